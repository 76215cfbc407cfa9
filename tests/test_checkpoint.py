"""When a checkpoint is written, and what becomes of a run when it cannot be."""

import contextlib
import errno
import os
import pathlib
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import curvops as co
from curvops import storage
from curvops.checkpoint import KIND, Checkpoint, begin, current, identify
from curvops.errors import CheckpointWarning
from curvops.linalg.core import algorithm
from tests.linalg.interrupted import Killed
from tests.ranks.processes import alone

CPU = torch.device("cpu")


def full(*_):
    raise OSError(errno.ENOSPC, "no room")


def test_saves_come_seldom_and_the_state_is_not_asked_for_between(tmp_path):
    kept, asked = Checkpoint(tmp_path, "test", dict), []
    for _ in range(3):
        kept.save(lambda: asked.append(1) or {})
    assert asked == [] and Checkpoint(tmp_path, "test", dict).state is None
    kept.save(lambda: {"step": 3}, now=True)
    assert Checkpoint(tmp_path, "test", dict).state == {"step": 3}


def test_a_disk_that_fills_up_in_a_run_warns_once(tmp_path, saved_at_each_step, monkeypatch):
    kept = Checkpoint(tmp_path, "test", dict)
    kept.save(lambda: {"step": 1})
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.warns(CheckpointWarning, match="no room.*The run continues") as caught:
            kept.save(lambda: {"step": 2})
            kept.save(lambda: {"step": 3})
        assert len(caught) == 1
        with pytest.raises(OSError, match="no room"):
            Checkpoint(tmp_path / "new", "test", dict)
    assert Checkpoint(tmp_path, "test", dict).state == {"step": 1}


def test_a_result_takes_the_place_of_all_steps_and_of_nothing_else(tmp_path, saved_at_each_step):
    kept = Checkpoint(tmp_path, "test", dict)
    inner = Checkpoint(kept.part("inner"), "inner", dict)
    Checkpoint(inner.part("innermost"), "innermost", dict)
    (tmp_path / "mine").mkdir()
    (tmp_path / "inner" / "note").write_text("mine")
    kept.finish({"x": torch.ones(2)})
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_dir()) == ["inner", "mine"]
    assert [path.name for path in (tmp_path / "inner").iterdir()] == ["note"]
    assert torch.equal(Checkpoint(tmp_path, "test", dict).outcome["x"], torch.ones(2))


def test_a_result_that_cannot_be_written_leaves_all_that_led_to_it(tmp_path, saved_at_each_step, monkeypatch):
    kept = Checkpoint(tmp_path, "test")
    kept.save(lambda: 1)
    Checkpoint(kept.part("inner"), "inner").finish(2)
    with monkeypatch.context() as patch, pytest.warns(CheckpointWarning, match="no room"):
        patch.setattr(os, "replace", full)
        assert kept.finish(3) == 3
    again = Checkpoint(tmp_path, "test")
    assert again.state == 1 and not again.done and Checkpoint(again.part("inner"), "inner").outcome == 2


@contextlib.contextmanager
def bound_by_permissions():
    """The superuser, whom they do not bind, acts as nobody meanwhile."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="of POSIX alone")
@pytest.mark.parametrize("mode", [0o555, 0o000], ids=["read-only", "closed"])
def test_missing_permission_is_reported_at_the_start(mode):
    asked = []
    with tempfile.TemporaryDirectory() as place:  # pytest's own folders are closed to others
        os.chmod(place, 0o755)
        folder = os.path.join(place, "folder")
        os.mkdir(folder, mode)
        for path in (folder, os.path.join(folder, "new")):
            with bound_by_permissions(), pytest.raises(PermissionError, match="folder"):
                Checkpoint(path, "test", lambda: asked.append(1) or {})
        os.chmod(folder, 0o755)
        assert os.listdir(folder) == []


def test_a_checkpoint_of_an_earlier_version_is_refused(tmp_path):
    storage.save(tmp_path, KIND, 1, {"problem": {"algorithm": "test"}, "reached": None, "result": None})
    with pytest.raises(
        ValueError, match="of an earlier version of curvops.* To start again, delete the folder or pass another path"
    ):
        Checkpoint(tmp_path, "test")


class Work:
    """A run of three steps, each of two halves, and what is made once for all; it ends after so many halves."""

    def __init__(self, left=99):
        self.left, self.made = left, []

    @algorithm
    def half(self, x, checkpoint=None):
        kept = begin("half", checkpoint, dict, CPU)
        assert not current()
        if kept.done:
            return kept.outcome
        if not self.left:
            raise Killed
        self.left -= 1
        self.made.append(x)
        return kept.finish(x + 1)

    @algorithm
    def whole(self, x, steps=3, checkpoint=None, generator=None):
        kept = begin("whole", checkpoint, dict, CPU, parts=True)
        if kept.done:
            return kept.outcome
        done, x = kept.state or (0, x)
        for step in range(done + 1, steps + 1):
            with current().name_part("once"):
                x = x + self.half(1)
            x = self.half(10 * self.half(x))
            kept.save(lambda: (step, x), now=step == 2)  # noqa: B023
        return kept.finish(x)


def folders(place):
    return sorted(each.name for each in place.iterdir() if each.is_dir())


@pytest.mark.parametrize("killed", range(8))
def test_steps_find_their_own_part_of_a_run_that_goes_on(tmp_path, killed):
    """Nothing is made twice, and what led to a state that was written is gone."""
    plain = Work()
    expected = plain.whole(1)
    assert len(plain.made) == 9 and list(tmp_path.iterdir()) == []
    first, second = Work(killed), Work()
    if killed < 7:
        with pytest.raises(Killed):
            first.whole(1, checkpoint=tmp_path)
        started = first.made[1:]
        parts = len(started) if len(started) < 4 else len(started) - 4
        assert len([name for name in folders(tmp_path) if name.startswith("half")]) == parts + 1 - (killed == 0)
    assert second.whole(1, checkpoint=tmp_path) == expected and folders(tmp_path) == []
    assert first.made + second.made == [1, *(x for x in plain.made if x != 1)] and len(first.made + second.made) == 7
    assert Work(0).whole(1, checkpoint=tmp_path) == expected


def test_a_step_with_a_folder_of_its_own_keeps_its_problem_there(tmp_path):
    @algorithm
    def outer(work, checkpoint):
        begin("outer", checkpoint, dict, CPU, parts=True)
        return work.half(3, checkpoint=tmp_path / "inner")

    assert outer(Work(), checkpoint=tmp_path / "outer") == 4 and folders(tmp_path / "outer") == []
    assert outer(Work(0), checkpoint=None) == 4
    with pytest.raises(ValueError, match=r"What differs: x \(3, here 4\)"):
        Work().half(4, checkpoint=tmp_path / "inner")


def test_preconditioners_and_callbacks_of_a_solve_keep_nothing(tmp_path, saved_at_each_step, monkeypatch):
    A, seen, plain = torch.diag(torch.arange(1.0, 9.0).double()), set(), os.replace
    monkeypatch.setattr(os, "replace", lambda file, to: seen.add(pathlib.Path(to).parent) or plain(file, to))
    options = {
        "preconditioner": lambda V: co.linalg.cg(A, V, rtol=0.1).x,
        "callback": lambda *_: co.linalg.nystrom(A, 2),
    }
    found = co.linalg.cg(A, torch.ones(8, 2).double(), checkpoint=tmp_path, **options)
    assert found.accepted and seen == {tmp_path}


@pytest.mark.parametrize("shape", [(8,), (8, 1), (1, 8)])
def test_arguments_of_other_shapes_or_numbers_are_another_problem(tmp_path, shape):
    work = Work()
    x = torch.arange(8.0).double()
    work.half(x, checkpoint=tmp_path)
    assert torch.equal(work.half(x * (1 + 1e-10), checkpoint=tmp_path), x + 1)
    if shape != (8,):
        with pytest.raises(ValueError, match="What differs: x"):
            work.half(x.view(shape), checkpoint=tmp_path)
    with pytest.raises(ValueError, match="What differs: x"):
        work.half(x * 1.1, checkpoint=tmp_path)


@dataclass
class Options:
    values: Any
    cache: list[int] = field(default_factory=list, compare=False)


class Loose:
    def __init__(self, **given: Any) -> None:
        vars(self).update(given)

    def told(self) -> str:
        return ""


def linear(**given: Any) -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    vars(module).update(given)
    return module


LONG = torch.arange(3000.0)
UNLIKE: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "one entry of a long tensor": (lambda: LONG.clone(), lambda: torch.cat([LONG[:1500], LONG[1499:-1]])),
    "a shape": (lambda: torch.zeros(2, 3), lambda: torch.zeros(3, 2)),
    "an entry of a long array": (lambda: LONG.numpy().copy(), lambda: LONG.numpy()[::-1].copy()),
    "a digit": (lambda: 0.1, lambda: 0.1 + 1e-15),
    "an inner tensor": (lambda: {"a": [LONG]}, lambda: {"a": [LONG + 1]}),
    "a field": (lambda: Options(1, [1]), lambda: Options(2, [1])),
    "an attribute": (lambda: Loose(a=LONG, b=1), lambda: Loose(a=LONG, b=2)),
    "a function": (lambda: torch.sin, lambda: torch.cos),
    "an argument of a function": (lambda: partial(torch.add, 1), lambda: partial(torch.add, 2)),
    "the object of a method": (lambda: Loose(a=1).told, lambda: Loose(a=2).told),
    "a class": (lambda: nn.Tanh, lambda: nn.ReLU),
    "a generator": (lambda: torch.Generator().manual_seed(0), lambda: torch.Generator().manual_seed(1)),
    "a module's mode": (lambda: linear(), lambda: linear().eval()),
    "a module's number": (lambda: linear(scale=1.0), lambda: linear(scale=2.0)),
    "a hidden module": (lambda: linear(hidden=[nn.ReLU()]), lambda: linear(hidden=[nn.Tanh()])),
}


@pytest.mark.parametrize("what", UNLIKE)
def test_values_are_told_apart_by_what_they_are(what: str) -> None:
    one, other = UNLIKE[what]
    assert identify(one()) == identify(one()) != identify(other())
    assert " at 0x" not in identify(one())


def test_caches_and_whatever_else_comes_and_goes_do_not_count() -> None:
    assert identify(Options(1, [1])) == identify(Options(1, [2]))
    assert identify(linear()) == identify(linear(trainer=threading.Lock(), later=None))
    parent, child = linear(), nn.Tanh()
    parent.append(child)
    child.parent = [parent]  # type: ignore[assignment]
    assert identify(parent) == identify(parent)


def identity() -> tuple[str, int]:
    """The identity of some values, and a number that depends on the seed of Python's hashes."""
    parts = nn.Sequential(nn.Tanh(), nn.Softplus(2.0))
    return identify({"b": {"x", "y", "z"}, "a": parts, "c": torch.ones(3), "d": print}), hash("x")


def test_an_identity_is_that_of_another_process() -> None:
    (here, seed), (there, other) = identity(), alone(identity)
    assert here == there and (seed != other or os.environ.get("PYTHONHASHSEED", "random") != "random")
