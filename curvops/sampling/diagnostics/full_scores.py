"""The gradient of the full log density at draws, from a log posterior that is a mean over data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from curvops.network.data.batches import parts_of
from curvops.sampling.chain import Chain
from curvops.sampling.evaluation import Evaluation
from curvops.sampling.log_density import LogPosterior


@torch.no_grad()
def scores(log_posterior: Any, chain: Chain, batches: Any, *, part: bool = False) -> Any:
    """∇ log p(θ | data) at each draw of a run, for `stein_discrepancy(chain, scores)`.

    It is N times the gradient of `log_posterior`, a mean over N points, added up over the batches by their sizes. Of a
    tempered posterior divide it by τ.

    Args:
        log_posterior: of `co.sampling.log_posterior`.
        chain: what `co.sampling.run` returned.
        batches: all data, `[(X, y)]` or a list of batches.
        part: True takes batches of a part of the data, N/n times their sum: unbiased scores where they are chosen at
            random, which the discrepancy's docstring says what to make of.

    Returns:
        A tree like `chain.params`, tensors (k, S, *shape).

    Raises:
        TypeError: another kind of log posterior, draws or batches.
        ValueError: the batches do not hold all N points, and `part` is not asked for.

    Cost: a gradient for each draw, many draws together where `torch.vmap` can.
    """
    if not isinstance(log_posterior, LogPosterior):
        raise TypeError(
            "scores takes co.sampling.log_posterior(...), which knows N and the sizes of batches, got "
            f"{type(log_posterior).__name__}; of a density of your own give its gradients to stein_discrepancy."
        )
    if not isinstance(chain, Chain):
        raise TypeError(f"scores takes the chain that co.sampling.run returned, got {type(chain).__name__}.")
    if isinstance(batches, Tensor | tuple) or not isinstance(batches, Iterable):
        raise TypeError(f"batches must be a list of batches, [(X, y)] for all data, got {type(batches).__name__}.")
    rows = chain.theta.flatten(0, 1)
    density, total, count = Evaluation(log_posterior), torch.zeros_like(rows), 0
    for batch in batches:
        points = len(parts_of(batch, log_posterior.weighted)[1])
        total += points * density.gradient(rows, chain.structure, batch)[1]
        count += points
    if count != log_posterior.data_size and not part:
        raise ValueError(
            f"the batches hold {count} points of {log_posterior.data_size}: give all of them, or part=True for scores "
            "of some, scaled to all."
        )
    if not count:
        raise ValueError("there is no batch.")
    return chain.structure.unflatten((total * (log_posterior.data_size / count)).view_as(chain.theta))
