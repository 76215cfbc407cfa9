"""Posteriors with structured curvatures: what they need not iterate, and share. Their answers: `test_combinations.py`.

Tests `log_evidence.py`.
"""

from unittest.mock import patch

import pytest
import torch

import curvops as co
from tests.posterior.trained import problem
from tests.randomness import seeded

CURVATURES = {
    "diagonal": co.DiagonalGGN,
    "kfac": co.KFAC,
    "ekfac": co.EKFAC,
    "block_diagonal": co.BlockDiagonal,
    "low_rank": lambda lin: co.low_rank(co.GGN(lin), rank=10, generator=seeded()),
    "low_rank_with_diagonal": lambda lin: co.low_rank(co.GGN(lin), rank=10, generator=seeded()).with_diagonal(
        co.DiagonalGGN(lin).diagonal()
    ),
}


@pytest.mark.parametrize("name", CURVATURES)
def test_tuning_and_samples_iterate_nowhere(lin, name):
    curvature = CURVATURES[name](lin)
    post = co.evidence.maximize(co.laplace(lin, curvature, prior_precision=1.0, check_mode=False))
    curve = co.evidence.grid(post, [0.5 * float(post.prior_precision), 2 * float(post.prior_precision)])
    assert all(point.value < post.log_evidence().value for point in curve)
    assert post.log_evidence().log_determinant_ratio.matvecs == 0
    assert post.deviations(5, generator=seeded()).method == "closed form"


def test_a_last_layer_is_a_selection():
    model, x, y = problem()
    lin = co.linearize(model, (x, y), "classification", parameters="last_layer")
    post = co.laplace(lin, co.GGN, prior_precision=1.0, check_mode=False)
    whole = co.GGN(co.linearize(model, (x, y), "classification")).to_dense()[-21:, -21:]
    torch.testing.assert_close(post.curvature.to_dense(), whole, rtol=1e-10, atol=1e-10)
    assert co.KFAC(lin).shape == (21, 21)
    assert float(post.predict(x[:2]).variance.min()) > 0


def test_all_answers_share_one_factorisation(lin):
    with patch.object(torch.linalg, "cholesky_ex", wraps=torch.linalg.cholesky_ex) as factorised:
        everything = co.Subnetwork(co.GGN(lin), torch.arange(lin.num_parameters))
        post = co.laplace(lin, everything, 1.3, check_mode=False)
        post.log_evidence()
        post.effective_parameters()
        post.sample(2, seeded())
        _ = post.predict(torch.ones(2, 4, dtype=torch.float64)).variance
        assert factorised.call_count == 1
