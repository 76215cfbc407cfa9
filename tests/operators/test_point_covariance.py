"""Predictive covariances under structured curvatures: the same as from solves for the rows of J."""

import functools

import pytest
import torch
from torch import nn

import curvops as co
from curvops.network.data import take
from curvops.operators.function_space import point_covariances, row_covariances
from tests.zoo import ZOO, batches, call
from tests.zoo_modules import Applied, Pooled

NETWORKS = [
    "mlp",
    "cnn",
    "cnn_1d",
    "resnet_groupnorm",
    "sequence_layernorm",
    "transposed_linear",
    "transformer_encoder",
    "tied_embedding",
    "embedding_padding",
    "embedding_few_rows",
    "bag_mean",
    "shared_parameter",
    "dead_branch",
    "mapping_inputs",
    "lstm",
    "prelu_of_one_slope",
    "own_slopes",
    "own_parameters",
]
TIGHT = {"rtol": 1e-10, "atol": 1e-10}
GAUSSIAN = co.likelihoods.Gaussian(noise=1.0)


@functools.cache
def plain(name):
    return linearized(name, memory_budget=None)


def linearized(name, likelihood=GAUSSIAN, **options):
    if not options:
        return plain(name)
    model, inputs = ZOO[name].build()
    y = torch.zeros_like(call(model, inputs))
    if likelihood == "classification":
        y = torch.arange(y[..., 0].numel()).view(y.shape[:-1]) % y.shape[-1]
    data = [(part, y[start : start + 3]) for start, (part, _) in zip((0, 3), batches(inputs))]
    return co.linearize(model, data, likelihood, **options), inputs


def by_solves(J, inverse, outputs):
    dense = J.to_dense()
    blocks = (dense @ (inverse @ dense.mT)).unflatten(0, (-1, outputs)).unflatten(2, (-1, outputs))
    return torch.diagonal(blocks, dim1=0, dim2=2).permute(2, 0, 1)


def low_rank(lin):
    return co.low_rank(co.GGN(lin), rank=5, generator=torch.Generator().manual_seed(0))


def uneven(lin):
    return torch.linspace(0.5, 2.0, lin.num_parameters, dtype=torch.float64)


STRUCTURES = {
    "DiagonalGGN": lambda lin: co.DiagonalGGN(lin).add_diagonal(0.7),
    "LowRank": lambda lin: low_rank(lin).add_diagonal(0.7),
    "LowRank and diagonal": lambda lin: low_rank(lin).add_diagonal(uneven(lin)),
    "BlockDiagonal": lambda lin: co.BlockDiagonal(lin).add_diagonal(0.7),
    "KFAC": lambda lin: co.KFAC(lin).add_diagonal(0.7),
    "KFAC, biases apart": lambda lin: co.KFAC(lin, bias="separate").add_diagonal(0.7),
    "EKFAC": lambda lin: co.EKFAC(lin, sharing="reduce").add_diagonal(0.7),
    "Dense": lambda lin: co.linalg.Dense(co.GGN(lin).to_dense(), psd=True).add_diagonal(0.7),
}
EACH_NETWORK = ["LowRank and diagonal", "BlockDiagonal", "KFAC"]
"""Weights of single entries, rows as they are, and rotated rows: the others use the same layers' parts."""
SOME_NETWORKS = ["mlp", "cnn_1d", "embedding_few_rows", "tied_embedding"]


@pytest.mark.parametrize(
    ("name", "structure"),
    [(name, s) for s in STRUCTURES for name in (NETWORKS if s in EACH_NETWORK else SOME_NETWORKS)],
)
def test_each_structure_is_what_solves_for_the_rows_give(name, structure):
    """Point by point, of the training data too, and two points together; the variances alone."""
    lin, inputs = linearized(name)
    inverse, J = STRUCTURES[structure](lin).inverse(), lin.jacobian(inputs)
    pair = lin.jacobian(take(inputs, slice(0, 2)))
    for rows, size in ((J, lin.output_shape[-1]), (lin.jacobian(), lin.output_shape[-1]), (pair, pair.shape[0])):
        found = point_covariances(rows, inverse, size)
        if found is None:  # a group of tied layers, or of a module with parameters of its own, is in no one block
            assert structure == "BlockDiagonal" and name in ("tied_embedding", "shared_parameter", "own_parameters")
        else:
            torch.testing.assert_close(found, by_solves(rows, inverse, size), **TIGHT)
            variances = point_covariances(rows, inverse, size, diagonals=True)
            torch.testing.assert_close(variances, found.diagonal(dim1=1, dim2=2), **TIGHT)


@pytest.mark.parametrize("curvature", [co.KFAC, co.EKFAC, functools.partial(co.KFAC, bias="separate")])
def test_layers_at_more_positions_than_they_have_columns(curvature):
    """An adapter of low rank beside many tokens, and a convolution of few channels in groups."""
    adapter = nn.Sequential(nn.Linear(5, 2, bias=False), nn.Linear(2, 7), nn.Tanh(), nn.Linear(7, 2))
    images = nn.Sequential(nn.Conv2d(2, 4, 2, groups=2), nn.Tanh(), nn.Flatten(2), nn.Linear(25, 2))
    for model, shape in ((adapter, (4, 11, 5)), (images, (4, 2, 6, 6))):
        whole = nn.Sequential(model, Applied(lambda f: f.mean(1))).double()
        x, y = torch.randn(shape).double(), torch.tensor([0, 1, 1, 0])
        lin = co.linearize(whole, (x, y), "classification")
        A = curvature(lin)
        inverse, J = A.add_diagonal(0.7).inverse(), lin.jacobian(x)
        for size in (2, 4):
            torch.testing.assert_close(point_covariances(J, inverse, size), by_solves(J, inverse, size), **TIGHT)


@pytest.mark.parametrize("structure", ["DiagonalGGN", "LowRank", "BlockDiagonal"])
@pytest.mark.parametrize("parameters", ["last_layer", "*weight", ["*bias"], torch.arange(0, 27, 3)])
def test_selections_and_subnetworks(structure, parameters):
    lin, inputs = linearized("mlp", parameters=parameters)
    inverse, J = STRUCTURES[structure](lin).inverse(), lin.jacobian(inputs)
    torch.testing.assert_close(point_covariances(J, inverse, 3), by_solves(J, inverse, 3), **TIGHT)


ENDS = {
    "flattened": lambda f: f.flatten(1),
    "flattened by outputs": lambda f: f.mT.flatten(1),
    "scaled": lambda f: 2 * f[:, 0] - 1,
    "scaled sequence": lambda f: f * torch.tensor([1.0, 3.0], dtype=f.dtype),
    "permuted": lambda f: f.flip(-1),
    "mean of positions": lambda f: f.mean(1),
    "mixed": lambda f: f.flatten(1) @ torch.ones(6, 4, dtype=f.dtype).tril(),
}


@pytest.mark.parametrize(
    ("end", "structure"),
    [*((end, "KFAC") for end in ENDS), *(("flattened by outputs", s) for s in (*EACH_NETWORK, "EKFAC"))],
)
def test_linear_operations_after_a_position_wise_layer(end, structure):
    """Blocks, variances and the gradient in x, of the last layer and of all, against rows and solves."""
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2), Applied(ENDS[end])).double()
    x = torch.randn(5, 3, 2, dtype=torch.float64)
    y = torch.zeros_like(model(x)).detach()
    for parameters in ("last_layer", None):
        lin = co.linearize(model, (x, y), co.likelihoods.Gaussian(noise=1.0), parameters)
        inverse, C = STRUCTURES[structure](lin).inverse(), lin.output_shape[-1]
        new, direction = x[:3] + 0.1, torch.randn_like(x[:3])
        J = lin.jacobian(new)
        expected = by_solves(J, inverse, C)
        torch.testing.assert_close(point_covariances(J, inverse, C), expected, **TIGHT)
        together = by_solves(J, inverse, J.shape[0])
        torch.testing.assert_close(point_covariances(J, inverse, J.shape[0]), together, **TIGHT)
        variances = point_covariances(J, inverse, C, diagonals=True)
        torch.testing.assert_close(variances, expected.diagonal(dim1=1, dim2=2), **TIGHT)
        products = (J @ J.mT).to_dense()
        torch.testing.assert_close(J.to_dense() @ J.to_dense().mT, products, **TIGHT)
        torch.testing.assert_close(co.TangentKernel(lin, 1.0, new).to_dense(), products, **TIGHT)
        ends = [by_solves(lin.jacobian(new + step * direction), inverse, C).sum() for step in (1e-5, -1e-5)]
        recorded = lin.jacobian(new.requires_grad_(), differentiable=True)
        row_covariances(recorded, inverse, C).sum().backward()
        torch.testing.assert_close((new.grad * direction).sum(), (ends[0] - ends[1]) / 2e-5, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(("name", "structure"), [*(("mlp", s) for s in STRUCTURES), ("sequence_layernorm", "KFAC")])
def test_a_last_layer_takes_its_inputs_alone(name, structure):
    """Outputs, covariances and products; of sequences by position. Of classes, which mix the outputs' axes."""
    classes = functools.partial(linearized, name, "classification", parameters="last_layer")
    lin, inputs = classes()
    assert lin.plan.is_last_layer
    C, inverse, J = lin.output_shape[-1], STRUCTURES[structure](lin).inverse(), lin.jacobian(inputs)
    expected = by_solves(classes(engine="autodiff")[0].jacobian(inputs), inverse, C)
    torch.testing.assert_close(J.outputs(), lin.predict(inputs), **TIGHT)
    torch.testing.assert_close(point_covariances(J, inverse, C), expected, **TIGHT)
    variances = point_covariances(J, inverse, C, diagonals=True)
    torch.testing.assert_close(variances, expected.diagonal(dim1=1, dim2=2), **TIGHT)
    torch.testing.assert_close(J.to_dense() @ J.to_dense().mT, (J @ J.mT).to_dense(), **TIGHT)


@pytest.mark.parametrize("name", ["mlp", "cnn", "norms_1d", "tied_embedding", "dead_branch", "own_parameters"])
def test_the_rows_of_a_subnetwork_are_its_columns(name):
    """Few entries of a layer are gathered, many cut out of its rows; what no output depends on is zero."""
    whole, inputs = linearized(name)
    dense = whole.jacobian(inputs).to_dense()
    for step in (1, 2, 17):
        index = torch.arange(whole.num_parameters - 1, -1, -step)
        J = linearized(name, parameters=index)[0].jacobian(inputs)
        torch.testing.assert_close(torch.cat(list(J.passes.selected_rows())), dense[:, index], **TIGHT)
        torch.testing.assert_close(J.formed(), dense[:, index].mT, **TIGHT)


@pytest.mark.parametrize("name", ["mlp", "lstm"])
def test_a_dense_block_of_few_weights_is_not_solved_iteratively(name):
    whole, inputs = linearized(name)
    index = torch.arange(0, whole.num_parameters, 7)
    lin, _ = linearized(name, parameters=index)
    inverse, J = co.Subnetwork(co.GGN(whole), index).add_diagonal(0.7).inverse(), lin.jacobian(inputs)
    found = point_covariances(J, inverse, lin.output_shape[-1])
    torch.testing.assert_close(found, by_solves(J, inverse, lin.output_shape[-1]), **TIGHT)


def test_low_rank_far_above_its_prior_goes_by_solves():
    """At the points that it was made of, Woodbury's difference would lose the digits."""
    lin, _ = linearized("mlp")
    curvature = co.low_rank(co.GGN(lin), rank=15, generator=torch.Generator().manual_seed(0))
    for shift, found in ((1.0, True), (1e-9, False)):
        inverse = curvature.add_diagonal(shift).inverse()
        assert (point_covariances(lin.jacobian(), inverse, 3) is not None) == found


def test_some_points_at_a_time():
    for name in ("mlp", "cnn", "tied_embedding"):
        lin, inputs = linearized(name, memory_budget=20_000)
        inverse, J = co.KFAC(lin).add_diagonal(0.7).inverse(), lin.jacobian(inputs)
        expected = by_solves(J, inverse, lin.num_outputs)
        with lin.memory.holding(lin.memory.room() - 3000):
            torch.testing.assert_close(point_covariances(J, inverse, lin.num_outputs), expected, **TIGHT)


@pytest.mark.parametrize("positions", [4, 30], ids=["by pairs of positions", "by rows"])
def test_long_rows_in_single_precision(positions):
    """2.4 million products of a 512 × 4,608 weight were added one to the next: variances off by 2e-4."""

    model, x = Pooled(nn.Sequential(nn.Linear(1024, 64), nn.Tanh()), 64), torch.randn(2, positions, 1024)
    lin = co.linearize(model, (x, torch.arange(2)), "classification")
    inverse = co.KFAC(lin).add_diagonal(1.0).inverse()
    found = point_covariances(lin.jacobian(x), inverse, 3)
    expected = point_covariances(lin.cast(torch.float64).jacobian(x.double()), inverse.double(), 3)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5 * float(expected.max()))


@pytest.mark.parametrize("kind", [co.KFAC, co.EKFAC])
def test_a_prior_for_each_layer_and_selections(kind):
    for parameters in (None, "last_layer", "*weight", ["*bias"]):
        lin, inputs = linearized("mlp", parameters=parameters)
        curvature = kind(lin)
        prior = torch.zeros(lin.num_parameters, dtype=torch.float64)
        for i, part in enumerate(curvature.partition.parts):  # one number a block
            prior[list(part) if isinstance(part, range) else part] = 0.5 + i
        J, inverse = lin.jacobian(inputs), curvature.add_diagonal(prior).inverse()
        torch.testing.assert_close(point_covariances(J, inverse, 3), by_solves(J, inverse, 3), **TIGHT)
