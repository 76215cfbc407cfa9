"""Function space over ranks: vectors over the outputs lie with the points, and every answer is that of one process.

Tests `operators_over_ranks.py`, `on_shards.py`.
"""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import curvops as co
from curvops import linalg
from curvops.linalg import cg, dual_descent
from tests.memory import Largest
from tests.ranks.meshes import Mesh, of_two_dimensions, wrong_blocks
from tests.ranks.processes import LONGEST, assert_those_of_one_process, by_problem, run_on_ranks
from tests.ranks.questions import DOUBLE, SHARDS, answered, linearise, seeded

NOISE = 8.0
"""Beside eigenvalues that reach 17 and 38: iterations are few."""
OUTPUTS = 3 * 102
"""The outputs of a kernel whose memory is counted."""
Question = tuple[str, Callable[[], Any]]


def of_jacobians(lin: co.operators.Linearization, on: Mesh) -> Iterator[Question]:
    J = lin.jacobian()
    rows, D = J.shape
    yield "J", lambda: J @ on.normal(D)
    yield "J, one vector", lambda: J @ on.normal(D, 1)
    yield "J, many vectors", lambda: J @ on.normal(D, 17)
    yield "Jᵀ", lambda: J.mT @ on.normal(rows)
    yield "Jᵀ, one vector", lambda: J.mT @ on.normal(rows, 1)
    yield "rows of J", lambda: J.rows_at(torch.tensor([3, 0, rows - 1, 15, 3]))


def of_kernels(lin: co.operators.Linearization, on: Mesh) -> Iterator[Question]:
    D, rows = lin.num_parameters, lin.num_data * lin.num_outputs
    scales = torch.linspace(0.5, 2, D, dtype=DOUBLE)
    K = co.TangentKernel(lin, scales)
    yield "K, a vector", lambda: K @ on.normal(rows)
    yield "K, a vector, formed", on.formed(K).to_dense
    K = co.TangentKernel(lin, 2.0)
    for how, A in {"": K, ", formed": on.formed(K)}.items():
        B, noisy = on.normal(rows), A.add_diagonal(NOISE)
        yield f"K{how}", lambda A=A, B=B: A @ B
        yield f"K{how}: one vector", lambda A=A: A @ on.normal(rows, 1)
        yield f"K{how}: transposed", lambda A=A, B=B: A.mT @ B
        yield f"K{how}: diagonal", A.diagonal
        yield f"K{how}: sum", lambda A=noisy, B=B: A @ B
        yield f"K{how}: beside a sum", lambda A=A, B=B, K=K: (A * 0.5 + K) @ B
        yield f"K{how}: solve", lambda A=noisy, B=B: co.linalg.solve(A, B, rtol=1e-13)


def of_solvers(lin: co.operators.Linearization, on: Mesh) -> Iterator[Question]:
    K, rows = co.TangentKernel(lin, 2.0), lin.num_data * lin.num_outputs
    plain = torch.ones(rows, 2, dtype=DOUBLE)
    for how, A in {"": K, ", formed": on.formed(K)}.items():
        B, noisy = on.normal(rows), A.add_diagonal(NOISE)
        shared, both = on.over(A), on.over(noisy)
        yield f"K{how}: logdet", noisy.logdet
        yield f"K{how}: variances", lambda A=noisy: A.inverse().diagonal()
        yield f"K{how}: plain vectors", lambda A=shared, V=plain: A @ V
        yield f"K{how}: cg of plain vectors", lambda A=both, V=plain: cg(A, V, rtol=1e-13).x
        yield f"K{how}: solution of plain vectors", lambda A=both, V=plain: A.solve(V)
        for batch in (5, 100):
            descent = {"noise": 20.0, "batch_size": batch, "maxiter": 2}
            yield (
                f"K{how}: dual descent, {batch} rows",
                lambda A=A, B=B, o=descent: dual_descent(A, B, generator=seeded(), **o).x,
            )


def of_formed_kernels(lin: co.operators.Linearization, on: Mesh) -> Iterator[Question]:
    K, rows = co.TangentKernel(lin, 2.0), lin.num_data * lin.num_outputs
    formed = on.formed(K)
    yield "formed, whole", formed.to_dense
    yield "formed, twice", lambda: (formed * 2.0).to_dense()
    yield "formed, as a tensor", lambda: formed.tensor if on.mesh is None else formed.matrix
    tensor = formed.tensor if on.mesh is None else formed.matrix
    yield (
        "a tensor: products",
        lambda: dual_descent(tensor, on.normal(rows), noise=20.0, maxiter=2, generator=seeded()).x,
    )
    new = torch.randn(6, 4, generator=seeded(8), dtype=DOUBLE)
    other = co.TangentKernel(lin, 2.0, new)
    yield "K of other points", lambda: other @ on.normal(other.shape[1])
    yield "K of other points, formed", lambda: on.formed(other) @ on.normal(other.shape[1])
    yield "K of both, its product", lambda: co.TangentKernel(lin, 2.0, new, new[:4]) @ on.normal(4 * lin.num_outputs)


def largest_tensor(group: Any, mesh: Any) -> dict[str, int]:
    """How many numbers the largest tensor has while the kernel of 102 points is formed and used, on this rank."""
    torch.manual_seed(0)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 3)).double()
    x, y = torch.randn(102, 4, generator=seeded(), dtype=DOUBLE), torch.randint(3, (102,), generator=seeded())
    lin = co.linearize(model, (x[rank::size], y[rank::size]), "classification", process_group=group)
    K, found = co.TangentKernel(lin, 2.0), {}
    B = distribute_tensor(torch.ones(OUTPUTS, 4, dtype=DOUBLE), mesh, [Shard(0)])
    with Largest() as forming:
        formed = K.formed(mesh)
    with Largest() as solving:
        cg(formed.add_diagonal(NOISE), B)
    ranks = formed.layouts[0].ranks
    before = ranks.messages
    _ = K @ B
    found["messages of a product"] = ranks.messages - before
    dual_descent(K, B, noise=5.0, maxiter=1, generator=seeded())
    _ = K.diagonal(), K.add_diagonal(NOISE).solve(torch.ones(OUTPUTS, dtype=DOUBLE))
    found["inputs of others kept"] = lin.passes._gathered is not None
    return found | {"forming": forming.numbers, "solving": solving.numbers}


def refusals(mesh: Any, lin: co.operators.Linearization) -> None:
    """Refuse what are no vectors of this function space, on all ranks and by name."""
    K, J = co.TangentKernel(lin, 2.0), lin.jacobian()
    whole = torch.ones(K.shape[0], 2, dtype=DOUBLE)
    wrong = wrong_blocks(whole, mesh)
    alone = [dist.new_group([rank]) for rank in range(mesh.size())][dist.get_rank()]
    if mesh.size() > 1:
        wrong["mesh.get_group"] = distribute_tensor(whole, DeviceMesh.from_group(alone, "cpu"), [Shard(0)])
    for words, tensor in wrong.items():
        for multiply in (lambda t: K @ t, lambda t: J.mT @ t, lambda t: K.add_diagonal(0.1) @ t):
            with pytest.raises(ValueError, match=words):
                multiply(tensor)
    with pytest.raises(ValueError, match="one dimension"):
        K.formed(of_two_dimensions(mesh))
    recorded = co.TangentKernel(lin, torch.tensor(2.0, requires_grad=True))
    for call, error, match in (
        (lambda: linalg.BlockRows.of(whole), TypeError, "a DTensor"),
        (lambda: linalg.BlockRows.of(distribute_tensor(whole[:, 0], mesh, [Shard(0)])), TypeError, "a DTensor"),
        (lambda: linalg.BlockRows.of(distribute_tensor(whole, mesh, [Shard(1)])), ValueError, "sharded by rows"),
        (lambda: recorded.formed(mesh), ValueError, "no gradient"),
        (lambda: recorded @ distribute_tensor(whole, mesh, [Shard(0)]), TypeError, "no gradient"),
    ):
        with pytest.raises(error, match=match):
            call()
    with pytest.raises(ValueError, match="of one set of inputs"):
        co.TangentKernel(lin, 2.0, torch.ones(2, 4, dtype=DOUBLE), torch.ones(3, 4, dtype=DOUBLE)).formed(mesh)


SHELVES = {
    "labels": (of_jacobians, of_kernels, of_solvers, of_formed_kernels),
    "more weights than outputs": (of_kernels,),
}
"""What is asked of each problem: the second one differs in the branches that a product takes, not in ranks."""


def answers(problem: str, lin: co.operators.Linearization, on: Mesh) -> dict[str, np.ndarray]:
    with torch.no_grad():
        return answered(question for shelf in SHELVES[problem] for question in shelf(lin, on))


def on_rank(group: dist.ProcessGroup, size: int) -> dict[str, Any]:
    mesh, rank = init_device_mesh("cpu", (size,)), dist.get_rank(group)
    asked = list(SHELVES)[: 2 if size == 2 else 1]
    lins = {problem: linearise(problem, SHARDS[size], group, rank) for problem in asked}
    found = {problem: answers(problem, lin, Mesh(mesh)) for problem, lin in lins.items()}
    refusals(mesh, lins["labels"])
    return found | {"largest": largest_tensor(group, mesh)}


def whole() -> dict[str, Any]:
    """The answers of one process."""
    return {problem: answers(problem, linearise(problem), Mesh()) for problem in SHELVES}


@pytest.mark.parametrize("size", LONGEST)
def test_answers_are_those_of_one_process(expected, size) -> None:
    problems = by_problem(run_on_ranks(size, on_rank, size))
    for largest in problems.pop("largest").values():
        assert largest["forming"] == OUTPUTS**2 // size
        assert largest["solving"] < OUTPUTS**2 // size
        assert largest["messages of a product"] == (size > 1)
        assert not largest["inputs of others kept"]
    for problem, found in problems.items():
        assert_those_of_one_process(found, expected[problem])


def modes_while_one_rank_holds_an_earlier_posterior(group: Any) -> list[float]:
    """What an earlier posterior keeps may be gone on one rank, where it was collected, and not on the other."""
    lin = linearise("more weights than outputs", SHARDS[2], group, dist.get_rank(group))
    held, found = [], []
    for prior in (1.0, 2.0):
        post = co.laplace(lin, co.GGN, prior, check_mode=False)
        found.append(float(post.linear_mode(rtol=1e-8).theta.norm()))
        if dist.get_rank(group):
            held.append(post)
        del post
        gc.collect()
    return found


def test_ranks_need_not_collect_posteriors_at_the_same_time() -> None:
    found = run_on_ranks(2, modes_while_one_rank_holds_an_earlier_posterior)
    assert found[0] == found[1]
