"""Models whose parameters are shared among processes (`fully_shard`): every answer is that of one process, or none.

Tests `shards.py`, `sharded_model.py`, `sharded_layers.py`, `sharded_passes.py`, `sharded_network.py`,
`sharded_linearization.py`, `sharded_curvature.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import curvops as co
from curvops import linalg
from tests.ranks.processes import run_on_ranks
from tests.ranks.questions import DOUBLE, seeded
from tests.ranks.questions import data as few_data
from tests.ranks.sharded_models import data, network, sharded
from tests.ranks.test_faults import network as perceptron
from tests.ranks.test_faults import outcome

PROBLEMS = {"transformer": "classification", "tied": "classification", "convolutions": "regression"}
SHARDS = {2: ((0, 3, 4), (4, 13)), 3: ((0, 5), (5, 5), (5, 6, 8, 13))}
"""The ends of the batches of each rank: unequal in number, one of no point."""
Question = tuple[str, Callable[[], Any]]


def linearise(problem: str, mesh: Any = None, **options: Any) -> Any:
    x, y = data(problem)
    if mesh is None:
        return co.linearize(network(problem), (x, y), PROBLEMS[problem], **options)
    ends = SHARDS[mesh.size()][mesh.get_rank()]
    batches = [(x[start:stop], y[start:stop]) for start, stop in pairwise(ends)]
    own = batches if len(ends) > 2 else batches[0]
    model = sharded(network(problem), mesh)
    return co.linearize(model, own, PROBLEMS[problem], process_group=mesh.get_group(), **options)


def questions(lin: Any, mesh: Any = None) -> Iterator[Question]:
    def place(whole: Tensor) -> Any:
        return whole if mesh is None else distribute_tensor(whole, mesh, [Shard(0)])

    D = lin.num_parameters
    V = place(torch.randn(D, 4, generator=seeded(5), dtype=DOUBLE))
    G, F = co.GGN(lin), co.EmpiricalFisher(lin)
    yield "weights", lambda: lin.theta
    yield "log-likelihood", lin.log_likelihood
    yield "gradient", lin.gradient
    yield "outputs", lin.outputs
    for name, A in {"GGN": G, "Fisher": F, "Fisher of tokens": co.EmpiricalFisher(lin, per_token=True)}.items():
        yield f"{name}: product", lambda A=A: A @ V
        yield f"{name}: again", lambda A=A: A @ V
        yield f"{name}: product of a vector", lambda A=A: A @ V[:, 0] if mesh is None else A @ place(_column(V))
        yield f"{name}: diagonal", lambda A=A: A.diagonal()
    yield "Monte-Carlo GGN: product", lambda: co.GGN(lin, mc_samples=2, generator=seeded()) @ V
    for fisher in ("exact", "empirical", "mc"):
        yield (
            f"{fisher} diagonal: product",
            lambda f=fisher: co.DiagonalGGN(lin, f, generator=seeded() if f == "mc" else None) @ V,
        )
    P = G.add_diagonal(0.5)
    yield "sum: product", lambda: (0.3 * G + F).add_diagonal(torch.linspace(0.5, 2, D, dtype=DOUBLE)) @ V
    yield "cg", lambda: linalg.cg(P, V, rtol=1e-12).x
    yield "minres", lambda: linalg.minres(P, V, rtol=1e-12).x
    yield "lanczos", lambda: linalg.lanczos(P, 6, generator=seeded()).T
    yield "eigsh", lambda: linalg.eigsh(P, 3, rtol=1e-12, generator=seeded()).values
    yield "trace", lambda: linalg.trace(G, max_matvecs=12, generator=seeded()).value
    yield "diagonal", lambda: linalg.diagonal(G, max_matvecs=12, generator=seeded()).value
    yield "logdet", lambda: linalg.logdet(G, shift=0.5, max_matvecs=40, generator=seeded()).value
    yield "low rank", lambda: co.low_rank(G, 20, generator=seeded()) @ V
    yield "low rank and prior: solve", lambda: linalg.solve(co.low_rank(G, 20, generator=seeded()).add_diagonal(0.5), V)
    yield "draws", lambda: linalg.draw(G, 3, generator=seeded())
    yield "draws with a prior", lambda: linalg.draw(P, 3, generator=seeded())


def _column(V: Any) -> Tensor:
    return V.full_tensor()[:, 0].contiguous()


def answers(lin: Any, mesh: Any = None) -> dict[str, np.ndarray]:
    found = {}
    for name, ask in questions(lin, mesh):
        answer = ask()
        answer = answer.full_tensor() if isinstance(answer, DTensor) else answer
        found[name] = torch.as_tensor(answer).detach().numpy()
    return found


def on_rank(group: Any) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(group),))
    return {problem: answers(linearise(problem, mesh), mesh) for problem in PROBLEMS}


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return {problem: answers(linearise(problem)) for problem in PROBLEMS}


@pytest.mark.parametrize("size", [2, 3])
def test_answers_are_those_of_one_process_with_all_parameters(expected, size) -> None:
    wrong = []
    for rank, by_problem in run_on_ranks(size, on_rank).items():
        assert not isinstance(by_problem, str), f"rank {rank}: {by_problem}"
        for problem, own in by_problem.items():
            assert own.keys() == expected[problem].keys()
            for name, truth in expected[problem].items():
                error = np.abs(own[name] - truth).max() / max(1e-300, np.abs(truth).max())
                if not error < 1e-10:
                    wrong.append(f"rank {rank} of {size}, {problem}: {name} is off by {error:.2g}")
    assert not wrong, "\n".join(wrong)


def variations(mesh: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What is done to a model, its wrappers or its data, for which a product is still that of one process."""
    group = mesh.get_group()
    x, y = few_data("labels")
    own = x[dist.get_rank(group) :: mesh.size()], y[dist.get_rank(group) :: mesh.size()]

    def lin_of(model: Any, **options: Any) -> Any:
        return co.linearize(model, own, "classification", process_group=group, **options)

    def product(lin: Any) -> Any:
        V = torch.randn(lin.num_parameters, 2, generator=seeded(7), dtype=DOUBLE)
        return (co.GGN(lin) @ distribute_tensor(V, mesh, [Shard(0)])).full_tensor()

    for again in (True, False):
        model = fully_shard(perceptron(), mesh=mesh, reshard_after_forward=again)
        yield f"reshard_after_forward={again}", lambda m=model: product(lin_of(m))
    leaves = perceptron()
    for leaf in (leaves[0], leaves[2]):
        fully_shard(leaf, mesh=mesh)
    yield "each layer by itself", lambda: product(lin_of(fully_shard(leaves, mesh=mesh)))
    yield (
        "along the inputs",
        lambda: product(lin_of(fully_shard(perceptron(), mesh=mesh, shard_placement_fn=_along_inputs))),
    )
    yield "a small budget", lambda: product(lin_of(fully_shard(perceptron(), mesh=mesh), memory_budget=1))

    ran = fully_shard(perceptron(), mesh=mesh, reshard_after_forward=False)
    ran(own[0])  # which leaves the parameters whole
    yield "after a pass", lambda: product(lin_of(ran))

    def trained() -> Any:
        model = fully_shard(perceptron(), mesh=mesh)
        lin = lin_of(model)
        optimiser = torch.optim.SGD(model.parameters(), 0.5)
        for _ in range(2):
            model(own[0]).square().sum().backward()
            optimiser.step()
        before = {name: p.full_tensor().clone() for name, p in model.named_parameters()}
        slopes = {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}
        model.train()
        found = product(lin)
        assert all(part.training for part in model.modules())
        for name, p in model.named_parameters():
            assert torch.equal(p.full_tensor(), before[name]) and torch.equal(p.grad.full_tensor(), slopes[name]), name
        return found

    yield "trained further", trained

    def noted() -> Any:
        lin = lin_of(fully_shard(perceptron(), mesh=mesh))
        V = torch.randn(lin.num_parameters, 2, generator=seeded(7), dtype=DOUBLE)
        whole = co.linearize(perceptron(), (x, y), "classification").model.selection.split(V)
        named = lin.unflatten(lin.flatten(whole))
        assert all(torch.equal(named[name].full_tensor(), whole[name]) for name in whole)
        return (co.GGN(lin) @ lin.flatten(named)).full_tensor()

    yield "vectors by name", noted
    half = fully_shard(perceptron(), mesh=mesh)
    yield "some parameters", lambda: product(lin_of(half, parameters=["2.*"]))


def _along_inputs(parameter: Tensor) -> Shard | None:
    return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % 2 == 0 else None


def whole_variations() -> dict[str, np.ndarray]:
    x, y = few_data("labels")

    def product(**options: Any) -> Tensor:
        lin = co.linearize(perceptron(), (x, y), "classification", **options)
        return co.GGN(lin) @ torch.randn(lin.num_parameters, 2, generator=seeded(7), dtype=DOUBLE)

    return {"": product().numpy(), "some parameters": product(parameters=["2.*"]).numpy()}


def variations_on_rank(group: Any) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(group),))
    return {name: found.numpy() for name, ask in variations(mesh) for found in [ask()]}


def test_any_way_to_shard_and_whatever_is_done_to_the_model_gives_the_same_product() -> None:
    truths = whole_variations()
    for rank, found in run_on_ranks(2, variations_on_rank).items():
        assert not isinstance(found, str), f"rank {rank}: {found}"
        for name, product in found.items():
            truth = truths.get(name, truths[""])
            assert np.abs(product - truth).max() < 1e-10 * np.abs(truth).max(), f"rank {rank}: {name}"


def refused_on_rank(group: Any) -> dict[str, str]:
    """What `linearize` says of models that it does not take."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(group),))
    x, y = few_data("labels")
    own = x[dist.get_rank(group) :: mesh.size()], y[dist.get_rank(group) :: mesh.size()]

    def said(model: Any, **given: Any) -> str:
        return outcome(lambda: co.linearize(model, own, "classification", **given))

    params = {name: distribute_tensor(tensor.detach(), mesh) for name, tensor in perceptron().named_parameters()}
    function: Callable[..., Any] = lambda params, x: x @ params["0.weight"].mT  # noqa: E731
    inner = perceptron()
    fully_shard(inner[2], mesh=mesh)
    return {
        "DTensors in a mapping": said((function, params)),
        "FSDP1": said(FullyShardedDataParallel(perceptron(), device_id=torch.device("cpu")), process_group=group),
        "a part": said(nn.Sequential(inner, nn.Identity()), process_group=group),
        "without a group": said(fully_shard(perceptron(), mesh=mesh)),
        "another engine": said(fully_shard(perceptron(), mesh=mesh), process_group=group, engine="streamed"),
        "a subnetwork": said(fully_shard(perceptron(), mesh=mesh), process_group=group, parameters=torch.arange(3)),
    }


def test_what_is_not_known_is_refused_by_name() -> None:
    for rank, answers in run_on_ranks(2, refused_on_rank).items():
        assert isinstance(answers, dict), f"rank {rank}: {answers}"
        assert "is a DTensor" in answers["DTensors in a mapping"]
        assert "FullyShardedDataParallel" in answers["FSDP1"]
        assert "call fully_shard on the model, too" in answers["a part"]
        assert "process_group=mesh.get_group()" in answers["without a group"]
        assert "engine='streamed' would gather all parameters" in answers["another engine"]
        assert "a subnetwork, which is not known" in answers["a subnetwork"]
