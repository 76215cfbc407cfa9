"""When a checkpoint is written, and what becomes of a run when it cannot be."""

import contextlib
import errno
import os
import shutil
import tempfile

import pytest
import torch

from curvops import storage
from curvops.checkpoint import Checkpoint, NotSaved


def test_saves_come_seldom_and_the_state_is_not_asked_for_between(tmp_path):
    kept, asked = Checkpoint(tmp_path, "test", dict), []
    for _ in range(3):
        kept.save(lambda: asked.append(1) or {})
    assert asked == [] and Checkpoint(tmp_path, "test", dict).state is None
    kept.save(lambda: {"step": 3}, now=True)
    assert Checkpoint(tmp_path, "test", dict).state == {"step": 3}


def test_a_state_that_takes_long_to_write_waits_for_a_longer_run(tmp_path, monkeypatch):
    monkeypatch.setattr("curvops.checkpoint.PAUSE", 0.0)
    kept = Checkpoint(tmp_path, "test", dict)
    kept.save(lambda: {"x": torch.zeros(10**6)})  # 0.04 s at the speed assumed: 2 s of a run
    assert Checkpoint(tmp_path, "test", dict).state is None


def test_a_disk_that_fills_up_in_a_run_warns_once(tmp_path, saved_at_each_step, monkeypatch):
    kept = Checkpoint(tmp_path, "test", dict)
    kept.save(lambda: {"step": 1})

    def full(*_):
        raise OSError(errno.ENOSPC, "no room")

    with monkeypatch.context() as patch:
        patch.setattr(storage, "save", full)
        with pytest.warns(NotSaved, match="no room.*The run goes on") as caught:
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


def test_a_disk_without_room_is_reported_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 60, 40))
    with pytest.raises(OSError, match="40 are free") as raised:
        Checkpoint(tmp_path / "new", "test", dict)
    assert raised.value.errno == errno.ENOSPC and list(tmp_path.iterdir()) == []
