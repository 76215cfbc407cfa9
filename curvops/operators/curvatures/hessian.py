"""The Hessian of the negative log-likelihood."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from curvops.operators.linearized.linearization import Linearization
from curvops.operators.linearized.network_operator import NetworkOperator
from curvops.operators.linearized.user_operator import UserOperator


class Hessian(UserOperator, NetworkOperator):
    """The Hessian (D, D) of −Σ_n log p(y_n | f(x_n, θ)) at θ*, which is the GGN + Σ_n Σ_c r_nc ∇²f_c.

    Symmetric, in general indefinite. Choose it for sharpness and saddle points, and the GGN for posteriors; solve
    shifted systems with `minres`, not CG. Cost to build: one product on two points. A product is a forward pass, a
    backward pass that records its graph, and a further backward pass per vector (Pearlmutter 1994): about 4 gradients
    for one vector, 2 for each further one. Memory: that graph for one batch; nothing is kept between products. The only
    likelihood hyperparameter that has a gradient is the single noise of a Gaussian.

    Args:
        lin: the linearised network.

    Raises:
        RuntimeError: the model has no second derivatives, or wrong ones (those of torch's fused weight_norm are not
            symmetric).

    Examples:
        >>> H = co.Hessian(lin)
        >>> H.shape, (H @ torch.ones(17)).shape
        (torch.Size([17, 17]), torch.Size([17]))
    """

    symmetric = True
    STORED = "lin"

    def __init__(self, lin: Linearization) -> None:
        lin.require_symmetric_hessian()
        super().__init__(lin.theta, lin=lin)

    def _product(self, block: Float[Tensor, "D K"]) -> Float[Tensor, "D K"]:
        product: Tensor = self.lin.hessian_product(block)
        return product
