"""The scaling figures:   python -m benchmarks.figures benchmarks/measured/operators.json --output docs/figures

It needs matplotlib, which the project's environment has.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter
from PIL import Image

from curvops.plots import style

PANELS = {
    "active-learning": (700, 540),
    "bayesian-optimisation": (545, 540),
    "bayesian-optimisation-branin": (550, 540),
    "chains_out_of_distribution": (690, 540),
    "cold_posterior": (675, 570),
    "double_well": (508, 585),
    "evidence-trace": (612, 660),
    "families-trace": (1080, 720),
    "front": (1010, 660),
    "infinite_width": (668, 570),
    "many_points": (735, 570),
    "online_lora": (645, 568),
    "sampled": (606, 570),
    "spectra_of_training": (862, 660),
    "subnetworks": (715, 425),
    "subsampled": (703, 570),
    "wide_networks": (480, 480),
    "wide_networks_density": (720, 405),
}
"""By figure of several panels, the width and the height in pixels of what the gallery shows: its first panels."""
AXES = {"N": "points N", "D": "parameters D", "C": "outputs C", "K": "vectors K"}


def scaling(points: list[dict[str, Any]], axis: str) -> Figure:
    """Milliseconds against one size on logarithmic axes, with a line of slope 1 through each curve's last point."""
    figure, axes = style.panel(4.6, 3.4)
    rows = [point for point in points if point["axis"] == axis]
    for name, look in style.looks(row["what"] for row in rows).items():
        sizes = [row["value"] for row in rows if row["what"] == name]
        times = [row["seconds"] * 1e3 for row in rows if row["what"] == name]
        axes.plot(sizes, times, label=name, linewidth=1.8, **look._asdict())
        linear = [times[-1] * size / sizes[-1] for size in (sizes[0], sizes[-1])]
        axes.plot([sizes[0], sizes[-1]], linear, color=style.GREY, linewidth=0.8, linestyle=":", zorder=0)
    axes.set_xscale("log")
    axes.set_yscale("log")
    ticks = sorted({row["value"] for row in rows})
    axes.set_xticks(ticks, [_short(tick) for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    style.dress(axes, AXES[axis], "milliseconds")
    axes.legend(fontsize=style.SMALL, frameon=False)
    return figure


def save_small(figure: Figure, path: Path, colours: int = 64) -> None:
    """Write a PNG of so many colours: a third of the bytes, for the pages."""
    style.save(figure, path)
    shrink(path, colours)


def shrink_large(folder: Path, most: int = 100_000) -> None:
    """Shrink the PNGs of more than so many bytes, which a page's own code has drawn in all colours."""
    for path in sorted(folder.glob("*.png")):
        if path.stat().st_size > most:
            shrink(path)


def shrink(path: Path, colours: int = 64) -> None:
    """Write a PNG again, of so many colours."""
    with Image.open(path) as image:
        reduced = image.convert("RGB").quantize(colours, dither=Image.Dither.NONE)
    reduced.save(path, optimize=True)


def thumbnails(folder: Path) -> None:
    """Write the first panels of the figures in a folder of PNGs into its folder `thumbs`, large enough to be read."""
    (folder / "thumbs").mkdir(exist_ok=True)
    for name, size in PANELS.items():
        with Image.open(folder / f"{name}.png") as image:
            image.crop((0, 0, *size)).save(folder / "thumbs" / f"{name}.png", optimize=True)


def _short(size: int) -> str:
    """301,066 as 301k."""
    return f"{size:,}" if size < 8000 else f"{size / 1000:,.0f}k"


def main() -> None:
    """One PNG for each size."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.figures", description=__doc__)
    parser.add_argument("file", type=Path, help="what benchmarks.operators wrote, with the part scaling")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    arguments = parser.parse_args()
    points = json.loads(arguments.file.read_text())["parts"]["scaling"]["points"]
    arguments.output.mkdir(parents=True, exist_ok=True)
    for axis in AXES:
        style.save(scaling(points, axis), arguments.output / f"scaling-{axis}.png")


if __name__ == "__main__":
    main()
