"""Several outputs of a model, by name, as blocks of columns of one row, and targets under the same names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.network.data.inputs import Layout

Name: TypeAlias = str | int
"""The key of an output: of a mapping, the name of an attribute, or the position in a tuple."""


class TargetShape(NamedTuple):
    """The form of one point's targets under one name: their shape, and whether they are floating-point."""

    shape: tuple[int, ...]
    floating: bool

    @property
    def columns(self) -> int:
        """The number of columns that they take in a row."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class NamedLayout(Layout):
    """The layout of several outputs, joined to rows (N, ΣR), and of their targets, joined to rows (N, ΣM).

    members: the layout of each output, with its name.
    forms: the form of each one's targets, once these are known.
    """

    members: tuple[Layout, ...] = ()
    forms: tuple[TargetShape, ...] = ()

    @classmethod
    def of(cls, members: Sequence[Layout]) -> NamedLayout:
        """Return the layout of these outputs in their order."""
        return cls(torch.Size((sum(member.output_shape.numel() for member in members),)), members=tuple(members))

    def for_targets(self, y: Any) -> NamedLayout:
        """Return the layout for targets of the form that these have."""
        targets = self._laid_out(y)
        return replace(
            self, forms=tuple(TargetShape(tuple(target.shape[1:]), target.is_floating_point()) for target in targets)
        )

    def join(self, outputs: Sequence[Tensor]) -> Float[Tensor, "n R"]:
        """Return the outputs, each as its model returns it, as one row per point."""
        return torch.cat([member.rows(output) for member, output in zip(self.members, outputs)], 1)

    def targets(self, y: Any) -> Tensor:
        """Return targets under the outputs' names as one row per point; whole numbers become floating-point ones."""
        targets = self._laid_out(y)
        for member, target, form in zip(self.members, targets, self.forms):
            if TargetShape(tuple(target.shape[1:]), target.is_floating_point()) != form:
                kind = "floating-point" if form.floating else "whole"
                raise ValueError(
                    f"the first targets[{member.name!r}] were {kind} numbers of shape {('n', *form.shape)}; "
                    f"given {target.dtype} of shape {tuple(target.shape)}.".replace("'n'", "n")
                )
        return torch.cat([target.reshape(len(target), -1).double() for target in targets], 1)

    def weights(self, w: Any, shape: torch.Size) -> Tensor:
        """Return weights of points (n,) unchanged, and those (n,) under each of the K names as (n, K)."""
        if isinstance(w, Tensor):
            return super().weights(w, shape)
        columns = []
        for name in [member.name for member in self.members]:
            assert name is not None
            column = part_of(w, name, "the sample weights")
            if column.ndim != 1:
                raise ValueError(
                    f"weights[{name!r}] must have shape ({len(column)},), a number for each point; given "
                    f"{tuple(column.shape)}."
                )
            columns.append(column)
        return torch.stack([column.double() for column in columns], 1)

    def _laid_out(self, y: Any) -> list[Tensor]:
        names = [member.name for member in self.members]
        if isinstance(y, Tensor):
            form = "a mapping with these keys" if isinstance(names[0], str) else "a tuple in this order"
            raise TypeError(
                f"the model's outputs are {names}, so targets are {form}; given one tensor of shape {tuple(y.shape)}."
            )
        targets = []
        for member, name in zip(self.members, names):
            assert name is not None
            target = part_of(y, name, "the targets")
            try:
                targets.append(member.targets(target))
            except ValueError as error:
                raise ValueError(f"targets[{name!r}]: {error}") from error
        return targets


def part_of(parts: Any, name: Name, what: str = "the model's outputs") -> Any:
    """Return the part of this name of a mapping, a tuple or an object with attributes; raise ValueError without it."""
    if isinstance(parts, Mapping):
        if name in parts:
            return parts[name]
        description: object = list(parts)
    elif isinstance(parts, (tuple, list)) and not isinstance(name, str):
        if -len(parts) <= name < len(parts):
            return parts[name]
        description = f"a {type(parts).__name__} of {len(parts)}"
    elif isinstance(name, str) and not isinstance(parts, Tensor) and hasattr(parts, name):
        return getattr(parts, name)
    elif isinstance(parts, Tensor):
        raise ValueError(f"a likelihood is given for {name!r}, but the model returns one tensor: pass one likelihood.")
    else:
        description = f"a {type(parts).__name__}, which has no part of that name"
    raise ValueError(f"a likelihood is given for {name!r}, but {what} are {description}.")
