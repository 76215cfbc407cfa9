"""Exceptions and warnings: every error that the library raises by a name of its own, and every warning.

Errors end in `Error`, warnings in `Warning`. Errors of solvers hold the state that was reached. Each has an entry in
the page "Troubleshooting", with its cause and its cure.

    >>> import warnings
    >>> from curvops.errors import ModeWarning
    >>> warnings.simplefilter("ignore", ModeWarning)
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

from linear_operator.utils.errors import NotPSDError

if TYPE_CHECKING:
    from curvops.linalg.core.results import FunctionProduct, Reason, Solution
    from curvops.posterior.deviations import Deviations


class ConvergenceError(RuntimeError):
    """Raised when a solve failed; ``solution`` holds the state reached."""

    def __init__(self, solution: Solution, rtol: float, remedies: Mapping[Reason, str] | None = None) -> None:
        self.solution = solution
        self.rtol = rtol
        measure = f"true relative residual {{}} at iteration {solution.iterations}, where rtol={rtol:.2e}"
        super().__init__(solution.failures("columns", measure, solution.relative_residuals, remedies))


class NotPositiveDefiniteError(ConvergenceError, NotPSDError):
    """Raised when a solve meets a direction of non-positive curvature."""


class NotPositiveSemidefiniteError(NotPSDError, ValueError):
    """Raised for a matrix that must be positive semidefinite, or positive definite, and is not."""


class FunctionConvergenceError(RuntimeError):
    """Raised when a function of a matrix did not reach the tolerance; ``product`` holds the state reached."""

    def __init__(self, product: FunctionProduct, rtol: float) -> None:
        self.product = product
        self.rtol = rtol
        measure = f"estimate of the relative error {{}} at iteration {product.iterations}, where rtol={rtol:.2e}"
        super().__init__(product.failures("columns", measure, product.error_estimates))


class NotSolvedError(ConvergenceError):
    """Raised when some draws were not solved to the tolerance; ``deviations`` holds the state they reached."""

    def __init__(self, deviations: Deviations, rtol: float, remedies: Mapping[Reason, str] | None = None) -> None:
        self.deviations, self.rtol = deviations, rtol
        measure = f"true relative residual {{}} after {deviations.matvecs} products, where rtol={rtol:.2e}"
        RuntimeError.__init__(self, deviations.failures("draws", measure, deviations.relative_residuals, remedies))


class ModeNotFoundError(ConvergenceError):
    """Raised when the mode was not found to the tolerance; `reason`, `gradient` and `steps` describe the end."""

    def __init__(self, reason: Reason, gradient: float, steps: int, rtol: float, remedy: str) -> None:
        self.reason, self.gradient, self.steps, self.rtol = reason, gradient, steps, rtol
        RuntimeError.__init__(
            self,
            f"the mode was not found: after {steps} Newton steps the relative gradient is {gradient:.2e}, above "
            f"{rtol:.2e}. {reason.name}: {remedy}",
        )


class DivergenceError(RuntimeError):
    """Raised when a descent or a sampler diverges with its step size; the message suggests another one."""


class DataChangedError(RuntimeError):
    """Raised when a pass over the data differs from the first pass."""


class NoDataError(ValueError):
    """Raised when the data contain no point."""


class MissingLabelsError(ValueError):
    """Raised where a result depends on the labels of the data, and these have none."""

    def __init__(self, what: str = "this result", remedy: str = "") -> None:
        super().__init__(
            f"labels are missing: {what} depends on them, and the data have none. {remedy}Linearise with both, "
            "co.linearize(model, (inputs, targets), likelihood). Without labels there are the GGN, the Fishers (exact "
            "and Monte Carlo), KFAC, kernels and, for a given prior precision, draws and predictions."
        )


class RanksDifferError(ValueError):
    """Raised when the ranks of a group were given different models, options or seeds."""


class BlockSizeWarning(UserWarning):
    """A warning that memory did not suffice for a block of columns, which is now split into smaller blocks."""


class CheckpointWarning(UserWarning):
    """A warning that a checkpoint could not be written; the run continues."""


class FewDrawsWarning(UserWarning):
    """A warning that few draws of the prior carry nearly all weights e^h, so that a weighted mean is unreliable."""


class InertWeightsWarning(UserWarning):
    """A warning that selected weights have no curvature: their posterior is the prior, and predictions ignore them."""


class ManyProductsWarning(UserWarning):
    """A warning that a call is about to make more than 1,000 products with an operator; it names a cheaper one."""


class MaxStepsWarning(UserWarning):
    """A warning that tuning ended before the hyperparameters stopped changing: the evidence is not at its maximum."""


class MemoryBudgetWarning(UserWarning):
    """A warning that a memory budget is less than the least that an algorithm needs, which it takes all the same."""


class ModeWarning(UserWarning):
    """A warning that the weights are not a mode of the posterior."""


class NoCurvatureWarning(UserWarning):
    """A warning that the likelihood of a target does not depend on the outputs, so that every curvature is zero."""


class NoFactorsWarning(UserWarning):
    """A warning that parameters without Kronecker factors are too many for an exact block: they get its diagonal."""


class NoProcessGroupWarning(UserWarning):
    """A warning that a process of several linearises its own data alone, since it was given no process group."""


class NoiseWarning(UserWarning):
    """A warning that the noise of a regression is far from the residuals' variance, or cannot be estimated."""


class NotLogitsWarning(UserWarning):
    """A warning that a classifier's outputs are probabilities, or logits with a constant in common that a link sees."""


class NotVectorizedWarning(UserWarning):
    """A warning that the log posterior of several chains is computed chain by chain; the message gives the reason."""


class OscillationWarning(UserWarning):
    """A warning that MacKay's update oscillates around the maximum of the evidence."""


class PrecisionWarning(UserWarning):
    """A warning that the dtype has too few digits: for the tolerance of a solve, or for a result in closed form."""


class RankWarning(UserWarning):
    """A warning that a low-rank approximation ended before the requested accuracy or rank."""


class SharedPointsWarning(UserWarning):
    """A warning that a few points are each on two ranks: either their data repeat them, or they count twice."""


class UndeterminedWarning(UserWarning):
    """A warning that the data do not determine a hyperparameter, which ends at the limit of the search."""


class UnsettledWarning(UserWarning):
    """A warning that a variational fit may not be at its optimum."""


CALLING_BACK = {"botorch", "contextlib", "curvops", "functools", "gpytorch", "linear_operator", "scipy", "torch"}
"""Packages whose frames stand between a user's line and a warning: the library and those that call it back."""


def warn(message: str, category: type[Warning]) -> None:
    """Warn at the line of the user's code from which the library was called, at whatever depth."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in CALLING_BACK:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


__all__ = [name for name, kind in list(globals().items()) if isinstance(kind, type) and kind.__module__ == __name__]
