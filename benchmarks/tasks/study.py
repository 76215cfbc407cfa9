"""Whole tasks, compared with other packages.

    .venv-peers/bin/python -m benchmarks.tasks [--threads 2] [--row 3] [--report]

Each program runs from a trained network to the answer, and builds everything that it needs. Each package has a process
of its own, in which its modules are loaded and the network is trained; the two then run in turn, and the ratio is taken
pair by pair, after a first run of each, which loads code, if both together last less than a minute. Peak memory is the
smallest of the runs, above what was resident before them. A program of another package that does not end within
`--limit` seconds is stopped: its time is then at least that, and the answers are compared on a smaller problem. Lines
are the statements of the program that a user writes. An answer that is worse than the other's is an error.

Rows are kept one by one: a run that was interrupted goes on, and `--row` measures one again. Figures of one and of two
threads stand side by side. A row that fails is left out of the first table, and named in the second one.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.machine import facts, peer_version, resident
from benchmarks.report import MEASURED
from benchmarks.study_page import Study, measured, part
from benchmarks.tables import MIB, machine_line, table, tables
from benchmarks.tasks import of_matrices, of_posteriors, of_samplers
from benchmarks.tasks.task import Task, statements
from benchmarks.timing import Comparison, Spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TASKS: dict[str, Task] = of_posteriors.TASKS | of_matrices.TASKS | of_samplers.TASKS
SHORT = {
    "toy": "91 weights: full GGN, prior and noise tuned",
    "last-layer": "CNN, last layer: KFAC, prior tuned",
    "kfac": "CNN, 422,000 weights: KFAC, prior tuned",
    "diagonal": "CNN, 422,000 weights: diagonal",
    "subnetwork": "CNN, 1,000 largest weights: full GGN",
    "lora": "LoRA of a GPT-2 small: KFAC",
    "resnet": "ResNet-18: KFAC",
    "draws": "64 posterior draws, full GGN",
    "spectrum": "20 eigenvalues and the spectral density",
    "logdet": "log det(G + I), full GGN",
    "sghmc": "10,000 steps of SGHMC",
    "ekf": "a diagonal EKF",
}
"""The tasks in few words, for a chart."""
LONG, PAIRS = 60.0, 9
"""Seconds of a first run of both from which on it counts; the largest number of pairs, which take half of that."""
OURS, PATIENCE = 600, 900
"""Seconds that our program may take, and that a problem may take to be made or answers to be looked at."""


class Program:
    """A process that prepares a task and runs one package's program for it when asked."""

    def __init__(self, name: str, whose: str, threads: int) -> None:
        self.label = f"{name}, {whose}"
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.tasks.process", name, whose, str(threads)]
        root = Path(__file__).parents[2]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, bufsize=0, cwd=root, **pipes)  # unbuffered: `select` sees all

    def line(self, wait: float = PATIENCE) -> dict[str, Any] | None:
        """The next answer; None where there is none after so many seconds. Raises RuntimeError if the process ended."""
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], wait)[0]:
            return None
        text = self.process.stdout.readline()
        if not text:
            raise RuntimeError(f"{self.label}: the process ended.")
        found: dict[str, Any] = json.loads(text)
        return found

    def ask(self, what: str, wait: float = PATIENCE) -> dict[str, Any]:
        """What the process answers. Raises RuntimeError if it does not within so many seconds."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n".encode())
        found = self.line(wait)
        if found is None:
            raise RuntimeError(f"{self.label}: no answer within {wait} s.")
        return found

    def run(self, limit: float) -> dict[str, Any]:
        """Seconds and peak of one run; no seconds where the limit passed, after which the process is ended."""
        before = self.ask("run")["before"]
        found = self.line(limit)
        if found is None:
            found = {"seconds": None, "peak": resident("VmHWM", self.process.pid) - before}
            self.end()
        return found

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def compare(name: str, threads: int, limit: float) -> dict[str, Any]:
    """Run a task of both packages in turn, each in a process of its own."""
    task, programs = TASKS[name], {whose: Program(name, whose, threads) for whose in ("ours", "theirs")}
    try:
        for program in programs.values():
            if program.line() is None:
                raise RuntimeError(f"{program.label}: the problem was not made within {PATIENCE} s.")
        first = {"theirs": programs["theirs"].run(limit), "ours": programs["ours"].run(OURS)}
        if first["ours"]["seconds"] is None:
            raise RuntimeError(f"{name}: our program did not end within {OURS} s.")
        ended = first["theirs"]["seconds"] is not None
        asked = "quality"
        if not ended and task.fewer is not None:
            asked, programs["theirs"] = "fewer", Program(name, "theirs", threads)
            programs["theirs"].line()
        judged = ["ours", "theirs"] if ended or asked == "fewer" else ["ours"]
        quality = {whose: programs[whose].ask(asked) for whose in judged}
        if "theirs" in quality and not task.same(quality["ours"], quality["theirs"]):
            raise RuntimeError(f"{name}: the answers are not of one quality: {quality}")
        pairs, both = [first], sum(run["seconds"] or limit for run in first.values())
        if both < LONG:
            again = max(1, min(PAIRS, round(LONG / 2 / both)))
            pairs = [{whose: programs[whose].run(OURS) for whose in first} for _ in range(again)]
    finally:
        for program in programs.values():
            program.end()
    times = [(pair["ours"]["seconds"], pair["theirs"]["seconds"] or limit) for pair in pairs]
    found = Comparison(
        Spread.of([a / b for a, b in times]), *(Spread.of(each) for each in zip(*times)), pairs=len(pairs)
    )
    return {
        "name": name, "peer": task.peer, "version": peer_version(task.peer), **found.as_json(), "ended": ended,
        "first": {whose: run["seconds"] for whose, run in first.items()}, "compared": asked, "quality": quality,
        "peaks": {whose: min(pair[whose]["peak"] for pair in pairs) for whose in first},
        "lines": {whose: statements(getattr(task, whose)) for whose in ("ours", "theirs")},
    }  # fmt: skip


def measure(threads: int, limit: int, row: int) -> dict[str, Any]:
    """The rows with so many threads, beside those of other numbers of threads that were measured before."""
    kept = measured("tasks")["found"] if (MEASURED / "tasks.json").exists() else {}
    before = {old["name"]: old for old in kept.get(str(threads), {}).get("rows", [])}
    rows, failed = [], []
    for i, name in enumerate(TASKS, 1):
        if row not in (0, i):
            rows += [before[name]] if name in before else []
            continue
        try:
            rows.append(part("tasks", f"{name}, threads {threads}", partial(compare, name, threads, limit)))
            print(rows[-1], file=sys.stderr, flush=True)
        except RuntimeError as error:
            failed.append(str(error))
            print(error, file=sys.stderr, flush=True)
    return {**kept, str(threads): {"machine": facts(threads), "rows": rows, "failed": failed}}


def peer(row: dict[str, Any]) -> str:
    """The other package, by the name that it is known by."""
    return str(row["peer"]).removesuffix("-for-pytorch")


def times_as_fast(row: dict[str, Any], form: str = ".1f") -> str:
    """How many times as fast we are, or how many times at least."""
    return f"{'' if row['ended'] else '≥ '}{1 / row['ratio']['median']:{form}}"


def sizes(row: dict[str, Any], what: str, unit: int = 1) -> str:
    """Ours, then theirs."""
    return " / ".join(f"{row[what][whose] / unit:,.0f}" for whose in ("ours", "theirs"))


def summary(found: Any) -> str:
    """With one thread, how many times as fast, memory and lines: what stands first on the page."""
    one = found["1"]
    heads = ["task", "beside", "times as fast", "MiB, ours / theirs", "lines, ours / theirs"]
    rows = [
        [TASKS[r["name"]].name, peer(r), times_as_fast(r), sizes(r, "peaks", MIB), sizes(r, "lines")]
        for r in one["rows"]
    ]
    return f"{table(heads, rows)}\n\n{machine_line(one)}"


def speed_chart(found: Any) -> Figure:
    """Draw how many times as fast each task is with one thread, as a bar."""
    from curvops.plots import style

    rows = sorted(found["1"]["rows"], key=lambda row: row["ratio"]["median"], reverse=True)
    figure, axes = style.panel(9.6, 4.4)
    times = [1 / row["ratio"]["median"] for row in rows]
    looks = style.looks(sorted(peer(row) for row in rows))
    labels = [f"{peer(row)} {row['version']}" for row in rows]
    for name, look in looks.items():
        ours = [i for i, row in enumerate(rows) if peer(row) == name]
        bars = axes.barh(ours, [times[i] for i in ours], 0.7, color=look.color, label=f"beside {labels[ours[0]]}")
        axes.bar_label(bars, [times_as_fast(rows[i]) for i in ours], padding=4, fontsize=style.SMALL, color=style.INK)
    axes.axvline(1, color=style.LIGHT, linewidth=1.5)
    axes.text(1, len(rows) - 0.4, "equally fast", fontsize=style.SMALL, color=style.INK, ha="center", va="bottom")
    axes.set_yticks(range(len(rows)), [SHORT[row["name"]] for row in rows])
    axes.set(xlim=(0, 1.12 * max(times)), ylim=(-0.6, len(rows) - 0.4))
    style.dress(axes, "times as fast, one thread", "")
    axes.grid(False, axis="y")
    axes.legend(fontsize=style.SMALL, loc="lower right", framealpha=0.9)
    return figure


def full_tables(found: Any) -> str:
    """Every figure, for one thread and for two."""
    parts = []
    for threads, of in found.items():
        heads = ["task", "s", "theirs", "times as fast", "least–greatest", "pairs"]
        heads += ["first run, s", "MiB, ours / theirs", "lines, ours / theirs"]
        rows = []
        for r in of["rows"]:
            ours, theirs, ratio = r["seconds"]["median"], r["unit_seconds"]["median"], r["ratio"]
            spread = f"{1 / ratio['high']:.2f}–{1 / ratio['low']:.2f}" if r["pairs"] > 1 else ""
            cells = [f"{ours:.3g}", f"{theirs:.3g}" if r["ended"] else f"> {theirs:.3g}", times_as_fast(r, ".2f")]
            rows.append([r["name"], *cells, spread, str(r["pairs"]), f"{r['first']['ours']:.3g}"])
            rows[-1] += [sizes(r, "peaks", MIB), sizes(r, "lines")]
        title = f"Threads: {threads}."
        shown = [heads[:6], ["task", *heads[6:]]]
        failed = "".join(f"\n\nNot measured: {error}" for error in of["failed"])
        parts.append(f"{title}\n\n{tables(heads, rows, *shown)}{failed}\n\n{machine_line(of)}")
    return "\n\n".join([*parts, qualities(next(iter(found.values()))["rows"])])


def qualities(rows: list[dict[str, Any]]) -> str:
    """What each task is, and the figures that hold the answers to one quality."""
    lines = []
    for r in rows:
        (figure,) = r["quality"]["ours"]
        ours, theirs = (r["quality"].get(whose, {}).get(figure) for whose in ("ours", "theirs"))
        what = f"{figure}{', of a smaller problem' if r['compared'] == 'fewer' else ''}"
        beside = f"{peer(r)} {r['version']}"
        lines.append([r["name"], TASKS[r["name"]].name, beside, what, f"{ours:.4g}", f"{theirs:.4g}" if theirs else ""])
    return table(["task", "what is done", "beside", "its quality", "ours", "theirs"], lines)


STUDY = Study(
    name="tasks",
    description=__doc__,
    measure=measure,
    sections={},
    page="docs/benchmarks.md",
    options={
        "threads": (1, "of torch"),
        "limit": (120, "seconds that another package's program may take"),
        "row": (0, "number of the one row to measure again; 0: all"),
    },
    figures={"tasks": speed_chart},
    elsewhere={"docs/benchmarks.md": {"tasks, in words": summary, "tasks": full_tables}},
)
