"""What the network's operators share: the weights give dtype and device, and conversion makes a new linearisation."""

from __future__ import annotations

from typing import Any

import torch
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.linalg.base import Operator, convert


class NetworkOperator(Operator):
    """An operator of a linearisation. The first tensor is θ: it gives dtype and device, and its gradient is zero."""

    @property
    def theta(self) -> Tensor:
        """θ*, (D,)."""
        return self._args[0]

    def __add__(self, other: Any) -> LinearOperator:
        if isinstance(other, NetworkOperator):
            require_same_parameters(self, other)
        return super().__add__(other)

    def _matmul(self, rhs: Tensor) -> Tensor:
        return self._attached(super()._matmul(rhs))

    def _t_matmul(self, rhs: Tensor) -> Tensor:
        return self._attached(super()._t_matmul(rhs))

    def _attached(self, result: Tensor) -> Tensor:
        """The result with a zero gradient for θ, where autograd asks for one."""
        if torch.is_grad_enabled() and self.theta.requires_grad:
            return result + 0 * self.theta.sum()
        return result

    def to(self, *args: Any, **kwargs: Any) -> LinearOperator:
        """The operator of a new linearisation in another dtype or on another device."""
        device, dtype = torch._C._nn._parse_to(*args, **kwargs)[:2]
        if (dtype in (None, self.dtype)) and (device in (None, self.device)):
            return self
        hyperparameters = [convert(tensor, device, dtype) for tensor in self._args[1:]]
        return self._converted(hyperparameters, dtype, device)

    def _converted(
        self, hyperparameters: list[Tensor], dtype: torch.dtype | None, device: torch.device | None
    ) -> LinearOperator:
        lin = self._kwargs["lin"].cast(dtype, device)
        return self.__class__(lin.theta, *hyperparameters, lin=lin)


def require_same_parameters(one: NetworkOperator, other: NetworkOperator) -> None:
    """Raise ValueError where two linearisations' parameters differ: their curvatures are of different points."""
    a, b = one._kwargs.get("lin"), other._kwargs.get("lin")
    if a is None or b is None or a is b:
        return
    first, second = a.model.selection, b.model.selection
    if (first.names, first.shapes) != (second.names, second.shapes) or one.theta.shape != other.theta.shape:
        raise ValueError(
            f"the two operators are of different parameters ({len(one.theta)} in {list(first.names)[:4]}… and "
            f"{len(other.theta)} in {list(second.names)[:4]}…); linearise both with the same parameters=."
        )
    if not torch.equal(one.theta, other.theta):
        raise ValueError(
            "the two operators were linearised at different weights, so that their sum is the curvature of neither; "
            "linearise both data sets at one set of weights."
        )
