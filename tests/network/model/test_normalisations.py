"""Normalised images whose gradients come back transposed, as those of tokens do, which torch misreads."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jacfwd

import curvops as co
from tests.network.products import require_curvature, softmax_hessian

X = torch.randn(4, 2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 2, 1, 2])


class Images(nn.Module):
    """Convolution, normalisation, and a head on tokens (n, t, c), or on (t, n, c) with `sequence_first`."""

    def __init__(self, norm: nn.Module, sequence_first: bool) -> None:
        super().__init__()
        self.convolution, self.norm, self.sequence_first = nn.Conv2d(2, 4, 2), norm, sequence_first
        self.shift, self.scale, self.head = nn.Parameter(torch.randn(4, 1, 1)), nn.LayerNorm(4), nn.Linear(4, 3)
        for buffer in norm.buffers():
            if buffer.is_floating_point():
                nn.init.uniform_(buffer, 0.5, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(self.convolution(x) + self.shift).flatten(2)
        tokens = tokens.permute(2, 0, 1) if self.sequence_first else tokens.mT
        return torch.tanh(self.head(self.scale(tokens))).sum(0 if self.sequence_first else 1)


class Written(nn.Module):
    """Batch normalisation as a function of buffers, as in frozen ones of detection libraries."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("location", torch.zeros(4))
        self.register_buffer("spread", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.location, self.spread, training=False)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm2d(4),
    "written": Written,
    "instance": lambda: nn.InstanceNorm2d(4, affine=True),
}


def images(norm: str, sequence_first: bool = False) -> Images:
    torch.manual_seed(0)
    return Images(NORMS[norm](), sequence_first).double().eval()


def dense(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return J (n, C, D), the GGN and the gradient of a classifier, by forward mode alone."""
    named = {name: value.detach() for name, value in model.named_parameters()}
    parts: Any = jacfwd(lambda params: functional_call(model, params, (x,)))(named)
    J = torch.cat([part.flatten(2) for part in parts.values()], 2)
    rows, f = J.flatten(0, 1), model(x).detach()
    return J, rows.mT @ softmax_hessian(f) @ rows, rows.mT @ (f.softmax(1) - F.one_hot(y, 3)).flatten()


CASES = [(norm, first, engine, 1) for norm in NORMS for first, engine in ((False, "layerwise"), (True, "streamed"))]
CASES += [("batch", True, "layerwise", 4), ("instance", False, "streamed", 4)]


@pytest.mark.parametrize(("norm", "sequence_first", "engine", "points"), CASES)
def test_few_images_have_their_curvature_by_forward_mode(
    norm: str, sequence_first: bool, engine: Any, points: int
) -> None:
    model = images(norm, sequence_first)
    x, y = X[:points], Y[:points]
    J, _, gradient = dense(model, x, y)
    lin = co.linearize(model, (x, y), "classification", engine=engine)
    torch.testing.assert_close(lin.gradient(), gradient, rtol=0, atol=1e-10)
    require_curvature(lin, J.flatten(0, 1), softmax_hessian(model(x)))
    torch.testing.assert_close(lin.jacobian(x[:1]).to_dense(), J[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("norm", ["batch", "instance"])
def test_the_predictive_variance_of_one_image_is_that_beside_another(norm: str) -> None:
    lin = co.linearize(images(norm), (X, Y), "classification")
    for curvature in (co.KFAC, co.DiagonalGGN, co.GGN):
        posterior = co.laplace(lin, curvature, 1.0, check_mode=False)
        two, one = (posterior.predict(X[:n]).covariance_matrix for n in (2, 1))
        torch.testing.assert_close(one[0], two[0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("norm", ["batch", "instance"])
def test_a_function_normalises_as_its_module_does(norm: str) -> None:
    model = images(norm)
    function = (lambda params, x: functional_call(model, params, (x,)), dict(model.named_parameters()))
    lin = co.linearize(function, (X[:1], Y[:1]), "classification")
    torch.testing.assert_close(co.GGN(lin).to_dense(), dense(model, X[:1], Y[:1])[1], rtol=0, atol=1e-10)
