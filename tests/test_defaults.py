"""The posterior that `co.laplace` makes from what it is given is that of the explicit calls: one table.

Tests `defaults.py`.
"""

import functools
import warnings
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import curvops as co
from curvops import metrics
from curvops.errors import ModeWarning, NoiseWarning, UndeterminedWarning
from tests.network.definitions import normal
from tests.randomness import perceptron, seeded

DOUBLE = torch.float64
CLOSE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}


def labels(x: torch.Tensor) -> torch.Tensor:
    return (x[:, :3] + 0.5 * x.flip(1)[:, :3].sin()).argmax(1)


LIKELIHOODS: dict[str, tuple[Any, int, Any]] = {
    "classes": ("classification", 3, labels),
    "numbers": (co.likelihoods.Gaussian(0.1), 2, lambda x: x[:, :2].sin()),
    "binary labels": (co.likelihoods.Bernoulli(), 2, lambda x: (x[:, :2] > 0).to(DOUBLE)),
    "counts": (co.likelihoods.Poisson(), 1, lambda x: x[:, :1].abs().round()),
    "own classes": (lambda f: torch.distributions.Categorical(logits=f), 3, labels),
    "numbers with their noise": (co.likelihoods.HeteroscedasticGaussian(), 2, lambda x: x[:, :1].sin()),
}
X, HELD_OUT, NEW = normal(40, 4), normal(30, 4, seed=1), normal(5, 4, seed=2)


@functools.cache
def linearised(name: str) -> co.operators.Linearization:
    likelihood, outputs, targets = LIKELIHOODS[name]
    model = perceptron(4, 5, outputs)
    return co.linearize(model, (X, targets(X)), likelihood)


def held_out(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    return HELD_OUT, LIKELIHOODS[name][2](HELD_OUT)


CURVATURES: dict[str, tuple[dict[str, Any], Any]] = {
    "left out": ({}, co.KFAC),
    "a name": ({"curvature": "diagonal"}, co.DiagonalGGN),
    "a class": ({"curvature": co.GGN}, co.GGN),
}
CHOSEN = ("left out", "by held-out data")
"""Ways to a prior that is not given."""
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tempered, with a mean": {"temperature": 0.5, "prior_mean": 0.1},
}


def logit_variance(post: co.posterior.Laplace, x: torch.Tensor = X) -> float:
    """The mean over points and outputs of diag(J P⁻¹ Jᵀ), by dense matrices; at temperature 1."""
    J = post.lin.jacobian(x).to_dense()
    return float((J @ torch.linalg.solve(post.precision.to_dense(), J.mT)).diagonal().mean())


@pytest.mark.filterwarnings("ignore::curvops.errors.UndeterminedWarning")
@pytest.mark.parametrize(
    ("curvature", "prior", "name", "options"),
    [
        *(("left out", *rest, "plain") for rest in product(CHOSEN, LIKELIHOODS)),
        *(("left out", *rest, "tempered, with a mean") for rest in product(CHOSEN, ("classes", "counts"))),
        *(("a class", *rest, "plain") for rest in product(CHOSEN, ("classes", "numbers"))),
        *((curvature, "given", "classes", "plain") for curvature in CURVATURES),
        ("left out", "given", "classes", "tempered, with a mean"),
    ],
)
def test_it_is_the_posterior_of_explicit_calls(
    curvature: str, prior: str, name: str, options: str, annotations_unchecked: Any
) -> None:
    """Each way to a prior × each likelihood; × the options and a curvature for one likelihood of each rule.

    A prior that is given is given in each form of a call.
    """
    lin, (given, kind), more = linearised(name), CURVATURES[curvature], OPTIONS[options]
    start = co.laplace(lin, kind, 2.0 if prior == "given" else 1.0, check_mode=False, **more)
    if prior == "given":
        found, explicit, words = co.laplace(lin, **given, prior_precision=2.0, check_mode=False, **more), start, " 2"
    elif prior == "by held-out data":
        found = co.laplace(lin, **given, validation=held_out(name), check_mode=False, **more)
        explicit, words = co.evidence.validate(start, *held_out(name), generator=seeded()), " by held-out data"
    elif name in ("classes", "binary labels", "own classes"):
        found = co.laplace(lin, **given, check_mode=False, **more)
        explicit, words = start.with_prior(found.prior_precision), " by the variance of the logits"
        assert logit_variance(explicit) == pytest.approx(0.25, rel=3e-4)
    else:
        found = co.laplace(lin, **given, check_mode=False, **more)
        mode = "linear" if name in ("numbers", "counts") else "auto"
        explicit = co.evidence.maximize(start, generator=seeded(), mode=mode)
        words = " by the evidence"
    assert f"prior precision {found.prior_precision.item():.6g}{words.removesuffix(' 2')}, " in repr(found)
    for one, other in [
        (found.prior_precision, explicit.prior_precision),
        (found.prior_mean, explicit.prior_mean),
        (found.precision.to_dense(), explicit.precision.to_dense()),
        (found.predict(NEW).variance, explicit.predict(NEW).variance),
        (found.log_evidence(generator=seeded()).value, explicit.log_evidence(generator=seeded()).value),
    ]:
        torch.testing.assert_close(one, other, **CLOSE)
    assert found.temperature == explicit.temperature == more.get("temperature", 1.0)


@pytest.mark.parametrize(
    ("name", "kind"),
    {
        "kfac": co.KFAC,
        "ekfac": co.EKFAC,
        "ggn": co.GGN,
        "diagonal": co.DiagonalGGN,
        "block_diagonal": co.BlockDiagonal,
        "empirical_fisher": co.EmpiricalFisher,
        "hessian": co.Hessian,
    }.items(),
)
def test_a_name_is_a_class_of_curvature(name: str, kind: type) -> None:
    lin = linearised("classes")
    found = co.laplace(lin, name, 100.0, check_mode=False)
    assert type(found.curvature) is kind
    later = co.linearize(lin.model.module, (HELD_OUT, labels(HELD_OUT)), "classification")
    assert type(found.update(later, "kfac", check_mode=False).curvature) is co.KFAC


def test_selections_that_kfac_cannot_describe_get_the_full_ggn() -> None:
    module = linearised("classes").model.module
    parts = {"last_layer": co.KFAC, "0.*": co.KFAC, (3, 17, 30): co.GGN}
    for parameters, kind in parts.items():
        chosen = torch.tensor(parameters) if isinstance(parameters, tuple) else parameters
        lin = co.linearize(module, (X, labels(X)), "classification", parameters=chosen)
        assert type(co.laplace(lin, check_mode=False).curvature) is kind
        assert type(co.laplace(lin, prior_precision=1.0, check_mode=False).curvature) is kind


@pytest.mark.parametrize("curvature", ["kfac", "ggn"])
def test_the_variance_of_logits_is_that_of_evenly_spaced_training_points(curvature: str) -> None:
    """Of 300 points the 200 that are read are in order of their class; the full GGN has 1,155 weights, and draws."""
    x = normal(300, 4)
    y = labels(x)
    x, y = x[y.argsort()], y.sort().values
    model = perceptron(4, 144, 3)
    lin = co.linearize(model, (x, y), "classification")
    post = co.laplace(lin, curvature)
    assert "by the variance of the logits" in repr(post)
    assert logit_variance(post, x) == pytest.approx(0.25, rel=0.2 if curvature == "ggn" else 0.1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 70)
    again = co.laplace(co.linearize(model, loader, "classification"), curvature)
    torch.testing.assert_close(again.prior_precision, post.prior_precision, rtol=1e-6, atol=0)


def test_many_numbers_choose_by_the_evidence_of_random_points() -> None:
    """Sorted by their targets, from a loader, in batches of 500; the curvature is that of all points."""
    x = normal(3000, 2)
    x = x[x[:, 0].argsort()]
    model, likelihood = (
        perceptron(2, 3, 1),
        co.likelihoods.Gaussian(0.1),
    )
    data = torch.utils.data.TensorDataset(x, x[:, :1].sin())
    every = co.linearize(model, torch.utils.data.DataLoader(data, 500), likelihood)
    chosen = torch.randperm(3000, generator=seeded())[:2000]
    some = co.linearize(model, data[chosen], likelihood)
    post, few = co.laplace(every), co.laplace(some)
    assert "by the evidence of 2,000 points, " in repr(post) and "by the evidence, " in repr(few)
    torch.testing.assert_close(post.prior_precision, few.prior_precision, rtol=1e-8, atol=0)
    explicit = co.laplace(every, prior_precision=float(post.prior_precision))
    torch.testing.assert_close(post.precision.to_dense(), explicit.precision.to_dense(), **CLOSE)
    by_all = co.evidence.maximize(explicit, mode="linear")
    assert float(by_all.prior_precision) != float(post.prior_precision)
    weighted = co.linearize(model, (*data[:], torch.ones(3000).double()), likelihood, weights=True)
    torch.testing.assert_close(co.laplace(weighted).prior_precision, post.prior_precision, rtol=1e-8, atol=0)


def test_points_that_say_less_choose_less() -> None:
    """Of 5,000 points the weights of most are zero, or their targets are missing: the other 1,250 choose."""
    x, counts = normal(5000, 2), torch.arange(5000) % 4 == 0
    y, w = x[:, :1].sin(), counts.double()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    few = co.laplace(co.linearize(model, (x[counts], y[counts]), co.likelihoods.Gaussian(0.1)))
    absent = y.where(counts.unsqueeze(1), torch.nan), co.likelihoods.Gaussian(0.1, missing="ignore")
    weighted = co.linearize(model, (x, y, w), co.likelihoods.Gaussian(0.1), weights=True)
    for lin in (weighted, co.linearize(model, (x, absent[0]), absent[1])):
        post = co.laplace(lin)
        assert "by the evidence of 1,250 points, " in repr(post)
        torch.testing.assert_close(post.prior_precision, few.prior_precision, rtol=1e-6, atol=0)
    rare = co.laplace(
        co.linearize(model, (x, y, 1e-3 * torch.ones(5000).double()), co.likelihoods.Gaussian(0.1), weights=True)
    )
    assert "by the evidence of 5,000 points, " in repr(rare)  # which say as much as five


def test_data_that_determine_all_weights_get_a_weak_prior() -> None:
    x = normal(4000, 2)
    torch.manual_seed(0)
    lin = co.linearize(nn.Linear(2, 2).double(), (x, (x[:, 0] > 0).long()), "classification", parameters="weight")
    post = co.laplace(lin, co.linalg.Dense(1e3 * torch.eye(4, dtype=DOUBLE), psd=True))
    assert float(post.prior_precision) == pytest.approx(1e-4) and logit_variance(post, x) < 0.25


def trained(steps: int = 300) -> tuple[co.operators.Linearization, Any, Any]:
    """A network far from any mode, trained with AdamW on 100 points, a quarter of them with another label."""
    x, new = normal(100, 4), normal(600, 4, seed=1)
    noisy = [torch.where(torch.rand(len(z), generator=seeded()) < 0.25, labels(z.flip(0)), labels(z)) for z in (x, new)]
    model = perceptron(4, 50, 3, activation=nn.ReLU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), noisy[0]).backward()
        optimizer.step()
    lin = co.linearize(model, (x, noisy[0]), "classification")
    return lin, (new[:200], noisy[1][:200]), (new[200:], noisy[1][200:])


def test_a_stranger_gets_no_worse_probabilities_than_he_had(annotations_unchecked: Any) -> None:
    """And better ones from data that were held out, without a warning."""
    lin, validation, (x, y) = trained()
    before = float(metrics.nll(lin.predict(x).softmax(-1), y))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        alone, checked = co.laplace(lin), co.laplace(lin, validation=validation)
    assert float(metrics.nll(alone.probabilities(x), y)) < before
    assert float(metrics.nll(checked.probabilities(x), y)) < 0.9 * before
    by_evidence = co.evidence.maximize(checked)
    assert "by the evidence" in repr(by_evidence) and "by" not in repr(by_evidence.with_prior(1.0))
    with pytest.warns(ModeWarning):
        co.laplace(lin, prior_precision=1.0).log_evidence()


def test_that_no_averaging_is_best_is_an_answer_and_a_warning_where_it_was_not_asked_for(
    annotations_unchecked: Any,
) -> None:
    lin, (new, _), _ = trained()
    certain = lin.predict(new).argmax(1)  # the network is right about all of them
    post = co.laplace(lin, validation=(new, certain))
    assert float(post.prior_precision) > 1e4
    torch.testing.assert_close(post.probabilities(new), lin.predict(new).softmax(-1), rtol=0, atol=0.01)
    with pytest.warns(UndeterminedWarning, match="averaging over the weights does not improve them"):
        co.evidence.validate(post.with_prior(1.0), new, certain)


def test_regression_far_from_a_mode_takes_the_evidence_of_the_linear_model_without_a_warning() -> None:
    lin = linearised("numbers")
    unknown = co.linearize(lin.model.module, (X, X[:, :2].sin()), "regression")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "by the evidence, " in repr(co.laplace(linearised("counts")))
        assert "by the evidence, noise" in repr(co.laplace(unknown)) and "(estimated)" in repr(co.laplace(unknown))
        of_loss = co.linearize(lin.model.module, (X, X[:, :2].sin()), nn.SmoothL1Loss())
        assert "by the evidence" in repr(co.laplace(of_loss, check_mode=False))


@pytest.mark.parametrize("unit", [1e4, 1e-4])
def test_numbers_in_another_unit_choose_the_prior_precision_of_that_unit(unit: float) -> None:
    def chosen(unit: float) -> torch.Tensor:
        y, model = unit * X[:3, :1].sin().float(), nn.Linear(4, 1)
        nn.init.zeros_(model.weight)
        lin = co.linearize(model, (X[:3].float(), y), co.likelihoods.Gaussian(0.01 * unit**2))
        return co.laplace(lin, check_mode=False).prior_precision * unit**2

    torch.testing.assert_close(chosen(unit), chosen(1.0), rtol=1e-2, atol=0)


def test_a_noise_that_held_out_data_choose_is_not_called_far_off() -> None:
    """The network fits its training targets, so that their residuals are far below the noise."""
    x, model = torch.randn(24, 40).tanh(), nn.Linear(40, 1, bias=False)
    y = x[:, :1].sin() + 0.5 * torch.randn(24, 1)
    model.weight.data = torch.linalg.solve(x[:12] @ x[:12].mT + 0.001 * torch.eye(12), y[:12]).mT @ x[:12]
    lin = co.linearize(model, (x[:12], y[:12]), "regression")
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoiseWarning)
        post = co.laplace(lin, validation=(x[12:], y[12:]))
    residuals = float((lin.predict(x[:12]) - y[:12]).square().mean())
    assert float(post.observation_noise) > 3 * residuals


def test_what_chose_the_prior_is_saved_and_further_data_forget_it(tmp_path: Any) -> None:
    lin = linearised("classes")
    post = co.laplace(lin)
    post.save(tmp_path / "post")
    assert repr(co.load(tmp_path / "post", lin.model.module)) == repr(post)
    later = co.linearize(lin.model.module, (HELD_OUT, labels(HELD_OUT)), "classification")
    assert "variance" not in repr(post.update(later, check_mode=False))
    assert "variance" not in repr(co.laplace(later, prior_precision=post, check_mode=False))
