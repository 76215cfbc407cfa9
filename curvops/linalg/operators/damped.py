"""The operator A + diag(d) of every posterior precision, its closed forms, and lazy inverses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.ambient import current_run, room_in
from curvops.checkpoint import Place
from curvops.errors import NotPositiveSemidefiniteError
from curvops.linalg.core.algorithm import keep
from curvops.linalg.core.cache import Cache
from curvops.linalg.core.matrix_identity import Sources, Spaces, common, merge_sources, scale_sources, spaces_of
from curvops.linalg.core.solve_routes import SKETCH_SERVES, SOLVE_VECTORS
from curvops.linalg.core.vectors import describe, is_psd, is_symmetric, require_precision
from curvops.linalg.estimators.logdet import ShiftedParts
from curvops.linalg.operators.algebra import Product, Sum
from curvops.linalg.operators.base import Operator, UnaryOperator, as_part, number_of
from curvops.linalg.operators.closed_form import (
    ClosedForm,
    DiagonalPlusRoot,
)
from curvops.linalg.operators.draws import draw_by_products, draw_dense, draw_together, normal
from curvops.linalg.operators.given_matrix import Diagonal
from curvops.linalg.preconditioners.nystrom import nystrom
from curvops.linalg.solvers.solve import solve
from curvops.ranks.sharded_vectors import RowLayout, over_ranks


class Damped(UnaryOperator):
    """The sum P = A + diag(d) for a symmetric A (n, n) and d, a number, a vector (n,), or a batch of vectors.

    `A.add_diagonal(d)` makes it. Solves, log-determinants, samples, roots and the inverse's diagonal come from the
    operand's closed form if it has one, otherwise from block CG with a Nyström preconditioner (Frangella, Tropp & Udell
    2023), from stochastic Lanczos quadrature, and from perturb-and-solve.

    Args:
        base: A, symmetric.
        shift: d: a number, a vector (n,), or a batch of vectors.
        cache: results shared with another operator of the same matrix; None starts an empty one.
        sources: the record of the data of a shift that is not a prior.

    Examples:
        >>> P = co.linalg.Diagonal(torch.tensor([3.0, 0.0])).add_diagonal(1.0)
        >>> P.solve(torch.ones(2)), round(float(P.logdet()), 4)
        (tensor([0.2500, 1.0000]), 1.3863)
    """

    _shown = ("base", "shift")
    _is_regularised = True
    _in_formula: ClassVar[str] = "({})"

    def __init__(
        self,
        base: LinearOperator,
        shift: float | Tensor,
        cache: Cache | None = None,
        *,
        sources: Sources | None = None,
    ) -> None:
        if not isinstance(shift, Tensor):
            shift = torch.as_tensor(shift, dtype=base.dtype, device=base.device)
        self.shift, self._shift_sources, self._cache = shift, sources, Cache() if cache is None else cache
        super().__init__(base, shift, cache=self._cache, sources=sources)

    def diagonal_plus_root(self) -> DiagonalPlusRoot | None:
        parts = self.base.diagonal_plus_root() if isinstance(self.base, Operator) else None
        return None if parts is None else parts._replace(weights=parts.weights + self.shift)

    @property
    def sources(self) -> Sources | None:
        of_base, of_shift = super().sources, self._shift_sources
        if of_base is None and of_shift is not None:
            return replace(of_shift, partial=True)
        return merge_sources(of_base, of_shift)

    def with_sources(self, sources: Sources | None) -> Damped:
        """Return the operator with further sources of its shift."""
        if sources is None:
            return self
        return Damped(self.base, self.shift, self._cache, sources=merge_sources(self._shift_sources, sources))

    def on_layouts(self, rows: RowLayout, columns: RowLayout) -> LinearOperator:
        base = over_ranks(self.base, rows)
        return Damped(base, self.shift, sources=self._shift_sources)

    @property
    def psd(self) -> bool:
        return super().psd and bool((self.shift >= 0).all())

    @property
    def definite(self) -> bool:
        return self.symmetric  # P is a precision: an indefinite one is an error

    def _size(self) -> torch.Size:
        size: torch.Size = self.base.shape
        if self.shift.ndim < 2:
            return size
        return torch.Size((*torch.broadcast_shapes(size[:-2], self.shift.shape[:-1]), *size[-2:]))

    def _made_of(self) -> str:
        added = "diag(d)" if self.shift.ndim else f"{number_of(self.shift, 'd')} · I"
        return f"{as_part(self.base)} + {added}"

    def _transpose_nonbatch(self) -> LinearOperator:
        transposed = self.base.mT
        return self if transposed is self.base else Damped(transposed, self.shift, sources=self._shift_sources)

    def _matmul(self, rhs: Tensor) -> Tensor:
        return torch.addcmul(self.base._matmul(rhs), self._shift_against(rhs), rhs)  # two blocks, where sums take three

    def _t_matmul(self, rhs: Tensor) -> Tensor:
        return torch.addcmul(self.base._t_matmul(rhs), self._shift_against(rhs), rhs)

    def _shift_against(self, rhs: Tensor) -> Tensor:
        return self.shift if self.shift.ndim == 0 or rhs.ndim == 1 else self.shift.unsqueeze(-1)

    def _diagonal(self) -> Tensor:
        return self.base._diagonal() + self.shift

    def add_diagonal(self, diag: float | Tensor) -> LinearOperator:
        total = super().add_diagonal(diag)
        return Damped(self.base, self.shift + total.shift, sources=self._shift_sources)

    def _times(self, factor: Tensor) -> LinearOperator:
        sources = scale_sources(self._shift_sources, factor)
        return Damped(self.base._mul_constant(factor), self.shift * factor, sources=sources)

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        operator = self
        if batch_indices:
            everything = slice(None)
            base = self.base._getitem(everything, everything, *batch_indices) if self.base.batch_shape else self.base
            shift = self.shift[batch_indices] if self.shift.ndim > 1 else self.shift
            operator = Damped(base, shift, sources=self._shift_sources)
        return Operator._getitem(operator, row_index, col_index)

    # Solving

    def preconditioner(
        self,
        columns: int = 1,
        generator: torch.Generator | None = None,
        *,
        memory_budget: int | None = None,
        checkpoint: Place | None = None,
    ) -> Any:
        """Return M ≈ P⁻¹ for solves with `columns` right-hand sides, an object with `@`; None if none pays off.

        The preconditioner is a Nyström sketch of A^-½-scaled A, with its rank chosen by expected total cost and within
        ``memory_budget`` bytes, and is kept for later solves. With a vector shift d the sketch is of S A S, S =
        diag(d)^-½, so that the prior's scales cost no iterations. With a ``checkpoint`` the sketch is that of the
        folder, or a new one, as in `nystrom`. Without a ``generator`` it has a fixed seed: a solve does not advance
        torch's generator, and gives the same result each time.

        Args:
            columns: the number of right-hand sides.
            generator: the source of the sketch; None has a fixed seed.
            memory_budget: bytes for the sketch.
            checkpoint: a folder that keeps the sketch, as in `nystrom`.

        Returns:
            M, or None.
        """
        cache, key = self._cache, ("preconditioner", self.representation())
        with cache.lock:
            of_run = checkpoint is not None or current_run().checkpoint is not None
            served, M = (not of_run and cache.get(*key, (self.shift,))) or (0, None)
            if columns > SKETCH_SERVES * served:
                M = None
                if self._takes_sketch:
                    M = self._build_preconditioner(columns, generator, memory_budget, checkpoint)
                cache.put(*key, (columns, M), (self.shift,))
            return M

    @property
    def _takes_sketch(self) -> bool:
        unbatched = not self.base.batch_shape and self.shift.ndim <= 1
        return unbatched and is_symmetric(self.base) and bool((self.shift.detach() > 0).all())

    def _build_preconditioner(
        self,
        columns: int,
        generator: torch.Generator | None,
        memory_budget: int | None,
        checkpoint: Place | None = None,
    ) -> Any:
        shift = self.shift.detach()
        generator = torch.Generator(self.device).manual_seed(0) if generator is None else generator
        base, level, scale = self._whiten(shift)
        if memory_budget is None and (room := room_in(self.memories)) is not None:
            memory_budget = max(0, room - SOLVE_VECTORS * describe(self).vector_bytes)  # room for one column
        try:
            sketch = nystrom(
                base,
                rank=None,
                shift=level,
                rhs=columns,
                generator=generator,
                memory_budget=memory_budget,
                checkpoint=checkpoint,
            )
        except NotPositiveSemidefiniteError:  # A is indefinite, but P may still be positive definite
            return None
        inner = sketch.preconditioner(level)
        keep(self, inner, inner.U.nbytes)
        return inner if scale is None else ScaledPreconditioner(scale, inner)

    def _whiten(self, shift: Tensor) -> tuple[LinearOperator, float, Tensor | None]:
        """Return B, λ, s with P = S⁻¹ (B + λ I) S⁻¹; with a scalar shift, B is A."""
        if shift.ndim == 0:
            return self.base.detach(), float(shift), None
        scale = shift.rsqrt()
        S = Diagonal(scale)
        return Product(S, self.base.detach(), S), 1.0, scale

    def shifted_form(self) -> ShiftedParts | None:
        """Return B, λ, an offset and a scale with log det P = log det(B + λ I) + offset; None unless d is positive."""
        shift = self.shift.detach()
        if self.base.batch_shape or shift.ndim > 1 or not bool((shift > 0).all()):
            return None
        base, level, scale = self._whiten(shift)
        return ShiftedParts(base, level, shift.new_zeros(()) if scale is None else shift.double().log().sum(), scale)

    def _closed_form(self) -> ClosedForm | None:
        """Return the closed form of this operand's class if it holds; it is factorised once."""
        form_class: type[ClosedForm] | None = getattr(self.base, "_damped_form", None)
        if form_class is None or self.batch_shape:
            return None
        require_precision(self.dtype, self.device)

        def form_that_holds() -> ClosedForm | None:
            form = form_class(self.base, self.shift)
            return form if form.holds else None

        tensors = (*self.base.representation(), self.shift)
        return self._cache.get_or_compute("form", tensors, form_that_holds, (self.shift,))

    def exact_solver(self) -> Callable[[Tensor], Tensor] | None:
        form = self._closed_form()
        return None if form is None else partial(_solve_definite, form)

    def _lower_bound(self) -> float | None:
        least = float(self.shift.detach().min())
        return least if least > 0 and is_psd(self.base) else None

    def _draw(self, k: int, generator: torch.Generator | None) -> Tensor:
        form = self._closed_form()
        if form is not None:
            return form.draw(k, generator)
        if not is_psd(self.base):  # A has no root, although P may be positive definite
            return (draw_dense if self._is_small else draw_by_products)(self, k, generator)
        if bool((self.shift < 0).any()):
            raise ValueError(f"A + diag(d) has no known root for a negative shift ({float(self.shift.min()):.3g}).")
        noise = normal(self.shape[-1], k, self.dtype, self.device, generator)
        return draw_together(self.base, k, generator) + self._shift_against(noise).sqrt() * noise


def add(left: Operator, right: LinearOperator) -> LinearOperator:
    """Return A + B: diagonals add up, a diagonal joins the shift of the other term, and a shift stays outermost."""
    if isinstance(left, Diagonal) and isinstance(right, Diagonal):
        space, sources = common(*left.spaces, *right.spaces), merge_sources(left.sources, right.sources)
        return Diagonal(left.entries + right.entries, space, sources=sources)
    for one, other in ((left, right), (right, left)):
        if isinstance(one, Diagonal) and isinstance(other, Operator):
            common(*spaces_of(left), *spaces_of(right))
            total = other.add_diagonal(one.entries)
            return total.with_sources(one.sources) if isinstance(total, Damped) else total
    if isinstance(left, Damped) and isinstance(right, Damped):
        sources = merge_sources(left._shift_sources, right._shift_sources)
        return Damped(left.base + right.base, left.shift + right.shift, sources=sources)
    for one, other in ((left, right), (right, left)):
        if isinstance(one, Damped):
            return Damped(one.base + other, one.shift, sources=one._shift_sources)
    return Sum(left, right)


class Inverse(UnaryOperator):
    """The inverse A⁻¹, as returned by `A.inverse()`, with one solve with A per column.

    Args:
        base: A, symmetric.
        rtol: the relative residual of each solve; None means that of `solve`.

    Examples:
        >>> A = co.linalg.Dense(torch.diag(torch.tensor([4.0, 2.0])), psd=True)
        >>> A.inverse() @ torch.ones(2)
        tensor([0.2500, 0.5000])
    """

    sources = None
    _in_formula: ClassVar[str] = "{}"

    def __init__(self, base: LinearOperator, rtol: float | None = None) -> None:
        super().__init__(base, rtol=rtol)

    @property
    def spaces(self) -> Spaces:
        return super().spaces[::-1]

    def _made_of(self) -> str:
        return f"{as_part(self.base)}⁻¹"

    def _matmul(self, rhs: Tensor) -> Tensor:
        return solve(self.base, rhs, rtol=self._kwargs["rtol"])

    def _t_matmul(self, rhs: Tensor) -> Tensor:
        return self.mT._matmul(rhs)

    def inverse(self, rtol: float | None = None) -> LinearOperator:
        return self.base

    def exact_solver(self) -> Callable[[Tensor], Tensor] | None:
        return lambda block: self.base._matmul(block)

    @property
    def _form_of_base(self) -> ClosedForm | None:
        return self.base._exact_form() if isinstance(self.base, Operator) else None

    def _diagonal(self) -> Tensor:
        form = self._form_of_base
        return super()._diagonal() if form is None else form.inverse_diagonal()

    def _diagonal_and_error(self) -> tuple[Tensor, Tensor]:
        form, (diagonal, error) = self._form_of_base, super()._diagonal_and_error()
        return diagonal, error if form is None else error + form.inverse_diagonal_error()

    @property
    def diagonal_matvecs(self) -> int:
        return self.shape[-1] if self._form_of_base is None else 0

    def logdet(self) -> Tensor:
        return -self.base.logdet()

    def zero_mean_mvn_samples(self, num_samples: int) -> Tensor:
        form = self._form_of_base
        return super().zero_mean_mvn_samples(num_samples) if form is None else form.draw_inverse(num_samples, None).mT

    def _draw(self, k: int, generator: torch.Generator | None) -> Tensor:
        form = self.base._closed_form() if isinstance(self.base, Damped) else None
        if form is not None:
            return form.draw_inverse(k, generator)
        return solve(self.base, draw_together(self.base, k, generator), rtol=self._kwargs["rtol"])  # P⁻¹ ε, ε ~ N(0, P)


def _solve_definite(form: ClosedForm, block: Tensor) -> Tensor:
    """Return P⁻¹ B by the closed form; raise an error for an indefinite P, which is not a precision."""
    form.require_definite()
    return form.solve(block)


@dataclass(frozen=True, eq=False)
class ScaledPreconditioner:
    """The preconditioner S M S for a diagonal S and a preconditioner M."""

    scale: Tensor
    inner: Any

    @property
    def matvecs(self) -> int:
        """The number of products spent on M."""
        return self.inner.matvecs

    @property
    def condition(self) -> float:
        """The condition number that M leaves."""
        return self.inner.condition

    def shifted(self, shift: float) -> ScaledPreconditioner:
        """Return the preconditioner for another multiple of S⁻² added to the matrix."""
        return ScaledPreconditioner(self.scale, self.inner.shifted(shift))

    def __matmul__(self, block: Tensor) -> Tensor:
        scale = self.scale if block.ndim == 1 else self.scale.unsqueeze(-1)
        return scale * (self.inner @ (scale * block))
