"""What a tired user writes: arguments in another's place, of another kind, or by another library's habits."""

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

import curvops as co
from curvops import metrics, plots
from tests.doors.door import Door
from tests.network.definitions import normal
from tests.zoo_modules import Wired

X, Y = normal(10, 4), torch.arange(10) % 3
POINTS = TensorDataset(X, Y)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()


@cache
def lin() -> co.operators.Linearization:
    """Of three classes, with 27 weights."""
    return co.linearize(net(), (X, Y), "classification")


@cache
def single() -> co.operators.Linearization:
    """In single precision, which autocast would change."""
    return co.linearize(net().float(), (X, Y), "classification")


def autocast(call: Callable[[], object]) -> object:
    """Call this as in the middle of mixed-precision training."""
    with torch.autocast("cpu", torch.bfloat16):
        return call()


@cache
def post() -> co.posterior.Laplace:
    return co.laplace(lin(), co.KFAC, 1.0, check_mode=False)


@cache
def several_noises() -> co.posterior.Laplace:
    likelihood = co.likelihoods.Gaussian(torch.tensor([0.5, 1.0], dtype=torch.float64))
    return co.laplace(co.linearize(nn.Linear(4, 2).double(), (X, X[:, :2]), likelihood), co.KFAC, 1.0, check_mode=False)


def named(m: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """Logits by name, beside a loss that is not made, as in transformers."""
    return {"loss": None, "logits": m.head(x)}


@cache
def precision() -> co.linalg.Damped:
    return co.GGN(lin()).add_diagonal(1.0)


def by(likelihood: object) -> co.operators.Linearization:
    return co.linearize(net(), (X, Y), likelihood)


def over(parameters: object) -> co.operators.Linearization:
    return co.linearize(net(), (X, Y), "classification", parameters=parameters)


class Loader(DataLoader):
    """A loader of one's own, whose batches cannot be made by another."""

    def __iter__(self):
        return super().__iter__()


ONES = np.ones(27)
IN_FOURS = BatchSampler(SequentialSampler(POINTS), 4, drop_last=True)

ARRAYS: dict[str, tuple[Callable[[], object], str]] = {
    "Dense": (lambda: co.linalg.Dense(np.eye(3)), "tensor must be a tensor, got ndarray"),
    "Diagonal": (lambda: co.linalg.Diagonal([1.0, 2.0]), "must be a tensor"),
    "LowRank": (lambda: co.linalg.LowRank([[1.0], [2.0]], [1.0]), "vectors must be a tensor"),
    "Kronecker": (lambda: co.linalg.Kronecker(ONES[:1], ONES[:1]), "left must be a tensor, got ndarray"),
    "cg": (lambda: co.linalg.cg(precision(), ONES), r"B must be a tensor, got ndarray.*; pass torch.as_tensor\(B\)"),
    "cg as matrix": (lambda: co.linalg.cg(np.eye(3), torch.ones(3)), r"got ndarray; pass torch.as_tensor\(A\)"),
    "solve": (lambda: precision().solve([1.0] * 27), "B must be a tensor, got"),
    "a product": (lambda: precision() @ ONES, r"got ndarray. Pass torch.as_tensor"),
    "push": (lambda: lin().push([1.0] * 27), "vector must be a tensor, got .*as_tensor"),
    "Categorical": (lambda: co.likelihoods.Categorical(weight=[1.0]), r"weight must be a tensor, got \[1.0\]"),
    "nll": (lambda: metrics.nll(ONES, ONES), r"got ndarray of shape \(27,\); pass torch.as_tensor"),
    "auroc": (lambda: metrics.auroc([0.1, 0.2], [0, 1]), "scores must be a tensor"),
}
"""Arrays and lists where tensors belong."""


DOORS = [
    Door(
        "linearize by a tired user",
        rows={
            "data in two arguments": (
                lambda: co.linearize(net(), X, Y, "classification"),
                TypeError,
                r"one argument: co.linearize\(model, \(X, y\), likelihood\)",
            ),
            "F.cross_entropy": (
                lambda: by(F.cross_entropy),
                TypeError,
                r"cross_entropy averages over the points.*Pass nn.CrossEntropyLoss\(\)",
            ),
            "F.binary_cross_entropy": (
                lambda: by(F.binary_cross_entropy),
                TypeError,
                r"last sigmoid and use nn.BCEWithLogitsLoss\(\)",
            ),
            "a class": (lambda: by(co.likelihoods.Categorical), TypeError, r"pass an instance, Categorical\(\)"),
            "a misspelt name": (lambda: by("clasification"), TypeError, 'Did you mean "classification"'),
            "binary": (lambda: by("binary"), TypeError, r"Did you mean co.likelihoods.Bernoulli\(\)"),
            "a module as selection": (lambda: over(net()[2]), TypeError, "by their names: 0.weight"),
            "tensors as selection": (lambda: over(list(net().parameters())), TypeError, "by their names: 0.weight"),
            "positions in a list": (lambda: over([0, 1]), TypeError, "torch.as_tensor"),
            "a module's name": (lambda: over("2"), r"'2' names no parameter; '2.\*' names those inside"),
            "a budget in words": (
                lambda: co.linearize(net(), (X, Y), "classification", memory_budget="1GB"),
                TypeError,
                "memory_budget must be a number, got '1GB'",
            ),
            "drop_last in a loader of one's own": (
                lambda: co.linearize(net(), Loader(POINTS, 4, drop_last=True), "classification"),
                "this Loader has drop_last=True.*pass drop_last=False",
            ),
            "drop_last in a sampler of batches": (
                lambda: co.linearize(net(), DataLoader(POINTS, batch_sampler=IN_FOURS), "classification"),
                "has drop_last=True.*pass drop_last=False",
            ),
        },
    ),
    Door(
        "laplace and predictions by a tired user",
        rows={
            "a number by position": (
                lambda: co.laplace(lin(), 1.0),
                TypeError,
                r"curvature must be a name.*co.laplace\(lin, prior_precision=1.0\)",
            ),
            "a function that makes a curvature": (
                lambda: co.laplace(lin(), lambda lin: co.KFAC(lin, sharing="reduce")),
                TypeError,
                r"pass what it makes: curvature\(lin\)",
            ),
            "a curvature's name": (lambda: co.laplace(lin(), "KFAC"), "one of 'kfac'.*got 'KFAC'"),
            "draws and inputs swapped": (lambda: post().functions(3, X), TypeError, r"got Tensor of shape \(10, 4\)"),
            "a loader": (
                lambda: post().predict(DataLoader(POINTS, 4)),
                TypeError,
                "given a DataLoader. Call this for the inputs of each batch",
            ),
            "a point alone": (lambda: post().predict(X[0]), r"\(4,\) have the shape of a single point.*pass x\[None\]"),
            "a precision beyond float32": (
                lambda: co.laplace(single(), co.KFAC, 1e39, check_mode=False),
                r"got inf: 1e\+39 is beyond the numbers of torch.float32; use model.double",
            ),
            "one noise of several": (
                lambda: several_noises().observation_noise,
                r"read several as post.lin.likelihood.of_position.noise",
            ),
            "a list of draws": (lambda: post().log_prob(list(range(10**4))), TypeError, "got list"),
        },
    ),
    Door(
        "models and scores by a tired user",
        rows={
            "a method": (
                lambda: co.linearize(net().forward, (X, Y), "classification"),
                TypeError,
                "Pass the module itself",
            ),
            "autocast": (
                lambda: autocast(lambda: co.linearize(nn.Linear(4, 3), (X.float(), Y), "classification")),
                "make this call outside of it",
            ),
            "a gradient under autocast": (lambda: autocast(single().gradient), "torch.autocast is on"),
            "a diagonal under autocast": (lambda: autocast(lambda: co.DiagonalGGN(single())), "torch.autocast is on"),
            "a class of modules": (
                lambda: co.linearize(nn.Linear, (X, Y), "classification"),
                TypeError,
                "Pass an instance of Linear",
            ),
            "weights alone": (
                lambda: co.linearize(net().state_dict(), (X, Y), "classification"),
                TypeError,
                r"model.load_state_dict\(weights\)",
            ),
            "a noise in words": (lambda: co.likelihoods.Gaussian(noise="0.1"), TypeError, "a variance.*got '0.1'"),
            "a temperature of masked classes": (
                lambda: metrics.temperature(torch.tensor([[0.0, -torch.inf]]), torch.tensor([0])),
                "logits must be finite.*a logit of -1e9",
            ),
            "a temperature of probabilities": (
                lambda: metrics.temperature(X[:, :3].softmax(-1), Y),
                r"pass temperature the logits, or probabilities.log\(\)",
            ),
            "a temperature of nothing": (lambda: metrics.temperature(X[:0, :3], Y[:0]), "no data"),
            "bounds in another order": (lambda: metrics.temperature(X[:, :3], Y, bounds=(5, 1)), "the lesser first"),
            "labels that torch ignores": (
                lambda: metrics.accuracy(torch.full((3, 2), 0.5), torch.tensor([0, -100, 1])),
                r"keep = labels != -100: score values\[keep\], labels\[keep\]",
            ),
            "one column of targets as a vector": (
                lambda: co.linearize(nn.Linear(4, 2).double(), (X, X[:, 0]), nn.GaussianNLLLoss()),
                r"a column for each mean, \(N, m\): pass y.unsqueeze\(1\)",
            ),
            "two classes by one logit": (
                lambda: co.linearize(
                    nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)).double(), (X, Y % 2), "classification"
                ),
                r"two classes from one logit a point, nn.BCEWithLogitsLoss\(\).*Bernoulli.* takes outputs \(N,\)",
            ),
            "outputs by name": (
                lambda: co.linearize(Wired(named).double(), (X, Y), "classification"),
                TypeError,
                r"return outputs\['logits'\], or pass .*such as \{'logits': 'classification'\} and \{'logits': y\}",
            ),
        },
    ),
    Door(
        "evidence by a tired user",
        rows={
            "the training data as held out": (
                lambda: co.evidence.validate(post(), X.flip(0), Y.flip(0)),
                r"these are the training data.*co.laplace\(lin\) chooses without them",
            ),
            "too few held-out targets": (
                lambda: co.evidence.validate(post(), X, Y[:2]),
                f"there are {len(X)} inputs, but 2 targets",
            ),
            "no draws": (lambda: co.evidence.mackay(post(), samples=0), "samples must be at least 1"),
            "an optimiser": (
                lambda: co.evidence.train(
                    net(), (X, Y), "classification", epochs=1, optimizer=torch.optim.Adam(net().parameters())
                ),
                TypeError,
                r"functools.partial\(torch.optim.Adam.*got an instance",
            ),
        },
    ),
    Door(
        "samplers by a tired user",
        rows={
            "a linearisation": (
                lambda: co.sampling.sgld(lin(), 1e-3),
                TypeError,
                r"got Linearization. Pass co.sampling.log_posterior\(lin\)",
            ),
            "a dataset as batches": (
                lambda: co.sampling.run(
                    co.sampling.sgld(lambda p, b: p.sum(), 1e-3, data_size=1), torch.zeros(2), POINTS, steps=1
                ),
                TypeError,
                r"got TensorDataset. Pass torch.utils.data.DataLoader\(dataset",
            ),
            "the state of another sampler": (
                lambda: co.sampling.baoa(sum, 0.1, data_size=1).update(
                    co.sampling.sgld(sum, 0.1, data_size=1).init(torch.zeros(2))
                ),
                TypeError,
                r"state must be a MomentumState: make it with init\(state.params\), got State",
            ),
            "a network": (
                lambda: co.sampling.sgld(net(), 1e-3),
                TypeError,
                r"got Sequential. Pass .*log_posterior\(model, likelihood, data_size=N\)",
            ),
        },
    ),
    Door(
        "linear algebra by a tired user",
        rows={
            "products under autocast": (
                lambda: autocast(lambda: co.linalg.Dense(torch.eye(3)) @ torch.ones(3)),
                r"torch.autocast is on.*torch.autocast\('cpu', enabled=False\)",
            ),
            "a solve under autocast": (
                lambda: autocast(lambda: co.linalg.solve(torch.eye(3), torch.ones(3))),
                "torch.autocast is on",
            ),
            "draws under autocast": (
                lambda: autocast(lambda: co.linalg.draw(co.linalg.Diagonal(torch.ones(3)), 2)),
                "torch.autocast is on",
            ),
            "LowRank of two dtypes": (
                lambda: co.linalg.LowRank(torch.ones(3, 1), torch.ones(1).double()),
                TypeError,
                "of one dtype, got torch.float32 and torch.float64",
            ),
            "Kronecker of two dtypes": (
                lambda: co.linalg.Kronecker(torch.ones(1, 2), torch.ones(1, 2).double()),
                TypeError,
                "one dtype, got torch.float32 and torch.float64",
            ),
            "a tolerance in words": (
                lambda: co.linalg.cg(precision(), torch.ones(27).double(), rtol="1e-3"),
                TypeError,
                "rtol must be a number, got '1e-3'",
            ),
            "a small preconditioner": (
                lambda: co.linalg.cg(precision(), torch.ones(27).double(), preconditioner=torch.eye(3).double()),
                r"must be \(27, 27\) and torch.float64, as A is, got \(3, 3\)",
            ),
            "a preconditioner as an array": (
                lambda: co.linalg.cg(precision(), torch.ones(27).double(), preconditioner=np.eye(27)),
                TypeError,
                "preconditioner must be a matrix of torch.*got ndarray of shape",
            ),
            "a preconditioner's image of another shape": (
                lambda: co.linalg.cg(precision(), torch.ones(27).double(), preconditioner=lambda V: V[:3]),
                r"given torch.float64 of shape \(27, 1\), but returned torch.float64 of shape \(3, 1\)",
            ),
            "half an eigenpair": (
                lambda: co.linalg.eigsh(precision(), 1.5),
                TypeError,
                "k must be a whole number, got 1.5",
            ),
            "no singular triplet": (lambda: co.linalg.svds(precision(), 0), "k must lie between 1 and the 27"),
            "a rank in words": (
                lambda: co.low_rank(precision(), "2"),
                TypeError,
                "rank must be a whole number, got '2'",
            ),
            "a sketch of half a rank": (
                lambda: co.linalg.nystrom(precision(), rank=1.5),
                TypeError,
                "rank must be a whole number, got 1.5",
            ),
            "a sketch without a shift": (
                lambda: co.linalg.nystrom(precision(), rank=2, shift=None),
                TypeError,
                "shift must be a number, got None",
            ),
            "a short step": (lambda: lin().push(torch.ones(3).double()), r"vector must have shape \(27,\), got"),
            "a step in float32": (lambda: lin().push(torch.ones(27)), "the right-hand side is torch.float32"),
            "named weights for a vector": (
                lambda: lin().predict(X, weights=lin().unflatten(lin().theta)),
                TypeError,
                r"got a mapping: join its tensors by lin.flatten\(mapping\)",
            ),
            "a name for another likelihood": (
                lambda: lin().with_likelihood("regression"),
                TypeError,
                r"with_likelihood takes one of co.likelihoods .* for co.linearize\); given 'regression'",
            ),
            "a vector for named weights": (
                lambda: lin().flatten(lin().theta),
                TypeError,
                r"expected a mapping from the names .* got Tensor of shape \(27,\)",
            ),
            "a rectangular operator for a block": (
                lambda: co.Subnetwork(lin().jacobian(), [0, 1]),
                r"source must have shape \(27, 27\), got \(30, 27\)",
            ),
            "a number of blocks": (
                lambda: co.BlockDiagonal(lin(), blocks=4),
                TypeError,
                "blocks must be 'layer', or a list of groups of names or positions, got int",
            ),
            "a class to ignore in words": (
                lambda: co.likelihoods.Categorical(ignore_index="none"),
                TypeError,
                "ignore_index must be a whole number, got 'none'",
            ),
            "a linearisation as matrix": (lambda: co.low_rank(lin(), 2), TypeError, r"such as co.GGN\(lin\)"),
            "a diagonal in words": (
                lambda: co.GGN(lin()).add_diagonal("1"),
                TypeError,
                r"must be a number or a tensor \(27,\), got '1'",
            ),
            "a seed where no probe is drawn": (
                lambda: co.linalg.trace(precision(), generator=0),
                TypeError,
                r"got 0; to fix a seed, pass torch.Generator\(\).manual_seed",
            ),
            "a function's name": (
                lambda: co.linalg.apply_function(precision(), "exp", torch.ones(27).double()),
                TypeError,
                "such as torch.exp, got 'exp'",
            ),
        },
    ),
    Door(
        "arrays and lists by a tired user",
        rows={name: (call, TypeError, said) for name, (call, said) in ARRAYS.items()},
    ),
    Door(
        "plots by a tired user",
        rows={
            "a path first": (
                lambda: plots.save("a.png", None),
                TypeError,
                "takes axes or a figure, then a path; got str",
            )
        },
    ),
]
