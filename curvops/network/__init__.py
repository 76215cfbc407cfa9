"""The network itself: parameters, likelihoods, data and engines; the interface for the floors above."""

from curvops.network import likelihoods
from curvops.network.data.batches import Batch
from curvops.network.data.inputs import move
from curvops.network.data.randomness import PointNormals, own_randomness
from curvops.network.engines.layer_calls import Layer
from curvops.network.engines.plan import EngineChoice, Plan
from curvops.network.likelihoods.gaussian import (
    estimated_noise,
    gaps_and_weights,
    gaussians_with_sums,
    mean_squares,
)
from curvops.network.likelihoods.output_fisher import Empirical, Exact, OutputFisher, Sampled
from curvops.network.model.model import Model, tensors_of
from curvops.network.model.parameters import Blocks, TangentSpace, read_mean, read_precision
from curvops.network.trained.network_record import record_of_network, recorded_network
from curvops.network.trained.trained_network import TrainedNetwork
from curvops.network.walks.budget import BatchMap, linear
from curvops.network.walks.input_graphs import InputGraph
from curvops.network.walks.layer_roots import Group, JacobianRows
from curvops.network.walks.row_squares import OuterRows, score_and_diagonal, squared_columns
from curvops.network.walks.walk import Passes, accumulate, by_points, shuffled

__all__ = [
    "Batch",
    "BatchMap",
    "Blocks",
    "Empirical",
    "EngineChoice",
    "Exact",
    "Group",
    "InputGraph",
    "JacobianRows",
    "Layer",
    "Model",
    "OuterRows",
    "OutputFisher",
    "Passes",
    "Plan",
    "PointNormals",
    "Sampled",
    "TangentSpace",
    "TrainedNetwork",
    "accumulate",
    "by_points",
    "estimated_noise",
    "gaps_and_weights",
    "gaussians_with_sums",
    "likelihoods",
    "linear",
    "mean_squares",
    "move",
    "own_randomness",
    "read_mean",
    "read_precision",
    "record_of_network",
    "recorded_network",
    "score_and_diagonal",
    "shuffled",
    "squared_columns",
    "tensors_of",
]
