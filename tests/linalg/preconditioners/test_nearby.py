"""A closed form that holds under another diagonal, as the preconditioner of systems and determinants.

Tests `closed_form.py`.
"""

import pytest
import torch

from curvops.linalg import DirectSum, Kronecker, LowRank, cg, logdet
from curvops.linalg.operators.closed_form import ClosedFormPreconditioner
from tests.linalg.operands import positive, random, uniform

DOUBLE = torch.float64
SIZE = 2100
"""Too many weights of a layer to be formed."""


def layer(scale=300.0):
    return scale * Kronecker(positive(1, 16), positive(1, 130, seed=1))


def layers():
    order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(0))
    return DirectSum(layer(), Kronecker(positive(2, 2), positive(2, 5)), positions=order.split([2080, 20]))


OPERANDS = {
    "layers": layers,
    "half of layers": lambda: 0.5 * layers(),
    "eigenbases": lambda: DirectSum(
        layer().eigen(), layer().eigen()[:20, :20], positions=[range(2080), range(2080, SIZE)]
    ),
    "layers + low rank": lambda: layers() + LowRank(random(SIZE, 3), uniform(3)),
}


def within(spread):
    """A diagonal that varies by this factor, without order."""
    d = torch.logspace(0, 1, SIZE, base=spread, dtype=DOUBLE)
    return d[torch.randperm(SIZE, generator=torch.Generator().manual_seed(1))]


@pytest.mark.parametrize("name", OPERANDS)
def test_it_is_that_of_each_layers_geometric_mean_and_its_floor_a_bound(name):
    base, d = OPERANDS[name](), within(4.0)
    P = base.add_diagonal(d)
    M = P.preconditioner(8)
    assert P._closed_form() is None and isinstance(M, ClosedFormPreconditioner)
    m = M.operator.shift
    assert float((d / m).log().abs().max()) <= torch.tensor(4.0).log() and float((d / m).log().sum().abs()) < 1e-8
    V = random(SIZE, 8)
    torch.testing.assert_close(M @ (base @ V + m.unsqueeze(1) * V), V, rtol=1e-8, atol=1e-9)
    quotients = (V * (P @ V)).sum(0) / (V * (base @ V + m.unsqueeze(1) * V)).sum(0)
    assert M.floor(float(d.min())) <= float(quotients.min())
    found = cg(P, V, preconditioner=M)
    assert found.converged.all() and M.matvecs + found.matvecs < cg(P, V).matvecs


@pytest.mark.parametrize("scale, spread, near", [(300.0, 4.0, True), (300.0, 1e6, False), (1e-3, 4.0, False)])
def test_it_is_taken_where_it_leaves_a_smaller_condition_number_than_a_sketch(scale, spread, near):
    """Beside a weak curvature, scaling by the diagonal is nearly all; a wide prior is not near any number."""
    P = layer(scale).add_diagonal(within(spread)[:2080])
    assert isinstance(P.preconditioner(8), ClosedFormPreconditioner) is near


@pytest.mark.usefixtures("annotations_unchecked")
def test_a_determinant_and_its_interval():
    """12 intervals at 95 %: fewer than 10 hold once in 50 times, and the seeds are fixed."""
    P = layers().add_diagonal(within(4.0).requires_grad_())
    dense = P.detach().to_dense()
    exact, held = dense.logdet(), 0
    for seed in range(12):
        found = logdet(P.detach(), max_matvecs=200, generator=torch.Generator().manual_seed(seed))
        low, high = found.interval()
        held += bool(low <= exact <= high)
        assert found.reason.name == "CONVERGED" and found.samples and found.matvecs < 100
        assert float(found.stderr) <= 0.01 * float(exact - P.shift.detach().log().sum())
    assert held >= 10
    found = logdet(P, max_matvecs=200, generator=torch.Generator().manual_seed(0))
    (slope,) = torch.autograd.grad(found.value, P.shift)
    trace = torch.linalg.inv(dense).trace()
    assert abs(float(slope.sum() / trace) - 1) < 0.1
