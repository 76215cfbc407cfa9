"""An operator that counts the vectors it multiplies, for methods of any library."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from linear_operator import LinearOperator
from torch import Tensor

from curvops.linalg import Operator
from curvops.linalg.solvers.solve import seems_symmetric


@dataclass
class Counter:
    """Products with single vectors so far; a block of K counts K, and so do K columns."""

    count: int = 0


class Counted(Operator):
    """The same matrix, counting its products in ``counter``, which copies in another dtype share.

    Whether it is symmetric is asked once: of operators of ours, and by two products of others.
    """

    def __init__(self, base: LinearOperator, counter: Counter | None = None, symmetric: bool | None = None) -> None:
        if symmetric is None:
            square = base.shape[-1] == base.shape[-2]
            symmetric = base.symmetric if isinstance(base, Operator) else square and seems_symmetric(base)
        super().__init__(base, counter=Counter() if counter is None else counter, symmetric=symmetric)

    @property
    def base(self) -> LinearOperator:
        """The operator that is counted."""
        return self._args[0]

    @property
    def counter(self) -> Counter:
        """Where the products are counted."""
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
        return self if self.symmetric else Counted(self.base.mT, self.counter, symmetric=False)

    def _matmul(self, rhs: Tensor) -> Tensor:
        self.counter.count += 1 if rhs.ndim == 1 else rhs.shape[-1]
        return self.base._matmul(rhs)

    def _t_matmul(self, rhs: Tensor) -> Tensor:
        self.counter.count += 1 if rhs.ndim == 1 else rhs.shape[-1]
        return self.base._t_matmul(rhs)

    def _columns(self, index: Tensor) -> Tensor:
        units = torch.zeros(len(index), self.shape[-1], dtype=self.dtype, device=self.device)
        return self._matmul(units.scatter_(1, index.unsqueeze(1), 1.0).mT)

    def _diagonal(self) -> Tensor:
        self.counter.count += self.diagonal_matvecs
        return self.base._diagonal()
