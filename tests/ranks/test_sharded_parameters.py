"""Models whose parameters are shared among processes (`fully_shard`): every answer is that of one process, or none.

Tests `shards.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_tensor

import curvops as co
from tests.ranks.processes import run_on_ranks
from tests.ranks.questions import data
from tests.ranks.test_faults import network, outcome


def refused_on_rank(group: Any) -> dict[str, str]:
    """What `linearize` says of models that it does not take."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(group),))
    x, y = data("labels")
    own = x[dist.get_rank(group) :: mesh.size()], y[dist.get_rank(group) :: mesh.size()]

    def said(model: Any, **given: Any) -> str:
        return outcome(lambda: co.linearize(model, own, "classification", **given))

    params = {name: distribute_tensor(tensor.detach(), mesh) for name, tensor in network().named_parameters()}
    function: Callable[..., Any] = lambda params, x: x @ params["0.weight"].mT  # noqa: E731
    inner = network()
    fully_shard(inner[2], mesh=mesh)
    return {
        "DTensors in a mapping": said((function, params)),
        "FSDP1": said(FullyShardedDataParallel(network(), device_id=torch.device("cpu")), process_group=group),
        "a part": said(nn.Sequential(inner, nn.Identity()), process_group=group),
        "without a group": said(fully_shard(network(), mesh=mesh)),
        "whole": said(fully_shard(network(), mesh=mesh), process_group=group),
    }


def test_what_is_not_known_is_refused_by_name() -> None:
    for rank, answers in run_on_ranks(2, refused_on_rank).items():
        assert isinstance(answers, dict), f"rank {rank}: {answers}"
        assert "is a DTensor" in answers["DTensors in a mapping"]
        assert "FullyShardedDataParallel" in answers["FSDP1"]
        assert "fully_shard" in answers["a part"]
        assert "fully_shard" in answers["without a group"]
        assert "fully_shard" in answers["whole"]
