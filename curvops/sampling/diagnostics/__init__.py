"""Diagnostics of chains: mixing, effective sample size, and the distance of their distribution from the target."""

from curvops.sampling.diagnostics.kernel_stein import scores, stein_discrepancy
from curvops.sampling.diagnostics.projected_chains import RandomProjections, random_projections
from curvops.sampling.diagnostics.ranks import ess, rhat, to_inference_data

__all__ = ["RandomProjections", "ess", "random_projections", "rhat", "scores", "stein_discrepancy", "to_inference_data"]
