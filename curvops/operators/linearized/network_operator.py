"""The operators of a network whose products walk over its points: their base, the Jacobian J, the points' gradients.

The weights give dtype and device, and a conversion makes a new linearisation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from linear_operator.operators import LinearOperator
from torch import Tensor
from torch.utils._pytree import tree_map

from curvops.ambient import Memories, Progress
from curvops.checks import carries_graph
from curvops.linalg.core.matrix_identity import Sources, Spaces
from curvops.linalg.core.vectors import columns, empty_block, put, put_columns, unit_columns, zero_block
from curvops.linalg.operators.base import Operator
from curvops.linalg.operators.contract import convert
from curvops.network import Empirical, InputGraph, Passes, by_points, likelihoods, move
from curvops.ranks.process_group import Ranks
from curvops.ranks.sharded_vectors import RowLayout


class NetworkOperator(Operator):
    """An operator of a linearisation; its first tensor is θ, which gives dtype and device and has a zero gradient."""

    _shown: ClassVar[tuple[str, ...]] = ("lin",)
    OPTIONS: ClassVar[tuple[str, ...]] = ()
    """The keywords that define the operator, in addition to the linearisation."""

    MADE_BY: ClassVar[str] = ""
    """The call that makes the operator, if users do not call its class, which then takes the stored form only."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls.MADE_BY and args and not isinstance(args[0], Tensor):  # a copy is made without arguments
            raise TypeError(f"{cls.MADE_BY} makes the {cls.__name__} of a linearised network; its class is not called.")
        return super().__new__(cls)

    @property
    def theta(self) -> Tensor:
        """The weights θ* of the linearisation, (D,)."""
        return self._args[0]

    @property
    def lin(self) -> Any:
        """The linearisation that the operator belongs to."""
        return self._kwargs["lin"]

    @property
    def likelihood(self) -> likelihoods.Likelihood:
        """The likelihood with this operator's hyperparameters."""
        likelihood: likelihoods.Likelihood = self.lin.likelihood
        if len(self._args) == 1:
            return likelihood
        return likelihood.with_hyperparameters([self.passes.replicated(tensor) for tensor in self._args[1:]])

    def _size(self) -> torch.Size:
        return torch.Size((self.theta.shape[-1], self.theta.shape[-1]))

    def _made_of(self) -> str:
        chosen = ((name, value) for name, value in self.options.items() if value is not None and value is not False)
        options = (f"{len(value)} {name} per point" if isinstance(value, Tensor) else name for name, value in chosen)
        return ", ".join([f"of {self.lin.likelihood.kind} on {self.lin.num_data} points", *options])

    @property
    def space(self) -> Any:
        """The tangent space of the linearisation; without its weights once the operator is detached from them."""
        return self._kwargs.get("space") or self.passes.model.tangent_space

    @property
    def spaces(self) -> Spaces:
        return self.space, self.space

    @property
    def sources(self) -> Sources | None:
        if not self.symmetric:  # J and per-point gradients have a row for each point and are not sums over points
            return None
        sources: Sources = self.lin.sources
        return sources if self._kwargs.get("space") is None else sources.detach()

    def detached_from_weights(self) -> LinearOperator:
        return self.__class__(*self._args, **self._kwargs | {"space": self.space.detached()})

    @property
    def passes(self) -> Passes:
        """The walk over the points of this operator."""
        walk: Passes = self.lin.passes
        return walk

    @property
    def ranks(self) -> Ranks | None:
        """The ranks that share the data of this operator."""
        shard = self.passes.shard
        return None if shard is None else shard.ranks

    @property
    def memories(self) -> Memories:
        return frozenset((self.lin.memory,))

    @property
    def progress(self) -> Progress:
        return self.passes.progress

    def _matmul(self, rhs: Tensor) -> Tensor:
        product = super()._matmul(rhs)
        return self._attached(product) if self.theta.requires_grad else product

    def _t_matmul(self, rhs: Tensor) -> Tensor:
        product = super()._t_matmul(rhs)
        return self._attached(product) if self.theta.requires_grad else product

    def _attached(self, product: Tensor) -> Tensor:
        """Return a product with a zero gradient for θ, which linear_operator differentiates by, too."""
        return product + 0 * self.theta.sum() if torch.is_grad_enabled() else product

    def on_layouts(self, rows: RowLayout, columns: RowLayout) -> LinearOperator:
        if (shard := self.passes.shard) is not None:  # vectors must be sharded among the processes of the data
            shard.ranks.require_ranks_of(rows.ranks)
        return super().on_layouts(rows, columns)

    def to(self, *args: Any, **kwargs: Any) -> LinearOperator:
        """Return the operator of a new linearisation in another dtype or on another device."""
        device, dtype = torch._C._nn._parse_to(*args, **kwargs)[:2]
        if (dtype in (None, self.dtype)) and (device in (None, self.device)):
            return self
        hyperparameters = [convert(tensor, device, dtype) for tensor in self._args[1:]]
        converted = self._converted(hyperparameters, dtype, device)
        return converted if self._kwargs.get("space") is None else converted.detached_from_weights()

    def _converted(
        self, hyperparameters: list[Tensor], dtype: torch.dtype | None, device: torch.device | None
    ) -> LinearOperator:
        options = {name: convert(value, device, dtype) for name, value in self.options.items()}
        return self.build_at(self.lin.cast(dtype, device), hyperparameters, **options)

    @property
    def options(self) -> dict[str, Any]:
        """The values of the keywords in `OPTIONS`."""
        return {name: self._kwargs[name] for name in self.OPTIONS}

    @classmethod
    def build_at(cls, lin: Any, hyperparameters: Sequence[Tensor], **options: Any) -> LinearOperator:
        """Build the operator of a linearisation, with these hyperparameters of the likelihood and these options."""
        return cls(lin.theta, *hyperparameters, lin=lin, **options)


class Jacobian(NetworkOperator):
    """The Jacobian J (n·C, D) of the outputs; row n·C + c is ∂f_c(x_n)/∂θ.

    Use `lin.jacobian(x)` to make it; the constructor takes the stored form. J @ V and J.mT @ U each cost half a GGN
    product (see `lin.plan`). J itself is formed by `to_dense` alone, layer by layer, by C backward passes.

    Examples:
        >>> J = lin.jacobian()
        >>> J, (J @ torch.ones(17)).shape, (J.mT @ torch.ones(16)).shape
        (Jacobian(16 × 17, of 8 points, float32, cpu), torch.Size([16]), torch.Size([17]))
    """

    _shown = ()
    MADE_BY = "lin.jacobian(x)"

    # The stored form has θ, the inputs in which products and outputs have a gradient, `passes`, the number of `rows`,
    # the `graph` that computes the outputs from those inputs (None without them) and, once detached, the `space`.

    @property
    def passes(self) -> Passes:
        """The walk over the inputs."""
        return self._kwargs["passes"]

    @property
    def spaces(self) -> Spaces:
        return None, self.space

    @property
    def memories(self) -> Memories:
        return frozenset((self.passes.memory,))

    @property
    def is_recorded(self) -> bool:
        """Whether results computed from it now have a gradient in its inputs."""
        return carries_graph(self._args[1:])

    @property
    def graph(self) -> Any:
        """The inputs of the Jacobian, all points together, with their graph if `is_recorded`."""
        graph = self._kwargs.get("graph")
        if graph is not None:
            return graph.at(self._args[1:])
        inputs = tree_map(lambda *parts: torch.cat(parts), *(inputs for inputs, _ in self.passes.gathered().source))
        return InputGraph(self.passes.engines, inputs)

    def gathered(self) -> Jacobian:
        """Return the same Jacobian with the inputs of all ranks on this one; itself if there is only one rank."""
        return self.at(self.passes.gathered(), self.shape[-2]) if self.passes.is_shared else self

    def apart(self) -> Jacobian:
        """Return the rows of this rank's own inputs."""
        walk, shard = self.passes, self.passes.shard
        return self if shard is None else self.at(walk.over(walk.source), sum(shard.sizes) * self._num_outputs)

    def at(self, passes: Passes, rows: int) -> Jacobian:
        """Return the Jacobian of the same network over another walk."""
        return Jacobian(*self._args, **self._kwargs | {"passes": passes, "rows": rows})

    def by_points(self, count: int, together: int = 1) -> Iterator[Jacobian]:
        """Yield the Jacobians of `count` points at a time, fewer at the end of a batch; this one if it has no more."""
        J, C = self.gathered(), self._num_outputs
        if count * C >= J.shape[-2]:
            yield J
            return
        for passes, points in by_points(J.passes, count, together):
            yield Jacobian(self.theta, passes=passes, rows=points * C)

    @property
    def _num_outputs(self) -> int:
        return self.passes.engines.plan.num_outputs

    def outputs(self) -> Float[Tensor, "n C"]:
        """Compute f(θ*) at its inputs by one forward pass; for a last layer, J needs no other pass."""
        if self.is_recorded:
            return self.graph.outputs()
        return self.passes.outputs()

    def formed(self) -> Float[Tensor, "D NC"]:
        """Form Jᵀ for few points; its columns come from each layer's rows, by C backward passes.

        Products with unit vectors would take C backward passes for each point. Memory: D·N·C numbers. The result has a
        gradient in the inputs if the Jacobian `is_recorded`.
        """
        if self.is_recorded:
            chunk = self.passes.chunk_bytes
            rows_of_J: Tensor = self.graph.by_rows(lambda rows: torch.cat([*rows.selected_rows()]), chunk)
            return rows_of_J.mT
        with torch.no_grad():
            rows = list(self.passes.selected_rows()) or [self.theta.new_zeros(0, len(self.theta))]
            return self.passes.line_up(rows).mT

    @torch.no_grad()
    def rows_at(self, index: Int[Tensor, " b"]) -> Float[Tensor, "D b"]:
        """Return Jᵀ e_i for these rows i, from passes over their points only.

        Cost: C backward passes for each point, or one for each pair of b rows if memory has no room for C rows.
        """
        if self.passes.is_shared:
            return self._rows_of_ranks_at(index)
        C, rows_there = self._num_outputs, empty_block(self.theta.unsqueeze(1), len(index))
        fit = max(0, self.passes.memory.room()) // (2 * C * self.theta.nbytes)
        start = 0
        for rows in index.split(fit or C):
            points, place = torch.unique(rows // C, return_inverse=True)
            among = place * C + rows % C
            chosen = Jacobian(self.theta, passes=self.passes.at_points(points), rows=len(points) * C)
            if fit:
                block = columns(chosen.formed(), among)
            else:
                block = chosen._transposed_product(unit_columns(among, len(points) * C, self.theta.dtype))
            put(rows_there, start, block)
            start += len(rows)
        return rows_there

    def _rows_of_ranks_at(self, index: Int[Tensor, " b"]) -> Float[Tensor, "D b"]:
        """Return rows, each taken from the rank that has its point. One all-reduce of D·b numbers."""
        own_jacobian, rows_there = self.apart(), zero_block(self.theta.unsqueeze(1), len(index))
        rows = self.passes.own_rows
        inside = ((index >= rows.start) & (index < rows.stop)).nonzero()[:, 0]
        if len(inside):
            put_columns(rows_there, inside, own_jacobian.rows_at(index[inside] - rows.start))
        return self.passes.add_up(rows_there)

    def _size(self) -> torch.Size:
        return torch.Size((self._kwargs["rows"], self.theta.shape[-1]))

    def _made_of(self) -> str:
        return f"of {self._kwargs['rows'] // self._num_outputs} points"

    def _form_dense(self) -> Float[Tensor, "NC D"]:
        return self.formed().mT

    def _product(self, block: Float[Tensor, "D K"]) -> Float[Tensor, "NC K"]:
        if self.is_recorded:
            return self.graph.push(block)
        block = self.passes.replicated(block)
        return self.passes.rows(lambda _, J: J.push(block), block.shape[1])

    def _transposed_product(self, block: Float[Tensor, "NC K"]) -> Float[Tensor, "D K"]:
        if self.is_recorded:
            return self.graph.pull(block)
        if not len(block):
            return block.new_zeros(block.shape[1], len(self.theta)).mT
        return self.passes.pull(block, self._num_outputs)

    def _converted(
        self, hyperparameters: list[Tensor], dtype: torch.dtype | None, device: torch.device | None
    ) -> LinearOperator:
        model, graph = self.passes.model.cast(dtype, device), self._kwargs.get("graph")
        passes = self.passes.over([(move(inputs, device, dtype), None) for inputs, _ in self.passes.source], model)
        changed = {"passes": passes, "graph": graph and graph.cast(passes.engines, device, dtype)}
        return Jacobian(passes.model.theta, *hyperparameters, **self._kwargs | changed)


class Gradients(NetworkOperator):
    """Per-example gradients (N, D): row n is g_n = J_nᵀ r_n, the gradient of −log p(y_n | f(x_n, θ)) at θ*.

    Use `lin.gradients()` to make it; the constructor takes the stored form. Rows are in the order of the data and add
    up to `lin.gradient()`. The sign is that of a loss: a step along −g_n makes point n more likely. Class and sample
    weights multiply a row once. A sequence is one row, the sum over its tokens; with `per_token=True` the operator is
    (N·T, D), and token t of sequence n is row n·T + t. Products carry gradients through the vectors and the
    likelihood's hyperparameters.

    Influence functions (Koh & Liang 2017): how much would the loss at a test point change if point n were left out?

        P = co.GGN(lin).add_diagonal(prior_precision)
        # The gradient of the test loss, (D,), and its increase to first order, (N,).
        g = co.linearize(model, (x_test, y_test), likelihood).gradient()
        influence = lin.gradients() @ P.solve(g)

    `G @ P.inverse() @ G.mT`, with G = lin.gradients(), is the influence of all points on one another. `G.mT @ G` is the
    empirical Fisher (sample weights enter it squared: for data with weights use `co.EmpiricalFisher`).

    Cost to build: nothing; the first product computes the rows layer by layer, for 2/3 of a gradient whatever C is
    (per token (1 + T) / 3). A product is one matrix product per layer, 0.25–0.5 gradients per vector, and a transposed
    product costs the same. Memory: what `print(lin.gradients().plan)` lists, within the rest of the budget; only
    `to_dense` forms the N × D numbers. Choose it for influence and gradient noise; for the curvature itself use
    `co.EmpiricalFisher`.

    Examples:
        >>> rows = lin.gradients()
        >>> rows, torch.allclose(rows.mT @ torch.ones(8), lin.gradient(), atol=1e-5)
        (Gradients(8 × 17, of Categorical on 8 points, float32, cpu), True)
    """

    OPTIONS = ("per_token",)
    MADE_BY = "lin.gradients()"

    @property
    def plan(self) -> Any:
        """The plan of engines for the products, as `lin.plan`."""
        return (self.lin.gradient_rows(self.likelihood, self._kwargs["per_token"]) or self.lin).plan

    @property
    def spaces(self) -> Spaces:
        return None, self.space

    @property
    def _positions(self) -> int:
        positions: int = self.lin.positions_apart(self._kwargs["per_token"])
        return positions

    def _size(self) -> torch.Size:
        return torch.Size((self.lin.num_data * self._positions, self.theta.shape[-1]))

    def _form_dense(self) -> Float[Tensor, "NT D"]:
        if carries_graph(self._args[1:]):
            return super()._form_dense()
        passes, root = self.lin.passes, Empirical(self.likelihood, self._positions, whole=True)
        with torch.no_grad():  # products with unit vectors would take N² D operations
            return passes.line_up([passes.as_matrix(*piece) for _, *piece in passes.jacobian_rows(root=root)])

    def _walk(self) -> tuple[Passes, Empirical, Empirical | None]:
        """Return the walk over the rows, the root that it multiplies by, and the root that is applied separately."""
        rows = self.lin.gradient_rows(self.likelihood, self._kwargs["per_token"])
        output = Empirical(self.likelihood, self._positions)
        return rows or self.lin.passes, output, output if rows is None else None

    def _product(self, block: Float[Tensor, "D K"]) -> Float[Tensor, "NT K"]:
        walk, output, root = self._walk()
        return walk.rows(lambda batch, G: output.weigh(G.push(block), batch), block.shape[1], root)

    def _transposed_product(self, block: Float[Tensor, "NT K"]) -> Float[Tensor, "D K"]:
        walk, output, root = self._walk()
        return walk.pull(block, self._positions, lambda batch, G, z: G.pull(output.weigh(z, batch)), root)
