"""Tuning on held-out data: no neighbour of what is returned scores better, by the same draws."""

import warnings

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import curvops as co
from curvops.errors import MissingLabelsError
from tests.posterior.trained import Heads, linear_problem, problem
from tests.randomness import seeded

DOUBLE = torch.float64


@pytest.fixture(scope="module")
def regression():
    return linear_problem()


def score(post, x, y):
    return float(post.log_likelihood(x, y).value.mean())


@pytest.mark.parametrize("over", ["noise", ("scalar", "noise")])
def test_no_neighbour_scores_better(regression, over, annotations_unchecked):
    post, x, y = regression
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        best = co.evidence.validate(post, x, y, over)
    assert [warning.category for warning in caught] == [co.evidence.UndeterminedWarning] * ("scalar" in over)
    found, record = score(best, x, y), best.tuning
    assert found == pytest.approx(max(record.scores)) and found >= score(post, x, y)
    assert len(record.scores) == len(record.noises) == len(record.prior_precisions)
    for factor in (0.9, 1.1):
        assert score(best.with_noise(best.observation_noise * factor), x, y) < found
    # The generating variance; 40 targets leave 22 % of it.
    assert best.observation_noise == pytest.approx(0.25, rel=0.5)


def test_one_factor_scales_the_noises_of_several_outputs(annotations_unchecked):
    """Those of two values beside a class; the search starts a thousand times below the noise of both."""
    generator = torch.Generator().manual_seed(0)
    x, new = (torch.randn(n, 3, generator=generator, dtype=DOUBLE) for n in (30, 40))
    model = Heads(3, kind=3, first=1, second=1).double()

    def targets(z):
        values = z[:, :2] + 0.3 * torch.randn(len(z), 2, generator=generator, dtype=DOUBLE)
        return {"kind": z.argmax(1), "first": values[:, :1], "second": values[:, 1:]}

    for name in ("first", "second"):
        model.heads[name].weight.data.copy_(torch.linalg.lstsq(x, targets(x)[name]).solution.mT)
    noises = {"first": 9e-5, "second": 9e-6}
    likelihoods = {name: co.likelihoods.Gaussian(noise) for name, noise in noises.items()}
    lin = co.linearize(model, (x, targets(x)), {"kind": "classification", **likelihoods})
    post, y = co.laplace(lin, co.GGN, 1.0, check_mode=False), targets(new)
    best = co.evidence.validate(post, new, y, "noise")
    factors = [float(best.lin.likelihood.likelihoods[name].noise) / noise for name, noise in noises.items()]
    assert factors[0] == pytest.approx(factors[1], rel=1e-12) and 1e3 < factors[0] < 1e4
    assert best.tuning.noises[4] == pytest.approx(sum(noises.values()) / 2)
    assert max(best.tuning.scores) > best.tuning.scores[4] + 100 and score(best, new, y) > score(post, new, y) + 100


def test_of_given_precisions_the_best_is_returned_for_data_in_any_form(regression, annotations_unchecked):
    post, x, y = regression
    precisions = [0.1, 1.0, 10.0]
    best = co.evidence.validate(post, x, y, prior_precisions=precisions)
    expected = best.tuning.scores
    assert list(expected) == pytest.approx([score(post.with_prior(value), x, y) for value in precisions])
    assert list(best.tuning.prior_precisions) == precisions
    assert float(best.prior_precision) == precisions[expected.index(max(expected))]
    dataset = TensorDataset(x, y)
    forms = [(x, y), dataset, DataLoader(dataset, 7), DataLoader(dataset, 7, shuffle=True)]
    forms += [[(x[:3], y[:3]), (x[3:], y[3:])], (x.numpy(), y.numpy()), {"inputs": x, "targets": y}]
    for data in forms:
        assert co.evidence.validate(post, data, prior_precisions=precisions).tuning.scores == expected
    for data, error, message in [
        ([], ValueError, "no points"),
        (x, MissingLabelsError, "A batch is"),
        ((x, y, y), TypeError, "a third item"),
        (iter([(x, y)]), TypeError, "only once"),
    ]:
        with pytest.raises(error, match=message):
            co.evidence.validate(post, data)


def test_classes_are_scored_by_the_same_draws_and_a_vector_keeps_its_shape(annotations_unchecked):
    model, x, y = problem()
    generator = torch.Generator().manual_seed(1)
    new = torch.randn(20, 4, generator=generator, dtype=DOUBLE)
    noisy = (new[:, :3] + torch.randn(20, 3, generator=generator).double()).argmax(1)
    lin = co.linearize(model, (x, y), "classification")
    shape = torch.linspace(0.5, 2, lin.num_parameters, dtype=DOUBLE)
    post = co.laplace(lin, co.DiagonalGGN, shape, check_mode=False)
    best, again = (co.evidence.validate(post, new, noisy, link="mc", generator=seeded()) for _ in range(2))
    ratio = best.prior_precision / shape
    torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio))
    assert torch.equal(best.prior_precision, again.prior_precision) and ratio[0] != 1
    assert max(best.tuning.scores) > best.tuning.scores[4]  # of the start
    of_best = best.tuning.prior_precisions[best.tuning.scores.index(max(best.tuning.scores))]
    assert of_best == pytest.approx(float(best.prior_precision.log().mean().exp()), rel=1e-12)
    assert best.tuning.prior_precisions[4] == pytest.approx(float(shape.log().mean().exp()), rel=1e-12)
    assert best.tuning.noises is None and min(best.tuning.stderrs) > 0


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_some_positions_choose_the_prior_of_images(smoothing):
    """Of 60 pixels of 20 images 33, by a fixed seed, and 20 of the 30 at which targets of 40 images are known.

    Labels are scored as they are, without the smoothing of training.
    """
    x, y = torch.randn(60, 2, 6, 10, generator=seeded()).double(), torch.arange(3600).view(60, 6, 10) % 7 % 3
    y[20:, 3:], order = -100, torch.randperm(60, generator=seeded())
    smoothed = torch.nn.CrossEntropyLoss(label_smoothing=smoothing)
    lin = co.linearize(torch.nn.Conv2d(2, 3, 3, padding=1).double(), (x[:20], y[:20]), smoothed)
    variances = co.laplace(lin).predict(x[:20]).variance.flatten(1, 2)
    assert float(variances[:, order[:33]].mean()) == pytest.approx(0.25, rel=0.01)
    post = co.laplace(lin, validation=(x[20:], y[20:]))
    p = post.probabilities(x[20:]).gather(1, y[20:].clamp(min=0).unsqueeze(1))
    scores = p.log().flatten(1)
    assert max(post.tuning.scores) == pytest.approx(float(scores[:, order[order < 30][:20]].mean()), rel=1e-10)


def test_priors_under_which_the_precision_is_indefinite_are_passed_over():
    """The curvature has an eigenvalue of about −2, as a Hessian may."""
    model, x, y = problem()
    lin = co.linearize(model, (x, y), "classification")
    indefinite = co.linalg.Dense(co.GGN(lin).to_dense() - 2 * torch.eye(lin.num_parameters, dtype=DOUBLE))
    new = torch.randn(20, 4, generator=torch.Generator().manual_seed(1), dtype=DOUBLE)
    best = co.laplace(lin, indefinite, validation=(new, new[:, :3].argmax(1)))
    assert 2 < min(best.tuning.prior_precisions) < 11
    with pytest.raises(co.errors.NotPositiveSemidefiniteError, match="Dense"):
        co.evidence.validate(best, new, new[:, :3].argmax(1), prior_precisions=[0.1, 1.0])


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (slice(0, 8), "8 of the 8 held-out points are training points"),
        (slice(5, 14), "7 of the 9 held-out points are training points"),
        (slice(12, 13), "all 1 held-out points have the same target"),
        (slice(12, 24, 3), "all 4 held-out points have the same target"),
    ],
)
def test_points_that_say_little_are_named(rows, words):
    """Of 24 points and three classes in turn the first twelve are those of training."""
    x, y = torch.randn(24, 4).double(), torch.arange(24) % 3
    lin = co.linearize(torch.nn.Linear(4, 3).double(), [(x[:5], y[:5]), (x[5:12], y[5:12])], "classification")
    with pytest.warns(co.evidence.UndeterminedWarning, match=words):
        co.laplace(lin, validation=(x[rows], y[rows]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        co.laplace(lin, validation=(x[9:], y[9:]))


def test_a_search_over_both_that_ran_out_names_the_call_that_goes_on():
    """Three training points leave two of five weights to the prior, whose precision held-out points determine."""
    generator = torch.Generator().manual_seed(0)
    old, x, truth = (torch.randn(n, 5, generator=generator, dtype=DOUBLE) for n in (3, 40, 1))
    model = torch.nn.Linear(5, 1, bias=False).double()
    model.weight.data.copy_(truth @ old.mT @ old.mT.pinverse())
    lin = co.linearize(model, (old, old @ truth.mT), co.likelihoods.Gaussian(0.1))
    post, y = co.laplace(lin, co.GGN, 1.0, check_mode=False), x @ truth.mT + 0.3 * x[:, :1].cos()
    words = r"again, co.evidence.validate\(post, x, y, \('scalar', 'noise'\)\)"
    with pytest.warns(co.evidence.MaxStepsWarning, match=words):
        co.evidence.validate(post, x, y, ("scalar", "noise"), xtol=1e-14)
    with warnings.catch_warnings():  # averaging does not pay under the second noise, 500 times the best one
        warnings.simplefilter("error")
        ends = [co.evidence.validate(start, x, y, ("scalar", "noise")) for start in (post, post.with_noise(10.0))]
    assert max(ends[0].tuning.scores) == pytest.approx(max(ends[1].tuning.scores), abs=1e-6)


def test_the_training_data_are_read_once_more_whatever_noises_are_tried():
    """KFAC falls as the noise rises, so that trials need no other; the posterior that is returned has its own."""
    sizes = []
    generator = torch.Generator().manual_seed(0)
    x, new = (torch.randn(n, 3, generator=generator, dtype=DOUBLE) for n in (40, 30))
    y, z = (points.sum(1, keepdim=True) + 0.3 * torch.randn(len(points), 1, generator=generator) for points in (x, new))
    model = torch.nn.Linear(3, 1).double()
    model.register_forward_hook(lambda _, given, found: sizes.append(len(found)))
    model.weight.data.copy_(torch.linalg.lstsq(x, y).solution.mT)
    post = co.laplace(co.linearize(model, (x, y), co.likelihoods.Gaussian(0.02)), co.KFAC, 1.0, check_mode=False)
    sizes.clear()
    best = co.evidence.validate(post, new, z, "noise")
    assert sizes.count(40) <= 4 and len(best.tuning.scores) > 15
    fresh = co.laplace(best.lin, co.KFAC, 1.0, check_mode=False)
    assert torch.allclose(best.predict(new).variance, fresh.predict(new).variance, rtol=1e-10)
    assert score(best, new, z) == pytest.approx(max(best.tuning.scores), rel=1e-10)
