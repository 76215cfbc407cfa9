"""Which features do other packages have? Each line runs the code behind a yes or no in the table of docs/comparison.md.

`.venv-peers/bin/python -m benchmarks.peer_features`: "yes" if it runs and gives the right result, else the error.
"""

from __future__ import annotations

import copy
import math
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.machine import peer_version

torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
CLASSES = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))
X, Y, LABELS = torch.randn(20, 2), torch.randn(20, 1), torch.randint(3, (20,))


def loader(targets: Tensor = Y) -> Any:
    """The data in one batch."""
    return DataLoader(TensorDataset(X, targets), batch_size=20)


def fitted(structure: str = "kron", subset: str = "all", classes: bool = False, **options: Any) -> Any:
    """A posterior of laplace-torch."""
    from laplace import Laplace

    model = copy.deepcopy(CLASSES if classes else MODEL)
    found = Laplace(model, "classification" if classes else "regression", subset, structure, **options)
    found.fit(loader(LABELS if classes else Y))
    return found


def laplace_noise() -> bool:
    """Gradient of the evidence in the noise and the prior precision."""
    noise, prior = torch.tensor(0.5, requires_grad=True), torch.tensor(1.0, requires_grad=True)
    fitted().log_marginal_likelihood(prior_precision=prior, sigma_noise=noise).backward()
    return bool(noise.grad) and bool(prior.grad)


def laplace_training() -> bool:
    """Tuning in training, by layer."""
    from laplace import marglik_training
    from laplace.curvature import CurvlinopsGGN

    model = copy.deepcopy(MODEL)
    found = marglik_training(model, loader(), "regression", "kron", CurvlinopsGGN, n_epochs=3)
    return bool((found[0].prior_precision != 1).all()) and float(found[0].sigma_noise) != 1


def laplace_validation() -> bool:
    """The prior precision by a grid on held-out data."""
    found = fitted(classes=True)
    found.optimize_prior_precision(method="gridsearch", val_loader=loader(LABELS), grid_size=5)
    return float(found.prior_precision) != 1


def laplace_inputs() -> bool:
    """Gradients of a predictive variance in the inputs."""
    from laplace.curvature import BackPackGGN

    x = X[:3].clone().requires_grad_()
    fitted(enable_backprop=True, backend=BackPackGGN)(x)[1].sum().backward()
    return x.grad is not None and bool(x.grad.any())


def laplace_structures() -> bool:
    """Parameter-wise priors; a temperature; last layer, subnetwork, function space."""
    from laplace import ELLA, FunctionalLaplace, VaLLA  # noqa: F401

    fitted("diag", prior_precision=torch.ones(17), temperature=0.5)
    fitted("kron", prior_precision=torch.ones(4), prior_mean=0.1)
    fitted("full", "last_layer")
    chosen = torch.tensor([0, 2])
    fitted("full", "subnetwork", subnetwork_indices=chosen)
    return fitted("gp", n_subset=10)(X[:2])[1].numel() == 2


def laplace_predictive() -> bool:
    """Joint for regression alone; probit, Monte Carlo, bridge."""
    joint = fitted("full")(X[:2], joint=True)[1].shape == (2, 2)
    classes = fitted("full", classes=True)
    links = [classes(X[:2], link_approx=link) for link in ("probit", "mc", "bridge", "bridge_norm")]
    return joint and all(p.shape == (2, 3) for p in links) and classes(X[:2], joint=True).shape == (2, 3)


def laplace_saved() -> bool:
    """state_dict of a posterior, and what it predicts afterwards."""
    found, other = fitted(), fitted()
    with tempfile.TemporaryDirectory() as folder:
        torch.save(found.state_dict(), Path(folder) / "state")
        other.load_state_dict(torch.load(Path(folder) / "state", weights_only=False))
    return bool(torch.equal(found(X)[1], other(X)[1]))


def laplace_continued() -> bool:
    """A fit that adds to an earlier one; four scores for a subnetwork."""
    from laplace.utils import (  # noqa: F401
        LargestMagnitudeSubnetMask,
        LargestVarianceDiagLaplaceSubnetMask,
        LargestVarianceSWAGSubnetMask,
        RandomSubnetMask,
    )

    found = fitted("diag")
    before = found.H.clone()
    found.fit(loader(), override=False)
    return bool(torch.allclose(found.H, 2 * before))


def laplace_rewards() -> bool:
    """A likelihood of preferences."""
    from laplace import Laplace

    Laplace(copy.deepcopy(MODEL), "reward_modeling")
    return True


def curvlinops_operators() -> bool:
    """GGN, Hessian, Fishers, EKFAC and inverses."""
    from curvlinops import (  # noqa: F401
        CGInverseLinearOperator,
        EFLinearOperator,
        EKFACLinearOperator,
        GGNLinearOperator,
        HessianLinearOperator,
        KFACLinearOperator,
        LSMRInverseLinearOperator,
        NeumannInverseLinearOperator,
    )

    given = CLASSES, nn.CrossEntropyLoss(), list(CLASSES.parameters()), [(X, LABELS)]
    for operator in (GGNLinearOperator, HessianLinearOperator, EFLinearOperator, KFACLinearOperator):
        made = operator(*given)
        made @ torch.ones(made.shape[1])
    ekfac = EKFACLinearOperator(*given)
    return math.isfinite(float(ekfac.logdet))


def curvlinops_estimators() -> bool:
    """Trace, diagonal, Frobenius norm as numbers without error bars; spectral densities; export to SciPy."""
    from curvlinops import GGNLinearOperator, hutchinson_diag, hutchinson_squared_fro, xtrace
    from curvlinops.papyan2020traces.spectrum import lanczos_approximate_spectrum  # noqa: F401

    G = GGNLinearOperator(CLASSES, nn.CrossEntropyLoss(), list(CLASSES.parameters()), [(X, LABELS)])
    found = [f(G, 8) for f in (xtrace, hutchinson_diag, hutchinson_squared_fro)]
    G.to_scipy()
    return all(isinstance(value, Tensor) for value in found)


def posteriors_cg() -> bool:
    """CG says whether it converged, as its second result."""
    import posteriors

    A = torch.diag(torch.logspace(0, 4, 50))
    few = posteriors.cg(lambda v: A @ v, torch.ones(50), maxiter=2, tol=1e-6)[1]
    enough = posteriors.cg(lambda v: A @ v, torch.ones(50), maxiter=500, tol=1e-6)[1]
    print("   ", few, enough)
    return str(few) != str(enough)


def posteriors_samplers() -> bool:
    """The samplers, diagonal and dense variational inference and filters, products."""
    from posteriors import diag_ggn, ekf, fvp, ggnvp, hvp, laplace, sgmcmc, vi  # noqa: F401

    names = (sgmcmc.sgld, sgmcmc.sghmc, sgmcmc.sgnht, sgmcmc.baoa, sgmcmc.sglrw, vi.diag, vi.dense)
    return all(callable(module.build) for module in (*names, ekf.diag_fisher, ekf.dense_fisher, laplace.diag_ggn))


def posteriors_saved() -> bool:
    """A state through torch.save."""
    from posteriors import laplace

    def log_posterior(params: Any, batch: Any) -> Any:
        out = torch.func.functional_call(MODEL, params, (batch[0],))
        return -0.5 * (out - batch[1]).square().sum(1), out

    transform = laplace.diag_fisher.build(log_posterior, per_sample=True)
    state, _ = transform.update(transform.init(dict(MODEL.named_parameters())), (X, Y))
    with tempfile.TemporaryDirectory() as folder:
        torch.save(state, Path(folder) / "state")
        back = torch.load(Path(folder) / "state", weights_only=False)
    return bool(torch.equal(back.prec_diag["0.weight"], state.prec_diag["0.weight"]))


CLAIMS: tuple[Callable[[], bool], ...] = (
    laplace_noise,
    laplace_training,
    laplace_validation,
    laplace_inputs,
    laplace_structures,
    laplace_predictive,
    laplace_saved,
    laplace_continued,
    laplace_rewards,
    curvlinops_operators,
    curvlinops_estimators,
    posteriors_cg,
    posteriors_samplers,
    posteriors_saved,
)


def main() -> None:
    """Run every claim."""
    warnings.simplefilter("ignore")
    print({name: peer_version(name) for name in ("laplace-torch", "curvlinops-for-pytorch", "posteriors")})
    for claim in CLAIMS:
        try:
            answer = "yes" if claim() else "NO"
        except Exception as error:
            answer = f"NO: {type(error).__name__}: {error}"
        print(f"{claim.__name__}: {str(claim.__doc__).splitlines()[0]} {answer[:300]}")


if __name__ == "__main__":
    main()
