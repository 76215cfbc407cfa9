"""A transformer with 4 layers of width 128, as a classifier of sequences and as a language model."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

VOCABULARY = 5000
WIDTH, HEADS, DEPTH, LONGEST = 128, 4, 4, 64


class Attention(nn.Module):
    """Self-attention by plain matrix products: fused kernels have no forward-mode derivatives."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, width) to the same."""
        q, k, v = self.project(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if self.causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(later, -math.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention, then two linear layers, each after a normalisation and beside an identity."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(WIDTH), Attention(causal), nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, width) to the same."""
        x = x + self.attention(self.norm1(x))
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm2(x))))


class Transformer(nn.Module):
    """Tokens (N, T) to outputs (N, C) from the mean over positions, or (N, T, C) at each position."""

    def __init__(self, outputs: int, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.layers = nn.Sequential(*[Layer(causal) for _ in range(DEPTH)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """The outputs, logits."""
        places = torch.arange(x.shape[1], device=x.device).expand_as(x)
        hidden = self.norm(self.layers(self.tokens(x) + self.positions(places)))
        return self.head(hidden if self.causal else hidden.mean(1))


def classifier(outputs: int) -> nn.Module:
    """C outputs a sequence."""
    return Transformer(outputs, causal=False)


def language(outputs: int) -> nn.Module:
    """C outputs a position, from it and those before."""
    return Transformer(outputs, causal=True)
