"""A program for torchrun: the demo in the tiny setting of its tests."""

from curvops.cli import app
from curvops.cli.demo import figures, network, run
from tests.cli.test_demo import POLISH, REGRESSION_STEPS, TINY

if __name__ == "__main__":
    run.QUICK, figures.REGRESSION_STEPS, network.POLISH = TINY, REGRESSION_STEPS, POLISH
    app(prog_name="curvops")
