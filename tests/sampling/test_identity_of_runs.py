"""A checkpoint of a chain is refused, by name, if anything that decides the chain's law has changed.

Tests `running.py` and `identify`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvops as co
from tests.sampling.gaussians import seeded

S = co.sampling
N, C = 9, 3


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, C)).double()


def posterior(net: nn.Module | None = None, likelihood: Any = None, **given: Any) -> Any:
    likelihood = co.likelihoods.Categorical() if likelihood is None else likelihood
    return S.log_posterior(network() if net is None else net, likelihood, **{"data_size": N, **given})


D = sum(p.numel() for p in network().parameters())


def hooked() -> nn.Module:
    net = network()
    net[1].register_forward_hook(lambda module, given, found: 2 * found)
    return net


def extracted() -> nn.Module:
    net = network()
    net.register_buffer("kept", torch.ones(2), persistent=False)
    return net


CLASSES = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)

TARGETS: dict[str, tuple[str, Callable[[], Any], Callable[[], Any]]] = {
    "class weights": (
        "the likelihood",
        lambda: posterior(likelihood=nn.CrossEntropyLoss(weight=CLASSES)),
        lambda: posterior(likelihood=nn.CrossEntropyLoss(weight=CLASSES + 1e-9)),
    ),
    "a hook": ("the network's modules", posterior, lambda: posterior(hooked())),
    "a buffer": ("the network's tensors", posterior, lambda: posterior(extracted())),
    "precisions": (
        "the prior's precision",
        lambda: posterior(prior_precision=torch.linspace(1, 2, D).double()),
        lambda: posterior(prior_precision=torch.linspace(1, 2, D).double().flip(0)),
    ),
    "the mean": ("the prior's mean", posterior, lambda: posterior(prior_mean=0.1)),
    "N": ("data_size", posterior, lambda: posterior(data_size=N + 1)),
    "sample weights": ("whether points have weights", posterior, lambda: posterior(weights=True)),
}
"""What differs by name, a log posterior, and another one."""

SAMPLERS: dict[str, Callable[[Any], Any]] = {
    "sgld": lambda f: S.sgld(f, 0.01),
    "pcn": lambda f: S.pcn(f, 0.01),
    "chains": lambda f: S.chains(S.sgld(f, 0.01), 2),
    "optimizer": lambda f: S.optimizer(torch.optim.Adam, f, lr=0.01),
    "vi": lambda f: S.vi(f, lr=0.01),
    "ekf": lambda f: S.ekf(f),
}


def ran(sampler: Any, folder: Path, start: Any = None, **given: Any) -> Tensor:
    f, generator = sampler.log_posterior, None if isinstance(start, S.State) else seeded(3)
    x, y = torch.randn(N, 2, generator=seeded(1)).double(), torch.arange(N) % C
    batch = (x, y, torch.ones(N).double()) if getattr(f, "weighted", False) else (x, y)
    start = f.params if start is None else start
    return S.run(sampler, start, [batch], steps=2, generator=generator, checkpoint=folder, **given).theta


@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_chain_of_another_log_posterior_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    sampler = SAMPLERS[kind]
    for case, (what, one, other) in (TARGETS if kind == "sgld" else {"N": TARGETS["N"]}).items():
        found = ran(sampler(one()), tmp_path / case)
        assert torch.equal(found, ran(sampler(one()), tmp_path / case)), case
        with pytest.raises(ValueError, match=f"another problem. What differs: .*{what}"):
            ran(sampler(other()), tmp_path / case)


def schedule(step: int) -> float:
    return 0.01


def scheduled(step: int) -> float:
    return 0.01


F0 = posterior()
MANY = torch.linspace(-1, 1, 3000, dtype=torch.float64)
FAR = MANY.clone()
FAR[1500] += 1


def squares(theta: Tensor, batch: Any) -> Tensor:
    return -0.5 * theta.square().sum()


def wide(mean: Tensor) -> Any:
    return S.pcn(squares, 0.1, covariance=1.0, mean=mean, data_size=1)


HYPERPARAMETERS: dict[str, tuple[str, Callable[[], Any], Callable[[], Any]]] = {
    "a function of another name": ("step_size", lambda: S.sgld(F0, schedule), lambda: S.sgld(F0, scheduled)),
    "a schedule": ("step_size", lambda: S.sgld(F0, S.Cosine(0.01, 5)), lambda: S.sgld(F0, S.Cosine(0.01, 6))),
    "another sampler": ("the sampler", lambda: S.sghmc(F0, 0.01), lambda: S.baoa(F0, 0.01)),
    "a long mean": ("mean", lambda: wide(MANY), lambda: wide(FAR)),
    "an optimiser's option": (
        "options",
        lambda: S.optimizer(torch.optim.Adam, F0, lr=0.01),
        lambda: S.optimizer(torch.optim.Adam, F0, lr=0.01, betas=(0.9, 0.99)),
    ),
    "a function": (
        "the log posterior",
        lambda: S.sgld(squares, 0.01, data_size=1),
        lambda: S.sgld(lambda p, b: squares(p, b), 0.01, data_size=1),
    ),
    "a form": ("form", lambda: S.ekf(F0), lambda: S.ekf(F0, "dense")),
}


@pytest.mark.parametrize("case", HYPERPARAMETERS)
def test_a_chain_of_another_sampler_is_refused_by_name(case: str, tmp_path: Path) -> None:
    what, one, other = HYPERPARAMETERS[case]
    start = MANY if case in ("a long mean", "a function") else None
    found = ran(one(), tmp_path, start)
    assert torch.equal(found, ran(one(), tmp_path, start))
    with pytest.raises(ValueError, match=f"another problem. What differs: .*{what}"):
        ran(other(), tmp_path, start)


def test_a_chain_from_another_state_is_refused(tmp_path: Path) -> None:
    """Momenta count, too."""
    sampler = S.sghmc(F0, 0.01)
    state = sampler.init(F0.params, seeded(0))
    state, _ = sampler.update(state, (torch.ones(N, 2).double(), torch.arange(N) % C))
    ran(sampler, tmp_path, state)
    ran(sampler, tmp_path, state.clone())
    other = state.clone()
    other.momentum.neg_()
    with pytest.raises(ValueError, match="What differs: start"):
        ran(sampler, tmp_path, other)
