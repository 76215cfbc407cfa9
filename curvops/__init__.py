"""Matrix-free linear algebra with a trained network, linearised at its weights: J : R^D → R^(N·C)."""

from importlib.metadata import version

from curvops import evidence, linalg, sampling
from curvops.linalg import Damped, LowRank, low_rank
from curvops.network import likelihoods
from curvops.network.data.batches import DataChanged
from curvops.network.likelihoods.bradley_terry import RewardPairs
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
    NoCurvature,
    NoFactors,
    Subnetwork,
    TangentKernel,
    linearize,
    subsample,
)
from curvops.posterior import (
    Deviations,
    Diverged,
    GaussianPosterior,
    InertWeights,
    Laplace,
    LinearMode,
    NotAMode,
    SampledNormal,
    StochasticDescent,
    Uncertainty,
    laplace,
    load,
    save,
    select,
    wasserstein,
)

__version__ = version("curvops")

__all__ = [
    "EKFAC",
    "GGN",
    "KFAC",
    "BlockDiagonal",
    "Damped",
    "DataChanged",
    "Deviations",
    "DiagonalGGN",
    "Diverged",
    "EmpiricalFisher",
    "GaussianPosterior",
    "Gradients",
    "Hessian",
    "InertWeights",
    "Jacobian",
    "Laplace",
    "LinearMode",
    "Linearization",
    "LowRank",
    "NoCurvature",
    "NoFactors",
    "NotAMode",
    "RewardPairs",
    "SampledNormal",
    "StochasticDescent",
    "Subnetwork",
    "TangentKernel",
    "Uncertainty",
    "evidence",
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
