"""A list of parameters starts each chain at its own."""

from __future__ import annotations

from typing import Any

import torch

import curvops as co


def _well(params: dict[str, torch.Tensor], batch: object) -> torch.Tensor:
    return -params["x"].square().sum()


def _sampler(k: int) -> Any:
    return co.sampling.chains(co.sampling.sgld(_well, 1e-3, temperature=0.0, data_size=1), k)


def test_each_chain_begins_where_it_was_told_to() -> None:
    starts = [{"x": torch.full((2,), float(i))} for i in range(3)]
    state = _sampler(3).init(starts)
    assert torch.equal(state.params["x"], torch.stack([each["x"] for each in starts]))
    state.theta.zero_()
    assert starts[1]["x"].tolist() == [1.0, 1.0]
