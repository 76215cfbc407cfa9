"""The door: `co.linearize` takes what it says it takes, refuses the rest with a remedy, and keeps a snapshot.

Tests `linearization.py`, `first_points.py`, `network_on_data.py` and `trained_network.py`.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import curvops as co
from tests.zoo_modules import Recurrent, Wired

X, Y = torch.randn(7, 4, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 0, 1, 2, 0])


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).eval()


def test_a_half_precision_base_may_round_otherwise_in_another_batch() -> None:
    """As its kernels do on some devices: a difference that means dependence in single precision is rounding in half."""

    def wiring(m: Any, x: Tensor) -> Tensor:
        return m.head(torch.tanh(m.fc1(x)).bfloat16() * (1 + torch.finfo(torch.bfloat16).eps * (len(x) > 1))).float()

    model = Wired(wiring)
    model.head.bfloat16().requires_grad_(False)
    assert co.linearize(model, (X, Y), "classification", "fc1.*").num_outputs == 3
    with pytest.raises(ValueError, match="depend on the other points of its batch"):
        co.linearize(Wired(lambda m, x: m.head(x) * (1 + 0.01 * (len(x) > 1))), (X, Y), "classification")


@pytest.mark.usefixtures("annotations_unchecked")
@pytest.mark.parametrize("parameters", [None, "2.*", "last_layer", torch.tensor([50, 3, 20])], ids=range(4))
def test_flatten_and_unflatten(parameters: Any) -> None:
    lin = co.linearize(net(), (X, Y), "classification", parameters)
    v = torch.randn(lin.num_parameters)
    named = [lin.unflatten_weights(v), lin.unflatten_tangent(v)]
    if isinstance(parameters, Tensor):
        with pytest.raises(ValueError, match=r"unflatten_weights.*unflatten_tangent"):
            lin.unflatten(v)
    else:
        named.append(lin.unflatten(v))
    for tensors in named:
        assert torch.equal(lin.flatten(tensors), v)
    for wrong in (v[1:], v.expand(3, -1), v.unsqueeze(1)):
        for unflatten in (lin.unflatten_weights, lin.unflatten_tangent):
            with pytest.raises(ValueError, match="vector must have shape"):
                unflatten(wrong)


def test_a_subnetworks_weights_load_into_the_model_and_leave_the_others_alone() -> None:
    model, index = net(), torch.tensor([50, 3, 20])
    lin = co.linearize(model, (X, Y), "classification", index)
    before = torch.cat([p.detach().flatten() for p in model.parameters()]).clone()
    assert model.load_state_dict(lin.unflatten_weights(lin.theta + 1), strict=False).unexpected_keys == []
    moved = torch.cat([p.detach().flatten() for p in model.parameters()]) - before
    torch.testing.assert_close(moved, torch.zeros_like(moved).index_fill(0, index, 1.0))
    step = torch.cat([t.flatten() for t in lin.unflatten_tangent(lin.theta).values()])
    assert int((step != 0).sum()) == len(index)


@pytest.mark.parametrize(("ours", "given"), [(torch.float64, torch.float32), (torch.float32, torch.float64)])
def test_data_of_another_precision_are_cast_to_that_of_the_weights(ours: torch.dtype, given: torch.dtype) -> None:
    model, x, v = net().to(ours), X.to(given), torch.ones(51, dtype=ours)
    lin, cast = (co.linearize(model, (inputs, Y), "classification") for inputs in (x, x.to(ours)))
    assert torch.equal(co.GGN(lin) @ v, co.GGN(cast) @ v) and torch.equal(lin.predict(x), lin.predict(x.to(ours)))
    assert lin.predict(x).dtype == ours
    arrays = co.linearize(model, (x.numpy(), Y.numpy()), "classification")
    assert torch.equal(arrays.predict(x.numpy()), lin.predict(x))


def test_outputs_at_other_weights_are_computed_some_points_at_a_time() -> None:
    """A pass that makes 1 MB a point is over at most 32 of them."""
    model = nn.Sequential(nn.Linear(4, 2**16), nn.Tanh(), nn.AdaptiveAvgPool1d(8), nn.Linear(8, 3)).double()
    seen, x = list[int](), torch.randn(70, 4).double()
    model[2].register_forward_hook(lambda _, args, output: seen.append(len(output)))
    data = x, torch.zeros(70, 3).double()
    lin = co.linearize(model, data, co.likelihoods.Gaussian(noise=1.0), parameters="3.*")
    seen.clear()
    outputs = lin.predict(x, 1.1 * lin.theta)
    assert seen == [24, 24, 22]
    assert torch.allclose(outputs, 1.1 * model(x), atol=1e-13)


def forms(x: Tensor, y: Tensor) -> dict[str, Any]:
    """The same data in memory, as a Dataset, in batches, and in batches whose first has only two points."""
    return {
        "tensors": (x, y),
        "dataset": TensorDataset(x, y),
        "loader": DataLoader(TensorDataset(x, y), batch_size=4),
        "batches": [(x[:2], y[:2]), (x[2:], y[2:])],
    }


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_run_along_steps_not_points(kind: Any) -> None:
    x = torch.randn(7, 6, 4)
    for data in forms(x, Y).values():
        assert co.linearize(Recurrent(kind, outputs=3), data, "classification").num_data == 7
        with pytest.raises(ValueError, match=r"other points of its batch.*batch_first=True \(not so 'rnn'\)"):
            co.linearize(Recurrent(kind, outputs=3, batch_first=False), data, "classification")


def by_class(f: Tensor, y: Tensor) -> Tensor:
    weight = len(y) / torch.bincount(y, minlength=3).clamp_min(1).to(f)
    return nn.functional.cross_entropy(f, y, weight, reduction="none")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("confident", [1.0, 1e3])
def test_losses_are_of_one_point_each_where_targets_differ_later(confident: float, dtype: torch.dtype) -> None:
    """Rounding never refuses a loss that is; weights of a batch are found though its first points share a class."""
    model, weight = net().to(dtype), torch.tensor([0.3, 2.0, 5.0], dtype=dtype)
    model[-1].weight.data.mul_(confident)
    x, y = torch.randn(7, 4, dtype=dtype), torch.tensor([1, 1, 1, 1, 1, 0, 1])
    fixed = co.likelihoods.FromLoss(nn.CrossEntropyLoss(weight))
    for name, data in forms(x, y).items():
        assert co.linearize(model, data, fixed).num_data == 7
        if name != "batches":
            with pytest.raises(ValueError, match="couples the points of a batch"):
                co.linearize(model, data, by_class)


def test_packed_sequences_may_have_to_come_in_order_of_their_lengths() -> None:
    class Packed(Recurrent):
        def forward(self, x: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, (x[:, :, 0] != 0).sum(1), batch_first=True)
            return self.head(self.rnn(packed)[1][-1])

    x = torch.rand(7, 6, 4) + 1
    for n in range(7):
        x[n, 6 - n // 2 :] = 0
    assert co.linearize(Packed(nn.GRU, outputs=3), (x, Y), "classification").num_data == 7
