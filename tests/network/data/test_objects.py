"""Points of any kind against the same network on tensors, and against dense autograd.

Tests `objects.py`.
"""

import copy
import functools
from array import array
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import curvops as co
from curvops.errors import DataChangedError
from tests.linalg.operands import close
from tests.network.definitions import Items

N, SIZES = 7, (2, 3, 1, 4, 2, 5, 1)


class Cloud:
    """A point that only its attributes describe, as a graph is described."""

    def __init__(self, rows):
        self.rows, self.name, self.meta = rows, "cloud", {"size": len(rows)}


class Picture:
    """A point that keeps its numbers to itself, but for NumPy."""

    __slots__ = ("pixels",)

    def __init__(self):
        self.pixels = np.zeros(3)

    def __array__(self, dtype=None, copy=None):
        return np.array(self.pixels, dtype)


class Clouds:
    """Some clouds in one, as a library of graphs batches them."""

    def __init__(self, rows, owner, count):
        self.rows, self.owner, self.count = rows, owner, count


KINDS = {
    "tensor": lambda rows: rows,
    "array": lambda rows: rows.numpy(),
    "dict": lambda rows: {"rows": rows, "sizes": torch.tensor([len(rows)])},
    "object": Cloud,
    "words": lambda rows: " ".join(repr(float(number)) for number in rows.flatten()),
}


def rows_of(point):
    """Return the rows of a point of any kind."""
    if isinstance(point, str):
        return torch.tensor([float(word) for word in point.split()], dtype=torch.float64).view(-1, 3)
    point = point["rows"] if isinstance(point, dict) else getattr(point, "rows", point)
    return torch.as_tensor(point)


def parts_of_points(points):
    rows = [rows_of(point) for point in points]
    owner = torch.cat([torch.full((len(part),), i) for i, part in enumerate(rows)])
    return torch.cat(rows), owner, len(rows)


def as_dict(points):
    rows, owner, count = parts_of_points(points)
    return {"rows": rows, "owner": owner, "count": count}


COLLATES = {
    "tuple": parts_of_points,
    "keywords": as_dict,
    "object": lambda points: Clouds(*parts_of_points(points)),
    "list": list,
}


class Pooled(nn.Module):
    """A network on the sum of a point's rows, which takes what each collate makes; `ragged` has weights before it."""

    def __init__(self, ragged=False):
        super().__init__()
        self.rows = nn.Linear(3, 3) if ragged else nn.Identity()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

    def forward(self, rows, owner=None, count=None):
        if isinstance(rows, list):
            rows, owner, count = parts_of_points(rows)
        elif isinstance(rows, Clouds):
            rows, owner, count = rows.rows, rows.owner, rows.count
        hidden = torch.tanh(self.rows(rows))
        return self.net(hidden.new_zeros(count, 3).index_add(0, owner, hidden))


class JoinPairs:
    """The collate_fn of a loader of (point, target); a class, so that workers can be started in any way."""

    def __init__(self, collate):
        self.collate = collate

    def __call__(self, items):
        return self.collate([point for point, _ in items]), torch.stack([y for _, y in items])


CUTS = slice(0, 3), slice(3, 4), slice(4, N)
FORMS = {
    "points": lambda points, y: (points, y),
    "pairs": lambda points, y: list(zip(points, y)),
    "dataset": lambda points, y: Items(*zip(points, y)),
    "loader": lambda points, y: DataLoader(
        Items(*zip(points, y)), batch_size=3, shuffle=True, collate_fn=JoinPairs(parts_of_points)
    ),
    "batches": lambda points, y: [(parts_of_points(points[cut]), y[cut]) for cut in CUTS],
}
JOINED = ("loader", "batches")
"""Those that come joined, so that `linearize` needs no collate."""


def of_form(form, model, points, y):
    collate = None if form in JOINED else parts_of_points
    return co.linearize(model, FORMS[form](points, y), noise(), collate=collate)


def joined(model, given, collate=list):
    return co.linearize(model, given, noise(), collate=collate)


def of_points(model, points, y, collate=list):
    return joined(model, (points, y), collate)


def data():
    torch.manual_seed(0)
    return [torch.randn(size, 3, dtype=torch.float64) for size in SIZES], torch.randn(N, 2, dtype=torch.float64)


def noise():
    return co.likelihoods.Gaussian(noise=0.3)


def post_of(lin):
    return co.laplace(lin, "kfac", 2.0, check_mode=False)


QUESTIONS = {
    "outputs": lambda lin, x: lin.outputs(),
    "log-likelihood": lambda lin, x: lin.log_likelihood(),
    "gradient": lambda lin, x: lin.gradient(),
    "GGN": lambda lin, x: co.GGN(lin) @ vectors(lin),
    "Hessian": lambda lin, x: co.Hessian(lin) @ vectors(lin),
    "KFAC": lambda lin, x: co.KFAC(lin) @ vectors(lin),
    "predict": lambda lin, x: lin.predict(x),
    "rows": lambda lin, x: lin.jacobian(x).to_dense(),
    "evidence": lambda lin, x: torch.as_tensor(post_of(lin).log_evidence().value),
    "variance": lambda lin, x: post_of(lin).predict(x).variance,
    "joint": lambda lin, x: post_of(lin).predict(x, joint=True).covariance_matrix,
    "draws": lambda lin, x: post_of(lin).functions(x, 3, generator=torch.Generator().manual_seed(0)),
}


def vectors(lin):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(lin.num_parameters, 2, dtype=torch.float64, generator=generator)


@pytest.fixture(scope="module")
def pooled():
    """The network, and what its linearisation on the sums of the points' rows, which are tensors, answers."""
    rows, y = data()
    model = Pooled().double()
    sums = torch.stack([torch.tanh(part).sum(0) for part in rows])
    lin = co.linearize(model.net, (sums, y), noise())
    return model, rows, y, sums, functools.cache(lambda ask, low, high: QUESTIONS[ask](lin, sums[low:high]))


@pytest.mark.parametrize("form", FORMS)
def test_each_form_answers_as_tensors_do(pooled, form):
    model, rows, y, _, answer = pooled
    points = [Cloud(part) for part in rows]
    lin = of_form(form, model, points, y)
    few = parts_of_points(points[:4]) if form == "batches" else points[:4]
    for name, ask in QUESTIONS.items():
        close(ask(lin, few), answer(name, 0, 4))


@pytest.mark.parametrize(
    ("kind", "collate"), [*((kind, "list") for kind in KINDS), *(("object", how) for how in COLLATES if how != "list")]
)
def test_points_and_what_the_model_takes_are_of_any_kind(pooled, kind, collate):
    model, rows, y, _, answer = pooled
    points = [KINDS[kind](part) for part in rows]
    lin = of_points(model, points, y, COLLATES[collate])
    for ask in ("GGN", "rows", "variance"):
        close(QUESTIONS[ask](lin, points[2:3]), answer(ask, 2, 3))


ENGINES = [("points", "autodiff"), ("points", "streamed"), ("points", "layerwise"), ("batches", "streamed")]


@pytest.mark.parametrize(("form", "engine"), [("loader", "auto"), ("batches", "auto"), *ENGINES])
def test_weights_before_the_sum_against_autograd(form, engine):
    rows, y = data()
    model = Pooled(ragged=True).double()
    points = [Cloud(part) for part in rows]
    J = torch.stack([row for point in points for row in gradients(model, point)])
    lin = of_form(form, model, points, y)
    lin = co.operators.Linearization(lin.model, lin.data, lin.likelihood, lin.output_shape, engine, 2**30)
    V = vectors(lin)
    for _ in range(2):  # engines are chosen anew
        close(lin.jacobian() @ V, J @ V)
        close(lin.jacobian().mT @ J @ V, J.mT @ (J @ V))
        close(co.GGN(lin) @ V, J.mT @ (J @ V) / 0.3)
    some = parts_of_points(points[1:4]) if form == "batches" else points[1:4]
    close(lin.jacobian(some).to_dense(), J[2:8])
    close(co.DiagonalGGN(lin).diagonal(), J.square().sum(0) / 0.3)
    r = (lin.outputs() - y) / 0.3
    G = torch.einsum("nc,ncd->nd", r, J.view(N, 2, -1))
    close(co.EmpiricalFisher(lin) @ V, G.mT @ (G @ V))


def gradients(model, point):
    """Return the rows of J at one point."""
    outputs = model(*parts_of_points([point])).squeeze(0)
    for output in outputs:
        found = torch.autograd.grad(output, [*model.parameters()], retain_graph=True)
        yield torch.cat([part.flatten() for part in found])


def test_a_change_is_noticed():
    rows, y = data()
    model, changes = Pooled().double(), {}
    changes["tensor"] = ({"rows": rows[0]}, lambda point: point["rows"].add_(1e-9))
    changes["array"] = ({"rows": rows[0].numpy().copy()}, lambda point: point["rows"].__iadd__(1e-9))
    changes["number"] = ({"rows": rows[0], "a": [1.0]}, lambda point: point["a"].__setitem__(0, 2.0))
    changes["word"] = ({"rows": rows[0], "a": "C"}, lambda point: point.__setitem__("a", "N"))
    changes["attribute"] = (Cloud(rows[0].clone()), lambda point: setattr(point, "name", "other"))
    boxed = np.empty(1, dtype=object)
    boxed[0] = [1.0]
    changes["boxed"] = ({"rows": rows[0], "a": boxed}, lambda point: point["a"][0].append(2.0))
    changes["queue"] = ({"rows": rows[0], "a": deque([1.0])}, lambda point: point["a"].append(2.0))
    changes["numbers"] = ({"rows": rows[0], "a": array("d", [1.0])}, lambda point: point["a"].append(2.0))
    changes["memory"] = ({"rows": rows[0], "a": memoryview(bytearray(2))}, lambda p: p["a"].__setitem__(0, 1))
    changes["image"] = ({"rows": rows[0], "a": Picture()}, lambda point: point["a"].pixels.__iadd__(1))
    changes["sparse"] = ({"rows": rows[0], "a": torch.eye(2).to_sparse()}, lambda p: p["a"]._values().add_(1))
    for point, change in changes.values():
        lin = of_points(model, [point, *rows[1:]], y, parts_of_points)
        lin.gradient()
        change(point)
        with pytest.raises(DataChangedError):
            lin.gradient()


def test_a_model_and_a_collate_that_write_leave_the_points_alone():
    def doubled(points):
        for point in points:
            point.rows.mul_(2)
            point.seen = True
        return points

    class Writing(Pooled):
        def forward(self, points):
            return super().forward(doubled(points))

    rows, y = data()
    points, model = [Cloud(part.clone()) for part in rows], Writing().double()
    lin = of_points(model, points, y, doubled)
    expected = Pooled.forward(model, *parts_of_points([4 * part for part in rows])).detach()
    for _ in range(2):
        close(lin.outputs(), expected)
        close(lin.gradient(), lin.gradient())
    close(lin.predict(points[:2]), expected[:2])
    assert all(torch.equal(point.rows, part) and not hasattr(point, "seen") for point, part in zip(points, rows))


def test_workers_and_the_order_do_not_matter():
    rows, y = data()
    model = Pooled().double()
    whole = torch.cat(rows)  # points are views of one memory
    points = [Cloud(part) for part in whole.split(SIZES)]
    workers = {"num_workers": 2, "persistent_workers": True}
    loader = DataLoader(Items(*zip(points, y)), batch_size=3, collate_fn=JoinPairs(parts_of_points), **workers)
    lin = co.linearize(model, loader, noise())
    close(lin.predict(points[2:4]), lin.outputs()[2:4])
    same = of_points(model, points[::-1], y.flip(0), parts_of_points)
    assert lin.source == same.source
    close((co.GGN(lin) + co.GGN(same)) @ vectors(lin), 2 * (co.GGN(lin) @ vectors(lin)))


def test_weights_of_points(pooled):
    model, rows, y, sums, _ = pooled
    w = torch.rand(N, dtype=torch.float64)
    reference = co.linearize(model.net, (sums, y, w), noise(), weights=True)
    for given in ((rows, y, w), list(zip(rows, y, w))):
        other = co.linearize(model, given, noise(), weights=True, collate=list)
        close(co.GGN(other) @ vectors(other), co.GGN(reference) @ vectors(other))


class Mixed(Pooled):
    """A point for each row, whose outputs depend on the other rows of its batch, as those of a graph's nodes do."""

    def forward(self, rows, owner, count):
        hidden = torch.tanh(self.rows(rows))
        return self.net(hidden + 0.5 * hidden.roll(1, 0) * hidden.sum(0))


def test_points_that_only_run_together():
    model, batches = Mixed(ragged=True).double(), [parts_of_points(data()[0][cut]) for cut in CUTS]
    outputs = [model(*batch) for batch in batches]
    lin = co.linearize(model, [(batch, f.detach() - 1) for batch, f in zip(batches, outputs)], noise())
    J = [
        torch.cat([p.flatten() for p in torch.autograd.grad(row, [*model.parameters()], retain_graph=True)])
        for row in torch.cat(outputs).flatten()
    ]
    J = torch.stack(J).view(18, 2, -1)
    P = torch.einsum("ncd,nce->de", J, J) / 0.3 + 2 * torch.eye(J.shape[-1], dtype=torch.float64)
    close(co.DiagonalGGN(lin).entries, P.diagonal() - 2)
    post = co.laplace(lin, co.GGN, 2.0, check_mode=False)
    close(post.predict(batches[0]).covariance_matrix, J[:6] @ torch.linalg.solve(P, J[:6].mT))


def test_a_batch_that_only_the_model_can_read_says_what_it_needs():
    rows, y = data()
    lin = of_form("batches", Pooled(ragged=True).double(), rows, y)
    close(co.DiagonalGGN(lin).diagonal(), co.GGN(lin).to_dense().diagonal())
    with pytest.raises(ValueError, match="collate="):
        lin.restrict(torch.tensor([0, 2]), 1.0)


@pytest.mark.parametrize(
    ("call", "message"),
    {
        "no collate": (lambda m, p, y: co.linearize(m, ([Cloud(r) for r in p], y), noise()), "collate="),
        "pairs of one": (lambda m, p, y: joined(m, [(part,) for part in p]), "target"),
        "with targets": (lambda m, p, y: of_points(m, p, y, JoinPairs(list)), "without targets"),
        "another loader": (lambda m, p, y: joined(m, DataLoader(Items(*zip(p, y)))), "own collate_fn"),
        "too few outputs": (lambda m, p, y: of_points(m, p, y, lambda points: parts_of_points(points[:1])), "one row"),
        "not what it takes": (
            lambda m, p, y: of_points(m, p, y, lambda points: Cloud(points[0])),
            "failed on .* points of type Tensor",
        ),
        "a single point": (lambda m, p, y: of_points(m, p, y).predict(Cloud(p[0])), "list"),
        "a random collate": (
            lambda m, p, y: of_points(m, p, y, lambda points: parts_of_points([torch.rand_like(q) for q in points])),
            "two passes over the same points",
        ),
        "a random order": (
            lambda m, p, y: of_points(m, p, y, lambda points: points[::-1]),
            "depend on the other points",
        ),
        "no inputs": (
            lambda m, p, y: post_of(of_points(m, p, y, parts_of_points)).predict(None),
            "the inputs are None",
        ),
        "a test point of another width": (
            lambda m, p, y: post_of(of_points(m, p, y, parts_of_points)).predict([*p, torch.zeros(2, 5)]),
            "collate= failed on 4 points of type Tensor",
        ),
        "a string": (lambda m, p, y: joined(m, ("abcdefg", y)), "a list of points"),
    }.values(),
)
def test_wrong_calls(call, message):
    rows, y = data()
    with pytest.raises((TypeError, ValueError), match=message):
        call(Pooled().double(), rows, y)


def test_points_may_be_boxed_and_are_cast_but_require_no_gradient():
    rows, y = data()
    model = Pooled().double()
    lin = of_points(model, rows, y)
    boxed = np.empty(2, dtype=object)
    boxed[:] = rows[:2]
    close(lin.predict(boxed), lin.predict(rows[:2]))
    close(copy.deepcopy(lin).predict(rows), lin.outputs())
    single = [part.float() for part in rows]
    close(of_points(model, single, y.float()).outputs(), lin.predict([part.double() for part in single]))
    with pytest.raises(ValueError, match="requires a gradient"):
        lin.predict([rows[0].clone().requires_grad_()])


@pytest.mark.parametrize("form", ["points", "loader", "batches"])
def test_a_posterior_is_read_again(form, tmp_path):
    rows, y = data()
    model, points = Pooled().double(), [Cloud(part) for part in rows]
    lin = of_form(form, model, points, y)
    post = post_of(lin)
    post.save(tmp_path)
    collate = None if form in JOINED else parts_of_points
    given = FORMS[form](points, y)
    again = co.load(tmp_path, model, given, collate=collate)
    few = parts_of_points(points[:4]) if form == "batches" else points[:4]
    close(again.predict(few).variance, post.predict(few).variance)
    close(co.GGN(again.lin) @ vectors(lin), co.GGN(lin) @ vectors(lin))
    with pytest.raises(ValueError, match="inputs="):
        co.load(tmp_path, model)
    if collate is not None:
        without = co.load(tmp_path, model, inputs=points[:2], collate=collate)
        close(without.predict(few).variance, post.predict(few).variance)
        with pytest.raises(ValueError, match="inputs="):
            co.load(tmp_path, model, inputs=points[2:4], collate=collate)
        points[0].rows.add_(1)
        with pytest.raises(ValueError, match="not those given"):
            co.load(tmp_path, model, given, collate=collate)


def of_clouds():
    rows, y = data()
    sums = torch.stack([torch.tanh(part).sum(0) for part in rows])
    return [Cloud(part) for part in rows], y, sums


def test_held_out_data_choose_the_prior():
    points, y, sums = of_clouds()
    model = Pooled().double()
    lin, held_out = of_points(model, points[:5], y[:5], parts_of_points), (points[5:], y[5:])
    loader = DataLoader(Items(*zip(*held_out)), batch_size=1, collate_fn=JoinPairs(parts_of_points))
    reference = post_of(co.linearize(model.net, (sums[:5], y[:5]), noise()))
    tried = {"prior_precisions": [0.5, 2.0]}
    expected = co.evidence.validate(reference, sums[5:], y[5:], **tried)
    forms = [held_out, (held_out,), (list(zip(*held_out)),), (Items(*zip(*held_out)),), (loader,)]
    for given in forms:
        tuned = co.evidence.validate(post_of(lin), *given, **tried)
        assert float(tuned.prior_precision) == float(expected.prior_precision)
        close(torch.as_tensor(tuned.tuning.scores), torch.as_tensor(expected.tuning.scores))
    with pytest.raises(ValueError, match="training data"):
        co.evidence.validate(post_of(lin), points[:5], y[:5])


def test_the_prior_that_training_points_choose():
    points, _, sums = of_clouds()
    model, labels = Pooled().double(), torch.arange(N) % 2
    lin = co.linearize(model, (points, labels), "classification", collate=parts_of_points)
    reference = co.linearize(model.net, (sums, labels), "classification")
    close(co.laplace(lin).prior_precision, co.laplace(reference).prior_precision)


def test_training_and_modes():
    points, y, sums = of_clouds()
    torch.manual_seed(3)
    model = Pooled().double()
    other = copy.deepcopy(model)
    co.fit_mode(model, (points, y), noise(), 1.0, collate=parts_of_points)
    co.fit_mode(other.net, (sums, y), noise(), 1.0)
    assert (model.net[0].weight - other.net[0].weight).norm() < 1e-3  # line searches round differently
    in_threes = {"collate": parts_of_points, "batch_size": 3}
    cuts = slice(0, 4), slice(4, N)
    for given, tensors, more in (
        (list(zip(points, y)), (sums, y), in_threes),
        ([(parts_of_points(points[cut]), y[cut]) for cut in cuts], [(sums[cut], y[cut]) for cut in cuts], {}),
    ):
        trained, same = copy.deepcopy(model), copy.deepcopy(model)
        options = {"epochs": 1, "over": "scalar", "curvature": co.DiagonalGGN}
        seeds = [torch.Generator().manual_seed(0) for _ in range(2)]
        co.evidence.train(trained, given, noise(), generator=seeds[0], **options, **more)
        more.pop("collate", None)
        co.evidence.train(same.net, tensors, noise(), generator=seeds[1], **options, **more)
        close(trained.net[0].weight, same.net[0].weight)


def test_minibatches_for_samplers():
    points, y, sums = of_clouds()
    model = Pooled().double()
    chains = []
    for net, given, collate in (
        (model, (points, y), parts_of_points),
        (model, list(zip(points, y)), list),
        (model.net, (sums, y), None),
    ):
        density = co.sampling.log_posterior(net, noise(), data_size=N)
        generator = torch.Generator().manual_seed(0)
        batches = co.sampling.minibatches(density, given, 3, generator, collate=collate)
        sampler = co.sampling.chains(co.sampling.sgld(density, 1e-3), 2)
        options = {"steps": 2, "generator": torch.Generator().manual_seed(0)}
        chains.append(co.sampling.run(sampler, density.params, batches, **options).theta)
    close(chains[0], chains[2])
    close(chains[1], chains[2])
    density = co.sampling.log_posterior(model, noise(), data_size=N)
    lin = density.linearize(density.model.theta, (parts_of_points(points), y))
    close(lin.outputs(), model.net(sums).detach())


def test_kernels_and_other_questions_of_points():
    points, y, sums = of_clouds()
    model = Pooled().double()
    lin, reference = of_points(model, points, y), co.linearize(model.net, (sums, y), noise())
    close(
        co.TangentKernel(lin, x=points[:2], x2=points[1:]).to_dense(),
        co.TangentKernel(reference, x=sums[:2], x2=sums[1:]).to_dense(),
    )
    close(co.TangentKernel(lin).to_dense(), co.TangentKernel(reference).to_dense())
    some = torch.tensor([0, 2, 5])
    close(co.GGN(lin.restrict(some, 1.0)).to_dense(), co.GGN(reference.restrict(some, 1.0)).to_dense())
    post, expected = post_of(lin), post_of(reference)
    close(post.log_likelihood(points[:3], y[:3]).value, expected.log_likelihood(sums[:3], y[:3]).value)
    assert (lin.cast(torch.float32).outputs() - lin.outputs()).abs().max() < 1e-6
    draws = post.sample(3, torch.Generator().manual_seed(0))
    close(post.predict(points, samples=draws).variance, expected.predict(sums, samples=draws).variance)
