"""The description of a matrix in a checkpoint, by which a later run checks that its matrix is the same."""

from __future__ import annotations

from typing import Any

import torch
from linear_operator import LinearOperator
from torch import Tensor

from curvops.ambient import aside
from curvops.checkpoint import digest, identify
from curvops.linalg.core.memory import memories_of
from curvops.linalg.core.sources import sources_of
from curvops.linalg.core.vectors import Matrix, describe, norm, product


@torch.no_grad()
def problem_of(A: Matrix) -> dict[str, Any]:
    """Describe A in a few numbers: size, dtype, kind, tensors, data, and products with two fixed vectors.

    The products are made after a first one, because later products use the engine that pays off over many: then the
    first product of a process and the first one after a crash have the same bits.
    """
    facts, sources = describe(A), sources_of(A)
    counts = {} if sources is None else {str(name): count for name, count in sources.counts.items()}
    tensors = [A] if isinstance(A, Tensor) else A.representation()
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (2, facts.columns), generator=generator).mT.to(facts.device, facts.dtype) * 2 - 1
    image = aside(product(A))(signs)
    for memory in memories_of(A):
        memory.expect_many()
    return {
        "the size": [facts.rows, facts.columns],
        "the dtype": str(facts.dtype),
        "the kind of operator": kind_of(A),
        "its tensors (weights, prior precision, noise)": digest(tensors),
        "the data": counts,
        "its products": torch.cat([norm(image), image[: min(len(image), 64)].double().sum(0)]),
    }


def form_of(A: LinearOperator) -> str:
    """Return the classes and single numbers that A is made of, without its matrices, which may differ by rounding."""
    return f"{kind_of(A)} {identify([tensor for tensor in A.representation() if tensor.numel() == 1])}"


def kind_of(A: Any) -> str:
    """Return the names of the classes that A is made of."""
    if not isinstance(A, LinearOperator):
        return "tensor"
    arguments = [kind_of(argument) for argument in A._args if isinstance(argument, LinearOperator)]
    return type(A).__name__ + (f"({', '.join(arguments)})" if arguments else "")
