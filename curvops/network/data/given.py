"""The tensors and arrays that a user hands in: read once, at the call, unless they are being learned.

A linearisation, a posterior and a sampler hold copies of the small tensors that they are given (noise, class weights,
prior precision and mean, positions): a later change in place changes no answer. A tensor that requires a gradient is
held itself, so that answers and gradients are those of its present value. Data are not copied, and are compared by
fingerprints (`network.data.batches`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.hooks import unserializable_hook


def tensor_of(x: Any) -> Any:
    """The tensor of a NumPy array, sharing its memory where torch can; anything else as it is.

    Raises TypeError for an array that holds no numbers.
    """
    if not isinstance(x, np.ndarray):
        return x
    if x.dtype.kind == "u" and x.dtype.itemsize > 1:
        x = x.astype(np.int64)  # torch has hardly any operation on these
    try:
        return torch.from_numpy(x if x.flags.writeable and min(x.strides, default=0) >= 0 else x.copy())
    except TypeError as error:
        raise TypeError(
            f"an array of {x.dtype} cannot become a tensor: {error} Convert it with x.astype(float)."
        ) from None


def own(given: Tensor, used: Tensor, what: str) -> Tensor:
    """`used`, the tensor made of `given`, in memory of its own; the tensor given itself where that is being learned.

    Where another tensor was made of one that is being learned (another dtype, an entry of a mapping) it keeps the value
    of the call, and a gradient through it that is asked for after a change is refused with a ValueError.
    """
    if not used.requires_grad:
        return used.clone()
    if used is given:
        return used
    value = given.detach().clone()

    def require_unchanged(gradient: Tensor) -> None:
        if not bool((given.detach() == value).all()):
            raise ValueError(
                f"{what} changed after it was given, and a copy of it was made then (another dtype or device, an entry "
                "of a mapping), so that this gradient is not at its present value. Make the linearisation or the "
                "posterior again after each change, or give a tensor like the weights: it is followed."
            )

    used = used.view_as(used)
    used.register_hook(unserializable_hook(require_unchanged))
    return used
