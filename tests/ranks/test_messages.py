"""The messages that ranks exchange, and their bytes, are those of the formulas on docs/many_machines.md.

Tests `process_group.py`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import curvops as co
from curvops.checkpoint import identify
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


def expected_of(size: int) -> dict[str, Count]:
    sums = lambda *numbers: (len(numbers), NUMBER * sum(numbers))  # noqa: E731
    lengths, rows = sums(size), max(SHARDS[size])
    one = sums(D * K)
    layers = pickle.dumps({"the layers that ran": [f"{i}.weight, {i}.bias: factors" for i in (0, 2)]})
    kfac = sums(*[n for p, q in LAYERS for n in (p * p, q * q, 1)], 1)  # factors, positions; the log-likelihood
    likelihood = identify(co.likelihoods.Categorical())

    def door(name: str, **options: Any) -> Count:
        """The arguments of an operator, compared when it is built."""
        given = {f"{option} of co.{name}": repr(value) for option, value in options.items()}
        told = pickle.dumps({"the operator": f"co.{name}", "the likelihood": likelihood} | given)
        return 2, lengths[1] + len(told)

    drawn = {"fisher": "exact", "mc_samples": 1, "generator": None}
    diagonal = door("DiagonalGGN", **drawn)
    of_kfac = door("KFAC", fisher="exact", sharing="expand", mc_samples=1, generator=None, bias="joint")
    of_diagonal = sums(D, 1)
    return {
        "product": one,
        "Hessian": one,
        "empirical Fisher": one,
        "gradient": sums(D),
        "log-likelihood": sums(1),
        "GGN": door("GGN", mc_samples=None, generator=None),
        "diagonal": (of_diagonal[0] + diagonal[0], of_diagonal[1] + diagonal[1]),
        "J": (2, lengths[1] + NUMBER * rows * C * K),
        "J transposed": one,
        "three products": (3 * one[0], 3 * one[1]),
        "KFAC": (kfac[0] + 2 + of_kfac[0], kfac[1] + lengths[1] + len(layers) + of_kfac[1]),
    }


@pytest.mark.parametrize("size", [2, 3])
def test_messages_and_bytes_are_those_of_the_formulas(size) -> None:
    expected = expected_of(size)
    everywhere = run_on_ranks(size, found_by_rank, size)
    for rank, found in everywhere.items():
        bits = "bits of a product"
        assert found[bits] == everywhere[0][bits]
        messages, sent = found["linearize"]
        wider, more = found["linearize a wider network"]
        assert (
            messages == wider == 18 and max(sent, more) < 4096 and abs(sent - more) < 16
        )  # lengths of pickled numbers
        for name, count in expected.items():
            assert found[name] == count, (rank, name)
