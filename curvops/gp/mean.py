"""The prior mean of a linearised network as a gpytorch mean."""

from __future__ import annotations

from typing import Any

from gpytorch.means import Mean
from jaxtyping import Float
from torch import Tensor

from curvops.argument_types import PriorMean
from curvops.checks import check_choice
from curvops.gp.points import OUTPUTS, as_points, own_outputs
from curvops.network.model.weight_vectors import read_mean
from curvops.operators import Linearization
from curvops.posterior.core.arguments import require_linearized


class LinearizedMean(Mean):
    """The mean f(x, θ*) + J(x)(m − θ*) of the linear model under its prior N(m, A⁻¹), as a gpytorch mean.

    Together with `LinearizedKernel`, it makes a gpytorch `ExactGP` the linearised network as a Gaussian process: for a
    Gaussian likelihood its predictions are those of `co.laplace` at the linear model's mode.

    Inputs are (..., n, d); the result is (..., n) for a network with one output, otherwise (..., n, C). It costs a
    forward pass and one product with J, and has a gradient in the inputs, but none in the network's weights.

    Args:
        lin: the linearised network. It is not a submodule: it is not trained, not moved, and not in the state dict.
        prior_mean: m, a number, a vector (D,) or a mapping {glob over parameter names: number}.
        outputs: "joint", or "independent" for a kernel of independent outputs: the result is then (..., C, n).

    Raises:
        TypeError, ValueError: `lin` is not a linearisation; the prior mean is of another kind or size; inputs do not
            fit the network.

    Examples:
        >>> co.gp.LinearizedMean(lin)(x).shape
        torch.Size([8, 2])
    """

    def __init__(self, lin: Linearization, prior_mean: PriorMean = 0.0, *, outputs: str = "joint") -> None:
        super().__init__()
        require_linearized(lin)
        check_choice("outputs", outputs, OUTPUTS)
        self._outputs = outputs
        self.lin, self._prior_mean = lin, read_mean(prior_mean, lin.model).detach()

    def extra_repr(self) -> str:
        """Return the linearisation, which torch prints among a module's parts."""
        return repr(self.lin)

    def forward(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n"] | Float[Tensor, "..."]:
        """Return the mean at x: (*b, n) for one output, else (*b, n, C); for independent outputs (..., C, n)."""
        jacobian = self.lin.jacobian(as_points(self.lin, x), differentiable=True)
        step = self._prior_mean.expand_as(self.lin.theta) - self.lin.theta
        values = jacobian.outputs().flatten() + jacobian._matmul(step)
        found = values.reshape(*x.shape[:-1], self.lin.num_outputs)
        if self._outputs == "independent":
            return own_outputs(found.mT, 1)
        return found.squeeze(-1) if found.shape[-1] == 1 else found

    def __deepcopy__(self, memo: dict[int, Any]) -> LinearizedMean:
        """Return a copy that shares the linearisation."""
        return LinearizedMean(self.lin, self._prior_mean, outputs=self._outputs)
