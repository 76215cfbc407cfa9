"""The data that a posterior's curvature sums over: they tell the likelihood of its evidence and its mode."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from linear_operator.operators import LinearOperator

from curvops.linalg.core.sources import sources_of
from curvops.operators import Linearization


def data_terms(lin: Linearization, curvature: LinearOperator) -> tuple[Linearization, ...] | str:
    """Return the linearisations whose log-likelihoods add up to that of the curvature; else why it is not known.

    A curvature times a number, (1 / T) * co.GGN(lin), is of the likelihood to this power (`power_of`). Every operator
    made of a linearisation, or of such an operator, says which data it is of and how often it counts
    them. A matrix of the user's own does not: alone it is taken for that of `lin`.
    """
    found = sources_of(curvature)
    if found is None:
        return (lin,)
    if found.detached:
        return "a part of the curvature was detached from its weights, so that it is of no likelihood at these."
    counts, own = found.counts, lin.source
    if not counts.get(own):
        return (
            "the curvature is of other data, or of another likelihood, than the linearisation given to co.laplace; "
            "linearise once over all data, or add up the curvatures of both."
        )
    if found.partial:
        return (
            "the curvature holds, beside what is known to be of these data, an operator that does not say which data "
            "it is of (a matrix, say)."
        )
    uneven = [count for count in counts.values() if abs(count - counts[own]) > 1e-12]
    if (found.repeated or uneven or counts[own] < 0) and (
        not_once := [c for c in counts.values() if abs(c - 1) > 1e-12]
    ):
        return f"the curvature counts data {not_once[0]:.4g} times, their likelihood counts once."
    known: dict[Hashable, Linearization] = {each.source: each for each in _linearizations(curvature)}
    known[own] = lin
    if not counts.keys() <= known.keys():
        return (
            "a part of it is of other data than the linearisation given to co.laplace, and (as KFAC, diagonals, "
            "blocks and low rank) does not keep them; linearise once over all data, or take a GGN, Fisher or Hessian "
            "of those."
        )
    return tuple(known[source] for source in counts)


def power_of(lin: Linearization, curvature: LinearOperator) -> float:
    """Return the power of a curvature's likelihood: 1/T where it is tempered, else 1."""
    found = sources_of(curvature)
    if found is None or set(found.counts.values()) == {1.0}:
        return 1.0
    count = found.counts.get(lin.source, 1.0)
    return 1.0 if abs(count - 1) <= 1e-12 else count


def _linearizations(operator: LinearOperator) -> Iterator[Linearization]:
    """Yield the linearisations that an operator and its parts hold."""
    lin = getattr(operator, "lin", None)
    if isinstance(lin, Linearization):
        yield lin
    for part in operator._args:
        if isinstance(part, LinearOperator):
            yield from _linearizations(part)
