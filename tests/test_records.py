"""Dataclasses come back from their records, through a file, as they were.

Tests `storage.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import torch
from jaxtyping import Float
from torch import Tensor

from curvops import storage
from curvops.storage import from_record, record_of, restore, state_of


class Colour(Enum):
    RED = "a long text"


@dataclass
class Inner:
    dtype: torch.dtype
    rows: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Outer:
    x: Float[Tensor, " n"]
    colours: tuple[Colour, ...]
    inner: Inner
    missing: Inner | None = None
    given: Inner | None = None
    parts: tuple[Inner, ...] = ()
    pair: tuple[int, float] = (1, 0.5)
    names: Mapping[str, str] = field(default_factory=dict)


def test_a_dataclass_comes_back_from_a_file(tmp_path):
    inner = Inner(torch.float64, [torch.ones(2), torch.zeros(1)])
    value = Outer(torch.arange(3.0), (Colour.RED,) * 2, inner, None, inner, (inner, inner), (2, 1e300), {"a": "b"})
    storage.save(tmp_path, "test", 1, record_of(value))
    found = from_record(Outer, storage.load(tmp_path, "test", 1)[1])
    assert repr(found) == repr(value)


def test_attributes_come_back_by_their_annotations():
    class Run:
        colour: Colour | None = None
        past: list[Inner]

        def __init__(self):
            self.past, self.count = [Inner(torch.float32)], 3

    run, other = Run(), Run()
    run.colour, run.count, names = Colour.RED, 4, ("colour", "past", "count")
    restore(other, names, record_of(state_of(run, names)))
    assert (other.colour, other.count, other.past) == (Colour.RED, 4, [Inner(torch.float32)])
