"""Building KFAC and EKFAC, in gradients, beside curvlinops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

import curvops as co
from benchmarks.machine import peer_version
from benchmarks.networks import Problem, build
from benchmarks.parts.diagonal import linearized
from benchmarks.parts.figures import Figures
from benchmarks.routes import PEER, peer_label
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
    if figures.settings.peers and peer_version(PEER) is not None:
        _beside_curvlinops(figures, problem, lin)


def _eigen(kfac: co.KFAC) -> Callable[[], object]:
    """The eigendecompositions of copies that keep none."""
    blocks = [block for block in kfac.blocks if isinstance(block, Kronecker)]
    copies = [Kronecker(block.left, block.right, details=block.details) for block in blocks]
    return lambda: [copy.eigen() for copy in copies]


def _beside_curvlinops(figures: Figures, problem: Problem, lin: Any) -> None:
    pairs = max(1, figures.settings.pairs // 2)
    for ours, theirs in (("exact", "type-2"), ("mc", "mc")):
        label = f"{peer_label()}, {'KFAC, exact' if ours == 'exact' else 'KFAC, one sample'}"
        try:
            run = curvlinops_kfac(problem, theirs)
            run()
        except Exception as error:  # refuses layers
            reason = str(error).splitlines()[0] if str(error) else "no message"
            print(f"  {problem.label}: {label}: {type(error).__name__}: {reason}")
            continue
        figures.gradients(problem, label, run)
        beside = alternate(run, lambda fisher=ours: co.KFAC(lin, fisher=fisher), pairs)
        figures.add(problem.label, f"KFAC, {'exact' if ours == 'exact' else 'one sample'}", beside, peer_label())


def curvlinops_kfac(problem: Problem, fisher: str) -> Callable[[], object]:
    """Builds the factors of curvlinops' KFAC, weights and biases together as here."""
    import curvlinops  # an environment of its own has it

    loss = nn.CrossEntropyLoss(reduction="sum")
    operator = curvlinops.KFACLinearOperator(
        problem.model,
        loss,
        problem.parameters,
        problem.batches(),
        check_deterministic=False,
        fisher_type=fisher,
        separate_weight_and_bias=False,
    )

    def factors() -> object:
        operator._input_covariances, operator._gradient_covariances = {}, {}
        operator.compute_kronecker_factors()
        return operator

    return factors
