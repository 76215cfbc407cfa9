"""The gradient of an estimate for the tensors inside A, as the gradient of Σ lᵀ A r over pairs of fixed vectors.

For tr A the pairs are the probes. For log det A they are A⁻¹z and z, so that d log det A = tr(A⁻¹ dA) is estimated with
the probes and solves of the value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.autograd import Function

from curvops.checks import carries_graph
from curvops.linalg.core.cache import require_first_derivative
from curvops.linalg.core.results import Estimate, accept
from curvops.linalg.core.vectors import Matrix, Vectors
from curvops.linalg.preconditioners.factored import FactoredPreconditioner
from curvops.linalg.solvers.cg import cg
from curvops.linalg.solvers.systems import shifted

VectorPairs = Callable[[Matrix], Iterable[tuple[Tensor, Tensor]]]


def needs_gradient(A: Matrix) -> bool:
    """Return whether a gradient for a tensor inside A is needed."""
    return carries_graph((A,) if isinstance(A, Tensor) else A.representation())


def attach_gradient(estimate: Estimate, A: Matrix, pairs: VectorPairs) -> Estimate:
    """Attach to the estimate's value the gradient d value = Σ lᵀ dA r over the blocks of ``pairs(A)``.

    ``pairs`` returns blocks (l, r); it is called in the backward pass, if there is one.
    """
    if not needs_gradient(A):
        return estimate
    if isinstance(A, Tensor):
        value = _WithGradient.apply(estimate.value, None, pairs, A)  # type: ignore[no-untyped-call]
    else:
        tree, tensors = A.representation_tree(), A.representation()
        value = _WithGradient.apply(estimate.value, tree, pairs, *tensors)  # type: ignore[no-untyped-call]
    return replace(estimate, value=value)


def solve_pairs(solves: list[tuple[Vectors, Vectors]], P: FactoredPreconditioner | None, shift: float) -> VectorPairs:
    """Make pairs for (A + shift I)⁻¹ from Lanczos probes z and the solves of z that Lanczos reached.

    With l = (A + shift I)⁻¹P^½z and r = P^-½z, E l rᵀ = (A + shift I)⁻¹. Lanczos approximates (P^-½(A + shift
    I)P^-½)⁻¹z; in the backward pass, conjugate gradients continue from there to a relative residual of 1e-6.

    Raises:
        ConvergenceError: a solve fails, in the backward pass.
    """

    def pairs(A: Matrix) -> Iterator[tuple[Tensor, Tensor]]:
        total = sum(signs.shape[1] for signs, _ in solves)
        base, rtol = shifted(A.detach(), shift), 1e-6
        for signs, guess in solves:
            Z = signs.to(guess.dtype)
            right, target, start = Z, Z, guess
            if P is not None:
                right, target, start = P.sqrt_inverse(Z), P.sqrt(Z), P.sqrt_inverse(guess)
            left = accept(cg(base, target, x0=start, preconditioner=P, rtol=rtol), rtol)
            yield left / total, right

    return pairs


class _WithGradient(Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, tree: Any, pairs: VectorPairs, *tensors: Tensor) -> Tensor:
        ctx.tree, ctx.pairs = tree, pairs
        ctx.save_for_backward(*tensors)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        require_first_derivative()
        tensors = ctx.saved_tensors
        A = tensors[0] if ctx.tree is None else ctx.tree(*tensors)
        total: list[Tensor | None] = [None] * len(tensors)
        for left, right in ctx.pairs(A):
            weighted = left * gradient.to(left)
            parts = (weighted @ right.mT,) if ctx.tree is None else A._bilinear_derivative(weighted, right)
            total = [new if old is None else old if new is None else old + new for old, new in zip(total, parts)]
        return (None, None, None, *total)
