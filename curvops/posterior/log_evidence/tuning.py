"""Records of tuning: its steps, the reason why it ended, and how well the data determine the hyperparameters."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from jaxtyping import Float
from torch import Tensor

from curvops.checks import checked_number
from curvops.errors import MaxStepsWarning, warn
from curvops.summary import Summarised, Table, Tabular, by_columns_of, summary


class Ending(Enum):
    """The reason why a tuning stopped; the value is the remedy, in plain sentences."""

    CONVERGED = "Converged: a further step would change less than the tolerance. Nothing needs to be done."
    WITHIN_ERROR = (
        "Converged: further steps would change less than the error bar of these samples. For a smaller error bar use "
        "more samples."
    )
    STEPS_SPENT = (
        "The steps were spent before the hyperparameters stopped changing. Continue from the returned posterior, or "
        "raise steps."
    )


@dataclass(frozen=True, eq=False, repr=False)
class TuningStep(Summarised):
    """One step of a tuning: the hyperparameters before it, the effective parameters at them, and its cost.

    Tensors have an entry for each group of weights with its own precision. If every single weight is a group, they
    have one entry: the geometric mean of the precisions and the sum of the counts.

    Examples:
        >>> tuning = co.evidence.maximize(post, "layers", steps=50).tuning
        >>> tuning.steps[0].prior_precision
        tensor([1., 1.], dtype=torch.float64)
    """

    prior_precision: Float[Tensor, " G"]
    effective_parameters: Float[Tensor, " G"]
    stderr: Float[Tensor, " G"]
    """Standard errors of the effective parameters, from the samples or probes; 0 if these are exact."""
    noise: float | None
    """The variance of a Gaussian likelihood, if it is tuned."""
    matvecs: int
    """The number of products with P that the step took."""


@dataclass(frozen=True, eq=False, repr=False)
class Tuning(Tabular):
    """The steps of `co.evidence.mackay` or `maximize`, as `post.tuning` of the posterior that they return.

    Examples:
        >>> tuning = co.evidence.maximize(post, "layers", steps=50).tuning
        >>> tuning.groups, tuning.converged
        (('0', '2'), True)
    """

    method: str
    groups: tuple[str, ...]
    """The groups of weights with their own precision: layers, or "all"; "weights" if each weight has its own."""
    mode: str
    """Whether the weights stayed ("map") or moved to the linear model's mode with each step ("linear")."""
    steps: tuple[TuningStep, ...]
    ending: Ending
    oscillated: bool = False
    """Whether MacKay's update oscillated, so that its steps were halved."""
    targets: float | None = None
    """How many values the noise was estimated from (for weighted points the sum of weights), if it was tuned."""

    @property
    def converged(self) -> bool:
        """Whether further steps would change less than the tolerance or the error bar."""
        return self.ending in (Ending.CONVERGED, Ending.WITHIN_ERROR)

    @property
    def matvecs(self) -> int:
        """The total number of products with P."""
        return sum(step.matvecs for step in self.steps)

    def prior_interval(self, level: float = 0.95) -> tuple[Float[Tensor, " G"], Float[Tensor, " G"]]:
        """Return the interval of each precision: γ directions determine it as γ draws determine a variance (χ²).

        It belongs to the last step and does not include the sampling error of γ. It warns with `MaxStepsWarning` if the
        tuning has not converged: the interval is then not around the optimum.

        Args:
            level: the probability of the interval.

        Returns:
            The lower and the upper ends, one for each precision.

        Raises:
            ValueError: the level is outside (0, 1).
        """
        self._warn_of_intervals()
        last = self.steps[-1]
        low, high = _chi_squared(last.effective_parameters, level)
        return last.prior_precision * low, last.prior_precision * high

    def noise_interval(self, level: float = 0.95) -> tuple[float, float]:
        """Return the interval of the noise, from the M − γ degrees of freedom that the weights leave in M targets.

        It warns as `prior_interval` does.

        Args:
            level: the probability of the interval.

        Returns:
            The lower and the upper end.

        Raises:
            ValueError: the level is outside (0, 1), or the noise was not tuned.
        """
        self._warn_of_intervals()
        last = self.steps[-1]
        if last.noise is None or self.targets is None:
            raise ValueError(
                "the noise was not tuned: mackay(post, tune_noise=True) or maximize(post, over='noise') tune it."
            )
        low, high = _chi_squared(self.targets - last.effective_parameters.sum(), level)
        return last.noise / float(high), last.noise / float(low)

    __repr__ = Tabular.as_text

    def _tables(self) -> list[Table]:
        of_steps = {
            "prior precision": [summary(step.prior_precision) for step in self.steps],
            "effective parameters": [summary(step.effective_parameters) for step in self.steps],
            "noise": ["" if step.noise is None else summary(step.noise) for step in self.steps],
            "products": [f"{step.matvecs:,}" for step in self.steps],
        }
        return [by_columns_of(of_steps, [f"{self.method}, {self.ending.name}: {self.ending.value}"])]

    def warn_of_ending(self, what: str) -> None:
        """Warn with `MaxStepsWarning` unless the tuning converged; `what` begins the message."""
        if self.converged:
            return
        faster = " update='mackay' needs fewer than update='em'." if self.method == "em" else ""
        warn(f"{what}{self.ending.value}{faster}", MaxStepsWarning)

    def _warn_of_intervals(self) -> None:
        self.warn_of_ending("the interval is around values at which the tuning has not converged. ")


@dataclass(frozen=True, eq=False, repr=False)
class Validation(Tabular):
    """The values that `co.evidence.validate` tried, in order, as `post.tuning` of the posterior that it returns.

    Examples:
        >>> validation = co.evidence.validate(post, x + 0.1, y, prior_precisions=[0.5, 1.0, 2.0]).tuning
        >>> validation.prior_precisions, len(validation.scores)
        ((0.5, 1.0, 2.0), 3)
    """

    prior_precisions: tuple[float, ...]
    """The prior precisions: the geometric mean of a vector's entries, NaN for an operator."""
    noises: tuple[float, ...] | None
    """The variances of a Gaussian likelihood; None for other likelihoods."""
    scores: tuple[float, ...]
    """Mean held-out log-likelihood per point (or pair), in nats."""
    stderrs: tuple[float, ...]
    """Standard errors of the scores from the posterior's draws alone; those from the held-out sample are larger."""

    __repr__ = Tabular.as_text

    def _tables(self) -> list[Table]:
        noises = {} if self.noises is None else {"noise": list(map(summary, self.noises))}
        precisions, scores = ([*map(summary, numbers)] for numbers in (self.prior_precisions, self.scores))
        return [by_columns_of({"prior precision": precisions, **noises, "held-out log-likelihood per point": scores})]


def _chi_squared(freedom: Tensor, level: float) -> tuple[Tensor, Tensor]:
    """Return the quantiles of χ² for its degrees of freedom that enclose the level."""
    from scipy.special import chdtri  # a slow import that few calls need

    checked_number("level", level, "(0, 1)")
    tail, degrees = (1 - level) / 2, freedom.detach().double().cpu().clamp_min(1e-3)
    low, high = (degrees.new_tensor(chdtri(degrees.numpy(), q)) / degrees for q in (1 - tail, tail))
    return low.to(freedom.device), high.to(freedom.device)
