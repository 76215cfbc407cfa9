"""The small factorisations behind MINRES-QLP and LSMR: a few numbers per column, on the host."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from jaxtyping import Float, Int
from torch import Tensor


def reflection(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """c, s, r with [c s; s −c] [a; b] = [r; 0], r ≥ 0; the identity's first column for a = b = 0."""
    r = torch.hypot(a, b)
    size = torch.where(r > 0, r, 1.0)
    return torch.where(r > 0, a / size, 1.0), b / size, r


def ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b, 0 where b is 0."""
    return torch.where(b == 0, 0.0, a / torch.where(b == 0, 1.0, b))


@dataclass(eq=False)
class QLP:
    """The QLP factorisation of Lanczos' tridiagonal matrices between two steps; a float64 number per column each.

    Names are those of Choi, Paige & Saunders 2011: Q_k T_k = R_k by left reflections (cs, sn), R_k = L_k P_kᵀ by two
    right ones (cr1, sr1), (cr2, sr2). x_k = W_k u_k with orthonormal W_k = V_k P_k.
    ``rootl`` is ‖A r‖/‖r‖ of the residual before the last step; ``begun`` is 0 before the first step, then 1, and
    ``looked`` is the value of rootl at which the residual was last seen to be nearly a null vector.
    """

    beta: Tensor
    phi: Tensor
    cs: Tensor
    sn: Tensor
    cr1: Tensor
    sr1: Tensor
    cr2: Tensor
    sr2: Tensor
    dltan: Tensor
    gama: Tensor
    gamal: Tensor
    eta: Tensor
    etal: Tensor
    vepln: Tensor
    veplnl: Tensor
    tau: Tensor
    taul: Tensor
    u: Tensor
    ul: Tensor
    ul2: Tensor
    ul3: Tensor
    rootl: Tensor
    begun: Tensor
    looked: Tensor

    @classmethod
    def start(cls, beta: Float[Tensor, " k"]) -> QLP:
        """Before the first step, the residuals being of norm beta."""
        begin = {field.name: torch.zeros_like(beta) for field in fields(cls)}
        minus = {name: torch.full_like(beta, -1.0) for name in ("cs", "cr1", "cr2")}
        known = {"beta": beta.clone(), "phi": beta.clone(), "looked": torch.full_like(beta, torch.inf)}
        return cls(**(begin | minus | known))

    def select(self, index: Int[Tensor, " j"]) -> QLP:
        """The columns that remain."""
        return QLP(**{field.name: getattr(self, field.name)[index] for field in fields(self)})

    def restart(self, index: Int[Tensor, " j"], beta: Float[Tensor, " j"]) -> None:
        """Begin some columns anew."""
        fresh = QLP.start(beta)
        for field in fields(self):
            getattr(self, field.name)[index] = getattr(fresh, field.name)

    def advance(self, alfa: Tensor, betan: Tensor, norm_A: float, eps: float) -> tuple[Tensor, Tensor]:
        """Take in a step of Lanczos: (cr1, sr1, cr2, sr2, ul2, ul, u) for the vectors, and which columns are at an end.

        A column is at an end where the Krylov space is complete, or L_k singular to rounding: then u is 0, which makes
        x_k the shortest of the minimisers.
        """
        dbar = self.dltan
        dlta = self.cs * dbar + self.sn * alfa
        gbar = self.sn * dbar - self.cs * alfa
        dltan = -self.cs * betan
        self.rootl = torch.hypot(gbar, dltan)
        eplnn = self.sn * betan
        gamal2, gamal = self.gamal, self.gama
        cs, sn, gama = reflection(gbar, betan)
        taul2, self.taul, self.tau = self.taul, self.tau, cs * self.phi
        self.phi = sn * self.phi

        veplnl2, etal2, self.etal = self.veplnl, self.etal, self.eta
        self.veplnl = self.cr2 * self.vepln + self.sr2 * dlta
        dlta = self.sr2 * self.vepln - self.cr2 * dlta
        self.eta, gama = self.sr2 * gama, -self.cr2 * gama
        cr1, sr1, gamal = reflection(gamal, dlta)
        self.vepln, gama = sr1 * gama, -cr1 * gama

        ul4, self.ul3 = self.ul3, self.ul2
        self.ul2 = ratio(taul2 - etal2 * ul4 - veplnl2 * self.ul3, gamal2)
        self.ul = ratio(self.taul - self.etal * self.ul3 - self.veplnl * self.ul2, gamal)
        singular = gama.abs() <= 100 * eps * norm_A
        self.u = torch.where(singular, 0.0, ratio(self.tau - self.eta * self.ul2 - self.vepln * self.ul, gama))
        coefficients = torch.stack([cr1, sr1, self.cr2, self.sr2, self.ul2, self.ul, self.u])

        self.cr2, self.sr2, gamal = reflection(gamal, eplnn)
        self.cs, self.sn, self.cr1, self.sr1 = cs, sn, cr1, sr1
        self.dltan, self.gama, self.gamal = dltan, gama, gamal
        self.beta, self.begun = betan, torch.ones_like(betan)
        return coefficients, singular | (betan <= eps * norm_A)


@dataclass(eq=False)
class Bidiagonal:
    """LSMR's factorisation of the bidiagonal matrices, named as in Fong & Saunders 2011; as `QLP` otherwise."""

    alpha: Tensor
    alphabar: Tensor
    rho: Tensor
    rhobar: Tensor
    cbar: Tensor
    sbar: Tensor
    zeta: Tensor
    zetabar: Tensor
    betadd: Tensor
    betad: Tensor
    rhodold: Tensor
    tautilde: Tensor
    thetatilde: Tensor
    normr: Tensor

    @classmethod
    def start(cls, alpha: Float[Tensor, " k"], beta: Float[Tensor, " k"]) -> Bidiagonal:
        """Before the first step: β u = r, α v = Aᵀu."""
        begin = {field.name: torch.zeros_like(beta) for field in fields(cls)}
        ones = {name: torch.ones_like(beta) for name in ("rho", "rhobar", "cbar", "rhodold")}
        known = {"alpha": alpha, "alphabar": alpha, "zetabar": alpha * beta, "betadd": beta, "normr": beta}
        return cls(**(begin | ones | {name: value.clone() for name, value in known.items()}))

    def select(self, index: Int[Tensor, " j"]) -> Bidiagonal:
        """The columns that remain."""
        return Bidiagonal(**{field.name: getattr(self, field.name)[index] for field in fields(self)})

    def restart(self, index: Int[Tensor, " j"], alpha: Tensor, beta: Tensor) -> None:
        """Begin some columns anew."""
        fresh = Bidiagonal.start(alpha, beta)
        for field in fields(self):
            getattr(self, field.name)[index] = getattr(fresh, field.name)

    def advance(self, alpha: Tensor, beta: Tensor) -> Tensor:
        """Take in β_{k+1} and α_{k+1}: the weights of hbar in itself, of hbar in x, and of h in the next h."""
        rhoold, rhobarold, zetaold = self.rho, self.rhobar, self.zeta
        c, s, self.rho = reflection(self.alphabar, beta)
        thetanew = s * alpha
        self.alphabar = c * alpha
        thetabar = self.sbar * self.rho
        self.cbar, self.sbar, self.rhobar = reflection(self.cbar * self.rho, thetanew)
        self.zeta, self.zetabar = self.cbar * self.zetabar, -self.sbar * self.zetabar

        betahat, self.betadd = c * self.betadd, -s * self.betadd
        thetatildeold = self.thetatilde
        ctilde, stilde, rhotilde = reflection(self.rhodold, thetabar)
        self.thetatilde, self.rhodold = stilde * self.rhobar, ctilde * self.rhobar
        self.betad = -stilde * self.betad + ctilde * betahat
        self.tautilde = ratio(zetaold - thetatildeold * self.tautilde, rhotilde)
        taud = ratio(self.zeta - self.thetatilde * self.tautilde, self.rhodold)
        self.normr = torch.hypot(self.betad - taud, self.betadd)
        self.alpha = alpha
        return torch.stack(
            [
                ratio(thetabar * self.rho, rhoold * rhobarold),
                ratio(ratio(self.zeta, self.rho), self.rhobar),
                ratio(thetanew, self.rho),
            ]
        )
