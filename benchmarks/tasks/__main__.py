"""Whole tasks, compared with other packages.

    .venv-peers/bin/python -m benchmarks.tasks [toy kfac ...] [--json benchmarks/measured/tasks.json]

Each program runs from a trained network to the answer, and builds everything that it needs. Both run in turn in one
process, after a first run of each if the task lasts less than half a minute; the ratio is taken pair by pair. Peak
memory is that of a separate process, above its memory before the program starts. Lines are the statements of the
program that a user writes. An answer that is worse than the other's ends the benchmark.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import facts, peer_version, reset_peak, resident, run_apart
from benchmarks.tables import MIB, machine_line, table
from benchmarks.tasks import of_matrices, of_posteriors, of_samplers
from benchmarks.tasks.task import Task, statements
from benchmarks.timing import alternate, seconds

TASKS: dict[str, Task] = of_posteriors.TASKS | of_matrices.TASKS | of_samplers.TASKS
LONG = 15.0
"""Seconds from which on a program is not run once beforehand."""


def compare(name: str) -> dict[str, Any]:
    """Run a task of both packages in turn, and in processes of their own for their memory."""
    task, answers = TASKS[name], {}
    problem = task.prepare()

    def ours() -> None:
        answers["ours"] = task.ours(problem)

    def theirs() -> None:
        answers["theirs"] = task.theirs(problem)

    first = seconds(ours)
    found = alternate(theirs, ours, task.pairs, warmup=int(task.pairs > 1 and first < LONG))
    quality = {whose: task.quality(problem, answer) for whose, answer in answers.items()}
    if not task.same(quality["ours"], quality["theirs"]):
        sys.exit(f"{name}: the answers are not of one quality: {quality}")
    peaks = {whose: run_apart("benchmarks.tasks", name, "--alone", whose)[0]["peak"] for whose in ("ours", "theirs")}
    lines = {whose: statements(getattr(task, whose)) for whose in ("ours", "theirs")}
    return {
        "task": task.name, "peer": f"{task.peer} {peer_version(task.peer)}", "first": first, **found.as_json(),
        "quality": quality, "peaks": peaks, "lines": lines,
    }  # fmt: skip


def alone(name: str, whose: str) -> dict[str, int]:
    """Run one program, and return its peak memory in bytes above what was resident before it."""
    task = TASKS[name]
    problem = task.prepare()
    before = reset_peak()
    getattr(task, whose)(problem)
    return {"peak": resident("VmHWM") - before}


def shown(result: dict[str, Any]) -> str:
    """The table of a measurement, in Markdown."""
    rows = []
    for row in result["rows"]:
        mine, other = row["seconds"]["median"], row["unit_seconds"]["median"]
        memory = [f"{row['peaks'][whose] / MIB:,.0f}" for whose in ("ours", "theirs")]
        lines = [str(row["lines"][whose]) for whose in ("ours", "theirs")]
        figures = [f"{mine:.3g}", f"{other:.3g}", f"{1 / row['ratio']['median']:.3g}", *memory, *lines]
        rows.append([row["task"], row["peer"], *figures])
    head = ["task", "beside", "s", "theirs", "times as fast", "MiB", "theirs", "lines", "theirs"]
    return machine_line(result) + "\n\n" + table(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", choices=[*TASKS, []], default=[])
    parser.add_argument("--alone", choices=["ours", "theirs"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(given.threads)
    if given.alone:
        print(json.dumps(alone(given.tasks[0], given.alone)))
        return
    result: dict[str, Any] = {"machine": facts(given.threads), "rows": []}
    if given.json and given.json.exists():
        result["rows"] = json.loads(given.json.read_text())["rows"]
    for name in given.tasks or TASKS:
        others = [row for row in result["rows"] if row["name"] != name]
        result["rows"] = [*others, compare(name) | {"name": name}]
        print(json.dumps(result["rows"][-1]), file=sys.stderr, flush=True)
        if given.json:
            given.json.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(shown(result))


if __name__ == "__main__":
    main()
