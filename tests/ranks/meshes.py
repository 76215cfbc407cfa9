"""Vectors that lie whole in one process or in shards over a mesh, and tensors that are no such vectors."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import curvops as co
from tests.ranks.questions import DOUBLE, seeded


class Mesh:
    """Where vectors lie: whole in one process, or sharded over a mesh."""

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        self.mesh = mesh

    def place(self, whole: Tensor) -> Any:
        return whole if self.mesh is None else distribute_tensor(whole, self.mesh, [Shard(0)])

    def over(self, A: Any) -> Any:
        A = co.linalg.Dense(A, psd=True) if isinstance(A, Tensor) else A
        return A if self.mesh is None else A.sharded(self.mesh)

    def normal(self, rows: int, columns: int = 3) -> Any:
        """Columns of normal numbers; a single one is a vector."""
        whole = torch.randn(rows, columns, generator=seeded(5), dtype=DOUBLE)
        return self.place(whole[:, 0] if columns == 1 else whole)

    def formed(self, K: co.TangentKernel) -> Any:
        return co.linalg.Dense(K.to_dense(), psd=True) if self.mesh is None else K.formed(self.mesh)


def of_two_dimensions(mesh: DeviceMesh) -> DeviceMesh:
    return init_device_mesh("cpu", (mesh.size(), 1), mesh_dim_names=("rows", "copies"))


def wrong_blocks(whole: Tensor, mesh: DeviceMesh) -> dict[str, Any]:
    """What an operator with the rows of `whole` refuses to multiply, by words of the error."""
    cut = whole[: 1 + mesh.get_local_rank()]
    backwards = DeviceMesh("cpu", list(range(mesh.size()))[::-1])
    return {
        "placements": distribute_tensor(whole, mesh, [Replicate()]),
        "sharded by rows": distribute_tensor(whole, mesh, [Shard(1)]),
        "one dimension": distribute_tensor(whole, of_two_dimensions(mesh), [Shard(0), Replicate()]),
        "cannot multiply|shape": distribute_tensor(whole[1:], mesh, [Shard(0)]),
        "dtype|float32": distribute_tensor(whole.float(), mesh, [Shard(0)]),
        "holds .* rows|rows of a DTensor|shape|cannot multiply": DTensor.from_local(
            cut, mesh, [Shard(0)], run_check=False
        ),
        "ascending": distribute_tensor(whole, backwards, [Shard(0)]),
    }
