"""The MINRES-QLP iteration: Lanczos' three terms, the answer from its factorisation, true residuals, and who stops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.linalg.core.results import Reason
from curvops.linalg.core.vectors import as_block, columns, inner, norm
from curvops.linalg.solvers.rotations import QLP
from curvops.linalg.solvers.systems import Block, Callback, Columns
from curvops.linalg.solvers.verdicts import CHECK_EVERY, Records, Recurrence, Verdict, grown

WATCHED = 6
"""Steps in which symmetry is watched: what Aᵀ ≠ A does to the second vector, it does at once."""


@dataclass(eq=False)
class Vectors:
    """The active columns: Lanczos' last two residuals, M⁻¹ of the last, its last vector; W, and x without its part."""

    before: Float[Tensor, "n k"]
    last: Float[Tensor, "n k"]
    z: Float[Tensor, "n k"]
    v: Float[Tensor, "n k"]
    wl: Float[Tensor, "n k"]
    w: Float[Tensor, "n k"]
    x: Float[Tensor, "n k"]

    def select(self, index: Tensor) -> Vectors:
        """The columns that remain."""
        return Vectors(*(columns(block, index) for block in vars(self).values()))

    def restart(self, index: Tensor, x: Tensor, r: Tensor, z: Tensor) -> None:
        """Begin some columns anew from x with residual r and z = M⁻¹r."""
        where = index.to(x.device)
        for block in (self.before, self.v, self.wl, self.w):
            block.mT[where] = 0.0
        self.x.mT[where], self.last.mT[where], self.z.mT[where] = x.mT, r.mT, z.mT

    def turn(self, v: Tensor, c: Float[Tensor, "7 k"]) -> None:
        """Take in a Lanczos vector: two right reflections, then what no later step changes goes to x."""
        cr1, sr1, cr2, sr2, ul2, _, _ = c
        fresh = (self.wl * sr2).addcmul_(v, -cr2)
        done = (self.wl * cr2).addcmul_(v, sr2)
        self.wl = (self.w * cr1).addcmul_(fresh, sr1)
        self.w = (self.w * sr1).addcmul_(fresh, -cr1)
        self.x = done.mul_(ul2).add_(self.x)


class Run(Recurrence):
    """K systems with right-hand sides of unit norm in lock-step; ``records`` is the outcome."""

    def __init__(
        self,
        multiply: Block,
        precondition: Block | None,
        system: Columns,
        warm: bool,
        rtol: float,
        maxiter: int,
        callback: Callback | None,
    ) -> None:
        self.multiply, self.precondition = multiply, precondition
        self.B, self.maxiter, self.callback = system.unit, maxiter, system.spread(callback)
        n, K = self.B.shape
        self.eps = torch.finfo(self.B.dtype).eps
        r = as_block(self.B - multiply(system.X) if warm and K else self.B)
        self.records = Records(system.X, norm(r).tolist(), rtol, 10 * self.eps * math.sqrt(n), max(500, maxiter // 2))
        self.records.matvecs = K if warm else 0
        self.trigger = max(0.95 * rtol, self.eps / 4)
        self.active = list(range(K))
        self.origin = system.X.mT.clone().mT if warm else None
        self.norm_A = self.norm_T = self.asymmetry = 0.0
        self.near: set[int] = set()
        z, beta = self.measured(r)
        before, v, wl, w = (torch.zeros_like(r) for _ in range(4))
        self.vectors = Vectors(before, r, as_block(z), v, wl, w, as_block(system.X))
        self.scalars = QLP.start(beta)
        self.size = torch.ones(K, dtype=torch.float64)
        self.parts = torch.zeros(2, K, dtype=self.B.dtype, device=self.B.device)
        """Of the answer along wl and w."""
        self.metric = norm(r).cpu() / torch.where(beta > 0, beta, 1.0)
        """The true residual over what the recurrence minimises, which is its norm in the preconditioner's metric."""

    def measured(self, r: Tensor) -> tuple[Tensor, Tensor]:
        """M⁻¹r and, on the host, the norm of r in that metric."""
        if self.precondition is None:
            return r, norm(r).cpu()
        z = self.precondition(r)
        return z, _root(inner(r, z).cpu())

    def note(self) -> set[int]:
        """A row of the history; positions whose recurrence says that they have converged or come near a null vector."""
        estimates = (self.scalars.phi * self.metric).tolist()
        row = self.records.record(self.active, estimates)
        if self.callback is not None:
            self.callback(self.records.iteration, row)
        return {j for j, value in enumerate(estimates) if not value > self.trigger} | self.near

    def step(self) -> tuple[set[int], set[int]]:
        """One step of Lanczos and of the factorisation: positions at their end, and those that met NaN or Inf."""
        V, beta = self.vectors, self.scalars.beta
        scale = torch.where(beta > 0, beta, 1.0).to(self.B)
        v = V.z / scale
        p = self.multiply(v)
        self.records.iteration += 1
        self.records.matvecs += len(self.active)
        watching = self.records.iteration <= WATCHED
        image = norm(p)
        mirrored = inner(p, V.v) if watching else image
        p = torch.addcmul(p, V.before, scale, value=-1)
        alfa = inner(p, v)
        p.addcmul_(V.last, alfa.to(p) / scale, value=-1)
        z = p if self.precondition is None else self.precondition(p)
        square = norm(p) if self.precondition is None else inner(p, z)
        packet = torch.stack([alfa, square, image, norm(v), mirrored]).cpu()
        broken = set((~torch.isfinite(packet).all(0)).nonzero().squeeze(1).tolist())
        if broken:
            self.near = set()
            return set(), broken
        alfa, square, image, size, mirrored = packet
        before, self.size = self.size, size
        betan = square if self.precondition is None else _root(square)
        self.norm_A = max(self.norm_A, float((image / torch.where(size > 0, size, 1.0)).amax()))
        if watching:
            self.watch(mirrored, beta, image * before)
        self.norm_T = max(self.norm_T, float(torch.hypot(torch.hypot(alfa, beta * self.scalars.begun), betan).amax()))
        coefficients, ended = self.scalars.advance(alfa, betan, self.norm_T, self.eps)
        c = coefficients.to(self.B)
        V.turn(v, c)
        V.before, V.last, V.z, V.v, self.parts = V.last / scale, p, z, v, c[5:]
        # Near a null vector r, x gains errors of eps/rootl along it: the answers before that must be looked at.
        rootl, looked = self.scalars.rootl, self.scalars.looked
        near = (rootl <= math.sqrt(self.eps) * self.norm_T) & (rootl <= 0.1 * looked)
        looked[near] = rootl[near]
        self.near = set(near.nonzero().squeeze(1).tolist())
        ended |= self.scalars.rootl <= 0.1 * self.records.level * self.norm_T
        return set(ended.nonzero().squeeze(1).tolist()), set()

    def watch(self, mirrored: Tensor, beta: Tensor, height: Tensor) -> None:
        """Keep the worst of ⟨v', Av⟩ − ⟨Av', v⟩, relative to ‖v'‖‖Av‖, for v', v that are orthogonal beyond doubt."""
        sound = (self.scalars.begun > 0) & (beta > 0.01 * self.norm_T) & (height > 0)
        gaps = ((mirrored - beta).abs() / torch.where(sound, height, 1.0))[sound].tolist()
        self.asymmetry = max([self.asymmetry, *gaps])

    def inspect(self, positions: Sequence[int], ended: set[int], forced: Reason | None = None) -> None:
        """Look at true residuals; columns stop with a reason, begin anew, or go on."""
        if not positions:
            return
        V, index = self.vectors, torch.tensor(list(positions))
        wl, w, parts = columns(V.wl, index), columns(V.w, index), self.parts[:, index.to(self.B.device)]
        x = columns(V.x, index).addcmul(wl, parts[0]).addcmul(w, parts[1])
        image = self.multiply(x)
        self.records.matvecs += len(positions)
        sizes, images = torch.stack([norm(x), norm(image)]).cpu().tolist()
        self.norm_A = grown(self.norm_A, images, sizes)
        r = columns(self.B, torch.tensor([self.active[j] for j in positions])) - image
        stalled = {j for j in positions if self.records.idle(self.active[j]) >= CHECK_EVERY}
        normal = self.lift(positions, x, r, [i for i, j in enumerate(positions) if j in ended | self.near | stalled])
        z, measures = self.measured(r)
        residuals, sizes = torch.stack([norm(r), norm(x)]).cpu().tolist()
        stopped: dict[int, Reason] = {}
        again: list[int] = []
        for i, j in enumerate(positions):
            column, residual, measure = self.active[j], residuals[i], float(measures[i])
            self.records.keep(column, x[:, i], residual, residual / (self.norm_A * sizes[i] + 1), normal[i])
            self.metric[j] = residual / measure if measure > 0 else 1.0
            drifted = measure > 2 * float(self.scalars.phi[j])
            if forced is not None or residual <= self.records.rtol:
                stopped[i] = forced or Reason.CONVERGED
                continue
            null = self.records.normal[column] <= self.records.vanishing
            verdict = self.records.judge(column, residual, drifted or j in ended, null)
            if verdict is Verdict.RESTART:
                again.append(i)
            elif verdict is Verdict.STOP:
                stopped[i] = Reason.STAGNATION if math.isfinite(residual) else Reason.NON_FINITE
        if again:
            kept = torch.tensor(again)
            V.restart(index[kept], columns(x, kept), columns(r, kept), columns(z, kept))
            self.scalars.restart(index[kept], measures[kept])
            self.parts[:, index[kept].to(self.B.device)] = 0.0
        self.stop(index, stopped)

    def lift(self, positions: Sequence[int], x: Tensor, r: Tensor, which: list[int]) -> list[float]:
        """‖A z‖/(‖A‖‖z‖) for z = M⁻¹r of some columns, NaN for the others; null vectors are taken out of x and r.

        Of an inconsistent system, r is the only null vector in the Krylov space (Liu, Milzarek & Roosta 2022).
        """
        normal = [math.nan] * len(positions)
        if not which:
            return normal
        index = torch.tensor(which)
        left = columns(r, index)
        z, square = self.measured(left)
        image = self.multiply(z)
        self.records.matvecs += len(which)
        sizes, images = torch.stack([norm(z), norm(image)]).cpu().tolist()
        self.norm_A = grown(self.norm_A, images, sizes)
        for i, size, height in zip(which, sizes, images):
            normal[i] = height / (self.norm_A * size) if height else 0.0
        moved = columns(x, index)
        if self.origin is not None:
            moved -= columns(self.origin, torch.tensor([self.active[positions[i]] for i in which]))
        null = torch.tensor([normal[i] <= self.records.vanishing for i in which]) & (square > 0)
        share = torch.where(null, inner(left, moved).cpu() / torch.where(null, square.square(), 1.0), 0.0).to(x)
        where = index.to(x.device)
        x.mT[where] = torch.addcmul(columns(x, index), z, share, value=-1).mT
        r.mT[where] = torch.addcmul(left, image, share).mT
        return normal

    def stop(self, index: Tensor, stopped: dict[int, Reason]) -> None:
        """Give reasons and drop the columns."""
        if not stopped:
            return
        for i, reason in stopped.items():
            asymmetric = self.asymmetry > math.sqrt(self.eps)
            failed = reason in (Reason.STAGNATION, Reason.ITERATION_LIMIT)
            self.records.stop(self.active[int(index[i])], Reason.NOT_SYMMETRIC if failed and asymmetric else reason)
        kept = [j for j, column in enumerate(self.active) if column not in self.records.reasons]
        where = torch.tensor(kept, dtype=torch.long)
        self.active = [self.active[j] for j in kept]
        self.vectors, self.scalars = self.vectors.select(where), self.scalars.select(where)
        self.parts = self.parts[:, where.to(self.B.device)]
        self.metric, self.size = self.metric[where], self.size[where]


def _root(square: Tensor) -> Tensor:
    """√(rᵀM⁻¹r); a negative one is an error."""
    if bool((square < 0).any()):
        raise ValueError("the preconditioner must be positive definite: a vector r with r'M⁻¹r < 0 was met.")
    return square.sqrt()
