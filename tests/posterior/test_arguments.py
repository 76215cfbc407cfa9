"""Wrong calls of a posterior: each is refused by the name of the argument, before anything is computed."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import curvops as co

DOUBLE = torch.float64


@pytest.fixture(scope="module")
def lin():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(12, 3, dtype=DOUBLE)
    return co.linearize(model, (x, (x[:, 0] > 0).long()), "classification")


@pytest.fixture(scope="module")
def post(lin):
    return co.laplace(lin, prior_precision=1.0, check_mode=False)


X = torch.ones(2, 3, dtype=DOUBLE)
DRAWS = "samples must be"
WRONG_LAPLACE = {
    "a module": (lambda lin: co.laplace(nn.Linear(3, 2)), TypeError, "linearised network"),
    "a curvature first": (lambda lin: co.laplace(co.GGN(lin)), TypeError, "linearised network"),
    "a word": (lambda lin: co.laplace(lin, "ggn"), TypeError, "curvature.*'ggn'"),
    "the prior second": (lambda lin: co.laplace(lin, 1.0), TypeError, "curvature.*1.0"),
    "a tensor": (lambda lin: co.laplace(lin, torch.eye(26, dtype=DOUBLE)), TypeError, "co.linalg.Dense"),
    "a function": (lambda lin: co.laplace(lin, lambda lin: co.GGN(lin)), TypeError, "call it"),
    "another class": (lambda lin: co.laplace(lin, nn.Linear), TypeError, "no operator class"),
    "a kernel": (lambda lin: co.laplace(lin, co.TangentKernel), ValueError, "shape"),
    "a part": (lambda lin: co.laplace(lin, co.GGN(lin)[:3, :3]), ValueError, "shape"),
    "another dtype": (lambda lin: co.laplace(lin, co.KFAC(lin).to(torch.float32)), ValueError, "float32.*convert"),
    "a prior in words": (lambda lin: co.laplace(lin, prior_precision="1"), TypeError, "prior_precision.*'1'"),
    "no prior": (lambda lin: co.laplace(lin, prior_precision=None), TypeError, "prior_precision.*None"),
    "a list": (lambda lin: co.laplace(lin, prior_precision=[1.0] * 26), TypeError, "prior_precision"),
    "a truth": (lambda lin: co.laplace(lin, prior_precision=True), TypeError, "prior_precision"),
    "a matrix": (lambda lin: co.laplace(lin, prior_precision=torch.eye(26)), ValueError, "prior_precision.*26"),
    "check_mode": (lambda lin: co.laplace(lin, check_mode="no"), TypeError, "check_mode"),
}
WRONG_USES = {
    "no draws": (lambda post: post.sample(0), ValueError, "k must be at least 1"),
    "negative": (lambda post: post.sample(-1), ValueError, "k must be at least 1"),
    "a fraction of a draw": (lambda post: post.sample(2.5), TypeError, "k must be a whole number"),
    "a float": (lambda post: post.sample(2.0), TypeError, "k must be a whole number"),
    "a shape": (lambda post: post.sample((2, 3)), TypeError, "k must be a whole number"),
    "a truth": (lambda post: post.sample(True), TypeError, "k must be a whole number"),
    "a seed": (lambda post: post.sample(3, generator=0), TypeError, "manual_seed"),
    "rtol of a sample": (lambda post: post.sample(3, rtol=-1.0), ValueError, "rtol"),
    "rtol of zero": (lambda post: post.sample(3, rtol=0.0), ValueError, "rtol"),
    "rtol in words": (lambda post: post.sample(3, rtol="low"), TypeError, "rtol"),
    "draws as joint": (lambda post: post.predict(X, post.sample(2)), TypeError, "joint"),
    "a number of draws": (lambda post: post.predict(X, samples=100), TypeError, rf"{DRAWS}.*post.sample"),
    "an array": (lambda post: post.predict(X, samples=np.zeros((2, 26))), TypeError, DRAWS),
    "one draw": (lambda post: post.predict(X, samples=post.sample(1)[0]), ValueError, DRAWS),
    "an empty block": (lambda post: post.predict(X, samples=torch.zeros(0, 26, dtype=DOUBLE)), ValueError, DRAWS),
    "draws in float32": (lambda post: post.predict(X, samples=torch.zeros(2, 26)), ValueError, "float32.*convert"),
    "rtol of predict": (lambda post: post.predict(X, rtol=float("nan")), ValueError, "rtol"),
    "inputs as a list": (lambda post: post.predict(X.tolist()), TypeError, "make lists of numbers torch.tensor"),
    "a link": (lambda post: post.probabilities(X, "logit"), ValueError, "probit"),
    "draws of probabilities": (lambda post: post.probabilities(X, "mc", 100), TypeError, DRAWS),
    "seed of probabilities": (lambda post: post.probabilities(X, "mc", generator=0), TypeError, "manual_seed"),
    "rtol of the evidence": (lambda post: post.log_evidence(-0.1), ValueError, "rtol"),
    "seed of the evidence": (lambda post: post.log_evidence(generator=1), TypeError, "manual_seed"),
    "rtol of the count": (lambda post: post.effective_parameters(0), ValueError, "rtol"),
    "a prior in words": (lambda post: post.with_prior("1"), TypeError, "prior_precision"),
    "a negative prior": (lambda post: post.with_prior(-1), ValueError, "prior_precision"),
    "a grid of one": (lambda post: co.evidence.grid(post, 1.0), TypeError, "prior_precisions"),
    "a grid of words": (lambda post: co.evidence.grid(post, ["1"]), TypeError, "prior_precisions"),
    "a grid of matrices": (lambda post: co.evidence.grid(post, torch.ones(2, 2)), ValueError, "prior_precisions"),
    "a grid with infinity": (lambda post: co.evidence.grid(post, [1, float("inf")]), ValueError, "prior_precisions"),
    "seed of a grid": (lambda post: co.evidence.grid(post, [1.0], generator=0), TypeError, "manual_seed"),
    "grid of no posterior": (lambda post: co.evidence.grid(post.lin, [1.0]), TypeError, "posterior"),
    "maximize of none": (lambda post: co.evidence.maximize(post.lin), TypeError, "posterior"),
    "xtol": (lambda post: co.evidence.maximize(post, xtol=0.0), ValueError, "xtol"),
    "rtol of maximize": (lambda post: co.evidence.maximize(post, rtol=float("inf")), ValueError, "rtol"),
}


@pytest.mark.usefixtures("annotations_unchecked")
@pytest.mark.parametrize("call", WRONG_LAPLACE)
def test_a_posterior_of_something_else_is_refused_by_name(lin, call):
    function, error, names = WRONG_LAPLACE[call]
    with pytest.raises(error, match=names):
        function(lin)


@pytest.mark.usefixtures("annotations_unchecked")
@pytest.mark.parametrize("call", WRONG_USES)
def test_a_wrong_call_is_refused_by_name(post, call):
    function, error, names = WRONG_USES[call]
    with pytest.raises(error, match=names):
        function(post)


def test_arrays_of_numpy_are_inputs_and_targets(post):
    x, y = torch.randn(5, 3, dtype=DOUBLE), torch.arange(5) % 2
    torch.testing.assert_close(post.predict(x.numpy()).variance, post.predict(x).variance, rtol=0, atol=0)
    given = ((x.numpy(), y.numpy()), (x.float().numpy(), y.int().numpy()), (x.float(), y))
    found = [post.log_likelihood(*each, generator=torch.Generator().manual_seed(0)).value for each in given]
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1], found[2], rtol=0, atol=0)


@pytest.mark.usefixtures("annotations_unchecked")
def test_numbers_of_numpy_are_numbers(lin):
    post = co.laplace(lin, prior_precision=np.float32(1.0), check_mode=False)
    assert post.sample(np.int64(2)).shape == (2, 26)
    assert post.log_evidence(rtol=np.float32(0.01)).value.isfinite()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda post: pickle.loads(pickle.dumps(post))])
@pytest.mark.parametrize("curvature", [co.GGN, co.KFAC])
def test_a_posterior_can_be_copied_and_pickled_before_and_after_its_use(lin, curvature, copied):
    for used in (False, True):
        post = co.laplace(lin, curvature, check_mode=False)
        if used:
            post.log_evidence(), post.sample(1), post.predict(X).variance, post.mode_gap
        other = copied(post)
        for quantity in (lambda p: p.log_evidence().value, lambda p: p.predict(X).variance, lambda p: p.mean):
            torch.testing.assert_close(quantity(other), quantity(post), rtol=1e-10, atol=1e-12)
        seeds = (torch.Generator().manual_seed(0) for _ in range(2))
        torch.testing.assert_close(*(p.sample(2, seed) for p, seed in zip((post, other), seeds)), rtol=1e-8, atol=1e-8)
