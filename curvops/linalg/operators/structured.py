"""Diagonal, dense and low-rank operators, and exact draws of N(0, A) through the algebra."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.linalg.core.memory import Memories, held_in, memories_of, solved_at_a_time
from curvops.linalg.core.results import Estimate, NotPositiveSemidefinite
from curvops.linalg.core.sources import Sources, merged, scaled
from curvops.linalg.core.spaces import Space, common, spaces_of
from curvops.linalg.core.vectors import Description, empty_block, join, put, random_block, require_precision
from curvops.linalg.functions.square_roots import sqrt
from curvops.linalg.operators.algebra import Expanded, Product, Scaled, Sliced, Sum
from curvops.linalg.operators.base import Operator
from curvops.linalg.operators.contract import DENSE_SIZE

# Draws of an operator without a root: columns that run together, and their relative error.
DRAW_BLOCK = 32
DRAW_RTOL = 1e-5


class Diagonal(Operator):
    """diag(d) for a vector d (n,); every operation is elementwise.

    `space` says what its rows stand for, `sources` which data it is of.
    """

    def __init__(self, entries: Tensor, space: Space | None = None, *, sources: Sources | None = None) -> None:
        if entries.ndim != 1:
            raise ValueError(f"entries must be a vector (n,), got {tuple(entries.shape)}.")
        super().__init__(entries, space=space, sources=sources)

    @property
    def entries(self) -> Tensor:
        """The diagonal d, (n,)."""
        return self._args[0]

    @property
    def symmetric(self) -> bool:
        return True

    @property
    def psd(self) -> bool:
        return bool((self.entries >= 0).all())

    def _size(self) -> torch.Size:
        return torch.Size((len(self.entries), len(self.entries)))

    def _product(self, block: Tensor) -> Tensor:
        return self.entries.unsqueeze(-1) * block

    def _diagonal(self) -> Tensor:
        return self.entries

    def __add__(self, other: Any) -> LinearOperator:
        if not isinstance(other, Diagonal):
            return super().__add__(other)
        space, sources = common(*self.spaces, *other.spaces), merged(self.sources, other.sources)
        return Diagonal(self.entries + other.entries, space, sources=sources)

    def _plus(self, other: LinearOperator) -> LinearOperator:
        common(*self.spaces, *spaces_of(other))
        return other._plus_diagonal(self) if isinstance(other, Operator) else super()._plus(other)

    def _mul_constant(self, other: Any) -> LinearOperator:
        factor = torch.as_tensor(other, dtype=self.dtype, device=self.device)
        if factor.ndim:
            return super()._mul_constant(other)
        return Diagonal(self.entries * factor, self.spaces[0], sources=scaled(self.sources, factor))

    def _closed_form(self) -> Any:
        return self.add_diagonal(0.0)._closed_form()

    def _draw(self, k: int, generator: torch.Generator | None) -> Tensor:
        _require_not_negative(self.entries)
        return self.entries.sqrt().unsqueeze(-1) * normal(len(self.entries), k, self.entries, generator)


class Dense(Operator):
    """A tensor (..., m, n) as an operator: a matrix that was asked for, or a batch of small ones.

    `psd` promises that the matrix is positive semi-definite; `space` says what its rows and columns stand for,
    `sources` which data it is of. A `rest` of the same shape is what its dtype does not hold of the matrix: products
    leave it out, factorisations add it in float64.
    """

    def __init__(
        self,
        tensor: Tensor,
        psd: bool = False,
        space: Space | None = None,
        *,
        rest: Tensor | None = None,
        sources: Sources | None = None,
    ) -> None:
        if tensor.ndim < 2:
            raise ValueError(f"tensor must be a matrix (m, n) or a batch of them, got {tuple(tensor.shape)}.")
        super().__init__(tensor, psd=psd, space=space, rest=rest, sources=sources)

    @property
    def _is_formed(self) -> bool:
        return True

    @property
    def tensor(self) -> Tensor:
        """The matrix, (..., m, n)."""
        return self._args[0]

    @property
    def rest(self) -> Tensor | None:
        """What the dtype does not hold of the matrix, where it is known."""
        return self._kwargs["rest"]

    @property
    def psd(self) -> bool:
        return self._kwargs["psd"]

    @property
    def symmetric(self) -> bool:
        if self.psd or not self.is_square or self.tensor.numel() == 0:
            return self.is_square
        slack = 4 * torch.finfo(self.dtype).eps * self.tensor.abs().max()
        return bool(((self.tensor - self.tensor.mT).abs() <= slack).all())

    def _size(self) -> torch.Size:
        return self.tensor.shape

    def _transpose_nonbatch(self) -> LinearOperator:
        return Dense(self.tensor.mT, psd=self.psd, space=self.spaces[0], sources=self.sources)

    def _matmul(self, rhs: Tensor) -> Tensor:
        return self.tensor @ rhs

    def _t_matmul(self, rhs: Tensor) -> Tensor:
        return self.tensor.mT @ rhs

    def to_dense(self) -> Tensor:
        """The tensor itself."""
        return self.tensor

    def _diagonal(self) -> Tensor:
        return self.tensor.diagonal(dim1=-2, dim2=-1)

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        return Dense(self.tensor[(*batch_indices, row_index, slice(None))][..., col_index])

    def _get_indices(self, row_index: Tensor, col_index: Tensor, *batch_indices: Tensor) -> Tensor:
        return self.tensor[(*batch_indices, row_index, col_index)]

    def _expand_batch(self, batch_shape: Any) -> LinearOperator:
        return Dense(self.tensor.expand(*batch_shape, *self.matrix_shape))

    def _unsqueeze_batch(self, dim: int) -> LinearOperator:
        return Dense(self.tensor.unsqueeze(dim))

    def _permute_batch(self, *dims: int) -> LinearOperator:
        return Dense(self.tensor.permute(*dims, -2, -1))


def in_parts(matrix: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """A matrix in another dtype, and what that dtype does not hold of it."""
    kept = matrix.to(dtype)
    return kept, None if matrix.dtype == dtype else (matrix - kept).to(dtype)


class LowRank(Operator):
    """U diag(s) Uᵀ with U (n, r) and s (r,) ≥ 0, (n, n).

    `add_diagonal` keeps closed forms (Woodbury). Cost to build, by `co.low_rank`, which says in `error` how close it
    is: r products with the matrix and 16 for the error. A product is two multiplications by U, 4·n·r operations.
    Memory: n·r numbers, three times that while it is built. Choose it for many solves where the spectrum falls fast.
    """

    def __init__(
        self,
        vectors: Tensor,
        values: Tensor,
        error: Estimate | None = None,
        space: Space | None = None,
        *,
        sources: Sources | None = None,
    ) -> None:
        if vectors.ndim != 2 or values.shape != vectors.shape[1:]:
            raise ValueError(
                f"LowRank is made of vectors (n, r) and values (r,), got {tuple(vectors.shape)} and "
                f"{tuple(values.shape)}."
            )
        super().__init__(vectors, values, error=error, space=space, sources=sources)

    @property
    def vectors(self) -> Tensor:
        """U, (n, r)."""
        return self._args[0]

    @property
    def values(self) -> Tensor:
        """s, (r,)."""
        return self._args[1]

    @property
    def error(self) -> Estimate | None:
        """‖A − Â‖_F / ‖A‖_F for the matrix A that this approximates, where it was made by `co.low_rank`."""
        return self._kwargs["error"]

    @property
    def root(self) -> Tensor:
        """W = U √s with A = W Wᵀ, (n, r)."""
        return self.vectors * self.values.sqrt()

    @property
    def symmetric(self) -> bool:
        return True

    @property
    def psd(self) -> bool:
        return bool((self.values >= 0).all())

    def _size(self) -> torch.Size:
        return torch.Size((self.vectors.shape[0], self.vectors.shape[0]))

    def _product(self, block: Tensor) -> Tensor:
        return self.vectors @ (self.values.unsqueeze(-1) * (self.vectors.mT @ block))

    def _diagonal(self) -> Tensor:
        return self.vectors.square() @ self.values

    def _mul_constant(self, other: Any) -> LinearOperator:
        factor = torch.as_tensor(other, dtype=self.dtype, device=self.device)
        if factor.ndim:
            return super()._mul_constant(other)
        sources = scaled(self.sources, factor)
        return LowRank(self.vectors, self.values * factor, error=self.error, space=self.spaces[0], sources=sources)

    def with_diagonal(self, diagonal: Float[Tensor, " n"]) -> LinearOperator:
        """U diag(s) Uᵀ + diag(e) with e ≥ 0 such that its diagonal is the one given, that of the matrix approximated.

        A `Damped`: products, draws and `add_diagonal` are exact, solves by Woodbury where the diagonal added to e is
        positive. Raises ValueError where an entry given is smaller than that of the low-rank part beyond rounding:
        never for `co.low_rank(method="nystrom")` and the exact diagonal, while Lanczos' part can exceed its matrix.
        """
        n = self.shape[-1]
        if diagonal.shape != (n,):
            raise ValueError(f"the diagonal must have shape ({n},), got {tuple(diagonal.shape)}.")
        own = self._diagonal()
        rest = diagonal - own
        # What rounding leaves of a Nyström approximation (its stabilising shift), and of the sum over its rank.
        eps = torch.finfo(self.dtype).eps
        slack = eps * (math.sqrt(n) * self.values.detach().norm() + 10 * len(self.values) * own.detach().abs())
        if not bool((rest.detach() >= -slack).all()):
            worst = int((rest.detach() + slack).argmin())
            raise ValueError(
                f"entry {worst} of the diagonal is {float(diagonal[worst]):.6g}, less than {float(own[worst]):.6g} of "
                "the low-rank part. Give the exact diagonal of the matrix approximated, not an estimate, and make "
                'the low-rank part by method="nystrom": Lanczos\' part can exceed its matrix.'
            )
        return self.add_diagonal(rest.clamp_min(0))

    def _draw(self, k: int, generator: torch.Generator | None) -> Tensor:
        _require_not_negative(self.values)
        return self.root @ normal(len(self.values), k, self.values, generator)


def draw(
    operator: LinearOperator,
    k: int,
    generator: torch.Generator | None = None,
    memories: Memories | None = None,
) -> Tensor:
    """k draws of N(0, A) as columns, (n, k), exact from the square roots that the parts of A have.

    A sum adds independent draws, B A Bᵀ multiplies a draw of A, and so on down to operators with a `_draw` of their
    own; a small matrix is factorised; a large one known to be positive semidefinite is multiplied by its square root
    (`sqrt`, to a relative error of 1e-5, or `FunctionNotConverged`). Raises ValueError for any other large operator.
    Where the memory budget (of A's networks, or ``memories``) has no room for the working vectors of all draws, some of
    them are made at a time: equal seeds then need equal budgets.
    """
    width, beside = solved_at_a_time(operator, k, memories)
    held = memories_of(operator) if memories is None else memories
    if width >= k:
        with held_in(held, beside):
            return draw_together(operator, k, generator)
    with held_in(held, beside):
        first = draw_together(operator, width, generator)
        found = empty_block(first, k)
        put(found, 0, first)
        del first
        for start in range(width, k, width):
            put(found, start, draw_together(operator, min(width, k - start), generator))
    return found


def draw_together(operator: LinearOperator, k: int, generator: torch.Generator | None) -> Tensor:
    """All of the draws together."""
    own = getattr(operator, "_draw", None)
    if own is not None:
        return own(k, generator)
    if isinstance(operator, Expanded):
        return draw_together(operator.base, k, generator)
    if isinstance(operator, Scaled) and operator.psd and operator.factor.ndim == 0:
        return operator.factor.sqrt() * draw_together(operator.base, k, generator)
    if isinstance(operator, Sum):
        parts = [draw_together(term, k, generator) for term in operator.terms]
        return torch.stack(parts).sum(0)
    if isinstance(operator, Sliced) and operator.psd:
        part = draw_together(operator.base, k, generator)
        return part if operator.rows is None else part[operator.rows]
    if isinstance(operator, Product) and operator.psd and len(operator.factors) > 2:
        left, *middle, _ = operator.factors
        return left._matmul(draw_together(Product(*middle) if len(middle) > 1 else middle[0], k, generator))
    if isinstance(operator, Product) and operator.psd and len(operator.factors) == 2:
        left = operator.factors[0]
        noise = normal(left.shape[-1], k, torch.empty(0, dtype=left.dtype, device=left.device), generator)
        return left._matmul(noise)
    return draw_dense(operator, k, generator)


def _require_not_negative(values: Tensor) -> None:
    if bool((values < 0).any()):
        raise NotPositiveSemidefinite(
            f"cannot draw from N(0, A): A has a negative eigenvalue {values.min().item():.3g}."
        )


def draw_dense(operator: LinearOperator, k: int, generator: torch.Generator | None) -> Tensor:
    """`draw` by the eigenvectors of the dense matrix, of a large operator by its symmetric square root."""
    formed = isinstance(operator, Dense)
    if isinstance(operator, Operator) and not formed and operator.shape[-1] > DENSE_SIZE:
        if operator.psd and not operator.batch_shape:
            return _draw_by_products(operator, k, generator)
        raise ValueError(
            f"this {type(operator).__name__} of shape {tuple(operator.shape)} is not known to be positive "
            "semidefinite, and no exact square root of it is known; draw from its parts, or from operator.inverse() "
            "of a Damped one."
        )
    require_precision(operator.dtype)
    values, vectors = torch.linalg.eigh(operator.to_dense())
    floor = -10 * len(values) * torch.finfo(values.dtype).eps * values.abs().max()
    if bool((values < floor).any()):
        raise NotPositiveSemidefinite(
            f"cannot draw from N(0, A): A has a negative eigenvalue {values.min().item():.3g}."
        )
    return vectors @ (values.clamp_min(0).sqrt().unsqueeze(-1) * normal(len(values), k, values, generator))


def _draw_by_products(operator: Operator, k: int, generator: torch.Generator | None) -> Tensor:
    """A^½ z, whose relative error is far below what any number of draws could tell."""
    like = torch.empty(0, dtype=operator.dtype, device=operator.device)
    parts = [
        sqrt(operator, normal(operator.shape[-1], count, like, generator), rtol=DRAW_RTOL).raise_if_failed(DRAW_RTOL)
        for count in [DRAW_BLOCK] * (k // DRAW_BLOCK) + [k % DRAW_BLOCK] * bool(k % DRAW_BLOCK)
    ]
    return join(*(part.value for part in parts)) if parts else operator.new_empty(operator.shape[-1], 0)


def normal(n: int, k: int, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """k standard normal vectors as columns, (n, k), in the dtype and on the device of a tensor."""
    return random_block(Description(n, n, like.dtype, like.device), k, "gaussian", generator)
