"""Do draws have the covariance that they promise?"""

from scipy.stats import norm

DRAWS = 20_000
ALARM = 1e-6  # false-alarm rate of one test over all entries of its covariance


def assert_covariance(draws, covariance):
    """Entries of the sample covariance are near normal with variance (S_ij² + S_ii S_jj)/k: Bonferroni over them."""
    count, k = covariance.numel(), draws.shape[1]
    variances = covariance.diagonal()
    scale = ((covariance.square() + variances[:, None] * variances) / k).sqrt()
    z = ((draws @ draws.mT / k - covariance) / scale).abs().max()
    assert z < norm.isf(ALARM / 2 / count), f"{z:.2f} standard errors"
