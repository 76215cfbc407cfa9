"""A saved posterior, read again for the model that it is of."""

from __future__ import annotations

import os
from typing import Any

from curvops import storage
from curvops.operators.linearization_record import recorded_linearization
from curvops.posterior.gaussian_posterior import GaussianPosterior
from curvops.posterior.laplace import Laplace
from curvops.posterior.posterior_record import KIND, OF_GAUSSIANS, VERSIONS, recorded_gaussian, recorded_parts
from curvops.progress import Progress


def load(
    path: str | os.PathLike[str],
    model: Any,
    data: Any = None,
    likelihood: Any = None,
    *,
    memory_budget: int | None = None,
    progress: Progress = None,
) -> Any:
    """The posterior that `post.save(path)` wrote, of the same model.

    Args:
        path: the folder.
        model: the network as it was linearised, an `nn.Module` or a pair (function, parameters), with the weights, the
            buffers and the dtype that it had then; the posterior is made on its device.
        data: the training data as `co.linearize` takes them, in the same batches (tensors and Datasets are divided as
            they were). Without them a posterior whose curvature has a structure (KFAC, EKFAC, diagonal, low rank,
            dense, blocks, subnetwork) predicts, samples and has its evidence (at mode="map"); what walks over the data
            says that they are missing. Needed where the curvature is a GGN, a Fisher or a Hessian itself.
        likelihood: the function or class of one's own, where the posterior has such a likelihood; those of
            `co.likelihoods` are saved.
        memory_budget: as in `co.linearize`.
        progress: likewise.

    Returns:
        What was saved, a `Laplace` or a `GaussianPosterior`. Where the curvature has a structure its predictions have
        the bits that they had, on a machine and with a torch of the same kind, and with as large a memory budget.

    Raises:
        FileNotFoundError: nothing was saved there.
        ValueError: another model, other data or another likelihood than saved, with what differs by name; files that
            are truncated, changed, or of a newer version; a curvature that needs the data, and no data.
        TypeError: an argument of another kind.

    Nothing of the files is unpickled, imported or executed. Cost: a pass over the files and one over the weights, a few
    passes of the model over two points; with data, one over these.
    """
    version, record = storage.load(path, KIND, max(VERSIONS))
    lin = recorded_linearization(record["linearization"], model, data, likelihood, memory_budget, progress)
    if version == OF_GAUSSIANS:
        return GaussianPosterior.of(lin, **recorded_gaussian(record, lin))
    return Laplace(lin, **recorded_parts(record, lin))
