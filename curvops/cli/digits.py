"""Scikit-learn's handwritten digits, 1,797 images of 8 x 8 pixels, which its package contains."""

from __future__ import annotations

from importlib import import_module

import torch
from jaxtyping import Float, Int
from torch import Tensor


def load_digits() -> tuple[Float[Tensor, "N 64"], Int[Tensor, " N"]]:
    """Return the images, with pixels in [0, 1], and their digits, in the order of scikit-learn."""
    try:
        dataset = import_module("sklearn.datasets").load_digits(return_X_y=True)
    except ImportError as error:
        raise ImportError("the digits need scikit-learn: pip install 'curvops[demo]'") from error
    x, y = (torch.as_tensor(array) for array in dataset)
    return x.float() / 16, y.long()
