"""Operators built from operators: transpose, sum, scaling, product, slice, and a batch of equal copies."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import pairwise
from typing import Any, ClassVar

import torch
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.linalg.core.matrix_identity import (
    Sources,
    Spaces,
    common,
    scale_sources,
    sources_of_sum,
    spaces_of,
    spaces_of_sum,
)
from curvops.linalg.core.vectors import is_psd, is_symmetric
from curvops.linalg.operators.base import Operator, UnaryOperator, as_part, joined, number_of
from curvops.linalg.operators.closed_form import ClosedForm, ScaledForm
from curvops.linalg.operators.draws import draw_together, normal
from curvops.ranks.sharded_vectors import Layouts, layouts_of


class Transposed(UnaryOperator):
    """The transpose Aᵀ of an operator that is not symmetric; one transposed product with A per column.

    Args:
        base: A.

    Examples:
        >>> A = co.linalg.Dense(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> A.mT @ torch.ones(2)
        tensor([4., 6.])
    """

    _in_formula: ClassVar[str] = "{}"

    def __init__(self, base: LinearOperator) -> None:
        super().__init__(base)

    @property
    def spaces(self) -> Spaces:
        return super().spaces[::-1]

    @property
    def layouts(self) -> Layouts:
        layouts = super().layouts
        return None if layouts is None else layouts[::-1]

    def _size(self) -> torch.Size:
        *batch, rows, columns = self.base.shape
        return torch.Size((*batch, columns, rows))

    def _made_of(self) -> str:
        return f"{as_part(self.base)}ᵀ"

    def _transpose_nonbatch(self) -> LinearOperator:
        return self.base

    def _matmul(self, rhs: Tensor) -> Tensor:
        return self.base._t_matmul(rhs)

    def _t_matmul(self, rhs: Tensor) -> Tensor:
        return self.base._matmul(rhs)


class Sum(Operator):
    """The sum A + B + …: one product with each term per column.

    Args:
        *terms: the operators A, B, …, of one shape.

    Raises:
        ValueError: the shapes differ.

    Examples:
        >>> A = co.linalg.Dense(torch.eye(2)) + co.linalg.Dense(torch.ones(2, 2))
        >>> A @ torch.ones(2)
        tensor([3., 3.])
    """

    _shown = ("terms",)
    _in_formula: ClassVar[str] = "({})"

    def __init__(self, *terms: LinearOperator) -> None:
        flat = [summand for term in terms for summand in (term._args if isinstance(term, Sum) else (term,))]
        _ = spaces_of_sum(flat)
        if len({term.matrix_shape for term in flat}) > 1:
            raise ValueError(f"cannot add operators of shapes {[tuple(term.shape) for term in flat]}.")
        super().__init__(*flat)
        self.terms = tuple(flat)

    @property
    def spaces(self) -> Spaces:
        return spaces_of_sum(self.terms)

    @property
    def sources(self) -> Sources | None:
        return sources_of_sum(self.terms)

    @property
    def symmetric(self) -> bool:
        return all(is_symmetric(term) for term in self.terms)

    @property
    def psd(self) -> bool:
        return all(is_psd(term) for term in self.terms)

    def _size(self) -> torch.Size:
        return torch.broadcast_shapes(*(term.shape for term in self.terms))

    def _made_of(self) -> str:
        return joined(self.terms, "+")

    def _transpose_nonbatch(self) -> LinearOperator:
        transposed = [term.mT for term in self.terms]
        return self if all(a is b for a, b in zip(transposed, self.terms)) else Sum(*transposed)

    def _matmul(self, rhs: Tensor) -> Tensor:
        return reduce(torch.add, [term._matmul(rhs) for term in self.terms])

    def _t_matmul(self, rhs: Tensor) -> Tensor:
        return reduce(torch.add, [term._t_matmul(rhs) for term in self.terms])

    def _diagonal(self) -> Tensor:
        return reduce(torch.add, [term._diagonal() for term in self.terms])

    def _diagonal_and_error(self) -> tuple[Tensor, Tensor]:
        """Return the diagonal, and the sum of the terms' errors, since a term may be larger than the sum."""
        diagonals, errors = zip(*map(_diagonal_and_error, self.terms))
        return reduce(torch.add, diagonals), reduce(torch.add, errors)

    def _draw(self, k: int, generator: torch.Generator | None) -> Tensor:
        """Add independent draws of each term."""
        return torch.stack([draw_together(term, k, generator) for term in self.terms]).sum(0)


def _diagonal_and_error(operator: Any) -> tuple[Tensor, Tensor]:
    if isinstance(operator, Operator):
        return operator._diagonal_and_error()
    return Operator._diagonal_and_error(operator)  # its own diagonal is all that this needs


class Scaled(UnaryOperator):
    """The multiple c A for a number c (a 0-d tensor, which may carry a gradient).

    Args:
        base: A.
        factor: c.

    Examples:
        >>> A = 3 * co.linalg.Diagonal(torch.tensor([1.0, 2.0]))
        >>> A @ torch.ones(2)
        tensor([3., 6.])
    """

    _shown: ClassVar[tuple[str, ...]] = ("base", "factor")
    _damped_form: ClassVar[type[ClosedForm] | None] = ScaledForm
    _in_formula: ClassVar[str] = "({})"

    def __init__(self, base: LinearOperator, factor: Tensor) -> None:
        super().__init__(base, factor)

    @property
    def factor(self) -> Tensor:
        """The number c, a 0-d tensor (or one per batch entry)."""
        return self._args[1]

    @property
    def sources(self) -> Sources | None:
        return scale_sources(super().sources, self.factor) if self.factor.ndim == 0 else None

    @property
    def psd(self) -> bool:
        return super().psd and bool((self.factor >= 0).all())

    def _size(self) -> torch.Size:
        return torch.broadcast_shapes(self.base.shape, (*self.factor.shape, 1, 1))

    def _made_of(self) -> str:
        return f"{number_of(self.factor, 'c')} · {as_part(self.base)}"

    def _matmul(self, rhs: Tensor) -> Tensor:
        return self._scale(self.base._matmul(rhs), rhs)

    def _t_matmul(self, rhs: Tensor) -> Tensor:
        return self._scale(self.base._t_matmul(rhs), rhs)

    def _scale(self, result: Tensor, rhs: Tensor) -> Tensor:
        factor = self.factor if rhs.ndim == 1 or self.factor.ndim == 0 else self.factor[..., None, None]
        return result * factor

    def _diagonal(self) -> Tensor:
        return self.base._diagonal() * self._row_factor

    def _diagonal_and_error(self) -> tuple[Tensor, Tensor]:
        diagonal, error = _diagonal_and_error(self.base)
        return diagonal * self._row_factor, error * self._row_factor.abs()

    @property
    def _row_factor(self) -> Tensor:
        """The factor in a shape that broadcasts over diagonals (..., n)."""
        return self.factor.unsqueeze(-1) if self.factor.ndim else self.factor

    def _draw(self, k: int, generator: torch.Generator | None) -> Tensor:
        if not self.psd or self.factor.ndim:
            return super()._draw(k, generator)
        return self.factor.sqrt() * draw_together(self.base, k, generator)


class Product(Operator):
    """The product A B …: one product with each factor per column; B A Bᵀ is positive semi-definite if A is.

    Args:
        *factors: the operators A, B, …, each with as many columns as the next has rows.

    Raises:
        ValueError: the shapes do not fit.

    Examples:
        >>> A = co.linalg.Dense(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> product = A @ co.linalg.Diagonal(torch.tensor([1.0, 10.0]))
        >>> product, product @ torch.ones(2)
        (Product(2 × 2, Dense · Diagonal, float32, cpu), tensor([21., 43.]))
    """

    _shown = ("factors",)
    _in_formula: ClassVar[str] = "({})"

    def __init__(self, *factors: LinearOperator) -> None:
        flat = [inner for factor in factors for inner in (factor._args if isinstance(factor, Product) else (factor,))]
        for left, right in pairwise(flat):
            common(spaces_of(left)[1], spaces_of(right)[0])
            if left.shape[-1] != right.shape[-2]:
                raise ValueError(f"cannot multiply operators of shapes {[tuple(factor.shape) for factor in flat]}.")
        super().__init__(*flat)
        self.factors = tuple(flat)

    @property
    def spaces(self) -> Spaces:
        return spaces_of(self.factors[0])[0], spaces_of(self.factors[-1])[1]

    @property
    def layouts(self) -> Layouts:
        layouts = [layout for factor in self.factors if (layout := layouts_of(factor)) is not None]
        return (layouts[0][0].beside(self.shape[-2]), layouts[-1][1].beside(self.shape[-1])) if layouts else None

    @property
    def symmetric(self) -> bool:
        return _is_congruence(self.factors, is_symmetric)

    @property
    def psd(self) -> bool:
        return _is_congruence(self.factors, is_psd)

    def _size(self) -> torch.Size:
        sizes = [factor.shape for factor in self.factors]
        batches = {size[:-2] for size in sizes}  # usually one; torch.broadcast_shapes is slow
        batch = batches.pop() if len(batches) == 1 else torch.broadcast_shapes(*batches)
        return torch.Size((*batch, sizes[0][-2], sizes[-1][-1]))

    def _made_of(self) -> str:
        return joined(self.factors, "·")

    def _transpose_nonbatch(self) -> LinearOperator:
        return self if self.symmetric else Product(*(factor.mT for factor in reversed(self.factors)))

    def _matmul(self, rhs: Tensor) -> Tensor:
        for factor in reversed(self.factors):
            rhs = factor._matmul(rhs)
        return rhs

    def _t_matmul(self, rhs: Tensor) -> Tensor:
        for factor in self.factors:
            rhs = factor._t_matmul(rhs)
        return rhs

    def _draw(self, k: int, generator: torch.Generator | None) -> Tensor:
        """Return B times a draw of A for B A Bᵀ, and B times white noise for B Bᵀ."""
        if not self.psd or len(self.factors) < 2:
            return super()._draw(k, generator)
        left, *middle, _ = self.factors
        if middle:
            return left._matmul(draw_together(Product(*middle) if len(middle) > 1 else middle[0], k, generator))
        return left._matmul(normal(left.shape[-1], k, left.dtype, left.device, generator))


class Sliced(UnaryOperator):
    """The submatrix A[rows, columns] for index tensors (None: all of them); one product with A per column.

    Args:
        base: A.
        rows: the positions of the rows.
        columns: the positions of the columns.

    Examples:
        >>> A = co.linalg.Dense(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> A[:1].to_dense(), A[1:, :1].to_dense()
        (tensor([[1., 2.]]), tensor([[3.]]))
    """

    _shown = ("base", "rows", "columns")
    _in_formula: ClassVar[str] = "({})"

    def __init__(self, base: LinearOperator, rows: Tensor | None = None, columns: Tensor | None = None) -> None:
        super().__init__(base, rows=rows, columns=columns)
        self.rows, self.columns = rows, columns

    @property
    def spaces(self) -> Spaces:
        rows, columns = super().spaces
        return rows if self.rows is None else None, columns if self.columns is None else None

    @property
    def symmetric(self) -> bool:
        return super().symmetric and self._is_principal()

    @property
    def psd(self) -> bool:
        return super().psd and self._is_principal()

    def _is_principal(self) -> bool:
        if self.rows is None or self.columns is None:
            return self.rows is self.columns
        return torch.equal(self.rows, self.columns)

    def _size(self) -> torch.Size:
        *batch, m, n = self.base.shape
        rows = m if self.rows is None else len(self.rows)
        return torch.Size((*batch, rows, n if self.columns is None else len(self.columns)))

    def _made_of(self) -> str:
        return f"part of {as_part(self.base)}"

    def _transpose_nonbatch(self) -> LinearOperator:
        return self if self.symmetric else Sliced(self.base.mT, rows=self.columns, columns=self.rows)

    def _matmul(self, rhs: Tensor) -> Tensor:
        return _take(self.base._matmul(_spread(rhs, self.columns, self.base.shape[-1])), self.rows)

    def _t_matmul(self, rhs: Tensor) -> Tensor:
        return _take(self.base._t_matmul(_spread(rhs, self.rows, self.base.shape[-2])), self.columns)

    def _draw(self, k: int, generator: torch.Generator | None) -> Tensor:
        if not self.psd:
            return super()._draw(k, generator)
        return _take(draw_together(self.base, k, generator), self.rows)


class Expanded(UnaryOperator):
    """An operator as a batch of equal copies, (*batch, m, n); one product is computed for all of them."""

    def __init__(self, base: Operator, batch: Sequence[int]) -> None:
        super().__init__(base, batch=torch.Size(batch))

    def _size(self) -> torch.Size:
        return torch.Size((*self._kwargs["batch"], *self.base.shape[-2:]))

    def _matmul(self, rhs: Tensor) -> Tensor:
        return self._broadcast(self.base._matmul(rhs))

    def _t_matmul(self, rhs: Tensor) -> Tensor:
        return self._broadcast(self.base._t_matmul(rhs))

    def _broadcast(self, result: Tensor) -> Tensor:
        return result.expand(*torch.broadcast_shapes(self.batch_shape, result.shape[:-2]), *result.shape[-2:])

    def _expand_batch(self, batch_shape: Any) -> LinearOperator:
        return Expanded(self.base, batch=torch.Size(batch_shape)) if len(batch_shape) else self.base

    def _diagonal(self) -> Tensor:
        diagonal = self.base._diagonal()
        return diagonal.expand(*self.batch_shape, len(diagonal))

    def logdet(self) -> Tensor:
        return self.base.logdet().expand(self.batch_shape)

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        # Only the shape of the batch matters: every copy is the same.
        batch = torch.empty(0).expand(*self.batch_shape, 0)[batch_indices].shape[:-1]
        block = self.base._getitem(row_index, col_index)
        return block._expand_batch(batch) if len(batch) else block

    def _get_indices(self, row_index: Tensor, col_index: Tensor, *batch_indices: Tensor) -> Tensor:
        row_index, col_index, *_ = torch.broadcast_tensors(row_index, col_index, *batch_indices)
        return self.base._get_indices(row_index, col_index)

    def _draw(self, k: int, generator: torch.Generator | None) -> Tensor:
        return draw_together(self.base, k, generator)


def _take(result: Tensor, index: Tensor | None) -> Tensor:
    if index is None:
        return result
    return result.index_select(-1 if result.ndim == 1 else -2, index)


def _spread(rhs: Tensor, index: Tensor | None, size: int) -> Tensor:
    if index is None:
        return rhs
    dim = -1 if rhs.ndim == 1 else -2
    shape = list(rhs.shape)
    shape[dim] = size
    return rhs.new_zeros(shape).index_add(dim, index, rhs)


def _same(left: Any, right: Any) -> bool:
    """Return whether two operators (or their arguments) are the same object, or were built from the same ones."""
    if left is right:
        return True
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.shape == right.shape and left.data_ptr() == right.data_ptr() and left.stride() == right.stride()
    if type(left) is not type(right) or not isinstance(left, LinearOperator):
        return False
    return (
        len(left._args) == len(right._args)
        and all(_same(a, b) for a, b in zip(left._args, right._args))
        and left._kwargs.keys() == right._kwargs.keys()
        and all(_same(value, right._kwargs[key]) for key, value in left._kwargs.items())
    )


def _is_congruence(factors: Sequence[LinearOperator], has_property: Any) -> bool:
    if len(factors) <= 1:
        return all(has_property(factor) for factor in factors)
    left, right = factors[0], factors[-1]
    mirrored = _same(left, right.mT) if left.shape[-1] == right.shape[-2] or len(factors) > 2 else False
    return mirrored and _is_congruence(factors[1:-1], has_property)
