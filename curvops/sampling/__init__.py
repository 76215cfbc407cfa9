"""Samplers, variational families and Kalman filters: one protocol, any curvature operator as preconditioner."""

from curvops.sampling import diagnostics
from curvops.sampling.baoa import baoa
from curvops.sampling.chain import Chain
from curvops.sampling.chains import chains
from curvops.sampling.empirical_posterior import EmpiricalPosterior, empirical
from curvops.sampling.evaluation import NotVectorized
from curvops.sampling.extended_kalman import ExtendedKalmanFilter, KalmanState, ekf
from curvops.sampling.hmc import hmc
from curvops.sampling.lmc import lmc
from curvops.sampling.log_density import LogPosterior, log_posterior
from curvops.sampling.ntk_precision import ntk_precision
from curvops.sampling.pcn import pcn
from curvops.sampling.reprior import Reprior, reprior
from curvops.sampling.reprior_gap import FewEffectiveDraws, GradientGap
from curvops.sampling.running import run
from curvops.sampling.schedules import Constant, Cosine, RobbinsMonro
from curvops.sampling.sghmc import sghmc, sgnht
from curvops.sampling.sgld import sgld
from curvops.sampling.state import Info, MomentumState, State
from curvops.sampling.torch_optimizer import optimizer
from curvops.sampling.transition import Transition
from curvops.sampling.variational import FitEnding, Unsettled, Variational, VariationalInfo, VariationalState, vi

__all__ = [
    "Chain",
    "Constant",
    "Cosine",
    "EmpiricalPosterior",
    "ExtendedKalmanFilter",
    "FewEffectiveDraws",
    "FitEnding",
    "GradientGap",
    "Info",
    "KalmanState",
    "LogPosterior",
    "MomentumState",
    "NotVectorized",
    "Reprior",
    "RobbinsMonro",
    "State",
    "Transition",
    "Unsettled",
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
