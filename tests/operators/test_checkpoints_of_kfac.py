"""Builds of KFAC and EKFAC that were killed end with the bits of one that was not."""

import math
from functools import partial

import pytest
import torch
from torch import nn

import curvops as co
from tests.linalg.interrupted import Killed, equal, killed_after

DOUBLE = torch.float64


WORK = {"left": math.inf, "made": 0}
"""The forward passes over a batch before a run is ended, and those that a build made."""


class Ending(nn.Sequential):
    """A network that ends a run after so many passes."""

    def forward(self, x):
        WORK["left"], WORK["made"] = WORK["left"] - 1, WORK["made"] + 1
        if WORK["left"] < 0:
            raise Killed
        return super().forward(x)


def linearized(shift=0.0, bias=0.0, batches=4, points=20, **options):
    """Factors of positions and of points, and an exact block. A new linearisation each time, as in a new process."""
    torch.manual_seed(0)
    model = Ending(nn.Conv2d(2, 4, 2), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)).double()
    model[1].weight.data += bias
    x, y = torch.randn(points, 2, 3, 3, dtype=DOUBLE) + shift, torch.arange(points) % 3
    data, left = list(zip(x.chunk(batches), y.chunk(batches))), WORK["left"]
    WORK["left"] = math.inf
    lin = co.linearize(model, data, "classification", **{"memory_budget": 2**10} | options)
    _ = lin.plan
    WORK.update(left=left, made=0)
    return lin


def build(folder, kind=co.KFAC, seed=None, lin=None, **options):
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    found = kind(linearized() if lin is None else lin, generator=generator, checkpoint=folder, **options)
    details = [block.details for block in found.blocks if isinstance(block, co.linalg.Kronecker)]
    return [list(found.representation()), [vars(side) for sides in details for side in sides]]


RUNS = {
    "KFAC": {},
    "KFAC, reduced, biases apart": {"sharing": "reduce", "bias": "separate"},
    "EKFAC": {"kind": co.EKFAC},
    "EKFAC of draws": {"kind": co.EKFAC, "fisher": "mc", "mc_samples": 2, "seed": 3},
}


KNOWN = 6
"""The passes that know the problem again, and begin."""


@pytest.mark.parametrize("name", RUNS)
def test_a_build_that_was_killed_goes_on_to_the_same_bits(name, tmp_path, saved_at_each_step):
    options = RUNS[name]
    plain = build(None, **options)
    assert equal(build(tmp_path / "whole", **options), plain)
    work = WORK["made"]
    known = work - (8 if "EKFAC" in name else 4)  # to know the problem again, and to draw
    for killed in range(known + 1, work, 2):
        found = killed_after(killed, partial(build, tmp_path / str(killed), **options), WORK)
        assert equal(found, plain)
        assert WORK["made"] <= work - killed + known
    assert equal(build(tmp_path / "whole", **options), plain) and WORK["made"] <= known, "the result was there"


@pytest.mark.usefixtures("annotations_unchecked")
def test_a_batch_of_many_points_is_left_in_the_middle(tmp_path, saved_at_each_step):
    """The size of pieces is that of the first run, whatever memory there is now."""
    small = {"batches": 1, "points": 40_000, "memory_budget": 2**14, "engine": "layerwise"}
    plain = build(None, lin=linearized(**small))
    work = WORK["made"]
    WORK["left"] = KNOWN + 8
    with pytest.raises(Killed):
        build(tmp_path, lin=linearized(**small))
    WORK["left"] = math.inf
    assert equal(build(tmp_path, lin=linearized(**small | {"memory_budget": 2**28})), plain)
    assert WORK["made"] < work


def test_draws_without_a_seed_are_kept(tmp_path, saved_at_each_step, annotations_unchecked):
    first = killed_after(KNOWN + 1, lambda: build(tmp_path, co.EKFAC, fisher="mc"), WORK)
    assert equal(build(tmp_path, co.EKFAC, fisher="mc"), first) and not equal(build(None, co.EKFAC, fisher="mc"), first)


def test_another_build_is_refused_by_name(tmp_path, annotations_unchecked):
    found = co.KFAC(linearized(), checkpoint=tmp_path)
    assert type(found.of(linearized(shift=1.0))) is co.KFAC  # with the same options, and not in the same folder
    for what, call in {
        "the data": lambda: build(tmp_path, lin=linearized(shift=0.1)),
        "the network's tensors": lambda: build(tmp_path, lin=linearized(bias=0.1)),
        "the parameters": lambda: build(tmp_path, lin=linearized(parameters="4.*")),
        "the engine": lambda: build(tmp_path, lin=linearized(engine="autodiff")),
        "sharing": lambda: build(tmp_path, sharing="reduce"),
        "fisher": lambda: build(tmp_path, fisher="empirical"),
        "algorithm": lambda: build(tmp_path, co.EKFAC),
    }.items():
        with pytest.raises(ValueError, match=f"another problem. What differs: .*{what}"):
            call()
