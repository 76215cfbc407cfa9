"""Custom autograd functions for the networks of tests/zoo.py: what their authors write into backward passes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class NumpyTanh(torch.autograd.Function):
    """tanh whose backward pass leaves autograd: right at first order, without a second derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = np.tanh(x.detach().numpy())
        ctx.slope = 1 - y**2
        return torch.from_numpy(y)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.from_numpy(gradient.detach().numpy() * ctx.slope)


class NoGradTanh(torch.autograd.Function):
    """The same under no_grad."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.tanh()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        with torch.no_grad():
            return gradient * (1 - y**2)


class PartlyDetached(NoGradTanh):
    """The same with one part of the gradient detached: differentiating it gives half of it."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return 0.5 * gradient * (1 - y**2) + 0.5 * gradient.detach() * (1 - y**2)


class Overwriting(NoGradTanh):
    """The same, writing into the gradient that it is given."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return gradient.detach().mul_(1 - y**2)


class WrongJvp(torch.autograd.Function):
    """The square with twice its forward-mode derivative; its backward pass is right at every order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)
        return x**2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2 * ctx.saved_tensors[0]

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent * 4 * ctx.saved_tensors[0]


Step = Callable[[Tensor], Tensor]


def with_derivatives(
    name: str, value: Step, gradient: Step, tangent: Step | None = None
) -> type[torch.autograd.Function]:
    """A function of this name with these derivatives, whatever it computes; forward mode needs the tangent."""

    class Given(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return value(x)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return gradient(g)

    if tangent is not None:
        Given.jvp = staticmethod(lambda ctx, t: tangent(t))
    return type(name, (Given,), {})


Rounded = with_derivatives("Rounded", torch.round, torch.clone)
"""Rounding whose gradient passes straight through: J is what training used, not the derivative."""
Clipped = with_derivatives("Clipped", torch.clone, lambda g: g.clamp(-10, 10))
"""The identity with a clipped gradient, which is no linear map."""
CentredGradient = with_derivatives("CentredGradient", torch.clone, lambda g: g - g.mean(0))
"""The identity with a gradient from which the mean over the points is taken."""


class NothingForZeros(torch.autograd.Function):
    """tanh, whose gradient is None where it would be zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(y := x.tanh())
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor | None:
        (y,) = ctx.saved_tensors
        return gradient * (1 - y.square()) if bool(gradient.any()) else None


class ScaledNumpy(nn.Module):
    """Parameters without a layer rule, before and after a function whose backward pass leaves autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(4, 5), nn.Linear(5, 3)
        self.scale, self.shift = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(NumpyTanh.apply(self.scale * self.fc(x))) + self.shift


def applied(function: Any, last: bool = False) -> Callable[[Any, Tensor], Tensor]:
    """A wiring with a custom function between its layers, or besides on its outputs."""

    def wiring(m: Any, x: Tensor) -> Tensor:
        outputs = m.head(function.apply(m.fc2(torch.tanh(m.fc1(x)))))
        return function.apply(outputs) if last else outputs

    return wiring
