"""The demo from end to end: networks, posteriors, predictions, checks and figures, in order."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from tqdm import tqdm

import curvops as co
from curvops import metrics
from curvops.cli.demo import demo_checks, digits, figures, network, report
from curvops.cli.demo.report import LabelledPredictions, Stages

MAP, SCALED, LAPLACE = "MAP", "MAP + temperature", "Laplace (full GGN)"
SUBNETWORK = "Laplace (subnetwork)"
CHEAPER: dict[str, tuple[Any, str | None]] = {  # curvature and selection of the posteriors to compare it with
    "Laplace (KFAC)": (co.KFAC, None),
    "Laplace (diagonal)": (co.DiagonalGGN, None),
    "Laplace (last layer)": (co.GGN, "8.correction.*"),
    SUBNETWORK: (co.GGN, None),  # on weights chosen by their predictive variance
}
EVIDENCE_RTOL = 0.02
"""Relative accuracy of the log-determinant in the evidence."""


@dataclass(frozen=True)
class DemoSize:
    """The size of the demo: points, networks, training, samples."""

    train: int
    seeds: int
    width: int = 184
    test: int = 500
    pretrained_share: float = 0.7
    pretraining: int = 60
    epochs: int = 20
    prior_precision: float = 150.0
    samples: int = 64
    checked: int = 20
    grid: int = 9
    columns: int = 8
    subnetwork: int = 500


FULL = DemoSize(train=1000, seeds=3)
QUICK = DemoSize(train=1000, seeds=1, checked=10)


@dataclass(frozen=True, eq=False)
class Outcome:
    """The results of one network: tuned posterior, draws of the weights, predictions by method and angle."""

    model: torch.nn.Module
    post: co.posterior.Laplace
    draws: Tensor
    evidence: co.evidence.Evidence
    mode_gap: float
    temperature: float
    predicted: dict[str, dict[int, LabelledPredictions]]
    rows: dict[str, report.Row]


def run(
    settings: DemoSize,
    output: Path,
    seeds: int,
    seed: int,
    say: Callable[[str], None],
    group: ProcessGroup | None = None,
) -> bool:
    """Run the demo and write its results.

    Args:
        settings: Sizes of data, networks and samples.
        output: Folder for results.json, weights and figures; it is created if missing.
        seeds: The number of networks to train.
        seed: Seed of the first network.
        say: A function that is called with the lines of the report.
        group: The processes that share the data of the posteriors, each with a shard of them; each trains the same
            networks. None for one process.

    Returns:
        Whether all proofs among the checks passed.
    """
    data, stages = digits.load_digits(settings.train), Stages()
    output.mkdir(parents=True, exist_ok=True)
    test = data.test.first(settings.test)
    outcomes = []
    for s in tqdm(range(seed, seed + seeds), desc="networks", disable=None):
        stages.announce(f"network {s - seed + 1} of {seeds}")
        outcomes.append(_network(settings, data, test, s, output, stages, group))
    first = outcomes[0]
    _introduce(first, data, say)
    generator = torch.Generator().manual_seed(seed)
    done = _run_checks(settings, outcomes, data, test, stages)
    drawn = _draw_figures(settings, first, data, test, generator, output, stages)
    summaries = report.summarize([outcome.rows for outcome in outcomes])
    say("\n" + report.table(summaries))
    say("6 and 9 are left out of rotated digits and of AUROC: turned far enough, one becomes the other.\n")
    for s, outcome in enumerate(outcomes, seed):
        say(_evidence_line(s, outcome))
    say("\n" + stages.table() + "\n")
    for check in done:
        say(f"{'PASS' if check.passed else 'FAIL'}  {check.name}: {check.text}")
    results = {
        "settings": asdict(settings),
        "summary": summaries,
        "seeds": [_numbers(outcome) for outcome in outcomes],
        "stages": [dict(zip(("name", "seconds", "products"), row)) for row in stages.rows()],
        "checks": [asdict(check) for check in done],
        **drawn,
    }
    report.write(results, output / "results.json")
    say(f"\nNumbers, weights and figures: {output}/")
    say("\n" + report.conclude([outcome.rows for outcome in outcomes], MAP, LAPLACE))
    return all(check.passed for check in done if check.proof)


def _network(
    settings: DemoSize,
    data: digits.Digits,
    test: digits.Images,
    seed: int,
    output: Path,
    stages: Stages,
    group: ProcessGroup | None,
) -> Outcome:
    generator = torch.Generator().manual_seed(seed)
    path = output / f"network-{seed}.safetensors"
    first, second = data.train.parts(settings.pretrained_share)
    with stages.stage("train, save, load"):
        pretrained = network.pretrain(first, seed, settings.pretraining, settings.width)
        network.save(network.fit_mode(pretrained, second, settings.prior_precision, settings.epochs), path)
        model = network.load(path, settings.width)
    with stages.stage("linearise"):
        posterior = partial(_posterior, model, second, settings.prior_precision, group)
        start = posterior(stages.curvature())
        gap = start.mode_gap
    with stages.stage("evidence: tune the prior"):
        post = _tune(start, generator)
        evidence = post.log_evidence(rtol=EVIDENCE_RTOL, generator=generator)  # costs nothing after the tuning
    with stages.stage(f"{settings.samples} samples, one block solve"):
        before, deviations = stages.spent, post.deviations(settings.samples, generator=generator)
        stages.spent = before + deviations.matvecs  # function space needs no products with the GGN itself
        draws = post.mean + deviations.draws
    with stages.stage("predict test points, 7 angles"):
        temperature = float(metrics.temperature(post.lin.predict(data.validation.x), data.validation.y))
        predicted = {
            MAP: _by_angle(test, partial(_of_network, post.lin, 1.0)),
            SCALED: _by_angle(test, partial(_of_network, post.lin, temperature)),
            LAPLACE: _by_angle(test, partial(_of_posterior, post, draws)),
        }
    with stages.stage("KFAC, diagonal, last layer, subnetwork: all"):
        precision, x = float(start.prior_precision), data.validation.x
        chosen = co.select(start.lin, settings.subnetwork, "predictive", prior_precision=precision, x=x)
        for name, (curvature, parameters) in CHEAPER.items():
            selected = chosen if name == SUBNETWORK else parameters
            other = _tune(posterior(curvature, selected), generator)
            samples = other.sample(settings.samples, generator)
            predicted[name] = _by_angle(test, partial(_of_posterior, other, samples))
    rows = {name: report.score(p, test.is_unambiguous) for name, p in predicted.items()}
    return Outcome(model, post, draws, evidence, gap, temperature, predicted, rows)


def _posterior(
    model: torch.nn.Module,
    train: digits.Images,
    prior_precision: float,
    group: ProcessGroup | None,
    curvature: Any,
    parameters: Any = None,
) -> co.posterior.Laplace:
    """Make the posterior around the network's weights; the mode is checked only for all weights together."""
    own = slice(None)
    if group is not None:  # contiguous, so that points keep their places, and draws keep their noise
        rank, size = group.rank(), group.size()
        own = slice(len(train) * rank // size, len(train) * (rank + 1) // size)
    shard, likelihood = (train.x[own], train.y[own]), co.likelihoods.Categorical()
    lin = co.linearize(model, shard, likelihood, parameters=parameters, process_group=group)
    return co.laplace(lin, curvature=curvature, prior_precision=prior_precision, check_mode=parameters is None)


def _tune(post: co.posterior.Laplace, generator: torch.Generator) -> co.posterior.Laplace:
    """Return the posterior for the prior precision with the largest evidence."""
    return co.evidence.maximize(post, rtol=EVIDENCE_RTOL, generator=generator)


def _by_angle(
    test: digits.Images, predict: Callable[[digits.Images], LabelledPredictions]
) -> dict[int, LabelledPredictions]:
    """Predict all digits upright, and the unambiguous ones rotated by each angle."""
    turned = {angle: test.unambiguous().turn(angle) for angle in digits.ANGLES}
    return {angle: predict(images) for angle, images in {0: test, **turned}.items()}


def _of_network(lin: co.operators.Linearization, temperature: float, images: digits.Images) -> LabelledPredictions:
    return LabelledPredictions(images.y, (lin.predict(images.x) / temperature).softmax(-1), None)


def _of_posterior(post: co.posterior.Laplace, draws: Tensor, images: digits.Images) -> LabelledPredictions:
    at = post.at(images.x, samples=draws)
    return LabelledPredictions(images.y, at.probabilities(link="probit"), at.uncertainty())


def _run_checks(
    settings: DemoSize, outcomes: list[Outcome], data: digits.Digits, test: digits.Images, stages: Stages
) -> list[demo_checks.Check]:
    first, x = outcomes[0], test.x[: settings.checked]
    with stages.stage(f"check: {settings.checked} points exactly"):
        solved = first.post.predict(x, rtol=1e-5).variance
    with stages.stage("check: dense, function space"):
        prior = float(first.post.prior_precision)
        reference = demo_checks.compute_variances(
            first.model, data.train.parts(settings.pretrained_share)[1].x, x, prior
        )
    drawn = first.post.predict(x, samples=first.draws).variance
    by_method = [
        torch.stack([metrics.nll(o.predicted[name][0].probabilities, test.y, reduction="none") for o in outcomes])
        for name in (LAPLACE, MAP)
    ]
    return [
        demo_checks.check_exact(solved, reference),
        demo_checks.check_samples(drawn, solved, reference, settings.samples),
        demo_checks.check_nll(*by_method),
    ]


def _draw_figures(
    settings: DemoSize,
    first: Outcome,
    data: digits.Digits,
    test: digits.Images,
    generator: torch.Generator,
    output: Path,
    stages: Stages,
) -> dict[str, Any]:
    post, chosen = first.post, float(first.post.prior_precision)
    followed = (MAP, SCALED, LAPLACE)
    rotated = {name: _joined([first.predicted[name][a] for a in digits.ANGLES]) for name in followed}
    figures.reliability(rotated, output / "reliability.png")
    figures.rotation(first.rows, followed, output / "rotation.png")
    with stages.stage("figure: evidence and validation"):
        grid = torch.logspace(-1, 1, settings.grid, dtype=torch.float64).mul(chosen).tolist()
        estimates = co.evidence.grid(post, grid, rtol=EVIDENCE_RTOL, generator=generator)
        nll = [figures.validation_nll(post.with_prior(value), data.validation, generator) for value in grid]
        figures.evidence(grid, estimates, nll, chosen, output / "evidence.png")
    with stages.stage("figure: conjugate gradients"):
        solves = figures.convergence(post, settings.columns, generator, output / "convergence.png")
    with stages.stage("figure: spectrum of the GGN"):
        spectrum = figures.spectrum(post.curvature, generator, output / "spectral_density.png")
    with stages.stage("figures: regression, covariance"), warnings.catch_warnings():
        warnings.simplefilter("ignore", co.errors.NoProcessGroupWarning)  # each process fits the curve by itself
        figures.regression(generator, output / "regression.png")
        labels = [str(int(digit)) for digit in test.y[:4]]
        figures.covariance(post, test.x[:4], labels, output / "covariance.png")
    curve = [
        {"prior_precision": p, "log_evidence": float(e.value), "interval": _interval(e), "validation_nll": loss}
        for p, e, loss in zip(grid, estimates, nll)
    ]
    return {"evidence_curve": curve, "conjugate_gradients": solves, "spectrum": spectrum}


def _joined(parts: list[LabelledPredictions]) -> LabelledPredictions:
    return LabelledPredictions(torch.cat([p.labels for p in parts]), torch.cat([p.probabilities for p in parts]), None)


def _introduce(first: Outcome, data: digits.Digits, say: Callable[[str], None]) -> None:
    parameters = first.post.lin.num_parameters
    say(
        f"{len(data.train)} digits for training: most of them pretrain a network of {parameters:,} parameters, and "
        f"{first.post.lin.num_data} give the posterior of a\ncorrection to each of its weights, under the prior "
        "N(0, 1 / prior precision). As a dense float64 matrix the GGN would "
        f"take {8 * parameters**2 / 1e9:.1f} GB; it is never formed."
    )
    say(f"Gradient of the log posterior at the trained weights: {first.mode_gap:.3f} times the prior's (0 at a mode).")


def _estimates(outcome: Outcome) -> dict[str, co.linalg.Estimate]:
    return {"log evidence": outcome.evidence, "effective parameters": outcome.evidence.effective_parameters}


def _interval(estimate: co.linalg.Estimate) -> list[float]:
    return [float(v) for v in estimate.interval()]


def _evidence_line(seed: int, outcome: Outcome) -> str:
    parts = []
    for what, e in _estimates(outcome).items():
        low, high = _interval(e)
        parts.append(f"{what} {float(e.value):.1f} (95 %: {low:.1f} to {high:.1f})")
    return f"seed {seed}: prior precision {float(outcome.post.prior_precision):.3g}, {', '.join(parts)}"


def _numbers(outcome: Outcome) -> dict[str, Any]:
    estimates = {
        what.replace(" ", "_"): {"value": float(e.value), "stderr": float(e.stderr), "interval": _interval(e)}
        for what, e in _estimates(outcome).items()
    }
    return {
        "prior_precision": float(outcome.post.prior_precision),
        "mode_gap": outcome.mode_gap,
        "temperature": outcome.temperature,
        "num_parameters": outcome.post.lin.num_parameters,
        **estimates,
        "rows": {name: asdict(row) for name, row in outcome.rows.items()},
    }
