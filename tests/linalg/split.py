"""Blocks of vectors in two pieces that never meet, and an operator on them: what a sharded vector type would be.

Only small results (inner products, Gram matrices) are summed over the pieces. A `Split` refuses to become a tensor.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from linear_operator import LinearOperator
from torch import Tensor

from curvops.linalg.core import entries as matrix_entries
from curvops.linalg.core import vectors
from curvops.linalg.core.vectors import Description


class Split:
    """A block (n, K): rows 0..m in one tensor, the others in another."""

    def __init__(self, top: Tensor, bottom: Tensor) -> None:
        self.top, self.bottom = top, bottom
        self.dtype, self.device, self.ndim = top.dtype, top.device, 2

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.top) + len(self.bottom), self.top.shape[1]

    @property
    def pieces(self) -> tuple[Tensor, Tensor]:
        return self.top, self.bottom

    def to(self, dtype: torch.dtype) -> Split:
        return Split(self.top.to(dtype), self.bottom.to(dtype))

    def refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise AssertionError("the pieces of a split block must not be joined")

    __torch_function__ = classmethod(refuse)
    __array__ = __len__ = __iter__ = __getitem__ = __bool__ = __float__ = refuse


def piecewise(name: str) -> Any:
    """The operator of tensors on each piece, with a block, a number or a row of numbers."""

    def apply(X: Split, Y: Any) -> Split:
        if not isinstance(Y, (Split, int, float)):
            assert isinstance(Y, Tensor) and Y.shape == (X.shape[1],), "neither a block nor a number a column"
        others = Y.pieces if isinstance(Y, Split) else (Y, Y)
        return Split(*(getattr(piece, name)(other) for piece, other in zip(X.pieces, others)))

    return apply


for _name in ("add", "sub", "mul", "truediv"):
    for _kind in ("", "r", "i"):
        setattr(Split, f"__{_kind}{_name}__", piecewise(f"__{_kind}{_name}__"))


class Halves(Description):
    """The description of a matrix that takes and gives split blocks."""


class SplitMatrix(LinearOperator):
    """A dense matrix known by its four blocks."""

    def __init__(self, A11: Tensor, A12: Tensor, A21: Tensor, A22: Tensor) -> None:
        super().__init__(A11, A12, A21, A22)
        self.blocks = A11, A12, A21, A22

    @classmethod
    def of(cls, A: Tensor) -> SplitMatrix:
        rows, columns = (size // 3 for size in A.shape)
        return cls(A[:rows, :columns], A[:rows, columns:], A[rows:, :columns], A[rows:, columns:])

    def _size(self) -> torch.Size:
        A11, A12, A21, _ = self.blocks
        return torch.Size((len(A11) + len(A21), A11.shape[1] + A12.shape[1]))

    def _transpose_nonbatch(self) -> SplitMatrix:
        A11, A12, A21, A22 = self.blocks
        return SplitMatrix(A11.mT, A21.mT, A12.mT, A22.mT)

    def _matmul(self, rhs: Any) -> Any:
        A11, A12, A21, A22 = self.blocks
        return Split(A11 @ rhs.top + A12 @ rhs.bottom, A21 @ rhs.top + A22 @ rhs.bottom)


def split(X: Tensor) -> Split:
    """A tensor in two pieces, the first a third of it: for right-hand sides and start blocks."""
    cut = len(X) // 3
    return Split(vectors.as_block(X[:cut]), vectors.as_block(X[cut:]))


def joined(X: Split) -> Tensor:
    """For the comparison at the end, outside of any algorithm."""
    return torch.cat(X.pieces)


@vectors.describe.register
def _(A: SplitMatrix) -> Halves:
    return Halves(*A.shape, A.dtype, A.device)


@vectors.product.register
def _(A: SplitMatrix) -> Any:
    return A._matmul


@vectors.transposed_product.register
def _(A: SplitMatrix) -> Any:
    return A._transpose_nonbatch()._matmul


# Rows are independent in these: each piece by itself, by the primitive for tensors.
for _name in ("part", "as_block", "columns", "combine", "finite_part"):
    _primitive = getattr(vectors, _name)
    _primitive.register(Split, lambda X, *rest, f=_primitive: Split(*(f(piece, *rest) for piece in X.pieces)))


@vectors.plus.register
def _(Y: Split, X: Split, c: Tensor) -> Split:
    return Split(*(vectors.plus(mine, other, c) for mine, other in zip(Y.pieces, X.pieces)))


@vectors.entries.register
def _(X: Split, index: Tensor) -> Tensor:
    cut = len(X.top)
    top = index < cut
    found = torch.empty(len(index), X.shape[1], dtype=X.dtype)
    found[top] = vectors.entries(X.top, index[top])
    found[~top] = vectors.entries(X.bottom, index[~top] - cut)
    return found


@vectors.put_entries.register
def _(X: Split, index: Tensor, rows: Tensor) -> None:
    cut = len(X.top)
    top = index < cut
    vectors.put_entries(X.top, index[top], rows[top])
    vectors.put_entries(X.bottom, index[~top] - cut, rows[~top])


class SplitRows:
    """Some rows of a split matrix, each in two parts."""

    def __init__(self, left: Tensor, right: Tensor) -> None:
        self.left, self.right = left, right

    def __matmul__(self, V: Split) -> Tensor:
        return self.left @ V.top + self.right @ V.bottom

    def diagonal(self) -> Tensor:
        """The entries (i, i) of the first rows."""
        k, cut = len(self.left), self.left.shape[1]
        return torch.cat([self.left.diagonal(), self.right[cut:].diagonal()])[:k]


@matrix_entries.rows.register
def _(A: SplitMatrix) -> Any:
    A11, A12, A21, A22 = A.blocks
    left, right = torch.cat([A11, A21]), torch.cat([A12, A22])
    return lambda index: SplitRows(left[index], right[index])


@vectors.put.register
def _(X: Split, start: int, V: Split) -> None:
    for mine, other in zip(X.pieces, V.pieces):
        vectors.put(mine, start, other)


@vectors.put_columns.register
def _(X: Split, index: Tensor, V: Split) -> None:
    for mine, other in zip(X.pieces, V.pieces):
        vectors.put_columns(mine, index, other)


@vectors.rotate.register
def _(X: Split, C: Tensor) -> None:
    for piece in X.pieces:
        vectors.rotate(piece, C)


@vectors.join.register
def _(first: Split, *others: Split) -> Split:
    return Split(*(vectors.join(*pieces) for pieces in zip(*(block.pieces for block in (first, *others)))))


@vectors.axpy.register
def _(Y: Split, X: Split, C: Tensor) -> Split:
    for mine, other in zip(Y.pieces, X.pieces):
        vectors.axpy(mine, other, C)
    return Y


@vectors.inner.register
def _(X: Split, Y: Split) -> Tensor:
    return vectors.inner(X.top, Y.top) + vectors.inner(X.bottom, Y.bottom)


@vectors.gram.register
def _(X: Split, Y: Split) -> Tensor:
    return vectors.gram(X.top, Y.top) + vectors.gram(X.bottom, Y.bottom)


@vectors.norm.register
def _(X: Split) -> Tensor:
    return torch.hypot(*(vectors.norm(piece) for piece in X.pieces))


@vectors.largest.register
def _(X: Split) -> Tensor:
    return torch.maximum(*(vectors.largest(piece) for piece in X.pieces))


@vectors.householder.register
def _(X: Split) -> tuple[Split, Tensor]:
    """Each piece by itself, then the two small triangles."""
    (Q1, R1), (Q2, R2) = (vectors.householder(piece) for piece in X.pieces)
    Q, R = torch.linalg.qr(torch.cat([R1, R2]))
    return Split(vectors.combine(Q1, Q[: len(R1)]), vectors.combine(Q2, Q[len(R1) :])), R


@vectors.project_out.register
def _(W: Split, store: Split, room: int, used: int, which: Tensor) -> tuple[Split, Tensor]:
    """One column at a time, by Gram matrices."""
    found, along = vectors.as_block(W), []
    for i, first in enumerate((which * room).tolist()):
        Q, w = vectors.part(store, first, first + used), vectors.part(found, i, i + 1)
        along.append(vectors.gram(Q, w)[:, 0])
        for _ in range(2):
            vectors.axpy(w, Q, -vectors.gram(Q, w))
    return found, torch.stack(along)


def whole(like: Split | Halves) -> Description:
    """What a tensor of the same size would be drawn from, so that results can be compared."""
    rows, columns = like[:2] if isinstance(like, Halves) else (like.shape[0], like.shape[0])
    return Description(rows, columns, like.dtype, like.device)


for _name in ("empty_block", "zero_block", "random_block"):
    _primitive = getattr(vectors, _name)
    for _kind in (Split, Halves):
        _primitive.register(_kind, lambda like, *rest, f=_primitive, **named: split(f(whole(like), *rest, **named)))
