"""Dense principal blocks of an operator: subnetworks, block-diagonal approximations, and small operators as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.argument_types import BlockChoice, Positions
from curvops.checks import (
    carries_graph,
    check_choice,
    check_kind,
    check_shape,
    checked_indices,
    refuse,
    require_no_graph,
)
from curvops.linalg import Damped, Dense, DirectSum
from curvops.linalg.core.algorithm import keep
from curvops.linalg.core.cache import Cache
from curvops.linalg.core.matrix_identity import sources_of, spaces_of
from curvops.linalg.core.results import accept
from curvops.linalg.core.solve_routes import FORMED_COPIES
from curvops.linalg.core.structure import add_gram, mirror
from curvops.linalg.core.vectors import is_psd, unit_columns
from curvops.linalg.operators.algebra import Scaled, Sum
from curvops.linalg.operators.base import UnaryOperator
from curvops.linalg.operators.closed_form import ClosedForm
from curvops.linalg.operators.contract import COLUMN_BLOCK
from curvops.linalg.operators.given_matrix import DenseForm, round_with_rest
from curvops.linalg.solvers.solve import certify_dense
from curvops.network import Exact, Group, OutputFisher
from curvops.operators.curvatures.ggn import Curvature
from curvops.operators.linearized.linearization import Linearization
from curvops.operators.linearized.user_operator import UserOperator

ROWS = 256
"""The number of rows of a block summed at a time."""


class Subnetwork(Dense):
    """The principal block A[S, S] of an operator for a set S of weights, as a dense matrix (S, S).

    `co.Subnetwork(op, indices)`; with a prior added it is solved by Cholesky (Daxberger et al. 2021). Cost to build,
    for a GGN or Fisher: the S columns of LᵀJ (H = L Lᵀ) and S² N·C operations. The columns come from a backward pass
    for each column of L if S is at least twice their number, otherwise from a push of J for each index. For other
    operators: a product for each index. A product is S² operations. Memory: a few S² numbers in float64, and the rows
    of some points. Choose it for exact inference over up to a few thousand weights. `parameters=indices` in
    `co.linearize` gives the same block as an operator that is never formed.

    Args:
        source: the operator (D, D).
        indices: positions of the weights, or a boolean mask (D,).
        stored: the keywords of the stored form; users leave them out.

    Raises:
        TypeError: a linearisation is given in place of an operator, or no indices.
        ValueError: indices are out of range, repeated or none, or a tensor inside the operator requires a gradient.

    Examples:
        >>> few = co.select(lin, 5)
        >>> G = co.Subnetwork(co.GGN(lin), few)
        >>> G.shape, G.add_diagonal(1.0).solve(torch.ones(5)).shape
        (torch.Size([5, 5]), torch.Size([5]))
    """

    _shown = ("indices",)

    def __init__(self, source: LinearOperator | Tensor, indices: Positions | None = None, **stored: Any) -> None:
        block: Any = source
        if "psd" not in stored:
            if stored or indices is None:
                raise TypeError("Subnetwork takes an operator (D, D) and indices, co.Subnetwork(co.GGN(lin), indices).")
            check_kind("source", source, (LinearOperator, Tensor), "an operator (D, D), such as co.GGN(lin)")
            operator = source if isinstance(source, LinearOperator) else Dense(source)
            check_shape("source", operator, operator.shape[-1:] * 2)
            indices = checked_indices(indices, operator.shape[-1]).to(operator.device)
            require_no_graph(operator.representation(), "Subnetwork")
            block, rest = round_with_rest(principal_block(operator, indices), operator.dtype)
            whole, sources = spaces_of(operator)[0], sources_of(operator)
            space = None if whole is None else whole.part(indices)
            stored = {"psd": is_psd(operator), "space": space, "rest": rest, "sources": sources}
        LinearOperator.__init__(self, block, indices=indices, **stored)
        self.tensor, self.rest, self.indices = block, stored["rest"], indices


class BlockDiagonal(UserOperator, DirectSum):
    """The diagonal blocks of the GGN for a partition of the weights, each exact and dense, as an operator (D, D).

    Entries outside the blocks are zero. With a prior added it is solved by Cholesky. Cost to build: a forward pass and
    C backward passes (of a softmax C − 1), with Σ p² N·C operations for blocks of p weights (a block of fewer than
    2 C weights takes a push of J for each weight). A product is Σ p² operations. Memory: Σ p² numbers. Choose it for
    small layers, and KFAC for large ones.

    Args:
        lin: the linearised network.
        blocks: "layer" for a block of each layer's own parameters, or a list of groups such as `[["0.*"], ["2.*"]]`,
            of globs over names or of positions. Weights in no group share a block with the rest of their layer.

    Raises:
        ValueError: groups overlap or match nothing, or the blocks exceed the memory budget.

    Examples:
        >>> B = co.BlockDiagonal(lin, "layer")
        >>> [block.shape for block in B.blocks]
        [torch.Size([9, 9]), torch.Size([8, 8])]
    """

    STORED = "positions"

    def __init__(self, lin: Linearization, blocks: BlockChoice = "layer") -> None:
        positions = tuple(_partition(lin, blocks))
        needed = sum(len(index) ** 2 for index in positions) * 8  # single precision stores two parts per number
        if needed > lin.memory_budget:
            raise ValueError(f"the dense blocks need {needed:,} bytes of {lin.memory_budget:,}: use co.KFAC(lin).")
        exact = Exact(lin.likelihood)
        parts = (round_with_rest(block, lin.theta.dtype) for block in fisher_blocks(lin, exact, positions))
        dense = (Dense(tensor, psd=True, rest=rest) for tensor, rest in parts)
        super().__init__(*dense, positions=positions, **lin.origin)


@torch.no_grad()
def principal_block(operator: LinearOperator, indices: Int[Tensor, " S"]) -> Float[Tensor, "S S"]:
    """Return A[S, S]: for curvatures and for sums in float64 (see `fisher_blocks`), else by one product per index."""
    if isinstance(operator, Damped):
        block = principal_block(operator.base, indices)
        block.diagonal().add_(operator.shift if operator.shift.ndim == 0 else operator.shift[indices])
        return block
    if isinstance(operator, Sum) and not operator.batch_shape:
        return torch.stack([principal_block(term, indices).double() for term in operator.terms]).sum(0)
    if isinstance(operator, Scaled) and not operator.batch_shape:
        return principal_block(operator.base, indices) * operator.factor
    if isinstance(operator, Curvature):
        return next(fisher_blocks(operator.lin, operator.output, [indices]))
    block = torch.empty(len(indices), len(indices), dtype=operator.dtype, device=operator.device)
    for start in range(0, len(indices), COLUMN_BLOCK):
        some = slice(start, start + COLUMN_BLOCK)
        block[:, some] = operator._matmul(unit_columns(indices[some], operator.shape[-1], operator.dtype))[indices]
    return block


def sums_rows(operator: LinearOperator) -> bool:
    """Return whether `principal_block` sums squares of rows in float64, whatever the dtype of products is."""
    if isinstance(operator, (Damped, Scaled)):
        return sums_rows(operator.base)
    return isinstance(operator, Curvature) or (isinstance(operator, Sum) and all(map(sums_rows, operator.terms)))


@torch.no_grad()
def fisher_blocks(
    lin: Linearization, output: OutputFisher, parts: Sequence[Int[Tensor, "_"]]
) -> Iterator[Float[Tensor, "_ _"]]:
    """Yield Σ_n (J_n E_S)ᵀ H_n (J_n E_S) for each set S of weights, summed in float64.

    The rows of LᵀJ take one backward pass for each column of H = L Lᵀ, in one walk for all sets. If these columns are
    not few compared with S, the selected columns come from a push of J for each index, multiplied by Lᵀ. The sums need
    float64, the rows do not: with sums in single precision, eigenvalues below 1e-7 of the largest would be rounding
    errors.
    """
    root, others = output.narrow, lin.plan.others.keys()
    totals = [lin.theta.new_zeros(len(index), len(index), dtype=torch.float64) for index in parts]
    places = [_places(lin, index) for index in parts]
    few = 2 * root.num_columns(lin.num_outputs)  # a row costs at most as much as pushing two unit vectors
    by_rows = [k for k, index in enumerate(parts) if few <= len(index) and not places[k].keys() & others]
    if by_rows:
        names = {name for k in by_rows for name in places[k]}
        for _, groups in lin.passes.root_pieces(root, lin.passes.chunk_bytes, names=names):
            together = list(groups)
            for k in by_rows:
                for rows in _rows_in(together, lin, places[k], len(parts[k])):
                    add_gram(totals[k], rows.mT, rows.mT, half=True)
    for k in sorted({*range(len(parts))} - {*by_rows}):
        for batch, J in lin.passes.each(len(parts[k])):
            units = (unit_columns(index, len(lin.theta), lin.theta.dtype) for index in parts[k].split(COLUMN_BLOCK))
            pushed = torch.cat([J.push(block) for block in units])
            columns = [output.root_transpose_product(J.outputs, u, batch) for u in pushed.split(ROWS)]
            rows = torch.cat(columns).double().flatten(1).mT
            add_gram(totals[k], rows.mT, rows.mT, half=True)
    while totals:
        yield mirror(lin.passes.add_up(totals.pop(0)).unsqueeze(0))[0]


def _rows_in(
    groups: Sequence[Group], lin: Linearization, places: Mapping[str, Tensor], size: int
) -> Iterator[Float[Tensor, "m {size}"]]:
    """Yield the columns of the rows of LᵀJ that `places` puts into S, some points at a time."""
    shared = [(group, [name for name in group.names if name in places]) for group in groups]
    reaching = [group.of(names) for group, names in shared if names]
    if not reaching:
        return
    columns, points = reaching[0].num_columns, max(group.start + group.num_points for group in reaching)
    largest = max(size, *(lin.model.selection.size_of(group.names) for group in reaching))
    step = max(1, lin.passes.chunk_bytes // max(1, 8 * columns * largest))
    for start in range(0, points, step):
        block = lin.theta.new_zeros(min(step, points - start) * columns, size, dtype=torch.float64)
        for group in reaching:
            first = max(start, group.start)
            some = group.take(slice(first - group.start, max(first, start + step) - group.start))
            replace(some, start=first - start).put_columns(block, places)
        yield block


def _places(lin: Linearization, indices: Int[Tensor, " S"]) -> dict[str, Tensor]:
    """Return the position of each entry among the indices, −1 for others, for the tensors that hold some of them."""
    order = torch.full((lin.num_parameters,), -1).index_copy(0, indices.cpu(), torch.arange(len(indices)))
    positions = lin.model.selection.positions().items()
    places = {name: torch.where(entries >= 0, order[entries.clamp_min(0)], -1) for name, entries in positions}
    return {name: entries for name, entries in places.items() if bool((entries >= 0).any())}


def _partition(lin: Linearization, blocks: Any) -> list[Int[Tensor, " p"]]:
    """Return the positions of each block: first those of the given groups, then the rest by layer."""
    of_name = {name: p[p >= 0].flatten() for name, p in lin.model.selection.positions().items()}
    if isinstance(blocks, str):
        check_choice("blocks", blocks, ("layer",))
        blocks = []
    check_kind("blocks", blocks, Iterable, "'layer', or a list of groups of names or positions")
    groups = [_group(lin, group, of_name) for group in blocks]
    grouped = torch.cat(groups) if groups else torch.empty(0, dtype=torch.long)
    refuse(len(grouped.unique()) != len(grouped), "the groups of blocks= overlap: put each weight into one group.")
    free = torch.ones(lin.num_parameters, dtype=torch.bool)
    free[grouped] = False
    layers: dict[str, list[Tensor]] = {}
    for name, positions in of_name.items():
        layers.setdefault(name.rpartition(".")[0], []).append(positions[free[positions]])
    rest = [torch.cat(parts) for parts in layers.values()]
    return [group.to(lin.theta.device) for group in [*groups, *rest] if len(group)]


def _group(lin: Linearization, group: Any, of_name: dict[str, Tensor]) -> Int[Tensor, " p"]:
    if isinstance(group, Sequence) and all(isinstance(glob, str) for glob in group):
        names = lin.model.selection.matching(*([group] if isinstance(group, str) else group))
        if not names:
            raise ValueError(f"blocks= contains {group!r}, which matches no parameter; the names are {list(of_name)}.")
        return torch.cat([of_name[name] for name in names])
    return checked_indices(group, lin.num_parameters).cpu()


class FormedCholesky(DenseForm):
    """Cholesky factorisation of a formed operand; tensors inside the operand get no gradients."""

    @property
    def holds(self) -> bool:
        return super().holds and not carries_graph(self.base.representation())

    @property
    def dtype_of_entries(self) -> torch.dtype:
        """The dtype whose rounding the entries have."""
        return torch.float64 if sums_rows(self.base.base) else self.base.dtype

    @cached_property
    def dense(self) -> Tensor:
        """P as a dense matrix (n, n)."""
        dense = self.base.formed()
        return dense.diagonal_scatter(dense.diagonal() + self.shift.to(dense.dtype))

    @cached_property
    def chol(self) -> Tensor:
        """The Cholesky factor, certified by solving for a right-hand side with one of the largest residuals.

        This right-hand side is close to the lowest eigenvector of P. As in every other solve, less than half of the
        digits warn, and a failure raises.
        """
        L = super().chol
        with torch.no_grad():
            b = L.new_ones(len(L), 1)
            for _ in range(4):  # inverse iterations towards the lowest eigenvector
                b = torch.cholesky_solve(b / b.norm(), L)
            accept(certify_dense(self.dense, torch.cholesky_solve(b, L), b, torch.zeros(())), None)
        return L


class Formed(UnaryOperator):
    """An operator A with few enough rows to be formed for repeated solves with a diagonal added.

    Products are those of A. The first solve, draw or log-determinant, with any diagonal, costs as much as a
    `Subnetwork` of all weights; each further diagonal costs a factorisation.
    """

    _damped_form: ClassVar[type[ClosedForm] | None] = FormedCholesky

    def __init__(self, base: LinearOperator, cache: Cache | None = None) -> None:
        super().__init__(base, cache=Cache() if cache is None else cache)

    def _product(self, block: Tensor) -> Tensor:
        product: Tensor = self.base._matmul(block)
        return product

    def formed(self) -> Tensor:
        """Return A (n, n) in float64, formed once and kept while its tensors are unchanged."""
        cache: Cache = self._kwargs["cache"]
        return cache.get_or_compute("formed", self.representation(), self._formed_now)

    def _formed_now(self) -> Tensor:
        dense = principal_block(self.base, torch.arange(self.shape[-1], device=self.device)).double()
        dense = (dense + dense.mT) / 2
        keep(self, dense, FORMED_COPIES * 8 * len(dense) ** 2)
        return dense
