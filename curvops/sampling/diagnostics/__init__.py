"""Whether chains have mixed, how many independent draws they are worth, and whether their law is the target's."""

from curvops.sampling.diagnostics.kernel_stein import scores, stein_discrepancy
from curvops.sampling.diagnostics.projected_chains import RandomProjections, random_projections
from curvops.sampling.diagnostics.ranks import ess, rhat, to_inference_data

__all__ = ["RandomProjections", "ess", "random_projections", "rhat", "scores", "stein_discrepancy", "to_inference_data"]
