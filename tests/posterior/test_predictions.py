"""Several answers at the same inputs are those of separate calls, and compute what they share once.

Tests `predictive.py`; `tests/test_counts.py` counts what the answers cost.
"""

import dataclasses
import functools
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import curvops as co
from tests.randomness import perceptron, seeded

DOUBLE = torch.float64


X = torch.randn(6, 4, dtype=DOUBLE, generator=seeded(1))
TARGETS: dict[str, Callable[[Tensor], Tensor]] = {
    "classification": lambda x: x[:, :3].argmax(1),
    "bernoulli": lambda x: (x[:, :2] > 0).double(),
    "gaussian": lambda x: x[:, :2].sin(),
}
LIKELIHOODS: dict[str, Any] = {
    "classification": "classification",
    "bernoulli": co.likelihoods.Bernoulli(),
    "gaussian": co.likelihoods.Gaussian(noise=0.3),
}


@functools.cache
def linearized(likelihood: str, parameters: str | None = None) -> co.operators.Linearization:
    model = perceptron(4, 6, 3 if likelihood == "classification" else 2, dtype=torch.float32)
    x = torch.randn(30, 4, dtype=DOUBLE)
    return co.linearize(model.double(), (x, TARGETS[likelihood](x)), LIKELIHOODS[likelihood], parameters)


def laplace(curvature: Any, parameters: str | None = None, **options: Any) -> Callable[[str], Any]:
    def make(likelihood: str) -> Any:
        lin = linearized(likelihood, parameters)
        return co.laplace(lin, curvature(lin), 2.0, check_mode=False, **options)

    return make


def gaussian(likelihood: str) -> Any:
    lin = linearized(likelihood)
    return co.posterior.GaussianPosterior.of(
        lin, co.linalg.Diagonal(torch.linspace(1, 9, len(lin.theta), dtype=DOUBLE))
    )


def empirical(through: str) -> Callable[[str], Any]:
    def make(likelihood: str) -> Any:
        lin = linearized(likelihood)
        noise = torch.randn(2, 6, len(lin.theta), dtype=DOUBLE, generator=seeded(2))
        return co.sampling.empirical(lin, lin.theta + 0.1 * noise, through)

    return make


POSTERIORS: dict[str, Callable[[str], Any]] = {
    "GGN": laplace(co.GGN),
    "GGN, tempered": laplace(co.GGN, temperature=0.5),
    "Hessian-free low rank": laplace(lambda lin: co.low_rank(co.GGN(lin), rank=5, generator=seeded())),
    "KFAC": laplace(co.KFAC),
    "diagonal": laplace(co.DiagonalGGN),
    "last layer": laplace(co.GGN, "last_layer"),
    "a Gaussian": gaussian,
    "Laplace process": lambda likelihood: co.gp.laplace_gp(linearized(likelihood), 2.0),
    "draws of the network": empirical("network"),
    "draws, linearised": empirical("linearization"),
}


@functools.cache
def posterior(name: str, likelihood: str) -> Any:
    """One for all the tests of it."""
    return POSTERIORS[name](likelihood)


QUESTIONS: dict[str, Callable[[Any, Tensor], Any]] = {
    "predict": lambda at, y: at.predict().covariance_matrix,
    "mean": lambda at, y: at.predict().mean,
    "variance": lambda at, y: at.predict().variance,
    "joint": lambda at, y: at.predict(joint=True).covariance_matrix,
    "groups": lambda at, y: at.predict(groups=2).covariance_matrix,
    "uncertainty": lambda at, y: at.uncertainty(generator=seeded(3)),
    "log-likelihood": lambda at, y: at.log_likelihood(y, generator=seeded(4)),
    "of pairs": lambda at, y: at.log_likelihood(y, joint=True, generator=seeded(5)),
}
OF_LABELS: dict[str, Callable[[Any, Tensor], Any]] = {
    f"probabilities, {link}": lambda at, y, link=link: at.probabilities(link, generator=seeded(6))
    for link in ("probit", "mc", "network")
}
OF_NUMBERS: dict[str, Callable[[Any, Tensor], Any]] = {
    "noise": lambda at, y: at.predict(noise=True).variance,
}
OF_DRAWS: dict[str, Callable[[Any, Tensor], Any]] = {
    "functions": lambda at, y: at.functions(),
    "interval": lambda at, y: torch.stack(at.predict().variance_interval(0.9)),
}


def questions(likelihood: str, by_draws: bool) -> dict[str, Callable[[Any, Tensor], Any]]:
    of_targets = OF_NUMBERS if likelihood == "gaussian" else OF_LABELS
    return QUESTIONS | of_targets | (OF_DRAWS if by_draws else {})


class Separately:
    """The same questions, each a call of the posterior."""

    def __init__(self, post: Any, x: Tensor, samples: Tensor | None) -> None:
        self.post, self.x, self.samples = post, x, samples

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def ask(*args: Any, **options: Any) -> Any:
            if name in ("predict", "functions"):
                args = args or ((len(self.samples),) if name == "functions" and self.samples is not None else ())
            named = {"link": args[0]} if name == "probabilities" else {}
            args = () if named else args
            return getattr(self.post, name)(self.x, *args, samples=self.samples, **named, **options)

        return ask


def tensors(found: Any) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found]
    return [v for f in dataclasses.fields(found) if isinstance(v := getattr(found, f.name), Tensor)]


CASES = [(name, "classification") for name in POSTERIORS]
CASES += itertools.product(("GGN", "KFAC", "Laplace process", "draws of the network"), ("gaussian", "bernoulli"))
"""Each posterior for classes; numbers, and labels of two outputs, for each way to predict."""


@pytest.mark.parametrize("by_draws", [False, True], ids=["exact", "draws"])
@pytest.mark.parametrize(("name", "likelihood"), CASES)
def test_answers_are_those_of_separate_calls(name: str, likelihood: str, by_draws: bool) -> None:
    post, y = posterior(name, likelihood), TARGETS[likelihood](X)
    samples = post.sample(5, seeded(7)) if by_draws else None
    asked = questions(likelihood, by_draws)
    expected = {what: tensors(ask(Separately(post, X, samples), y)) for what, ask in asked.items()}
    for order in (list(asked), list(reversed(asked))):
        at = post.at(X, samples)
        for what in order:
            for found, truth in zip(tensors(asked[what](at, y)), expected[what], strict=True):
                torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-13, equal_nan=False)


def gradient_of(found: Any, x: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(sum(t.sum() for t in tensors(found) if t.requires_grad), x)
    return slope


@pytest.mark.parametrize("by_draws", [False, True], ids=["exact", "draws"])
@pytest.mark.parametrize("name", ["GGN", "KFAC", "last layer", "draws of the network", "draws, linearised"])
def test_each_answer_has_its_gradient(name: str, by_draws: bool) -> None:
    post, x = posterior(name, "classification"), X.clone().requires_grad_()
    samples = post.sample(5, seeded(7)) if by_draws else None
    at, apart = post.at((x,), samples), Separately(post, x, samples)
    with torch.no_grad():
        constant = at.predict().variance
        assert not constant.requires_grad
    for what in ("mean", "variance", "uncertainty", "probabilities, probit", "mean", "variance"):
        ask = (QUESTIONS | OF_LABELS)[what]
        found, truth = ask(at, None), ask(apart, None)
        assert all(t.requires_grad for t in tensors(found))
        torch.testing.assert_close(gradient_of(found, x), gradient_of(truth, x), rtol=1e-10, atol=1e-12)


def test_draws_that_require_a_gradient_have_it_in_each_answer() -> None:
    post = laplace(co.GGN)("classification")
    samples = post.sample(3, seeded()).requires_grad_()
    at, apart = post.at(X, samples), Separately(post, X, samples)
    for ask in (QUESTIONS["variance"], OF_LABELS["probabilities, probit"], QUESTIONS["uncertainty"]):
        found, truth = ask(at, None), ask(apart, None)
        torch.testing.assert_close(gradient_of(found, samples), gradient_of(truth, samples), rtol=1e-10, atol=1e-12)


def test_a_gradient_in_the_prior_is_computed_again() -> None:
    lin = linearized("classification")
    A = torch.tensor(2.0, dtype=DOUBLE, requires_grad=True)
    post = co.laplace(lin, co.KFAC, A, check_mode=False)
    at = post.at(X)
    for ask in (QUESTIONS["variance"], OF_LABELS["probabilities, probit"], QUESTIONS["variance"]):
        (found,), (truth,) = (
            torch.autograd.grad(ask(source, None)[:, 0].sum(), A) for source in (at, Separately(post, X, None))
        )
        torch.testing.assert_close(found, truth, rtol=1e-10, atol=0)
        assert found != 0


@pytest.mark.parametrize("which", ["noise", "prior precision"])
def test_a_learned_tensor_that_changes_is_followed(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    learned = {name: torch.tensor(2.0, dtype=DOUBLE, requires_grad=True) for name in ("noise", "prior precision")}
    monkeypatch.setitem(LIKELIHOODS, "gaussian", co.likelihoods.Gaussian(learned["noise"]))
    post = co.laplace(
        linearized.__wrapped__("gaussian"), co.GGN, prior_precision=learned["prior precision"], check_mode=False
    )
    at = post.at(X)
    with torch.no_grad():
        before = at.predict().variance
        learned[which].mul_(5)
        after, parts = at.predict().variance, at.uncertainty()
        torch.testing.assert_close(after, post.predict(X).variance, rtol=1e-12, atol=0)
        torch.testing.assert_close(parts.total, after + learned["noise"], rtol=1e-12, atol=0)
        assert float((after / before - 1).abs().min()) > 0.1


def test_nothing_is_kept_longer_than_the_object() -> None:
    post = laplace(co.GGN)("classification")
    at = post.at(X, post.sample(3, seeded()))
    _ = at.predict().variance, at.uncertainty(), at.probabilities()
    (shared,) = at._shared.values()
    alive = [weakref.ref(shared), weakref.ref(shared.pushed), weakref.ref(shared.jacobian)]
    gc.disable()  # no cycles either
    try:
        del at, shared
        assert [ref() for ref in alive] == [None] * 3
    finally:
        gc.enable()
