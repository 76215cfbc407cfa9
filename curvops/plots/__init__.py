"""Figures of curvops' results from plain arrays; each function returns a matplotlib Figure.

No function here uses pyplot or changes matplotlib's global settings. Needs matplotlib, which `curvops[demo]` installs.

>>> import numpy as np
>>> from curvops import plots
>>> figure = plots.convergence({"plain": (np.array([0, 1, 2]), np.array([1.0, 1e-3, 1e-6]))}, rtol=1e-5)
>>> figure.axes[0].get_yscale()
'log'
"""

try:
    from curvops.plots.chain_plots import autocorrelation, trace
    from curvops.plots.cost_plots import convergence, estimates, solves
    from curvops.plots.density import spectral_density, training_spectra
    from curvops.plots.prediction_plots import covariance, ray, regression, reliability, rotation
    from curvops.plots.prior_plots import evidence, evidence_trace
    from curvops.plots.removal_plots import influence, pruning
    from curvops.plots.style import save
except ModuleNotFoundError as error:
    if (error.name or "").split(".")[0] != "matplotlib":
        raise
    message = "curvops.plots needs matplotlib: pip install 'curvops[demo]'"
    raise ModuleNotFoundError(message, name="matplotlib") from error

__all__ = [
    "autocorrelation",
    "convergence",
    "covariance",
    "estimates",
    "evidence",
    "evidence_trace",
    "influence",
    "pruning",
    "ray",
    "regression",
    "reliability",
    "rotation",
    "save",
    "solves",
    "spectral_density",
    "trace",
    "training_spectra",
]
