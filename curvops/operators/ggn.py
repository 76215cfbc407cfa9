"""The generalised Gauss–Newton matrix, and its Monte-Carlo estimate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.network.likelihoods.output_fisher import Exact, OutputFisher, Sampled
from curvops.network.walks.passes import Passes
from curvops.operators.curvature import Curvature
from curvops.operators.fisher import sampled_residuals
from curvops.operators.linearization import Linearization
from curvops.operators.reading import Stored, require_no_gradient


class GGN(Curvature):
    """G = Σ_n J_nᵀ H_n J_n (D, D), H_n the output Fisher (Schraudolph 2002); symmetric positive semi-definite.

    `co.GGN(lin)`; products G @ v and G @ V carry gradients through the vectors and the likelihood's hyperparameters.
    Cost to build: nothing. A product is one push and one pull of J, 0.5–2 gradients a vector (`lin.plan` says how
    many), plus O(N·C) for H. Memory: what the plan keeps, within the budget. Choose it first: all others approximate
    it, and are worth it where its many products cost too much.

    `co.GGN(lin, mc_samples=M, generator=g)` is the Monte-Carlo Fisher: M targets a point are drawn from the model once,
    here, for one forward pass, and H_n is the mean of r rᵀ over their residuals. Its expectation is the GGN; choose it
    where C is large (a vocabulary), or as a cheaper root of the GGN. It has no gradient for hyperparameters. Its
    products multiply with M rows a point, whatever C: of one sample 0.5–1 gradients (`print(op.plan)`), after
    (1 + M) / 3 at the first, within what is left of the budget. Raises ValueError for mc_samples below 1.
    """

    OPTIONS = ("draws",)

    @classmethod
    def _read(
        cls, lin: Linearization, mc_samples: int | None = None, generator: torch.Generator | None = None
    ) -> Stored:
        if mc_samples is None:
            return cls._of(lin, draws=None, rows=None)
        require_no_gradient(lin.likelihood, "GGN(lin, mc_samples=…)")
        draws = sampled_residuals(lin, mc_samples, generator)
        rows = lin.passes.reduced(Sampled(lin.likelihood, draws))
        (theta, *hyperparameters), kept = cls._of(lin, draws=draws, rows=rows)
        return (theta, *(tensor.detach() for tensor in hyperparameters)), kept  # the draws do not move with them

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
        return cls(lin.theta, *hyperparameters, lin=lin, draws=draws, rows=rows)
