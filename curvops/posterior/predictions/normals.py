"""Normal distributions of the outputs: gpytorch's, without its floor under variances.

gpytorch raises each variance to at least `settings.min_variance` (1e-6 in float32, 1e-10 in float64), warns that it was
negative and cuts its gradient; for targets of order 1e-3 this affects most variances. Results computed from a
distribution of these classes (slices, sums, the marginal of a gpytorch likelihood) belong to these classes, too.
"""

from __future__ import annotations

from typing import Any

import torch
from gpytorch import settings
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.checks import check_options
from curvops.linalg import Dense
from curvops.summary import FIRST


class Normal(MultivariateNormal):
    """gpytorch's `MultivariateNormal` with unmodified variances, at any scale."""

    @property
    def variance(self) -> Tensor:
        """The variances, the diagonal of the covariance."""
        entries = self.lazy_covariance_matrix.diagonal(dim1=-1, dim2=-2)
        return entries.expand(self._batch_shape + self._event_shape)

    def confidence_region(self) -> tuple[Tensor, Tensor]:
        """Return the mean less and plus two standard deviations, with its gradient."""
        spread = 2 * self.stddev
        return self.mean - spread, self.mean + spread

    def __repr__(self) -> str:
        if self.mean.ndim != 2 or isinstance(self, MultitaskMultivariateNormal):
            return super().__repr__()
        count, few = len(self.mean), zip(self.mean[:FIRST].tolist(), self.stddev[:FIRST].tolist())
        rows = [", ".join(f"{m:.4g} ± {s:.2g}" for m, s in zip(*row)) for row in few]
        more = [f"… {count} points"] if count > FIRST else []
        return f"{type(self).__name__}({'; '.join([*rows, *more])})"

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density of values (..., *event), in nats; raise ValueError for values of another shape."""
        _check_event(value, self.loc.shape[-1:])
        with settings.fast_computations.log_prob(True):  # uses the operator; otherwise a factor with some jitter
            density: Tensor = super().log_prob(value)
        return density

    def __radd__(self, other: Any) -> MultivariateNormal:  # also if ours is on the right of gpytorch's own
        return self if isinstance(other, int | float) and other == 0 else self + other


class MultitaskNormal(MultitaskMultivariateNormal, Normal):
    """gpytorch's `MultitaskMultivariateNormal` with unmodified variances, at any scale."""

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density of values (..., N, C), in nats; raise ValueError for values of another shape."""
        _check_event(value, self.event_shape)
        return super().log_prob(value)

    def __getitem__(self, index: Any) -> MultivariateNormal:
        normal = super().__getitem__(index)
        mean, covariance = normal.mean, normal.lazy_covariance_matrix
        if isinstance(normal, MultitaskMultivariateNormal):
            return MultitaskNormal(mean, covariance, interleaved=normal._interleaved)
        return Normal(mean, covariance)

    def to_data_independent_dist(self, jitter_val: float = 0.0) -> MultivariateNormal:
        """Return each point's own distribution over its outputs, without the 1e-4 that gpytorch adds to variances."""
        normal = super().to_data_independent_dist(jitter_val)
        return Normal(normal.mean, Dense(normal.covariance_matrix, psd=True))


class SampledNormal(Normal):
    """A predictive distribution whose covariances are means over k draws of the weights, with errors of the variances.

    In what gpytorch makes of it (slices, sums, multiples) `draws` is None: take the errors first.

    Args:
        mean: the means, (C,), (N, C) or the mean of a joint distribution.
        covariance_matrix: the covariances, one for each point or a joint one.
        validate_args: as in gpytorch.
        draws: k, the number of draws of the weights.

    Examples:
        >>> found = post.predict(x, samples=post.sample(200))
        >>> low, high = found.variance_interval()
        >>> bool((low < found.variance).all())
        True
    """

    def __init__(
        self,
        mean: Float[Tensor, "*N C"],
        covariance_matrix: LinearOperator | Tensor,
        validate_args: bool = False,
        draws: int | None = None,
    ) -> None:
        super().__init__(mean, covariance_matrix, validate_args=validate_args)
        self.draws = draws

    def _known_draws(self) -> int:
        if self.draws is None:
            raise ValueError("only the result of predict(x, samples=...) has errors: this was computed from it.")
        return self.draws

    @property
    def variance_stderr(self) -> Float[Tensor, "*N C"]:
        """The standard error of each variance, √(2/k) times the variance: k σ̂²/σ² is χ² with k degrees of freedom."""
        return self.variance * (2 / self._known_draws()) ** 0.5

    def variance_interval(self, level: float = 0.95) -> tuple[Float[Tensor, "*N C"], Float[Tensor, "*N C"]]:
        """Return the exact interval of each variance from quantiles of χ²; `level` is in (0, 1)."""
        from scipy.special import chdtri  # a slow import that few calls need

        check_options(level=level)
        k, tail = self._known_draws(), (1 - level) / 2
        low, high = (k / float(chdtri(k, q)) for q in (tail, 1 - tail))
        return self.variance * low, self.variance * high


def _check_event(value: Tensor, event: torch.Size) -> None:
    """Raise ValueError if gpytorch would broadcast (N, 1) against N, or reshape (C, N) to (N, C)."""
    if value.shape[-len(event) :] != event:
        raise ValueError(f"values must end with {tuple(event)}, got {tuple(value.shape)}: transpose them.")
