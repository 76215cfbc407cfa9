"""A Laplace posterior as a BoTorch model: its moments against dense algebra, and acquisition functions that take it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from botorch.acquisition import LogExpectedImprovement, qUpperConfidenceBound
from botorch.acquisition.acquisition import AcquisitionFunction
from botorch.acquisition.knowledge_gradient import qKnowledgeGradient
from botorch.acquisition.logei import qLogNoisyExpectedImprovement
from botorch.acquisition.max_value_entropy_search import qLowerBoundMaxValueEntropy, qMaxValueEntropy
from botorch.acquisition.monte_carlo import qSimpleRegret
from botorch.acquisition.objective import GenericMCObjective, ScalarizedPosteriorTransform
from botorch.exceptions.errors import DeprecationError
from botorch.models import ModelList, SingleTaskGP
from botorch.models.transforms.input import Normalize
from botorch.models.transforms.outcome import Standardize
from botorch.optim import optimize_acqf
from botorch.posteriors import GPyTorchPosterior
from botorch.sampling import SobolQMCNormalSampler
from torch import Tensor, nn
from torch.autograd import gradcheck

import curvops as co
from curvops.gp import LaplaceModel

DOUBLE = torch.float64
NOISE = 0.01
BOUNDS = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=DOUBLE)
EXACT = {"rtol": 1e-8, "atol": 1e-9}


def posterior(outputs: int = 1, curvature: Any = co.KFAC, likelihood: Any = None) -> co.posterior.Laplace:
    torch.manual_seed(0)
    x, y = torch.rand(8, 2, dtype=DOUBLE), torch.rand(8, outputs, dtype=DOUBLE)
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, outputs)).double()
    targets = y if likelihood is None else y.argmax(1)
    lin = co.linearize(net, (x, targets), likelihood or co.likelihoods.Gaussian(NOISE))
    return co.laplace(lin, curvature, prior_precision=1.0, check_mode=False)


def dense_moments(
    post: co.posterior.Laplace, x: Tensor, start: Tensor, observed: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """The linear model's mean and covariance at x in weight space, after further observations."""
    lin, P, mean = post.lin, post.precision.to_dense(), start
    if observed is not None:
        J = lin.jacobian(observed[0]).to_dense()
        P = P + J.mT @ J / NOISE
        gap = observed[1] - lin.predict(observed[0]) - (J @ (start - lin.theta)).reshape(observed[1].shape)
        mean = start + torch.linalg.solve(P, J.mT @ gap.flatten() / NOISE)
    J = lin.jacobian(x).to_dense()
    found = lin.predict(x) + (J @ (mean - lin.theta)).reshape(len(x), -1)
    return found, J @ torch.linalg.solve(P, J.mT)


@pytest.mark.parametrize(
    ("outputs", "curvature", "mode"),
    [
        (1, co.GGN, "map"),
        (3, co.GGN, "linear"),
        (1, co.KFAC, "linear"),
        (3, co.KFAC, "map"),
        (3, co.DiagonalGGN, "map"),
    ],
)
def test_posteriors_and_conditioning_are_those_of_the_linear_model(outputs: int, curvature: Any, mode: str) -> None:
    post = posterior(outputs, curvature)
    model = LaplaceModel(post, mode=mode)
    start = post.lin.theta if mode == "map" else post.linear_mode().theta
    X = torch.rand(3, 2, 4, 2, dtype=DOUBLE)
    observed = torch.rand(3, 2, dtype=DOUBLE), torch.rand(3, outputs, dtype=DOUBLE)
    first = model.condition_on_observations(observed[0][:1], observed[1][:1])
    models = {
        None: model,
        observed: model.condition_on_observations(*observed),
        observed[:2]: first.condition_on_observations(observed[0][1:], observed[1][1:]),
    }
    for given, conditioned in models.items():
        found = conditioned.posterior(X)
        assert found.mean.shape == (3, 2, 4, outputs)
        for i in range(3):
            mean, covariance = dense_moments(post, X[i, 1], start, given)
            torch.testing.assert_close(found.mean[i, 1], mean, **EXACT)
            torch.testing.assert_close(found.distribution.covariance_matrix[i, 1], covariance, **EXACT)


def test_fantasies_share_their_points() -> None:
    post = posterior()
    model = LaplaceModel(post)
    assert model.batch_shape == () and model.num_outputs == 1
    X = torch.rand(2, 3, 2, dtype=DOUBLE)
    fantasies = model.fantasize(X, SobolQMCNormalSampler(torch.Size([5]), seed=0))
    assert fantasies.batch_shape == (5, 2)
    found, x = fantasies.posterior(torch.rand(2, 4, 2, dtype=DOUBLE)), torch.rand(4, 2, dtype=DOUBLE)
    assert found.mean.shape == (5, 2, 4, 1)
    found = fantasies.posterior(x)
    Y = fantasies._observed[0].Y
    mean, covariance = dense_moments(post, x, post.lin.theta, (X[1], Y[3, 1]))
    torch.testing.assert_close(found.mean[3, 1], mean, **EXACT)
    torch.testing.assert_close(found.distribution.covariance_matrix[3, 1], covariance, **EXACT)


def test_noise_of_each_batch() -> None:
    """Posteriors under a noise with batches of its own, as BoTorch passes them on."""
    model, X = LaplaceModel(posterior(2)), torch.rand(2, 3, 2, dtype=DOUBLE)
    noise = torch.rand(2, 3, 2, dtype=DOUBLE) + 0.1
    plain, noisy = model.posterior(X), model.posterior(X, observation_noise=noise)
    torch.testing.assert_close(noisy.variance, plain.variance + noise)
    Y, new = torch.rand(5, 2, 3, 2, dtype=DOUBLE), torch.rand(2, 4, 2, dtype=DOUBLE)
    found = model.condition_on_observations(X, Y, noise=noise).posterior(new)
    for i in range(2):
        alone = model.condition_on_observations(X[i], Y[:, i], noise=noise[i]).posterior(new[i])
        torch.testing.assert_close(found.mean[:, i], alone.mean, **EXACT)
        torch.testing.assert_close(found.variance[:, i], alone.variance, **EXACT)


def test_observations_of_some_outputs_with_noise_of_their_own() -> None:
    """Told twice: of outputs 2 and 0 at two points with a noise each, then of all at a third."""
    post = posterior(3)
    lin, x = post.lin, torch.rand(4, 2, dtype=DOUBLE)
    X, Y = torch.rand(3, 2, dtype=DOUBLE), torch.rand(3, 3, dtype=DOUBLE)
    noise = torch.tensor([[0.1, 0.2], [0.3, 0.4]], dtype=DOUBLE)
    told = LaplaceModel(post).subset_output([2, 0]).condition_on_observations(X[:2], Y[:2][:, [2, 0]], noise)
    told._outputs = [0, 1, 2]
    found = told.condition_on_observations(X[2:], Y[2:]).posterior(x)
    rows = [2, 0, 5, 3, 6, 7, 8]
    J, R = lin.jacobian(X).to_dense()[rows], torch.cat([noise.flatten(), torch.full((3,), NOISE, dtype=DOUBLE)])
    P = post.precision.to_dense() + J.mT @ (J / R[:, None])
    gap = (Y - lin.predict(X)).flatten()[rows]
    J_x = lin.jacobian(x).to_dense()
    mean = lin.predict(x) + (J_x @ torch.linalg.solve(P, J.mT @ (gap / R))).view(4, 3)
    torch.testing.assert_close(found.mean, mean, **EXACT)
    covariance = J_x @ torch.linalg.solve(P, J_x.mT)
    torch.testing.assert_close(found.distribution.covariance_matrix, covariance, **EXACT)


def test_fantasies_with_noise_of_their_own_and_of_no_points() -> None:
    model, sampler = LaplaceModel(posterior(2)), SobolQMCNormalSampler(torch.Size([5]), seed=0)
    X, x = torch.rand(3, 2, 2, dtype=DOUBLE), torch.rand(3, 4, 2, dtype=DOUBLE)
    noises = torch.rand(3, 2, 2, dtype=DOUBLE) + 0.1
    found = model.fantasize(X, sampler, observation_noise=noises).posterior(x)
    assert found.mean.shape == (5, 3, 4, 2)
    for i in range(3):
        alone = model.fantasize(X[i], sampler, observation_noise=noises[i]).posterior(x[i])
        torch.testing.assert_close(found.variance[:, i], alone.variance, **EXACT)
    nothing = model.fantasize(X[:, :0], sampler).posterior(x)
    torch.testing.assert_close(nothing.mean, model.posterior(x).mean.expand(5, -1, -1, -1))
    torch.testing.assert_close(nothing.variance, model.posterior(x).variance.expand(5, -1, -1, -1))


def test_repeated_candidates_are_drawn_alike() -> None:
    """The covariance of three equal points and one other is singular; no jitter tells them apart."""
    X = torch.rand(2, 2, dtype=DOUBLE)[[0, 0, 0, 1]]
    drawn = LaplaceModel(posterior()).posterior(X).rsample(torch.Size([50]))
    torch.testing.assert_close(drawn[:, 1:3], drawn[:, :1].expand(-1, 2, -1), rtol=0, atol=1e-7)
    assert float((drawn[:, 3] - drawn[:, 0]).abs().max()) > 1e-3


def test_lists_of_models() -> None:
    X, sampler = torch.rand(3, 2, 2, dtype=DOUBLE), SobolQMCNormalSampler(torch.Size([4]), seed=0)
    one, three = LaplaceModel(posterior()), LaplaceModel(posterior(3))
    process = SingleTaskGP(torch.rand(5, 2, dtype=DOUBLE), torch.rand(5, 1, dtype=DOUBLE))
    models = ModelList(one, three, process)
    each = torch.cat([model.posterior(X).mean for model in (one, three, process)], -1)
    torch.testing.assert_close(models.posterior(X).mean, each)
    torch.testing.assert_close(models.posterior(X, output_indices=[3, 1]).mean, each[..., [3, 1]])
    torch.testing.assert_close(models.subset_output([0, 2]).posterior(X).mean, each[..., [0, 2]])
    assert ModelList(one, one).fantasize(X, sampler).posterior(X).mean.shape == (4, 3, 2, 2)


def test_single_precision_fantasies_and_draws() -> None:
    """Each shape as BoTorch's tests ask it of its own models; the model itself is left as it was."""
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))
    lin = co.linearize(net, (torch.rand(8, 2), torch.rand(8, 2)), co.likelihoods.Gaussian(NOISE))
    model, X = LaplaceModel(co.laplace(lin, co.KFAC, 1.0, check_mode=False)), torch.rand(2, 3, 2)
    plain, sampler = model.posterior(X), SobolQMCNormalSampler(torch.Size([2]), seed=0)
    assert isinstance(plain, GPyTorchPosterior) and plain.mean.dtype == torch.float32
    fantasy = model.fantasize(X, sampler, observation_noise=torch.rand(3, 2) + 0.1)
    assert fantasy.batch_shape == (2, 2) and fantasy.posterior(X).mean.shape == (2, 2, 3, 2)
    assert fantasy.posterior(X[:, :1]).rsample(torch.Size([4])).shape == (4, 2, 2, 1, 2)
    with pytest.raises(DeprecationError, match="no longer accepts a boolean"):
        model.fantasize(X, sampler, observation_noise=True)
    told = model.condition_on_observations(X, torch.rand(2, 3, 2))
    assert bool((told.posterior(X).variance < plain.variance).all())
    torch.testing.assert_close(model.posterior(X).mean, plain.mean)


def test_gradients_in_the_candidates() -> None:
    model = LaplaceModel(posterior(2))
    conditioned = model.condition_on_observations(torch.rand(2, 2, dtype=DOUBLE), torch.rand(2, 2, dtype=DOUBLE))
    X = torch.rand(2, 2, 2, dtype=DOUBLE, requires_grad=True)

    def moments(X: Tensor) -> tuple[Tensor, Tensor]:
        found = conditioned.posterior(X)
        return found.mean, found.distribution.covariance_matrix

    assert gradcheck(moments, (X,), fast_mode=True, rtol=1e-4)


def test_noise_outputs_and_transforms() -> None:
    post, X = posterior(3), torch.rand(2, 4, 2, dtype=DOUBLE)
    model = LaplaceModel(post)
    plain = model.posterior(X)
    noisy = model.posterior(X, observation_noise=True)
    torch.testing.assert_close(noisy.variance, plain.variance + NOISE)
    given = model.posterior(X, observation_noise=torch.tensor([[0.1, 0.2, 0.3]], dtype=DOUBLE))
    torch.testing.assert_close(given.variance, plain.variance + torch.tensor([0.1, 0.2, 0.3], dtype=DOUBLE))
    for some in (model.subset_output([2, 0]).posterior(X), model.posterior(X, output_indices=[2, 0])):
        torch.testing.assert_close(some.mean, plain.mean[..., [2, 0]])
        torch.testing.assert_close(some.variance, plain.variance[..., [2, 0]])
    scale, Y = Standardize(m=3), torch.rand(6, 3, dtype=DOUBLE) * torch.tensor([5.0, 10.0, 15.0]) + 2
    scale(Y)
    scaled = LaplaceModel(post, outcome_transform=scale)
    whole = scaled.posterior(X)
    for some in (scaled.subset_output([2, 0]).posterior(X), scaled.posterior(X, output_indices=[2, 0])):
        torch.testing.assert_close(some.mean, whole.mean[..., [2, 0]])
        torch.testing.assert_close(some.variance, whole.variance[..., [2, 0]])
    torch.testing.assert_close(scaled.posterior(X).mean, whole.mean)  # the model itself keeps its transform
    torch.testing.assert_close(model.subset_output([1]).posterior(X).variance, plain.variance[..., [1]])
    weighted = model.posterior(X, posterior_transform=ScalarizedPosteriorTransform(torch.ones(3, dtype=DOUBLE)))
    torch.testing.assert_close(weighted.mean, plain.mean.sum(-1, keepdim=True))

    class TimesPoints(ScalarizedPosteriorTransform):
        def forward(self, posterior: Any, X: Tensor | None = None) -> Any:
            assert X is not None
            return GPyTorchPosterior(posterior.distribution[..., 0] * float(X.sum()))

    class Plain(ScalarizedPosteriorTransform):
        def forward(self, posterior: Any) -> Any:
            return super().forward(posterior)

    by_points = model.posterior(X, posterior_transform=TimesPoints(torch.ones(3, dtype=DOUBLE)))
    torch.testing.assert_close(by_points.mean, plain.mean[..., :1] * X.sum())
    without = model.posterior(X, posterior_transform=Plain(torch.ones(3, dtype=DOUBLE)))
    torch.testing.assert_close(without.mean, plain.mean.sum(-1, keepdim=True))

    units = Normalize(d=2, bounds=2 * BOUNDS)
    changed = LaplaceModel(post, input_transform=units, outcome_transform=scale)
    found = changed.posterior(2 * X)
    torch.testing.assert_close(found.mean, plain.mean * Y.std(0) + Y.mean(0))
    torch.testing.assert_close(found.variance, plain.variance * Y.var(0))
    both = [
        changed.condition_on_observations(2 * X[0], Y[:4]).posterior(2 * X[1]).mean,
        model.condition_on_observations(X[0], (Y[:4] - Y.mean(0)) / Y.std(0)).posterior(X[1]).mean * Y.std(0)
        + Y.mean(0),
    ]
    torch.testing.assert_close(*both, **EXACT)


ACQUISITIONS: dict[str, Callable[[LaplaceModel], AcquisitionFunction]] = {
    "LogEI": lambda model: LogExpectedImprovement(model, 0.5),
    "qLogNEI": lambda model: qLogNoisyExpectedImprovement(
        model, torch.rand(4, 2, dtype=DOUBLE), sampler=SobolQMCNormalSampler(torch.Size([8]))
    ),
    "qMES": lambda model: qMaxValueEntropy(model, torch.rand(20, 2, dtype=DOUBLE), num_fantasies=2, num_y_samples=8),
    "GIBBON": lambda model: qLowerBoundMaxValueEntropy(model, torch.rand(20, 2, dtype=DOUBLE)),
    "qKG": lambda model: qKnowledgeGradient(model, num_fantasies=2),
    "Thompson": lambda model: qSimpleRegret(model.draw_function(torch.Generator().manual_seed(0))),
}


@pytest.mark.parametrize("name", ACQUISITIONS)
def test_acquisition_functions_are_optimised(name: str) -> None:
    acquisition = ACQUISITIONS[name](LaplaceModel(posterior()))
    q = 1 if name in ("LogEI", "Thompson") else 2
    options, one_by_one = {"maxiter": 3}, name in ("qMES", "GIBBON")
    candidates, value = optimize_acqf(
        acquisition, BOUNDS, q=q, num_restarts=2, raw_samples=4, options=options, sequential=one_by_one
    )
    assert candidates.shape == (q, 2) and bool(value.isfinite().all())
    assert bool(((candidates >= 0) & (candidates <= 1)).all())


def test_probabilities_of_a_classifier_as_an_objective() -> None:
    model = LaplaceModel(posterior(3, likelihood="classification"))
    objective = GenericMCObjective(lambda samples, X=None: samples.softmax(-1)[..., 0])
    sampler = SobolQMCNormalSampler(torch.Size([16]))
    acquisition = qUpperConfidenceBound(model, 0.1, sampler=sampler, objective=objective)
    X = torch.rand(5, 2, 2, dtype=DOUBLE, requires_grad=True)
    value = acquisition(X)
    assert value.shape == (5,) and bool(torch.autograd.grad(value.sum(), X)[0].isfinite().all())


def test_a_drawn_function_is_one_function() -> None:
    post = posterior(2)
    model, X = LaplaceModel(post), torch.rand(3, 2, 2, dtype=DOUBLE)
    drawn = model.draw_function(torch.Generator().manual_seed(1))
    sample = post.sample(1, torch.Generator().manual_seed(1))
    expected = post.functions(X.reshape(-1, 2), 1, samples=sample).reshape(3, 2, 2)
    torch.testing.assert_close(drawn.posterior(X).mean, expected)


class Missing:
    """A finder of modules for which BoTorch is not installed."""

    def find_spec(self, name: str, *_: Any) -> None:
        if name == "botorch":
            raise ModuleNotFoundError("No module named 'botorch'", name=name)


def test_without_botorch_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in [name for name in sys.modules if name.split(".")[0] == "botorch"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "curvops.gp.botorch_model")
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    with pytest.raises(ModuleNotFoundError, match=r"pip install curvops\[botorch\]"):
        co.gp.__getattr__("LaplaceModel")
    with pytest.raises(AttributeError, match="no attribute 'Model'"):
        co.gp.__getattr__("Model")
