"""Is the demo right? Each check compares two independent ways to one number, and passes or fails."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

WORST_ERROR = 1e-3
INSIDE = 0.85


@dataclass(frozen=True)
class Check:
    """One line of the report; `numbers` go to results.json. A failed `proof` is an error, all else a finding."""

    name: str
    passed: bool
    text: str
    numbers: dict[str, float]
    proof: bool = True


def exact(solved: Float[Tensor, "M C"], reference: Float[Tensor, "M C"]) -> Check:
    """Variances by block solves in weight space against a dense solve in function space, an independent program."""
    worst = float(((solved.to(reference) - reference).abs() / reference).max())
    return Check(
        "exact variances",
        worst <= WORST_ERROR,
        f"{len(solved)} test points by block solves against a dense solve in function space: "
        f"worst relative error {worst:.1e} (at most {WORST_ERROR:.0e})",
        {"worst_relative_error": worst},
    )


def sampled(
    drawn: Float[Tensor, "M C"], solved: Float[Tensor, "M C"], reference: Float[Tensor, "M C"], samples: int
) -> Check:
    """Variances from samples against both: the share within two relative standard errors √(2/k)."""
    error = (2 / samples) ** 0.5
    shares = [
        float(((drawn.double() / v.double() - 1).abs() <= 2 * error).double().mean()) for v in (solved, reference)
    ]
    return Check(
        "sampled variances",
        min(shares) >= INSIDE,
        f"{samples} samples (each variance ±{100 * error:.0f} %): within two standard errors of the block solves for "
        f"{100 * shares[0]:.0f} %, of the dense solve for {100 * shares[1]:.0f} % (at least {100 * INSIDE:.0f} %; "
        "95 % expected)",
        {"relative_standard_error": error, "inside_solved": shares[0], "inside_reference": shares[1]},
    )


def not_worse(laplace: Float[Tensor, "S N"], at_mode: Float[Tensor, "S N"]) -> Check:
    """NLL of Laplace against the MAP's, by seed and test point, and the MAP's own standard error over the points."""
    mean = float((laplace - at_mode).mean())
    error = float(at_mode.mean(0).std() / at_mode.shape[1] ** 0.5)
    return Check(
        "NLL at 0°",
        mean <= error,
        f"Laplace minus MAP {mean:+.4f} nats a point, where MAP's is known to ±{error:.4f} (at most that much above)",
        {"difference": mean, "standard_error": error},
        proof=False,
    )
