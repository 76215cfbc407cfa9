"""Rank-normalised split R̂ and effective sample sizes of each entry, computed by ArviZ (Vehtari et al. 2021)."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from curvops.argument_types import Draws
from curvops.checks import check_choice
from curvops.sampling.core.chain_draws import checked_draws

LEAST_DRAWS = 4
"""The smallest number of draws for which a chain can be split into halves."""


def to_inference_data(draws: Draws) -> Any:
    """Convert draws to an `arviz.InferenceData` with a group `posterior`, for ArviZ's tables and plots.

    Args:
        draws: {name: tensor (chain, draw, ...)} or one such tensor, which gets the name "x".

    Returns:
        The `arviz.InferenceData`.

    Raises:
        ImportError: ArviZ is not installed (`pip install curvops[diagnostics]`).
        TypeError, ValueError: draws are of another kind, or not finite.

    Tensors on the CPU are not copied.

    Examples:
        >>> draws = torch.randn(2, 100, 3, generator=torch.Generator().manual_seed(0))
        >>> co.sampling.diagnostics.to_inference_data(draws).posterior.sizes["chain"]
        2
    """
    return _dataset(checked_draws(draws))


def rhat(draws: Draws) -> dict[str, Tensor]:
    """Compute the rank-normalised split R̂ of each entry; above 1.01, chains have not mixed (Vehtari et al. 2021).

    Args:
        draws: {name: tensor (chain, draw, ...)} or one such tensor, with at least two chains.

    Returns:
        {name: tensor of the parameter's shape}, in float64.

    Raises:
        ImportError, TypeError, ValueError: as `to_inference_data`, for a single chain, and for fewer than four draws
            per chain.

    Cost: about a millisecond for each entry; for many weights use `random_projections`.

    Examples:
        >>> draws = torch.randn(2, 100, 3, generator=torch.Generator().manual_seed(0))
        >>> bool((co.sampling.diagnostics.rhat(draws)["x"] < 1.1).all())
        True
    """
    checked = checked_draws(draws, chains=2, each=LEAST_DRAWS)
    return _tensors(_arviz().rhat(_dataset(checked), method="rank"), checked)


def ess(draws: Draws, kind: str = "bulk") -> dict[str, Tensor]:
    """Compute the effective sample size of each entry, over all chains together (Vehtari et al. 2021).

    Args:
        draws: {name: tensor (chain, draw, ...)} or one such tensor.
        kind: "bulk" for the rank-normalised draws, which measures the accuracy at the centre of the distribution;
            "tail" for the smaller one at the 5 % and the 95 % quantile, which measures it in the tails.

    Returns:
        {name: tensor of the parameter's shape}, in float64.

    Raises:
        ImportError, TypeError, ValueError: as `to_inference_data`, for fewer than four draws, and for another kind.

    Cost: as for `rhat`.

    Examples:
        >>> draws = torch.randn(2, 100, 3, generator=torch.Generator().manual_seed(0))
        >>> co.sampling.diagnostics.ess(draws)["x"].shape
        torch.Size([3])
    """
    check_choice("kind", kind, ("bulk", "tail"))
    checked = checked_draws(draws, each=LEAST_DRAWS)
    return _tensors(_arviz().ess(_dataset(checked), method=kind), checked)


def _arviz() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # ArviZ announces its next version once a day
            import arviz
    except ImportError as error:
        raise ImportError("R̂ and effective sample sizes need ArviZ: pip install curvops[diagnostics].") from error
    return arviz


def _dataset(checked: dict[str, Tensor]) -> Any:
    return _arviz().from_dict(posterior={name: tensor.detach().cpu().numpy() for name, tensor in checked.items()})


def _tensors(found: Any, checked: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: torch.as_tensor(found[name].values, dtype=torch.float64, device=tensor.device)
        for name, tensor in checked.items()
    }
