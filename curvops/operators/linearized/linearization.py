"""A trained network, linearised at its weights: the one object that every network operator is built from."""

from __future__ import annotations

from typing import Any, get_args

from jaxtyping import Float
from torch import Tensor

from curvops.checks import check_choice, check_flag, check_limits
from curvops.linalg.core.sources import Sources
from curvops.network import EngineChoice, TrainedNetwork
from curvops.operators.linearized.gradients import Gradients
from curvops.operators.linearized.jacobian import Jacobian
from curvops.progress import Progress, check_progress


class Linearization(TrainedNetwork):
    """f(x, θ) ≈ f(x, θ*) + J(x)(θ − θ*) around a snapshot θ* of the network, made by `co.linearize`.

    Training the network further changes nothing here. Sums run over the data, never means. `output_shape` is that of
    a point's outputs: (C,), or (T, C) for sequences, whose outputs are rows (n, T·C) everywhere, position by position.
    """

    @property
    def sources(self) -> Sources:
        """The data of operators made of this linearisation, counted once."""
        return Sources({self.source: 1.0})

    @property
    def origin(self) -> dict[str, Any]:
        """The keywords by which an operator that is made of tensors keeps whose weights and data it is of."""
        return {"space": self.tangent_space, "sources": self.sources}

    def jacobian(self, x: Any = None, differentiable: bool = False) -> Jacobian:
        """J as an operator (n·C, D), rows point by point (n·C + c); at the training inputs where x is None.

        With `differentiable` its products, and what posteriors make of them, have gradients in those of the inputs that
        require one (never in θ): first derivatives, by differentiating backward passes.

        Raises as `linearize` does for inputs that are not finite or of another form, and ValueError for inputs
        that require a gradient which is not asked for or which J does not have (a custom `autograd.Function`, an
        operation without a second derivative).
        """
        check_flag("differentiable", differentiable)
        if x is None:
            if differentiable:
                raise ValueError("differentiable=True is for inputs that are given: pass x.")
            return Jacobian(self.theta, passes=self.passes, rows=self.num_data * self.num_outputs)
        # A copy of x: the operator is lazy, and a later change must not change half of a predictive.
        walk, points, graph = self.walk_at(x, differentiable)
        rows = points * self.num_outputs
        if graph is None:
            return Jacobian(self.theta, passes=walk, rows=rows)
        return Jacobian(self.theta, *graph.tensors, passes=walk, rows=rows, graph=graph.detached())

    def push(self, delta: Float[Tensor, " D"]) -> Float[Tensor, "N C"]:
        """J δ at the training inputs: by how much the outputs of the linear model change."""
        return self.jacobian()._matmul(delta.unsqueeze(-1)).reshape(self.num_data, -1)

    def gradients(self, per_token: bool = False) -> Gradients:
        """The gradient of each point's negative log-likelihood as the rows of an operator (N, D); see `Gradients`.

        With `per_token` those of the tokens of sequences, (N·T, D). Raises TypeError for anything but True or False.
        """
        check_flag("per_token", per_token, "For points other than the training points linearise there.")
        return Gradients(self.theta, *self.likelihood.hyperparameters, lin=self, per_token=per_token)


def linearize(
    model: Any,
    data: Any,
    likelihood: Any,
    parameters: Any = None,
    memory_budget: int | None = None,
    *,
    engine: EngineChoice = "auto",
    weights: Any = False,
    progress: Progress = None,
) -> Linearization:
    """Linearise a network at its present weights.

    Args:
        model: an `nn.Module`, or a pair (function(params, inputs) -> outputs, mapping of parameters). Outputs are
            (N, C), or (N, ..., C) where a point has several positions (tokens of a sequence, pixels of an image):
            targets are then (N, ...) or (N, ..., m), and positions are left out by ignore_index or by zeros in weights
            (N, ...).
        data: tensors or NumPy arrays (X, y), a Dataset, a DataLoader (one that shuffles is read in the order of its
            dataset, each point once) or any iterable of (inputs, targets) that can be read again; inputs may be a
            tensor, a tuple or a mapping. Floating data are cast to the parameters' dtype. Each item may be a mapping
            instead: {"inputs": ..., "targets": ..., "weights": ...}, or a batch of Hugging Face's, whose "labels" are
            the targets and everything else the inputs. Weights, (N,) or one per position, multiply log-likelihoods.
        likelihood: one of `co.likelihoods` (`Categorical(...)`, `Gaussian(noise=variance)`, `Bernoulli(...)`,
            `Poisson()`, `HeteroscedasticGaussian()`); `nn.CrossEntropyLoss(...)`, `nn.BCEWithLogitsLoss(...)`,
            `nn.PoissonNLLLoss()` or `nn.MSELoss()`; a function from outputs to a `torch.distributions.Distribution`;
            "classification" or "regression"; or any other loss, a function of (outputs, targets) that returns one a
            point, or a module such as `nn.HuberLoss()` (see `co.likelihoods.FromLoss`). A loss of torch takes outputs
            and targets in its own layout: `nn.CrossEntropyLoss` has the C classes at dimension 1, all others have the
            outputs last. Its `reduction` is not used, since likelihoods are sums. The gradient of a loss that is read
            as one of `co.likelihoods` is compared with that likelihood's on the first points.
        parameters: None (all that require a gradient), "last_layer" (the one in whose output the model's is linear,
            found by running it), a glob or a list of globs over names, a predicate (name, tensor) -> bool, or positions
            (indices or a mask) in the flat vector of all parameters: a subnetwork.
        memory_budget: bytes for the linearisations kept between products and for the working vectors of algorithms on
            the operators made from this (solvers, bases, sketches, predictions) that are given no budget of their own.
            None is a quarter of the memory free on the device at the call. Where both want more, each gets half. An
            algorithm always gets the least that it needs, about a dozen vectors, and its results come on top.
        engine: "auto" leaves the choice to the cost rule of `lin.plan`; "autodiff" and "layerwise" force one;
            "streamed" is autodiff that keeps nothing between products (within one, a push and a pull share a pass
            where the budget allows it). Results are the same: layer by layer, rows and factors come from layer rules.
        weights: True says that the third item of a batch holds weights; without it a third item is refused.
        progress: for passes over the data, and for algorithms on the operators made from this that are not told
            otherwise. None shows a bar after two seconds where standard error is a terminal, False never, True always;
            a function is called with (what, points or products done, how many in all or None) after each batch and each
            product.

    Returns:
        A `Linearization`. The model's inputs and torch's random state are left as they were. Weights, buffers, the
        likelihood's tensors and positions are copied: changing them afterwards changes nothing here. A noise that
        requires a gradient is being learned, and is followed as far as the curvature can; a posterior whose curvature
        cannot says so. Tensors inside a function of one's own are not copied; neither are data, which must stay as
        they are (a pass over changed data raises `DataChanged`).

    Raises:
        TypeError: an argument of another kind than those above.
        ValueError: empty, one-shot or non-finite data, targets that do not suit the likelihood, a module in train mode
            that is random or depends on its batch, outputs that are not (N, C) or (N, ..., C), or a selection that
            matches nothing or mixes dtypes. The message says what to do.

    Warns with `NoCurvature` where every curvature is zero under the likelihood. Costs one pass over the data and a few
    passes over two points, about twenty for the first network of its structure: what is proven of its derivatives then
    is not proven again.
    """
    check_choice("engine", engine, get_args(EngineChoice))
    check_progress(progress)
    check_limits(memory_budget=memory_budget)
    check_flag("weights", weights, "Give them with the data: (X, y, w) and weights=True.")
    return Linearization.read(model, data, likelihood, parameters, memory_budget, engine, weights, progress)
