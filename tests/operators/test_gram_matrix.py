"""The Gram matrix of J's rows: in both forms, in sets of layers, pieces and panels, against J Jᵀ.

Tests `gram_matrix.py`.
"""

import pytest
import torch
from torch import nn

import curvops as co
from curvops.network import read_precision
from tests.zoo import ZOO, reference

DOUBLE = torch.float64


NETWORKS = {
    "grouped": lambda: nn.Sequential(
        nn.Unflatten(1, (16, 2)), nn.Conv1d(16, 48, 3, padding=1, groups=2, bias=False), nn.Tanh(), nn.Flatten(),
        nn.Linear(96, 3),
    ),
    "sequence": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 16)), nn.Linear(16, 24), nn.Tanh(), nn.Flatten(), nn.Linear(48, 3)
    ),
    "norm": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 16)), nn.Conv1d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(),
        nn.Linear(64, 3),
    ),
}  # fmt: skip


@pytest.fixture(params=sorted(NETWORKS))
def lin(request):
    torch.manual_seed(0)
    x = torch.randn(7, 32, dtype=DOUBLE)
    batches = [(x[:4], torch.arange(4) % 3), (x[4:], torch.arange(3))]
    return co.linearize(NETWORKS[request.param]().double(), batches, "classification")


PRIORS = {
    "number": lambda lin: 2.0,
    "tensors": lambda lin: {name: 1.0 + i for i, name in enumerate(lin.model.selection.names)},
    "vector": lambda lin: (
        torch.rand(lin.num_parameters, dtype=DOUBLE, generator=torch.Generator().manual_seed(2)) + 0.5
    ),
}


@pytest.mark.parametrize(
    ("prior", "room"),
    [("number", None), ("vector", None), ("tensors", 3 * 2**13), ("vector", 0)],
)
def test_the_matrix(lin, prior, room):
    """J A⁻¹ Jᵀ and J A⁻¹ J'ᵀ, whole, and with little memory in sets of layers, or one by one."""
    A, x = PRIORS[prior](lin), torch.randn(5, 32, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))
    J, other = lin.jacobian().to_dense(), lin.jacobian(x).to_dense()
    scale = read_precision("prior", A, lin.model.selection, lin.theta)
    if room is not None:
        lin.memory.keep(lin, lin.memory.room() - room)
    torch.testing.assert_close(co.TangentKernel(lin, A).to_dense(), J / scale @ J.mT, rtol=1e-10, atol=1e-10)
    cross = co.TangentKernel(lin, A, x2=x).to_dense()
    torch.testing.assert_close(cross, J / scale @ other.mT, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("room", [0, 1000, 2000, 4000])
def test_tied_layers_are_held_together(room):
    """A weight that two modules share makes one set of them."""
    (model, x), J = ZOO["shared_parameter"].build(), reference("shared_parameter")
    lin = co.linearize(model, (x, torch.zeros(5, 3)), co.likelihoods.Gaussian(noise=1.0))
    with lin.memory.holding(lin.memory.room() - room):
        torch.testing.assert_close(co.TangentKernel(lin).to_dense(), J @ J.mT, rtol=1e-10, atol=1e-10)


def test_a_kernel_in_another_dtype_stays_symmetric():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    lin = co.linearize(model, (torch.randn(6, 3), torch.arange(6) % 2), "classification")
    for kernel in (co.TangentKernel(lin), co.TangentKernel(lin, 2.0, x=torch.randn(3, 3), x2=torch.randn(2, 3))):
        single = kernel.to(torch.float32)
        assert single.psd == kernel.psd and single.symmetric == kernel.symmetric and single.dtype == torch.float32
        torch.testing.assert_close(single.to_dense().double(), kernel.to_dense(), rtol=1e-4, atol=1e-4)
    P = co.TangentKernel(lin).to(torch.float32).add_diagonal(1.0)
    b = torch.ones(P.shape[-1])
    torch.testing.assert_close(P @ P.solve(b), b, rtol=1e-4, atol=1e-4)
