"""Matrix-free linear algebra with a trained network, linearised at its weights: J : R^D → R^(N·C).

The examples of functions and classes go on from these lines:

>>> import torch
>>> from torch import nn
>>> import curvops as co
>>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
>>> x, y = torch.linspace(-1, 1, 16).reshape(8, 2), torch.arange(8) % 2
>>> lin = co.linearize(model, (x, y), "classification")
>>> post = co.laplace(lin, co.GGN, prior_precision=1.0, check_mode=False)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from curvops import errors, evidence, gp, linalg, metrics, operators, posterior, sampling
from curvops.defaults import laplace
from curvops.linalg import low_rank
from curvops.network import likelihoods
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
    Subnetwork,
    TangentKernel,
    linearize,
    subsample,
)
from curvops.posterior import fit_mode, load, save, select, wasserstein
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
    "DiagonalGGN",
    "EmpiricalFisher",
    "Gradients",
    "Hessian",
    "Jacobian",
    "Subnetwork",
    "TangentKernel",
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
    "metrics",
    "operators",
    "posterior",
    "sampling",
    "save",
    "select",
    "subsample",
    "wasserstein",
]


def __dir__() -> list[str]:
    """List the public names alone: modules that only curvops imports are not shown."""
    return [*__all__, "__version__", "plots"]
