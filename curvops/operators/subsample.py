"""A random subset of the data, weighted so that every sum over it is unbiased."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from curvops.checks import check_generator, check_kind, checked_whole
from curvops.operators.curvatures.subnetwork import checked_indices
from curvops.operators.linearized.linearization import Linearization


def subsample(
    lin: Linearization, m: int | Int[Tensor, " m"], generator: torch.Generator | None = None
) -> Linearization:
    """Linearise the network on m of its N points, each with N/m times its weight.

    Curvatures, gradients and log-likelihoods of the result are unbiased estimates of those of all points: their mean
    over all subsets of m points equals the full value. The posterior of one subset is not unbiased.

    Args:
        lin: the linearisation of all data.
        m: the number of points to draw without replacement, or their positions (m,).
        generator: the source of the draw.

    Returns:
        A linearisation with its own engines, within the memory budget of `lin`. Costs a pass over the data; the chosen
        points are copied.

    Raises:
        TypeError, ValueError: `lin` is not a linearisation, m is not between 1 and N, or positions are out of range or
            repeated.

    Examples:
        >>> few = co.subsample(lin, 4, generator=torch.Generator().manual_seed(0))
        >>> few.num_data, co.GGN(few).shape
        (4, torch.Size([17, 17]))
    """
    check_kind("lin", lin, Linearization, "a linearisation, co.linearize(…)")
    chosen = _positions(m, lin.num_data, generator)
    lin.passes.agree({"the chosen points, from m and generator": chosen.tolist()})
    return lin.restrict(chosen, lin.num_data / len(chosen))


def _positions(m: int | Tensor, num_data: int, generator: torch.Generator | None) -> Int[Tensor, " m"]:
    check_generator(generator)
    if isinstance(m, Tensor) and m.ndim:
        return checked_indices(m, num_data).cpu().sort().values
    count = checked_whole("m", m, 1, num_data, "a whole number of points or a vector of their positions")
    device = None if generator is None else generator.device
    return torch.randperm(num_data, generator=generator, device=device)[:count].cpu().sort().values
