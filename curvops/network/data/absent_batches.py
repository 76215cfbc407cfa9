"""Training data of which only a few facts are left: those of a linearisation that was read from a file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch

from curvops.network.data.inputs import Inputs, move


@dataclass(frozen=True, eq=False)
class AbsentBatches:
    """What `Batches` says of itself where the data are not at hand; whoever asks for a batch is told so.

    `few` are the inputs of a point or two, on which a model is tried; `sizes` those of the batches.
    """

    few: Inputs
    num_data: int
    sizes: tuple[int, ...]
    fingerprint: int
    fingerprint_dtype: torch.dtype | None
    weighted: bool

    def __iter__(self) -> Iterator[NoReturn]:
        raise ValueError(
            f"this needs the {self.num_data:,} training points, and the posterior was loaded without them: pass them, "
            "co.load(path, model, data)."
        )

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> AbsentBatches:
        """The same on another device or in another floating dtype."""
        return replace(self, few=move(self.few, device, dtype))
