"""The tangent kernel: inner products of the outputs' gradients."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.argument_types import Mesh, Points, PriorPrecision
from curvops.checks import carries_graph
from curvops.linalg import Diagonal
from curvops.linalg.operators.base import Operator, as_part, number_of
from curvops.linalg.operators.closed_form import ClosedForm
from curvops.linalg.operators.contract import convert
from curvops.linalg.operators.draws import normal
from curvops.network import JacobianRows, read_precision
from curvops.operators.function_space.function_space import WeightSpaceForm
from curvops.operators.function_space.gram_matrix import gram_matrix, gram_with_graph, scales_by_name
from curvops.operators.function_space.point_covariance import point_covariances
from curvops.operators.linearized.linearization import Linearization
from curvops.operators.linearized.network_operator import Jacobian
from curvops.operators.linearized.user_operator import UserOperator
from curvops.ranks.on_shards import BlockRows, formed_over_ranks
from curvops.ranks.sharded_vectors import RowLayout
from curvops.summary import size_of


class TangentKernel(UserOperator, Operator):
    """The tangent kernel K = J(x) A⁻¹ J(x')ᵀ (n·C, n'·C), the prior covariance of f under a diagonal precision A.

    It is symmetric positive semi-definite if x' is x (Jacot et al. 2018). Rows are ordered point by point.

    Cost to build: nothing. A product is a pull at x' and a push at x, 0.5–2 gradients per vector. Choose it for few
    points and many weights (function space). If there are fewer weights than rows, the kernel plus a positive
    diagonal is solved exactly with a D × D matrix. `to_dense`, the Gram matrix, costs a forward pass and C backward
    passes on each side, and for each layer Σ (a aᵀ) ∘ (δ δᵀ) over its pairs of positions, in one of two orders; a
    product of the layer's own Jacobian replaces this sum if that is less work or A is not constant on its tensors. If
    the rows of all points do not fit into memory, passes are made again for each panel of points that does. Memory: as
    many rows as the budget has room for, and the Gram matrix.

    Args:
        lin: the linearised network.
        prior: A, a positive number, a vector (D,) or a mapping {glob over parameter names: number}.
        x: inputs; None for the training inputs.
        x2: the inputs x'; None for x.

    Raises:
        TypeError, ValueError: the prior is of another kind or size, or not positive, or `lin.jacobian` rejects the
            inputs.

    Examples:
        >>> K = co.TangentKernel(lin)
        >>> K.shape, co.TangentKernel(lin, x=x[:2]).shape
        (torch.Size([16, 16]), torch.Size([4, 4]))
    """

    _shown = ("prior", "formed", "blocks")
    CARRIED = True  # the kernel does not depend on the likelihood
    _damped_form: ClassVar[type[ClosedForm] | None] = WeightSpaceForm

    def __init__(
        self, lin: Linearization, prior: PriorPrecision = 1.0, x: Points | None = None, x2: Points | None = None
    ) -> None:
        scale = read_precision("prior", prior, lin.model.selection, lin.theta)
        left = _jacobian(lin, x)
        super().__init__(left, left if x2 is None else _jacobian(lin, x2), scale)

    @classmethod
    def _is_stored(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return len(args) == 3 and isinstance(args[0], Jacobian)

    @property
    def prior(self) -> Tensor:
        """The prior precision A, 0-d or (D,)."""
        return self._args[2]

    def keeping_in(self, store: dict[str, Tensor]) -> LinearOperator:
        """Return the kernel with a store for quantities of its inputs, which kernels with other priors share."""
        kind: Any = type(self)
        return kind(*self._args, store=store)

    @property
    def psd(self) -> bool:
        return self._args[0] is self._args[1] or self._args[0].passes is self._args[1].passes

    def _size(self) -> torch.Size:
        return torch.Size((self._args[0].shape[-2], self._args[1].shape[-2]))

    def _made_of(self) -> str:
        left, right, prior = self._args
        places = as_part(left) if self.psd else f"{as_part(left)} and {as_part(right)}"
        return f"{places}, prior {number_of(prior, size_of(prior))}"

    def _product(self, block: Tensor) -> Tensor:
        left, right, _ = self._args
        return left._product(self.scaled(right._transposed_product(block)))

    def _transposed_product(self, block: Tensor) -> Tensor:
        left, right, _ = self._args
        return right._product(self.scaled(left._transposed_product(block)))

    def scaled(self, block: Float[Tensor, "D b"]) -> Float[Tensor, "D b"]:
        """Return A⁻¹ V."""
        return block / (self.prior if self.prior.ndim == 0 else self.prior.unsqueeze(-1))

    def _transpose_nonbatch(self) -> LinearOperator:
        left, right, prior = self._args
        return self if self.psd else TangentKernel(right, left, prior)

    def _columns(self, index: Int[Tensor, " b"]) -> Float[Tensor, "nC b"]:
        """Return the columns that belong to these rows of J(x'), with passes over their points only."""
        left, right, _ = self._args
        return left._product(self.scaled(right.rows_at(index)))

    def formed(self, mesh: Mesh) -> BlockRows:
        """Form the matrix with its rows shared among the ranks of a one-dimensional device mesh.

        Products with sharded vectors then gather only these vectors, N·C numbers each, whereas the kernel itself sums D
        numbers over ranks. Each rank holds (N·C)² / ranks numbers; for the kernel of the training points it reads its
        own points, and those of one other rank at a time.

        Args:
            mesh: a one-dimensional DeviceMesh.

        Returns:
            The matrix, as BlockRows.

        Raises:
            ValueError: the mesh has several dimensions or other ranks than the data, the kernel has two sets of
                inputs, or a gradient in the inputs or in A is required.
        """
        layout = RowLayout.on(mesh, self.shape[-2])
        if not self.psd:
            raise ValueError("formed(mesh) needs a kernel of one set of inputs; for two sets use to_dense().")
        if self._args[0].is_recorded or carries_graph((self.prior,)):
            raise ValueError("no gradient passes through a kernel whose rows are shared among ranks: use to_dense().")
        return formed_over_ranks(self, layout)

    def _draw(self, k: int, generator: torch.Generator | None) -> Tensor:
        """Draw k exact samples of N(0, K) as J A^-½ z, at the cost of one push of J per draw."""
        left, _, prior = self._args
        if not self.psd:
            raise ValueError("a kernel of two sets of inputs is not a covariance: draw from the kernel of one set.")
        z = normal(left.shape[-1], k, self.dtype, self.device, generator)
        return left._product(z * (prior if prior.ndim == 0 else prior.unsqueeze(-1)).rsqrt())

    def to(self, *args: Any, **kwargs: Any) -> LinearOperator:
        """Return the kernel in another dtype or on another device; a kernel of one set of inputs remains so."""
        device, dtype = torch._C._nn._parse_to(*args, **kwargs)[:2]
        left, right, prior = self._args
        first = left.to(device=device, dtype=dtype)
        second = first if self.psd else right.to(device=device, dtype=dtype)
        return TangentKernel(first, second, convert(prior, device, dtype))

    def _diagonal(self) -> Float[Tensor, " nC"]:
        """Return the variances Σ_d J²_id / A_d from each layer's inputs and sensitivities, by C backward passes."""
        outputs = self._args[0].passes.engines.plan.num_outputs
        return self._in_blocks(outputs, True).flatten() if self.psd else super()._diagonal()

    @property
    def diagonal_matvecs(self) -> int:
        return 0 if self.psd else min(self.matrix_shape)

    def blocks(self, points: int) -> Float[Tensor, "b qC qC"]:
        """Return the diagonal blocks for groups of `points` points, without forming any entry between groups.

        Args:
            points: the number of points of a group.

        Returns:
            The blocks, (b, points·C, points·C).

        Raises:
            ValueError: the kernel has two sets of inputs, or `points` does not divide their number.
        """
        left = self._args[0]
        outputs = points * left.passes.engines.plan.num_outputs
        if not self.psd or left.shape[-2] % outputs:
            raise ValueError(f"blocks of {points} points need a kernel of one set of inputs, whose number they divide.")
        return self._in_blocks(outputs, False)

    def _in_blocks(self, rows: int, diagonals: bool) -> Tensor:
        left, prior = self._args[0], self.prior
        apart = left.passes.is_shared and rows == left.passes.engines.plan.num_outputs and not carries_graph((prior,))
        left = left.apart() if apart else left.gathered()

        def compute(walk: JacobianRows | None, precision: Tensor) -> Tensor:
            weights = precision.reciprocal().expand(left.shape[-1])
            blocks = point_covariances(left, Diagonal(weights), rows, diagonals, walk)
            assert blocks is not None  # a diagonal has a structure
            return blocks

        if apart:
            return self._args[0].passes.line_up([compute(None, prior)])
        if not left.shape[-2] or not (left.is_recorded or carries_graph((prior,))):
            return compute(None, prior)
        blocks: Tensor = left.graph.by_rows(compute, left.passes.chunk_bytes, prior)
        return blocks

    def to_dense(self) -> Float[Tensor, "nC mC"]:
        """Return the Gram matrix; if a gradient for A is needed, from all rows of J."""
        left, right, prior = self._args
        if left.is_recorded or right.is_recorded:
            return gram_with_graph(left, right, scales_by_name(left.passes, prior))
        if carries_graph((prior,)):
            return left.formed().mT @ self.scaled(right.formed())
        return gram_matrix(left, right, prior)


def _jacobian(lin: Linearization, x: Any) -> Jacobian:
    return lin.jacobian() if x is None else lin.jacobian(x, differentiable=True)
