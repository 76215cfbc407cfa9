"""Stand-in for the training data of a linearisation that was loaded from a file without them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch

from curvops.network.data.inputs import Inputs, move


@dataclass(frozen=True, eq=False)
class AbsentBatches:
    """The properties of `Batches` without the data themselves; reading a batch raises ValueError.

    `few` holds the inputs of one or two points, on which a model is tried; `sizes` the sizes of the batches.
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
        """Return a copy on another device or in another floating dtype."""
        return replace(self, few=move(self.few, device, dtype))
