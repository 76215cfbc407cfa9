"""Samplers, variational families and Kalman filters: one protocol, with any curvature operator as preconditioner."""

from curvops.errors import FewDrawsWarning, NotVectorizedWarning, UnsettledWarning
from curvops.sampling import diagnostics
from curvops.sampling.empirical_posterior import EmpiricalPosterior, empirical
from curvops.sampling.extended_kalman import ExtendedKalmanFilter, KalmanState, ekf
from curvops.sampling.langevin import baoa, sghmc, sgld, sgnht
from curvops.sampling.log_density import LogPosterior, Minibatches, log_posterior, minibatches
from curvops.sampling.metropolis import hmc, lmc, pcn
from curvops.sampling.reprior import GradientGap, Reprior, ntk_precision, reprior
from curvops.sampling.running import chains, run
from curvops.sampling.state import Chain, Info, MomentumState, State
from curvops.sampling.torch_optimizer import optimizer
from curvops.sampling.transition import Constant, Cosine, RobbinsMonro, Transition
from curvops.sampling.variational import FitEnding, Variational, VariationalInfo, VariationalState, vi

__all__ = [
    "Chain",
    "Constant",
    "Cosine",
    "EmpiricalPosterior",
    "ExtendedKalmanFilter",
    "FewDrawsWarning",
    "FitEnding",
    "GradientGap",
    "Info",
    "KalmanState",
    "LogPosterior",
    "Minibatches",
    "MomentumState",
    "NotVectorizedWarning",
    "Reprior",
    "RobbinsMonro",
    "State",
    "Transition",
    "UnsettledWarning",
    "Variational",
    "VariationalInfo",
    "VariationalState",
    "baoa",
    "chains",
    "diagnostics",
    "ekf",
    "empirical",
    "hmc",
    "lmc",
    "log_posterior",
    "minibatches",
    "ntk_precision",
    "optimizer",
    "pcn",
    "reprior",
    "run",
    "sghmc",
    "sgld",
    "sgnht",
    "vi",
]
