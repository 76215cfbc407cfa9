"""Many steps of a sampler: warm-up, thinning, progress, a checkpoint, and an error where they diverge."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from curvops.checkpoint import Checkpoint, Place, digest, seed_of
from curvops.checks import check_generator, checked_number, checked_whole
from curvops.progress import Progress, check_progress, shown
from curvops.sampling.chain import Chain
from curvops.sampling.divergence import Watch
from curvops.sampling.feed import Feed, require_repeatable
from curvops.sampling.log_density import LogPosterior
from curvops.sampling.metric import OperatorMetric
from curvops.sampling.schedules import Constant
from curvops.sampling.state import Info, State
from curvops.sampling.step_size import StepSizeSearch
from curvops.sampling.transition import Transition

TRACES = ("log_posterior", "acceptance", "energy_error")


def run(
    sampler: Any,
    start: Any,
    batches: Any = None,
    *,
    steps: int,
    warmup: int = 0,
    thin: int = 1,
    target_acceptance: float | None = None,
    generator: torch.Generator | None = None,
    progress: Progress = None,
    checkpoint: Place | None = None,
) -> Chain:
    """Take steps of a sampler and keep draws.

    Args:
        sampler: of `co.sampling`: a sampler, an optimiser, or `chains(sampler, k)` of one.
        start: parameters, as `sampler.init` takes them, or the state of an earlier run, which stays as it is.
        batches: a list of batches, a DataLoader or another iterable that can be read again; `[(X, y)]` takes all data
            at each step. None where `log_posterior` needs none.
        steps: after warm-up.
        warmup: steps before, of which nothing is kept.
        thin: steps between two draws: `steps // thin` are kept.
        target_acceptance: with a warm-up of a Metropolis sampler, the mean acceptance probability that its step size
            is set to, by stochastic approximation with averaged trials; .57 suits LMC, .65–.8 HMC. Some hundred steps
            of a chain that is where its law is; one still on its way there has other step sizes.
        generator: source of the state's generators where `start` are parameters.
        progress: as everywhere: None, a flag or a function (what, done, total).
        checkpoint: a folder for what is reached, also when the run is interrupted. The same call goes on from there
            and ends with the same bits; the folder keeps the result, which a later call returns at once. Another
            start, sampler, `co.sampling.log_posterior` or generator is refused; batches are not compared.

    Returns:
        A `Chain`: draws (k, S, d), what each step said, the last state, and the sampler as warm-up left it.

    Raises:
        Diverged: the energy grows beyond what a stable step allows, or no proposal is accepted in 100 steps; the
            message names the step size to try.
        TypeError, ValueError: arguments of another kind, batches that can be read only once or change their structure,
            a checkpoint of another problem.
        OSError: the checkpoint cannot be written.
    """
    if not isinstance(sampler, Transition):
        raise TypeError(f"sampler must be one of co.sampling (sgld, …), got {type(sampler).__name__}.")
    steps, warmup, thin = (
        checked_whole("steps", steps, 1),
        checked_whole("warmup", warmup, 0),
        checked_whole("thin", thin, 1),
    )
    if thin > steps:
        raise ValueError(f"thin={thin} is more than steps={steps}: no draw would be kept.")
    check_generator(generator)
    check_progress(progress)
    adaptation = _adaptation(sampler, target_acceptance, warmup)
    if isinstance(start, State) and generator is not None:
        raise ValueError("start is a state, which holds its own generators: leave generator out.")
    seed = None if checkpoint is None else seed_of(generator)
    state = start if isinstance(start, State) else sampler.init(start, generator)
    sampler._check_state(state)
    if checkpoint is not None:
        require_repeatable(batches)

    def problem() -> dict[str, Any]:
        held = {f"the sampler's {name}": text for name, text in _options(sampler).items()}
        random = digest([state.random]) if isinstance(start, State) else seed
        plan = {"steps": steps, "warmup": warmup, "thin": thin, "target_acceptance": target_acceptance}
        return {**plan, **held, "the start": digest([state.theta]), "the generator": random}

    kept = Checkpoint(checkpoint, "a sampler", problem, state.theta.device)
    known = kept.outcome if kept.result is not None else kept.state
    reached = _Reached.begun(sampler, state, steps // thin, steps, adaptation)
    if known is not None:
        reached = reached.restored(known)
    if kept.result is None:
        reached = _taken(sampler, reached, Feed(batches, reached.position), kept, warmup, thin, progress)
        kept.finish(reached.record() if kept else None)
    return reached.chain(sampler, thin)


@dataclass(frozen=True, eq=False)
class _Reached:
    """How far a run has come, consistent whenever it is interrupted."""

    done: int
    """Steps, those of warm-up included."""
    state: Any
    draws: Tensor
    traces: dict[str, Tensor]
    adaptation: StepSizeSearch | None
    position: Any = None

    @classmethod
    def begun(
        cls, sampler: Transition, state: Any, kept: int, steps: int, adaptation: StepSizeSearch | None
    ) -> _Reached:
        """Nothing yet."""
        theta = state.theta if state.theta.ndim == 2 else state.theta.unsqueeze(0)
        k = len(theta)
        traced = TRACES if sampler.metropolis else TRACES[:1]
        traces = {name: theta.new_full((k, steps), math.nan, dtype=torch.float64) for name in traced}
        return cls(0, state, theta.new_empty(k, kept, theta.shape[-1]), traces, adaptation)

    def advanced(self, state: Any, info: Info, warmup: int, thin: int, position: Any) -> _Reached:
        """After one more step."""
        at, adaptation = self.done - warmup, self.adaptation
        if at >= 0:
            for name, trace in self.traces.items():
                trace[:, at] = getattr(info, name)
            if (at + 1) % thin == 0 and at // thin < self.draws.shape[1]:
                self.draws[:, at // thin] = state.theta
        elif adaptation is not None:
            assert info.acceptance is not None
            adaptation = adaptation.updated(float(info.acceptance.mean()))
        return replace(self, done=self.done + 1, state=state, adaptation=adaptation, position=position)

    def record(self) -> dict[str, Any]:
        """As plain values and tensors."""
        state = {f.name: getattr(self.state, f.name) for f in fields(self.state)}
        state = {name: value for name, value in state.items() if isinstance(value, Tensor | dict)}
        adaptation = None if self.adaptation is None else list(astuple(self.adaptation))
        return {
            "done": self.done,
            "state": state,
            "draws": self.draws,
            "traces": self.traces,
            "adaptation": adaptation,
            "position": self.position,
        }

    def restored(self, record: Any) -> _Reached:
        """What a record holds, with this one's structure."""
        device = self.state.theta.device
        held = {
            name: _placed(value, device) if name not in ("step", "random") else value.cpu()
            for name, value in record["state"].items()
        }
        adaptation = None if record["adaptation"] is None else StepSizeSearch(*record["adaptation"])
        traces = {name: trace.to(device) for name, trace in record["traces"].items()}
        state, draws = replace(self.state, **held), record["draws"].to(device)
        return _Reached(record["done"], state, draws, traces, adaptation, record["position"])

    def chain(self, sampler: Transition, thin: int) -> Chain:
        """The result."""
        adapted = _adapted(sampler, self.adaptation, False)
        traces = {name: self.traces.get(name) for name in TRACES}
        return Chain(self.draws, **traces, thin=thin, state=self.state, sampler=adapted)  # type: ignore[arg-type]


def _taken(
    sampler: Transition, reached: _Reached, feed: Feed, kept: Checkpoint, warmup: int, thin: int, progress: Progress
) -> _Reached:
    """All steps that are left."""
    total = warmup + reached.traces["log_posterior"].shape[1]
    # Without a checkpoint nobody sees a state between two steps: they are made in place, on a copy.
    inplace = not kept
    if inplace:
        reached = replace(reached, state=reached.state.clone())
    watch = Watch(sampler)
    adapted: Any = None
    with shown("sampling", total, progress) as bar:
        bar.done = reached.done
        try:
            while reached.done < total:
                if adapted is None or reached.done <= warmup:
                    adapted = _adapted(sampler, reached.adaptation, reached.done < warmup)
                batch = feed.next()
                if sampler.metropolis and feed.position["index"] > 1:
                    raise ValueError(
                        "a pass gives more than one batch: samplers that accept or reject need all data at each step, "
                        "[(X, y)]; for minibatches use sgld, sghmc or baoa."
                    )
                watch.before(reached.state, batch)
                state, info = adapted.update(reached.state, batch, inplace=inplace)
                watch.after(info, adapted, reached.adaptation is not None and reached.done < warmup)
                reached = reached.advanced(state, info, warmup, thin, feed.position)
                kept.save(reached.record)
                bar.advance()
            watch.finish(reached.state)
        except BaseException:
            kept.save(reached.record, now=True)
            raise
    return reached


def _adaptation(sampler: Transition, target: float | None, warmup: int) -> StepSizeSearch | None:
    if target is None:
        return None
    if not sampler.metropolis:
        raise ValueError(
            f"target_acceptance is for Metropolis samplers (hmc, lmc, pcn); {type(sampler).__name__} is none."
        )
    checked_number("target_acceptance", target, "(0, 1)")
    if warmup < 1:
        raise ValueError("target_acceptance is reached in a warm-up: give warmup=, some hundred steps.")
    if not isinstance(sampler.step_size, Constant):
        raise ValueError("target_acceptance sets the step size, which follows a schedule here: give it as a number.")
    return StepSizeSearch.begun(sampler.step_size.value, float(target), sampler.largest_step)


def _adapted(sampler: Transition, adaptation: StepSizeSearch | None, warming_up: bool) -> Transition:
    """The sampler with the step size that this stage of the adaptation has."""
    if adaptation is None:
        return sampler
    return sampler.with_step_size(adaptation.trial if warming_up else adaptation.final)


def _options(sampler: Transition) -> dict[str, str]:
    """What tells this sampler from others, in words that do not change from process to process.

    Of a function of the user's own nothing is known.
    """
    found = {"method": type(sampler).__name__}
    for each in fields(sampler):
        text = repr(getattr(sampler, each.name))
        if " at 0x" not in text:
            found[each.name] = text
    if isinstance(sampler.metric, OperatorMetric):
        found["preconditioner"] = digest(sampler.metric.D.representation())
    if isinstance(sampler.log_posterior, LogPosterior):
        found["log posterior"] = sampler.log_posterior.fingerprint
    return found


def _placed(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    return {key: _placed(each, device) for key, each in value.items()} if isinstance(value, dict) else value
