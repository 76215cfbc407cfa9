"""Names that a user meets after a dot: few, and all of them meant for users."""

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import curvops as co

MOST = 30
REFERENCE = Path(__file__).resolve().parents[1] / "docs" / "reference"


@functools.cache
def objects() -> dict[str, Any]:
    """One of each kind that users hold, and the operators that add names of their own."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    lin = co.linearize(model, (torch.ones(5, 3), torch.arange(5) % 2), "classification")
    G = co.GGN(lin)
    operators = {
        "GGN": G,
        "KFAC": co.KFAC(lin),
        "Hessian": co.Hessian(lin),
        "TangentKernel": co.TangentKernel(lin, 1.0),
        "Jacobian": lin.jacobian(),
        "Gradients": lin.gradients(),
        "Subnetwork": co.Subnetwork(G, torch.tensor([1, 2])),
        "LowRank": co.low_rank(G, 3),
        "Damped": G.add_diagonal(1.0),
        "Inverse": G.add_diagonal(1.0).inverse(),
        "Sliced": G[:3, :2],
        "Kronecker": co.linalg.Kronecker(torch.eye(2)[None], torch.eye(3)[None]),
    }
    post = co.laplace(lin, co.KFAC, prior_precision=1.0, check_mode=False)
    gaussian = co.posterior.GaussianPosterior.of(lin, co.linalg.Diagonal(torch.ones(lin.num_parameters)))
    return {"Linearization": lin, "Laplace": post, "GaussianPosterior": gaussian, **operators}


def test_few_names_at_the_top() -> None:
    assert len(co.__all__) <= MOST
    assert set(dir(co)) == {*co.__all__, "plots", "__version__"}
    assert all(hasattr(co, name) for name in dir(co))
    assert co.metrics.nll and co.posterior.Laplace and co.operators.Linearization and co.likelihoods.RewardPairs


def test_errors_stand_in_one_place_and_where_they_are_used() -> None:
    assert not set(co.errors.__all__) & set(co.__all__)
    assert co.linalg.ConvergenceError is co.errors.ConvergenceError
    assert co.evidence.UndeterminedWarning is co.errors.UndeterminedWarning
    assert co.posterior.ModeWarning is co.errors.ModeWarning


@pytest.mark.parametrize("name", objects())
def test_an_object_shows_what_a_user_calls(name: str) -> None:
    """Each name is there, is not private, and has a description."""
    thing = objects()[name]
    shown = dir(thing)
    assert 0 < len(shown) <= MOST, len(shown)
    assert not [each for each in shown if each.startswith("_")]
    for each in shown:
        assert hasattr(type(thing), each) or hasattr(thing, each), each


@pytest.mark.skipif(not REFERENCE.exists(), reason="not a checkout: the documentation is not here")
@pytest.mark.parametrize("name", ["Linearization", "Laplace"])
def test_what_the_reference_describes_is_shown(name: str) -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in REFERENCE.rglob("*.md"))
    (listed,) = re.findall(
        rf"^::: curvops[\w.]*\.{re.escape(name)}\n +options: \{{[^[]*?members: \[([^]]+)\]", pages, re.MULTILINE
    )
    assert set(re.findall(r"\w+", listed)) <= set(dir(objects()[name]))


def test_a_class_of_ones_own_shows_its_names() -> None:
    class Twice(co.linalg.Operator):
        """Twice the identity."""

        def _size(self) -> torch.Size:
            return torch.Size((2, 2))

        def _product(self, block: torch.Tensor) -> torch.Tensor:
            return self.weight * block

        @property
        def weight(self) -> float:
            """The factor."""
            return 2.0

    assert {"weight", "matmul"} <= set(dir(Twice(torch.ones(2))))
    assert {"tensor", "indices"} <= set(dir(co.Subnetwork(torch.eye(3), [0, 2])))
