"""Matrices that the library sees through their products alone, with the promises that a test makes for them."""

import torch

from curvops.linalg import Operator


class Known(Operator):
    """A matrix known by its products."""

    def __init__(self, matrix, is_symmetric=True, is_psd=False):
        super().__init__(matrix, is_symmetric=is_symmetric, is_psd=is_psd)

    @property
    def symmetric(self):
        return self._kwargs["is_symmetric"]

    @property
    def psd(self):
        return self._kwargs["is_psd"]

    def _size(self):
        return self._args[0].shape

    def _product(self, block):
        return self._args[0] @ block

    def _transposed_product(self, block):
        return self._args[0].mT @ block


class Noted(Known):
    """A matrix that notes what it is multiplied with, in `blocks`."""

    def __init__(self, matrix, is_symmetric=True, is_psd=False):
        super().__init__(matrix, is_symmetric, is_psd)
        self.blocks = []

    def _product(self, block):
        self.blocks.append(block.clone())
        return super()._product(block)

    @property
    def probes(self):
        """The columns of length √n, which random probes have; those of an orthonormal basis have length 1."""
        columns = torch.cat(self.blocks, 1)
        return columns[:, columns.norm(dim=0) > 2]


class Rooted(Known):
    """A positive semidefinite matrix with a known root, by which samples are drawn."""

    def __init__(self, matrix, is_symmetric=True, is_psd=True):
        super().__init__(matrix, is_symmetric, is_psd)

    def _draw(self, k, generator):
        values, vectors = torch.linalg.eigh(self._args[0])
        noise = torch.randn(len(values), k, generator=generator, dtype=values.dtype)
        return vectors @ (values.clamp_min(0).sqrt()[:, None] * noise)
