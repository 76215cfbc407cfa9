"""Vectors whose rows are shared among processes: every answer is that of whole vectors in one process.

Tests `sharded.py`, `on_shards.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import curvops as co
from curvops.linalg import cg, lsmr, minres
from tests.linalg.matrices import symmetric
from tests.ranks.processes import run_on_ranks
from tests.ranks.questions import DOUBLE, SHARDS, linearise, seeded

N = 301
SIZES = (2, 3)
Question = tuple[str, Callable[[], Any]]


def right_hand_sides(n: int, dtype: torch.dtype = DOUBLE) -> Tensor:
    return torch.randn(n, 5, generator=seeded(5), dtype=DOUBLE).to(dtype)


def matrices(lin: co.Linearization) -> dict[str, Any]:
    """What stands for each kind of operator, all positive definite."""
    G, shift = co.GGN(lin), torch.linspace(0.5, 2, lin.num_parameters, dtype=DOUBLE)
    return {
        "dense": symmetric(torch.linspace(1, 40, N, dtype=DOUBLE)),
        "GGN": G.add_diagonal(0.5),
        "GGN with a vector": G.add_diagonal(shift),
        "KFAC": co.KFAC(lin).add_diagonal(0.5),
        "sum": (0.5 * G + co.EmpiricalFisher(lin)).add_diagonal(0.5),
    }


def of_products(lin: co.Linearization, place: Callable[[Tensor], Any]) -> Iterator[Question]:
    for name, A in matrices(lin).items():
        B = place(right_hand_sides(A.shape[0]))
        if name != "dense":
            yield f"{name}: product", lambda A=A, B=B: A @ B
    J = lin.jacobian()
    yield "J: product", lambda: J @ place(right_hand_sides(J.shape[1]))
    yield "J: transposed product", lambda: J.mT @ place(right_hand_sides(J.shape[0]))
    yield "GGN: product of a vector", lambda: co.GGN(lin) @ place(right_hand_sides(J.shape[1])[:, 0])


def of_solvers(lin: co.Linearization, place: Callable[[Tensor], Any]) -> Iterator[Question]:
    for name, A in matrices(lin).items():
        B, start = place(right_hand_sides(A.shape[0])), place(0.1 * right_hand_sides(A.shape[0]))
        yield f"{name}: cg", lambda A=A, B=B: cg(A, B, rtol=1e-12).x
        yield f"{name}: cg from a start", lambda A=A, B=B, s=start: cg(A, B, x0=s, rtol=1e-12, block=False).x
        yield f"{name}: minres", lambda A=A, B=B: minres(A, B, rtol=1e-12).x
    few = place(right_hand_sides(N)[:, 0])
    yield "cg of one vector", lambda: cg(matrices(lin)["dense"], few, rtol=1e-12).x
    J = lin.jacobian()
    yield "lsmr", lambda: lsmr(J, J @ place(right_hand_sides(J.shape[1])), damp=0.1, rtol=1e-13).x


def answers(lin: co.Linearization, place: Callable[[Tensor], Any]) -> dict[str, np.ndarray]:
    found = {}
    for shelf in (of_products, of_solvers):
        for name, ask in shelf(lin, place):
            try:
                value = ask()
            except Exception as error:
                raise RuntimeError(f"{name}: {error}") from error
            if isinstance(value, DTensor):
                assert value.placements == (Shard(0),)
                value = value.full_tensor()
            found[name] = torch.as_tensor(value).detach().numpy().copy()
    return found


def answers_of_rank(group: Any, size: int) -> dict[str, np.ndarray]:
    mesh = init_device_mesh("cpu", (size,))
    lin = linearise("labels", SHARDS[size], group, dist.get_rank(group))
    return answers(lin, lambda whole: distribute_tensor(whole, mesh, [Shard(0)])) | refusals(mesh, lin)


def refusals(mesh: Any, lin: co.Linearization) -> dict[str, np.ndarray]:
    """Refuse what is no block of this operator, on all ranks and by name."""
    G, whole = co.GGN(lin), right_hand_sides(lin.num_parameters)
    other = init_device_mesh("cpu", (mesh.size(), 1), mesh_dim_names=("rows", "copies"))
    block = distribute_tensor(whole, mesh, [Shard(0)])
    cut = DTensor.from_local(whole[: 3 + mesh.get_local_rank()], mesh, [Shard(0)], run_check=False)
    wrong = {
        "placements": distribute_tensor(whole, mesh, [Replicate()]),
        "sharded by rows": distribute_tensor(whole, mesh, [Shard(1)]),
        "one dimension": distribute_tensor(whole, other, [Shard(0), Replicate()]),
        "shape": distribute_tensor(whole[1:], mesh, [Shard(0)]),
        "dtype|float32": distribute_tensor(whole.float(), mesh, [Shard(0)]),
        "rows of a DTensor|shape": cut,
    }
    for words, tensor in wrong.items():
        for ask in (lambda t: G @ t, lambda t: cg(G, t), lambda t: cg(G, block, x0=t)):
            with pytest.raises((ValueError, TypeError), match=words):
                ask(tensor)
    with pytest.raises(TypeError, match="gradient"):
        _ = G @ distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
    with pytest.raises(ValueError, match="checkpoint"):
        cg(G, block, checkpoint="nowhere")
    return {}


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    return answers(linearise("labels"), lambda whole: whole)


@pytest.mark.parametrize("size", SIZES)
def test_answers_are_those_of_whole_vectors(expected, size) -> None:
    found = run_on_ranks(size, answers_of_rank, size)
    wrong = []
    for rank, own in found.items():
        assert not isinstance(own, str), f"rank {rank}: {own}"
        assert own.keys() == expected.keys()
        for name, value in own.items():
            assert np.array_equal(value, found[0][name]), (rank, name)
            error = np.abs(value - expected[name]).max() / np.abs(expected[name]).max()
            if not error < 1e-10:
                wrong.append(f"rank {rank} of {size}: {name} is off by {error:.2g}")
    assert not wrong, "\n".join(wrong)
