"""`python -m curvops`: the command line."""

from curvops.cli import app

if __name__ == "__main__":
    app(prog_name="curvops")
