"""What every test runs under.

Shapes are checked by jaxtyping's own pytest option, set in pyproject.toml, in the first case of every test function,
there in the first calls of each function of the library (`shape_checks`): the checks take two to four times the
library's own time on small matrices, and other cases run the same code. Of a suite of tests that many classes inherit,
one test of every class and every test of one class count as first cases.
"""

import functools
import gc
import os
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest

from tests import shape_checks
from tests.times import a_minute_between_saves

collect_ignore = ["any_machine.py", "another_rounding.py", "cuda/stand_in.py"]  # a script, and plugins
shape_checks.install()  # before any module of the library is imported
# Whatever the environment says, the two test processes and those that tests start compile each module once.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_configure(config: pytest.Config) -> None:
    global torch, using_threads
    if config.getoption("dist", "no") != "no":
        return  # the process that hands out the tests, which begin when it has been through: torch takes it seconds
    import torch

    from tests.threads import using_threads

    gc.disable()  # until all tests are collected
    os.fsync = lambda fd: None  # no file of a test need outlive a loss of power: 8 ms each, and as many to remove it
    torch.set_num_threads(int(os.environ.get("TEST_THREADS", "1")))  # two test processes share the two cores
    if not torch.cuda.is_available():  # torch's own notes the stack for each kind of device that might come: 1 ms
        torch.manual_seed = torch.default_generator.manual_seed


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen = set()
    for item in items:
        if isinstance(item, pytest.Function):
            case = {item.function, item.cls or item.function}
            if case <= seen:
                item.fixturenames.insert(0, "annotations_unchecked")
            seen |= case
    if not torch.cuda.is_available():  # tests/cuda/test_stand_in.py runs what is left out here
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def pytest_collection_finish() -> None:
    """What is there before the first test stays: the garbage collector need not look at 800,000 objects each time."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread: a fork waits for ever for those of its parent's pool, which it has not."""
    with using_threads(1):
        yield


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Two threads, as a user has them."""
    with using_threads(2):
        yield


@pytest.fixture(autouse=True)
def _torch_as_found() -> Iterator[None]:
    """Each test has the same seed; the library never changes a global default, so no test may leave one changed."""
    torch.manual_seed(0)
    shape_checks.restart()
    before = torch.get_default_dtype(), torch.is_grad_enabled()
    yield
    after = torch.get_default_dtype(), torch.is_grad_enabled()
    torch.set_default_dtype(before[0])
    torch.set_grad_enabled(before[1])
    assert after == before


@pytest.fixture
def annotations_unchecked() -> Iterator[None]:
    """As for a user: without the shape checks of the test run, whose errors would come before the function's own."""
    calls, shape_checks.CALLS = shape_checks.CALLS, 0
    yield
    shape_checks.CALLS = calls


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


@pytest.fixture
def saved_at_each_step() -> Iterator[None]:
    """Checkpoints are saved whenever they may be, without waiting for the disk."""
    with a_minute_between_saves():
        yield


@pytest.fixture
def after(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Ends a run after so many steps of its progress, `left`; counts them, `made`: products, or batches."""
    # Here, since the process that hands out the tests reads this file, too, and needs none of curvops.
    import curvops as co
    from tests.linalg.interrupted import Killed

    state = {"left": float("inf"), "made": 0}

    def step(*_: Any) -> None:
        state["left"] -= 1
        state["made"] += 1
        if state["left"] < 0:
            raise Killed

    monkeypatch.setattr(co, "linearize", functools.partial(co.linearize, progress=step))
    return state
