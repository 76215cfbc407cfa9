"""Gradients of the tangent kernel in its inputs and its prior, against finite differences.

Tests `gram_matrix.py`, and the blocks and the diagonal in `tangent_kernel.py`.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck

import curvops as co


class WithScale(nn.Module):
    """A network with a parameter that has no layer rule."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale, self.last = nn.Linear(3, 3), nn.Parameter(torch.tensor(0.7)), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)) * self.scale)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3, bias=False), nn.GELU(), nn.Linear(3, 2))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 3, 3)), nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.LayerNorm(8), nn.Linear(8, 2)
    )


def grouped() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (4, 2)), nn.Conv1d(4, 6, 2, padding=1, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(18, 2)
    )


NETWORKS: dict[str, tuple[Callable[[], nn.Module], int, object]] = {
    "mlp": (mlp, 3, None),
    "last layer": (mlp, 3, "last_layer"),
    "subnetwork": (mlp, 3, torch.tensor([0, 3, 7, 20, 30])),
    "convolutional": (convolutional, 9, None),
    "grouped convolution": (grouped, 8, None),
    "a parameter without a layer rule": (WithScale, 3, None),
}
QUESTIONS: dict[str, Callable[[co.TangentKernel, co.TangentKernel], Tensor]] = {
    "matrix": lambda square, cross: square.to_dense(),
    "matrix of two sets": lambda square, cross: cross.to_dense(),
    "product": lambda square, cross: cross @ torch.ones(4, 2, dtype=torch.float64),
    "transposed product": lambda square, cross: cross.mT @ torch.ones(6, 1, dtype=torch.float64),
    "diagonal": lambda square, cross: square.diagonal(),
    "blocks": lambda square, cross: square.blocks(3),
    "solve": lambda square, cross: square.add_diagonal(0.5).solve(torch.ones(6, 2, dtype=torch.float64)),
    "log-determinant": lambda square, cross: square.add_diagonal(0.5).logdet(),
}


def linearized(name: str) -> tuple[co.operators.Linearization, int]:
    torch.manual_seed(0)
    make, size, parameters = NETWORKS[name]
    data = torch.randn(4, size, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    return co.linearize(make().double(), data, co.likelihoods.Gaussian(noise=1.0), parameters=parameters), size


OF_EACH_NETWORK = ["matrix of two sets", "transposed product", "blocks"]
CASES = [
    *(("mlp", "vector", question) for question in QUESTIONS),
    *(("mlp", "number", question) for question in ("product", "diagonal", "blocks")),
    *((name, "vector", question) for name in [*NETWORKS][1:] for question in OF_EACH_NETWORK),
    *((name, "number", "matrix") for name in NETWORKS),
]


@pytest.mark.parametrize(("name", "prior", "question"), CASES)
def test_gradients_in_inputs_and_prior(name: str, prior: str, question: str) -> None:
    lin, size = linearized(name)
    precision = torch.rand(lin.num_parameters if prior == "vector" else (), dtype=torch.float64) + 0.5
    x, x2 = (torch.randn(n, size, dtype=torch.float64, requires_grad=True) for n in (3, 2))

    def answer(precision: Tensor, x: Tensor, x2: Tensor) -> Tensor:
        kernels = co.TangentKernel(lin, precision, x), co.TangentKernel(lin, precision, x, x2)
        return QUESTIONS[question](*kernels)

    plain = answer(precision, x.detach(), x2.detach())
    torch.testing.assert_close(answer(precision, x, x2), plain, rtol=1e-10, atol=1e-10)
    assert gradcheck(answer, (precision.requires_grad_(), x, x2), fast_mode=True)
    assert all(weight.grad is None for weight in lin.model.leaves().values())


def test_gradient_beside_the_training_inputs() -> None:
    lin, size = linearized("mlp")
    x2 = torch.randn(2, size, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x2: co.TangentKernel(lin, 2.0, None, x2).to_dense(), (x2,), fast_mode=True)


@pytest.mark.parametrize("question", QUESTIONS)
def test_second_derivatives_are_refused_by_name(question: str) -> None:
    lin, size = linearized("mlp")
    x = torch.randn(3, size, dtype=torch.float64, requires_grad=True)
    value = QUESTIONS[question](co.TangentKernel(lin, 2.0, x), co.TangentKernel(lin, 2.0, x, x[:2])).sum()
    with pytest.raises(RuntimeError, match="first derivatives"):
        torch.autograd.grad(value, x, create_graph=True)


@pytest.mark.parametrize("name", NETWORKS)
def test_blocks_are_those_of_the_matrix(name: str) -> None:
    lin, size = linearized(name)
    kernel = co.TangentKernel(lin, 2.0, torch.randn(6, size, dtype=torch.float64))
    dense = kernel.to_dense()
    torch.testing.assert_close(kernel.diagonal(), dense.diagonal(), rtol=1e-10, atol=1e-12)
    assert kernel.diagonal_matvecs == 0 and kernel.trace().matvecs == 0
    for points in (1, 2, 3, 6):
        rows = 2 * points
        wanted = torch.stack([dense[i : i + rows, i : i + rows] for i in range(0, 12, rows)])
        torch.testing.assert_close(kernel.blocks(points), wanted, rtol=1e-10, atol=1e-12)


def test_blocks_that_do_not_divide_the_points() -> None:
    lin, size = linearized("mlp")
    x = torch.randn(5, size, dtype=torch.float64)
    with pytest.raises(ValueError, match="whose number they divide"):
        co.TangentKernel(lin, 2.0, x).blocks(2)
    with pytest.raises(ValueError, match="one set of inputs"):
        co.TangentKernel(lin, 2.0, x, x + 1).blocks(5)
