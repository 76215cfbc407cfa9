"""Long work is shown on a terminal and told to programs; short work, and work elsewhere, is silent.

Tests `ambient.py`.
"""

import inspect
import io
import itertools
import re
import sys
import time
from inspect import signature

import pytest
import torch
from linear_operator import to_linear_operator
from tqdm import tqdm

import curvops as co
from curvops import linalg
from curvops.ambient import progress_bar
from tests.threads import run_in_threads


class Terminal(io.StringIO):
    def isatty(self):
        return True


def stand_in(monkeypatch, stream):
    """Standard error, replaced in the test itself: between a fixture and the test pytest puts its own there."""
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def at_length(monkeypatch):
    """Work takes ten seconds from one look at the clock to the next."""
    monkeypatch.setattr(time, "monotonic", itertools.count(0.0, 10.0).__next__)


def notes_of(monkeypatch):
    """The notes behind all bars, which a fast machine draws a few of."""
    notes = []
    monkeypatch.setattr(tqdm, "set_postfix_str", lambda self, note, refresh: notes.append(note))
    return notes


def run(**options):
    with progress_bar("solve", 5, **options) as steps:
        for _ in range(5):
            steps.advance(1, "residual 0.1")


def test_long_work_shows_itself_on_a_terminal_and_leaves_nothing(monkeypatch):
    terminal = stand_in(monkeypatch, Terminal())
    run()
    assert terminal.getvalue() == ""  # short work
    at_length(monkeypatch)
    run(progress=False)
    assert terminal.getvalue() == ""
    run()
    text = terminal.getvalue()
    assert "solve" in text and "/5" in text
    assert text.rsplit("\r", 1)[1].strip() == ""  # the bar is wiped
    stream = stand_in(monkeypatch, io.StringIO())
    run()
    assert stream.getvalue() == ""
    run(progress=True)
    assert "solve" in stream.getvalue()


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
    for curvature in (co.KFAC, co.BlockDiagonal, lambda lin: co.Subnetwork(co.GGN(lin), torch.arange(9))):
        heard.clear()
        curvature(lin)
        assert heard[-1] == ("rows of the curvature's root", 12, 12)  # of two classes, a column each
    heard.clear()
    lin.jacobian(torch.randn(9, 3)) @ v
    assert heard[-1][1] == 9
    heard.clear()
    assert lin.cast(torch.float64).passes.progress is lin.passes.progress


def test_rows_of_a_batch_are_counted_column_by_column():
    """One large batch was silent to its end."""
    seen = []
    model = torch.nn.Sequential(torch.nn.Linear(3, 1000), torch.nn.Tanh(), torch.nn.Linear(1000, 3))
    points = torch.randn(1000, 3), torch.arange(1000) % 3
    lin = co.linearize(model, points, "classification", progress=lambda *step: seen.append(step))
    seen.clear()
    co.KFAC(lin)
    assert seen == [("rows of the curvature's root", rows, 2000) for rows in (1000, 2000)]


SIZE = 60
DECAYING = torch.diag(torch.arange(1.0, SIZE + 1).double() ** -2)
PRECISION = DECAYING + 0.01 * torch.eye(SIZE).double()
RIGHT = torch.cos(torch.arange(3.0 * SIZE).double()).reshape(SIZE, 3)


def seeded(function, *given, **options):
    return lambda progress: function(*given, generator=torch.Generator().manual_seed(0), progress=progress, **options)


def plain(function, *given, **options):
    return lambda progress: function(*given, progress=progress, **options)


ALGORITHMS = {
    "cg": plain(linalg.cg, PRECISION, RIGHT),
    "cg from a start": plain(linalg.cg, PRECISION, RIGHT, x0=RIGHT, block=False),
    "cg refined": plain(linalg.cg, PRECISION.float(), RIGHT.float(), refine=True),
    "cg preconditioned": plain(linalg.cg, PRECISION, RIGHT, preconditioner=PRECISION.inverse()),
    "minres": plain(linalg.minres, PRECISION - 0.1 * torch.eye(SIZE).double(), RIGHT),
    "lsmr": plain(linalg.lsmr, PRECISION[:, :20], RIGHT),
    "dual_descent": seeded(linalg.dual_descent, DECAYING, RIGHT, noise=1.0, batch_size=20),
    "eigsh": seeded(linalg.eigsh, DECAYING, 3),
    "eigsh inside": seeded(linalg.eigsh, DECAYING, 3, sigma=0.05, rtol=1e-3, max_matvecs=10_000),
    "svds": seeded(linalg.svds, DECAYING[:, :40], 3),
    "lanczos": seeded(linalg.lanczos, DECAYING, 10),
    "trace": seeded(linalg.trace, DECAYING, max_matvecs=20),
    "trace exactly": seeded(linalg.trace, DECAYING, method="exact"),
    "trace to a tolerance": seeded(linalg.trace, PRECISION + RIGHT @ RIGHT.mT, method="hutchinson", rtol=0.02),
    "diagonal": seeded(linalg.diagonal, DECAYING, max_matvecs=20),
    "frobenius_norm": seeded(linalg.frobenius_norm, DECAYING, max_matvecs=20),
    "logdet": seeded(linalg.logdet, DECAYING, shift=0.01, max_matvecs=50),
    "logdet exactly": seeded(linalg.logdet, DECAYING, shift=0.01),
    "logdet of a grid": seeded(linalg.logdet, DECAYING, shift=torch.tensor([0.01, 0.1]), max_matvecs=50),
    "logdet by an estimated bound": seeded(linalg.logdet, PRECISION, lower_bound="estimate", max_matvecs=50),
    "effective_dimension": seeded(linalg.effective_dimension, DECAYING, 0.01, max_matvecs=50),
    "spectral_density": seeded(linalg.spectral_density, DECAYING, probes=2, steps=20),
    "apply_function": plain(linalg.apply_function, PRECISION, torch.exp, RIGHT),
    "sqrt": plain(linalg.sqrt, PRECISION, RIGHT),
    "inverse_sqrt": plain(linalg.inverse_sqrt, PRECISION, RIGHT, lower_bound=0.01),
    "low_rank": seeded(linalg.low_rank, DECAYING, 10),
    "nystrom": seeded(linalg.nystrom, DECAYING, 10),
    "cholesky": seeded(linalg.cholesky, DECAYING, 10),
    "cholesky of an operator": seeded(linalg.cholesky, to_linear_operator(DECAYING) @ torch.eye(SIZE).double(), 10),
    "block_jacobi": plain(linalg.block_jacobi, to_linear_operator(DECAYING), 5, 0.01),
    "solve": plain(linalg.solve, PRECISION, RIGHT, method="cg"),
    "spectral_quadrature": seeded(linalg.spectral_quadrature, DECAYING, shift=0.01, max_matvecs=50),
}


def answer(found):
    """The numbers of a result, of whatever kind."""
    if isinstance(found, linalg.BlockPreconditioner):
        return found @ torch.eye(SIZE).double()
    if isinstance(found, (torch.Tensor, linalg.LowRank)):
        return found.to_dense()
    if isinstance(found, linalg.SpectralQuadrature):
        return found.logdet(0.01).value
    names = ("x", "values", "eigenvalues", "value", "T", "F", "density")
    return next(getattr(found, name) for name in names if hasattr(found, name))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_tells_of_its_products_up_to_the_last_and_computes_the_same(name):
    heard = []
    found = ALGORITHMS[name](lambda *step: heard.append(step))
    counts = [done for _, done, _ in heard]
    assert counts == sorted(set(counts)) and counts
    assert {what for what, _, _ in heard} == {name.split()[0]}
    known = found.error.matvecs if hasattr(found, "error") else getattr(found, "matvecs", counts[-1])
    assert counts[-1] == known
    totals = {total for _, _, total in heard}
    assert len(totals) == 1 and (None in totals or counts[-1] <= totals.pop())
    silent = ALGORITHMS[name](False)
    assert torch.equal(answer(found), answer(silent))


def test_a_steady_rate_tells_how_long_a_solve_will_take(monkeypatch):
    """Without an aim there is none."""
    stand_in(monkeypatch, Terminal())
    notes = notes_of(monkeypatch)
    at_length(monkeypatch)
    for rtol, told in ((1e-10, True), (0.0, False)):
        notes.clear()
        linalg.cg(torch.diag(torch.logspace(-3, 0, SIZE).double()), RIGHT[:, 0], rtol=rtol)
        found = [re.fullmatch(r"residual \S+, about [\d:]+ left at this rate", note) for note in notes]
        assert any(found) is told and all(match or "left" not in note for match, note in zip(found, notes))


def test_every_public_algorithm_has_the_keyword():
    tested = {name.split()[0] for name in ALGORITHMS}
    spending = [f for f in vars(linalg).values() if inspect.isfunction(f) and "progress" in signature(f).parameters]
    assert {f.__name__ for f in spending} == tested
    limited = {"memory_budget", "max_matvecs", "maxiter"}
    public = [getattr(linalg, name) for name in linalg.__all__]
    for f in filter(inspect.isfunction, public):
        assert f.__name__ in tested or not limited & set(signature(f).parameters), f


def test_what_a_product_a_preconditioner_or_a_listener_does_counts_for_nothing():
    inner = lambda V: linalg.cg(PRECISION, V).x  # noqa: E731
    heard = []
    solution = linalg.cg(PRECISION, RIGHT, preconditioner=inner, progress=lambda *step: heard.append(step))
    assert heard[-1] == ("cg", solution.matvecs, None)
    heard.clear()

    def listen(*step):
        heard.append(step)
        linalg.trace(PRECISION, method="exact")

    found = linalg.lanczos(PRECISION, 5, start=RIGHT[:, 0], progress=listen)
    assert heard == [("lanczos", done, 5) for done in range(1, found.matvecs + 1)]
    heard.clear()
    called = lambda depth, errors: linalg.trace(PRECISION, method="exact")  # noqa: E731
    root = linalg.sqrt(PRECISION, RIGHT, callback=called, progress=lambda *step: heard.append(step))
    assert heard[-1] == ("sqrt", root.matvecs, None)


def test_an_interrupted_algorithm_takes_its_bar_away_and_the_next_one_shows_its_own(monkeypatch):
    terminal = stand_in(monkeypatch, Terminal())
    at_length(monkeypatch)

    def interrupted(iteration, residuals):
        if iteration == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        linalg.cg(PRECISION, RIGHT, callback=interrupted)
    assert "cg" in terminal.getvalue()
    assert terminal.getvalue().rsplit("\r", 1)[1].strip() == ""
    heard = []
    linalg.eigsh(DECAYING, 2, progress=lambda *step: heard.append(step))
    assert heard[0][0] == "eigsh" and heard[0][1] < 5


@pytest.mark.parametrize(
    "name, note",
    [("cg", "residual"), ("minres", "residual"), ("eigsh", "residual"), ("trace to a tolerance", "standard error")],
)
def test_the_bar_says_what_was_reached(name, note, monkeypatch):
    at_length(monkeypatch)
    stream = stand_in(monkeypatch, io.StringIO())
    ALGORITHMS[name](None)
    assert stream.getvalue() == ""
    shown_notes = notes_of(monkeypatch)
    ALGORITHMS[name](True)
    assert name.split()[0] in stream.getvalue() and any(note in text for text in shown_notes)


def test_algorithms_on_a_network_show_themselves_as_its_linearisation_was_asked_to():
    heard = []
    lin = linearized(lambda *step: heard.append(step))
    P = co.GGN(lin).add_diagonal(1.0)
    v = torch.ones(lin.num_parameters)
    lin.cast(torch.float64)
    solution = linalg.cg(P, v)
    assert ("cg", solution.matvecs, None) in heard and any(what.startswith("pass") for what, _, _ in heard)
    heard.clear()
    co.GGN(lin.cast(torch.float64)).eigsh(2)
    assert "eigsh" in {what for what, _, _ in heard}
    heard.clear()
    other = []
    solution = linalg.cg(P, v, progress=lambda *step: other.append(step))
    assert other[-1][1] == solution.matvecs and "cg" not in {what for what, _, _ in heard}
    heard.clear()
    linalg.cg(P, v, progress=False)
    assert not heard  # not of the passes either


def test_a_posterior_s_long_calls_count_the_products_of_all_their_solves():
    heard, model = [], torch.nn.Sequential(torch.nn.Linear(4, 50), torch.nn.Tanh(), torch.nn.Linear(50, 2))
    data = torch.randn(30, 4), torch.arange(30) % 2
    lin = co.linearize(model, data, "classification", progress=lambda *step: heard.append(step))
    post = co.laplace(lin, co.GGN, 1.0, check_mode=False)
    heard.clear()
    drawn = post.deviations(2, method="cg", generator=torch.Generator().manual_seed(0))
    names = {what for what, _, _ in heard}
    assert "deviations" in names and not {"cg", "nystrom"} & names and drawn.accepted
    assert 0 < max(done for what, done, _ in heard if what == "deviations") <= drawn.matvecs
    heard.clear()
    post.linear_mode()
    names = {what for what, _, _ in heard}
    assert "linear_mode" in names and not {"cg", "nystrom"} & names


def test_other_threads_have_their_own():
    heard = {}

    def work(name):
        def listen(what, done, total):
            heard.setdefault(name, []).append(done)

        return linalg.lanczos(PRECISION, 20, start=RIGHT[:, 0], progress=listen)

    def outer(what, done, total):
        if done == 5:
            run_in_threads(lambda: work("inner"))
        heard.setdefault("outer", []).append(done)

    linalg.lanczos(PRECISION, 20, start=RIGHT[:, 0], progress=outer)
    assert heard["inner"] == heard["outer"] == list(range(1, 21))


@pytest.mark.usefixtures("annotations_unchecked")
@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_refuses_what_is_no_way_to_show_progress(name):
    with pytest.raises(TypeError, match="progress must be None, False, True or a function.*3"):
        ALGORITHMS[name](3)
