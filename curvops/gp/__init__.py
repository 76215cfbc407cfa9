"""Gaussian processes made of networks: gpytorch kernels and means, a BoTorch model."""

from typing import Any

from curvops.gp.infinite_width import InfiniteWidthKernel
from curvops.gp.kernel import LinearizedKernel
from curvops.gp.laplace_process import LaplaceProcess, ModeNotFound, laplace_gp
from curvops.gp.mean import LinearizedMean
from curvops.gp.reduction import ReducedPosterior, reduced_posterior

__all__ = [
    "InfiniteWidthKernel",
    "LaplaceModel",
    "LaplaceProcess",
    "LinearizedKernel",
    "LinearizedMean",
    "ModeNotFound",
    "ReducedPosterior",
    "laplace_gp",
    "reduced_posterior",
]


def __getattr__(name: str) -> Any:
    """Import BoTorch's part on first access: it is an extra, and slow to import."""
    if name != "LaplaceModel":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}.")
    try:
        from curvops.gp.botorch_model import LaplaceModel
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "botorch":
            raise
        raise ModuleNotFoundError(
            "LaplaceModel needs BoTorch: pip install curvops[botorch].", name="botorch"
        ) from error
    return LaplaceModel
