"""Probes are numbered: one seed gives the same ones, whatever the memory budget and the width of a block.

Tests `probed.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import curvops as co
from curvops import linalg
from curvops.linalg.core.probed import Probed
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
ASKED = STREAMED | {
    "trace": lambda A, **o: linalg.trace(A, method="xtrace", max_matvecs=40, **o),
    "trace, to a tolerance": lambda A, **o: linalg.trace(A, method="xtrace", rtol=1e-3, max_matvecs=120, **o),
    "trace, hutch++": lambda A, **o: linalg.trace(A, method="hutch++", max_matvecs=60, **o),
    "diagonal": lambda A, **o: linalg.diagonal(A, method="xdiag", max_matvecs=40, **o),
    "norm": lambda A, **o: linalg.frobenius_norm(A, max_matvecs=40, **o),
    "log-determinant": lambda A, **o: linalg.logdet(A, shift=0.01, rtol=0.05, **o),
    "quadrature": lambda A, **o: linalg.spectral_quadrature(A, shift=0.01, rtol=0.05, **o),
    "quadrature with a sketch": lambda A, **o: linalg.spectral_quadrature(A, shift=0.01, probes=6, rank=10, **o),
    "effective dimension": lambda A, **o: linalg.effective_dimension(A, 0.01, rtol=0.1, max_matvecs=300, **o),
    "density": lambda A, **o: linalg.spectral_density(A, probes=6, steps=20, **o),
    "error of a low rank": lambda A, **o: co.low_rank(A, rtol=0.05, **o),
    "error of a fixed rank": lambda A, **o: co.low_rank(A, 60, **o),
}


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.filterwarnings("ignore::curvops.linalg.RankWarning")
def test_a_seed_gives_the_same_probes_under_every_budget(name, monkeypatch) -> None:
    plain, drawn = Probed.probes, []

    def noted(self: Probed, k: int, kind: Any = "signs") -> Any:
        drawn.append(plain(self, k, kind))
        return drawn[-1].clone()

    monkeypatch.setattr(Probed, "probes", noted)
    A = linalg.Dense(symmetric(torch.logspace(1, -4, N, dtype=torch.float64)), psd=True)
    found, values = [], []
    for vectors in BUDGETS:
        drawn.clear()
        room = None if vectors is None else vectors * 8 * N
        values.append(ASKED[name](A, generator=torch.Generator().manual_seed(0), memory_budget=room))
        found.append(drawn.copy())
    whole = torch.cat(found[0], 1)
    for each in found[1:]:
        some = torch.cat(each, 1)
        both = min(some.shape[1], whole.shape[1])
        assert both > 1 and torch.equal(some[:, :both], whole[:, :both])
    if not name.startswith("error"):  # as many probes, after a sketch of fewer columns
        assert len({tuple(block.shape[1] for block in each) for each in found}) > 1
    for value in values if name in STREAMED else ():
        torch.testing.assert_close(value.value, values[0].value, rtol=1e-12, atol=0)
