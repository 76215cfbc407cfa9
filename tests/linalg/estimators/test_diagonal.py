import math

import pytest
import torch

from curvops.linalg import diagonal
from tests.linalg.known import Noted
from tests.linalg.matrices import generator


@pytest.mark.parametrize(("name", "budget"), [("power", 10), ("spike", 16)])
def test_intervals_of_diagonal_matrices_hold_though_all_samples_are_off_together(name, budget):
    # The spread of the samples held 81 and 83 % of the entries. 20 runs, whose shares have a standard deviation of 8
    # points: at 94 % (98 %), below 90 % has a false-alarm rate of 2 % (0.1 %).
    k = torch.arange(1, 513, dtype=torch.float64)
    A = torch.diag(k**-2 if name == "power" else torch.where(k == 1, 512.0, 1.0).double())
    g, held = generator(), []
    for _ in range(20):
        low, high = diagonal(A, max_matvecs=budget, generator=g).interval()
        held.append(((low - 1e-12 <= A.diagonal()) & (A.diagonal() <= high + 1e-12)).double().mean())
    assert torch.stack(held).mean() >= 0.9


def test_bekas_streams_the_mean_of_its_probes():
    A = torch.randn(90, 90, dtype=torch.float64, generator=generator(1))
    noted = Noted(A, is_symmetric=False)
    e = diagonal(noted, method="bekas", max_matvecs=85, generator=generator())
    assert len(noted.blocks) > 1
    samples = noted.probes * (A @ noted.probes)
    torch.testing.assert_close(e.value, samples.mean(1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(e.stderr, samples.std(1) / math.sqrt(85), rtol=1e-10, atol=0)
