"""The cache of `terms.py`: computed once, forgotten by value, counted by the budget, copied without its lock.

Tests `terms.py`.
"""

import copy
import gc
import operator
import pickle
from functools import partial

import pytest
import torch

import curvops as co
from curvops.posterior.terms import CurvatureCache
from curvops.storage import record_of
from tests.posterior.trained import problem

DOUBLE = torch.float64


def gaussian(noise=0.3):
    model, x, y = problem("regression")
    return co.linearize(model, (x, y), co.likelihoods.Gaussian(noise=noise))


@pytest.fixture
def cache():
    lin = gaussian()
    return CurvatureCache(lin, co.GGN(lin))


def test_a_value_is_computed_once_while_it_fits(cache):
    made = []
    for bound in (1, 1, 2, 2, 1):
        found = cache.get("quadrature", lambda bound=bound: made.append(bound) or bound, partial(operator.le, bound))
        assert found >= bound
    assert made == [1, 2]
    assert cache.get("formed", lambda: None) is None and cache.get("formed", lambda: 3) == 3


@pytest.mark.parametrize(
    "change", [lambda noise: noise.mul_(2), lambda noise: noise.data.mul_(2), lambda noise: noise.fill_(0.6)]
)
def test_what_depends_on_the_likelihood_is_forgotten_by_value(cache, change):
    """A change through .data leaves the version as it is; the same value again is no change."""
    before = cache.log_likelihood()
    cache.of_data["J Jᵀ"] = kept = torch.ones(2)
    cache.lin.likelihood.noise.fill_(0.3)
    assert cache.peek("log likelihood") is before
    change(cache.lin.likelihood.noise)
    assert cache.peek("log likelihood") is None
    torch.testing.assert_close(cache.log_likelihood(), cache.lin.log_likelihood(), rtol=0, atol=0)
    assert cache.of_data["J Jᵀ"] is kept


def test_a_curvature_that_does_not_follow_is_refused():
    lin = gaussian()
    cache = CurvatureCache(lin, co.KFAC(lin))
    cache.log_likelihood()
    lin.likelihood.noise.mul_(2)
    with pytest.raises(ValueError, match="has changed since KFAC was built"):
        cache.peek("log likelihood")


def test_all_eigenvalues_are_counted():
    lin = gaussian()
    room = lin.memory.room()
    post = co.laplace(lin, co.GGN, 1.0, check_mode=False)
    post.log_evidence()
    assert lin.memory.room() <= room - 8 * lin.num_parameters**2


def test_what_depends_on_the_data_alone_is_shared_while_one_holds_it(cache):
    other = CurvatureCache(cache.lin.with_likelihood(co.likelihoods.Gaussian(0.7)), cache.curvature)
    other.of_data["J Jᵀ"] = torch.ones(2)
    lin, curvature, elsewhere = cache.lin, cache.curvature, gaussian()
    assert "J Jᵀ" in cache.of_data and "J Jᵀ" not in CurvatureCache(elsewhere, co.GGN(elsewhere)).of_data
    del cache.of_data, other
    gc.collect()
    assert CurvatureCache(lin, curvature).of_data == {}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_copies_keep_the_values(cache, copied):
    cache.generator = torch.Generator()
    cache.gradient()
    again = copied(cache)
    assert again.generator is None and again.lock is not cache.lock
    torch.testing.assert_close(again.peek("gradient"), cache.peek("gradient"), rtol=0, atol=0)
    again.put("gradient", torch.zeros(1))
    assert len(cache.peek("gradient")) == cache.lin.num_parameters


@pytest.mark.parametrize("scaled", [False, True])
def test_sketches_and_the_quadrature_go_into_a_record_and_back(scaled):
    model, x, y = problem("regression")
    lin = co.linearize(model, (x, y), co.likelihoods.Gaussian(noise=1.0))
    prior = torch.linspace(0.1, 0.2, lin.num_parameters, dtype=DOUBLE) if scaled else 0.1
    post = co.laplace(lin, co.GGN, prior_precision=prior, check_mode=False)
    made = post.precision.preconditioner(8, torch.Generator().manual_seed(0))
    post.cache.put("sketch", (post.prior.diagonal, 8, made))
    quadrature = co.linalg.spectral_quadrature(co.GGN(lin), shift=0.1, generator=torch.Generator().manual_seed(0))
    post.cache.put("quadrature", (0.1, 0.01, quadrature))
    again = CurvatureCache(lin, post.curvature)
    room = lin.memory.room()
    again.recall(record_of(post.cache.state()))
    assert lin.memory.room() < room
    v = torch.ones(lin.num_parameters, dtype=DOUBLE)
    torch.testing.assert_close(again.peek("sketch")[2] @ v, made @ v, rtol=0, atol=0)
    assert again.peek("sketch")[1] == 8 and again.peek("quadrature")[:2] == (0.1, 0.01)
    torch.testing.assert_close(again.peek("quadrature")[2].logdet(0.5).value, quadrature.logdet(0.5).value)
