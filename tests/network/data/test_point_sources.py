"""Items of a DataLoader in any form, and batches that its collate_fn makes, against the same network on tensors.

Tests `point_sources.py`, and the checks of joined points in `first_points.py`.
"""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import curvops as co
from curvops.errors import MissingLabelsError
from tests.network.data.test_objects import (
    QUESTIONS,
    Cloud,
    JoinPairs,
    N,
    Pooled,
    close,
    data,
    joined,
    noise,
    of_clouds,
    of_points,
    parts_of_points,
    post_of,
    vectors,
)
from tests.network.definitions import Items


class OfTwo(nn.Module):
    """A network on the sums of two clouds."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))

    def forward(self, first, second):
        return self.net(torch.stack([torch.cat([a.sum(0), b.sum(0)]) for a, b in zip(first, second)]))


ITEMS = {
    "two points and a label": (lambda a, b, y: (a, b, y), lambda item: item),
    "a pair of the second point and the label": (lambda a, b, y: (a, (b, y)), lambda item: (item[0], *item[1])),
    "the label first": (lambda a, b, y: (y, a, b), lambda item: (*item[1:], item[0])),
    "a pair of points": (lambda a, b, y: ((a, b), y), lambda item: (*item[0], item[1])),
    "a mapping": (lambda a, b, y: {"a": a, "b": b, "y": y}, lambda item: item.values()),
}


class JoinItems:
    def __init__(self, entries):
        self.entries = entries

    def __call__(self, items):
        first, second, y = zip(*map(self.entries, items))
        return (list(first), list(second)), torch.stack(y)


@pytest.mark.parametrize("item", ITEMS)
def test_items_of_any_form(item):
    rows, y = data()
    model = OfTwo().double()
    make, entries = ITEMS[item]
    items = [make(*three) for three in zip(rows, rows[::-1], y)]
    sums = torch.stack([part.sum(0) for part in rows])
    inputs = torch.cat([sums, sums.flip(0)], 1)
    reference = co.linearize(model.net, (inputs, y), noise())
    lin = co.linearize(model, DataLoader(items, batch_size=3, collate_fn=JoinItems(entries)), noise())
    for name in ("outputs", "log-likelihood", "GGN", "KFAC"):
        close(QUESTIONS[name](lin, None), QUESTIONS[name](reference, None))
    close(lin.predict(items[2:5]), lin.outputs()[2:5])
    tuned = co.evidence.validate(post_of(lin), items[:4], prior_precisions=[0.5, 2.0])
    expected = co.evidence.validate(post_of(reference), inputs[:4], y[:4], prior_precisions=[0.5, 2.0])
    close(torch.as_tensor(tuned.tuning.scores), torch.as_tensor(expected.tuning.scores))
    bare = list(zip(rows, rows[::-1]))
    if item == "a pair of points":
        close(lin.predict(bare[2:5]), lin.outputs()[2:5])
        close(lin.predict([(pair, None) for pair in bare[2:5]]), lin.outputs()[2:5])
    elif item != "a mapping":
        with pytest.raises(TypeError, match="with their labels"):
            lin.predict(bare[2:5])


def test_inputs_that_hold_the_label():
    class Forced(Pooled):
        def forward(self, rows, y):
            return super().forward(rows) + y.sin()

    def collate(items):
        points, y = zip(*items)
        return (list(points), torch.stack(y)), torch.stack(y)

    rows, y = data()
    model = Forced().double()
    lin = co.linearize(model, DataLoader(Items(*zip(rows, y)), batch_size=3, collate_fn=collate), noise())
    close(lin.outputs(), model(rows, y).detach())
    close(lin.predict(list(zip(rows, y))[3:]), lin.outputs()[3:])
    with pytest.raises(TypeError, match="with their labels"):
        lin.predict(rows[:2])


def test_batches_of_two_tensors_of_other_lengths():
    class Owned(Pooled):
        def forward(self, rows, owner):
            return super().forward(rows, owner, int(owner.max()) + 1)

    rows, y = data()
    model, sums = Owned().double(), torch.stack([torch.tanh(part).sum(0) for part in rows])
    reference = co.linearize(model.net, (sums, y), noise())
    batches = [(parts_of_points(rows[cut])[:2], y[cut]) for cut in (slice(0, 3), slice(3, N))]
    loader = DataLoader(
        Items(*zip(rows, y)), batch_size=3, collate_fn=JoinPairs(lambda points: parts_of_points(points)[:2])
    )
    for given in (batches, loader):
        lin = co.linearize(model, given, noise())
        close(co.GGN(lin) @ vectors(lin), co.GGN(reference) @ vectors(lin))
    close(lin.predict(rows), lin.outputs())


def cropped(part):
    return part[torch.randint(len(part), (2,))] if len(part) > 3 else part


class OneBatch:
    """Points in one, which are its entries, by name, if it is iterated over."""

    def __init__(self, rows, y):
        self.rows, self.y = rows, y

    def __iter__(self):
        return iter([("rows", self.y), ("y", self.y)])


def of_equal_points(model, points, y):
    equal = [points[0]] * 4 + [*points[1:3], points[0]]
    return of_points(model, equal, y, lambda some: sorted(some, key=len))


@pytest.mark.parametrize(
    ("call", "message"),
    {
        "random crops of long points only": (
            lambda m, p, y: of_points(m, p, y, lambda some: parts_of_points([*map(cropped, some)])),
            "random",
        ),
        "sorted, where the first are equal": (of_equal_points, "keep their order"),
        "NaN in an attribute": (
            lambda m, p, y: of_points(m, [Cloud(r * math.nan if len(r) == 5 else r) for r in p], y),
            "at point 5 hold NaN",
        ),
        "NaN in an attribute of a test point": (
            lambda m, p, y: of_points(m, p, y).predict([Cloud(p[0]), Cloud(p[1] * math.nan)]),
            "at point 1 hold NaN",
        ),
        "one batch": (lambda m, p, y: co.linearize(m, OneBatch(parts_of_points(p), y), noise()), r"\[batch\]"),
        "a tuple of two pairs": (lambda m, p, y: joined(m, tuple(zip(p[:2], y))), "2 inputs"),
        "rows of numbers": (lambda m, p, y: co.gp.LinearizedGP(of_points(m, p, y)), "rows of numbers"),
        "joined points in memory": (lambda m, p, y: co.linearize(m, (parts_of_points(p)[:2], y), noise()), "collate="),
    }.values(),
)
def test_what_the_first_points_do_not_show(call, message):
    rows, y = data()
    with pytest.raises((TypeError, ValueError), match=message):
        call(Pooled().double(), rows, y)


def test_held_out_data_without_labels():
    points, y, sums = of_clouds()
    model = Pooled().double()
    for post in (post_of(of_points(model, points, y)), post_of(co.linearize(model.net, (sums, y), noise()))):
        x = sums if post.lin.model.calls.example is None else points
        with pytest.raises(MissingLabelsError):
            co.evidence.validate(post, (x[:3], None))
    with pytest.raises(MissingLabelsError):
        co.evidence.train(model, (points, None), "classification", epochs=1, collate=list)
