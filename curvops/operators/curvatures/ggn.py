"""The GGN, the Fishers and the Hessian: products, square root, diagonal, closed form.

The GGN and the Fishers are Jᵀ H J with H on the outputs of each point. A last layer whose outputs do not interact has a
GGN with a block for each output, which Cholesky solves: with H diagonal, G = Σ_n H_n ⊗ a_n a_nᵀ is block-diagonal, with
blocks G_c = Σ_n h_nc a_n a_nᵀ of the weights of output c and its bias.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.checks import carries_graph
from curvops.linalg import Dense, Diagonal
from curvops.linalg.core.algorithm import keep
from curvops.linalg.core.cache import Cache
from curvops.linalg.core.matrix_identity import Spaces
from curvops.linalg.core.solve_routes import DENSE_BLOCK, DENSE_SIZE, FEWER_OUTPUTS, FORMED_COPIES
from curvops.linalg.operators.closed_form import ClosedForm
from curvops.linalg.operators.direct_sum import DirectSum, DirectSumForm
from curvops.linalg.operators.draws import ColumnNoise
from curvops.linalg.operators.given_matrix import round_with_rest
from curvops.network import Empirical, Exact, OutputFisher, Passes, Plan, Sampled, shuffled
from curvops.operators.linearized.linearization import Linearization
from curvops.operators.linearized.network_operator import NetworkOperator
from curvops.operators.linearized.user_operator import UserOperator, require_no_gradient


class Curvature(UserOperator, NetworkOperator):
    """A curvature Σ_n J_nᵀ H_n J_n (D, D), symmetric positive semi-definite; a subclass defines H in `output`.

    If H = L Lᵀ has few columns, products use the rows of Lᵀ J, which `rows` walks over. Products carry gradients
    through the vectors and the likelihood's hyperparameters.
    """

    _shown: ClassVar[tuple[str, ...]] = ()
    psd = True
    STORED = "lin"
    CARRIED = True

    @property
    def output(self) -> OutputFisher:
        """H, the curvature of each point's outputs."""
        raise TypeError(f"{type(self).__name__} does not define H: override `output`.")

    @property
    def rows(self) -> Passes | None:
        """Return the walk over Lᵀ J that products may use, or None if they use J itself."""
        return None

    @property
    def plan(self) -> Plan:  # type: ignore[override]
        """The plan of engines for the products, as `lin.plan`; for linear systems see `(G + prior).plan()`."""
        return (self.rows or self.lin).plan

    @property
    def narrow_root(self) -> CurvatureRoot | None:
        lin = self.lin
        columns = lin.num_data * self.output.num_columns(lin.num_outputs)
        kind = type(self)
        by_formula = kind._product is Curvature._product and kind._matmul is Curvature._matmul
        if FEWER_OUTPUTS * columns > len(self.theta) or not by_formula:
            return None
        return CurvatureRoot.of(self)

    def _product(self, block: Float[Tensor, "D K"], own: bool = False) -> Float[Tensor, "D K"]:
        """Return the product as a sum over all points, or over this rank's own."""
        rows, output = self.rows, self.output
        walk = rows or self.lin.passes
        V = walk.replicated(block)

        def term(batch: Any, J: Any) -> Tensor:
            u = J.push(V)  # before the outputs, which a push gives, too
            return J.pull(u if rows is not None else output.product(J.outputs, u, batch))

        return walk.total(term, V.shape[1], own_part=own)

    def _diagonal(self) -> Float[Tensor, " D"]:
        """Compute the diagonal from the rows of Lᵀ J, or by products if a hyperparameter's gradient is recorded."""
        if carries_graph(self._args[1:]):
            return super()._diagonal()
        return self.lin.curvature_diagonal(self.output)

    @property
    def diagonal_matvecs(self) -> int:
        return self.shape[-1] if carries_graph(self._args[1:]) else 0

    def _draw(self, k: int, generator: torch.Generator | None) -> Float[Tensor, "D k"]:
        """Draw k exact samples of N(0, A) as Jᵀ L z with H = L Lᵀ, at the cost of one pull of J per draw.

        Equal seeds give equal draws, however the data are batched.
        """
        per_point = self.output.num_columns(self.lin.num_outputs)
        noise = ColumnNoise.of(generator, k, self.device)
        if (rows := self.rows) is not None:
            return rows.draw(noise.columns, per_point, noise.key)
        return self.lin.passes.draw(noise.columns, per_point, noise.key, self.output)


class CurvatureRoot(NetworkOperator):
    """The square root S = Jᵀ L (D, N·R) of a GGN or Fisher S Sᵀ, with R columns per point in the order of the points.

    S Z and Sᵀ V each cost half a product of the curvature.
    """

    _shown = ()

    # The stored form has θ, `lin`, the `walk`, its number of `points`, the `output`, and whether the walk is `reduced`
    # to Lᵀ J.

    @classmethod
    def of(cls, curvature: Curvature) -> CurvatureRoot:
        """Return the root of a curvature, over all of its data."""
        lin, rows = curvature.lin, curvature.rows
        walk, reduced = rows or lin.passes, rows is not None
        return cls(lin.theta, lin=lin, walk=walk, output=curvature.output, points=lin.num_data, reduced=reduced)

    @property
    def output(self) -> OutputFisher:
        """H = L Lᵀ of each point."""
        return self._kwargs["output"]

    @property
    def columns_a_point(self) -> int:
        """R, the number of columns of L per point."""
        return self.output.num_columns(self.lin.num_outputs)

    @property
    def spaces(self) -> Spaces:
        return self.lin.tangent_space, None

    def _size(self) -> torch.Size:
        return torch.Size((len(self._args[0]), self._kwargs["points"] * self.columns_a_point))

    def _product(self, block: Float[Tensor, "NR K"]) -> Float[Tensor, "D K"]:
        walk: Passes = self._kwargs["walk"]
        return walk.pull(block, self.columns_a_point, root=self._root)

    def _transposed_product(self, block: Float[Tensor, "D K"]) -> Float[Tensor, "NR K"]:
        walk: Passes = self._kwargs["walk"]
        return walk.rows(lambda _, S: S.push(block), block.shape[1], self._root)

    @property
    def _root(self) -> OutputFisher | None:
        return None if self._kwargs["reduced"] else self.output

    def minibatches(
        self, size: int, generator: torch.Generator | None = None
    ) -> Iterator[tuple[Int[Tensor, " n"], CurvatureRoot]]:
        """Yield (positions of some points, their columns of S) in random order until every point has come once.

        Points are shuffled within each batch, and the batches come in their own order. Data given as tensors are one
        batch, shuffled as a whole.
        """
        if isinstance(self.output, Sampled):
            raise ValueError("minibatches need the exact root: use co.GGN(lin) or method='cg'.")
        if self.lin.passes.is_shared:
            raise ValueError("minibatches are not available for data of a process group: use method='cg' or 'dual'.")
        for chosen, walk in shuffled(self.lin.passes, size, generator):
            options = {"walk": walk, "points": len(chosen), "reduced": False}
            yield chosen, CurvatureRoot(self.theta, **self._kwargs | options)


def root_of(operator: Any) -> CurvatureRoot | None:
    """Return the root of a GGN or Fisher, computed from its data; None for any other operator."""
    return CurvatureRoot.of(operator) if isinstance(operator, Curvature) else None


class OutputBlocksForm(DirectSumForm):
    """The closed form of such a GGN plus a diagonal, if it has more rows than each solve forms anyway."""

    def __init__(self, curvature: Any, shift: Tensor) -> None:
        self.curvature, self.shift = curvature, shift

    @cached_property
    def base(self) -> DirectSum:
        """The blocks, which priors share."""
        G, tensors = self.curvature, self.curvature.representation()
        blocks: DirectSum = G.cache.get_or_compute("by output", tensors, self._blocks, tensors[1:])
        return blocks

    def _blocks(self) -> DirectSum:
        blocks = output_blocks(self.curvature.lin, self.curvature.output)
        keep(self.curvature, blocks, self._nbytes)
        return blocks

    @property
    def _nbytes(self) -> int:
        """The bytes of all blocks, of these plus a prior, of their factors, and of work."""
        layer = self.curvature.lin.passes.engines.plan.layers[0]
        return FORMED_COPIES * 8 * int(layer.height * layer.width**2)

    @property
    def holds(self) -> bool:
        G, lin = self.curvature, self.curvature.lin
        plan, model = lin.passes.engines.plan, lin.model
        exact = type(G)._product is Curvature._product and isinstance(G.output, Exact)
        if not (
            exact
            and G.output.is_diagonal
            and plan.is_last_layer
            and model.selection.index is None
            and self.shift.ndim < 2
        ):
            return False
        if carries_graph(G.representation()) or "weight" not in plan.layers[0].names:
            return False
        large = len(lin.theta) > DENSE_SIZE and plan.layers[0].width <= DENSE_BLOCK
        return large and self._nbytes <= lin.memory_budget


@torch.no_grad()
def output_blocks(lin: Linearization, output: OutputFisher) -> DirectSum:
    """Return the GGN of a last layer with a diagonal H as the direct sum of its blocks. One forward pass."""
    layer = lin.passes.engines.plan.layers[0]
    total = lin.theta.new_zeros(layer.height, layer.width, layer.width, dtype=torch.float64)
    for _, groups in lin.root_pieces(output, lin.passes.chunk_bytes, apart=True):
        for group in groups:
            assert group.hessian is not None  # its layer is the last one, alone, and H is diagonal
            right = group.parts[0].right().flatten(0, 2).double()
            for block_sum, weights in zip(total, group.hessian.diagonal.unbind(1)):
                block_sum.addmm_((weights.unsqueeze(1) * right).mT, right)
    total = lin.passes.add_up(total)
    positions = layer.to_matrix(lin.model.selection.positions())[0].to(lin.theta.device)
    parts = (round_with_rest(block, lin.theta.dtype) for block in total)
    dense = (Dense(block, psd=True, rest=rest) for block, rest in parts)
    return DirectSum(*dense, positions=list(positions), **lin.origin)


class GGN(Curvature):
    """The generalised Gauss–Newton matrix G = Σ_n J_nᵀ H_n J_n (D, D), H_n the output Fisher (Schraudolph 2002).

    Symmetric positive semi-definite. Products G @ v and G @ V carry gradients through the vectors and the likelihood's
    hyperparameters. Cost to build: nothing. A product is one push and one pull of J, 0.5–2 gradients per vector (see
    `lin.plan`), plus O(N·C) for H. Memory: the engines of the plan, within the budget. Try it first: all other
    curvatures approximate it, and pay off when many products with it would cost too much. For a last layer whose
    outputs do not interact (Bernoulli, Poisson and Gaussian likelihoods), it is block-diagonal by output: with a prior
    added it is solved by Cholesky, if C blocks of (q + 1)² numbers, for q inputs, fit into the budget.

    With `mc_samples` it is the Monte-Carlo Fisher: one forward pass at construction draws M targets per point from the
    model, and H_n is the mean of r rᵀ over their residuals. Its expectation is the GGN. Choose it if C is large (a
    vocabulary), or for a cheaper root of the GGN. It has no gradient for hyperparameters. Its products multiply with M
    rows per point, whatever C is: for one sample a product costs 0.5–1 gradients (`print(op.plan)`), and the first one
    (1 + M) / 3 more. The rows are stored within the rest of the budget.

    Args:
        lin: the linearised network.
        mc_samples: M, the number of targets drawn per point; None for the GGN itself.
        generator: the source of the draws.

    Raises:
        ValueError: mc_samples is below 1, or is given while hyperparameters require a gradient.

    Examples:
        >>> G = co.GGN(lin)
        >>> G.shape, (G @ torch.ones(17)).shape, G.add_diagonal(1.0).solve(torch.ones(17)).shape
        (torch.Size([17, 17]), torch.Size([17]), torch.Size([17]))
    """

    _shown = ()
    OPTIONS = ("draws",)
    _damped_form: ClassVar[type[ClosedForm] | None] = OutputBlocksForm

    def __init__(
        self, lin: Linearization, mc_samples: int | None = None, generator: torch.Generator | None = None
    ) -> None:
        hyperparameters: Sequence[Tensor] = lin.likelihood.hyperparameters
        draws, rows = None, None
        if mc_samples is not None:
            require_no_gradient(lin.likelihood, "GGN(lin, mc_samples=…)")
            draws = lin.draw_residuals(mc_samples, generator)
            rows = lin.passes.with_root(Sampled(lin.likelihood, draws))
            hyperparameters = [tensor.detach() for tensor in hyperparameters]  # the draws do not change with them
        super().__init__(lin.theta, *hyperparameters, lin=lin, draws=draws, rows=rows, cache=Cache())

    @property
    def output(self) -> OutputFisher:
        """H, the output Fisher or its estimate from the draws."""
        draws: Tensor | None = self._kwargs["draws"]
        return Exact(self.likelihood) if draws is None else Sampled(self.likelihood, draws)

    @property
    def rows(self) -> Passes | None:
        return self._kwargs["rows"]

    @property
    def cache(self) -> Cache:
        """The cache of its blocks by output."""
        return self._kwargs["cache"]

    @classmethod
    def build_at(cls, lin: Linearization, hyperparameters: Sequence[Tensor], **options: Any) -> LinearOperator:
        draws = options["draws"]
        rows = None if draws is None else lin.passes.with_root(Sampled(lin.likelihood, draws))
        return super().build_at(lin, hyperparameters, draws=draws, rows=rows, cache=Cache())


class DiagonalGGN(UserOperator, Diagonal):
    """The diagonal of the GGN as an operator (D, D): the summed squares of all rows of LᵀJ (Dangel et al. 2020).

    Every operation on it, with or without a prior, is elementwise: a product is D multiplications. It ignores
    correlations. Choose it to rank weights, or as the cheapest posterior, but not if weights act together (Dangel,
    Kunstner & Hennig 2020).

    Cost to build, at construction and without a gradient graph: one forward pass (two for "mc"), one backward pass for
    each of the C columns (of a softmax C − 1; "mc": `mc_samples`, "empirical": one), and one more matrix product per
    layer for each column; a layer that is applied at one position shares that product among all columns. Memory: a
    chunk of sensitivities within the budget, never a Jacobian. Parameters without a layer rule need a backward pass for
    each point and column. A last layer alone needs the diagonal of H and no columns, whatever C is, unless the
    likelihood is a function.

    Args:
        lin: the linearised network.
        fisher: "exact", "mc" (targets drawn from the model) or "empirical" (the true targets).
        mc_samples: the number of targets drawn per point with fisher="mc".
        generator: the source of the draws.

    Raises:
        ValueError: `fisher` is none of these, or `mc_samples` is given with a `fisher` that draws nothing.

    Examples:
        >>> D = co.DiagonalGGN(lin)
        >>> D.shape, D.diagonal().shape
        (torch.Size([17, 17]), torch.Size([17]))
    """

    STORED = "space"

    def __init__(
        self,
        lin: Linearization,
        fisher: str = "exact",
        mc_samples: int = 1,
        generator: torch.Generator | None = None,
    ) -> None:
        entries = lin.curvature_diagonal(lin.output_fisher(fisher, mc_samples, generator))
        super().__init__(entries, **lin.origin)


class DisplacedGGN(Curvature):
    """The GGN with output Fishers at displaced outputs: H_n is taken at f_n + shift_n, with shift = J δ (N, C)."""

    _shown = ()

    @classmethod
    def at(cls, lin: Linearization, shift: Float[Tensor, "N C"]) -> DisplacedGGN:
        """Return the displaced GGN of a linearisation."""
        return cls(lin.theta, *lin.likelihood.hyperparameters, lin=lin, shift=shift)

    @property
    def shift(self) -> Float[Tensor, "N C"]:
        """The displacement of the outputs."""
        return self._kwargs["shift"]

    @property
    def output(self) -> Exact:
        return Exact(self.likelihood, self.shift)

    @torch.no_grad()
    def gradient(self) -> Float[Tensor, " D"]:
        """Return Jᵀr, the gradient of the linear model's negative log-likelihood. One pull of J."""
        exact = self.output
        return self.lin.passes.total(lambda batch, J: J.pull_of(lambda f: exact.residual(f, batch)), 1).squeeze(1)

    def log_likelihood(self, step: Float[Tensor, "N C"] | float = 0.0) -> Float[Tensor, ""]:
        """Return Σ_n log p(y_n | f_n + shift_n + step_n) in nats, in float64. No product with J."""
        exact = Exact(self.likelihood, self.shift + step)
        return self.lin.passes.total(lambda batch, J: exact.log_prob(J.outputs, batch).double().sum(), 0)


class EmpiricalFisher(Curvature):
    """The empirical Fisher F = Σ_n g_n g_nᵀ (D, D), g_n = J_nᵀ r_n the gradient of point n's negative log-likelihood.

    It is *not* an estimate of the GGN (Kunstner, Hennig & Balles 2019): choose it for second moments of gradients, not
    for uncertainty. Class weights multiply r_n; sample weights multiply the outer product, so that a point of weight
    two counts as two points. (A sequence with weights for its positions enters with the largest of them, and the
    others count relative to it.) Cost to build: nothing; the first product computes the rows g_n layer by layer, for
    2/3 of a gradient. A product is two matrix products per layer, 0.5–1 gradients per vector whatever C is
    (`print(op.plan)`). Per token there are T rows per sequence, which take (1 + T) / 3 gradients to compute. While a
    hyperparameter's gradient is recorded, a product costs as much as the GGN's. Memory: the rows that the plan keeps,
    within the rest of the budget.

    Args:
        lin: the linearised network.
        per_token: give each token of a sequence its own outer product; otherwise g_n sums over the tokens.

    Raises:
        TypeError: per_token is neither True nor False.

    Examples:
        >>> F = co.EmpiricalFisher(lin)
        >>> F.shape, (F @ torch.ones(17)).shape
        (torch.Size([17, 17]), torch.Size([17]))
    """

    _shown = ()
    OPTIONS = ("per_token",)

    def __init__(self, lin: Linearization, per_token: bool = False) -> None:
        lin.require_labels("the empirical Fisher")
        super().__init__(lin.theta, *lin.likelihood.hyperparameters, lin=lin, per_token=per_token)

    @property
    def output(self) -> OutputFisher:
        """The outer products H_n = r_n r_nᵀ in place of the output Fisher."""
        return Empirical(self.likelihood, self.lin.positions_apart(self._kwargs["per_token"]))

    @property
    def rows(self) -> Passes | None:
        return self.lin.gradient_rows(self.likelihood, self._kwargs["per_token"])


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
