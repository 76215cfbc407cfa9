"""The shared base of curvops kernels in gpytorch: parameters with constraints, and matrices that remain operators."""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.constraints import Interval, Positive
from gpytorch.kernels import Kernel
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.priors import Prior
from linear_operator.operators import LinearOperator
from torch import Tensor


class OperatorKernel(Kernel):
    """A gpytorch kernel whose matrices, and their sums with a noise variance, are operators of curvops.

    gpytorch's own sums are solved by conjugate gradients at a tolerance of 1 from 801 rows on; these are not.
    """

    has_lengthscale = False

    def __call__(self, x1: Tensor, x2: Tensor | None = None, diag: bool = False, **params: Any) -> Any:
        """Return the lazy matrix, or its diagonal; see gpytorch's `Kernel.__call__`."""
        found = super().__call__(x1, x2, diag=diag, **params)
        if type(found) is LazyEvaluatedKernelTensor:
            return LazyOperatorKernel(found.x1, found.x2, kernel=self, **params)
        return found

    def _add_parameter(self, name: str, start: Tensor, prior: Prior | None, constraint: Interval | None) -> None:
        """Register a parameter with its initial value; the class has its property, from `_value` and `_set_value`."""
        self.register_parameter(f"raw_{name}", torch.nn.Parameter(torch.zeros_like(start)))
        self.register_constraint(f"raw_{name}", Positive() if constraint is None else constraint)
        if prior is not None:
            self.register_prior(f"{name}_prior", prior, lambda m: getattr(m, name), lambda m, v: setattr(m, name, v))
        setattr(self, name, start)

    def _value(self, name: str) -> Tensor:
        value: Tensor = getattr(self, f"raw_{name}_constraint").transform(getattr(self, f"raw_{name}"))
        return value

    def _set_value(self, name: str, value: Any) -> None:
        raw, constraint = getattr(self, f"raw_{name}"), getattr(self, f"raw_{name}_constraint")
        given = torch.as_tensor(value, dtype=raw.dtype, device=raw.device).expand_as(raw)
        self.initialize(**{f"raw_{name}": constraint.inverse_transform(given)})


def refuse_single_dimensions(last_dim_is_batch: bool) -> None:
    """Raise ValueError if gpytorch requests a kernel of each input dimension."""
    if last_dim_is_batch:
        raise ValueError("last_dim_is_batch makes a kernel of each input dimension; a network takes them together.")


class LazyOperatorKernel(LazyEvaluatedKernelTensor):
    """A kernel matrix that is evaluated on first use; its sums are curvops operators."""

    def __add__(self, other: Any) -> LinearOperator:
        return self.evaluate_kernel() + other

    def add_diagonal(self, diag: Tensor) -> LinearOperator:
        return self.evaluate_kernel().add_diagonal(diag)
