"""Noise whose columns are drawn by their numbers, so that a block can be drawn in parts of any width."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from curvops.checks import drawn_seed


class ColumnNoise(torch.Generator):
    """A source of noise for some columns among many; the noise of a column does not depend on the others.

    In the n-th requested block, column j comes from a generator seeded by (key, n, j), with the seed from Philox, whose
    counter is (n, j). The source is a `torch.Generator`, seeded by its key and first column, so that operators with
    their own `_draw` can draw from it as from any other generator.
    """

    def __new__(cls, key: int, columns: range, device: torch.device) -> ColumnNoise:
        return super().__new__(cls, device)  # type: ignore[call-arg]

    def __init__(self, key: int, columns: range, device: torch.device) -> None:
        self.key, self.columns, self._asked = key, columns, 0
        self.manual_seed(key + columns.start)

    @classmethod
    def of(cls, generator: torch.Generator | None, k: int, device: torch.device) -> ColumnNoise:
        """Return a source for k columns; its key comes from a generator, by default torch's own, or from a source."""
        if isinstance(generator, ColumnNoise) and len(generator.columns) == k:
            return cls(generator.draw_key(), generator.columns, generator.device)
        return cls(drawn_seed(generator), range(k), device if generator is None else generator.device)

    def part(self, start: int, stop: int) -> ColumnNoise:
        """Return a new source for some of the columns, in the state before the first request."""
        return ColumnNoise(self.key, self.columns[start:stop], self.device)

    def fill(self, rows: Float[Tensor, "k n"]) -> None:
        """Fill each row with the standard normal numbers of its column."""
        words = self._philox().random_raw(self.columns.stop)[self.columns.start :]
        for row, word in zip(rows, words.tolist()):
            row.normal_(generator=self.manual_seed(word >> 2))

    def draw_key(self) -> int:
        """Draw the key of another source, the same for all columns."""
        return int(self._philox(of_columns=False).random_raw(1)[0]) >> 2

    def _philox(self, of_columns: bool = True) -> np.random.Philox:
        self._asked += 1
        return np.random.Philox(key=self.key, counter=[0, self._asked, int(not of_columns), 1])
