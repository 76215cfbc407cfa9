"""The digits of the benchmarks: scikit-learn's handwritten digits, their fixed split, and how to turn an image.

The 1797 images of 8 x 8 pixels are part of the scikit-learn package (UCI "Optical recognition of handwritten
digits"), so nothing is downloaded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from curvops.cli import demo

ANGLES = (15, 30, 45, 60, 75, 90)
"""Degrees, counter-clockwise."""

AMBIGUOUS = (6, 9)
"""Digits left out of every comparison with rotated images: turned far enough, one becomes the other."""


@dataclass(frozen=True, eq=False)
class Images:
    """Images with pixels in [0, 1], and their digits."""

    x: Float[Tensor, "N 1 8 8"]
    y: Int[Tensor, " N"]

    def __len__(self) -> int:
        return len(self.y)

    def to(self, dtype: torch.dtype) -> Images:
        """Return the images in another dtype."""
        return Images(self.x.to(dtype), self.y)

    def first(self, n: int) -> Images:
        """Return the first `n` points; the splits are in random order, so they are a random subset."""
        return Images(self.x[:n], self.y[:n])

    def parts(self, share: float) -> tuple[Images, Images]:
        """Return the first `share` of the points and the rest, a random partition since the order is random."""
        cut = round(len(self) * share)
        return self.first(cut), Images(self.x[cut:], self.y[cut:])

    @property
    def is_unambiguous(self) -> Bool[Tensor, " N"]:
        """A mask of the digits that no rotation turns into another one (not 6 and 9)."""
        return torch.stack([self.y != digit for digit in AMBIGUOUS]).all(0)

    def unambiguous(self) -> Images:
        """Leave out the digits that a rotation turns into another digit."""
        return Images(self.x[self.is_unambiguous], self.y[self.is_unambiguous])

    def turn(self, degrees: float | int) -> Images:
        """Turn the images counter-clockwise, in degrees."""
        return Images(rotate(self.x, degrees), self.y)


@dataclass(frozen=True, eq=False)
class Digits:
    """One stratified split, the same for every seed of the network."""

    train: Images
    validation: Images
    test: Images


def all_digits() -> Images:
    """Load the 1797 digits in the order of scikit-learn."""
    return _images(*(part.numpy() for part in demo.load_digits()))


def load_digits(train: int = 1000, validation: int = 297) -> Digits:
    """Split the 1797 digits at random, stratified by class; the rest (500 by default) is the test set."""
    from sklearn.model_selection import train_test_split

    x, y = (part.numpy() for part in demo.load_digits())
    x_train, x_rest, y_train, y_rest = train_test_split(x, y, train_size=train, stratify=y, random_state=0)
    x_val, x_test, y_val, y_test = train_test_split(
        x_rest, y_rest, train_size=validation, stratify=y_rest, random_state=0
    )
    return Digits(_images(x_train, y_train), _images(x_val, y_val), _images(x_test, y_test))


def _images(x: np.ndarray, y: np.ndarray) -> Images:
    return Images(torch.as_tensor(x).reshape(-1, 1, 8, 8), torch.as_tensor(y))


def rotate(images: Float[Tensor, "N ch H W"], degrees: float | int) -> Float[Tensor, "N ch H W"]:
    """Rotate images counter-clockwise about their centre, bilinearly, with black outside; 90 degrees is exact."""
    angle = math.radians(degrees)
    c, s = math.cos(angle), math.sin(angle)
    # affine_grid maps output positions to input positions, x to the right and y down
    matrix = images.new_tensor([[c, -s, 0.0], [s, c, 0.0]]).expand(len(images), 2, 3)
    grid = torch.nn.functional.affine_grid(matrix, list(images.shape), align_corners=True)
    return torch.nn.functional.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=True)
