"""Data that are streamed from files by the workers of a DataLoader: the answers are those of data in memory.

Tests `point_sources.py`.
"""

import functools
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate, get_worker_info

import curvops as co
from curvops.errors import DataChangedError
from tests.network.definitions import as_batches
from tests.randomness import seeded
from tests.threads import run_in_threads

N, WIDTHS = 46, (4, 5, 3)
DOUBLE = torch.float64
X = torch.randn(N, WIDTHS[0], dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
Y = torch.randint(WIDTHS[-1], (N,), generator=torch.Generator().manual_seed(1))
PARTS = ((0, 17), (17, 30), (30, N))
"""The first and the last point of each file, where there are several."""


class Rows(Dataset):
    """Points of arrays or tensors that are mapped into memory; an array is opened where it is read."""

    def __init__(self, inputs: Callable[[], Any], targets: Callable[[], Any]) -> None:
        self.open = inputs, targets
        self.parts: Any = None

    def __len__(self) -> int:
        return len(self.open[1]())

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        if self.parts is None:
            self.parts = [part() for part in self.open]
        x, y = (part[i] for part in self.parts)
        return torch.as_tensor(np.array(x)), torch.as_tensor(int(y))


class Shards(IterableDataset):
    """Batches from safetensors files, of which each worker reads its share."""

    def __init__(self, paths: list[Path], size: int) -> None:
        self.paths, self.size = paths, size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        worker = get_worker_info()
        for path in self.paths if worker is None else self.paths[worker.id :: worker.num_workers]:
            with safe_open(path, "pt") as file:
                x, y = file.get_slice("x"), file.get_slice("y")
                for start in range(0, x.get_shape()[0], self.size):
                    yield x[start : start + self.size], y[start : start + self.size]


def memory_mapped(folder: Path) -> Dataset:
    X.numpy().tofile(folder / "x.bin")
    Y.numpy().tofile(folder / "y.bin")
    x = partial(np.memmap, folder / "x.bin", X.numpy().dtype, "r", shape=X.shape)
    return Rows(x, partial(np.memmap, folder / "y.bin", Y.numpy().dtype, "r"))


def shards(folder: Path) -> Dataset:
    paths = []
    for start, stop in PARTS:
        paths.append(folder / f"{start}.safetensors")
        save_file({"x": X[start:stop].clone(), "y": Y[start:stop].clone()}, paths[-1])
    return Shards(paths, 8)


SOURCES = {"memmap": memory_mapped, "safetensors": shards}
WORKERS = {
    "started for each pass": {"num_workers": 1},
    "persistent": {"num_workers": 2, "persistent_workers": True},
    "prefetching": {"num_workers": 1, "persistent_workers": True, "prefetch_factor": 4, "pin_memory": True},
    "shuffled": {"num_workers": 1, "shuffle": True, "persistent_workers": True},
}
CASES = [
    ("memmap", "shuffled"),
    ("memmap", "prefetching"),
    ("memmap", "started for each pass"),
    ("safetensors", "persistent"),
]


def network() -> nn.Module:
    torch.manual_seed(0)
    first, last = nn.Linear(*WIDTHS[:2]), nn.Linear(*WIDTHS[1:])
    return nn.Sequential(first, nn.Tanh(), last).double()


def linearized(data: Any) -> co.operators.Linearization:
    return co.linearize(network(), data, "classification", engine="streamed")


def posterior(lin: co.operators.Linearization, curvature: Any) -> co.posterior.Laplace:
    return co.laplace(lin, curvature, prior_precision=2.0, check_mode=False)


def vectors(lin: co.operators.Linearization) -> Tensor:
    return torch.randn(lin.num_parameters, 3, dtype=DOUBLE, generator=seeded(3))


QUESTIONS: dict[str, Callable[[co.operators.Linearization], Tensor]] = {
    "product": lambda lin: co.GGN(lin) @ vectors(lin),
    "sampled Fisher": lambda lin: co.GGN(lin, mc_samples=2, generator=seeded(3)) @ vectors(lin),
    "JᵀJ": lambda lin: lin.jacobian().mT @ (lin.jacobian() @ vectors(lin)),
    "gradient": lambda lin: lin.gradient(),
    "log likelihood": lambda lin: lin.log_likelihood(),
    "diagonal": lambda lin: co.DiagonalGGN(lin).diagonal(),
    "EKFAC": lambda lin: co.EKFAC(lin).to_dense(),
    "low rank": lambda lin: co.low_rank(co.GGN(lin), 4, generator=seeded(3)).to_dense(),
    "draws": lambda lin: posterior(lin, co.GGN).sample(2, generator=seeded(3)),
    "prediction": lambda lin: posterior(lin, co.GGN).predict(X[:5]).covariance_matrix,
    "evidence by KFAC": lambda lin: posterior(lin, co.KFAC).log_evidence().value,
}
"""What a posterior and its parts are made of, from products, from rows and from passes within passes."""
FEW = ("product", "sampled Fisher", "log likelihood", "EKFAC")
ASKED = {"started for each pass": FEW, "shuffled": FEW, "prefetching": FEW}
"""Every other question takes passes in the same way."""


@functools.cache
def in_memory(name: str) -> Tensor:
    return QUESTIONS[name](linearized((X, Y)))


@pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning")
@pytest.mark.parametrize(("source", "workers"), CASES)
def test_answers_are_those_of_data_in_memory(tmp_path, source, workers) -> None:
    dataset, options = SOURCES[source](tmp_path), WORKERS[workers]
    loader = DataLoader(dataset, batch_size=None if source == "safetensors" else 8, **options)
    lin, expected = linearized(loader), in_memory
    if source == "safetensors":  # workers take turns, and what is drawn follows the order
        whole = linearized(tuple(map(torch.cat, zip(*loader))))
        expected = lambda name: QUESTIONS[name](whole)  # noqa: E731
    assert lin.num_data == N
    for name in ASKED.get(workers, QUESTIONS):
        torch.testing.assert_close(QUESTIONS[name](lin), expected(name), rtol=1e-10, atol=1e-10, msg=name)


def test_passes_within_passes_and_in_two_threads_have_workers_of_their_own(tmp_path) -> None:
    batches = as_batches(DataLoader(memory_mapped(tmp_path), 8, num_workers=1, persistent_workers=True), 1)
    pairs = [(a.start + i, b.num_points) for i, a in enumerate(batches) for b in batches]
    assert len(pairs) == len(batches) ** 2
    assert run_in_threads(*[lambda: sum(b.num_points for b in batches)] * 3) == [N] * 3
    next(iter(batches))  # a pass that is given up
    batches.verify()
    pickle.loads(pickle.dumps(batches)).verify()


class Failing(Rows):
    """Rows whose reading raises while a file exists."""

    def __init__(self, sign: Path) -> None:
        self.sign = sign

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        if self.sign.exists() and i == N - 1:
            raise OSError("the disk is gone")
        return X[i], Y[i]


def test_a_worker_that_raises_says_so_and_the_next_product_is_right(tmp_path) -> None:
    sign = tmp_path / "sign"
    loader = DataLoader(Failing(sign), 8, num_workers=2, persistent_workers=True)
    lin = co.linearize(network(), loader, "classification", engine="streamed")
    G, v = co.GGN(lin), torch.ones(lin.num_parameters, dtype=DOUBLE)
    expected = G @ v
    sign.touch()
    with pytest.raises(OSError, match="(?s)Caught OSError in DataLoader worker process .*the disk is gone"):
        _ = G @ v
    sign.unlink()
    assert torch.equal(G @ v, expected)


def noisy(points: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Join points with noise, which a worker draws."""
    x, y = default_collate(points)
    return x + torch.randn(x.shape), y


def test_random_states_stay_where_they_were_and_noise_of_workers_is_noticed(tmp_path) -> None:
    own = torch.Generator().manual_seed(5)
    loader = DataLoader(memory_mapped(tmp_path), 8, num_workers=1, generator=own, persistent_workers=True)
    users = [iter(loader)]
    before = own.get_state(), torch.get_rng_state(), next(users[0])
    batches = as_batches(loader, 1)
    batches.verify()
    assert torch.equal(own.get_state(), before[0]) and torch.equal(torch.get_rng_state(), before[1])
    assert sum(len(y) for _, y in users[0]) == N - 8  # the user's own pass goes on
    changing = as_batches(DataLoader(TensorDataset(X, Y), 8, num_workers=1, generator=own, collate_fn=noisy), 1)
    with pytest.raises(DataChangedError, match="batch 0 has other values"):
        changing.verify()


class Whole(IterableDataset):
    """Batches that every worker yields."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(X.split(8), Y.split(8))


def test_workers_that_each_read_all_points_are_refused() -> None:
    assert sum(as_batches(DataLoader(Whole(), None, num_workers=1), 1).sizes) == N
    with pytest.raises(ValueError, match="a batch came 2 times, once from each of the loader's 2 workers"):
        as_batches(DataLoader(Whole(), None, num_workers=2), 1)
