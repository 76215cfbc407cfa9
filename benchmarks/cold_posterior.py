"""Is a posterior better when it is colder?          python -m benchmarks.cold_posterior

After Duffield et al. 2024, who classify film reviews. Here the data are sequences of tokens drawn from a seed, and the
network is a small one with a convolution and an LSTM. Laplace, variational inference and SGHMC at five temperatures are
compared with plain training. The score is the log loss of test sequences; the best temperature is chosen on validation
sequences.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from torch import Tensor, nn

import curvops as co
from benchmarks import study_page
from benchmarks.claims import claims_table, spread
from benchmarks.tables import table
from curvops import metrics
from curvops.plots import style

TEMPERATURES = (0.03, 0.1, 0.3, 1.0, 3.0)
WORDS, NEGATIONS, LENGTH, FLIPPED = 16, 1, 8, 0.1
TRAINING, VALIDATION, TEST = 600, 400, 400
EMBEDDED, CHANNELS, HIDDEN = 4, 6, 5
PRIOR, BATCH, DRAWS = 3.0, 200, 30
RATE, STEPS = 0.03, 250
"""Of Adam, for plain training on all points, and for variational inference, which starts at its mode."""
STEP_SIZE, FRICTION, CHAINS, LONG, SPACING = 0.2, 0.1, 6, 700, 20
"""Of SGHMC: so many chains a seed, steps of each, and steps between draws of the serial one, which follow on these."""

Data = tuple[Tensor, Tensor]
Losses = dict[str, Tensor]
"""By method the log loss of validation and of test sequences, (2, temperatures, seeds)."""
LAPLACE = [f"Laplace, {curvature}, {how}" for curvature in ("EF", "GGN") for how in ("sampled", "linearised")]
VI = ["VI, sampled", "VI, linearised"]
SGHMC = ["SGHMC, serial", "SGHMC, parallel"]


class Reader(nn.Module):
    """Embedding, convolution, pooling, LSTM, two logits.

    The LSTM is written from linear layers: `torch.vmap` has no rule for torch's own, and many chains would take as many
    times as long.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, EMBEDDED)
        self.convolution = nn.Conv1d(EMBEDDED, CHANNELS, 3, padding=1)
        self.into = nn.Linear(CHANNELS, 4 * HIDDEN)
        self.again = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False)
        self.head = nn.Linear(HIDDEN, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (N, 2) of tokens (N, LENGTH)."""
        features = self.convolution(self.embedding(tokens).mT).tanh()
        pooled = features.unflatten(-1, (-1, 2)).mean(-1).mT
        gates = self.into(pooled)
        hidden = memory = gates.new_zeros(len(tokens), HIDDEN)
        for position in range(gates.shape[1]):
            enter, keep, leave, new = (gates[:, position] + self.again(hidden)).chunk(4, -1)
            memory = keep.sigmoid() * memory + enter.sigmoid() * new.tanh()
            hidden = leave.sigmoid() * memory.tanh()
        return self.head(hidden)


def sequences(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens and labels: words have values, a negation turns that of the next one; a label in ten is flipped."""
    values = torch.randn(WORDS, generator=torch.Generator().manual_seed(0))
    tokens = torch.randint(WORDS, (n, LENGTH), generator=generator)
    negated = torch.cat([torch.zeros(n, 1, dtype=torch.bool), tokens[:, :-1] < NEGATIONS], 1)
    worth = values[tokens] * (tokens >= NEGATIONS) * torch.where(negated, -1.0, 1.0)
    flipped = torch.rand(n, generator=generator) < FLIPPED
    return tokens, ((worth.sum(1) > 0) ^ flipped).long()


def network(seed: int) -> nn.Module:
    """At a start of its own."""
    torch.manual_seed(seed)
    return Reader().double().eval()


def density(data: Data, prior: float = PRIOR) -> co.sampling.LogPosterior:
    """The log posterior of every method; plain training without a prior takes next to none."""
    return co.sampling.log_posterior(network(0), "classification", prior_precision=prior, data_size=len(data[0]))


def batches(data: Data) -> list[Data]:
    """The points, some at a time."""
    return list(zip(*(part.split(BATCH) for part in data)))


def starts(count: int) -> list[dict[str, Tensor]]:
    """Parameters of as many networks."""
    return [dict(network(i).named_parameters()) for i in range(count)]


def at(params: dict[str, Tensor], data: Data) -> co.operators.Linearization:
    """The network linearised at these parameters."""
    model = network(0)
    model.load_state_dict(params)
    return co.linearize(model, data, "classification")


def trained(data: Data, prior: float, seeds: int, steps: int = STEPS) -> list[dict[str, Tensor]]:
    """Plain training from as many starts, side by side."""
    rate = co.sampling.Cosine(RATE, steps)
    adam = co.sampling.chains(co.sampling.optimizer(torch.optim.Adam, density(data, prior), lr=rate), seeds)
    state = co.sampling.run(adam, starts(seeds), [data], steps=steps, thin=steps).state
    return [{name: value[i] for name, value in state.params.items()} for i in range(seeds)]


def loss(probabilities: Callable[[Tensor], Tensor], parts: Sequence[Data]) -> Tensor:
    """Nats a sequence, of each part of the data."""
    return torch.stack([metrics.nll(probabilities(tokens).clamp_min(1e-12), labels) for tokens, labels in parts])


def of_gaussian(post: Any, name: str, parts: Sequence[Data], seed: int) -> dict[str, Tensor]:
    """Compare draws of the weights through the network and through its linearisation."""
    draws = post.sample(DRAWS, generator=torch.Generator().manual_seed(seed))
    links = {"sampled": "network", "linearised": "mc"}
    return {
        f"{name}, {how}": loss(partial(post.probabilities, link=link, samples=draws), parts)
        for how, link in links.items()
    }


def laplace(lin: co.operators.Linearization, parts: Sequence[Data], temperature: float, seed: int) -> dict[str, Tensor]:
    """Diagonal Laplace with the empirical Fisher and with the GGN."""
    found = {}
    fisher = co.linalg.Diagonal(co.EmpiricalFisher(lin).diagonal())
    for name, curvature in {"EF": fisher, "GGN": co.DiagonalGGN(lin)}.items():
        post = co.laplace(lin, curvature, PRIOR, temperature=temperature, check_mode=False)
        found |= of_gaussian(post, f"Laplace, {name}", parts, seed)
    return found


def variational(
    data: Data, mode: dict[str, Tensor], parts: Sequence[Data], temperature: float, seed: int, steps: int = STEPS
) -> dict[str, Tensor]:
    """Diagonal variational inference: from e⁻³, one draw a step, stick the landing."""
    vi = co.sampling.vi(
        density(data),
        "diagonal",
        initial_scale=math.exp(-3),
        temperature=temperature,
        lr=co.sampling.Cosine(RATE, steps),
    )
    generator = torch.Generator().manual_seed(seed)
    state = co.sampling.run(vi, mode, batches(data), steps=steps, thin=steps, generator=generator).state
    return of_gaussian(vi.posterior(state, at(state.params, data)), "VI", parts, seed)


def hamiltonian(
    data: Data,
    lin: co.operators.Linearization,
    parts: Sequence[Data],
    temperature: float,
    seeds: int,
    steps: int = LONG,
) -> dict[str, Tensor]:
    """By part and seed: the last weights of `CHAINS` chains, and as many draws of the first of them."""
    sampler = co.sampling.sghmc(density(data), STEP_SIZE, alpha=FRICTION, temperature=temperature, momentum_first=True)
    generator = torch.Generator().manual_seed(0)
    many = seeds * CHAINS
    run = co.sampling.run(
        co.sampling.chains(sampler, many), starts(many), batches(data), steps=steps, thin=steps, generator=generator
    )
    firsts = [{name: value[i * CHAINS, -1] for name, value in run.params.items()} for i in range(seeds)]
    later = co.sampling.run(
        co.sampling.chains(sampler, seeds),
        firsts,
        batches(data),
        steps=CHAINS * SPACING,
        thin=SPACING,
        generator=generator,
    )
    sets = {
        "SGHMC, serial": list(later.theta),
        "SGHMC, parallel": list(run.theta.squeeze(1).unflatten(0, (seeds, CHAINS))),
    }
    return {
        name: torch.stack(
            [
                loss(partial(co.sampling.empirical(lin, each.unsqueeze(0)).probabilities, link="mc"), parts)
                for each in found
            ],
            dim=1,
        )
        for name, found in sets.items()
    }


def study(seeds: int) -> Losses:
    """Every method at every temperature."""
    generator = torch.Generator().manual_seed(1)
    data, *parts = (sequences(n, generator) for n in (TRAINING, VALIDATION, TEST))
    names = ["MLE", "MAP", *LAPLACE, *VI, *SGHMC]
    found = {name: torch.full((2, len(TEMPERATURES), seeds), math.nan, dtype=torch.float64) for name in names}
    modes = {name: trained(data, prior, seeds) for name, prior in (("MLE", 1e-6), ("MAP", PRIOR))}
    lins = {name: [at(params, data) for params in each] for name, each in modes.items()}
    for name, each in lins.items():
        plain = [loss(lambda tokens, lin=lin: lin.predict(tokens).softmax(-1), parts) for lin in each]
        found[name][:] = torch.stack(plain, dim=1).unsqueeze(1)
    for i, temperature in enumerate(TEMPERATURES):
        start = time.perf_counter()
        for seed, lin in enumerate(lins["MAP"]):
            rows = laplace(lin, parts, temperature, seed)
            rows |= variational(data, modes["MAP"][seed], parts, temperature, seed)
            for name, value in rows.items():
                found[name][:, i, seed] = value
        for name, values in hamiltonian(data, lins["MAP"][0], parts, temperature, seeds).items():
            found[name][:, i] = values
        means = {name: round(float(values[1, i].mean()), 3) for name, values in found.items()}
        print(f"temperature {temperature}: {time.perf_counter() - start:.0f} s, {means}", flush=True)
    return found


def results_table(found: Losses) -> str:
    """Mean ± standard deviation of the test loss; what has no temperature has one figure."""
    rows = []
    for name, (_, losses) in found.items():
        cells = [spread(losses[0]) if name in ("MLE", "MAP") else spread(row) for row in losses]
        rows.append([name, *cells])
    seeds = found["MAP"].shape[-1]
    said = f"Nats per test sequence, mean ± standard deviation over {seeds} starts."
    return f"{said}\n\n{table(['method', *(f'τ = {temperature:g}' for temperature in TEMPERATURES)], rows)}"


def best(losses: Tensor, places: Sequence[int] = range(len(TEMPERATURES))) -> Tensor:
    """By seed the test loss at the temperature, of these, whose validation loss is the least with that seed."""
    validation, test = losses[:, list(places)]
    return test.gather(0, validation.argmin(0, keepdim=True)).squeeze(0)


def claims(found: Losses) -> str:
    """The seven claims of the paper."""
    one = TEMPERATURES.index(1.0)
    pairs = {
        "1. Laplace, EF: linearised better than sampled": ("Laplace, EF, linearised", "Laplace, EF, sampled"),
        "1. Laplace, GGN: linearised better than sampled": ("Laplace, GGN, linearised", "Laplace, GGN, sampled"),
        "2. Laplace, linearised: GGN better than EF": ("Laplace, GGN, linearised", "Laplace, EF, linearised"),
        "2. Laplace, sampled: GGN better than EF": ("Laplace, GGN, sampled", "Laplace, EF, sampled"),
        "3. VI: sampled better than linearised": ("VI, sampled", "VI, linearised"),
        "6. SGHMC: parallel better than serial": ("SGHMC, parallel", "SGHMC, serial"),
        "7. VI, sampled, better than MAP": ("VI, sampled", "MAP"),
        "7. SGHMC, parallel, better than MAP": ("SGHMC, parallel", "MAP"),
    }
    each = []
    for claim, (better, worse) in pairs.items():
        each += [(f"{claim}, each at its best τ", best(found[worse]) - best(found[better]))]
        each += [(f"{claim}, at τ = 1", found[worse][1, one] - found[better][1, one])]
    cold, warm = range(one), range(one, len(TEMPERATURES))
    each += [
        (f"4. {name}: better at a τ below 1", best(found[name], warm) - best(found[name], cold))
        for name in (*LAPLACE, *VI)
    ]
    for places, said in ((slice(None), "over all τ"), (slice(one + 1), "up to τ = 1")):
        extent = {name: losses[1, places].amax(0) - losses[1, places].amin(0) for name, losses in found.items()}
        gaussian = torch.stack([extent[name] for name in (*LAPLACE, *VI)]).mean(0)
        each += [(f"5. {name}: flatter than Gaussians in the mean, {said}", gaussian - extent[name]) for name in SGHMC]
    return claims_table(sorted(each, key=lambda row: row[0][0]), "nats")


def curves(found: Losses) -> Figure:
    """Log loss against temperature."""
    figure = style.blank(8.6, 3.8)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, names in zip(panels, (LAPLACE, [*VI, *SGHMC])):
        for name, look in style.looks(names).items():
            bars = look._asdict() | {"label": name, "markersize": 5, "capsize": 2}
            axes.errorbar(TEMPERATURES, found[name][1].mean(1), found[name][1].std(1), **bars)
        axes.axhline(float(found["MAP"][1].mean()), color=style.GREY, linestyle=":", label="MAP")
        axes.set_xscale("log")
        axes.set_xticks(TEMPERATURES, [f"{temperature:g}" for temperature in TEMPERATURES])
        axes.xaxis.set_minor_locator(NullLocator())
        style.dress(axes, "temperature τ", "log loss of test sequences (nats)" if names is LAPLACE else "")
        axes.legend(fontsize=style.SMALL, frameon=False)
    return figure


STUDY = study_page.Study(
    "cold_posterior",
    __doc__,
    study,
    {"cold_posterior": lambda found: f"{results_table(found)}\n\n{claims(found)}"},
    "docs/samplers_measured.md",
    figures={"cold_posterior": curves},
    options={"seeds": (5, "starts of each method")},
)

if __name__ == "__main__":
    STUDY.run()
