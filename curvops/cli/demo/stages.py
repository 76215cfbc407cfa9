"""How long did each stage take, and how many products with the curvature?"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NoReturn

from torch import Tensor
from tqdm import tqdm

import curvops as co


@dataclass
class Stages:
    """Seconds and products by stage, in order; a stage that runs again adds up."""

    seconds: dict[str, float] = field(default_factory=dict)
    products: dict[str, int] = field(default_factory=dict)
    spent: int = 0
    _bar: tqdm[NoReturn] = field(default_factory=lambda: tqdm(disable=True), repr=False)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the block under this name, with its products counted on a terminal's last line."""
        start, before = time.perf_counter(), self.spent
        with tqdm(desc=name, unit=" products", disable=None, leave=False) as self._bar:
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        self.products[name] = self.products.get(name, 0) + self.spent - before

    def curvature(self) -> type[co.GGN]:
        """The GGN, counting its products with single vectors here."""
        stages = self

        class CountedGGN(co.GGN):
            def _product(self, block: Tensor) -> Tensor:
                stages.spent += block.shape[1]
                stages._bar.update(block.shape[1])
                return super()._product(block)

        return CountedGGN

    def rows(self) -> list[tuple[str, float, int]]:
        """(name, seconds, products), in the order of first use."""
        return [(name, seconds, self.products[name]) for name, seconds in self.seconds.items()]
