"""The trace of a matrix known by its products.

>>> import torch
>>> from curvops.linalg import trace
>>> A = torch.diag(torch.arange(1.0, 501.0) ** -2)
>>> estimate = trace(A, rtol=0.01, generator=torch.Generator().manual_seed(0))
>>> low, high = estimate.interval()
>>> estimate.reason.name, bool(low <= A.trace() <= high)
('CONVERGED', True)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor

from curvops.linalg.core.limits import check_choice
from curvops.linalg.core.memory import working
from curvops.linalg.core.results import Estimate
from curvops.linalg.core.vectors import Description, Matrix, describe_square, inner, product, unit_blocks
from curvops.linalg.estimators.adaptive import BLOCK, LEAST_VECTORS, block_within, checked, estimated, products_allowed
from curvops.linalg.estimators.carried_gradients import carried, differentiated
from curvops.linalg.estimators.exchangeable import XNysTrace, XTrace
from curvops.linalg.estimators.hutchinson import Hutchinson, HutchPlusPlus
from curvops.progress import Progress, at_work

METHODS = ("xtrace", "xnystrace", "hutch++", "hutchinson", "exact")
Family: TypeAlias = XTrace | XNysTrace | HutchPlusPlus | Hutchinson


def trace(
    A: Matrix,
    *,
    method: str = "xtrace",
    rtol: float | None = None,
    max_matvecs: int | None = None,
    generator: torch.Generator | None = None,
    memory_budget: int | None = None,
    progress: Progress = None,
) -> Estimate:
    """Estimate tr A from products.

    Args:
        A: (n, n); it need not be symmetric. The value carries gradients for the tensors inside A.
        method: "xtrace" (any A, two products a probe); "xnystrace" (positive semidefinite A, one product a probe, the
            most accurate where the spectrum decays); "hutch++"; "hutchinson" (streams: no vector is kept; as good as
            any on a flat spectrum); "exact" (n products, no error).
        rtol: add probes until the error bar is at most rtol times the estimate; earlier products are kept.
        max_matvecs: the budget. Without rtol it is spent, 128 by default, and n or more gives the exact trace; with
            rtol it is a limit, none by default, and the exact trace is taken where growth comes to n products.
        generator: source of the probes.
        memory_budget: bytes for the blocks that all methods but Hutchinson keep; ``reason`` says where it limited the
            accuracy.
        progress: as in `cg`.

    Raises:
        ValueError: an unknown method, A not square, a product that is not finite, or a budget too small for an error
            bar (4 products; 2 for xnystrace and hutchinson, 6 for hutch++).
        NotPositiveSemidefinite: xnystrace met an eigenvalue clearly below zero (it is also a ValueError).

    Source: Epperly, Tropp & Webber 2024; Meyer et al. 2021; Hutchinson 1990.
    """
    facts = describe_square(A)
    check_choice("method", method, METHODS)
    keep = differentiated(A)
    total = products_allowed(method, rtol, max_matvecs, facts)
    with (
        torch.no_grad(),
        at_work("trace", total, progress, A),
        working(A, memory_budget, LEAST_VECTORS, checked(product(A))) as (multiply, room),
    ):
        block = block_within(room, facts)
        family = _family(method, multiply, facts, generator, keep, block)
        if method == "exact":
            found = _exact(multiply, facts, block)
        else:
            found = estimated(
                family,
                lambda: _exact(multiply, facts, block),
                facts,
                rtol=rtol,
                max_matvecs=max_matvecs,
                memory_budget=room,
            )

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        """Blocks L, R with tr X = tr LᵀXR, in expectation or exactly."""
        return family.functional() if found.samples else ((E, E) for E in unit_blocks(facts, BLOCK))

    return carried(found, A, lambda _: pairs())


def _family(
    method: str,
    multiply: Callable[[Tensor], Tensor],
    facts: Description,
    generator: torch.Generator | None,
    keep: bool,
    block: int,
) -> Family:
    if method == "xnystrace":
        return XNysTrace(multiply, facts, generator)
    if method == "hutch++":
        return HutchPlusPlus(multiply, facts, generator)
    if method == "hutchinson":
        return Hutchinson(multiply, facts, generator, keep, block)
    return XTrace(multiply, facts, generator)


def _exact(multiply: Callable[[Tensor], Tensor], facts: Description, block: int) -> Estimate:
    total = torch.zeros((), dtype=torch.float64, device=facts.device)
    for E in unit_blocks(facts, block):
        total = total + inner(E, multiply(E)).sum()
    return Estimate.exact(total, facts.rows)
