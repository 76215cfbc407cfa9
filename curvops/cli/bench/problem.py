"""A problem of the benchmark: a matrix whose products are counted, right-hand sides, and known facts about both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from linear_operator import LinearOperator
from torch import Tensor

from curvops.linalg import Operator
from curvops.linalg.core.vectors import unit_columns
from curvops.linalg.solvers.solve import seems_symmetric

T = TypeVar("T")
EXACT_SIZE = 4000
EIGENVALUES = 5
STRENGTH = {"any": 0, "square": 1, "symmetric": 2, "psd": 3, "damped": 4}
"""Kinds of matrix, each of which includes those after it; "damped" is positive semidefinite plus a known shift."""


class BenchError(ValueError):
    """Raised for a wrong choice of problems or methods; the message is one line with the possible choices."""


class NotApplicableError(ValueError):
    """Raised by a method that does not suit a problem; the message says why."""


@dataclass
class Counter:
    """The number of products with single vectors so far; a block of K counts as K products."""

    count: int = 0


class CountingOperator(Operator):
    """An operator that counts another operator's products in ``counter``, including those of copies in another dtype.

    Its symmetry is determined once: from the tag of a curvops operator, and by two products for other operators.
    """

    def __init__(self, base: LinearOperator, counter: Counter | None = None, symmetric: bool | None = None) -> None:
        if symmetric is None:
            square = base.shape[-1] == base.shape[-2]
            symmetric = base.symmetric if isinstance(base, Operator) else square and seems_symmetric(base)
        super().__init__(base, counter=Counter() if counter is None else counter, symmetric=symmetric)

    @property
    def base(self) -> LinearOperator:
        """The operator whose products are counted."""
        return self._args[0]

    @property
    def counter(self) -> Counter:
        """The number of products so far."""
        return self._kwargs["counter"]

    @property
    def symmetric(self) -> bool:
        return self._kwargs["symmetric"]

    @property
    def psd(self) -> bool:
        return bool(getattr(self.base, "psd", False))

    def _size(self) -> torch.Size:
        return self.base.shape

    def _transpose_nonbatch(self) -> LinearOperator:
        return self if self.symmetric else CountingOperator(self.base.mT, self.counter, symmetric=False)

    def _matmul(self, rhs: Tensor) -> Tensor:
        self.counter.count += 1 if rhs.ndim == 1 else rhs.shape[-1]
        return self.base._matmul(rhs)

    def _t_matmul(self, rhs: Tensor) -> Tensor:
        self.counter.count += 1 if rhs.ndim == 1 else rhs.shape[-1]
        return self.base._t_matmul(rhs)

    def _columns(self, index: Tensor) -> Tensor:
        return self._matmul(unit_columns(index, self.shape[-1], self.dtype))

    def _diagonal(self) -> Tensor:
        self.counter.count += self.diagonal_matvecs
        return self.base._diagonal()


@dataclass(frozen=True, eq=False)
class Problem:
    """A matrix A = G + shift I (m, n) with right-hand sides B (m, K); only square matrices have a shift.

    ``lower`` is a known lower bound of A's spectrum, or 0. ``definite`` is False if A is known to be indefinite; a
    user's matrix counts as definite, since failures are reported with their reason. ``diagonal`` is the diagonal of G
    if it is cheap, ``layers`` its diagonal blocks, ``tensor`` G itself if it is a tensor. ``text`` describes the
    problem in the heading of its table.
    """

    name: str
    text: str
    G: CountingOperator
    shift: float
    B: Tensor
    lower: float = 0.0
    definite: bool = True
    diagonal: Tensor | None = None
    layers: LinearOperator | None = None
    tensor: Tensor | None = None

    @cached_property
    def A(self) -> LinearOperator:
        """The matrix as a counting operator."""
        return self.G.add_diagonal(self.shift) if self.shift else self.G

    @property
    def square(self) -> bool:
        """Whether A is square."""
        return self.G.shape[-1] == self.G.shape[-2]

    @property
    def size(self) -> str:
        """The size of A, for headings."""
        m, n = self.G.shape
        return f"n = {n:,}" if self.square else f"{m:,} × {n:,}"

    @property
    def kind(self) -> str:
        """The kind of A that a method may rely on, a key of `STRENGTH`."""
        if not self.square:
            return "any"
        if not self.G.symmetric:
            return "square"
        if not self.definite:
            return "symmetric"
        return "damped" if self.shift > 0 else "psd"

    def relative_residuals(self, X: Tensor) -> Tensor:
        """Return ‖b − Ax‖/‖b‖ of each column, without counting the products."""
        return self._uncounted(lambda A, B: (B - A._matmul(X)).norm(dim=0), X.dtype) / self._lengths.to(X.dtype)

    def residual(self, X: Tensor, column: int | None = None) -> float:
        """Return the worst ‖b − Ax‖/‖b‖; for least squares the smaller of it and ‖Aᵀr‖/(‖A‖ ‖r‖).

        The products are not counted. X solves for all columns, or for the given one.
        """
        of = slice(None) if column is None else slice(column, column + 1)

        def relative(A: LinearOperator, B: Tensor) -> Tensor:
            r = B[:, of] - A._matmul(X)
            plain = r.norm(dim=0) / self._lengths[of].to(r)
            if self.square:
                return plain
            return torch.minimum(plain, A._t_matmul(r).norm(dim=0) / (self._norm * r.norm(dim=0)))

        return float(self._uncounted(relative, X.dtype).nan_to_num(torch.inf).max())

    @property
    def shown(self) -> str:
        """The name of the residual that `worst` returns, for the axis of a figure."""
        return "worst relative residual" + ("" if self._least is None else " above the least")

    def worst(self, relative: Tensor) -> float:
        """Return the worst relative residual (K,), for least squares above the smallest possible, if known."""
        if self._least is not None:
            relative = (relative.to(self._least).square() - self._least.square()).clamp_min(0).sqrt()
        return float(relative.nan_to_num(torch.inf).max())

    @cached_property
    def _lengths(self) -> Tensor:
        lengths = self.B.norm(dim=0)
        return torch.where(lengths > 0, lengths, 1.0)

    @cached_property
    def _norm(self) -> float:
        """A lower estimate of the norm ‖A‖ by power iteration."""

        def power(A: LinearOperator, B: Tensor) -> float:
            v, size = B[:, :1], 0.0
            for _ in range(30):
                image = A._t_matmul(v / v.norm())
                v, size = A._matmul(image), float(image.norm())
            return size

        return self._uncounted(power, self.B.dtype)

    @cached_property
    def _least(self) -> Tensor | None:
        """The smallest possible relative residuals of a rectangular system; None if it is too large to form."""
        if self.square or self.dense is None:
            return None
        B = self.B.double()
        U, s, _ = torch.linalg.svd(self.dense, full_matrices=False)
        U = U[:, s > len(s) * torch.finfo(self.B.dtype).eps * s[0]]
        return (B - U @ (U.mT @ B)).norm(dim=0) / self._lengths.double()

    def _uncounted(self, of: Callable[[LinearOperator, Tensor], T], dtype: torch.dtype) -> T:
        before = self.G.counter.count
        result = of(self.A if dtype == self.B.dtype else self.A.to(dtype), self.B.to(dtype))
        self.G.counter.count = before
        return result

    @cached_property
    def dense(self) -> Tensor | None:
        """The matrix A in float64, by n products that are not counted; None if it is too large."""
        n = self.G.shape[-1]
        if max(self.G.shape) > EXACT_SIZE:
            return None

        def columns(A: LinearOperator, B: Tensor) -> Tensor:
            eye = torch.eye(n, dtype=B.dtype, device=B.device)
            return torch.cat([A._matmul(part) for part in eye.split(256, dim=1)], 1).double()

        dense = self._uncounted(columns, self.B.dtype)
        return (dense + dense.mT) / 2 if self.G.symmetric else dense

    @cached_property
    def exact(self) -> dict[str, Tensor]:
        """The true value of each quantity that exists and can be computed from the dense matrix."""
        if self.dense is None:
            return {}
        values = {"Frobenius norm": self.dense.norm()}
        if self.square:
            values |= {"trace": self.dense.trace(), "diagonal": self.dense.diagonal()}
        if not self.G.symmetric:
            return values
        spectrum = torch.linalg.eigvalsh(self.dense)
        values["largest eigenvalues"] = spectrum[-EIGENVALUES:].flip(0)
        L, info = torch.linalg.cholesky_ex(self.dense)
        if not bool(info != 0):
            values["logdet"] = 2 * L.diagonal().log().sum()
        if self.kind == "damped":
            values["effective dimension"] = ((spectrum - self.shift).clamp_min(0) / spectrum).sum()
        return values
