"""A trained network, linearised at its weights: the object from which every network operator is built.

A random part of its data, weighted so that every sum over it is unbiased, makes another linearisation (`subsample`).
"""

from __future__ import annotations

import sys
from typing import Any, cast, get_args

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed import ProcessGroup

from curvops.ambient import Progress
from curvops.argument_types import Collate, Data, LikelihoodChoice, Network, ParameterChoice, Points
from curvops.checks import (
    check_choice,
    check_flag,
    check_generator,
    check_kind,
    check_options,
    checked_indices,
    checked_whole,
    refuse,
    rounds_to_tf32,
)
from curvops.errors import warn
from curvops.linalg.core.matrix_identity import Sources
from curvops.network import EngineChoice, TrainedNetwork
from curvops.operators.linearized.network_operator import Gradients, Jacobian
from curvops.ranks.process_group import holds_shards
from curvops.ranks.sharded_linearization import ShardedLinearization

TF32 = (
    "matrix products are rounded to TF32, three digits, and so are those with this linearisation: solvers, intervals "
    "and predictions are no better. Set torch.set_float32_matmul_precision('highest') around such calls."
)


class Linearization(TrainedNetwork):
    """A network linearised at a snapshot θ* of its weights: f(x, θ) ≈ f(x, θ*) + J(x)(θ − θ*); see `co.linearize`.

    Training the network further changes nothing here. Everything is a sum over the data, never a mean. `output_shape`
    is the shape of one point's outputs: (C,), or (T, C) for sequences. The outputs of sequences are rows (n, T·C)
    everywhere, position by position.

    Args:
        model: the copied model with its selected parameters.
        data: the batches of the data.
        likelihood: the likelihood of the targets.
        output_shape: the shape of one point's outputs.
        engine: the choice of the engine, as in `co.linearize`.
        memory_budget: bytes, as in `co.linearize`.
        progress: as in `co.linearize`.
        token: the fingerprint of data and weights, if it is known.
        engines: engines shared with another linearisation of the same data.

    Examples:
        >>> lin = co.linearize(model, (x, y), "classification")
        >>> lin.num_parameters, lin.num_data, lin.output_shape
        (17, 8, torch.Size([2]))
    """

    @property
    def sources(self) -> Sources:
        """The data of operators made from this linearisation, counted once."""
        return Sources({self.source: 1.0})

    @property
    def origin(self) -> dict[str, Any]:
        """The keywords by which operators made of tensors record the weights and data they belong to."""
        return {"space": self.tangent_space, "sources": self.sources}

    def jacobian(self, x: Points | None = None, differentiable: bool = False) -> Jacobian:
        """Return the Jacobian J as an operator (n·C, D), with row n·C + c for output c of point n.

        With `differentiable`, its products, and what posteriors compute from them, have gradients in the inputs that
        require one (never in θ). These are first derivatives, obtained by differentiating backward passes.

        Args:
            x: the inputs; None means the training inputs.
            differentiable: whether products have gradients in the inputs.

        Returns:
            The operator, (n·C, D).

        Raises:
            ValueError: as in `linearize` if inputs are not finite or have another form; if inputs require a
                gradient without `differentiable=True`, or if J has no gradient in the inputs (a
                custom `autograd.Function`, an operation without a second derivative).
        """
        if x is None:
            refuse(differentiable, "the inputs are None: pass x; only lin.jacobian() is at the training inputs.")
            return Jacobian(self.theta, passes=self.passes, rows=self.num_data * self.num_outputs)
        # Copy x: the operator is lazy, and a later change of x must not affect half of a prediction.
        walk, points, graph = self.walk_at(x, differentiable)
        rows = points * self.num_outputs
        if graph is None:
            return Jacobian(self.theta, passes=walk, rows=rows)
        return Jacobian(self.theta, *graph.tensors, passes=walk, rows=rows, graph=graph.detached())

    def push(self, delta: Float[Tensor, " D"]) -> Float[Tensor, "N C"]:
        """Return J δ at the training inputs, the change of the linear model's outputs."""
        jacobian, vector = self.jacobian(), self._one_vector(delta)
        jacobian.require_fit(vector)
        return jacobian._matmul(vector.unsqueeze(-1)).reshape(self.num_data, -1)

    def gradients(self, per_token: bool = False) -> Gradients:
        """Return each point's gradient of its negative log-likelihood as rows of an operator (N, D); see `Gradients`.

        With `per_token` there is a row for each token of a sequence, (N·T, D).

        Args:
            per_token: whether each token of a sequence has its own row.

        Returns:
            The operator, (N, D) or (N·T, D).

        Raises:
            TypeError: per_token is neither True nor False.
        """
        check_flag("per_token", per_token, "For points other than the training points, linearise with those points.")
        self.require_labels("a point's gradient")
        return Gradients(self.theta, *self.likelihood.hyperparameters, lin=self, per_token=per_token)


def linearize(
    model: Network,
    data: Data,
    likelihood: LikelihoodChoice,
    parameters: ParameterChoice | None = None,
    memory_budget: int | None = None,
    *,
    engine: EngineChoice = "auto",
    weights: bool = False,
    progress: Progress = None,
    process_group: ProcessGroup | None = None,
    collate: Collate | None = None,
) -> Linearization:
    """Linearise a network at its current weights.

    Args:
        model: an `nn.Module`, or a pair (function(params, inputs) -> outputs, mapping of parameters). Outputs are
            (N, C), or (N, ..., C) if a point has several positions (tokens of a sequence, pixels of an image). Targets
            are then (N, ...) or (N, ..., m), and positions are left out by ignore_index or by zeros in weights (N,
            ...).
        data: tensors or NumPy arrays (X, y), a Dataset, a DataLoader (one that shuffles or drops its last batch is read
            in the order of its dataset, each point once) or any iterable of (inputs, targets) that can be read again.
            Inputs may be a tensor, a tuple or a mapping. Floating-point data are cast to the parameters' dtype. Each
            item may also be a mapping {"inputs": ..., "targets": ..., "weights": ...}, or a Hugging Face batch, whose
            "labels" are the targets and everything else the inputs. Weights, (N,) or one per position, multiply
            log-likelihoods; targets that are independent given the outputs may have one each, several outputs a
            mapping. NaN in targets is refused unless the likelihood ignores it,
            `co.likelihoods.Gaussian(missing="ignore")`. Without labels: one tensor X, or (X, None), where X may also be
            a Dataset or a DataLoader of inputs. What depends on labels then raises `MissingLabelsError`. Batches of a
            DataLoader, or of an iterable, may also be (anything, targets), if the model makes one output for each
            target; a DataLoader then gives single points, too.
        likelihood: one of `co.likelihoods` (`Categorical(...)`, `Gaussian(noise=variance)`, `Bernoulli(...)`,
            `Poisson()`, `HeteroscedasticGaussian()`); "classification", or "regression", which is `Gaussian()` with a
            noise that is estimated; `nn.CrossEntropyLoss(...)`, `nn.BCEWithLogitsLoss(...)`, `nn.PoissonNLLLoss()` or
            `nn.MSELoss()`, whose GGN is that of the sum of squares, as for a noise of ½; a function from outputs to a
            `torch.distributions.Distribution`; or any other loss: a function of (outputs, targets) that returns one
            loss per point, or a module such as `nn.HuberLoss()` (see `co.likelihoods.FromLoss`). A torch loss gets
            outputs and targets in its own layout: for `nn.CrossEntropyLoss` the C classes are dimension 1, for all
            others the outputs are last. Its `reduction` is ignored, since likelihoods are sums. A subclass of such a
            loss with a `forward` of its own is a loss like any other. For a model that returns several tensors, in a
            mapping, a tuple or an object, a mapping (or a tuple) of any of these, and targets with the same keys: see
            `co.likelihoods.Multitask`.
        parameters: None (all that require a gradient); "last_layer" (the layer after which no other runs, in whose
            output the model's is affine, found by running the model; `lin.plan` names it; weights that also act
            earlier, tied or normalised ones, are linearised as all others); a glob or a list of globs over names; a
            predicate (name, tensor) -> bool; or positions (indices or a mask) in the flat vector of all parameters,
            which select a subnetwork. A complex parameter counts as pairs of reals (*shape, 2), as
            `torch.view_as_real` gives them.
        memory_budget: bytes for the linearisations kept between products, and for the working vectors of algorithms on
            operators made from this one (solvers, bases, sketches, predictions) that have no budget of their own.
            None means a quarter of the device memory that is free when this is called. If both need more, each gets
            half. An algorithm always gets the minimum it needs, about a dozen vectors, and its results are not counted.
        engine: "auto" leaves the choice to the cost rule of `lin.plan`; "autodiff" and "layerwise" force one;
            "streamed" is autodiff that keeps nothing between products (within a product, a push and a pull share a pass
            if the budget allows it). The results are the same. Rows and Kronecker factors come from layer rules with
            every engine.
        weights: True means that the third item of a batch holds weights; otherwise a third item is rejected.
        progress: for passes over the data, and for algorithms on operators made from this one without a `progress` of
            their own. None shows a bar after two seconds if standard error is a terminal, False never, True always. A
            function is called with (description, points or products done, their total or None) after each batch and
            each product.
        process_group: a process group of torch.distributed, each of whose ranks calls this with its own shard of the
            data, which may be empty, and with otherwise equal arguments. All sums over the data then extend over all
            shards. Without it the data are those of this process alone.

            A model that `torch.distributed.fsdp.fully_shard` has sharded needs the group of its own mesh.
        collate: for points of any kind (graphs, texts, images of several sizes, dicts): a function of a list of points
            that returns what the model takes, a tensor, a tuple (positional arguments), a dict (keywords, or the only
            argument) or anything else (the only argument). Data are then (points, targets) with a list of points, or a
            list or a Dataset of (point, target), and all that takes inputs takes a list of points, such as
            `post.predict(graphs[:2])`. A DataLoader has its own collate_fn, and needs no other.

    Returns:
        A `Linearization`; for a model that is sharded by `fully_shard`, a `ShardedLinearization`, which runs the model
        itself and has DTensors for vectors. The model's inputs and torch's random state are left as they were. Weights,
        buffers, positions and the likelihood's tensors are copied, so that later changes of them change nothing here. A
        noise that requires a gradient counts as being learned: its current value is used as far as the curvature can,
        and a posterior whose curvature cannot raises an error. Two things are not copied: tensors inside your own
        functions, and the data, which must not change (a pass over changed data raises `DataChangedError`).
        Of objects, their tensors, arrays, numbers and words are compared, in attributes and containers; what an
        extension keeps in its own memory (a graph of DGL) is not seen.

    Raises:
        TypeError: an argument is of another kind than those above.
        ValueError: data are empty, non-finite or readable only once; collate fails, is random or does not keep the
            order of points; single points are needed of batches that only the model can read; targets do not suit the
            likelihood; a module in train mode is random or depends on its batch; outputs are not (N, C) or
            (N, ..., C); a selection matches nothing or mixes dtypes. The message says what to do.
        MissingLabelsError: there are no labels, and the curvature depends on them, as by class weights, a loss of your
            own or a noise that is to be estimated.
        RanksDifferError: the ranks were given different models, likelihoods, options or versions, or the same data.

    Warns with `NoCurvatureWarning` if every curvature is zero under the likelihood, with `NotLogitsWarning` if a
    classifier returns probabilities or their logarithms, and with `NoiseWarning` if a noise is to be estimated and all
    residuals are zero. Costs one pass over the data (and a forward pass, if a noise is estimated, and two, if points
    are joined) and about ten passes over two to four points, most of which check the derivatives.

    Examples:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
        >>> x, y = torch.rand(8, 2), torch.arange(8) % 2
        >>> lin = co.linearize(model, (x, y), "classification")
        >>> lin
        Linearization(17 weights, 8 points, 2 outputs, Categorical, float32, cpu)
    """
    check_choice("engine", engine, get_args(EngineChoice))
    check_options(progress=progress, memory_budget=memory_budget)
    check_flag("weights", weights, "Pass them with the data, (X, y, w), and weights=True.")
    if isinstance(likelihood, Tensor | np.ndarray):
        raise TypeError("inputs and targets are one argument: co.linearize(model, (X, y), likelihood).")
    if memory_budget is not None:
        memory_budget = int(min(memory_budget, sys.maxsize))  # 1e9 is also a number of bytes
    arguments: dict[str, Any] = {"model": model, "data": data, "likelihood": likelihood, "parameters": parameters}
    arguments |= {"memory_budget": memory_budget, "engine": engine, "weights": weights, "collate": collate}
    arguments["process_group"] = process_group
    if holds_shards(model):
        if progress:
            raise ValueError("progress= is not supported for a model that is sharded by fully_shard: omit it.")
        return cast(Any, ShardedLinearization.read(**arguments))
    lin = Linearization.read(**arguments, progress=progress)
    if rounds_to_tf32(lin.theta.dtype, lin.theta.device):
        warn(TF32, UserWarning)
    return lin


def subsample(
    lin: Linearization, m: int | Int[Tensor, " m"], generator: torch.Generator | None = None
) -> Linearization:
    """Linearise the network on m of its N points, each with N/m times its weight.

    Curvatures, gradients and log-likelihoods of the result are unbiased estimates of those of all points: their mean
    over all subsets of m points equals the full value. The posterior of one subset is not unbiased.

    Args:
        lin: the linearisation of all data.
        m: the number of points to draw without replacement, or their positions (m,).
        generator: the source of the draw.

    Returns:
        A linearisation with its own engines, within the memory budget of `lin`. Costs a pass over the data; the chosen
        points are copied.

    Raises:
        TypeError, ValueError: `lin` is not a linearisation, m is not between 1 and N, or positions are out of range or
            repeated.

    Examples:
        >>> few = co.subsample(lin, 4, generator=torch.Generator().manual_seed(0))
        >>> few.num_data, co.GGN(few).shape
        (4, torch.Size([17, 17]))
    """
    check_kind("lin", lin, Linearization, "a linearisation, co.linearize(…)")
    chosen = _positions(m, lin.num_data, generator)
    lin.passes.agree({"the chosen points, from m and generator": chosen.tolist()})
    return lin.restrict(chosen, lin.num_data / len(chosen))


def _positions(m: int | Tensor, num_data: int, generator: torch.Generator | None) -> Int[Tensor, " m"]:
    check_generator(generator)
    if isinstance(m, Tensor) and m.ndim:
        return checked_indices(m, num_data).cpu().sort().values
    count = checked_whole("m", m, 1, num_data, "a whole number of points or a vector of their positions")
    device = None if generator is None else generator.device
    return torch.randperm(num_data, generator=generator, device=device)[:count].cpu().sort().values
