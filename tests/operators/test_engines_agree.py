"""An engine is a matter of cost: whatever multiplies with J, every answer is the same."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvops as co
from tests.randomness import seeded

N, C = 6, 3


class Mixed(nn.Module):
    """Convolutions (shared positions), a norm, and a parameter without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(2, 4, 2), nn.LayerNorm(5)
        self.wide, self.head = nn.Linear(20, 4), nn.Linear(4, C)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 4))

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.norm(self.conv(x).tanh()).flatten(1)
        found: Tensor = self.head(self.wide(hidden).tanh() * self.scale)
        return found


X = torch.randn(N, 2, 6, generator=seeded(3)).double()
V = torch.randn(400, 3, generator=seeded(3)).double()
KINDS = [
    {"fisher": "exact", "sharing": "expand", "bias": "joint"},
    {"fisher": "exact", "sharing": "reduce", "bias": "separate"},
    {"fisher": "mc", "sharing": "reduce", "bias": "joint"},
    {"fisher": "empirical", "sharing": "expand", "bias": "separate"},
]


def answers(lin: Any) -> dict[str, Tensor]:
    """What the library says of a linearisation, as tensors."""
    v, x = V[: lin.num_parameters], X[:2]
    drawn: dict[str, Callable[[], Tensor]] = {}
    for kind, options in itertools.product((co.KFAC, co.EKFAC), KINDS):
        found = kind(lin, **options, generator=seeded(3) if options["fisher"] == "mc" else None)
        drawn[f"{kind.__name__} {options}"] = lambda found=found: torch.cat([found @ v, found.diagonal()[:, None]], 1)
    for fisher in ("exact", "mc", "empirical"):
        generator = seeded(3) if fisher == "mc" else None
        drawn[f"DiagonalGGN {fisher}"] = lambda f=fisher, g=generator: (
            co.DiagonalGGN(lin, fisher=f, generator=g).entries
        )
    for operator in (
        co.GGN(lin),
        co.GGN(lin, mc_samples=2, generator=seeded(3)),
        co.EmpiricalFisher(lin),
        co.Hessian(lin),
        co.Subnetwork(co.GGN(lin), torch.arange(0, lin.num_parameters, 9)),
        co.BlockDiagonal(lin),
    ):
        name, size = f"{type(operator).__name__} {len(drawn)}", operator.shape[-1]
        drawn[f"{name} @ v"] = lambda A=operator, n=size: A @ V[:n]
        if not isinstance(operator, co.Hessian):
            drawn[f"diag {name}"] = lambda A=operator: A.diagonal()
    drawn["J v"] = lambda: lin.jacobian() @ v
    drawn["kernel"] = lambda: co.TangentKernel(lin).to_dense()
    drawn["gradients"] = lambda: lin.gradients() @ v
    for curvature in (co.KFAC, co.EKFAC, co.DiagonalGGN, co.GGN):
        post = co.laplace(lin, curvature, 2.0, check_mode=False)
        drawn[f"variances {curvature.__name__}"] = lambda post=post: post.predict(x).covariance_matrix
    drawn["evidence"] = lambda: post.log_evidence().value
    for score in ("variance", "predictive", "obd"):
        extra = {"x": x} if score == "predictive" else {}
        drawn[f"select {score}"] = lambda s=score, e=extra: co.select(
            lin, 12, score=s, prior_precision=2.0, **e
        ).double()
    return {name: answer() for name, answer in drawn.items()}


def linearized(engine: str, parameters: Any = None) -> Any:
    torch.manual_seed(0)
    model = Mixed().double()
    return co.linearize(model, [(X[:4], torch.arange(4) % C), (X[4:], torch.arange(2))], "classification",
                        parameters, engine=engine)  # fmt: skip


@pytest.mark.parametrize("parameters", [None, "head.*"])
def test_no_answer_depends_on_the_engine(parameters: Any) -> None:
    """KFAC under an autodiff engine was made of exact blocks and diagonals, its `sharing` and `bias` ignored."""
    expected = answers(linearized("auto", parameters))
    for engine in ("streamed", "autodiff", "layerwise"):
        found = answers(linearized(engine, parameters))
        for name, value in expected.items():
            assert torch.allclose(found[name], value, rtol=1e-10, atol=1e-11), f"{engine}: {name}"
