"""Networks with a readout that is registered before its body, and one that chooses by the numbers."""

from torch import nn


class Wrapped(nn.Module):
    """A body, a readout, and whatever comes after it."""

    def __init__(self, head, after=lambda f, h: f):
        super().__init__()
        self.head, self.body, self.after = head, nn.Linear(3, 4), after  # the readout is registered first
        self.double()

    def forward(self, x):
        h = self.body(x).tanh()
        return self.after(self.head(h), h)


class Halting(nn.Module):
    """Three inputs, two outputs, and a choice that `torch.vmap` refuses."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, x):
        h = self.inner(x)
        return h if bool(h.sum() > 1e9) else h + 1
