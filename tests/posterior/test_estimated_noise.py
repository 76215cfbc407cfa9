"""The noise of a regression: estimated from residuals and left-out points, shown, and compared with a given one.

Tests `gaussian.py`, and the left-out points of `updating.py`.
"""

import copy
import functools
import math
import warnings

import pytest
import torch

import curvops as co
from curvops.errors import NoiseWarning
from tests.randomness import perceptron

DOUBLE = torch.float64
GAUSSIAN = co.likelihoods.Gaussian


def data(n=40, outputs=1, positions=()):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, *positions, 2, generator=generator, dtype=DOUBLE)
    scales = torch.tensor([0.1, 1.0, 5.0], dtype=DOUBLE)[:outputs]
    errors = torch.randn(n, *positions, outputs, generator=generator, dtype=DOUBLE)
    return x, x.sum(-1, keepdim=True).sin() + scales * errors


def network(outputs=1, hidden=6):
    return perceptron(2, hidden, outputs)


def trained(model, x, y, steps=300):
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    return model


@functools.cache
def overfitted():
    """Twelve points, and a network that was trained on them for too long."""
    x, y = data(12)
    return trained(network(hidden=20), x, y), x, y


def noise(of):
    """The noise of a linearisation or a posterior."""
    return getattr(of, "lin", of).likelihood.hyperparameters[0]


def same(found, expected):
    """Equal to the four digits that an estimate has."""
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=found.dtype), rtol=6e-4, atol=0)


def left_out(model, x, y, w=None, units=None):
    """The squared errors of each point under the linear model of all others, by a fit without it, at the best λ."""
    lin = co.linearize(model, (x, y), GAUSSIAN(noise=1.0))
    D, N = lin.num_parameters, len(x)
    J = (lin.jacobian() @ torch.eye(D, dtype=DOUBLE)).view(N, -1, D)
    B, C = J.shape[1], y.shape[-1]
    t = y.view(N, B) - model(x).detach().view(N, B) + J @ lin.theta
    units = torch.ones(B, dtype=DOUBLE) if units is None else units.repeat(B // C)
    weights = torch.ones(N, B, dtype=DOUBLE) if w is None else w.view(N, -1).repeat_interleave(B // w[0].numel(), 1)
    scale = weights.sqrt() / units
    rows, targets = scale.unsqueeze(-1) * J, scale * t
    top = float(torch.linalg.eigvalsh(rows.reshape(-1, D) @ rows.reshape(-1, D).mT)[-1])

    kept = torch.stack([torch.tensor([i for i in range(N) if i != n]) for n in range(N)])
    A, b = rows[kept].flatten(1, 2), targets[kept].flatten(1).unsqueeze(-1)
    grams, moments = A.mT @ A, A.mT @ b

    def errors(damp):
        fitted = torch.linalg.solve(grams + damp * torch.eye(D, dtype=DOUBLE), moments)
        return targets - (rows @ fitted).squeeze(-1)

    least = math.log10(N * B * torch.finfo(DOUBLE).eps)
    found = [errors(top * 10**power) for power in torch.linspace(least, 3, 20).tolist()]
    best = min(found, key=lambda each: float(each.square().sum()))
    return (best * units).square().view(-1, C).sum(0) / weights.view(-1, C).sum(0)


@pytest.mark.parametrize("spec", ["regression", GAUSSIAN(), GAUSSIAN(noise=None)], ids=["name", "Gaussian()", "None"])
def test_it_is_the_mean_squared_residual_of_the_training_data(spec):
    (x, y), model = data(outputs=2), network(2)
    batches = [(x[i : i + 7], y[i : i + 7]) for i in range(0, 40, 7)]
    for given in ((x, y), batches, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 9, shuffle=True)):
        found = noise(co.linearize(model, given, spec))
        same(found, (model(x) - y).square().mean())
        assert torch.equal(found, noise(co.linearize(model, (x, y), spec)))
    assert found.shape == ()


def test_each_output_may_have_its_own():
    (x, y), model = data(outputs=3), network(3)
    found = noise(co.linearize(model, (x, y), GAUSSIAN(noise="per_output")))
    same(found, (model(x) - y).square().mean(0))


@pytest.mark.parametrize("per_position", [False, True], ids=["weights of points", "weights of positions"])
def test_weights_and_positions_count(per_position):
    (x, y), model = data(outputs=2, positions=(5,)), network(2)
    w = torch.rand(40, *([5] if per_position else []), dtype=DOUBLE)
    w[3] = 0
    each = w.unsqueeze(-1) if per_position else w.view(40, 1, 1)
    squares = each * (model(x) - y).square()
    for spec, dims in ((None, (0, 1, 2)), ("per_output", (0, 1))):
        lin = co.linearize(model, (x, y, w), GAUSSIAN(noise=spec), weights=True)
        same(noise(lin), squares.sum(dims) / each.expand_as(squares).sum(dims))


def test_one_point_and_constant_targets_are_data_too():
    model = network()
    for x, y in ((torch.ones(1, 2), torch.ones(1, 1)), (torch.randn(9, 2), torch.full((9, 1), 3.0))):
        post = co.laplace(co.linearize(model, (x, y), "regression"), co.GGN, 1.0, check_mode=False)
        assert 0 < post.observation_noise < 100
        assert post.predict(x.double(), noise=True).variance.isfinite().all()


def test_a_posterior_has_the_error_on_left_out_points_if_it_is_larger():
    model, x, y = overfitted()
    lin = co.linearize(model, (x, y), "regression")
    post = co.laplace(lin, co.KFAC, 1.0, check_mode=False)
    expected = left_out(model, x, y)
    same(noise(post).view(1), expected)
    assert post.observation_noise > 10 * noise(lin)
    assert noise(lin) == noise(co.laplace(lin, co.GGN(lin), 1.0, check_mode=False))  # an operator has its noise


def test_points_are_left_out_with_their_weights_outputs_and_positions():
    x, y = data(8, outputs=2, positions=(3,))
    model, w = trained(network(2, 20), x, y, 300), torch.rand(8, dtype=DOUBLE)
    w[2] = 0
    for spec in (None, "per_output"):
        post = co.laplace(
            co.linearize(model, (x, y, w), GAUSSIAN(noise=spec), weights=True), co.KFAC, 1.0, 0.0, 1.0, False
        )
        sizes = (w.view(8, 1, 1) * y.square()).sum((0, 1)) / (3 * w.sum())
        expected = left_out(model, x, y, w, None if spec is None else sizes.sqrt())
        same(noise(post), expected.mean() if spec is None else expected)


@pytest.mark.parametrize("parameters", ["last_layer", "0.*", torch.tensor([1, 4, 9])], ids=["last", "first", "few"])
def test_a_part_of_the_network_has_the_noise_of_the_whole(parameters):
    model, x, y = copy.deepcopy(overfitted())
    whole, part = (
        co.laplace(co.linearize(model, (x, y), "regression", chosen), co.GGN, 1.0, check_mode=False)
        for chosen in (None, parameters)
    )
    assert noise(part) == noise(whole)
    model[0].requires_grad_(False)  # a body that was not trained is not fitted anew
    head = co.laplace(co.linearize(model, (x, y), "regression", "last_layer"), co.GGN, 1.0, check_mode=False)
    assert noise(head) == noise(co.laplace(co.linearize(model, (x, y), "regression"), co.GGN, 1.0, check_mode=False))
    assert noise(head) < noise(whole)


def test_an_exact_fit_warns_and_left_out_points_show_the_noise():
    x, _ = data(12)
    model = network()
    y = model(x).detach()
    with pytest.warns(NoiseWarning, match="to rounding"):
        lin = co.linearize(model, (x, y), "regression")
    assert "unknown noise" in repr(lin) and noise(lin) == 1
    post = co.laplace(lin, co.GGN, 1.0, check_mode=False)
    assert 0 < post.observation_noise < float(y.square().mean())
    assert "(estimated)" in repr(post)


@pytest.mark.parametrize("times", [0.2, 5.0])
def test_a_given_noise_that_is_far_off_warns_at_the_posterior(times):
    (x, y), model = data(outputs=2), network(2)
    squares = (model(x) - y).square().mean().detach()
    with pytest.warns(NoiseWarning, match=f"is {times:.2g} times") as caught:
        lin = co.linearize(model, (x, y), GAUSSIAN(noise=times * squares))
        co.laplace(lin, co.KFAC, 1.0)
    assert [each.category for each in caught].count(NoiseWarning) == 1


def test_a_noise_that_is_near_estimated_learned_or_left_unchecked_does_not_warn():
    (x, y), model = data(outputs=2), network(2)
    squares = (model(x) - y).square().mean(0).detach()
    fine = [GAUSSIAN(noise=2 * squares), GAUSSIAN(noise=float(squares.mean()) / 2), "regression"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoiseWarning)
        for spec in [*fine, GAUSSIAN(noise=torch.tensor(100.0, dtype=DOUBLE, requires_grad=True))]:
            co.laplace(co.linearize(model, (x, y), spec), co.GGN, 1.0)
        co.laplace(co.linearize(model, (x, y), GAUSSIAN(noise=100.0)), co.GGN, 1.0, check_mode=False)
        few = x[:2], model(x[:2]).detach() + torch.tensor([[0.2], [-0.4]], dtype=DOUBLE)
        co.laplace(co.linearize(model, few, GAUSSIAN(noise=1.0)), co.GGN, 1.0)  # as small in 2 cases of 100
        reciprocal = {"inputs": x, "targets": y, "weights": 1 / squares.expand_as(y)}
        co.laplace(co.linearize(model, reciprocal, GAUSSIAN(noise=1.0)), co.GGN, 1.0)
    with pytest.warns(NoiseWarning, match="is 50 times"):
        co.laplace(co.linearize(model, few, GAUSSIAN(noise=5.0)), co.GGN, 1.0)


def test_a_noise_of_further_data_that_is_far_from_the_earlier_one_warns():
    (x, y), model = data(), network()
    post = co.laplace(co.linearize(model, (x, y), "regression"), co.GGN, 1.0)
    further = co.linearize(model, (x[:2], model(x[:2]).detach() + 1e-3), "regression")
    for after in (post.update, functools.partial(co.laplace, prior_precision=post)):
        with pytest.warns(NoiseWarning, match="these 2 points alone is .*earlier posterior has"):
            assert after(further, co.GGN).observation_noise < post.observation_noise / 3


def test_it_is_saved_with_its_value(tmp_path):
    (x, y), model = data(outputs=3), network(3)
    post = co.laplace(co.linearize(model, (x, y), GAUSSIAN(noise="per_output")), co.KFAC, 1.0, check_mode=False)
    post.save(tmp_path)
    for given in ((), ((x, y),), ((x, y), "regression")):
        loaded = co.load(tmp_path, model, *given)
        assert torch.equal(noise(loaded), noise(post))
        assert torch.equal(loaded.predict(x).variance, post.predict(x).variance)


@pytest.mark.parametrize("curvature", [co.GGN, co.KFAC, co.DiagonalGGN])
def test_a_posterior_takes_a_noise_for_each_output(curvature):
    (x, y), model = data(outputs=3), network(3)
    each = torch.tensor([0.1, 1.0, 20.0], dtype=DOUBLE)
    post = co.laplace(co.linearize(model, (x, y), GAUSSIAN(noise=2.0)), curvature, 1.0, check_mode=False)
    expected = co.laplace(co.linearize(model, (x, y), GAUSSIAN(noise=each)), curvature, 1.0, check_mode=False)
    found = post.with_noise(each)
    torch.testing.assert_close(found.predict(x).covariance_matrix, expected.predict(x).covariance_matrix)
    torch.testing.assert_close(found.log_evidence().value, expected.log_evidence().value)
    tuned = co.evidence.validate(expected, x + 0.1, y, "noise")
    torch.testing.assert_close(noise(tuned) / noise(tuned)[0], each / each[0])


def test_training_by_the_evidence_learns_it_from_the_residuals():
    (x, y), model = data(), network()
    post = co.evidence.train(model, (x, y), "regression", epochs=60, every=20, over="scalar")
    same(noise(post), max(float(left_out(model, x, y)), float((model(x) - y).square().mean())))
