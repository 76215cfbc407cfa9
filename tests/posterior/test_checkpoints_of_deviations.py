"""Draws and modes whose run was killed end with the bits of a run that was not."""

import os
import signal
import sys
import time

import pytest
import torch

import curvops as co
from curvops.storage import record_of
from tests.linalg.interrupted import equal, killed_after
from tests.randomness import perceptron


def setting(prior=0.05, points=40, shift=0.0, curvature=co.GGN):
    """291 weights: more than are solved for densely. A new linearisation each time, as in a new process."""
    model = perceptron(8, 24, 3)
    x, y = torch.randn(points, 8, dtype=torch.float64) + shift, torch.arange(points) % 3
    return co.laplace(co.linearize(model, (x, y), "classification"), curvature, prior, check_mode=False)


def draws(folder, method="cg", seed=0, **options):
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    found = setting().deviations(3, method=method, rtol=1e-7, generator=generator, checkpoint=folder, **options)
    return record_of(found)


def descent(folder):
    """Ends at 30 %, before the last epoch."""
    post, generator = setting(), torch.Generator().manual_seed(1)
    options = co.posterior.StochasticDescent(batch_size=20, epochs=20)
    return record_of(post.deviations(3, method=options, rtol=0.3, generator=generator, checkpoint=folder))


def mode(folder, curvature=co.GGN):
    return record_of(setting(1.0, curvature=curvature).linear_mode(rtol=1e-4, checkpoint=folder))


RUNS = {
    "cg": draws,
    "dual": lambda folder: draws(folder, "dual"),
    "sgd": descent,
    "linear mode": mode,
    "linear mode beside KFAC": lambda folder: mode(folder, co.KFAC),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_was_killed_goes_on_to_the_same_bits(name, after, tmp_path, saved_at_each_step):
    run = RUNS[name]
    whole = run(tmp_path / "whole")
    work = after["made"]
    for killed in (1, work // 2) if name != "dual" else (1,):
        found = killed_after(killed, lambda killed=killed: run(tmp_path / str(killed)), after)
        assert equal(found, whole)
        assert after["made"] <= work - killed + 8, "work was done twice"  # 8 to know the problems again
    assert [path.name for path in (tmp_path / "whole").iterdir() if path.is_dir()] == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_kill_9_loses_nothing(tmp_path, saved_at_each_step, one_thread):
    """At moments over the whole of a run."""
    whole, folder, ended = draws(tmp_path / "whole"), tmp_path / "killed", 0
    folder.mkdir()
    for changes in (2, 4, 8):  # of a folder that a whole run changes some thirty times
        child = os.fork()
        if not child:
            draws(folder)
            os._exit(0)
        seen = {folder.stat().st_mtime_ns}
        while len(seen) <= changes and not os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            seen.add(folder.stat().st_mtime_ns)
            time.sleep(0.0005)
        os.kill(child, signal.SIGKILL)
        ended += os.WIFSIGNALED(os.waitpid(child, 0)[1])
    assert ended
    assert equal(draws(folder), whole)


def test_the_noise_of_a_run_without_a_seed_is_kept(after, tmp_path, saved_at_each_step):
    first = killed_after(8, lambda: draws(tmp_path, seed=None), after)
    again = draws(tmp_path, seed=None)
    assert equal(first, again)
    post = setting()
    expected = post.deviations(3, co.posterior.deviations.Noise(**first["noise"]), method="cg", rtol=1e-10).draws
    P = post.precision.to_dense()
    assert ((P @ (first["draws"] - expected).mT).norm(dim=0) <= 1.1e-7 * (P @ expected.mT).norm(dim=0)).all()


def test_another_posterior_is_refused_by_name(tmp_path, saved_at_each_step):
    found = setting().deviations(2, method="cg", checkpoint=tmp_path)
    for what, call in {
        "its tensors": lambda: setting(0.06).deviations(2, method="cg", checkpoint=tmp_path),
        "the data": lambda: setting(shift=0.1).deviations(2, method="cg", checkpoint=tmp_path),
        "k \\(2, here 3\\)": lambda: setting().deviations(3, method="cg", checkpoint=tmp_path),
        "rtol": lambda: setting().deviations(2, method="cg", rtol=1e-4, checkpoint=tmp_path),
        "method": lambda: setting().deviations(2, checkpoint=tmp_path),
        "noise": lambda: setting().deviations(2, found.noise, method="cg", checkpoint=tmp_path),
    }.items():
        with pytest.raises(ValueError, match=f"another problem. What differs: .*{what}"):
            call()
    prior = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    with pytest.raises(ValueError, match="saves no gradient"):
        setting(prior).deviations(2, method="cg", checkpoint=tmp_path / "gradient")
