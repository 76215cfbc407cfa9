"""The data that an operator sums over, and how often it counts them, which its entries do not show."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Sources:
    """The data of an operator by name, with the factor of each; equal names mean the same data.

    `partial`: the data of a further part are unknown. `detached`: a part was detached from the weights at which it was
    built. `repeated`: several terms of a sum have the same data, so that their factor is not a temperature.
    """

    counts: Mapping[Hashable, float] = field(default_factory=dict)
    partial: bool = False
    detached: bool = False
    repeated: bool = False

    def detach(self) -> Sources:
        """Return the sources of a copy that is detached from its weights."""
        return replace(self, detached=True)


def sources_of(operator: Any) -> Sources | None:
    """Return the data of an operator; None if they are unknown, as for tensors and foreign operators."""
    return getattr(operator, "sources", None)


def scale_sources(sources: Sources | None, factor: Tensor) -> Sources | None:
    """Return the sources of an operator times a number (a 0-d tensor, whose gradient does not matter)."""
    if sources is None:
        return None
    scale = float(factor.detach())
    return replace(sources, counts={name: scale * count for name, count in sources.counts.items()})


def merge_sources(*sources: Sources | None) -> Sources | None:
    """Return the sources of a sum in which a term of unknown sources, such as a prior, adds no data."""
    with_data = [one for one in sources if one is not None]
    if len(with_data) < 2:
        return with_data[0] if with_data else None
    counts: dict[Hashable, float] = {}
    repeated = any(one.repeated for one in with_data)
    for one in with_data:
        repeated |= not counts.keys().isdisjoint(one.counts)
        for name, count in one.counts.items():
            counts[name] = counts.get(name, 0.0) + count
    partial, detached = any(one.partial for one in with_data), any(one.detached for one in with_data)
    return Sources(counts, partial, detached, repeated)


def sources_of_sum(terms: Sequence[Any]) -> Sources | None:
    """Return the sources of a sum of operators in which a term of unknown sources may have further data."""
    of_terms = [sources_of(term) for term in terms]
    total = merge_sources(*of_terms)
    return total if total is None or None not in of_terms else replace(total, partial=True)
