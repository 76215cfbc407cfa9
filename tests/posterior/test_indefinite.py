"""Posteriors whose curvature may have negative eigenvalues."""

import dataclasses
import functools
import re

import pytest
import torch

import curvops as co
from curvops.errors import NotPositiveDefiniteError, NotPositiveSemidefiniteError
from tests.linalg.known import Known
from tests.posterior.trained import problem


@pytest.fixture(scope="module")
def lin():
    """Not at a minimum: the Hessian's least eigenvalue is about −15."""
    torch.manual_seed(0)
    model, x, y = problem(steps=1)
    return co.linearize(model, (x, y), "classification")


@functools.cache
def hessian(lin):
    """Its matrix."""
    return co.Hessian(lin).to_dense()


def least(lin):
    return float(torch.linalg.eigvalsh(hessian(lin))[0])


@pytest.mark.parametrize("prior", [1e-3, "vector"])
def test_a_hessian_under_a_small_prior_is_refused_at_the_door(lin, prior):
    assert least(lin) < -0.5
    given = torch.linspace(1e-3, 2e-3, lin.num_parameters, dtype=torch.float64) if prior == "vector" else prior
    with pytest.raises(NotPositiveSemidefiniteError, match="eigenvalue of -.*prior_precision of") as refused:
        co.laplace(lin, co.Hessian, prior_precision=given, check_mode=False)
    needed = float(re.search(r"prior_precision of ([\d.e+-]+)", str(refused.value))[1])
    assert -least(lin) < needed < -1.1 * least(lin)
    post = co.laplace(lin, co.Hessian, prior_precision=needed, check_mode=False)
    with pytest.raises(NotPositiveSemidefiniteError, match="prior_precision of"):
        post.with_prior(1e-3)
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    J = lin.jacobian(x).to_dense()
    expected = J @ torch.linalg.solve(hessian(lin) + needed * torch.eye(len(lin.theta)).double(), J.mT)
    torch.testing.assert_close(post.predict(x, joint=True).covariance_matrix, expected, rtol=1e-8, atol=1e-10)
    assert post.sample(2).isfinite().all()


def test_an_indefinite_precision_that_passed_the_door_is_refused_by_every_use(lin):
    """A short Lanczos run cannot see everything: here it is left out."""
    sound = co.laplace(lin, co.Hessian, prior_precision=-2 * least(lin), check_mode=False)
    post = dataclasses.replace(sound, prior=dataclasses.replace(sound.prior, precision=torch.tensor(1e-3).double()))
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for use in (
        lambda: post.predict(x).variance,
        lambda: post.predict(x, joint=True).covariance_matrix,
        lambda: post.predict(x, joint=True).sample(),
        lambda: post.probabilities(x),
        lambda: post.probabilities(x, link="mc"),
        lambda: post.sample(2),
        post.log_evidence,
        post.effective_parameters,
    ):
        with pytest.raises((NotPositiveDefiniteError, NotPositiveSemidefiniteError)):
            use()
    for use in (post.log_evidence, post.effective_parameters):
        with pytest.raises(NotPositiveSemidefiniteError, match="Hessian: .*use the GGN"):
            use()


@pytest.mark.parametrize(("corner", "message"), [(3.0, "not symmetric"), (float("nan"), "NaN")])
def test_a_curvature_that_is_not_symmetric_or_not_finite_is_refused_at_the_door(lin, corner, message):
    """A matrix of one's own that is said to be symmetric, and is not."""
    matrix = co.GGN(lin).to_dense().clone()
    matrix[0, -1] = corner
    with pytest.raises(ValueError, match=f"Known: .*{message}"):
        co.laplace(lin, Known(matrix), prior_precision=1.0, check_mode=False)
