"""Networks of infinite width against quadrature, many digits, random networks and dense Gaussian processes.

Tests `infinite_width.py`.
"""

import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import gpytorch
import mpmath
import numpy as np
import pytest
import torch
from scipy import special, stats
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.func import functional_call, jacrev

import curvops as co
from curvops.gp import InfiniteWidthKernel
from curvops.gp.infinite_width import ACTIVATIONS, Covariance

EXACT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}
Function = Callable[[np.ndarray], np.ndarray]
FUNCTIONS: dict[str, tuple[Function, Function]] = {  # φ and φ'
    "relu": (lambda u: np.maximum(u, 0), lambda u: (u > 0).astype(float)),
    "erf": (special.erf, lambda u: 2 / math.sqrt(math.pi) * np.exp(-(u**2))),
    "gelu": (lambda u: u * special.ndtr(u), lambda u: special.ndtr(u) + u * stats.norm.pdf(u)),
    "identity": (lambda u: u, np.ones_like),
}
VARIANCES: dict[str, tuple[Any, Any]] = {
    "one": (2.0, 0.5),
    "no biases": (1.5, 0.0),
    "by layer": ([1.5, 0.7, 2.0], [0.1, 0.5, 1.0]),
}


@pytest.fixture(autouse=True)
def in_double_precision() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def kernel(activation: str, kind: str = "ntk", variances: str = "one", depth: int = 2) -> InfiniteWidthKernel:
    weight, bias = VARIANCES[variances]
    return InfiniteWidthKernel(depth, activation, kind, weight_variance=weight, bias_variance=bias)


@functools.cache
def quadrature() -> tuple[np.ndarray, np.ndarray]:
    """The nodes and the weights of Gauss and Legendre on either side of the origin."""
    nodes, weights = np.polynomial.legendre.leggauss(150)
    return 6 * np.concatenate([nodes - 1, nodes + 1]), 6 * np.concatenate([weights, weights])


def expected(functions: Function, a: float, b: float, c: float) -> float:
    """E[f(u) f(v)] by Gauss–Legendre quadrature in each quadrant, in one dimension where u and v are one."""
    points, weights = quadrature()
    if a == b == c:
        return float(weights @ (functions(points * math.sqrt(a)) ** 2 * stats.norm.pdf(points)))
    u, v, rho = points[:, None], points[None], c / math.sqrt(a * b)
    density = np.exp(-(u * u - 2 * rho * u * v + v * v) / (2 * (1 - rho**2))) / (2 * math.pi * math.sqrt(1 - rho**2))
    of_u, of_v = functions(u * math.sqrt(a)), functions(v * math.sqrt(b))
    return float(weights @ (of_u * of_v * density) @ weights)


def by_quadrature(activation: str, kind: str, variances: str, x: Tensor, y: Tensor) -> float:
    """The kernel of two points with two hidden layers, every expectation by quadrature."""
    weights, biases = (v if isinstance(v, list) else [v] * 3 for v in VARIANCES[variances])
    a, b, c = (weights[0] * float(p @ q) / len(x) + biases[0] for p, q in ((x, x), (y, y), (x, y)))
    tangent, (value, slope) = c, FUNCTIONS[activation]
    for weight, bias in zip(weights[1:], biases[1:]):
        change = weight * expected(slope, a, b, c)
        a, b, c = (weight * expected(value, *of) + bias for of in ((a, a, a), (b, b, b), (a, b, c)))
        tangent = c + change * tangent
    return tangent if kind == "ntk" else c


@pytest.mark.parametrize(
    "a,b,rho", [(1.0, 1.0, 0.3), (0.4, 3.0, -0.6), (2.0, 0.1, 0.9), (0.01, 1.5, 0.0), (2.0, 2.0, 1)]
)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_expectations_are_those_of_quadrature(activation: str, a: float, b: float, rho: float) -> None:
    c = rho * math.sqrt(a * b)
    given = (torch.tensor([[value]]) for value in (a, b, c, math.sqrt(2 - 2 * rho)))
    found, (value, slope) = ACTIVATIONS[activation](Covariance(*given)), FUNCTIONS[activation]
    assert float(found.product) == pytest.approx(expected(value, a, b, c), rel=1e-10, abs=1e-12)
    assert float(found.slope) == pytest.approx(expected(slope, a, b, c), rel=1e-10, abs=1e-12)


@pytest.mark.parametrize(("kind", "variances"), [("nngp", "no biases"), ("ntk", "by layer")])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_matrices_diagonals_and_batches(activation: str, kind: str, variances: str) -> None:
    k, x, z = kernel(activation, kind, variances), torch.randn(2, 2, 4), torch.randn(2, 4)
    square = torch.tensor([[[by_quadrature(activation, kind, variances, p, q) for q in b] for p in b] for b in x])
    cross = torch.tensor([[[by_quadrature(activation, kind, variances, p, q) for q in z] for p in b] for b in x])
    torch.testing.assert_close(k(x).to_dense(), square, **EXACT)
    torch.testing.assert_close(k(x[0]).to_dense(), square[0], **EXACT)
    torch.testing.assert_close(k(x, z).to_dense(), cross, **EXACT)
    torch.testing.assert_close(k(z, x).to_dense(), cross.mT, **EXACT)
    torch.testing.assert_close(k(x, diag=True), square.diagonal(dim1=1, dim2=2), **EXACT)
    torch.testing.assert_close(k(x).diagonal(dim1=-1, dim2=-2), square.diagonal(dim1=1, dim2=2), **EXACT)
    torch.testing.assert_close(k(x, z, diag=True), cross.diagonal(dim1=1, dim2=2), **EXACT)
    torch.testing.assert_close(k(x.clone(), x.clone())[0, 1:].to_dense(), square[0, 1:], **EXACT)
    assert torch.equal(k(x).to_dense(), k(x).to_dense().mT)
    single = copy.deepcopy(k).float()(x.float())
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.to_dense().double(), square, rtol=2e-6, atol=2e-6)
    assert float(torch.linalg.eigvalsh(k(torch.cat([x[0], x[0]])).to_dense().detach()).min()) > -1e-13 * float(
        square.max()
    )


def test_a_deep_linear_network_by_hand() -> None:
    """K⁴ of three hidden layers is (x·x'/d) σ_w⁸, and each of its four layers adds as much to Θ."""
    x = torch.randn(3, 5)
    k = InfiniteWidthKernel(3, "identity", weight_variance=torch.tensor(1.5), bias_variance=0.0)
    torch.testing.assert_close(k(x).to_dense(), 4 * 1.5**4 * x @ x.mT / 5, **EXACT)
    torch.testing.assert_close(InfiniteWidthKernel(0, bias_variance=0.0)(x).to_dense(), 2 * x @ x.mT / 5)


def arc_cosine(x: list[Any], y: list[Any], depth: int, weight: Any, bias: Any) -> Any:
    """The tangent kernel of rectifiers in many digits, by the formula as Cho and Saul print it."""
    a, b, c = (weight * mpmath.fdot(p, q) / len(x) + bias for p, q in ((x, x), (y, y), (x, y)))
    tangent = c
    for _ in range(depth):
        length = mpmath.sqrt(a * b)
        theta = mpmath.acos(c / length)
        c = weight * length * (mpmath.sin(theta) + (mpmath.pi - theta) * c / length) / (2 * mpmath.pi) + bias
        a, b = weight * a / 2 + bias, weight * b / 2 + bias
        tangent = c + weight * (mpmath.pi - theta) / (2 * mpmath.pi) * tangent
    return tangent


@pytest.mark.parametrize("bias", [0.0, 0.5])
@pytest.mark.parametrize("distance", [1.0, 1e-3, 1e-6, 1e-8, 1e-10])
def test_near_points_keep_their_digits(distance: float, bias: float) -> None:
    """The angle as an arc cosine would have an error of 1e-8 at distances below that."""
    x, step = torch.randn(2, 1, 6)
    y = x + distance * step
    k = InfiniteWidthKernel(3, "relu", weight_variance=2.0, bias_variance=bias)
    with mpmath.workdps(60):
        exact = arc_cosine(
            *([mpmath.mpf(v) for v in p[0].tolist()] for p in (x, y)), 3, mpmath.mpf(2), mpmath.mpf(bias)
        )
        error = abs(float(mpmath.mpf(float(k(x, y).to_dense().detach())) - exact))
    assert error < 2e-15 * float(exact)
    together = k(torch.cat([x, y])).to_dense()
    assert float(torch.linalg.eigvalsh(together.detach()).min()) > -1e-14


CASES = ("apart", "one point", "near", "collinear", "opposite", "zero")
PLACES = [
    *itertools.product(["relu"], ["ntk"], ["no biases", "one"], CASES),
    *itertools.product(["erf", "gelu", "identity"], ["ntk"], ["by layer"], ["one point", "collinear", "zero"]),
    *itertools.product(ACTIVATIONS, ["nngp"], ["by layer"], ["apart"]),
]
PLACES.remove(("relu", "ntk", "no biases", "zero"))  # |x| at x = 0 has no slope; the next test but one


@pytest.mark.parametrize(("activation", "kind", "variances", "case"), PLACES)
def test_gradients_in_inputs(activation: str, kind: str, variances: str, case: str) -> None:
    """Rectifiers at all places, since they alone have a kink; other functions where points coincide."""
    torch.manual_seed(1)
    k, x, step = kernel(activation, kind, variances), *torch.randn(2, 2, 3)
    y = {"one point": x, "near": x + 1e-3 * step, "collinear": 2 * x, "opposite": -x, "zero": 0 * x}.get(case, step)
    x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
    assert gradcheck(lambda x, y: k(x, y).to_dense(), (x, y), fast_mode=True)
    assert gradcheck(lambda x, y: k(x, y, diag=True), (x, y), fast_mode=True)
    assert gradcheck(lambda x: k(torch.cat([x, y.detach(), x])).to_dense(), (x,), fast_mode=True)
    assert gradcheck(lambda x: k(x, diag=True), (x,), fast_mode=True)


@pytest.mark.parametrize("distance", [1e-2, 1e-5, 1e-8, 1e-11])
def test_the_slope_beside_the_kink_of_a_rectifier(distance: float) -> None:
    """Θ of one hidden layer falls beside x' = x by σ_w²Θ¹/2π times the angle, whose slope is √(σ_w²/d)/√K¹ across x."""
    x = torch.tensor([[3.0, 0.0]])
    y = torch.tensor([[3.0, distance]], requires_grad=True)
    k = InfiniteWidthKernel(1, weight_variance=2.0, bias_variance=1.0)
    (slope,) = torch.autograd.grad(k(x, y).to_dense().sum(), y)
    first = 2.0 * 9 / 2 + 1
    assert float(slope[0, 1]) == pytest.approx(-2 * first / (2 * math.pi) / math.sqrt(first), rel=2 * distance + 1e-4)


def test_no_gradient_is_nan_at_the_origin_without_biases() -> None:
    x = torch.zeros(2, 3, requires_grad=True)
    for kind in ("nngp", "ntk"):
        k = kernel("relu", kind, "no biases")
        found = k(torch.cat([x, torch.ones_like(x)])).to_dense()
        assert float(found[:2].detach().abs().max()) == 0
        (slope,) = torch.autograd.grad(found.sum(), x)
        assert bool(slope.isfinite().all())


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_second_derivatives_are_right_or_refused(activation: str) -> None:
    x, k, same = torch.randn(3, 2, requires_grad=True), kernel(activation), 0 if activation == "relu" else 1
    try:
        assert torch.autograd.gradgradcheck(lambda x: k(torch.cat([x, x[:same]])).to_dense(), (x,), fast_mode=True)
    except NotImplementedError as error:  # before torch 2.14
        assert activation == "relu" and "cdist" in str(error)


@pytest.mark.parametrize(
    ("kind", "variances"), [("ntk", "one"), ("ntk", "no biases"), ("ntk", "by layer"), ("nngp", "by layer")]
)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_in_variances(activation: str, kind: str, variances: str) -> None:
    k, x = kernel(activation, kind, variances), torch.randn(3, 2)
    names = [name for name, _ in k.named_parameters()]

    def matrix(*values: Tensor) -> Tensor:
        return functional_call(k, dict(zip(names, values)), (x, x)).to_dense()

    start = tuple(value.detach().clone().requires_grad_() for value in k.parameters())
    assert gradcheck(matrix, start, fast_mode=True)
    if activation != "relu":
        assert torch.autograd.gradgradcheck(matrix, start, fast_mode=True)


def test_the_ntk_precision_makes_the_empirical_kernel_of_the_ntk_parametrisation() -> None:
    weight_std, bias_std, x = 1.3, 0.4, torch.randn(4, 3)
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 1))
    lin = co.linearize(model, (x, x[:, :1]), co.likelihoods.Gaussian(noise=1.0))
    prior = co.sampling.ntk_precision(model, weight_std, bias_std)
    fan_in = {name: layer.in_features for name, layer in model.named_children() if isinstance(layer, nn.Linear)}
    scale = {
        name: weight_std / math.sqrt(fan_in[name.partition(".")[0]]) if name.endswith("weight") else bias_std
        for name, _ in model.named_parameters()
    }

    def outputs(omega: dict[str, Tensor]) -> Tensor:  # f of W and b ~ N(0, 1), in the NTK parametrisation
        return functional_call(model, {name: scale[name] * value for name, value in omega.items()}, (x,)).squeeze(1)

    omega = {name: value.detach() / scale[name] for name, value in model.named_parameters()}
    J = torch.cat([block.flatten(1) for block in jacrev(outputs)(omega).values()], 1)
    torch.testing.assert_close(co.TangentKernel(lin, prior).to_dense(), J @ J.mT, **EXACT)
    torch.testing.assert_close(co.gp.LinearizedKernel(lin, prior)(x).to_dense(), J @ J.mT, **EXACT)


class Process(gpytorch.models.ExactGP):
    def __init__(self, x: Tensor, y: Tensor, likelihood: Any, covariance: Any, mean: Any = None) -> None:
        super().__init__(x, y, likelihood)
        self.mean_module, self.covar_module = mean or gpytorch.means.ZeroMean(), covariance

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


@pytest.mark.usefixtures("no_foreign_solvers", "iterating")
@pytest.mark.parametrize(("activation", "kind"), [("erf", "nngp"), ("relu", "ntk")])
def test_an_exact_process_is_the_dense_one(activation: str, kind: str) -> None:
    x, new = torch.randn(12, 3), torch.randn(4, 3)
    y, likelihood = torch.randn(12), gpytorch.likelihoods.GaussianLikelihood()
    likelihood.noise = 0.3
    gp = Process(x, y, likelihood, kernel(activation, kind))
    marginal = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, gp)
    noisy = gp.covar_module(x).to_dense().detach() + 0.3 * torch.eye(12)
    normal = torch.distributions.MultivariateNormal(torch.zeros(12), noisy)
    torch.testing.assert_close(12 * marginal(gp(x), y), normal.log_prob(y), rtol=1e-9, atol=1e-9)
    gp.eval()
    cross, predicted = gp.covar_module(new, x).to_dense(), gp(new)
    torch.testing.assert_close(predicted.mean, cross @ torch.linalg.solve(noisy, y), rtol=1e-8, atol=1e-8)
    left = gp.covar_module(new).to_dense() - cross @ torch.linalg.solve(noisy, cross.mT)
    torch.testing.assert_close(predicted.covariance_matrix, left, rtol=1e-8, atol=1e-8)


def test_batches_of_variances_and_active_dimensions() -> None:
    x = torch.randn(5, 3)
    batch = InfiniteWidthKernel(2, weight_variance=[1.0, 2.0, 1.0], batch_shape=torch.Size([2]))
    batch.weight_variance = torch.tensor([[1.0, 2.0, 3.0], [2.0, 1.0, 1.0]])
    each = [InfiniteWidthKernel(2, weight_variance=row) for row in batch.weight_variance.detach()]
    dense = torch.stack([k(x).to_dense() for k in each])
    torch.testing.assert_close(batch(x).to_dense(), dense, **EXACT)
    torch.testing.assert_close(batch(x.expand(2, 5, 3)).to_dense(), dense, **EXACT)
    torch.testing.assert_close(batch(x, diag=True), dense.diagonal(dim1=1, dim2=2), **EXACT)
    torch.testing.assert_close(batch[1](x).to_dense(), dense[1], **EXACT)
    some = InfiniteWidthKernel(2, active_dims=(0, 2))
    torch.testing.assert_close(some(x).to_dense(), InfiniteWidthKernel(2)(x[:, [0, 2]]).to_dense(), **EXACT)


def test_priors_constraints_whole_numbers_and_no_points() -> None:
    k = InfiniteWidthKernel(
        weight_variance_prior=gpytorch.priors.GammaPrior(2.0, 1.0),
        bias_variance_constraint=gpytorch.constraints.Interval(0.5, 2.0),
    )
    assert [name for name, *_ in k.named_priors()] == ["weight_variance_prior"]
    assert 0.5 < float(k.bias_variance.detach()) < 2
    whole = InfiniteWidthKernel()(torch.tensor([[1], [2]])).to_dense()
    torch.testing.assert_close(whole, InfiniteWidthKernel()(torch.tensor([[1.0], [2.0]])).to_dense())
    assert InfiniteWidthKernel()(torch.ones(0, 2), torch.ones(3, 2)).to_dense().shape == (0, 3)
