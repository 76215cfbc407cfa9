"""Models whose parameters are shared among processes (`fully_shard`): every answer is that of one process, or none.

Tests `sharded_model.py`, `sharded_walk.py`, `sharded_linearization.py`, `operators_over_ranks.py`.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import curvops as co
from curvops import linalg
from tests.ranks.processes import LONGEST, assert_said, assert_those_of_one_process, by_problem, run_on_ranks
from tests.ranks.questions import DOUBLE, answered, seeded
from tests.ranks.questions import data as few_data
from tests.ranks.sharded_models import data, network, sharded
from tests.ranks.test_refusals import network as perceptron
from tests.ranks.test_refusals import outcome

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


def questions(problem: str, lin: Any, mesh: Any = None) -> Iterator[Question]:
    def place(whole: Tensor) -> Any:
        return whole if mesh is None else distribute_tensor(whole, mesh, [Shard(0)])

    D = lin.num_parameters
    V = place(torch.randn(D, 4, generator=seeded(5), dtype=DOUBLE))
    G, F = co.GGN(lin), co.EmpiricalFisher(lin)
    yield "weights", lambda: lin.theta
    yield "log-likelihood", lin.log_likelihood
    yield "gradient", lin.gradient
    yield "outputs", lin.outputs
    operators = {"GGN": G, "Fisher": F}
    if problem == "tied":
        operators["Fisher of tokens"] = co.EmpiricalFisher(lin, per_token=True)
    for name, A in operators.items():
        yield f"{name}: product", lambda A=A: A @ V
        yield f"{name}: diagonal", lambda A=A: A.diagonal()
    yield "GGN: again", lambda: G @ V
    yield "GGN: product of a vector", lambda: G @ (V[:, 0] if mesh is None else place(_column(V)))
    yield "Monte-Carlo GGN: product", lambda: co.GGN(lin, mc_samples=2, generator=seeded()) @ V
    for fisher in ("exact", "empirical", "mc"):
        yield (
            f"{fisher} diagonal: product",
            lambda f=fisher: co.DiagonalGGN(lin, f, generator=seeded() if f == "mc" else None) @ V,
        )
    P = G.add_diagonal(10.0)  # beside eigenvalues that reach 21: iterations are few
    yield "draws", lambda: linalg.draw(G, 3, generator=seeded())
    if problem != "transformer":  # what follows knows of the network its products alone; 1,077 rows: odd
        return
    yield "sum: product", lambda: (0.3 * G + F).add_diagonal(torch.linspace(0.5, 2, D, dtype=DOUBLE)) @ V
    yield "low rank", lambda: co.low_rank(G, 20, generator=seeded()) @ V
    yield "low rank and prior: solve", lambda: linalg.solve(co.low_rank(G, 20, generator=seeded()).add_diagonal(0.5), V)
    yield "draws with a prior", lambda: linalg.draw(P, 3, generator=seeded())


def _column(V: Any) -> Tensor:
    return V.full_tensor()[:, 0].contiguous()


def on_rank(group: Any) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(group),))
    problems = PROBLEMS if mesh.size() == 2 else ["transformer", "tied"]
    return {problem: answered(questions(problem, linearise(problem, mesh), mesh)) for problem in problems}


def whole() -> dict[str, Any]:
    """The answers of one process."""
    return {problem: answered(questions(problem, linearise(problem))) for problem in PROBLEMS}


@pytest.mark.parametrize("size", LONGEST)
def test_answers_are_those_of_one_process_with_all_parameters(expected, size) -> None:
    for problem, found in by_problem(run_on_ranks(size, on_rank)).items():
        assert_those_of_one_process(found, expected[problem])


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
        for name, product in found.items():
            truth = truths.get(name, truths[""])
            assert np.abs(product - truth).max() < 1e-10 * np.abs(truth).max(), f"rank {rank}: {name}"


class Custom(nn.Module):
    """A layer without a rule, and a weight that another module reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(4, 3, dtype=DOUBLE), nn.Parameter(torch.ones(3, dtype=DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale


class ReadsElsewhere(Custom):
    """A layer whose weight its parent also reads."""

    def __init__(self) -> None:
        super().__init__()
        del self.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.inner.weight.sum()


def refused_on_rank(group: Any) -> dict[str, str]:
    """What `linearize`, and what stands on it, say of what they do not know."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(group),))
    x, y = few_data("labels")
    own = x[dist.get_rank(group) :: mesh.size()], y[dist.get_rank(group) :: mesh.size()]

    def said(model: Any, **given: Any) -> str:
        return outcome(lambda: co.linearize(model, own, "classification", **given))

    def of(model: nn.Module, given: Any = None, **options: Any) -> str:
        return said(fully_shard(model, mesh=mesh, **options), **({"process_group": group} | (given or {})))

    params = {name: distribute_tensor(tensor.detach(), mesh) for name, tensor in perceptron().named_parameters()}
    function: Callable[..., Any] = lambda params, x: x @ params["0.weight"].mT  # noqa: E731
    inner = perceptron()
    fully_shard(inner[2], mesh=mesh)
    replicas = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "shard"))
    columns = parallelize_module(perceptron(), mesh, {"0": ColwiseParallel()})
    ignoring, hooked = perceptron(), perceptron()
    hooked[0].register_forward_hook(lambda module, given, output: 2 * output)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    found = {
        "DTensors in a mapping": said((function, params)),
        "FSDP1": said(FullyShardedDataParallel(perceptron(), device_id=torch.device("cpu")), process_group=group),
        "a part": said(nn.Sequential(inner, nn.Identity()), process_group=group),
        "tensor parallel": said(columns, process_group=group),
        "replicas": said(fully_shard(perceptron(), mesh=replicas), process_group=group),
        "half precision": of(perceptron(), mp_policy=half),
        "offloaded": of(perceptron(), offload_policy=CPUOffloadPolicy(pin_memory=False)),
        "ignored": of(ignoring, ignored_params=set(ignoring[0].parameters())),
        "hooked": of(hooked),
        "no rule": of(Custom()),
        "read elsewhere": of(ReadsElsewhere()),
        "dropout": of(nn.Sequential(nn.Dropout(0.5), perceptron()).train()),
        "without a group": of(perceptron(), {"process_group": None}),
        "another engine": of(perceptron(), {"engine": "streamed"}),
        "a subnetwork": of(perceptron(), {"parameters": torch.arange(3)}),
        "a bar": of(perceptron(), {"progress": True}),
    }
    lin = co.linearize(fully_shard(perceptron(), mesh=mesh), own, "classification", process_group=group)
    G, plain = co.GGN(lin), torch.ones(lin.num_parameters, dtype=DOUBLE)
    asks: dict[str, Callable[[], Any]] = {
        "lin.jacobian": lambda: lin.jacobian,
        "KFAC": lambda: co.KFAC(lin),
        "Subnetwork": lambda: co.Subnetwork(G, torch.arange(3)) @ plain[:3],
        "laplace": lambda: co.laplace(lin, co.GGN, prior_precision=1.0),
        "kernel": lambda: co.TangentKernel(lin, 1.0),
        "select": lambda: co.select(lin, 3),
        "subsample": lambda: co.subsample(lin, 3),
        "sampler": lambda: co.sampling.log_posterior(lin, prior_precision=1.0),
        "a plain vector": lambda: G @ plain,
        "a plain vector by name": lambda: lin.unflatten(plain),
        "a vector too short": lambda: G @ distribute_tensor(plain[:-1], mesh, [Shard(0)]),
        "a replicated vector": lambda: G @ distribute_tensor(plain, mesh, [Replicate()]),
        "single precision": lambda: G @ distribute_tensor(plain.float(), mesh, [Shard(0)]),
        "an unknown name": lambda: lin.flatten({"0.weights": plain}),
        "another dtype": lambda: G.to(torch.float32),
        "no samples": lambda: co.GGN(lin, mc_samples=0),
    }
    return found | {name: outcome(ask) for name, ask in asks.items()}


REFUSED = {
    "DTensors in a mapping": "is a DTensor",
    "FSDP1": "FullyShardedDataParallel",
    "a part": "call fully_shard on the model, too",
    "tensor parallel": "is a DTensor",
    "replicas": "only meshes of one dimension",
    "half precision": "MixedPrecisionPolicy(param_dtype=torch.bfloat16)",
    "offloaded": "CPUOffloadPolicy",
    "ignored": "is not sharded: leave it out",
    "hooked": "['0.bias', '0.weight'] have no layer rule",
    "no rule": "['scale'] have no layer rule",
    "read elsewhere": "['inner.weight'] have gradients that differ from those of their layers' rules",
    "dropout": "call model.eval()",
    "without a group": "process_group=mesh.get_group()",
    "another engine": "engine='streamed' would gather all parameters",
    "a subnetwork": "a subnetwork: name a sharded model's parameters",
    "a bar": "progress= is not supported",
    "lin.jacobian": "lin.jacobian is not available for models sharded over ranks",
    "KFAC": "co.KFAC is not available",
    "Subnetwork": "sharded",
    "laplace": "co.linearize of an unsharded copy of the model. Of the sharded one available are its gradient",
    "kernel": "co.TangentKernel is not available",
    "select": "an unsharded copy of the model",
    "subsample": "got ShardedLinearization",
    "sampler": "pass an unsharded copy of the model",
    "a plain vector": "lin.flatten(mapping)",
    "a plain vector by name": "lin.flatten(mapping)",
    "a vector too short": "cannot multiply an operator of shape",
    "a replicated vector": "placements=[Shard(0)]",
    "single precision": "float32",
    "an unknown name": "unknown names ['0.weights']",
    "another dtype": "convert the model before fully_shard",
    "no samples": "mc_samples",
}


def test_what_is_not_known_is_refused_by_name() -> None:
    found = run_on_ranks(2, refused_on_rank)
    assert_said(found, REFUSED)
    assert all("Error" in said.partition(":")[0] for told in found.values() for said in told.values()), found
