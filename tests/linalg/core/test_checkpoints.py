"""Runs that were killed go on to the same bits; other problems are refused by name.

Tests `matrix_identity.py`.
"""

import pytest
import torch

import curvops as co
from curvops.storage import record_of
from tests.linalg.interrupted import counted, equal, goes_on
from tests.linalg.matrices import generator, symmetric
from tests.linalg.systems import right_hand_sides

N = 40
CLUSTERED = symmetric(torch.cat([torch.linspace(0, 1, N - 9), torch.full((5,), 3.0), torch.linspace(2, 5, 4)]).double())
SPREAD = symmetric(torch.logspace(0, 1, N).double())
B = right_hand_sides(N, 5)
B[:, 2] = 0


def cg(A, folder, sides=B, **options):
    return record_of(co.linalg.cg(A, sides, rtol=1e-6, checkpoint=folder, **options))


def eigsh(A, folder, **options):
    return record_of(co.linalg.eigsh(A, rtol=1e-8, generator=generator(1), checkpoint=folder, **options))


def low_rank(A, folder, **options):
    found = co.low_rank(A, generator=generator(1), checkpoint=folder, **options)
    return [*found.representation(), record_of(found.error)]


def nystrom(A, folder, **options):
    return record_of(co.linalg.nystrom(A, generator=generator(1), checkpoint=folder, **options))


RUNS = {
    "cg": (cg, SPREAD, {}),
    "cg by columns": (cg, SPREAD, {"block": False}),
    "cg that keeps directions": (cg, SPREAD, {"keep_directions": 70}),
    "cg in groups": (cg, SPREAD, {"memory_budget": 12 * N * 8 * 3}),
    "cg from a guess": (cg, SPREAD, {"x0": torch.ones_like(B)}),
    "eigsh": (eigsh, CLUSTERED, {"k": 4}),
    "eigsh with restarts": (eigsh, CLUSTERED, {"k": 6, "memory_budget": 26 * N * 8}),
    "low rank": (low_rank, SPREAD, {"rtol": 0.3}),
    "low rank, rank given": (low_rank, SPREAD, {"rank": 35}),
    "nystrom": (nystrom, SPREAD, {"rank": 35}),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_was_killed_goes_on_to_the_same_bits(name, tmp_path, saved_at_each_step):
    run, matrix, options = RUNS[name]

    def kept(A, folder):
        return run(A, folder, **options)

    whole = counted(matrix, float("inf"))
    expected, products = kept(whole, None), whole.products
    whole, _ = goes_on(kept, matrix, tmp_path / "whole", [])
    assert name in ("low rank, rank given", "nystrom") or equal(whole, expected)  # these multiply in smaller blocks
    killed = max(1, 2 * products // 3)
    found, left = goes_on(kept, matrix, tmp_path / "killed", [killed])
    assert equal(found, whole)
    assert left <= max(1, products - killed) + 3, "products were made twice"
    if products > 9:
        found, _ = goes_on(kept, matrix, tmp_path / "again", [1, *[products // 3] * 2])
        assert equal(found, whole)
    again, left = goes_on(kept, matrix, tmp_path / "killed", [])
    assert equal(again, whole) and left == 1, "the result was there"


def test_another_problem_is_refused_by_name(tmp_path, saved_at_each_step):
    eigsh(CLUSTERED, tmp_path, k=4)
    refused = {
        "the size": lambda: eigsh(SPREAD[:30, :30], tmp_path, k=4),
        "its tensors": lambda: eigsh(CLUSTERED + 1e-9, tmp_path, k=4),
        "its products": lambda: eigsh(SPREAD, tmp_path, k=4),
        "the kind of operator": lambda: eigsh(co.linalg.Dense(CLUSTERED), tmp_path, k=4),
        "the dtype": lambda: eigsh(CLUSTERED.float(), tmp_path, k=4),
        "k \\(4, here 5\\)": lambda: eigsh(CLUSTERED, tmp_path, k=5),
        "which": lambda: eigsh(CLUSTERED, tmp_path, k=4, which="SA"),
        "generator": lambda: co.linalg.eigsh(CLUSTERED, 4, rtol=1e-8, checkpoint=tmp_path),
        "algorithm": lambda: low_rank(CLUSTERED, tmp_path, rank=4),
    }
    for what, call in refused.items():
        with pytest.raises(ValueError, match=f"another problem. What differs: .*{what}"):
            call()


def test_right_hand_sides_of_another_system_are_refused(tmp_path, saved_at_each_step):
    cg(SPREAD, tmp_path)
    for sides in (2 * B, B[:, :4], B[:, 0]):
        with pytest.raises(ValueError, match="What differs: B"):
            cg(SPREAD, tmp_path, sides=sides)
    places = torch.eye(N, dtype=torch.float64)[:, N - 2 :]
    cg(SPREAD, tmp_path / "last", sides=places[:, 0])
    with pytest.raises(ValueError, match="What differs: B"):
        cg(SPREAD, tmp_path / "last", sides=places[:, 1])
    with pytest.raises(ValueError, match="x0"):
        cg(SPREAD, tmp_path, x0=torch.ones_like(B))
    with pytest.raises(ValueError, match="saves no checkpoint of iterative refinement"):
        co.linalg.cg(SPREAD, B, refine=True, checkpoint=tmp_path / "new")


def test_a_folder_that_cannot_be_written_is_reported_before_the_first_step(tmp_path):
    (tmp_path / "file").write_text("")
    A = counted(SPREAD, 1)  # the product by which the matrix is known again
    for path, error in ((tmp_path / "file", FileExistsError), (tmp_path / "file" / "in it", OSError), (3, TypeError)):
        A.products = 0
        with pytest.raises(error):
            co.linalg.cg(A, B, checkpoint=path)
    (tmp_path / "curvops.json").write_text("nonsense")
    with pytest.raises(ValueError, match="delete the folder or pass another path"):
        co.linalg.cg(SPREAD, B, checkpoint=tmp_path)


def test_a_source_of_random_numbers_ends_as_that_of_the_whole_run(tmp_path, saved_at_each_step):
    states = []
    for _ in range(2):  # the second has nothing to do
        source = generator(1)
        co.linalg.eigsh(CLUSTERED, 4, generator=source, checkpoint=tmp_path)
        states.append(source.get_state())
    source = generator(1)
    co.linalg.eigsh(CLUSTERED, 4, generator=source)
    assert torch.equal(states[0], states[1]) and torch.equal(states[0], source.get_state())


def test_without_a_generator_the_numbers_drawn_are_kept(tmp_path, saved_at_each_step):
    def run(A, folder):
        return record_of(co.linalg.eigsh(A, 4, checkpoint=folder))

    first, _ = goes_on(run, CLUSTERED, tmp_path, [4])
    torch.manual_seed(5)
    again, _ = goes_on(run, CLUSTERED, tmp_path, [])
    assert equal(first, again)
