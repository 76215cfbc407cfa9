"""Are the influence scores of kronfluence equal to ours?     python -m benchmarks.peer_influence

It needs `pip install --no-deps kronfluence==1.0.1`, in an environment with accelerate, einconv, einops and opt_einsum.
Its scores are compared with those of `co.KFAC` and `co.EKFAC`: with the empirical Fisher, where they are equal, and
with its default, one drawn label for each point, where ours are exact.
"""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import curvops as co
from benchmarks.machine import peer_version
from benchmarks.tables import table

POINTS, QUERIES, PRIOR = 80, 20, 0.5
DTYPES = ("activation_covariance", "gradient_covariance", "eigendecomposition", "lambda", "precondition", "score")


def problem() -> tuple[nn.Module, TensorDataset, TensorDataset]:
    """A small classifier in float64, training points and test points."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    data = (TensorDataset(2 * torch.randn(n, 2).double(), torch.randint(2, (n,))) for n in (POINTS, QUERIES))
    return model, *data


def theirs(model: nn.Module, data: TensorDataset, queries: TensorDataset, strategy: str, empirical: bool) -> Tensor:
    """Kronfluence's scores (queries, points) under a damping that is our prior precision, per point."""
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.task import Task

    class Classify(Task):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            logits, labels = model(batch[0]), batch[1]
            if sample:
                labels = torch.distributions.Categorical(logits=logits.detach()).sample()
            return nn.functional.cross_entropy(logits, labels, reduction="sum")

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return self.compute_train_loss(batch, model)

    task = Classify()
    factor = FactorArguments(strategy=strategy, use_empirical_fisher=empirical)
    score = ScoreArguments(damping_factor=PRIOR / POINTS)
    for arguments in (factor, score):
        for name in (f"{name}_dtype" for name in (*DTYPES, "per_sample_gradient")):
            if hasattr(arguments, name):
                setattr(arguments, name, torch.float64)
    with tempfile.TemporaryDirectory() as folder:
        wrapped = prepare_model(copy.deepcopy(model), task)
        analyzer = Analyzer("influence", wrapped, task, cpu=True, output_dir=folder, disable_tqdm=True)
        analyzer.fit_all_factors("factors", data, per_device_batch_size=POINTS, factor_args=factor)
        batches = {"per_device_query_batch_size": QUERIES, "per_device_train_batch_size": POINTS}
        analyzer.compute_pairwise_scores("scores", "factors", queries, data, score_args=score, **batches)
        found: Tensor = analyzer.load_pairwise_scores("scores")["all_modules"]
    return found / POINTS


def ours(model: nn.Module, data: TensorDataset, queries: TensorDataset, strategy: str, empirical: bool) -> Tensor:
    """The same scores by operators."""
    lin, test = (co.linearize(model, part.tensors, "classification") for part in (data, queries))
    curvature = {"kfac": co.KFAC, "ekfac": co.EKFAC}[strategy](lin, fisher="empirical" if empirical else "exact")
    P = curvature.add_diagonal(PRIOR)
    return (test.gradients() @ P.inverse() @ lin.gradients().mT).to_dense()


def compare() -> str:
    """Relative differences and correlations of all scores."""
    rows, given = [], problem()
    for strategy in ("kfac", "ekfac"):
        for empirical in (True, False):
            a, b = (scores(*given, strategy, empirical).double() for scores in (ours, theirs))
            correlation = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]
            fisher = "empirical" if empirical else "one drawn label / exact"
            rows.append([strategy, fisher, f"{float((a - b).norm() / a.norm()):.1e}", f"{float(correlation):.4f}"])
    return table(["strategy", "Fisher", "relative difference", "correlation"], rows)


if __name__ == "__main__":
    print(f"kronfluence {peer_version('kronfluence')}\n\n{compare()}")
