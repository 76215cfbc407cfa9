"""How a model is called: its inputs become arguments, and its errors are explained.

The signature decides. Entries that `forward` names (or, for a tuple, positions) are passed as separate arguments, as in
Hugging Face models; otherwise the mapping or tuple is the only argument, as in `forward(self, batch)`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from curvops.network.data.inputs import Inputs, described
from curvops.network.data.objects import Objects
from curvops.network.data.point_sources import data_like


class Calls:
    """The way one module receives its inputs, decided once for each set of names or number of positions.

    `mapping_type` is the user's type of mapping; a dict is converted to it if it is the only argument. `example` are
    objects of the data, if they are objects: in the same way a user's inputs are read.
    """

    def __init__(self, module: nn.Module | None) -> None:
        self._module = module
        self._whole: dict[Hashable, bool] = {}
        self.mapping_type: Any = dict
        self.example: Objects | None = None

    def read(self, x: Any) -> Any:
        """Return a user's inputs, as objects if the data are."""
        return x if self.example is None else self.example.like(x)

    def read_data(self, data: Any) -> Any:
        """Return a user's data, with objects for inputs if those of the training data are."""
        return data if self.example is None else data_like(data, self.example)

    def arguments(self, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments; raise TypeError if the signature allows neither way."""
        if isinstance(inputs, torch.Tensor) or not isinstance(inputs, Mapping | tuple | list):
            return (inputs,), {}
        form = _form(inputs)
        if form not in self._whole:
            self._whole[form] = self._is_whole(inputs)
        if self._whole[form]:
            return (self.as_given(inputs),), {}
        return ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})

    def as_given(self, inputs: Any) -> Any:
        """Convert a mapping to the user's type, if a dict can be converted; return anything else unchanged."""
        if not isinstance(inputs, Mapping) or not issubclass(self.mapping_type, Mapping) or self.mapping_type is dict:
            return inputs
        try:
            made = self.mapping_type(dict(inputs))
        except Exception:  # some mappings cannot be built from their entries alone
            return inputs
        return made if isinstance(made, Mapping) and set(made) == set(inputs) else inputs

    def turn(self, inputs: Any) -> bool:
        """Switch to the other way for inputs of this form; return False if the signature allows only one."""
        signature = self._signature()
        if signature is None or not isinstance(inputs, Mapping | tuple | list):
            return False
        if _refusal(signature, inputs, True) is None and _refusal(signature, inputs, False) is None:
            self._whole[_form(inputs)] = not self._whole[_form(inputs)]
            return True
        return False

    def _is_whole(self, inputs: Any) -> bool:
        signature = self._signature()
        # Lists have as many entries as there are points, and named tuples (packed sequences) are objects.
        alone = type(inputs) is not tuple and not isinstance(inputs, Mapping)
        if alone and (signature is None or _refusal(signature, inputs, True) is None):
            return True
        if signature is None or (refusal := _refusal(signature, inputs, False)) is None:
            return False
        if _refusal(signature, inputs, True) is None:
            return True
        names = ", ".join(repr(name) for name in inputs) if isinstance(inputs, Mapping) else f"{len(inputs)} tensors"
        raise TypeError(f"the model's forward{signature} cannot be called with inputs {names} ({refusal}).")

    def _signature(self) -> inspect.Signature | None:
        try:
            return None if self._module is None else inspect.signature(self._module.forward)
        except (TypeError, ValueError):  # compiled functions may have none
            return None


def _form(inputs: Any) -> Hashable:
    if isinstance(inputs, list):
        return list
    return frozenset(inputs) if isinstance(inputs, Mapping) else len(inputs)


def _refusal(signature: inspect.Signature, inputs: Any, whole: bool) -> TypeError | None:
    """Return the error of binding the arguments in this way; None if they can be bound."""
    try:
        if whole:
            signature.bind(inputs)
        elif isinstance(inputs, Mapping):
            signature.bind(**inputs)
        else:
            signature.bind(*inputs)
    except TypeError as error:
        return error
    return None


PAIR = " If the second of these are targets: predictions take the inputs alone."


@contextlib.contextmanager
def explain(inputs: Inputs) -> Iterator[None]:
    """Add to an error of the model the inputs that it ran on; the original error becomes the cause.

    Raises TypeError for a TypeError, else ValueError. Out-of-memory errors pass through unchanged.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        pair = PAIR if isinstance(inputs, tuple) and len(inputs) == 2 else ""
        raise kind(
            f"the model failed on {described(inputs)}: {type(error).__name__}: {_first_lines(error)}{pair}"
        ) from error


def _first_lines(error: Exception) -> str:
    text = " ".join(str(error).split("\n\n")[0].split())
    return text if text.endswith((".", "!", "?")) else f"{text}."
