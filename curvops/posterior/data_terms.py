"""Which data a posterior's curvature is of: the likelihood that goes with it in the evidence and at the mode."""

from __future__ import annotations

from collections.abc import Iterator

from linear_operator.operators import LinearOperator

from curvops.linalg import Damped
from curvops.linalg.algebra import Scaled, Sum
from curvops.linalg.spaces import spaces_of
from curvops.network.tangent_space import TangentSpace
from curvops.operators import Linearization


def data_terms(lin: Linearization, curvature: LinearOperator) -> tuple[Linearization, ...] | str:
    """The linearisations whose log-likelihoods add up to the one that the curvature is of; else why it is not known.

    GGN, Fishers and Hessian say which linearisation they are of, and sums of them are of all their data. Other
    operators (KFAC, low rank, dense) do not; alone they are taken for those of `lin`.
    """
    counts: dict[int, float] = {}
    found: dict[int, Linearization] = {}
    others = 0
    for factor, part in _parts(curvature):
        of = getattr(part, "lin", None)
        if not isinstance(of, Linearization):
            others += 1
        else:
            counts[id(of)] = counts.get(id(of), 0.0) + factor
            found[id(of)] = of
    if any(_is_detached(part) for _, part in _parts(curvature)):
        return "a part of the curvature was detached from its weights, so that it is of no likelihood at these."
    if not counts:
        return (lin,)
    own = counts.get(id(lin), 0.0)
    if others and len(counts) == 1 and 0 < own < 1:
        return (lin,)  # as 0.5 * GGN(lin) + 0.5 * KFAC(lin)
    if own == 0:
        return "the curvature is of other data than those of the linearisation given to co.laplace."
    if others:
        return (
            "the curvature holds, beside a GGN, Fisher or Hessian, an operator that does not say which data it is of "
            "(an earlier posterior, say)."
        )
    uneven = [count for count in counts.values() if abs(count - 1) > 1e-12]
    if uneven:
        return f"the curvature counts data {uneven[0]:.4g} times, their likelihood counts once."
    return tuple(found.values())


def _parts(operator: LinearOperator, factor: float = 1.0) -> Iterator[tuple[float, LinearOperator]]:
    """The summands of an operator, each with its factor."""
    if isinstance(operator, Sum):
        for term in operator.terms:
            yield from _parts(term, factor)
    elif isinstance(operator, Scaled) and operator.factor.ndim == 0:
        yield from _parts(operator.base, factor * float(operator.factor))
    elif isinstance(operator, Damped):
        yield from _parts(operator.base, factor)
    else:
        yield factor, operator


def _is_detached(operator: LinearOperator) -> bool:
    """Whether an operator, or what it is made of, is of weights that it was told to forget."""
    space = spaces_of(operator)[0]
    return isinstance(space, TangentSpace) and not space.held
