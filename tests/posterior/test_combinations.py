"""Every curvature crossed with every prior, method and temperature, against dense references: one table.

The map from standard normal numbers to a draw is linear. Here it is written out as a matrix M: in place of random
numbers the columns of an orthogonal matrix go in, one a draw, and M Mᵀ is T P⁻¹ or the draws have another law.
"""

import dataclasses
import functools
import math
import tempfile

import pytest
import torch
from torch import Tensor, nn

import curvops as co
from curvops.linalg.operators import ColumnNoise
from curvops.network import PointNormals, Sampled
from curvops.posterior.deviations import Noise
from curvops.posterior.log_evidence import log_ratio
from tests.randomness import perceptron, seeded

DOUBLE = torch.float64
CLOSE = {"rtol": 1e-10, "atol": 1e-11}


def network(i):
    """A network of 15 weights, and the data of a task."""
    model = perceptron(2, 2, 3, seed=i)
    x = torch.randn(5, 2, dtype=DOUBLE)
    return model, (x, x.cos().sum(1).long() % 3)


@functools.cache
def task(i):
    """The network of a task, linearised."""
    return co.linearize(*network(i), "classification")


@functools.cache
def built(curvature, i):
    """The curvature of a task."""
    return curvature(task(i))


X = torch.linspace(-1, 1, 8, dtype=DOUBLE).view(4, 2)


@functools.cache
def dense(curvature):
    """The matrix of a curvature, which many posteriors share."""
    return curvature.to_dense()


@functools.cache
def jacobian(lin):
    """J at X, as a matrix."""
    return lin.jacobian(X).to_dense()


def positive(n, low=0.5, high=2.0):
    return torch.linspace(low, high, n, dtype=DOUBLE)


def low_rank(lin):
    return co.low_rank(co.GGN(lin), rank=6, generator=seeded())


CURVATURES = {
    "GGN": co.GGN,
    "MC GGN": lambda lin: co.GGN(lin, mc_samples=2, generator=seeded(3)),
    "EmpiricalFisher": co.EmpiricalFisher,
    "Hessian": co.Hessian,
    "DiagonalGGN": co.DiagonalGGN,
    "KFAC": co.KFAC,
    "KFAC, biases apart": lambda lin: co.KFAC(lin, bias="separate"),
    "EKFAC": co.EKFAC,
    "BlockDiagonal": co.BlockDiagonal,
    "LowRank": low_rank,
    "LowRank + diagonal": lambda lin: low_rank(lin).with_diagonal(co.GGN(lin).diagonal()),
    "half KFAC, half diagonal": lambda lin: 0.5 * co.KFAC(lin) + 0.5 * co.DiagonalGGN(lin),
    "half a GGN": lambda lin: 0.5 * co.GGN(lin),
    "GGN + KFAC": lambda lin: 0.5 * co.GGN(lin) + 0.5 * co.KFAC(lin),
    "Subnetwork": lambda lin: co.Subnetwork(co.GGN(lin), range(lin.num_parameters)),
    "Dense": lambda lin: co.linalg.Dense(co.GGN(lin).to_dense(), psd=True),
}


def under(prior):
    """The posterior under a prior that a function of the linearisation gives."""

    def made(curvature, temperature):
        lin = task(0)
        return co.laplace(lin, built(curvature, 0), prior(lin), temperature=temperature, check_mode=False)

    return made


def after(first=None, tasks=1, cooled=1.0, **options):
    """The posterior after updates of an earlier one, of a curvature and a temperature of its own."""

    def made(curvature, temperature):
        post = co.laplace(task(1), built(first or curvature, 1), 12.0, temperature=cooled, check_mode=False)
        for i in range(2, tasks + 2):
            post = post.update(task(i), built(curvature, i), check_mode=False, generator=seeded(), **options)
        return dataclasses.replace(post, temperature=temperature)

    return made


def spread(n):
    """A covariance with eigenvalues of 0.02 to 0.2."""
    root = torch.linalg.qr(torch.randn(n, n, dtype=DOUBLE, generator=seeded(2)))[0]
    return co.linalg.Dense(root @ torch.diag(positive(n, 0.02, 0.2)) @ root.mT, psd=True)


def variational(covariance):
    """What variational inference and filters give, of other data."""
    return under(lambda lin: co.posterior.GaussianPosterior.of(task(1), covariance(task(1))))


def constant(curvature):
    return under(lambda lin: built(curvature, 1).add_diagonal(5.0).detached_from_weights())


PRIORS = {
    "number": under(lambda lin: 5.0),
    "vector": under(lambda lin: positive(lin.num_parameters, 5.0, 9.0)),
    "by layer": under(lambda lin: {"0.*": 5.0, "2.*": 7.0}),
    "by tensor": under(lambda lin: {"0.weight": 5.0, "0.bias": 6.0, "2.weight": 7.0, "2.bias": 5.5}),
    "matrix": under(lambda lin: co.linalg.Dense(torch.linalg.inv(spread(lin.num_parameters).tensor), psd=True)),
    "diagonal operator": under(lambda lin: co.linalg.Diagonal(positive(lin.num_parameters, 5.0, 9.0))),
    "GGN + number": constant(co.GGN),
    "KFAC + number": constant(co.KFAC),
    "DiagonalGGN + number": constant(co.DiagonalGGN),
    "low rank + number": constant(low_rank),
    "variational, diagonal": variational(lambda lin: co.linalg.Diagonal(positive(lin.num_parameters, 0.05, 0.2))),
    "variational, dense": variational(lambda lin: spread(lin.num_parameters)),
    "variational, low rank": variational(lambda lin: (0.01 * low_rank(lin)).add_diagonal(0.1)),
    "update": after(),
    "update of a tempered one": after(cooled=0.5),
    "updates": after(tasks=3),
    "update of a GGN": after(co.GGN),
    "update of a KFAC": after(co.KFAC),
    "low-rank updates": after(tasks=2, form="low_rank"),
    "low-rank updates with their diagonals": after(tasks=2, form="low_rank_diagonal"),
    "Kronecker updates": after(tasks=2, form="kronecker"),
}


def matrix_of(prior):
    """A, as a matrix."""
    A, n = prior.precision, task(0).num_parameters
    return torch.diag(A.expand(n)) if isinstance(A, Tensor) else A.to_dense()


def matrix_of_draws(post, method, monkeypatch, numbers_of):
    """M (D, m) for the m standard normal numbers that a draw is made of, times an orthogonal matrix.

    `numbers_of` keeps where these numbers are: all methods but a closed form solve for one noise.
    """
    counted = method if method == "closed form" else "cg"
    places = numbers_of.setdefault(counted, {})
    streams, seeds, of_points = {}, [], {}
    made, normal, randn = Noise.generator, Tensor.normal_, torch.randn
    columns_drawn, key_drawn, fill_columns = ColumnNoise.of, ColumnNoise.draw_key, ColumnNoise.fill

    def generator(self, device, *stream):
        found = made(self, device, *stream)
        seeds.append(found.initial_seed())
        streams[id(found)] = [found, stream[1] if stream else 0, made(self, device, *stream[:1]).initial_seed(), 0]
        return found

    design = torch.zeros(0, 1, dtype=DOUBLE)

    def numbers(block, *args, generator=None, **options):
        if id(generator) not in streams:
            return normal(block, *args, generator=generator, **options)
        _, column, stream, position = known = streams[id(generator)]
        rows = block.unsqueeze(0) if block.ndim == 1 else block
        n = rows.shape[1:].numel()
        known[3] += n
        rows.copy_(columns_of((stream, position, n), column, len(rows)).view(rows.shape))
        return block

    def columns_of(place, column, count):
        first, n = places.setdefault(place, sum(size for *_, size in places)), place[-1]
        values = (torch.zeros if len(design) else torch.ones)(count, n, dtype=DOUBLE)  # ones while they are counted
        taken = design[first : first + n, column : column + count].mT
        values[: taken.shape[0], : taken.shape[1]] = taken
        return values

    def column_noise(generator, k, device):
        found = columns_drawn(generator, k, device)
        if id(generator) in streams:
            _, column, stream, position = known = streams[id(generator)]
            known[3] += 1
            of_points[found.key] = (stream, position), column
        return found

    def derived(self):
        key = key_drawn(self)
        if self.key in of_points:
            stream, column = of_points[self.key]
            of_points[key] = (stream, self._asked), column
        return key

    def fill(self, rows):
        fill_columns(self, rows)
        if self.key in of_points:
            stream, column = of_points[self.key]
            place = ((stream, self._asked), 0, rows.shape[1])
            rows.copy_(columns_of(place, column + self.columns.start, len(rows)))

    def block(self, draws, points, outputs, like):
        stream, column = of_points.get(self.seed, ("points of the noise", 0))
        seeds.extend((self.seed, draw, points.start) for draw in draws)
        place = (stream, points.start * outputs, (points.stop - points.start) * outputs)
        return columns_of(place, column + draws.start, len(draws)).unflatten(1, (-1, outputs))

    monkeypatch.setattr(Noise, "generator", generator)
    monkeypatch.setattr(Tensor, "normal_", numbers)
    monkeypatch.setattr(ColumnNoise, "of", column_noise)
    monkeypatch.setattr(ColumnNoise, "draw_key", derived)
    monkeypatch.setattr(ColumnNoise, "fill", fill)
    monkeypatch.setattr(PointNormals, "block", block)

    def filled(*size, generator=None, **options):
        return torch.empty(*size, **options).normal_(generator=generator)

    monkeypatch.setattr(torch, "randn", filled)
    if not places:
        post.deviations(1, method=counted, rtol=1e-12, generator=seeded())
    m = sum(size for *_, size in places)
    design = torch.linalg.qr(randn(m, m, dtype=DOUBLE, generator=seeded(1)))[0]
    seeds.clear()
    found = post.deviations(m, method=method, rtol=1e-12, generator=seeded()).draws.mT
    assert len(set(seeds)) == len(seeds)  # nothing is drawn twice, for no two draws
    return found


def descent(post):
    """All points in one step of constant length, the last iterate as the answer: a linear map with a fixed point.

    A diagonal prior is its preconditioner: the smaller momentum is then the faster one.
    """
    loss = "standard" if isinstance(post.curvature, co.GGN) else "low_variance"
    momentum = 0.5 if post.prior.diagonal is None else 0.2
    return co.posterior.StochasticDescent(loss, epochs=250, momentum=momentum, final=1.0, averaging=1.0)


DESCENTS = ("number", "vector", "matrix", "KFAC + number", "variational, dense", "update", "low-rank updates")
"""A prior of each kind that descent multiplies with or divides by."""


def methods_of(post, prior):
    kinds = ["cg"]
    if post.precision._closed_form() is not None:
        kinds.append("closed form")
    if isinstance(post.curvature, co.GGN | co.EmpiricalFisher):
        kinds += ["dual"] if post.prior.diagonal is not None else []
        if prior in DESCENTS and not isinstance(post.curvature.output, Sampled):  # whose minibatches are not known
            kinds.append(descent(post))
    return kinds


BY_DATA = {"GGN", "MC GGN", "EmpiricalFisher", "Hessian", "half a GGN", "GGN + KFAC"}
"""Curvatures that are saved by reference to their data: not those of another task, then."""


def holds_other_data(curvature, prior):
    """Whether the prior holds the curvature of another task, by reference."""
    if prior in ("update", "update of a tempered one", "updates"):
        return curvature in BY_DATA
    return prior in ("GGN + number", "update of a GGN")


def is_reloaded(curvature, prior):
    """Whether the posterior is saved and loaded: what it holds is saved part by part, each curvature, each prior."""
    return curvature in ("GGN", "KFAC", "LowRank") or prior in ("number", "update")


def refusal(curvature, prior):
    """Why there is no such posterior, in words of its error; None where there is one."""
    if prior == "Kronecker updates" and "KFAC" not in (curvature, curvature.split(",")[0]):
        return "form='kronecker' needs a KFAC"
    if curvature == "Hessian" and "low-rank" in prior:
        return "not positive semidefinite"
    return None


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("curvature", CURVATURES)
def test_every_answer_is_that_of_dense_matrices(curvature, prior, tmp_path):
    T, (make, wrong) = 0.7, (PRIORS[prior], refusal(curvature, prior))
    if wrong is not None:
        with pytest.raises(ValueError, match=wrong):
            make(CURVATURES[curvature], T)
        return
    post = make(CURVATURES[curvature], T)
    G, A, J = dense(post.curvature), matrix_of(post.prior), jacobian(post.lin)
    P = post.precision.to_dense() if prior == "Kronecker updates" else G + A
    inverse = torch.linalg.inv(P)
    torch.testing.assert_close(post.precision.to_dense(), P, **CLOSE)
    numbers_of = {}
    for method in methods_of(post, prior):
        with pytest.MonkeyPatch.context() as patched:
            M = matrix_of_draws(post, method, patched, numbers_of)
        torch.testing.assert_close(M @ M.mT, T * inverse, **CLOSE)
    covariance = T * J @ inverse @ J.mT
    torch.testing.assert_close(post.predict(X, joint=True).covariance_matrix, covariance, **CLOSE)
    blocks = covariance.view(4, 3, 4, 3).diagonal(dim1=0, dim2=2).movedim(-1, 0)
    found = post.predict(X).covariance_matrix
    torch.testing.assert_close(found, blocks, **CLOSE)
    gap = torch.linspace(-1, 1, len(P), dtype=DOUBLE)
    penalty = 0.5 * gap @ P @ gap / T
    torch.testing.assert_close(post.penalty(post.mean + gap), penalty, **CLOSE)
    constant = 0.5 * (torch.logdet(P) - len(P) * math.log(2 * math.pi * T))
    torch.testing.assert_close(post.log_prob(post.mean + gap).value, constant - penalty, **CLOSE)
    torch.testing.assert_close(log_ratio(post.terms, 1e-10).value, torch.logdet(P) - torch.logdet(A), **CLOSE)
    torch.testing.assert_close(post.effective_parameters(1e-10).value, (inverse @ G).trace(), **CLOSE)
    if holds_other_data(curvature, prior):
        with pytest.raises(ValueError, match="of other data or weights"):
            post.save(tmp_path / "post")
        return
    if not is_reloaded(curvature, prior):
        return
    post.save(tmp_path / "post")
    again = co.load(tmp_path / "post", *network(next(i for i in range(5) if task(i) is post.lin)))
    torch.testing.assert_close(again.precision.to_dense(), P, **CLOSE)
    assert getattr(again.curvature, "arguments", None) == getattr(post.curvature, "arguments", None)
    if post.compression is not None:
        assert again.compression.value == post.compression.value and again.compression.stderr == post.compression.stderr
    assert torch.equal(again.predict(X).covariance_matrix, found)
    assert torch.equal(again.sample(2, seeded()), post.sample(2, seeded()))


def kept_mode(post):
    with tempfile.TemporaryDirectory() as folder:
        return post.linear_mode(checkpoint=folder).theta


QUESTIONS = {
    "linear_mode": lambda post: post.linear_mode().theta,
    "linear_mode, kept": kept_mode,
    "log_evidence": lambda post: post.log_evidence(generator=seeded(), mode="linear").value,
    "effective_parameters": lambda post: post.effective_parameters(generator=seeded()).value,
    "predict": lambda post: post.predict(torch.ones(2, 8, dtype=DOUBLE)).variance,
    "sample": lambda post: post.sample(3, seeded()),
    "solve": lambda post: post.precision.solve(torch.ones_like(post.mean)),
}


@pytest.mark.parametrize("ask", QUESTIONS.values(), ids=QUESTIONS)
def test_answers_neither_read_nor_advance_the_global_generator(ask):
    """Of 483 weights, so that systems are solved by preconditioned iterations; each time no engine is kept."""
    model = nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 3)).double()
    x = torch.randn(40, 8, dtype=DOUBLE)
    found = []
    for seed in range(2):
        lin = co.linearize(model, (x, x[:, :3].argmax(1)), "classification")
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        found.append(ask(co.laplace(lin, co.GGN, prior_precision=0.1, check_mode=False)))
        assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(*found)
