"""Kronecker products per group (the layer blocks of KFAC), and their form in the eigenbasis."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, cast

import torch
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.ambient import CACHE_BYTES, Memory, Progress
from curvops.checks import carries_graph, check_tensor
from curvops.linalg.core.cache import Cache
from curvops.linalg.core.vectors import ROUNDING_SEEN
from curvops.linalg.operators import kronecker_factors
from curvops.linalg.operators.base import Operator
from curvops.linalg.operators.closed_form import ClosedForm, Spectral, not_definite, warn_of_rounding
from curvops.linalg.operators.kronecker_factors import (
    Details,
    Factor,
    decompositions,
    noise_of,
    operations,
    to_double,
)


class EigenKroneckerForm(Spectral):
    """The closed form U_g (diag(values_g) + d_g I) U_gᵀ for a shift that is a single number in each group."""

    @property
    def holds(self) -> bool:
        return self.shift.ndim == 0 or bool((self._by_group == self._by_group[:, :1]).all())

    @property
    def _by_group(self) -> Tensor:
        """The shift of each group, (g, p·q)."""
        return self.shift.expand(self.base.shape[-1]).reshape(self.base.sizes[0], -1)

    @cached_property
    def eigen(self) -> EigenKronecker:
        """The operand, or the eigendecomposition that a Kronecker product keeps."""
        return self.base if isinstance(self.base, EigenKronecker) else cast(Kronecker, self.base).eigen()

    @cached_property
    def values(self) -> Tensor:
        """The eigenvalues of the operand, (g, p, q)."""
        return self.eigen.values

    @cached_property
    def level(self) -> Tensor:
        """The shift of each group, (g, 1) or 0-d."""
        if self.shift.ndim == 0:
            return self.shift
        return self.shift.reshape(self.base.sizes[0], -1).mean(1, keepdim=True)

    @cached_property
    def spectrum(self) -> Tensor:
        return (self.values.flatten(1) + self.level).flatten()

    @cached_property
    def definite_spectrum(self) -> Tensor:
        spectrum, rounding = self.spectrum.detach().reshape(self.base.sizes[0], -1), self.eigen.rounding
        least, largest = torch.stack(spectrum.aminmax()).tolist()
        if not torch.finfo(spectrum.dtype).eps * largest < least:
            # Without a shift, eigenvalues at the rounding level of their group's largest are not known to be positive.
            floor = torch.finfo(spectrum.dtype).eps * spectrum.amax(1, keepdim=True) * (self.level.detach() == 0)
            if not bool((spectrum > floor).all()):
                raise not_definite(self.base, float((spectrum - floor).min()))
        # Rounding of the eigenvalues in float64 is reported by estimates only. The eigenvectors have the dtype's: a
        # vector along those of large eigenvalues is seen by those of small ones to eps of its size, squared in xᵀP⁻¹x.
        eps = torch.finfo(spectrum.dtype).eps
        error = max(rounding if rounding >= torch.finfo(torch.float32).eps else 0.0, eps**2)
        if error * largest > ROUNDING_SEEN * least:
            sizes = self.values.detach().flatten(1).amax(1, keepdim=True)
            warn_of_rounding(self.base, float((error * sizes / spectrum).max()))
        return self.spectrum

    @cached_property
    def weights(self) -> Tensor:
        """The reciprocal of the spectrum, (g, p, q)."""
        return self.definite_spectrum.reshape(self.base.sizes).reciprocal()

    def _with_bounds(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield parts of the spectrum, (g, m) in float64, with the smallest and largest value of each within rounding.

        Rows R + E instead of R move the roots of the eigenvalues of RᵀR by at most ‖E‖ (Weyl): small eigenvalues by far
        less than large ones. The errors of the sum and of the decomposition are the same for all.
        """
        spectrum = self.definite_spectrum.detach().view(self.base.sizes[0], -1)
        values, rounding, of_rows = self.values.detach().flatten(1), self.eigen.rounding, self.eigen.of_rows
        eps, psd = torch.finfo(self.base.dtype).eps, self.base.psd
        squares = values if psd else values.clamp_min(0)
        moved = of_rows * squares.sum(1, keepdim=True, dtype=torch.float64).sqrt()
        noise_of_all = rounding * values.abs().amax(1, keepdim=True).double()
        level = self.level.detach().double()
        step = max(1, CACHE_BYTES // (8 * 8 * len(values)))  # eight arrays of float64
        for chunk, shifted in zip(values.split(step, 1), spectrum.split(step, 1)):
            lam = chunk.double()
            roots, noise = lam.clamp_min(0).sqrt(), noise_of_all + eps * lam.abs()
            below = ((roots - moved).clamp_min(0).square() - noise).clamp_min(0)
            above = (roots + moved).square() + noise
            if not psd:  # an indefinite matrix in an eigenbasis is not a sum of squares
                below, above = torch.where(lam > 0, below, lam - noise), above + lam.clamp_max(0)
            yield shifted.double(), (below + level).clamp_min(torch.finfo(self.base.dtype).tiny), above + level

    def logdet_error(self) -> float:
        parts = [
            torch.maximum(above / shifted, shifted / below).log().sum() for shifted, below, above in self._with_bounds()
        ]
        return float(torch.stack(parts).sum())

    def inverse_diagonal_error(self) -> Tensor:
        errors = []
        for shifted, below, above in self._with_bounds():
            inverse = shifted.reciprocal()
            errors.append(torch.maximum(inverse - above.reciprocal(), below.reciprocal() - inverse))
        return self.eigen.diagonal_of(torch.cat(errors, 1).flatten().to(self.eigen.dtype))

    def rotate(self, block: Tensor) -> Tensor:
        return self.eigen.rotate(block)

    def rotate_back(self, block: Tensor) -> Tensor:
        return self.eigen.rotate_back(block)

    def _filtered(self, weights: Tensor, block: Tensor) -> Tensor:
        return self.eigen.filter(weights.reshape(self.base.sizes), block)

    def logdet(self) -> Tensor:
        value = super().logdet()
        if self.shift.ndim and self.shift.requires_grad:
            # d log det P / dd_i = (P⁻¹)_ii: adds, with value zero, the gradient that the mean over the group lacks.
            missing = self.shift.reshape(len(self.level), -1) - self.level
            value = value + (self.inverse_diagonal().detach() * missing.flatten()).sum()
        return value

    def inverse_diagonal(self) -> Tensor:
        return self.eigen.diagonal_of(self.definite_spectrum.reciprocal())


class _GroupedBlocks(Operator):
    """A symmetric matrix, block-diagonal over groups g, whose blocks act on vectors as p × q matrices (row-major)."""

    _shown: ClassVar[tuple[str, ...]] = ()
    symmetric = True

    sizes: tuple[int, ...]
    """The sizes (g, p, q)."""

    def _size(self) -> torch.Size:
        return torch.Size((math.prod(self.sizes),) * 2)

    def _made_of(self) -> str:
        g, p, q = self.sizes
        return f"{f'{g} groups of ' if g > 1 else ''}{p} × {p} ⊗ {q} × {q}"

    def _closed_form(self) -> Any:
        return self.add_diagonal(0.0)._closed_form()

    def _draw(self, k: int, generator: torch.Generator | None) -> Tensor:
        return self._closed_form().draw(k, generator)


class Kronecker(_GroupedBlocks):
    """The block-diagonal matrix over groups of left_g ⊗ right_g: V (p, q) -> left_g V right_gᵀ; (n, n), n = g·p·q.

    left (g, p, p) or (g, p) for a diagonal factor; right (g, q, q) or (g, q). Factors are positive semi-definite. A
    product costs 2·n·(p + q) operations per column, as two batched matrix products.

    Args:
        left: (g, p, p), or (g, p) for a diagonal factor.
        right: (g, q, q), or (g, q).
        cache: eigendecompositions shared with a multiple of the matrix.
        details: data of the factors that make their eigendecompositions more accurate than their dtype allows, or
            cheaper than their size would require.

    Raises:
        TypeError: the factors are not tensors of one dtype.
        ValueError: the factors do not fit each other.

    Examples:
        >>> A, B = torch.diag(torch.tensor([1.0, 2.0])), torch.ones(1, 1)
        >>> co.linalg.Kronecker(B[None], A[None]).to_dense()
        tensor([[1., 0.],
                [0., 2.]])
    """

    _shown = ("left", "right", "eigenvalues", "heuristic_damping")
    psd = True
    _damped_form: ClassVar[type[ClosedForm] | None] = EigenKroneckerForm

    def __init__(
        self,
        left: Float[Tensor, "g p *left"],
        right: Float[Tensor, "g q *right"],
        cache: Cache | None = None,
        *,
        details: tuple[Details, Details] = (Details(), Details()),
    ) -> None:
        check_tensor("left", left)
        check_tensor("right", right)
        for name, factor in (("left", left), ("right", right)):
            square = factor.ndim == 2 or (factor.ndim == 3 and factor.shape[1] == factor.shape[2])
            if not square or factor.shape[0] != left.shape[0]:
                raise ValueError(f"{name} must be (g, m, m), or (g, m) if diagonal, with one g: {factor.shape}.")
        if left.dtype != right.dtype:
            raise TypeError(f"left and right must have one dtype, got {left.dtype} and {right.dtype}.")
        self.left, self.right, self.details = left, right, details
        self.sizes = left.shape[0], left.shape[-1], right.shape[-1]
        self._cache = Cache() if cache is None else cache
        super().__init__(left, right, cache=self._cache, details=details)

    def _product(self, block: Tensor) -> Tensor:
        return _two_sided(self.left, self.right, block)

    # Transposed factors have the same product, but their gradients differ between an entry and its mirror image.

    def _transposed_product(self, block: Tensor) -> Tensor:
        return self._transposed._product(block)

    def _transpose_nonbatch(self) -> LinearOperator:
        return self._transposed if carries_graph(self._args) else self

    @property
    def _transposed(self) -> Kronecker:
        return Kronecker(_transpose(self.left), _transpose(self.right), details=self.details)

    def _diagonal(self) -> Tensor:
        return (_diagonal_of(self.left).unsqueeze(2) * _diagonal_of(self.right).unsqueeze(1)).flatten()

    def _times(self, factor: Tensor) -> LinearOperator:
        if bool(factor < 0):
            return super()._times(factor)
        of_left, of_right = self.details
        scaled = of_left.map(lambda rest: rest * factor, lambda root: root * factor.sqrt())
        return Kronecker(self.left * factor, self.right, details=(scaled, of_right))

    def to(self, *args: Any, **kwargs: Any) -> LinearOperator:
        """Convert to another dtype or device; in float64, restore the parts of the factors that rounding removed."""
        device, dtype = torch._C._nn._parse_to(*args, **kwargs)[:2]

        def change(tensor: Tensor) -> Tensor:
            return tensor.to(device=device, dtype=dtype)

        def converted(factor: Tensor, detail: Details) -> tuple[Tensor, Details]:
            if dtype == torch.float64 and factor.ndim == 3:
                return change(to_double(factor, detail)), replace(detail.map(change, change), rest=None)
            return change(factor), detail.map(change, change)

        (left, of_left), (right, of_right) = map(converted, self._args, self.details)
        return Kronecker(left, right, details=(of_left, of_right))

    def eigen(self) -> EigenKronecker:
        """Return U diag(values) Uᵀ by the factors' eigendecompositions, g·(p³ + q³) operations, and keep it.

        They run in float64. In float32 the small eigenvalues would be lost, and the solution with them (2 × 300 rows,
        condition 1e8, shift 1e-6: relative error 1e-2 instead of 5e-7, in half of the time), even if the factor itself
        is a sum in float32 (its own rounding is below one unit of the largest eigenvalue, that of the decomposition up
        to 13). A factor with a root of r < m rows takes r³ operations, and some 4·m³/3 in the factor's dtype to
        complete its eigenvectors. Raises NotPositiveSemidefiniteError if a factor has an eigenvalue below zero beyond
        its dtype's rounding.
        """
        return self._cache.get_or_compute("eigen", self._args, lambda: self._assemble(*decompositions(self.factors)))

    def eigenvalues(self) -> Float[Tensor, "g p q"]:
        """Return the eigenvalues."""
        return self.eigen().values

    @property
    def known_eigen(self) -> EigenKronecker | None:
        """The eigendecomposition, if it was computed before."""
        return self._cache.get("eigen", self._args)

    def keep_eigen(self, eigen: EigenKronecker) -> None:
        """Keep an eigendecomposition that was computed from the same factors."""
        self._cache.get_or_compute("eigen", self._args, lambda: eigen)

    @property
    def factors(self) -> tuple[Factor, Factor]:
        """Both factors, with their details and names."""
        return (self.left, self.details[0], "left"), (self.right, self.details[1], "right")

    @property
    def rounding(self) -> float:
        """The largest error of the computed eigenvalues, relative to the largest."""
        return sum(noise_of(detail, factor) for detail, factor in zip(self.details, self._args))

    @property
    def of_rows(self) -> float:
        """The largest error of the eigenvalues' roots, relative to the root of their sum."""
        return sum(detail.of_rows for detail in self.details)

    def _assemble(self, left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> EigenKronecker:
        values = (left[0].unsqueeze(2) * right[0].unsqueeze(1)).to(self.dtype)
        return EigenKronecker(left[1], right[1], values, self.rounding, self.of_rows)

    def heuristic_damping(self, shift: float | Tensor) -> Kronecker:
        """Return (left + √λ/π I) ⊗ (right + π√λ I), π² = mean diag(right) / mean diag(left).

        The two cross terms then have equal traces. π is 1 in a group with a zero factor. For A + λ I use
        `add_diagonal`.

        Args:
            shift: λ, a single positive number.

        Returns:
            The damped product.

        Raises:
            ValueError: the shift is not a single positive number.

        Source: Martens & Grosse 2015, §6.3.
        """
        level = torch.as_tensor(shift, dtype=self.dtype, device=self.device)
        if level.ndim or not bool(level > 0):
            raise ValueError(f"heuristic damping needs one positive number, got {shift}; use add_diagonal for others.")
        left, right = (detail.formed(factor) for factor, detail, _ in self.factors)
        of_left, of_right = (_diagonal_of(factor).mean(1) for factor, _ in (left, right))
        usable = (of_left > 0) & (of_right > 0)
        one = torch.ones_like(of_left)
        pi = (torch.where(usable, of_right, one) / torch.where(usable, of_left, one)).sqrt()
        damped = _shift(left[0], level.sqrt() / pi), _shift(right[0], level.sqrt() * pi)
        return Kronecker(*damped, details=(left[1], right[1]))


class EigenKronecker(_GroupedBlocks):
    """The matrix U diag(values) Uᵀ with U = U_l ⊗ U_r in each group: the Kronecker eigenbasis with any spectrum.

    Vectors are (g, p, p) and (g, q, q), orthogonal, or ones (g, p), (g, q) for the identity; values (g, p, q). Adding a
    diagonal with one number per group only shifts the values.

    Args:
        left_vectors: U_l, (g, p, p), or ones (g, p).
        right_vectors: U_r, (g, q, q), or ones (g, q).
        values: the eigenvalues, (g, p, q).
        rounding: the largest error of the values, relative to the largest value.
        of_rows: the largest error of their roots, relative to the root of their sum.

    Examples:
        >>> K = co.EKFAC(lin)
        >>> type(K.blocks[0]).__name__, K.blocks[0].shape
        ('EigenKronecker', torch.Size([9, 9]))
    """

    _shown = ("left_vectors", "right_vectors", "values")
    _damped_form: ClassVar[type[ClosedForm] | None] = EigenKroneckerForm

    def __init__(
        self,
        left_vectors: Float[Tensor, "g p *left"],
        right_vectors: Float[Tensor, "g q *right"],
        values: Float[Tensor, "g p q"],
        rounding: float = 0.0,
        of_rows: float = 0.0,
    ) -> None:
        self.left_vectors, self.right_vectors, self.values = left_vectors, right_vectors, values
        self.rounding, self.of_rows, self.sizes = rounding, of_rows, tuple(values.shape)
        super().__init__(left_vectors, right_vectors, values, rounding=rounding, of_rows=of_rows)

    @property
    def psd(self) -> bool:
        return bool((self.values >= 0).all())

    def rotate(self, block: Tensor) -> Tensor:
        """Return U B for columns B (n, K), rotating out of the eigenbasis."""
        return _two_sided(self.left_vectors, self.right_vectors, block)

    def rotate_back(self, block: Tensor) -> Tensor:
        """Return Uᵀ B for columns B (n, K), rotating into the eigenbasis."""
        return _two_sided(_transpose(self.left_vectors), _transpose(self.right_vectors), block)

    def filter(self, weights: Float[Tensor, "g p q"], block: Tensor) -> Tensor:
        """Return U diag(weights) Uᵀ B for columns B (n, K)."""
        left, right = self.left_vectors, self.right_vectors
        rotated = _both(_transpose(left), _transpose(right), _to_groups(block, weights.shape))
        return _from_groups(_both(left, right, weights.unsqueeze(1) * rotated))

    def diagonal_of(self, spectrum: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """Return the diagonal of U diag(spectrum) Uᵀ."""
        weights = spectrum.reshape(self.sizes).unsqueeze(1)
        return _both(self.left_vectors.square(), self.right_vectors.square(), weights).flatten()

    def _product(self, block: Tensor) -> Tensor:
        return self.filter(self.values, block)

    def _diagonal(self) -> Tensor:
        return self.diagonal_of(self.values.flatten())

    def _times(self, factor: Tensor) -> LinearOperator:
        return EigenKronecker(self.left_vectors, self.right_vectors, self.values * factor, self.rounding, self.of_rows)


def _two_sided(left: Tensor, right: Tensor, block: Tensor) -> Tensor:
    """Return left_g V right_gᵀ for each group and column of a block (n, K)."""
    groups = _to_groups(block, (left.shape[0], left.shape[1], right.shape[1]))
    return _from_groups(_both(left, right, groups))


# A block in groups is (g, K, p, q): for one group, columns need not be moved. The right factor multiplies all rows of
# all columns at once, (K·p, q), and the left one each column.


def _to_groups(block: Tensor, sizes: Sequence[int]) -> Float[Tensor, "g k p q"]:
    return block.mT.reshape(block.shape[1], *sizes).transpose(0, 1)


def _from_groups(groups: Float[Tensor, "g k p q"]) -> Float[Tensor, "n k"]:
    return groups.transpose(0, 1).contiguous().flatten(1).mT


def _both(left: Tensor, right: Tensor, groups: Tensor) -> Tensor:
    """Return left_g V right_gᵀ for each group and column; factors (g, m) are diagonal."""
    if right.ndim == 2:
        groups = right[:, None, None, :] * groups
    else:
        groups = torch.bmm(groups.flatten(1, 2), right.mT).unflatten(1, groups.shape[1:3])
    return left[:, None, :, None] * groups if left.ndim == 2 else left.unsqueeze(1) @ groups


def _transpose(factor: Tensor) -> Tensor:
    return factor if factor.ndim == 2 else factor.mT


def _diagonal_of(factor: Tensor) -> Tensor:
    return factor if factor.ndim == 2 else factor.diagonal(dim1=-2, dim2=-1)


def _shift(factor: Tensor, levels: Tensor) -> Tensor:
    diagonal = levels.unsqueeze(1).expand(factor.shape[:2])
    return factor + (diagonal if factor.ndim == 2 else torch.diag_embed(diagonal))


def decompose(blocks: Iterable[Any], progress: Progress = None, memory: Memory | None = None) -> None:
    """Compute the missing eigendecompositions of Kronecker blocks in parallel, if that pays; each block keeps its own.

    The others are computed on first use. As many run at a time as ``memory`` has room for, at least one.
    """
    wanted = [block for block in blocks if isinstance(block, Kronecker) and block.known_eigen is None]
    wanted = [block for block in wanted if not carries_graph(block._args)]
    if sum(operations(factor) for block in wanted for factor in block.factors) < kronecker_factors.AT_ONCE:
        return
    decomposed = decompositions([factor for block in wanted for factor in block.factors], progress, memory)
    for block, left, right in zip(wanted, decomposed[::2], decomposed[1::2]):
        block.keep_eigen(block._assemble(left, right))
