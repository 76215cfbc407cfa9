import math

import pytest
import torch

from curvops.linalg import Dense, Reason, spectral_density
from tests.linalg.matrices import SPECTRA, generator, symmetric
from tests.linalg.rooted import rooted


def broadened(found, values):
    """The exact density with the same broadening, on the same grid; eigenvalues at or below the threshold left out."""
    log = found.scale == "log"
    x, places = (found.grid.log(), values[values > found.threshold].log()) if log else (found.grid, values)
    bells = torch.exp(-0.5 * ((x[:, None] - places) / found.bandwidth).square())
    return bells.sum(1) / (len(values) * found.bandwidth * math.sqrt(2 * math.pi))


@pytest.mark.parametrize(
    ("name", "scale", "dtype"),
    [
        ("decaying", "linear", torch.float32),
        ("step", "log", torch.float32),
        ("kappa 1e8", "log", torch.float64),
        ("flat", "linear", torch.float64),
    ],
)
def test_integrates_to_one_within_its_band(name, scale, dtype):
    found = spectral_density(symmetric(SPECTRA[name]).to(dtype), scale=scale, generator=generator(), probes=4)
    assert abs(found.integral() + found.zero_mass - 1) < 1e-6
    torch.testing.assert_close(found.weights.sum(1), torch.ones(4).double(), rtol=0, atol=1e-10)
    assert (found.lower <= found.density).all() and (found.density <= found.upper).all()
    assert found.zero_mass == 0 or dtype == torch.float32
    assert found.matvecs <= 4 * 100 and found.nodes.shape[0] == 4


@pytest.mark.usefixtures("annotations_unchecked")
@pytest.mark.parametrize("scale", ["linear", "log"])
def test_the_band_covers_the_broadened_density(scale):
    # Points of one seed move together: over 4 seeds × 3 spectra the share has a standard error of about 2.3 %, so that
    # 88 % for a band that covers 94 % fails in fewer than 1 of 100 choices of seeds.
    shares = []
    for name in ("decaying", "clustered", "flat"):
        values, A = SPECTRA[name], symmetric(SPECTRA[name])
        for seed in range(4):
            found = spectral_density(A, scale=scale, probes=6, grid_size=256, generator=generator(seed))
            exact = broadened(found, values)
            slack = 1e-6 * exact.max()
            inside = (found.lower - slack <= exact) & (exact <= found.upper + slack)
            shares.append(float(inside.double().mean()))
    assert sum(shares) / len(shares) >= 0.88


def test_zero_and_negative_eigenvalues_are_a_mass_of_their_own_on_the_log_scale():
    values = torch.cat([torch.zeros(60), torch.full((15,), -1.0), torch.logspace(-2, 1, 45)]).double()
    found = spectral_density(symmetric(values), scale="log", probes=30, steps=120, generator=generator())
    assert found.zero_mass == pytest.approx(75 / 120, abs=0.03)
    assert found.integral() == pytest.approx(1 - found.zero_mass, abs=1e-6) and found.grid.min() > 0
    cut = spectral_density(symmetric(values), scale="log", threshold=1.0, probes=30, generator=generator())
    assert cut.zero_mass == pytest.approx(105 / 120, abs=0.03)
    with pytest.raises(ValueError, match="threshold"):
        spectral_density(torch.zeros(5, 5), scale="log")


def test_one_eigenvalue():
    for A in (torch.tensor([[3.0]]), 3 * torch.eye(10), torch.zeros(4, 4)):
        found = spectral_density(A, probes=3)
        assert found.integral() == pytest.approx(1, abs=1e-6) and found.reason is Reason.CONVERGED
        assert found.grid[found.density.argmax()] == pytest.approx(float(A[0, 0]), abs=0.02)
        torch.testing.assert_close(found.upper, found.lower, rtol=1e-6, atol=1e-6)


def test_one_probe_has_no_band():
    found = spectral_density(symmetric(SPECTRA["flat"]), probes=1, generator=generator())
    assert (found.upper == math.inf).all() and (found.lower == 0).all()


def test_budgets_cap_the_depth_and_say_so():
    A = symmetric(SPECTRA["kappa 1e8"])
    steps = spectral_density(A, scale="log", steps=15, generator=generator())
    assert steps.reason is Reason.ITERATION_LIMIT and steps.nodes.shape[1] == 15
    capped = spectral_density(A, scale="log", memory_budget=120 * 8 * 14, generator=generator(), probes=3)
    assert capped.reason is Reason.RANK_CAPPED and capped.nodes.shape == (3, 12)
    # Fewer probes at once is no loss of depth.
    groups = spectral_density(A, steps=30, memory_budget=120 * 8 * 32 * 3, probes=7, generator=generator())
    assert groups.nodes.shape[0] == 7 and groups.integral() == pytest.approx(1, abs=1e-6)


def test_the_band_allows_for_what_depth_would_change():
    A, values = symmetric(SPECTRA["kappa 1e4"]), SPECTRA["kappa 1e4"]
    shallow = spectral_density(A, scale="log", probes=15, steps=20, generator=generator())
    exact = broadened(shallow, values)
    deep = spectral_density(A, scale="log", probes=15, steps=120, generator=generator())
    assert (shallow.upper - shallow.lower).mean() > 2 * (deep.upper - deep.lower).mean()
    assert shallow.reason is Reason.ITERATION_LIMIT and exact.isfinite().all()


@pytest.mark.parametrize("least", [0.0, 0.05, 1.0])
def test_a_positive_semidefinite_operator_has_no_density_below_zero(least):
    values = torch.cat([torch.full((60,), least), torch.linspace(least, 4.0, 60)]).double()
    A = symmetric(values)
    found = Dense(A, psd=True).spectral_density(probes=4, steps=120, generator=generator())
    whole = Dense(A).spectral_density(probes=4, steps=120, generator=generator())
    assert found.grid.min() >= 0 and (found.density >= 0).all() and (found.lower >= 0).all()
    assert found.integral() == pytest.approx(1, abs=1e-6) and found.bandwidth == pytest.approx(whole.bandwidth)
    # Folded: what the other curve has at −λ is added at λ.
    bells = torch.exp(-0.5 * ((found.grid[:, None, None].abs() - whole.nodes) / found.bandwidth).square())
    mirrored = torch.exp(-0.5 * ((-found.grid[:, None, None] - whole.nodes) / found.bandwidth).square())
    expected = ((bells + mirrored) * whole.weights).sum((1, 2)) / (4 * found.bandwidth * math.sqrt(2 * math.pi))
    torch.testing.assert_close(found.density, expected, rtol=1e-8, atol=1e-10)


def test_a_wrong_tag_does_not_hide_negative_eigenvalues():
    class Tagged(Dense):
        psd = True

    values = torch.cat([torch.full((20,), -2.0), torch.linspace(0, 4, 80)]).double()
    found = Tagged(symmetric(values)).spectral_density(probes=30, steps=120, generator=generator())
    negative = float(torch.trapezoid(found.density[found.grid < -1], found.grid[found.grid < -1]))
    assert negative == pytest.approx(0.2, abs=0.04)


@pytest.mark.parametrize(("scale", "dtype"), [("linear", torch.float32), ("log", torch.float64)])
def test_from_a_narrow_root(scale, dtype):
    """The smaller matrix has the same eigenvalues but for zeros, whose share is exact."""
    values, n, probes = SPECTRA["kappa 1e4"], 300, 30
    found = spectral_density(rooted(values, n, dtype), scale=scale, probes=probes, steps=120, generator=generator())
    assert (found.matvecs <= probes * len(values)) and found.nodes.shape[0] == probes
    torch.testing.assert_close(found.weights.sum(1), torch.ones(probes).double(), rtol=0, atol=1e-10)
    zeros = found.weights[found.nodes <= found.threshold if scale == "log" else found.nodes.abs() < 1e-12].sum()
    assert float(zeros) / probes == pytest.approx(1 - len(values) / n, abs=1e-3)
    exact = broadened(found, values) * len(values) / n
    if scale == "log":
        assert found.zero_mass == pytest.approx(1 - len(values) / n, abs=1e-6)
        inside = (found.lower <= exact + 1e-6) & (exact <= found.upper + 1e-6)
        assert float(inside.double().mean()) > 0.85
    else:
        assert found.integral() == pytest.approx(1, abs=1e-6)
    mean = float((found.weights * found.nodes).sum() / probes)
    assert mean == pytest.approx(float(values.sum() / n), rel=0.06)  # tr A/n; signs have a spread of about 2 %
