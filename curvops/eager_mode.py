"""The base class of our modes that intercept the operations of torch below automatic differentiation."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class EagerMode(TorchDispatchMode):
    """A dispatch mode that torch does not wrap for its compiler, whose 800 modules the first operation would load."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
