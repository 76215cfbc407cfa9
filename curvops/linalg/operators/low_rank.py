"""A low-rank matrix U diag(s) Uᵀ, such a matrix near to one known by its products, and either plus a diagonal."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.ambient import Progress
from curvops.checkpoint import Place, begin, derive_generator
from curvops.checks import (
    carries_graph,
    check_shape,
    check_tensor,
    checked_number,
    checked_whole,
    refuse,
    require_no_graph,
)
from curvops.errors import RankWarning, warn
from curvops.linalg.core import vectors as vec
from curvops.linalg.core.algorithm import algorithm, working
from curvops.linalg.core.matrix_identity import Sources, Space, problem_of, scale_sources, sources_of, spaces_of
from curvops.linalg.core.probed import ESTIMATE_VECTORS, Probed
from curvops.linalg.core.results import Estimate, default_rtol
from curvops.linalg.core.solve_routes import SKETCH_RANK
from curvops.linalg.core.vectors import CHUNK, ROUNDINGS, Description, Given, Matrix
from curvops.linalg.estimators.frobenius import PROBES, root_of_ratio
from curvops.linalg.operators.base import Operator
from curvops.linalg.operators.closed_form import ClosedForm, DiagonalPlusRoot, warn_of_rounding
from curvops.linalg.operators.draws import draw, normal, require_not_negative
from curvops.linalg.preconditioners.nystrom import SKETCH_ARRAYS, grow
from curvops.linalg.spectra.apply_function import inverse_root, inverse_root_product
from curvops.ranks.sharded_vectors import Sharded, block_of, stored


class LowRankForm(ClosedForm):
    """Woodbury's form: (D + U S Uᵀ)⁻¹ = D⁻¹ − D⁻¹U S (I + UᵀD⁻¹U S)⁻¹ UᵀD⁻¹ for S ≥ 0 and D = diag(d) > 0."""

    @property
    def holds(self) -> bool:
        return bool((self.shift > 0).all()) and self.base.psd

    @property
    def inverse_shift(self) -> Tensor:
        """The inverse D⁻¹ as a column, (n, 1) or 0-d."""
        return self.shift.reciprocal() if self.shift.ndim == 0 else self.shift.reciprocal().unsqueeze(-1)

    @cached_property
    def U(self) -> Any:
        """The matrix U, (n, r), of which each rank holds its rows if the vectors are sharded."""
        return self.base.vectors if self.base.layouts is None else block_of(self.base.vectors)

    @cached_property
    def scaled(self) -> Any:
        """The matrix D⁻¹U, (n, r)."""
        return self.inverse_shift * self.U

    def _against(self, block: Tensor) -> Tensor:
        """Return UᵀB, (r, K)."""
        return _times_transposed(self.U, block)

    def _pull(self, block: Tensor) -> Tensor:
        """Return UᵀD⁻¹B, (r, K), without a second matrix of U's size if d is a single number."""
        if self.shift.ndim == 0:
            return self.inverse_shift * self._against(block)
        return _times_transposed(self.scaled, block)

    @cached_property
    def capacitance(self) -> Tensor:
        """The capacitance I + UᵀD⁻¹U S, (r, r); it is not symmetric, but has a gradient even if S has a zero."""
        return self._eye + self._pull(self.U) * self.base.values

    @cached_property
    def factors(self) -> tuple[Tensor, Tensor]:
        """The LU factors of the capacitance."""
        if len(self.base.values):  # the difference of two vectors of size 1/d, whose roundings differ in sign
            warn_of_rounding(self.base, self._condition * torch.finfo(self.base.dtype).eps / self.base.shape[-1] ** 0.5)
        lu, pivots = torch.linalg.lu_factor(self.capacitance)
        return lu, pivots

    @property
    def _eye(self) -> Tensor:
        return torch.eye(len(self.base.values), dtype=self.base.dtype, device=self.base.device)

    @cached_property
    def _remedy(self) -> str:
        """How a solve keeps digits that Woodbury's difference would lose, "split" or "float64"; "" if it loses none.

        An orthonormal U, which may be as large as memory allows, gets no copy in float64: it is split off, unless the
        diagonal is a vector.
        """
        base, eps = self.base, torch.finfo(self.base.dtype).eps
        recorded = carries_graph((base.vectors, base.values, self.shift))
        if recorded or not len(base.values) or self._condition * eps <= default_rtol(base.dtype):
            return ""
        if not bool((self._against(self.U) - self._eye).abs().max() <= 100 * eps):
            return "" if base.dtype == torch.float64 or isinstance(self.U, Sharded) else "float64"
        if self.shift.ndim:
            return ""
        warn_of_rounding(base, self._condition * eps**2)  # U, too, is known to eps only: an error in xᵀP⁻¹x, squared
        return "split"

    @cached_property
    def _in_float64(self) -> LowRankForm:
        """The closed form of this low rank plus diagonal in float64."""
        return LowRankForm(self.base.to(torch.float64), self.shift.double())

    @cached_property
    def _condition(self) -> float:
        """The largest s ‖u‖²/d, on the CPU."""
        return float((self.base.values.detach() * vec.norm(self.U.detach()).square()).max() / self.shift.detach().min())

    def _split_solve(self, block: Tensor) -> Tensor:
        """Return U (Uᵀb)/(s + d) + (b − UUᵀb)/d, the second part orthogonalised to U three times.

        For a b in the span of U the second part is rounding, much of it in the span: two passes are not enough.
        """
        inside = self._against(block)
        outside = block - vec.combine(self.U, inside)
        again = self._against(outside)
        outside = outside - vec.combine(self.U, again)
        left = (inside + again) / (self.base.values + self.shift).unsqueeze(-1) - self._against(outside) / self.shift
        return outside / self.shift + vec.combine(self.U, left)

    def solve(self, block: Tensor) -> Tensor:
        if self._remedy == "split":
            return self._split_solve(block)
        if self._remedy == "float64":
            return self._in_float64.solve(block.double()).to(block.dtype)
        U, weights = self.U, self.base.values.unsqueeze(-1) * torch.linalg.lu_solve(*self.factors, self._pull(block))
        tensors = (self.base.vectors, self.base.values, self.shift, block)
        if self.shift.ndim or isinstance(U, Sharded) or carries_graph(tensors):
            return self.inverse_shift * (block - vec.combine(U, weights))
        # As (K, n), the layout of a block, with the fewest passes over it.
        return torch.addmm(block.mT, (weights * self.inverse_shift).mT, U.mT, beta=self._scale, alpha=-1).mT

    @cached_property
    def _scale(self) -> float:
        """The number 1/d on the CPU, fetched once."""
        return float(self.inverse_shift)

    def inverse_parts(self) -> DiagonalPlusRoot:
        """Return P⁻¹ = D⁻¹ − (D⁻¹U M)(D⁻¹U M)ᵀ with M = √S C⁻ᵀ and C Cᵀ = I + √S UᵀD⁻¹U √S."""
        weights = self.shift.reciprocal().expand(self.base.shape[-1])
        values, positive = self.base.values, self.base.values > 0
        if not bool(positive.any()):
            return DiagonalPlusRoot(weights)
        roots, capacitance = values[positive].sqrt(), self.capacitance[positive][:, positive]  # I + UᵀD⁻¹U S
        factor = torch.linalg.cholesky(roots.unsqueeze(-1) * capacitance / roots)
        unit = torch.eye(len(roots), dtype=roots.dtype, device=roots.device)
        inverse_factor = roots.unsqueeze(-1) * torch.linalg.solve_triangular(factor.mT, unit, upper=True)
        mixing = values.new_zeros(len(values), len(roots)).index_copy(0, positive.nonzero().squeeze(1), inverse_factor)
        if self.shift.ndim:
            return DiagonalPlusRoot(weights, self.scaled, mixing, -1)
        return DiagonalPlusRoot(weights, self.base.vectors, mixing * self.inverse_shift, -1)

    def logdet(self) -> Tensor:
        shift = self.shift.expand(self.base.shape[-1])
        return shift.log().sum() + torch.linalg.slogdet(self.capacitance)[1].clamp_min(0)  # less is rounding, even −∞

    @property
    def _unit(self) -> float:
        """The largest relative error of a sum of products in the dtype, relative to the size of its terms."""
        return ROUNDINGS * torch.finfo(self.base.dtype).eps

    @cached_property
    def _rounding(self) -> tuple[Tensor, float, float]:
        """The diagonal c of H = I + √S UᵀD⁻¹U √S, the least eigenvalue λ of K = H_ij/√(c_i c_j), and the error of K⁻¹.

        det H is that of the capacitance. Rounding, in its products (by Cauchy and Schwarz) and in the elimination
        (Higham 2002, theorem 9.3), changes an entry of K by a few units, and so ‖K⁻¹‖ λ by the error, which is infinite
        if λ may be zero.
        """
        C, values = self.capacitance.detach().double(), self.base.values.detach().double()
        sizes, r = C.diagonal(), int((values > 0).sum())
        if not r:
            return sizes, 1.0, 0.0
        scale = (values / sizes).sqrt()[values > 0]
        K = C[values > 0][:, values > 0] * scale.unsqueeze(-1) / (scale * sizes[values > 0])
        change = r * (self._unit + min(ROUNDINGS, r) * torch.finfo(self.base.dtype).eps)
        least = float(torch.linalg.eigvalsh((K + K.mT) / 2)[0]) - change if bool(torch.isfinite(K).all()) else 0.0
        return sizes, least, change / (least - change) if least > change else math.inf

    def logdet_error(self) -> float:
        sizes, _, error = self._rounding
        logs = self.shift.detach().double().log().expand(self.base.shape[-1])
        most = float(sizes.log().sum())  # 0 ≤ log det C ≤ Σ log c_j
        return min(len(sizes) * math.log1p(error), 2 * most) + self._unit * (float(logs.abs().sum()) + most)

    def inverse_diagonal_error(self) -> Tensor:
        unit, inverse_shift, U = self._unit, self.shift.detach().reciprocal(), self.U.detach()
        if self._remedy == "split":
            gap = (vec.gram(U, U) - self._eye).abs()  # P⁻¹ has (S⁻¹d + UᵀU)⁻¹ where the formula has (S⁻¹d + I)⁻¹
            forms, size = (vec.by_rows(U, function=partial(_sizes_of_rows, matrix=m)) for m in (gap, self._eye))
            return (3 * forms[:, 0] + unit * (1 + size[:, 0])) * inverse_shift
        sizes, least, error = self._rounding
        if math.isinf(error):  # 0 < P⁻¹ ≤ D⁻¹
            return inverse_shift + self.inverse_diagonal().detach().abs()
        weights = self.base.values.detach().double() / sizes * ((error + len(sizes) * unit) / least)
        return (
            vec.by_rows(self.scaled.detach(), function=partial(_sizes_of_rows, matrix=weights.diag()))[:, 0]
            + unit * inverse_shift
        )

    def inverse_diagonal(self) -> Tensor:
        values = self.base.values
        if self._remedy != "split":
            middle = values.unsqueeze(-1) * torch.linalg.lu_solve(*self.factors, self._eye)
            forms = vec.by_rows(self.scaled, function=partial(_quadratic_forms, matrix=middle))
            return self.shift.reciprocal() - forms[:, 0]
        weights = torch.stack([(values + self.shift).reciprocal(), torch.ones_like(values)], 1)
        inside, size = vec.by_rows(self.U, function=lambda rows: rows.square() @ weights).mT
        return inside + (1 - size).clamp_min(0) / self.shift

    @cached_property
    def whitened(self) -> tuple[Tensor, Tensor]:
        """The pair W = D^-½U√S, f = R² (I + R)⁻¹, R = (I + WᵀW)^-½: (I + W Wᵀ)^-½ = I − W f Wᵀ."""
        W = self.inverse_shift.sqrt() * self.base.root
        R = inverse_root(self._eye + W.mT @ W)
        return W, R @ torch.linalg.solve(self._eye + R, R)

    def _whitened_root(self, block: Tensor) -> Tensor:
        W, f = self.whitened
        return block - W @ (f @ (W.mT @ block))

    def draw(self, k: int, generator: torch.Generator | None) -> Tensor:
        noise = self.inverse_shift.rsqrt() * self._normal(k, generator)
        return draw(self.base, k, generator) + noise

    def draw_inverse(self, k: int, generator: torch.Generator | None) -> Tensor:
        return self.inverse_shift.sqrt() * self._whitened_root(self._normal(k, generator))

    def inverse_root(self, block: Tensor) -> Tensor:
        if self.shift.ndim and not bool((self.shift == self.shift[0]).all()):
            # D^-½ (I + W Wᵀ)^-½ is a root, but not the symmetric one, for which no closed form is known.
            least = float(self.shift.detach().min())
            return inverse_root_product(self.base.add_diagonal(self.shift), block, lower_bound=least)
        return self.inverse_shift.sqrt() * self._whitened_root(block)


def _quadratic_forms(rows: Tensor, matrix: Tensor) -> Float[Tensor, "n 1"]:
    """Return xᵀ M x for each row x."""
    return ((rows @ matrix.to(rows)) * rows).sum(1, keepdim=True)


def _sizes_of_rows(rows: Tensor, matrix: Tensor) -> Float[Tensor, "n 1"]:
    return _quadratic_forms(rows.abs(), matrix)


def _times_transposed(X: Any, block: Any) -> Tensor:
    return vec.gram(X, block).to(block.dtype) if isinstance(X, Sharded) else X.mT @ block


class LowRank(Operator):
    """The matrix U diag(s) Uᵀ with U (n, r) and s (r,) ≥ 0, (n, n).

    `add_diagonal` keeps closed forms (Woodbury). Cost to build, by `co.low_rank`, which estimates the `error`: r
    products with the matrix, and 16 for the error. A product is two multiplications by U, 4·n·r operations. Memory: n·r
    numbers, and three times that while it is built. Choose it for many solves if the spectrum decays fast.

    Args:
        vectors: U, (n, r), with orthonormal columns.
        values: s, (r,), not negative.
        error: the estimated relative error of the approximation.
        space: the space of its rows and columns; None means plain vectors.
        sources: the record of the data behind the matrix.

    Raises:
        TypeError: vectors and values are not tensors of one dtype.
        ValueError: vectors and values do not fit each other.

    Examples:
        >>> vectors, values = torch.eye(3)[:, :2], torch.tensor([5.0, 1.0])
        >>> P = co.linalg.LowRank(vectors, values).add_diagonal(1.0)
        >>> P.solve(torch.ones(3))
        tensor([0.1667, 0.5000, 1.0000])
    """

    _shown = ("error", "values", "vectors", "with_diagonal")
    symmetric = True
    _damped_form: ClassVar[type[ClosedForm] | None] = LowRankForm

    def __init__(
        self,
        vectors: Tensor,
        values: Tensor,
        error: Estimate | None = None,
        space: Space | None = None,
        *,
        sources: Sources | None = None,
    ) -> None:
        check_tensor("vectors", vectors)
        check_tensor("values", values)
        if vectors.ndim != 2 or values.shape != vectors.shape[1:]:
            raise ValueError(f"vectors must be (n, r), values (r,): got {tuple(vectors.shape)}, {tuple(values.shape)}.")
        if vectors.dtype != values.dtype:
            dtypes = f"{vectors.dtype} and {values.dtype}"
            raise TypeError(f"vectors and values must be of one dtype, got {dtypes}: pass values.to(vectors.dtype).")
        super().__init__(vectors, values, error=error, space=space, sources=sources)
        self.vectors, self.values, self.error = vectors, values, error

    def _made_of(self) -> str:
        return f"of rank {self.values.shape[0]}"

    @property
    def root(self) -> Tensor:
        """The root W = U √s with A = W Wᵀ, (n, r)."""
        return self.vectors * self.values.sqrt()

    def diagonal_plus_root(self) -> DiagonalPlusRoot | None:
        if self.layouts is not None or not self.psd:
            return None
        return DiagonalPlusRoot(self.values.new_zeros(len(self.vectors)), self.root)

    @property
    def psd(self) -> bool:
        return bool((self.values >= 0).all())

    def _size(self) -> torch.Size:
        return torch.Size((self.vectors.shape[0], self.vectors.shape[0]))

    def _product(self, block: Tensor) -> Tensor:
        weighted = self.values.unsqueeze(-1) * (self.vectors.mT @ block)
        return (weighted.mT @ self.vectors.mT).mT

    def _matmul(self, rhs: Tensor) -> Tensor:
        if self.layouts is None:
            return super()._matmul(rhs)
        U = block_of(self.vectors)
        block = vec.as_columns(rhs if isinstance(rhs, Sharded) else U.like(rhs[U.rows.own]))
        image: Any = vec.shaped_as(vec.combine(U, self.values.unsqueeze(-1) * vec.gram(U, block)), rhs)
        return image if isinstance(rhs, Sharded) else image.whole()

    def _t_matmul(self, rhs: Tensor) -> Tensor:
        return self._matmul(rhs)

    def _diagonal(self) -> Tensor:
        if self.layouts is None:
            return self.vectors.square() @ self.values
        return vec.by_rows(block_of(self.vectors), function=lambda rows: (rows.square() @ self.values)[:, None])[:, 0]

    def _times(self, factor: Tensor) -> LinearOperator:
        sources = scale_sources(self.sources, factor)
        return LowRank(self.vectors, self.values * factor, error=self.error, space=self.spaces[0], sources=sources)

    def with_diagonal(self, diagonal: Float[Tensor, " n"]) -> LinearOperator:
        """Add diag(e), e ≥ 0, so that the sum has the given diagonal, that of the approximated matrix.

        Products, draws and `add_diagonal` are exact, and solves use Woodbury if the diagonal added to e is positive. An
        entry that is smaller than that of the low-rank part is an error. This never happens for `co.low_rank`, a
        Nyström approximation, and the exact diagonal.

        Args:
            diagonal: the diagonal of the sum, (n,).

        Returns:
            The sum, a `Damped`.

        Raises:
            ValueError: an entry is smaller than that of the low-rank part beyond rounding.
        """
        n = self.shape[-1]
        check_shape("the diagonal", diagonal, (n,))
        present = self._diagonal()
        rest = diagonal - present
        # Allows for rounding of a Nyström approximation (its stabilising shift) and of the sums over points in both.
        eps = torch.finfo(self.dtype).eps
        slack = eps * math.sqrt(n) * self.values.detach().norm() + math.sqrt(eps) * present.detach().abs()
        if not bool((rest.detach() >= -slack).all()):
            worst = int((rest.detach() + slack).argmin())
            sizes = f"{float(diagonal[worst]):.6g}, less than {float(present[worst]):.6g} of the low-rank part"
            raise ValueError(f"entry {worst} of the diagonal is {sizes}: pass the exact diagonal, beside co.low_rank.")
        return self.add_diagonal(rest.clamp_min(0))

    def _draw(self, k: int, generator: torch.Generator | None) -> Tensor:
        require_not_negative(self.values)
        refuse(self.layouts is not None, "a LowRank whose vectors are sharded over ranks cannot be drawn from.")
        return self.root @ normal(len(self.values), k, self.dtype, self.device, generator)


@algorithm
def low_rank(
    op: Matrix | Given,
    rank: int | None = None,
    rtol: float | None = None,
    generator: torch.Generator | None = None,
    memory_budget: int | None = None,
    progress: Progress = None,
    checkpoint: Place | None = None,
) -> LowRank:
    """Approximate positive semi-definite A (n, n) by Â = U diag(s) Uᵀ, U (n, r) orthonormal, s (r,) descending.

    `Â.error` estimates ‖A − Â‖_F / ‖A‖_F from 16 random vectors independent of the approximation (exactly, from all n
    unit vectors, if n ≤ 16). Its standard error is that of the ratio; its matvecs are all products spent.

    Args:
        op: a tensor or an operator, symmetric positive semi-definite.
        rank: r; the result has fewer if A has no more eigenvalues above rounding. With rtol, the largest r.
        rtol: double the rank until error + 2 standard errors ≤ rtol (0.01 if neither is given). The same random vectors
            measure the error after each doubling.
        generator: the source of the random vectors.
        memory_budget: bytes for the stored vectors, which limit the rank. None is the rest of the budget of the
            linearisation behind A; then fewer vectors, at least four, may measure the error. The rank is at most 1024
            if neither rank nor memory_budget is given.
        progress: as in `cg`.
        checkpoint: a folder for intermediate results, written at most every half minute: a killed run continues from
            there and gives bitwise the same result. It also keeps the result, which a later run returns at once.

    Warns with `RankWarning` if the budget or the limit ended the growth first.

    Returns:
        A LowRank operator with its `error`.

    Raises:
        ValueError: rank is not in 1..n, rtol is not in (0, 1), the budget is below one vector, a tensor in A requires a
            gradient (Â has none), or the checkpoint belongs to another problem.
        OSError: the checkpoint cannot be written.
        NotPositiveSemidefiniteError: an eigenvalue clearly below zero was found.

    Source: the randomised Nyström approximation of Frangella, Tropp & Udell 2023, by blocks of products.

    Examples:
        >>> A = torch.diag(torch.tensor([100.0, 50.0, 0.0, 0.0]).double())
        >>> approximation = co.linalg.low_rank(A, rank=2, generator=torch.Generator().manual_seed(0))
        >>> approximation.values.round(), approximation.vectors.shape
        (tensor([100.,  50.], dtype=torch.float64), torch.Size([4, 2]))
    """
    op = vec.as_matrix(op)
    facts = vec.describe_square(op)
    require_no_graph((op,) if isinstance(op, Tensor) else op.representation(), "low_rank")
    if rank is not None:
        checked_whole("rank", rank, 1, facts.rows)
    if rtol is not None:
        checked_number("rtol", rtol, "(0, 1)")
    aim = (0.01 if rank is None else None) if rtol is None else rtol
    wanted = rank or (facts.rows if memory_budget is not None else min(facts.rows, SKETCH_RANK))
    least = SKETCH_ARRAYS * facts.vector_bytes
    small = memory_budget is not None and memory_budget < least
    refuse(small, f"memory_budget={memory_budget} bytes, but a rank of one needs {least}.")
    saved = begin("low_rank", checkpoint, lambda: problem_of(op), facts.device)
    generator = vec.spawn_generator(generator)
    beside = saved.source("generator of the error's probes", derive_generator(generator), facts.device)
    generator = saved.source("generator", generator, facts.device)

    if saved.done:
        made = saved.result(_Made)
    else:
        with working(op, ESTIMATE_VECTORS) as (multiply, room):
            probes = PROBES
            if memory_budget is None and room is not None:  # a given budget covers the stored vectors only
                probes = max(4, min(PROBES, room // (8 * facts.vector_bytes)))
                room -= 2 * probes * facts.vector_bytes
            limit = wanted if room is None else max(1, min(wanted, room // (SKETCH_ARRAYS * facts.vector_bytes)))
            probed = Probed(multiply, facts, generator)
            probed_once: list[Tensor] = list(saved.attach("error", lambda: probed_once) or [])

            def error_of(U: Tensor, values: Tensor, matvecs: int) -> Estimate:
                if not probed_once:
                    if facts.rows <= probes:
                        Z = next(vec.unit_blocks(facts, probes))
                    else:
                        Z = replace(probed, generator=beside).probes(probes)
                    probed_once.extend((Z, multiply(Z)))
                Z, images = probed_once
                return _relative_error(facts, Z, images, U, values, matvecs)

            def is_accurate(U: Tensor, values: Tensor) -> bool:
                return aim is not None and _bound(error_of(U, values, 0)) <= aim

            fixed = limit if aim is None else None
            sketch = grow(probed, fixed, limit, satisfied=is_accurate, known_psd=vec.is_psd(op), saved=saved)
            values = sketch.eigenvalues.to(sketch.U)
            made = saved.finish(_Made(sketch.U, values, error_of(sketch.U, values, sketch.matvecs), limit))
    values, error, limit, r = made.values, made.error, made.limit, len(made.values)
    small = float(error.value) <= math.sqrt(torch.finfo(values.dtype).eps)
    if _bound(error) > aim if aim is not None else limit < (rank or 0) or not (r == limit or small):
        warn(
            f"low_rank ended at rank {r} with a relative error of {float(error.value):.2g} ± {float(error.stderr):.1g}"
            f"{'' if aim is None else f' (rtol={aim:g})'}: the rank was limited to {limit}; raise rank or "
            "memory_budget, or accept the error.",
            RankWarning,
        )
    return LowRank(stored(made.vectors), values, error=error, space=spaces_of(op)[0], sources=sources_of(op))


@dataclass(frozen=True, eq=False)
class _Made:
    """An approximation with its error, and the largest rank that it could have had."""

    vectors: Tensor
    values: Tensor
    error: Estimate
    limit: int


def _bound(error: Estimate) -> float:
    return float(error.value + 2 * error.stderr)


def _relative_error(
    facts: Description, probes: Tensor, images: Tensor, U: Tensor, values: Tensor, matvecs: int
) -> Estimate:
    """Estimate ‖A − Â‖_F / ‖A‖_F from probes and their products with A, exactly if the probes are unit vectors."""
    count, width = probes.shape[1], max(1, CHUNK // facts.rows)
    errors, seen = [], []
    for start in range(0, count, width):
        image = vec.combine(U, values[:, None] * vec.gram(U, vec.part(probes, start, start + width)))
        seen.append(vec.norm(image).square())
        image -= vec.part(images, start, start + width)
        errors.append(vec.norm(image).square())
    error, size_seen = torch.cat(errors), torch.cat(seen)
    # The products with A, and with Â, which is no larger, have errors of this size relative to their own.
    rounding = 2 * vec.rounding_level(facts.dtype, facts.rows)
    if count == facts.rows:
        size = vec.norm(images).square().sum()
        value = (error.sum() / size).sqrt() if bool(size > 0) else error.new_zeros(())
        return Estimate.rounded(value, rounding, matvecs=matvecs + count, size=1.0)
    # ‖Â‖_F is known, so the probes estimate only ‖A‖² − ‖Â‖²; this is not negative for a projection of A.
    approximation_size = values.double().square().sum()
    sizes = approximation_size + vec.norm(images).square() - size_seen
    size = torch.maximum(sizes.mean(), approximation_size)
    if not bool(size > 0):
        return Estimate(size, torch.zeros_like(size), count, matvecs + count)
    return root_of_ratio(error, sizes, size, matvecs + count, rounding)
