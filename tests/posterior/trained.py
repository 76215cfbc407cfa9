"""Small networks trained to a mode of their posterior."""

import torch
from torch import nn


def problem(likelihood="classification", n=30, outputs=3, prior=1.0, steps=300):
    """A tanh network trained to a mode of its posterior by L-BFGS; D = 51 at three outputs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs)).double()
    x = torch.randn(n, 4, dtype=torch.float64)
    y = (x[:, :outputs].argmax(1)) if likelihood == "classification" else x[:, :outputs].sin()
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
    return model, x, y
