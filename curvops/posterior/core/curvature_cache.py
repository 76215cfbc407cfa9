"""The cache of a posterior's likelihood and curvature: one store with one rule of validity.

| name                    | what it is                                                       | depends on              |
|-------------------------|------------------------------------------------------------------|-------------------------|
| log likelihood          | Σ log p(y_n given x_n, θ*) of the data of the curvature          | likelihood              |
| gradient                | of the negative log-likelihood at θ*, (D,)                       | likelihood              |
| lowest                  | least Ritz value of G with its vector                            | likelihood              |
| spectrum                | all eigenvalues and eigenvectors of G                            | likelihood              |
| quadrature              | smallest prior precision, tolerance and the quadrature for them  | likelihood              |
| formed                  | G, or its undamped part, as a matrix                             | likelihood              |
| precision               | P, and P with its operand formed                                 | likelihood, prior       |
| columns                 | number of right-hand sides that covariances have needed so far  | likelihood              |
| weights, functions      | a prior's diagonal, columns and the sketch for them, in one of   | likelihood; it serves   |
|                         | the two spaces                                                   | neighbouring priors     |
| kernel                  | spectrum, solves and mode from J Jᵀ under the likelihood         | likelihood              |
| J Jᵀ                    | the matrix, shared by the posteriors of these data and weights   | data and weights        |

Values that depend on the likelihood are dropped if a hyperparameter has changed since they were computed.
Hyperparameters are compared by value, since version counters miss fused optimisers and `.data`. J Jᵀ is dropped with
the last posterior that uses it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import cached_property
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.checkpoint import Checkpoint, current
from curvops.checks import carries_graph
from curvops.linalg import SpectralQuadrature
from curvops.linalg.core.memory import keep
from curvops.linalg.core.sources import sources_of
from curvops.linalg.operators.damped import ScaledPreconditioner
from curvops.linalg.preconditioners.factored import LowRankPreconditioner
from curvops.network.likelihoods import Likelihood
from curvops.operators import GGN, Linearization
from curvops.operators.function_space.gram_cost import gram_cost
from curvops.operators.linearized.user_operator import require_no_gradient
from curvops.records import from_record

SKETCHES = ("weights", "functions")
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
        self.lock = threading.RLock()
        self.checks_mode = checks_mode  # until there was a warning; False if the user wants none
        self._values = dict[str, Any]()
        self._seen = [tensor.detach().clone() for _, tensor in self.hyperparameters]
        # When an earlier cache is collected differs between ranks, which must agree on what is known.
        self.of_data = OfData() if lin.passes.shard is not None else _of_data.setdefault(id(lin.passes), OfData())

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "lock"} | {"generator": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.lock = threading.RLock()

    def get(
        self, name: str, compute: Callable[[], Known], fits: Callable[[Any], bool] | None = None, nbytes: int = 0
    ) -> Known:
        """Return the value of this name, computed if it is missing or outdated; a value of None is not kept.

        As long as the value exists, its bytes count as used in the memory budget.
        """
        with self.lock:
            known: Any = self.known(name)
            if known is None or (fits is not None and not fits(known)):
                known = compute()
                if known is not None:
                    self._store(name, known, nbytes)
            found: Known = known
            return found

    @property
    def hyperparameters(self) -> list[tuple[Likelihood, Tensor]]:
        """The hyperparameters of all linearisations, which may change while a posterior is in use, with their owners."""
        found = []
        for lin in (self.lin,) if isinstance(self.data, str) else self.data:
            found += [(lin.likelihood, tensor) for tensor in lin.likelihood.hyperparameters]
        return found

    def known(self, name: str) -> Any:
        """Return the value of this name, or None if there is none."""
        with self.lock:
            if (now := self.hyperparameters) and not all(torch.equal(t, old) for (_, t), old in zip(now, self._seen)):
                self._require_followed()
                self._seen = [tensor.detach().clone() for _, tensor in now]
                self._values.clear()
            return self._values.get(name)

    def put(self, name: str, value: object, nbytes: int = 0) -> None:
        """Store this value with the present hyperparameters."""
        with self.lock:
            self.known(name)
            self._store(name, value, nbytes)

    def _store(self, name: str, value: object, nbytes: int) -> None:
        self._values[name] = value
        if nbytes:
            keep(self.curvature, value, nbytes)

    @cached_property
    def gram_cost(self) -> float:
        """Return the gradients that J Jᵀ takes; ∞ unless the curvature is the exact GGN of these data alone."""
        curvature = self.curvature
        exact = isinstance(curvature, GGN) and curvature.asked == {} and curvature.lin is self.lin
        return gram_cost(self.lin.plan, self.lin.num_data) if exact else math.inf

    def known_data(self, what: str) -> tuple[Linearization, ...]:
        """Return the linearisations of the curvature; raise ValueError if `what` needs them and they are unknown."""
        if isinstance(self.data, str):
            raise ValueError(
                f"{what} needs the likelihood of the curvature: {self.data} Pass a curvature that counts the data of "
                "each linearisation once, such as co.GGN(lin_a) + co.GGN(lin_b), or a multiple of such a sum, which "
                "tempers the likelihood."
            )
        return self.data

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
        self.known("")
        for likelihood, tensor in self.hyperparameters:
            if carries_graph((tensor,)) and not self._is_held(tensor):
                require_no_gradient(likelihood, f"a posterior with {type(self.curvature).__name__}")

    def state(self) -> dict[str, Any]:
        """Return what tuning reuses at the next prior, for checkpoints: sketches, their source, and a quadrature."""
        sketches, source = {}, self.generator
        for space in SKETCHES:
            if (known := self.known(space)) is not None:
                of, columns, made = known
                scale, inner = (made.scale, made.inner) if isinstance(made, ScaledPreconditioner) else (None, made)
                sketches[space] = {"of": of, "columns": columns, "scale": scale, "inner": inner}
        quadrature = self.known("quadrature")
        return {
            "sketches": sketches,
            "generator": None if source is None else source.get_state(),
            "quadrature": None if quadrature is None else list(quadrature),
        }

    def recall(self, state: Mapping[str, Any]) -> None:
        """Restore the values that were drawn for the same curvature."""
        if self.generator is not None:
            self.generator.set_state(state["generator"].cpu())
        for space, each in state["sketches"].items():
            inner: Any = from_record(LowRankPreconditioner, each["inner"])
            keep(self.curvature, inner, inner.U.nbytes)
            made = inner if each["scale"] is None else ScaledPreconditioner(each["scale"], inner)
            self.put(space, (each["of"], each["columns"], made))
        if state["quadrature"] is not None:
            smallest, rtol, record = state["quadrature"]
            self.put("quadrature", (smallest, rtol, from_record(SpectralQuadrature, record)))

    @property
    def is_kept(self) -> bool:
        """Return whether a value belongs to the state of the current run, which computed it."""
        return current().whole.held.get("cache") is self

    def keep_in(self, kept: Checkpoint) -> None:
        """Save a value with this step of its run; if the step has ended, restore the value that it left."""
        if self.is_kept:
            known = kept.attach("known", self.state)
            if kept.done:
                self.recall(known)

    def _require_followed(self) -> None:
        """Raise ValueError if hyperparameters have changed and the curvature does not follow them."""
        for likelihood, tensor in self.hyperparameters:
            if not self._is_held(tensor):
                raise ValueError(
                    f"{likelihood!r} has changed since {type(self.curvature).__name__} was built, which does not "
                    "follow it: build the curvature and the posterior again, co.laplace(lin, ...). co.GGN and "
                    "co.EmpiricalFisher do follow. So does every curvature built while gradients are on, for the "
                    "single noise of a Gaussian likelihood that requires a gradient."
                )

    def _is_held(self, tensor: Tensor) -> bool:
        """Return whether the curvature follows a tensor and has gradients in it."""
        return any(tensor is other for other in self.curvature.representation())


def data_terms(lin: Linearization, curvature: LinearOperator) -> tuple[Linearization, ...] | str:
    """Return the linearisations whose log-likelihoods add up to the curvature's, or a sentence on why they are unknown.

    A curvature times a number, (1 / T) * co.GGN(lin), belongs to the likelihood to this power (`power_of`). Operators
    built from a linearisation, or from such operators, record their data and how often they count them. A user's own
    matrix does not; if it stands alone, it counts as a curvature of `lin`.
    """
    found = sources_of(curvature)
    if found is None:
        return (lin,)
    if found.detached:
        return "a part of the curvature was detached from its weights, so it belongs to no likelihood at these weights."
    counts, own = found.counts, lin.source
    if not counts.get(own):
        return (
            "the curvature belongs to other data, or another likelihood, than the linearisation given to co.laplace; "
            "linearise once with all data, or add up the curvatures of both."
        )
    if found.partial:
        return (
            "in addition to the part that belongs to these data, the curvature holds an operator (a matrix, say) "
            "that does not record which data it belongs to."
        )
    uneven = [count for count in counts.values() if abs(count - counts[own]) > 1e-12]
    if (found.repeated or uneven or counts[own] < 0) and (
        not_once := [c for c in counts.values() if abs(c - 1) > 1e-12]
    ):
        return f"the curvature counts data {not_once[0]:.4g} times, but their likelihood counts them once."
    known: dict[Hashable, Linearization] = {each.source: each for each in _linearizations(curvature)}
    known[own] = lin
    if not counts.keys() <= known.keys():
        return (
            "a part of it belongs to other data than the linearisation given to co.laplace, and does not keep them "
            "(as KFAC, diagonals, blocks and low rank); linearise once with all data, or use a GGN, Fisher or "
            "Hessian of those data."
        )
    return tuple(known[source] for source in counts)


def power_of(lin: Linearization, curvature: LinearOperator) -> float:
    """Return the power of a curvature's likelihood: 1/T if it is tempered, otherwise 1."""
    found = sources_of(curvature)
    count = 1.0 if found is None else found.counts.get(lin.source, 1.0)
    return 1.0 if abs(count - 1) <= 1e-12 else count


def _linearizations(operator: LinearOperator) -> Iterator[Linearization]:
    """Yield the linearisations that an operator and its parts contain."""
    lin = getattr(operator, "lin", None)
    if isinstance(lin, Linearization):
        yield lin
    for part in operator._args:
        if isinstance(part, LinearOperator):
            yield from _linearizations(part)
