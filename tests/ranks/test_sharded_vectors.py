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
from curvops import linalg
from curvops.linalg import cg, lsmr, minres
from tests.linalg.matrices import symmetric
from tests.ranks.processes import run_on_ranks
from tests.ranks.questions import DOUBLE, SHARDS, linearise, seeded

N = 75
SIZES = (2, 3)
Question = tuple[str, Callable[[], Any]]


class Mesh:
    """Where vectors lie: whole in one process, or sharded over a mesh."""

    def __init__(self, mesh: Any = None) -> None:
        self.mesh = mesh

    def place(self, whole: Tensor) -> Any:
        return whole if self.mesh is None else distribute_tensor(whole, self.mesh, [Shard(0)])

    def over(self, A: Any) -> Any:
        A = linalg.Dense(A, psd=True) if isinstance(A, Tensor) else A
        return A if self.mesh is None else A.sharded(self.mesh)


def right_hand_sides(n: int, dtype: torch.dtype = DOUBLE) -> Tensor:
    return torch.randn(n, 5, generator=seeded(5), dtype=DOUBLE).to(dtype)


def matrices(lin: co.Linearization, few: bool = False) -> dict[str, Any]:
    """What stands for each kind of operator, all positive definite; or a few of them."""
    G, shift = co.GGN(lin), torch.linspace(0.5, 2, lin.num_parameters, dtype=DOUBLE)
    known = {
        "dense": symmetric(torch.linspace(1, 40, N, dtype=DOUBLE)),
        "GGN": G.add_diagonal(0.5),
        "GGN with a vector": G.add_diagonal(shift),
        "KFAC": co.KFAC(lin).add_diagonal(0.5),
        "sum": (0.5 * G + co.EmpiricalFisher(lin)).add_diagonal(0.5),
    }
    return {name: known[name] for name in ("dense", "GGN")} if few else known


def of_products(lin: co.Linearization, on: Mesh) -> Iterator[Question]:
    for name, A in matrices(lin).items():
        B = on.place(right_hand_sides(A.shape[0]))
        if name != "dense":
            yield f"{name}: product", lambda A=A, B=B: A @ B
    J = lin.jacobian()
    yield "J: product", lambda: J @ on.place(right_hand_sides(J.shape[1]))
    yield "J: transposed product", lambda: J.mT @ on.place(right_hand_sides(J.shape[0]))
    yield "GGN: product of a vector", lambda: co.GGN(lin) @ on.place(right_hand_sides(J.shape[1])[:, 0])


def of_solvers(lin: co.Linearization, on: Mesh) -> Iterator[Question]:
    for name, A in matrices(lin).items():
        B, start = on.place(right_hand_sides(A.shape[0])), on.place(0.1 * right_hand_sides(A.shape[0]))
        yield f"{name}: cg", lambda A=A, B=B: cg(A, B, rtol=1e-12).x
        yield f"{name}: cg from a start", lambda A=A, B=B, s=start: cg(A, B, x0=s, rtol=1e-12, block=False).x
        yield f"{name}: minres", lambda A=A, B=B: minres(A, B, rtol=1e-12).x
    few = on.place(right_hand_sides(N)[:, 0])
    yield "cg of one vector", lambda: cg(matrices(lin)["dense"], few, rtol=1e-12).x
    J = lin.jacobian()
    yield "lsmr", lambda: lsmr(J, J @ on.place(right_hand_sides(J.shape[1])), damp=0.1, rtol=1e-13).x


def of_functions(lin: co.Linearization, on: Mesh) -> Iterator[Question]:
    for name, A in matrices(lin, few=True).items():
        B = on.place(right_hand_sides(A.shape[0]))
        yield f"{name}: solve", lambda A=A, B=B: linalg.solve(A, B, rtol=1e-12)
        yield f"{name}: inverse root", lambda A=A, B=B: linalg.inverse_sqrt(A, B, rtol=1e-12).value
        yield f"{name}: root by contour", lambda A=A, B=B: linalg.sqrt(A, B, rtol=1e-12, method="contour").value
        yield f"{name}: logarithm", lambda A=A, B=B: linalg.apply_function(A, torch.log, B, rtol=1e-12).value


def of_spectra(lin: co.Linearization, on: Mesh) -> Iterator[Question]:
    for name, A in matrices(lin, few=True).items():
        A = on.over(A)
        yield f"{name}: eigsh", lambda A=A: linalg.eigsh(A, 3, rtol=1e-12, generator=seeded()).values
        yield f"{name}: its space", lambda A=A: projector(linalg.eigsh(A, 3, rtol=1e-12, generator=seeded()).vectors)
        yield f"{name}: smallest", lambda A=A: linalg.eigsh(A, 2, "smallest", rtol=1e-12, generator=seeded()).values
        yield f"{name}: lanczos", lambda A=A: linalg.lanczos(A, 8, generator=seeded()).T
        yield f"{name}: its basis", lambda A=A: linalg.lanczos(A, 8, generator=seeded()).Q
    J = lin.jacobian()
    yield "svds", lambda: linalg.svds(on.over(J), 3, rtol=1e-12, generator=seeded()).values
    yield "its space", lambda: projector(linalg.svds(on.over(J), 3, rtol=1e-12, generator=seeded()).V)


def of_estimators(lin: co.Linearization, on: Mesh) -> Iterator[Question]:
    for name, A in matrices(lin, few=True).items():
        A = on.over(A)
        for what in ("trace", "diagonal", "frobenius_norm"):
            ask = getattr(linalg, what)
            yield f"{name}: {what}", lambda A=A, ask=ask: ask(A, max_matvecs=24, generator=seeded()).value
            yield f"{name}: {what}, error", lambda A=A, ask=ask: ask(A, max_matvecs=24, generator=seeded()).stderr
        for method in ("xnystrace", "hutch++", "hutchinson", "exact"):
            yield (
                f"{name}: {method}",
                lambda A=A, m=method: linalg.trace(A, method=m, max_matvecs=24, generator=seeded()).value,
            )
        for method in ("xnysdiag", "bekas", "exact"):
            yield (
                f"{name}: {method}",
                lambda A=A, m=method: linalg.diagonal(A, method=m, max_matvecs=24, generator=seeded()).value,
            )
        yield f"{name}: logdet", lambda A=A: linalg.logdet(A, shift=0.1, max_matvecs=40, generator=seeded()).value
        yield (
            f"{name}: quadrature",
            lambda A=A: linalg.spectral_quadrature(A, shift=0.1, generator=seeded()).logdet(1.0).value,
        )
        yield f"{name}: density", lambda A=A: A.spectral_density(probes=3, generator=seeded()).density
        yield f"{name}: its logdet", lambda A=A: A.logdet()


def of_sketches(lin: co.Linearization, on: Mesh) -> Iterator[Question]:
    for name, plain in matrices(lin, few=True).items():
        A, B = on.over(plain), on.place(right_hand_sides(plain.shape[0]))
        yield f"{name}: nystrom", lambda A=A: linalg.nystrom(A, 12, generator=seeded()).eigenvalues
        yield f"{name}: its product", lambda A=A, B=B: linalg.nystrom(A, 12, generator=seeded()) @ B
        P = linalg.nystrom(A, 12, generator=seeded()).preconditioner(0.5)
        yield f"{name}: its inverse", lambda P=P, B=B: P @ B
        yield f"{name}: its root", lambda P=P, B=B: P.sqrt(B)
        yield f"{name}: cg with it", lambda A=A, P=P, B=B: cg(A, B, preconditioner=P, rtol=1e-12).x
        for method in ("nystrom", "lanczos"):
            low = co.low_rank(A, 12, method=method, generator=seeded())
            yield f"{name}: low rank, {method}", lambda low=low: low.to_dense()
            yield f"{name}: its error", lambda low=low: low.error.value
        yield f"{name}: low rank: diagonal", lambda low=low: low.diagonal()
        for shift in (0.5, 1e-12, torch.linspace(0.5, 2, plain.shape[0], dtype=DOUBLE)):
            H = low.add_diagonal(shift)
            yield f"{name}: low rank + d: product", lambda H=H, B=B: H @ B
            yield f"{name}: low rank + d: solution", lambda H=H, B=B: H.solve(B)
            yield f"{name}: low rank + d: logdet", lambda H=H: H.logdet()
            yield f"{name}: low rank + d: variances", lambda H=H: H.inverse().diagonal()
        yield f"{name}: sum with low rank", lambda A=A, low=low, B=B: cg(A + low, B, rtol=1e-12).x


def projector(V: Any) -> Tensor:
    V = V.full_tensor() if isinstance(V, DTensor) else V
    return V @ V.mT


def answers(lin: co.Linearization, on: Mesh) -> dict[str, np.ndarray]:
    found = {}
    for shelf in (of_products, of_solvers, of_functions, of_spectra, of_estimators, of_sketches):
        for name, ask in shelf(lin, on):
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
    return answers(lin, Mesh(mesh)) | refusals(mesh, lin)


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
    return answers(linearise("labels"), Mesh())


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
