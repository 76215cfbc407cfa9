"""What every test runs under. Shapes are checked by jaxtyping's own pytest option, set in pyproject.toml."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

import jaxtyping
import pytest
import torch


def pytest_configure() -> None:
    torch.set_num_threads(1)  # two test processes share the two cores


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    no_device = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(no_device)


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _torch_left_as_found() -> Iterator[None]:
    """The library never changes a global default, so no test may leave one changed."""
    before = torch.get_default_dtype(), torch.is_grad_enabled()
    yield
    after = torch.get_default_dtype(), torch.is_grad_enabled()
    torch.set_default_dtype(before[0])
    torch.set_grad_enabled(before[1])
    assert after == before


@pytest.fixture
def annotations_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a user: what a function says of a wrong argument is its own, not the shape checks' of the test run."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


FOREIGN_SOLVERS = (
    "linear_operator.utils.linear_cg",
    "linear_operator.utils.lanczos.lanczos_tridiag",
    "linear_operator.utils.stochastic_lq.StochasticLQ.lanczos_batch",
    "linear_operator.utils.minres",
    "linear_operator.utils.contour_integral_quad",
    "linear_operator.functions._sqrt_inv_matmul.SqrtInvMatmul.forward",
)


@pytest.fixture
def no_foreign_solvers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every iteration of linear_operator raises."""

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise AssertionError("linear_operator's own iteration was called")

    for target in FOREIGN_SOLVERS:
        monkeypatch.setattr(target, refuse)
