"""Gaussian targets, preconditioners of every kind, and the linear map that one step of a sampler is on them.

On N(0, 𝒯H⁻¹) a step is z' = F z + B w, with the state's vectors z and the standard normal numbers w that it draws.
F and B are found column by column from the implemented step, by giving it unit vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import curvops as co
from curvops.linalg.operators import ColumnNoise
from curvops.sampling.state import NoiseSource
from tests.randomness import seeded

TEMPERATURE, POINTS = 0.7, 5
SCALED = TEMPERATURE / POINTS
"""𝒯 = τ/N."""


def curvature(d: int) -> Tensor:
    """H, symmetric, with eigenvalues from .2 to 3."""
    basis = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64, generator=seeded(d))).Q
    return basis * torch.linspace(0.2, 3, d, dtype=torch.float64) @ basis.mT


def log_density(H: Tensor) -> Callable[[Any, Any], Tensor]:
    return lambda params, batch: -0.5 * (params @ (H @ params))


def preconditioners(d: int) -> dict[str, Any]:
    """None, a number, a vector, and operators: dense, low rank plus diagonal, Kronecker, and inverses of these."""
    g = seeded(d + 1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=g)

    def spd(n: int) -> Tensor:
        root = normal(n, n)
        return root @ root.mT / n + 0.3 * torch.eye(n, dtype=torch.float64)

    low = co.linalg.LowRank(torch.linalg.qr(normal(d, 2)).Q, torch.tensor([0.8, 0.4], dtype=torch.float64))
    factors = co.linalg.Kronecker(spd(2).unsqueeze(0), spd(d // 2).unsqueeze(0))
    return {
        "none": None,
        "number": 0.6,
        "vector": 0.3 + torch.rand(d, dtype=torch.float64, generator=g),
        "dense": co.linalg.Dense(spd(d), psd=True),
        "low rank plus diagonal": low.add_diagonal(0.2 + torch.rand(d, dtype=torch.float64, generator=g)),
        "inverse of low rank": low.add_diagonal(0.9).inverse(),
        "inverse of Kronecker": factors.add_diagonal(0.7).inverse(),
    }


def matrix(D: Any, d: int) -> Tensor:
    """The dense (d, d) matrix of a preconditioner."""
    eye = torch.eye(d, dtype=torch.float64)
    if D is None or isinstance(D, float):
        return eye * (1.0 if D is None else D)
    return torch.diag(D) if isinstance(D, Tensor) else D.to_dense()


def root(D: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(D)
    return vectors * values.sqrt() @ vectors.mT


class Given:
    """While entered, the standard normal numbers of chain i are those of `white[i]` in order; uniform ones are 0.

    `taken` says how many a chain took. Without `white` all are 0.
    """

    def __init__(self, white: Tensor | None = None) -> None:
        self.white, self.taken, self._chain = white, 0, 0

    def _next(self, count: int, rows: slice) -> Tensor:
        self.taken += count
        if self.white is None:
            return torch.zeros(1, count, dtype=torch.float64)
        return self.white[rows, self.taken - count : self.taken]

    def __enter__(self) -> Given:
        def normal(source: Any, like: Tensor) -> Tensor:
            rows = self._next(like.shape[-1], slice(None))
            return torch.empty_like(like).copy_(rows if like.ndim > 1 else rows[0])

        def fill(source: Any, rows: Tensor) -> None:
            assert len(rows) == 1
            rows.copy_(self._next(rows.shape[1], slice(self._chain, self._chain + 1)))

        def each(source: Any, draw: Any) -> Tensor:
            found, begun = [], self.taken
            for self._chain, generator in enumerate(source._generators):
                self.taken = begun
                found.append(draw(generator))
            return found[0] if source._single else torch.stack(found)

        self._patches = [
            patch.object(NoiseSource, "normal", normal),
            patch.object(NoiseSource, "uniform", lambda source, like: torch.zeros((), dtype=torch.float64)),
            patch.object(NoiseSource, "per_chain", each),
            patch.object(ColumnNoise, "fill", fill),
        ]
        for one in self._patches:
            one.start()
        return self

    def __exit__(self, *details: object) -> None:
        for each in self._patches:
            each.stop()


@dataclass(frozen=True, eq=False)
class Linear:
    """F and Q = B Bᵀ of a step, of the parameters or of (θ, m)."""

    F: Tensor
    Q: Tensor

    @property
    def radius(self) -> float:
        return float(torch.linalg.eigvals(self.F).abs().max())


def linear_step(sampler: Any, d: int, parts: tuple[str, ...]) -> Linear:
    """What the implemented step does to the named vectors of its state: chain i starts, or draws, unit vector i."""

    def stepped(z: Tensor, white: Tensor | None) -> tuple[Tensor, int]:
        many = co.sampling.chains(sampler, len(z))
        start = many.init(torch.zeros(d, dtype=torch.float64), seeded(0))
        changed = {name: value.clone() for name, value in zip(parts, z.split(d, -1))}
        if "thermostat" in vars(start):
            changed["thermostat"] = torch.full((len(z),), sampler.alpha, dtype=torch.float64)
        with Given(white) as given:
            after, _ = many.update(replace(start, **changed))
        return torch.cat([getattr(after, name) for name in parts], -1), given.taken

    size = d * len(parts)
    F, count = stepped(torch.eye(size, dtype=torch.float64), None)
    B, _ = stepped(torch.zeros(count, size, dtype=torch.float64), torch.eye(count, dtype=torch.float64))
    return Linear(F.mT, B.mT @ B)
