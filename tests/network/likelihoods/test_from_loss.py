"""Losses of one's own: every operator against dense autograd of the loss itself, and the refusals by name."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvops as co
from tests.network.definitions import TIGHT, normal
from tests.zoo_modules import Applied

N, C, T = 5, 2, 3
W = torch.tensor([1.0, 0.0, 2.5, 0.3, 4.0]).double()


def net(*shape: int, positive: bool = False) -> nn.Module:
    """Outputs of any shape, positive where asked for."""
    last, reshaped = nn.Linear(3, torch.Size(shape).numel()), Applied(lambda f: f.reshape(len(f), *shape))
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), last, *[nn.Softplus()] * positive, reshaped).double()


def reals(*shape: int) -> Tensor:
    return normal(N, *shape, seed=4, scale=2.0)


def quartic(f: Tensor, y: Tensor) -> Tensor:
    return ((f - y) ** 4).sum(-1)


def coupled(outputs: Tensor, targets: Tensor, scale: float = 2.0) -> Tensor:
    """A loss in which the outputs of a point meet."""
    gap = outputs - targets
    return torch.logsumexp(scale * gap, -1) + gap.square().sum(-1)


def hinge(f: Tensor, y: Tensor) -> Tensor:
    """Squared hinge of class labels."""
    return F.relu(1 - f.gather(-1, y.unsqueeze(-1)) + f).square().sum(-1)


huber = partial(F.huber_loss, reduction="sum", delta=0.7)


# name: (what is given, shape of a point's outputs, positive outputs, targets, the loss as a sum)
Case = tuple[Any, tuple[int, ...], bool, Tensor, Callable[[Tensor, Tensor], Tensor]]
LABELS = torch.arange(N) % C
CASES: dict[str, Case] = {
    "huber": (nn.HuberLoss(delta=0.7), (C,), False, reals(C), huber),
    "huber, reduced by sum": (nn.HuberLoss("sum", 0.7), (C,), False, reals(C), huber),
    "huber of numbers": (nn.HuberLoss(delta=0.7), (), False, reals(), huber),
    "huber of positions": (nn.HuberLoss(delta=0.7), (T, C), False, reals(T, C), huber),
    "smooth": (nn.SmoothL1Loss(beta=0.3), (C,), False, reals(C), partial(F.smooth_l1_loss, reduction="sum", beta=0.3)),
    "rates": (
        nn.PoissonNLLLoss(log_input=False, full=True),
        (C,),
        True,
        reals(C).abs().round(),
        partial(F.poisson_nll_loss, log_input=False, full=True, reduction="sum"),
    ),
    "means and variances": (
        nn.GaussianNLLLoss(full=True),
        (2 * C,),
        True,
        reals(C),
        lambda f, y: F.gaussian_nll_loss(f[:, :C], y, f[:, C:], full=True, reduction="sum"),
    ),
    "function": (quartic, (C,), False, reals(C), lambda f, y: quartic(f, y).sum()),
    "partial": (partial(coupled, scale=0.5), (C,), False, reals(C), lambda f, y: coupled(f, y, 0.5).sum()),
    "labels": (hinge, (C,), False, LABELS, lambda f, y: hinge(f, y).sum()),
    "a column": (lambda f, y: (f - y).square(), (1,), False, reals(1), lambda f, y: (f - y).square().sum()),
}
CONVEX = sorted(CASES.keys() - {"means and variances"})


def dense(case: str) -> tuple[nn.Module, Tensor, Tensor, dict[str, Tensor]]:
    """The loss's gradients of points, its Hessian, J and H in the parameters and outputs, by autograd alone."""
    _, shape, positive, y, total = CASES[case]
    torch.manual_seed(0)
    model, x = net(*shape, positive=positive), normal(N, 2)
    theta = torch.cat([p.detach().flatten() for p in model.parameters()])

    def outputs(at: Tensor) -> Tensor:
        parts = at.split([p.numel() for p in model.parameters()])
        named = {n: part.view_as(p) for (n, p), part in zip(model.named_parameters(), parts)}
        found: Tensor = torch.func.functional_call(model, named, (x,))
        return found

    f = outputs(theta)
    J = torch.autograd.functional.jacobian(outputs, theta).reshape(f.numel(), -1)
    points = torch.autograd.functional.jacobian(
        lambda at: torch.stack([total(outputs(at)[i : i + 1], y[i : i + 1]) for i in range(N)]), theta
    )
    H = torch.autograd.functional.hessian(lambda g: total(g, y), f).reshape(f.numel(), f.numel())
    hessian = torch.autograd.functional.hessian(lambda at: total(outputs(at), y), theta)
    parts = {"loss": total(f, y), "points": points, "J": J, "H": H, "hessian": hessian}
    return model, x, y, parts


@pytest.mark.parametrize(
    ("case", "engine"), [*((case, "layerwise") for case in CASES), *((case, "streamed") for case in list(CASES)[:2])]
)
def test_every_operator_is_that_of_the_loss(case: str, engine: Any) -> None:
    model, x, y, known = dense(case)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lin = co.linearize(model, (x, y), CASES[case][0], engine=engine)
    torch.testing.assert_close(lin.log_likelihood(), -known["loss"], **TIGHT)
    torch.testing.assert_close(lin.gradient(), known["points"].sum(0), **TIGHT)
    torch.testing.assert_close(co.Hessian(lin).to_dense(), known["hessian"], **TIGHT)
    torch.testing.assert_close(co.EmpiricalFisher(lin).to_dense(), known["points"].mT @ known["points"], **TIGHT)
    if case not in CONVEX:
        instead = r"not convex in the outputs.*EmpiricalFisher.*HeteroscedasticGaussian"
        for make in (co.GGN, co.KFAC, co.DiagonalGGN):
            with pytest.raises(ValueError, match=instead):
                make(lin).to_dense()
        return
    G = known["J"].mT @ known["H"] @ known["J"]
    torch.testing.assert_close(co.GGN(lin).to_dense(), G, **TIGHT)
    torch.testing.assert_close(co.DiagonalGGN(lin).diagonal(), G.diagonal(), **TIGHT)
    torch.testing.assert_close(co.BlockDiagonal(lin).to_dense()[:6, :6], G[:6, :6], **TIGHT)
    post = co.laplace(lin, co.GGN, 2.0, check_mode=False)
    P = G + 2.0 * torch.eye(len(G), dtype=G.dtype)
    variance = (known["J"] @ torch.linalg.solve(P, known["J"].mT)).diagonal()
    torch.testing.assert_close(post.predict(x).variance.flatten(), variance, rtol=1e-8, atol=1e-10)
    evidence = -known["loss"] - 0.5 * (2.0 * lin.theta @ lin.theta + torch.logdet(P / 2.0))
    torch.testing.assert_close(post.log_evidence().value, evidence, **TIGHT)


@pytest.mark.parametrize("case", ["huber", "function", "labels"])
def test_sample_weights_multiply_the_loss_of_their_point(case: str) -> None:
    model, x, y, known = dense(case)
    lin = co.linearize(model, (x, y, W), CASES[case][0], weights=True)
    torch.testing.assert_close(lin.gradient(), W @ known["points"], **TIGHT)
    each = W.repeat_interleave(len(known["H"]) // N)
    torch.testing.assert_close(co.GGN(lin).to_dense(), known["J"].mT @ (each * known["H"]) @ known["J"], **TIGHT)


def test_what_needs_a_distribution_is_refused_by_name() -> None:
    model, x, y, _ = dense("huber")
    lin = co.linearize(model, (x, y), nn.HuberLoss())
    post = co.laplace(lin, co.KFAC, 2.0, check_mode=False)
    asked: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
        "Monte-Carlo Fisher": (lambda: co.GGN(lin, mc_samples=2), TypeError, "nothing to draw"),
        "KFAC": (lambda: co.KFAC(lin, fisher="mc"), TypeError, "nothing to draw"),
        "probabilities": (lambda: post.probabilities(x), ValueError, "no class probabilities; use predict or func"),
        "uncertainty": (lambda: post.uncertainty(x), ValueError, "no decomposition"),
        "noise": (lambda: post.predict(x, noise=True), ValueError, "is for real targets"),
        "tuning": (lambda: co.evidence.maximize(post, "noise"), ValueError, "no noise that is one number"),
    }
    for call, kind, message in asked.values():
        with pytest.raises(kind, match=message):
            call()
    assert post.log_likelihood(x, y).value.isfinite().all()


def test_an_option_changed_afterwards_changes_nothing() -> None:
    model, x, y, _ = dense("huber")
    loss = nn.HuberLoss(delta=0.7)
    lin = co.linearize(model, (x, y), loss)
    expected, loss.delta = lin.log_likelihood(), 0.1
    assert torch.equal(lin.log_likelihood(), expected)
    assert loss.reduction == "mean"


def divided(f: Tensor, y: Tensor) -> Tensor:
    z = (f - y).square()
    return (z / (1 + z)).sum(-1)


def test_a_loss_that_is_not_convex_or_does_not_curve_says_so() -> None:
    model, x = net(C), normal(N, 2)
    lin = co.linearize(model, (x, reals(C)), divided)
    with pytest.raises(ValueError, match="is not convex in the outputs .its Hessian has an eigenvalue of -"):
        co.laplace(lin, co.GGN, 1.0, check_mode=False).predict(x).variance.sum()
    assert co.Hessian(lin).to_dense().isfinite().all()
    signs = torch.ones(N, dtype=x.dtype).index_fill(0, torch.tensor(1), -1.0)
    at_one_point = co.linearize(model, (x, signs), lambda f, y: y * f.square().sum(-1))
    with pytest.raises(ValueError, match="has an eigenvalue of -2"):
        co.GGN(at_one_point).to_dense()
    with pytest.warns(co.errors.NoCurvatureWarning, match="linear in the outputs"):
        co.linearize(model, (x, reals(C)), nn.L1Loss())
    lin = co.linearize(model, (x, LABELS), nn.MultiMarginLoss())
    with pytest.raises(RuntimeError, match="not implemented"):
        co.GGN(lin).to_dense()
    lin = co.linearize(net(1), (x, reals(1)), co.likelihoods.FromLoss(nn.HuberLoss()))
    with pytest.raises(ValueError, match="had targets"):  # torch would broadcast it
        co.laplace(lin, co.GGN, 1.0, check_mode=False).log_likelihood(x, reals())


def test_a_sampler_takes_it() -> None:
    model, x, y, known = dense("huber")
    density = co.sampling.log_posterior(model, nn.HuberLoss(delta=0.7), prior_precision=2.0, data_size=N)
    value = density(density.params, (x, y))
    theta = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(value, (-known["loss"] - theta.square().sum()) / N, **TIGHT)
