"""Test points split over the ranks of a group: predictions of each rank's own, or of all, are those of one process.

Tests `split_points.py`.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import curvops as co
from tests.ranks.processes import LONGEST, run_on_ranks
from tests.ranks.questions import DOUBLE, SHARDS, data, linearise, seeded
from tests.ranks.test_refusals import outcome

POINTS = 6
OWN = {1: (6,), 2: (4, 2), 3: (2, 0, 4)}
"""Test points of each rank: ragged, and none."""
CURVATURES = (co.GGN, co.KFAC, co.DiagonalGGN)
PROBLEMS = ("labels", "numbers")


def new_points(problem: str) -> tuple[Tensor, Tensor]:
    x, y = data(problem, seed=9)
    return x[:POINTS].clone(), y[:POINTS]


def as_tensors(found: Any) -> list[Tensor]:
    """The tensors of a result that have a row for each point."""
    if not dataclasses.is_dataclass(found):
        return [found]
    values = [getattr(found, field.name) for field in dataclasses.fields(found)]
    return [value for value in values if isinstance(value, Tensor) and value.ndim]


def in_pairs(post: Any, x: Tensor, y: Tensor, **options: Any) -> Tensor:
    return post.predict(x, groups=2, **options).covariance_matrix


def joint_density(post: Any, x: Tensor, y: Tensor, **options: Any) -> Tensor:
    return post.predict(x, joint=True, **options).log_prob(torch.ones(POINTS, post.lin.num_outputs, dtype=DOUBLE))


def asked_twice(at: co.posterior.Predictions) -> Tensor:
    _ = at.predict().variance, at.uncertainty(seeded())
    return at.predict().variance


Asked = tuple[str, Callable[..., Any]]
"""What of a result belongs to a point ("all": nothing), and a function of (posterior, x, y) and options."""
WITH_DRAWS: dict[str, Asked] = {
    "mean": ("rows", lambda p, x, y, **o: p.predict(x, **o).mean),
    "variances": ("rows", lambda p, x, y, **o: p.predict(x, **o).variance),
    "covariances": ("rows", lambda p, x, y, **o: p.predict(x, **o).covariance_matrix),
    "joint": ("both", lambda p, x, y, **o: p.predict(x, joint=True, **o).covariance_matrix),
    "pairs": ("pairs", in_pairs),
    "uncertainty": ("rows", lambda p, x, y, **o: p.uncertainty(x, generator=seeded(), **o)),
    "log-likelihood": ("rows", lambda p, x, y, **o: p.log_likelihood(x, y, generator=seeded(), **o)),
    "that of pairs": ("all", lambda p, x, y, **o: p.log_likelihood(x, y, joint=True, generator=seeded(), **o)),
}
WITH_DRAWS |= {
    "variances, asked twice": ("rows", lambda p, x, y, **o: asked_twice(p.at(x, **o))),
}
WITHOUT: dict[str, Asked] = {
    "functions": ("columns", lambda p, x, y, **o: p.functions(x, 3, generator=seeded(), rtol=1e-12, **o))
}
OF_LABELS: dict[str, Asked] = {
    "probabilities": ("rows", lambda p, x, y, **o: p.probabilities(x, **o)),
    "probabilities by draws": ("rows", lambda p, x, y, **o: p.probabilities(x, "mc", generator=seeded(), **o)),
    "probabilities by the bridge": ("rows", lambda p, x, y, **o: p.probabilities(x, "bridge", **o)),
}
OF_NUMBERS: dict[str, Asked] = {
    "with noise": ("rows", lambda p, x, y, **o: p.predict(x, noise=True, **o).covariance_matrix),
    "joint density": ("all", joint_density),
}


def questions(lin: co.operators.Linearization, problem: str) -> Iterator[tuple[str, str, Callable[..., Any]]]:
    for curvature in CURVATURES:
        post = co.laplace(lin, curvature, prior_precision=3.0, check_mode=False)
        draws = post.sample(4, seeded(), rtol=1e-12)
        for name, (kind, ask) in (WITH_DRAWS | WITHOUT | (OF_LABELS if problem == "labels" else OF_NUMBERS)).items():
            yield f"{curvature.__name__}: {name}", kind, partial(ask, post)
        for name, (kind, ask) in WITH_DRAWS.items():
            yield f"{curvature.__name__}: {name}, by draws", kind, partial(ask, post, samples=draws)
        if problem == "labels":
            by_network = partial(type(post).probabilities, link="network", samples=draws)
            yield f"{curvature.__name__}: of the network", "rows", lambda x, y, p=post, f=by_network, **o: f(p, x, **o)


def part_of(value: np.ndarray, kind: str, own: slice) -> np.ndarray:
    """The part of a result that belongs to some points."""
    if kind == "columns":
        return value[:, own]
    if kind == "pairs":
        return value[own.start // 2 : own.stop // 2]
    if kind == "both":
        C = len(value) // POINTS
        own = slice(own.start * C, own.stop * C)
        return value[own, own]
    return value[own]


def answers(
    lin: co.operators.Linearization, problem: str, own: slice, size: int = 1, **options: Any
) -> dict[str, list[np.ndarray]]:
    x, y = new_points(problem)
    found = {}
    with torch.no_grad():
        for name, kind, ask in questions(lin, problem):
            if not options and ((kind == "all" and own != slice(0, POINTS)) or (kind == "pairs" and size == 3)):
                continue  # of all points together; and a rank without points has no groups
            try:
                result = ask(x[own], y[own], **options)
            except Exception as error:
                raise RuntimeError(f"{name} ({options}): {error}") from error
            found[name] = [tensor.numpy().copy() for tensor in as_tensors(result)]
    return found


def own_points(size: int, rank: int) -> slice:
    ends = [0, *accumulate(OWN[size])]
    return slice(*ends[rank : rank + 2])


def on_rank(group: dist.ProcessGroup, size: int) -> dict[str, Any]:
    rank, found = dist.get_rank(group), {}
    for problem in PROBLEMS if size > 1 else PROBLEMS[:1]:
        lin = linearise(problem, SHARDS[size], group, rank)
        own = own_points(size, rank)
        found[problem, "own"] = answers(lin, problem, own, size)
        found[problem, "gathered"] = answers(lin, problem, own, size, gather=True)
    return found


def whole() -> dict[str, Any]:
    """The answers of one process."""
    return {problem: answers(linearise(problem), problem, slice(0, POINTS)) for problem in PROBLEMS}


@pytest.mark.parametrize("size", LONGEST)
def test_predictions_are_those_of_one_process(expected, size) -> None:
    kinds = {problem: {n: k for n, k, _ in questions(linearise(problem), problem)} for problem in PROBLEMS}
    found, wrong = run_on_ranks(size, on_rank, size), []
    for rank, by_case in found.items():
        for (problem, how), own in by_case.items():
            for name, values in own.items():
                kind = kinds[problem][name]
                for value, truth in zip(values, expected[problem][name], strict=True):
                    if how == "own" and kind != "all":
                        truth = part_of(truth, kind, own_points(size, rank))
                    assert value.shape == truth.shape, (name, how, value.shape, truth.shape)
                    error = np.abs(value - truth).max(initial=0) / max(1e-300, np.abs(truth).max(initial=0))
                    if not error < 1e-10:
                        wrong.append(f"rank {rank} of {size}, {problem}, {how}: {name} is off by {error:.2g}")
    assert not wrong, "\n".join(wrong)
    assert all(found[0].keys() == own.keys() for own in found.values())


def again(post: Any, x: Tensor, shares: bool) -> object:
    """Ask two questions, the second of which has its products already if they are shared."""
    at = post.at(x)
    _ = at.predict().variance
    return (at if shares else post.at(x)).uncertainty(seeded())


def refusals(group: dist.ProcessGroup) -> dict[str, str]:
    """What each rank is told of calls in which the ranks differ; and that they then still work together."""
    rank = dist.get_rank(group)
    lin = linearise("labels", SHARDS[2], group, rank)
    post, kfac = (co.laplace(lin, c, prior_precision=3.0, check_mode=False) for c in (co.GGN, co.KFAC))
    x, y = new_points("labels")
    own = x[own_points(2, rank)]
    bad = own.clone()
    bad[0, 0] = torch.nan if rank else bad[0, 0]
    found = {
        "not finite on one rank": lambda: post.predict(bad),
        "two ways to bring together": lambda: kfac.predict(own, gather=rank == 0).covariance_matrix,
        "two questions": lambda: kfac.predict(own) if rank else kfac.uncertainty(own, generator=seeded()),
        "one asks again": lambda: again(kfac, own, rank == 0),
        "two seeds": lambda: kfac.probabilities(own, "mc", generator=seeded(rank)),
        "two forms": lambda: post.predict((own,) if rank else own),
        "groups that cut a rank's points": lambda: kfac.predict(x[:4] if rank else x[:3], groups=2),
        "targets of another length on one rank": lambda: post.log_likelihood(own, y[: len(own) - rank]),
    }
    told = {name: outcome(ask) for name, ask in found.items()}
    ranks = lin.passes.shard.ranks
    for name, options in {"its own": {}, "all": {"gather": True}}.items():
        before = ranks.messages
        _ = kfac.predict(own, **options).variance
        told[f"messages for {name}"] = str(ranks.messages - before)
    told["at the end"] = str(bool(torch.isfinite(post.predict(own, gather=True).variance).all()))
    split = slice(rank, None, 2)
    both = co.evidence.validate(post, x[split], y[split], prior_precisions=[0.1, 3.0], generator=seeded())
    order = torch.tensor([0, 2, 4, 1, 3, 5])
    alone = co.evidence.validate(post, x[order], y[order], prior_precisions=[0.1, 3.0], generator=seeded())
    told["validation"] = str(np.allclose(both.tuning.scores, alone.tuning.scores, rtol=1e-10, atol=0))
    return told


def test_ranks_that_ask_for_different_things_are_told() -> None:
    words = {
        "not finite on one rank": ("rank 1 rejected its test points", "holds NaN"),
        "two ways to bring together": ("gather=False", "gather=True"),
        "two questions": ("asks for predictions", "uncertainty"),
        "one asks again": (", again, gather=False", ", again, gather=False"),
        "two seeds": ("seed=", "RanksDifferError"),
        "two forms": ("are of", "inputs of one form"),
        "groups that cut a rank's points": ("must divide the 3 points", "must divide the 3 points"),
        "targets of another length on one rank": ("rank 1 rejected its test points", "one target per point"),
        "messages for its own": ("2", "2"),
        "messages for all": ("6", "6"),
        "at the end": ("True", "True"),
        "validation": ("True", "True"),
    }
    found = run_on_ranks(2, refusals)
    for rank, told in found.items():
        assert told.keys() == words.keys()
        for name, text in told.items():
            found_it = text == words[name][rank] if name.startswith("messages") else words[name][rank] in text
            assert found_it, (rank, name, text)
