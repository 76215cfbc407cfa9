"""A linearised network inside gpytorch against dense Jacobians and the linearised Laplace posterior.

Tests `kernel.py`, `operator_kernel.py`.
"""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import gpytorch
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck

import curvops as co
from curvops.gp import ComposedKernel, LinearizedGP, LinearizedKernel, LinearizedMean
from curvops.linalg import Operator
from curvops.posterior.predictions import MultitaskNormal, Normal

DOUBLE = torch.float64
N, NOISE = 12, 0.3
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "one output": (lambda: nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)), (3,), 1),
    "two outputs": (lambda: nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)), (3,), 2),
    "fewer weights than rows": (lambda: nn.Sequential(nn.Linear(3, 1), nn.Tanh(), nn.Linear(1, 2)), (3,), 2),
    "images": (lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 2)), (1, 3, 3), 2),
}
PRIORS: dict[str, dict[str, Any]] = {
    "scalar": {"prior_precision": 2.0},
    "layers": {"prior_precision": 2.0, "over": "layers"},
    "tensors": {"prior_precision": 0.5, "over": "tensors"},
    "globs": {"prior_precision": {"0.*": 2.0, "[!0]*": 0.5}},
    "scaled": {"prior_precision": 2.0, "outputscale": 3.0},
}
CASES = [*((name, "layers") for name in NETWORKS), *(("two outputs", prior) for prior in PRIORS if prior != "layers")]
"""Each network, and each prior: the kernel knows the network by J alone, and the prior by its entries."""


def linearized(name: str) -> tuple[co.operators.Linearization, Tensor, Tensor]:
    torch.manual_seed(0)
    make, shape, outputs = NETWORKS[name]
    x, y = torch.randn(N, *shape, dtype=DOUBLE), torch.randn(N, outputs, dtype=DOUBLE)
    data = [(x[:5], y[:5]), (x[5:], y[5:])]
    return co.linearize(make().double(), data, co.likelihoods.Gaussian(NOISE)), x, y


def dense_kernel(lin: co.operators.Linearization, x: Tensor, x2: Tensor, kernel: LinearizedKernel) -> Tensor:
    shape = lin.data.few.shape[1:]
    J, J2 = (lin.jacobian(points.reshape(-1, *shape)).to_dense() for points in (x, x2))
    return (J * kernel._entries()) @ J2.mT


@pytest.mark.usefixtures("no_foreign_solvers", "iterating")
@pytest.mark.parametrize(("name", "prior"), CASES)
def test_the_process_is_the_linearised_posterior(name: str, prior: str) -> None:
    lin, x, _ = linearized(name)
    gp = LinearizedGP(lin, **PRIORS[prior])
    post = co.laplace(lin, co.GGN, prior_precision=gp.covar_module._entries().reciprocal().detach(), check_mode=False)
    new = torch.randn(4, *x.shape[1:], dtype=DOUBLE)

    gp.train()
    marginal = gpytorch.mlls.ExactMarginalLogLikelihood(gp.likelihood, gp)
    value = marginal(gp(x.flatten(1)), gp.train_targets) * gp.train_targets.numel()
    torch.testing.assert_close(value, post.log_evidence(mode="linear").value, rtol=1e-9, atol=1e-9)
    value.backward()
    assert all(parameter.grad is not None for parameter in gp.parameters())

    gp.eval()
    predicted, mode = gp(new.flatten(1)), post.linear_mode(rtol=1e-12).theta
    assert isinstance(predicted, Normal) and isinstance(predicted, MultitaskNormal) == (lin.num_outputs > 1)
    joint = post.predict(new, joint=True).covariance_matrix
    torch.testing.assert_close(predicted.covariance_matrix, joint, rtol=1e-8, atol=1e-8)
    mean = lin.predict(new) + (lin.jacobian(new) @ (mode - lin.theta)).reshape(4, -1)
    torch.testing.assert_close(predicted.mean.reshape(4, -1), mean, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(copy.deepcopy(gp)(new.flatten(1)).mean, predicted.mean)


def test_kernel_mean_and_likelihood_of_a_process_may_be_given() -> None:
    lin, *_ = linearized("two outputs")
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(2).double()
    kernel = ComposedKernel(gpytorch.kernels.ScaleKernel(LinearizedKernel(lin))).double()
    gp = LinearizedGP(lin, likelihood, kernel, LinearizedMean(lin, 0.5)).eval()
    assert gp.covar_module is kernel and gp.likelihood is likelihood
    assert gp(torch.randn(4, 3, dtype=DOUBLE)).mean.shape == (4, 2)
    again = lin.with_likelihood(co.likelihoods.Gaussian(0.1))  # the same weights
    assert LinearizedGP(again, kernel=kernel).covar_module is kernel


@pytest.mark.parametrize(("name", "prior"), CASES)
def test_matrices_diagonals_and_batches(name: str, prior: str) -> None:
    lin, x, _ = linearized(name)
    kernel, size = LinearizedKernel(lin, **PRIORS[prior]), x[0].numel()
    a, b = torch.randn(2, 3, size, dtype=DOUBLE), torch.randn(2, 4, size, dtype=DOUBLE)
    exact = {"rtol": 1e-10, "atol": 1e-12}
    cross = torch.stack([dense_kernel(lin, p, q, kernel) for p, q in zip(a, b)])
    square = torch.stack([dense_kernel(lin, p, p, kernel) for p in a])
    torch.testing.assert_close(kernel(a[0]).to_dense(), square[0], **exact)
    torch.testing.assert_close(kernel(a[0], b[0]).to_dense(), cross[0], **exact)
    torch.testing.assert_close(kernel(a, b).to_dense(), cross, **exact)
    torch.testing.assert_close(kernel(a).to_dense(), square, **exact)
    torch.testing.assert_close(kernel(a, b[0]).to_dense()[1], dense_kernel(lin, a[1], b[0], kernel), **exact)
    torch.testing.assert_close(kernel(a, diag=True), square.diagonal(dim1=1, dim2=2), **exact)
    torch.testing.assert_close(kernel(a).diagonal(dim1=-1, dim2=-2), square.diagonal(dim1=1, dim2=2), **exact)
    torch.testing.assert_close(kernel(a[0], b[0, :3], diag=True), cross[0, :, : square.shape[1]].diagonal(), **exact)
    torch.testing.assert_close(kernel(x.flatten(1)).to_dense(), dense_kernel(lin, x, x, kernel), **exact)


@pytest.mark.parametrize(("name", "prior"), CASES)
def test_gradients_in_inputs_and_parameters(name: str, prior: str) -> None:
    lin, x, _ = linearized(name)
    kernel, size = LinearizedKernel(lin, **PRIORS[prior]), x[0].numel()
    a, b = (torch.randn(n, size, dtype=DOUBLE, requires_grad=True) for n in (3, 2))
    assert gradcheck(lambda a: kernel(a).to_dense(), (a,), fast_mode=True)
    assert gradcheck(lambda a, b: kernel(a, b).to_dense(), (a, b), fast_mode=True)
    assert gradcheck(lambda a: kernel(a, diag=True), (a,), fast_mode=True)
    assert gradcheck(lambda a: kernel(torch.stack([a, a + 1])).to_dense(), (a,), fast_mode=True)
    assert gradcheck(LinearizedMean(lin), (a,), fast_mode=True)
    start = kernel.prior_precision.detach().clone().requires_grad_()

    def matrix(precision: Tensor) -> Tensor:
        changed = copy.deepcopy(kernel)
        del changed.raw_prior_precision
        changed.raw_prior_precision = changed.raw_prior_precision_constraint.inverse_transform(precision)
        return changed(a.detach()).to_dense()

    assert gradcheck(matrix, (start,), fast_mode=True)


def test_equal_points_in_two_tensors_have_a_gradient_each() -> None:
    lin, x, _ = linearized("two outputs")
    kernel = LinearizedKernel(lin, 2.0)
    a, b = (x[:3].flatten(1).clone().requires_grad_() for _ in range(2))
    assert gradcheck(lambda a, b: kernel(a, b).to_dense(), (a, b), fast_mode=True)
    assert gradcheck(lambda a, b: kernel(a, b, diag=True), (a, b), fast_mode=True)
    assert gradcheck(lambda a: kernel(a, b.detach()).to_dense(), (a,), fast_mode=True)
    assert gradcheck(lambda a: kernel(torch.cat([a, b]))[:3, :3].to_dense(), (a,), fast_mode=True)
    both = torch.cat([a, b])
    assert kernel(both[2:], both[2:]).evaluate_kernel().psd


@pytest.mark.parametrize("name", ["one output", "two outputs"])
def test_no_points_have_an_empty_matrix_diagonal_and_mean(name: str) -> None:
    lin, x, _ = linearized(name)
    kernel, C, none = LinearizedKernel(lin, over="layers"), lin.num_outputs, x[:0].flatten(1)
    assert kernel(none).to_dense().shape == (0, 0) and kernel(none, diag=True).shape == (0,)
    assert kernel(x.flatten(1), none).to_dense().shape == (len(x) * C, 0)
    assert LinearizedMean(lin)(none).shape == ((0,) if C == 1 else (0, C))


@pytest.mark.parametrize("over", ["scalar", "layers"])
def test_casting_the_kernel_casts_its_parameters_and_not_the_matrix(over: str) -> None:
    lin, x, _ = linearized("two outputs")
    x = x.flatten(1)
    kernel, cast = (LinearizedKernel(lin, 2.0, over=over, outputscale=4.0) for _ in range(2))
    cast.float()
    assert cast.prior_precision.dtype == torch.float32
    torch.testing.assert_close(cast(x).to_dense(), kernel(x).to_dense(), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(cast(x, diag=True), kernel(x, diag=True), rtol=1e-6, atol=1e-9)
    cast(x).to_dense().sum().backward()
    assert cast.raw_prior_precision.grad is not None and cast.raw_prior_precision.grad.dtype == torch.float32


def test_a_parameter_without_a_layer_rule_and_a_subnetwork() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    data = torch.randn(5, 3, dtype=DOUBLE), torch.randn(5, 2, dtype=DOUBLE)
    lin = co.linearize(net, data, co.likelihoods.Gaussian(noise=1.0), parameters=torch.tensor([1, 5, 17, 20]))
    kernel = LinearizedKernel(lin, 2.0, over="layers")
    torch.testing.assert_close(kernel(data[0]).to_dense(), dense_kernel(lin, data[0], data[0], kernel))


RBF, Scale = gpytorch.kernels.RBFKernel, gpytorch.kernels.ScaleKernel
COMPOSED: dict[str, Callable[[LinearizedKernel], gpytorch.kernels.Kernel]] = {
    "a sum of two": lambda k: k + copy.deepcopy(k),
    "a sum": lambda k: k + RBF(),
    "a product": lambda k: k * RBF(),
    "a sum of three": lambda k: k + RBF() + copy.deepcopy(k),
    "a multiple": lambda k: ComposedKernel(Scale(k)),
    "a multiple of a sum": lambda k: ComposedKernel(Scale(k + RBF())),
    "a sum that begins with another": lambda k: ComposedKernel(RBF() + k),
    "a product that begins with another": lambda k: ComposedKernel(Scale(RBF()) * k),
}


@pytest.mark.usefixtures("no_foreign_solvers", "iterating")
@pytest.mark.parametrize("name", COMPOSED)
def test_composed_kernels_are_solved_by_ours(name: str) -> None:
    lin, x, _ = linearized("one output")
    gp = LinearizedGP(lin, kernel=COMPOSED[name](LinearizedKernel(lin, 2.0)).double())
    likelihood, targets = gp.likelihood, gp.train_targets
    new = torch.randn(4, 3, dtype=DOUBLE)
    with gpytorch.settings.lazily_evaluate_kernels(False), gpytorch.settings.fast_computations(False, False, False):
        both = gp.covar_module(torch.cat([x, new])).to_dense()
    dense = torch.distributions.MultivariateNormal(
        gp.mean_module(x), both[:N, :N] + likelihood.noise * torch.eye(N, dtype=DOUBLE)
    )
    marginal = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, gp.train())
    value, expected = marginal(gp(x), targets) * N, dense.log_prob(targets)
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-9)
    parameters = list(gp.parameters())
    for one, other in zip(torch.autograd.grad(value, parameters), torch.autograd.grad(expected, parameters)):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-8)
    predicted = gp.eval()(new)
    solved = torch.linalg.solve(dense.covariance_matrix, both[:N, N:])
    torch.testing.assert_close(predicted.covariance_matrix, both[N:, N:] - both[N:, :N] @ solved, rtol=1e-8, atol=1e-9)
    mean = gp.mean_module(new) + solved.mT @ (targets - gp.mean_module(x))
    torch.testing.assert_close(predicted.mean, mean, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(gp.covar_module(new, diag=True), both.diagonal()[N:])
    batches = torch.stack([new, new + 1])
    torch.testing.assert_close(gp.covar_module(batches).to_dense()[0], both[N:, N:])
    torch.testing.assert_close(copy.deepcopy(gp.covar_module)(x).to_dense(), both[:N, :N])


def test_composed_kernels_of_several_outputs() -> None:
    lin, x, _ = linearized("two outputs")
    kernel, points = LinearizedKernel(lin, 2.0), x[:4]
    scaled = ComposedKernel(gpytorch.kernels.ScaleKernel(LinearizedKernel(lin, 2.0))).double()
    scaled.base_kernel.outputscale = 3.0
    dense = kernel(points).to_dense()
    torch.testing.assert_close(scaled(points).to_dense(), 3 * dense)
    torch.testing.assert_close((kernel + scaled)(points).to_dense(), 4 * dense)
    torch.testing.assert_close((kernel * LinearizedKernel(lin, 2.0))(points).to_dense(), dense.square())
    assert isinstance((kernel + scaled)(points).add_diagonal(torch.tensor(0.5, dtype=DOUBLE)), Operator)


def test_the_network_is_neither_trained_nor_moved_nor_saved() -> None:
    lin, x, _ = linearized("one output")
    gp = LinearizedGP(lin, prior_precision=2.0, over="layers", outputscale=2.0)
    names = {"raw_prior_precision", "raw_outputscale"}
    assert {name for name, _ in gp.covar_module.named_parameters()} == names
    assert not [name for name in gp.state_dict() if "lin" in name]
    before, theta = copy.deepcopy(gp.state_dict()), lin.theta.clone()
    optimizer, marginal = (
        torch.optim.Adam(gp.parameters(), 0.1),
        gpytorch.mlls.ExactMarginalLogLikelihood(gp.likelihood, gp),
    )
    gp.train()
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        losses.append(-marginal(gp(x), gp.train_targets))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    assert torch.equal(theta, lin.theta)
    copied = copy.deepcopy(gp)
    assert copied.covar_module.lin is lin
    again = pickle.loads(pickle.dumps(gp.covar_module))
    torch.testing.assert_close(again(x).to_dense(), gp.covar_module(x).to_dense(), rtol=0, atol=0)
    gp.load_state_dict(before)
    torch.testing.assert_close(gp.covar_module.prior_precision, torch.full((2,), 2.0, dtype=DOUBLE))


def test_beyond_the_memory_budget_products_take_the_matrix_s_place() -> None:
    lin, x, _ = linearized("two outputs")
    kernel = LinearizedKernel(lin, 2.0)
    lin.memory.keep(lin, lin.memory.room())
    lazy = kernel._matrix(x, x)
    assert isinstance(lazy, co.TangentKernel)
    ones = torch.ones(2 * N, dtype=DOUBLE)
    torch.testing.assert_close(lazy @ ones, dense_kernel(lin, x, x, kernel) @ ones)


def few_weights() -> tuple[co.operators.Linearization, Tensor, Tensor]:
    """Return 8 weights and 300 rows, too many for a dense solve, with room for JᵀJ but for neither J nor J Jᵀ."""
    torch.manual_seed(0)
    x, y = torch.randn(150, 3, dtype=DOUBLE), torch.randn(150, 2, dtype=DOUBLE)
    network = NETWORKS["fewer weights than rows"][0]().double()
    lin = co.linearize(network, (x, y), co.likelihoods.Gaussian(NOISE))
    lin.memory.keep(lin, lin.memory.room() - 4000)
    return lin, x, y


@pytest.mark.usefixtures("no_foreign_solvers", "iterating")
@pytest.mark.parametrize(("prior", "task_noise"), [("scalar", True), ("layers", False), ("scaled", True)])
def test_where_neither_j_nor_its_gram_matrix_fits_few_weights_are_solved_for(prior: str, task_noise: bool) -> None:
    lin, x, y = few_weights()
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(2, has_task_noise=task_noise).double()
    gp = LinearizedGP(lin, likelihood, **PRIORS[prior])

    def noisy(K: Tensor) -> Tensor:
        noise = likelihood.noise + (likelihood.task_noises if task_noise else torch.zeros(2, dtype=DOUBLE))
        return K + noise.repeat(150).diag()

    dense = noisy(dense_kernel(lin, x, x, gp.covar_module))
    expected = torch.distributions.MultivariateNormal(gp.mean_module(x).flatten(), dense).log_prob(y.flatten())
    marginal = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, gp.train())
    value = marginal(gp(x), y) * y.numel()
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-9)
    parameters = list(gp.parameters())
    gradients = torch.autograd.grad(value, parameters)
    for one, other in zip(gradients, torch.autograd.grad(expected, parameters)):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-8)
    gp.eval()
    new = torch.randn(4, 3, dtype=DOUBLE)
    with torch.no_grad():
        cross = dense_kernel(lin, new, x, gp.covar_module)
        solved = torch.linalg.solve(dense, cross.mT).mT
        predicted = gp(new)
        here = dense_kernel(lin, new, new, gp.covar_module) - solved @ cross.mT
        gap = (y - gp.mean_module(x)).flatten()
        torch.testing.assert_close(predicted.covariance_matrix, here, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(predicted.mean.flatten(), gp.mean_module(new).flatten() + solved @ gap)


@pytest.mark.parametrize(("noise", "each"), [(0.3, False), (1e-6, True)])
def test_the_form_of_few_weights_is_the_matrix_s(noise: float, each: bool) -> None:
    lin, *_ = few_weights()
    d = torch.linspace(1, 2, 300, dtype=DOUBLE) * noise if each else torch.tensor(noise, dtype=DOUBLE)
    A = torch.linspace(0.5, 2, 8, dtype=DOUBLE)
    P = co.TangentKernel(lin, A).add_diagonal(d)
    J = lin.jacobian().to_dense()
    dense = (J / A) @ J.mT + d.expand(300).diag()
    b = torch.randn(300, 3, dtype=DOUBLE)
    assert P.plan().chosen["solve"] == "closed form"
    solved = P.solve(b)
    backward = (dense @ solved - b).norm() / (torch.linalg.matrix_norm(dense, 2) * solved.norm() + b.norm())
    assert float(backward) < 1e-15
    torch.testing.assert_close(P.logdet(), torch.logdet(dense), rtol=1e-9, atol=1e-8)
    torch.testing.assert_close(P.inverse().diagonal(), torch.linalg.inv(dense).diagonal(), rtol=1e-6, atol=1e-8)
    units = torch.eye(300, dtype=DOUBLE)
    half = P.sqrt_inv_matmul(units[:, :1])
    values, vectors = torch.linalg.eigh(dense)
    torch.testing.assert_close(half, (vectors * values.rsqrt()) @ vectors[:1].mT, rtol=1e-4, atol=1e-5 / noise**0.5)


def test_draws_of_the_form_of_few_weights_have_its_covariance() -> None:
    P = co.TangentKernel(few_weights()[0], 2.0).add_diagonal(0.3)
    assert P.plan().chosen["solve"] == "closed form"
    directions = torch.linalg.eigh(P.to_dense())[1][:, ::38]
    for operator in (P, P.inverse()):
        drawn = directions.mT @ co.linalg.draw(operator, 500, torch.Generator().manual_seed(0))
        expected = (directions * (operator @ directions)).sum(0)
        # Six standard errors of eight variances: a false alarm in 1e6.
        assert bool(((drawn.square().mean(1) - expected).abs() < 6 * (2 / 500) ** 0.5 * expected).all())
