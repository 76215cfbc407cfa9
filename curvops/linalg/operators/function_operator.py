"""A function that multiplies vectors, or an operator of SciPy, as an operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from linear_operator import LinearOperator
from torch import Tensor

from curvops.linalg.core.sharded import adapted
from curvops.linalg.core.vectors import Matrix
from curvops.linalg.operators.base import Operator


class FunctionOperator(Operator):
    """A matrix known by a function; `like` (0,) has its dtype and device. Made by `as_operator`."""

    def __init__(
        self,
        like: Tensor,
        *,
        function: Callable[[Tensor], Tensor],
        transposed: Callable[[Tensor], Tensor] | None,
        size: torch.Size,
        vectors: bool,
    ) -> None:
        super().__init__(like, function=function, transposed=transposed, size=size, vectors=vectors)

    def _size(self) -> torch.Size:
        size: torch.Size = self._kwargs["size"]
        return size

    def _product(self, block: Tensor) -> Tensor:
        return self._applied(self._kwargs["function"], block, self.shape[0])

    def _transposed_product(self, block: Tensor) -> Tensor:
        if self._kwargs["transposed"] is None:
            raise TypeError(
                "a function multiplies by A alone, and this algorithm multiplies by Aᵀ, too: pass a "
                "scipy.sparse.linalg.LinearOperator with matvec and rmatvec, or a subclass of co.linalg.Operator."
            )
        return self._applied(self._kwargs["transposed"], block, self.shape[1])

    def _applied(self, function: Callable[[Tensor], Tensor], block: Tensor, rows: int) -> Tensor:
        given = block.unbind(1) if self._kwargs["vectors"] else [block]
        results = [function(each) for each in given]
        for each, result in zip(given, results):
            expected = (rows, *each.shape[1:])
            if not isinstance(result, Tensor) or result.shape != expected or result.dtype != block.dtype:
                what = f"{result.dtype} {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
                raise ValueError(
                    f"the function returned {what} for a tensor {tuple(each.shape)}, expected {block.dtype} {expected}."
                )
        return torch.stack(results, 1) if self._kwargs["vectors"] else results[0]


def as_operator(A: Any, like: Tensor | None = None) -> Matrix:
    """Return a function V -> A V, or a `scipy.sparse.linalg.LinearOperator`, as an operator.

    Solvers take both as they are, since their right-hand side says what size a function has; estimators and spectra
    take what this function returns.

    Args:
        A: a function, an operator of SciPy (its products copy vectors to the CPU and back), a tensor or a
            LinearOperator; the last two are returned as they are.
        like: a vector (n,) for a square matrix known by a function on vectors, a block (n, K) for a function on blocks
            of any number of columns. Size, dtype and device are those of ``like``. An operator of SciPy needs none,
            and has its own dtype on the CPU without it.

    Returns:
        The operator. It costs one call of the function a block, or a vector.

    Raises:
        TypeError: A is none of these, or a function without ``like``.

    Example:
        >>> import torch, curvops as co
        >>> A = co.linalg.as_operator(lambda v: 2 * v, like=torch.zeros(50, dtype=torch.float64))
        >>> round(float(co.linalg.trace(A).value), 6)
        100.0
    """
    if isinstance(A, Tensor | LinearOperator):
        return A
    if hasattr(A, "matmat") and hasattr(A, "rmatmat"):
        dtype = torch.from_numpy(np.empty(0, A.dtype)).dtype if like is None else like.dtype
        device = torch.device("cpu") if like is None else like.device
        size, forward, transposed = torch.Size(A.shape), _of_arrays(A.matmat), _of_arrays(A.rmatmat)
        empty = torch.empty(0, dtype=dtype, device=device)
        return FunctionOperator(empty, function=forward, transposed=transposed, size=size, vectors=False)
    if not callable(A) or isinstance(A, type | torch.nn.Module):
        raise TypeError(
            "A must be a tensor, a linear_operator.LinearOperator, a scipy.sparse.linalg.LinearOperator or a function "
            f"V -> A V, got {type(A).__name__}."
        )
    if like is None:
        raise TypeError(
            "a function does not say its size: pass co.linalg.as_operator(function, like=v), with a vector (n,) or a "
            "block (n, K) such as the function takes."
        )
    size = torch.Size((len(like), len(like)))
    return FunctionOperator(like.new_empty(0), function=A, transposed=None, size=size, vectors=like.ndim == 1)


def _of_arrays(multiply: Callable[[Any], Any]) -> Callable[[Tensor], Tensor]:
    """Return a product on NumPy arrays as one on tensors."""
    return lambda block: torch.as_tensor(multiply(block.detach().cpu().numpy()), dtype=block.dtype, device=block.device)


@adapted.register(object)
def _(A: Any, like: Any) -> Any:
    is_function = callable(A) and not isinstance(A, type | torch.nn.Module)
    if isinstance(A, Tensor | LinearOperator) or not (is_function or hasattr(A, "rmatmat")):
        return A  # whatever else it is, the algorithm says so
    return as_operator(A, like if isinstance(like, Tensor) and like.ndim in (1, 2) else None)
