"""An estimate's gradient for the tensors inside A: that of a sum of lᵀ A r over pairs of vectors held fixed.

For tr A the pairs are the probes; for log det A they are A⁻¹z and z, so that d log det A = tr(A⁻¹ dA) is estimated
with the probes and solves of the value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from curvops.linalg.core.results import Estimate, accept
from curvops.linalg.core.vectors import Matrix, Vectors
from curvops.linalg.preconditioners.factored import FactoredPreconditioner
from curvops.linalg.solvers.cg import cg
from curvops.linalg.solvers.systems import shifted

SOLVE_RTOL = 1e-6
Pairs = Callable[[Matrix], Iterable[tuple[Tensor, Tensor]]]


def differentiated(A: Matrix) -> bool:
    """Whether a gradient for a tensor inside A is asked for."""
    tensors = (A,) if isinstance(A, Tensor) else A.representation()
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def carried(estimate: Estimate, A: Matrix, pairs: Pairs) -> Estimate:
    """The estimate, its value carrying d value = Σ lᵀ dA r over the blocks (l, r) that ``pairs(A)`` gives.

    ``pairs`` is called in the backward pass, if there is one.
    """
    if not differentiated(A):
        return estimate
    if isinstance(A, Tensor):
        value = _Carried.apply(estimate.value, None, pairs, A)  # type: ignore[no-untyped-call]
    else:
        tree, tensors = A.representation_tree(), A.representation()
        value = _Carried.apply(estimate.value, tree, pairs, *tensors)  # type: ignore[no-untyped-call]
    return replace(estimate, value=value)


def solved_pairs(solves: list[tuple[Vectors, Vectors]], P: FactoredPreconditioner | None, shift: float) -> Pairs:
    """Pairs for (A + shift I)⁻¹ from probes z of Lanczos runs and (P^-½(A + shift I)P^-½)⁻¹z as far as they reach.

    With l = (A + shift I)⁻¹P^½z and r = P^-½z, E l rᵀ = (A + shift I)⁻¹. Conjugate gradients go on from what Lanczos
    found, to a relative residual of 1e-6, in the backward pass.

    Raises:
        NotConverged: there, where a solve fails.
    """

    def pairs(A: Matrix) -> Iterator[tuple[Tensor, Tensor]]:
        total = sum(signs.shape[1] for signs, _ in solves)
        base = shifted(A.detach(), shift)
        for signs, guess in solves:
            Z = signs.to(guess.dtype)
            right, target, start = Z, Z, guess
            if P is not None:
                right, target, start = P.sqrt_inverse(Z), P.sqrt(Z), P.sqrt_inverse(guess)
            left = accept(cg(base, target, x0=start, preconditioner=P, rtol=SOLVE_RTOL), SOLVE_RTOL)
            yield left / total, right

    return pairs


class _Carried(Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, tree: Any, pairs: Pairs, *tensors: Tensor) -> Tensor:
        ctx.tree, ctx.pairs = tree, pairs
        ctx.save_for_backward(*tensors)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        A = tensors[0] if ctx.tree is None else ctx.tree(*tensors)
        total: list[Tensor | None] = [None] * len(tensors)
        for left, right in ctx.pairs(A):
            weighted = left * gradient.to(left)
            parts = (weighted @ right.mT,) if ctx.tree is None else A._bilinear_derivative(weighted, right)
            total = [new if old is None else old if new is None else old + new for old, new in zip(total, parts)]
        return (None, None, None, *total)
