"""Networks of several outputs, each with its likelihood, against the loss of all outputs together by autograd.

Tests `composite.py`, `layouts.py`, and the answers by name in `answers.py`.
"""

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Bernoulli, Normal, Poisson
from torch.utils.data import DataLoader

import curvops as co
from tests.network.definitions import TIGHT, Items, normal, require_consistent_products, require_sampled_moment
from tests.zoo import dense_jacobian
from tests.zoo_modules import Applied, Several

N, T = 8, 3
LIKELIHOODS = co.likelihoods
Losses = dict[Any, Callable[[Tensor, Tensor], Tensor]]
"""Minus log p of each target as a function of the outputs under a name and of some targets, summed over a point."""


class Segmenter(nn.Module):
    """A class for each pixel, (N, C, h, w), and a number for the image, (N,)."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.classes, self.size = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 3, 1), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.body(x).tanh()
        return {"mask": self.classes(h), "size": self.size(h.mean((2, 3))).squeeze(1)}


class Joined(nn.Module):
    """All outputs that have targets, as one row."""

    def __init__(self, net: nn.Module, names: list[Any]) -> None:
        super().__init__()
        self.net, self.names = net, names

    def parts(self, x: Tensor) -> dict[Any, Tensor]:
        found = self.net(x)
        return {n: found[n] if isinstance(found, (dict, tuple)) else getattr(found, n) for n in self.names}

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part.flatten(1) if part.ndim > 1 else part[:, None] for part in self.parts(x).values()], 1)


def cross_entropy(f: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(f, y, reduction="none").reshape(len(f), -1).sum(1)


def minus_log(distribution: Callable[[Tensor], Any]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda f, y: -distribution(f).log_prob(y).reshape(len(f), -1).sum(1)


def observed(f: Tensor, y: Tensor) -> Tensor:
    known = ~y.isnan()
    return -(Normal(f, 0.5**0.5).log_prob(y.where(known, 0)) * known).sum(1)


@dataclass
class Case:
    """A network, its data and likelihoods, and minus log p of each output's target."""

    net: Callable[[], nn.Module]
    shape: tuple[int, ...]
    targets: dict[Any, Tensor]
    likelihoods: dict[Any, Any]
    losses: Losses
    given: Callable[[dict[Any, Tensor]], Any] = dict
    weights: Tensor | None = None
    by_name: dict[Any, Tensor] | None = None
    """Weights of the points under each name."""

    @property
    def weighted(self) -> tuple[Any, ...]:
        """The weights as the third part of the data, if there are some."""
        return tuple(weights for weights in (self.weights, self.by_name) if weights is not None)

    def build(self, **options: Any) -> tuple[Joined, Tensor, Any, co.operators.Linearization]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            net = self.net().double()
        x, y = normal(*self.shape), self.given(self.targets)
        data = (x, y, *self.weighted)
        lin = co.linearize(net, data, self.likelihoods, weights=bool(self.weighted), **options)
        return Joined(net, list(self.targets)), x, y, lin

    def loss(self, parts: dict[Any, Tensor], index: Tensor) -> Tensor:
        """Minus the log-likelihood of each point."""
        losses = {n: self.losses[n](parts[n], self.targets[n][index]) for n in self.targets}
        if self.by_name is not None:
            losses = {n: loss * self.by_name[n][index] for n, loss in losses.items()}
        return torch.stack(list(losses.values())).sum(0)

    def joined(self, joined: Joined, x: Tensor) -> co.operators.Linearization:
        """The same network with one row of outputs, and with this loss."""
        shapes = {name: part.shape[1:] for name, part in joined.parts(x).items()}

        def loss(f: Tensor, index: Tensor) -> Tensor:
            parts, start = {}, 0
            for name, shape in shapes.items():
                parts[name] = f[:, start : start + shape.numel()].reshape(len(f), *shape)
                start += shape.numel()
            return self.loss(parts, index[:, 0].long())

        data = [x, torch.arange(N).double()[:, None]] + ([] if self.weights is None else [self.weights])
        return co.linearize(joined, tuple(data), loss, weights=self.weights is not None)


CLASSES, VALUES = torch.arange(N) % 3, normal(N, 2, seed=1)
GAUSSIAN = minus_log(lambda f: Normal(f, 0.5**0.5))
NOISE = torch.tensor([0.4, 1.3], dtype=torch.float64)


def hollow() -> Tensor:
    y = VALUES.clone()
    y[::2, 0] = math.nan
    return y


CASES = {
    "a class and values": Case(
        lambda: Several({"class": 3, "value": 2}),
        (N, 4),
        {"class": CLASSES, "value": VALUES},
        {"class": "classification", "value": LIKELIHOODS.Gaussian(0.5)},
        {"class": cross_entropy, "value": GAUSSIAN},
    ),
    "a tuple": Case(
        lambda: Several({0: 3, 1: 2}, lambda parts: tuple(parts.values())),
        (N, 4),
        {0: CLASSES, 1: VALUES},
        ["classification", LIKELIHOODS.Gaussian(0.5)],
        {0: cross_entropy, 1: GAUSSIAN},
        given=lambda targets: tuple(targets.values()),
    ),
    "attributes": Case(
        lambda: Several({"kind": 3, "rate": 2}, lambda parts: SimpleNamespace(**parts)),
        (N, 4),
        {"kind": CLASSES, "rate": VALUES.abs().round()},
        {"kind": "classification", "rate": LIKELIHOODS.Poisson()},
        {"kind": cross_entropy, "rate": minus_log(lambda f: Poisson(f.exp()))},
    ),
    "labels, probabilities and several noises": Case(
        lambda: Several({"a": 2, "b": 3, "c": 2}),
        (N, 4),
        {"a": (VALUES > 0).double(), "b": normal(N, 3, seed=5).softmax(1), "c": VALUES},
        {"a": nn.BCEWithLogitsLoss(), "b": nn.CrossEntropyLoss(), "c": LIKELIHOODS.Gaussian(NOISE)},
        {
            "a": minus_log(lambda f: Bernoulli(logits=f)),
            "b": cross_entropy,
            "c": minus_log(lambda f: Normal(f, NOISE.sqrt())),
        },
        weights=normal(N, seed=6).abs(),
    ),
    "missing targets of both": Case(
        lambda: Several({"class": 3, "value": 2}),
        (N, 4),
        {"class": CLASSES.where(torch.arange(N) != 1, -100), "value": hollow()},
        {"class": "classification", "value": LIKELIHOODS.Gaussian(0.5, missing="ignore")},
        {"class": cross_entropy, "value": observed},
    ),
    "sequences and a loss": Case(
        lambda: Several({"tags": 3, "value": 2}),
        (N, T, 4),
        {"tags": torch.arange(N * T).reshape(N, T) % 3, "value": normal(N, T, 2, seed=2)},
        {"tags": "classification", "value": lambda f, y: nn.functional.huber_loss(f, y, reduction="none")},
        {
            "tags": lambda f, y: cross_entropy(f.movedim(-1, 1), y),
            "value": lambda f, y: nn.functional.huber_loss(f, y, reduction="none").flatten(1).sum(1),
        },
    ),
    "weights by name": Case(
        lambda: Several({"tags": 3, "value": 2}),
        (N, T, 4),
        {"tags": torch.arange(N * T).reshape(N, T) % 3, "value": normal(N, T, 2, seed=2)},
        {"tags": "classification", "value": LIKELIHOODS.Gaussian(0.5)},
        {"tags": lambda f, y: cross_entropy(f.movedim(-1, 1), y), "value": GAUSSIAN},
        by_name={"tags": normal(N, seed=7).abs(), "value": (torch.arange(N) % 3).double()},
    ),
    "pixels and a number": Case(
        Segmenter,
        (N, 2, 2, 3),
        {"mask": torch.arange(N * 6).reshape(N, 2, 3) % 3, "size": VALUES[:, 0]},
        {"mask": nn.CrossEntropyLoss(), "size": LIKELIHOODS.Gaussian(0.5)},
        {"mask": cross_entropy, "size": lambda f, y: GAUSSIAN(f[:, None], y[:, None])},
    ),
}
EVERY = pytest.mark.parametrize("name", CASES)
built = functools.cache(lambda name: CASES[name].build())
as_one_row = functools.cache(lambda name: CASES[name].joined(*built(name)[:2]))
FIRST = CASES["a class and values"]


@EVERY
def test_sums_over_the_data_are_those_of_the_loss(name: str) -> None:
    case = CASES[name]
    joined, x, _, lin = built(name)
    w = torch.ones(N, dtype=torch.float64) if case.weights is None else case.weights
    total = (w * case.loss(joined.parts(x), torch.arange(N))).sum()
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(total, list(joined.parameters()))])
    torch.testing.assert_close(lin.gradient(), gradient, **TIGHT)
    if name != "sequences and a loss":  # of a loss, the terms that do not depend on the outputs are not known
        torch.testing.assert_close(lin.log_likelihood(), -total.detach(), **TIGHT)
    J = dense_jacobian(joined, x)
    if "pixels" not in name:  # there the rows of J go pixel by pixel
        torch.testing.assert_close(lin.jacobian(x).to_dense(), J, **TIGHT)
    torch.testing.assert_close(co.TangentKernel(lin).to_dense().trace(), J.square().sum(), **TIGHT)


WITH_POINT_WEIGHTS = (co.KFAC, co.EKFAC, co.EmpiricalFisher)
"""Operators in which the weight of a point counts for itself, so that a weighted loss is another one."""
OPERATORS = [co.GGN, co.KFAC, co.EKFAC, co.DiagonalGGN, co.EmpiricalFisher, co.Hessian, co.BlockDiagonal]
COMPARED = [
    pytest.param(name, kind, id=f"{kind.__name__}-{name}")
    for name, case in CASES.items()
    for kind in OPERATORS
    if case.by_name is None or kind not in WITH_POINT_WEIGHTS
]


@pytest.mark.parametrize(("name", "kind"), COMPARED)
def test_curvatures_are_those_of_one_row_of_outputs(name: str, kind: Any) -> None:
    found, expected = (kind(lin).to_dense() for lin in (built(name)[3], as_one_row(name)))
    torch.testing.assert_close(found, expected, **TIGHT)


@EVERY
def test_the_output_fisher_is_block_diagonal(name: str) -> None:
    *_, y, lin = built(name)
    likelihood, f = lin.likelihood, lin.outputs()
    rows = lin.model.layout.targets(y)
    H = likelihood.hessian_product(f, torch.eye(f.shape[1]).double().unsqueeze(1).expand(-1, N, -1), rows)
    require_consistent_products(likelihood, f, rows, None, H.permute(1, 2, 0))
    w = normal(N, seed=3).abs()
    require_consistent_products(likelihood, f, rows, w, w[:, None, None] * H.permute(1, 2, 0))
    narrow = likelihood.narrow_root(f, rows, None, 0, likelihood.narrow_columns(f.shape[1]))
    torch.testing.assert_close(torch.einsum("rnc,rnd->ncd", narrow, narrow), H.permute(1, 2, 0), **TIGHT)
    middle = likelihood.narrow_root(f, rows, None, 1, len(narrow) - 1)
    torch.testing.assert_close(middle, narrow[1:-1], **TIGHT)


def test_drawn_residuals_have_the_fisher_as_second_moment() -> None:
    """4 standard errors for 25 entries: a false alarm below 1 % at a random seed."""
    *_, lin = built("a class and values")
    f, y = lin.outputs(), lin.model.layout.targets(FIRST.targets)
    H = lin.likelihood.hessian_product(f, torch.eye(5).double().unsqueeze(1).expand(-1, N, -1), y).permute(1, 2, 0)
    require_sampled_moment(lin.likelihood, f, y, None, H)
    drawn = lin.likelihood.sample(f, torch.Generator().manual_seed(0))
    lin.likelihood.check_targets(drawn, 5)


@pytest.mark.parametrize(
    ("name", "curvature"), [*((name, co.KFAC) for name in CASES), ("a tuple", co.GGN), ("sequences and a loss", co.GGN)]
)
def test_predictions_come_by_name(name: str, curvature: Any) -> None:
    case = CASES[name]
    joined, x, _, lin = built(name)
    post = co.laplace(lin, curvature, 0.7, check_mode=False)
    J = dense_jacobian(joined, x).unflatten(0, (N, -1))
    covariance = torch.linalg.inv(post.precision.to_dense())
    S, start = J.flatten(0, 1) @ covariance @ J.flatten(0, 1).mT, 0
    predicted, together = post.predict(x), post.predict(x, joint=True)
    assert list(predicted) == list(together) == list(case.targets)
    for key, part in joined.parts(x).items():
        width, f = part[0].numel(), part.detach()
        place = torch.arange(N)[:, None] * J.shape[1] + torch.arange(start, start + width)
        start += width
        if f.ndim == 1:
            f = f[:, None]
        torch.testing.assert_close(lin.predict(x)[key], f, **TIGHT)
        if key == "mask":  # the classes last
            f, place = f.movedim(1, -1), place.reshape(N, 3, 6).mT
        torch.testing.assert_close(predicted[key].mean, f, **TIGHT)
        place = place.reshape(-1)
        dense = S[place][:, place]
        torch.testing.assert_close(predicted[key].variance, dense.diagonal().view_as(f), rtol=1e-8, atol=1e-10)
        joint = together[key].lazy_covariance_matrix.to_dense()
        torch.testing.assert_close(joint, dense, rtol=1e-7, atol=1e-10)


def test_answers_are_of_the_outputs_that_have_them() -> None:
    *_, x, y, lin = built("a class and values")
    post = co.laplace(lin, co.GGN, 0.7, check_mode=False)
    at, samples = post.at(x), post.sample(50, torch.Generator().manual_seed(0))
    predicted = at.predict()
    f, v = predicted["class"].mean, predicted["class"].variance
    assert list(at.probabilities()) == ["class"]
    torch.testing.assert_close(at.probabilities()["class"], (f / (1 + math.pi / 8 * v).sqrt()).softmax(1), **TIGHT)
    assert [found.unit for found in at.uncertainty().values()] == ["nats", "variance"]
    value, noisy = predicted["value"], post.predict(x, noise=True)
    torch.testing.assert_close(at.uncertainty()["value"].total, value.variance + 0.5, **TIGHT)
    assert list(noisy) == ["value"]
    torch.testing.assert_close(noisy["value"].variance, value.variance + 0.5, **TIGHT)
    torch.testing.assert_close(at["value"].predict().mean, value.mean, **TIGHT)
    functions = post.functions(x, 50, samples=samples)
    # One draw of the weights for all outputs: the score of a point is that of its targets together.
    log_p = F.log_softmax(functions["class"], -1)[:, torch.arange(N), y["class"]]
    log_p = log_p + Normal(functions["value"], 0.5**0.5).log_prob(y["value"]).sum(-1)
    found = post.log_likelihood(x, y, samples=samples)
    torch.testing.assert_close(found.value, log_p.logsumexp(0) - math.log(50), **TIGHT)


def test_the_noise_of_each_output_is_estimated_and_learned() -> None:
    likelihoods = {"class": "classification", "value": LIKELIHOODS.Gaussian("per_output")}
    joined, x, y, _ = built("a class and values")
    lin = co.linearize(joined.net, (x, y), likelihoods)
    squares = (joined.parts(x)["value"].detach() - VALUES).square().mean(0)
    torch.testing.assert_close(lin.likelihood.likelihoods["value"].noise, squares, rtol=1e-3, atol=0)
    post = co.laplace(lin, co.GGN, 0.7, check_mode=False)
    other = post.with_noise({"value": NOISE})
    expected = co.linearize(joined.net, (x, y), likelihoods | {"value": LIKELIHOODS.Gaussian(NOISE)})
    torch.testing.assert_close(other.curvature.to_dense(), co.GGN(expected).to_dense(), **TIGHT)

    def evidence(noise: Tensor) -> Tensor:
        lin = co.linearize(joined.net, (x, y), likelihoods | {"value": LIKELIHOODS.Gaussian(noise)})
        return co.laplace(lin, co.GGN, 0.7, check_mode=False).log_evidence().value

    assert torch.autograd.gradcheck(evidence, NOISE.clone().requires_grad_(), eps=1e-5, rtol=1e-6, atol=1e-6)


def named_items(x: Tensor, y: dict[str, Tensor]) -> Items:
    """A dataset of inputs and of targets by name."""
    return Items(*((x[i], {name: part[i] for name, part in y.items()}) for i in range(N)))


def test_targets_by_name_come_in_every_form_of_data() -> None:
    joined, x, y, lin = built("a class and values")
    arrays = {name: part.numpy() for name, part in y.items()}
    batches = [(x[i : i + 3], {name: part[i : i + 3] for name, part in y.items()}) for i in (0, 3, 6)]
    forms = {
        "arrays": (x.numpy(), arrays),
        "names": {"inputs": x, "targets": y},
        "labels": {"x": x, "labels": y},
        "batches": batches,
        "names of batches": [{"inputs": inputs, "targets": targets} for inputs, targets in batches],
        "a dataset": named_items(x, y),
        "a loader": DataLoader(named_items(x, y), 3),
        "more targets": (x, y | {"index": torch.arange(N)}),
        "a mapping of inputs": ({"x": x}, y),
    }
    expected = co.GGN(lin).to_dense()
    for data in forms.values():
        found = co.GGN(co.linearize(joined.net, data, FIRST.likelihoods)).to_dense()
        torch.testing.assert_close(found, expected, **TIGHT)
    halves = [co.GGN(lin.restrict(torch.arange(start, N, 2), 1.0)).to_dense() for start in (0, 1)]
    torch.testing.assert_close(halves[0] + halves[1], expected, **TIGHT)
    single = co.linearize(copy.deepcopy(joined.net).float(), (x, y), FIRST.likelihoods)
    torch.testing.assert_close(co.GGN(single).to_dense().double(), expected, rtol=1e-4, atol=1e-4)


def test_points_of_any_kind_have_targets_by_name() -> None:
    joined, x, y, lin = built("a class and values")
    points = [{"x": row} for row in x]
    pairs = [(point, {name: part[i] for name, part in y.items()}) for i, point in enumerate(points)]
    model = nn.Sequential(Applied(lambda some: torch.stack([point["x"] for point in some])), joined.net)
    expected = co.KFAC(lin).to_dense()
    for data in ((points, y), pairs):
        objects = co.linearize(model, data, FIRST.likelihoods, collate=list)
        torch.testing.assert_close(co.KFAC(objects).to_dense(), expected, **TIGHT)


def test_a_posterior_is_saved(tmp_path: Any) -> None:
    for i, name in enumerate(("a tuple", "pixels and a number", "missing targets of both")):
        joined, x, y, lin = built(name)
        post = co.laplace(lin, co.KFAC, 1.0, check_mode=False)
        post.save(tmp_path / str(i))
        for again in (co.load(tmp_path / str(i), joined.net), co.load(tmp_path / str(i), joined.net, (x, y))):
            for key, value in post.predict(x).items():
                torch.testing.assert_close(again.predict(x)[key].variance, value.variance, **TIGHT)
        torch.testing.assert_close(again.lin.log_likelihood(), lin.log_likelihood(), **TIGHT)


def test_a_posterior_with_functions_is_loaded_with_its_likelihoods(tmp_path: Any) -> None:
    joined, x, y, lin = built("sequences and a loss")
    post, given = co.laplace(lin, co.KFAC, 1.0, check_mode=False), CASES["sequences and a loss"].likelihoods
    post.save(tmp_path / "p")
    for data in (None, (x, y)):
        again = co.load(tmp_path / "p", joined.net, data, likelihood=dict(reversed(given.items())))
        for key, value in post.predict(x).items():
            torch.testing.assert_close(again.predict(x)[key].variance, value.variance, **TIGHT)
    torch.testing.assert_close(again.lin.log_likelihood(), lin.log_likelihood(), **TIGHT)
    other = given | {"value": lambda f, y: 3 * given["value"](f, y)}
    for wrong, message in (
        (None, "cannot be saved"),
        (given["value"], r"outputs are \['tags', 'value'\]: pass a likelihood for each, .*; given <function"),
        ({"tags": given["tags"]}, r"given {'tags'"),
        (other, "is not that of the saved posterior"),
    ):
        with pytest.raises(ValueError, match=message):
            co.load(tmp_path / "p", joined.net, likelihood=wrong)


@pytest.mark.filterwarnings("ignore::curvops.errors.UndeterminedWarning", "ignore::curvops.errors.ModeWarning")
def test_the_prior_is_chosen_by_one_rule_for_each_kind() -> None:
    """Only classes and labels have logits, whose variance is a quarter; otherwise the evidence decides."""
    joined, x, y, _ = built("a class and values")
    classes = (x[:, 0] > 0).long() + (x[:, 1] > 0)
    for chosen_by, mode, value, columns in (
        ("the variance of the logits", None, None, 2),
        ("the evidence", "linear", LIKELIHOODS.Gaussian(0.5), 2),
        ("the evidence", "map", LIKELIHOODS.HeteroscedasticGaussian(), 1),  # whose linear model may have no mode
    ):
        y = {"class": classes, "value": 3 * x[:, :columns]}
        likelihoods = {"class": "classification"} | ({} if value is None else {"value": value})
        post = co.laplace(co.linearize(joined.net, (x, y), likelihoods))
        assert (post.prior.chosen_by, getattr(post.tuning, "mode", None)) == (chosen_by, mode)


@pytest.mark.filterwarnings("ignore::curvops.errors.ModeWarning")
def test_training_takes_targets_by_name() -> None:
    joined, x, y, _ = built("a class and values")
    net = copy.deepcopy(joined.net)
    posts = [
        co.evidence.train(net, data, FIRST.likelihoods, epochs=1, batch_size=N, optimizer=torch.optim.SGD)
        for data in ((x, y), named_items(x, y))
    ]
    assert list(posts[1].predict(x)) == ["class", "value"]
    again = co.linearize(net, (x, y), posts[1].lin.likelihood)
    torch.testing.assert_close(again.log_likelihood(), posts[1].lin.log_likelihood(), **TIGHT)


@pytest.mark.parametrize(
    ("likelihoods", "targets", "message"),
    [
        (
            "classification",
            FIRST.targets,
            r"pass likelihoods and targets under the names .*\{'class': 'classification'\}",
        ),
        (
            {"kind": "classification"},
            FIRST.targets,
            r"given for 'kind', but the model's outputs are \['class', 'value'",
        ),
        ({"class": "classification"}, {"kind": CLASSES}, r"given for 'class', but the targets are \['kind'\]"),
        ({"class": "classification"}, CLASSES, r"targets are a mapping with these keys; given"),
        ({"class": "classification"}, {"class": CLASSES + 1}, r"targets\['class'\]: .* given values from 1 to 3"),
        (
            {"class": "classification", "value": "regression"},
            {"class": CLASSES, "value": hollow()},
            r"targets\['value'\]: targets of shape .* holds NaN .*missing='ignore'",
        ),
        ({"value": "regression"}, {"value": ["a"] * N}, "must be tensors; given dict"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(likelihoods: Any, targets: Any, message: str) -> None:
    joined, x, *_ = built("a class and values")
    with pytest.raises((TypeError, ValueError), match=message):
        co.linearize(joined.net, (x, targets), likelihoods)


def test_other_forms_of_outputs_and_targets_are_refused() -> None:
    (several, x, *_), (pair, _, y, _), one = built("a class and values"), built("a tuple"), nn.Linear(4, 2).double()
    both, forms = CASES["a tuple"].likelihoods, [{"class": CLASSES[:4]}, {"class": torch.rand(4, 3).softmax(1)}]
    later = list(zip((x[:4], x[4:]), forms, strict=True))
    for model, data, likelihood, message in (
        (pair.net, (x, *y), both, r"third item .* Nest the targets of several outputs: \(x, \(y1, y2\)\)"),
        (pair.net, (x, y[0]), both, "targets are a tuple in this order; given one tensor"),
        (several.net, later, {"class": "classification"}, r"targets\['class'\] differ from the first"),
        (one, (x, FIRST.targets), FIRST.likelihoods, "the model returns one tensor: pass one likelihood"),
        (one, (x, FIRST.targets), "regression", "pass a mapping of likelihoods"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            co.linearize(model, data, likelihood)


def test_hyperparameters_of_one_output_need_its_name() -> None:
    *_, lin = built("a class and values")
    post = co.laplace(lin, co.GGN, 1.0, check_mode=False)
    for noise, message in (
        (0.1, r"post.with_noise\({'value': variance}\)"),
        ({"val": 0.1}, r"noise names \['val'\], but the outputs are \['class', 'value'\]"),
        ({"class": 0.1}, "has no noise"),
    ):
        with pytest.raises(ValueError, match=message):
            post.with_noise(noise)
    with pytest.raises(KeyError, match="is not one of the outputs"):
        post.at(normal(N, 4))["val"]


def test_tools_for_one_output_say_so() -> None:
    net = Several({"value": 1})
    net.body = nn.Linear(1, 3)
    x = normal(N, 1)
    lin = co.linearize(net.double(), (x, {"value": x}), {"value": LIKELIHOODS.Gaussian(0.5)})
    post = co.laplace(lin, co.GGN, 1.0, check_mode=False)
    with pytest.raises(ValueError, match="linearise a network that returns one"):
        co.gp.LaplaceModel(post)
    with pytest.raises(ValueError, match=r"pass name=, one of \['value'\]; got name=None"):
        co.plots.regression(post, x)


def test_empirical_posteriors_predict_by_name() -> None:
    *_, x, _, lin = built("a class and values")
    draws = co.laplace(lin, co.GGN, 0.7, check_mode=False).sample(6, torch.Generator().manual_seed(0))
    post = co.sampling.empirical(lin, draws.view(2, 3, -1))
    values = torch.stack([lin.predict(x, weights)["value"] for weights in draws])
    torch.testing.assert_close(post.predict(x)["value"].mean, values.mean(0), **TIGHT)
    assert list(post.probabilities(x)) == ["class"]


SUMS = {name: case for name, case in CASES.items() if name != "sequences and a loss"}  # whose constants are not known


@pytest.mark.parametrize("by_lin", [True, False])
@pytest.mark.parametrize("name", SUMS)
def test_samplers_take_the_sum_of_the_log_likelihoods(name: str, by_lin: bool) -> None:
    """The value and its gradient, by a linearisation or from the likelihoods; chains, minibatches and a filter run."""
    case = CASES[name]
    joined, x, y, lin = built(name)
    batch = (x, y, *case.weighted)
    if by_lin:
        density = co.sampling.log_posterior(lin, prior_precision=0.7)
    else:
        density = co.sampling.log_posterior(
            joined.net, case.likelihoods, prior_precision=0.7, data_size=N, weights=bool(case.weighted)
        )
    params = {key: value.requires_grad_() for key, value in density.params.items()}
    w = torch.ones(N, dtype=torch.float64) if case.weights is None else case.weights
    theta = torch.cat([p.flatten() for p in joined.parameters()])
    expected = -(w * case.loss(joined.parts(x), torch.arange(N))).sum() / N - 0.35 * theta.square().sum() / N
    value = density(params, batch)
    torch.testing.assert_close(value, expected, **TIGHT)
    slopes, wanted = (
        torch.autograd.grad(total, list(at))
        for total, at in ((value, params.values()), (expected, joined.parameters()))
    )
    torch.testing.assert_close(slopes, wanted, **TIGHT)
    chains = co.sampling.chains(co.sampling.sgld(density, 1e-3), 2)
    generator = torch.Generator().manual_seed(0)
    assert co.sampling.run(chains, density.params, [batch], steps=2, generator=generator).theta.shape[:2] == (2, 2)
    if isinstance(y, dict):
        batches = co.sampling.minibatches(density, batch, 3, generator=generator)
        assert co.sampling.run(co.sampling.sgld(density, 1e-3), density.params, batches, steps=3).theta.shape[1] == 3
    filtered = co.sampling.run(co.sampling.ekf(density, "dense"), density.params, [batch], steps=1)
    post = co.laplace(lin, co.GGN, 0.7, check_mode=False)
    torch.testing.assert_close(filtered.state.precision["matrix"], post.precision.to_dense(), **TIGHT)


def test_a_noise_that_samplers_do_not_know_is_asked_for() -> None:
    net = Several({"class": 3, "value": 2}).double()
    with pytest.raises(ValueError, match="the noise of this regression is unknown"):
        co.sampling.log_posterior(net, {"class": "classification", "value": "regression"}, data_size=N)
    density = co.sampling.log_posterior(net, FIRST.likelihoods, data_size=N)
    with pytest.raises(ValueError, match=r"There are 8 inputs, but the targets have shape \(7,\)"):
        density(density.params, (normal(N, 4), {"class": CLASSES[:7], "value": VALUES}))


@pytest.mark.parametrize("kind", WITH_POINT_WEIGHTS, ids=lambda kind: kind.__name__)
def test_equal_weights_by_name_are_those_of_the_points(kind: Any) -> None:
    net, x, w = Several({"class": 3, "value": 2}).double(), normal(N, 4), normal(N, seed=6).abs()
    named, of_points = (
        kind(co.linearize(net, (x, FIRST.targets, weights), FIRST.likelihoods, weights=True)).to_dense()
        for weights in ({"class": w, "value": w}, w)
    )
    torch.testing.assert_close(named, of_points, **TIGHT)


def test_weights_by_name_are_one_number_for_each_point() -> None:
    net, x, y = Several({"class": 3, "value": 2}).double(), normal(N, 4), FIRST.targets
    one = torch.ones(N, dtype=torch.float64)
    lin = co.linearize(net, (x, y, {"class": one, "value": 0 * one}), FIRST.likelihoods, weights=True)
    alone = co.linearize(net, (x, {"class": y["class"]}), {"class": "classification"})
    torch.testing.assert_close(lin.gradient()[:23], alone.gradient()[:23], **TIGHT)
    loader = DataLoader(
        [
            ({"inputs": x[i], "targets": {n: t[i] for n, t in y.items()}} | {"weights": {"class": 1.0, "value": 0.0}})
            for i in range(N)
        ],
        batch_size=3,
    )
    torch.testing.assert_close(
        co.linearize(net, loader, FIRST.likelihoods, weights=True).gradient(), lin.gradient(), **TIGHT
    )
    half = lin.restrict(torch.arange(0, N, 2), 2.0)
    assert half.data.weighted and next(iter(half.data)).weights.tolist() == [[2.0, 0.0]] * 4
    for weights, message in (
        ({"class": one}, r"given for 'value', but the sample weights are \['class'\]"),
        ({"class": one[:, None], "value": one}, r"weights\['class'\] must have shape .* a number for each point"),
    ):
        with pytest.raises(ValueError, match=message):
            co.linearize(net, (x, y, weights), FIRST.likelihoods, weights=True)
