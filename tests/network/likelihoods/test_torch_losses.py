"""Losses of torch mean what torch computes: against the losses themselves, on every shape that they take.

Tests `inputs.py`, `conversions.py`.
"""

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvops as co
from tests.network.definitions import TIGHT, normal
from tests.zoo_modules import Shaped

N, C, T = 5, 3, 3


def labels(*positions: int, ignored: bool = False) -> Tensor:
    y = torch.randint(0, C, (N, *positions), generator=torch.Generator().manual_seed(1))
    return y.masked_fill(normal(N, *positions, seed=2) > 0.5, -100) if ignored else y


def soft(*shape: int) -> Tensor:
    return normal(N, *shape, seed=3).softmax(1)


def reals(*shape: int) -> Tensor:
    return normal(N, *shape, seed=4)


def events(*shape: int) -> Tensor:
    return (normal(N, *shape, seed=5) > 0).double()


def counts(*shape: int) -> Tensor:
    return torch.poisson(torch.full((N, *shape), 2.0).double(), generator=torch.Generator().manual_seed(6))


W = torch.tensor([0.5, 2.0, 1.3]).double()
CE, BCE = nn.CrossEntropyLoss, nn.BCEWithLogitsLoss

# name: (loss, shape of a point's outputs, targets)
CASES: dict[str, tuple[nn.Module, tuple[int, ...], Tensor]] = {
    "classes": (CE(), (C,), labels()),
    "one position": (CE(), (C, 1), labels(1)),
    "images": (CE(), (C, 3, 2), labels(3, 2)),
    "ignored": (CE(), (C, T), labels(T, ignored=True)),
    "an ignored class": (CE(ignore_index=1), (C, 2, 2), labels(2, 2)),
    "int32": (CE(), (C, T), labels(T).int()),
    "class weights": (CE(W), (C, T), labels(T)),
    "smoothing": (CE(label_smoothing=0.2), (C, 2, 2), labels(2, 2)),
    "all options": (CE(W, ignore_index=-100, label_smoothing=0.3), (C, T), labels(T, ignored=True)),
    "probabilities": (CE(), (C,), soft(C)),
    "probabilities of pixels": (CE(W, label_smoothing=0.3), (C, 2, 2), soft(C, 2, 2)),
    "events": (BCE(), (C,), events(C)),
    "numbers": (BCE(), (), events()),
    "boolean": (BCE(), (C,), events(C).bool()),
    "soft events": (BCE(), (2, 2, C), events(2, 2, C) * 0.9),
    "pos_weight": (BCE(pos_weight=W), (T, C), events(T, C)),
    "a scalar weight": (BCE(weight=torch.tensor(0.3)), (C,), events(C)),
    "one weight": (BCE(weight=torch.tensor([0.3]), pos_weight=torch.tensor([2.0])), (), events()),
    "weights of channels": (BCE(W[:, None, None], pos_weight=W.flip(0)[:, None, None]), (C, 2, 2), events(C, 2, 2)),
    "weights with a batch dimension": (BCE(W[None, :, None]), (C, 2), events(C, 2)),
    "both": (BCE(W, pos_weight=W[:, None] * torch.ones(C)), (C, C), events(C, C)),
    "squares": (nn.MSELoss(), (C,), reals(C)),
    "counts": (nn.PoissonNLLLoss(), (C,), counts(C)),
    "counts of numbers": (nn.PoissonNLLLoss(full=True), (), counts().long()),
    "counts of positions": (nn.PoissonNLLLoss(full=True), (T, C), counts(T, C)),
}


def summed(loss: nn.Module, model: nn.Module, x: Tensor, y: Tensor, parameters: Tensor) -> Tensor:
    """torch's loss at flat parameters, summed whatever its reduction."""
    parts = parameters.split([p.numel() for p in model.parameters()])
    named = {n: part.view_as(p) for (n, p), part in zip(model.named_parameters(), parts)}
    f = torch.func.functional_call(model, named, (x,))
    y = y.to(f.dtype) if not isinstance(loss, CE) else y if y.is_floating_point() else y.long()
    options = {"reduction": "sum"}
    if isinstance(loss, CE):
        options |= {"ignore_index": loss.ignore_index, "label_smoothing": loss.label_smoothing}
        return nn.functional.cross_entropy(f, y, loss.weight, **options)
    if isinstance(loss, BCE):
        return nn.functional.binary_cross_entropy_with_logits(f, y, loss.weight, pos_weight=loss.pos_weight, **options)
    if isinstance(loss, nn.MSELoss):
        return nn.functional.mse_loss(f, y, **options)
    return nn.functional.poisson_nll_loss(f, y, full=False, **options)


def constant(loss: nn.Module, y: Tensor) -> float | Tensor:
    """What normalises the likelihood, and torch leaves out."""
    if isinstance(loss, nn.MSELoss):
        return 0.5 * y.numel() * math.log(math.pi)
    return (y.double() + 1).lgamma().sum() if isinstance(loss, nn.PoissonNLLLoss) else 0.0


@pytest.mark.parametrize("case", CASES)
def test_value_gradient_and_curvature_are_torchs(case: str) -> None:
    loss, shape, y = CASES[case]
    model, x = Shaped(*shape).double(), normal(N, 2)
    lin = co.linearize(model, (x, y), loss)
    theta = lin.theta.clone()
    value = summed(loss, model, x, y, theta)
    torch.testing.assert_close(-lin.log_likelihood(), value + constant(loss, y), **TIGHT)
    gradient = torch.func.grad(lambda t: summed(loss, model, x, y, t))(theta)
    torch.testing.assert_close(lin.gradient(), gradient, **TIGHT)
    hessian = torch.func.hessian(lambda t: summed(loss, model, x, y, t))(theta)
    torch.testing.assert_close(co.GGN(lin).to_dense(), hessian, **TIGHT)
    torch.testing.assert_close(co.DiagonalGGN(lin).diagonal(), hessian.diagonal(), **TIGHT)


def test_classes_are_where_the_likelihood_says() -> None:
    """A loss of torch has them at dimension 1, a likelihood last, also where both would fit."""
    x, y, first = normal(N, 2), labels(T), Shaped(C, T).double()
    last = nn.Sequential(first, nn.Unflatten(1, (1, C)), nn.Flatten(1, 2)).double()
    theirs, ours = co.linearize(first, (x, y), CE()), co.linearize(last, (x, y), "classification")
    with torch.no_grad():
        f = first(x)
    torch.testing.assert_close(-theirs.log_likelihood(), CE(reduction="sum")(f, y), **TIGHT)
    torch.testing.assert_close(-ours.log_likelihood(), CE(reduction="sum")(f.mT, y), **TIGHT)
    assert not torch.allclose(theirs.log_likelihood(), ours.log_likelihood())
    torch.testing.assert_close(theirs.outputs(), f, **TIGHT)
    post = co.laplace(theirs, co.GGN, 1.0, check_mode=False)
    torch.testing.assert_close(post.predict(x).mean, f.mT, **TIGHT)


@pytest.mark.parametrize("likelihood", ["regression", lambda f: torch.distributions.Normal(f, 1)])
def test_a_number_for_each_point_is_a_column(likelihood: Any) -> None:
    model, x, y = nn.Sequential(nn.Linear(2, 1), nn.Flatten(0)), torch.randn(8, 2), torch.ones(8)
    flat, column = (co.linearize(m, (x, t), likelihood) for m, t in ((model, y), (model[0], y[:, None])))
    assert torch.equal(co.GGN(flat).to_dense(), co.GGN(column).to_dense())
    assert torch.equal(flat.predict(x), column.predict(x)) and torch.equal(flat.gradient(), column.gradient())


def test_pixels_are_positions() -> None:
    """(N, H, W, C), targets and weights (N, H, W): as the same outputs in one row of positions."""
    x, y, w = normal(N, 2), labels(3, 2), normal(N, 3, 2).abs()
    model = Shaped(3, 2, C).double()
    flat = nn.Sequential(model, nn.Flatten(1, 2))
    image = co.linearize(model, {"inputs": x, "targets": y, "weights": w}, "classification")
    row = co.linearize(flat, (x, y.flatten(1), w.flatten(1)), "classification", weights=True)
    assert image.output_shape == row.output_shape == (6, C)
    torch.testing.assert_close(co.GGN(image).to_dense(), co.GGN(row).to_dense(), **TIGHT)
    torch.testing.assert_close(image.gradient(), row.gradient(), **TIGHT)
    fisher = co.EmpiricalFisher(image, per_token=True).to_dense()
    torch.testing.assert_close(fisher, co.EmpiricalFisher(row, per_token=True).to_dense(), **TIGHT)


# (shape of a point's outputs, shape of the noise, what it multiplies: the noise reshaped to broadcast over the outputs)
PLACES: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None]] = [
    ((3,), (3,), (3,)),
    ((3,), (3, 1), None),
    ((3, 5), (3,), (3, 1)),
    ((3, 3), (3,), None),
    ((3, 3), (3, 1), (3, 1)),
    ((3, 4, 5), (3,), (3, 1, 1)),
    ((3, 4, 5), (5,), (5,)),
    ((3, 4, 5), (4,), None),
    ((3, 4, 5), (3, 1, 1), (3, 1, 1)),
    ((3, 4, 3), (3,), None),
    ((3, 4, 3), (1, 1, 3), (3,)),
    ((3, 1, 1), (3,), (3, 1, 1)),
    ((1, 4, 5), (1,), (1,)),
    ((3, 4, 5), (1, 1, 1), (1,)),
]


@pytest.mark.parametrize(("shape", "given", "meant"), PLACES)
def test_a_noise_for_each_output_goes_with_the_models_outputs(
    shape: tuple[int, ...], given: tuple[int, ...], meant: tuple[int, ...] | None
) -> None:
    noise = torch.linspace(0.5, 2.0, math.prod(given)).double().reshape(given).requires_grad_()
    model, x, y = Shaped(*shape).double(), normal(N, 2), normal(N, *shape, seed=4)
    if meant is None:
        with pytest.raises(ValueError, match=r"pass one variance, or"):
            co.linearize(model, (x, y), co.likelihoods.Gaussian(noise))
        return
    lin = co.linearize(model, (x, y), co.likelihoods.Gaussian(noise))

    def log_likelihood(theta: Tensor, noise: Tensor) -> Tensor:
        weight, bias = theta.split([2 * math.prod(shape), math.prod(shape)])
        f = torch.func.functional_call(model, {"weight": weight.view(-1, 2), "bias": bias}, (x,))
        each = noise.reshape(meant).expand(shape)
        return -0.5 * ((f - y).square() / each + (2 * math.pi * each).log()).sum()

    expected = log_likelihood(lin.theta, noise)
    torch.testing.assert_close(lin.log_likelihood(), expected, **TIGHT)
    torch.testing.assert_close(
        torch.autograd.grad(lin.log_likelihood(), noise), torch.autograd.grad(expected, noise), **TIGHT
    )
    hessian = torch.func.hessian(log_likelihood)(lin.theta, noise.detach())
    torch.testing.assert_close(co.GGN(lin).to_dense().detach(), -hessian, **TIGHT)


class Doubled(nn.CrossEntropyLoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return 2 * super().forward(input, target)


class Smoothed(nn.CrossEntropyLoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(input, target, reduction=self.reduction, label_smoothing=0.05)


class Halved(nn.MSELoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input, target) / 2


CLASSES = torch.arange(6) % C
HIT = F.one_hot(CLASSES, C).double()
# name: outputs of six points, from zero to far beyond where a softmax rounds to a unit vector
OUTPUTS = {f"{gap} ahead": gap * HIT + normal(6, C, scale=0.1) for gap in (6, 17, 88, 1000)}
OUTPUTS |= {"zero": 0 * HIT, "tiny": normal(6, C, scale=1e-8), "ordinary": normal(6, C), "wrong": -300 * HIT}
OUTPUTS |= {"huge": normal(6, C, scale=1e6)}
SOFTMAX = co.likelihoods.Categorical()
# name: (loss, targets, the likelihood that it is)
RIGHT: dict[str, tuple[Any, Tensor, co.likelihoods.Likelihood]] = {
    "classes": (CE(), CLASSES, SOFTMAX),
    "smoothing": (CE(label_smoothing=0.1), CLASSES, co.likelihoods.Categorical(label_smoothing=0.1)),
    "weights": (CE(W.float()), CLASSES, co.likelihoods.Categorical(W)),
    "probabilities": (CE(), HIT, SOFTMAX),
    "events": (BCE(pos_weight=W.float()), HIT, co.likelihoods.Bernoulli(pos_weight=W)),
    "squares": (nn.MSELoss(), HIT, co.likelihoods.Gaussian(0.5)),
    "a function": (lambda f, y: F.cross_entropy(f, y, reduction="none"), CLASSES, SOFTMAX),
    "its definition": (lambda f, y: f.logsumexp(1) - f.gather(1, y.unsqueeze(1)).squeeze(1), CLASSES, SOFTMAX),
    "a function of events": (
        lambda f, y: F.binary_cross_entropy_with_logits(f, y, reduction="none"),
        HIT,
        co.likelihoods.Bernoulli(),
    ),
}
OWN = {"doubled": (Doubled(), CLASSES), "smoothed": (Smoothed(), CLASSES), "halved": (Halved(), HIT)}


def with_outputs(outputs: Tensor, targets: Tensor, loss: Any, dtype: torch.dtype) -> co.operators.Linearization:
    """A network trained to these outputs: its inputs times the identity."""
    model = nn.Linear(C, C).to(dtype)
    model.load_state_dict({"weight": torch.eye(C), "bias": torch.zeros(C)})
    targets = targets.to(dtype) if targets.is_floating_point() else targets
    return co.linearize(model, (outputs.to(dtype), targets), loss, parameters=["bias"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loss", RIGHT)
def test_rounding_refuses_no_loss(loss: str) -> None:
    (given, targets, likelihood), dtype = RIGHT[loss], torch.float32
    for name, outputs in OUTPUTS.items():
        found = co.GGN(with_outputs(outputs, targets, given, dtype)).to_dense().double()
        unit = torch.eye(C).double()[:, None].expand(C, 6, C)
        expected = likelihood.to(dtype=torch.float64).hessian_product(outputs.to(dtype).double(), unit, targets).sum(1)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=100 * torch.finfo(dtype).eps, msg=name)


@pytest.mark.parametrize("loss", OWN)
def test_a_subclass_with_a_forward_of_its_own_is_a_loss_of_ones_own(loss: str) -> None:
    given, targets = OWN[loss]
    f = OUTPUTS["ordinary"]
    lin = with_outputs(f, targets, given, torch.float64)
    assert isinstance(lin.likelihood, co.likelihoods.FromLoss)
    summed = type(given)(reduction="sum")
    hessian = torch.func.hessian(lambda bias: summed(f + bias, targets))(torch.zeros(C).double())
    torch.testing.assert_close(co.GGN(lin).to_dense(), hessian, **TIGHT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("gap", "activation"), [(6, nn.Tanh), (17, nn.Tanh), (30, nn.ReLU), (200, nn.Tanh)])
def test_rounding_refuses_no_hessian(gap: int, activation: type[nn.Module], dtype: torch.dtype) -> None:
    """Of a network so confident that its gradient, and so its second derivatives, are rounding errors."""
    model, x = nn.Sequential(nn.Linear(2, 5), activation(), nn.Linear(5, C)).to(dtype), normal(N, 2, dtype=dtype)
    with torch.no_grad():
        best, second = model(x).topk(2).values.unbind(1)
        for parameter in model[2].parameters():
            parameter *= gap / (best - second).min()
    y = model(x).argmax(1)
    lin = co.linearize(model, (x, y), CE())
    found = co.Hessian(lin).to_dense().double()
    double, at = copy.deepcopy(model).double(), lin.theta.double()
    expected = torch.func.hessian(lambda theta: summed(CE(), double, x.double(), y, theta))(at)
    size = 1 + model[2].weight.detach().double().norm() ** 2
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=float(100 * torch.finfo(dtype).eps * size))
