"""`post.plan` and `P.plan` say what is done: which algorithm runs is seen where it is called."""

import pytest
import torch

import curvops as co
from curvops.linalg.core import solve_routes as routes
from tests.linalg.solvers.test_solve import TABLE
from tests.randomness import perceptron, seeded

DOUBLE = torch.float64
METHODS = {"dense": "cg", "cg with a sketch": "cg", "formed matrix": "closed form", "formed kernel": "dual"}
"""What draws call a route, where it is another name."""


def network(width, points, outputs="classification"):
    """A network of 4 inputs and 3 classes, its GGN's kernel wide or narrow beside its weights."""
    model = perceptron(4, width, 3)
    x = torch.randn(points, 4, dtype=DOUBLE)
    return co.linearize(model, (x, torch.arange(points) % 3), outputs)


CASES = {  # the posterior, columns, the route
    "dense": (lambda: co.laplace(network(20, 30), co.GGN, 1.0, check_mode=False), 3, "dense"),
    "closed form": (lambda: co.laplace(network(20, 30), co.KFAC, 1.0, check_mode=False), 3, "closed form"),
    "formed matrix": (lambda: co.laplace(network(40, 200), co.GGN, 1.0, check_mode=False), 41, "formed matrix"),
    "cg with a sketch": (lambda: co.laplace(network(40, 200), co.GGN, 1.0, check_mode=False), 3, "cg with a sketch"),
    "a vector": (
        lambda: co.laplace(
            network(40, 20), co.GGN, prior_precision=torch.full((323,), 2.0, dtype=DOUBLE), check_mode=False
        ),
        3,
        "cg with a sketch",
    ),
    "an operator": (
        lambda: co.laplace(
            network(40, 20), co.GGN, prior_precision=co.linalg.Dense(2 * torch.eye(323).double(), psd=True)
        ),
        3,
        "cg",
    ),
    "formed kernel": (lambda: co.laplace(network(200, 10), co.GGN, 1.0, check_mode=False), 3, "formed kernel"),
    "within rounding": (
        lambda: co.laplace(network(200, 10), co.GGN, prior_precision=1e-12, check_mode=False),
        3,
        "cg with a sketch",
    ),
}


@pytest.mark.filterwarnings("ignore::curvops.errors.ModeWarning")
@pytest.mark.parametrize("name", CASES)
def test_draws(name):
    make, columns, route = CASES[name]
    post = make()
    if name == "within rounding":  # which only the formed kernel tells
        assert post.plan(columns).chosen["draws"] == "formed kernel"
        post.log_evidence()
    assert post.plan(columns).chosen["draws"] == route
    found = post.deviations(columns, generator=seeded())
    assert found.method == METHODS.get(route, route)


DETERMINANTS = {"dense": "spectrum", "closed form": "closed form", "formed kernel": "formed kernel"}


@pytest.mark.parametrize("name", DETERMINANTS)
def test_determinants(name):
    make, columns, _ = CASES[name]
    post = make()
    assert post.plan(columns).chosen["determinants"] == DETERMINANTS[name]
    found = post.log_evidence().log_determinant_ratio
    assert found.stderr == 0


def test_memory_decides_between_the_two_spaces():
    """Outputs in all a quarter of the weights, whose kernel costs more than the draws."""
    lin = network(40, 20)
    post = co.laplace(lin, co.EmpiricalFisher, 1.0, check_mode=False)
    assert post.plan(3).chosen["draws"] == "cg with a sketch"
    with lin.memory.holding(lin.memory.room() - 16 * 2 * 323 * 8):
        assert post.plan(2).chosen["draws"] == "cg with a sketch"
        assert post.plan(3).chosen["draws"] == "dual"
        assert post.deviations(3, generator=seeded()).method == "dual"


@pytest.mark.parametrize("name", [name for name in TABLE if hasattr(TABLE[name][0], "plan")])
def test_systems_of_operators(name):
    A, method = TABLE[name]
    assert routes.chosen(A.plan(2).tables["solve"]).name.removesuffix(" with a sketch") == method


@pytest.mark.filterwarnings("ignore::curvops.errors.ModeWarning")
@pytest.mark.parametrize(("width", "data"), [(40, 200), (40, 20), (200, 10), (600, 10)])
def test_nothing_asked_before_changes_a_prediction(width, data):
    """With a formed matrix, and with a formed kernel, for weights few and many; nor the plan but for what is formed."""
    x, first = torch.linspace(-1, 1, 8, dtype=DOUBLE).view(2, 4), torch.linspace(-2, 2, 400, dtype=DOUBLE).view(100, 4)
    fresh, used = (co.laplace(network(width, data), co.GGN, 1.0, check_mode=False) for _ in range(2))
    before = used.plan(3).chosen
    for points in (first, first[:1], first[:1]):
        assert bool((used.predict(points).variance > 0).all())
    assert used.plan(3).chosen == before
    assert torch.equal(used.predict(x).variance, fresh.predict(x).variance)
