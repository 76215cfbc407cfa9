"""Figures of what curvops returns, for a notebook or a paper.

Each function takes the results first and options by keyword, and returns matplotlib's Axes. Those of one panel draw
into `ax=` if it is given; otherwise they make a figure of pyplot. No function changes matplotlib's global settings.
Needs matplotlib, which `curvops[demo]` installs.

>>> import torch
>>> from curvops import plots
>>> p, labels = torch.tensor([[0.9, 0.1], [0.4, 0.6]]), torch.tensor([0, 1])
>>> plots.reliability({"network": p}, labels).get_ylabel()
'accuracy (fraction of points)'
"""

try:
    from curvops.plots.prediction_plots import ray, regression, reliability
    from curvops.plots.spectrum_plots import convergence, spectral_density, training_spectra
    from curvops.plots.style import save
    from curvops.plots.tuning_plots import autocorrelation, evidence, evidence_trace, influence, pruning, trace
except ModuleNotFoundError as error:
    if (error.name or "").split(".")[0] != "matplotlib":
        raise
    message = "curvops.plots needs matplotlib: pip install 'curvops[demo]'"
    raise ModuleNotFoundError(message, name="matplotlib") from error

__all__ = [
    "autocorrelation",
    "convergence",
    "evidence",
    "evidence_trace",
    "influence",
    "pruning",
    "ray",
    "regression",
    "reliability",
    "save",
    "spectral_density",
    "trace",
    "training_spectra",
]
