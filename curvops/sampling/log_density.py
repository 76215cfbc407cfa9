"""The log posterior of a network in the form of samplers: mean log-likelihood of a batch + log prior / N.

A sampler evaluates it and its gradient at the vectors of a state: one point, or k points together or one by one
(`Evaluation`). Its batches may be `minibatches`, drawn from the points of one process or of all ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils._pytree import tree_map_only

from curvops.argument_types import (
    Collate,
    Data,
    GivenBatch,
    LikelihoodChoice,
    Network,
    ParameterChoice,
    PriorMean,
    PriorPrecision,
)
from curvops.checkpoint import identify
from curvops.checks import check_kind, check_like, check_shape, checked_whole, drawn_seed, refuse, shown
from curvops.errors import NotVectorizedWarning, warn
from curvops.network import Batch, Model
from curvops.network.data.batches import Batches, Reading
from curvops.network.data.inputs import BatchParts, Inputs, aligned_parts, move, move_tensor, parts_of, sizes_of, take
from curvops.network.data.inputs import copy as copy_of
from curvops.network.data.point_sources import with_collate
from curvops.network.engines.engine import Engines
from curvops.network.likelihoods import Likelihood, as_likelihood
from curvops.network.likelihoods.conversions import interpretation_of
from curvops.network.trained.first_points import (
    few_of,
    likelihood_at,
    likelihoods_by_name,
    output_shape,
    reading_for,
)
from curvops.network.walks.budget import Budget, default_budget
from curvops.operators import Linearization, ShardedLinearization
from curvops.posterior.gaussians.updating import as_prior, with_left_out_noise
from curvops.posterior.terms import Prior, check_linearization
from curvops.ranks.process_group import Ranks
from curvops.ranks.shard import ChosenPoints, Shard
from curvops.sampling.state import State, Structure, times_rows
from curvops.summary import summary

LogDensity = Callable[[Any, Any], Tensor]
SUBNETWORK = "subnetwork"
"""The name of the single vector of parameters if a subnetwork is selected."""


@dataclass(frozen=True, eq=False, repr=False)
class LogPosterior:
    """A log posterior of a network: (params, batch) -> (1/n) Σ log p(y_i | x_i, params) + (1/N) log prior, in nats.

    `co.sampling.log_posterior` makes it; it is defined up to a constant. Batches are (inputs, targets) of any size n,
    as in `co.linearize`. Everything but the selected parameters keeps its value from the time of construction.

    For a linearisation over a process group the sum is over the points of all ranks: each passes its own part of a
    batch, all of its shard or what `co.sampling.minibatches` gives. All ranks have equal values and gradients.

    Examples:
        >>> density = co.sampling.log_posterior(model, "classification", data_size=8)
        >>> density
        LogPosterior(17 weights, 8 points, prior 1)
    """

    model: Model
    prior: Prior
    data_size: int
    weighted: bool = False
    _spec: Any = field(default=None, repr=False)
    _likelihood: list[Likelihood] = field(default_factory=list, repr=False)
    _checked: set[Any] = field(default_factory=set, repr=False)
    """The shapes and dtypes of the targets that were checked, by the first batch that has each."""
    _engines: list[Engines] = field(default_factory=list, repr=False)
    """The engines that `record` made last."""
    ranks: ClassVar[Any] = None
    """The ranks of a process group that share the data; None if this process has all of them."""

    def __repr__(self) -> str:
        return f"LogPosterior({len(self.model.theta)} weights, {self.data_size} points, prior {self.prior.printed})"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_engines": []}  # they hold a pass

    @property
    def params(self) -> dict[str, Tensor]:
        """Copies of the selected parameters by name, with the values of the model: a start for a sampler."""
        if self.model.selection.index is not None:
            return {SUBNETWORK: self.model.theta.clone()}
        return {name: value.clone() for name, value in self.model.values.items()}

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return self.model.selection.names if self.model.selection.index is None else (SUBNETWORK,)

    def facts(self) -> dict[str, Any]:
        """Return by name what distinguishes this log posterior from others. Costs a pass over the weights."""
        return {
            **self.model.identified_by,
            "the likelihood": identify(self._spec),
            "the prior's precision": identify(self.prior.precision),
            "the prior's mean": identify(self.prior.mean),
            "data_size": self.data_size,
            "whether points have weights": self.weighted,
        }

    def __call__(self, params: Mapping[str, Tensor], batch: Any) -> Float[Tensor, ""]:
        """Return mean log-likelihood of the batch + log prior / N, differentiable in params."""
        return self.log_likelihood(params, batch) + self.log_prior(params) / self.data_size

    def ordered(self, params: Any) -> dict[str, Tensor]:
        """Return params in the order of the model's parameters; raise ValueError for other names, dtypes or devices."""
        if not isinstance(params, Mapping) or set(params) != set(self._names):
            raise ValueError(f"params must have the names {list(self._names)}: start from log_posterior.params.")
        for name, value in params.items():
            check_like(f"params[{name!r}]", value, self.model.theta, "the model")
        return {name: params[name] for name in self._names}

    def log_likelihood(self, params: Mapping[str, Tensor], batch: GivenBatch) -> Float[Tensor, ""]:
        """Return the mean of log p(y | x, params) over the points of the batch, of all ranks."""
        return self.own_log_likelihood(self.ordered(params), batch)

    def own_log_likelihood(
        self, params: dict[str, Tensor], batch: GivenBatch, points: int | None = None
    ) -> Float[Tensor, ""]:
        """Return this process's part of `log_likelihood`, for parameters in order; the parts add up over the ranks.

        points: the number of points of which these are some; None if these are all.
        """
        inputs, targets, weights = aligned_parts(*parts_of(batch, self.weighted))
        first = next(iter(params.values()))
        place = first.device, first.dtype
        inputs = move(inputs, *place)
        likelihood = self._likelihood[0] if self._likelihood else self._likelihood_at(inputs, targets)
        values = params if self.model.selection.index is None else self.model.unflatten(params[SUBNETWORK])
        outputs, layout = self.model(values, inputs), self.model.layout
        assert layout is not None
        y = move_tensor(layout.targets(targets), *place)
        if len(outputs) != len(y):
            raise ValueError(f"the model returns {len(outputs)} rows for {len(y)} points: return one per point.")
        form = y.shape[1:], y.dtype
        if form not in self._checked:
            refuse(len(y) > self.data_size, f"this batch has {len(y)} points, more than data_size={self.data_size}.")
            likelihood.check_targets(y, layout.output_shape.numel())
            self._checked.add(form)
        shape = getattr(targets, "shape", torch.Size())
        w = None if weights is None else layout.weights(weights, shape).to(*place)
        terms = likelihood.log_prob(outputs, y, w)
        return terms.mean() if points is None else terms.sum() / points

    def num_points(self, batch: GivenBatch) -> int:
        """Return the number of points of a batch, of all ranks."""
        return max(sizes_of(parts_of(batch, self.weighted)[1]))

    # What samplers use: autograd differentiates the likelihood, and the prior is added to value and gradient.

    def with_prior(
        self, value: Float[Tensor, "*k"], gradient: Float[Tensor, "*k d"] | None, theta: Float[Tensor, "*k d"]
    ) -> tuple[Float[Tensor, "*k"], Any]:
        """Return the log posterior and its gradient from those of `own_log_likelihood` at these vectors."""
        A, gap = self.prior.precision, theta - self.prior.mean
        pull = (A * gap if isinstance(A, Tensor) else times_rows(A, gap)) / self.data_size
        value = value - 0.5 * (pull * gap).sum(-1)
        return value, None if gradient is None else gradient.sub_(pull)

    def require_all_data(self, batch: GivenBatch) -> None:
        """Raise ValueError unless the batch contains all N points, which samplers that accept or reject need."""
        n = self.num_points(batch)
        if n != self.data_size:
            raise ValueError(f"this batch has {n} of the {self.data_size} points: pass all, [(X, y)], or use sgld.")

    def log_prior(self, params: Mapping[str, Tensor]) -> Float[Tensor, ""]:
        """Return −½ (θ − m)ᵀA(θ − m), the log prior up to a constant."""
        gap = torch.cat([params[name].flatten() for name in self._names]) - self.prior.mean
        if self.prior.diagonal is not None:
            return -0.5 * (self.prior.diagonal * gap.square()).sum()
        held = gap.detach()
        pull = self.prior.product(held)
        return 0.5 * (pull * held).sum() - (pull * gap).sum()  # the gradient is −A(θ − m), whatever A's product records

    def linearize(
        self, weights: Float[Tensor, " D"], batch: GivenBatch, engines: Engines | None = None
    ) -> Linearization:
        """Linearise the network at a vector of weights (ordered as `params`), with a copy of one batch as its data.

        Raises as `co.linearize` does for a batch. Costs a few passes over two points for the first batch and one such
        pass for later ones, or none with the engines that `record` made for these weights and this batch.
        """
        likelihood, network, reading = self._reading(weights, batch)
        inputs, *labels = reading.parts(batch)
        inputs = move(copy_of(inputs), reading.device, reading.dtype)  # once, not in each pass
        labels = tree_map_only(Tensor, lambda tensor: tensor.clone().to(reading.device), labels)
        data = Batches([BatchParts(inputs, *labels)], reading)
        memory = Budget(self._budget, self.model.theta.device)
        if engines is None:
            engines = Engines(network, next(iter(data)).inputs, "auto", memory.budget)
        assert network.layout is not None
        shape = output_shape(likelihood, network.layout)
        return Linearization(engines.model, data, likelihood, shape, "auto", memory, False, engines=engines)

    def record(self, weights: Float[Tensor, " D"], batch: GivenBatch) -> tuple[Engines, Likelihood, Batch]:
        """Record a pass over one batch for `score_and_diagonal`; return its engines, the likelihood and the batch.

        It takes the same weights and raises the same errors as `linearize`. Engines that were checked for the last
        batch are reused; they are checked again only if the pass was another one.
        """
        likelihood, network, reading = self._reading(weights, batch)
        checked, held = reading.read_checked(batch), self._engines
        if held:
            engines = held[0].at(network, checked.inputs)
        else:
            engines = Engines(network, checked.inputs, "auto", self._budget, whole=True)
        held[:] = [engines]
        return engines, likelihood, checked

    def _reading(self, weights: Float[Tensor, " D"], batch: Any) -> tuple[Likelihood, Model, Reading]:
        """Return the likelihood, the network at these weights, and the form of its batches."""
        if self.ranks is not None:
            raise ValueError("over a process group no batch is linearised: use co.linearize(..., process_group=).")
        if not self._likelihood:
            self.own_log_likelihood(self.params, batch)
        likelihood, layout, network = self._likelihood[0], self.model.layout, self.model.at(weights)
        assert layout is not None
        return likelihood, network, reading_for(network, likelihood, layout, self.weighted)

    @cached_property
    def _budget(self) -> int:
        """The bytes for each linearisation, determined once: asking the system takes as long as a small pass."""
        return default_budget(self.model.theta.device)

    def _likelihood_at(self, inputs: Inputs, targets: Any) -> Likelihood:
        """Return the likelihood for the model's positions, from the first batch."""
        device, dtype, few = self.model.theta.device, self.model.theta.dtype, few_of(inputs)
        interpreted, layout, _ = likelihood_at(self.model, take(inputs, few), self._spec, take(targets, few))
        self.model.layout = layout
        self._likelihood.append(interpreted.to(device=device, dtype=dtype))
        return self._likelihood[0]


class Share(NamedTuple):
    """The points of a minibatch that one rank holds, and the number of points that the minibatch has on all ranks."""

    local: Any
    points: int


@dataclass(frozen=True, eq=False, repr=False)
class SharedLogPosterior(LogPosterior):
    """A log posterior whose data the ranks of a process group share: each evaluates its own points."""

    shard: Shard = field(kw_only=True, repr=False)

    def __post_init__(self) -> None:
        self.ranks.require_equal(self.prior.facts())

    @property
    def ranks(self) -> Ranks:
        """The ranks that share the data."""
        return self.shard.ranks

    def log_likelihood(self, params: Mapping[str, Tensor], batch: GivenBatch) -> Float[Tensor, ""]:
        replicas = {name: self.ranks.replicate(value) for name, value in self.ordered(params).items()}
        return self.ranks.add_up(self.own_log_likelihood(replicas, batch))

    def own_log_likelihood(
        self, params: dict[str, Tensor], batch: GivenBatch, points: int | None = None
    ) -> Float[Tensor, ""]:
        points, local = self._of_rank(batch)
        if local is not None and super().num_points(local):
            return super().own_log_likelihood(params, local, points)
        return 0 * torch.stack([value.sum() for value in params.values()]).sum()

    def with_prior(
        self, value: Float[Tensor, "*k"], gradient: Float[Tensor, "*k d"] | None, theta: Float[Tensor, "*k d"]
    ) -> tuple[Float[Tensor, "*k"], Any]:
        if gradient is None:
            return super().with_prior(self.ranks.add_up(value), None, theta)
        both = self.ranks.add_up(torch.cat([gradient, value.unsqueeze(-1)], -1))  # in one message
        return super().with_prior(both[..., -1].clone(), both[..., :-1], theta)

    def num_points(self, batch: GivenBatch) -> int:
        return self._of_rank(batch)[0]

    def _of_rank(self, batch: Any) -> tuple[int, Any]:
        """Return the number of points of a batch, of all ranks, and those that this rank holds."""
        if isinstance(batch, Share):
            return batch.points, batch.local
        n, held = super().num_points(batch), self.shard.num_own
        if n != held:
            raise ValueError(f"this batch has {n} of the {held} points of this rank: see co.sampling.minibatches.")
        return self.data_size, batch


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation:
    """A log posterior at one point or at k points: together (`torch.vmap`), one by one, or (None) as possible."""

    log_posterior: LogDensity
    vectorized: bool | None = None
    _together: list[bool] = field(default_factory=lambda: [True], repr=False)

    def __repr__(self) -> str:
        return summary(self.log_posterior)

    def gradient(
        self, theta: Float[Tensor, "*k d"], structure: Structure, batch: Any, wanted: bool = True
    ) -> tuple[Float[Tensor, "*k"], Any]:
        """Return log_posterior and, if wanted, its gradient (*k, d), each in new memory."""
        if theta.ndim > 1 and not self._together[0]:
            values, gradients = zip(*[self.gradient(row, structure, batch, wanted) for row in theta])
            return torch.stack(values), torch.stack(gradients) if wanted else None
        f, at_one, point = self.log_posterior, partial(self._at_one, structure, batch), theta.detach()
        point.requires_grad_(wanted)
        try:
            with torch.set_grad_enabled(wanted):
                value = at_one(point) if theta.ndim == 1 else torch.vmap(at_one)(point)
        except (RuntimeError, NotImplementedError) as error:
            self._fall_back(error, theta)
            return self.gradient(theta, structure, batch, wanted)
        gradient = torch.autograd.grad(value, point, torch.ones_like(value))[0] if wanted else None
        value = value.detach()
        return f.with_prior(value, gradient, theta) if isinstance(f, LogPosterior) else (value, gradient)

    def _fall_back(self, error: Exception, theta: Tensor) -> None:
        """Evaluate k points one by one from now on; raise the error if that is no remedy."""
        if theta.ndim == 1 or self.vectorized or isinstance(error, torch.OutOfMemoryError):
            raise error
        refuse("running_mean" in str(error), "the model normalises by batch statistics: call model.eval().")
        warn(
            f"torch.vmap cannot run log_posterior, so the chains are computed one by one, with the same draws: {error} "
            "To choose this from the start, pass chains(..., vectorized=False).",
            NotVectorizedWarning,
        )
        self._together[:] = [False]

    def _at_one(self, structure: Structure, batch: Any, vector: Float[Tensor, " d"]) -> Tensor:
        """Return what is differentiated at one point; raise TypeError unless it is one real number."""
        f = self.log_posterior
        value = (f.own_log_likelihood if isinstance(f, LogPosterior) else f)(structure.unflatten(vector), batch)
        if not isinstance(value, Tensor) or value.ndim:
            raise TypeError(f"log_posterior must return one number, the mean over the batch, got {shown(value)}.")
        return value


def log_posterior(
    model: Network,
    likelihood: LikelihoodChoice | None = None,
    *,
    prior_precision: PriorPrecision = 1.0,
    prior_mean: PriorMean = 0.0,
    data_size: int | None = None,
    parameters: ParameterChoice | None = None,
    weights: bool = False,
) -> LogPosterior:
    """Build the log posterior of a network, with its N, in the form of every sampler.

    Args:
        model: an `nn.Module` or a pair (function(params, inputs) -> outputs, mapping of parameters), with all
            arguments below; or a linearisation, `co.linearize(model, data, likelihood)`, which already has a
            likelihood, parameters, N and perhaps sample weights.
        likelihood: as in `co.linearize`, a mapping for several outputs: their log-likelihoods add.
        prior_precision: A, as in `co.laplace`: a number, a vector (D,), a mapping {glob: number}, an operator, or an
            earlier posterior (which also gives the mean).
        prior_mean: m, a number, a vector (D,) or a mapping.
        data_size: N, the total number of points in all batches.
        parameters: as in `co.linearize` ("last_layer" needs data: pass a linearisation).
        weights: True if the third item of a batch holds the weights of its points.

    Returns:
        A `LogPosterior`; `.params` are the parameters to start from.

    Raises:
        TypeError, ValueError: N is missing or given twice, a model in train mode is random or uses batch statistics,
            and everything that `co.linearize` and `co.laplace` reject. Each batch is checked when it is used, the
            values of its targets only in the first batch whose targets have its shape and dtype.

    Cost of a call: a forward pass, and a pass over the parameters for the prior.

    Examples:
        >>> density = co.sampling.log_posterior(model, "classification", prior_precision=1.0, data_size=8)
        >>> density(density.params, (x, y)).shape
        torch.Size([])
    """
    if isinstance(model, ShardedLinearization):
        raise TypeError("a sampler holds all parameters on each rank: pass an unsharded copy of the model.")
    if isinstance(model, Linearization):
        facts = {"likelihood": likelihood, "data_size": data_size, "parameters": parameters, "weights": weights or None}
        twice = [name for name, value in facts.items() if value is not None]
        refuse(twice, f"the linearisation already has {', '.join(twice)}: leave it out.")
        model = with_left_out_noise(model)
        prior = as_prior(prior_precision, prior_mean, model.model, model)
        fields_of = model.model, prior, model.num_data, model.data.weighted, model.likelihood, [model.likelihood]
        shard = model.passes.shard
        return LogPosterior(*fields_of) if shard is None else SharedLogPosterior(*fields_of, shard=shard)
    if isinstance(parameters, str) and parameters == "last_layer":
        raise ValueError('for parameters="last_layer" pass co.linearize(model, data, likelihood, "last_layer").')
    network = Model(model, parameters)
    size = checked_whole("data_size", data_size, kind="the number N of points in all batches together")
    several = likelihoods_by_name(likelihood)
    likelihood = _owned(likelihood) if several is None else {name: _owned(member) for name, member in several.items()}
    return LogPosterior(network, as_prior(prior_precision, prior_mean, network), size, weights, likelihood)


def _owned(likelihood: Any) -> Any:
    """Return a copy of a likelihood or a loss, unaffected by later changes; raise ValueError for an unknown noise."""
    if interpretation_of(likelihood) is not None:
        return copy.deepcopy(likelihood)  # interpreted with the first batch, because it needs the shapes
    new = as_likelihood(likelihood).to()
    if new.needs_noise:
        raise ValueError(
            "the noise of this regression is unknown: pass Gaussian(noise=variance), or a linearisation, which has it."
        )
    return new


def as_vectors(lin: Linearization, tensors: Any, leading: int, what: str) -> Float[Tensor, "*k D"]:
    """Copy {name: tensor (*k, *shape)} into vectors (*k, D) in the order of `lin.flatten`; k has `leading` dimensions.

    A tensor without a name, or one of a subnetwork, already holds vectors. Raises ValueError for other names or shapes.
    """
    selection = lin.model.selection
    named = tensors if isinstance(tensors, Mapping) else {SUBNETWORK: tensors}
    if list(named) == [SUBNETWORK] and SUBNETWORK not in selection.names and isinstance(named[SUBNETWORK], Tensor):
        vectors = named[SUBNETWORK]
        hint = "Their dimensions are (chain, draw, weight)." if leading == 2 else ""
        check_shape(what, vectors, (*vectors.shape[:leading], lin.num_parameters), hint)
        return vectors.clone()
    if set(named) != set(selection.names) or selection.index is not None:
        wanted = "vectors of a subnetwork" if selection.index is not None else list(selection.names)
        raise ValueError(
            f"{what} have the names {list(named)}, not {wanted}: linearise with the parameters that were sampled."
        )
    for name, shape in zip(selection.names, selection.shapes):
        check_shape(f"{what}[{name!r}]", named[name], (*named[name].shape[:leading], *shape))
    return selection.concatenate([named[name] for name in selection.names], leading)


def order_at_mean(lin: Linearization, state: State) -> Int[Tensor, " D"]:
    """Return the position in the state's vector of each weight of the linearisation.

    Raises TypeError if it is not a linearisation, ValueError if it has other parameters or weights than the state.
    """
    check_linearization(lin)
    positions = torch.arange(state.structure.size, device=state.theta.device, dtype=torch.float64)
    order = as_vectors(lin, state.structure.unflatten(positions), 0, "the state's params").long()
    mean = state.theta[order]
    check_like("the linearisation", lin.theta, mean, "the state")
    if not torch.equal(lin.theta, mean):
        part = lin.model.selection.index is not None
        weights = "lin.unflatten_weights(state.theta)" if part else "state.params"
        raise ValueError(
            f"the linearisation has other weights than the mean, by {float((lin.theta - mean).abs().max()):.3g}: "
            f"put the mean into the model, model.load_state_dict({weights}, strict=False), and linearise again."
        )
    return order


class Minibatches:
    """Passes over the points of all ranks in random order, cut into minibatches; see `co.sampling.minibatches`.

    Args:
        points: the points, chosen by their index.
        size: the number of points of a minibatch.
        seed: the seed of the order.
        shared: whether the ranks share the points.

    Examples:
        >>> density = co.sampling.log_posterior(model, "classification", data_size=8)
        >>> batches = co.sampling.minibatches(density, (x, y), 4)
        >>> type(batches).__name__
        'Minibatches'
    """

    def __init__(self, points: ChosenPoints, size: int, seed: int, shared: bool) -> None:
        self._points, self._size, self._shared = points, size, shared
        self.generator = torch.Generator().manual_seed(seed)
        """The generator of the orders, whose state `co.sampling.run` saves in checkpoints."""

    def __repr__(self) -> str:
        return f"Minibatches({len(self)} of {self._size} points, {self._points.total} in all)"

    def __len__(self) -> int:
        """Return the number of minibatches of a pass."""
        return -(-self._points.total // self._size)

    def __iter__(self) -> Iterator[Any]:
        for batch, points in self._points.minibatches(self._size, self.generator):
            yield Share(batch, points) if self._shared else batch


def minibatches(
    log_posterior: LogPosterior,
    data: Data,
    size: int,
    generator: torch.Generator | None = None,
    *,
    collate: Collate | None = None,
) -> Minibatches:
    """Shuffle the points of all ranks anew in each pass, and cut them into minibatches; each rank gets its own part.

    Equal seeds give equal minibatches for any number of ranks, which may hold any parts of the data: points are
    numbered in the order of the ranks. In one process they are minibatches like those of a DataLoader.

    Args:
        log_posterior: the result of `co.sampling.log_posterior`, for a linearisation over a process group or not.
        data: the points of this rank: tensors (X, y), as in `co.linearize`, or a Dataset of such points, of which only
            the chosen ones are read.
        size: the number of points of a minibatch, on all ranks together; the last one of a pass may have fewer.
        generator: the source of the orders, with equal seeds on all ranks; None uses torch's default generator.
        collate: as in `co.linearize`, for data with a list of points.

    Returns:
        The `batches` for `co.sampling.run`: an iterable that can be read any number of times.

    Raises:
        TypeError, ValueError: the log posterior or the data are of another kind, the number of points differs from that
            of the linearisation, or size is not a whole number from 1 to N.
        RanksDifferError: seeds or sizes differ.

    Cost: no messages after this call; the order of N points on each rank.

    Examples:
        >>> density = co.sampling.log_posterior(model, "classification", data_size=8)
        >>> batches = co.sampling.minibatches(density, (x, y), 4, generator=torch.Generator().manual_seed(0))
        >>> co.sampling.run(co.sampling.sgld(density, 1e-3), density.params, batches, steps=5).theta.shape
        torch.Size([1, 5, 17])
    """
    check_kind("log_posterior", log_posterior, LogPosterior, "co.sampling.log_posterior(...)")
    shard = log_posterior.shard if isinstance(log_posterior, SharedLogPosterior) else None
    count = log_posterior.data_size
    size = checked_whole("size", size, 1, count)
    data = data if collate is None else with_collate(data, collate)
    points = ChosenPoints.of(data, log_posterior.weighted, shard, count)
    seed = drawn_seed(generator)
    if shard is not None:
        shard.ranks.require_equal({"the size of minibatches": size, "the seed of minibatches": seed})
    return Minibatches(points, size, seed, shard is not None)
