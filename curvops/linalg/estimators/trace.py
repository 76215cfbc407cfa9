"""Estimates of the trace of a matrix known by its products.

>>> import torch
>>> from curvops.linalg import trace
>>> A = torch.diag(torch.arange(1.0, 501.0) ** -2)
>>> estimate = trace(A, rtol=0.01, generator=torch.Generator().manual_seed(0))
>>> low, high = estimate.interval()
>>> estimate.reason.name, bool(low <= A.trace() <= high)
('CONVERGED', True)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from curvops.checks import check_generator
from curvops.linalg.core.entries import known_diagonal
from curvops.linalg.core.probed import BLOCK, Limits, Probed
from curvops.linalg.core.results import Estimate
from curvops.linalg.core.rounding import ROUNDINGS
from curvops.linalg.core.sharded import algorithm
from curvops.linalg.core.vectors import Given, Matrix, as_matrix, describe_square, inner, norm, unit_blocks
from curvops.linalg.estimators.adaptive import Quantity
from curvops.linalg.estimators.carried_gradients import attach_gradient, needs_gradient
from curvops.linalg.estimators.exchangeable import XNysTrace, XTrace
from curvops.linalg.estimators.hutchinson import Hutchinson, HutchPlusPlus
from curvops.progress import Progress

METHODS = ("xtrace", "xnystrace", "hutch++", "hutchinson", "exact")
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
    A = as_matrix(A)
    facts = describe_square(A)
    families: dict[str, Callable[[Probed], TraceEstimator]] = {
        "xtrace": XTrace,
        "xnystrace": XNysTrace,
        "hutch++": HutchPlusPlus,
        "hutchinson": partial(Hutchinson, keep=needs_gradient(A)),
    }
    limits = Limits(rtol, max_matvecs, memory_budget)
    check_generator(generator)
    if method is None and (known := known_diagonal(A)) is not None:
        limits.check(0)
        diagonal, error = known
        return Estimate.rounded(diagonal.double().sum(), error.double().sum(), limits.tolerated)
    method = "xtrace" if method is None else method
    found, family = Quantity(families, _exact).estimate(A, method, limits, generator)

    def pairs(_: Matrix) -> Iterable[tuple[Tensor, Tensor]]:
        """Return blocks L, R with tr X = tr LᵀXR, in expectation or exactly."""
        return ((E, E) for E in unit_blocks(facts, BLOCK)) if family is None else family.functional()

    return attach_gradient(found, A, pairs)


def _exact(probed: Probed) -> Estimate:
    total = torch.zeros(2, dtype=torch.float64, device=probed.facts.device)
    for E in unit_blocks(probed.facts, probed.block):
        Y = probed.multiply(E)
        total = total + torch.stack([inner(E, Y).sum(), norm(Y).sum()])
    rounding = ROUNDINGS * torch.finfo(probed.facts.dtype).eps
    return Estimate.rounded(total[0], rounding * total[1], probed.limits.tolerated, probed.facts.rows)
