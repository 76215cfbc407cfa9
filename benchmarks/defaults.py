"""What should `co.laplace(lin)` do if nothing else is said? Structures, priors, means and links on small settings.

    python -m benchmarks.defaults        # half an hour on one core

Networks are trained as people train them (AdamW, SGD with decay, stopped early), not to a mode. Each posterior predicts
test points and points of unseen classes; differences to the network itself are paired by seed.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import curvops as co
from benchmarks import study_page
from benchmarks.defaults_settings import SETTINGS, Points, Setting, train
from benchmarks.tables import table
from curvops import metrics
from curvops.plots import style
from curvops.posterior.predictions import answers

GRID = tuple(10 ** (k / 2) for k in range(-4, 10))
"""The prior precisions among which held-out points choose."""
MODES = (1.0, 10.0, 100.0, 1000.0)
"""The prior precisions at which the linear mode is found."""
LINKS = ("probit", "mc", "bridge")
DRAWS = 100
VARIANCES = (0.25, 1.0)
WEIGHTS = 1500
"""The most weights for which the full GGN is formed, and the linear mode found."""
SUBNETWORK = 200
MEASURES = ("NLL", "ECE", "Brier", "AUROC")

Moments = tuple[Tensor, Tensor]
"""Of logits at N points: means (N, C) and covariances (N, C, C)."""
Found = dict[str, Any]
"""By setting: "points", "weights", "network" (seeds, measures), and "rows" by "structure | rule": the "prior" of each
seed, "epistemic" (the AUROC of the mutual information), "seconds", and by link (seeds, measures)."""


def dense(lin: co.operators.Linearization) -> Any:
    """The GGN as a matrix."""
    matrix = co.GGN(lin).to_dense()
    return co.linalg.Dense((matrix + matrix.mT) / 2)  # in pairs of products it is symmetric to rounding only


STRUCTURES: dict[str, tuple[str, Callable[[co.operators.Linearization], Any]]] = {
    "last layer, full GGN": ("last layer", dense),
    "last layer, KFAC": ("last layer", co.KFAC),
    "KFAC": ("all", co.KFAC),
    "EKFAC": ("all", co.EKFAC),
    "diagonal": ("all", co.DiagonalGGN),
    "full GGN": ("all", dense),
    "subnetwork": ("subnetwork", dense),
}
"""By name the selected weights and the curvature."""


def probabilities(moments: Moments, link: str) -> Tensor:
    """Class probabilities of Gaussian logits."""
    mean, covariance = moments
    if link == "probit":
        return answers.scale_logits(mean, covariance.diagonal(dim1=-2, dim2=-1)).softmax(-1)
    if link == "bridge":
        return answers.bridge(mean, covariance)
    return drawn(moments).mean(0)


def drawn(moments: Moments) -> Tensor:
    """Class probabilities (draws, N, C) at draws of the logits, the same normals for every posterior."""
    mean, covariance = (part.float() for part in moments)
    values, vectors = torch.linalg.eigh(covariance)
    root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
    normals = torch.randn(DRAWS, mean.shape[-1], generator=torch.Generator().manual_seed(0), dtype=mean.dtype)
    return (mean + torch.einsum("kc,ndc->knd", normals, root)).softmax(-1).double()


def nll(p: Tensor, labels: Tensor) -> float:
    """Nats a point."""
    return -float(p.gather(1, labels.unsqueeze(1)).clamp_min(1e-12).log().mean())


def scores(p: Tensor, labels: Tensor) -> list[float]:
    """The measures of probabilities at test points, then points of unseen classes, which are told apart by entropy."""
    test = p[: len(labels)]
    found = [nll(test, labels), float(metrics.ece(test, labels)), float(metrics.brier(test, labels))]
    return [*found, apart(metrics.predictive_entropy(p), len(labels))]


def apart(uncertainty: Tensor, known: int) -> float:
    """The AUROC of unseen points against the known ones, which are first."""
    return float(metrics.auroc(uncertainty, torch.arange(len(uncertainty)) >= known))


class Cell:
    """The posteriors of one network over one selection of its weights."""

    def __init__(
        self, lin: co.operators.Linearization, points: Points, decay: float, modes: Sequence[float] = MODES
    ) -> None:
        self.lin, self.points, self.prior = lin, points, decay * len(points.x)
        self.inputs, theta = torch.cat([points.x_test, points.x_unseen]), None
        self.modes: dict[float, tuple[float, Tensor]] = {}
        """By prior precision log-likelihood − ½ scatter at the linear mode, and how far it is from θ*."""
        for precision in sorted(modes, reverse=True):
            mode = co.laplace(lin, co.GGN, precision, check_mode=False).linear_mode(x0=theta, rtol=1e-2)
            theta = mode.theta
            fit = float(mode.log_likelihood) - 0.5 * precision * float(theta.square().sum())
            self.modes[precision] = fit, theta - lin.theta

    def moved(self, moments: Moments, x: Tensor, precision: float) -> Moments:
        """The moments at x with the mean at the linear mode."""
        mean, covariance = moments
        return mean + (self.lin.jacobian(x) @ self.modes[precision][1]).reshape(mean.shape), covariance

    def rows(self, curvature: Callable[[co.operators.Linearization], Any]) -> dict[str, dict[str, Any]]:
        """By rule the prior that it chose, and what is predicted with it."""
        start = time.process_time()
        base = co.laplace(self.lin, curvature(self.lin), 1.0, check_mode=False)
        made = time.process_time() - start
        at_held = {a: predicted(base.with_prior(a), self.points.x_held) for a in {*GRID, *self.modes}}
        searched = time.process_time() - start
        found: dict[str, dict[str, Any]] = {}

        def add(
            rule: str,
            choose: Callable[[], co.posterior.Laplace],
            link: str | None = None,
            mode: float = 0,
            spent: float = made,
        ) -> None:
            begun = time.process_time()
            try:
                post = choose()
            except ValueError:  # the evidence has no maximum
                return
            moments = predicted(post, self.inputs)
            spent += time.process_time() - begun
            if mode:
                moments = self.moved(moments, self.inputs, mode)
            row = found.setdefault(rule, {"prior": float(post.prior_precision.log().mean().exp()), "seconds": spent})
            if link in (None, "mc"):
                p = drawn(moments)
                row["epistemic"] = apart(metrics.mutual_information(p), len(self.points.y_test))
                row["mc"] = scores(p.mean(0), self.points.y_test)
            for name in {"probit", "bridge"} & ({*LINKS} if link is None else {link}):
                row[name] = scores(probabilities(moments, name), self.points.y_test)

        def held(link: str, moments: Mapping[float, Moments]) -> float:
            losses = {a: nll(probabilities(each, link), self.points.y_held) for a, each in moments.items()}
            return min(losses, key=lambda a: losses[a])

        add("1", lambda: base)
        add("decay × N", lambda: base.with_prior(self.prior))
        add("evidence", lambda: co.evidence.maximize(base, mode="map"))
        add("evidence, per layer", lambda: co.evidence.maximize(base, "layers", mode="map"))
        for variance in VARIANCES:
            add(f"variance {variance:g}", partial(of_variance, base, self.points.x[:100], variance))
        of_grid = {a: at_held[a] for a in GRID}
        for link in LINKS:
            chosen = base.with_prior(held(link, of_grid))
            add("held-out", lambda post=chosen: post, link, spent=searched)
        add("held-out, scored by draws", lambda: base.with_prior(held("mc", of_grid)), spent=searched)
        if self.modes:
            ratio = {a: float(base.with_prior(a).log_evidence(mode="map").log_determinant_ratio) for a in self.modes}
            best = max(self.modes, key=lambda a: self.modes[a][0] - 0.5 * ratio[a])
            add("evidence, linear mode", lambda: base.with_prior(best))
            add("evidence, linear mode, mean there", lambda: base.with_prior(best), mode=best)
            elsewhere = {a: self.moved(at_held[a], self.points.x_held, a) for a in self.modes}
            for link in LINKS:
                precision = held(link, elsewhere)
                post = base.with_prior(precision)
                add("held-out, mean at the linear mode", lambda post=post: post, link, precision, searched)
        return found


def predicted(post: co.posterior.Laplace, x: Tensor) -> Moments:
    """Means and covariances of the logits."""
    found = post.predict(x, groups=1)
    mean = found.mean.squeeze(1)
    return mean, found.covariance_matrix.reshape(*mean.shape, mean.shape[-1])


def of_variance(post: co.posterior.Laplace, x: Tensor, variance: float) -> co.posterior.Laplace:
    """The posterior whose logits have this mean variance at x: a bisection of the prior precision."""
    low, high = -2.0, 5.0
    for _ in range(9):
        middle = (low + high) / 2
        wide = float(post.with_prior(10**middle).predict(x).variance.mean()) > variance
        low, high = (middle, high) if wide else (low, middle)
    return post.with_prior(10 ** ((low + high) / 2))


def measure(
    network: nn.Module, points: Points, decay: float, structures: Iterable[str] = tuple(STRUCTURES)
) -> dict[str, Any]:
    """What one network and all its posteriors predict."""
    inputs, data = torch.cat([points.x_test, points.x_unseen]), (points.x, points.y)
    everything = co.linearize(network, data, "classification", progress=False)
    count = len(everything.theta)
    few = co.select(everything, min(SUBNETWORK, count // 4), "predictive")
    lins = {"all": everything}
    for name, selected in (("last layer", "last_layer"), ("subnetwork", few)):
        lins[name] = co.linearize(network, data, "classification", parameters=selected, progress=False)
    found: dict[str, Any] = {"weights": count, "rows": {}}
    with torch.no_grad():
        found["network"] = scores(network(inputs).softmax(-1), points.y_test)
        cells = {
            name: Cell(lin, points, decay, MODES if count <= WEIGHTS and name != "subnetwork" else ())
            for name, lin in lins.items()
        }
        for structure in structures:
            name, curvature = STRUCTURES[structure]
            if structure == "full GGN" and count > WEIGHTS:
                continue
            for rule, row in cells[name].rows(curvature).items():
                found["rows"][f"{structure} | {rule}"] = row
    return found


def of_setting(setting: Setting, seeds: int, structures: Iterable[str] = tuple(STRUCTURES)) -> dict[str, Any]:
    """All seeds of a setting: by structure and rule a list over seeds."""
    networks = train(setting, range(seeds))
    points = [setting.points(setting.count, seed) for seed in range(seeds)]
    each = [measure(net, here, setting.decay, structures) for net, here in zip(networks, points)]
    rows: dict[str, Any] = {}
    for name in each[0]["rows"]:
        if all(name in one["rows"] for one in each):
            keys = each[0]["rows"][name]
            rows[name] = {key: rounded([one["rows"][name][key] for one in each]) for key in keys}
    found = {"points": setting.count, "weights": each[0]["weights"], "rows": rows}
    return {**found, "network": rounded([one["network"] for one in each])}


def rounded(tree: Any) -> Any:
    """Numbers to four digits: what seeds differ by is far more."""
    return [rounded(part) for part in tree] if isinstance(tree, list) else float(f"{tree:.4g}")


def study(seeds: int) -> Found:
    """Every setting; an interrupted study goes on with the next one."""
    found = {}
    for i, (name, setting) in enumerate(SETTINGS.items()):
        start = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # networks that are not at a mode, on purpose
            found[name] = study_page.part("defaults", f"{i}", partial(of_setting, setting, seeds))
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    return found


RULES = (
    "1",
    "decay × N",
    "evidence",
    "evidence, per layer",
    "evidence, linear mode",
    "evidence, linear mode, mean there",
    "variance 0.25",
    "variance 1",
    "held-out",
    "held-out, scored by draws",
    "held-out, mean at the linear mode",
)
"""In the order of the tables."""
CHOSEN = {"held-out": "KFAC | held-out", "variance 1/4": "KFAC | variance 0.25"}
"""What `co.laplace(lin)` does with held-out data, and without."""


NOTICED = 0.005
"""Nats a point: a smaller change of the NLL is not called worse."""
CHOICES = ("KFAC | held-out", "KFAC | variance 0.25", "KFAC | evidence", "last layer, KFAC | 1")
"""What `co.laplace` does with held-out data and without, what it does not do, and the default of laplace-torch."""
HEADER = ["NLL", "worst", "worse in", "ECE", "Brier", "AUROC"]


def changes(found: Found, row: str, link: str, measure: int = 0) -> list[Tensor]:
    """By setting that has the row, and by seed, how much its measure is above that of the network."""
    held = [one for one in found.values() if row in one["rows"]]
    return [one["rows"][row][link][:, measure] - one["network"][:, measure] for one in held]


def standard_error(values: Tensor) -> float:
    """Of the mean of paired differences."""
    return float(values.std()) / len(values) ** 0.5


def is_worse(values: Tensor) -> bool:
    """Whether a mean difference is above two of its standard errors, and large enough to be noticed."""
    return float(values.mean()) > max(NOTICED, 2 * standard_error(values))


def summary(found: Found, row: str, link: str = "probit") -> list[str]:
    """The mean change of the NLL, the worst setting's, how many settings are worse, and the other measures' changes."""
    each = changes(found, row, link)
    if not each:
        return [""] * len(HEADER)
    means = torch.stack([values.mean() for values in each])
    others = [torch.stack(changes(found, row, link, i)).mean() for i in range(1, len(MEASURES))]
    count = f"{sum(map(is_worse, each))} of {len(each)}"
    cells = [f"{float(value):+.3f}" for value in (means.mean(), means.max(), *others)]
    return [*cells[:2], count, *cells[2:]]


def settings_table(found: Found) -> str:
    """By setting what the network has, and how four choices change its NLL."""
    lines = []
    for name, one in found.items():
        each = [changes({name: one}, row, "probit")[0] for row in CHOICES]
        cells = [f"{float(values.mean()):+.3f} ± {standard_error(values):.3f}" for values in each]
        network = [f"{float(value):.3f}" for value in one["network"].mean(0)[:2]]
        lines.append([name, f"{one['weights']:,}", *network, *cells])
    header = ["setting", "D", "NLL", "ECE", "held-out", "variance 1/4", "evidence", "last layer, prior 1"]
    return table(header, lines)


def calibration_table(found: Found) -> str:
    """By setting the ECE and the Brier score of the network, and how the choices of `co.laplace` change them."""
    lines = []
    for name, one in found.items():
        cells = [name]
        for measure in (1, 2):
            cells.append(f"{float(one['network'][:, measure].mean()):.3f}")
            for row in CHOICES[: 4 - measure]:
                (values,) = changes({name: one}, row, "probit", measure)
                cells.append(f"{float(values.mean()):+.3f} ± {standard_error(values):.3f}")
        lines.append(cells)
    of_brier = ["Brier", "held-out", "variance 1/4"]
    return table(["setting", "ECE", "held-out", "variance 1/4", "evidence", *of_brier], lines)


def rules_tables(found: Found) -> str:
    """KFAC of all weights and of the last layer under every rule."""
    parts = []
    for structure in ("KFAC", "last layer, KFAC"):
        lines = [[rule, *summary(found, f"{structure} | {rule}")] for rule in RULES]
        parts.append(table([f"{structure}; prior:", *HEADER], lines))
    return "\n\n".join(parts)


def structures_tables(found: Found) -> str:
    """Every structure under three rules, with the seconds of the posterior, its prior and its predictions."""
    parts = []
    for rule in ("held-out", "variance 0.25", "evidence"):
        lines = []
        for structure in STRUCTURES:
            row = f"{structure} | {rule}"
            spent = [float(one["rows"][row]["seconds"].mean()) for one in found.values() if row in one["rows"]]
            lines.append([structure, *summary(found, row), f"{sum(spent) / len(spent):.2f}" if spent else ""])
        parts.append(table([f"prior: {rule}", *HEADER, "seconds"], lines))
    return "\n\n".join(parts)


def links_table(found: Found) -> str:
    """The links under three rules, for KFAC of all weights and of the last layer."""
    lines = [
        [f"{structure}; {rule}; {link}", *summary(found, f"{structure} | {rule}", link)]
        for structure in ("KFAC", "last layer, KFAC")
        for rule in ("held-out", "variance 0.25", "1")
        for link in LINKS
    ]
    return table(["structure; prior; link", *HEADER], lines)


def unseen_table(found: Found) -> str:
    """By setting how well unseen inputs are told apart: the network's entropy, then epistemic uncertainties."""
    rows = {"KFAC, held-out": "KFAC | held-out", "variance 1/4": "KFAC | variance 0.25", "prior 1": "KFAC | 1"}
    rows |= {
        "last layer, held-out": "last layer, KFAC | held-out",
        "last layer, 1/4": "last layer, KFAC | variance 0.25",
    }
    lines = []
    for name, one in found.items():
        values = [one["network"][:, 3], *(one["rows"][row]["epistemic"] for row in rows.values())]
        lines.append([name, *(f"{float(value.mean()):.3f}" for value in values)])
    return table(["setting", "network", *rows], lines)


def picture(found: Found) -> Figure:
    """By setting how much four choices change the NLL of the network."""
    figure = style.blank(8.6, 5.2)
    axes = figure.subplots()
    names = ("held-out points", "variance of logits 1/4", "evidence", "last layer, prior 1")
    for (name, look), row in zip(style.looks(names).items(), CHOICES):
        each = changes(found, row, "probit")
        means, errors = [float(v.mean()) for v in each], [standard_error(v) for v in each]
        bars = look._asdict() | {"linestyle": "none", "label": name, "markersize": 6, "capsize": 2}
        axes.errorbar(means, range(len(each)), xerr=errors, **bars)
    axes.axvline(0, color=style.GREY, linestyle=":")
    axes.set_yticks(range(len(found)), list(found))
    axes.invert_yaxis()
    style.dress(axes, "NLL minus that of the network (nats a point)", "")
    axes.legend(fontsize=style.SMALL, frameon=False)
    return figure


SECTIONS: dict[str, Callable[[Found], str]] = {
    "defaults: settings": settings_table,
    "defaults: calibration": calibration_table,
    "defaults: rules": rules_tables,
    "defaults: structures": structures_tables,
    "defaults: links": links_table,
    "defaults: unseen": unseen_table,
}
STUDY = study_page.Study(
    "defaults",
    __doc__,
    study,
    SECTIONS,
    "docs/defaults.md",
    figures={"defaults": picture},
    options={"seeds": (5, "networks of each setting")},
)

if __name__ == "__main__":
    STUDY.run()
