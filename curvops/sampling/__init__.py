"""Samplers, variational families and Kalman filters: one protocol, with any curvature operator as preconditioner."""

from curvops.errors import FewDrawsWarning, NotVectorizedWarning, UnsettledWarning
from curvops.sampling import diagnostics
from curvops.sampling.core.chain_draws import Chain
from curvops.sampling.core.log_density import LogPosterior, log_posterior
from curvops.sampling.core.schedules import Constant, Cosine, RobbinsMonro
from curvops.sampling.core.state import Info, MomentumState, State
from curvops.sampling.core.transition import Transition
from curvops.sampling.families.extended_kalman import ExtendedKalmanFilter, KalmanState, ekf
from curvops.sampling.families.variational import FitEnding, Variational, VariationalInfo, VariationalState, vi
from curvops.sampling.repriorisation.gap import GradientGap
from curvops.sampling.repriorisation.reprior import Reprior, reprior
from curvops.sampling.repriorisation.reprior_problem import ntk_precision
from curvops.sampling.runs.empirical_posterior import EmpiricalPosterior, empirical
from curvops.sampling.runs.minibatches import Minibatches, minibatches
from curvops.sampling.runs.running import chains, run
from curvops.sampling.samplers.baoa import baoa
from curvops.sampling.samplers.hmc import hmc, lmc
from curvops.sampling.samplers.pcn import pcn
from curvops.sampling.samplers.sghmc import sghmc, sgnht
from curvops.sampling.samplers.sgld import sgld
from curvops.sampling.samplers.torch_optimizer import optimizer

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
