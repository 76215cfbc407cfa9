"""The heteroscedastic Gaussian likelihood: real-valued targets whose variances the network predicts, too."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.network.data.inputs import require_finite
from curvops.network.likelihoods.likelihood import Independent, Outputs, Weights, normal_like, weigh


class HeteroscedasticGaussian(Independent):
    """The Gaussian likelihood of targets y ~ N(mu, sigma^2) with predicted variances: f = (mu_1 .. mu_m, s_1 .. s_m).

    The 2m outputs are first m means, then m log variances s = log sigma^2; targets are (n, m). H is the output Fisher
    diag(1 / sigma^2, 1/2), which is positive; the Hessian of -log p is not (at mu = s = 0 and y = 2 it has an
    eigenvalue of -0.56). Variances must be representable: |s| < 87 in float32.

    Examples:
        >>> likelihood = co.likelihoods.HeteroscedasticGaussian()
        >>> lin = co.linearize(nn.Linear(2, 2), (x, torch.zeros(8, 1)), likelihood)
    """

    always_curved = True

    def __repr__(self) -> str:
        return "HeteroscedasticGaussian()"

    def log_prob(self, f: Outputs, y: Tensor, w: Weights = None) -> Float[Tensor, " n"]:
        z, s = _standardise(f, y)
        return weigh(-0.5 * (z.square() + s + math.log(2 * math.pi)), w).sum(-1)

    def residual(self, f: Outputs, y: Tensor, w: Weights = None) -> Outputs:
        z, s = _standardise(f, y)
        return weigh(_score(z, s), w)

    def curvature(self, f: Outputs, y: Tensor) -> Tensor:
        s = f.chunk(2, -1)[1]
        return torch.cat([(-s).exp(), torch.full_like(s, 0.5)], -1)

    def curvature_root(self, f: Outputs, y: Tensor) -> Tensor:
        s = f.chunk(2, -1)[1]
        return torch.cat([(-0.5 * s).exp(), torch.full_like(s, math.sqrt(0.5))], -1)

    def sample(self, f: Outputs, generator: torch.Generator | None = None) -> Tensor:
        mu, s = f.detach().chunk(2, -1)
        return mu + (0.5 * s).exp() * normal_like(mu, generator)

    def mc_residual(
        self,
        f: Outputs,
        y: Tensor,
        w: Weights = None,
        generator: torch.Generator | None = None,
    ) -> Outputs:
        s = f.chunk(2, -1)[1]
        # Drawn in standardised form: mu + sigma z would round z away if sigma is far below mu.
        return weigh(_score(normal_like(s, generator), s), None if w is None else w.sqrt())

    def mean(self, f: Outputs) -> Float[Tensor, "n m"]:
        return f.chunk(2, -1)[0]

    def check_targets(self, y: Tensor, num_outputs: int | None = None) -> None:
        if not y.is_floating_point():
            raise TypeError(f"HeteroscedasticGaussian targets must be floating-point; given {y.dtype}. Use y.float().")
        if num_outputs is not None and num_outputs % 2:
            raise ValueError(
                "HeteroscedasticGaussian needs m means and m log variances, an even number of outputs; the model has "
                f"{num_outputs}. For a variance that is not predicted use Gaussian."
            )
        if y.ndim != 2 or (num_outputs is not None and 2 * y.shape[1] != num_outputs):
            m = "m" if num_outputs is None else str(num_outputs // 2)
            raise ValueError(
                f"HeteroscedasticGaussian targets have shape (n, {m}), one column for each of the {m} means among the "
                f"outputs; given {tuple(y.shape)}."
            )
        require_finite("targets", y)


def _standardise(f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return (y - mu) / sigma and s, (n, m) each."""
    mu, s = f.chunk(2, -1)
    return (y - mu) * (-0.5 * s).exp(), s


def _score(z: Tensor, s: Tensor) -> Tensor:
    """Return the residual (n, 2m) at standardised targets z."""
    return torch.cat([-z * (-0.5 * s).exp(), 0.5 * (1 - z.square())], -1)
