"""Gaussians over the weights: the base of all posteriors, and one that is not a Laplace approximation."""

from __future__ import annotations

import math
import os
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor, nn

from curvops import storage
from curvops.checks import carries_graph, check_kind, check_like, check_options, refuse
from curvops.linalg import Damped, Dense, Estimate, Inverse, LowRank, logdet, low_rank
from curvops.linalg.core import solve_routes as routes
from curvops.linalg.core.matrix_identity import sources_of
from curvops.linalg.estimators.frobenius import relative_distance
from curvops.linalg.operators.base import as_part
from curvops.linalg.operators.draws import draw
from curvops.network import accumulate, record_of_network
from curvops.operators import Linearization
from curvops.operators.curvatures.kfac import has_kronecker_blocks
from curvops.operators.operator_record import record_of_operator
from curvops.posterior.deviations import Deviations, trace
from curvops.posterior.predictions.outputs import NormalOutputs
from curvops.posterior.predictions.predictive import Predictive
from curvops.posterior.terms import (
    check_linearization,
    check_operator,
    checked_draws,
)

KIND = "posterior"
"""The kind of a posterior's folder."""
OF_LAPLACE, OF_GAUSSIANS = VERSIONS = 1, 2
"""Versions of the schema; a version is raised when an older program would misread it."""
INTERNAL = ("cache", "prior", "prior_error", "prior_for", "progress", "terms")
"""Names of a posterior that other functions of the library use, and that `dir` does not show."""


class GaussianWeights(Predictive):
    """A Gaussian N(θ*, T P⁻¹) at the weights θ* of a linearisation; the base class of all posteriors."""

    temperature: float
    precision: Any
    """The precision P, (D, D), whatever the temperature."""

    def __dir__(self) -> list[str]:
        """List what a user calls."""
        return [name for name in super().__dir__() if not name.startswith("_") and name not in INTERNAL]

    @property
    def mean(self) -> Float[Tensor, " D"]:
        """The mean θ*, the weights of the linearisation."""
        return self.lin.theta

    @abstractmethod
    def _deviations(self, k: int, generator: torch.Generator | None, rtol: float) -> Float[Tensor, "k D"]:
        """Draw from N(0, T P⁻¹), as rows, after checking the arguments."""

    @abstractmethod
    def _logdet(self, rtol: float, generator: torch.Generator | None) -> Estimate:
        """Return log det P in nats."""

    @abstractmethod
    def _record(self, inputs: Any) -> tuple[int, dict[str, Any]]:
        """Return the posterior as plain values and tensors, and the version of the schema."""

    def sample(self, k: int, generator: torch.Generator | None = None, rtol: float = 1e-3) -> Float[Tensor, "k D"]:
        """Draw k weight vectors from the posterior, as rows: the mean plus `deviations`.

        Args:
            k: the number of draws, at least 1.
            generator: the source of the draws.
            rtol: the relative residual of each solve; the default is far below the sampling error of k draws.

        Returns:
            The draws (k, D), with the mean added. `lin.unflatten_weights(draw)` gives the tensors of one draw by name;
            weights outside a subnetwork keep their values.

        Raises:
            ConvergenceError: rtol was not reached.
            TypeError: k is not a whole number.
            ValueError: k is less than 1, or rtol is not a positive number.
        """
        return accumulate(self._deviations(k, generator, rtol), self.mean)

    def trace(
        self,
        M: LinearOperator,
        samples: int | Float[Tensor, "k D"] | Deviations = 64,
        generator: torch.Generator | None = None,
    ) -> Estimate:
        """Estimate tr(T P⁻¹ M) for a symmetric operator M (D, D) as the mean of zᵀM z over draws z of the posterior.

        Args:
            M: the operator. For tr(P⁻¹G) with a Laplace posterior's own curvature G, see `effective_parameters`.
            samples: the number of draws; or draws (k, D) from an earlier `sample` or `deviations`, to use them again.
            generator: the source of new draws.

        Raises:
            TypeError, ValueError: M is not an operator (D, D) on these weights, or there are fewer than two draws.

        Cost: a product with M per draw, and that of new draws. The value is as accurate as the draws' own tolerance.
        """
        check_kind("M", M, LinearOperator, "an operator (D, D), such as co.linalg.Dense(matrix)")
        check_operator("M", M, self.lin.model)
        if isinstance(samples, Deviations):
            return trace(M, checked_draws(samples.draws, self.mean))
        if isinstance(samples, Tensor):
            return trace(M, checked_draws(samples, self.mean) - self.mean)
        return trace(M, self._deviations(samples, generator, 1e-3))

    def penalty(self, params: nn.Module | Mapping[str, Tensor] | Float[Tensor, " D"]) -> Float[Tensor, ""]:
        """Return ½ (θ − θ*)ᵀP(θ − θ*) / T, the negative log density of weights up to a constant, with its gradient.

        Add it to the summed loss of the next task, so that training on it does not forget this task.

        Args:
            params: the model in training; or its weights by name (names outside the selection are ignored), or as a
                vector (D,). Gradients flow into them.

        Cost: a product with P, forward and backward together.

        Raises:
            TypeError, ValueError: an argument is of another kind, a name is missing, or a shape is wrong.
        """
        gap = flatten_weights(self.lin, params) - self.mean
        return quadratic(self.precision, gap).to(gap.dtype) / self.temperature

    def log_prob(
        self,
        weights: nn.Module | Mapping[str, Tensor] | Float[Tensor, "*k D"],
        rtol: float = 0.01,
        generator: torch.Generator | None = None,
    ) -> Estimate:
        """Return log N(θ; θ*, T P⁻¹), the log density of weights θ under this Gaussian, in nats.

        It is ½ log det P − D/2 log 2πT − `penalty(θ)`. The log-determinant is exact where that of `log_evidence` is
        (closed forms, and up to 1,024 weights), with its rounding as bias bound; otherwise it is estimated. All rows
        share one log-determinant, so that differences between them are exact.

        Args:
            weights: a model, weights by name (names outside the selection are ignored), a vector (D,), or rows (k, D)
                such as those of `sample`.
            rtol: the relative accuracy of an estimated log-determinant.
            generator: the source of the probes.

        Returns:
            An Estimate of shape () or (k,), in float64. Its gradient in the weights is −P(θ − θ*) / T; in the prior
            precision and in hyperparameters it has the same gradients as `log_evidence`.

        Cost: a product with P for each row, and the log-determinant, which is stored as for `log_evidence`.

        Raises:
            TypeError, ValueError: weights are of another kind or shape, a name is missing, or a gradient is required
                that the log-determinant does not have.
        """
        check_options(rtol=rtol, generator=generator)
        gap = flatten_weights(self.lin, weights, rows=True) - self.mean
        constant = gap.shape[-1] * math.log(2 * math.pi * self.temperature) / 2
        half = self._logdet(rtol, generator) * 0.5
        value = half.value.double() - constant - quadratic(self.precision, gap) / self.temperature
        return replace(half, value=value, stderr=half.stderr.to(value).expand_as(value))

    def save(self, path: str | os.PathLike[str], inputs: Any = None) -> None:
        """Write the posterior into a folder, from which `co.load(path, model)` reads it again.

        Curvature, prior and covariance are saved by structure: Kronecker factors with their eigenbases, low rank,
        diagonals, dense blocks, and sums of these. A GGN, a Fisher or a Hessian is saved by reference to its data,
        which `co.load` then needs. Neither the model nor the data are saved: only the selected weights and fingerprints
        of all tensors of the model; and a fingerprint of the data and the inputs of two points, at which `co.load`
        compares the model's outputs. An earlier posterior in the folder is replaced in one step: after a crash, or on
        a full disk, it is unchanged.

        Args:
            path: the folder; it is created with its parent folders.
            inputs: inputs of one or two points, to save in place of the first two training inputs.

        Raises:
            OSError: the folder could not be written (a full disk); an earlier posterior is unchanged.
            FileExistsError: the path is a file, or contains something other than a posterior.
            ValueError: an operator cannot be saved: one of your own class, or a GGN of other data (those of an earlier
                task: `post.update(lin_new, rank=...)` keeps it by structure).
            TypeError: path is not a path.

        Gradients of the prior precision and of hyperparameters are not saved, nor is `tuning`. Cost: writing as many
        numbers as the factors have, and for a Laplace posterior a pass over the data if the log-likelihood is not
        known yet.
        """
        version, record = self._record(inputs)
        self.lin.write_once(partial(storage.save, path, KIND, version, record))

    def prior_for(
        self,
        lin: Linearization | None,
        form: str | None = None,
        rank: int | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[LinearOperator, Estimate | None]:
        """Return P / T as the precision of a prior for other data, and the error of its form."""
        sources = sources_of(self.precision)
        known = lin is not None and (lin.source == self.lin.source or (sources and lin.source in sources.counts))
        refuse(known, "the earlier posterior has these data, which would count twice: linearise with the new data.")
        compressed, error = compress_precision(form, self.precision.detached_from_weights(), rank, generator)
        return (compressed if self.temperature == 1 else compressed * (1 / self.temperature)), error


@dataclass(frozen=True, eq=False, repr=False)
class GaussianPosterior(GaussianWeights):
    """A Gaussian N(θ*, Σ) at the weights of a linearisation, the result of variational inference and Kalman filters.

    It predicts, is saved and serves as a prior like a `Laplace` posterior. It has no evidence, because it does not
    record its prior and its likelihood. Predictions are those of the linearised network.

    Examples:
        >>> variances = torch.full((17,), 0.1)
        >>> fit = co.posterior.GaussianPosterior(lin, co.linalg.Diagonal(variances), co.linalg.Diagonal(1 / variances))
        >>> fit.predict(x).mean.shape
        torch.Size([8, 2])
    """

    lin: Linearization
    covariance: LinearOperator
    """The covariance Σ, (D, D)."""
    precision: LinearOperator
    """The precision Σ⁻¹, (D, D)."""
    temperature: float = 1.0

    def _facts(self) -> tuple[str, ...]:
        return (f"covariance {as_part(self.covariance)}",)

    @classmethod
    def of(
        cls, lin: Linearization, covariance: LinearOperator | None = None, precision: LinearOperator | None = None
    ) -> GaussianPosterior:
        """Make the posterior from its covariance, its precision, or both if each has its own form.

        Args:
            lin: the network linearised at the mean.
            covariance: Σ, an operator (D, D), or None.
            precision: Σ⁻¹, an operator (D, D), or None.

        Returns:
            The posterior.

        Raises:
            TypeError, ValueError: an operator has another size, dtype or parameters, or neither is given.
        """
        check_linearization(lin)
        for name, operator in (("covariance", covariance), ("precision", precision)):
            if operator is not None:
                check_operator(name, operator, lin.model)
        if covariance is not None:
            return cls(lin, covariance, covariance.inverse() if precision is None else precision)
        if precision is None:
            raise ValueError("a Gaussian needs its covariance or its precision: pass one of them.")
        return cls(lin, precision.inverse(), precision)

    def deviations(self, k: int, generator: torch.Generator | None = None) -> Float[Tensor, "k D"]:
        """Draw k deviations from N(0, Σ), the posterior minus its mean, as rows.

        Args:
            k: the number of draws, at least 1.
            generator: the source of the draws.

        Returns:
            The deviations, (k, D).

        Raises:
            TypeError, ValueError: k is not a whole number of draws, or generator is not a torch.Generator.
        """
        return self._deviations(k, generator, 1e-3)

    def _deviations(self, k: int, generator: torch.Generator | None, rtol: float) -> Float[Tensor, "k D"]:
        check_options(k=k, rtol=rtol, generator=generator)
        return draw(self.covariance, k, generator, frozenset((self.lin.memory,))).mT

    def _outputs(self) -> NormalOutputs:
        return NormalOutputs(self.lin, lambda *_: self.covariance, self.temperature)

    def _logdet(self, rtol: float, generator: torch.Generator | None) -> Estimate:
        """Return log det P, from whichever operator is not the lazy inverse of the other."""
        rank = len(self.covariance.values) if isinstance(self.covariance, LowRank) else len(self.mean)
        if rank < len(self.mean):
            raise ValueError(f"a covariance of rank {rank} has no density over {len(self.mean):,} weights.")
        matrix, sign = (self.precision, 1.0) if isinstance(self.covariance, Inverse) else (self.covariance, -1.0)
        exact = len(self.mean) <= routes.MOST_DECOMPOSED or isinstance(matrix, Dense)
        return logdet(matrix, rtol=rtol, max_matvecs=len(self.mean) if exact else None, generator=generator) * sign

    def _record(self, inputs: Any) -> tuple[int, dict[str, Any]]:
        """Return the operators; if one is the lazy inverse of the other, only the other is recorded."""
        operators = (("covariance", self.covariance, self.precision), ("precision", self.precision, self.covariance))
        record: dict[str, Any] = {"linearization": record_of_network(self.lin, inputs)}
        for name, operator, other in operators:
            is_lazy = isinstance(operator, Inverse) and operator.base is other
            record[name] = None if is_lazy else record_of_operator(operator, self.lin, f"the {name}")
        return OF_GAUSSIANS, record


def quadratic(precision: LinearOperator, gap: Float[Tensor, "*k D"]) -> Float[Tensor, "*k"]:
    """Return ½ gapᵀ P gap per row, with its gradient P gap, by one product with P; on demand also in P's tensors.

    It is computed in float64, since it may be as large as 1e6 nats.
    """
    rows = torch.atleast_2d(gap)
    if carries_graph(precision.representation()):
        values = 0.5 * (rows * precision.matmul(rows.mT).mT).double().sum(-1)
    else:
        with torch.no_grad():
            product = precision._matmul(rows.detach().mT).mT
        values = (rows * product).double().sum(-1)
        values = values - 0.5 * values.detach()
    return values.reshape(gap.shape[:-1])


def flatten_weights(lin: Linearization, params: Any, rows: bool = False) -> Float[Tensor, "*k D"]:
    """Return a model's weights, named ones, a vector or, if allowed, rows as one tensor that keeps its graph."""
    if isinstance(params, Mapping | nn.Module):
        params = lin.flatten(params)
    check_kind("params", params, Tensor, f"the model, named tensors or a vector ({lin.num_parameters},)")
    if params.shape[-1:] != (lin.num_parameters,) or params.ndim > 1 + rows:
        or_rows = f" or rows (k, {lin.num_parameters})" if rows else ""
        raise ValueError(f"params must be a vector ({lin.num_parameters},){or_rows}, got shape {tuple(params.shape)}.")
    check_like("params", params, lin.theta, "the posterior")
    return params


def compress_precision(
    form: str | None, precision: LinearOperator, rank: int | None, generator: torch.Generator | None
) -> tuple[LinearOperator, Estimate | None]:
    """Return P in the given form (None: unchanged), and the error ‖C − Ĉ‖_F / ‖C‖_F of its curvature."""
    if form is None:
        return precision, None
    if not isinstance(precision, Damped):
        raise ValueError(f"form={form!r} needs a curvature plus a number or a vector: use co.low_rank(prior operator).")
    curvature = precision.base
    if form == "kronecker":
        if not has_kronecker_blocks(curvature):
            raise ValueError("form='kronecker' needs a KFAC: start with curvature=co.KFAC, or use form='low_rank'.")
        return precision, None
    sketch = low_rank(curvature, rank, generator=generator)
    if form == "low_rank":
        return sketch.add_diagonal(precision.shift), sketch.error
    corrected = sketch.with_diagonal(curvature.diagonal())
    return corrected.add_diagonal(precision.shift), relative_distance(curvature, corrected, generator)
