"""The shared base of curvops kernels in gpytorch: parameters with constraints, matrices that remain operators, points.

Inputs have the form of gpytorch and BoTorch, (..., n, d), and are converted to the form of the network.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from gpytorch import settings
from gpytorch.constraints import Interval, Positive
from gpytorch.kernels import Kernel
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.priors import Prior
from jaxtyping import Float
from linear_operator import to_dense
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.checks import carries_graph, check_kind, check_tensor
from curvops.linalg import Dense, Operator
from curvops.network.data.objects import Objects
from curvops.operators import Linearization
from curvops.summary import name_of

OUTPUTS = ("joint", "independent")
"""How a kernel and a mean treat the network's outputs: as a multi-output process, or as a batch of processes."""


def as_points(lin: Linearization, x: Tensor) -> Tensor:
    """Return the points (..., n, d) as one row of points, each in the shape of the network's input.

    Raises TypeError if x is not a tensor or the network takes several, ValueError if d is not the size of its input.
    """
    few: Any = lin.data.few
    if isinstance(few, Objects):
        raise TypeError(f"a Gaussian process takes rows of numbers, and the data are {few!r}: use post.predict.")
    check_kind("the network's input", few, Tensor, "one tensor: wrap the network in a module that splits it")
    check_tensor("inputs", x)
    shape = few.shape[1:]
    if x.ndim < 2 or x.shape[-1] != math.prod(shape):
        raise ValueError(f"inputs must have shape (..., n, {math.prod(shape)}), a row per point, got {tuple(x.shape)}.")
    points = x.reshape(-1, *shape)
    return points if few.is_floating_point() else points.to(few.dtype)


def own_outputs(values: Float[Tensor, "*b C *rest"], rest: int) -> Float[Tensor, "*b2 C *rest"]:
    """Return each output's values at its own inputs, whose last batch dimension is that of the outputs.

    Inputs without a batch, or with a last batch dimension of 1, are shared by all outputs. Raises ValueError for
    others.
    """
    at = values.ndim - rest - 1
    outputs = values.shape[at]
    if at == 0:
        return values
    if values.shape[at - 1] == 1:
        return values.squeeze(at - 1)
    if values.shape[at - 1] != outputs:
        raise ValueError(f"inputs of {outputs} independent outputs have a last batch dimension of 1 or {outputs}.")
    return values.diagonal(dim1=at - 1, dim2=at).movedim(-1, at - 1)


def same_points(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors hold the same points, so that gradients treat them as one tensor given twice."""
    if x is y or x.shape != y.shape:
        return x is y
    if x._base is not None and x._base is y._base and x.data_ptr() == y.data_ptr() and x.stride() == y.stride():
        return True
    return not carries_graph((x, y)) and torch.equal(x, y)


class OperatorKernel(Kernel):
    """A gpytorch kernel whose matrices, and their sums with a noise variance, are operators of curvops.

    From 801 rows on, gpytorch solves its own sums by conjugate gradients at a tolerance of 1; these it does not.
    """

    has_lengthscale = False
    parameters_by_batch = True
    """Whether each kernel of a batch has its own parameters, which gpytorch indexes."""

    def __call__(self, x1: Tensor, x2: Tensor | None = None, diag: bool = False, **params: Any) -> Any:
        """Return the lazy matrix, or its diagonal; see gpytorch's `Kernel.__call__`."""
        matrix = super().__call__(x1, x2, diag=diag, **params)
        if type(matrix) is LazyEvaluatedKernelTensor:
            return LazyOperatorKernel(matrix.x1, matrix.x2, kernel=self, **params)
        return matrix

    def __add__(self, other: Kernel) -> Kernel:
        return ComposedKernel(super().__add__(other))

    def __mul__(self, other: Kernel) -> Kernel:
        return ComposedKernel(super().__mul__(other))

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
        tensor = torch.as_tensor(value, dtype=raw.dtype, device=raw.device)
        start = constraint.inverse_transform(tensor.expand_as(raw))
        if not bool(start.isfinite().all()):
            raise ValueError(f"{name} must be finite and within its constraint, {constraint}, got {value}.")
        self.initialize(**{f"raw_{name}": start})


class ComposedKernel(OperatorKernel):
    """A gpytorch kernel that is made of others, with matrices that are operators of curvops.

    gpytorch's own sums, products and multiples evaluate as gpytorch's operators, whatever they are made of: with a
    noise variance added, they are solved by conjugate gradients at a tolerance of 1 from 801 rows on. In this class
    they are not. `kernel + other` and `kernel * other` return it if the first one is a kernel of curvops. Wrap in it
    the kernels that gpytorch makes: `ComposedKernel(ScaleKernel(kernel))`, `ComposedKernel(RBFKernel() + kernel)`.

    Cost: the matrices of the parts, which are formed if they are sums or products.

    Args:
        base_kernel: the kernel.

    Raises:
        TypeError: the argument is not a gpytorch kernel.

    Examples:
        >>> from gpytorch.kernels import ScaleKernel
        >>> kernel = co.gp.ComposedKernel(ScaleKernel(co.gp.LinearizedKernel(lin, outputs="independent")))
        >>> kernel(x).shape
        torch.Size([2, 8, 8])
    """

    def __init__(self, base_kernel: Kernel) -> None:
        super().__init__()
        check_kind("base_kernel", base_kernel, Kernel, "a kernel of gpytorch")
        self.base_kernel = base_kernel

    def num_outputs_per_input(self, x1: Tensor, x2: Tensor) -> Any:
        """Return the number of the kernel's outputs."""
        return self.base_kernel.num_outputs_per_input(x1, x2)

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> LinearOperator | Tensor:
        """Return the kernel's matrix, or its diagonal."""
        with settings.lazily_evaluate_kernels(False):
            matrix = self.base_kernel(x1, x2, diag=diag, **params)
        if diag or (isinstance(matrix, Operator) and not isinstance(matrix, Dense)):
            return matrix
        return Dense(to_dense(matrix), psd=same_points(x1, x2))

    def __getitem__(self, index: Any) -> Kernel:
        return ComposedKernel(self.base_kernel[index])


class LazyOperatorKernel(LazyEvaluatedKernelTensor):
    """A kernel matrix that is evaluated on first use; its sums are curvops operators."""

    def __repr__(self) -> str:
        size = " × ".join(map(str, self.shape))
        return f"{type(self).__name__}({size}, of {type(self.kernel).__name__}, {name_of(self.dtype)}, {self.device})"

    def __add__(self, other: Any) -> LinearOperator:
        return self.evaluate_kernel() + other

    def add_diagonal(self, diag: Tensor) -> LinearOperator:
        return self.evaluate_kernel().add_diagonal(diag)

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        shared = self.kernel.batch_shape and not self.kernel.parameters_by_batch
        if shared and any(index != slice(None) for index in batch_indices):
            return self.evaluate_kernel()._getitem(row_index, col_index, *batch_indices)
        return super()._getitem(row_index, col_index, *batch_indices)
