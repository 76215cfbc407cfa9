"""Small networks trained to a mode of their posterior."""

import copy
import functools

import torch
from torch import nn

import curvops as co
from tests.randomness import perceptron, seeded

DOUBLE = torch.float64


class Counted(co.linalg.Operator):
    """A user's own curvature of this matrix, which counts its products."""

    psd = True

    def __init__(self, matrix):
        super().__init__(matrix)
        self.products = 0

    def _size(self):
        return self._args[0].shape

    def _product(self, block):
        self.products += block.shape[-1]
        return self._args[0] @ block


class Heads(nn.Module):
    """Outputs by name, of these sizes, linear in the inputs."""

    def __init__(self, inputs, **sizes):
        super().__init__()
        self.heads = nn.ModuleDict({name: nn.Linear(inputs, size, bias=False) for name, size in sizes.items()})

    def forward(self, x):
        return {name: head(x) for name, head in self.heads.items()}


def to_the_mode(model, x, y, prior, steps=300):
    """Train a network to a mode of its posterior: of classes, or of numbers with noise 1."""
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=steps, line_search_fn="strong_wolfe", tolerance_grad=1e-9
    )

    def loss():
        optimizer.zero_grad()
        f = model(x)
        data = nn.functional.cross_entropy(f, y, reduction="sum") if y.ndim == 1 else 0.5 * (f - y).square().sum()
        value = data + 0.5 * prior * sum(p.square().sum() for p in model.parameters())
        value.backward()
        return value

    optimizer.step(loss)
    return model


@functools.cache
def trained(likelihood, n, outputs, prior, steps, width):
    """The network at its mode, the data, and the state of torch's generator afterwards."""
    model = perceptron(4, width, outputs)
    x = torch.randn(n, 4, dtype=DOUBLE)
    y = (x[:, :outputs].argmax(1)) if likelihood == "classification" else x[:, :outputs].sin()
    return to_the_mode(model, x, y, prior, steps), x, y, torch.get_rng_state()


def problem(likelihood="classification", n=30, outputs=3, prior=1.0, steps=300, width=6):
    """A tanh network trained, once, to a mode of its posterior by L-BFGS; D = 51 at three outputs."""
    model, x, y, state = trained(likelihood, n, outputs, prior, steps, width)
    torch.set_rng_state(state)
    return copy.deepcopy(model), x.clone(), y.clone()


def untrained(likelihood, outputs, targets, **options):
    """A posterior away from a mode, which few answers need; `mc` is the Fisher that every distribution has."""
    model = perceptron(4, 6, outputs)
    x = torch.randn(30, 4, dtype=DOUBLE)
    lin = co.linearize(model, (x, targets(x)), likelihood)
    G = co.GGN(lin, mc_samples=2, generator=seeded()) if options.pop("mc", False) else co.GGN(lin)
    return co.laplace(lin, G, prior_precision=2.0, check_mode=False, **options)


def linear_problem():
    """A linear model at the mode of twelve points, with forty held-out points of the same noise."""
    generator = torch.Generator().manual_seed(0)
    x, new = (torch.randn(n, 5, generator=generator, dtype=DOUBLE) for n in (12, 40))
    truth = torch.randn(5, 1, generator=generator, dtype=DOUBLE)
    y, targets = (z @ truth + 0.5 * torch.randn(len(z), 1, generator=generator, dtype=DOUBLE) for z in (x, new))
    model = nn.Linear(5, 1, bias=False).double()
    model.weight.data.copy_(torch.linalg.solve(x.mT @ x + 0.25 * torch.eye(5), x.mT @ y).mT)
    return (
        co.laplace(co.linearize(model, (x, y), co.likelihoods.Gaussian(0.1)), co.GGN, 1.0, check_mode=False),
        new,
        targets,
    )
