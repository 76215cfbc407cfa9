"""MacKay's steps that were killed end with the bits of those that were not."""

import pytest
import torch

import curvops as co
from curvops.storage import record_of
from tests.linalg.interrupted import equal, killed_after
from tests.randomness import perceptron

DOUBLE = torch.float64


def setting(likelihood="classification", shift=0.0, mean=0.0, width=30, memory_budget=2**20):
    """303 weights, a new linearisation each time, as in a new process. Memory has no room for their whole spectrum."""
    model = perceptron(6, width, 3)
    x = torch.randn(30, 6, dtype=DOUBLE) + shift
    y = torch.arange(30) % 3 if likelihood == "classification" else x[:, :3].sin()
    lin = co.linearize(model, (x, y), likelihood, memory_budget=memory_budget)
    return co.laplace(lin, co.GGN, 1.0, prior_mean=mean, check_mode=False)


def tuned(folder, post=None, seed=0, draws=False, **options):
    """The posterior's hyperparameters, its steps, and what it draws."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    options = {"samples": 2, "steps": 2, "prior": "layer"} | options
    found = co.evidence.mackay(post or setting(), generator=generator, checkpoint=folder, **options)
    how = found.tuning
    record = [found.prior_precision, [record_of(step) for step in how.steps], how.ending.name, how.targets]
    return [*record, found.deviations(2, generator=torch.Generator().manual_seed(1)).draws if draws else None]


RUNS = {
    "layers": lambda folder: tuned(folder, draws=True),
    "with the noise": lambda folder: tuned(folder, setting("regression"), tune_noise=True, samples=3),
    "in function space": lambda folder: tuned(folder, method="dual"),
    "counted by a quadrature": lambda folder: tuned(folder, samples=None, prior="iso"),
}
LOST = {"counted by a quadrature": 60}
"""The products of a group of probes, which is made again as a whole; elsewhere what begins a run and its last step."""


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_was_killed_goes_on_to_the_same_bits(name, after, tmp_path, saved_at_each_step):
    """Wherever within a step it was killed, and without the work inside that was done."""
    run = RUNS[name]
    whole = run(tmp_path / "whole")
    work = after["made"]
    killed = work - 1 if name == "layers" else work // 2
    found = killed_after(killed, lambda: run(tmp_path / "killed"), after)
    assert equal(found, whole)
    assert after["made"] <= work - killed + LOST.get(name, 12), "work was done twice"
    after["made"] = 0
    assert equal(run(tmp_path / "whole"), whole) and after["made"] <= 12, "the result was there"


def test_another_run_is_refused_by_name(tmp_path, annotations_unchecked):
    tuned(tmp_path, steps=1)
    for what, call in {
        "steps \\(1, here 2\\)": lambda: tuned(tmp_path, steps=2),
        "samples": lambda: tuned(tmp_path, steps=1, samples=3),
        "prior": lambda: tuned(tmp_path, steps=1, prior="g"),
        "update": lambda: tuned(tmp_path, steps=1, update="em"),
        "generator": lambda: tuned(tmp_path, steps=1, seed=1),
        "the data": lambda: tuned(tmp_path, setting(shift=0.1), steps=1),
        "the prior's mean": lambda: tuned(tmp_path, setting(mean=0.1), steps=1),
    }.items():
        with pytest.raises(ValueError, match=f"another problem. What differs: .*{what}"):
            call()
