"""The command of a study: measure, keep the raw results next to the code, fill sections of a page, draw figures.

    python -m benchmarks.cold_posterior              # measures: minutes to hours
    python -m benchmarks.cold_posterior --report     # the same tables and figures from benchmarks/measured/, in seconds

A file of `measured/` holds the machine, the options and the results as plain JSON, so that anyone can make a table
again, or another one, without running the study.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.machine import facts
from benchmarks.report import MEASURED, fill
from benchmarks.tables import machine_line

if TYPE_CHECKING:  # processes whose memory is measured load this module, too
    from matplotlib.figure import Figure

Found = Any
"""A tree of mappings by text and sequences, with numbers, text and tensors."""


@dataclass(frozen=True)
class Study:
    """The measurements of `python -m benchmarks.{name}`, and the pages and figures made of them."""

    name: str
    """Of the module and of its file of raw results."""
    description: str | None
    measure: Callable[..., Found]
    """Takes the options by name."""
    sections: Mapping[str, Callable[[Found], str]]
    """By their names on the page, the texts to fill them with."""
    page: str
    figures: Mapping[str, Callable[[Found], Figure]] = field(default_factory=dict)
    """By the name of the file in `figures/` beside the page, the drawings."""
    options: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    """Whole numbers by name, each with its default and what it counts."""
    rows: Mapping[str, Callable[[int], Iterable[Mapping[str, Any]]]] = field(default_factory=dict)
    """Options by which a process measures some rows alone and prints them as JSON, a line each."""
    elsewhere: Mapping[str, Mapping[str, Callable[[Found], str]]] = field(default_factory=dict)
    """By other pages, the texts of their sections, which do not repeat the machine."""

    def run(self) -> None:
        """Run the study as the command line asks: measure or report."""
        parser = argparse.ArgumentParser(f"python -m benchmarks.{self.name}", description=self.description)
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.add_argument("--page", type=Path, default=Path(self.page), help="page with the sections")
        parser.add_argument("--report", action="store_true", help="measure nothing: take benchmarks/measured/")
        for option, (default, counted) in self.options.items():
            parser.add_argument(f"--{option}", type=int, default=default, help=counted)
        for option in self.rows:
            parser.add_argument(f"--{option}", type=int, help="measure rows in this process, and print them as JSON")
        arguments = parser.parse_args()
        for option, measure in self.rows.items():
            if (given := getattr(arguments, option)) is not None:
                for row in measure(given):
                    print(json.dumps(row), flush=True)
                return
        if not arguments.report:
            chosen = {option: getattr(arguments, option) for option in self.options}
            machine = facts(chosen.get("threads", torch.get_num_threads()))
            keep(self.name, {"machine": machine, "options": chosen, "found": self.measure(**chosen)})
            shutil.rmtree(MEASURED / f"{self.name}.parts", ignore_errors=True)
        kept = measured(self.name)
        for page, texts in self.pages(kept).items():
            for section, text in texts.items():
                fill(arguments.page if page == self.page else Path(page), section, text)
        for file, draw in self.figures.items():
            from benchmarks.figures import save_small

            save_small(draw(kept["found"]), arguments.page.parent / "figures" / f"{file}.png")

    def texts(self, kept: Mapping[str, Any]) -> dict[str, str]:
        """The sections of the page, made of raw results."""
        machine = machine_line(kept)
        return {section: f"{text(kept['found'])}\n\n{machine}" for section, text in self.sections.items()}

    def pages(self, kept: Mapping[str, Any]) -> dict[str, dict[str, str]]:
        """The sections of every page that shows these results."""
        found = kept["found"]
        others = {page: {name: text(found) for name, text in texts.items()} for page, texts in self.elsewhere.items()}
        return {**others, self.page: self.texts(kept) | others.get(self.page, {})}


def keep(name: str, result: Mapping[str, Any]) -> None:
    """Write the raw results of a study, tensors as lists, a row of numbers on one line."""
    text = json.dumps(result, indent=1, ensure_ascii=False, default=Tensor.tolist)
    text = re.sub(r"\[[^][{}\"]*\]", lambda row: " ".join(row[0].split()), text)
    (MEASURED / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def part(name: str, cell: str, compute: Callable[[], Found]) -> Found:
    """What `compute` returns, tensors as lists: kept in a file, from which a study that was interrupted goes on."""
    path = MEASURED / f"{name}.parts" / f"{cell}.json"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        text = json.dumps(compute(), default=Tensor.tolist)
        path.with_suffix(".new").write_text(text, encoding="utf-8")
        path.with_suffix(".new").replace(path)
    return json.loads(path.read_text(encoding="utf-8"))


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
