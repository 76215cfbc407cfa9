"""Errors that begin inside torch say at the door what was given and what to do, and keep their cause."""

import warnings
from operator import itemgetter
from typing import Any

import pytest
import torch
from torch import Tensor, distributions, nn

import curvops as co
from tests.network.definitions import normal
from tests.zoo_modules import Applied, Wired

X, Y = normal(7, 4, dtype=torch.float32), torch.tensor([0, 1, 2, 0, 1, 2, 0])


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def tokens() -> nn.Module:
    return nn.Sequential(nn.Embedding(5, 2), nn.Flatten(), nn.Linear(8, 3))


def wired(wiring: Any) -> nn.Module:
    return Wired(wiring)


def elsewhere(m: Any, x: Tensor) -> Tensor:
    raise RuntimeError("Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!")


# what: (model, data, the cause's class, what the message says)
CASES: dict[str, tuple[nn.Module, Any, type, str]] = {
    "width": (net(), (X[:, :3], Y), RuntimeError, r"inputs \(2, 3\) of torch.float32.*2x3 and 4x6"),
    "dimensions": (nn.Conv1d(2, 3, 1), (X[:, :3, None], Y), RuntimeError, "the model failed on inputs"),
    "integers": (
        net(),
        (Y[:, None].expand(7, 4), Y),
        RuntimeError,
        "torch.int64",
    ),
    "floats": (tokens(), (X, Y), RuntimeError, "the model failed on inputs"),
    "range": (tokens(), (torch.full((7, 4), 9), Y), IndexError, "index out of range"),
    "entry": (nn.Sequential(Applied(itemgetter("features")), nn.Linear(4, 3)), ({"x": X}, Y), KeyError, "KeyError"),
    "no mapping": (net(), ({"x": X}, Y), TypeError, "the model failed on inputs"),
    "arguments": (nn.Bilinear(4, 4, 3), (X, Y), TypeError, "missing 1 required"),
    "device": (wired(elsewhere), (X, Y), RuntimeError, "on the same device"),
    "its own": (wired(lambda m, x: m.nothing(x)), (X, Y), AttributeError, "AttributeError.*nothing"),
    "later batch": (net(), [(X, Y), (X[:, :3], Y)], RuntimeError, "^Batch 1: the model failed on"),
}


@pytest.mark.parametrize("what", CASES)
def test_errors_name_the_inputs(what: str) -> None:
    model, data, cause, message = CASES[what]
    with pytest.raises((ValueError, TypeError), match=f"(?s){message}") as caught:
        co.linearize(model.eval(), data, "classification")
    found: BaseException | None = caught.value.__cause__
    while found is not None and type(found) is not cause:
        found = found.__cause__
    assert found is not None


def test_memory_that_runs_out_says_so_itself() -> None:
    def wiring(m: Any, x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError):
        co.linearize(Wired(wiring), (X, Y), "classification")


@pytest.mark.parametrize("method", ["predict", "jacobian"])
def test_new_inputs_are_tried_too(method: str) -> None:
    lin = co.linearize(net(), (X, Y), "classification")
    call = getattr(lin, method)
    for wrong, error in [(X[:, :3], ValueError), (Y[:, None].expand(7, 4), ValueError), ({"x": X}, TypeError)]:
        with pytest.raises(error, match="the model failed on inputs"):
            call(wrong)
    with pytest.raises(ValueError, match="holds NaN or infinite"):
        call(X * torch.nan)
    call(X)


def uniform(f: Tensor) -> distributions.Distribution:
    return distributions.Uniform(f.detach() - 9, f.detach() + 9)


def test_a_likelihood_without_curvature_warns() -> None:
    y = torch.zeros(7, 3)
    with pytest.warns(
        co.errors.NoCurvatureWarning, match="no curvature.*the posterior is the prior.*changes with the outputs"
    ):
        lin = co.linearize(net(), (X, y), uniform)
    assert (co.GGN(lin, mc_samples=1) @ torch.ones(lin.num_parameters) == 0).all()


def ended_by(last: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(net(), last)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("last", "words"),
    [(nn.Softmax(-1), "probabilities: each row is at least 0.*softmax"), (nn.LogSoftmax(-1), "log-probabilities")],
    ids=["softmax", "log-softmax"],
)
def test_a_classifier_that_returns_no_logits_warns(dtype: torch.dtype, last: nn.Module, words: str) -> None:
    model = ended_by(last).to(dtype)
    for likelihood in ("classification", nn.CrossEntropyLoss(label_smoothing=0.1)):
        with pytest.warns(co.errors.NotLogitsWarning, match=words + r".*Return the logits.*linearize\(model\[:-1\]"):
            co.linearize(model, (X.to(dtype), Y), likelihood)
    with pytest.warns(co.errors.NotLogitsWarning, match=words):  # three positions a point
        co.linearize(model, (X.to(dtype).expand(3, 7, 4).movedim(0, 1), Y[:, None].expand(7, 3)), "classification")


HEAD = nn.Linear(4, 3)
nn.init.zeros_(HEAD.weight)
HEAD.bias.data = torch.tensor([0.2, 0.3, 0.5]).log()


QUIET: dict[str, tuple[nn.Module, Tensor, Tensor, Any]] = {
    "saturated": (nn.Linear(4, 3), 1e6 * X, Y, "classification"),
    "saturated events": (nn.Linear(4, 3), 1e6 * X, torch.ones(7, 3) > 0, co.likelihoods.Bernoulli()),
    "squares": (nn.Linear(4, 3), X, torch.zeros(7, 3), "regression"),
    "ignored at first": (nn.Linear(4, 3), X, torch.tensor([-100] * 6 + [1]), "classification"),
    "kink": (nn.Linear(4, 3), X, torch.zeros(7, 3), lambda f: distributions.Laplace(f, 1.0)),
    "counts": (nn.Linear(4, 3), X, torch.ones(7, 3), lambda f: distributions.Poisson(f.exp())),
    "logits": (net(), X, Y, "classification"),
    "class frequencies": (HEAD, X, Y, "classification"),
    "sigmoid": (ended_by(nn.Sigmoid()), X, Y, "classification"),
    "regression": (ended_by(nn.Softmax(-1)), X, X[:, :3], "regression"),
    "their own": (ended_by(nn.Softmax(-1)), X, Y, lambda p: distributions.Categorical(probs=p)),
    "inside": (nn.Sequential(net(), nn.Softmax(-1), nn.Linear(3, 3)), X, Y, "classification"),
    "sigmoid inside": (
        nn.Sequential(net(), nn.Sigmoid(), nn.Linear(3, 3)),
        X,
        (X[:, :3] > 0).float(),
        co.likelihoods.Bernoulli(),
    ),
}


@pytest.mark.parametrize("what", QUIET)
def test_curvature_and_logits_do_not_warn(what: str) -> None:
    model, x, y, likelihood = QUIET[what]
    with warnings.catch_warnings():
        warnings.simplefilter("error", co.errors.NoCurvatureWarning)
        warnings.simplefilter("error", co.errors.NotLogitsWarning)
        co.linearize(model, (x, y), likelihood)


def test_a_sigmoid_at_the_end_warns_where_one_more_is_taken() -> None:
    events = (X[:, :3] > 0).float()
    for likelihood in (co.likelihoods.Bernoulli(), nn.BCEWithLogitsLoss()):
        with pytest.warns(co.errors.NotLogitsWarning, match="ends with a sigmoid.*last sigmoid"):
            co.linearize(nn.Sequential(net(), nn.Sequential(nn.Sigmoid())), (X, events), likelihood)


def test_a_sampler_warns_of_probabilities_too() -> None:
    log_posterior = co.sampling.log_posterior(ended_by(nn.Softmax(-1)), "classification", data_size=7)
    with pytest.warns(co.errors.NotLogitsWarning, match="probabilities"):
        log_posterior(log_posterior.params, (X, Y))


@pytest.mark.parametrize("offset", [3.0, 100.0])
def test_a_constant_in_all_logits_warns_where_probit_takes_it_for_a_difference(offset: float) -> None:
    shifted = net()
    with torch.no_grad():
        shifted[-1].bias.add_(offset)  # type: ignore[index]
    post = co.laplace(co.linearize(shifted, (X, Y), "classification"), co.GGN, 1.0, check_mode=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", co.errors.NotLogitsWarning)
        post.probabilities(X, link="mc", generator=torch.Generator().manual_seed(0))
        assert not caught
        post.probabilities(X)
    assert [("a constant in common" in str(each.message)) for each in caught] == [True] * (offset == 100)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, "detach"])
def test_outputs_without_a_gradient_are_refused(mode: Any) -> None:
    inner = net()

    class Closed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            if mode == "detach":
                return self.inner(x).detach()
            with mode():
                return self.inner(x)

    with pytest.raises(ValueError, match=r"no gradient in the 4 selected parameters.*detach"):
        co.linearize(Closed(), (X, Y), "classification")


def test_inputs_with_their_targets_are_called_by_name() -> None:
    post = co.laplace(co.linearize(net(), (X, Y), "classification"), co.GGN, 1.0, check_mode=False)
    with pytest.raises(TypeError, match="predictions take the inputs alone"):
        post.probabilities((X, Y))
