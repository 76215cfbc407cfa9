"""Loading posteriors and operators for the model that they belong to, and saving a single operator."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops import storage
from curvops.ambient import Progress
from curvops.argument_types import Collate, Data, LikelihoodChoice, Network, Points
from curvops.checks import check_kind
from curvops.network import record_of_network, recorded_network
from curvops.operators import Linearization
from curvops.operators.operator_record import operator_of_record, record_of_operator, value_of_record
from curvops.posterior.gaussians.gaussian_posterior import KIND, OF_GAUSSIANS, VERSIONS, GaussianPosterior
from curvops.posterior.gaussians.laplace import Laplace
from curvops.posterior.terms import CurvatureCache, KroneckerPrior, Prior, check_operator

OPERATOR, OF_OPERATORS = "operator", 1
"""The kind of an operator's folder, and the version of its schema."""
PRIORS = {kind.__name__: kind for kind in (KroneckerPrior, Prior)}


def save(
    operator: LinearOperator, path: str | os.PathLike[str], lin: Linearization, inputs: Points | None = None
) -> None:
    """Write an operator into a folder, from which `co.load(path, model)` reads it again, as `post.save` does.

    Args:
        operator: a curvature (D, D), its sum with a prior or its inverse: co.KFAC(lin), co.low_rank(op), …. A GGN, a
            Fisher or a Hessian is saved by reference to its data, which `co.load` then needs.
        path: the folder; it is created with its parent folders. An earlier operator in it is replaced in one step.
        lin: the linearisation that the operator belongs to; its weights and fingerprints are saved.
        inputs: inputs of one or two points, to save in place of the first two training inputs.

    Raises:
        OSError: the folder could not be written (a full disk); an earlier operator is unchanged.
        FileExistsError: the path is a file, or contains something other than an operator.
        ValueError: the operator has another size, other weights, or a class that cannot be saved.
        TypeError: an argument is of another kind; to save a posterior, use post.save(path).

    Gradients are not saved. Cost: writing as many numbers as the operator has.

    Examples:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> co.save(co.KFAC(lin), folder, lin)
        >>> co.load(folder, model, (x, y))
        KFAC(17 × 17, 2 blocks, on 8 points, float32, cpu)
    """
    if not isinstance(operator, LinearOperator):
        hint = "; to save a posterior, use post.save(path)" if hasattr(operator, "save") else ""
        raise TypeError(f"save takes an operator, such as co.KFAC(lin), got {type(operator).__name__}{hint}.")
    check_kind("lin", lin, Linearization, "the linearisation of the operator, co.linearize(...)")
    check_operator("operator", operator, lin.model)
    with torch.no_grad():
        record = {
            "linearization": record_of_network(lin, inputs),
            "operator": record_of_operator(operator, lin, "the operator"),
        }
    lin.write_once(partial(storage.save, path, OPERATOR, OF_OPERATORS, record))


def load(
    path: str | os.PathLike[str],
    model: Network,
    data: Data | None = None,
    likelihood: LikelihoodChoice | None = None,
    *,
    load_weights: bool = False,
    memory_budget: int | None = None,
    progress: Progress = None,
    inputs: Points | None = None,
    collate: Collate | None = None,
) -> Any:
    """Read the posterior that `post.save(path)` wrote, or the operator that `co.save` wrote, for the same model.

    Args:
        path: the folder.
        model: the network as it was linearised, an `nn.Module` or a pair (function, parameters), with the same weights,
            buffers and dtype; the posterior is placed on its device.
        data: the training data as in `co.linearize`, in any batches and order (with a Monte-Carlo Fisher, in their
            original order). Without them, a posterior whose curvature has a structure (KFAC, EKFAC, diagonal, low rank,
            dense, blocks, subnetwork) predicts, samples and has its evidence (at mode="map"), and methods that need the
            data raise an error. They are required if the curvature itself is a GGN, a Fisher or a Hessian.
        likelihood: your own function or class, if the posterior has such a likelihood; those of `co.likelihoods` are
            saved. For several outputs those of all, as to `co.linearize`, if one is such a likelihood.
        load_weights: True writes the saved weights into the model, which may then be untrained. They are those that
            were linearised: buffers and, under a selection, other parameters have to be loaded before
            (``model.load_state_dict``). The model is unchanged if it differs in anything else.
        memory_budget: as in `co.linearize`.
        progress: as in `co.linearize`.
        inputs: for a posterior of points that are objects (graphs, texts), which are not saved, without its data: the
            first two training points or, if `post.save(path, inputs)` was given some, these.
        collate: as in `co.linearize`, for data or inputs that are lists of points.

    Returns:
        The saved object: a `Laplace`, a `GaussianPosterior` or an operator. If the curvature has a structure, its
        predictions and the products of an operator are bitwise the same as before, on the same kind of machine with the
        same torch, and with as large a memory budget.

    Raises:
        FileNotFoundError: nothing was saved there.
        ValueError: the model, the data or the likelihood differ from those saved (the message names the difference);
            files are truncated, changed, or of a newer version; or the curvature needs the data, and none are given.
        TypeError: an argument is of another kind.

    Nothing in the files is unpickled, imported or executed. Cost: a pass over the files and one over the weights, a few
    passes of the model over two points; with data, one pass over these.

    Examples:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> post.save(folder)
        >>> co.load(folder, model, (x, y)).prior_precision
        tensor(1.)
    """

    def network(record: Any) -> Linearization:
        return recorded_network(
            Linearization, record, model, data, likelihood, load_weights, memory_budget, progress, inputs, collate
        )

    if storage.kind_of(path) == OPERATOR:
        _, record = storage.load(path, OPERATOR, OF_OPERATORS)
        return operator_of_record(record["operator"], network(record["linearization"]))
    version, record = storage.load(path, KIND, max(VERSIONS))
    lin = network(record["linearization"])
    if version == OF_GAUSSIANS:
        saved = {name: record[name] for name in ("covariance", "precision") if record[name] is not None}
        return GaussianPosterior.of(
            lin, **{name: operator_of_record(operator_record, lin) for name, operator_record in saved.items()}
        )
    return _read_laplace(record, lin)


def _read_laplace(record: Mapping[str, Any], lin: Linearization) -> Laplace:
    device, saved = lin.theta.device, record["prior"]
    curvature, precision = operator_of_record(record["curvature"], lin), value_of_record(saved["precision"], lin)
    check_operator("the saved curvature", curvature, lin.model)
    if not isinstance(precision, Tensor):
        check_operator("the saved prior precision", precision, lin.model)
    cache = CurvatureCache(lin, curvature, checks_mode=False)  # the data may be absent
    for name, tensor in (("log likelihood", record["log_likelihood"]), ("gradient", record["gradient"])):
        if tensor is not None:
            cache.put(name, tensor.to(device))
    # Folders of version 0.2 do not say what chose the precision.
    prior = PRIORS[saved["class"]](precision, saved["mean"].to(device), saved.get("chosen_by", ""))
    error = value_of_record(record["prior_error"], lin)
    return Laplace(lin, curvature, prior, cache, record["temperature"], error)
