"""The Bradley–Terry likelihood of preferences between two items, given the reward of each."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from curvops.network.likelihoods.categorical import Categorical


class BradleyTerry(Categorical):
    """The Bradley–Terry likelihood of preferences in pairs with rewards f (n, 2): p(second preferred) = σ(f₂ − f₁).

    It is the softmax of `Categorical` over the pair, so H is that of two classes. Targets are the index of the
    preferred item, 0 or 1, of an integer dtype, or the probabilities of both, floating-point rows (n, 2). Adding one
    number to all rewards changes nothing: a predicted preference depends only on the difference of the rewards, whose
    variance is v₁ + v₂ − 2 c₁₂, from their covariance.

    Args:
        label_smoothing: s in [0, 1), as in `Categorical`.

    Raises:
        ValueError: label_smoothing is out of range.

    Source: Bradley & Terry 1952; for reward models Stiennon et al. 2020, section 3.3.

    Examples:
        >>> pairs, preferred = torch.stack([x, x.flip(0)], 1), torch.zeros(8, dtype=torch.long)
        >>> rewards = co.likelihoods.RewardPairs(nn.Linear(2, 1))
        >>> lin = co.linearize(rewards, (pairs, preferred), co.likelihoods.BradleyTerry())
        >>> lin.output_shape
        torch.Size([2])
    """

    def __init__(self, label_smoothing: float | int = 0.0) -> None:
        super().__init__(label_smoothing=label_smoothing)

    def __repr__(self) -> str:
        return f"BradleyTerry(label_smoothing={self.label_smoothing:g})"

    def _check_classes(self, num_outputs: int) -> None:
        if num_outputs != 2:
            raise ValueError(
                f"BradleyTerry compares two rewards, but the model has {num_outputs} outputs. Wrap a model that rates "
                "one item as co.likelihoods.RewardPairs(model), and pass pairs of items, inputs (n, 2, ...)."
            )


class RewardPairs(nn.Module):
    """A model of one output per item, such as a reward model, applied to both items of each pair.

    Inputs are pairs: each tensor (n, 2, ...), alone, in a tuple or in a mapping, has the two items at dimension 1.
    Outputs are (n, 2), so that predictions include the covariance of the two. The parameters are the model's own, with
    names that begin with "model.".

    Args:
        model: a module that returns (n, 1) or (n,) for n items, or an object with such `logits`. It is called twice
            per pass.

    A call raises ValueError for inputs without this dimension and for outputs of another shape.

    Examples:
        >>> pairs = torch.stack([x, x.flip(0)], 1)
        >>> rewards = co.likelihoods.RewardPairs(nn.Linear(2, 1))
        >>> rewards(pairs).shape
        torch.Size([8, 2])
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor, **named: Tensor) -> Float[Tensor, "n 2"]:
        for tensor in (*inputs, *named.values()):
            if tensor.ndim < 2 or tensor.shape[1] != 2:
                raise ValueError(
                    f"RewardPairs takes inputs (n, 2, ...), two items per point, got shape {tuple(tensor.shape)}; "
                    "make them with torch.stack([first, second], 1)."
                )
        each = [self.model(*(x[:, i] for x in inputs), **{name: x[:, i] for name, x in named.items()}) for i in (0, 1)]
        return torch.stack([_rewards(found) for found in each], 1)


def _rewards(found: Any) -> Float[Tensor, " n"]:
    rewards: Tensor = getattr(found, "logits", found)
    if rewards.ndim > 2 or rewards.shape[1:].numel() != 1:
        raise ValueError(
            f"RewardPairs needs a model with one output per item, (n,) or (n, 1); it returns {tuple(rewards.shape)}."
        )
    return rewards.flatten()
