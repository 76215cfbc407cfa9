"""Building KFAC and EKFAC, in gradients, compared with curvlinops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import curvops as co
from benchmarks import peer_operators
from benchmarks.networks import Problem, build
from benchmarks.parts.diagonal import linearized
from benchmarks.parts.figures import Figures
from benchmarks.timing import alternate, alternate_fresh
from curvops.linalg import Kronecker

EXACT = 15.0  # 1.5·C
SAMPLED = {"mlp": 3.0, "cnn": None, "resnet": 5.0}


def measure(figures: Figures) -> None:
    """Factors of the exact and the sampled Fisher, eigendecompositions apart, EKFAC on top."""
    for name, sampled in SAMPLED.items():
        _network(figures, build(name), sampled)


def _network(figures: Figures, problem: Problem, sampled: float | None) -> None:
    lin = linearized(problem)
    figures.gradients(problem, "KFAC, exact", lambda: co.KFAC(lin), EXACT)
    figures.gradients(problem, "KFAC, one sample", lambda: co.KFAC(lin, fisher="mc"), sampled)
    kfac, pairs = co.KFAC(lin, fisher="mc"), max(1, figures.settings.pairs // 3)
    figures.add(
        problem.label,
        "eigendecompositions, once for all priors",
        alternate_fresh(problem.unit(), lambda: _eigen(kfac), pairs, warmup=0),
    )
    if problem.name != "resnet":  # some minutes
        figures.gradients(problem, "EKFAC, exact, with its eigendecompositions", lambda: co.EKFAC(lin))
    if figures.settings.peers and peer_operators.label() is not None:
        _beside_curvlinops(figures, problem, lin)


def _eigen(kfac: co.KFAC) -> Callable[[], object]:
    """The eigendecompositions of copies that keep none."""
    blocks = [block for block in kfac.blocks if isinstance(block, Kronecker)]
    copies = [Kronecker(block.left, block.right, details=block.details) for block in blocks]
    return lambda: [copy.eigen() for copy in copies]


def _beside_curvlinops(figures: Figures, problem: Problem, lin: Any) -> None:
    pairs = max(1, figures.settings.pairs // 2)
    for ours, theirs in (("exact", "type-2"), ("mc", "mc")):
        label = f"{peer_operators.label()}, {'KFAC, exact' if ours == 'exact' else 'KFAC, one sample'}"
        try:
            run = peer_operators.kfac_factors(problem, theirs)
            run()
        except Exception as error:  # refuses layers
            reason = str(error).splitlines()[0] if str(error) else "no message"
            print(f"  {problem.label}: {label}: {type(error).__name__}: {reason}")
            continue
        figures.gradients(problem, label, run)
        beside = alternate(run, lambda fisher=ours: co.KFAC(lin, fisher=fisher), pairs)
        figures.add(
            problem.label, f"KFAC, {'exact' if ours == 'exact' else 'one sample'}", beside, peer_operators.label()
        )
