"""Estimates of the trace of a matrix known by its products, and the gradient of an estimate.

The gradient for the tensors inside A is that of Σ lᵀ A r over pairs of fixed vectors. For tr A the pairs are the
probes. For log det A they are A⁻¹z and z (`logdet`), so that d log det A = tr(A⁻¹ dA) is estimated with the probes and
solves of the value.

>>> import torch
>>> from curvops.linalg import trace
>>> A = torch.diag(torch.arange(1.0, 501.0) ** -2)
>>> estimate = trace(A, rtol=0.01, generator=torch.Generator().manual_seed(0))
>>> low, high = estimate.interval()
>>> estimate.reason.name, bool(low <= A.trace() <= high)
('CONVERGED', True)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function

from curvops.ambient import Progress
from curvops.checks import carries_graph, check_options
from curvops.linalg.core import vectors as vec
from curvops.linalg.core.algorithm import algorithm
from curvops.linalg.core.cache import require_first_derivative
from curvops.linalg.core.probed import PROBES_AT_ONCE, Limits, Probed, estimate
from curvops.linalg.core.results import Estimate, Reason, caution
from curvops.linalg.core.vectors import Given, Matrix
from curvops.linalg.estimators.diagonal import exact_diagonal
from curvops.linalg.estimators.exchangeable import RangeSketch, XNysTrace, XTrace

VectorPairs = Callable[[Matrix], Iterable[tuple[Tensor, Tensor]]]
"""The pairs (l, r) of the gradient, by blocks, for the matrix A in the backward pass."""
METHODS = ("xtrace", "xnystrace", "hutch++", "hutchinson", "exact")


def sample_mean(samples: Tensor, matvecs: int, offset: Tensor | float = 0.0, bias: Tensor | float = 0.0) -> Estimate:
    """Return a known part plus the mean of independent samples, with its standard error."""
    stderr = samples.std() / math.sqrt(len(samples))
    value, k = offset + samples.mean(), len(samples)
    return Estimate(value, stderr, k, matvecs, bias, Reason.BUDGET_SPENT, widening=caution(k))


class Hutchinson:
    """The mean of zᵀAz over random signs, streamed: only the numbers are kept (Hutchinson 1990)."""

    least, first, held = 2, PROBES_AT_ONCE, 0.0

    def __init__(self, probed: Probed, keep: bool = False) -> None:
        self.probed = probed
        self.samples = torch.zeros(0, dtype=torch.float64, device=probed.facts.device)
        self.signs: list[Tensor] | None = [] if keep else None

    def spend(self, matvecs: int) -> None:
        """Spend one product per probe."""
        for Z in self.probed.stream(matvecs - len(self.samples)):
            self.samples = torch.cat([self.samples, self.sample(Z, self.probed.multiply(Z))])
            if self.signs is not None:
                self.signs.append(Z.to(torch.int8))

    def sample(self, Z: Tensor, Y: Tensor) -> Float[Tensor, " k"]:
        """Return the samples of probes Z with products Y."""
        return vec.inner(Z, Y)

    def estimate(self) -> Estimate:
        """Return mean and standard error of the samples."""
        return sample_mean(self.samples, len(self.samples))

    def functional(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield blocks L, R with E tr LᵀXR = tr X; the probes must have been kept."""
        assert self.signs is not None
        for signs in self.signs:
            Z = signs.to(self.probed.facts.dtype)
            yield Z / len(self.samples), Z


class HutchPlusPlus:
    """Hutch++: tr QᵀAQ exactly, and Hutchinson's estimator on the complement of Q (Meyer et al. 2021).

    The sketch, A Q and the residual probes each take a third of the products. When the sketch grows, the products of
    the residual are updated by a downdate with A Q.
    """

    least, first, held = 6, 16, 2.0

    def __init__(self, probed: Probed) -> None:
        self.probed, self.sketch = probed, RangeSketch(probed, "signs")
        self.G = self.AG = vec.empty_block(probed.facts, 0)

    @property
    def matvecs(self) -> int:
        """Products spent."""
        return self.sketch.matvecs + self.G.shape[1]

    def spend(self, matvecs: int) -> None:
        """Spend a third of the products on each part."""
        before = self.sketch.columns
        self.sketch.grow(matvecs // 3)
        new = slice(before, self.sketch.columns)
        if self.G.shape[1]:
            overlap = vec.gram(self.sketch.Q[:, new], self.G)
            self.G = vec.axpy(self.G, self.sketch.Q[:, new], -overlap)
            self.AG = vec.axpy(self.AG, self.sketch.Z[:, new], -overlap)
        missing = matvecs - self.matvecs
        if missing > 0:
            G = self.probed.probes(missing)
            G = vec.axpy(G, self.sketch.Q, -vec.gram(self.sketch.Q, G))
            self.G, self.AG = vec.join(self.G, G), vec.join(self.AG, self.probed.multiply(G))

    def estimate(self) -> Estimate:
        """Return the exact part plus the mean of the samples; the bias bound is rounding."""
        in_range = vec.inner(self.sketch.Q, self.sketch.Z).sum()
        rounding = math.sqrt(self.probed.facts.rows) * torch.finfo(self.probed.facts.dtype).eps
        bias = rounding * vec.norm(self.sketch.Z).square().sum().sqrt()
        return sample_mean(vec.inner(self.G, self.AG), self.matvecs, in_range, bias)

    def functional(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield blocks L, R with E tr LᵀXR = tr X."""
        yield self.sketch.Q, self.sketch.Q
        yield self.G / self.G.shape[1], self.G


TraceEstimator: TypeAlias = XTrace | XNysTrace | HutchPlusPlus | Hutchinson


@algorithm
def trace(
    A: Matrix | Given,
    *,
    method: str | None = None,
    rtol: float | None = None,
    max_matvecs: int | None = None,
    generator: torch.Generator | None = None,
    memory_budget: int | None = None,
    progress: Progress = None,
) -> Estimate:
    """Estimate tr A from products; of an operator that knows its diagonal, return the exact trace without any.

    `A.trace()` is the same for an operator of curvops.

    Args:
        A: (n, n); it need not be symmetric. The value carries gradients for the tensors inside A.
        method: None uses the diagonal of an operator if it is known, otherwise "xtrace". A name requests an estimate:
            "xtrace" (any A, two products per probe); "xnystrace" (positive semidefinite A, one product per probe,
            the most accurate if the spectrum decays); "hutch++"; "hutchinson" (streams: no vector is kept; as good
            as any on a flat spectrum); "exact" (n products, no error).
        rtol: add probes until the error bar is at most rtol times the estimate; earlier products are kept.
        max_matvecs: the budget. Without rtol all of it is spent, 128 by default, and n or more give the exact trace;
            with rtol it is a limit, by default none, and the exact trace is computed if growth reaches n products.
        generator: the source of the probes.
        memory_budget: bytes for the blocks that all methods but Hutchinson keep; ``reason`` says whether it limited
            the accuracy.
        progress: as in `cg`.

    Returns:
        An Estimate of tr A, a number.

    Raises:
        ValueError: the method is unknown, A is not square, a product is not finite, or the budget is too small for an
            error bar (4 products; 2 for xnystrace and hutchinson, 6 for hutch++).
        NotPositiveSemidefiniteError: xnystrace found an eigenvalue clearly below zero (it is also a ValueError).

    Source: Epperly, Tropp & Webber 2024; Meyer et al. 2021; Hutchinson 1990.

    Examples:
        >>> A = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
        >>> float(co.linalg.trace(A))
        5.0
    """
    A = vec.as_matrix(A)
    facts = vec.describe_square(A)
    check_options(rtol=rtol, max_matvecs=max_matvecs, generator=generator)
    if method is None and (exact := vec.known_diagonal(A)) is not None:
        diagonal, error = exact
        return Estimate.rounded(diagonal.double().sum(), error.double().sum(), rtol)
    families: dict[str, Callable[[Probed], TraceEstimator]] = {
        "xtrace": XTrace,
        "xnystrace": XNysTrace,
        "hutch++": HutchPlusPlus,
        "hutchinson": partial(Hutchinson, keep=needs_gradient(A)),
    }
    method = "xtrace" if method is None else method
    value, family = estimate(A, method, families, _exact, Limits(rtol, max_matvecs), generator)

    def pairs(_: Matrix) -> Iterable[tuple[Tensor, Tensor]]:
        """Return blocks L, R with tr X = tr LᵀXR, in expectation or exactly."""
        return ((E, E) for E in vec.unit_blocks(facts, PROBES_AT_ONCE)) if family is None else family.functional()

    return attach_gradient(value, A, pairs)


def _exact(probed: Probed) -> Estimate:
    entries = exact_diagonal(probed)
    error = torch.as_tensor(entries.bias_bound).double().sum()
    return Estimate.rounded(entries.value.double().sum(), error, probed.limits.rtol, probed.facts.rows)


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
