"""Posteriors with structured curvatures: what they need not iterate, and share. Their answers: `test_combinations.py`.

Tests `log_evidence.py`.
"""

import pytest

import curvops as co
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
