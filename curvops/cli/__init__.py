"""The command line: `curvops demo` and `curvops bench`, also `python -m curvops demo`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, no_args_is_help=True)


def _print_version(wanted: bool) -> bool:
    """Print the versions that a bug report needs, and exit."""
    if wanted:
        python = ".".join(map(str, sys.version_info[:3]))
        typer.echo(f"curvops {version('curvops')} (torch {version('torch')}, Python {python})")
        raise typer.Exit
    return wanted


@contextmanager
def _exit_codes(interrupted: str) -> Iterator[None]:
    """Print one line and exit, with 130 after an interruption and with 1 if a package is missing."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(interrupted, err=True)
        raise typer.Exit(130) from None
    except ImportError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


@app.callback()
def curvops(
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the versions and exit.")
    ] = False,
) -> None:
    """Curvature, uncertainty and evidence of trained networks."""


@app.command(name="demo")
def show_demo(
    output: Annotated[Path, typer.Option(help="Folder for results.json and figures.")] = Path("curvops-demo"),
    seed: Annotated[int, typer.Option(help="Seed of the data and the networks.")] = 0,
) -> None:
    """Show in three stories, in under a minute, what a posterior adds to a trained network."""
    with _exit_codes("Interrupted; what was written so far is in " + str(output)):
        from curvops.cli.demo import run

        passed = run(output, seed, typer.echo)
    if not passed:
        raise typer.Exit(1)


@app.command()
def bench(
    problem: Annotated[
        list[str] | None, typer.Option(help="A spectrum by name, digits-ggn, or your own module:function. Repeatable.")
    ] = None,
    method: Annotated[list[str] | None, typer.Option(help="A solver or estimator. Repeatable.")] = None,
    preconditioner: Annotated[list[str] | None, typer.Option(help="For solvers and logdet. Repeatable.")] = None,
    names: Annotated[bool, typer.Option("--list", help="Print the names of all problems, methods, ...")] = False,
    size: Annotated[int | None, typer.Option(min=2, help="Rows of the matrix: 600, or 300 with --quick.")] = None,
    columns: Annotated[int, typer.Option(min=1, help="Right-hand sides.")] = 8,
    rtol: Annotated[float, typer.Option(min=0.0, help="Tolerance of the solvers.")] = 1e-6,
    rank: Annotated[
        int | None, typer.Option(min=1, help="Rank of low-rank preconditioners; they choose one if left out.")
    ] = None,
    budget: Annotated[list[int] | None, typer.Option(min=2, help="Products of an estimator. Repeatable.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Runs of each estimator: 5, or 3 with --quick.")] = None,
    single: Annotated[bool, typer.Option("--float32", help="Use float32 instead of float64.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Two small problems, in seconds.")] = False,
    output: Annotated[Path, typer.Option(help="Folder for results.json and figures.")] = Path("curvops-bench"),
) -> None:
    """Compare solvers and estimators: products, time, true and claimed errors."""
    import torch

    with _exit_codes("Interrupted; finished problems have their figures in " + str(output)):
        from curvops.cli import sweep
        from curvops.cli.problems import NAMES, BenchError
        from curvops.cli.sweep import METHODS, PRECONDITIONERS, Settings

        if names:
            for what, table in (("problems", NAMES), ("methods", METHODS), ("preconditioners", PRECONDITIONERS)):
                typer.echo(f"{what}: {', '.join(table)}")
            return
        choice = sweep.Choice(
            problem or (sweep.QUICK if quick else sweep.PROBLEMS),
            method or sweep.USUAL,
            preconditioner or sweep.USUAL_PRECONDITIONERS,
        )
        usual = Settings(size=300, budgets=(30, 100), seeds=3) if quick else Settings()
        settings = Settings(
            size=size or usual.size,
            columns=columns,
            dtype=torch.float32 if single else torch.float64,
            rtol=rtol,
            rank=rank,
            budgets=tuple(sorted(budget)) if budget else usual.budgets,
            seeds=seeds or usual.seeds,
        )
        try:
            sweep.run(choice, settings, output, typer.echo)
        except BenchError as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(2) from None
