"""`co.laplace`, and the choices that it makes for arguments that are left out.

The choices are those which `benchmarks/defaults.py` finds never worse than the network itself.
"""

from __future__ import annotations

from typing import Any

import torch
from linear_operator.operators import LinearOperator

from curvops.checks import check_flag
from curvops.evidence.maximize import maximize
from curvops.evidence.validate import validate
from curvops.operators import GGN, KFAC, Linearization
from curvops.posterior import Laplace
from curvops.posterior.core.arguments import check_linearization
from curvops.posterior.gaussians.laplace import make_laplace
from curvops.posterior.gaussians.updating import checked_posterior

START = 1.0
"""The prior precision at which the search for another one begins."""


def laplace(
    lin: Linearization,
    curvature: Any = None,
    prior_precision: Any = None,
    prior_mean: Any = 0.0,
    temperature: float = 1.0,
    check_mode: bool = True,
    *,
    validation: Any = None,
) -> Laplace:
    """Make the Laplace posterior N(θ*, T (G + A)⁻¹) of a linearised network under the prior N(m, A⁻¹).

        lin = co.linearize(model, (x, y), "classification")
        post = co.laplace(lin, validation=(x_held_out, y_held_out))
        post.probabilities(x_new)

    Args:
        lin: the linearisation, from `co.linearize`.
        curvature: G, a name ("kfac", "ekfac", "ggn", "diagonal", "block_diagonal", "empirical_fisher", "hessian"), an
            operator class to be built from `lin`, or an operator (D, D). None is KFAC, and the full GGN for single
            entries of parameters (a subnetwork), which a Kronecker product cannot describe.
        prior_precision: A. A positive number: weight decay × N if training minimised a *mean* loss
            + ½ · weight decay · ‖θ − m‖². A vector (D,) of positive numbers, or a mapping {glob over parameter names:
            number} that matches each selected parameter once, such as `{"0.*": 1.0, "2.*": 10.0}`. A positive
            semidefinite operator (D, D); one that was linearised at other weights needs `op.detached_from_weights()`.
            Or an earlier posterior, which then is the prior, with its mean and its temperature. None chooses a number
            by `validation`, or else by the evidence, as `co.evidence.maximize` does; `repr` shows it.
        prior_mean: m, a number, a vector (D,), or a mapping {glob: number, or tensor of the parameter's shape}. Tensors
            of the prior are copied, so that later in-place changes have no effect, unless they require a gradient: then
            the posterior always uses their current values. (An operator is not copied: do not change it.)
        temperature: T, which multiplies the covariance: T·P⁻¹ is that of the posterior to the power 1/T. For a
            tempered *likelihood* use the curvature `(1 / T) * co.GGN(lin)` instead.
        check_mode: compare the gradient of the log posterior with that of the prior, at the cost of one gradient, and
            warn with `ModeWarning` if it is not small. A prior that `validation` chose needs no mode, and no check.
        validation: held-out data, (X, y), a Dataset, a DataLoader or batches, as in `co.evidence.validate`: they choose
            the prior precision, whatever training did, as the one under which they are most likely.

    Returns:
        A `Laplace`. No matrix is formed, except for the factors of KFAC.

    Raises:
        ValueError: the prior precision is not positive and finite, does not name each parameter once, is an operator
            not known to be positive semidefinite, or is given in addition to `validation`; it is left out, and the
            evidence has no maximum or is not known; the temperature is not positive; the curvature has another size,
            was linearised at other weights or is not known to be symmetric; G + A is indefinite; or (with check_mode)
            a gradient is not finite.
        TypeError: an argument is of another kind, or parameters are in half precision.

    Cost: KFAC takes about one gradient for each output. The choice of the prior precision then costs one pass for the
    evidence, or some 25 predictions at the held-out points; for a curvature without a closed form, such as the full
    GGN, as much as `co.evidence.maximize`. Choices are made with a fixed seed. A curvature that may be indefinite
    (co.Hessian, differences) is tested with 20 products, about 80 gradients for a Hessian; if they show that G + A is
    indefinite, the error names the prior precision that is needed.

    Source: MacKay 1992; the predictions of the linearised network as in Immer, Korzepa & Bauer 2021.
    """
    check_linearization(lin)
    check_flag("check_mode", check_mode)
    if prior_precision is not None and validation is not None:
        raise ValueError(
            "validation chooses the prior precision, and prior_precision gives it: leave one of them out. (To scale a "
            "prior of your own, call co.evidence.validate(post, x, y).)"
        )
    chosen = default_curvature(lin) if curvature is None else curvature
    given = START if prior_precision is None else prior_precision
    post = make_laplace(lin, chosen, given, prior_mean, temperature)
    if prior_precision is None:
        post = choose_prior(post, validation)
    return checked_posterior(post, check_mode and validation is None)


def default_curvature(lin: Linearization) -> type[LinearOperator]:
    """Return the class of curvature for a posterior that names none."""
    whole_parameters = lin.model.selection.index is None
    return KFAC if whole_parameters else GGN


def choose_prior(post: Laplace, validation: Any = None) -> Laplace:
    """Return the posterior under the scalar prior precision that held-out data or, without any, the evidence choose."""
    generator = torch.Generator(device=post.mean.device).manual_seed(0)  # so that the same call makes the same choice
    if validation is not None:
        return validate(post, validation, generator=generator)
    try:
        return maximize(post, generator=generator)
    except ValueError as error:
        raise ValueError(
            "the prior precision was left out, and the evidence cannot choose it: pass validation=(x, y) of held-out "
            f"points, or prior_precision= (weight decay × N of training on a mean loss). {error}"
        ) from error
