"""Fingerprints see every change, on every dtype and layout, and raise no false alarm."""

import pytest
import torch
from torch import Tensor

from curvops.fingerprints import CHUNK, _odd_weights, fingerprint, in_64_bits, join_sums, ordered_sum, point_prints

DTYPES = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64),
]


def bits(n: int = 60) -> Tensor:
    """0 and 1, which as floats differ in high bits only: the hardest case for a sum modulo 2^64."""
    return torch.arange(n) % 3 % 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_single_change_and_swap_is_seen(dtype: torch.dtype) -> None:
    x = bits().to(dtype)
    before = fingerprint([x])
    for i in range(len(x)):
        changed = x.clone()
        changed[i] = changed[i] == 0
        assert fingerprint([changed]) != before
        swapped = x.clone()
        swapped[[i, i - 1]] = x[[i - 1, i]]
        assert (fingerprint([swapped]) == before) == torch.equal(swapped, x)
    assert fingerprint([x.clone()]) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_signs_and_last_bits_are_seen(dtype: torch.dtype) -> None:
    x = torch.ones(16, dtype=dtype)
    x[::2] = -1
    before = fingerprint([x])
    assert fingerprint([x.roll(1)]) != before
    assert fingerprint([-x]) != before
    assert fingerprint([x.nextafter(torch.tensor(2.0, dtype=dtype))]) != before
    assert fingerprint([torch.zeros(1, dtype=dtype)]) != fingerprint([-torch.zeros(1, dtype=dtype)])


def test_position_among_tensors_and_chunks_counts() -> None:
    x, y = bits().float(), bits().float().roll(1)
    assert fingerprint([x, y]) != fingerprint([y, x])
    long = torch.zeros(2 * CHUNK + 3, dtype=torch.int32)
    prints = set()
    for i in (0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 2):
        changed = long.clone()
        changed[i] = 1
        prints.add(int(fingerprint([changed])))
    assert len(prints) == 7


def test_layout_and_gradients_do_not_matter() -> None:
    x = torch.randn(6, 10)
    assert fingerprint([x.t().contiguous().t()]) == fingerprint([x])
    assert fingerprint([torch.cat([x[:1], x])[1:]]) == fingerprint([x])
    assert fingerprint([x.clone().requires_grad_()]) == fingerprint([x])
    assert fingerprint([torch.tensor(1.0)]).shape == ()
    assert fingerprint([torch.zeros(0, 3), x]).dtype == torch.int64


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_columns_of_a_larger_tensor_are_their_values(dtype: torch.dtype) -> None:
    table = bits().view(20, 3).to(dtype)
    for part in (table[:, :1], table[:, 1], table[::2], table.mT, table[:1].expand(4, 3)):
        assert fingerprint([part]) == fingerprint([part.contiguous()])


def test_a_single_number_between_others_is_that_number() -> None:
    numbers = torch.arange(6)
    assert int(fingerprint([numbers[2::6]])) == int(fingerprint([torch.tensor([2])]))


def of_points(tensors: list[Tensor], cuts: list[int]) -> tuple[int, int]:
    """The sum of the points' fingerprints and the one of their order, from parts of so many points."""
    parts = zip(*(tensor.split(cuts) for tensor in tensors))
    prints = [point_prints(list(part)) for part in parts]
    return in_64_bits(sum(int(part.sum()) for part in prints)), join_sums([int(ordered_sum(p)) for p in prints], cuts)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_points_are_known_in_any_parts_and_each_change_is_seen(dtype: torch.dtype) -> None:
    x, y = bits(84).view(12, 7).to(dtype), torch.arange(12) % 3
    known = of_points([x, y], [12])
    assert of_points([x, y], [5, 1, 6]) == known and of_points([x.clone(), y], [1] * 12) == known
    whole = ordered_sum(point_prints([x[:5], y[:5]])) + ordered_sum(point_prints([x[5:], y[5:]]), 5)
    assert int(whole) == known[1]
    turned = of_points([x.flip(0), y.flip(0)], [12])
    assert turned[0] == known[0] and turned[1] != known[1]
    for i in range(12):
        changed, exchanged = x.clone(), x.clone()
        changed[i, 3] = changed[i, 3] == 0
        exchanged[[i, i - 1], 2] = x[[i - 1, i], 2]  # one number of two points
        assert of_points([changed, y], [12])[0] != known[0]
        assert (of_points([exchanged, y], [12])[0] == known[0]) == torch.equal(exchanged, x)
    assert of_points([x, y.roll(1)], [12])[0] != known[0]
    assert of_points([x[:, :0], y], [12])[0] != known[0]


def test_rows_longer_than_a_chunk_are_seen_to_their_end() -> None:
    rows = bits(2 * (CHUNK + 5)).to(torch.int16).view(2, -1)
    changed = rows.clone()
    changed[1, -1] += 1
    before, after = point_prints([rows]), point_prints([changed])
    assert before[0] == after[0] and before[1] != after[1]
    by_sums, weights = (rows[:, :9] * _odd_weights(torch.device("cpu"))[:9]).sum(1), _odd_weights(torch.device("cpu"))
    assert torch.equal(by_sums, rows[:, :9].to(torch.int64).mv(weights[:9]))  # as an accelerator computes it
