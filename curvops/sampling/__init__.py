"""Samplers, variational families and Kalman filters: one protocol, any curvature operator as preconditioner."""

from curvops.sampling.chain import Chain
from curvops.sampling.log_density import LogPosterior, log_posterior
from curvops.sampling.run import run
from curvops.sampling.schedules import Constant, Cosine, RobbinsMonro
from curvops.sampling.sgld import sgld
from curvops.sampling.state import Info, MomentumState, State
from curvops.sampling.transition import Transition

__all__ = [
    "Chain",
    "Constant",
    "Cosine",
    "Info",
    "LogPosterior",
    "MomentumState",
    "RobbinsMonro",
    "State",
    "Transition",
    "log_posterior",
    "run",
    "sgld",
]
