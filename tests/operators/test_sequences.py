"""Networks that return (N, T, C): the GGN is a sum over the positions that count, against dense definitions."""

from typing import Any

import pytest
import torch
from torch import Tensor, distributions, nn

import curvops as co
from tests.network.definitions import (
    TIGHT,
    autograd_gradient,
    autograd_hessians,
    dense_fisher,
    normal,
    require_consistent_products,
    require_sampled_moment,
)
from tests.zoo import dense_jacobian
from tests.zoo_modules import Applied

N, T, C = 4, 3, 3


def pointwise() -> tuple[nn.Module, Tensor]:
    """A convolution along positions, then one of width 1: channels first inside, last outside."""
    layers = nn.Conv1d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv1d(4, C, 1), Applied(lambda f: f.mT)
    return nn.Sequential(*layers).double(), normal(N, 2, T)


LABELS = torch.tensor([[0, 1, 2], [2, 2, 1], [0, 0, 1], [1, 2, 0]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]], dtype=torch.bool)
MASKED = LABELS.masked_fill(~MASK, -100)
REALS = normal(N, T, C, seed=3)
PER_POSITION = torch.rand(N, T, generator=torch.Generator().manual_seed(4)).double()
PER_SEQUENCE = torch.tensor([1.0, 0.0, 2.5, 0.3]).double()

# name: (likelihood given, targets, weights given, the weight of each position)
CASES: dict[str, tuple[Any, Tensor, Tensor | None, Tensor]] = {
    "ignored labels": ("classification", MASKED, None, MASK.double()),
    "mask": ("classification", LABELS, MASK, MASK.double()),
    "weights of positions": (co.likelihoods.Gaussian(noise=1.0), REALS, PER_POSITION, PER_POSITION),
    "weights of sequences": (co.likelihoods.Gaussian(0.5), REALS, PER_SEQUENCE, PER_SEQUENCE[:, None].expand(N, T)),
    "class probabilities": (
        co.likelihoods.Categorical(label_smoothing=0.1), REALS.softmax(-1), None, torch.ones(N, T).double(),
    ),
    "events": (co.likelihoods.Bernoulli(), REALS > 0, PER_POSITION, PER_POSITION),
    "distribution": (lambda f: distributions.Categorical(logits=f), LABELS, PER_POSITION, PER_POSITION),
}  # fmt: skip


def jacobian_rows(model: nn.Module, x: Tensor) -> Tensor:
    """(N, T, C, D) row by row."""
    return dense_jacobian(model, x).unflatten(0, (len(x), T, C))


def of_position(case: str) -> co.likelihoods.Likelihood:
    given = CASES[case][0]
    return co.likelihoods.as_likelihood("classification" if case == "distribution" else given)


def definition(model: nn.Module, x: Tensor, likelihood: Any, y: Tensor, each: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-likelihood, gradient and GGN, summed over the positions of non-zero weight alone."""
    keep = each.flatten() > 0
    J, f = jacobian_rows(model, x).flatten(0, 1)[keep], model(x).detach().flatten(0, 1)[keep]
    y, w = y.flatten(0, 1)[keep], each.flatten()[keep]
    H = dense_fisher(likelihood, f, y, w)
    value, r = likelihood.log_prob(f, y, w).sum(), likelihood.residual(f, y, w)
    return value, torch.einsum("ncd,nc->d", J, r), torch.einsum("ncd,nce,nef->df", J, H, J)


def linearised(model: nn.Module, x: Tensor, case: str) -> co.operators.Linearization:
    given, y, w, _ = CASES[case]
    return co.linearize(model, (x, y) if w is None else (x, y, w), given, weights=w is not None)


@pytest.mark.parametrize("case", CASES)
def test_sums_over_positions(case: str) -> None:
    model, x = pointwise()
    likelihood, (_, y, _, each) = of_position(case), CASES[case]
    value, gradient, ggn = definition(model, x, likelihood, y, each)
    lin = linearised(model, x, case)
    torch.testing.assert_close(lin.log_likelihood(), value, **TIGHT)
    torch.testing.assert_close(lin.gradient(), gradient, **TIGHT)
    v = normal(lin.num_parameters, 3, seed=6)
    torch.testing.assert_close(co.GGN(lin) @ v, ggn @ v, **TIGHT)
    torch.testing.assert_close(co.DiagonalGGN(lin).diagonal(), ggn.diagonal(), **TIGHT)
    if case in ("ignored labels", "mask", "class probabilities"):  # it sums over the positions of a sequence first
        rows = [definition(model, x[n : n + 1], likelihood, y[n : n + 1], each[n : n + 1])[1] for n in range(N)]
        torch.testing.assert_close(
            co.EmpiricalFisher(lin).to_dense(), torch.stack(rows).mT @ torch.stack(rows), **TIGHT
        )
    assert (lin.num_data, lin.num_outputs, lin.output_shape) == (N, T * C, torch.Size([T, C]))
    torch.testing.assert_close(lin.outputs(), model(x).detach(), **TIGHT)


def test_a_posterior_predicts_each_position() -> None:
    model, x = pointwise()
    post = co.laplace(linearised(model, x, "mask"), co.GGN, 1.0, check_mode=False)
    P = co.GGN(post.lin).to_dense() + torch.eye(post.lin.num_parameters).double()
    J = jacobian_rows(model, x)
    expected = J @ torch.linalg.solve(P, J.flatten(0, 2).mT).mT.view_as(J).mT
    predicted = post.predict(x, rtol=1e-12)
    torch.testing.assert_close(predicted.mean, model(x).detach(), **TIGHT)
    torch.testing.assert_close(predicted.covariance_matrix, expected, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(predicted.variance, expected.diagonal(dim1=-2, dim2=-1), rtol=1e-8, atol=1e-8)
    joint = post.predict(x, joint=True, rtol=1e-12).covariance_matrix  # each position as a point
    rows = J.flatten(0, 2)
    torch.testing.assert_close(joint, rows @ torch.linalg.solve(P, rows.mT), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("w", [None, PER_SEQUENCE, PER_POSITION], ids=["none", "sequences", "positions"])
@pytest.mark.parametrize("name", ["ignored labels", "weights of positions", "class probabilities"])
def test_the_likelihood_of_sequences_by_definition(name: str, w: Tensor | None) -> None:
    y = CASES[name][1]
    likelihood, f = co.likelihoods.Sequences(of_position(name), T, C), normal(N, T * C)
    H = autograd_hessians(likelihood, f, y, w)
    require_consistent_products(likelihood, f, y, w, H)
    torch.testing.assert_close(likelihood.residual(f, y, w), autograd_gradient(likelihood, f, y, w), **TIGHT)
    M = likelihood.narrow_columns(T * C)
    for step in (1, 2, M):
        columns = torch.cat([likelihood.narrow_root(f, y, w, i, min(M, i + step)) for i in range(0, M, step)])
        torch.testing.assert_close(torch.einsum("mnc,mnd->ncd", columns, columns), H, **TIGHT)
    assert w is not None or int(torch.linalg.matrix_rank(H).max()) == M
    assert likelihood.root_columns(T * C) == T * C
    assert likelihood.log_prob(f, y, w).shape == (N,)
    assert likelihood.mean(f).shape == (N, T * C)
    assert likelihood.sample(f).shape == (y.shape if y.ndim == 2 or name.startswith("weights") else y.shape[:2])


def test_monte_carlo_residuals_have_the_hessian_as_second_moment() -> None:
    """4 standard errors, among them the entries between positions, where the Hessian is 0."""
    f, likelihood = normal(N, T * C), co.likelihoods.Sequences(co.likelihoods.Categorical(), T, C)
    H = autograd_hessians(likelihood, f, MASKED, PER_POSITION)
    require_sampled_moment(likelihood, f, MASKED, PER_POSITION, H)


def test_rows_that_are_sequences() -> None:
    """A model that flattens (N, T, C) itself, with the likelihood given as one of sequences."""
    model, x = pointwise()
    flat = nn.Sequential(model, nn.Flatten())
    likelihood = co.likelihoods.Sequences(co.likelihoods.Categorical(), T, C)
    lin = co.linearize(flat, (x, LABELS, MASK), likelihood, weights=True)
    assert lin.output_shape == (T, C)
    expected = co.GGN(linearised(model, x, "mask")).to_dense()
    torch.testing.assert_close(co.GGN(lin).to_dense(), expected, **TIGHT)
    assert repr(co.linearize(model, (x, LABELS), likelihood).likelihood) == repr(likelihood)
    for wrong in (model, flat):
        with pytest.raises(ValueError, match=r"not the outputs of|needs 6 outputs; the model has 9"):
            co.linearize(wrong, (x, LABELS), co.likelihoods.Sequences(co.likelihoods.Categorical(), T, 2))


def test_all_sequences_have_one_length() -> None:
    model, x = pointwise()
    with pytest.raises(ValueError, match="Batch 1: The model returns 3 positions per point.*Pad sequences"):
        co.linearize(model, [(x, LABELS), (x[..., :2], LABELS[:, :2])], "classification")
    with pytest.raises(ValueError, match=r"returns \(2, 2, 3\), but \(N, 3, 3\) before: pad"):
        linearised(model, x, "mask").predict(x[..., :2])
