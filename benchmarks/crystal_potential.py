"""Which crystals does a pretrained potential not know?      make jobs

CHGNet, a graph network for the energies of crystals, ships its weights with its package, 0.2.0 and 0.3.0. Crystals come
from pymatgen's library of AFLOW prototypes: half of them are the data, the others are test points, as they are and with
every element replaced by another of its group. The errors of their energies are unknown here; the two versions disagree
about them. Of squeezed and stretched elements the truth is known: ASE has their equations of state, computed with all
electrons and the functional that CHGNet was trained on.

    .venv-wild/bin/python -m benchmarks.crystal_potential
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from scipy.optimize import minimize
from scipy.stats import spearmanr
from torch import Tensor, nn

import curvops as co
from benchmarks import study_page
from benchmarks.machine import resident
from benchmarks.tables import table
from benchmarks.timing import clock, seconds
from curvops.plots import style

NOISE = 0.03**2
"""In eV² per atom²: the square of the error on test crystals that CHGNet's authors state."""
VOLUMES = (0.85, 0.94, 1.0, 1.1)
EQUILIBRIUM = VOLUMES.index(1.0)
PRIORS = (1.0, 1e4)
TOGETHER = 6
"""Squeezed elements whose covariances are computed at a time."""
TRIED = 8
"""Elements on which the prior precision is chosen."""


class Energy(nn.Module):
    """The energies per atom of crystals, in eV, (n, 1): one entry of what the potential returns."""

    def __init__(self, potential: nn.Module) -> None:
        super().__init__()
        self.potential = potential

    def forward(self, crystals: list[Any]) -> Tensor:
        """Compute the energies of a list of crystal graphs."""
        return self.potential(crystals, task="e")["e"].unsqueeze(1)


def dense_ggn(lin: co.operators.Linearization) -> co.linalg.Dense:
    """Return the GGN of few weights as a matrix."""
    return co.linalg.Dense(co.GGN(lin).to_dense(), psd=True)


POSTERIORS = {"last layer, GGN": ("last_layer", dense_ggn), "all weights, KFAC": (None, co.KFAC)}


def load(version: str) -> nn.Module:
    """Return a released version of CHGNet."""
    from chgnet.model import CHGNet

    return CHGNet.load(model_name=version, verbose=False, use_device="cpu")


def prototypes(atoms: int) -> list[Any]:
    """Return the prototypes of at most so many atoms, of elements that both versions know."""
    from pymatgen.analysis.prototypes import AFLOW_PROTOTYPE_LIBRARY

    crystals = [entry["snl"].structure for entry in AFLOW_PROTOTYPE_LIBRARY]
    return [c for c in crystals if len(c) <= atoms and max(e.Z for e in c.composition.elements) <= 89]


def substituted(crystal: Any, source: random.Random) -> Any:
    """Return a crystal with each element replaced by another of its group, in the same cell."""
    from pymatgen.core import Element

    elements = [Element.from_Z(z) for z in range(1, 84)]
    others = {}
    for element in crystal.composition.elements:
        group = [e for e in elements if e.group == element.group and e != element]
        others[element.symbol] = source.choice(group or elements).symbol
    crystal = crystal.copy()
    crystal.replace_species(others)
    return crystal


def elements() -> tuple[list[str], list[Any], Tensor]:
    """Return the names of every second of 71 elements, their crystals at each volume, and energies above the least.

    The energies (36, V), in eV per atom, are those of Birch and Murnaghan's equation with the volume, the bulk modulus
    and its derivative that the Δ project computed with WIEN2k and the functional of Perdew, Burke and Ernzerhof.
    """
    from ase.collections import dcdft
    from pymatgen.io.ase import AseAtomsAdaptor

    crystals, energies = [], []
    names = dcdft.names[::2]
    for name in names:
        volume, B, slope = (dcdft.data[name][f"wien2k_{key}"] for key in ("volume", "B", "Bp"))
        for scale in VOLUMES:
            crystal = AseAtomsAdaptor.get_structure(dcdft[name])
            crystal.scale_lattice(scale * volume * len(crystal))
            crystals.append(crystal)
            x = scale ** (-2 / 3)
            shape = (x - 1) ** 3 * slope + (x - 1) ** 2 * (6 - 4 * x)
            energies.append(9 / 16 * volume * B / 160.21766 * shape)  # B in GPa, volumes in Å³
    return names, crystals, torch.tensor(energies).view(-1, len(VOLUMES))


def features(potential: nn.Module, crystals: list[Any]) -> Tensor:
    """Return what the last layer reads, averaged over the atoms of each crystal."""
    read: list[Tensor] = []
    hook = potential.mlp.layers[-1].register_forward_hook(lambda module, inputs, output: read.append(inputs[0]))
    with torch.no_grad():
        potential(crystals, task="e")
    hook.remove()
    counts = [len(crystal.atomic_number) for crystal in crystals]
    return torch.stack([atoms.mean(0) for atoms in read[0].split(counts)])


def energies(potential: nn.Module, crystals: list[Any]) -> Tensor:
    """Return the energies per atom of crystals, (n,)."""
    with torch.no_grad():
        return Energy(potential)(crystals).squeeze(1)


def deviations(post: co.posterior.Laplace, crystals: list[Any]) -> Tensor:
    """Return the standard deviations of the energies of crystals, (n,)."""
    return post.predict(crystals).variance.detach().squeeze(1).sqrt()


def deviations_of_differences(post: co.posterior.Laplace, crystals: list[Any]) -> Tensor:
    """Return the standard deviations (n, V) of the energies above that at the equilibrium volume, of n elements."""
    blocks, step = [], TOGETHER * len(VOLUMES)
    for start in range(0, len(crystals), step):
        some = crystals[start : start + step]
        blocks.append(post.predict(some, groups=len(VOLUMES)).covariance_matrix.detach())
    C = torch.cat(blocks).double()
    v = C.diagonal(dim1=1, dim2=2)
    return (v + v[:, EQUILIBRIUM : EQUILIBRIUM + 1] - 2 * C[:, :, EQUILIBRIUM]).clamp(min=0).sqrt()


def measure(atoms: int) -> dict[str, Any]:
    """Measure deviations and errors, and what they cost."""
    return study_page.part("crystal_potential", "all", partial(_measured, atoms))


def _measured(atoms: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    new, old = load("0.3.0").eval(), load("0.2.0").eval()
    graph, source = new.graph_converter, random.Random(0)
    kinds = prototypes(atoms)
    data = [graph(crystal) for crystal in kinds[::2]]
    test = {
        "data": data,
        "prototypes": [graph(crystal) for crystal in kinds[1::2]],
        "substituted": [graph(substituted(crystal, source)) for crystal in kinds[1::2]],
    }
    names, crystals, truth = elements()
    squeezed = [graph(crystal) for crystal in crystals]
    found: dict[str, Any] = {"elements": names, "crystals": {name: len(some) for name, some in test.items()}}
    found["atoms"] = sum(len(crystal.atomic_number) for crystal in data)
    found["disagreement"] = {name: (energies(new, some) - energies(old, some)).abs() for name, some in test.items()}
    above = {}
    for version, potential in (("0.3.0", new), ("0.2.0", old)):
        E = energies(potential, squeezed).view(truth.shape)
        above[version] = E - E[:, EQUILIBRIUM : EQUILIBRIUM + 1]
    found["squeezed"] = {"truth": truth, **above}
    close = features(new, data)
    found["distance"] = {name: torch.cdist(features(new, some), close).amin(1) for name, some in test.items()}
    f = features(new, squeezed).view(*truth.shape, -1)
    found["squeezed"]["distance"] = (f - f[:, EQUILIBRIUM : EQUILIBRIUM + 1]).norm(dim=-1)

    model, y = Energy(new), energies(new, data).unsqueeze(1)
    weights = [p for p in model.parameters() if p.requires_grad]
    found["gradient"] = seconds(lambda: torch.autograd.grad(model(data).sum(), weights, allow_unused=True))
    found["posteriors"] = {}
    for name, (parameters, curvature) in POSTERIORS.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            likelihood = co.likelihoods.Gaussian(NOISE)
            make = partial(co.linearize, model, (data, y), likelihood, parameters, collate=list)
            lin, linearize = clock(make)
            C, building = clock(partial(curvature, lin))
            posts = {prior: co.laplace(lin, C, prior, check_mode=False) for prior in PRIORS}
            row: dict[str, Any] = {"weights": lin.num_parameters, "linearize": linearize, "curvature": building}
            tried = squeezed[: TRIED * len(VOLUMES)]
            prior, choosing = clock(partial(best, posts, tried, (above["0.3.0"] - truth)[:TRIED]))
            predict = posts[prior]
            row |= {
                "prior": prior,
                "choosing": choosing,
                "deviation": {k: deviations(predict, some) for k, some in test.items()},
            }
            row["squeezed"], predicting = clock(partial(deviations_of_differences, predict, squeezed))
            row |= {"predicting": predicting, "messages": [str(w.message).splitlines()[0] for w in caught]}
        found["posteriors"][name] = row
        print(name, linearize, building, prior, predicting, len(caught), flush=True)
    return found | {"peak": resident("VmHWM")}


def best(posts: dict[float, co.posterior.Laplace], crystals: list[Any], error: Tensor) -> float:
    """Return the prior precision under which the errors of differences are most likely, given scale and noise."""
    tried = {}
    for prior, post in posts.items():
        s = deviations_of_differences(post, crystals)
        tried[prior] = calibrated(_beside(s).flatten(), _beside(error).flatten())[1]
    return min(tried, key=tried.__getitem__)


def calibrated(u: Tensor, error: Tensor) -> tuple[tuple[float, float], float]:
    """Return a and b of the variance a + b u² under which errors are most likely, and their mean -log density."""
    scale = float(error.square().mean())
    unit = u.double() / float(u.double().square().mean().sqrt().clamp(min=1e-30))

    def objective(logs: Any) -> float:
        return float(misfit(unit, error, (scale * math.exp(logs[0]), scale * math.exp(logs[1]))))

    starts = [(0.0, -3.0), (-3.0, 0.0), (-6.0, 0.0)]
    logs = min((minimize(objective, s, method="Nelder-Mead") for s in starts), key=lambda r: r.fun)
    a, b = (scale * math.exp(value) for value in logs.x)
    return (a, b / float(u.double().square().mean().clamp(min=1e-60))), float(logs.fun)


def misfit(u: Tensor, error: Tensor, constants: tuple[float, float]) -> Tensor:
    """Return the mean -log density of errors under normal laws of variance a + b u²."""
    variance = constants[0] + constants[1] * u.double().square()
    return ((2 * math.pi * variance).log() + error.double().square() / variance).mean() / 2


def _beside(values: Tensor) -> Tensor:
    """Return the columns of volumes other than the equilibrium."""
    return values[:, [i for i in range(len(VOLUMES)) if i != EQUILIBRIUM]]


def rank(a: Tensor, b: Tensor) -> float:
    """Return Spearman's correlation of two samples."""
    return float(spearmanr(a.flatten(), b.flatten())[0])


def doubts(found: dict[str, Any]) -> dict[str, Callable[[str], Tensor]]:
    """Return by name what may foretell the disagreement on a set of crystals."""
    posts = found["posteriors"]
    bars = {name: (lambda k, row=row: row["deviation"][k]) for name, row in posts.items()}
    return {**bars, "distance of features": lambda k: found["distance"][k]}


def doubts_of_differences(found: dict[str, Any]) -> dict[str, Tensor]:
    """Return by name what may foretell the errors of differences, (36, V)."""
    squeezed = found["squeezed"]
    return {
        **{name: row["squeezed"] for name, row in found["posteriors"].items()},
        "the other version": (squeezed["0.3.0"] - squeezed["0.2.0"]).abs(),
        "distance of features": squeezed["distance"],
        "the energy itself": squeezed["0.3.0"].abs(),
        "the strain": (torch.tensor(VOLUMES).double() - 1).abs().expand(len(found["elements"]), -1),
    }


def substituted_table(found: dict[str, Any]) -> str:
    """How well each measure foretells where the versions disagree."""
    rows, n = [], found["crystals"]
    disagreement = found["disagreement"]
    for name, doubt in doubts(found).items():
        times = f"{float(doubt('substituted').median() / doubt('prototypes').median()):.1f}"
        both = [torch.cat([of("prototypes"), of("substituted")]) for of in (doubt, disagreement.__getitem__)]
        ranks = [rank(doubt(kind), disagreement[kind]) for kind in ("prototypes", "substituted")]
        rows.append([name, times, *(f"{r:.2f}" for r in (*ranks, rank(*both)))])
    medians = {kind: 1e3 * float(disagreement[kind].median()) for kind in n}
    header = ["", "times as large", "rank, prototypes", "rank, substituted", "rank, both"]
    text = (
        f"{n['data']} crystals are the data; {n['prototypes']} others are tested as they are and with substituted "
        "elements. *Times as large*: the median of these beside that of those. *Rank*: Spearman's correlation with "
        f"the disagreement of the two versions, whose median is {medians['data']:.0f} meV per atom on the data, "
        f"{medians['prototypes']:.0f} on other prototypes and {medians['substituted']:.0f} on substituted ones."
    )
    return f"{table(header, rows)}\n\n{text}"


def squeezed_table(found: dict[str, Any]) -> str:
    """How well each measure foretells errors of squeezed and stretched elements."""
    squeezed, rows = found["squeezed"], []
    error = (squeezed["0.3.0"] - squeezed["truth"]).abs()
    third = len(error) // 3
    constant = calibrated(torch.zeros_like(_beside(error[:third]).flatten()), _beside(error[:third]).flatten())[0]
    reference = misfit(torch.zeros(1), _beside(error[third:]).flatten(), (constant[0], 0.0))
    for name, doubt in doubts_of_differences(found).items():
        constants, _ = calibrated(_beside(doubt[:third]).flatten(), _beside(error[:third]).flatten())
        gain = float(reference - misfit(_beside(doubt[third:]).flatten(), _beside(error[third:]).flatten(), constants))
        tested, wrong = _beside(doubt[third:]), _beside(error[third:])
        alone = "–" if name == "the strain" else f"{sum(map(rank, tested.T, wrong.T)) / tested.shape[1]:.2f}"
        rows.append([name, f"{rank(tested, wrong):.2f}", alone, f"{gain:.2f}"])
    header = ["", "rank", "rank at one volume", "nats gained"]
    text = (
        f"Errors of {len(error) - third} elements at {', '.join(f'{v:g}' for v in VOLUMES if v != 1)} times their "
        f"volume; their median is {1e3 * float(_beside(error[third:]).median()):.0f} meV per atom, the largest "
        f"{1e3 * float(error[third:].max()):.0f}. *Rank*: Spearman's correlation of the measure with the size of the "
        "error; *at one volume*, the mean over the volumes. *Nats gained*: a point, by the variance a + b u² of the "
        f"measure u beside a constant one; a and b fit the errors of {third} other elements, on {TRIED} of which the "
        "prior precisions were chosen, too."
    )
    return f"{table(header, rows)}\n\n{text}"


def costs_table(found: dict[str, Any]) -> str:
    """Seconds of each step, also in gradients."""
    rows = []
    for name, row in found["posteriors"].items():
        points = len(VOLUMES) * len(found["elements"])
        cells = [row["linearize"], row["curvature"], row["curvature"] / found["gradient"]]
        each = [f"{1e3 * row['predicting'] / points:.0f} ms", f"{row['prior']:g}", str(len(row["messages"]))]
        rows.append([name, f"{row['weights']:,}", *(f"{cell:.1f}" for cell in cells), *each])
    header = ["", "weights", "linearize", "curvature", "in gradients", "a prediction", "prior precision", "warnings"]
    text = (
        f"Seconds. A gradient of the {found['crystals']['data']} crystals of {found['atoms']} atoms takes "
        f"{found['gradient']:.1f} s. The study needed at most {found['peak'] / 2**30:.1f} GiB."
    )
    return f"{table(header, rows)}\n\n{text}"


def scatter(found: dict[str, Any]) -> Figure:
    """Disagreement against the error bar for crystals, and error against it for squeezed elements."""
    figure = style.blank(9.5, 4)
    left, right = figure.subplots(1, 2)
    bars = found["posteriors"]["all weights, KFAC"]
    labels = {"data": "the data", "prototypes": "other prototypes", "substituted": "substituted elements"}
    for (kind, label), look in zip(labels.items(), style.looks(labels).values()):
        points = 1e3 * bars["deviation"][kind], 1e3 * found["disagreement"][kind]
        left.plot(*points, linestyle="", markersize=4.5, alpha=0.75, label=label, **look.dots)
    style.dress(left, "standard deviation (meV per atom)", "disagreement of versions (meV per atom)", "crystals")
    squeezed = found["squeezed"]
    error = 1e3 * (squeezed["0.3.0"] - squeezed["truth"]).abs()
    for i, look in zip((0, 1, 3), style.looks(map(str, VOLUMES)).values()):
        points = 1e3 * bars["squeezed"][:, i], error[:, i]
        right.plot(*points, linestyle="", markersize=4.5, alpha=0.75, label=f"{VOLUMES[i]:g} V", **look.dots)
    style.dress(right, "standard deviation (meV per atom)", "error (meV per atom)", "squeezed and stretched elements")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.legend(fontsize=style.SMALL, frameon=False, loc="lower right")
    right.set_ylim(bottom=0.1)
    left.set_ylim(bottom=0.1)
    return figure


SECTIONS: dict[str, Callable[[dict[str, Any]], str]] = {
    "squeezed": squeezed_table,
    "crystal costs": costs_table,
}
STUDY = study_page.Study(
    "crystal_potential",
    __doc__,
    measure,
    {"substituted": substituted_table},
    "docs/crystal_potential.md",
    figures={"crystal_potential": scatter},
    options={"atoms": (6, "the most atoms of a prototype's cell")},
    elsewhere={"docs/crystal_potential.md": SECTIONS},
)

if __name__ == "__main__":
    STUDY.run()
