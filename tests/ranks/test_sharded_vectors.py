"""Vectors whose rows are shared among processes: every answer is that of whole vectors in one process.

Tests `sharded_vectors.py`, `on_shards.py`, `algorithm.py`.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import curvops as co
from curvops import linalg
from curvops.errors import RanksDifferError
from curvops.linalg import cg, lsmr, minres
from curvops.linalg.core import vectors
from curvops.ranks.process_group import Ranks
from curvops.ranks.sharded_vectors import unwrapped
from tests.linalg.matrices import symmetric
from tests.memory import peak_of
from tests.ranks.meshes import Mesh, of_two_dimensions, wrong_blocks
from tests.ranks.processes import LONGEST, assert_those_of_one_process, run_on_ranks
from tests.ranks.questions import DOUBLE, SHARDS, answered, linearise, seeded

N = 40
Question = tuple[str, Callable[[], Any]]


def matrices(lin: co.operators.Linearization) -> dict[str, Any]:
    """What stands for each kind of operator, all positive definite."""
    G, shift = co.GGN(lin), torch.linspace(0.5, 2, lin.num_parameters, dtype=DOUBLE)
    return {
        "dense": symmetric(torch.linspace(1, 4, N, dtype=DOUBLE)),
        "GGN": G.add_diagonal(0.5),
        "GGN with a vector": G.add_diagonal(shift),
        "KFAC": co.KFAC(lin).add_diagonal(0.5),
        "sum": (0.5 * G + co.EmpiricalFisher(lin)).add_diagonal(0.5),
    }


def of_products(lin: co.operators.Linearization, on: Mesh) -> Iterator[Question]:
    for name, A in matrices(lin).items():
        B = on.normal(A.shape[0], 5)
        if name != "dense":
            yield f"{name}: product", lambda A=A, B=B: A @ B
    J = lin.jacobian()
    yield "Hessian: product", lambda: co.Hessian(lin) @ on.normal(J.shape[1], 5)
    yield "J: product", lambda: J @ on.normal(J.shape[1], 5)
    yield "J: transposed product", lambda: J.mT @ on.normal(J.shape[0], 5)
    yield "GGN: product of a vector", lambda: co.GGN(lin) @ on.normal(J.shape[1], 1)


def of_solvers(lin: co.operators.Linearization, on: Mesh) -> Iterator[Question]:
    for name in ("dense", "GGN"):  # solvers multiply, whatever the operator
        A = matrices(lin)["dense"] if name == "dense" else definite(lin)
        B, start = on.normal(A.shape[0], 5), 0.1 * on.normal(A.shape[0], 5)
        yield f"{name}: cg", lambda A=A, B=B: cg(A, B, rtol=1e-12).x
        yield f"{name}: cg from a start", lambda A=A, B=B, s=start: cg(A, B, x0=s, rtol=1e-12, block=False).x
        yield f"{name}: minres", lambda A=A, B=B: minres(A, B, rtol=1e-12).x
    few = on.normal(N, 1)
    yield "cg of one vector", lambda: cg(matrices(lin)["dense"], few, rtol=1e-12).x
    J = lin.jacobian()
    yield "lsmr", lambda: lsmr(J, J @ on.normal(J.shape[1], 5), damp=3.0, rtol=1e-13).x


def definite(lin: co.operators.Linearization) -> Any:
    """The GGN, whose eigenvalues reach 11, and a diagonal with which iterations are few."""
    return co.GGN(lin).add_diagonal(5.0)


def of_functions(lin: co.operators.Linearization, on: Mesh) -> Iterator[Question]:
    A, B = definite(lin), on.normal(lin.num_parameters, 5)
    yield "solve", lambda: linalg.solve(A, B, rtol=1e-12)
    yield "inverse root", lambda: linalg.inverse_sqrt(A, B, rtol=1e-12).value
    yield "logarithm", lambda: linalg.apply_function(A, torch.log, B, rtol=1e-12).value


def of_spectra(lin: co.operators.Linearization, on: Mesh) -> Iterator[Question]:
    A, J = on.over(definite(lin)), lin.jacobian()
    pairs = cache(lambda: linalg.eigsh(A, 3, rtol=1e-12, generator=seeded()))
    triplets = cache(lambda: linalg.svds(on.over(J), 3, rtol=1e-12, generator=seeded()))
    process = cache(lambda: linalg.lanczos(A, 8, generator=seeded()))
    yield "eigsh", lambda: pairs().values
    yield "eigsh: space", lambda: projector(pairs().vectors)
    # The error of an eigenvalue is of the order of its residual's square.
    yield "smallest", lambda: linalg.eigsh(A, 2, "SA", rtol=1e-8, generator=seeded()).values
    yield "lanczos", lambda: process().T
    yield "lanczos: basis", lambda: process().Q
    yield "svds", lambda: triplets().values
    yield "svds: space", lambda: projector(triplets().V)


def of_estimators(lin: co.operators.Linearization, on: Mesh) -> Iterator[Question]:
    A = on.over(definite(lin))
    methods = {
        "trace": ("auto", "xnystrace", "hutch++", "hutchinson", "exact"),
        "diagonal": ("auto", "xnysdiag", "bekas", "exact"),
        "frobenius_norm": ("auto",),
    }
    for what, names in methods.items():
        for method in names:
            given = {"max_matvecs": 24} | ({} if method == "auto" else {"method": method})
            yield f"{what}: {method}", lambda w=what, g=given: getattr(linalg, w)(A, generator=seeded(), **g).value
        yield f"{what}: error", lambda w=what: getattr(linalg, w)(A, max_matvecs=24, generator=seeded()).stderr
    yield "logdet", lambda: linalg.logdet(A, shift=0.1, max_matvecs=40, generator=seeded()).value
    yield "quadrature", lambda: linalg.spectral_quadrature(A, shift=0.1, generator=seeded()).logdet(1.0).value
    yield "density", lambda: A.spectral_density(probes=3, generator=seeded()).density
    yield "its logdet", lambda: A.logdet()


def of_sketches(lin: co.operators.Linearization, on: Mesh) -> Iterator[Question]:
    D = lin.num_parameters
    A, B = on.over(definite(lin)), on.normal(D, 5)
    sketch = linalg.nystrom(A, 12, generator=seeded())
    P, low = sketch.preconditioner(0.5), co.low_rank(A, 12, generator=seeded())
    yield "nystrom", lambda: sketch.eigenvalues
    yield "its product", lambda: sketch @ B
    yield "its inverse", lambda: P @ B
    yield "its root", lambda: P.sqrt(B)
    yield "cg with it", lambda: cg(A, B, preconditioner=P, rtol=1e-12).x
    yield "low rank", lambda: low.to_dense()
    yield "its error", lambda: low.error.value
    yield "its diagonal", lambda: low.diagonal()
    for name, shift in {"d": 0.5, "little": 1e-12, "a vector": torch.linspace(0.5, 2, D, dtype=DOUBLE)}.items():
        H = low.add_diagonal(shift)
        yield f"low rank + {name}: product", lambda H=H: H @ B
        yield f"low rank + {name}: solution", lambda H=H: H.solve(B)
        yield f"low rank + {name}: logdet", lambda H=H: H.logdet()
        yield f"low rank + {name}: variances", lambda H=H: H.inverse().diagonal()
    yield "sum with low rank", lambda: cg(A + low, B, rtol=1e-12).x


def projector(V: Any) -> Tensor:
    V = V.full_tensor() if isinstance(V, DTensor) else V
    return V @ V.mT


SHELVES = (of_products, of_solvers, of_functions, of_spectra, of_estimators, of_sketches)
OF_THREE_RANKS = (of_products, of_spectra, of_sketches)
"""What is asked of three ranks, one without data: what depends on where rows lie. Two ranks are asked for all."""


def answers(lin: co.operators.Linearization, on: Mesh, shelves: Any = SHELVES) -> dict[str, np.ndarray]:
    return answered(question for shelf in shelves for question in shelf(lin, on))


def answers_of_rank(group: Any, size: int) -> dict[str, np.ndarray]:
    mesh = init_device_mesh("cpu", (size,))
    lin = linearise("labels", SHARDS[size], group, dist.get_rank(group))
    large = linearise("more weights than outputs", SHARDS[size], group, dist.get_rank(group))
    small_problems(mesh)
    costs(mesh, lin)
    refusals(mesh, lin)
    found = answers(lin, Mesh(mesh), SHELVES if size == 2 else OF_THREE_RANKS)
    if size == 2:
        found |= answers(large, Mesh(mesh), (solved_at_large,))
    return found


def refusals(mesh: Any, lin: co.operators.Linearization) -> None:
    """Refuse what is no block of this operator, on all ranks and by name."""
    G, whole = co.GGN(lin), Mesh().normal(lin.num_parameters, 5)
    block = distribute_tensor(whole, mesh, [Shard(0)])
    for words, tensor in wrong_blocks(whole, mesh).items():
        asked = [lambda t: G @ t, lambda t: cg(G, t), lambda t: cg(G, block, x0=t), lambda t: G.sharded(mesh) @ t]
        for ask in asked:
            with pytest.raises((ValueError, TypeError), match=words):
                ask(tensor)
    with pytest.raises(TypeError, match="gradient"):
        _ = G @ distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
    with pytest.raises(ValueError, match="checkpoint"):
        cg(G, block, checkpoint="nowhere")
    with pytest.raises(ValueError, match="checkpoint"):
        linalg.nystrom(G.sharded(mesh), 3, checkpoint="nowhere")
    with pytest.raises(ValueError, match="one dimension"):
        G.sharded(of_two_dimensions(mesh))
    with pytest.raises(ValueError, match="cannot be drawn from"):
        linalg.draw(co.low_rank(G.sharded(mesh), 4, generator=seeded()), 2)
    with pytest.raises(RanksDifferError, match="from generator"):
        linalg.nystrom(G.sharded(mesh), 3, generator=seeded(mesh.get_local_rank()))


def costs(mesh: Any, lin: co.operators.Linearization) -> None:
    """Count messages and bytes: a gather and a scatter of a product, one message of a Gram matrix."""
    K, D, size = 4, lin.num_parameters, mesh.size()
    block = unwrapped(Mesh(mesh).normal(D, K))
    ranks, most = block.rows.ranks, -(-D // size)

    def spent(work: Callable[[], Any], *groups: Ranks) -> list[int]:
        before = [(each.messages, each.bytes_sent) for each in groups]
        work()
        return [
            now - then for each, old in zip(groups, before) for now, then in zip((each.messages, each.bytes_sent), old)
        ]

    data = lin.passes.shard.ranks
    for A, scattered in ((co.GGN(lin), D), (co.KFAC(lin), 0)):
        expected = [1 + bool(scattered), 8 * K * (most + scattered), 0, 0]
        assert spent(lambda A=A: A._matmul(block), ranks, data) == expected
    assert spent(lambda: vectors.gram(block, block), ranks) == [1, 8 * K * K]


def small_problems(mesh: Any) -> None:
    """Fewer rows than ranks, no columns, single precision, and data that every rank holds."""
    size = mesh.size()
    for n in {1, 2, size}:
        A = torch.diag(torch.arange(1.0, n + 1, dtype=DOUBLE))
        b = Mesh().normal(n, 5)
        found = cg(A, distribute_tensor(b, mesh, [Shard(0)]), rtol=1e-13).x.full_tensor()
        torch.testing.assert_close(found, b / A.diagonal()[:, None], rtol=1e-12, atol=0)
        operator = linalg.Dense(A, psd=True).sharded(mesh)
        diagonal = linalg.diagonal(operator, generator=seeded()).value
        torch.testing.assert_close(diagonal, A.diagonal(), rtol=1e-12, atol=0)
        pairs = linalg.eigsh(operator, 1, generator=seeded())
        torch.testing.assert_close(pairs.values, torch.tensor([float(n)], dtype=DOUBLE), rtol=1e-12, atol=0)
    lin = linearise("labels")
    G, V = co.GGN(lin), Mesh().normal(lin.num_parameters, 5)
    none, shape = distribute_tensor(V, mesh, [Shard(0)]).to_local()[:, :0], torch.Size((len(V), 0))
    nothing = DTensor.from_local(none, mesh, [Shard(0)], run_check=False, shape=shape, stride=(1, len(V)))
    assert (G @ nothing).shape == (lin.num_parameters, 0)
    torch.testing.assert_close(
        (G @ distribute_tensor(V, mesh, [Shard(0)])).full_tensor(), G @ V, rtol=1e-12, atol=1e-14
    )
    low = co.low_rank(G.to(torch.float32).sharded(mesh), 8, generator=seeded())
    assert low.dtype == torch.float32
    expected = co.low_rank(G.to(torch.float32), 8, generator=seeded())
    torch.testing.assert_close(low.values, expected.values, rtol=1e-4, atol=0)
    single = distribute_tensor(V.float(), mesh, [Shard(0)])
    found = cg(G.to(torch.float32).add_diagonal(0.5), single).x.full_tensor()
    torch.testing.assert_close(found, cg(G.add_diagonal(0.5), V).x.float(), rtol=0, atol=1e-4)


def solved_at_large(lin: co.operators.Linearization, on: Mesh) -> Iterator[Question]:
    """Ask of a problem that is too large for the dense matrix, so that it is sketched and iterated."""
    for prior in (0.05, torch.linspace(0.05, 0.2, lin.num_parameters, dtype=DOUBLE)):
        P = co.GGN(lin).add_diagonal(prior)
        B = on.normal(lin.num_parameters, 5)
        yield f"large: solve {type(prior)}", lambda P=P, B=B: linalg.solve(P, B, rtol=1e-12)
        yield f"large: product with the inverse {type(prior)}", lambda P=P, B=B: P.inverse(1e-12) @ B
        yield f"large: logdet {type(prior)}", lambda P=P: linalg.logdet(on.over(P), generator=seeded()).value


ROWS = 150_000


def peak_of_sketch(mesh: Any = None) -> int:
    """The most bytes of a process while a sketch of 40 columns is made and solved with."""
    A = Whole(torch.linspace(1, 0, ROWS, dtype=DOUBLE).square())
    B = Mesh(mesh).place(torch.ones(ROWS, 1, dtype=DOUBLE))

    def work() -> None:
        low = co.low_rank(A if mesh is None else A.sharded(mesh), 40, generator=seeded())
        low.add_diagonal(0.1).solve(B)

    return peak_of(work)[0]


class Whole(linalg.Operator):
    """A diagonal matrix that takes whole vectors, as a network does."""

    psd = True

    def _size(self) -> torch.Size:
        return torch.Size((len(self._args[0]),) * 2)

    def _product(self, block: Tensor) -> Tensor:
        return self._args[0].unsqueeze(1) * block


def peaks_of_rank(group: Any, size: int, most: float) -> list[int]:
    """The peaks of runs until one stayed below this on each rank, or of six.

    The buffers of messages may be freed some panels late, by chance.
    """
    mesh, peaks, above = init_device_mesh("cpu", (size,)), [], torch.ones(1)
    while above and len(peaks) < 6:
        peaks.append(peak_of_sketch(mesh))
        above.fill_(min(peaks) >= most)
        dist.all_reduce(above, group=group)
    return peaks


def test_the_memory_of_a_rank_falls_with_their_number() -> None:
    most = 0.65 * peak_of_sketch()  # half, panels of six columns, and temporaries
    for rank, peaks in run_on_ranks(2, peaks_of_rank, 2, most).items():
        assert min(peaks) < most, (rank, peaks, most)


def whole() -> dict[str, np.ndarray]:
    """The answers of one process."""
    small, large = linearise("labels"), linearise("more weights than outputs")
    return answers(small, Mesh()) | answers(large, Mesh(), (solved_at_large,))


@pytest.mark.parametrize("size", LONGEST)
def test_answers_are_those_of_whole_vectors(expected, size) -> None:
    assert_those_of_one_process(run_on_ranks(size, answers_of_rank, size), expected, in_part=size != 2)
