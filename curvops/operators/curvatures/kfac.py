"""Kronecker-factored curvature, a block B ⊗ A for each layer, and sums of such curvatures kept as one.

B₁ ⊗ A₁ + B₂ ⊗ A₂ + λ I has no common eigenbasis, but (B ⊗ A) + λ I has one: with the Kronecker product nearest to the
sum in each layer, solves, determinants and draws keep a closed form, and the memory is that of one KFAC, whatever the
number of terms (Van Loan & Pitsianis 1993). The error that this makes is computed, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, cast, get_args

import torch
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.ambient import Memory, Progress
from curvops.checkpoint import Place, begin, seed_of
from curvops.checks import check_choice
from curvops.linalg import Dense, Diagonal, DirectSum, Estimate, Kronecker, Operator
from curvops.linalg.core.algorithm import algorithm
from curvops.linalg.core.cache import Cache
from curvops.linalg.core.matrix_identity import Sources, Space, common, merge_sources, scale_sources
from curvops.linalg.core.partition import Partition, partition
from curvops.linalg.core.vectors import ROUNDINGS
from curvops.linalg.operators.closed_form import ClosedForm
from curvops.linalg.operators.direct_sum import DirectSumForm
from curvops.linalg.operators.given_matrix import round_with_rest
from curvops.linalg.operators.kronecker import EigenKroneckerForm, decompose
from curvops.linalg.operators.kronecker_factors import Details, to_double
from curvops.operators.curvatures.kfac_factors import Bias, Sharing, eigenvalue_corrected, exact_block, kfac_blocks
from curvops.operators.linearized.linearization import Linearization
from curvops.operators.linearized.user_operator import UserOperator

Names = tuple[str, ...]
TOLD = "progress", "memory"
"""The keywords of layer blocks that belong to the linearisation, not to the matrix."""


class LayerBlocksForm(DirectSumForm):
    """The closed form of layer blocks plus a diagonal; layers too large for Cholesky need a multiple of I."""

    @cached_property
    def kronecker_forms(self) -> dict[tuple[str, ...], EigenKroneckerForm]:
        """The forms of the blocks that are Kronecker products, by the names of their parameters."""
        blocks = zip(cast(LayerBlocks, self.base).names, self.decomposed)
        return {names: form for names, form in blocks if isinstance(form, EigenKroneckerForm)}

    @cached_property
    def decomposed(self) -> list[ClosedForm]:
        """The forms of all blocks, with their eigendecompositions computed together."""
        decompose((form.base for form in self.forms), self.base.progress, self.base.memory)
        return self.forms


class LayerBlocks(DirectSum):
    """A block-diagonal operator with a block for each layer's parameters; the base class of KFAC and EKFAC."""

    _shown = ()
    _damped_form: ClassVar[type[ClosedForm] | None] = LayerBlocksForm

    def __init__(
        self,
        *blocks: Operator,
        positions: Any,
        cache: Cache | None = None,
        space: Space | None = None,
        names: tuple[tuple[str, ...], ...] = (),
        sources: Sources | None = None,
        progress: Progress = None,
        memory: Memory | None = None,
    ) -> None:
        ambient = {"progress": progress, "memory": memory}
        self._store(blocks, positions, cache, space=space, names=names, sources=sources, **ambient)

    @property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """The parameters of each block."""
        return self._kwargs["names"]

    @property
    def progress(self) -> Progress:
        return self._kwargs["progress"]

    @property
    def memory(self) -> Memory | None:
        """The budget for decompositions."""
        return self._kwargs["memory"]

    def _made_of(self) -> str:
        return f"{len(self.blocks)} blocks"

    def _times(self, factor: Tensor) -> LinearOperator:
        options = {name: self._kwargs[name] for name in ("positions", "space", "names", *TOLD)}
        blocks = (block._mul_constant(factor) for block in self.blocks)
        return LayerBlocks(*blocks, **options, sources=scale_sources(self.sources, factor))

    def add_diagonal(self, diag: float | Tensor) -> LinearOperator:
        if isinstance(diag, Tensor) and diag.ndim == 2 and diag.shape == self.shape and len(diag) > 1:
            raise ValueError(f"the diagonal is a matrix {tuple(diag.shape)}: give a vector (D,), or write KFAC + A.")
        return super().add_diagonal(diag)


class KroneckerCurvature(UserOperator, LayerBlocks):
    """Layer blocks built from Kronecker factors, in one or two walks over the data."""

    STORED = "positions"
    CORRECTED: ClassVar[bool] = False
    """Whether a second walk computes the second moments in the eigenbases of the factors."""

    @algorithm
    def __init__(
        self,
        lin: Linearization,
        fisher: str = "exact",
        sharing: str = "expand",
        mc_samples: int = 1,
        generator: torch.Generator | None = None,
        bias: str = "joint",
        checkpoint: Place | None = None,
    ) -> None:
        check_choice("sharing", sharing, get_args(Sharing))
        check_choice("bias", bias, get_args(Bias))

        def problem() -> dict[str, Any]:
            return lin.problem() | (lin.order if fisher == "mc" else {})

        seed = seed_of(generator) if fisher == "mc" else None
        place = checkpoint, problem, lin.theta.device, True, lin.ranks
        saved = begin(type(self).__name__, *place, lin=None, generator=seed)
        source = saved.source("generator", generator, lin.theta.device) if fisher == "mc" else None
        output = lin.output_fisher(fisher, mc_samples, source).narrow  # all walks use the same draws
        blocks = kfac_blocks(lin, output, sharing, bias)
        positions = partition([block.positions for block in blocks], lin.theta.device)
        operators = {block.names: block.operator for block in blocks}
        names = tuple(operators)
        del blocks  # so that factors can be freed before the walk is over
        corrected = eigenvalue_corrected(lin, output, operators) if self.CORRECTED else list(operators.values())
        ambient: dict[str, Any] = {"progress": lin.passes.progress, "memory": lin.memory}
        super().__init__(*corrected, positions=positions, names=names, **ambient, **lin.origin)


class KFAC(KroneckerCurvature):
    """A block-diagonal approximation of the GGN (D, D): B ⊗ A for a layer's weight and bias (Martens & Grosse 2015).

    A is the mean of a aᵀ over inputs (with a one appended for the bias), and B the sum of δ δᵀ over the columns of the
    output Fisher's square root; a sample of weight two counts as two in both. Linear layers, convolutions (a block for
    each group) and embeddings have factors. Normalisation and other layers get their exact block if they have up to
    1,024 parameters, and its exact diagonal beyond (a `NoFactorsWarning` names them), so that no model is rejected.
    Layers that share weights have one block. A layer with M rows for N points, a different number for each (atoms of
    graphs, packed sequences, tokens that a mask selects), has A = (1/M) Σ_i a_i a_iᵀ and B = Σ_i Σ_r δ_ir δ_irᵀ, sums
    over its rows i and the root's columns r: those of T positions, with M in place of N·T (Eschenhagen et al. 2023).

    Small eigenvalues are accurate for layers with up to 512 inputs, which are summed in float64 whatever the data's
    dtype, and for wider factors that sum fewer rows than columns, whose eigenvalues come from these rows. For other
    factors a `PrecisionWarning` warning is issued if the prior precision is below the rounding of single precision.

    With a prior that is constant in each layer, products, solves, log-determinants and samples have a closed form in
    the eigenbases of A and B, which are computed once. With a prior that varies within a layer, layers of up to 2,048
    weights are factorised. If a larger layer is among them, conjugate gradients and probes compute everything.
    `heuristic_damping` gives Martens & Grosse's factored damping instead.

    Cost to build: a forward pass (two with "mc"), a backward pass for each column (C, of a softmax C − 1, `mc_samples`,
    or 1), and the factors' matrix products; a last layer needs no columns, but the sum of H, one product. A product is
    two matrix products per layer. Memory: Σ 2·(in² + out²) numbers. Choose it if the GGN's own products cost too much
    and a diagonal is too crude.

    Args:
        lin: the linearised network.
        fisher: "exact", "mc" (targets drawn from the model) or "empirical" (the true targets).
        sharing: for a layer that is applied at several positions, "expand" treats each position as a separate point,
            and "reduce" first averages a and sums δ over the positions that count, or over the rows of each point
            (Eschenhagen et al. 2023; embeddings always expand). If a layer in one call for all rows has as many rows
            of each point as the outputs have positions, they are taken to be these positions, in their order.
        mc_samples: the number of targets drawn per point with fisher="mc".
        generator: the source of the draws.
        bias: "joint" for one block with the weight, or "separate" for its own block B, which ignores correlations with
            the weight; the two may then have different prior precisions.
        checkpoint: a folder for the sums over the points processed so far, saved at most every half minute, and for the
            result. A build that was killed resumes from it and gives bitwise the same result. A checkpoint of another
            network, other data or other options is rejected.

    Raises:
        ValueError: `fisher`, `sharing` or `bias` is unknown, or a selection splits a layer.

    Examples:
        >>> K = co.KFAC(lin)
        >>> K.shape, K.add_diagonal(1.0).solve(torch.ones(17)).shape
        (torch.Size([17, 17]), torch.Size([17]))
    """

    def heuristic_damping(self, shift: float) -> LinearOperator:
        """Return (B + √λ/π I) ⊗ (A + π√λ I) for Kronecker blocks and + λ I for others (Martens & Grosse 2015, §6.3).

        The result is Kronecker-factored, but has cross terms that the exact B ⊗ A + λ I does not have.

        Args:
            shift: λ > 0.

        Returns:
            The damped operator, block by block.
        """
        damped = [
            block.heuristic_damping(shift) if isinstance(block, Kronecker) else block.add_diagonal(shift)
            for block in self.blocks
        ]
        return DirectSum(*damped, positions=self.partition, space=self.spaces[0], sources=self.sources)


class EKFAC(KroneckerCurvature):
    """KFAC with exact second moments in each block's eigenbasis (D, D): U diag(s) Uᵀ, U = U_B ⊗ U_A.

    In Frobenius norm it is never further from the GGN's blocks than KFAC, and its trace is exact. Choose it over KFAC
    if the second walk is affordable: solves and samples cost the same.

    Cost to build: that of KFAC, its eigendecompositions, and a second walk with a matrix product for each column (for a
    layer that is applied at one position: one for all columns). A product is four matrix products per layer. Memory:
    that of KFAC and D numbers.

    Args:
        lin: the linearised network.
        fisher: "exact", "mc" or "empirical", as in `KFAC`.
        sharing: "expand" or "reduce", as in `KFAC`.
        mc_samples: the number of targets drawn per point with fisher="mc".
        generator: source of the draws.
        bias: "joint" or "separate", as in `KFAC`.
        checkpoint: a folder for the sums over the points done so far, and for the result, as in `KFAC`.

    Raises:
        ValueError: `fisher`, `sharing` or `bias` is unknown, or the selection splits a layer.

    Source: George et al. 2018.

    Examples:
        >>> K = co.EKFAC(lin)
        >>> K.shape, K.add_diagonal(1.0).solve(torch.ones(17)).shape
        (torch.Size([17, 17]), torch.Size([17]))
    """

    CORRECTED = True


class KFACSum(NamedTuple):
    """Layer blocks K̂, and their error ‖S − K̂‖_F / ‖S‖_F for the sum S that they approximate."""

    operator: LayerBlocks
    error: Estimate


def has_kronecker_blocks(operator: LinearOperator) -> bool:
    """Return whether it is made of Kronecker products, as KFAC is, and exact blocks of layers without factors."""
    if not isinstance(operator, LayerBlocks):
        return False
    return all(isinstance(block, Kronecker | Dense | Diagonal) for block in operator.blocks)


def kfac_sum(*terms: LayerBlocks) -> KFACSum:
    """Return the layer blocks nearest to a sum in Frobenius norm; exact blocks add up.

    A layer that an operator's data do not reach (the head of another task, say) gets nothing from it. Raises ValueError
    if the layers are divided differently (bias="joint" and "separate").

    Cost: k² inner products of each layer's factors for k terms, in float64. Source: Van Loan & Pitsianis 1993.
    """
    space = common(*(term.spaces[0] for term in terms))
    members: dict[Names, list[Operator]] = {}
    places: dict[Names, Tensor | range] = {}
    for term in terms:
        for names, block, positions in zip(term.names, term.blocks, term.partition.parts):
            members.setdefault(names, []).append(block)
            places.setdefault(names, positions)
    reached = {names: [block for block in blocks if not _is_silent(block)] for names, blocks in members.items()}
    blocks_by_names = {names: blocks for names, blocks in reached.items() if blocks}
    seen = [name for names in blocks_by_names for name in names]
    for names in members:
        if names not in blocks_by_names and not set(names) & set(seen):
            blocks_by_names[names], seen = members[names][:1], [*seen, *names]
    if len(set(seen)) < len(seen):
        twice = sorted({name for name in seen if seen.count(name) > 1})
        raise ValueError(f"the curvatures divide {twice} into different blocks: build both with one bias= of co.KFAC.")
    order = [names for names in members if names in blocks_by_names]
    sums = [_block_sum(blocks_by_names[names]) for names in order]
    error, size = (torch.stack([block_sum[i] for block_sum in sums]).sum() for i in (1, 2))
    value = (error / size).sqrt() if bool(size > 0) else torch.zeros_like(size)
    sources = merge_sources(*(term.sources for term in terms))
    parts = Partition(tuple(places[names] for names in order))
    operator = LayerBlocks(
        *(block_sum[0] for block_sum in sums),
        positions=parts,
        space=space,
        names=tuple(order),
        sources=sources,
        progress=next((term.progress for term in terms if term.progress is not None), None),
        memory=next((term.memory for term in terms if term.memory is not None), None),
    )
    # Squares are known up to the rounding of the sum's square.
    rounding = ROUNDINGS * torch.finfo(value.dtype).eps
    return KFACSum(operator, Estimate.rounded(value, rounding / value.clamp_min(rounding**0.5), size=1.0))


def _is_silent(block: Operator) -> bool:
    """Return whether no output of these data depends on the block's parameters."""
    return isinstance(block, Dense | Diagonal) and not bool(block._args[0].any())


def _block_sum(blocks: Sequence[Operator]) -> tuple[Operator, Tensor, Tensor]:
    """Return one block for a sum of blocks, with the squares of the Frobenius norms of its error and of the sum."""
    if all(isinstance(block, Kronecker) for block in blocks):
        return nearest_kronecker([block for block in blocks if isinstance(block, Kronecker)])
    zero = torch.zeros((), dtype=torch.float64, device=blocks[0].device)
    if all(isinstance(block, Diagonal) for block in blocks):
        entries = torch.stack([block.diagonal() for block in blocks]).sum(0)
        return Diagonal(entries), zero, entries.double().square().sum()
    total = torch.stack([block.to_dense().double() for block in blocks]).sum(0)
    for block in blocks:
        if isinstance(block, Dense) and block.rest is not None:
            total += block.rest
    return exact_block(total, blocks[0].dtype), zero, total.square().sum()


class Nearest(NamedTuple):
    """A Kronecker product B ⊗ A, and the squares of ‖S − B ⊗ A‖_F and ‖S‖_F for the sum S that it approximates."""

    operator: Kronecker
    error: Float[Tensor, ""]
    size: Float[Tensor, ""]


@torch.no_grad()
def nearest_kronecker(terms: Sequence[Kronecker]) -> Nearest:
    """Return the Kronecker product nearest to Σ_i B_i ⊗ A_i in each group, for factors of equal sizes.

    Rearranged, Σ_i B_i ⊗ A_i is the matrix Σ_i vec(B_i) vec(A_i)ᵀ, and its nearest product is that matrix's first
    singular pair: B = Σ_i b_i B_i and A = σ Σ_i a_i A_i with b an eigenvector of K_A K_B, the matrices of the inner
    products ⟨A_i, A_j⟩ and ⟨B_i, B_j⟩. These products are non-negative for positive semidefinite factors, and so are b
    and a (Perron): B and A are positive semidefinite. Errors are exact, to rounding of √ε.

    Cost: k² inner products of the factors for k terms, in float64.
    """
    if len({(term.sizes, *(factor.ndim for factor, *_ in term.factors)) for term in terms}) != 1:
        raise ValueError(f"the factors differ in their sizes: {[term.sizes for term in terms]}.")
    both = [[to_double(factor, details) for factor, details, _ in term.factors] for term in terms]
    lefts, rights = (torch.stack(factors, 1) for factors in zip(*both))  # (g, k, …)
    of_lefts, of_rights = _inner_products(lefts), _inner_products(rights)
    values, vectors = torch.linalg.eigh(of_lefts)
    root = (vectors * values.clamp_min(0).sqrt().unsqueeze(1)) @ vectors.mT
    squares, pairs = torch.linalg.eigh(root @ of_rights @ root)  # squared singular values, ascending
    squares = squares.clamp_min(0)
    sigma, first = squares[:, -1].sqrt(), pairs[:, :, -1]
    scale = sigma.clamp_min(torch.finfo(sigma.dtype).tiny).reciprocal().unsqueeze(1)
    b = (of_rights @ (root @ first.unsqueeze(2))).squeeze(2) * scale.square()
    a = (of_lefts @ b.unsqueeze(2)).squeeze(2) * scale
    b, a = b.abs(), a.abs()  # one sign, up to rounding
    left, of_left = _combine(lefts, b, terms, 0)
    right, of_right = _combine(rights, a * sigma.unsqueeze(1), terms, 1)
    total = squares.sum()
    error = torch.zeros_like(total) if len(terms) == 1 else squares[:, :-1].sum()
    return Nearest(Kronecker(left, right, details=(of_left, of_right)), error, total)


def _inner_products(factors: Float[Tensor, "g k *m"]) -> Float[Tensor, "g k k"]:
    flat = factors.flatten(2)
    return flat @ flat.mT


def _combine(
    factors: Float[Tensor, "g k *m"], weights: Float[Tensor, "g k"], terms: Sequence[Kronecker], side: int
) -> tuple[Tensor, Details]:
    """Return Σ_i w_i F_i in the terms' dtype, with the part lost in rounding."""
    total = (weights.unsqueeze(1) @ factors.flatten(2)).squeeze(1).unflatten(1, factors.shape[2:])
    rounded, rest = round_with_rest(total, terms[0].dtype)
    rounding, of_rows = (max(getattr(t.details[side], name) for t in terms) for name in ("rounding", "of_rows"))
    return rounded, Details(rest if total.ndim == 3 else None, None, rounding, of_rows)
