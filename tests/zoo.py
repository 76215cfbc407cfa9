"""One table of small networks that drives the tests of engines, operators and posteriors.

`ZOO[name].build(dtype)` gives (model, inputs): seeded, in eval mode, a handful of points. `autodiff` names (as globs)
the parameters that no layer rule can serve; everything else is the layerwise engine's. `pushes` says how J v
is made where neither layers nor caches serve it.
"""

import fnmatch
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests import zoo_functions as functions
from tests import zoo_modules as parts

N = 5


@dataclass(frozen=True, eq=False)
class Network:
    """A row of the table."""

    name: str
    make: Callable[[], Any]
    data: Callable[[], Any]
    autodiff: tuple[str, ...] = ()
    pushes: str = "forward mode"

    def build(self, dtype: torch.dtype = torch.float64) -> tuple[Any, Any]:
        """(model, inputs): an `nn.Module` in eval mode, or a pair (function, params)."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            model, inputs = self.make(), _to(self.data(), dtype)
        if isinstance(model, nn.Module):
            return model.to(dtype).eval(), inputs
        return (model[0], _to(model[1], dtype)), inputs

    def served_by_autodiff(self, names: list[str]) -> set[str]:
        """The names among `names` that have no layer rule."""
        return {name for name in names if any(fnmatch.fnmatchcase(name, glob) for glob in self.autodiff)}


def parameters_of(model: Any) -> dict[str, Tensor]:
    """The trainable tensors by name."""
    if isinstance(model, nn.Module):
        return {name: p for name, p in model.named_parameters() if p.requires_grad}
    return dict(model[1])


def call(model: Any, inputs: Any) -> Tensor:
    """The model as its owner calls it."""
    if isinstance(model, tuple):
        return model[0](model[1], inputs)
    return (
        model(**inputs) if isinstance(inputs, dict) else model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    )


def dense_jacobian(model: Any, inputs: Any) -> Tensor:
    """The Jacobian (N·C, D) by one backward pass a row, without any code of the library; complex numbers are pairs."""
    if isinstance(model, tuple):
        model = model[0], {name: tensor.detach().requires_grad_() for name, tensor in model[1].items()}
    leaves = list(parameters_of(model).values())
    rows = []
    for output in call(model, inputs).flatten():
        gradients = torch.autograd.grad(output, leaves, retain_graph=True, allow_unused=True)
        found = [torch.zeros_like(p) if g is None else g for g, p in zip(gradients, leaves)]
        rows.append(torch.cat([(torch.view_as_real(g) if g.is_complex() else g).flatten() for g in found]))
    return torch.stack(rows).detach()


@functools.cache
def reference(name: str, dtype: torch.dtype = torch.float64) -> Tensor:
    """`dense_jacobian` of a network of the table. Do not write into it."""
    return dense_jacobian(*ZOO[name].build(dtype))


def batches(inputs: Any, sizes: tuple[int, ...] = (3, 2)) -> list[tuple[Any, None]]:
    """The inputs in ragged batches, with no labels."""
    bounds = [0, *torch.tensor(sizes).cumsum(0).tolist()]
    return [(points(inputs, slice(low, high)), None) for low, high in itertools.pairwise(bounds)]


def points(inputs: Any, part: slice) -> Any:
    """Some of the points."""
    return _each(inputs, lambda tensor: tensor[part])


def _each(inputs: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(inputs, dict):
        return {name: change(tensor) for name, tensor in inputs.items()}
    return tuple(change(tensor) for tensor in inputs) if isinstance(inputs, tuple) else change(inputs)


def _to(inputs: Any, dtype: torch.dtype) -> Any:
    return _each(inputs, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def _vectors() -> Tensor:
    return torch.randn(N, 4)


def _sequences() -> Tensor:
    return torch.randn(N, 3, 4)


def _images() -> Tensor:
    return torch.randn(N, 2, 6, 6)


def _series() -> Tensor:
    return torch.randn(N, 2, 7)


def _volumes() -> Tensor:
    return torch.randn(N, 2, 2, 3, 3)


def _two_named() -> dict[str, Tensor]:
    return {"x": _vectors(), "y": _vectors()}


def _tokens() -> Tensor:
    """Token 0 is padding. The first two points hold none of it, so that no probe of two points meets it."""
    tokens = torch.randint(1, 7, (N, 4))
    tokens[2:, -1] = 0
    return tokens


def _wired(wiring: Callable[..., Tensor]) -> Callable[[], nn.Module]:
    return lambda: parts.Wired(wiring)


def _shared_parameter() -> nn.Module:
    net = parts.Wired(lambda m, x: m.head(torch.tanh(m.fc2(torch.tanh(m.fc1(x))))))
    net.fc2.weight = net.fc1.weight
    return net


def _hooked(kind: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        net = parts.Wired(lambda m, x: m.head(torch.tanh(m.fc2(torch.tanh(m.fc1(x))))))
        if kind == "forward":
            net.fc1.register_forward_hook(lambda module, args, output: output**2)
        elif kind == "pre":
            net.fc1.register_forward_pre_hook(lambda module, args: (args[0] ** 2,))
        else:
            net.fc2.register_full_backward_hook(lambda module, given, returned: None)
        return net

    return make


def _normed(norm: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3))


def _hook_weight_norm(layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return torch.nn.utils.weight_norm(layer)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def _inplace_relu() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 9), nn.ReLU(inplace=True), nn.Linear(9, 3))


def _inplace_positions() -> nn.Module:
    """Linear layers of several positions return views, which in-place activations move on in the graph."""
    linear, relu = nn.Linear(5, 5), nn.ReLU(inplace=True)
    return parts.Pooled(nn.Sequential(nn.Linear(4, 5), relu, linear, nn.ELU(inplace=True), linear, relu), 5)


def _one_slope() -> nn.Module:
    """A PReLU with one slope for all channels, at two places, and an in-place activation after it."""
    prelu = nn.PReLU()
    body = [nn.Conv2d(2, 4, 3), prelu, nn.ELU(inplace=True), nn.Conv2d(4, 3, 2), prelu, nn.Flatten(), nn.Linear(27, 3)]
    return nn.Sequential(*body)


def _flattened() -> nn.Module:
    return nn.Sequential(nn.Flatten(0, 1), nn.Linear(4, 5), nn.Unflatten(0, (-1, 3)))


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=2, dilation=2, groups=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 2, stride=2),
        nn.Tanh(), nn.Conv2d(4, 3, 1, padding="same", bias=False), nn.Flatten(), nn.Linear(3, 3),
    )  # fmt: skip


def _batch_norm() -> nn.Module:
    net = parts.Residual(nn.BatchNorm2d)
    for norm in (net.norm1, net.norm2):
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    return net


def _norms_1d() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.LayerNorm(6, bias=False), nn.Linear(6, 3))


def _sequence_layernorm() -> nn.Module:
    body = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.LayerNorm((3, 6)), nn.Linear(6, 5), nn.LayerNorm(5))
    return parts.Pooled(body, 5)


def _transposed() -> nn.Module:
    """Linear layers whose weights are stored transposed, as GPT-2's are."""
    from transformers.pytorch_utils import Conv1D

    return parts.Pooled(nn.Sequential(Conv1D(6, 4), nn.GELU(), Conv1D(5, 6)), 5)


def _encoder(batch_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=6, dropout=0.1, batch_first=batch_first)
    stack = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    return parts.Pooled(stack, 4, first=not batch_first)


def _frozen_projection() -> nn.Module:
    net = parts.Attention()
    net.attention.in_proj_weight.requires_grad_(False)
    net.attention.out_proj.bias.requires_grad_(False)
    return net


def _mask(x: Tensor) -> Tensor:
    """What is added to the scores of positions."""
    return torch.tensor([[0.0, -1.0, 0.5]] * 3).to(x)


CAUSAL = {"attn_mask": lambda x: _mask(x) > 0, "is_causal": lambda x: True, "average_attn_weights": lambda x: False}
FURTHER_KEYS = {"add_bias_kv": True, "add_zero_attn": True}


def _other_widths() -> nn.Module:
    return parts.AskedAttention({"value": lambda x: x[..., :3]}, kdim=4, vdim=3)


def _pair() -> tuple[Any, dict[str, Tensor]]:
    def function(params: Any, x: Tensor) -> Tensor:
        return torch.tanh(x @ params["a"] + params["b"]) @ params["c"]

    return function, {"a": torch.randn(4, 5), "b": torch.randn(5), "c": torch.randn(5, 3)}


def _written_later() -> nn.Module:
    def wiring(m: Any, x: Tensor) -> Tensor:
        h = x.clone()
        y = m.fc1(h)
        h.mul_(2)
        return m.head(m.fc2(y) + h)

    net = parts.Wired(wiring)
    net.fc1.weight.requires_grad_(False)  # else autograd itself refuses
    return net


def _two_heads() -> nn.Module:
    net = parts.Wired(parts.tuple_output)
    net.fc1 = parts.TwoOutputs()
    return net


def _centred_gradient() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), parts.Applied(functions.CentredGradient.apply), nn.Linear(5, 3))


def _table() -> Iterator[Network]:
    row, f, twice = Network, torch.tanh, "double backward"
    yield row("mlp", _mlp, _vectors)
    yield row("cnn", _cnn, _images)
    yield row("cnn_1d", parts.cnn_1d, _series)
    yield row("cnn_3d", parts.cnn_3d, _volumes)
    yield row("autoencoder", parts.autoencoder, _images)
    yield row("given_output_size", parts.GivenOutputSize, _images, ("up*",))
    yield row("resnet_groupnorm", lambda: parts.Residual(lambda c: nn.GroupNorm(2, c)), _images)
    yield row("resnet_batchnorm", _batch_norm, _images)
    yield row("instance_norms", parts.instance_norms, _images)
    yield row("rms_norms", parts.rms_norms, _sequences)
    yield row("bilinear", parts.TwoBilinear, lambda: (_sequences(), _sequences()), ("mix*", "square*"))
    yield row("norms_1d", _norms_1d, _vectors)
    yield row("sequence_layernorm", _sequence_layernorm, _sequences)
    yield row("transposed_linear", _transposed, _sequences)
    yield row("transformer_encoder", lambda: _encoder(True), _sequences)
    yield row("sequence_first", lambda: _encoder(False), _sequences)
    yield row("flattened_positions", lambda: parts.Pooled(_flattened(), 5), _sequences)
    yield row("one_query", _wired(lambda m, x: m.head(m.fc1(x) * m.fc2(torch.ones_like(x[:1])))), _vectors)
    yield row("fused_attention", parts.FusedAttention, _sequences)
    yield row("attention", parts.Attention, _sequences)
    yield row("attention_of_two", lambda: parts.Attention(cross=True), _sequences, ("attention.in_proj*",))
    yield row("attention_frozen", _frozen_projection, _sequences)
    yield row("attention_positions_first", lambda: parts.AskedAttention(batch_first=False), _sequences)
    yield row("attention_without_bias", lambda: parts.AskedAttention(bias=False), _sequences)
    yield row("attention_masked", lambda: parts.AskedAttention({"attn_mask": _mask}), _sequences)
    yield row("attention_causal", lambda: parts.AskedAttention(CAUSAL), _sequences)
    yield row("attention_further_keys", lambda: parts.AskedAttention(**FURTHER_KEYS), _sequences, ("attention.bias_*",))
    yield row("attention_other_widths", _other_widths, _sequences, ("attention.[!o]*",))
    yield row("attention_of_one_query", parts.OneQuery, _vectors, ("*",))
    yield row("lstm", lambda: parts.Recurrent(nn.LSTM), _sequences, ("rnn*",))
    yield row("gru", lambda: parts.Recurrent(nn.GRU), _sequences, ("rnn*",))
    yield row("tied_embedding", lambda: parts.Tokens(nn.Embedding(7, 4), 4, tied=True), _tokens)
    yield row("embedding_padding", lambda: parts.Tokens(nn.Embedding(7, 4, 0), 4), _tokens, pushes=twice)
    yield row("embedding_few_rows", lambda: parts.Tokens(nn.Embedding(7, 4), 4), lambda: _tokens().repeat(1, 2))
    yield row("embedding_max_norm", lambda: parts.Tokens(nn.Embedding(7, 4, max_norm=5.0), 4), _tokens)
    yield row("bag_mean", lambda: parts.Tokens(nn.EmbeddingBag(7, 4, padding_idx=0), 4), _tokens)
    yield row("bag_sum", lambda: parts.Tokens(nn.EmbeddingBag(7, 4, mode="sum"), 4), _tokens)
    yield row("bag_max", lambda: parts.Tokens(nn.EmbeddingBag(7, 4, mode="max", padding_idx=0), 4), _tokens, ("emb*",))
    yield row("bag_weighted", parts.WeightedBag, _tokens)
    yield row("functional_padding", parts.FunctionalEmbedding, _tokens, ("table",), pushes=twice)
    yield row("linear_twice", _wired(lambda m, x: m.head(m.fc2(f(m.fc1(f(m.fc1(x))))))), _vectors)
    yield row("shared_parameter", _shared_parameter, _vectors)
    yield row("own_parameters", parts.OwnParameters, _vectors, ("weight", "scale", "fc.weight"))
    yield row("function_pair", _pair, _vectors, ("*",))
    yield row("inplace_relu", _inplace_relu, _vectors)
    yield row("inplace_positions", _inplace_positions, _sequences)
    yield row("inplace_add", _wired(parts.inplace_add), _vectors)
    yield row("inplace_mul", _wired(lambda m, x: m.head(m.fc2(m.fc1(x).mul_(2)))), _vectors)
    yield row("setitem", _wired(parts.setitem), _vectors)
    yield row("written_later", _written_later, _vectors, ("fc1.bias",))
    yield row("weight_norm", lambda: _normed(parametrizations.weight_norm), _vectors, ("0.*",), pushes=twice)
    yield row("weight_norm_hook", lambda: _normed(_hook_weight_norm), _vectors, ("0.*",), pushes=twice)
    yield row("spectral_norm", lambda: _normed(parametrizations.spectral_norm), _vectors, ("0.*",))
    yield row("orthogonal", lambda: _normed(parametrizations.orthogonal), _vectors, ("0.*",))
    yield row("prelu", lambda: nn.Sequential(nn.Linear(4, 5), nn.PReLU(5), nn.Linear(5, 3)), _vectors)
    yield row("prelu_of_one_slope", _one_slope, _images)
    yield row("own_slopes", lambda: nn.Sequential(nn.Linear(4, 5), parts.Slopes(5), nn.Linear(5, 3)), _vectors, ("1*",))
    yield row("tuple_output", _two_heads, _vectors)
    yield row("keyword_input", _wired(lambda m, x: m.head(input=f(m.fc2(input=m.fc1(input=x))))), _vectors)
    yield row("dead_branch", _wired(lambda m, x: (m.fc2(x), m.head(m.fc1(x)))[1]), _vectors)
    yield row("flat_output", _wired(lambda m, x: m.head(m.fc2(m.fc1(x))).sign()), _vectors)
    yield row("mapping_inputs", _wired(lambda m, x, y: m.head(m.fc1(x) * m.fc2(y))), _two_named)
    yield row("tuple_inputs", _wired(lambda m, x, y: m.head(m.fc1(x) * m.fc2(y))), lambda: (_vectors(), _vectors()))
    yield row("user_hook", _hooked("forward"), _vectors, ("fc1*",))
    yield row("user_pre_hook", _hooked("pre"), _vectors, ("fc1*",))
    yield row("user_backward_hook", _hooked("backward"), _vectors)
    yield row("checkpointed", lambda: parts.Checkpointed(False), _vectors)
    yield row("old_function", _wired(parts.old_function), _vectors, pushes=twice)
    yield row("numpy_backward", _wired(functions.applied(functions.NumpyTanh)), _vectors, pushes="rows")
    yield row("backward_without_gradient", _wired(functions.applied(functions.NoGradTanh)), _vectors, pushes="rows")
    yield row("backward_detached_in_part", _wired(functions.applied(functions.PartlyDetached)), _vectors, pushes="rows")
    yield row(
        "cotangent_overwritten", _wired(functions.applied(functions.Overwriting, last=True)), _vectors, pushes="rows"
    )
    yield row("numpy_below_own_parameters", functions.ScaledNumpy, _vectors, ("scale", "shift"), pushes="rows")
    yield row("wrong_jvp", _wired(functions.applied(functions.WrongJvp)), _vectors, pushes=twice)
    yield row("straight_through", _wired(functions.applied(functions.Rounded)), _vectors, pushes=twice)
    yield row("hardsigmoid", _wired(lambda m, x: m.head(F.hardsigmoid(m.fc2(F.hardsigmoid(m.fc1(x)))))), _vectors)
    yield row("functional_bag", lambda: parts.FunctionalEmbedding(bag=True), _tokens, ("table",), pushes="rows")
    yield row("linear_subclass", lambda: nn.Sequential(nn.Linear(4, 5), parts.ScaledLinear(5, 3)), _vectors, ("1.*",))
    yield row("bfloat16_base", lambda: parts.HalfBase(torch.bfloat16), _vectors)
    yield row("float16_base", lambda: parts.HalfBase(torch.float16), _vectors)
    yield row("without_gradient", _wired(parts.without_gradient), _vectors, ("fc1*",), pushes=twice)
    yield row("counting_calls", parts.CountingCalls, _vectors)
    yield row("one_gradient", parts.OneGradient, _vectors, ("weight", "change", "shift"))
    yield row("pairs", parts.Pairs, _series, ("spectrum",))
    yield row("sparse_graph", parts.SparseGraph, _sequences, pushes=twice)
    yield row("slopes", _wired(parts.slopes), _vectors, ("fc1*", "head*"))
    yield row("forces", _wired(parts.forces), _vectors, ("fc1.weight", "head.weight"))


def _unsupported() -> Iterator[tuple[Network, str]]:
    row, lost = Network, "loses its gradients: pass use_reentrant=False"
    yield row("clipped_backward", _wired(functions.applied(functions.Clipped)), _vectors), "of Clipped is not linear"
    yield row("backward_over_points", _centred_gradient, _vectors), "of CentredGradient is not linear"
    yield row("checkpoint_reentrant", lambda: parts.Checkpointed(True), _vectors), "use_reentrant=False"
    yield row("checkpoint_reentrant_first", lambda: parts.Checkpointed(True, first=True), _vectors), lost


ZOO: dict[str, Network] = {network.name: network for network in _table()}

# Networks without the derivatives that products need, with what the error must name.
UNSUPPORTED: dict[str, tuple[Network, str]] = {network.name: (network, words) for network, words in _unsupported()}
