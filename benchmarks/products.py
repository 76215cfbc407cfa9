"""The cost of a GGN product, in gradients:   .venv-peers/bin/python -m benchmarks.products

Every figure is the median ratio of alternating runs, with the smallest and the largest. Rows that compare two routes
("against") alternate those two instead of the unit.
"""

from __future__ import annotations

import gc
import sys
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import peer_operators, routes
from benchmarks.machine import cores
from benchmarks.networks import NETWORKS, Problem, build
from benchmarks.report import UNIT, products_tables, speed
from benchmarks.study_page import Study, part
from benchmarks.tables import is_resolved
from benchmarks.timing import Comparison, Run, Spread, alternate, alternate_fresh

BUILDS = 3
"""How often a build is measured until its spread says something."""


@dataclass(frozen=True)
class Settings:
    """The extent of measuring: pairs of runs, products that count as settled, blocks and their networks, the budget."""

    pairs: int
    settle: int
    columns: int
    blocks: list[str]
    memory_budget: int | None


@dataclass(eq=False)
class Measurement:
    """The figures of one network as they are taken."""

    problem: Problem
    settings: Settings
    unit: Run
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, route: str, comparison: Comparison, columns: int = 1, against: str = UNIT, **more: Any) -> None:
        """Keep a row and show it. Beside the unit a block counts per vector; beside another route both have all K."""
        figures = comparison.as_json(columns if against == UNIT else 1)
        self.rows.append({"route": route, "against": against, "columns": columns, **figures, **more})
        ratio = self.rows[-1]["ratio"]
        text = f"{ratio['median']:6.2f} ({ratio['low']:.2f} to {ratio['high']:.2f}) of a {against}"
        print(f"  {self.problem.label}: {route}, K = {columns}: {text} {more.get('engine', '')}", file=sys.stderr)

    def pairs_of(self, columns: int) -> int:
        """Fewer pairs where each takes long."""
        return self.settings.pairs if columns == 1 else max(1, self.settings.pairs // 2)

    def measure(self, route: str, run: Run, columns: int = 1, **more: Any) -> Comparison:
        """Time a route beside the unit, and keep the row."""
        comparison = alternate(self.unit, run, self.pairs_of(columns))
        self.add(route, comparison, columns, **more)
        return comparison


def measure(problem: Problem, settings: Settings) -> dict[str, Any]:
    """All figures of one network, as plain numbers. Costs about 500 gradients, as many again with blocks."""
    m = Measurement(problem, settings, problem.unit())
    v = problem.block(1)[:, 0].contiguous()
    streaming = routes.ggn(problem, settings.memory_budget, "streamed")
    reference = streaming @ v
    m.measure("streaming", lambda: streaming @ v, engine=routes.engines(streaming))
    frugal = routes.ggn(problem, memory_budget=0)
    m.measure("streaming, no memory", lambda: frugal @ v, engine=routes.engines(frugal))
    cached = measure_cached(m, v, reference, streaming)
    measure_first(m, v)
    for name in ("autodiff", "layerwise"):
        measure_engine(m, name, v)
    other = peer_operators.ggn(problem)
    if other is not None:
        measure_peer(m, other, cached, v, reference)
    if problem.name in settings.blocks:
        measure_block(m, other, cached)
    return {
        "network": problem.name,
        "outputs": problem.outputs,
        "points": problem.points,
        "parameters": problem.num_parameters,
        "unit_seconds": m.rows[0]["unit_seconds"],
        "memory_budget": cached.lin.memory_budget,
        "rows": m.rows,
    }


def measure_cached(m: Measurement, v: Tensor, reference: Tensor, streaming: Any) -> Any:
    """A product once the caches are built, beside the unit and beside streaming. Returns the warm operator."""
    operator = routes.ggn(m.problem, m.settings.memory_budget)
    history = routes.settle(operator, v, m.settings.settle)
    difference = routes.difference(operator @ v, reference)
    engine = routes.engines(operator)
    m.measure("cached", lambda: operator @ v, engine=engine, history=history, difference=difference)
    beside = alternate(lambda: streaming @ v, lambda: operator @ v, m.settings.pairs)
    m.add("cached", beside, against="streaming", engine=engine)
    if routes.engines(operator) != engine:  # its cost rule had not come to rest: the spread mixes two engines
        for row in m.rows[-2:]:
            row["engine"] = f"{engine}, then {routes.engines(operator)}"
    return operator


def measure_first(m: Measurement, v: Tensor) -> None:
    """Measure the cost of a fresh linearisation, and of its first product with all that this triggers."""

    def make() -> Any:
        return routes.ggn(m.problem, m.settings.memory_budget)

    m.measure("linearize", make)
    m.add("first product", alternate_fresh(m.unit, routes.first(make, v), m.settings.pairs))


def measure_engine(m: Measurement, name: str, v: Tensor) -> None:
    """A forced engine: its product, what building it costs beyond a product, and the bytes that it keeps."""
    kind = "recorded" if name == "autodiff" else name

    def make() -> Any:
        return routes.ggn(m.problem, m.settings.memory_budget, name)

    before = routes.products_before(make, v, kind)
    operator = make()
    size = routes.kept_bytes(operator, kind)
    if before is None:
        m.rows.append({"route": name, "bytes": size, "note": "not built within the memory budget"})
        return
    for _ in range(before + 1):
        operator @ v
    product = m.measure(name, lambda: operator @ v, engine=routes.engines(operator), bytes=size)
    del operator
    gc.collect()
    for _ in range(BUILDS):  # another job may have taken the machine meanwhile
        built = alternate_fresh(m.unit, routes.building(make, v, before), max(1, m.settings.pairs // 2), warmup=0)
        beyond = {key: value - product.ratio.median for key, value in asdict(built.ratio).items()}
        if is_resolved(beyond):
            break
    m.add(f"{name}: build", Comparison(Spread(**beyond), built.seconds, built.unit_seconds, built.pairs))


def measure_block(m: Measurement, other: Any | None, cached: Any) -> None:
    """A product with a block, on a linearisation that has only met blocks: per vector, then beside another package."""
    V = m.problem.block(m.settings.columns)
    columns, pairs = V.shape[1], m.pairs_of(V.shape[1])
    operator = routes.ggn(m.problem, m.settings.memory_budget)
    history = routes.settle(operator, V, 3)
    difference = routes.difference((operator @ V)[:, 0], cached @ V[:, 0])
    engine = routes.engines(operator)
    m.measure("cached", lambda: operator @ V, columns, engine=engine, history=history, difference=difference)
    if other is not None:
        m.measure(peer_operators.label(), lambda: other @ V, columns)
        m.add(
            "cached", alternate(lambda: other @ V, lambda: operator @ V, pairs), columns, against=peer_operators.label()
        )


def measure_peer(m: Measurement, other: Any, cached: Any, v: Tensor, reference: Tensor) -> None:
    """Measure the product of another package beside the unit, then this library beside it."""
    name = peer_operators.label()
    m.measure(name, lambda: other @ v, difference=routes.difference(other @ v, reference))
    m.add("cached", alternate(lambda: other @ v, lambda: cached @ v, m.settings.pairs), against=name)


def measure_all(pairs: int, settle: int, columns: int, threads: int) -> dict[str, Any]:
    """The figures of every network with 10 and with 100 outputs; a run that was interrupted goes on where it was."""
    torch.set_num_threads(threads)
    settings, found = Settings(pairs, settle, columns, ["mlp"], None), []
    for name in NETWORKS:
        for outputs in (10, 100):
            found.append(part("products", f"{name} {outputs}", partial(measure, build(name, outputs), settings)))
            gc.collect()
    return {"settings": asdict(settings), "networks": found}


STUDY = Study(
    name="products",
    description=__doc__,
    measure=measure_all,
    sections={"products": products_tables},
    page="docs/benchmarks.md",
    options={
        "pairs": (9, "pairs of alternating runs behind a median"),
        "settle": (64, "products without a change of engine that count as warm"),
        "columns": (16, "vectors of a block, measured on the MLP"),
        "threads": (cores(), "of torch"),
    },
    elsewhere={"docs/benchmarks.md": {"speed": speed}},
)


if __name__ == "__main__":
    STUDY.run()
