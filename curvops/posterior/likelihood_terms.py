"""The likelihood that a posterior's curvature is of: its value and gradient over all data, computed once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.linalg.core.cache import recorded
from curvops.network.likelihoods.likelihood import Likelihood
from curvops.operators import Linearization
from curvops.operators.curvatures.displaced_ggn import DisplacedGGN, pushed
from curvops.operators.linearized.reading import require_no_gradient
from curvops.posterior.data_terms import data_terms, power_of


@dataclass(eq=False)
class Known:
    """What was computed so far, at these hyperparameters of the likelihood."""

    hyperparameters: list[Tensor]
    log_likelihood: Tensor | None = None
    gradient: Tensor | None = None


class LikelihoodTerms:
    """The log-likelihood of all data of a curvature and its gradient, each when first asked for.

    `era()` tells whether hyperparameters have changed in place since, upon which everything computed is forgotten.
    """

    def __init__(self, lin: Linearization, curvature: LinearOperator) -> None:
        self.lin, self.curvature = lin, curvature
        self.lock = threading.RLock()
        self._kept = Known(self._hyperparameters())

    def __getstate__(self) -> dict[str, Any]:
        """What was computed is copied and pickled along; a lock cannot be."""
        return {name: value for name, value in self.__dict__.items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.lock = threading.RLock()

    @cached_property
    def data(self) -> tuple[Linearization, ...] | str:
        """The linearisations that the curvature is of; a sentence on why where that is not known."""
        return data_terms(self.lin, self.curvature)

    @cached_property
    def power(self) -> float:
        """How often the curvature counts these data: 1/T where their likelihood is tempered."""
        return power_of(self.lin, self.curvature)

    def known_data(self, what: str) -> tuple[Linearization, ...]:
        """The linearisations that the curvature is of; ValueError on why `what` is not known without them."""
        if isinstance(self.data, str):
            raise ValueError(
                f"{what} needs the likelihood that the curvature is of: {self.data} Give a curvature that counts the "
                "data of each linearisation once, such as co.GGN(lin_a) + co.GGN(lin_b), or a multiple of that, which "
                "tempers the likelihood."
            )
        return self.data

    def _hyperparameters(self) -> list[Tensor]:
        """The values of all that a learned likelihood may change under a posterior that is kept."""
        lins = {id(lin): lin for lin in (self.lin, *(() if isinstance(self.data, str) else self.data))}
        return [tensor.detach().clone() for lin in lins.values() for tensor in lin.likelihood.hyperparameters]

    @property
    def _found(self) -> Known:
        """What was computed, forgotten where the likelihood's hyperparameters have changed since (in place)."""
        with self.lock:
            now = self._hyperparameters()
            if not all(map(torch.equal, now, self._kept.hyperparameters)):
                self._require_followed()
                self._kept = Known(now)
            return self._kept

    def _require_followed(self) -> None:
        """Raise ValueError unless the curvature holds the hyperparameters, which have changed."""
        for likelihood, tensor in self._learned():
            if not self._is_held(tensor):
                raise ValueError(
                    f"{likelihood!r} has changed since {type(self.curvature).__name__} was made, which does not follow "
                    "it: make the curvature and the posterior again, co.laplace(lin, ...). co.GGN and "
                    "co.EmpiricalFisher follow; so does, of the one noise of a Gaussian likelihood that requires a "
                    "gradient, every curvature of a linearisation made while gradients are on."
                )

    def _learned(self) -> Iterator[tuple[Likelihood, Tensor]]:
        """Each hyperparameter of the linearisations, with the likelihood that it is of."""
        for lin in (self.lin,) if isinstance(self.data, str) else self.data:
            yield from ((lin.likelihood, tensor) for tensor in lin.likelihood.hyperparameters)

    def _is_held(self, tensor: Tensor) -> bool:
        """Whether the curvature follows a tensor, and has gradients for it."""
        return any(tensor is other for other in self.curvature.representation())

    def era(self) -> object:
        """Another object where hyperparameters have changed since."""
        return self._found

    def log_likelihood(self) -> Float[Tensor, ""]:
        """Σ_n log p(y_n | x_n, θ*) in nats over all data of the curvature, with its gradient in hyperparameters.

        Of a tempered likelihood it is times 1/T. Raises ValueError where the data are not known, or counted unevenly.
        """
        data = self.known_data("the log evidence")
        if recorded([tensor for lin in data for tensor in lin.likelihood.hyperparameters]):
            return self.power * torch.stack([lin.log_likelihood() for lin in data]).sum()
        with self.lock:
            found = self._found
            if found.log_likelihood is None:
                with torch.no_grad():
                    found.log_likelihood = self.power * torch.stack([lin.log_likelihood() for lin in data]).sum()
            return found.log_likelihood

    def linear_log_likelihood(self, theta: Float[Tensor, " D"]) -> Float[Tensor, ""]:
        """That of the linear model at other weights, with its gradient in hyperparameters."""
        delta = theta - self.lin.theta
        parts = [DisplacedGGN.at(lin, pushed(lin, delta)) for lin in self.known_data("the log evidence")]
        return self.power * torch.stack([part.log_likelihood() for part in parts]).sum()

    def gradient(self) -> Float[Tensor, " D"] | None:
        """Gradient of the negative log-likelihood of all data of the curvature at θ*; None where they are not known."""
        with self.lock:
            found = self._found
            if found.gradient is None and not isinstance(self.data, str):
                with torch.no_grad():
                    found.gradient = self.power * torch.stack([lin.gradient() for lin in self.data]).sum(0)
            return found.gradient

    def known(self) -> tuple[Tensor | None, Tensor | None]:
        """The log-likelihood and the gradient, where they were asked for before."""
        found = self._found
        return found.log_likelihood, found.gradient

    def take(self, log_likelihood: Tensor | None, gradient: Tensor | None) -> None:
        """Take what was known of another posterior with the same curvature and data."""
        found = self._found
        found.log_likelihood, found.gradient = log_likelihood, gradient

    def require_gradients(self) -> None:
        """Raise ValueError where a hyperparameter asks for a gradient that the curvature has not, or has changed."""
        self.era()
        for likelihood, tensor in self._learned():
            if recorded((tensor,)) and not self._is_held(tensor):
                require_no_gradient(likelihood, f"a posterior with {type(self.curvature).__name__}")
