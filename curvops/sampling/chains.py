"""Several chains side by side, by `torch.vmap` or by a loop: the draws are the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from curvops.checks import check_flag, checked_whole
from curvops.sampling.transition import Transition


def chains(sampler: Any, k: int, *, vectorized: bool | None = None) -> Any:
    """The sampler running k chains at once: its states and infos have a first dimension of k.

    Each chain draws from a generator of its own, seeded by `init`'s: the noise is bit for bit that of k single chains
    with these generators, however they are computed. A schedule is one for all of them.

    Args:
        sampler: of `co.sampling`, of one chain.
        k: the number of chains, at least 1.
        vectorized: True computes all gradients together by `torch.vmap`, False one by one; None does the first where
            `log_posterior` allows it, and else the second with a `NotVectorized` warning.

    Raises:
        TypeError, ValueError: k is no number of chains, or the sampler has chains already; at the first step, a module
            that normalises by batch statistics.

    Cost: k times the memory of one; together, of a small network, far less than k times its time.
    """
    if not isinstance(sampler, Transition):
        raise TypeError(f"chains takes a sampler of co.sampling (sgld, …), got {type(sampler).__name__}.")
    if sampler.chains is not None:
        raise ValueError(f"the sampler runs {sampler.chains} chains already; give the sampler of one.")
    count = checked_whole("k", k, kind="a whole number of chains")
    if vectorized is not None:
        check_flag("vectorized", vectorized)
    return replace(sampler, chains=count, density=replace(sampler.density, vectorized=vectorized, _together=[]))
