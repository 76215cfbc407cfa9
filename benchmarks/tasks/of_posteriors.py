"""Laplace posterior tasks, tuning and predictions, compared with laplace-torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import curvops as co
from benchmarks.networks import cnn, linear_layers, resnet
from benchmarks.tasks.task import Task

LIKE = 0.02
"""Nats a point by which a held-out loss may be above the other package's and count as equal."""
HALF_A_NAT = 0.5


Program = Callable[[Any], Tensor]


@dataclass
class Trained:
    """A trained network, its data, and others to predict.

    The other package forms rows of the Jacobian. It gets the data in batches of 64 points and predicts at as many, or
    at single ones where its backend multiplies each row with all points.
    """

    model: nn.Module
    inputs: Tensor
    targets: Tensor
    test: Tensor
    labels: Tensor

    @property
    def loader(self) -> Any:
        """The data in batches, in order."""
        return DataLoader(TensorDataset(self.inputs, self.targets), batch_size=64)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The inputs to predict at, in parts."""
        return self.test.split(64)


def toy() -> Trained:
    """A sine with a gap; a network of 91 weights."""
    torch.manual_seed(0)
    x = torch.cat([torch.linspace(-4, -1, 75), torch.linspace(1.5, 4, 75)]).unsqueeze(1)
    y = x.sin() + 0.2 * torch.randn(150, 1)
    model, grid = linear_layers(1, 30, 1), torch.linspace(-4, 4, 200).unsqueeze(1)
    squares = nn.MSELoss(reduction="sum")
    _fit(model, [(x, y)], 1500, lambda f, y: squares(f, y) / 0.08, 0.5)
    return Trained(model, x, y, grid, grid.sin())


def images(network: nn.Module, size: int, channels: int, points: int, test: int, epochs: int) -> Trained:
    """Ten blurred patterns under noise, and a network trained on them by Adam."""
    torch.manual_seed(0)
    patterns = nn.functional.interpolate(torch.randn(10, channels, 4, 4), size=size, mode="bilinear")
    labels = torch.randint(10, (points + test,))
    x = patterns[labels] + 3.0 * torch.randn(points + test, channels, size, size)
    data = DataLoader(TensorDataset(x[:points], labels[:points]), 64, shuffle=True)
    _fit(network, data, epochs, partial(nn.functional.cross_entropy, reduction="sum"), 1.0, points)
    return Trained(network, x[:points], labels[:points], x[points:], labels[points:])


def small_images() -> Trained:
    """The CNN of the other benchmarks on 1,024 images, and 1,000 others."""
    torch.manual_seed(0)
    return images(cnn(10), 28, 1, 1024, 1000, epochs=6)


def large_images() -> Trained:
    """The ResNet-18 on 512 images, and 64 others."""
    torch.manual_seed(0)
    network = resnet(10, stride=2)
    for module in network.modules():
        if isinstance(module, nn.GroupNorm):  # whose weights the other package's KFAC refuses
            module.requires_grad_(False)
    return images(network, 32, 3, 512, 64, epochs=4)


def _fit(model: nn.Module, data: Iterable[Any], epochs: int, loss: Any, precision: float, points: int = 1) -> None:
    optimizer = torch.optim.Adam(model.parameters(), 1e-2 if points == 1 else 1e-3)
    for _ in range(epochs):
        for x, y in data:
            penalty = precision / 2 * sum(p.square().sum() for p in model.parameters())
            optimizer.zero_grad()
            (loss(model(x), y) + penalty * len(x) / max(points, len(x))).backward()
            optimizer.step()
    model.eval()


# Toy regression: prior precision and noise by the evidence, then the variances of the function.


def toy_ours(problem: Trained) -> tuple[Tensor, Tensor, float]:
    lin = co.linearize(problem.model, (problem.inputs, problem.targets), co.likelihoods.Gaussian(1.0))
    post = co.evidence.maximize(co.laplace(lin, co.GGN, 1.0, check_mode=False), over=("scalar", "noise"), mode="map")
    predicted = post.predict(problem.test)
    return predicted.mean, predicted.variance, float(post.log_evidence(mode="map").value)


def toy_theirs(problem: Trained) -> tuple[Tensor, Tensor, float]:
    from laplace import Laplace

    la: Any = Laplace(problem.model, "regression", subset_of_weights="all", hessian_structure="full")
    la.fit(problem.loader)
    log_prior, log_sigma = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    optimizer = torch.optim.Adam([log_prior, log_sigma], lr=1e-1)
    for _ in range(100):
        optimizer.zero_grad()
        loss = -la.log_marginal_likelihood(log_prior.exp(), log_sigma.exp())
        loss.backward()
        optimizer.step()
    mean, variance = la(problem.test)
    return mean, variance.squeeze(-1), -float(loss)


def evidence_of(problem: Trained, answer: Any) -> dict[str, float]:
    """The evidence that was reached."""
    return {"log evidence": answer[2]}


# A classifier's posterior: the prior precision by the evidence, then probabilities of new images.


def last_layer_ours(problem: Trained) -> Tensor:
    data = problem.inputs, problem.targets
    lin = co.linearize(problem.model, data, "classification", parameters="last_layer")
    post = co.evidence.maximize(co.laplace(lin, co.KFAC, 1.0, check_mode=False), mode="map")
    return post.probabilities(problem.test)


def last_layer_theirs(problem: Trained) -> Tensor:
    from laplace import Laplace

    la: Any = Laplace(problem.model, "classification", subset_of_weights="last_layer", hessian_structure="kron")
    la.fit(problem.loader)
    la.optimize_prior_precision(method="marglik", prior_structure="scalar")
    return la(problem.test, link_approx="probit")  # type: ignore[no-any-return]


def kfac_ours(problem: Trained) -> Tensor:
    lin = co.linearize(problem.model, (problem.inputs, problem.targets), "classification")
    post = co.evidence.maximize(co.laplace(lin, co.KFAC, 1.0, check_mode=False), mode="map")
    return post.probabilities(problem.test)


def kfac_theirs(problem: Trained) -> Tensor:
    from laplace import Laplace

    # The factors of `BackPackGGN` have another scale for the CNN: their log det(H + 1) is 9,536 for 2,314.
    la: Any = Laplace(problem.model, "classification", subset_of_weights="all", hessian_structure="kron")
    la.fit(problem.loader)
    la.optimize_prior_precision(method="marglik", prior_structure="scalar")
    return torch.cat([la(x, link_approx="probit") for x in problem.test.split(1)])


def untuned_ours(problem: Trained) -> Tensor:
    lin = co.linearize(problem.model, (problem.inputs, problem.targets), "classification")
    return co.laplace(lin, co.KFAC, 1.0, check_mode=False).probabilities(problem.test)


def untuned_theirs(problem: Trained) -> Tensor:
    from laplace import Laplace

    la: Any = Laplace(problem.model, "classification", subset_of_weights="all", hessian_structure="kron")
    la.fit(problem.loader)
    return torch.cat([la(x, link_approx="probit") for x in problem.test.split(1)])


def diagonal_ours(problem: Trained) -> Tensor:
    lin = co.linearize(problem.model, (problem.inputs, problem.targets), "classification")
    post = co.evidence.maximize(co.laplace(lin, co.DiagonalGGN, 1.0, check_mode=False), mode="map")
    return post.probabilities(problem.test)


def diagonal_theirs(problem: Trained) -> Tensor:
    from laplace import Laplace
    from laplace.curvature import BackPackGGN

    la: Any = Laplace(
        problem.model, "classification", subset_of_weights="all", hessian_structure="diag", backend=BackPackGGN
    )
    la.fit(problem.loader)
    la.optimize_prior_precision(method="marglik", prior_structure="scalar")
    return torch.cat([la(x, link_approx="probit") for x in problem.parts])


def subnetwork_ours(problem: Trained) -> Tensor:
    lin = co.linearize(problem.model, (problem.inputs, problem.targets), "classification")
    few = co.linearize(
        problem.model, (problem.inputs, problem.targets), "classification", parameters=co.select(lin, 1000, "magnitude")
    )
    return co.laplace(few, co.GGN, 1.0, check_mode=False).probabilities(problem.test)


def subnetwork_theirs(problem: Trained) -> Tensor:
    from laplace import Laplace
    from laplace.curvature import BackPackGGN
    from laplace.utils import LargestMagnitudeSubnetMask

    indices = LargestMagnitudeSubnetMask(problem.model, n_params_subnet=1000).select()
    of = {"subset_of_weights": "subnetwork", "hessian_structure": "full", "subnetwork_indices": indices}
    la: Any = Laplace(problem.model, "classification", **of, backend=BackPackGGN)
    la.fit(problem.loader)
    return torch.cat([la(x, link_approx="probit") for x in problem.parts])


def loss_of(problem: Any, probabilities: Tensor) -> dict[str, float]:
    """The loss of held-out images."""
    chosen = probabilities.detach().gather(1, problem.labels.unsqueeze(1))
    return {"nats a point": float(-chosen.clamp_min(1e-12).log().mean())}


def no_worse(ours: dict[str, float], theirs: dict[str, float]) -> bool:
    """Whether our loss is theirs, or smaller."""
    return ours["nats a point"] <= theirs["nats a point"] + LIKE


# An adapter of a transformer of GPT-2's size, whose base is frozen.

WIDTH, DEPTH, HEADS, RANK, LENGTH = 768, 12, 12, 4, 32


class Adapted(nn.Module):
    """A frozen linear layer beside a trained one of low rank."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.base = nn.Linear(inner, outer).requires_grad_(False)
        self.first, self.second = nn.Linear(inner, RANK, bias=False), nn.Linear(RANK, outer, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.second(self.first(x))


class Layer(nn.Module):
    """Attention with an adapter in its projection, then two frozen linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.project, self.out = Adapted(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.mT / (WIDTH // HEADS) ** 0.5
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm2(x))))


class Classifier(nn.Module):
    """GPT-2 small's shape, with an adapter in each layer and a trained head for two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50257, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers, self.norm = nn.Sequential(*[Layer() for _ in range(DEPTH)]), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 2)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("first" in name or "second" in name or "head" in name)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x) + self.positions.weight[: x.shape[1]]
        return self.head(self.norm(self.layers(hidden)).mean(1))  # type: ignore[no-any-return]


def sentences() -> Trained:
    """32 sequences to adapt to, of which a few tokens say the class, and 32 others."""
    torch.manual_seed(0)
    model, x = Classifier(), torch.randint(50257, (64, LENGTH))
    labels = torch.randint(2, (64,))
    x[:, :8] = torch.randint(20, (64, 8)) + 20 * labels.unsqueeze(1)
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(weights, 2e-3)
    for i in range(12):
        some = slice(8 * (i % 4), 8 * (i % 4) + 8)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[some]), labels[some]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return Trained(model.eval(), x[:32], labels[:32], x[32:], labels[32:])


def few(problem: Trained) -> Trained:
    """The problem with four predictions."""
    return replace(problem, test=problem.test[:4], labels=problem.labels[:4])


def of_classifier(name: str, prepare: Callable[[], Trained], ours: Program, theirs: Program) -> Task:
    """Return a task beside laplace-torch that is held to the loss of held-out points."""
    return Task(name, prepare, ours, theirs, "laplace-torch", ("laplace",), loss_of, no_worse, few)


TASKS = {
    "toy": Task(
        "toy regression, 91 weights: full GGN, prior and noise tuned",
        toy, toy_ours, toy_theirs, "laplace-torch", ("laplace",), evidence_of,
        lambda ours, theirs: ours["log evidence"] >= theirs["log evidence"] - HALF_A_NAT,
    ),
    "last-layer": of_classifier(
        "last layer of a CNN: KFAC, prior tuned, 1,000 predictions", small_images, last_layer_ours, last_layer_theirs
    ),
    "kfac": of_classifier(
        "all 422,000 weights of it: KFAC, prior tuned, 1,000 predictions", small_images, kfac_ours, kfac_theirs
    ),
    "diagonal": of_classifier(
        "the same with a diagonal", small_images, diagonal_ours, diagonal_theirs
    ),
    "subnetwork": of_classifier(
        "its 1,000 largest weights: full GGN, 1,000 predictions", small_images, subnetwork_ours, subnetwork_theirs
    ),
    "lora": of_classifier(
        "LoRA of a GPT-2 small: KFAC, 32 predictions", sentences, untuned_ours, untuned_theirs
    ),
    "resnet": of_classifier(
        "ResNet-18, 512 images: KFAC, 64 predictions", large_images, untuned_ours, untuned_theirs
    ),
}  # fmt: skip
