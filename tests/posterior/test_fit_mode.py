"""Tests `fit_mode.py` and `linear_mode.py`: training ends at a mode or says why not; elsewhere the evidence warns."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import curvops as co
from curvops.errors import ModeWarning
from tests.zoo_modules import Applied

DOUBLE = torch.float64


def data(n=60, likelihood="classification", dtype=DOUBLE):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 4, generator=generator, dtype=DOUBLE)
    scores = x[:, :3].sin() + 0.3 * torch.randn(n, 3, generator=generator, dtype=DOUBLE)
    targets = {"classification": scores.argmax(1), "poisson": scores.exp().round(), "bernoulli": (scores > 0).double()}
    targets["exponential"] = scores.exp()
    return x.to(dtype), targets.get(likelihood, scores if likelihood == "regression" else None)


def network(activation=nn.Tanh, dtype=DOUBLE, hidden=4):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, hidden), activation(), nn.Linear(hidden, 3)).to(dtype)


def gradient_of(model, loss, precision, mean=0.0):
    """The gradient of minus the log posterior by autograd, beside the library."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    value = loss + 0.5 * precision * sum((p - mean).square().sum() for p in parameters)
    return torch.cat([g.flatten() for g in torch.autograd.grad(value, parameters)])


LOSSES = {
    "classification": lambda f, y: nn.functional.cross_entropy(f, y, reduction="sum"),
    "regression": lambda f, y: (f - y).square().sum() / 0.2,
    "poisson": lambda f, y: nn.functional.poisson_nll_loss(f, y, reduction="sum"),
    "bernoulli": lambda f, y: nn.functional.binary_cross_entropy_with_logits(f, y, reduction="sum"),
    "exponential": lambda f, y: (y * f.exp() - f).sum(),
}
LIKELIHOODS = {
    "classification": "classification",
    "regression": co.likelihoods.Gaussian(0.1),
    "poisson": co.likelihoods.Poisson(),
    "bernoulli": co.likelihoods.Bernoulli(),
    "exponential": lambda f: torch.distributions.Exponential(f.exp()),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_the_gradient_of_the_log_posterior_vanishes(kind):
    x, y = data(likelihood=kind)
    model = network()
    with torch.inference_mode(kind == "poisson"):
        fit = co.fit_mode(model, (x, y), LIKELIHOODS[kind], 0.5, 0.1, atol=1e-12)
    assert fit.converged and fit.remaining < 1e-12 and fit.gradients < 3000
    assert gradient_of(model, LOSSES[kind](model(x), y), 0.5, 0.1).norm() < 1e-5
    assert bool((fit.losses.diff() < 0).all())
    norm = sum((p - 0.1).square().sum() for p in model.parameters())
    lin = co.linearize(model, (x, y), LIKELIHOODS[kind])
    post = co.laplace(lin, co.GGN(lin, mc_samples=16 if kind == "exponential" else None), 0.5, 0.1)
    assert float(fit.losses[-1]) == pytest.approx(float(0.25 * norm.detach() - post.lin.log_likelihood()), rel=1e-10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        post.log_evidence()


@pytest.mark.parametrize(("gradients", "steps"), [(30, 0), (80, 50)])
def test_an_interruption_leaves_the_weights_after_the_last_full_50_steps(gradients, steps):
    (x, y), likelihood = data(likelihood="regression"), LIKELIHOODS["regression"]

    def interrupt(description, done, total):
        if done > gradients:
            raise KeyboardInterrupt

    model, stopped = network(), network()
    if steps:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ModeWarning)
            co.fit_mode(model, (x, y), likelihood, 0.5, atol=1e-12, maxiter=steps)
    with pytest.raises(KeyboardInterrupt):
        co.fit_mode(stopped, (x, y), likelihood, 0.5, atol=1e-12, progress=interrupt)
    for kept, expected in zip(stopped.parameters(), model.parameters()):
        assert torch.equal(kept, expected)


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU])
def test_a_small_network_ends_within_a_nat_of_a_mode(activation, dtype):
    x, y = data(100, dtype=dtype)
    model = network(activation, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit = co.fit_mode(model, (x, y), "classification", prior_precision=1.0)
        post = co.laplace(co.linearize(model, (x, y), "classification"), co.KFAC, prior_precision=1.0)
        post.log_evidence()
        co.evidence.grid(post, [0.5, 1.0])
    assert fit.remaining < 1 and (fit.converged or activation is nn.ReLU)
    assert f"reason={fit.reason.name}" in repr(fit) and model[0].weight.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_a_last_layer_always_reaches_its_mode_with_few_passes(dtype):
    """The rest of the network runs for the checks at the door, and once or twice for the features."""
    x, y = data(300, dtype=dtype)
    model, passes = network(nn.ReLU, dtype), []
    body = model[0].weight.detach().clone()
    model[0].register_forward_hook(lambda module, inputs, outputs: passes.append(len(outputs)))
    fit = co.fit_mode(model, (x, y), "classification", 1.0, parameters="last_layer")
    assert fit.converged and torch.equal(model[0].weight, body)
    assert sum(passes) < 15 * len(x)
    for p in model[0].parameters():
        p.requires_grad_(False)
    gradient = gradient_of(model, LOSSES["classification"](model(x), y), 1.0)
    assert gradient.norm() < (1e-2 if dtype == torch.float32 else 1e-4)


def pooled(head):
    """A head whose outputs are added up over two positions."""
    positions, total = Applied(lambda x: torch.stack([x, x.flip(1)], 1)), Applied(lambda f: f.sum(1))
    return nn.Sequential(positions, nn.Linear(4, 6), nn.Tanh(), head, total).double()


def test_a_head_that_is_pooled_reaches_its_mode():
    """By Newton's method, as the outputs are affine in its weights: that takes few passes through the rest."""
    x, y = data(60)
    model, passes = pooled(nn.Linear(6, 3)), []
    model[1].register_forward_hook(lambda module, inputs, outputs: passes.append(len(outputs)))
    fit = co.fit_mode(model, (x, y), "classification", 1.0, parameters="last_layer")
    assert fit.converged and fit.remaining <= 0.01
    assert sum(passes) < 40 * len(x)
    model[1].requires_grad_(False)
    assert gradient_of(model, LOSSES["classification"](model(x), y), 1.0).norm() < 1e-4


def test_a_normalised_head_is_descended_and_tells_how_far_it_came():
    """A prior draws the direction to 0, where it is not smooth: rounding decides whether 0.01 nats are reached."""
    x, y = data(60)
    model = pooled(nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)))
    fit = co.fit_mode(model, (x, y), "classification", 10.0, parameters="last_layer")
    assert fit.converged == (fit.remaining <= 0.01) and fit.remaining < 0.1
    assert fit.losses[-1] < fit.losses[0] - 1


def test_data_in_any_form_and_weights_of_points_give_the_same_mode():
    """A point of weight two counts as two points."""
    x, y = data(40)
    dataset = TensorDataset(x, y)

    def mode(given, **options):
        model = network(hidden=2)
        assert co.fit_mode(model, given, "classification", 3.0, atol=1e-13, **options).converged
        return co.linearize(model, (x, y), "classification").theta

    want = mode((x, y))
    for given in (DataLoader(dataset, 7, shuffle=True), [(x[:11], y[:11]), (x[11:], y[11:])]):
        torch.testing.assert_close(mode(given), want, rtol=1e-5, atol=1e-5)
    counts = torch.ones(40, dtype=DOUBLE)
    counts[:5] = 2
    twice = mode((torch.cat([x, x[:5]]), torch.cat([y, y[:5]])))
    torch.testing.assert_close(mode((x, y, counts), weights=True), twice, rtol=1e-5, atol=1e-5)


def test_frozen_tied_and_complex_parameters():
    """Frozen parameters and those outside a selection keep their values; tied ones stay tied."""
    x, y = data(40)

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
            self.b.weight = self.a.weight
            self.scale = nn.Parameter(torch.ones(4, dtype=torch.complex128))

        def forward(self, x):
            return self.head(self.b((self.a(x).tanh() * self.scale).real).tanh())

    model = Tied().double()
    model.scale.data = model.scale.data.to(torch.complex128)
    model.head.bias.requires_grad_(False)
    frozen, scale = model.head.bias.clone(), model.scale.detach().clone()
    assert co.fit_mode(
        model, (x, y), "classification", {"a.*": 1.0, "b.bias": 2.0, "head.*": 1.0, "scale": 1.0}
    ).converged
    assert model.b.weight is model.a.weight and torch.equal(model.head.bias, frozen)
    assert not torch.equal(model.scale, scale)
    head, bias = model.head.weight.detach().clone(), model.a.bias.detach().clone()
    assert co.fit_mode(model, (x, y), "classification", 5.0, parameters="a.bias").converged
    assert torch.equal(model.head.weight, head) and not torch.equal(model.a.bias, bias)


def test_a_function_of_parameters_is_trained_in_its_mapping():
    x, y = data(30, "regression")
    params = {"w": torch.zeros(4, 3, dtype=DOUBLE)}
    fit = co.fit_mode(
        (lambda params, x: x @ params["w"], params), (x, y), co.likelihoods.Gaussian(0.1), 2.0, atol=1e-14
    )
    assert fit.converged
    want = torch.linalg.solve(x.mT @ x / 0.1 + 2 * torch.eye(4), x.mT @ y / 0.1)
    torch.testing.assert_close(params["w"], want, rtol=1e-7, atol=1e-7)


def test_progress_counts_gradients():
    seen = []
    x, y = data(30)
    model = network()
    fit = co.fit_mode(model, (x, y), "classification", 1.0, progress=lambda *step: seen.append(step))
    assert [done for _, done, _ in seen] == list(range(1, fit.gradients + 1)) and seen[0][0] == "fit_mode"


def test_what_remains_is_told_in_nats_where_training_ends_early(annotations_unchecked):
    x, y = data()
    model = network()
    with pytest.warns(ModeWarning, match='nats from a mode.*maxiter was reached.*parameters="last_layer"'):
        fit = co.fit_mode(model, (x, y), "classification", 1e-3, maxiter=5)
    assert fit.reason.name == "ITERATION_LIMIT" and not fit.converged and fit.remaining > 1


def test_the_evidence_is_too_low_by_the_nats_in_its_warning(annotations_unchecked):
    """Of a linear model with a Gaussian likelihood, the evidence at the mode of the linear model is exact."""
    x, y = data(30, "regression")
    lin = co.linearize(nn.Linear(4, 3).double(), (x, y), co.likelihoods.Gaussian(0.1))
    with pytest.warns(co.errors.NoiseWarning):
        post = co.laplace(lin, co.GGN, prior_precision=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # predictions, draws and spectra need no mode
        post.predict(x), post.sample(2), post.plan(), post.effective_parameters()
        right = post.log_evidence(mode="linear").value
    with pytest.warns(ModeWarning, match="log evidence is about") as caught:
        low = post.log_evidence().value
    assert [warning.category for warning in caught] == [ModeWarning]
    assert f"about {float(right - low):,.0f} nats" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once for a posterior
        post.log_evidence(), post.with_prior(2.0).log_evidence(), co.evidence.grid(post, [1.0])
        co.laplace(lin, co.GGN, prior_precision=1.0, check_mode=False).with_noise(0.2).log_evidence()
    for first in (lambda p: co.evidence.grid(p, [1.0, 2.0]), co.evidence.maximize):
        with pytest.warns(ModeWarning) as caught:
            first(co.laplace(lin, co.GGN, prior_precision=1.0))
        assert [warning.category for warning in caught if warning.category is ModeWarning] == [ModeWarning]
