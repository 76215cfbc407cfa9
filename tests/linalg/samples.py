"""Do draws have the covariance that they promise?

Draws are R z of standard normals z, so that their covariance is R Rᵀ: unit vectors in place of z show R itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from curvops.linalg.operators import ColumnNoise
from curvops.network import PointNormals

Sample = Callable[[int, torch.Generator], Tensor]
"""k draws as columns, (n, k), of a generator: the one given, or torch's own."""


class Normals:
    """While entered, numbers that `randn`, `normal_`, `ColumnNoise` and `PointNormals` take from a generator are noted.

    Draws are the first dimension or the last. `rows` has one row a draw, `filled` the numbers as they were asked for,
    or the seed that those of columns and points come from.

    With `units` numbers a draw, draw i is given the unit vector i in their place.
    """

    def __init__(self, draws: int, generator: torch.Generator, units: int = 0) -> None:
        self.draws, self.generator, self.units = draws, generator, units
        self.rows: list[Tensor] = []
        self.filled: list[Tensor | int] = []
        self._randn, self._fill, self._block = torch.randn, torch.Tensor.normal_, PointNormals.block
        self._of, self._columns, self._draw_key = ColumnNoise.of, ColumnNoise.fill, ColumnNoise.draw_key
        self._places: set[tuple[int, ...]] = set()
        self._keys: set[int] = set()

    def __enter__(self) -> Normals:
        def fill(
            tensor: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: torch.Generator | None = None
        ) -> Tensor:
            self._fill(tensor, mean, std, generator=generator)
            return self._noted(tensor) if self._counts(generator) and (mean, std) == (0.0, 1.0) else tensor

        def randn(*size: Any, generator: torch.Generator | None = None, **options: Any) -> Tensor:
            found = self._randn(*size, generator=generator, **options)
            return self._noted(found) if self._counts(generator) else found

        def block(normals: PointNormals, draws: range, points: slice, outputs: int, like: Tensor) -> Tensor:
            if normals.seed not in self._keys:
                self._keys.add(normals.seed)
                self.filled.append(normals.seed)
            places = {(normals.seed, point) for point in range(points.start, points.stop)}
            assert draws == range(self.draws) and not places & self._places, "numbers of a point that are drawn twice"
            self._places |= places
            found = self._block(normals, draws, points, outputs, like)
            self._note(found.flatten(1))
            return found

        def of(generator: torch.Generator | None, k: int, device: torch.device) -> ColumnNoise:
            noise = self._of(generator, k, device)
            if self._counts(generator):
                self._keys.add(noise.key)
                self.filled.append(noise.key)
            return noise

        def draw_key(noise: ColumnNoise) -> int:
            key = self._draw_key(noise)
            assert noise.key in self._keys and key not in self._keys
            self._keys.add(key)
            return key

        def fill_columns(noise: ColumnNoise, rows: Tensor) -> None:
            self._columns(noise, rows)
            place = (noise.key, noise._asked, -1)
            assert noise.key in self._keys and place not in self._places, "numbers of a column that are drawn twice"
            assert noise.columns == range(self.draws)
            self._places.add(place)
            self._note(rows)

        self._patches = [
            patch.object(ColumnNoise, "of", of),
            patch.object(ColumnNoise, "draw_key", draw_key),
            patch.object(ColumnNoise, "fill", fill_columns),
            patch.object(torch, "randn", randn),
            patch.object(torch.Tensor, "normal_", fill),
            patch.object(PointNormals, "block", block),
        ]
        for each in self._patches:
            each.start()
        return self

    def __exit__(self, *details: object) -> None:
        for each in self._patches:
            each.stop()

    def _counts(self, generator: torch.Generator | None) -> bool:
        return (torch.default_generator if generator is None else generator) is self.generator

    def _noted(self, numbers: Tensor) -> Tensor:
        assert self.draws in (numbers.shape[0], numbers.shape[-1]), "numbers that belong to no draw"
        self.filled.append(numbers.clone())
        self._note(numbers.view(self.draws, -1) if len(numbers) == self.draws else numbers.view(-1, self.draws).mT)
        return numbers

    def _note(self, rows: Tensor) -> None:
        if self.units:
            start = sum(row.shape[1] for row in self.rows)
            rows.copy_(torch.eye(self.units, dtype=rows.dtype)[:, start : start + rows.shape[1]])
        self.rows.append(rows.clone())


def assert_covariance(
    sample: Sample, covariance: Tensor, rtol: float = 1e-10, generator: torch.Generator | None = None
) -> None:
    """Draws are R z with R Rᵀ the covariance, to rounding; every number of z comes from the generator, and once."""
    generator = torch.Generator() if generator is None else generator
    generator.manual_seed(11)
    with Normals(3, generator) as normals:
        draws = sample(3, generator)
    z, used = torch.cat(normals.rows, 1), generator.get_state()
    generator.manual_seed(11)
    for numbers in normals.filled:  # its own numbers in their order: nothing was seeded anew
        if isinstance(numbers, int):
            assert numbers == torch.randint(2**62, (), generator=generator)
        else:
            assert numbers.equal(torch.randn(numbers.shape, dtype=numbers.dtype, generator=generator))
    assert generator.get_state().equal(used)
    with Normals(z.shape[1], generator, units=z.shape[1]) as normals:
        R = sample(z.shape[1], generator)
    assert torch.cat(normals.rows, 1).equal(torch.eye(z.shape[1], dtype=z.dtype))
    scale = float(covariance.abs().max())
    torch.testing.assert_close(R @ R.mT, covariance, rtol=rtol, atol=rtol * scale)
    torch.testing.assert_close(draws, R @ z.mT, rtol=rtol, atol=rtol * scale**0.5)
