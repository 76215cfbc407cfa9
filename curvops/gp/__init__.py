"""Gaussian processes made from networks: gpytorch kernels and means, and a BoTorch model."""

from importlib.metadata import version
from typing import Any

from curvops.errors import ModeNotFoundError
from curvops.gp.exact_process import LinearizedGP
from curvops.gp.infinite_width import InfiniteWidthKernel
from curvops.gp.kernel import LinearizedKernel, LinearizedMean
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
    except ImportError as error:
        if (error.name or "").split(".")[0] != "botorch":
            raise
        if error.name == "botorch":
            message = "LaplaceModel needs BoTorch: pip install curvops[botorch]."
            raise ModuleNotFoundError(message, name="botorch") from error
        raise ImportError(
            f"LaplaceModel needs BoTorch 0.14 or newer, this is {version('botorch')} ({error}): pip install --upgrade "
            "curvops[botorch].",
            name=error.name,
        ) from error
    return LaplaceModel
