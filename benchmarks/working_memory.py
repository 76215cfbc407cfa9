"""Do algorithms stay within the memory budget?

    python -m benchmarks.working_memory --budgets 128 256 1024
    python -m benchmarks.working_memory --network resnet --budgets 512 1024 2048 4096 --keep
    python -m benchmarks.working_memory --network factors --budgets 512 1024 2048 4096 --keep

The network "mlp" has two million weights and few points: a vector is 8 MB, so that every working vector shows. The
bound for each algorithm is the memory before it, the budget, one batch's forward and backward pass, and the result. The
peak is that of the process, reset before each algorithm (Linux). Each budget has its own process, whose allocator
returns large freed blocks at once, as in `benchmarks.memory`.

"resnet" is a ResNet-18 with eleven million weights and batches of 64 images, as many as its engines have room for in
the budget; "factors" is the same with 1,280 images, so that KFAC's factors have full rank. The algorithms run one after
the other, and what they keep stays: the bound is the memory before the network is linearised, a block of four vectors,
the budget, the measured peak of one batch's forward and backward pass, and the results, among them what KFAC and EKFAC
store. The allocator is glibc's with its default rules, so that freed blocks which it keeps count (`--allocator`). With
`--keep` the rows go to `benchmarks/measured/`, in place of the same ones, and to docs/scale.md.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.machine import facts, reset_peak, resident, run_apart
from benchmarks.report import MEASURED, fill_pages
from benchmarks.tables import MIB, table, within

WIDTHS, POINTS = (1000, 1400, 400, 10), 12
SLACK = 24 * MIB
"""Bytes that the allocator and lazily loaded code may add."""
ALGORITHMS = (
    """
predict, joint, diagonal predict, kfac predict, ekfac predict, low rank predict, sample, diagonal sample, cg, minres,
solve, refined cg, preconditioner, nystrom, low_rank, lanczos, eigsh, svds, trace, xnystrace, hutch++,
hutchinson, diagonal, xnysdiag, bekas, frobenius, logdet, log_evidence, effective_parameters, sqrt,
spectral_density, kernel
""".strip()
    .replace("\n", " ")
    .split(", ")
)


IMAGES, BATCH, MANY = 2**23, 64, 1280
"""Bytes of the budget for each image, which an engine needs; images of a batch; and as many as have full factors."""
INFERENCE = ("gradient", "products", "solve", "evidence", "sample", "predict", "mode")
FACTORS = ("gradient", "kfac", "kfac predict", "ekfac predict")


def stages(budget: int, points: int) -> tuple[dict[str, Callable[[], Any]], int, int, int | None]:
    """The calls for a ResNet-18 by name, the bytes of a vector and of one batch's passes, and the memory before it."""
    import torch

    import curvops as co
    from benchmarks.large_network import network
    from benchmarks.networks import Problem

    model = network().eval()
    problem = Problem("resnet", 10, model, torch.randn(points, 3, 32, 32), torch.arange(points) % 10)
    batches, x = problem.batches(points // BATCH), torch.randn(BATCH, 3, 32, 32)
    before = reset_peak()
    unit = Problem("resnet", 10, model, *batches[0]).unit()
    for _ in range(2):
        unit()
    batch = resident("VmHWM") - before
    lin = co.linearize(model, batches, "classification", memory_budget=budget)
    prior: dict[str, Any] = {"prior_precision": 1e3 * points, "check_mode": False}
    B = torch.randn(4, lin.num_parameters).mT
    post = co.laplace(lin, co.GGN, **prior)

    def seeded() -> torch.Generator:
        return torch.Generator().manual_seed(0)

    def products() -> Any:
        for _ in range(2):
            co.GGN(lin) @ B
        return co.GGN(lin) @ B

    def factored(curvature: Any) -> Any:
        return co.laplace(lin, curvature(lin, fisher="mc"), **prior)

    kept: dict[str, Any] = {}

    def kfac() -> Any:
        kept["kfac"] = factored(co.KFAC)
        kept["kfac"].log_evidence()
        return kept["kfac"].curvature

    def ekfac() -> Any:
        found = factored(co.EKFAC)
        _ = found.predict(x).variance
        return found.curvature

    calls = {
        "gradient": unit,
        "products": products,
        "solve": lambda: co.linalg.solve(post.precision, B, rtol=0.1),
        "evidence": post.log_evidence,
        "sample": lambda: post.sample(4, seeded()),
        "predict": lambda: post.predict(x[:8], rtol=0.1).variance,
        "mode": lambda: post.linear_mode(rtol=0.1),
        "kfac": kfac,
        "kfac predict": lambda: kept["kfac"].predict(x).variance,
        "ekfac predict": ekfac,
    }
    return calls, lin.theta.nbytes, batch, before + B.nbytes


def algorithms(budget: int) -> tuple[dict[str, Callable[[], Any]], int, int, int | None]:
    """The calls by name, the bytes of a vector and of one batch's passes; the memory before is that of each call."""
    import torch
    from torch import nn

    import curvops as co
    from benchmarks.layers import linear_layers

    torch.manual_seed(0)
    model = linear_layers(*WIDTHS, activation=nn.ReLU)
    x, y = torch.randn(2 * POINTS, WIDTHS[0]), torch.arange(2 * POINTS) % WIDTHS[-1]
    lin = co.linearize(model.eval(), (x[:POINTS], y[:POINTS]), "classification", memory_budget=budget)
    L, D = co.linalg, lin.num_parameters

    def posterior(curvature: Any) -> Any:
        return co.laplace(lin, curvature, prior_precision=1.0, check_mode=False)

    def seeded() -> torch.Generator:
        return torch.Generator().manual_seed(0)

    post = posterior(co.GGN)
    G, P, few = post.curvature, post.precision, x[POINTS : POINTS + 1]
    loose: dict[str, Any] = {"rtol": 0.1}
    budgeted: dict[str, Any] = {"max_matvecs": 48, "generator": seeded()}
    calls: dict[str, Callable[[], Any]] = {
        "predict": lambda: post.predict(few, **loose).variance,
        "joint": lambda: post.predict(few, joint=True, **loose).covariance_matrix,
        "diagonal predict": lambda: posterior(co.DiagonalGGN).predict(x[POINTS:]).variance,
        "kfac predict": lambda: posterior(co.KFAC(lin, fisher="mc")).predict(few).variance,
        "ekfac predict": lambda: posterior(co.EKFAC(lin, fisher="mc")).predict(few).variance,
        "low rank predict": lambda: posterior(co.low_rank(G, 4, generator=seeded())).predict(x[POINTS:]).variance,
        "sample": lambda: post.sample(4, seeded(), **loose),
        "diagonal sample": lambda: posterior(co.DiagonalGGN).sample(4, seeded()),
        "cg": lambda: L.cg(P, torch.randn(8, D).mT, **loose),
        "minres": lambda: L.minres(P, torch.randn(4, D).mT, **loose),
        "solve": lambda: L.solve(P, torch.randn(8, D).mT, **loose),
        "refined cg": lambda: L.cg(P, torch.randn(2, D).mT, refine=True, rtol=0.1),
        "preconditioner": lambda: posterior(co.GGN).precision.preconditioner(16, seeded()),
        "nystrom": lambda: L.nystrom(G, 64, generator=seeded()),
        "low_rank": lambda: co.low_rank(G, 64, generator=seeded()),
        "lanczos": lambda: L.lanczos(G, 64, generator=seeded()),
        "eigsh": lambda: L.eigsh(G, 4, rtol=0.1, generator=seeded()),
        "svds": lambda: L.svds(lin.jacobian(), 4, rtol=0.1, generator=seeded()),
        "trace": lambda: L.trace(G, **budgeted),
        "xnystrace": lambda: L.trace(G, method="xnystrace", **budgeted),
        "hutch++": lambda: L.trace(G, method="hutch++", **budgeted),
        "hutchinson": lambda: L.trace(G, method="hutchinson", **budgeted),
        "diagonal": lambda: L.diagonal(G, **budgeted),
        "xnysdiag": lambda: L.diagonal(G, method="xnysdiag", **budgeted),
        "bekas": lambda: L.diagonal(G, method="bekas", **budgeted),
        "frobenius": lambda: L.frobenius_norm(G, **budgeted),
        "logdet": lambda: L.logdet(G, shift=1.0, rtol=0.2, **budgeted),
        "log_evidence": lambda: posterior(co.GGN).log_evidence(rtol=0.2, generator=seeded()),
        "effective_parameters": lambda: posterior(co.GGN).effective_parameters(rtol=0.2, generator=seeded()),
        "sqrt": lambda: L.sqrt(P, torch.randn(2, D).mT, rtol=0.1, lower_bound=1.0),
        "spectral_density": lambda: L.spectral_density(G, probes=4, steps=16, generator=seeded()),
        "kernel": lambda: co.TangentKernel(lin, x=x).to_dense(),
    }
    vector = D * lin.theta.element_size()
    return calls, vector, 2 * vector, None  # a batch: the gradient, and few activations


NETWORKS: dict[str, tuple[Callable[[int], Any], Sequence[str]]] = {
    "mlp": (algorithms, ALGORITHMS),
    "resnet": (lambda budget: stages(budget, budget // IMAGES), INFERENCE),
    "factors": (lambda budget: stages(budget, MANY), FACTORS),
}


def child(network: str, budget: int, names: Sequence[str], threads: int) -> None:
    """Run the algorithms one after the other; a JSON row for each."""
    import torch

    from benchmarks.peak import load_code

    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    load_code()
    calls, vector, batch, base = NETWORKS[network][0](budget)
    stored = 0
    for name in names:
        before, start = reset_peak(), time.perf_counter()
        result = calls[name]()
        peak, seconds = resident("VmHWM"), time.perf_counter() - start
        over = peak - (before if base is None else base)
        row = {"network": network, "algorithm": name, "budget": budget, "over": over, "batch": batch}
        row["seconds"] = round(seconds, 2)
        stored += sum(t.nbytes for block in getattr(result, "blocks", ()) for t in tensors(block))
        row["asked"] = stored + sum(t.nbytes for t in tensors(result) if t.numel() * t.element_size() >= vector)
        bound = budget + batch + row["asked"] + SLACK
        print(json.dumps(row | {"bound": bound, "capped": capped(result)}), flush=True)
        del result


def tensors(result: Any) -> list[Any]:
    """The tensors of a result, of its fields, and of operators' arguments and decompositions."""
    from torch import Tensor

    if isinstance(result, Tensor):
        return [result]
    fields = list(getattr(result, "__dict__", {}).values()) + list(getattr(result, "_args", ()))
    fields += [field for known in getattr(result, "details", ()) for field in (known.rest, known.root)]
    eigen = getattr(result, "known_eigen", None)
    return [field for field in fields if isinstance(field, Tensor)] + ([] if eigen is None else tensors(eigen))


def capped(result: Any) -> str:
    """Where the result says that memory capped it."""
    reason = getattr(result, "reason", None)
    if getattr(result, "groups", 1) > 1:
        return f"{result.groups} groups"
    return reason.name if reason is not None and reason.name == "RANK_CAPPED" else ""


def rows(
    budget: int, names: Sequence[str], threads: int = 1, network: str = "mlp", prompt: bool = True
) -> list[dict[str, Any]]:
    """Measure in a process of its own, and return its rows."""
    arguments = ["--child", budget, "--network", network, "--threads", threads, "--algorithms", *names]
    return run_apart("benchmarks.working_memory", *arguments, prompt=prompt)


def keep(found: Sequence[dict[str, Any]], threads: int) -> None:
    """Put these rows in place of the same ones among the raw results, and the tables into the page."""
    file = MEASURED / "working_memory.json"
    before = json.loads(file.read_text(encoding="utf-8"))["rows"] if file.exists() else []
    kept = {tuple(row[key] for key in ("network", "budget", "algorithm")): row for row in [*before, *found]}
    result = {"kind": "working memory", "machine": facts(threads), "rows": [kept[key] for key in sorted(kept)]}
    file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    fill_pages(result)


def main() -> None:
    """Measure every algorithm at every budget and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.working_memory", description=__doc__)
    parser.add_argument("--network", default="mlp", choices=NETWORKS)
    parser.add_argument("--algorithms", nargs="+", choices=[*ALGORITHMS, *INFERENCE, *FACTORS], metavar="NAME")
    parser.add_argument("--budgets", type=float, nargs="+", default=[128, 256, 1024], metavar="MIB")
    parser.add_argument("--allocator", choices=["prompt", "default"], help="by default that of the network")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="write the rows to benchmarks/measured/ and the page")
    parser.add_argument("--child", type=int, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.algorithms or NETWORKS[options.network][1]
    if options.child is not None:
        child(options.network, options.child, names, options.threads)
        return
    prompt = (options.allocator or ("prompt" if options.network == "mlp" else "default")) == "prompt"
    header = ["algorithm", "budget", "asked for", "bound", "over", "within", "capped", "s"]
    lines = []
    for budget in options.budgets:
        found = rows(round(budget * MIB), names, options.threads, options.network, prompt)
        if options.keep:
            keep(found, options.threads)
        for row in found:
            sizes = [f"{row[key] / MIB:,.0f}" for key in ("budget", "asked", "bound", "over")]
            verdict = within(row["over"], row["bound"])
            lines.append([row["algorithm"], *sizes, verdict, row["capped"], f"{row['seconds']:.1f}"])
    print(table(header, lines))


if __name__ == "__main__":
    main()
