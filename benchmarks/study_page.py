"""The command of a study: run it over seeds, fill its section of the samplers' page, draw its figure."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from matplotlib.figure import Figure

from benchmarks.figures import save_small
from benchmarks.machine import facts
from benchmarks.report import fill
from benchmarks.tables import machine_line

Found = TypeVar("Found")


def run(
    name: str,
    description: str | None,
    seeds: str,
    study: Callable[[int], Found],
    tables: Sequence[Callable[[Found], str]],
    curves: Callable[[Found], Figure],
) -> None:
    """The module's name is that of the section and of the figure; `seeds` says what they are seeds of."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument("--page", type=Path, default=Path("docs/samplers_measured.md"), help="page with the section")
    parser.add_argument("--seeds", type=int, default=5, help=seeds)
    arguments = parser.parse_args()
    machine = machine_line({"machine": facts(torch.get_num_threads())})
    found = study(arguments.seeds)
    fill(arguments.page, name, "\n\n".join([*[table(found) for table in tables], machine]))
    save_small(curves(found), arguments.page.parent / "figures" / f"{name}.png")
