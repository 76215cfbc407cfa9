"""The empirical Fisher, from the residuals at the true targets."""

from __future__ import annotations

from curvops.checks import check_flag
from curvops.network import Empirical, OutputFisher, Passes
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
