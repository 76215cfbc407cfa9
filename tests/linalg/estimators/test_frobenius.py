import torch

from curvops.linalg import Reason, frobenius_norm
from tests.linalg.matrices import generator


def test_rectangular():
    A = torch.randn(300, 500, dtype=torch.float64, generator=generator(1))
    e = frobenius_norm(A, rtol=0.01, generator=generator())
    assert e.reason is Reason.CONVERGED and (e.value / A.norm() - 1).abs() < 0.03
