"""Gaussian processes made from networks: gpytorch kernels and means, and a BoTorch model."""

from typing import Any

from curvops.errors import ModeNotFoundError
from curvops.gp.infinite_width import InfiniteWidthKernel
from curvops.gp.kernel import LinearizedGP, LinearizedKernel, LinearizedMean
from curvops.gp.laplace_process import LaplaceProcess, laplace_gp
from curvops.gp.operator_kernel import ComposedKernel
from curvops.gp.reduction import ReducedPosterior, reduced_posterior

__all__ = [
    "ComposedKernel",
    "InfiniteWidthKernel",
    "LaplaceModel",
    "LaplaceProcess",
    "LinearizedGP",
    "LinearizedKernel",
    "LinearizedMean",
    "ModeNotFoundError",
    "ReducedPosterior",
    "laplace_gp",
    "reduced_posterior",
]


def __getattr__(name: str) -> Any:
    """Import the BoTorch part on first access: BoTorch is an extra, and slow to import."""
    if name != "LaplaceModel":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}.")
    try:
        from curvops.gp.botorch_model import LaplaceModel
    except ModuleNotFoundError as error:
        if error.name != "botorch":
            raise
        raise ModuleNotFoundError(
            "LaplaceModel needs BoTorch: pip install curvops[botorch].", name="botorch"
        ) from error
    return LaplaceModel
