"""GGN products of transformers, exact and from one sample, beside curvlinops."""

from __future__ import annotations

import sys
from typing import Any

import torch

import curvops as co
from benchmarks import routes
from benchmarks.machine import peer_version
from benchmarks.networks import Problem, build
from benchmarks.parts.diagonal import linearized
from benchmarks.parts.figures import MIB, Figures
from benchmarks.parts.fishers import peer
from benchmarks.timing import alternate
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
    if figures.settings.peers and peer_version(routes.PEER) is not None:
        _beside(figures, problem, "GGN @ v", exact, v, "GGNLinearOperator")
        _beside(figures, problem, "GGN(mc_samples=1) @ v", sampled, v, "FisherMCLinearOperator")


def _beside(figures: Figures, problem: Problem, what: str, ours: Any, v: torch.Tensor, name: str) -> None:
    label = f"{routes.peer_label()}, {name}"
    try:
        theirs = peer(problem, name)
        theirs @ v
    except Exception as error:  # what it cannot do, it says
        print(f"  {problem.label}: {label}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
        return
    figures.gradients(problem, label, lambda: theirs @ v)
    pairs = max(1, figures.settings.pairs // 2)
    figures.add(problem.label, what, alternate(lambda: theirs @ v, lambda: ours @ v, pairs), label)
