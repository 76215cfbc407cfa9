"""The command of a study: measure, keep the raw results beside the code, fill sections of a page, draw figures.

    python -m benchmarks.cold_posterior              # measures: minutes to hours
    python -m benchmarks.cold_posterior --report     # the same tables and figures from benchmarks/measured/, in seconds

A file of `measured/` holds the machine, the options and what was found, as plain JSON: whoever doubts a table can make
it again, or another one, without running the study.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.figures import save_small
from benchmarks.machine import facts
from benchmarks.report import fill
from benchmarks.tables import machine_line

MEASURED = Path(__file__).parent / "measured"

Found = Any
"""A tree of mappings by text and sequences, with numbers, text and tensors."""


def run(
    name: str,
    description: str | None,
    measure: Callable[..., Found],
    sections: Mapping[str, Callable[[Found], str]],
    page: str,
    figures: Mapping[str, Callable[[Found], Figure]] | None = None,
    rows: Mapping[str, Callable[[int], Iterable[Mapping[str, Any]]]] | None = None,
    **options: tuple[int, str],
) -> None:
    """Parse the command line of `benchmarks.{name}` and do what it says.

    Args:
        name: of the module and of its file of raw results.
        description: for `--help`.
        measure: takes the options by name and returns what was found.
        sections: by their names on the page, the texts to fill them with.
        page: where they stand; figures go into `figures/` beside it.
        figures: by the name of the file, the drawings.
        rows: options by which this process measures some rows and prints them as JSON, a line each, and what measures.
        options: whole numbers by name, each with its default and what it counts.
    """
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        f"python -m benchmarks.{name}", description=description, formatter_class=as_written
    )
    parser.add_argument("--page", type=Path, default=Path(page), help="page with the sections")
    parser.add_argument("--report", action="store_true", help="measure nothing: take benchmarks/measured/")
    for option, (default, counted) in options.items():
        parser.add_argument(f"--{option}", type=int, default=default, help=counted)
    for option in rows or {}:
        parser.add_argument(f"--{option}", type=int, help="measure rows in this process, and print them as JSON")
    arguments = parser.parse_args()
    for option, of in (rows or {}).items():
        if (given := getattr(arguments, option)) is not None:
            for row in of(given):
                print(json.dumps(row), flush=True)
            return
    if not arguments.report:
        chosen = {option: getattr(arguments, option) for option in options}
        machine = facts(torch.get_num_threads())
        keep(name, {"machine": machine, "options": chosen, "found": measure(**chosen)})
    kept = measured(name)
    for section, text in sections.items():
        fill(arguments.page, section, f"{text(kept['found'])}\n\n{machine_line(kept)}")
    for file, draw in (figures or {}).items():
        save_small(draw(kept["found"]), arguments.page.parent / "figures" / f"{file}.png")


def keep(name: str, result: Mapping[str, Any]) -> None:
    """Write the raw results of a study, tensors as lists."""
    text = json.dumps(result, indent=1, ensure_ascii=False, default=Tensor.tolist)
    (MEASURED / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def measured(name: str) -> dict[str, Any]:
    """The raw results of a study, lists of numbers as tensors in float64."""
    result = json.loads((MEASURED / f"{name}.json").read_text(encoding="utf-8"))
    return {**result, "found": tensors(result["found"])}


def tensors(tree: Any) -> Any:
    """The tree with each list of numbers, or of such lists of one length, as a tensor."""
    if isinstance(tree, dict):
        return {key: tensors(value) for key, value in tree.items()}
    if not isinstance(tree, list):
        return tree
    parts = [tensors(value) for value in tree]
    if parts and all(isinstance(part, int | float) and not isinstance(part, bool) for part in parts):
        return torch.tensor(parts, dtype=torch.float64)
    if parts and all(isinstance(part, Tensor) and part.shape == parts[0].shape for part in parts):
        return torch.stack(parts)
    return parts
