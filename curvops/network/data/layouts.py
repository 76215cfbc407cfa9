"""Layouts of outputs, which the model returns in any shape, as one row per point, with their targets and weights.

A `Layout` makes rows of positions and of images, a `PositionsLayout` of some of these positions. A `NamedLayout` joins
the rows of several outputs, which have names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.checks import check_shape

Name: TypeAlias = str | int
"""The key of an output: of a mapping, the name of an attribute, or the position in a tuple."""


@dataclass(frozen=True)
class Layout:
    """The map from outputs (N, *shape) to rows (n, T·C), position by position (t·C + c), with targets and weights.

    shape: the shape of a point's outputs, as the model returns them; () if it returns one number per point.
    class_dim: the dimension of (N, *shape) that holds the C outputs of a position: the last, or 1, as in torch's
        cross-entropy, and for the channels of images. All others are positions, T in total.
    positions_in_rows: T, if the model itself returns rows (N, T·C) and the likelihood is that of sequences.
    apart: whether targets are independent given the outputs, so that each may have a weight.
    name: the key of this output among those that the model returns; None if it returns one tensor.
    """

    shape: torch.Size
    class_dim: int = -1
    positions_in_rows: int | None = None
    apart: bool = False
    name: str | int | None = None

    @property
    def num_outputs(self) -> int:
        """The number C of outputs of one position."""
        if not self.shape:
            return 1
        return self.shape[0 if self.class_dim == 1 else -1]

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """The lengths of the dimensions that are positions; empty if a point has one position."""
        return tuple(self.shape[1:] if self.class_dim == 1 else self.shape[:-1])

    @property
    def output_shape(self) -> torch.Size:
        """The shape (C,) of a point's outputs or, with positions, (T, C)."""
        T = torch.Size(self.positions).numel()
        return torch.Size((T, self.num_outputs) if self.positions else (self.num_outputs,))

    @property
    def places(self) -> tuple[int, ...]:
        """The `positions`, or (T,) if the model returns those of a sequence in rows."""
        return self.positions or (() if self.positions_in_rows is None else (self.positions_in_rows,))

    def by_point(self, values: Tensor, dim: int = 0) -> Tensor:
        """Return values of positions, (..., n·T, *m) with n·T at this dimension, as (..., n, *places, *m).

        One further dimension m is that of outputs, and comes where the model has them.
        """
        if not self.places:
            return values
        points = values.shape[dim] // torch.Size(self.places).numel()
        values = values.unflatten(dim, (points, *self.places))
        has_outputs = values.ndim == dim + len(self.places) + 2
        return values.movedim(-1, dim + 1) if self.class_dim == 1 and has_outputs else values

    def rows(self, outputs: Tensor) -> Float[Tensor, "n R"]:
        """Return outputs (n, *shape), or one number per point (n,), as rows (n, T·C)."""
        if not self.shape:
            return outputs.unsqueeze(1)
        # With one position, or the classes last, nothing moves: only a view follows the last layer in the graph.
        moved = outputs.movedim(1, -1) if self.positions and self.class_dim == 1 else outputs
        return moved.flatten(1)

    def restored(self, rows: Float[Tensor, "n R"]) -> Tensor:
        """Return rows (n, T·C) in the shape (n, *shape) of the model's outputs, the inverse of `rows`."""
        if not self.shape:
            return rows.squeeze(1)
        return self.by_point(rows.reshape(-1, self.num_outputs)) if self.positions else rows

    def targets(self, y: Any) -> Tensor:
        """Return targets (n, *positions, ...), or (n, C, *positions) with the classes at dimension 1, as (n, T, ...).

        Raises ValueError if they do not have the outputs' positions.
        """
        if not isinstance(y, Tensor):
            raise TypeError(
                "targets under several names, or in a tuple, need a likelihood for each: pass a mapping of likelihoods "
                'with the same keys, such as {"kind": "classification", "value": "regression"}.'
            )
        if not self.shape and y.ndim == 1:
            return y.unsqueeze(1)
        if not self.positions:
            return y
        if self.class_dim == 1 and y.shape[1:] == self.shape:
            y = y.movedim(1, -1)
        if tuple(y.shape[1 : 1 + len(self.positions)]) != self.positions:
            raise ValueError(self._misplaced(y))
        return y.flatten(1, len(self.positions))

    def in_given_form(self, y: Tensor) -> Tensor:
        """Return targets (n, T, ...) as (n, *positions, ...), a form from which `targets` makes these."""
        if not self.shape:
            return y.squeeze(1)
        return y.unflatten(1, self.positions) if self.positions else y

    def weights(self, w: Any, shape: torch.Size) -> Tensor:
        """Return sample weights (n,) unchanged, (n, *positions) as (n, T), and those of the targets' shape as targets.

        Raises ValueError for other shapes.
        """
        apart = self.apart and len(shape) > 1
        if apart and w.shape == shape:
            return self.targets(w)
        n = len(w) if w.ndim else 0
        if w.shape[1:] not in ((), self.places) or not w.ndim:
            others = f" or, one per position, {(n, *self.places)}" if self.places else ""
            others += f" or, one per target, {tuple(shape)}" if apart else ""
            raise ValueError(f"the sample weights must have shape ({n},){others}; given {tuple(w.shape)}.")
        return w.flatten(1) if w.ndim > 1 else w

    def _misplaced(self, y: Tensor) -> str:
        if self.class_dim == 1:
            return misplaced(self.positions, y) + (
                " The classes or channels are taken from dimension 1 of the outputs; if they are last, use "
                "curvops.likelihoods.Categorical(...), with the same options."
            )
        remedy = " If the classes are at dimension 1, pass likelihood=torch.nn.CrossEntropyLoss(...)."
        if y.shape[2:] == self.shape[1:]:
            remedy = " If channels are at dimension 1, put them last in the outputs and in y: movedim(1, -1)."
        return misplaced(self.positions, y) + (remedy if self.shape[1:] in (y.shape[1:], y.shape[2:]) else "")


def misplaced(positions: Sequence[int], y: Tensor) -> str:
    """Return the error message for targets that do not have these positions."""
    places = ", ".join(str(length) for length in positions)
    return (
        f"The model returns {_times(positions)} positions per point, so targets have shape (n, {places}) or "
        f"(n, {places}, ...); given {tuple(y.shape)}. Pad sequences to one length, and leave positions out with "
        f"ignore_index (-100) or with weights (n, {places}) of zero."
    )


def _times(lengths: Sequence[int]) -> str:
    return " x ".join(str(length) for length in lengths)


@dataclass(frozen=True)
class PositionsLayout(Layout):
    """The layout of the outputs at some positions t alone, from the layout of the whole outputs."""

    whole: Layout = Layout(torch.Size(()))
    chosen: tuple[int, ...] = ()

    @property
    def places(self) -> tuple[int, ...]:
        return (len(self.chosen),)

    def rows(self, outputs: Tensor) -> Float[Tensor, "n R"]:
        by_position = self.whole.rows(outputs).unflatten(1, (torch.Size(self.whole.places).numel(), -1))
        return by_position[:, self.chosen].flatten(1)

    def targets(self, y: Any) -> Tensor:
        return self.whole.targets(y)[:, self.chosen]


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
                raise ValueError(f"targets[{member.name!r}] differ from the first ones in shape or dtype.")
        return torch.cat([target.reshape(len(target), -1).double() for target in targets], 1)

    def weights(self, w: Any, shape: torch.Size) -> Tensor:
        """Return weights of points (n,) unchanged, and those (n,) under each of the K names as (n, K)."""
        if isinstance(w, Tensor):
            return super().weights(w, shape)
        columns = []
        for name in [member.name for member in self.members]:
            assert name is not None
            column = part_of(w, name, "the sample weights")
            check_shape(f"weights[{name!r}]", column, (len(column),), "They are a number for each point.")
            columns.append(column)
        return torch.stack([column.double() for column in columns], 1)

    def _laid_out(self, y: Any) -> list[Tensor]:
        names = [member.name for member in self.members]
        if isinstance(y, Tensor):
            form = "a mapping with these keys" if isinstance(names[0], str) else "a tuple in this order"
            raise TypeError(f"the outputs are {names}, so targets are {form}; given one tensor {tuple(y.shape)}.")
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


def checked_outputs(outputs: Any, layout: Layout | None = None) -> Tensor:
    """Return the outputs; raise TypeError or ValueError unless they are a floating-point tensor (n, C) or (n, ..., C).

    With a layout they must have its shape, which may be one number per point, (n,). Several outputs are joined to rows.
    """
    if isinstance(layout, NamedLayout):
        return layout.join([checked_outputs(outputs, member) for member in layout.members])
    if layout is not None and layout.name is not None:
        outputs = part_of(outputs, layout.name)
    if not isinstance(outputs, Tensor):
        raise TypeError(f"the model returns {type(outputs).__name__}, not a tensor (N, C): {_remedy(outputs)}.")
    if not outputs.is_floating_point():
        raise TypeError(f"the model returns {outputs.dtype}, expected a real floating-point tensor (N, C).")
    if outputs.ndim == 0 or (outputs.ndim == 1 and (layout is None or layout.shape)):
        raise ValueError(
            f"the model returns shape {tuple(outputs.shape)}, expected (N, C): add outputs.unsqueeze(1) in the model, "
            "or, for inputs of a single point, pass x.unsqueeze(0). For two classes from one logit a point, "
            "nn.BCEWithLogitsLoss() as the likelihood (Bernoulli) takes outputs (N,)."
        )
    if layout is not None and layout.shape != outputs.shape[1:]:
        expected = ", ".join(str(length) for length in layout.shape)
        raise ValueError(f"the model returns {tuple(outputs.shape)}, but (N, {expected}) before: pad sequences.")
    return outputs


def _remedy(outputs: Any) -> str:
    """Return what to do about outputs that are no tensor, by the names that they have."""
    if isinstance(outputs, Mapping):
        names = [name for name, value in outputs.items() if isinstance(value, Tensor) and value.ndim]
        if names:
            name = "logits" if "logits" in names else names[0]
            wanted = f"outputs.{name}" if hasattr(outputs, str(name)) else f"outputs[{name!r}]"
            return (
                f"let forward return {wanted}, or pass likelihoods and targets under the names that have them "
                f"(of {names}), such as {{{name!r}: 'classification'}} and {{{name!r}: y}}"
            )
    if isinstance(outputs, tuple | list):
        return "let forward return one of them, or pass a tuple of likelihoods, and one of targets, in their order"
    return f"let forward return {'outputs.logits' if hasattr(outputs, 'logits') else 'only the tensor of outputs'}"


def layout_of(outputs: Any, class_dim: int = -1, numbers: bool = False, name: Name | None = None) -> Layout:
    """Return the layout of a tensor that a model returns, alone or under a name.

    class_dim: the dimension of (n, ...) that holds the C outputs of a position. numbers: read (n,) as (n, 1).
    """
    output = outputs if name is None else part_of(outputs, name)
    if numbers and isinstance(output, Tensor) and output.ndim == 1:
        return Layout(torch.Size(()), name=name)
    return Layout(checked_outputs(output).shape[1:], class_dim, name=name)
