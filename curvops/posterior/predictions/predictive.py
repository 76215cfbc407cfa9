"""Predictions of any posterior over the weights: outputs, probabilities, uncertainty, and scores of test data.

A posterior provides its outputs (`outputs.py`); each method passes them to the file that computes its answer.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from gpytorch.distributions import MultivariateNormal
from jaxtyping import Float
from torch import Tensor

from curvops.argument_types import Points
from curvops.checks import check_choice, check_flag, check_options, checked_whole, refuse
from curvops.linalg import Estimate
from curvops.linalg.core.cache import Cache
from curvops.network import PointNormals
from curvops.network.likelihoods import Bernoulli, Gaussian, Likelihood, Multitask
from curvops.operators import Linearization
from curvops.posterior.predictions import answers
from curvops.posterior.predictions.answers import (
    NAMED,
    NamedPredictions,
    Uncertainty,
    add_noise,
    decompose_drawn_numbers,
    decompose_labels,
    decompose_numbers,
    join_uncertainties,
)
from curvops.posterior.predictions.normals import MultitaskNormal, Normal, SampledNormal
from curvops.posterior.predictions.outputs import (
    CovarianceByPosition,
    CovarianceOverRanks,
    DrawnOutputs,
    NormalOutputs,
    OutputDistribution,
    SomeOutputs,
    normals_for,
)
from curvops.posterior.terms import checked_draws
from curvops.ranks.sharded_vectors import ranks_together
from curvops.ranks.split_points import SplitPoints, split_points
from curvops.summary import name_of

Answers = TypeVar("Answers", Uncertainty, Estimate)
ByName: TypeAlias = Any
"""For a network with several outputs: a mapping from their names to such answers."""
WEIGHT_DRAWS = 100
"""The number of draws of the weights for averages over them, if none are given: each costs a solve or a pass."""


class Predictive(ABC):
    """A distribution of the weights of a linearised network, with its predictions at new inputs.

    Where a point has positions (tokens of a sequence, pixels of an image), N stands for all of their dimensions below,
    (N, T) or (N, h, w). Results that have an entry for each output come in the shape of the model's outputs, those of
    `predict`, which are distributions of the C outputs of a position, with C last.
    """

    lin: Linearization
    precision: Any
    """The precision of a Gaussian, (D, D); empirical distributions have none."""

    def __repr__(self) -> str:
        facts = (f"{self.lin.num_parameters} weights", *self._facts(), name_of(self.lin.theta.dtype))
        return f"{type(self).__name__}({', '.join([*facts, str(self.lin.theta.device)])})"

    def _facts(self) -> tuple[str, ...]:
        """Return what distinguishes this distribution, in a few words each."""
        return ()

    @property
    @abstractmethod
    def mean(self) -> Float[Tensor, " D"]:
        """The mean of the weights."""

    @abstractmethod
    def sample(self, k: int, generator: torch.Generator | None = None, rtol: float = 1e-3) -> Float[Tensor, "k D"]:
        """Draw k weight vectors, as rows."""

    @abstractmethod
    def _outputs(self) -> OutputDistribution:
        """Return the outputs under this distribution of the weights."""

    @property
    def _is_learned(self) -> bool:
        """Whether the outputs follow a tensor, such as a noise, that requires a gradient and may change."""
        return False

    def at(
        self, x: Any, samples: Float[Tensor, "k D"] | None = None, rtol: float | None = None, gather: bool = False
    ) -> Predictions | ByName:
        """Return the predictions at x, for several questions that share their passes, products and solves.

        Args:
            x: inputs as the model takes them. The first question checks them; do not change them in between.
            samples: draws (k, D) of the weights from `sample`, for all answers.
            rtol: the relative residual of the exact solves; None means 1e-6, and 1.5e-8 in float64.
            gather: as in `predict`.

        Returns:
            The `Predictions`, whose methods answer as the posterior's of the same names; for several outputs a mapping
            from their names to `Predictions`, with the same methods.

        Cost: nothing before the first question. Then what answers have in common is computed once; joint covariances
        and draws that are made for one answer are not in common.

        Raises:
            TypeError, ValueError: draws have another size, dtype or device, or rtol is not a positive number.
        """
        check_options(rtol=rtol)
        outputs = self._outputs()
        if samples is not None:
            outputs = outputs.at_draws(checked_draws(samples, self.mean))
        whole = Predictions(self, x, samples, rtol, gather, outputs)
        if not isinstance(self.lin.likelihood, Multitask):
            return whole
        views = {name: self.lin.output(name) for name in self.lin.likelihood.likelihoods}
        return NamedPredictions(whole, {name: whole.of(view) for name, view in views.items()})

    def predict(
        self,
        x: Any,
        joint: bool = False,
        samples: Float[Tensor, "k D"] | None = None,
        rtol: float | None = None,
        noise: bool = False,
        groups: int | None = None,
        gather: bool = False,
    ) -> MultivariateNormal | ByName:
        """Return the distribution of the linearised network's outputs at x, for several outputs one under each name.

        Args:
            x: inputs as the model takes them.
            joint: False gives a `MultivariateNormal` of batch shape (N,) and event shape (C,), with independent
                points and positions; True a `MultitaskMultivariateNormal` over (N, C), in which each position is a
                point, as it is in `groups`. They are subclasses of gpytorch's, without its floor under small variances.
            samples: draws (k, D) from `sample`. The covariance is then mean_k (J z_k)(J z_k)ᵀ, at k products with J.
                For independent points the result has the `variance_stderr` and the `variance_interval(level)` of each
                variance.
            rtol: the relative residual of the exact solves; None means 1e-6, and 1.5e-8 in float64.
            noise: return the distribution of real targets, with their noise: of a Gaussian likelihood, a
                heteroscedastic one, or a distribution that the user makes from the outputs. It is the Gaussian with
                the targets' mean (m,) and their covariance, Cov[E[y | f]] + E[Var[y | f]]; for a distribution of the
                user's over 1000 draws of the outputs, the same ones in each call (variances have an error of about 4
                %), or over the `samples`, which joint ones need.
            groups: q, for groups of q consecutive points that are joint within and independent between groups: a
                `MultitaskMultivariateNormal` of batch shape (N / q,) over (q, C), for BoTorch's batches. No entry of a
                covariance between groups is formed.
            gather: over a process group, collect the predictions for the points of all ranks on each rank, in order.
                Without it each rank predicts at its own x, whether or not other ranks have the same points.

        Covariances are lazy. Exact ones solve for N·C rows of J on first use; up to 1,024 weights, and up to 8,192 for
        D / 8 rows or more (D / 64 if training has twice as many outputs as weights), the matrix is formed and
        factorised instead, and kept for later calls. Under a structured curvature (KFAC, EKFAC, diagonal, low rank,
        dense blocks of layers or of all selected weights) they come from each layer's inputs and sensitivities, at C
        backward passes and a few matrix products (joint ones if memory has room for all rows); for a last layer they
        come from its inputs, without a further pass. Variances need no C × C block. If x requires a gradient, the mean
        and the covariance have it (first derivatives, never in θ), for 2 to 3 times the cost of the covariance; exact
        solves are not repeated for it.

        Raises:
            ValueError: noise=True is given with another likelihood, groups do not divide N, draws have another size,
                inputs are unsuitable (see `jacobian`), or gradients are required both in x and in the prior precision
                or the noise. On first use: covariances exceed the memory budget.
        """
        return self.at(x, samples, rtol, gather).predict(joint, noise, groups)

    def functions(
        self,
        x: Any,
        k: int,
        generator: torch.Generator | None = None,
        samples: Float[Tensor, "k D"] | None = None,
        rtol: float = 1e-3,
        gather: bool = False,
    ) -> Float[Tensor, "k N *C"] | ByName:
        """Draw k functions of the linearised network, f(x, θ*) + J(x)(θ_k − θ*), each jointly at all points.

        Several outputs are those of the same functions, by name.

        Args:
            x: inputs as the model takes them.
            k: the number of draws; if `samples` are given, their number.
            generator: the source of the draws.
            samples: draws (k, D) of the weights from `sample`, for the same functions at other inputs.
            rtol: as in `sample`.
            gather: as in `predict`.

        Cost: that of `sample(k)`, and k products with J(x).
        """
        samples = self.sample(k, generator, rtol) if samples is None else checked_draws(samples, self.mean)
        refuse(len(samples) != k, f"k is {k}, but there are {len(samples)} samples; pass k=len(samples).")
        return self.at(x, samples, gather=gather).functions()

    def probabilities(
        self,
        x: Any,
        link: str | None = None,
        samples: Float[Tensor, "k D"] | None = None,
        generator: torch.Generator | None = None,
        gather: bool = False,
    ) -> Float[Tensor, "N *C"] | ByName:
        """Return class probabilities E[softmax(f)] at x, or E[σ(f)] for each label of a Bernoulli likelihood.

        For a `torch.distributions.Categorical` or `Bernoulli` that the user makes from the outputs, it is the mean of
        its probabilities. Several outputs have them by name, those that are classes or labels.

        Args:
            x: inputs as the model takes them.
            link: None is "probit", but "mc" for `co.sampling.empirical`, the mean over its draws, and for a
                distribution of the user's, whose outputs are not logits. "probit" scales the logits by their variances
                (under `BradleyTerry`, the difference of the two rewards by its own variance); "mc" averages over draws
                of the logits (from `samples` of the weights, otherwise 1000 from each point's covariance); "bridge" is
                the Laplace bridge, and "bridge_norm" the same with normalised variances, which is better if they are
                large (classes only); "network" averages the network itself over the samples (100 if none are given),
                for comparison only: the posterior belongs to the linearised network, and the network itself predicts
                worse at its draws.
            samples: draws (k, D) of the weights, from `sample`.
            generator: the source of the draws.
            gather: as in `predict`.

        Cost: that of `predict`; "network" takes a forward pass for each sample.

        Raises:
            ValueError: the link is unknown or does not fit the likelihood, or the likelihood has no probabilities.
        """
        return self.at(x, samples, gather=gather).probabilities(link, generator)

    def uncertainty(
        self,
        x: Any,
        samples: Float[Tensor, "k D"] | None = None,
        generator: torch.Generator | None = None,
        gather: bool = False,
    ) -> Uncertainty | ByName:
        """Return the total uncertainty of the target at each x, and its aleatoric and epistemic parts.

        Several outputs have them by name.

        Args:
            x: inputs as the model takes them.
            samples: draws (k, D) of the weights, from `sample`; by default each point's own covariance is used, with
                1000 draws from it for classes and for distributions of the user's.
            generator: the source of these draws.
            gather: as in `predict`.

        Returns:
            For classes, entropies in nats (N,): that of the mean prediction, the mean entropy, and the mutual
            information between target and weights; for the labels of a Bernoulli likelihood the same for each label
            (N, C), by an integral over its normal logit. For numbers, variances (N, C): in closed form for Gaussian,
            heteroscedastic and Poisson targets, from draws for a distribution of the user's. `mean` is the mean of the
            target: probabilities or (Poisson) rates.

        Raises:
            ValueError: the likelihood is another one.
        """
        return self.at(x, samples, gather=gather).uncertainty(generator)

    def log_likelihood(
        self,
        x: Any,
        y: Any,
        joint: bool = False,
        samples: Float[Tensor, "k D"] | None = None,
        generator: torch.Generator | None = None,
        gather: bool = False,
        link: str = "mc",
    ) -> Estimate:
        """Return log p(y | x, data) of test points in nats, each with its standard error.

        Args:
            x: inputs as the model takes them.
            y: targets in the likelihood's form. For several outputs a mapping, and the result is that of all of a
                point's targets together.
            joint: False scores each point, (N,); True scores random pairs of points, (⌊N/2⌋,), with ten copies of the
                two points in all (the dyadic score of Osband et al. 2022), which measures whether predictions vary
                together as they should.
            samples: draws (k, D) of the weights. By default each point's own covariance is used (exactly for a Gaussian
                likelihood and for a single output, otherwise by 1000 draws around the outputs that make the target
                likely); with joint=True, 100 draws of the weights.
            generator: the source of the draws, and of the pairs.
            gather: as in `predict`.
            link: "mc" averages over the draws; "probit", for classes and labels, scores the `probabilities` of that
                link, which need none.

        Raises:
            TypeError, ValueError: the likelihood cannot score the targets, there is not exactly one for each point, or
                the link does not fit the likelihood or joint=True.
        """
        return self.at(x, samples, gather=gather).log_likelihood(y, joint, generator, link)


@dataclass(frozen=True, eq=False)
class Predictions:
    """The predictions of a posterior at inputs x; `post.at(x)` makes it.

    The answers are those of the posterior's methods of the same names, where their arguments are described. What they
    have in common is computed once and kept as long as this object: the outputs, the covariances of the points, and
    with `samples` the products J z_k. Exact covariances that have a gradient in x are computed for each answer, and so
    is everything while the prior precision or the noise is being learned. Results share memory with this object: copy
    them before changing them in place.

    Examples:
        >>> at = post.at(x)
        >>> at.predict().mean.shape, at.probabilities().shape
        (torch.Size([8, 2]), torch.Size([8, 2]))
    """

    posterior: Predictive
    x: Any = field(repr=False)
    samples: Float[Tensor, "k D"] | None = field(repr=False)
    rtol: float | None
    gather: bool
    _outputs: OutputDistribution = field(repr=False)
    _shared: dict[tuple[bool, bool], Any] = field(init=False, repr=False, default_factory=dict)

    @property
    def lin(self) -> Linearization:
        """The linearised network, with the output that these are predictions of."""
        return self._outputs.lin

    def of(self, lin: Linearization) -> Predictions:
        """Return the predictions of a part of the outputs, that of `lin`, or of these outputs by another likelihood."""
        return replace(self, _outputs=replace(self._outputs, lin=lin))

    @property
    def _target(self) -> Likelihood:
        """The likelihood of one position's target."""
        return self.lin.likelihood.of_position

    def predict(self, joint: bool = False, noise: bool = False, groups: int | None = None) -> MultivariateNormal:
        """Return the distribution of the linearised network's outputs; see `predict` of the posterior."""
        check_flag("joint", joint)
        check_flag("noise", noise)
        likelihood = self._target if noise else None
        if likelihood is not None and likelihood.form != "numbers":
            raise ValueError(f"noise=True is for real targets, and this is {likelihood!r}: use uncertainty(x).")
        refuse(joint and groups is not None, "joint=True makes a single group: pass groups or joint=True, not both.")
        together = None if joint else 1 if groups is None else checked_whole("groups", groups)
        call, lin = f"predictions, joint within {together or 'all'} points", self.lin
        by_draws = likelihood is not None and not self._outputs.has_moments_of(likelihood)
        fixed = torch.Generator(lin.theta.device).manual_seed(0)  # a distribution that is asked for again is the same
        normals = normals_for(self._outputs, fixed) if by_draws else None
        outputs, split = self._split(self._outputs, call, normals, together is None and self.gather)
        if together not in (None, 1):
            for points in (*split.counts, outputs.jacobian.shape[-2] // lin.num_outputs):
                outputs.require_whole_groups(points * lin.num_outputs // lin.output_shape[-1], together)
        if likelihood is not None and by_draws:
            mean, covariance = outputs.drawn_moments(likelihood, together, normals, split.start)
        else:
            mean, covariance = outputs.mean, outputs.covariance(together)
            if likelihood is not None:
                mean, covariance = add_noise(likelihood, mean, covariance)
        if split.ranks is not None:
            mean = split.rows_asked_for(mean)
            size = mean.numel() if together is None else len(mean) // together
            if not split.is_done:
                options = {"split": split, "size": size, "memory_budget": math.inf, "cache": Cache()}
                covariance = CovarianceOverRanks(covariance, **options)
        if joint or groups is not None:
            return MultitaskNormal(mean if joint else mean.unflatten(0, (-1, groups)), covariance)
        if self.lin.places:
            mean = mean.unflatten(0, (-1, *self.lin.places))
            covariance = CovarianceByPosition(covariance, places=mean.shape[:-1], memory_budget=math.inf, cache=Cache())
        if self.samples is None or noise:
            return Normal(mean, covariance)
        return SampledNormal(mean, covariance, draws=len(self.samples))

    def functions(self) -> Float[Tensor, "k N *C"]:
        """Return the linearised network as a function at each of the `samples`.

        Raises:
            ValueError: there are no samples.
        """
        if self.samples is None or not isinstance(self._outputs, DrawnOutputs):
            raise ValueError("pass draws, post.at(x, samples=post.sample(k)); or use post.functions(x, k).")
        outputs, split = self._split(self._outputs, f"{len(self.samples)} functions")
        return self.lin.by_point(split.rows_asked_for(outputs.functions(), 1), 1)

    def probabilities(self, link: str | None = None, generator: torch.Generator | None = None) -> Float[Tensor, "N *C"]:
        """Return class probabilities; see `probabilities` of the posterior."""
        likelihood = self._target
        link = answers.checked_link(link if link is not None or self._outputs.is_normal else "mc", likelihood)
        outputs = self._outputs_by_weights(generator) if link == "network" else self._outputs
        normals = normals_for(outputs, generator) if link == "mc" else None
        outputs, split = self._split(outputs, f"probabilities, link={link!r}", normals)
        if isinstance(outputs, DrawnOutputs) and link == "network":
            probabilities = answers.average(likelihood.mean, outputs.of_network)
        elif link == "mc":
            drawn = outputs.draws(normals, split.start)
            probabilities = torch.cat([answers.average(likelihood.mean, draws) for draws in drawn])
        else:
            covariance = outputs.covariance()
            probabilities = answers.normal_probabilities(link, likelihood, lambda: outputs.mean, covariance)
        return self.lin.by_point(split.rows_asked_for(probabilities))

    def uncertainty(self, generator: torch.Generator | None = None) -> Uncertainty:
        """Return the total uncertainty of the targets, and its parts; see `uncertainty` of the posterior."""
        likelihood = self._target
        if likelihood.form is None:
            raise ValueError(f"{likelihood!r} has no decomposition of its uncertainty; use predict or functions(x, k).")
        check_options(generator=generator)
        has_integral = isinstance(likelihood, Bernoulli) and isinstance(self._outputs, NormalOutputs)
        by_draws = not has_integral and not self._outputs.has_moments_of(likelihood)
        normals = normals_for(self._outputs, generator) if by_draws else None
        outputs, split = self._split(self._outputs, "uncertainty", normals)
        if by_draws:
            of_numbers = partial(decompose_drawn_numbers, correction=outputs.correction)
            decompose = decompose_labels if likelihood.form in NAMED else of_numbers
            drawn = outputs.draws(normals, split.start)
            uncertainty = join_uncertainties([decompose(likelihood, draws, outputs.error) for draws in drawn])
        elif isinstance(likelihood, Bernoulli) and isinstance(outputs, NormalOutputs):
            uncertainty = outputs.uncertainty_of_labels(likelihood)
        else:
            mean, variances = outputs.mean, outputs.covariance().diagonal(dim1=-2, dim2=-1)
            uncertainty = decompose_numbers(likelihood, mean, variances)
        return self._by_point(split, uncertainty)

    def log_likelihood(
        self, y: Points, joint: bool = False, generator: torch.Generator | None = None, link: str = "mc"
    ) -> Estimate:
        """Return log p(y | x, data) in nats; see `log_likelihood` of the posterior."""
        check_flag("joint", joint)
        check_options(generator=generator)
        check_choice("link", link, ("mc", "probit"))
        likelihood = self._target
        by_probit = link == "probit"
        refuse(by_probit and joint, "link='probit' scores each point; pairs of points, joint=True, need link='mc'.")
        if by_probit:
            answers.checked_link(link, likelihood)
        outputs = self._outputs_by_weights(generator) if joint else self._outputs
        is_exact = isinstance(likelihood, Gaussian) or self.lin.output_shape[-1] == 1
        normals = None if by_probit or is_exact else normals_for(outputs, generator)
        targets_of = partial(answers.targets_by_position, outputs.lin, self.x, y)
        call = f"the log-likelihood, joint={joint}, link={link!r}"
        outputs, split = self._split(outputs, call, normals, joint and self.gather, targets_of)
        targets = split.targets
        assert targets is not None
        if joint and len(targets) == 1:
            raise ValueError("joint=True scores pairs of points, and there is only one; pass more, or joint=False.")
        if by_probit:
            logits = answers.probit_logits(likelihood, lambda: outputs.mean, outputs.covariance())
            return self._by_point(split, Estimate.exact(likelihood.log_prob(logits, targets)))
        if isinstance(outputs, NormalOutputs) and is_exact:
            return self._by_point(split, Estimate.exact(outputs.log_likelihoods_of(likelihood, targets)))
        log_p = outputs.log_likelihoods_of_draws(likelihood, targets, normals, split.start)
        if joint:
            return answers.dyadic_score(log_p, generator, outputs.error)
        return self._by_point(split, answers.log_mean_exp(log_p, outputs.error))

    def _by_point(self, split: SplitPoints, results: Answers) -> Answers:
        """Return a dataclass of results for the points asked for, those of positions in the shape of the outputs."""
        rows: dict[str, Any] = {}
        for name in (f.name for f in fields(results)):
            value = getattr(results, name)
            if isinstance(value, Tensor) and value.ndim:
                rows[name] = self.lin.by_point(split.rows_asked_for(value))
        return replace(results, **rows)

    def _outputs_by_weights(self, generator: torch.Generator | None) -> OutputDistribution:
        """Return the outputs at the draws of the weights, made for one answer if there are none."""
        if isinstance(self._outputs, DrawnOutputs):
            return self._outputs
        return self._outputs.at_draws(self.posterior.sample(WEIGHT_DRAWS, generator))

    def _split(
        self,
        outputs: SomeOutputs,
        call: str,
        normals: PointNormals | None = None,
        all_points: bool = False,
        targets: Callable[[], Tensor] | None = None,
    ) -> tuple[SomeOutputs, SplitPoints]:
        """Return the outputs at this rank's points, and how points are split; `all_points` if all are needed together.

        The same outputs serve later questions while gradients are recorded, or while they are not, unless a tensor is
        being learned.
        """
        request = call if normals is None else f"{call}, seed={normals.seed}"
        request += ", again" if self._shared else ""  # ranks must agree on which products are known

        def needs_data() -> bool:
            sharded = isinstance(outputs, NormalOutputs) and ranks_together(self.posterior.precision) is not None
            return all_points or sharded

        split = split_points(self.lin, self.x, self.gather, request, needs_data, targets)
        if outputs is not self._outputs:
            return replace(outputs, x=split.x, rtol=self.rtol), split
        key = split.is_whole, torch.is_grad_enabled()
        if key not in self._shared or self.posterior._is_learned:
            self._shared[key] = replace(outputs, x=split.x, rtol=self.rtol)
        return self._shared[key], split
