"""A last layer, whose δ is the identity: sums over H use its own structure, at any number of outputs."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvops as co
from tests.memory import Largest
from tests.network.definitions import TIGHT, autograd_hessians, normal
from tests.zoo_modules import Applied

N, T, C, WIDTH = 6, 3, 4, 5
LABELS = torch.tensor([0, 1, 2, 3, 3, 1])
TOKENS = torch.tensor([[0, 1, 2], [2, -100, 1], [3, 0, 1], [1, 2, 0], [-100, -100, 3], [2, 2, 3]])
EVENTS = (normal(N, C, seed=5) > 0).double()
lik = co.likelihoods

# likelihood, targets, sample weights
LIKELIHOODS: dict[str, tuple[Any, Tensor, Tensor | None]] = {
    "classes": (lik.Categorical(), LABELS, None),
    "weighted points": (lik.Categorical(), LABELS, torch.tensor([1.0, 2.0, 0.0, 0.5, 3.0, 1.0]).double()),
    "weighted classes, smoothed, one ignored": (
        lik.Categorical(torch.tensor([1.0, 2.0, 0.5, 3.0]).double(), ignore_index=1, label_smoothing=0.2),
        LABELS,
        None,
    ),
    "soft classes": (lik.Categorical(), normal(N, C, seed=3).softmax(1), None),
    "events": (lik.Bernoulli(pos_weight=torch.arange(1.0, 5.0).double()), EVENTS, None),
    "counts": (lik.Poisson(), EVENTS, torch.arange(6.0).double()),
    "noises": (lik.Gaussian(torch.tensor([0.1, 1.0, 2.0, 5.0]).double()), normal(N, C), None),
    "means and variances": (lik.HeteroscedasticGaussian(), normal(N, C // 2), None),
    "tokens": (lik.Categorical(), TOKENS, None),
    "weighted tokens": (lik.Categorical(), TOKENS, normal(N, T, seed=2).square()),
    "a function, by columns": (lambda f, y: (f - y).cosh().log() + f.square().sum(1, keepdim=True), EVENTS, None),
}


def network(likelihood: Any, y: Tensor, width: int = WIDTH, outputs: int = C) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, outputs)).double()
    return model, normal(len(y), T, 2) if y.shape[1:] == (T,) else normal(len(y), 2)


def linearized(name: str, parameters: str | None) -> tuple[co.operators.Linearization, Tensor]:
    """A row of the table, and the outputs."""
    likelihood, y, w = LIKELIHOODS[name]
    model, x = network(likelihood, y)
    data = (x, y) if w is None else (x, y, w)
    lin = co.linearize(model, data, likelihood, parameters=parameters, weights=w is not None)
    return lin, model(x).detach()


@pytest.mark.parametrize("parameters", ["last_layer", "2.weight", "2.bias", None])
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_the_diagonal_is_that_of_the_products(name: str, parameters: str | None) -> None:
    lin, _ = linearized(name, parameters)
    expected = co.GGN(lin).to_dense().diagonal()
    torch.testing.assert_close(co.DiagonalGGN(lin).diagonal(), expected, **TIGHT)
    torch.testing.assert_close(co.GGN(lin).diagonal(), expected, **TIGHT)


class Doubled(lik.Categorical):
    """A subclass of a user, with an H of its own."""

    def hessian_product(self, f: Tensor, u: Tensor, y: Tensor, w: Tensor | None = None) -> Tensor:
        return 2.0 * super().hessian_product(f, u, y, w)

    def root_product(self, f: Tensor, z: Tensor, y: Tensor, w: Tensor | None = None) -> Tensor:
        return 2.0**0.5 * super().root_product(f, z, y, w)

    def root_transpose_product(self, f: Tensor, u: Tensor, y: Tensor, w: Tensor | None = None) -> Tensor:
        return 2.0**0.5 * super().root_transpose_product(f, u, y, w)


@pytest.mark.parametrize("make", [co.DiagonalGGN, co.KFAC])
def test_a_subclass_with_another_h_keeps_it(make: Any) -> None:
    model, x = network(None, LABELS)
    found, expected = (
        make(co.linearize(model, (x, LABELS), likelihood, parameters="last_layer")).to_dense()
        for likelihood in (Doubled(), lik.Categorical())
    )
    torch.testing.assert_close(found, 2.0 * expected, **TIGHT)


BY_POINT = [(name, "expand") for name in LIKELIHOODS]
"""Without positions, both kinds of sharing are the same."""


@pytest.mark.parametrize("parameters", ["last_layer", "2.weight", None])
@pytest.mark.parametrize(("name", "sharing"), [*BY_POINT, ("tokens", "reduce"), ("weighted tokens", "reduce")])
def test_the_kronecker_factor_of_the_outputs_is_the_sum_of_h(name: str, sharing: str, parameters: str | None) -> None:
    (lin, f), (_, y, w) = linearized(name, parameters), LIKELIHOODS[name]
    K = co.KFAC(lin, sharing=sharing)
    last = K.blocks[-1].to_dense()
    size = C * (WIDTH + (parameters != "2.weight"))
    H = autograd_hessians(lin.likelihood, f.flatten(1), y, w) if name != "means and variances" else None
    if H is None:
        s = f[:, C // 2 :]
        H = torch.diag_embed(torch.cat([(-s).exp(), torch.full_like(s, 0.5)], 1))
    blocks = H.unflatten(1, (-1, C)).unflatten(3, (-1, C)).diagonal(dim1=1, dim2=3)  # (N, C, C, T)
    B = blocks.sum((0, 3))
    # The block is B ⊗ A / count: its partial trace over the inputs is B up to a number.
    assert last.shape == (size, size)
    partial = last.unflatten(0, (C, -1)).unflatten(2, (C, -1)).diagonal(dim1=1, dim2=3).sum(-1)
    torch.testing.assert_close(partial / partial.trace(), B / B.trace(), **TIGHT)


def test_confident_classes_lose_no_digits() -> None:
    """The variances p(1 − p) of probabilities next to 1, which are no differences, in the diagonal and in KFAC."""
    model = nn.Linear(1, 3, bias=False).double()
    model.weight.data = torch.tensor([[30.0], [-2.0], [-5.0]]).double()
    lin = co.linearize(model, (torch.ones(1, 1).double(), torch.zeros(1).long()), "classification")
    p = model.weight.detach().flatten().softmax(0)
    top = p[1:].sum() * p[0]
    expected = torch.cat([top[None], p[1:] * (1 - p[1:])])
    for found in (co.DiagonalGGN(lin).diagonal(), co.KFAC(lin).diagonal()):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("likelihood", [lik.Categorical(), lik.Bernoulli()], ids=["classes", "events"])
def test_many_outputs_take_no_columns(likelihood: Any) -> None:
    points, outputs = 100, 150
    y = torch.arange(points) % outputs
    y = y if isinstance(likelihood, lik.Categorical) else nn.functional.one_hot(y, outputs)
    model, x = network(likelihood, y, outputs=outputs)
    lin = co.linearize(model, (x, y), likelihood, parameters="last_layer")
    for build in (co.DiagonalGGN, co.KFAC):
        with Largest() as largest:
            build(lin)
        assert largest.numbers <= 2 * outputs**2


@pytest.mark.parametrize("parameters", ["last_layer", None])
@pytest.mark.parametrize("first", [False, True])
def test_checks_of_a_text_look_at_few_of_its_positions(first: bool, parameters: str | None) -> None:
    """No result is larger than the outputs of the three points; torch's cross-entropy has classes at dimension 1."""
    vocabulary, length = 300, 64
    layers = nn.Embedding(vocabulary, 4), nn.Tanh(), nn.Linear(4, vocabulary)
    model = nn.Sequential(*layers, Applied(lambda f: f.movedim(-1, 1) if first else f))
    tokens = torch.arange(3 * length).unflatten(0, (3, length))
    with Largest() as largest:
        co.linearize(model, (tokens, tokens), nn.CrossEntropyLoss() if first else "classification", parameters)
    assert largest.numbers <= 3 * length * vocabulary
