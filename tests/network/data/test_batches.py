"""Every form of data gives the same batches; changed data are noticed.

Tests `batches.py`, and the parts of a batch in `inputs.py`.
"""

from collections import UserDict
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, SubsetRandomSampler, TensorDataset

import curvops as co
from curvops.errors import DataChangedError
from curvops.network.likelihoods import Categorical
from tests.network.definitions import Items, as_batches

N = 10
X = torch.randn(N, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(N) % 3
W = torch.linspace(0, 1, N)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(X, Y, strict=True)


class Reiterable:
    """Calls a function at every pass."""

    def __init__(self, batches: Callable[[], object]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[object]:
        return iter(self.batches())


def in_fours(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    return list(zip(*(tensor.split(4) for tensor in tensors), strict=True))


FORMS = {
    "tensors": (X, Y),
    "list of tensors": [X, Y],
    "dataset": TensorDataset(X, Y),
    "iterable dataset": Stream(),
    "loader": DataLoader(TensorDataset(X, Y), batch_size=4),
    "list of batches": in_fours(X, Y),
    "re-iterable": Reiterable(lambda: in_fours(X, Y)),
}


@pytest.mark.parametrize("data", FORMS.values(), ids=FORMS)
def test_every_form_gives_the_same_batches(data: object) -> None:
    batches = as_batches(data, 4, "cpu", torch.float64, Categorical().check_targets)
    assert batches.sizes == (4, 4, 2)
    assert (batches.num_data, batches.num_batches, len(batches)) == (N, 3, 3)
    for _ in range(2):
        read = list(batches)
        assert torch.equal(torch.cat([batch.inputs for batch in read]), X.double())
        assert torch.equal(torch.cat([batch.targets for batch in read]), Y)
        assert all(batch.weights is None for batch in read)


@pytest.mark.parametrize(
    "data", [(X, Y, W), in_fours(X, Y, W), TensorDataset(X, Y, W)], ids=["tensors", "batches", "dataset"]
)
def test_sample_weights(data: object) -> None:
    batches = as_batches(data, 4, dtype=torch.float64, weights=True)
    assert torch.equal(torch.cat([batch.weights for batch in batches]), W.double())
    (mask,) = as_batches((X, Y, W > 0.5), N, dtype=torch.float64, weights=True)
    assert mask.weights.dtype == torch.float64


NAMED = {"inputs": X, "targets": Y, "weights": W}


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize(
    "data",
    [
        NAMED,
        UserDict(NAMED),
        Items(*(dict(zip(NAMED, row)) for row in zip(X, Y, W))),
        [dict(zip(NAMED, parts)) for parts in in_fours(X, Y, W)],
    ],
    ids=["memory", "mapping", "dataset", "batches"],
)
def test_named_weights_need_no_other_word(data: object, declared: bool) -> None:
    batches = as_batches(data, 4, weights=declared)
    assert batches.sizes == (4, 4, 2)
    assert torch.equal(torch.cat([batch.weights for batch in batches]), W)
    assert torch.equal(torch.cat([batch.inputs for batch in batches]), X)


def test_named_inputs_and_targets_alone() -> None:
    (batch,) = as_batches({"inputs": {"ids": Y, "mask": X}, "targets": Y}, N)
    assert batch.weights is None and set(batch.inputs) == {"ids", "mask"}


def test_structured_inputs() -> None:
    (first, _, _) = as_batches(((X, Y), Y), 4)
    assert isinstance(first.inputs, tuple) and len(first.inputs[1]) == 4
    (first, _, _) = as_batches(({"ids": Y, "mask": X}, Y), 4)
    assert isinstance(first.inputs, dict) and len(first.inputs["ids"]) == 4
    (only,) = as_batches([(UserDict(ids=Y), Y)], 4)
    assert isinstance(only.inputs, dict) and only.num_points == N


def test_two_batches_are_not_taken_for_tensors_in_memory() -> None:
    assert as_batches(in_fours(X[:8], Y[:8]), 1).sizes == (4, 4)
    assert as_batches(tuple(in_fours(X, Y)), 1).sizes == (4, 4, 2)


def test_few_points_in_memory_leave_predictions_in_large_batches() -> None:
    sizes: list[int] = []
    model = lambda params, x: sizes.append(len(x)) or x @ params["w"]  # noqa: E731
    lin = co.linearize((model, {"w": torch.ones(3, 1)}), (X[:2], X[:2, :1]), co.likelihoods.Gaussian(1.0))
    lin.predict(X)
    assert sizes[-1] == N


def test_to_casts_and_still_knows_the_data() -> None:
    x = X.clone()
    batches = as_batches((x, Y), 4)
    doubled = batches.to(dtype=torch.float64)
    assert next(iter(doubled)).inputs.dtype == torch.float64
    x[0, 0] += 1
    for seen in (batches, doubled):
        with pytest.raises(DataChangedError):
            seen.verify()
    with pytest.raises(DataChangedError):
        batches.to(dtype=torch.float64)


def test_a_loader_that_shuffles_is_read_in_the_order_of_its_dataset() -> None:
    """Each point once, the last batch too, by the loader's own collation, whatever the loader draws."""
    data = TensorDataset(X, Y)

    def doubled(points: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        x, y = zip(*points, strict=True)
        return 2 * torch.stack(x), torch.stack(y)

    loaders = {
        "shuffled": (DataLoader(data, 4, shuffle=True), X, Y),
        "without its last batch": (DataLoader(data, 4, shuffle=True, drop_last=True), X, Y),
        "collated": (DataLoader(data, 4, shuffle=True, collate_fn=doubled), 2 * X, Y),
        "of a subset": (
            DataLoader(data, 3, sampler=SubsetRandomSampler([7, 2, 5, 0])),
            X[[7, 2, 5, 0]],
            Y[[7, 2, 5, 0]],
        ),
        "by one": (DataLoader(in_fours(X, Y), batch_size=None, shuffle=True), X, Y),
        "in order, without its last batch": (DataLoader(data, 4, drop_last=True), X, Y),
        "by a sampler, without its last batch": (
            DataLoader(data, 4, sampler=range(9, -1, -1), drop_last=True),
            X.flip(0),
            Y.flip(0),
        ),
        "a stream without its last batch": (DataLoader(Stream(), 4, drop_last=True), X, Y),
    }
    for name, (loader, x, y) in loaders.items():
        batches = as_batches(loader, 1)
        for _ in range(3):
            found = list(batches)
            assert torch.equal(torch.cat([batch.inputs for batch in found]), x), name
            assert torch.equal(torch.cat([batch.targets for batch in found]), y), name


HUGGING = {"input_ids": Y, "attention_mask": Y > 0, "labels": Y}


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_labels_inside_a_mapping_are_the_targets(kind: Callable[[object], object]) -> None:
    for data in (kind(HUGGING), [kind(HUGGING)], [kind({"x": X, "label": Y})]):
        (batch,) = as_batches(data, N)
        assert torch.equal(batch.targets, Y) and isinstance(batch.inputs, dict)
        assert not {"labels", "label"} & batch.inputs.keys()
    (batch,) = as_batches([kind(HUGGING | {"weights": W})], N, weights=True)
    assert torch.equal(batch.weights, W) and batch.inputs.keys() == {"input_ids", "attention_mask"}


def test_arrays_are_tensors_and_counts_are_weights() -> None:
    expected = as_batches((X, Y, W.round()), 4, weights=True)
    frozen = X.numpy().copy()
    frozen.flags.writeable = False
    arrays = {
        "arrays": (X.numpy(), Y.numpy(), W.round().long().numpy()),
        "backwards": (X.flip(0).numpy()[::-1], Y.flip(0).numpy()[::-1], W.round().numpy()),
        "not to be written": (frozen, Y.numpy().astype("uint16"), W.round().to(torch.uint8)),
        "named": {"inputs": X.numpy(), "targets": Y.numpy(), "weights": W.round().long()},
        "batches": [tuple(t.numpy() for t in batch) for batch in in_fours(X, Y, W.round().int())],
        "labels": {"x": X.numpy(), "labels": Y.numpy(), "weights": W.round().long().numpy()},
    }
    for name, data in arrays.items():
        for one, other in zip(as_batches(data, 4, weights=True), expected, strict=True):
            inputs = one.inputs["x"] if name == "labels" else one.inputs
            for found, known in zip((inputs, one.targets, one.weights), (other.inputs, other.targets, other.weights)):
                assert torch.equal(found.to(known.dtype), known), name


class Augmented(Dataset):
    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return X[i] + 0.01 * torch.randn(3), Y[i]


def exhausted_after(passes: int) -> Reiterable:
    left = iter(range(passes))
    return Reiterable(lambda: in_fours(X, Y) if next(left, None) is not None else in_fours(X, Y)[:2])


def growing() -> Reiterable:
    lengths = iter([1, 2])
    return Reiterable(lambda: in_fours(X, Y)[: next(lengths)])


def other_shapes() -> Reiterable:
    sizes = iter([4, 5])
    return Reiterable(lambda: [(X[:size], Y[:size]) for size in [next(sizes)]])


class Shuffled:
    """Batches in another order at each pass, by torch's default generator."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(N)
        return iter(in_fours(X[order], Y[order]))


CHANGING = {
    "shuffling": (lambda: Shuffled(), r"batch \d.*Usual causes are shuffling"),
    "augmentation": (Augmented, r"batch 0 has other values \(3 batches do\).*augmentation"),
    "fewer": (lambda: exhausted_after(1), "only 2 of the first pass's 3 batches"),
    "more": (growing, "more than the first pass's 1 batches"),
    "shapes": (other_shapes, "batch 0 has other shapes"),
}


@pytest.mark.parametrize(("make", "message"), CHANGING.values(), ids=CHANGING)
def test_data_that_change_between_passes_are_noticed(make: Callable[[], object], message: str) -> None:
    batches = as_batches(make(), 4)
    with pytest.raises(DataChangedError, match=message):
        batches.verify()


@pytest.mark.parametrize("which", [0, 1, 2], ids=["inputs", "targets", "weights"])
def test_changes_in_place_are_noticed(which: int) -> None:
    """Also changes through ``.data`` and NumPy, which leave the version counter alone; undoing them is fine."""
    data = [X.clone(), Y.clone(), W.clone()]
    batches = as_batches(tuple(data), 4, weights=True)
    batches.verify()
    kept = data[which][5].clone()
    data[which].numpy()[5] += 1
    with pytest.raises(DataChangedError, match="batch 1 has other values"):
        batches.verify()
    data[which].data[5] = kept
    batches.verify()
