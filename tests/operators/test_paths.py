"""Networks that run otherwise for many points than for few, or for some points: every result is the plain network's.

What an engine knows of a network it saw at a few points (tests `path_of` and `Engines.record`).
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvops as co

FEW = 9
"""Points up to which these networks run as they look; engines prove layers on 8."""
N = 16


class Network(nn.Module):
    """Two hidden layers and a head; `run` makes the outputs, from the module and x, of more than `few` points."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor], few: int) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 2)
        self.run, self.few = run, few

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x) if len(x) > self.few else plain(self, x)


def plain(m: Any, x: Tensor) -> Tensor:
    return m.head(torch.tanh(m.second(torch.tanh(m.first(x)))))


def first_by_its_weight(m: Any, x: Tensor) -> Tensor:
    return m.head(torch.tanh(m.second(torch.tanh(F.linear(x, m.first.weight, m.first.bias)))))


def head_by_its_weight(m: Any, x: Tensor) -> Tensor:
    return F.linear(torch.tanh(m.second(torch.tanh(m.first(x)))), m.head.weight, m.head.bias)


def second_both_ways(m: Any, x: Tensor) -> Tensor:
    a = torch.tanh(m.first(x))
    return m.head(torch.tanh(0.25 * m.second(a) + 0.75 * F.linear(a, m.second.weight, m.second.bias)))


def turned_around(m: Any, x: Tensor) -> Tensor:
    return m.head(torch.tanh(m.second(torch.tanh(m.first(x).flip(0))))).flip(0)


def in_two_calls(m: Any, x: Tensor) -> Tensor:
    return m.head(torch.tanh(m.second(torch.tanh(torch.cat([m.first(part) for part in x.split(7)])))))


def sorted_by_an_input(m: Any, x: Tensor) -> Tensor:
    order = x[:, 0].argsort()
    return plain(m, x[order])[order.argsort()]


def added_by_kind(m: Any, x: Tensor) -> Tensor:
    """As a mixture of experts does: points come and go by an index."""
    order = x[:, 1].argsort()
    return torch.zeros_like(x[:, :2]).index_add(0, order, plain(m, x[order]))


RUNS = [
    first_by_its_weight,
    head_by_its_weight,
    second_both_ways,
    turned_around,
    in_two_calls,
    sorted_by_an_input,
    added_by_kind,
]


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(N, 3, dtype=torch.float64)
    return x, torch.randint(2, (N,))


def linearized(run: Any, sizes: tuple[int, ...], engine: str = "auto", few: int = FEW, **options: Any) -> Any:
    """The network on all points, in batches of these sizes."""
    torch.manual_seed(0)
    model = Network(run, few).double()
    x, y = data()
    batches = list(zip(x.split(sizes), y.split(sizes)))
    return co.linearize(model, batches, "classification", engine=engine, **options)


QUESTIONS: dict[str, Callable[[Any], Tensor]] = {
    "Hessian": lambda lin: co.Hessian(lin).to_dense(),
    "Fisher": lambda lin: co.EmpiricalFisher(lin).to_dense(),
    "diagonal": lambda lin: co.DiagonalGGN(lin).to_dense(),
    "KFAC": lambda lin: co.KFAC(lin).to_dense(),
    "KFAC empirical": lambda lin: co.KFAC(lin, fisher="empirical", sharing="reduce").to_dense(),
    "EKFAC": lambda lin: co.EKFAC(lin).to_dense(),
    "blocks": lambda lin: co.BlockDiagonal(lin, blocks="layer").to_dense(),
    "subnetwork": lambda lin: co.Subnetwork(co.GGN(lin), torch.arange(0, 50, 3)).to_dense(),
    "kernel": lambda lin: co.TangentKernel(lin, 2.0).to_dense(),
    "last layer": lambda lin: co.GGN(last_layer(lin)).to_dense(),
    "gradient": lambda lin: lin.gradient(),
}
BY_ENGINE: dict[str, Callable[[Any], Tensor]] = {
    "GGN": lambda lin: co.GGN(lin).to_dense(),
    "jacobian": lambda lin: lin.jacobian().to_dense(),
    "KFAC": lambda lin: co.KFAC(lin).to_dense(),
}


def last_layer(lin: Any) -> Any:
    """The same network and batches with the head alone selected."""
    network, sizes = lin.model.module, tuple(batch.num_points for batch in lin.data)
    return linearized(network.run, sizes, few=network.few, parameters="last_layer")


@cache
def expected(sizes: tuple[int, ...], name: str) -> Tensor:
    return (QUESTIONS | BY_ENGINE)[name](linearized(plain, sizes))


def same(found: Tensor, right: Tensor) -> bool:
    return bool((found - right).abs().max() <= 1e-10 * right.abs().max())


def require_plain_results(run: Any, sizes: tuple[int, ...], few: int, leave_out: str = "") -> None:
    """Of each question in a linearisation of its own."""
    for name, ask in QUESTIONS.items():
        if name != leave_out:
            assert same(ask(linearized(run, sizes, few=few)), expected(sizes, name)), (sizes, name)


def require_products_by_each_engine(run: Any, sizes: tuple[int, ...], few: int) -> None:
    """Before and after rows."""
    for choice, times in (("auto", 2), ("layerwise", 1), ("autodiff", 1)):
        lin = linearized(run, sizes, choice, few)
        for name, ask in [*BY_ENGINE.items()] * times:
            assert same(ask(lin), expected(sizes, name)), (sizes, name, choice)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_curvatures_are_those_of_the_plain_network(run: Any) -> None:
    """In batches of which the first is run as it looks; `few = 0` below is one batch of all points."""
    require_plain_results(run, (3, N - 3), FEW)
    require_products_by_each_engine(run, (3, N - 3), FEW)


@pytest.mark.parametrize("run", [turned_around, added_by_kind], ids=lambda run: run.__name__)
def test_points_may_be_in_another_order_within_any_network(run: Any) -> None:
    """The head of one that adds up points is not its last layer."""
    require_plain_results(run, (N,), 0, "last layer" if run is added_by_kind else "")
    require_products_by_each_engine(run, (N,), 0)


def second_at_positive_points(m: Any, x: Tensor) -> Tensor:
    a = torch.tanh(m.first(x))
    b = F.linear(a, m.second.weight, m.second.bias) if len(x) > FEW else m.second(a)
    return m.head(a + b * (x[:, :1] > 0) if (x[:, 0] > 0).any() else a)


def test_a_layer_that_no_point_of_a_first_half_reaches_has_its_rows_at_the_second() -> None:
    """Each half is run for itself; the rows of one half stood at the points of the other."""
    torch.manual_seed(0)
    model, (x, y) = Network(second_at_positive_points, 0).double(), data()
    x[:, 0] = x[:, 0].abs() * torch.linspace(-1, 1, N).sign()
    sides = [co.GGN(co.linearize(model, (x, y), "classification", engine=e)) for e in ("autodiff", "layerwise")]
    assert same(co.Subnetwork(sides[1], torch.arange(sides[1].shape[0])).to_dense(), sides[0].to_dense())


@cache
def posterior(run: Any, curvature: Any) -> Any:
    return co.laplace(linearized(run, (N,)), curvature, prior_precision=2.0, check_mode=False)


OTHERS = [(run, kind) for run in (second_both_ways, added_by_kind) for kind in (co.GGN, co.DiagonalGGN, co.EKFAC)]


@pytest.mark.parametrize(("run", "curvature"), [*((run, co.KFAC) for run in RUNS), *OTHERS])
def test_predictions_and_evidence_are_those_of_the_plain_network(run: Any, curvature: Any) -> None:
    """At fewer and at more test points than the layers are proved on, in one posterior."""
    found, right = posterior(run, curvature), posterior(plain, curvature)
    torch.manual_seed(2)
    for count in (2, 14, 1):
        x = torch.randn(count, 3, dtype=torch.float64)
        for joint in (False, True):
            ours, theirs = (p.predict(x, joint=joint) for p in (found, right))
            assert same(ours.mean, theirs.mean)
            assert same(ours.covariance_matrix, theirs.covariance_matrix)
    assert same(found.log_evidence().value, right.log_evidence().value)


WAYS = [*((run, "ggn") for run in RUNS), (first_by_its_weight, "empirical")]


@pytest.mark.parametrize(("run", "fisher"), WAYS, ids=lambda given: getattr(given, "__name__", given))
def test_a_filter_of_batches_of_other_sizes_is_that_of_the_plain_network(run: Any, fisher: Any) -> None:
    """What was proven at one batch serves only passes like it: a layer has a rule at some steps, and none at others."""
    x, y = data()
    ends = []
    for r in (run, plain):
        torch.manual_seed(0)
        target = co.sampling.log_posterior(Network(r, FEW).double(), "classification", prior_precision=2.0, data_size=N)
        kalman = co.sampling.ekf(target, fisher=fisher)
        state = kalman.init(target.params)
        for part in (slice(0, 3), slice(3, N), slice(0, 12), slice(0, 5)):
            state = kalman.update(state, (x[part], y[part]))[0]
        ends.append((state.theta, state.precision["diagonal"]))
    assert all(map(same, *ends))


def test_a_batch_on_another_path_is_named_in_the_plan() -> None:
    lin = linearized(first_by_its_weight, (N,), "layerwise")
    assert "a layer ran differently in a batch" not in str(lin.plan)
    co.GGN(lin).to_dense()
    assert "autodiff: a layer ran differently in a batch" in str(lin.plan)
    assert not lin.plan.others  # its rows are those of the layer rules


def test_points_that_depend_on_the_others_of_a_large_batch_are_refused() -> None:
    def centred(m: Any, x: Tensor) -> Tensor:
        return plain(m, x) - plain(m, x).mean(0)

    for ask in (co.DiagonalGGN, co.KFAC):
        with pytest.raises(ValueError, match=f"depend on the other points of its batch of {N}"):
            ask(linearized(centred, (N,))).to_dense()


def test_gradients_in_inputs_name_layers_that_run_otherwise() -> None:
    lin = linearized(first_by_its_weight, (N,))
    x = torch.randn(N, 3, dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"first.bias.*fewer points at a time"):
        (lin.jacobian(x, differentiable=True) @ torch.ones(lin.num_parameters).double()).sum().backward()


def test_a_pass_of_a_proven_path_costs_no_other() -> None:
    """Eight points prove the layers once for batches of every size."""
    sizes: list[int] = []

    def counted(m: Any, x: Tensor) -> Tensor:
        sizes.append(len(x))
        return plain(m, x)

    lin = linearized(counted, (N - 3, 3), few=0)
    co.DiagonalGGN(lin).to_dense()
    assert sizes.count(N - 3) == 1 and sizes.count(8) == 2
    for ask in (co.DiagonalGGN, co.KFAC):
        sizes.clear()
        ask(lin).to_dense()
        assert sizes == [N - 3, 3]
