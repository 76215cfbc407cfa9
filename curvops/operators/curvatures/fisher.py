"""Fishers from residuals: the empirical one at the true targets, and draws of targets for the Monte-Carlo one."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.checks import check_flag, check_generator, checked_whole
from curvops.network.data.batches import Batch
from curvops.network.likelihoods.output_fisher import Empirical, Exact, FromResiduals, OutputFisher, Sampled, check_kind
from curvops.network.walks.passes import Passes
from curvops.operators.curvatures.curvature import Curvature
from curvops.operators.linearized.linearization import Linearization


class EmpiricalFisher(Curvature):
    """The empirical Fisher F = Σ_n g_n g_nᵀ (D, D), g_n = J_nᵀ r_n the gradient of point n's negative log-likelihood.

    It is *not* an estimate of the GGN (Kunstner, Hennig & Balles 2019): choose it for second moments of gradients, not
    for uncertainty. Class weights multiply r_n, sample weights the outer product: a point of weight two counts as two
    (a sequence with weights for its positions by the largest, the others relative to it). Cost to build: nothing at the
    call; the first product computes the rows g_n by layer, for 2/3 of a gradient. A product is two matrix products a
    layer, 0.5–1 gradients a vector whatever C (`print(op.plan)`); per token T rows a sequence, (1 + T) / 3 to compute.
    While a gradient for a hyperparameter is recorded it costs as much as the GGN's. Memory: the rows that the plan
    keeps, within the rest of the budget.

    Args:
        lin: the linearised network.
        per_token: give each token of a sequence its own outer product; else g_n sums over the tokens.

    Raises:
        TypeError: per_token is neither True nor False.
    """

    OPTIONS = ("per_token",)

    def __init__(self, lin: Linearization, per_token: bool = False) -> None:
        check_flag("per_token", per_token)
        super().__init__(lin.theta, *lin.likelihood.hyperparameters, lin=lin, per_token=per_token)

    @property
    def output(self) -> OutputFisher:
        """H_n = r_n r_nᵀ."""
        return Empirical(self.likelihood, self.lin.positions_apart(self._kwargs["per_token"]))

    @property
    def rows(self) -> Passes | None:
        return self.lin.gradient_rows(self.likelihood, self._kwargs["per_token"])


def sampled_residuals(lin: Linearization, mc_samples: int, generator: torch.Generator | None) -> Float[Tensor, "M N C"]:
    """Residuals at M targets a point drawn from the model, divided by √M. One forward pass."""
    checked_whole("mc_samples", mc_samples, kind="a whole number of targets a point")
    check_generator(generator)
    with torch.no_grad():
        walked, line_up = [(batch, J.outputs) for batch, J in lin.passes.each(0)], lin.passes.line_up
        f, y = line_up([f for _, f in walked]), line_up([batch.targets for batch, _ in walked])
        weights = [batch.weights for batch, _ in walked if batch.weights is not None]
        return _drawn(lin, mc_samples, generator, f, y, line_up(weights) if weights else None)


def _drawn(
    lin: Linearization, mc_samples: int, generator: torch.Generator | None, f: Tensor, y: Tensor, w: Tensor | None
) -> Float[Tensor, "M N C"]:
    """All points at once: equal seeds draw alike however the data are batched."""
    draws = [lin.likelihood.mc_residual(f, y, w, generator) for _ in range(mc_samples)]
    return torch.stack(draws) / mc_samples**0.5


class DrawnInPassing(FromResiduals):
    """`Sampled`, its targets drawn when first asked for: in the walk's own pass where that is of all points at once."""

    def __init__(self, lin: Linearization, mc_samples: int, generator: torch.Generator | None) -> None:
        self.lin, self.mc_samples, self.generator = lin, mc_samples, generator
        self.likelihood = lin.likelihood
        self._found: Sampled | None = None

    def state(self) -> Tensor | None:
        """Return the draws; None before there are any."""
        return None if self._found is None else self._found.draws

    def recall(self, draws: Tensor | None) -> None:
        """Take what was drawn before."""
        if draws is not None:
            self._found = Sampled(self.likelihood, draws)

    def num_columns(self, num_outputs: int) -> int:
        return self.mc_samples

    def root_product(self, f: Tensor, z: Tensor, batch: Batch) -> Tensor:
        return self._sampled(f, batch).root_product(f, z, batch)

    def root_transpose_product(self, f: Tensor, u: Tensor, batch: Batch) -> Tensor:
        return self._sampled(f, batch).root_transpose_product(f, u, batch)

    def columns(self, f: Tensor, batch: Batch, start: int, stop: int) -> Tensor:
        return self._sampled(f, batch).columns(f, batch, start, stop)

    def _sampled(self, f: Tensor, batch: Batch) -> Sampled:
        if self._found is None:
            with torch.no_grad():
                if len(f) == self.lin.num_data:
                    given = f.detach(), batch.targets, batch.weights
                    draws = _drawn(self.lin, self.mc_samples, self.generator, *given)
                else:
                    draws = sampled_residuals(self.lin, self.mc_samples, self.generator)
            self._found = Sampled(self.likelihood, draws)
        return self._found


def output_fisher(lin: Linearization, kind: str, mc_samples: int, generator: torch.Generator | None) -> OutputFisher:
    """The H that `fisher=` names: "exact", "mc" with `mc_samples` targets a point, or "empirical".

    Raises ValueError for another word, for `mc_samples` below 1, and above 1 where nothing is drawn.
    """
    check_kind(kind)
    checked_whole("mc_samples", mc_samples, kind="a whole number of targets a point")
    if kind != "mc" and mc_samples != 1:
        raise ValueError(f"mc_samples={mc_samples} with fisher={kind!r}, which draws nothing; use fisher='mc'.")
    if kind == "mc":
        check_generator(generator)
        return DrawnInPassing(lin, mc_samples, generator)
    return Exact(lin.likelihood) if kind == "exact" else Empirical(lin.likelihood)
