"""The last layer is the one in whose output the model's is linear, whatever the order of registration."""

import itertools
import pickle
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvops as co
from tests.network.products import require_curvature, softmax_hessian
from tests.zoo import call, dense_jacobian
from tests.zoo_modules import Applied


def last_layer(model: Any, x: Any) -> tuple[str, ...]:
    """The names of its parameters."""
    y = call(model, x).detach()
    lin = co.linearize(model, (x, y), co.likelihoods.Gaussian(1.0), "last_layer")
    return tuple(lin.unflatten(lin.theta))


class HeadFirst(nn.Module):
    """Its head is registered before its body."""

    def __init__(self, end: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.head, self.side, self.body, self.end = nn.Linear(5, 3), nn.Linear(5, 3), nn.Linear(4, 5), end
        self.matrix, self.scale = nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.rand(3) + 1)
        self.shift = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self, self.body(x).tanh())


class Doubled(torch.autograd.Function):
    """A linear operation that no table knows."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return 2 * tangent


def _written(h: Tensor) -> Tensor:
    """Return a tensor in whose first column the rest of the rows is added up in place."""
    whole = h.clone()
    whole[:, 0] += whole[:, 1:].sum(1)
    return whole


def _checked(h: Tensor) -> Tensor:
    if float(h.detach().abs().max()) > 1e4:
        raise OverflowError("the logits explode")
    return h


HEAD, SIDE = ("head.weight", "head.bias"), ("side.weight", "side.bias")
ENDS = {
    "itself": lambda m, h: m.head(h),
    "reshaped": lambda m, h: m.head(h).unsqueeze(1).flatten(1),
    "cast": lambda m, h: m.head(h).float().clone(),
    "logits": lambda m, h: SimpleNamespace(logits=m.head(h)).logits,
    "of two positions the last": lambda m, h: m.head(torch.stack([h, h + 1], 1))[:, -1],
    "scaled": lambda m, h: (1 - 2 * m.head(h) * torch.arange(3)) / 3,
    "permuted": lambda m, h: m.head(h).flip(-1).roll(1, -1),
    "pooled": lambda m, h: F.adaptive_avg_pool1d(m.head(torch.stack([h, h + 1], 1)).mT, 1).flatten(1),
    "mixed": lambda m, h: F.linear(m.head(h), torch.ones(2, 3).to(h)),
    "centred": lambda m, h: m.head(h) - m.head(h).mean(-1, keepdim=True),
    "head twice": lambda m, h: torch.cat([m.head(h), m.head(h)], 1),
}


def _resampled(m: Any, h: Tensor) -> Tensor:
    return F.interpolate(m.head(h).view(-1, 1, 1, 3), (2, 4), mode="bicubic").flatten(1)


AFFINE = {
    "two heads added up": (lambda m, h: m.head(h) + 3 * m.side(h), (*HEAD, *SIDE)),
    "two heads side by side": (lambda m, h: torch.cat([m.head(h), m.side(h)], 1), (*HEAD, *SIDE)),
    "a sum weighted by the inputs": (lambda m, h: (h.detach().softmax(-1)[:, :3] * m.head(h)).cumsum(1), HEAD),
    "a skip connection": (lambda m, h: m.head(h) + h[:, :3], HEAD),
    "a skip connection from another layer": (lambda m, h: m.head(s := m.side(h) @ m.matrix.mT) + s[:, :3].exp(), HEAD),
    "gates that do not come from the head": (lambda m, h: m.head(h) * h.sigmoid()[:, :3], HEAD),
    "a scale that is a parameter": (lambda m, h: m.head(h) * m.scale.exp() + m.shift, (*HEAD, "shift")),
    "a shift that is scaled": (lambda m, h: (m.head(h) + m.shift) * m.scale, (*HEAD, "shift")),
    "written in place": (lambda m, h: _written(m.head(h)), HEAD),
    "an operation of a user": (lambda m, h: Doubled.apply(m.head(h)), HEAD),
    "resampled": (_resampled, HEAD),
    "a transform": (lambda m, h: torch.fft.irfft(torch.fft.rfft(m.head(h)) * torch.arange(1, 3), 4), HEAD),
    "a matrix of the model": (lambda m, h: m.head(h).sigmoid() @ m.matrix.mT, ("matrix",)),
    "a matrix and a shift": (lambda m, h: m.head(h).sigmoid() @ m.matrix.mT[:, 1:4] + m.shift, ("matrix", "shift")),
}


@pytest.mark.parametrize(("end", "names"), AFFINE.values(), ids=AFFINE)
def test_the_outputs_are_affine_in_what_is_found(end: Callable[[Any, Tensor], Tensor], names: tuple[str, ...]) -> None:
    """J is the same at other weights of these names, and products, curvatures and predictions are the dense ones."""
    model, x = HeadFirst(end).double(), torch.randn(5, 4, dtype=torch.float64)
    y = torch.randn_like(model(x)).detach()
    lin = co.linearize(model, (x, y), co.likelihoods.Gaussian(noise=0.5), "last_layer")
    assert lin.model.selection.names == names
    fixed = {name: value.detach() for name, value in model.named_parameters()}
    chosen = {name: fixed[name] for name in names}
    jacobian = torch.func.jacrev(lambda p: torch.func.functional_call(model, {**fixed, **p}, (x,)))

    def dense(at: dict[str, Tensor]) -> Tensor:
        rows = jacobian(at)
        return torch.cat([rows[name].flatten(0, 1).flatten(1) for name in names], 1)

    J, size = dense(chosen), lin.num_parameters
    elsewhere = {name: value + torch.randn_like(value) for name, value in chosen.items()}
    torch.testing.assert_close(dense(elsewhere), J, rtol=0, atol=1e-10)
    require_curvature(lin, J, 2 * torch.eye(len(J)).double(), times=1)
    found = co.laplace(lin, co.GGN, 3.0, check_mode=False).predict(x, joint=True).covariance_matrix
    expected = J @ torch.linalg.inv(2 * J.mT @ J + 3 * torch.eye(size, dtype=torch.float64)) @ J.mT
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


ADDED = {
    "a bias outside the head": lambda m, h: m.head(h) + m.shift,
    "a bias outside the head, scaled": lambda m, h: (m.head(h) + m.shift.expand(len(h), 3)) * 0.5,
}
SUMS = {
    "added by index": lambda h, i, n: h.new_zeros(n, 3).index_add(0, i, h),
    "added in place": lambda h, i, n: h.new_zeros(n, 3).index_add_(0, i, h),
    "scattered": lambda h, i, n: h.new_zeros(n, 3).scatter_add(0, i[:, None].expand(-1, 3), h),
    "put": lambda h, i, n: h.new_zeros(n, 3).index_put((i,), h, accumulate=True),
    "averaged": lambda h, i, n: h.new_zeros(n, 3).scatter_reduce(0, i[:, None].expand(-1, 3), h, "mean"),
    "by masks": lambda h, i, n: torch.stack([(h * (i == k)[:, None]).sum(0) for k in range(n)]),
}


class Molecules(nn.Module):
    """A sum over the atoms of each point, whose number differs; a module around the head owns a parameter, too."""

    def __init__(self, total: Callable[[Tensor, Tensor, int], Tensor]) -> None:
        super().__init__()
        self.kinds, self.total = nn.Parameter(torch.randn(4)), total
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        points, atoms = (x[..., 0] > -0.5).nonzero().unbind(1)
        return self.total(self.head(self.body(x[points, atoms] * self.kinds).tanh()), points, len(x))


@pytest.mark.parametrize("total", SUMS.values(), ids=SUMS)
def test_sums_over_the_atoms_of_a_molecule(total: Callable[[Tensor, Tensor, int], Tensor]) -> None:
    """The head's rows are atoms, not points; products and predictions are those of the dense Jacobian."""
    model, x = Molecules(total).double(), torch.randn(5, 4, 4, dtype=torch.float64)
    lin = co.linearize(model, (x, torch.arange(5) % 3), "classification", "last_layer")
    assert lin.model.selection.names == HEAD
    J, H = dense_jacobian(model, x)[:, -18:], softmax_hessian(model(x))
    require_curvature(lin, J, H, times=1)
    covariance = co.laplace(lin, co.GGN, 2.0, check_mode=False).predict(x).covariance_matrix
    expected = J @ torch.linalg.inv(J.mT @ H @ J + 2 * torch.eye(18).double()) @ J.mT
    blocks = torch.stack([expected[3 * n : 3 * n + 3, 3 * n : 3 * n + 3] for n in range(5)])
    torch.testing.assert_close(covariance.reshape(blocks.shape), blocks, rtol=0, atol=1e-10)


class Around(nn.Module):
    """A vision transformer in small: the module around the head owns a token and positions."""

    def __init__(self, end: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, 5)), nn.Parameter(torch.randn(1, 3, 5))
        self.shift, self.end = nn.Parameter(torch.randn(3)), end
        self.embed, self.block = nn.Linear(2, 5), nn.TransformerEncoderLayer(5, 1, 7, 0.0, batch_first=True)
        self.head, self.side = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.cat([self.token.expand(len(x), -1, -1), self.embed(x.unflatten(1, (2, 2)))], 1)
        return self.end(self, self.block(tokens + self.positions)[:, 0])


@pytest.mark.parametrize("end", ["itself", "of two positions the last", "mixed", "head twice"])
def test_of_modules_around_each_other_the_innermost_counts(end: str) -> None:
    assert last_layer(Around(ENDS[end]).eval(), torch.randn(2, 4)) == HEAD


@pytest.mark.parametrize("end", ADDED.values(), ids=ADDED)
def test_parameters_that_are_added_belong_to_it(end: Callable[[Any, Tensor], Tensor]) -> None:
    assert last_layer(Around(end).eval(), torch.randn(2, 4)) == (*HEAD, "shift")


def test_a_normalised_weight_is_selected_with_its_layer() -> None:
    model = HeadFirst(ENDS["itself"])
    nn.utils.parametrizations.weight_norm(model.head)
    weights = [f"head.parametrizations.weight.original{i}" for i in range(2)]
    assert last_layer(model, torch.randn(2, 4)) == ("head.bias", *weights)


ROWS = torch.arange(6)[:, None]
NONE = {
    "softmax": (lambda m, h: m.head(h).softmax(-1), "they come from Softmax"),
    "in place": (lambda m, h: m.head(h).relu_(), "they come from Relu"),
    "in a piece of a tensor": (lambda m, h: _written(m.head(h)).exp(), "they come from Exp"),
    "large values refused": (lambda m, h: _checked(m.head(h)).softmax(-1), "they come from Softmax"),
    "two branches": (lambda m, h: m.head(h) * m.side(h), "they come from a product of parts that both depend on"),
    "the largest of two": (lambda m, h: torch.maximum(m.head(h), m.side(h)), "they come from Maximum"),
    "bounded far away": (lambda m, h: m.head(h).clamp(-1e5, 1e5), "they come from Clamp"),
    "a median": (lambda m, h: m.head(h).median(1, keepdim=True).values, "they come from Median"),
    "squared": (lambda m, h: m.head(h) * m.head(h), "they come from a product of parts that both depend on"),
    "reciprocal": (lambda m, h: 1 / m.head(h), "they come from"),
    "the largest": (
        lambda m, h: torch.zeros(len(h), 3).scatter_reduce(0, ROWS[: len(h)].expand(-1, 3), m.head(h), "amax"),
        "they come from ScatterReduce",
    ),
    "normalised": (lambda m, h: m.head(h) / m.head(h).norm(dim=-1, keepdim=True), "they come from a product"),
}


@pytest.mark.parametrize(
    ("network", "what"), [*((HeadFirst, what) for what in NONE), (Around, "softmax"), (Around, "two branches")]
)
def test_no_layer_is_an_error_that_names_cause_and_remedy(network: type[nn.Module], what: str) -> None:
    (end, why), data = NONE[what], (torch.randn(6, 4), torch.randn(6, 3))
    with pytest.raises(
        ValueError, match=rf"not linear in the output of one layer \({why}.*; name .*='(head|side)\.\*' \(layers"
    ):
        co.linearize(network(end).eval(), data, co.likelihoods.Gaussian(noise=1.0), parameters="last_layer")


CHOSEN_BY_VALUE = {
    "where": lambda z: torch.where(z > 0, z, 0.1 * z),
    "a mask as a factor": lambda z: z * (z > 0),
    "gathered": lambda z: z.gather(1, z.argmax(1, keepdim=True)),
    "a constant norm": lambda z: z / z.detach().norm(dim=-1, keepdim=True),
    "a constant added": lambda z: z + z.detach().tanh(),
}
BEHIND_AN_OFFSET = {
    "bounded": lambda z: 1e4 + z.tanh(),
    "one-sided": lambda z: 1e4 + F.softplus(z),
    "a kink": lambda z: 1e4 + z.relu(),
    "a small bend": lambda z: z + 1e-3 * z.tanh(),
}
OPERATIONS = CHOSEN_BY_VALUE | BEHIND_AN_OFFSET


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_what_is_not_affine_is_refused_in_either_precision(operation: Callable[[Tensor], Tensor]) -> None:
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        model, x = HeadFirst(lambda m, h: operation(m.head(h))).to(dtype), torch.randn(6, 4, dtype=dtype)
        with pytest.raises(ValueError, match=r"not linear in the output of one layer .*name .*='head\.\*'"):
            co.linearize(model, (x, torch.zeros_like(model(x))), co.likelihoods.Gaussian(1.0), "last_layer")


ALL_AFFINE = {name: (end, HEAD) for name, end in ENDS.items()} | AFFINE


@pytest.mark.parametrize("name", ALL_AFFINE)
def test_an_offset_or_a_precision_refuses_no_affine_end(name: str) -> None:
    """bfloat16 has no Fourier transform."""
    end, names = ALL_AFFINE[name]
    for offset, dtype in itertools.product((0.0, 1e5), (torch.float32, torch.float64, torch.bfloat16)):
        if (name, dtype) != ("a transform", torch.bfloat16):
            torch.manual_seed(0)
            model = HeadFirst(lambda m, h, offset=offset: end(m, h) + offset).to(dtype)
            assert last_layer(model, torch.randn(2, 4, dtype=dtype)) == names, (offset, dtype)


def test_of_a_product_outside_of_layers_the_error_names_the_factor() -> None:
    data = torch.randn(6, 4), torch.randn(6, 1)
    ends = {"='scale'": lambda m, h: h, "=['scale', 'shift']": lambda m, h: h + m.shift[:1]}
    for remedy, end in ends.items():
        model = HeadFirst(lambda m, h, end=end: end(m, (h[:, :3] * m.scale).sum(1, keepdim=True)))
        with pytest.raises(ValueError, match=rf"name its parameters, as parameters{re.escape(remedy)}\."):
            co.linearize(model, data, co.likelihoods.Gaussian(noise=1.0), parameters="last_layer")


def test_functions_with_a_bias_and_with_none() -> None:
    params = {"c": torch.randn(3), "b": torch.randn(5, 3), "a": torch.randn(4, 5)}
    x = torch.randn(2, 4)
    assert last_layer((lambda p, x: (x @ p["a"]).tanh() @ p["b"] + p["c"], params), x) == ("c", "b")
    assert last_layer((lambda p, x: (x @ p["a"]).tanh() @ p["a"].mT, {"a": params["a"]}), x) == ("a",)
    with pytest.raises(ValueError, match="not linear in the output of one layer"):
        last_layer((lambda p, x: ((x @ p["a"]) @ p["b"] + p["c"]).exp(), params), x)


def test_a_head_that_is_tied_has_the_name_that_comes_first() -> None:
    model = nn.Sequential(nn.Embedding(7, 4), Applied(lambda rows: rows.mean(1)), nn.Linear(4, 7, bias=False))
    model[2].weight = model[0].weight
    assert last_layer(model, torch.randint(0, 7, (2, 3))) == ("0.weight",)


def test_a_pickled_network_contains_each_weight_of_its_snapshot_once() -> None:
    model = nn.Sequential(nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 2))
    size = sum(parameter.nbytes for parameter in model.parameters())
    lin = co.linearize(model, (torch.randn(4, 300), torch.arange(4) % 2), "classification", "last_layer")
    assert len(pickle.dumps(lin)) < 2.2 * size  # the snapshot, and the parameters of the module's copy
