"""GGN products for pytest-benchmark (`make bench`): seconds, one group for each network, the gradient among its rows.

Rows run one after another here, so the machine's drift shows; `python -m benchmarks.products` alternates them.
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import peer_operators, routes
from benchmarks.networks import NETWORKS, Problem, build

ROUNDS = 7
SETTLED = 12
COLUMNS = 16
PROBLEMS = [(name, outputs) for name in NETWORKS for outputs in (10, 100)]


@pytest.fixture(scope="module", params=PROBLEMS, ids=[f"{name}-C{outputs}" for name, outputs in PROBLEMS])
def problem(request: pytest.FixtureRequest) -> Problem:
    """One network with its data."""
    return build(*request.param)


@pytest.fixture
def timed(benchmark: Any, problem: Problem) -> Any:
    """The benchmark in the network's group, with one warm-up run."""
    benchmark.group = problem.label

    def run(function: Any, rounds: int = ROUNDS) -> None:
        benchmark.pedantic(function, rounds=rounds, warmup_rounds=1)

    return run


@pytest.fixture
def vector(problem: Problem) -> Any:
    """One vector (D,)."""
    return problem.block(1)[:, 0].contiguous()


def test_gradient(timed: Any, problem: Problem) -> None:
    """The unit."""
    timed(problem.unit())


def test_cached(timed: Any, benchmark: Any, problem: Problem, vector: Any) -> None:
    """A product once the caches are built."""
    G = routes.ggn(problem)
    routes.settle(G, vector, SETTLED)
    timed(lambda: G @ vector)
    benchmark.extra_info["engine"] = routes.engines(G)


def test_streaming(timed: Any, problem: Problem, vector: Any) -> None:
    """A product with nothing kept."""
    G = routes.ggn(problem, engine="streamed")
    timed(lambda: G @ vector)


def test_first(benchmark: Any, problem: Problem, vector: Any) -> None:
    """The first product of a fresh linearisation, with all that it triggers."""
    benchmark.group = problem.label
    make = routes.first(lambda: routes.ggn(problem), vector)
    benchmark.pedantic(lambda product: product(), setup=lambda: ((make(),), {}), rounds=ROUNDS, warmup_rounds=1)


def test_linearize(timed: Any, problem: Problem) -> None:
    """The call before it."""
    timed(lambda: routes.ggn(problem))


def test_block(timed: Any, benchmark: Any, problem: Problem) -> None:
    """A product with a block: divide by K for a vector's share. The MLP only, as the others take long."""
    if problem.name != "mlp":
        pytest.skip("`python -m benchmarks.products` has blocks on every network")
    V = problem.block(COLUMNS)
    G = routes.ggn(problem)
    routes.settle(G, V, 2)
    timed(lambda: G @ V, rounds=3)
    benchmark.extra_info |= {"engine": routes.engines(G), "columns": COLUMNS}


def test_curvlinops(timed: Any, benchmark: Any, problem: Problem, vector: Any) -> None:
    """A product by another package, where it is installed."""
    other = peer_operators.ggn(problem)
    if other is None:
        pytest.skip("curvlinops is not installed here")
    timed(lambda: other @ vector, rounds=3)
    benchmark.extra_info["package"] = peer_operators.label()
