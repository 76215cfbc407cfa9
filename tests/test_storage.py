"""Trees as folders: what comes back, what is refused, and what a crash at any step leaves."""

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from curvops import storage
from tests.linalg.interrupted import equal

TREE = {"words": ["a", "ü"], "numbers": [1, 2.5, None, True, -(2**62)], "deep": {"x": torch.arange(3.0)}}


def save(path: Path, tree: Any = TREE, kind: str = "thing", version: int = 1) -> None:
    storage.save(path, kind, version, tree)


def load(path: Path, kind: str = "thing", version: int = 1) -> Any:
    found, tree = storage.load(path, kind, version)
    assert found == 1
    return tree


def contents(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "curvops.json").read_text())
    return found


def tensors_of(path: Path) -> Path:
    return path / contents(path)["tensors"]["file"]


def test_plain_values_and_tensors_come_back(tmp_path: Path) -> None:
    shared = torch.randn(4, 6)
    tree = {
        **TREE,
        "": {"$x": 1, "$tensor": "no tensor", "$float": 2},
        "numpy": [np.int64(-3).item(), np.float32(0.5).item()],
        "infinite": [float("inf"), -float("inf")],
        "a": {"b.c": torch.ones(1)},
        "a.b": {"c": torch.zeros(1)},  # both are a.b.c
        "dtypes": [shared.to(t) for t in (torch.float64, torch.bfloat16, torch.bool, torch.int64)],
        "shapes": [torch.tensor(2.0), torch.empty(0, 3), shared.mT, shared[1:3, ::2], shared, shared[0].expand(2, 6)],
        "turned": torch.randn(2, 3, 4).permute(2, 0, 1),
        "leaf": torch.randn(2).requires_grad_(),
    }
    save(tmp_path / "new" / "deep")
    save(tmp_path / "new" / "deep", tree | {"numpy": [np.int64(-3), np.float32(0.5)]})
    found = load(tmp_path / "new" / "deep")
    tree["leaf"] = tree["leaf"].detach()
    assert equal(found, tree)
    assert found["turned"].stride() == tree["turned"].stride() and found["shapes"][2].stride() == (1, 6)
    found["deep"]["x"].add_(1)  # memory of its own: neither the file nor another load sees it
    assert equal(load(tmp_path / "new" / "deep"), tree)


def test_the_folder_holds_two_files_that_all_who_may_read_the_folder_may_read(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for k in range(3):
        save(tmp_path, {"x": torch.full((3,), float(k))})
    names = {file.name for file in tmp_path.iterdir()}
    assert names == {"curvops.json", "notes.txt", tensors_of(tmp_path).name}
    assert len({(tmp_path / name).stat().st_mode for name in names}) == 1


def test_what_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(FileExistsError, match="is a file"):
        save(file)
    with pytest.raises(OSError, match="was not written"):
        save(file / "below")
    bad_ones = [(object(), "object"), ({"x": {3}}, "at.x is a set"), (1j, "at is a complex")]
    for bad, what in bad_ones:
        with pytest.raises(TypeError, match=what):
            save(tmp_path / "new", {"at": bad})
    assert [each.name for each in tmp_path.iterdir()] == ["file"] and file.read_text() == "mine"
    save(tmp_path / "chain", kind="chain")
    with pytest.raises(FileExistsError, match="holds 'chain', which 'thing' does not replace"):
        save(tmp_path / "chain")


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing was saved"):
        load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"is no folder with curvops\.json: nothing was saved there"):
        load(tmp_path)
    save(tmp_path)
    with pytest.raises(FileNotFoundError, match="is no folder"):
        load(tmp_path / "curvops.json")
    with pytest.raises(ValueError, match="holds 'thing', expected 'chain'"):
        load(tmp_path, "chain")


def write(path: Path, **changes: Any) -> None:
    (path / "curvops.json").write_text(json.dumps(contents(path) | changes))


DAMAGE: dict[str, tuple[Any, str]] = {
    "newer tree": (lambda p: save(p, version=2), "version 2 .* reads up to 1: upgrade"),
    "newer layout": (lambda p: write(p, layout=9), "layout 9 .* upgrade"),
    "another tree": (lambda p: write(p, tree={}), "damaged: curvops.json"),
    "an older version": (lambda p: write(p, version=0), "damaged: curvops.json"),
    "another file": (lambda p: write(p, tensors={"file": "../secret", "sha256": ""}), "damaged: curvops.json"),
    "not JSON": (lambda p: (p / "curvops.json").write_text('{"format": '), "damaged: curvops.json is not a file"),
    "binary": (lambda p: (p / "curvops.json").write_bytes(b"\xff\xfe\x00"), "damaged: curvops.json is not a file"),
    "other JSON": (lambda p: (p / "curvops.json").write_text("[1]"), "not a file of curvops"),
    "truncated": (lambda p: os.truncate(tensors_of(p), tensors_of(p).stat().st_size - 1), "tensors-.* truncated"),
    "empty": (lambda p: tensors_of(p).write_bytes(b""), "tensors-.* truncated"),
    "missing": (lambda p: tensors_of(p).unlink(), "tensors-.* is missing"),
}


def flip_a_bit(path: Path) -> None:
    data = bytearray(tensors_of(path).read_bytes())
    data[-1] ^= 1
    tensors_of(path).write_bytes(data)


DAMAGE["a bit"] = (flip_a_bit, "tensors-.* truncated, or changed")


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named_and_the_next_save_replaces_it(name: str, tmp_path: Path) -> None:
    save(tmp_path)
    damage, message = DAMAGE[name]
    damage(tmp_path)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)
    save(tmp_path)
    assert equal(load(tmp_path), TREE)


class Crash(BaseException):
    """The process is gone: nothing is caught, nothing is tidied up."""


BEFORE = ("mkdtemp", "save_file", "flush tensors", "flush tree", "replace tensors", "flush names", "replace tree")
"""The steps that change the disk, up to the one that makes the new save the folder's."""


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("tidied", [True, False], ids=["error", "killed"])
def test_a_crash_at_any_step_leaves_the_old_or_the_new(
    tidied: bool, first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call that changes the disk fails in turn; where the process is killed, nothing is removed afterwards."""
    new, outcomes = {"x": torch.ones(5)}, []
    for step in range(20):
        path = tmp_path / f"{step}"
        if not first:
            save(path)
        left = step

        def crashing(work: Any) -> Any:
            def call(*args: Any, **options: Any) -> Any:
                nonlocal left
                left -= 1
                if left < 0:
                    raise OSError(5, "I/O error") if tidied else Crash
                return work(*args, **options)

            return call

        with monkeypatch.context() as patch:
            for module, name in (
                *((storage.tempfile, "mkdtemp"), (storage, "save_file"), (os, "fsync"), (storage.os, "replace")),
                *(() if tidied else ((storage.shutil, "rmtree"), (Path, "unlink"), (Path, "rmdir"))),
            ):
                patch.setattr(module, name, crashing(getattr(module, name)))
            try:
                save(path, new)
            except OSError as error:
                assert tidied and "was not written (I/O error)" in str(error)
            except Crash:
                assert not tidied
            else:
                assert equal(load(path), new)
                break
        if first and not (path / "curvops.json").exists():
            outcomes.append("nothing")
            with pytest.raises(FileNotFoundError):
                load(path)
        else:
            outcomes.append("new" if equal(load(path), new) else "old")
            assert outcomes[-1] == "new" or equal(load(path), TREE)
            assert not tidied or len(list(path.iterdir())) == 2 or outcomes[-1] == "new"
        save(path, new)  # what is left of the crash does no harm ...
        assert equal(load(path), new)
        for each in path.iterdir():
            os.utime(each, (0, 0))
        save(path)  # ... and is removed once it is old
        assert equal(load(path), TREE) and len(list(path.iterdir())) == 2
    assert outcomes[: len(BEFORE)] == ["nothing" if first else "old"] * len(BEFORE)
    assert set(outcomes[len(BEFORE) :]) == (set() if tidied else {"new"})


def test_a_disk_that_takes_no_more_leaves_the_earlier_contents(tmp_path: Path) -> None:
    import resource  # of POSIX alone

    save(tmp_path / "kept")
    large = {"x": torch.zeros(10_000)}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # no file of this process may grow beyond
    try:
        for path in (tmp_path / "kept", tmp_path / "new" / "deep"):
            with pytest.raises(OSError, match="was not written .* unchanged"):
                save(path, large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert equal(load(tmp_path / "kept"), TREE) and len(list((tmp_path / "kept").iterdir())) == 2


def test_young_files_of_another_save_are_left_alone(tmp_path: Path) -> None:
    save(tmp_path)
    running, left = tmp_path / ".writing-x", tmp_path / f"tensors-{0:016x}.safetensors"
    running.mkdir()
    left.write_text("")
    save(tmp_path, {})
    assert running.exists() and left.exists()
    past = time.time() - 7200
    for each in (running, left):
        os.utime(each, (past, past))
    save(tmp_path)
    assert not running.exists() and not left.exists()


def test_what_a_crash_left_in_a_folder_is_removed_with_it(tmp_path: Path) -> None:
    place = tmp_path / "saved"
    save(place)
    (place / ".writing-x").mkdir()
    (place / ".writing-x" / "tensors").write_text("half")
    (place / "notes.txt").write_text("the user's own")
    storage.discard(place, "another kind")
    assert len(list(place.iterdir())) == 4
    storage.discard(place, storage.kind_of(place) or "")
    assert [each.name for each in place.iterdir()] == ["notes.txt"]
