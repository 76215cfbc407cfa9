"""A stage of the GPU run: its device and size, the time left to it, and the rows that it has written so far."""

from __future__ import annotations

import gc
import json
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import facts

Row = dict[str, Any]
RESERVE = 3.0
"""Seconds before the end of a stage at which no further row is begun."""


@dataclass(eq=False)
class Stage:
    """Rows of one stage, in a file that is written anew with each row; `toy` asks for networks that a CPU can serve."""

    path: Path
    device: torch.device
    toy: bool
    limit: float
    rows: list[Row] = field(default_factory=list)
    begin: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        if self.path.exists():
            self.rows = [row for row in json.loads(self.path.read_text())["rows"] if "error" not in row]

    @property
    def left(self) -> float:
        """The seconds left."""
        return self.limit - (time.perf_counter() - self.begin)

    def row(self, name: str, measure: Callable[[], Row]) -> Row | None:
        """Add the row of this name unless it is there, and return it; an error becomes a row. None without time."""
        for row in self.rows:
            if row["name"] == name:
                return row
        if self.left < RESERVE:
            return None
        begin = time.perf_counter()
        try:
            found = measure()
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(where.filename).name}:{where.lineno}"
            found = {"error": f"{type(error).__name__}: {str(error)[:8000]} ({place})"}
        self.rows.append({"name": name, **found, "took": round(time.perf_counter() - begin, 2)})
        print(f"  {self.path.stem}: {self.rows[-1]}", flush=True)
        self.write(ended=False)
        self.free()
        return self.rows[-1]

    def end(self) -> None:
        """Write that the stage has ended, unless time ran out or a row failed: then a second run goes on."""
        self.write(ended=self.left >= RESERVE and not any("error" in row for row in self.rows))

    def write(self, ended: bool) -> None:
        """Write the rows with the machine that they are of."""
        machine = facts(torch.get_num_threads()) | {"card": self.card()}
        text = json.dumps({"machine": machine, "toy": self.toy, "ended": ended, "rows": self.rows}, indent=1)
        self.path.with_suffix(".new").write_text(text + "\n")
        self.path.with_suffix(".new").replace(self.path)

    def card(self) -> str:
        """Name the GPU."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "no GPU"

    def free(self) -> None:
        """Free what the last row left on the device."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def clock(self) -> float:
        """Return the time once the device has finished what was asked of it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def seconds(self, run: Callable[[], object], least: float = 0.2, most: int = 20) -> tuple[float, int]:
        """Return the median time of runs after a first one, and the peak of allocated bytes (0 on a CPU).

        Runs are repeated for some tenths of a second; a first run that took longer, or of a toy, is the only one.
        """
        begin = self.clock()
        result = run()
        first = self.clock() - begin
        del result
        if self.toy:
            return first, 0
        peak = self.peak(run) if first < self.left / 4 else 0
        if first > 10 * least:
            return first, peak
        times: list[float] = []
        while len(times) < most and (sum(times) < least or not times):
            begin = self.clock()
            result = run()
            times.append(self.clock() - begin)
            del result
        return sorted(times)[len(times) // 2], peak

    def peak(self, run: Callable[[], object]) -> int:
        """Return by how many bytes a run raises what is allocated on the device; 0 on a CPU."""
        if self.device.type != "cuda":
            return 0
        self.free()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        result = run()
        torch.cuda.synchronize(self.device)
        del result
        return int(torch.cuda.max_memory_allocated(self.device) - before)
