"""Other libraries' solvers and estimators: what an adapter is, and where the adapters are found."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from curvops.cli.bench.measure import Trail
from curvops.cli.bench.methods import Made, Settings
from curvops.cli.bench.own import imported
from curvops.cli.bench.problem import BenchError, Problem
from curvops.linalg import Estimate

ADAPTERS = ("benchmarks.peer_solvers", "benchmarks.peer_estimators")
"""Modules of a clone, not of the installed package; each has a table PEERS."""


class Answer(NamedTuple):
    """What a peer hands back: the solution and its own verdict."""

    x: Tensor
    verdict: str
    iterations: int | None = None


class Peer(NamedTuple):
    """A solver of another library: its module, what A must be, and how to call it."""

    module: str
    needs: str
    run: Callable[[Problem, Made, Settings, Trail], Answer]
    preconditioned: bool = True


class PeerEstimator(NamedTuple):
    """An estimator of another library: its module, what it estimates, what A must be, and how to call it."""

    module: str
    quantity: str
    needs: str
    run: Callable[[Problem, int, torch.Generator], Estimate]


def peers() -> dict[str, Peer | PeerEstimator]:
    """The adapters by name, whether or not their libraries are installed.

    Raises:
        BenchError: the adapters are not here, as outside a clone.
    """
    found: dict[str, Peer | PeerEstimator] = {}
    for name in ADAPTERS:
        try:
            found |= imported(name).PEERS
        except (ImportError, AttributeError) as error:
            raise BenchError(
                f"--peers needs the adapters {' and '.join(ADAPTERS)} to other libraries, which are not installed with "
                f"curvops: run it from the root of a clone of the project ({type(error).__name__}: {error})."
            ) from error
    return found


def installed(module: str) -> bool:
    """Whether a peer's library can be imported."""
    return find_spec(module) is not None
