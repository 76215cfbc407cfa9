"""Metrics of predicted class probabilities: accuracy, proper scores, calibration, detection.

Every function takes tensors on any device and returns 0-d tensors (or a frozen dataclass of tensors) in the dtype
of its first argument. Entropies and log-likelihoods are in nats. The probabilities may come from any source.

    >>> import torch
    >>> probabilities = torch.tensor([[0.9, 0.1], [0.4, 0.6]], dtype=torch.float64)
    >>> labels = torch.tensor([0, 0])
    >>> round(float(brier(probabilities, labels)), 4)
    0.37
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from curvops.checks import check_choice, check_shape, check_tensor, checked_whole, refuse
from curvops.errors import UndeterminedWarning, warn
from curvops.summary import Table, Tabular

__all__ = [
    "ReliabilityBins",
    "accuracy",
    "auroc",
    "brier",
    "ece",
    "mutual_information",
    "nll",
    "predictive_entropy",
    "reliability_bins",
    "temperature",
]


def accuracy(probabilities: Float[Tensor, "N ..."], labels: Int[Tensor, "N ..."]) -> Float[Tensor, ""]:
    """Return the fraction of points whose most probable class is the label; between 0 and 1.

    Args:
        probabilities: class probabilities, (N, C), or of positions (N, ..., C) or (N, C, ...).
        labels: the true classes, (N,) or (N, ...), in 0..C − 1.

    Returns:
        The fraction, a number.

    Raises:
        TypeError, ValueError: the arguments are not probabilities and labels of these shapes, or there are no points.

    Examples:
        >>> p, labels = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.3, 0.7]]), torch.tensor([0, 1, 0])
        >>> co.metrics.accuracy(p, labels)
        tensor(0.6667)
    """
    probabilities, labels = _scored(probabilities, labels)
    return (probabilities.argmax(-1) == labels).to(probabilities.dtype).mean()


def nll(
    probabilities: Float[Tensor, "N ..."], labels: Int[Tensor, "N ..."], *, reduction: str = "mean"
) -> Float[Tensor, "*shape"]:
    """Return −log p(label) in nats, the negative log-likelihood, as the mean or per point (`reduction="none"`).

    It is infinite if the label has probability exactly 0; if that comes from rounding, compute the softmax in
    float64.

    Args:
        probabilities: class probabilities, (N, C), or of positions (N, ..., C) or (N, C, ...).
        labels: the true classes, (N,) or (N, ...), in 0..C − 1.
        reduction: "mean", or "none" for a value per point.

    Returns:
        The mean, a number, or the values in the shape of the labels.

    Raises:
        TypeError, ValueError: the arguments are not probabilities and labels of these shapes, or there are no points.

    Examples:
        >>> p, labels = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.3, 0.7]]), torch.tensor([0, 1, 0])
        >>> co.metrics.nll(p, labels)
        tensor(0.5108)
    """
    p, y = _scored(probabilities, labels, least=0 if reduction == "none" else 1)
    check_choice("reduction", reduction, ("mean", "none"))
    values = -p.gather(-1, y.long()[:, None]).squeeze(-1).log()
    return values.view(labels.shape) if reduction == "none" else values.mean()


def brier(probabilities: Float[Tensor, "N ..."], labels: Int[Tensor, "N ..."]) -> Float[Tensor, ""]:
    """Return the mean over points of Σ_c (p_c − [c = label])², in [0, 2] (Brier 1950, a sum over all classes).

    Args:
        probabilities: class probabilities, (N, C), or of positions (N, ..., C) or (N, C, ...).
        labels: the true classes, (N,) or (N, ...), in 0..C − 1.

    Returns:
        The score, a number.

    Raises:
        TypeError, ValueError: the arguments are not probabilities and labels of these shapes, or there are no points.

    Examples:
        >>> p, labels = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.3, 0.7]]), torch.tensor([0, 1, 0])
        >>> co.metrics.brier(p, labels)
        tensor(0.3600)
    """
    probabilities, labels = _scored(probabilities, labels)
    truth = torch.nn.functional.one_hot(labels.long(), probabilities.shape[1]).to(probabilities.dtype)
    return (probabilities - truth).square().sum(-1).mean()


@dataclass(frozen=True, eq=False, repr=False)
class ReliabilityBins(Tabular):
    """Confidence and accuracy in equal-width bins of confidence; NaN in bins without points.

    Examples:
        >>> p, labels = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.3, 0.7]]), torch.tensor([0, 1, 0])
        >>> bins = co.metrics.reliability_bins(p, labels, bins=4)
        >>> bins
        confidence   points  mean confidence  accuracy
        0.5 to 0.75  1       0.7              0
        0.75 to 1    2       0.85             1
    """

    edges: Float[Tensor, " B1"]
    """Bin edges from 0 to 1, one more than bins; a bin contains lower < confidence <= upper."""
    confidence: Float[Tensor, " B"]
    """Mean of the largest probability in each bin."""
    accuracy: Float[Tensor, " B"]
    """Fraction of correct predictions in each bin."""
    count: Int[Tensor, " B"]
    """Number of points in each bin."""

    __repr__ = Tabular.as_text

    def _tables(self) -> list[Table]:
        columns = self.edges[:-1], self.edges[1:], self.count, self.confidence, self.accuracy
        rows = [
            (f"{low:.3g} to {high:.3g}", f"{n:,}", f"{confidence:.4g}", f"{accuracy:.4g}")
            for low, high, n, confidence, accuracy in zip(*(column.tolist() for column in columns))
            if n
        ]
        return [Table(("confidence", "points", "mean confidence", "accuracy"), rows)]


def reliability_bins(
    probabilities: Float[Tensor, "N ..."], labels: Int[Tensor, "N ..."], *, bins: int = 15
) -> ReliabilityBins:
    """Group points by confidence (the largest probability) into `bins` equal-width bins of (0, 1].

    Args:
        probabilities: class probabilities, (N, C), or of positions (N, ..., C) or (N, C, ...).
        labels: the true classes, (N,) or (N, ...), in 0..C − 1.
        bins: the number of bins.

    Returns:
        The ReliabilityBins, each with (bins,) values.

    Raises:
        TypeError, ValueError: the arguments are not probabilities and labels of these shapes, or there are no points.

    Examples:
        >>> p, labels = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.3, 0.7]]), torch.tensor([0, 1, 0])
        >>> bins = co.metrics.reliability_bins(p, labels, bins=4)
        >>> bins.count
        tensor([0, 0, 1, 2])
    """
    probabilities, labels = _scored(probabilities, labels)
    checked_whole("bins", bins)
    confidence, predicted = probabilities.max(-1)
    edges = torch.linspace(0, 1, bins + 1, dtype=probabilities.dtype, device=probabilities.device)
    where = (torch.bucketize(confidence, edges) - 1).clamp(0, bins - 1)
    count = torch.bincount(where, minlength=bins)

    def mean(values: Tensor) -> Tensor:
        # A sum in single precision stands still at 2²⁴ points. 0 / 0 is the NaN that marks an empty bin.
        total = torch.bincount(where, weights=values.double(), minlength=bins)
        return (total / count).to(torch.promote_types(probabilities.dtype, torch.float32))

    return ReliabilityBins(edges, confidence=mean(confidence), accuracy=mean(predicted == labels), count=count)


def ece(probabilities: Float[Tensor, "N ..."], labels: Int[Tensor, "N ..."], *, bins: int = 15) -> Float[Tensor, ""]:
    """Return the expected calibration error Σ_b (n_b/N) |accuracy_b − confidence_b| over 15 equal bins, in [0, 1].

    Args:
        probabilities: class probabilities, (N, C), or of positions (N, ..., C) or (N, C, ...).
        labels: the true classes, (N,) or (N, ...), in 0..C − 1.
        bins: the number of bins.

    Returns:
        The error, a number.

    Raises:
        TypeError, ValueError: the arguments are not probabilities and labels of these shapes.

    Source: Guo et al. 2017, equation 3. Biased upwards for few points, as every binned estimate is.

    Examples:
        >>> p, labels = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.3, 0.7]]), torch.tensor([0, 1, 0])
        >>> co.metrics.ece(p, labels, bins=4)
        tensor(0.3333)
    """
    table = reliability_bins(probabilities, labels, bins=bins)
    gap = (table.accuracy - table.confidence).abs().nan_to_num(0.0)
    return (gap * table.count / table.count.sum()).sum()


def auroc(scores: Shaped[Tensor, "N *T"], positive: Int[Tensor, "N *T"] | Bool[Tensor, "N *T"]) -> Float[Tensor, ""]:
    """Return the area under the ROC curve: P(score of a positive > score of a negative) + ½ P(they are equal).

    The area is the Mann–Whitney statistic over the number of pairs, by SciPy on the CPU, in O(N log N).

    Args:
        scores: a number for each point or position, (N, ...), larger for positive ones.
        positive: a mask (boolean, or 0 and 1) of the positive ones, (N, ...).

    Returns:
        The area, a number between 0 and 1.

    Raises:
        TypeError: the numbers are not in a tensor.
        ValueError: shapes differ, a score is not finite, or a class is absent, so that the area is undefined.

    Examples:
        >>> scores, positive = torch.tensor([0.9, 0.8, 0.3, 0.1]), torch.tensor([True, False, True, False])
        >>> co.metrics.auroc(scores, positive)
        tensor(0.7500)
    """
    check_tensor("scores", scores)
    check_tensor("positive", positive)
    check_shape("positive", positive, scores.shape)
    refuse(not scores.isfinite().all(), "scores must be finite: a NaN or Inf has no rank.")
    if positive.dtype != torch.bool and not ((positive == 0) | (positive == 1)).all():
        raise ValueError("positive must be boolean, or hold only 0 and 1")
    mask = positive.bool()
    n1 = int(mask.sum())
    n0 = mask.numel() - n1
    refuse(n1 == 0 or n0 == 0, f"AUROC needs both classes: {n1} positive and {n0} negative points were given")
    from scipy.stats import rankdata  # a slow import

    ranks = rankdata(scores.detach().double().flatten().cpu().numpy())[mask.flatten().cpu().numpy()]
    dtype = scores.dtype if scores.is_floating_point() else None
    return torch.tensor(float(ranks.sum() - n1 * (n1 + 1) / 2) / (n1 * n0), dtype=dtype, device=scores.device)


def predictive_entropy(probabilities: Float[Tensor, "*N C"]) -> Float[Tensor, "*N"]:
    """Return the total uncertainty of each prediction, −Σ_c p_c log p_c in nats; between 0 and log C. 0 log 0 is 0.

    Args:
        probabilities: class probabilities, (N, C), or of positions (N, ..., C).

    Returns:
        The entropies, (N,) or (N, ...).

    Raises:
        TypeError, ValueError: the argument does not hold probabilities.

    Examples:
        >>> co.metrics.predictive_entropy(torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
        tensor([0.6931, 0.0000])
    """
    _check_probabilities(probabilities)
    pointwise: Tensor = torch.special.entr(probabilities)
    return pointwise.sum(-1)


def mutual_information(samples: Float[Tensor, "S *N C"]) -> Float[Tensor, "*N"]:
    """Return the epistemic uncertainty H(mean_s p_s) − mean_s H(p_s) in nats; between 0 and log C.

    This is the mutual information between the label and the weights (Houlsby et al. 2011): the part of the total
    uncertainty (the predictive entropy of the mean) that more data could remove. It is 0 if all draws agree. With S
    draws it is at most log S.

    Args:
        samples: class probabilities under S ≥ 2 draws of the weights, (S, N, C), or of positions (S, N, ..., C).

    Returns:
        The information, (N,) or (N, ...).

    Raises:
        TypeError, ValueError: the argument does not hold probabilities of at least two draws.

    Examples:
        >>> p = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])  # two draws that contradict each other
        >>> co.metrics.mutual_information(p)
        tensor([0.6931])
    """
    check_tensor("samples", samples)
    if samples.ndim < 3 or samples.shape[0] < 2:
        raise ValueError(f"samples must be (S, N, ..., C) with at least 2 draws, not {tuple(samples.shape)}")
    _check_probabilities(samples)
    return divergences(samples.clamp_min(torch.finfo(samples.dtype).tiny).log(), samples.mean(0)).mean(0)


def divergences(log_p: Float[Tensor, "S *N C"], mean: Float[Tensor, "*N C"]) -> Float[Tensor, "S *N"]:
    """Return the Kullback–Leibler divergence of each draw's p from the mean m, in nats.

    Its mean over draws is the mutual information.

    It is computed as Σ_c m (eᵈd − (eᵈ − 1)) with d = log p − log m, whose terms are of second order in d: in a
    difference of entropies, rounding would hide the effect of well-determined weights.
    """
    d = log_p - mean.clamp_min(torch.finfo(mean.dtype).tiny).log()
    return (log_p.exp() * d - mean * d.expm1()).sum(-1)


def temperature(
    logits: Float[Tensor, "N ..."], labels: Int[Tensor, "N ..."], *, bounds: tuple[float, float] = (1e-2, 1e2)
) -> Float[Tensor, ""]:
    """Return the T > 0 that minimises the NLL of softmax(logits / T) on validation data (Guo et al. 2017, section 4.2).

    The NLL is convex in 1/T, so its derivative Σ_n (E_p[f_n] − f_n,label) changes sign once, where SciPy's root finder
    on log T in float64 finds it. If it lies outside `bounds` (every point classified correctly drives T to 0, labels
    worse than chance to infinity), the nearer bound is returned, with an `UndeterminedWarning`.

    Args:
        logits: the logits of validation points, (N, C), or of positions (N, ..., C) or (N, C, ...).
        labels: the true classes, (N,) or (N, ...), in 0..C − 1.
        bounds: the least and the greatest T.

    Returns:
        The temperature, a number.

    Raises:
        TypeError, ValueError: the arguments are not finite logits and labels of these shapes, the logits are
            probabilities, or the bounds are not positive.

    Examples:
        >>> logits, labels = torch.tensor([[9.0, 0.0], [0.0, 9.0], [9.0, 0.0]]), torch.tensor([0, 1, 1])
        >>> co.metrics.temperature(logits, labels) > 1  # overconfident
        tensor(True)
    """
    logits, labels = _by_position(logits, labels)
    refuse(not 0 < bounds[0] < bounds[1], f"bounds must be two positive numbers, the lesser first, got {bounds}.")
    refuse(not len(logits), "no data: a temperature of zero points is undefined.")
    refuse(not logits.isfinite().all(), "logits must be finite: give classes that cannot occur a logit of -1e9.")
    if len(logits) > 1 and bool((logits > 0).all() & ((logits.double().sum(-1) - 1).abs() <= 1e-5).all()):
        raise ValueError("these are probabilities: pass temperature the logits, or probabilities.log().")
    f = logits.to(torch.float64)
    f = f - f.gather(-1, labels.long()[:, None])

    def slope(log_t: float) -> float:
        """Return d NLL / d(1/T), which is positive if the logits are too sharp, so that T must grow."""
        return float((torch.softmax(f / math.exp(log_t), -1) * f).sum())

    from scipy.optimize import brentq  # a slow import

    low, high = map(math.log, bounds)
    if slope(low) > 0 > slope(high):
        return logits.new_tensor(math.exp(brentq(slope, low, high, xtol=1e-14)))
    change, bound = ("smaller", bounds[0]) if slope(low) <= 0 else ("larger", bounds[1])
    warn(f"the {change} T, the likelier these labels: T is the bound {bound}. Pass more points.", UndeterminedWarning)
    return logits.new_tensor(bound)


def _scored(probabilities: Tensor, labels: Tensor, least: int = 1) -> tuple[Tensor, Tensor]:
    """Return probabilities and labels with a row for each position; raise TypeError or ValueError for other things."""
    probabilities, labels = _by_position(probabilities, labels)
    refuse(len(labels) < least, "no data: a score of zero points is undefined.")
    _check_probabilities(probabilities)
    return probabilities, labels


def _by_position(values: Tensor, labels: Tensor) -> tuple[Float[Tensor, "N C"], Int[Tensor, " N"]]:
    check_tensor("values", values)
    check_tensor("labels", labels)
    place = "values"
    if values.ndim > 2:
        last, second = values.shape[:-1] == labels.shape, values.shape[:1] + values.shape[2:] == labels.shape
        if last and second:
            raise ValueError(
                f"values {tuple(values.shape)} may have their classes at dimension 1 or last: pass them as (N, C), "
                "values.flatten(0, -2) or values.movedim(1, -1).flatten(0, -2), and labels.flatten()."
            )
        if last or second:
            place = "values.movedim(1, -1)" if second else place
            values = (values.movedim(1, -1) if second else values).flatten(0, -2)
            labels = labels.flatten()
    _check_shapes(values, labels, f"{place}[keep]")
    return values, labels


def _check_shapes(values: Tensor, labels: Tensor, kept: str) -> None:
    binary = "; for the probabilities q (N, 1) of label 1, pass torch.cat([1 - q, q], 1) and whole labels (N,)"
    remedy = binary if values.ndim == 2 and values.shape[1] == 1 else ""
    if values.ndim == 2 and values.shape[1] > 1 and labels.shape == values.shape:
        remedy = (
            "; several labels of a point, with probabilities Q, are scored as N·C of their own: pass "
            "torch.stack([1 - Q.flatten(), Q.flatten()], 1) and Y.flatten().long()"
        )
    if values.ndim != 2 or labels.shape != values.shape[:1]:
        shapes = f"{tuple(values.shape)} and {tuple(labels.shape)}"
        raise ValueError(f"expected (N, C), (N, ..., C) or (N, C, ...) values, (N, ...) labels, not {shapes}{remedy}")
    refuse(labels.is_floating_point(), f"labels must be integers, not {labels.dtype}{remedy}")
    if labels.numel() and (labels.min() < 0 or labels.max() >= values.shape[1]):
        beyond = labels[(labels < 0) | (labels >= values.shape[1])].unique().tolist()
        if len(beyond) == 1 and not remedy:
            ignored = beyond[0]
            remedy = f"; to leave out the label {ignored}, keep = labels != {ignored}: score {kept}, labels[keep]"
        span = f"{int(labels.min())}..{int(labels.max())}"
        raise ValueError(f"labels must lie in 0..{values.shape[1] - 1}, not {span}{remedy}")


def _check_probabilities(p: Tensor) -> None:
    check_tensor("probabilities", p)
    if not p.is_floating_point() or p.ndim < 2 or p.shape[-1] == 0:
        raise ValueError(f"probabilities must be a floating (..., N, C) tensor, not {tuple(p.shape)} {p.dtype}")
    # written so that a NaN fails too; bf16 has 8 bits, hence a tolerance from the dtype
    tolerance = max(1e-4, 8 * torch.finfo(p.dtype).eps)
    if not (p >= 0).all() or not ((p.sum(-1) - 1).abs() <= tolerance).all():
        first = "; classes at dimension 1 are put last by p.movedim(1, -1)" if p.ndim > 2 else ""
        raise ValueError(f"probabilities must be non-negative and sum to 1 over classes; were logits given?{first}")
