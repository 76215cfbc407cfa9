"""The kernel of a linearised network inside gpytorch's variational models: exact where the family holds the posterior.

Tests `outputs="independent"` of `kernel.py`, too.
"""

import copy
from typing import Any

import gpytorch
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck

import curvops as co
from curvops.gp import LinearizedKernel, LinearizedMean

pytestmark = pytest.mark.usefixtures("no_foreign_solvers")

DOUBLE = torch.float64
N = 12


def linearized(outputs: int, likelihood: Any, y: Tensor) -> tuple[co.operators.Linearization, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(N, 2, dtype=DOUBLE)
    network = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, outputs)).double()
    return co.linearize(network, (x, y), likelihood), x


class Variational(gpytorch.models.ApproximateGP):
    """One process, or a batch of them, one of each output."""

    def __init__(self, lin: co.operators.Linearization, inducing: Tensor, learned: bool = True, **options: Any) -> None:
        several = lin.num_outputs > 1
        batch = torch.Size([lin.num_outputs]) if several else torch.Size()
        q = gpytorch.variational.CholeskyVariationalDistribution(inducing.shape[-2], batch_shape=batch)
        own = gpytorch.variational.VariationalStrategy(self, inducing, q, learn_inducing_locations=learned)
        wrap = gpytorch.variational.IndependentMultitaskVariationalStrategy
        super().__init__(wrap(own, num_tasks=lin.num_outputs) if several else own)
        self.own = own
        outputs = "independent" if several else "joint"
        self.mean_module = LinearizedMean(lin, outputs=outputs)
        self.covar_module = LinearizedKernel(lin, 1.0, over="layers", outputs=outputs, **options)
        self.double()

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


@pytest.mark.parametrize("outputs", [1, 2])
def test_with_all_points_inducing_the_best_bound_is_the_evidence_of_the_process(outputs: int) -> None:
    """Under a Gaussian likelihood, and for independent outputs the sum of their evidences."""
    noise = 0.3
    y = torch.randn(N, outputs, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))
    lin, x = linearized(outputs, co.likelihoods.Gaussian(noise), y)
    gp = Variational(lin, x, learned=False)
    K, mean = gp.covar_module(x).to_dense().detach(), gp.mean_module(x).detach()
    K, mean = K.reshape(-1, N, N), mean.reshape(-1, N)
    eye = torch.eye(N, dtype=DOUBLE)
    L = torch.linalg.cholesky(K + gp.own.jitter_val * eye)
    solved = torch.linalg.solve(K + noise * eye, torch.cat([L, (y.mT - mean).unsqueeze(-1)], -1))
    S = eye - L.mT @ solved[..., :-1]
    q = gp.own._variational_distribution
    shape = q.variational_mean.shape
    with torch.no_grad():
        q.variational_mean.copy_((L.mT @ solved[..., -1:]).squeeze(-1).reshape(shape))
        q.chol_variational_covar.copy_(torch.linalg.cholesky(S).reshape(*shape, N))
    gp.own.variational_params_initialized.fill_(1)
    likelihood: Any = gpytorch.likelihoods.GaussianLikelihood()
    if outputs > 1:
        likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(outputs, has_task_noise=False)
    likelihood = likelihood.double()
    likelihood.noise = torch.tensor(noise, dtype=DOUBLE)
    bound = gpytorch.mlls.VariationalELBO(likelihood, gp, num_data=N)
    value = bound(gp.train()(x), y if outputs > 1 else y.squeeze(1)) * N
    normal = torch.distributions.MultivariateNormal(mean, K + noise * eye)
    torch.testing.assert_close(value, normal.log_prob(y.mT).sum(), rtol=1e-4, atol=1e-3)
    new = torch.randn(4, 2, dtype=DOUBLE)
    predicted = gp.eval()(new)
    if outputs == 1:
        post = co.laplace(lin, co.GGN, prior_precision=1.0, check_mode=False)
        exact = co.gp.laplace_gp(lin, 1.0)
        torch.testing.assert_close(
            predicted.covariance_matrix, post.predict(new, joint=True).covariance_matrix, rtol=1e-3, atol=1e-4
        )
        torch.testing.assert_close(predicted.mean.unsqueeze(1), exact.predict(new).mean, rtol=1e-3, atol=1e-3)
    assert predicted.mean.shape == ((4, outputs) if outputs > 1 else (4,))


@pytest.mark.parametrize("kind", ["bernoulli", "softmax"])
def test_classification_trains_by_the_bound(kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(N) % (3 if kind == "softmax" else 2)
    if kind == "softmax":
        lin, x = linearized(3, "classification", labels)
        likelihood: Any = gpytorch.likelihoods.SoftmaxLikelihood(num_classes=3, mixing_weights=False).double()
        y: Tensor = labels
    else:
        lin, x = linearized(1, co.likelihoods.Bernoulli(), labels[:, None].double())
        likelihood, y = gpytorch.likelihoods.BernoulliLikelihood().double(), labels.double()
    gp = Variational(lin, x[:6].clone())
    theta = lin.theta.clone()
    names = {name for name, _ in gp.covar_module.named_parameters()}
    assert names == {"raw_prior_precision"} and not [name for name in gp.state_dict() if "lin." in name]
    bound = gpytorch.mlls.VariationalELBO(likelihood, gp, num_data=N)
    optimizer, values = torch.optim.Adam(gp.parameters(), lr=0.05), []
    with torch.random.fork_rng():
        torch.manual_seed(int(torch.randint(100, (), generator=generator)))
        for _ in range(10):
            optimizer.zero_grad()
            loss = -bound(gp(x), y)
            loss.backward()
            optimizer.step()
            values.append(float(loss.detach()))
        assert sum(values[-5:]) < sum(values[:5]) and torch.equal(theta, lin.theta)
        assert all(bool(parameter.grad.isfinite().all()) for parameter in gp.parameters())
        gp.eval()
        copied = copy.deepcopy(gp)
        torch.testing.assert_close(copied(x).mean, gp(x).mean)
        probabilities = likelihood(gp(torch.randn(5, 2, dtype=DOUBLE)))
    found = probabilities.probs.mean(0) if kind == "softmax" else probabilities.mean
    assert found.shape == ((5, 3) if kind == "softmax" else (5,))
    assert bool(((found >= 0) & (found <= 1)).all())


def test_independent_outputs_are_the_blocks_of_the_joint_kernel() -> None:
    lin = linearized(3, "classification", torch.arange(N) % 3)[0]
    joint, own = (
        LinearizedKernel(lin, 2.0, over="layers"),
        LinearizedKernel(lin, 2.0, over="layers", outputs="independent"),
    )
    mean, means = LinearizedMean(lin, 0.1), LinearizedMean(lin, 0.1, outputs="independent")
    a, b = torch.randn(4, 2, dtype=DOUBLE), torch.randn(5, 2, dtype=DOUBLE)
    blocks = joint(a, b).to_dense().view(4, 3, 5, 3)
    expected = torch.stack([blocks[:, c, :, c] for c in range(3)])
    assert own(a, b).shape == (3, 4, 5)
    torch.testing.assert_close(own(a, b).to_dense(), expected)
    torch.testing.assert_close(own(a[None], b).to_dense(), expected)
    torch.testing.assert_close(own(a.expand(3, 4, 2), b).to_dense(), expected)
    torch.testing.assert_close(own(a, b)[1].to_dense(), expected[1])
    torch.testing.assert_close(own(a, b)[:, :2, 1:].to_dense(), expected[:, :2, 1:])
    square = own(a).to_dense()
    torch.testing.assert_close(own(a, diag=True), square.diagonal(dim1=1, dim2=2))
    torch.testing.assert_close(own(a).diagonal(dim1=-1, dim2=-2), square.diagonal(dim1=1, dim2=2))
    each = torch.stack([a, a + 1, a - 1])
    torch.testing.assert_close(own(each).to_dense(), torch.stack([own(p).to_dense()[c] for c, p in enumerate(each)]))
    torch.testing.assert_close(means(a), mean(a).mT)
    torch.testing.assert_close(means(each), torch.stack([mean(p)[:, c] for c, p in enumerate(each)]))
    assert gradcheck(lambda a: own(a).to_dense(), (a.requires_grad_(),), fast_mode=True)
    scaled = gpytorch.kernels.ScaleKernel(own, batch_shape=torch.Size([3])).double()
    torch.testing.assert_close(scaled(a).to_dense(), own(a).to_dense() * scaled.outputscale[:, None, None])
