"""A problem: a matrix whose products are counted, right-hand sides, and what is known of both beforehand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from linear_operator import LinearOperator
from torch import Tensor

from curvops.cli.bench.counted import Counted

T = TypeVar("T")
EXACT_SIZE = 4000
EIGENVALUES = 5
STRENGTH = {"any": 0, "square": 1, "symmetric": 2, "psd": 3, "damped": 4}
"""What a matrix may be, each kind being also all before it; "damped" is positive semidefinite plus a known shift."""


class BenchError(ValueError):
    """What was asked for cannot be run; the message is one line with the choices."""


class Unfit(ValueError):
    """A method cannot be tried on this problem; the message says why."""


@dataclass(frozen=True, eq=False)
class Problem:
    """A = G + shift I (m, n), right-hand sides B (m, K), and what is known beforehand. Only square A has a shift.

    ``lower`` is a known lower bound of A's spectrum, 0 for none. ``definite`` is False where A is known to be
    indefinite: of a user's matrix one may hope, since failures come with their reason. ``diagonal`` is G's where it is
    cheap, ``layers`` its diagonal blocks, ``tensor`` G itself where it is one. ``text`` says what it is, for the
    table's heading.
    """

    name: str
    text: str
    G: Counted
    shift: float
    B: Tensor
    lower: float = 0.0
    definite: bool = True
    diagonal: Tensor | None = None
    layers: LinearOperator | None = None
    tensor: Tensor | None = None

    @cached_property
    def A(self) -> LinearOperator:
        """The matrix itself."""
        return self.G.add_diagonal(self.shift) if self.shift else self.G

    @property
    def square(self) -> bool:
        """Whether A is."""
        return self.G.shape[-1] == self.G.shape[-2]

    @property
    def size(self) -> str:
        """A's size, for headings."""
        m, n = self.G.shape
        return f"n = {n:,}" if self.square else f"{m:,} × {n:,}"

    @property
    def kind(self) -> str:
        """What a method may rely on: a key of `STRENGTH`."""
        if not self.square:
            return "any"
        if not self.G.symmetric:
            return "square"
        if not self.definite:
            return "symmetric"
        return "damped" if self.shift > 0 else "psd"

    def relative_residuals(self, X: Tensor) -> Tensor:
        """‖b − Ax‖/‖b‖ of each column, not counted."""
        return self._uncounted(lambda A, B: (B - A._matmul(X)).norm(dim=0), X.dtype) / self._lengths.to(X.dtype)

    def residual(self, X: Tensor, column: int | None = None) -> float:
        """The worst ‖b − Ax‖/‖b‖, not counted; of least squares the lesser of it and ‖Aᵀr‖/(‖A‖ ‖r‖).

        X solves for all columns, or for this one.
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
        """What `worst` returns, for the axis of a figure."""
        return "worst relative residual" + ("" if self._least is None else " above the least")

    def worst(self, relative: Tensor) -> float:
        """The worst of relative residuals (K,); of least squares how far it is above the least there is, if known."""
        if self._least is not None:
            relative = (relative.to(self._least).square() - self._least.square()).clamp_min(0).sqrt()
        return float(relative.nan_to_num(torch.inf).max())

    @cached_property
    def _lengths(self) -> Tensor:
        lengths = self.B.norm(dim=0)
        return torch.where(lengths > 0, lengths, 1.0)

    @cached_property
    def _norm(self) -> float:
        """‖A‖ by power iteration, from below."""

        def power(A: LinearOperator, B: Tensor) -> float:
            v, size = B[:, :1], 0.0
            for _ in range(30):
                image = A._t_matmul(v / v.norm())
                v, size = A._matmul(image), float(image.norm())
            return size

        return self._uncounted(power, self.B.dtype)

    @cached_property
    def _least(self) -> Tensor | None:
        """The least relative residuals of a rectangular system, None where the dense matrix is too large."""
        if self.square or self.dense is None:
            return None
        B = self.B.double()
        U, s, _ = torch.linalg.svd(self.dense, full_matrices=False)
        U = U[:, s > len(s) * torch.finfo(self.B.dtype).eps * s[0]]
        return (B - U @ (U.mT @ B)).norm(dim=0) / self._lengths.double()

    def _uncounted(self, of: Callable[[LinearOperator, Tensor], T], dtype: torch.dtype) -> T:
        before = self.G.counter.count
        found = of(self.A if dtype == self.B.dtype else self.A.to(dtype), self.B.to(dtype))
        self.G.counter.count = before
        return found

    @cached_property
    def dense(self) -> Tensor | None:
        """A in float64 by n products that are not counted, None where it is too large."""
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
        """What estimators estimate, by the dense matrix; what exists and could be computed."""
        if self.dense is None:
            return {}
        found = {"Frobenius norm": self.dense.norm()}
        if self.square:
            found |= {"trace": self.dense.trace(), "diagonal": self.dense.diagonal()}
        if not self.G.symmetric:
            return found
        values = torch.linalg.eigvalsh(self.dense)
        found["largest eigenvalues"] = values[-EIGENVALUES:].flip(0)
        L, info = torch.linalg.cholesky_ex(self.dense)
        if not bool(info != 0):
            found["logdet"] = 2 * L.diagonal().log().sum()
        if self.kind == "damped":
            found["effective dimension"] = ((values - self.shift).clamp_min(0) / values).sum()
        return found
