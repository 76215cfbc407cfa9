"""Shards of every kind of data: of objects, of several outputs, without labels, and such as lead to other engines.

The answers are those of one process, and equal on all ranks. Tests `process_group.py`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import curvops as co
from tests.randomness import perceptron
from tests.ranks.processes import alone, assert_those_of_one_process, run_on_ranks
from tests.ranks.questions import DOUBLE, data, own_slice, place_of, seeded
from tests.ranks.sharded_models import data as sequences
from tests.ranks.sharded_models import network, sharded
from tests.zoo_modules import Applied, Several

CHOSEN = torch.tensor([1, 8, 12])
GAUSSIAN = co.likelihoods.Gaussian
LARGE = 100.0
Answers = dict[str, Tensor]


def summed(points: list[dict[str, Tensor]]) -> Tensor:
    return torch.stack([point["rows"].sum(0) for point in points])


def of_objects(group: Any) -> Answers:
    torch.manual_seed(0)
    points = [{"rows": torch.randn(size, 3).double()} for size in (2, 3, 1, 4, 2, 5, 1)]
    y = torch.randn(7, 2).double()
    model = nn.Sequential(Applied(summed), nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    own = own_slice(*place_of(group), {1: (7,), 3: (4, 0, 3)})
    mine, gathered = points[own], {} if group is None else {"gather": True}
    lin = co.linearize(model, (mine, y[own]), GAUSSIAN(noise=0.3), process_group=group, collate=list)
    post, full = (co.laplace(lin, curvature, 1.0, check_mode=False) for curvature in ("kfac", "ggn"))
    return {
        "GGN": co.GGN(lin).to_dense(),
        "prediction": post.predict(points[:3]).variance,
        "shared prediction": post.predict(mine, **gathered).variance,
        "kernel": co.TangentKernel(lin).to_dense(),
        "full": full.predict(points[1:4]).variance,
        "full, each its own": full.predict(mine, **gathered).variance,
        "some points": co.GGN(lin.restrict(torch.tensor([1, 5]), 2.0)).to_dense(),
        "one rank": co.GGN(lin.gathered()).to_dense(),
    }


def of_targets(group: Any) -> Answers:
    """Several outputs, missing targets, weights of targets, and weights by the names of outputs."""
    own = own_slice(*place_of(group))
    torch.manual_seed(0)
    model = Several({"kind": 3, "value": 2}).double()
    (x, kind), (_, value) = data("labels"), data("numbers")
    w = value.abs()
    value[::3, 0] = torch.nan
    targets = {"kind": kind[own], "value": value[own]}
    choice = {"kind": "classification", "value": GAUSSIAN("per_output", missing="ignore")}
    several = co.linearize(model, (x[own], targets), choice, process_group=group)
    plain = nn.Sequential(model.body, nn.Tanh(), model.heads["head_value"])
    batch = {"inputs": x[own], "targets": value[own], "weights": w[own]}
    weighted = co.linearize(plain, batch, GAUSSIAN(missing="ignore"), weights=True, process_group=group)
    found = {}
    for name, lin in {"several": several, "weighted": weighted}.items():
        post = co.laplace(lin, "ggn", 1.0, check_mode=False)
        here = lambda answer: answer["value"] if name == "several" else answer  # noqa: B023, E731
        found |= {
            f"{name}: log-likelihood": lin.log_likelihood(),
            f"{name}: noises": torch.cat([noise.reshape(-1) for noise in lin.likelihood.hyperparameters]),
            f"{name}: GGN": co.GGN(lin).to_dense(),
            f"{name}: Monte Carlo": co.GGN(lin, mc_samples=2, generator=seeded()).to_dense(),
            f"{name}: empirical": co.EmpiricalFisher(lin).to_dense(),
            f"{name}: KFAC": co.KFAC(lin).to_dense(),
            f"{name}: some points": co.GGN(lin.restrict(CHOSEN, 2.0)).to_dense(),
            f"{name}: one rank": co.GGN(lin.gathered()).to_dense(),
            f"{name}: evidence": post.log_evidence().value,
            f"{name}: prediction": here(post.predict(x[:3])).variance,
            f"{name}: gathered": here(post.predict(x[own], gather=True) if group else post.predict(x)).variance,
        }
    by_name = {"kind": w[own, 0], "value": w[own, 1]}
    named = co.linearize(model, (x[own], targets, by_name), choice, weights=True, process_group=group)
    return found | {"weights by name": co.GGN(named).to_dense()}


def without_labels(group: Any) -> Answers:
    """Of one process with labels."""
    model = perceptron(4, 3, 3)
    x, y = data("labels")
    points = (x, y) if group is None else x[own_slice(*place_of(group))]
    lin = co.linearize(model, points, "classification", process_group=group)
    return {
        "GGN": co.GGN(lin).to_dense(),
        "Monte Carlo": co.GGN(lin, mc_samples=2, generator=seeded()).to_dense(),
        "KFAC": co.KFAC(lin).to_dense(),
        "prediction": co.laplace(lin, "kfac", 1.0).predict(x[:3]).variance,
        "some points": co.GGN(lin.restrict(CHOSEN, 2.0)).to_dense(),
        "one rank": co.GGN(lin.gathered()).to_dense(),
    }


def without_labels_by_shared_parameters(group: Any) -> Answers:
    x, y = sequences("tied")
    model = network("tied")
    V = torch.randn(sum(p.numel() for p in model.parameters()), 2, generator=seeded(), dtype=DOUBLE)
    if group is None:
        return {"GGN": co.GGN(co.linearize(model, (x, y), "classification")) @ V}
    mesh = init_device_mesh("cpu", (2,))
    own = x[:5] if mesh.get_rank() == 0 else x[5:]
    lin = co.linearize(sharded(model, mesh), own, "classification", process_group=mesh.get_group())
    return {"GGN": (co.GGN(lin) @ distribute_tensor(V, mesh, [Shard(0)])).full_tensor()}


class OddLayer(nn.Module):
    """A network whose first layer does not run as a layer where an input is large."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        first = F.linear(x, self.first.weight, self.first.bias) if bool((x > LARGE / 2).any()) else self.first(x)
        return self.last(torch.tanh(first / LARGE))


def of_a_layer_that_fails_on_one_rank(group: Any) -> Answers:
    """It is left to autodiff on all ranks."""
    torch.manual_seed(0)
    model = OddLayer().double()
    x, y = data("labels")
    x[1, 0] = LARGE  # the first point of rank 1
    size, rank = place_of(group)
    lin = co.linearize(model, (x[rank::size], y[rank::size]), "classification", process_group=group)
    return {
        "KFAC": co.KFAC(lin).to_dense(),
        "EKFAC": co.EKFAC(lin).to_dense(),
        "diagonal": co.DiagonalGGN(lin).diagonal(),
        "product": co.GGN(lin) @ torch.eye(lin.num_parameters, dtype=DOUBLE),
    }


def of_a_budget(group: Any, budget: int) -> Answers:
    """Predictions, which do not depend on what a rank keeps of its shard."""
    model = perceptron(4, 60, 40, 3)
    x = torch.randn(400, 4, dtype=DOUBLE, generator=seeded())
    y = torch.randint(3, (400,), generator=seeded())
    shard = own_slice(*place_of(group), {1: (400,), 2: (360, 40)})
    batches = list(zip(x[shard].split(40), y[shard].split(40)))
    lin = co.linearize(model, batches, "classification", memory_budget=budget, process_group=group)
    G = co.GGN(lin)
    for _ in range(3):  # engines are kept
        _ = G @ torch.ones(lin.num_parameters, 8, dtype=DOUBLE)
    post = co.laplace(lin, co.GGN, prior_precision=3.0, check_mode=False)
    new = torch.randn(4, 4, dtype=DOUBLE, generator=seeded(7))
    J, B = lin.jacobian(new), torch.randn(lin.num_parameters, 8, dtype=DOUBLE, generator=seeded(5))
    for _ in range(3):
        pulled = J.mT @ (J @ B)
    return {
        "products at new points": pulled,
        "their solutions": post.precision.solve(pulled),
        "prediction": post.predict(new).covariance_matrix,
        "functions": post.functions(new, 3, generator=seeded()),
    }


def numbers(group: Any, ask: Callable[..., Answers], *given: Any) -> dict[str, np.ndarray]:
    return {name: value.detach().numpy() for name, value in ask(group, *given).items()}


@pytest.mark.parametrize(
    ("size", "ask"),
    [
        (3, of_objects),
        (3, of_targets),
        (3, without_labels),
        (2, without_labels_by_shared_parameters),
        (2, of_a_layer_that_fails_on_one_rank),
    ],
)
def test_answers_are_those_of_one_process(size: int, ask: Callable[..., Answers]) -> None:
    assert_those_of_one_process(run_on_ranks(size, numbers, ask), alone(numbers, None, ask), within=1e-12)


def test_predictions_do_not_depend_on_what_a_rank_keeps_of_its_shard() -> None:
    found = run_on_ranks(2, numbers, of_a_budget, 2**19)
    assert_those_of_one_process(found, alone(numbers, None, of_a_budget, 2**30), within=1e-6)
