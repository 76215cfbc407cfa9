"""The terms of a posterior's precision P = G + A: the prior N(m, A⁻¹), and the curvature G with a cache of its values.

A is a number, a number per layer or weight, an operator, or an earlier posterior's precision. The cache is one store
with one rule of validity:

| name                    | what it is                                                       | depends on              |
|-------------------------|------------------------------------------------------------------|-------------------------|
| log likelihood          | Σ log p(y_n given x_n, θ*) of the data of the curvature          | likelihood              |
| gradient                | of the negative log-likelihood at θ*, (D,)                       | likelihood              |
| lowest                  | least Ritz value of G with its vector                            | likelihood              |
| spectrum                | all eigenvalues and eigenvectors of G                            | likelihood              |
| quadrature              | smallest prior precision, tolerance and the quadrature for them  | likelihood              |
| formed                  | G, or its undamped part, as a matrix                             | likelihood              |
| sketch                  | a prior's diagonal, columns and the preconditioner for them      | likelihood; it serves   |
|                         |                                                                  | neighbouring priors     |
| ggn                     | the cache of the GGN, for the linear model's mode                | likelihood              |
| kernel                  | factor, spectrum and mode from J Jᵀ under the likelihood         | likelihood              |
| J Jᵀ                    | the matrix, shared by the posteriors of these data and weights   | data and weights        |

Values that depend on the likelihood are dropped if a hyperparameter has changed since they were computed.
Hyperparameters are compared by value, since version counters miss fused optimisers and `.data`. J Jᵀ is dropped with
the last posterior that uses it.

Below stand the checks of what users give for these terms.
"""

from __future__ import annotations

import math
import numbers
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import add
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import torch
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.ambient import CACHE_BYTES
from curvops.checkpoint import Checkpoint, current, identify
from curvops.checks import carries_graph, check_choice, check_kind, check_like, check_shape, shown
from curvops.linalg import Damped, Estimate, Operator, SpectralQuadrature
from curvops.linalg.core.algorithm import keep
from curvops.linalg.core.matrix_identity import common, form_of, sources_of, spaces_of
from curvops.linalg.core.solve_routes import DENSE_BLOCK, NEWTON_STEPS
from curvops.linalg.core.vectors import is_psd, is_symmetric
from curvops.linalg.operators.base import as_part, number_of
from curvops.linalg.operators.closed_form import ClosedForm
from curvops.linalg.operators.damped import ScaledPreconditioner
from curvops.linalg.preconditioners.factored import LowRankPreconditioner
from curvops.network import Model, read_mean, read_precision
from curvops.network.likelihoods import Likelihood
from curvops.operators import (
    EKFAC,
    GGN,
    KFAC,
    BlockDiagonal,
    DiagonalGGN,
    EmpiricalFisher,
    Hessian,
    Linearization,
    ShardedLinearization,
)
from curvops.operators.curvatures.kfac import has_kronecker_blocks, kfac_sum
from curvops.operators.curvatures.subnetwork import Formed
from curvops.operators.function_space.gram_matrix import gram_cost
from curvops.operators.linearized.user_operator import require_no_gradient
from curvops.ranks.sharded_linearization import KNOWN_OF_SHARDS
from curvops.storage import from_record
from curvops.summary import size_of

Known = TypeVar("Known")


class OfData(dict[str, Any]):
    """Values that depend only on the data and the weights."""


_of_data: WeakValueDictionary[int, OfData] = WeakValueDictionary()
"""The values of each walk over data that a cache holds at present."""


class CurvatureCache:
    """The values of the table above for one linearisation and curvature, shared by posteriors under different priors.

    `data` are the linearisations that the curvature belongs to, or a sentence that says why they are unknown. `power`
    is how often the curvature counts them: 1/T if their likelihood is tempered. `generator` is the default source
    of sketches. Pickling and copying keep the values, and drop the lock and the generator.
    """

    def __init__(
        self,
        lin: Linearization,
        curvature: LinearOperator,
        generator: torch.Generator | None = None,
        checks_mode: bool = True,
    ) -> None:
        self.lin, self.curvature, self.generator = lin, curvature, generator
        self.data, self.power = data_terms(lin, curvature), power_of(lin, curvature)
        sources = sources_of(curvature)
        self.scaled_with_graph = sources is not None and sources.recorded
        self.lock = threading.RLock()
        self.checks_mode = checks_mode  # until there was a warning; False if the user wants none
        self._values = dict[str, Any]()
        self._seen = [tensor.detach().clone() for _, tensor in self.hyperparameters]
        # When an earlier cache is collected differs between ranks, which must agree on what is known.
        self.of_data = OfData() if lin.passes.is_shared else _of_data.setdefault(id(lin.passes), OfData())

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "lock"} | {"generator": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.lock = threading.RLock()

    def get(self, name: str, compute: Callable[[], Known], fits: Callable[[Any], bool] | None = None) -> Known:
        """Return the value of this name, computed if it is missing or outdated; a value of None is not kept."""
        with self.lock:
            value: Any = self.peek(name)
            if value is None or (fits is not None and not fits(value)):
                value = compute()
                if value is not None:
                    self._values[name] = value
            typed: Known = value
            return typed

    @property
    def hyperparameters(self) -> list[tuple[Likelihood, Tensor]]:
        """The hyperparameters of all linearisations with their likelihoods; they may change while they are in use."""
        tensors = []
        for lin in (self.lin,) if isinstance(self.data, str) else self.data:
            for tensor in lin.likelihood.hyperparameters:
                tensors.append((lin.likelihood, tensor))
        return tensors

    def peek(self, name: str) -> Any:
        """Return the value kept under this name, None if there is none; nothing is computed."""
        with self.lock:
            self._follow()
            return self._values.get(name)

    def _follow(self) -> list[tuple[Likelihood, Tensor]]:
        """Return the hyperparameters; drop all values if one has changed, or raise ValueError if G does not follow."""
        now = self.hyperparameters
        if now and not all(torch.equal(tensor, old) for (_, tensor), old in zip(now, self._seen)):
            for likelihood, tensor in now:
                if not self._is_held(tensor):
                    kind = type(self.curvature).__name__
                    raise ValueError(f"{likelihood!r} has changed since {kind} was built: build the posterior again.")
            self._seen = [tensor.detach().clone() for _, tensor in now]
            self._values.clear()
        return now

    def put(self, name: str, value: object) -> None:
        """Store this value with the present hyperparameters."""
        with self.lock:
            self._follow()
            self._values[name] = value

    @cached_property
    def gram_cost(self) -> float:
        """Return the gradients that J Jᵀ takes; ∞ unless the curvature is the exact GGN of these data alone."""
        curvature = self.curvature
        exact = isinstance(curvature, GGN) and curvature.arguments == {} and curvature.lin is self.lin
        return gram_cost(self.lin.plan, self.lin.num_data) if exact else math.inf

    @cached_property
    def mode_cost(self) -> float:
        """Return the gradients that the linear model's mode takes by J Jᵀ, factorised for each of `NEWTON_STEPS`.

        There the curvature is the GGN, whatever it is here. Factors of up to `DENSE_BLOCK` outputs take a moment. The
        result is ∞ unless these data alone are counted, once.
        """
        if isinstance(self.data, str) or self.power != 1 or [*map(id, self.data)] != [id(self.lin)]:
            return math.inf
        plan, points = self.lin.plan, self.lin.num_data
        outputs = points * plan.num_outputs
        factor = outputs**3 / 6 if outputs > DENSE_BLOCK else 0.0
        return gram_cost(plan, points) + NEWTON_STEPS * factor / max(1, 3 * plan.forward * points)

    def known_data(self, what: str) -> tuple[Linearization, ...]:
        """Return the linearisations of the curvature; raise ValueError if `what` needs them and they are unknown."""
        if isinstance(self.data, str):
            raise ValueError(
                f"{what} needs the likelihood of the curvature: {self.data} Pass a curvature that counts the data of "
                "each linearisation once, such as co.GGN(lin_a) + co.GGN(lin_b), or a multiple of such a sum."
            )
        return self.data

    def ggn(self) -> LinearOperator:
        """Return the GGN of the curvature's data, whatever the curvature is."""
        total: LinearOperator = reduce(add, map(GGN, self.known_data("the mode of the linear model")))
        return total

    def log_likelihood(self) -> Float[Tensor, ""]:
        """Return Σ_n log p(y_n | x_n, θ*) in nats over the curvature's data, with its gradient in hyperparameters.

        A tempered likelihood is multiplied by 1/T. Raises ValueError if the data are unknown or counted unevenly.
        """
        data = self.known_data("the log evidence")

        def compute() -> Tensor:
            return self.power * torch.stack([lin.log_likelihood() for lin in data]).sum()

        if carries_graph([tensor for lin in data for tensor in lin.likelihood.hyperparameters]):
            return compute()
        with torch.no_grad():
            return self.get("log likelihood", compute)

    @torch.no_grad()
    def gradient(self) -> Float[Tensor, " D"] | None:
        """Return the gradient of the negative log-likelihood over the curvature's data, or None."""
        data = self.data
        if isinstance(data, str):
            return None
        return self.get("gradient", lambda: self.power * torch.stack([lin.gradient() for lin in data]).sum(0))

    def require_gradients(self) -> None:
        """Raise ValueError if a hyperparameter has changed, or needs a gradient that the curvature lacks."""
        with self.lock:
            hyperparameters = self._follow()
        for likelihood, tensor in hyperparameters:
            if carries_graph((tensor,)) and not self._is_held(tensor):
                require_no_gradient(likelihood, f"a posterior with {type(self.curvature).__name__}")

    def state(self) -> dict[str, Any]:
        """Return what tuning reuses at the next prior, for checkpoints: a sketch, its source, and a quadrature."""
        record, sketch, quadrature = None, self.peek("sketch"), self.peek("quadrature")
        if sketch is not None:
            diagonal, columns, made = sketch
            scale, inner = (made.scale, made.inner) if isinstance(made, ScaledPreconditioner) else (None, made)
            record = {"of": diagonal, "columns": columns, "scale": scale, "inner": inner}
        return {
            "sketch": record,
            "generator": None if self.generator is None else self.generator.get_state(),
            "quadrature": None if quadrature is None else list(quadrature),
        }

    def recall(self, state: Mapping[str, Any]) -> None:
        """Restore the values that were drawn for the same curvature."""
        if self.generator is not None:
            self.generator.set_state(state["generator"].cpu())
        if (sketch := state["sketch"]) is not None:
            inner: Any = from_record(LowRankPreconditioner, sketch["inner"])
            keep(self.curvature, inner, inner.U.nbytes)
            made = inner if sketch["scale"] is None else ScaledPreconditioner(sketch["scale"], inner)
            self.put("sketch", (sketch["of"], sketch["columns"], made))
        if state["quadrature"] is not None:
            smallest, rtol, record = state["quadrature"]
            self.put("quadrature", (smallest, rtol, from_record(SpectralQuadrature, record)))

    @property
    def is_kept(self) -> bool:
        """Return whether a value belongs to the state of the current run, which computed it."""
        return current().whole.held.get("cache") is self

    def keep_in(self, saved: Checkpoint) -> None:
        """Save a value with this step of its run; if the step has ended, restore the value that it left."""
        if self.is_kept:
            state = saved.attach("known", self.state)
            if saved.done:
                self.recall(state)

    def _is_held(self, tensor: Tensor) -> bool:
        """Return whether the curvature follows a tensor and has gradients in it."""
        return any(tensor is other for other in self.curvature.representation())


def data_terms(lin: Linearization, curvature: LinearOperator) -> tuple[Linearization, ...] | str:
    """Return the linearisations whose log-likelihoods add up to the curvature's, or a sentence on why they are unknown.

    A curvature times a number, (1 / T) * co.GGN(lin), belongs to the likelihood to this power (`power_of`). Operators
    built from a linearisation, or from such operators, record their data and how often they count them. A user's own
    matrix does not; if it stands alone, it counts as a curvature of `lin`.
    """
    sources = sources_of(curvature)
    if sources is None:
        return (lin,)
    if sources.detached:
        return "a part of the curvature was detached from its weights, so it belongs to no likelihood at these weights."
    counts, source_of_lin = sources.counts, lin.source
    if not counts.get(source_of_lin):
        return (
            "the curvature belongs to other data, or another likelihood, than the linearisation given to co.laplace; "
            "linearise once with all data, or add up the curvatures of both."
        )
    if sources.partial:
        return (
            "in addition to the part that belongs to these data, the curvature holds an operator (a matrix, say) "
            "that does not record which data it belongs to."
        )
    uneven = [count for count in counts.values() if abs(count - counts[source_of_lin]) > 1e-12]
    if (sources.repeated or uneven or counts[source_of_lin] < 0) and (
        not_once := [c for c in counts.values() if abs(c - 1) > 1e-12]
    ):
        return f"the curvature counts data {not_once[0]:.4g} times, but their likelihood counts them once."
    linearizations: dict[Hashable, Linearization] = {
        linearization.source: linearization for linearization in _linearizations(curvature)
    }
    linearizations[source_of_lin] = lin
    if not counts.keys() <= linearizations.keys():
        return (
            "a part of it belongs to other data than the linearisation given to co.laplace, and does not keep them "
            "(as KFAC, diagonals, blocks and low rank); linearise once with all data, or use a GGN, Fisher or "
            "Hessian of those data."
        )
    return tuple(linearizations[source] for source in counts)


def power_of(lin: Linearization, curvature: LinearOperator) -> float:
    """Return the power of a curvature's likelihood: 1/T if it is tempered, otherwise 1."""
    sources = sources_of(curvature)
    count = 1.0 if sources is None else sources.counts.get(lin.source, 1.0)
    return 1.0 if abs(count - 1) <= 1e-12 else count


def _linearizations(operator: LinearOperator) -> Iterator[Linearization]:
    """Yield the linearisations that an operator and its parts contain."""
    lin = getattr(operator, "lin", None)
    if isinstance(lin, Linearization):
        yield lin
    for argument in operator._args:
        if isinstance(argument, LinearOperator):
            yield from _linearizations(argument)


class WithCurvature(NamedTuple):
    """The sum P = G + A as an operator, and ‖C − Ĉ‖_F / ‖C‖_F if its curvature C is stored as Ĉ; otherwise None."""

    precision: Any
    error: Estimate | None = None


@dataclass(frozen=True, eq=False)
class Prior:
    """A Gaussian prior N(m, A⁻¹): `precision` A, 0-d, a diagonal (D,) or an operator; `mean`, 0-d or (D,)."""

    precision: Tensor | LinearOperator
    mean: Float[Tensor, ""] | Float[Tensor, " D"]
    chosen_by: str = ""
    """What chose the precision, "the evidence" or "held-out data"; empty if it was given."""

    @property
    def printed(self) -> str:
        """The precision in a few words, with what chose it."""
        A = self.precision
        value = number_of(A, size_of(A)) if isinstance(A, Tensor) else as_part(A)
        return f"{value} by {self.chosen_by}" if self.chosen_by else value

    def facts(self) -> dict[str, Any]:
        """Return by name what must be equal on all ranks; operators are told by their kinds and numbers alone."""
        A = self.precision
        precision = identify(A) if isinstance(A, Tensor) else form_of(A)
        return {"the prior's precision": precision, "the prior's mean": identify(self.mean)}

    @property
    def diagonal(self) -> Tensor | None:
        """Return A as a 0-d tensor or its diagonal (D,); None for an operator."""
        return self.precision if isinstance(self.precision, Tensor) else None

    def plus(self, curvature: LinearOperator) -> WithCurvature:
        """Return G + A, with A's own shift on the outside."""
        if self.diagonal is not None:
            return WithCurvature(curvature.add_diagonal(self.diagonal))
        return WithCurvature(curvature + self.precision)

    def product(self, vector: Float[Tensor, " D"]) -> Float[Tensor, " D"]:
        """Return A v."""
        if isinstance(self.precision, Tensor):
            return self.precision * vector
        product: Tensor = self.precision._matmul(vector.unsqueeze(-1)).squeeze(-1)
        return product

    def quadratic(self, theta: Float[Tensor, " D"]) -> Float[Tensor, ""]:
        """Return (θ − m)ᵀ A (θ − m) in float64, minus twice the log density without its constant."""
        # In double precision, since the result may be as large as 1e6 nats; in parts, since copies are twice as large.
        if self.diagonal is not None:
            parts = zip(*(v.expand_as(theta).split(CACHE_BYTES // 8) for v in (theta, self.mean, self.diagonal)))
            return torch.stack([(A.double() * (t.double() - m.double()).square()).sum() for t, m, A in parts]).sum()
        gap = theta.double() - self.mean.double()
        return gap @ self.product(gap.to(theta.dtype)).double()

    def gradient(self, theta: Float[Tensor, " D"]) -> Float[Tensor, " D"]:
        """Return A (θ − m), the gradient of the negative log density."""
        with torch.no_grad():
            return self.product(theta - self.mean)


@dataclass(frozen=True, eq=False)
class KroneckerPrior(Prior):
    """A prior of Kronecker blocks plus a diagonal; its sum with a KFAC has the same form."""

    def plus(self, curvature: LinearOperator) -> WithCurvature:
        """Return G + A, for a KFAC with one Kronecker product per block (the nearest to the sum)."""
        if not has_kronecker_blocks(curvature):
            return super().plus(curvature)
        assert isinstance(self.precision, Damped)
        blocks, error = kfac_sum(self.precision.base, curvature)
        return WithCurvature(blocks.add_diagonal(self.precision.shift), error)


@dataclass(frozen=True, eq=False)
class PrecisionTerms:
    """The terms of a posterior's precision P = G + A: the curvature, with its cache, and the prior."""

    cache: CurvatureCache
    prior: Prior

    @property
    def lin(self) -> Linearization:
        """The linearisation of the posterior's weights."""
        return self.cache.lin

    @property
    def curvature(self) -> LinearOperator:
        """The curvature G."""
        return self.cache.curvature

    @property
    def A(self) -> Tensor | None:
        """The prior precision as a 0-d tensor or its diagonal (D,); None for an operator."""
        return self.prior.diagonal

    @cached_property
    def sum(self) -> WithCurvature:
        """The sum P and its error, computed once: all methods of a posterior share the factorisation."""
        return self.prior.plus(self.curvature)

    @cached_property
    def precision(self) -> Any:
        """The operator P. It holds the tensors of G and A themselves, so that a change of their values takes effect."""
        return self.sum.precision

    @cached_property
    def formed(self) -> Any:
        """The operator P with its operand `Formed`, which priors that are numbers or vectors share."""
        P = self.precision
        base, shift = (P.base, P.shift) if isinstance(P, Damped) else (P, 0.0)
        formed = self.cache.get("formed", lambda: Formed(base), lambda formed: formed.base is base)
        return formed.add_diagonal(shift)

    @property
    def closed_form(self) -> ClosedForm | None:
        """The closed form of P, if it has a valid one."""
        form: ClosedForm | None = self.precision._closed_form()
        return form

    @property
    def of_mode(self) -> PrecisionTerms:
        """The terms of which a sketch serves the linear model's precision: under KFAC or a Fisher, those of its GGN."""
        cache, of_fisher = self.cache, isinstance(self.curvature, EmpiricalFisher)
        if is_psd(self.curvature) and self.closed_form is None and not of_fisher:
            return self

        def of_ggn() -> CurvatureCache:
            ggn = cache.ggn()
            return CurvatureCache(cache.lin, ggn if cache.power == 1 else cache.power * ggn, cache.generator)

        return PrecisionTerms(cache.get("ggn", of_ggn), self.prior)


def read_prior(prior_precision: Any, prior_mean: Any, network: Model, posterior: bool = False) -> Prior:
    """Return the prior that a user's arguments describe; `posterior` means that an earlier one gave the precision.

    Raises TypeError for an argument of another kind. Raises ValueError for a wrong size, a precision that is not
    positive and finite, a mapping that does not name each parameter once, or an operator that is not known to be
    positive semidefinite or that belongs to other parameters or other weights.
    """
    selection, theta = network.selection, network.theta
    if isinstance(prior_precision, LinearOperator):
        precision: Tensor | LinearOperator = _checked_operator(prior_precision, network, posterior)
    else:
        others = ", an operator or an earlier posterior"
        precision = read_precision("prior_precision", prior_precision, selection, theta, others)
    return Prior(precision, read_mean(prior_mean, selection, theta))


def _checked_operator(prior: LinearOperator, network: Model, definite: bool) -> LinearOperator:
    """Return a precision operator (D, D), after checking that it belongs to these weights or to none."""
    kind = type(prior).__name__
    check_kind("prior_precision", prior, Operator, "an operator of curvops, such as co.linalg.Dense(matrix)")
    check_operator("prior_precision", prior, network)
    if not (definite or is_psd(prior)):
        raise ValueError(
            f"prior_precision {kind} is not known to be positive semidefinite; pass co.linalg.Dense(matrix, psd=True), "
            "a curvature plus a number, or a class of your own with psd = True."
        )
    if carries_graph(prior.representation()):
        raise ValueError(f"a prior given as an operator carries no gradient: detach the tensors of {kind}.")
    return prior


CURVATURES: dict[str, type[LinearOperator]] = {
    "kfac": KFAC,
    "ekfac": EKFAC,
    "ggn": GGN,
    "diagonal": DiagonalGGN,
    "block_diagonal": BlockDiagonal,
    "empirical_fisher": EmpiricalFisher,
    "hessian": Hessian,
}
"""Curvatures by name."""


def checked_draws(samples: Any, mean: Tensor, name: str = "samples", count: int | None = None) -> Tensor:
    """Return draws of the weights (k, D), k = `count`; raise unless their shape, dtype and device fit."""
    size = f"({'k' if count is None else count}, {len(mean)})"
    check_kind(name, samples, Tensor, f"draws of the weights {size}, as from post.sample(k)")
    if samples.ndim != 2 or samples.shape[1] != len(mean) or len(samples) != (count or max(len(samples), 1)):
        raise ValueError(f"{name} must be {size}, as from post.sample(k), not {tuple(samples.shape)}.")
    check_like(name, samples, mean, "the weights")
    return samples


def checked_curvature(curvature: Any, lin: Linearization) -> LinearOperator:
    """Return the operator (D, D) that `curvature` is, names or builds; raise TypeError or ValueError for others."""
    if isinstance(curvature, str):
        check_choice("curvature", curvature, CURVATURES)
        curvature = CURVATURES[curvature]
    operator: Any = curvature(lin) if isinstance(curvature, type) else curvature
    if not isinstance(operator, LinearOperator):
        hint = "; wrap a tensor as co.linalg.Dense(matrix, psd=True)"
        if isinstance(operator, numbers.Real):
            hint = f"; a prior precision is named: co.laplace(lin, prior_precision={operator})"
        elif callable(operator):
            hint = "; of a function, pass what it makes: curvature(lin)"
        raise TypeError(f"curvature must be a name, a class (co.KFAC, …) or an operator, got {shown(operator)}{hint}.")
    check_operator("curvature", operator, lin.model)
    if not is_symmetric(operator):
        raise ValueError(
            f"curvature {type(operator).__name__} is not known to be symmetric: a class of your own says so by "
            "symmetric = True or psd = True, a matrix by co.linalg.Dense(matrix, psd=True)."
        )
    return operator


def check_operator(name: str, operator: LinearOperator, network: Model) -> None:
    """Raise ValueError unless it is an operator (D, D) on these parameters, made at their current values or at none."""
    common(network.tangent_space, *spaces_of(operator))
    check_shape(name, operator, (network.num_parameters,) * 2)
    check_like(name, operator, network.theta, "the parameters")


def require_linearized(lin: Any) -> None:
    """Raise TypeError unless it is a linearised network that has all its weights on each rank."""
    if isinstance(lin, ShardedLinearization):
        raise TypeError(
            "this needs all weights on each rank, got a ShardedLinearization: pass co.linearize of an unsharded copy "
            f"of the model. Of the sharded one {KNOWN_OF_SHARDS}."
        )
    check_kind("lin", lin, Linearization, "a linearised network, co.linearize(model, data, likelihood)")


def check_linearization(lin: Any) -> None:
    """Raise TypeError unless it is a linearised network in a dtype that a posterior supports."""
    require_linearized(lin)
    dtype = lin.theta.dtype
    if torch.finfo(dtype).bits < 32:
        raise TypeError(f"{dtype} is too coarse: pass lin.cast(torch.float32), or linearise model.float().")
