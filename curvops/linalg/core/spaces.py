"""The meaning of an operator's rows and columns, which keeps different vectors of equal length from being mixed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor


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
