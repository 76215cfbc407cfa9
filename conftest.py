"""Names that examples in docstrings use without defining them: `torch`, `nn`, `co`, and a small network.

The docstring of `curvops` shows them to readers. `model` maps points `x` (8, 2) to the logits of two classes, and `y`
are their labels; `lin` is its linearisation with 17 weights, `post` its Laplace posterior. Pages define all they use.
"""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="session")
def _example() -> dict[str, Any]:
    import torch  # here: the tests prepare the library before it is imported
    from torch import nn

    import curvops as co

    x, y = torch.linspace(-1, 1, 16).reshape(8, 2), torch.arange(8) % 2
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(torch.linspace(-1, 1, each.numel()).reshape(each.shape))
    lin = co.linearize(model, (x, y), "classification")
    post = co.laplace(lin, co.GGN, prior_precision=1.0, check_mode=False)
    return {"torch": torch, "nn": nn, "co": co, "model": model, "x": x, "y": y, "lin": lin, "post": post}


@pytest.fixture
def _names_of_examples(_example: dict[str, Any], doctest_namespace: dict[str, Any]) -> None:
    doctest_namespace.update(_example)
    doctest_namespace["torch"].manual_seed(0)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Give the names to docstrings, and to no test, which has fewer fixtures to set up."""
    if isinstance(item, pytest.DoctestItem) and item.path.suffix == ".py":
        item.fixturenames.append("_names_of_examples")
