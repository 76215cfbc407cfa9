"""The shapes of predictions: those of the model's outputs, position by position; of no points there are none."""

import warnings

import pytest
import torch
from torch import nn

import curvops as co
from curvops import metrics
from tests.zoo_modules import Applied

DOUBLE = torch.float64


def per_pixel(last):
    """Outputs (n, 3, h, w) with the classes at dimension 1, or last."""
    layers = nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, 3, 1)
    return nn.Sequential(*layers, Applied(lambda f: f.movedim(1, -1) if last else f))


def flat(outputs=3):
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs))


PIXELS = torch.randn(6, 1, 4, 2, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
IMAGES = PIXELS[:, :, :2]
POINTS = PIXELS[:, 0].flatten(1)[:, :4]
CASES = {  # model, inputs, targets, likelihood, whether classes are at dimension 1
    "image, torch's loss": (per_pixel(False), IMAGES, torch.arange(24).view(6, 2, 2) % 3, nn.CrossEntropyLoss(), True),
    "image": (per_pixel(True), IMAGES, torch.arange(24).view(6, 2, 2) % 3, "classification", False),
    "image of numbers": (per_pixel(True), IMAGES, torch.ones(6, 2, 2, 3, dtype=DOUBLE), "regression", False),
    "sequence": (flat(), PIXELS[:, 0].mT, torch.arange(12).view(6, 2) % 3, "classification", False),
    "classes": (flat(), POINTS, torch.arange(6) % 3, "classification", False),
    "numbers": (flat(), POINTS, torch.ones(6, 3, dtype=DOUBLE), "regression", False),
    "labels": (flat(), POINTS, torch.ones(6, 3, dtype=DOUBLE), co.likelihoods.Bernoulli(), False),
    "rates": (flat(), POINTS, torch.ones(6, 3, dtype=DOUBLE), co.likelihoods.Poisson(), False),
    "means and variances": (
        flat(4),
        POINTS,
        torch.ones(6, 2, dtype=DOUBLE),
        co.likelihoods.HeteroscedasticGaussian(),
        False,
    ),
}
CURVATURES = [co.GGN, co.KFAC, co.EKFAC, co.DiagonalGGN]


def empirical(post):
    return co.sampling.empirical(post.lin, post.sample(4, torch.Generator().manual_seed(1)).unsqueeze(0))


def answers(post, x, y):
    """Everything that a posterior says of x, by name: of distributions and at each position, C last."""
    S, C = post.sample(5, torch.Generator().manual_seed(2)), post.lin.output_shape[-1]
    predicted = {"predict": post.predict(x), "drawn": post.predict(x, samples=S), "joint": post.predict(x, joint=True)}
    predicted["joint, drawn"] = post.predict(x, joint=True, samples=S)
    found = {"lin.predict": post.lin.predict(x)}
    for name, d in predicted.items():
        found |= {f"{name}: mean": d.mean, f"{name}: variance": d.variance, f"{name}: stddev": d.stddev}
        found[f"{name}: draws"] = d.rsample(torch.Size([2]))[0]
        assert d.covariance_matrix.shape == ((*d.mean.shape, C) if "joint" not in name else (d.mean.numel(),) * 2)
    found["functions"] = post.functions(x, 5, samples=S)[0]
    parts = {"": post.uncertainty(x), "drawn ": post.uncertainty(x, samples=S)}
    found |= {
        f"{name}{field}": getattr(u, field) for name, u in parts.items() for field in ("mean", "total", "epistemic")
    }
    found |= {"score": post.log_likelihood(x, y).value, "drawn score": post.log_likelihood(x, y, samples=S).value}
    if not isinstance(post.lin.likelihood.of_position, co.posterior.predictions.answers.NUMBERS):
        links = ["probit", "mc", "network"] + ["bridge", "bridge_norm"] * isinstance(
            post.lin.likelihood.of_position, co.likelihoods.Categorical
        )
        found |= {link: post.probabilities(x, link) for link in links}
        found["given draws"] = post.probabilities(x, "mc", samples=S)
    if isinstance(post.lin.likelihood.of_position, co.likelihoods.Categorical):
        p = found["probit"]
        found["nll"] = metrics.nll(p, y, reduction="none")
        if p.shape[1:] == (*y.shape[1:], C):
            found["entropy"] = metrics.predictive_entropy(p)
    return found


def posterior(case, curvature):
    model, x, y, likelihood, _ = CASES[case]
    torch.manual_seed(0)
    lin = co.linearize(model.double(), (x, y), likelihood)
    return co.laplace(lin, curvature, prior_precision=2.0, check_mode=False), x, y


@pytest.mark.parametrize(
    ("case", "curvature"),
    [*((case, co.GGN) for case in CASES), *zip(CASES, CURVATURES[1:])],
)
def test_answers_have_the_shape_of_the_model_s_outputs_and_no_points_give_empty_ones(case, curvature):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        post, x, y = posterior(case, curvature)
        kinds = [post] if curvature is not co.GGN else [post, empirical(post)]
        f = CASES[case][0](x[:3]).detach()
        last = f.movedim(1, -1) if CASES[case][-1] else f
        m = last.shape[-1] // 2 if case == "means and variances" else last.shape[-1]
        targets, rows = (*last.shape[:-1], m), (last.shape[:-1].numel(), last.shape[-1])
        for kind in kinds:
            full, none = answers(kind, x[:3], y[:3]), answers(kind, x[:0], y[:0])
            torch.testing.assert_close(full["lin.predict"], f, rtol=1e-10, atol=1e-12)
            if kind is post:
                torch.testing.assert_close(full["predict: mean"], last, rtol=1e-10, atol=1e-12)
            entropies = isinstance(post.lin.likelihood.of_position, co.likelihoods.Categorical)
            numbers = ("score", "drawn score", "nll", "entropy")
            numbers += ("total", "epistemic", "drawn total", "drawn epistemic") if entropies else ()
            for name, value in full.items():
                expected = f.shape
                if name.startswith("joint"):
                    expected = rows
                elif name.startswith(("predict", "drawn: ")):
                    expected = last.shape
                elif name in numbers:
                    expected = last.shape[:-1]
                elif name.endswith(("mean", "total", "epistemic")) and m < last.shape[-1]:
                    expected = targets
                assert value.shape == expected, name
                assert none[name].shape == (0, *value.shape[1:]) and none[name].dtype == value.dtype, name
        assert len(post.log_likelihood(x[:0], y[:0], joint=True).value) == 0


def test_channels_first_or_last_are_the_same_numbers_and_metrics_take_both():
    first, last = per_pixel(False).double(), per_pixel(True).double()
    last.load_state_dict(first.state_dict())
    x, y = PIXELS, torch.arange(48).view(6, 4, 2) % 3
    kinds = ((first, nn.CrossEntropyLoss()), (last, "classification"))
    theirs, ours = (
        co.laplace(co.linearize(model, (x, y), likelihood), co.KFAC, 2.0, check_mode=False)
        for model, likelihood in kinds
    )
    exact = {"rtol": 1e-10, "atol": 1e-12}
    P, Q = theirs.probabilities(x), ours.probabilities(x)
    torch.testing.assert_close(P.movedim(1, -1), Q, **exact)
    torch.testing.assert_close(theirs.lin.outputs().movedim(1, -1), ours.lin.outputs(), **exact)
    weights = ours.sample(3, torch.Generator().manual_seed(0))
    drawn = theirs.functions(x, 3, samples=weights)
    torch.testing.assert_close(drawn.movedim(2, -1), ours.functions(x, 3, samples=weights), **exact)
    torch.testing.assert_close(theirs.predict(x).variance, ours.predict(x).variance, **exact)
    rows = Q.flatten(0, -2), y.flatten()
    for score in (metrics.nll, metrics.brier, metrics.accuracy, metrics.ece):
        assert score(P, y) == score(Q, y) == score(*rows)
    f = ours.lin.predict(x)
    assert metrics.temperature(f, y) == metrics.temperature(f.movedim(-1, 1), y)
    assert metrics.nll(P, y, reduction="none").shape == y.shape
    with pytest.raises(ValueError, match=r"score values.movedim\(1, -1\)\[keep\], labels\[keep\]"):
        metrics.nll(P, y.masked_fill(y == 0, 255))
    with pytest.raises(ValueError, match=r"put last by p.movedim\(1, -1\)"):
        metrics.predictive_entropy(P)
    with pytest.raises(ValueError, match="may have their classes at dimension 1 or last"):
        metrics.nll(Q[:, :3, 0], y[:, :3, 0])
    with pytest.raises(ValueError, match=r"\(N, ..., C\) or \(N, C, ...\) values"):
        metrics.nll(Q, y[:, :3])


def test_products_with_a_jacobian_of_no_points():
    post, x, _ = posterior("classes", co.GGN)
    J, D = post.lin.jacobian(x[:0]), post.lin.num_parameters
    assert (J @ torch.ones(D, 2, dtype=DOUBLE)).shape == (0, 2)
    torch.testing.assert_close(J.mT @ torch.ones(0, 2, dtype=DOUBLE), torch.zeros(D, 2, dtype=DOUBLE))
    assert J.to_dense().shape == J.formed().mT.shape == (0, D)
    assert co.TangentKernel(post.lin, 1.0, x[:0]).to_dense().shape == (0, 0)


@pytest.mark.parametrize("case", ["image, torch's loss", "image", "sequence"])
def test_scores_take_targets_as_training_did(case):
    """The log-likelihood of each pixel at the mean, where the posterior is nearly a point."""
    model, x, y, _, first = CASES[case]
    lin = posterior(case, co.GGN)[0].lin
    post = co.laplace(lin, co.KFAC, prior_precision=1e14, check_mode=False)
    f = model(x).movedim(1, -1) if first else model(x)
    expected = f.detach().log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(post.log_likelihood(x, y).value, expected, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="there are 6 inputs, but 5 targets"):
        post.log_likelihood(x, y[:5])
