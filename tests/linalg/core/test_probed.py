"""Probes are numbered: one seed gives the same ones, whatever the memory budget and the width of a block.

Tests `probed.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from curvops import linalg
from tests.linalg.matrices import symmetric

N = 301
"""Too large for dense routes, and no multiple of 16, the numbers that torch makes normal together."""
BUDGETS = (None, 400, 60, 30)
"""Vectors that have room."""
STREAMED: dict[str, Callable[..., Any]] = {
    "trace, hutchinson": lambda A, **o: linalg.trace(A, method="hutchinson", max_matvecs=40, **o),
    "diagonal, bekas": lambda A, **o: linalg.diagonal(A, method="bekas", max_matvecs=40, **o),
    "norm, hutchinson": lambda A, **o: linalg.frobenius_norm(A, method="hutchinson", max_matvecs=40, **o),
}
"""Estimates whose probes are streamed: the memory changes how many run at once, and nothing else."""


@pytest.mark.parametrize("name", STREAMED)
def test_a_seed_gives_the_same_probes_under_every_budget(name) -> None:
    A, values = linalg.Dense(symmetric(torch.logspace(1, -4, N, dtype=torch.float64)), psd=True), []
    for vectors in BUDGETS:
        room = None if vectors is None else vectors * 8 * N
        values.append(STREAMED[name](A, generator=torch.Generator().manual_seed(0), memory_budget=room).value)
    for value in values[1:]:
        torch.testing.assert_close(value, values[0], rtol=1e-12, atol=0)
