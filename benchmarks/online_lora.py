"""Does an adapter keep what it learnt in earlier episodes?            python -m benchmarks.online_lora

After Duffield et al. 2024, who adapt Llama 2 to one book after another. Here a two-block GPT-2, built from its
configuration and trained on sentences of a random language, adapts to four dialects by LoRA on the attention of its
last block. The knowledge of earlier dialects is a penalty, the additive Fisher of all of them or of the last one alone,
or the state of an extended Kalman filter. The table and the figure go into the page (`--page`) and next to it.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass

import peft
import torch
import transformers
from matplotlib.figure import Figure
from torch import Tensor, nn

import curvops as co
from benchmarks import study_page
from benchmarks.claims import claims_table, spread
from benchmarks.tables import tables
from curvops.plots import style

EPISODES, WORDS, OWN, LENGTH = 4, 24, 6, 16
SENTENCES, TEST = 32, 64
WIDTH, BLOCKS, HEADS = 32, 2, 2
RANK, ALPHA = 8, 32
FAVOUR = 5.0
PRETRAINING, STEPS, RATE = 250, 80, 0.01
PRIOR, STRENGTHS = 1e-2, (1.0, 10.0)
"""The strength ω multiplies the penalty: 1 is the posterior's own."""
FILTER_PRIOR, BATCH = 1.0, 4


class Logits(nn.Module):
    """The logits alone of a language model, (N, T, WORDS)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute the logits of the words after each token."""
        return self.model(input_ids=tokens).logits


Data = tuple[Tensor, Tensor]
"""Tokens (N, T) and those after them."""


def grammars(seed: int) -> list[Tensor]:
    """Which word follows which, in the base language and in each dialect.

    A dialect has words of its own: what follows them is new, and they follow others more often.
    """
    generator = torch.Generator().manual_seed(seed)
    base = (2 * torch.randn(WORDS, WORDS, generator=generator)).softmax(1)
    found = [base]
    for episode in range(EPISODES):
        own = slice(episode * OWN, (episode + 1) * OWN)
        dialect = base.clone()
        dialect[own] = (2 * torch.randn(OWN, WORDS, generator=generator)).softmax(1)
        dialect[:, own] *= FAVOUR
        found.append(dialect / dialect.sum(1, keepdim=True))
    return found


def sentences(grammar: Tensor, n: int, generator: torch.Generator) -> Data:
    """Random sentences of a language."""
    words = [torch.randint(WORDS, (n,), generator=generator)]
    for _ in range(LENGTH):
        words.append(torch.multinomial(grammar[words[-1]], 1, generator=generator).squeeze(1))
    tokens = torch.stack(words, 1)
    return tokens[:, :-1], tokens[:, 1:]


def misfit(model: nn.Module, data: Data, reduction: str = "sum") -> Tensor:
    """Cross-entropy of the words, in nats."""
    return nn.functional.cross_entropy(model(data[0]).flatten(0, 1), data[1].flatten(), reduction=reduction)


def descend(model: nn.Module, loss: Callable[[], Tensor], steps: int) -> None:
    """Adam, its rate falling to zero, over what requires a gradient."""
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(weights, lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        schedule.step()


def pretrained(seed: int, steps: int = PRETRAINING) -> nn.Module:
    """A small GPT-2 that speaks the base language."""
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=WORDS,
        n_positions=LENGTH,
        n_embd=WIDTH,
        n_layer=BLOCKS,
        n_head=HEADS,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model, grammar = Logits(transformers.GPT2LMHeadModel(config)).eval(), grammars(seed)[0]
    generator = torch.Generator().manual_seed(seed)
    descend(model, lambda: misfit(model, sentences(grammar, TEST, generator), "mean"), steps)
    return model


def adapted(base: nn.Module, seed: int) -> nn.Module:
    """The model with a new adapter on its last block's attention; GPT-2 keeps query, key and value as one layer."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=["c_attn", "attn.c_proj"],
        layers_to_transform=[BLOCKS - 1],
        layers_pattern="h",
        fan_in_fan_out=True,
    )
    return Logits(peft.get_peft_model(copy.deepcopy(base.model), config)).eval()


def posterior(
    post: co.posterior.Laplace | None, lin: co.operators.Linearization, additive: bool
) -> co.posterior.Laplace:
    """Make the next posterior from the diagonal Fishers of all episodes, each where it was, or of the last alone."""
    if post is None or not additive:
        return co.laplace(lin, co.DiagonalGGN(lin, fisher="empirical"), PRIOR, check_mode=False)
    return post.update(lin, co.DiagonalGGN(lin, fisher="empirical"), check_mode=False)


@dataclass(frozen=True)
class Method:
    """Is there a penalty, and of what strength; is it that of all episodes; are all episodes' data there?"""

    strength: float | None = None
    additive: bool = False
    offline: bool = False


METHODS = {
    "plain": Method(),
    **{f"single penalty, ω = {strength:g}": Method(strength) for strength in STRENGTHS},
    **{f"online, ω = {strength:g}": Method(strength, additive=True) for strength in STRENGTHS},
    "offline": Method(offline=True),
}


FILTER = "Kalman filter, one pass"


def episodes(seed: int) -> tuple[list[Data], list[Data]]:
    """Training and test sentences of each dialect."""
    generator = torch.Generator().manual_seed(1 + seed)
    languages = grammars(seed)[1:]
    training = [sentences(grammar, SENTENCES, generator) for grammar in languages]
    return training, [sentences(grammar, TEST, generator) for grammar in languages]


@torch.no_grad()
def losses_of(model: nn.Module, held_out: list[Data]) -> Tensor:
    """Nats a word of each dialect."""
    return torch.stack([misfit(model, each, "mean") for each in held_out])


def filtered(base: nn.Module, seed: int) -> Tensor:
    """As `run`, by the extended Kalman filter alone: each batch once, and nothing is carried on but its state."""
    training, held_out = episodes(seed)
    model, found = adapted(base, seed), torch.zeros(EPISODES, EPISODES)
    density = co.sampling.log_posterior(
        model, "classification", prior_precision=FILTER_PRIOR, data_size=EPISODES * SENTENCES
    )
    ekf = co.sampling.ekf(density, "diagonal", fisher="empirical")
    state = ekf.init(density.params)
    for episode, data in enumerate(training):
        for batch in zip(*(part.split(BATCH) for part in data)):
            state, _ = ekf.update(state, batch)
        model.load_state_dict(state.params, strict=False)
        found[episode] = losses_of(model, held_out)
    return found


def run(method: Method, base: nn.Module, seed: int, steps: int = STEPS) -> Tensor:
    """Test losses in nats a word, (EPISODES trained, EPISODES tested)."""
    training, held_out = episodes(seed)
    model, found = adapted(base, seed), torch.zeros(EPISODES, EPISODES)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    post: co.posterior.Laplace | None = None
    for episode in range(EPISODES):
        seen = training[: episode + 1] if method.offline else [training[episode]]
        tokens, following = (torch.cat(parts) for parts in zip(*seen))

        def loss(data: Data = (tokens, following), post: co.posterior.Laplace | None = post) -> Tensor:
            if post is None:
                penalty = 0.5 * PRIOR * torch.stack([p.square().sum() for p in named.values()]).sum()
            else:
                penalty = method.strength * post.penalty(named)
            return (misfit(model, data) + penalty) / data[0].numel()

        descend(model, loss, steps)
        found[episode] = losses_of(model, held_out)
        if method.strength is not None:
            lin = co.linearize(model, (tokens, following), "classification")
            post = posterior(post, lin, method.additive)
    return found


def study(seeds: int) -> dict[str, Tensor]:
    """Test losses by method, (seeds, EPISODES trained, EPISODES tested)."""
    found: dict[str, list[Tensor]] = {name: [] for name in (*METHODS, FILTER)}
    for seed in range(1, seeds + 1):  # the priors were chosen with seed 0
        start, base = time.perf_counter(), pretrained(seed)
        for name, method in METHODS.items():
            found[name].append(run(method, base, seed))
        found[FILTER].append(filtered(base, seed))
        print(f"seed {seed}: {time.perf_counter() - start:.0f} s", flush=True)
    return {name: torch.stack(losses) for name, losses in found.items()}


def relative(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Loss above that of offline training after as many episodes, mean over those seen, (seeds, EPISODES)."""
    seen = torch.ones(EPISODES, EPISODES).tril()
    return {
        name: ((losses - found["offline"]) * seen).sum(-1) / seen.sum(-1)
        for name, losses in found.items()
        if name != "offline"
    }


def forgotten(losses: Tensor) -> Tensor:
    """How much the earlier episodes' losses grew from when each was learnt to the end, (seeds,)."""
    return torch.stack([losses[:, -1, e] - losses[:, e, e] for e in range(EPISODES - 1)]).mean(0)


def results_table(found: dict[str, Tensor]) -> str:
    """In nats a word, a row a method."""
    episodes = [f"after episode {e + 1}" for e in range(EPISODES)]
    header = ["training", *episodes, "own loss", "forgotten"]
    above, rows = relative(found), []
    for name, losses in found.items():
        cells = [spread(each, 2) for each in above[name].T] if name in above else ["0"] * EPISODES
        own = losses.diagonal(dim1=1, dim2=2).mean(1)
        rows.append([name, *cells, spread(own, 2), spread(forgotten(losses), 2)])
    seeds = len(found["plain"])
    apart = tables(header, rows, ["training", *episodes], ["training", "own loss", "forgotten"])
    return f"Mean ± standard deviation over {seeds} languages, each with its network.\n\n{apart}"


def claims(found: dict[str, Tensor]) -> str:
    """The claims of an additive penalty."""
    end = {name: losses[:, -1] for name, losses in relative(found).items()}
    each = []
    for strength in STRENGTHS:
        online, single = f"online, ω = {strength:g}", f"single penalty, ω = {strength:g}"
        each += [
            (f"{online}: below plain training in the end", end["plain"] - end[online]),
            (f"{online}: forgets less than plain training", forgotten(found["plain"]) - forgotten(found[online])),
            (f"{online}: below the single penalty in the end", end[single] - end[online]),
            (f"{online}: forgets less than the single penalty", forgotten(found[single]) - forgotten(found[online])),
            (f"{online}: as good as offline training, or better", -end[online]),
        ]
    best = f"online, ω = {max(STRENGTHS):g}"
    each += [
        (f"{FILTER}: below plain training in the end", end["plain"] - end[FILTER]),
        (f"{FILTER}: forgets less than {best}", forgotten(found[best]) - forgotten(found[FILTER])),
    ]
    return claims_table(each, "nats a word")


def curves(found: dict[str, Tensor]) -> Figure:
    """Loss above offline training, and the loss of the first episode, against the episodes learnt."""
    figure = style.blank(8.6, 4.6)
    panels = figure.subplots(1, 2)
    episodes = range(1, EPISODES + 1)
    above = relative(found)
    first = {name: losses[:, :, 0] for name, losses in found.items()}
    looks = style.looks(found)
    titles = ("above offline, episodes seen", "loss of the first episode")
    for axes, values, title in zip(panels, (above, first), titles):
        for name, each in values.items():
            look = looks[name]._asdict() | {"label": name, "markersize": 5, "capsize": 2}
            axes.errorbar(episodes, each.mean(0), each.std(0), **look)
        axes.set_xticks(list(episodes))
        style.dress(axes, "episodes learnt", "nats a word", title)
    figure.legend(
        *panels[1].get_legend_handles_labels(), fontsize=style.SMALL, frameon=False, loc="outside lower center", ncols=3
    )
    return figure


STUDY = study_page.Study(
    "online_lora",
    __doc__,
    study,
    {"online_lora": lambda found: f"{results_table(found)}\n\n{claims(found)}"},
    "docs/samplers_measured.md",
    figures={"online_lora": curves},
    options={"seeds": (5, "languages, networks and adapters")},
)

if __name__ == "__main__":
    STUDY.run()
