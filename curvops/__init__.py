"""Matrix-free linear algebra with a trained network, linearised at its weights: J : R^D → R^(N·C)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from curvops import errors, evidence, gp, linalg, sampling
from curvops.linalg import Damped, LowRank, low_rank
from curvops.network import RewardPairs, likelihoods
from curvops.operators import (
    EKFAC,
    GGN,
    KFAC,
    BlockDiagonal,
    DiagonalGGN,
    EmpiricalFisher,
    Gradients,
    Hessian,
    Jacobian,
    Linearization,
    ShardedLinearization,
    Subnetwork,
    TangentKernel,
    linearize,
    subsample,
)
from curvops.posterior import (
    Deviations,
    GaussianPosterior,
    Laplace,
    LinearMode,
    ModeFit,
    Predictions,
    SampledNormal,
    StochasticDescent,
    Uncertainty,
    fit_mode,
    laplace,
    load,
    save,
    select,
    wasserstein,
)
from curvops.version import __version__ as __version__

if TYPE_CHECKING:
    from curvops import plots as plots
else:

    def __getattr__(name: str) -> Any:
        """Import the figures on first access: they need matplotlib, an extra."""
        if name != "plots":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return import_module("curvops.plots")


__all__ = [
    "EKFAC",
    "GGN",
    "KFAC",
    "BlockDiagonal",
    "Damped",
    "Deviations",
    "DiagonalGGN",
    "EmpiricalFisher",
    "GaussianPosterior",
    "Gradients",
    "Hessian",
    "Jacobian",
    "Laplace",
    "LinearMode",
    "ModeFit",
    "Linearization",
    "LowRank",
    "Predictions",
    "RewardPairs",
    "SampledNormal",
    "ShardedLinearization",
    "StochasticDescent",
    "Subnetwork",
    "TangentKernel",
    "Uncertainty",
    "errors",
    "evidence",
    "fit_mode",
    "gp",
    "laplace",
    "likelihoods",
    "linalg",
    "linearize",
    "load",
    "low_rank",
    "sampling",
    "save",
    "select",
    "subsample",
    "wasserstein",
]
