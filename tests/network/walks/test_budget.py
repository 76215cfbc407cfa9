"""One memory budget for engines and vectors: what each may take, and who gives way.

Tests `budget.py`.
"""

import copy
import gc
import os
from pathlib import Path

import pytest
import torch
from torch import nn

import curvops as co
from curvops.ambient import SMALL_BYTES

MIB = 2**20


class Cache:
    """Keeps and wants as many bytes as it is told."""

    def __init__(self, kept: int, wanted: int) -> None:
        self.kept_bytes, self.wanted_bytes = kept, wanted

    def shrink(self, most: int) -> None:
        self.kept_bytes = min(self.kept_bytes, most)


def network(**options):
    data = torch.ones(2, 1), torch.ones(2, 1)
    return co.linearize(nn.Linear(1, 1), data, co.likelihoods.Gaussian(1.0), **options)


def fresh(nbytes):
    """A budget of so many bytes, without the engines of the linearisation that it was made for."""
    return copy.copy(network(memory_budget=nbytes).memory)


def test_vectors_have_what_engines_do_not_want_and_half_at_least():
    memory = fresh(100 * MIB)
    assert memory.room() == memory.for_engines == 100 * MIB
    small, large = Cache(0, 30 * MIB), Cache(0, 500 * MIB)
    memory.register(small)
    assert memory.room() == 70 * MIB
    memory.register(large)
    assert memory.room() == 50 * MIB
    del large
    gc.collect()
    assert memory.room() == 70 * MIB


def test_engines_give_way_to_vectors_that_are_held():
    memory, cache = fresh(100 * MIB), Cache(80 * MIB, 80 * MIB)
    memory.register(cache)
    with memory.holding(40 * MIB):
        assert cache.kept_bytes == 60 * MIB and memory.for_engines == 0 and memory.room() == 10 * MIB
    assert memory.for_engines == 40 * MIB


def test_what_is_kept_counts_as_long_as_its_owner_lives():
    memory, owner = fresh(100 * MIB), Cache(0, 0)
    memory.keep(owner, 60 * MIB)
    assert memory.room() == 40 * MIB
    del owner
    gc.collect()
    assert memory.room() == 100 * MIB


def test_a_cache_may_come_while_bytes_are_counted():
    """As from another thread, which predicts under the same posterior."""
    memory, coming = fresh(100 * MIB), Cache(0, 0)

    class Beside(Cache):
        wanted_bytes = property(lambda _: memory.register(coming) or 0, lambda _, wanted: None)

    memory.register(beside := Beside(0, 0))
    assert memory.room() == 100 * MIB and beside.kept_bytes == 0


def test_a_small_budget_leaves_room_for_small_vectors():
    assert fresh(0).room() == SMALL_BYTES and fresh(0).for_engines == 0


GROUP = "/sys/fs/cgroup/memory."
AVAILABLE = {"/proc/meminfo": "MemTotal:  900 kB\nMemAvailable:   400 kB\nSwapFree:  7 kB\n"}
PHYSICAL = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
MACHINES = {
    "no group": (AVAILABLE, 400 * 1024 // 4),
    "a group without a limit": (AVAILABLE | {GROUP + "max": "max\n", GROUP + "current": "5\n"}, 400 * 1024 // 4),
    "a wide group": (AVAILABLE | {GROUP + "max": "900000\n", GROUP + "current": "1000\n"}, 400 * 1024 // 4),
    "a narrow group": (AVAILABLE | {GROUP + "max": "300000\n", GROUP + "current": "100000\n"}, 200_000 // 4),
    "no kernel that tells": ({}, PHYSICAL // 2 // 4),
    "a kernel that does not say what is available": ({"/proc/meminfo": "MemTotal:  900 kB\n"}, PHYSICAL // 2 // 4),
}


@pytest.mark.parametrize("machine", MACHINES)
def test_the_default_is_a_quarter_of_what_machine_and_control_group_leave(machine, tmp_path, monkeypatch):
    files, expected = MACHINES[machine]
    for path, text in files.items():
        (tmp_path / path.replace("/", "-")).write_text(text)

    def read(path: Path) -> str:
        return (tmp_path / str(path).replace("/", "-")).read_bytes().decode()

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", read)
        found = network().memory_budget
    assert found == expected


def wide(budget):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(6, 500, generator=generator).double(), torch.arange(6) % 3
    model = nn.Sequential(nn.Linear(500, 3)).double()
    return co.linearize(model, [(x[:3], y[:3]), (x[3:], y[3:])], "classification", memory_budget=budget)


def test_engines_are_let_go_and_built_again():
    lin = wide(MIB)
    G, v = co.GGN(lin), torch.ones(lin.num_parameters).double()
    expected = [G @ v for _ in range(8)][-1]
    assert sum(lin.plan.in_use.values()) == 2
    kept = lin.passes.kept_bytes
    with lin.memory.holding(MIB - kept // 2):
        assert 0 < lin.passes.kept_bytes <= kept // 2
        torch.testing.assert_close(G @ v, expected, rtol=1e-12, atol=0)
        assert lin.passes.kept_bytes <= kept // 2
    for _ in range(8):
        torch.testing.assert_close(G @ v, expected, rtol=1e-12, atol=0)
    assert lin.passes.kept_bytes == kept
