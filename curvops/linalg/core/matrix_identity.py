"""The identity of a matrix beside its entries: the meaning of its rows and columns, its data, and its description.

Spaces keep different vectors of equal length from being mixed. Sources are the data that an operator sums over, and how
often it counts them. By the description in a checkpoint a later run checks that its matrix is the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from linear_operator import LinearOperator
from torch import Tensor

from curvops.ambient import as_step
from curvops.checkpoint import digest, identify
from curvops.linalg.core.vectors import Matrix, describe, norm, product


@runtime_checkable
class Space(Protocol):
    """A vector space with its own meaning, such as the weights of one network at one point."""

    def difference(self, other: Any) -> str | None:
        """Return a clause that says why vectors of the other space are not vectors of this one; None if they are."""
        ...

    def join(self, other: Any) -> Any:
        """Return the space with the facts known about either, if the two do not differ."""
        ...

    def part(self, indices: Tensor) -> Any:
        """Return the space of the entries at these positions."""
        ...

    def detached(self) -> Any:
        """Return the space without the point at which it was built, which no longer distinguishes it from others."""
        ...


Spaces = tuple[Space | None, Space | None]
"""The spaces of an operator's rows and columns; None if unknown."""


def common(*spaces: Space | None) -> Space | None:
    """Join all that is known about these spaces, None if nothing is; raise ValueError if two of them differ."""
    joint: Space | None = None
    for space in spaces:
        if joint is None or space is None or space is joint:
            joint = space if joint is None else joint
            continue
        why = joint.difference(space)
        if why is not None:
            raise ValueError(f"these operators do not fit together: {why}")
        joint = joint.join(space)
    return joint


def spaces_of(operator: Any) -> Spaces:
    """Return the spaces of an operator's rows and columns, (None, None) for a tensor or a foreign operator."""
    return getattr(operator, "spaces", (None, None))


def spaces_of_sum(terms: Sequence[Any]) -> Spaces:
    """Return the spaces of the rows and columns of a sum; raise ValueError if the terms differ."""
    rows, columns = zip(*map(spaces_of, terms))
    return common(*rows), common(*columns)


@dataclass(frozen=True)
class Sources:
    """The data of an operator by name, with the factor of each; equal names mean the same data.

    `partial`: the data of a further part are unknown. `detached`: a part was detached from the weights at which it was
    built. `repeated`: several terms of a sum have the same data, so that their factor is not a temperature.
    `recorded`: a factor requires a gradient, which the counts have not.
    """

    counts: Mapping[Hashable, float] = field(default_factory=dict)
    partial: bool = False
    detached: bool = False
    repeated: bool = False
    recorded: bool = False

    def detach(self) -> Sources:
        """Return the sources of a copy that is detached from its weights."""
        return replace(self, detached=True)


def sources_of(operator: Any) -> Sources | None:
    """Return the data of an operator; None if they are unknown, as for tensors and foreign operators."""
    return getattr(operator, "sources", None)


def scale_sources(sources: Sources | None, factor: Tensor) -> Sources | None:
    """Return the sources of an operator times a number, a 0-d tensor."""
    if sources is None:
        return None
    scale = float(factor.detach())
    counts = {name: scale * count for name, count in sources.counts.items()}
    return replace(sources, counts=counts, recorded=sources.recorded or factor.requires_grad)


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
    return Sources(counts, partial, detached, repeated, any(one.recorded for one in with_data))


def sources_of_sum(terms: Sequence[Any]) -> Sources | None:
    """Return the sources of a sum of operators in which a term of unknown sources may have further data."""
    of_terms = [sources_of(term) for term in terms]
    total = merge_sources(*of_terms)
    return total if total is None or None not in of_terms else replace(total, partial=True)


@torch.no_grad()
def problem_of(A: Matrix) -> dict[str, Any]:
    """Describe A in a few numbers: size, dtype, kind, tensors, data, and products with two fixed vectors."""
    facts, sources = describe(A), sources_of(A)
    counts = {} if sources is None else {str(name): count for name, count in sources.counts.items()}
    tensors = [A] if isinstance(A, Tensor) else A.representation()
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (2, facts.columns), generator=generator).mT.to(facts.device, facts.dtype) * 2 - 1
    image = as_step(0, product(A), signs)
    return {
        "the size": [facts.rows, facts.columns],
        "the dtype": str(facts.dtype),
        "the kind of operator": kind_of(A),
        "its tensors (weights, prior precision, noise)": digest(tensors),
        "the data": counts,
        "its products": torch.cat([norm(image), image[: min(len(image), 64)].double().sum(0)]),
    }


def form_of(A: LinearOperator) -> str:
    """Return the classes and single numbers that A is made of, without its matrices, which may differ by rounding."""
    return f"{kind_of(A)} {identify([tensor for tensor in A.representation() if tensor.numel() == 1])}"


def kind_of(A: Any) -> str:
    """Return the names of the classes that A is made of."""
    if not isinstance(A, LinearOperator):
        return "tensor"
    arguments = [kind_of(argument) for argument in A._args if isinstance(argument, LinearOperator)]
    return type(A).__name__ + (f"({', '.join(arguments)})" if arguments else "")
