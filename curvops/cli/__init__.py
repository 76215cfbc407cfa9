"""The command line: `curvops demo`, also `python -m curvops demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def curvops() -> None:
    """Curvature, uncertainty and evidence of trained networks."""


@app.command()
def demo(
    quick: Annotated[bool, typer.Option(help="One seed and fewer points: under a minute on two cores.")] = False,
    output: Annotated[Path, typer.Option(help="Folder for results.json, weights and figures.")] = Path("curvops-demo"),
    seeds: Annotated[int | None, typer.Option(min=1, help="Networks to train; 3, or 1 with --quick.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the first network.")] = 0,
) -> None:
    """From a trained network to calibrated predictions, on handwritten digits."""
    from curvops.cli.demo.run import FULL, QUICK, run

    settings = QUICK if quick else FULL
    try:
        passed = run(settings, output, settings.seeds if seeds is None else seeds, seed, typer.echo)
    except KeyboardInterrupt:
        typer.echo("Interrupted; what was written so far is in " + str(output), err=True)
        raise typer.Exit(130) from None
    except ImportError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    if not passed:
        raise typer.Exit(1)
