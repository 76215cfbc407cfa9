"""The small networks of tests/zoo.py, each with one habit of real code that an engine may trip over."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Applied(nn.Module):
    """A function as a layer of `nn.Sequential`, or another module inside one that only passes its arguments on."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.function(*args, **kwargs)


class Shaped(nn.Linear):
    """A linear map of two inputs to outputs of any shape."""

    def __init__(self, *shape: int) -> None:
        super().__init__(2, math.prod(shape))
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).reshape(len(x), *self.shape)


class Residual(nn.Module):
    """Two convolutions and norms around an in-place skip, a strided shortcut, average pooling, a linear head."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.conv1, self.norm1 = nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False), norm(6)
        self.conv2, self.norm2 = nn.Conv2d(6, 6, 3, padding=1, bias=False), norm(6)
        self.shortcut = nn.Conv2d(4, 6, 1, stride=2)
        self.relu, self.head = nn.ReLU(inplace=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.stem(x))
        h = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        h += self.shortcut(x)
        return self.head(self.relu(h).mean((2, 3)))


def cnn_1d() -> nn.Module:
    """Convolutions over time: padded on one side, around the ends, and transposed."""
    return nn.Sequential(
        nn.Conv1d(2, 4, 4, padding="same", groups=2), nn.ReLU(), nn.Conv1d(4, 3, 3, padding=1, padding_mode="circular"),
        nn.Tanh(), nn.ConvTranspose1d(3, 2, 3, stride=2, padding=1), nn.Flatten(), nn.Linear(26, 3),
    )  # fmt: skip


def cnn_3d() -> nn.Module:
    """Convolutions over volumes."""
    return nn.Sequential(
        nn.Conv3d(2, 4, (1, 2, 3), padding=(0, 1, 1), groups=2), nn.Tanh(), nn.ConvTranspose3d(4, 2, 2, bias=False),
        nn.Flatten(1, -2), nn.Linear(4, 1), nn.Flatten(), nn.Linear(30, 3, bias=False),
    )  # fmt: skip


def autoencoder() -> nn.Module:
    """Down by a convolution and up by a transposed one, with other paddings than zeros."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1, padding_mode="reflect"), nn.Tanh(),
        nn.ConvTranspose2d(4, 4, 3, stride=2, padding=1, output_padding=1, groups=2), nn.ReLU(),
        nn.Conv2d(4, 3, 2, padding="same", padding_mode="replicate"), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip


def instance_norms() -> nn.Module:
    """With statistics of each image, and with running ones."""
    running = nn.InstanceNorm2d(3, affine=True, track_running_stats=True)
    assert running.running_mean is not None
    running.running_mean.normal_()
    layers = [nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.ReLU(), nn.Conv2d(4, 3, 2), running]
    return nn.Sequential(*layers, nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def rms_norms() -> nn.Module:
    """Over one dimension and over two."""
    body = nn.Sequential(nn.Linear(4, 6), nn.RMSNorm(6), nn.Tanh(), nn.Linear(6, 5), nn.RMSNorm((3, 5), eps=0.1))
    return Pooled(body, 5)


class GivenOutputSize(nn.Module):
    """A transposed convolution that is told its output's size call by call."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up, self.head = nn.Conv2d(2, 3, 2, stride=2), nn.ConvTranspose2d(3, 3, 2, 2), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.up(self.down(x), output_size=(7, 7)).amax((2, 3)))


class Pooled(nn.Module):
    """A body on (n, t, d), the mean over t, a linear head. `first` says that the body wants (t, n, d)."""

    def __init__(self, body: nn.Module, width: int, first: bool = False) -> None:
        super().__init__()
        self.body, self.head, self.first = body, nn.Linear(width, 3), first

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x.transpose(0, 1)).transpose(0, 1) if self.first else self.body(x)
        return self.head(h.mean(1))


class Recurrent(nn.Module):
    """A recurrent layer, its last state, a linear head."""

    def __init__(self, layer: Any, inputs: int = 4, width: int = 3, outputs: int = 2, batch_first: bool = True) -> None:
        super().__init__()
        self.rnn, self.head = layer(inputs, width, batch_first=batch_first), nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


class FusedAttention(nn.Module):
    """Two heads by the fused kernel, causal."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)).mean(1)


class Attention(nn.Module):
    """`nn.MultiheadAttention`: the hook of its output projection never fires, and it returns a tuple.

    With `cross`, query, key and value are not one tensor.
    """

    def __init__(self, cross: bool = False) -> None:
        super().__init__()
        self.attention, self.head, self.cross = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3), cross

    def forward(self, x: Tensor) -> Tensor:
        query = x[:, :2] if self.cross else x
        return self.head(self.attention(query, x, x, need_weights=self.cross)[0].mean(1))


class AskedAttention(nn.Module):
    """Attention that is asked for something else besides, and the sum over positions."""

    def __init__(self, call: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, **{"batch_first": True} | options)
        self.call = call or {}

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.attention.batch_first else x.transpose(0, 1)
        call = {name: value(x) for name, value in self.call.items()}
        attended = self.attention(**{"query": x, "key": x, "value": x} | call)[0]
        return attended.sum(1 if self.attention.batch_first else 0)


class OneQuery(nn.Module):
    """Attention to a query that all points share: its projections have no row for each point."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.query = nn.MultiheadAttention(4, 2), nn.Parameter(torch.randn(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        seed = self.attention(self.query, self.query, self.query)[0].mean(0)
        return x @ seed.unsqueeze(1)


class Tokens(nn.Module):
    """Token embeddings, the mean, a head; the output weight may be the embedding's."""

    def __init__(self, embedding: nn.Module, width: int, tied: bool = False) -> None:
        super().__init__()
        self.embedding = embedding
        self.mix, self.head = nn.Linear(width, width), nn.Linear(width, 7 if tied else 3)
        if tied:
            assert isinstance(embedding, nn.Embedding)
            self.head.weight = embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        return self.head(torch.tanh(self.mix(h if h.ndim == 2 else h.mean(1))))


class Several(nn.Module):
    """A body and a head for each output; `returned` says how the outputs are returned."""

    def __init__(self, widths: dict[Any, int], returned: Callable[[dict[Any, Tensor]], Any] = dict) -> None:
        super().__init__()
        self.body = nn.Linear(4, 3)
        self.heads = nn.ModuleDict({f"head_{name}": nn.Linear(3, width) for name, width in widths.items()})
        self.names, self.returned = list(widths), returned

    def forward(self, x: Tensor) -> Any:
        h = self.body(x).tanh()
        return self.returned({name: self.heads[f"head_{name}"](h) for name in self.names} | {"features": h})


class WeightedBag(nn.Module):
    """Bags with a weight per token, 1, 2, 3, ... by place."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(7, 4, mode="sum"), nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        weights = torch.ones_like(tokens, dtype=self.head.weight.dtype).cumsum(1)
        return self.head(self.bag(tokens, per_sample_weights=weights))


class TwoBilinear(nn.Module):
    """Bilinear layers, one with positions and keyword inputs out of order, one of the same tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.square = nn.Bilinear(4, 4, 3), nn.Bilinear(3, 3, 3, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.mix(input2=y, input1=x).mean(1))
        return self.square(h, h)


class FunctionalEmbedding(nn.Module):
    """A parameter looked up with a padding row, or in bags, by a functional call: no module tells of it."""

    def __init__(self, bag: bool = False) -> None:
        super().__init__()
        self.table, self.head, self.bag = nn.Parameter(torch.randn(7, 4)), nn.Linear(4, 3), bag

    def forward(self, tokens: Tensor) -> Tensor:
        if self.bag:
            return self.head(F.embedding_bag(tokens, self.table))
        return self.head(F.embedding(tokens, self.table, padding_idx=0).mean(1))


class Wired(nn.Module):
    """Two linear layers and a head, put together by a function of (module, x)."""

    def __init__(self, wiring: Any, width: int = 4) -> None:
        super().__init__()
        self.fc1, self.fc2, self.head = nn.Linear(4, width), nn.Linear(width, 4), nn.Linear(4, 3)
        self.wiring = wiring

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        return self.wiring(self, *args, **kwargs)


class TwoOutputs(nn.Module):
    """A submodule that returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.left(x)), self.right(x)


class ScaledLinear(nn.Linear):
    """A subclass with another forward."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input) + self.bias**2


class Slopes(nn.PReLU):
    """A subclass, for which there is no rule."""


class OwnParameters(nn.Module):
    """Parameters that no layer owns, a scalar among them, and a layer whose weight the parent uses too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.tensor(0.7))
        self.fc, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.scale * F.linear(x, self.weight))
        return self.head(self.fc(h) + F.linear(x, self.fc.weight))


class HalfBase(nn.Module):
    """A frozen base in 16 bits under an adapter and a head in the parameters' own precision."""

    def __init__(self, half: torch.dtype) -> None:
        super().__init__()
        self.base, self.half = nn.Linear(4, 4).requires_grad_(False), half
        self.down, self.up, self.head = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        frozen = F.linear(x.to(self.half), self.base.weight.to(self.half), self.base.bias.to(self.half))
        return self.head(torch.tanh(frozen.to(x.dtype) + self.up(self.down(x))))


class CountingCalls(nn.Module):
    """A buffer that every forward pass changes, and a buffer that the outputs depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("shift", torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.fc(x - self.shift)


class Checkpointed(nn.Module):
    """A block whose activations are computed again in the backward pass."""

    def __init__(self, reentrant: bool, first: bool = False) -> None:
        super().__init__()
        self.stem, self.head, self.reentrant = nn.Linear(4, 4), nn.Linear(4, 3), reentrant
        self.block, self.first = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4)), first

    def forward(self, x: Tensor) -> Tensor:
        h = x if self.first else torch.tanh(self.stem(x))
        return self.head(torch.tanh(checkpoint(self.block, h, use_reentrant=self.reentrant)))


class OneGradient(nn.Module):
    """Two weights that have one and the same gradient, and one whose gradient is a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.change, self.shift = (nn.Parameter(0.5 * torch.randn(4, 4)) for _ in range(3))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(F.linear(x, self.weight + self.change) + self.shift.sum()))


class Pairs(nn.Module):
    """A weight of pairs that are read as complex numbers, behind an odd number of others; for series (n, 2, 7)."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.spectrum = nn.Linear(2, 3), nn.Parameter(0.3 * torch.randn(3, 3, 4, 2))
        self.head = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.lift(x.mT)
        waves = torch.fft.rfft(h, dim=1)
        mixed = torch.einsum("nki,iok->nko", waves, torch.view_as_complex(self.spectrum))
        return self.head(torch.tanh(torch.fft.irfft(mixed, n=h.shape[1], dim=1) + h)).squeeze(-1)


class SparseGraph(nn.Module):
    """A graph over the three positions of a sequence, kept as a sparse buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(4, 5), nn.Linear(5, 3)
        self.register_buffer("graph", torch.tensor([[1.0, 0, 2], [0, 3, 0], [0, 1, 1]]).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        nodes = torch.tanh(self.fc(x)).transpose(0, 1)
        sums = torch.sparse.mm(self.graph, nodes.flatten(1)).view_as(nodes)
        return self.head(torch.tanh(sums).sum(0))


class OldSquare(torch.autograd.Function):
    """x², as functions were written before forward mode and vmap."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def slopes(m: Any, x: Tensor) -> Tensor:
    """The slopes of an energy in each point's inputs, by `torch.func`."""
    energy = torch.func.grad(lambda point: m.head(torch.tanh(m.fc1(point))).square().sum())
    return m.fc2(torch.func.vmap(energy)(x))


def forces(m: Any, x: Tensor) -> Tensor:
    """An energy of each point and its slopes, by autograd."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        energy = m.head(torch.tanh(m.fc1(x))).square().sum(1, keepdim=True)
        (gradient,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
    return torch.cat([energy, m.fc2(gradient)], 1)


def setitem(m: Any, x: Tensor) -> Tensor:
    """Columns written one by one."""
    h = torch.zeros_like(x)
    h[:, :2] = m.fc1(x)[:, :2]
    h[:, 2:] = m.fc2(x)[:, 2:].sin()
    return m.head(h)


def inplace_add(m: Any, x: Tensor) -> Tensor:
    """A sum in place."""
    h = m.fc1(x)
    h += m.fc2(x)
    return m.head(h.sin())


def tuple_output(m: Any, x: Tensor) -> Tensor:
    """A submodule's tuple, multiplied."""
    left, right = m.fc1(x)
    return m.head(m.fc2(left * right))


def old_function(m: Any, x: Tensor) -> Tensor:
    """Through an old-style function."""
    return m.head(OldSquare.apply(m.fc2(torch.tanh(m.fc1(x)))))


def without_gradient(m: Any, x: Tensor) -> Tensor:
    """A factor without gradients."""
    with torch.no_grad():
        h = m.fc1(x)
    return m.head(m.fc2(x) * h)
