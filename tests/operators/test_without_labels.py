"""Data without labels: what depends on inputs alone is as with labels, and all else names what is missing.

Tests the label-free parts of `batches.py`, `first_points.py` and of the likelihoods.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Independent, Poisson
from torch.utils.data import DataLoader, TensorDataset

import curvops as co
from curvops.errors import MissingLabelsError
from tests.network.definitions import Items
from tests.randomness import seeded

N, C, T = 6, 3, 4


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=seeded(sum(shape)))


def classes(*shape: int) -> Tensor:
    return torch.randint(0, C, shape, generator=seeded(2))


class OfShape(nn.Module):
    """A network of two layers on the last dimension, whose outputs have their classes last, or at dimension 1."""

    def __init__(self, outputs: int, form: str = "last") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.form = nn.Linear(2, 4).double(), nn.Linear(4, outputs).double(), form

    def forward(self, x: Tensor) -> Tensor:
        f = self.b(torch.tanh(self.a(x)))
        return f.movedim(-1, 1) if self.form == "first" else f.squeeze(-1) if self.form == "number" else f


class TwoHeads(OfShape):
    """Two outputs by name, of one body."""

    def forward(self, x: Tensor) -> Any:
        f = super().forward(x)
        return {"kind": f[:, :C], "value": f[:, C:]}


class PlainCrossEntropy(nn.CrossEntropyLoss):
    """A subclass that computes the same."""


class Focal(nn.CrossEntropyLoss):
    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        return 2 * super().forward(f, y).square()


X, TOKENS = randn(N, 2), randn(N, T, 2)
PIXELS = randn(N, 2, 3, 2)
EACH = torch.tensor([0.6, 0.7, 0.8])
LIKELIHOODS: dict[str, tuple[Any, nn.Module, Tensor, Any]] = {
    "classification": ("classification", OfShape(C), X, classes(N)),
    "probabilities": ("classification", OfShape(C), X, randn(N, C).softmax(1)),
    "smoothing": (nn.CrossEntropyLoss(label_smoothing=0.2), OfShape(C), X, classes(N)),
    "subclass": (PlainCrossEntropy(), OfShape(C), X, classes(N)),
    "preferences": (co.likelihoods.BradleyTerry(), OfShape(2), X, classes(N) // 2),
    "one noise": (co.likelihoods.Gaussian(noise=0.9), OfShape(C), X, randn(N, C)),
    "a noise for each output": (co.likelihoods.Gaussian(noise=EACH), OfShape(C), X, randn(N, C)),
    "numbers": (nn.MSELoss(), OfShape(1, "number"), X, randn(N)),
    "labels": (co.likelihoods.Bernoulli(), OfShape(C), X, classes(N, C) // 2),
    "weights of outputs": (co.likelihoods.Bernoulli(weight=EACH), OfShape(C), X, classes(N, C) // 2),
    "counts": (co.likelihoods.Poisson(), OfShape(C), X, classes(N, C)),
    "predicted variances": (co.likelihoods.HeteroscedasticGaussian(), OfShape(4), X, randn(N, 2)),
    "a finite support": (lambda f: torch.distributions.Categorical(logits=f), OfShape(C), X, classes(N)),
    "natural parameters": (lambda f: Independent(Poisson(f.exp()), 1), OfShape(C), X, classes(N, C).double()),
    "several outputs": (
        {"kind": "classification", "value": co.likelihoods.Gaussian(noise=0.9)},
        TwoHeads(C + 2),
        X,
        {"kind": classes(N), "value": randn(N, 2)},
    ),
    "tokens": ("classification", OfShape(C), TOKENS, classes(N, T)),
    "pixels": (nn.CrossEntropyLoss(), OfShape(C, "first"), PIXELS, classes(N, 2, 3)),
    "numbers at pixels": (co.likelihoods.Gaussian(noise=2.0), OfShape(C), PIXELS, randn(N, 2, 3, C)),
    "labels at pixels": (nn.BCEWithLogitsLoss(), OfShape(C), PIXELS, (classes(N, 2, 3, C) // 2).double()),
}  # fmt: skip
OPERATORS: dict[str, Callable[[Any], Any]] = {
    "GGN": co.GGN,
    "Monte-Carlo Fisher": lambda lin: co.GGN(lin, mc_samples=2, generator=seeded()),
    "KFAC": co.KFAC,
    "KFAC by Monte Carlo": lambda lin: co.KFAC(lin, fisher="mc", generator=seeded()),
    "EKFAC": co.EKFAC,
    "diagonal": co.DiagonalGGN,
    "blocks": co.BlockDiagonal,
    "NTK": co.TangentKernel,
    "precision of a posterior": lambda lin: co.laplace(lin, "ggn", 1.0, check_mode=False).precision,
}


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_operators_are_those_of_the_labelled_data(name: str) -> None:
    """To the last digits, for each likelihood × what it does; for two, all operators, and with weights of points."""
    likelihood, model, x, y = LIKELIHOODS[name]
    w = torch.linspace(0.5, 2, N, dtype=torch.float64)
    whole = name in ("classification", "tokens")
    for weights in (False, True) if whole else (False,):
        labelled, without = (
            co.linearize(model, (x, targets, w) if weights else (x, targets), likelihood, weights=weights)
            for targets in (y, None)
        )
        for kind in OPERATORS if whole else ("GGN", "Monte-Carlo Fisher", "KFAC"):
            expected, result = (OPERATORS[kind](lin).to_dense() for lin in (labelled, without))
            assert torch.allclose(result, expected, rtol=1e-12, atol=1e-12 * float(expected.abs().max())), kind


def without_labels(likelihood: Any = "classification", outputs: int = C, **options: Any) -> Any:
    return co.linearize(OfShape(outputs), X, likelihood, **options)


REFUSED: dict[str, Callable[[Any], Any]] = {
    "log-likelihood": lambda lin: lin.log_likelihood(),
    "gradient": lambda lin: lin.gradient(),
    "gradients of points": lambda lin: lin.gradients(),
    "Hessian": co.Hessian,
    "empirical Fisher": co.EmpiricalFisher,
    "KFAC of it": lambda lin: co.KFAC(lin, fisher="empirical"),
    "diagonal of it": lambda lin: co.DiagonalGGN(lin, fisher="empirical"),
    "residuals": lambda lin: lin.squared_residuals(),
    "evidence": lambda lin: co.laplace(lin, prior_precision=1.0).log_evidence(),
    "evidence of the linear model": lambda lin: co.laplace(lin, "ggn", 1.0).log_evidence(mode="linear"),
    "tuning by the evidence": lambda lin: co.evidence.maximize(co.laplace(lin, prior_precision=1.0)),
    "mode of the linear model": lambda lin: co.laplace(lin, prior_precision=1.0).linear_mode(),
    "mode of the network": lambda lin: co.fit_mode(OfShape(C), X, "classification", 1.0),
    "MacKay": lambda lin: co.evidence.mackay(co.laplace(lin, "ggn", 1.0)),
    "grid": lambda lin: co.evidence.grid(co.laplace(lin, "ggn", 1.0), [0.1, 1.0]),
    "gap of the mode": lambda lin: co.laplace(lin, "ggn", 1.0).mode_gap,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_depends_on_labels_says_so(name: str) -> None:
    with pytest.raises(MissingLabelsError, match="labels are missing.*Linearise with both"):
        REFUSED[name](without_labels())


class Own(co.likelihoods.Poisson):
    """A likelihood with another H than that of the class above it."""

    def curvature(self, f: Tensor, y: Tensor) -> Tensor:
        return y * f.exp()


LABELS_IN_H: dict[str, tuple[Any, str]] = {
    "class weights": (nn.CrossEntropyLoss(torch.ones(C).double()), "Categorical.*<3 classes>"),
    "ignored": (nn.CrossEntropyLoss(ignore_index=0), "weights of zero"),
    "weights of yes": (nn.BCEWithLogitsLoss(pos_weight=torch.ones(C).double()), "pos_weight"),
    "a loss": (nn.HuberLoss(), "HuberLoss"),
    "a function": (lambda f, y: (f - y).square().sum(-1), "a likelihood of co.likelihoods"),
    "an unknown noise": ("regression", "the noise depends.*Gaussian.noise=variance"),
    "an own likelihood": (Own(), "let its any_targets"),
    "a subclass that computes something else": (Focal(), r"the curvature of FromLoss\(Focal"),
}


@pytest.mark.parametrize("name", LABELS_IN_H)
def test_a_curvature_that_depends_on_labels_is_refused(name: str) -> None:
    likelihood, message = LABELS_IN_H[name]
    with pytest.raises(MissingLabelsError, match=f"(?i){message}"):
        without_labels(likelihood)


def test_the_default_prior_precision_of_a_classifier_needs_no_labels() -> None:
    post = co.laplace(without_labels())
    with_labels = co.laplace(co.linearize(OfShape(C), (X, classes(N)), "classification"))
    assert torch.equal(post.prior.precision, with_labels.prior.precision)
    assert torch.equal(post.probabilities(X), with_labels.probabilities(X))
    with pytest.raises(MissingLabelsError, match="evidence.*Pass prior_precision="):
        co.laplace(without_labels(co.likelihoods.Gaussian(noise=0.1)))


def test_test_data_may_have_labels() -> None:
    post = co.laplace(without_labels(), prior_precision=1.0)
    assert post.log_likelihood(X, classes(N)).value.isfinite().all()
    assert co.evidence.validate(post, X, classes(N)).prior.chosen_by == "held-out data"


class Stream:
    """Batches of inputs, which can be read again."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from X.split(4)


FORMS: dict[str, Callable[[], Any]] = {
    "tensor": lambda: X,
    "array": lambda: np.asarray(X),
    "pair": lambda: (X, None),
    "list of one": lambda: [X],
    "names": lambda: {"inputs": X, "targets": None},
    "dataset": lambda: Items(*X),
    "dataset of a tensor": lambda: TensorDataset(X),
    "loader": lambda: DataLoader(Items(*X), 4),
    "loader that shuffles": lambda: DataLoader(TensorDataset(X), 4, shuffle=True),
    "loader in a pair": lambda: (DataLoader(Items(*X), 4), None),
    "dataset in a pair": lambda: (Items(*X), None),
    "batches": lambda: [(x, None) for x in X.split(4)],
    "batches of one": lambda: [[x] for x in X.split(4)],
    "stream": Stream,
}


@pytest.mark.parametrize("form", FORMS)
def test_the_forms_of_data_without_labels(form: str) -> None:
    lin = co.linearize(OfShape(C), FORMS[form](), "classification")
    assert repr(lin) == "Linearization(27 weights, 6 points without labels, 3 outputs, Categorical, float64, cpu)"
    expected = co.GGN(co.linearize(OfShape(C), (X, classes(N)), "classification"))
    assert torch.allclose(co.GGN(lin).to_dense(), expected.to_dense(), rtol=1e-12, atol=1e-14)


class OfTwo(OfShape):
    def forward(self, x: Tensor, factor: Tensor) -> Tensor:
        return super().forward(x) * factor


@pytest.mark.parametrize(
    "data",
    [
        ((X, X[:, :1]), None),
        ({"x": X, "factor": X[:, :1]}, None),
        {"inputs": {"x": X, "factor": X[:, :1]}, "targets": None},
        {"x": X, "factor": X[:, :1], "labels": None},
        [((x, x[:, :1]), None) for x in X.split(4)],
        (Items(*({"x": x, "factor": x[:1]} for x in X)), None),
        (DataLoader(Items(*((x, x[:1]) for x in X)), 4), None),
    ],
)
def test_several_inputs_without_labels(data: Any) -> None:
    lin = co.linearize(OfTwo(C), data, "classification")
    with pytest.raises(MissingLabelsError):
        lin.log_likelihood()
    labelled = co.linearize(OfTwo(C), ((X, X[:, :1]), classes(N)), "classification")
    assert torch.allclose(co.GGN(lin).to_dense(), co.GGN(labelled).to_dense(), rtol=1e-12, atol=1e-14)


class OfSets(OfShape):
    """The sum over the rows of each set."""

    def forward(self, sets: list[Tensor]) -> Tensor:
        return torch.stack([super(OfSets, self).forward(rows).sum(0) for rows in sets])


def test_points_of_any_kind_without_labels() -> None:
    sets = [randn(n, 2) for n in (2, 1, 3, 2)]
    options: dict[str, Any] = {"likelihood": "classification", "collate": list}
    lin = co.linearize(OfSets(C), (sets, None), **options)
    labelled = co.linearize(OfSets(C), (sets, classes(4)), **options)
    assert torch.allclose(co.GGN(lin).to_dense(), co.GGN(labelled).to_dense(), rtol=1e-12, atol=1e-13)
    assert torch.allclose(lin.predict(sets[1:]), labelled.predict(sets[1:]), rtol=1e-12, atol=1e-13)
    with pytest.raises(MissingLabelsError):
        lin.gradient()


AMBIGUOUS: dict[str, tuple[Any, str]] = {
    "mapping": ({"x": X, "factor": X[:, :1]}, "cannot be read.*Without labels, write .inputs, None."),
    "mappings": ([{"x": X, "factor": X[:, :1]}], "(?i)without labels .inputs, None."),
    "four tensors": ((X, X, X, X), "A tuple of 4 tensors can be read in several ways.*, None.*nest the targets"),
    "list of tensors": ([X] * 5, "A list of 5 tensors"),
    "some labels": ([(X, None), (X, classes(N))], "Batch 1: this batch has labels, and others do not"),
    "some missing": ([(X, classes(N)), (X, None)], "Batch 1: this batch has no labels, and others do"),
    "no data": (None, "cannot be read"),
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_what_may_hold_labels_is_not_read_without(name: str) -> None:
    data, message = AMBIGUOUS[name]
    with pytest.raises((TypeError, ValueError), match=message):
        co.linearize(OfShape(C), data, "classification")


def test_data_without_labels_are_not_those_with_some() -> None:
    """Even if the labels are the numbers that stand for missing ones."""
    lin, labelled = without_labels(), co.linearize(OfShape(C), (X, 0 * classes(N)), "classification")
    assert lin.source == without_labels().source != labelled.source


def test_restricted_cast_and_checkpointed(tmp_path: Path) -> None:
    lin, labelled = without_labels(), co.linearize(OfShape(C), (X, classes(N)), "classification")
    chosen = torch.tensor([1, 4])
    assert torch.equal(co.GGN(lin.restrict(chosen, 2.0)).to_dense(), co.GGN(labelled.restrict(chosen, 2.0)).to_dense())
    with pytest.raises(MissingLabelsError):
        lin.restrict(chosen, 2.0).gradient()
    assert torch.equal(co.GGN(lin.cast(torch.float32)).to_dense(), co.GGN(labelled.cast(torch.float32)).to_dense())
    saved = [co.KFAC(lin, checkpoint=tmp_path / "run").to_dense() for _ in range(2)]
    assert torch.equal(saved[0], saved[1]) and torch.equal(saved[0], co.KFAC(labelled).to_dense())


@pytest.mark.parametrize("curvature", ["ggn", "kfac"])
def test_a_saved_posterior(tmp_path: Path, curvature: str) -> None:
    model = OfShape(C)
    post = co.laplace(co.linearize(model, X, "classification"), curvature, prior_precision=1.0)
    post.save(tmp_path / "post")
    for data in (X, (X, None)):
        loaded = co.load(tmp_path / "post", model, data)
        assert torch.equal(loaded.probabilities(X), post.probabilities(X))
        with pytest.raises(MissingLabelsError):
            loaded.log_evidence()
    with pytest.raises(ValueError, match="not those of the saved posterior"):
        co.load(tmp_path / "post", model, (X, classes(N)))
