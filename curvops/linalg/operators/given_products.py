"""A matrix known by a function or by a SciPy LinearOperator, as an operator.

>>> import torch
>>> from curvops.linalg import as_operator, cg, trace
>>> decay = torch.arange(1.0, 6.0)
>>> A = as_operator(lambda v: decay * v, like=torch.ones(5))
>>> cg(A, torch.ones(5)).x
tensor([1.0000, 0.5000, 0.3333, 0.2500, 0.2000])
>>> trace(A, method="exact").value
tensor(15., dtype=torch.float64)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor, nn

from curvops.checks import check_like, check_shape, check_tensor
from curvops.linalg.core.vectors import as_matrix, describe
from curvops.linalg.operators.base import Operator
from curvops.linalg.operators.dense import Dense

NO_ADJOINT = "this call, lsmr for example, needs products with Aᵀ"


class GivenProducts(Operator):
    """A matrix known by its products alone; made by `as_operator`.

    Args:
        like: a tensor of its dtype, on its device.
        size: its size (m, n).
        multiply: the function V (n, K) -> A V.
        adjoint: the function U (m, K) -> Aᵀ U; None if it is not known.
        vectors: whether the functions take vectors (n,), a column at a time.
    """

    def __init__(
        self,
        like: Tensor,
        *,
        size: tuple[int, int],
        multiply: Callable[[Tensor], Any],
        adjoint: Callable[[Tensor], Any] | None = None,
        vectors: bool = False,
    ) -> None:
        super().__init__(like, size=size, multiply=multiply, adjoint=adjoint, vectors=vectors)

    def _size(self) -> torch.Size:
        return torch.Size(self._kwargs["size"])

    def _product(self, block: Float[Tensor, "n K"]) -> Float[Tensor, "m K"]:
        multiply, rows = self._kwargs["multiply"], self.shape[0]
        if self._kwargs["vectors"]:
            return torch.stack([_checked(multiply(v), v, rows) for v in block.unbind(1)], 1)
        return _checked(multiply(block), block, rows)

    def _transposed_product(self, block: Float[Tensor, "m K"]) -> Float[Tensor, "n K"]:
        adjoint = self._kwargs["adjoint"]
        if adjoint is None:
            raise TypeError(f"{NO_ADJOINT}: pass a SciPy LinearOperator with an rmatvec, or a subclass of Operator.")
        return _checked(adjoint(block), block, self.shape[1])


def _checked(image: Any, argument: Tensor, rows: int) -> Tensor:
    """Return the result of a function; raise TypeError or ValueError if it is not what a product with `given` is."""
    check_tensor("the result of the function of A", image)
    check_shape("the result of the function of A", image, (rows, *argument.shape[1:]))
    check_like("the result of the function of A", image, argument, "its argument")
    return image


def as_operator(A: Any, like: Tensor | None = None) -> LinearOperator:
    """Make an operator of a matrix known by a function V -> A V, by a SciPy LinearOperator, or by its entries.

    The solvers and the functions of a matrix (`cg`, `minres`, `solve`, `apply_function`, ...) call this with their
    right-hand sides. Products of a SciPy operator pass through NumPy, on the CPU. No gradient passes through either.
    A tensor (m, n) becomes a `Dense`; operators are returned as they are.

    Args:
        A: a function, for a square matrix; or a `scipy.sparse.linalg.LinearOperator` of any shape, whose
            ``rmatvec`` or ``rmatmat`` serves those who need Aᵀ (`lsmr`, `svds`); or a matrix, as a tensor or an
            operator.
        like: a vector (n,) or a block (n, K), which gives size, dtype and device, and says what the function takes:
            vectors, or blocks of any number of columns. A SciPy operator has its own shape,
            and without ``like`` its own dtype (float64 if that is not a floating-point dtype), on the CPU.

    Returns:
        The operator. The symmetry of products is not known: `cg` takes the caller's word, `solve` tests it.

    Raises:
        TypeError: A is none of these, is complex, or is a function without ``like``.
        ValueError: A is a tensor that is not a matrix.

    Examples:
        >>> A = co.linalg.as_operator(lambda V: 2 * V, like=torch.ones(3))
        >>> A.shape, co.linalg.solve(A, torch.ones(3))
        (torch.Size([3, 3]), tensor([0.5000, 0.5000, 0.5000]))
    """
    if isinstance(A, type | nn.Module) or hasattr(A, "jacobian") or not callable(A):
        describe(A)  # raises an error that says what a matrix is, unless A is one
        return Dense(A) if isinstance(A, Tensor) else A
    if like is not None:
        check_tensor("B or like", like)
    if not hasattr(A, "rmatmat"):
        if like is None:
            raise TypeError("the size of a function's matrix is unknown: as_operator(function, like=v).")
        rows = like.shape[-2] if like.ndim > 1 else len(like)
        return GivenProducts(like.detach().new_empty(0), size=(rows, rows), multiply=A, vectors=like.ndim == 1)
    kind = np.dtype(A.dtype or float)
    if kind.kind == "c":
        raise TypeError(f"A must have a real floating-point dtype, got {kind}.")
    dtype = torch.float32 if kind == np.float32 else torch.float64
    empty = torch.empty(0, dtype=dtype) if like is None else like.detach().new_empty(0)

    def adjoint(block: Any) -> Any:
        try:
            return A.rmatmat(block)
        except (NotImplementedError, TypeError) as error:  # SciPy calls None if there is no rmatvec
            raise TypeError(f"{NO_ADJOINT}: give the SciPy LinearOperator an rmatvec.") from error

    size = int(A.shape[0]), int(A.shape[1])
    return GivenProducts(empty, size=size, multiply=_through_numpy(A.matmat), adjoint=_through_numpy(adjoint))


as_matrix.register(cast("type[Any]", Callable), as_operator)  # SciPy's operators can be called, too


def _through_numpy(multiply: Callable[[Any], Any]) -> Callable[[Tensor], Tensor]:
    return lambda block: torch.as_tensor(multiply(block.detach().cpu().numpy())).to(block)
