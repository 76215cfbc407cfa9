"""The messages that ranks exchange, and their bytes, are those of the formulas on docs/many_machines.md.

Tests `process_group.py`.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import curvops as co
from curvops.fingerprints import fingerprint
from curvops.ranks.process_group import Ranks
from tests.ranks.processes import run_on_ranks
from tests.ranks.questions import DOUBLE, SHARDS, linearise, seeded

NUMBER = 8
"""Bytes of a number in these tests."""
K = 3
WIDE = "more weights than outputs"
C, LAYERS = 3, ((5, 5), (3, 6))
"""The outputs, and rows and columns of each layer's matrix with its bias."""
D = sum(p * q for p, q in LAYERS)

Count = tuple[int, int]


def counted(ranks: Ranks, run: Callable[[], Any]) -> Count:
    before = ranks.messages, ranks.bytes_sent
    run()
    return ranks.messages - before[0], ranks.bytes_sent - before[1]


def found_by_rank(group: dist.ProcessGroup, size: int) -> dict[str, Count]:
    lin, wider = (linearise(name, SHARDS[size], group, dist.get_rank(group)) for name in ("labels", WIDE))
    ranks = lin.passes.shard.ranks
    to_linearize = [(each.messages, each.bytes_sent) for each in (ranks, wider.passes.shard.ranks)]
    assert lin.num_parameters == D
    J = lin.jacobian()
    V = torch.ones(D, K, dtype=DOUBLE)
    U = torch.ones(lin.num_data * C, K, dtype=DOUBLE)
    G, H, F = co.GGN(lin), co.Hessian(lin), co.EmpiricalFisher(lin)
    return {
        "linearize": to_linearize[0],
        "linearize a wider network": to_linearize[1],
        "product": counted(ranks, lambda: G @ V),
        "Hessian": counted(ranks, lambda: H @ V),
        "empirical Fisher": counted(ranks, lambda: F @ V),
        "gradient": counted(ranks, lin.gradient),
        "log-likelihood": counted(ranks, lin.log_likelihood),
        "GGN": counted(ranks, lambda: co.GGN(lin)),
        "diagonal": counted(ranks, lambda: co.DiagonalGGN(lin)),
        "J": counted(ranks, lambda: J @ V),
        "J transposed": counted(ranks, lambda: J.mT @ U),
        "KFAC": counted(ranks, lambda: co.KFAC(lin)),
        "bits of a product": (int(fingerprint([G @ torch.rand(D, 2, generator=seeded(), dtype=DOUBLE)])), 0),
        "three products": counted(ranks, lambda: [G @ V for _ in range(3)]),
    }


def sums(*numbers: int) -> Count:
    return len(numbers), NUMBER * sum(numbers)


def products_of(size: int) -> dict[str, Count]:
    """The messages of products and sums, to the byte."""
    one, rows = sums(D * K), max(SHARDS[size])
    return {
        "product": one,
        "Hessian": one,
        "empirical Fisher": one,
        "gradient": sums(D),
        "log-likelihood": sums(1),
        "J": (2, sums(size, rows * C * K)[1]),
        "J transposed": one,
        "three products": (3 * one[0], 3 * one[1]),
    }


BUILT = {
    "GGN": (2, sums()),
    "diagonal": (2, sums(D, 1)),  # and the log-likelihood, which later walks know
    "KFAC": (4, sums(*[n for p, q in LAYERS for n in (p * p, q * q, 1)])),  # factors, positions
}
"""Of operators that are built: messages in which the arguments, and the layers that ran, are compared; and sums."""
COMPARED = 1024
"""Bytes that such messages have at most."""


@pytest.mark.parametrize("size", [2, 3])
def test_messages_and_bytes_are_those_of_the_formulas(size) -> None:
    everywhere = run_on_ranks(size, found_by_rank, size)
    for rank, found in everywhere.items():
        bits = "bits of a product"
        assert found[bits] == everywhere[0][bits]
        messages, sent = found["linearize"]
        wider, more = found["linearize a wider network"]
        assert (
            messages == wider == 18 and max(sent, more) < 4096 and abs(sent - more) < 16
        )  # lengths of pickled numbers
        for name, count in products_of(size).items():
            assert found[name] == count, (rank, name)
        for name, (compared, (messages, sent)) in BUILT.items():
            assert found[name][0] == compared + messages, (rank, name)
            assert 0 < found[name][1] - sent < COMPARED, (rank, name)
