"""Batches of several lengths, as texts have them, choose the same prior as the same texts padded to one length."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import curvops as co

WORDS, LENGTHS = 12, (3, 5, 8)


class Text(nn.Module):
    """The mean of a text's embedded words, 0 for padding, mapped to the logits of three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.map = nn.Embedding(WORDS, 4, padding_idx=0), nn.Linear(4, 3)

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        rows = self.embed(words).tanh() * mask.unsqueeze(-1)
        return self.map(rows.sum(1) / mask.sum(1, keepdim=True))


def items(count: int, seed: int) -> list[tuple[Tensor, int]]:
    generator = torch.Generator().manual_seed(seed)
    texts = [torch.randint(1, WORDS, (LENGTHS[i % 3],), generator=generator) for i in range(count)]
    return [(text, int(text.sum()) % 3) for text in texts]


def together(texts: list[tuple[Tensor, int]], length: int = 0) -> tuple[tuple[Tensor, Tensor], Tensor]:
    words = pad_sequence([text for text, _ in texts], batch_first=True)
    words = nn.functional.pad(words, (0, max(0, length - words.shape[1])))
    return (words, (words > 0).double()), torch.tensor([label for _, label in texts])


def batches(texts: list[tuple[Tensor, int]]) -> DataLoader[Any]:
    texts = sorted(texts, key=lambda item: len(item[0]))
    return DataLoader(texts, 4, collate_fn=together)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("error::curvops.errors.UndeterminedWarning")
@pytest.mark.parametrize("validated", [True, False], ids=["by held-out data", "by the variance of the logits"])
def test_the_prior_is_that_of_texts_padded_to_one_length(validated: bool) -> None:
    model, train, held_out = Text().double(), items(24, 0), items(30, 1)
    model.map.weight.data.mul_(6)
    right = model(*together(held_out)[0]).argmax(1).tolist()
    held_out = [(text, (label + (i % 5 == 0)) % 3) for i, ((text, _), label) in enumerate(zip(held_out, right))]
    assert len({x[0].shape for x, _ in batches(held_out)}) > 1
    chosen: list[Tensor] = []
    for data in (batches, lambda texts: together(texts, max(LENGTHS))):
        lin = co.linearize(model, data(train), "classification", "map.*")
        chosen.append(co.laplace(lin, co.GGN, validation=data(held_out) if validated else None).prior_precision)
        with pytest.raises(ValueError, match="these are the training data"):
            co.laplace(lin, co.GGN, validation=data(train))
    torch.testing.assert_close(*chosen, rtol=1e-8, atol=0)
