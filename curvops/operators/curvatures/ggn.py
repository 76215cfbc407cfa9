"""The generalised Gauss–Newton matrix, its Monte-Carlo estimate and its diagonal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.linalg import Diagonal
from curvops.network import Exact, OutputFisher, Passes, Sampled
from curvops.operators.curvatures.curvature import Curvature
from curvops.operators.linearized.linearization import Linearization
from curvops.operators.linearized.reading import OfLinearization, made_of, require_no_gradient


class GGN(Curvature):
    """The generalised Gauss–Newton matrix G = Σ_n J_nᵀ H_n J_n (D, D), H_n the output Fisher (Schraudolph 2002).

    Symmetric positive semi-definite. Products G @ v and G @ V carry gradients through the vectors and the likelihood's
    hyperparameters. Cost to build: nothing. A product is one push and one pull of J, 0.5–2 gradients a vector (see
    `lin.plan`), plus O(N·C) for H. Memory: the engines of the plan, within the budget. Choose it first: all others
    approximate it, and pay where its many products cost too much.

    With `mc_samples` it is the Monte-Carlo Fisher: M targets a point are drawn from the model once, at the call, by one
    forward pass, and H_n is the mean of r rᵀ over their residuals. Its expectation is the GGN; choose it where C is
    large (a vocabulary), or as a cheaper root of the GGN. It has no gradient for hyperparameters. Its products multiply
    with M rows a point, whatever C: for one sample 0.5–1 gradients (`print(op.plan)`), after (1 + M) / 3 at the first,
    within the rest of the budget.

    Args:
        lin: the linearised network.
        mc_samples: M, targets to draw a point; None for the GGN itself.
        generator: source of the draws.

    Raises:
        ValueError: mc_samples below 1, or hyperparameters that require a gradient with `mc_samples`.
    """

    OPTIONS = ("draws",)

    def __init__(
        self, lin: Linearization, mc_samples: int | None = None, generator: torch.Generator | None = None
    ) -> None:
        hyperparameters = lin.likelihood.hyperparameters
        if mc_samples is None:
            super().__init__(lin.theta, *hyperparameters, lin=lin, draws=None, rows=None)
            return
        require_no_gradient(lin.likelihood, "GGN(lin, mc_samples=…)")
        draws = lin.draw_residuals(mc_samples, generator)
        rows = lin.passes.reduced(Sampled(lin.likelihood, draws))
        fixed = (tensor.detach() for tensor in hyperparameters)  # the draws do not move with them
        super().__init__(lin.theta, *fixed, lin=lin, draws=draws, rows=rows)

    @property
    def output(self) -> OutputFisher:
        """H: the output Fisher, or its estimate from the draws."""
        draws: Tensor | None = self._kwargs["draws"]
        return Exact(self.likelihood) if draws is None else Sampled(self.likelihood, draws)

    @property
    def rows(self) -> Passes | None:
        return self._kwargs["rows"]

    @classmethod
    def made_at(cls, lin: Linearization, hyperparameters: Sequence[Tensor], **options: Any) -> LinearOperator:
        draws = options["draws"]
        rows = None if draws is None else lin.passes.reduced(Sampled(lin.likelihood, draws))
        return super().made_at(lin, hyperparameters, draws=draws, rows=rows)


class DiagonalGGN(OfLinearization, Diagonal):
    """The diagonal of the GGN as an operator (D, D): the summed squares of all rows of LᵀJ (Dangel et al. 2020).

    Every operation on it, and on it plus a prior, is elementwise: a product is D multiplications. It ignores
    correlations: choose it for ranking weights and as the cheapest posterior, not where weights act together. (Dangel,
    Kunstner & Hennig 2020.)

    Cost to build, here and once, without a gradient graph: a forward pass and a backward pass for each of C columns
    (mc: `mc_samples`, empirical: one), and one more matrix product a layer for each; where a layer is applied at one
    position that product is shared by all columns. Memory: a chunk of sensitivities within the budget, never a
    Jacobian. Parameters without a layer rule take a backward pass for each point and column.

    Args:
        lin: the linearised network.
        fisher: "exact", "mc" (targets drawn from the model) or "empirical" (the true targets).
        mc_samples: targets to draw a point with fisher="mc".
        generator: source of the draws.

    Raises:
        ValueError: another `fisher`, or `mc_samples` that does not fit it.
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
        super().__init__(entries, **made_of(lin))
