"""What can be asked of a linearisation: each answer is to be that of one process, whatever the ranks."""

import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, product
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import curvops as co
from curvops.ranks.process_group import is_dtensor
from tests.randomness import seeded

DOUBLE = torch.float64
N = 14
WIDTHS = {"labels": 5, "numbers": 3, "more weights than outputs": 40}
"""Hidden units of each problem."""
SHARDS = {1: (14,), 2: (9, 5), 3: (5, 0, 9)}
"""Points of each rank: ragged, and none."""


def data(problem: str, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, 4, generator=generator, dtype=DOUBLE)
    if problem == "numbers":
        return x, torch.randn(N, 2, generator=generator, dtype=DOUBLE)
    return x, torch.randint(3, (N,), generator=generator)


def own_slice(size: int, rank: int, shards: dict[int, tuple[int, ...]] = SHARDS) -> slice:
    """Which points a rank has."""
    return slice(sum(shards[size][:rank]), sum(shards[size][: rank + 1]))


def own_points(problem: str, size: int, rank: int) -> tuple[Tensor, Tensor]:
    x, y = data(problem)
    return x[own_slice(size, rank)], y[own_slice(size, rank)]


def place_of(group: Any) -> tuple[int, int]:
    """The size of a group and the rank in it; of one process, without a group, (1, 0)."""
    return (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))


def linearise(
    problem: str, shards: tuple[int, ...] = (N,), group: Any = None, rank: int = 0, seed: int = 1, batch: int = N
) -> co.operators.Linearization:
    """A problem's network at its data, or this rank's part of them, in batches of so many points."""
    torch.manual_seed(0)
    width, outputs = WIDTHS[problem], 2 if problem == "numbers" else 3
    model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, outputs)).double()
    noise = torch.tensor(0.3, dtype=DOUBLE, requires_grad=True)
    likelihood = co.likelihoods.Gaussian(noise) if problem == "numbers" else "classification"
    own = slice(sum(shards[:rank]), sum(shards[: rank + 1]))
    x, y = (tensor[own] for tensor in data(problem, seed))
    batches: Any = list(zip(x.split(batch), y.split(batch))) if len(x) > batch else (x, y)
    return co.linearize(model, batches, likelihood, process_group=group)


def gradient_of(function: Callable[[], Tensor], tensor: Tensor) -> Tensor:
    return torch.autograd.grad(function(), tensor)[0]


Question = Callable[[], Any]


def of_operators(lin: co.operators.Linearization, B: Tensor) -> Iterator[tuple[str, Question]]:
    G, J, K = co.GGN(lin), lin.jacobian(), co.TangentKernel(lin, 2.0)
    rows = torch.ones(lin.num_data * lin.num_outputs, 2, dtype=DOUBLE)
    yield "log-likelihood", lin.log_likelihood
    yield "gradient", lin.gradient
    yield "outputs", lin.outputs
    for name, A in {"GGN": G, "Hessian": co.Hessian(lin), "empirical Fisher": co.EmpiricalFisher(lin)}.items():
        yield f"{name}: product", lambda A=A: A @ B
        yield f"{name}: diagonal", A.diagonal
    yield "J: product", lambda: J @ B
    yield "J: transposed product", lambda: J.mT @ rows
    yield "points' gradients", lambda: lin.gradients().to_dense()
    yield "kernel: product", lambda: K @ rows
    yield "kernel: matrix", K.to_dense
    yield "kernel: diagonal", K.diagonal
    yield "kernel: blocks", lambda: K.blocks(2)
    noisy = K.add_diagonal(torch.tensor(0.4, dtype=DOUBLE))
    yield "kernel and noise: solution", lambda: noisy.solve(rows)
    yield "kernel and noise: log-determinant", lambda: co.linalg.logdet(noisy, generator=seeded(3)).value
    yield "rows of J", lambda: J.rows_at(torch.tensor([1, 3, 15, 27]))
    yield "kernel beside other points", lambda: co.TangentKernel(lin, 2.0, None, rows[:3, :1].expand(3, 4)).to_dense()
    yield "Monte-Carlo Fisher", lambda: co.GGN(lin, mc_samples=2, generator=seeded(3)) @ B
    yield "diagonal of the GGN", lambda: co.DiagonalGGN(lin).diagonal()
    for fisher in ("exact", "empirical", "mc"):
        source = {"generator": seeded(3)} if fisher == "mc" else {}
        yield f"KFAC, {fisher}", lambda o=(fisher, source): co.KFAC(lin, fisher=o[0], **o[1]).to_dense()
    yield "EKFAC", lambda: co.EKFAC(lin).to_dense()
    yield "blocks", lambda: co.BlockDiagonal(lin).to_dense()
    yield "subnetwork", lambda: co.Subnetwork(G, [1, 5, 9]).to_dense()
    yield "low rank", lambda: co.low_rank(G, 5, generator=seeded(3)).to_dense()
    yield "subsample", lambda: co.GGN(co.subsample(lin, 5, generator=seeded(3))) @ B


def of_solvers(lin: co.operators.Linearization, B: Tensor) -> Iterator[tuple[str, Question]]:
    G, J, shift = co.GGN(lin), lin.jacobian(), torch.tensor(20.0, dtype=DOUBLE)
    P = G.add_diagonal(shift)
    yield "cg", lambda: P.cg(B, rtol=1e-12).x
    yield "solve", lambda: P.solve(B)
    yield "lsmr", lambda: co.linalg.lsmr(J, J @ B, damp=3.0, rtol=1e-12).x
    yield "svds", lambda: co.linalg.svds(J, 3, generator=seeded(3)).values
    yield "log-determinant", lambda: co.linalg.logdet(G, shift=1.0, generator=seeded(3)).value
    yield "trace", lambda: co.linalg.trace(G, generator=seeded(3)).value


def of_posteriors(lin: co.operators.Linearization, B: Tensor) -> Iterator[tuple[str, Question]]:
    x = torch.randn(6, 4, generator=seeded(3), dtype=DOUBLE)
    for curvature in (co.GGN, co.KFAC, co.EKFAC, co.DiagonalGGN, co.EmpiricalFisher):
        name, post = curvature.__name__, co.laplace(lin, curvature, prior_precision=3.0, check_mode=False)
        yield f"{name}: prediction", lambda p=post: p.predict(x).covariance_matrix
        yield f"{name}: joint prediction", lambda p=post: p.predict(x, joint=True).covariance_matrix
        yield f"{name}: evidence", lambda p=post: p.log_evidence(generator=seeded(3)).value
        yield f"{name}: draws", lambda p=post: p.sample(3, seeded(3), rtol=1e-12)
        yield f"{name}: effective parameters", lambda p=post: p.effective_parameters(generator=seeded(3)).value
        yield f"{name}: penalty", lambda p=post: p.penalty(lin.theta + 1)
    yield "chosen prior", lambda: co.laplace(lin, check_mode=False).prior_precision
    # The search for the best score is sensitive to rounding, and this score is not.
    yield "validated", lambda: torch.tensor(max(co.laplace(lin, validation=(x, x[:, :2])).tuning.scores))
    post = co.laplace(lin, co.GGN, prior_precision=3.0, check_mode=False)
    yield "functions", lambda: post.functions(x, 3, generator=seeded(3))
    yield "uncertainty", lambda: post.uncertainty(x).total
    yield "posterior: trace", lambda: post.trace(co.GGN(lin), samples=4, generator=seeded(3)).value
    yield "linear mode", lambda: post.linear_mode(rtol=1e-10).theta
    yield "evidence at the linear mode", lambda: post.log_evidence(mode="linear", generator=seeded(3)).value
    yield "selection", lambda: co.select(lin, 5)
    yield "selection by prediction", lambda: co.select(lin, 5, score="predictive")
    yield "distance", lambda: co.wasserstein(post, co.select(lin, 5), generator=seeded(3)).value


def of_processes(lin: co.operators.Linearization, B: Tensor) -> Iterator[tuple[str, Question]]:
    x = torch.randn(6, 4, generator=seeded(3), dtype=DOUBLE)
    yield "kernel of gpytorch", lambda: co.gp.LinearizedKernel(lin)(x).to_dense()
    reduced = lambda **form: co.gp.reduced_posterior(lin, 3, prior_precision=3.0, generator=seeded(3), **form)  # noqa: E731
    yield "reduced posterior", lambda: reduced().predict(x).covariance_matrix
    yield "exact process: inputs", lambda: co.gp.LinearizedGP(lin).train_inputs[0]
    yield "exact process: targets", lambda: co.gp.LinearizedGP(lin).train_targets
    post = co.laplace(lin, co.GGN, prior_precision=3.0, check_mode=False)
    yield "model of BoTorch", lambda: co.gp.LaplaceModel(post).posterior(x).variance


def of_classes(lin: co.operators.Linearization) -> Iterator[tuple[str, Question]]:
    """What cannot be asked of a regression, or differs there."""
    x = torch.randn(6, 4, generator=seeded(3), dtype=DOUBLE)
    post = co.laplace(lin, co.GGN, prior_precision=3.0, check_mode=False)
    yield "dual draws", lambda: post.deviations(3, generator=seeded(3), method="dual", rtol=1e-12).draws
    yield "Laplace's process", lambda: co.gp.laplace_gp(lin, prior_precision=3.0).predict(x).covariance_matrix
    yield "uncertainty", lambda: post.uncertainty(x, generator=seeded(3)).total
    for curvature in (None, co.GGN):
        yield f"chosen prior, {curvature}", lambda c=curvature: co.laplace(lin, c, check_mode=False).prior_precision
    yield "validated", lambda: torch.tensor(max(co.laplace(lin, validation=(x, torch.arange(6) % 3)).tuning.scores))


def of_draws(lin: co.operators.Linearization) -> Iterator[tuple[str, Question]]:
    """Whatever is random by data: equal seeds give equal numbers, for any batches and ranks."""
    G, kernel, drawn = co.GGN(lin), co.TangentKernel(lin, 2.0), {"fisher": "mc", "generator": seeded()}
    # Roots by eigenvectors are those of definite matrices: at an eigenvalue 0 they are accurate to √eps only.
    matrices = {
        "GGN": G,
        "GGN of drawn labels": co.GGN(lin, mc_samples=2, generator=seeded()),
        "empirical Fisher": co.EmpiricalFisher(lin),
        "KFAC of drawn labels": co.KFAC(lin, **drawn).add_diagonal(0.5),
        "EKFAC of drawn labels": co.EKFAC(lin, fisher="mc", generator=seeded()).add_diagonal(0.5),
        "diagonal of drawn labels": co.DiagonalGGN(lin, fisher="mc", generator=seeded()),
        "blocks": co.BlockDiagonal(lin).add_diagonal(0.5),
        "GGN and KFAC": 0.5 * G + co.KFAC(lin).add_diagonal(0.5),
        "GGN and a diagonal": G.add_diagonal(0.5),
        "inverse": co.KFAC(lin).add_diagonal(0.5).inverse(),
        "tangent kernel": kernel,
        "tangent kernel and noise": kernel.add_diagonal(torch.tensor(0.5, dtype=DOUBLE)),
    }
    for name, A in matrices.items():
        yield f"draws of {name}", lambda A=A: co.linalg.draw(A, 4, seeded())
    for name in ("trace", "diagonal", "frobenius_norm"):  # by probes of data
        yield f"{name} of the kernel", lambda name=name: getattr(co.linalg, name)(kernel, generator=seeded()).value
    yield "density of the kernel", lambda: kernel.spectral_density(probes=3, generator=seeded()).density
    yield "sketch of the kernel", lambda: co.low_rank(kernel, 5, generator=seeded()).to_dense()
    post = co.laplace(lin, co.GGN, prior_precision=3.0, check_mode=False)
    x = torch.randn(6, 4, generator=seeded(), dtype=DOUBLE)
    yield "draws by cg", lambda: post.deviations(3, method="cg", generator=seeded(), rtol=1e-12).draws
    yield "probabilities by draws", lambda: post.probabilities(x, link="mc", generator=seeded())
    yield "random selection", lambda: co.select(lin, 5, score="random", generator=seeded())
    process = co.gp.reduced_posterior(lin, 3, prior_precision=3.0, features="random", generator=seeded())
    yield "random features", lambda: process.predict(x).covariance_matrix


def of_tuning(lin: co.operators.Linearization, B: Tensor) -> Iterator[tuple[str, Question]]:
    post = co.laplace(lin, co.GGN, prior_precision=3.0, check_mode=False)
    yield "maximize", lambda: co.evidence.maximize(post, steps=3, generator=seeded(3)).prior_precision
    yield (
        "maximize over layers",
        lambda: co.evidence.maximize(post, "layers", steps=3, generator=seeded(3)).prior_precision,
    )
    yield "mackay", lambda: co.evidence.mackay(post, samples=4, steps=3, generator=seeded(3)).prior_precision
    yield "grid", lambda: torch.stack([e.value for e in co.evidence.grid(post, [0.1, 1.0], generator=seeded(3))])
    tuned = lambda: co.evidence.maximize(post, ("scalar", "noise"), steps=3, generator=seeded(3)).lin.likelihood  # noqa: E731
    yield "maximize over the noise", lambda: tuned().hyperparameters[0]
    each = post.with_noise(torch.tensor([0.3, 0.5], dtype=DOUBLE))
    yield "maximize over noises", lambda: co.evidence.maximize(each, ("scalar", "noise"), steps=3).lin.likelihood.noise


def of_gradients(lin: co.operators.Linearization, B: Tensor) -> Iterator[tuple[str, Question]]:
    """Of what has a gradient, this gradient: in the vectors and in the likelihood's noise."""
    operators = {"GGN": co.GGN(lin), "J": lin.jacobian(), "empirical Fisher": co.EmpiricalFisher(lin)}
    for name, A in operators.items():
        V = B.clone().requires_grad_()
        yield f"{name}: gradient in the vectors", lambda A=A, V=V: gradient_of(lambda: (A @ V).square().sum(), V)
    for noise in lin.likelihood.hyperparameters:
        yield "likelihood: gradient in the noise", lambda n=noise: gradient_of(lin.log_likelihood, n)
        yield "GGN: gradient in the noise", lambda n=noise: gradient_of(lambda: (co.GGN(lin) @ B).square().sum(), n)
        for curvature, mode in product((co.GGN, co.KFAC), ("map", "linear")):
            post = co.laplace(lin, curvature, prior_precision=3.0, check_mode=False)
            evidence = lambda p=post, m=mode: p.log_evidence(mode=m, generator=seeded(3)).value  # noqa: E731
            yield f"evidence, {curvature.__name__}, {mode}", lambda n=noise, e=evidence: gradient_of(e, n)


def of_tasks(first: co.operators.Linearization, second: co.operators.Linearization) -> Iterator[tuple[str, Question]]:
    for curvature in (co.GGN, co.KFAC):
        post = co.laplace(first, curvature, prior_precision=3.0, check_mode=False).update(second, check_mode=False)
        yield f"{curvature.__name__}: second task", lambda p=post: p.predict(data("labels")[0]).covariance_matrix
        yield f"{curvature.__name__}: its draws", lambda p=post: p.sample(2, seeded(3), rtol=1e-12)


def answered(questions: Iterable[tuple[str, Question]]) -> dict[str, np.ndarray]:
    """The answers, as NumPy arrays by the question's name, DTensors as a whole; an error says which question it was."""
    found = {}
    for name, ask in questions:
        assert name not in found, f"{name}: asked twice"
        try:
            value = ask()
        except Exception as error:
            raise RuntimeError(f"{name}: {error}") from error
        if is_dtensor(value):
            assert len(value.placements) == 1 and value.placements[0].is_shard(0), name
            value = value.full_tensor()
        found[name] = torch.as_tensor(value).detach().numpy().copy()
    return found


def answers(lin: co.operators.Linearization, later: co.operators.Linearization) -> dict[str, np.ndarray]:
    """All answers, as NumPy arrays by the question's name; `later` has the data of a second task."""
    B = torch.randn(lin.num_parameters, 3, generator=seeded(5), dtype=DOUBLE)
    shelves = [shelf(lin, B) for shelf in (of_operators, of_solvers, of_posteriors, of_processes, of_tuning)]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", co.evidence.MaxStepsWarning)
        found = answered(chain(*shelves, of_tasks(lin, later)))
    return found | answered(of_gradients(lin, B))


def of_labels(group: Any = None, batch: int = 5) -> dict[str, np.ndarray]:
    """The answers to questions about labels alone, and to those that are random: of one process or a rank."""
    size, rank = place_of(group)
    lin = linearise("labels", SHARDS[size], group, rank, batch=batch)
    with torch.no_grad():
        return answered(chain(of_classes(lin), of_draws(lin)))


def of_numbers(group: Any = None) -> dict[str, np.ndarray]:
    """The answers to questions about numbers, with a second task: of one process or a rank."""
    size, rank = place_of(group)
    return answers(*(linearise("numbers", SHARDS[size], group, rank, seed) for seed in (1, 2)))
