"""Many steps of a sampler, in one chain or several: warm-up that tunes a step size, thinning, and divergence.

A run reads its batches in endless passes, each of which a later run can continue.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from curvops.ambient import Progress, as_step, progress_bar
from curvops.argument_types import GivenBatch, SamplingMethod, Start
from curvops.checkpoint import Checkpoint, Place, begin, identify, seed_of
from curvops.checks import check_kind, check_options, checked_number, refuse
from curvops.errors import DivergenceError
from curvops.linalg.core.algorithm import algorithm
from curvops.ranks.process_group import Ranks, Spread
from curvops.sampling.log_density import LogPosterior
from curvops.sampling.state import Chain, Info, State
from curvops.sampling.transition import Constant, Transition
from curvops.storage import from_record


class Feed:
    """An endless sequence of batches; `Feed(batches, position)` continues from a `position`.

    batches: an iterable that can be read again (a list, a DataLoader), or None for a density without data.
    """

    def __init__(self, batches: Any, position: Any = None) -> None:
        self._batches = _checked(batches)
        self.position: dict[str, Any] = position or {"index": 0, "generator": None}
        """The number of batches used in this pass, and the state of the loader's generator when the pass began."""

    def __iter__(self) -> Iterator[Any]:
        if self._batches is None:
            yield from itertools.repeat(None)
        source = getattr(order_of(self._batches), "generator", None)
        while True:
            skipped, state = self.position["index"], self.position["generator"]
            if isinstance(source, torch.Generator):
                if state is None:
                    state = source.get_state()
                else:
                    source.set_state(state.cpu())
            for index, batch in enumerate(self._batches, 1):
                if index > skipped:
                    self.position = {"index": index, "generator": state}
                    yield batch
            empty = not self.position["index"]
            refuse(empty, f"the data are empty: a pass over this {type(self._batches).__name__} gave no batch.")
            self.position = {"index": 0, "generator": None}


def order_of(batches: Any) -> Any:
    """Return what has the generator of the order: the sampler of a DataLoader or of its batches, or the batches."""
    if not isinstance(batches, DataLoader):
        return batches
    sampler = getattr(batches.batch_sampler, "sampler", batches.sampler)
    return sampler if hasattr(sampler, "generator") else batches


def _checked(batches: Any) -> Any:
    """Return the batches; raise TypeError unless they can be read again in every pass."""
    pair = isinstance(batches, tuple) and len(batches) in (2, 3) and isinstance(batches[0], Tensor)
    if isinstance(batches, Iterator | Tensor | str) or pair or not (batches is None or isinstance(batches, Iterable)):
        raise TypeError(
            "batches must be a list of batches, [(inputs, targets)] if each step uses all data, or a DataLoader, got "
            f"{type(batches).__name__}. Pass torch.utils.data.DataLoader(dataset, batch_size=..., shuffle=True)."
        )
    return batches


class Watch:
    """A check of energies −log_posterior every few steps; it keeps the state before them to measure its curvature.

    On a quadratic of curvature h, a step beyond the stability limit multiplies the energy each time. From 1.02 times
    the limit on, the energy exceeds any bound within 100 steps, whereas a stable sampler stays at its thermal energy
    𝒯d/2.
    """

    def __init__(self, transition: Transition) -> None:
        self._transition = transition
        self._energies: list[Tensor] = []
        self._first: Tensor | None = None
        self._held: tuple[State, Any] | None = None
        self._accepted: list[Tensor] = []
        self._steps = 0

    def before(self, state: State, batch: Any) -> None:
        """Store the state before a step, after checking the energies every few steps."""
        if self._steps % self._transition.check_every == 0:
            self.look(state)
            self._held = state.clone(), batch
        self._steps += 1

    def after(self, info: Info, adapted: Transition, adapting: bool) -> None:
        """Store the energy of a step; raise DivergenceError if no proposal of the last hundred was to be accepted."""
        self._energies.append(-info.log_posterior)
        if info.acceptance is None or adapting:
            return
        self._accepted.append(info.acceptance)
        if len(self._accepted) == 100:
            mean = float(torch.stack(self._accepted).mean())
            self._accepted.clear()
            if mean < 1e-3:
                raise DivergenceError(
                    f"of 100 proposals with step_size={adapted.step_size(self._steps - 1):g} none was likely to "
                    f"be accepted (mean probability {mean:.2g}){self.remedy()} Or use a warm-up to find one: "
                    "run(..., warmup=500, target_acceptance=0.6)."
                )

    def look(self, state: State) -> None:
        """Check the energies of the steps since the last check, which led to this state."""
        if not self._energies:
            return
        energies = torch.stack(self._energies)
        self._energies.clear()
        if self._first is None:
            self._first = energies[0]
        temperature = self._transition.temperature(int(state.step)) / self._transition.data_size
        # No stable sampler's fluctuations reach a hundred times its thermal energy and its start's own size.
        bound = 100 * (temperature * state.structure.size + self._first.abs() + 1)
        if bool(((energies - self._first) <= bound).all()) and bool(state.theta.isfinite().all()):
            return
        name, length = self._transition.step_length(int(state.step))
        worst = float(energies.max()) if bool(energies.isfinite().all()) else float("inf")
        raise DivergenceError(
            f"the energy −log_posterior grew from {float(self._first.max()):.4g} to {worst:.4g} within "
            f"{self._steps} steps of {name}={length:g}{self.remedy()}"
        )

    def remedy(self) -> str:
        """Return the end of a message: the largest curvature, and the step size to try."""
        assert self._held is not None
        state, batch = self._held
        theta = state.theta if state.theta.ndim == 1 else state.theta[0]
        curvature = largest_curvature(self._transition, theta, state, batch)
        limit = self._transition.stability_limit(curvature)
        if limit is None:
            name, length = self._transition.step_length(int(state.step))
            return f"; use a smaller step, {name}={length / 4:.2g}."
        return (
            f", where the largest curvature is {curvature:.3g} and steps up to {limit:.3g} are stable; try "
            f"step_size={limit / 2:.2g}."
        )


def largest_curvature(transition: Transition, theta: Tensor, state: State, batch: Any) -> float:
    """Compute the largest eigenvalue of D times the Hessian of −log_posterior by power iterations on differences."""
    generator = torch.Generator(theta.device).manual_seed(0)
    v = torch.empty_like(theta).normal_(generator=generator)
    h = torch.finfo(theta.dtype).eps ** (1 / 3) * (1 + theta.norm())  # balances rounding and the cubic term
    curvature = 0.0
    for _ in range(20):
        v = v / v.norm()
        ahead, behind = (
            transition.density.gradient(theta + sign * h * v, state.structure, batch)[1] for sign in (1.0, -1.0)
        )
        pushed = transition.metric.product((behind - ahead) / (2 * h))
        curvature = float(v @ pushed)
        if not pushed.isfinite().all() or float(pushed.norm()) == 0:
            break
        v = pushed
    return curvature


TRACES = ("log_posterior", "acceptance", "energy_error")


@algorithm
@torch.inference_mode(False)
def run(
    sampler: SamplingMethod,
    start: Start,
    batches: Iterable[GivenBatch] | None = None,
    *,
    steps: int,
    warmup: int = 0,
    thin: int = 1,
    target_acceptance: float | None = None,
    generator: torch.Generator | None = None,
    progress: Progress = None,
    checkpoint: Place | None = None,
) -> Chain:
    """Take steps of a sampler, and return the draws.

    Args:
        sampler: a sampler or optimiser of `co.sampling`, or `chains(sampler, k)` of one.
        start: parameters, as for `sampler.init`, or the state of an earlier run, which is not changed.
        batches: a list of batches, a DataLoader or another iterable that can be read again; `[(X, y)]` uses all data in
            each step. None if `log_posterior` needs no batches.
        steps: the number of steps after warm-up.
        warmup: the number of steps before them, of which nothing is kept.
        thin: the number of steps between two draws; `steps // thin` draws are kept.
        target_acceptance: for a Metropolis sampler with a warm-up, the mean acceptance probability to which its step
            size is tuned, by stochastic approximation with averaged trials; .57 suits LMC, .65–.8 HMC. Tuning takes
            some hundred steps of a chain in equilibrium; a chain still on its way there needs other step sizes.
        generator: the source of the state's generators if `start` are parameters.
        progress: None, a flag or a function (what, done, total), as in other calls.
        checkpoint: a folder for intermediate results, also written when the run is interrupted. The same call resumes
            from there and gives bitwise the same draws; the folder keeps the result, which a later call returns at
            once. Another start, generator, sampler or log posterior (its network, likelihood, prior and N) is rejected.
            Batches are not compared, and code of your own is known by its name alone (a log posterior, a loss or a
            schedule that is a function, a module's `forward`): take another folder after changing it.

    Returns:
        A `Chain`: draws (k, S, d), the traces of all steps, the last state, and the sampler with its step size from the
        warm-up.

    Raises:
        DivergenceError: the energy grows beyond what a stable step allows, or no proposal is accepted in 100 steps; the
            message suggests a step size.
        TypeError, ValueError: arguments are of another kind, batches can be read only once,
            or the checkpoint belongs to another problem.
        OSError: the checkpoint cannot be written.

    Examples:
        >>> density = co.sampling.log_posterior(model, "classification", data_size=8)
        >>> sampler = co.sampling.sgld(density, 1e-3)
        >>> co.sampling.run(sampler, density.params, [(x, y)], steps=20, warmup=5, thin=2).theta.shape
        torch.Size([1, 10, 17])
    """
    check_kind("sampler", sampler, Transition, "one of co.sampling (sgld, …)")
    check_options(steps=steps, warmup=warmup, thin=thin, generator=generator, progress=progress)
    refuse(thin > steps, f"thin={thin} is more than steps={steps}: no draw would be kept.")
    adaptation = _adaptation(sampler, target_acceptance, warmup)
    given_twice = isinstance(start, State) and generator is not None
    refuse(given_twice, "start is a state, which has its own generators: leave generator out.")
    random = identify(start.random) if isinstance(start, State) else seed_of(generator)  # before the first draw from it
    state = start if isinstance(start, State) else sampler.init(start, generator)
    if sampler.ranks is not None and sampler.spread is None:
        sampler.ranks.require_equal(_options(sampler))
    if checkpoint is not None:
        if sampler.spread is not None:
            raise ValueError("checkpoint= is not for chains that ranks share: run them in parts, from chain.state.")
        order = order_of(batches)
        kind, unseeded = type(order).__name__, order is not batches and order.generator is None
        refuse(unseeded, f"a checkpoint needs the same batches: give the DataLoader (or your own {kind}) a generator=.")

    facts: dict[str, Any] = {"generator": random, "batches": None}
    if not isinstance(start, State):  # without what `init` draws
        facts["start"] = identify([state.theta, state.structure.names, state.structure.shapes])
    problem, device = partial(_problem, sampler), state.theta.device
    saved = begin("a sampler", checkpoint, problem, device, False, sampler.ranks, **facts)
    record = saved.outcome if saved.done else saved.state
    # Without a checkpoint, no state between two steps is visible: steps are made in place, on a copy.
    theta, traced = state.theta.view(-1, state.theta.shape[-1]), TRACES if sampler.metropolis else TRACES[:1]
    traces = {name: theta.new_full((len(theta), steps), math.nan, dtype=torch.float64) for name in traced}
    draws = theta.new_empty(len(theta), steps // thin, theta.shape[-1])
    now = _RunState(0, state if saved else state.clone(), draws, traces, adaptation)
    if record is not None:
        now = now.restore(record)
    if not saved.done:
        now = _take_steps(sampler, now, Feed(batches, now.position), saved, warmup, thin, progress)
        if saved:
            saved.finish(now.record())
    return now.chain(sampler, thin)


@dataclass(frozen=True, eq=False)
class _RunState:
    """The state of a run, consistent whenever it is interrupted."""

    done: int
    """The number of steps, including warm-up."""
    state: Any
    draws: Tensor
    traces: dict[str, Tensor]
    adaptation: StepSizeSearch | None
    position: Any = None

    def advance(
        self, state: Any, info: Info, warmup: int, thin: int, position: Any, spread: Spread | None
    ) -> _RunState:
        """Return the state after one more step."""
        at, adaptation = self.done - warmup, self.adaptation
        if at >= 0:
            for name, trace in self.traces.items():
                trace[:, at] = getattr(info, name)
            if (at + 1) % thin == 0 and at // thin < self.draws.shape[1]:
                self.draws[:, at // thin] = state.theta
        elif adaptation is not None:
            assert info.acceptance is not None
            acceptance = float(info.acceptance.mean()) if spread is None else spread.mean(info.acceptance)
            adaptation = adaptation.update(acceptance)
        return replace(self, done=self.done + 1, state=state, adaptation=adaptation, position=position)

    def record(self) -> dict[str, Any]:
        """Return the state as plain values and tensors."""
        state = {name: value for name, value in vars(self.state).items() if isinstance(value, Tensor | dict)}
        return vars(self) | {"state": state}

    def restore(self, record: Any) -> _RunState:
        """Return the state of a record, with the structure of this one."""
        return from_record(_RunState, {**record, "state": replace(self.state, **record["state"])})

    def chain(self, sampler: Transition, thin: int) -> Chain:
        """Return the resulting chain."""
        adapted = _with_step_size(sampler, self.adaptation, False)
        traces = {name: self.traces.get(name) for name in TRACES}
        chain = Chain(self.draws, **traces, thin=thin, state=self.state, sampler=adapted)  # type: ignore[arg-type]
        if sampler.spread is None:
            return chain
        return chain.gathered(sampler.spread) if sampler.spread.gather else replace(chain, spread=sampler.spread)


def _take_steps(
    sampler: Transition, now: _RunState, feed: Feed, saved: Checkpoint, warmup: int, thin: int, progress: Progress
) -> _RunState:
    """Take all remaining steps."""
    total = warmup + now.traces["log_posterior"].shape[1]
    watch, adapted, batches = Watch(sampler), _with_step_size(sampler, now.adaptation, now.done < warmup), iter(feed)
    with progress_bar("sampling", total, progress) as bar:
        bar.done = now.done
        try:
            while now.done < total:
                batch, warming_up = next(batches), now.done < warmup
                if sampler.metropolis and feed.position["index"] > 1:
                    raise ValueError("a pass gives several batches, but this sampler needs all data, [(X, y)].")
                watch.before(now.state, batch)
                state, info = as_step(0, adapted.update, now.state, batch, inplace=not saved)
                watch.after(info, adapted, now.adaptation is not None and warming_up)
                now = now.advance(state, info, warmup, thin, feed.position, sampler.spread)
                if warming_up:
                    adapted = _with_step_size(sampler, now.adaptation, now.done < warmup)
                saved.save(now.record)
                bar.advance()
            watch.look(now.state)
        except BaseException:
            saved.save(now.record, now=True)
            raise
    return now


def _adaptation(sampler: Transition, target: float | None, warmup: int) -> StepSizeSearch | None:
    if target is None:
        return None
    checked_number("target_acceptance", target, "(0, 1)")
    if not sampler.metropolis or not warmup or not isinstance(sampler.step_size, Constant):
        raise ValueError(
            "target_acceptance is for Metropolis samplers (hmc, lmc, pcn) whose step size is a number, with a warmup=."
        )
    return StepSizeSearch.start(sampler.step_size.value, float(target), sampler.largest_step)


def _with_step_size(sampler: Transition, adaptation: StepSizeSearch | None, warming_up: bool) -> Transition:
    """Return the sampler with the step size of this stage of the adaptation."""
    if adaptation is None:
        return sampler
    return sampler.with_step_size(adaptation.trial if warming_up else adaptation.final)


def _problem(sampler: Transition) -> dict[str, Any]:
    """Return by name whatever decides the law of a chain, besides its start and its batches."""
    density = sampler.density
    target = density.log_posterior
    return {
        **_options(sampler),
        "vectorized": density.vectorized,
        **(target.facts() if isinstance(target, LogPosterior) else {"the log posterior": identify(target)}),
    }


def _options(sampler: Transition) -> dict[str, Any]:
    """Return by name the kind and the options of a sampler, in words."""
    options = {field.name: getattr(sampler, field.name) for field in fields(sampler) if field.name != "density"}
    options["preconditioner or covariance"] = options.pop("metric")
    names = {f"the sampler's {name}": identify(value) for name, value in options.items()}
    return {"the sampler": type(sampler).__name__, **names}


@dataclass(frozen=True)
class StepSizeSearch:
    """A search for a step size: log ε follows the error of the acceptance, relative to the rarer outcome's probability.

        log ε ← log ε − t^−¾ (a* − a)/min(a*, 1 − a*),    the result being a mean of trials, with larger weights for
        later ones

    This is Robbins–Monro on the log scale (Andrieu & Thoms 2008) with Polyak's averaging. The rate of rejection is
    proportional to ε³ for one leapfrog step and to ε for pCN. In these units the mean error therefore has a slope of 1
    to 3 in log ε at any target (Garthwaite, Fan & Sisson 2016 also divide by the slope); the slope of plain a* − a is
    .06 at .98.

    target: a*. most: the log of the largest step size (1 for pCN).
    """

    target: float
    most: float
    steps: int = 0
    log_trial: float = 0.0
    log_mean: float = 0.0

    @classmethod
    def start(cls, step_size: float, target: float, most: float) -> StepSizeSearch:
        """Return a search that starts at this step size."""
        start = math.log(min(step_size, most))
        return cls(target, math.log(most) if most < math.inf else 1e300, 0, start, start)

    @property
    def trial(self) -> float:
        """The step size of the next step of warm-up."""
        return math.exp(self.log_trial)

    @property
    def final(self) -> float:
        """The step size after warm-up, the mean of trials with larger weights for later ones."""
        return math.exp(self.log_mean)

    def update(self, acceptance: float) -> StepSizeSearch:
        """Return the search after a step with this acceptance probability; NaN counts as 0."""
        share = (self.steps + 1) ** -0.75  # as old trials fade in Hoffman & Gelman 2014
        missed = self.target - (acceptance if acceptance == acceptance else 0.0)
        move = share * missed / min(self.target, 1 - self.target)
        trial = min(self.log_trial - max(-1.0, min(1.0, move)), self.most)  # a factor e at most
        mean = share * trial + (1 - share) * self.log_mean
        return replace(self, steps=self.steps + 1, log_trial=trial, log_mean=mean)


def chains(
    sampler: SamplingMethod,
    k: int,
    *,
    vectorized: bool | None = None,
    process_group: dist.ProcessGroup | None = None,
    gather: bool = True,
) -> Any:
    """Return a sampler of k chains at once, whose states and infos have a first dimension of k.

    Each chain draws from its own generator, seeded by that of `init`: the noise is bit for bit that of k single chains
    with these generators, however they are computed. All chains share a schedule.

    Args:
        sampler: a sampler of `co.sampling`, of one chain.
        k: the number of chains, at least 1.
        vectorized: True computes all gradients together by `torch.vmap`, False one by one. None computes them
            together if `log_posterior` allows it, otherwise one by one with a `NotVectorizedWarning` warning.
        process_group: a process group of torch.distributed, whose ranks share the chains: rank r of n runs the chains
            r, r + n, r + 2n, … of the k, on all of the data, with the noise that they have in one process. All ranks
            make the same calls, with equal seeds; a run needs messages only at its end, and in a warm-up with
            `target_acceptance` one for each step.
        gather: with a process group, whether `run` returns all chains on every rank, or each rank's own chains
            (`random_projections` then still computes R̂ of all chains).

    Returns:
        A sampler of the same kind, for `co.sampling.run` or its own `init` and `update`.

    Raises:
        TypeError, ValueError: k is not a number of chains, or is smaller than the number of ranks; or these ranks share
            the data of the log posterior.
        RanksDifferError: numbers of chains differ; in `init`, starts or seeds differ.

    Cost: k times the memory of one chain; together, for a small network, far less than k times its time.

    Examples:
        >>> density = co.sampling.log_posterior(model, "classification", data_size=8)
        >>> sampler = co.sampling.chains(co.sampling.sgld(density, 1e-3), 3)
        >>> co.sampling.run(sampler, density.params, [(x, y)], steps=5).theta.shape
        torch.Size([3, 5, 17])
    """
    check_kind("sampler", sampler, Transition, "one of co.sampling (sgld, …)")
    refuse(sampler.chains is not None, f"the sampler already runs {sampler.chains} chains; pass that of one.")
    refuse(not gather and process_group is None, "gather=False is for chains that the ranks of a process_group share.")
    refuse(sampler.alone, sampler.alone)
    check_options(k=k)
    if process_group is not None:
        spread = Spread(Ranks(process_group), k, gather)
        if isinstance(sampler.log_posterior, LogPosterior) and sampler.log_posterior.ranks is not None:
            spread.require_apart(sampler.log_posterior.ranks)
        sampler = replace(sampler, spread=spread)
    density = replace(sampler.density, vectorized=vectorized, _together=[vectorized is not False])
    return replace(sampler, chains=k, density=density)
