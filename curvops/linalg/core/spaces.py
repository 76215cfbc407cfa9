"""What an operator's rows and columns stand for, so that vectors of different meaning but equal length never mix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Space(Protocol):
    """A vector space with a meaning of its own (the weights of one network at one point, say)."""

    def difference(self, other: Any) -> str | None:
        """Why vectors of the other space are not vectors of this one, as a clause; None where they are."""
        ...

    def joined(self, other: Any) -> Any:
        """What is known of both spaces, where they do not differ."""
        ...

    def part(self, indices: Tensor) -> Any:
        """The space of the entries at these positions."""
        ...

    def detached(self) -> Any:
        """The space that differs from no other for the point at which it was made."""
        ...


Spaces = tuple[Space | None, Space | None]
"""What the rows and what the columns stand for; None where it is not known."""


def common(*spaces: Space | None) -> Space | None:
    """What is known of all of these, None where nothing is; raises ValueError where two of them differ."""
    found: Space | None = None
    for space in spaces:
        if found is None or space is None or space is found:
            found = space if found is None else found
            continue
        why = found.difference(space)
        if why is not None:
            raise ValueError(f"these operators do not fit together: {why}")
        found = found.joined(space)
    return found


def spaces_of(operator: Any) -> Spaces:
    """What the rows and columns of an operator stand for; a tensor or a foreign operator does not say."""
    found: Spaces = getattr(operator, "spaces", (None, None))
    return found


def spaces_of_sum(terms: Sequence[Any]) -> Spaces:
    """What the rows and columns of a sum stand for; raises ValueError where the terms differ."""
    rows, columns = zip(*map(spaces_of, terms))
    return common(*rows), common(*columns)
