"""Builds of KFAC and EKFAC that were killed end with the bits of one that was not."""

import pytest
import torch
from torch import nn

import curvops as co
from curvops.network.walks import batch_rows
from tests.linalg.interrupted import Killed, equal

DOUBLE = torch.float64


def linearized(shift=0.0, bias=0.0, batches=4, **options):
    """Factors of positions and of points, and an exact block. A new linearisation each time, as in a new process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 2), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)).double()
    model[1].weight.data += bias
    x, y = torch.randn(20, 2, 3, 3, dtype=DOUBLE) + shift, torch.arange(20) % 3
    data = list(zip(x.chunk(batches), y.chunk(batches)))
    return co.linearize(model, data, "classification", **options)


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


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(batch_rows, "LEAST_CHUNK", 2**10)


@pytest.mark.parametrize("name", RUNS)
def test_a_build_that_was_killed_goes_on_to_the_same_bits(name, after, tmp_path, saved_at_each_step):
    options = RUNS[name]
    plain = build(None, **options)
    pieces = after["made"]
    assert pieces == (8 if "EKFAC" in name else 4)
    assert equal(build(tmp_path / "whole", **options), plain)
    for killed in range(1, pieces, 2):
        after["left"] = killed
        with pytest.raises(Killed):
            build(tmp_path / str(killed), **options)
        after["left"], after["made"] = float("inf"), 0
        torch.manual_seed(killed)
        assert equal(build(tmp_path / str(killed), **options), plain)
        assert after["made"] == pieces - killed
    after["left"] = 0
    assert equal(build(tmp_path / "1", **options), plain), "the result was there"


@pytest.mark.usefixtures("small_pieces", "annotations_unchecked")
def test_a_batch_of_many_points_is_left_in_the_middle(after, tmp_path, saved_at_each_step):
    """The size of pieces is that of the first run, whatever memory there is now."""
    small = {"batches": 1, "memory_budget": 2**14, "engine": "layerwise"}
    plain = build(None, lin=linearized(**small))
    pieces = after["made"]
    assert pieces > 3
    after["left"] = 2
    with pytest.raises(Killed):
        build(tmp_path, lin=linearized(**small))
    after["left"], after["made"] = float("inf"), 0
    assert equal(build(tmp_path, lin=linearized(**small | {"memory_budget": 2**28})), plain)
    assert after["made"] == pieces - 2


def test_draws_without_a_seed_are_kept(after, tmp_path, saved_at_each_step, annotations_unchecked):
    after["left"] = 5
    with pytest.raises(Killed):
        build(tmp_path, co.EKFAC, fisher="mc")
    after["left"] = float("inf")
    first = build(tmp_path, co.EKFAC, fisher="mc")
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
