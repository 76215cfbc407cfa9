"""Long work is shown on a terminal and told to programs; short work, and work elsewhere, is silent."""

import io
import sys

import pytest
import torch

import curvops as co
from curvops import progress
from curvops.progress import shown


class Terminal(io.StringIO):
    def isatty(self):
        return True


def stand_in(monkeypatch, stream):
    """Standard error, replaced in the test itself: between a fixture and the test pytest puts its own there."""
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def run(**options):
    with shown("solve", 5, **options) as steps:
        for _ in range(5):
            steps.advance(1, "residual 0.1")


def test_short_work_is_silent(monkeypatch):
    terminal = stand_in(monkeypatch, Terminal())
    run()
    assert terminal.getvalue() == ""


def test_long_work_shows_itself_and_leaves_nothing(monkeypatch):
    terminal = stand_in(monkeypatch, Terminal())
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    run()
    text = terminal.getvalue()
    assert "solve" in text and "/5" in text
    assert text.rsplit("\r", 1)[1].strip() == ""  # the bar is wiped
    terminal = stand_in(monkeypatch, Terminal())
    run(progress=False)
    assert terminal.getvalue() == ""


def test_elsewhere_it_is_silent_unless_asked(monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    stream = stand_in(monkeypatch, io.StringIO())
    run()
    assert stream.getvalue() == ""
    run(progress=True)
    assert "solve" in stream.getvalue()


def test_an_error_takes_the_bar_away(monkeypatch):
    terminal = stand_in(monkeypatch, Terminal())
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    with pytest.raises(KeyboardInterrupt), shown("solve", 5) as steps:
        steps.advance()
        raise KeyboardInterrupt
    assert terminal.getvalue().rsplit("\r", 1)[1].strip() == ""


def linearized(told):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    batches = [(torch.randn(4, 3), torch.arange(4) % 2) for _ in range(3)]
    return co.linearize(model, batches, "classification", progress=told)


def test_a_function_hears_of_every_batch_and_of_the_total_once_it_is_known():
    heard = []
    lin = linearized(lambda *step: heard.append(step))
    v = torch.ones(lin.num_parameters)
    co.EmpiricalFisher(lin)
    G = co.GGN(lin)
    _ = G @ v
    assert [step[1:] for step in heard[-3:]] == [(4, heard[-1][2]), (8, heard[-1][2]), (12, heard[-1][2])]
    heard.clear()
    co.KFAC(lin)
    assert heard[-1] == ("rows of the curvature's root", 12, 12)
    heard.clear()
    lin.jacobian(torch.randn(9, 3)) @ v
    assert heard[-1][1] == 9
    heard.clear()
    assert lin.cast(torch.float64).passes.progress is lin.passes.progress


@pytest.mark.usefixtures("annotations_unchecked")
def test_what_is_no_way_to_show_progress_is_refused():
    with pytest.raises(TypeError, match="progress must be None, False, True or a function.*'yes'"):
        linearized("yes")
