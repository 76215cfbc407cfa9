"""Does the layerwise engine multiply by the Jacobian that automatic differentiation has?"""

from __future__ import annotations

import torch

from curvops.network.autodiff import Streamed
from curvops.network.layerwise import Layerwise
from curvops.network.probes import allowance, rounding, tolerance


def mismatches(engine: Layerwise, reference: Streamed) -> set[str]:
    """Names of parameters for which this batch's Jᵀu differs from autograd's, or J from the adjoint of Jᵀ."""
    generator = torch.Generator(device=engine.outputs.device).manual_seed(0)
    u = torch.randn(1, *engine.outputs.shape, dtype=engine.outputs.dtype, device=generator.device, generator=generator)
    ours, expected = engine.pull(u), reference.pull(u)
    scale = torch.stack([value.norm() for value in expected.values()]).norm()
    tol = tolerance(u.dtype)
    differences = {name: (ours[name] - value).norm() for name, value in expected.items()}
    bad = {name for name, value in expected.items() if not bool(differences[name] <= allowance(value) + tol**2 * scale)}
    if bad:
        noise = rounding(lambda block: reference.pull(block[""]), {"": u}, expected, generator)
        bad = {name for name in bad if not bool(differences[name] <= allowance(expected[name], noise[name]))}
    for part in engine.parts:
        names = part.layer.names
        tangents = {
            name: torch.randn(1, *part.layer.shape_of(local), dtype=u.dtype, device=u.device, generator=generator)
            for local, name in names.items()
        }
        pushed = part.push(tangents)
        pulled = part.pull(pushed)  # not of u: ⟨u, Jv⟩ may be small by chance, and a wrong push with it
        left = pushed.square().sum()
        right = torch.stack([(pulled[local] * tangents[name]).sum() for local, name in names.items()]).sum()
        if not bool((left - right).abs() <= tol * left):
            bad |= set(names.values())
    return bad
