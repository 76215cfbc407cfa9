"""The noise of a regression by leaving out each training point in turn, in closed form for the linearised network.

A network that fits its training data too well has residuals that are far smaller than its errors elsewhere. With all of
its weights fitted anew from 0, the linear model f(x, θ*) + J(x)(θ − θ*) predicts every point from the others with the
error a_n = ([(K + λ)⁻¹]_nn)⁻¹ [(K + λ)⁻¹ t]_n, for K = J Jᵀ and t = y − f + J θ* (Allen 1974; Rasmussen & Williams
2006, section 5.4.2). Its mean square, at the λ where it is smallest, estimates the error on further points.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.network import estimated_noise, gaps_and_weights, needs_noise
from curvops.operators import Linearization
from curvops.operators.function_space.gram_matrix import gram_matrix

MOST_ROWS = 2000
"""The largest number of training outputs for which J Jᵀ is formed and decomposed without being asked for."""
GRID = 20
"""The number of values of λ, over the range in which J Jᵀ is resolved."""


@torch.no_grad()
def with_left_out_noise(lin: Linearization) -> Linearization:
    """Return the linearisation with the larger of its residuals' and the left-out points' mean square as its noise.

    It is `lin` itself if its noise is not to be estimated, or if its data are not here or have too many outputs. Over a
    process group each rank takes the data of all, and the result of the first. The decomposition of J Jᵀ is made once
    for a linearisation, whatever posteriors are made from it.
    """
    if not needs_noise(lin.likelihood) or not lin.data.is_present or lin.num_data * lin.num_outputs > MOST_ROWS:
        return lin
    sums, known = lin.squared_residuals(), lin.known_now()
    if (squares := known.get("left-out squares")) is None:
        squares = left_out_squares(lin.gathered(), sums)
        if lin.ranks is not None:
            squares = squares.new_tensor(lin.ranks.gather(squares.tolist())[0])
        known["left-out squares"] = squares
    sums[0] = sums[0].maximum(squares)
    return lin.with_likelihood(estimated_noise(lin.likelihood, sums, lin.theta))


def left_out_squares(lin: Linearization, sums: Float[Tensor, "3 C"]) -> Float[Tensor, " C"]:
    """Return Σ w a², the squared errors of left-out points for each output, or 0 if J Jᵀ is not finite.

    All outputs of a point are left out together. For a noise of each output, outputs count in units of their targets.
    """
    whole, shape = lin.of_whole_network(), (lin.num_data, lin.num_outputs)
    gaps, weights = lin.passes.rows(
        lambda batch, J: gaps_and_weights(lin.likelihood, J.outputs, batch.targets, batch.weights), 2
    ).mT.double()
    units = (sums[1] / sums[2]).sqrt() if lin.likelihood.hyperparameters[0].numel() > 1 else torch.ones_like(sums[0])
    units = torch.where(units > 0, units, 1.0).repeat(lin.num_outputs // len(units)).repeat(lin.num_data)
    J = whole.jacobian()
    K = gram_matrix(J, J, torch.ones_like(whole.theta[0])).double()
    scale = weights.sqrt() / units
    t = scale * (J._matmul(whole.theta.unsqueeze(1)).squeeze(1).double() - gaps)
    K = scale.unsqueeze(1) * K * scale
    if not bool(K.isfinite().all() & t.isfinite().all()):
        return torch.zeros_like(sums[0])
    values, vectors = torch.linalg.eigh(K)
    values, largest = values.clamp_min(0), float(values[-1].clamp_min(torch.finfo(K.dtype).tiny))
    turned, blocks = vectors.mT @ t, vectors.view(*shape, -1)
    least = len(K) * torch.finfo(lin.theta.dtype).eps
    squares = blocks.square() if shape[1] == 1 else blocks  # bmm is slow for single rows
    found = []
    for power in torch.linspace(math.log10(least), 3, GRID).tolist():
        inverse = 1 / (values + largest * 10**power)
        own = (squares @ inverse).unsqueeze(2) if shape[1] == 1 else torch.bmm(blocks * inverse, blocks.mT)
        found.append(torch.linalg.solve(own, (vectors @ (inverse * turned)).view(*shape)).flatten())
    errors = min(found, key=lambda errors: float(errors.square().sum()))
    return (errors * units).square().view(-1, len(sums[0])).sum(0)
