"""The layout of a model's outputs: which dimensions are positions, and which holds the C outputs of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """The map from outputs (N, *shape) to rows (n, T·C), position by position (t·C + c), with targets and weights.

    shape: the shape of a point's outputs, as the model returns them; () if it returns one number per point.
    class_dim: the dimension of (N, *shape) that holds the C outputs of a position: the last, or 1, as in torch's
        cross-entropy, and for the channels of images. All others are positions, T in total.
    positions_in_rows: T, if the model itself returns rows (N, T·C) and the likelihood is that of sequences.
    """

    shape: torch.Size
    class_dim: int = -1
    positions_in_rows: int | None = None

    @property
    def num_outputs(self) -> int:
        """The number C of outputs of one position."""
        if not self.shape:
            return 1
        return self.shape[0 if self.class_dim == 1 else -1]

    @property
    def positions(self) -> tuple[int, ...]:
        """The lengths of the dimensions that are positions; empty if a point has one position."""
        return tuple(self.shape[1:] if self.class_dim == 1 else self.shape[:-1])

    @property
    def output_shape(self) -> torch.Size:
        """The shape (C,) of a point's outputs or, with positions, (T, C)."""
        T = torch.Size(self.positions).numel()
        return torch.Size((T, self.num_outputs) if self.positions else (self.num_outputs,))

    def rows(self, outputs: Tensor) -> Float[Tensor, "n R"]:
        """Return outputs (n, *shape), or one number per point (n,), as rows (n, T·C)."""
        if not self.shape:
            return outputs.unsqueeze(1)
        # With one position, or the classes last, nothing moves: only a view follows the last layer in the graph.
        moved = outputs.movedim(1, -1) if self.positions and self.class_dim == 1 else outputs
        return moved.flatten(1)

    def targets(self, y: Tensor) -> Tensor:
        """Return targets (n, *positions, ...), or (n, C, *positions) with the classes at dimension 1, as (n, T, ...).

        Raises ValueError if they do not have the outputs' positions.
        """
        if not self.shape and y.ndim == 1:
            return y.unsqueeze(1)
        if not self.positions:
            return y
        if self.class_dim == 1 and y.shape[1:] == self.shape:
            y = y.movedim(1, -1)
        if tuple(y.shape[1 : 1 + len(self.positions)]) != self.positions:
            raise ValueError(self._misplaced(y))
        return y.flatten(1, len(self.positions))

    def weights(self, w: Tensor) -> Tensor:
        """Return sample weights (n,) unchanged, and (n, *positions) as (n, T). Raises ValueError for other shapes."""
        n, in_rows = len(w) if w.ndim else 0, self.positions_in_rows
        places = self.positions or (() if in_rows is None else (in_rows,))
        if w.shape[1:] not in ((), places) or not w.ndim:
            or_positions = f" or, one per position, {(n, *places)}" if places else ""
            raise ValueError(f"the sample weights must have shape ({n},){or_positions}; given {tuple(w.shape)}.")
        return w.flatten(1) if w.ndim > 1 else w

    def _misplaced(self, y: Tensor) -> str:
        if self.class_dim != 1:
            first = (
                " They fit outputs with the classes at dimension 1, as in torch's cross-entropy: if that is meant, "
                "pass likelihood=torch.nn.CrossEntropyLoss(...), or return outputs.movedim(1, -1)."
            )
            return misplaced(self.positions, y) + (first if y.shape[1:] == self.shape[1:] else "")
        C, n = self.num_outputs, len(y)
        return (
            f"the classes or channels are at dimension 1: outputs {('N', *self.shape)} are C = {C} classes at each of "
            f"{_times(self.positions)} positions, so targets have shape {(n, *self.positions)} or, as probabilities or "
            f"numbers, {(n, *self.shape)}; given {tuple(y.shape)}. If a classifier returns the classes last, use "
            "curvops.likelihoods.Categorical(...), with the same options."
        ).replace("'N'", "N")


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
