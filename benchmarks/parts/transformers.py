"""GGN products of transformers, exact and from one sample, compared with curvlinops."""

from __future__ import annotations

import torch

import curvops as co
from benchmarks import peer_operators, routes
from benchmarks.networks import Problem, build
from benchmarks.parts.diagonal import linearized
from benchmarks.parts.figures import Figures
from benchmarks.parts.fishers import beside
from benchmarks.tables import MIB
from benchmarks.transformer import VOCABULARY

SETTLED = 24


def measure(figures: Figures) -> None:
    """A classifier with 10 outputs, and a language model with 5,000 at each of 64 positions."""
    _network(figures, build("transformer", 10))
    _network(figures, build("language", VOCABULARY))
    figures.peak("language", VOCABULARY, "sampled", [256 * MIB], batches=4)


def _network(figures: Figures, problem: Problem) -> None:
    lin = linearized(problem)
    v = problem.block(1)[:, 0].contiguous()
    generator = torch.Generator().manual_seed(0)
    exact, sampled = co.GGN(lin), co.GGN(lin, mc_samples=1, generator=generator)
    routes.settle(sampled, v, SETTLED)
    routes.settle(exact, v, SETTLED)
    figures.gradients(problem, "GGN @ v", lambda: exact @ v, note=f"served {routes.engines(exact)}")
    served = f"served {routes.engines(sampled)}"
    figures.gradients(problem, "GGN(mc_samples=1) @ v", lambda: sampled @ v, note=served)
    figures.gradients(problem, "GGN(mc_samples=1)", lambda: co.GGN(lin, mc_samples=1))
    if figures.settings.peers and peer_operators.label() is not None:
        beside(figures, problem, "GGN", exact, v, "GGNLinearOperator")
        beside(figures, problem, "GGN(mc_samples=1)", sampled, v, "FisherMCLinearOperator")
