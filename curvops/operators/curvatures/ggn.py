"""The generalised Gauss–Newton matrix, its Monte-Carlo estimate, its diagonal, and the empirical Fisher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.checks import check_flag
from curvops.linalg import Diagonal
from curvops.linalg.core.cache import Cache
from curvops.linalg.operators.closed_form import ClosedForm
from curvops.network import Empirical, Exact, OutputFisher, Passes, Sampled
from curvops.operators.curvatures.curvature import Curvature
from curvops.operators.curvatures.output_blocks import OutputBlocksForm
from curvops.operators.curvatures.sharded_curvature import ShardedCurvature, diagonal_of
from curvops.operators.linearized.linearization import Linearization
from curvops.operators.linearized.sharded_linearization import ShardedLinearization
from curvops.operators.linearized.user_operator import UserOperator, require_no_gradient


class GGN(Curvature):
    """The generalised Gauss–Newton matrix G = Σ_n J_nᵀ H_n J_n (D, D), H_n the output Fisher (Schraudolph 2002).

    Symmetric positive semi-definite. Products G @ v and G @ V carry gradients through the vectors and the likelihood's
    hyperparameters. Cost to build: nothing. A product is one push and one pull of J, 0.5–2 gradients per vector (see
    `lin.plan`), plus O(N·C) for H. Memory: the engines of the plan, within the budget. Try it first: all other
    curvatures approximate it, and pay off when many products with it would cost too much. For a last layer whose
    outputs do not interact (Bernoulli, Poisson and Gaussian likelihoods), it is block-diagonal by output: with a prior
    added it is solved by Cholesky, if C blocks of (q + 1)² numbers, for q inputs, fit into the budget.

    With `mc_samples` it is the Monte-Carlo Fisher: one forward pass at construction draws M targets per point from the
    model, and H_n is the mean of r rᵀ over their residuals. Its expectation is the GGN. Choose it if C is large (a
    vocabulary), or for a cheaper root of the GGN. It has no gradient for hyperparameters. Its products multiply with M
    rows per point, whatever C is: for one sample a product costs 0.5–1 gradients (`print(op.plan)`), and the first one
    (1 + M) / 3 more. The rows are stored within the rest of the budget.

    Args:
        lin: the linearised network.
        mc_samples: M, the number of targets drawn per point; None for the GGN itself.
        generator: the source of the draws.

    Raises:
        ValueError: mc_samples is below 1, or is given while hyperparameters require a gradient.

    Examples:
        >>> G = co.GGN(lin)
        >>> G.shape, (G @ torch.ones(17)).shape, G.add_diagonal(1.0).solve(torch.ones(17)).shape
        (torch.Size([17, 17]), torch.Size([17]), torch.Size([17]))
    """

    _shown = ()
    OPTIONS = ("draws",)
    _damped_form: ClassVar[type[ClosedForm] | None] = OutputBlocksForm

    def __init__(
        self, lin: Linearization, mc_samples: int | None = None, generator: torch.Generator | None = None
    ) -> None:
        hyperparameters = lin.likelihood.hyperparameters
        if mc_samples is None:
            super().__init__(lin.theta, *hyperparameters, lin=lin, draws=None, rows=None, cache=Cache())
            return
        require_no_gradient(lin.likelihood, "GGN(lin, mc_samples=…)")
        draws = lin.draw_residuals(mc_samples, generator)
        rows = lin.passes.with_root(Sampled(lin.likelihood, draws))
        fixed = (tensor.detach() for tensor in hyperparameters)  # the draws do not change with them
        super().__init__(lin.theta, *fixed, lin=lin, draws=draws, rows=rows, cache=Cache())

    @classmethod
    def _of_shards(cls, lin: ShardedLinearization, **options: Any) -> LinearOperator:
        samples, generator = options.get("mc_samples"), options.get("generator")
        if samples is None:
            return ShardedCurvature.of(lin, Exact(lin.likelihood), by_rows=False)
        return ShardedCurvature.of(lin, Sampled(lin.likelihood, lin.draw_residuals(samples, generator)), by_rows=True)

    @property
    def output(self) -> OutputFisher:
        """H, the output Fisher or its estimate from the draws."""
        draws: Tensor | None = self._kwargs["draws"]
        return Exact(self.likelihood) if draws is None else Sampled(self.likelihood, draws)

    @property
    def rows(self) -> Passes | None:
        return self._kwargs["rows"]

    @property
    def cache(self) -> Cache:
        """The cache of its blocks by output."""
        return self._kwargs["cache"]

    @classmethod
    def build_at(cls, lin: Linearization, hyperparameters: Sequence[Tensor], **options: Any) -> LinearOperator:
        draws = options["draws"]
        rows = None if draws is None else lin.passes.with_root(Sampled(lin.likelihood, draws))
        return super().build_at(lin, hyperparameters, draws=draws, rows=rows, cache=Cache())


class DiagonalGGN(UserOperator, Diagonal):
    """The diagonal of the GGN as an operator (D, D): the summed squares of all rows of LᵀJ (Dangel et al. 2020).

    Every operation on it, with or without a prior, is elementwise: a product is D multiplications. It ignores
    correlations. Choose it to rank weights, or as the cheapest posterior, but not if weights act together (Dangel,
    Kunstner & Hennig 2020).

    Cost to build, at construction and without a gradient graph: one forward pass, one backward pass for each of the C
    columns (of a softmax C − 1; "mc": `mc_samples`, "empirical": one), and one more matrix product per layer for each
    column; a layer that is applied at one position shares that product among all columns. Memory: a chunk of
    sensitivities within the budget, never a Jacobian. Parameters without a layer rule need a backward pass for each
    point and column. A last layer alone needs the diagonal of H and no columns, whatever C is, unless the likelihood is
    a function.

    Args:
        lin: the linearised network.
        fisher: "exact", "mc" (targets drawn from the model) or "empirical" (the true targets).
        mc_samples: the number of targets drawn per point with fisher="mc".
        generator: the source of the draws.

    Raises:
        ValueError: `fisher` is none of these, or `mc_samples` is given with a `fisher` that draws nothing.

    Examples:
        >>> D = co.DiagonalGGN(lin)
        >>> D.shape, D.diagonal().shape
        (torch.Size([17, 17]), torch.Size([17]))
    """

    STORED = "space"

    def __init__(
        self,
        lin: Linearization,
        fisher: str = "exact",
        mc_samples: int = 1,
        generator: torch.Generator | None = None,
    ) -> None:
        entries = lin.curvature_diagonal(lin.output_fisher(fisher, mc_samples, generator))
        super().__init__(entries, **lin.origin)

    @classmethod
    def _of_shards(cls, lin: ShardedLinearization, **options: Any) -> LinearOperator:
        return diagonal_of(lin, **options)


class DisplacedGGN(Curvature):
    """The GGN with output Fishers at displaced outputs: H_n is taken at f_n + shift_n, with shift = J δ (N, C)."""

    _shown = ()

    @classmethod
    def at(cls, lin: Linearization, shift: Float[Tensor, "N C"]) -> DisplacedGGN:
        """Return the displaced GGN of a linearisation."""
        return cls(lin.theta, *lin.likelihood.hyperparameters, lin=lin, shift=shift)

    @property
    def shift(self) -> Float[Tensor, "N C"]:
        """The displacement of the outputs."""
        return self._kwargs["shift"]

    @property
    def output(self) -> Exact:
        return Exact(self.likelihood, self.shift)

    @torch.no_grad()
    def gradient(self) -> Float[Tensor, " D"]:
        """Return Jᵀr, the gradient of the linear model's negative log-likelihood. One pull of J."""
        exact = self.output
        return self.lin.sum_over_batches(lambda batch, J: J.pull_of(lambda f: exact.residual(f, batch)), 1).squeeze(1)

    def log_likelihood(self, step: Float[Tensor, "N C"] | float = 0.0) -> Float[Tensor, ""]:
        """Return Σ_n log p(y_n | f_n + shift_n + step_n) in nats, in float64. No product with J."""
        exact = Exact(self.likelihood, self.shift + step)
        return self.lin.sum_over_batches(lambda batch, J: exact.log_prob(J.outputs, batch).double().sum(), 0)


class EmpiricalFisher(Curvature):
    """The empirical Fisher F = Σ_n g_n g_nᵀ (D, D), g_n = J_nᵀ r_n the gradient of point n's negative log-likelihood.

    It is *not* an estimate of the GGN (Kunstner, Hennig & Balles 2019): choose it for second moments of gradients, not
    for uncertainty. Class weights multiply r_n; sample weights multiply the outer product, so that a point of weight
    two counts as two points. (A sequence with weights for its positions enters with the largest of them, and the
    others count relative to it.) Cost to build: nothing; the first product computes the rows g_n layer by layer, for
    2/3 of a gradient. A product is two matrix products per layer, 0.5–1 gradients per vector whatever C is
    (`print(op.plan)`). Per token there are T rows per sequence, which take (1 + T) / 3 gradients to compute. While a
    hyperparameter's gradient is recorded, a product costs as much as the GGN's. Memory: the rows that the plan keeps,
    within the rest of the budget.

    Args:
        lin: the linearised network.
        per_token: give each token of a sequence its own outer product; otherwise g_n sums over the tokens.

    Raises:
        TypeError: per_token is neither True nor False.

    Examples:
        >>> F = co.EmpiricalFisher(lin)
        >>> F.shape, (F @ torch.ones(17)).shape
        (torch.Size([17, 17]), torch.Size([17]))
    """

    _shown = ()
    OPTIONS = ("per_token",)

    def __init__(self, lin: Linearization, per_token: bool = False) -> None:
        check_flag("per_token", per_token)
        super().__init__(lin.theta, *lin.likelihood.hyperparameters, lin=lin, per_token=per_token)

    @classmethod
    def _of_shards(cls, lin: ShardedLinearization, **options: Any) -> LinearOperator:
        check_flag("per_token", options.get("per_token", False))
        positions = lin.positions_apart(options.get("per_token", False))
        return ShardedCurvature.of(lin, Empirical(lin.likelihood, positions), by_rows=True)

    @property
    def output(self) -> OutputFisher:
        """The outer products H_n = r_n r_nᵀ in place of the output Fisher."""
        return Empirical(self.likelihood, self.lin.positions_apart(self._kwargs["per_token"]))

    @property
    def rows(self) -> Passes | None:
        return self.lin.gradient_rows(self.likelihood, self._kwargs["per_token"])
