"""What every test runs under. Shapes are checked by jaxtyping's own pytest option, set in pyproject.toml."""

from __future__ import annotations

from collections.abc import Iterator

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
