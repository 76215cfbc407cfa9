"""Metrics against scikit-learn, against brute force and against their definitions."""

import itertools
import math

import numpy as np
import pytest
import torch
from sklearn import metrics as reference

from curvops import metrics


@pytest.fixture
def problem() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(200, 5, dtype=torch.float64, generator=generator)
    return logits.softmax(-1), torch.randint(0, 5, (200,), generator=generator)


def test_scores_against_scikit_learn(problem: tuple[torch.Tensor, torch.Tensor]) -> None:
    p, y = problem
    assert float(metrics.accuracy(p, y)) == reference.accuracy_score(y, p.argmax(-1))
    assert float(metrics.nll(p, y)) == pytest.approx(reference.log_loss(y, p), rel=1e-10)
    assert float(metrics.nll(p, y, reduction="none").mean()) == pytest.approx(float(metrics.nll(p, y)), rel=1e-12)
    truth = np.eye(5)[y]
    assert float(metrics.brier(p, y)) == pytest.approx(float(((p.numpy() - truth) ** 2).sum(1).mean()), rel=1e-10)


def test_ece_by_brute_force(problem: tuple[torch.Tensor, torch.Tensor]) -> None:
    p, y = problem
    total = 0.0
    confidence, predicted = p.max(-1)
    for b in range(15):
        inside = (confidence > b / 15) & (confidence <= (b + 1) / 15)
        if inside.any():
            gap = (predicted[inside] == y[inside]).double().mean() - confidence[inside].mean()
            total += float(gap.abs()) * int(inside.sum()) / len(y)
    assert float(metrics.ece(p, y)) == pytest.approx(total, abs=1e-10)


def test_bins_count_every_point_once_and_mark_empty_ones() -> None:
    p = torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.8, 0.2]], dtype=torch.float64)
    table = metrics.reliability_bins(p, torch.tensor([0, 1, 0]), bins=5)
    assert table.count.tolist() == [0, 0, 1, 1, 1]
    assert table.accuracy[2:].tolist() == [0.0, 1.0, 1.0]
    assert torch.isnan(table.accuracy[:2]).all()
    assert torch.isnan(table.confidence[:2]).all()


def test_more_pixels_than_single_precision_counts() -> None:
    p = torch.tensor([[0.75, 0.25]]).expand(20_000_000, 2)
    assert float(metrics.ece(p, torch.zeros(len(p), dtype=torch.long))) == pytest.approx(0.25, abs=1e-6)


@pytest.mark.parametrize("levels", [3, 10_000], ids=["ties", "distinct"])
def test_auroc_against_scikit_learn_and_pairs(levels: int) -> None:
    generator = torch.Generator().manual_seed(levels)
    scores = torch.randint(0, levels, (90,), generator=generator).double() / levels
    positive = torch.rand(90, generator=generator) < 0.3
    expected = reference.roc_auc_score(positive, scores)
    pairs = [
        (a > b) + 0.5 * (a == b) for a, b in itertools.product(scores[positive].tolist(), scores[~positive].tolist())
    ]
    value = float(metrics.auroc(scores, positive))
    assert value == pytest.approx(expected, abs=1e-10) == pytest.approx(sum(pairs) / len(pairs), abs=1e-10)
    assert float(metrics.auroc(scores, positive.long())) == value
    assert float(metrics.auroc(-scores, positive)) == pytest.approx(1 - value, abs=1e-10)
    counts, maps = (scores * levels).round().long(), positive.view(3, 5, 6)
    assert float(metrics.auroc(counts.view(3, 5, 6), maps)) == pytest.approx(value, abs=1e-6), "whole numbers"


def test_entropy_bounds_and_value(problem: tuple[torch.Tensor, torch.Tensor]) -> None:
    p, _ = problem
    entropy = metrics.predictive_entropy(p)
    torch.testing.assert_close(entropy, torch.distributions.Categorical(probs=p).entropy(), rtol=1e-10, atol=1e-10)
    uniform = torch.full((1, 8), 1 / 8, dtype=torch.float64)
    assert float(metrics.predictive_entropy(uniform)) == pytest.approx(math.log(8), rel=1e-12)
    assert float(metrics.predictive_entropy(torch.eye(3)).sum()) == 0.0


def test_mutual_information_is_the_mean_divergence_from_the_mean() -> None:
    samples = torch.randn(7, 20, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).softmax(-1)
    mean = samples.mean(0)
    divergence = (samples * (samples.log() - mean.log())).sum(-1).mean(0)
    torch.testing.assert_close(metrics.mutual_information(samples), divergence, rtol=1e-10, atol=1e-12)
    agreeing = samples[:1].expand(7, -1, -1)
    assert float(metrics.mutual_information(agreeing).abs().max()) <= 1e-15
    opposite = torch.eye(2, dtype=torch.float64)[:, None]
    assert float(metrics.mutual_information(opposite)) == pytest.approx(math.log(2), rel=1e-12)


def test_temperature_is_the_stationary_point(problem: tuple[torch.Tensor, torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(400, 5, dtype=torch.float64, generator=generator)
    y = torch.distributions.Categorical(logits=logits).probs.multinomial(1, generator=generator).squeeze(1)
    sharp = 4 * logits
    t = metrics.temperature(sharp, y)
    grid = torch.linspace(0.5, 1.5, 201, dtype=torch.float64) * t
    values = torch.stack([metrics.nll((sharp / s).softmax(-1), y) for s in grid])
    assert int(values.argmin()) == 100
    assert 3 < float(t) < 5.5
    scale = t.clone().requires_grad_()
    slope = torch.autograd.grad(torch.nn.functional.cross_entropy(sharp / scale, y), scale)[0]
    assert abs(float(slope)) < 1e-10
    # scaling the logits scales the temperature
    assert float(metrics.temperature(3 * sharp, y)) == pytest.approx(3 * float(t), rel=1e-10)


def test_temperature_stops_at_its_bounds() -> None:
    logits = torch.eye(4, dtype=torch.float64)
    for shift, bound in ((0, 0.5), (1, 2.0)):
        with pytest.warns(UserWarning, match=f"T is the bound {bound}"):
            assert float(metrics.temperature(logits, (torch.arange(4) + shift) % 4, bounds=(0.5, 2.0))) == bound


@pytest.mark.parametrize("labels", [torch.tensor([0, 1]), torch.tensor([[0], [1]]), torch.tensor([0.0, 1.0])])
def test_one_column_of_probabilities_is_refused_with_the_line_to_write(labels: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"pass torch\.cat\(\[1 - q, q\], 1\)"):
        metrics.nll(torch.tensor([[0.2], [0.7]]), labels)


@pytest.mark.usefixtures("annotations_unchecked")
def test_several_labels_of_a_point_are_refused_with_the_line_to_write() -> None:
    Q, Y = torch.tensor([[0.9, 0.2], [0.4, 0.7]]), torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    with pytest.raises(ValueError, match=r"torch.stack\(\[1 - Q.flatten\(\), Q.flatten\(\)\], 1\)"):
        metrics.nll(Q, Y)
    pairs = torch.stack([1 - Q.flatten(), Q.flatten()], 1)
    expected = -torch.tensor([0.9, 0.8, 0.4, 0.7]).log().mean()
    torch.testing.assert_close(metrics.nll(pairs, Y.flatten().long()), expected)
