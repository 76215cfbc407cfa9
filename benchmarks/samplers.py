"""What does a step of each sampler cost?   .venv-peers/bin/python -m benchmarks.samplers [--pairs 15] [--no-peers]

The unit is one gradient: that of the mean log-likelihood of all 1,024 points of the MLP of `benchmarks.networks` plus
the log prior, by `loss.backward` on the module itself. A step computes one gradient, draws 670k normal numbers and
passes over vectors of that length; the row "noise and passes" is the cost of the last two alone. Each row alternates
with its unit; posteriors (Duffield et al. 2024) runs in the same turns. Then: SGLD with KFAC's inverse as its
preconditioner, whose factors are refreshed every 100 steps, and 16 chains of small networks by vmap, compared with a
loop.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import curvops as co
from benchmarks.networks import Problem, build
from benchmarks.timing import Comparison, Run, alternate, seconds

S = co.sampling
STEP, ALPHA, REFRESH = 1e-4, 1.0, 100


def unit_of(problem: Problem, precision: float = 1.0) -> Run:
    """One gradient of the log posterior over N."""
    loss, model, N = nn.CrossEntropyLoss(), problem.model, problem.points
    parameters = list(model.parameters())

    def gradient() -> object:
        value = -loss(model(problem.inputs), problem.targets)
        value = value - 0.5 * precision / N * sum(p.square().sum() for p in parameters)
        return torch.autograd.grad(value, parameters)

    return gradient


def step_of(sampler: Any, params: Any, batch: Any) -> Run:
    """Steps in place, one after the other."""
    state = sampler.init(params, torch.Generator().manual_seed(0))
    return lambda: sampler.update(state, batch, inplace=True)


def ours(f: Any) -> dict[str, Any]:
    """A sampler of each kind."""
    return {
        "sgld": S.sgld(f, STEP),
        "sghmc": S.sghmc(f, STEP, alpha=ALPHA),
        "sgnht": S.sgnht(f, STEP, alpha=ALPHA),
        "baoa": S.baoa(f, STEP, alpha=ALPHA),
        "lmc": S.lmc(f, STEP),
        "hmc, 1 leapfrog step": S.hmc(f, STEP, leapfrog_steps=1),
        "AdamW": S.optimizer(torch.optim.AdamW, f, lr=STEP),
    }


def peers(problem: Problem) -> dict[str, Run]:
    """Steps in place of posteriors, where it is installed."""
    try:
        import posteriors  # type: ignore[import-not-found]
    except ImportError:
        return {}
    model, N, loss = problem.model, problem.points, nn.CrossEntropyLoss()

    def log_posterior(params: Any, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        out = torch.func.functional_call(model, params, (batch[0],))
        prior = -0.5 * sum(p.square().sum() for p in params.values())
        return -loss(out, batch[1]) + prior / N, torch.tensor([])

    options: dict[str, dict[str, float]] = {"sgld": {}, "sghmc": {"alpha": ALPHA}, "sgnht": {"alpha": ALPHA}}
    options["baoa"] = {"alpha": ALPHA}
    batch, found = (problem.inputs, problem.targets), {}
    for name, chosen in options.items():
        built = getattr(posteriors.sgmcmc, name).build(log_posterior, lr=STEP, temperature=1 / N, **chosen)
        params = {key: p.detach().clone() for key, p in model.named_parameters()}
        found[name] = functools.partial(_peer_step, built, built.init(params), batch)
    return found


def _peer_step(built: Any, state: Any, batch: Any) -> object:
    return built.update(state, batch, inplace=True)


def traffic_of(problem: Problem) -> Run:
    """A draw of 670k normal numbers and three passes."""
    a, b, c = (torch.zeros(problem.num_parameters) for _ in range(3))

    def passes() -> object:
        c.normal_()
        a.add_(b, alpha=1e-3).add_(c, alpha=1e-3)
        return torch.cat([a[:100], a[100:]])

    return passes


def preconditioned(problem: Problem) -> tuple[Run, float]:
    """A step of SGLD preconditioned by KFAC's inverse, and the seconds of a refresh over `REFRESH` steps."""
    batch = problem.inputs, problem.targets
    f = S.log_posterior(problem.model, "classification", data_size=problem.points)

    def refresh() -> Any:
        lin = co.linearize(problem.model, batch, "classification")
        D = (co.KFAC(lin).add_diagonal(1.0) * (1 / problem.points)).inverse()
        sampler = S.sgld(f, STEP, preconditioner=D)
        sampler.update(sampler.init(f.params), batch)  # what is kept is made at the first step
        return sampler

    sampler = refresh()
    return step_of(sampler, f.params, batch), seconds(refresh) / REFRESH


def shown(name: str, found: Comparison, extra: str = "") -> None:
    r = found.ratio
    print(
        f"| {name} | {r.median:.2f} | {r.low:.2f}–{r.high:.2f} | {1e3 * found.seconds.median:.1f} | {extra} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--only", nargs="*", choices=["steps", "chains", "kfac"], default=["steps", "chains", "kfac"])
    arguments = parser.parse_args()
    problem = build("mlp")
    unit, batch = unit_of(problem), (problem.inputs, problem.targets)
    f = S.log_posterior(problem.model, "classification", data_size=problem.points)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread(s), D = {problem.num_parameters:,}\n")
    print("| step | gradients (median) | range | ms | |\n|---|---:|---:|---:|---|")
    if "steps" in arguments.only:
        passes = alternate(unit, traffic_of(problem), arguments.pairs)
        shown("noise and passes alone", passes)
        others = {} if arguments.no_peers else peers(problem)
        for name, sampler in ours(f).items():
            mine = step_of(sampler, f.params, batch)
            found = alternate(unit, mine, arguments.pairs)
            extra = ""
            if name in others:
                beside = alternate(others[name], mine, arguments.pairs)
                extra = f"{beside.ratio.median:.2f} ({beside.ratio.low:.2f}–{beside.ratio.high:.2f}) × posteriors"
            shown(name, found, extra)
    if "kfac" in arguments.only:
        for times in (1, 4):
            larger = replace(problem, inputs=problem.inputs.repeat(times, 1), targets=problem.targets.repeat(times))
            step, refresh = preconditioned(larger)
            found = alternate(unit_of(larger), step, arguments.pairs)
            more = f"+ {refresh / found.unit_seconds.median:.2f} for a refresh every {REFRESH} steps"
            shown(f"sgld, KFAC⁻¹, batch {larger.points}", found, more)
    if "chains" in arguments.only:
        print("\n| 16 chains by vmap | steps of a loop (median) | range | ms | |\n|---|---:|---:|---:|---|")
        for name in ("tiny", "small"):
            few = build(name)
            g, data = S.log_posterior(few.model, "classification", data_size=few.points), (few.inputs, few.targets)
            loop = [step_of(S.sgld(g, STEP), g.params, data) for _ in range(16)]
            together = step_of(S.chains(S.sgld(g, STEP), 16, vectorized=True), g.params, data)
            found = alternate(_all(loop), together, arguments.pairs)
            shown(f"{name}, D = {few.num_parameters}", found, f"{1 / found.ratio.median:.1f} times as fast")


def _all(runs: list[Run]) -> Callable[[], object]:
    return lambda: [run() for run in runs]


if __name__ == "__main__":
    main()
