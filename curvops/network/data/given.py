"""Tensors and arrays given by the user: copied at the call, unless they require a gradient.

A linearisation, a posterior and a sampler keep copies of the small tensors that they are given (noise, class weights,
prior precision and mean, positions): a later change in place has no effect. A tensor that requires a gradient is kept
itself, so that results and gradients belong to its present value. Data are not copied but compared by fingerprints
(`network.data.batches`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.hooks import unserializable_hook


def tensor_of(x: Any) -> Any:
    """Convert a NumPy array to a tensor, sharing its memory where torch can; return anything else unchanged.

    Raises TypeError for an array that holds no numbers.
    """
    if not isinstance(x, np.ndarray):
        return x
    if x.dtype.kind == "u" and x.dtype.itemsize > 1:
        x = x.astype(np.int64)  # torch has hardly any operations for unsigned integers
    try:
        return torch.from_numpy(x if x.flags.writeable and min(x.strides, default=0) >= 0 else x.copy())
    except TypeError as error:
        raise TypeError(
            f"an array of {x.dtype} cannot become a tensor: {error} Convert it with x.astype(float)."
        ) from None


def own(given: Tensor, used: Tensor, what: str) -> Tensor:
    """Copy `used`, the tensor made from `given`, or return `given` itself where it requires a gradient.

    Where `given` requires a gradient and `used` is a conversion of it (another dtype, an entry of a mapping), the
    conversion keeps the value at the call, and a backward pass through it after a change raises ValueError.
    """
    if not used.requires_grad:
        return used.clone()
    if used is given:
        return used
    value = given.detach().clone()

    def require_unchanged(gradient: Tensor) -> None:
        if not bool((given.detach() == value).all()):
            raise ValueError(
                f"{what} changed after it was given. It had been converted (another dtype or device, an entry of a "
                "mapping), so that this gradient does not belong to its present value. Build the linearisation or the "
                "posterior again after each change, or give a tensor with the weights' dtype and device, whose changes "
                "take effect."
            )

    used = used.view_as(used)
    used.register_hook(unserializable_hook(require_unchanged))
    return used
