"""Is a model called with the entries of its inputs as arguments of their own, or with all of them as one argument?

Its signature says: entries that `forward` takes by name (of a tuple: by position) are arguments, as Hugging Face's
models have them; where it does not take them, the mapping or tuple is its only argument, as in `forward(self, batch)`.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Mapping
from typing import Any

from torch import nn


class Calls:
    """How one module is called, decided once for each set of names or number of positions.

    `mapping_type` is what a mapping was before it became a dict; as an only argument it is that again.
    """

    def __init__(self, module: nn.Module | None) -> None:
        self._module = module
        self._whole: dict[Hashable, bool] = {}
        self.mapping_type: Any = dict

    def arguments(self, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments. Raises TypeError where the signature takes the inputs neither way."""
        if not isinstance(inputs, Mapping | tuple | list):
            return (inputs,), {}
        form = _form(inputs)
        if form not in self._whole:
            self._whole[form] = self._decided(inputs)
        if self._whole[form]:
            return (self.as_given(inputs),), {}
        return ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})

    def as_given(self, inputs: Any) -> Any:
        """A mapping in the type of the user's, where one can be made of a dict; anything else as it is."""
        if not isinstance(inputs, Mapping) or not issubclass(self.mapping_type, Mapping) or self.mapping_type is dict:
            return inputs
        try:
            made = self.mapping_type(dict(inputs))
        except Exception:  # some mappings cannot be made of their entries alone
            return inputs
        return made if isinstance(made, Mapping) and set(made) == set(inputs) else inputs

    def turn(self, inputs: Any) -> bool:
        """Take the other way for such inputs; False where the signature leaves no choice."""
        signature = self._signature()
        if signature is None or not isinstance(inputs, Mapping | tuple | list):
            return False
        if _refusal(signature, inputs, True) is None and _refusal(signature, inputs, False) is None:
            self._whole[_form(inputs)] = not self._whole[_form(inputs)]
            return True
        return False

    def _decided(self, inputs: Any) -> bool:
        signature = self._signature()
        if signature is None or (refusal := _refusal(signature, inputs, False)) is None:
            return False
        if _refusal(signature, inputs, True) is None:
            return True
        names = ", ".join(repr(name) for name in inputs) if isinstance(inputs, Mapping) else f"{len(inputs)} tensors"
        raise TypeError(
            f"the model's forward{signature} cannot be called with inputs {names} ({refusal}). Name the entries of a "
            "mapping as forward names its arguments, or let forward take the whole mapping as its one argument."
        )

    def _signature(self) -> inspect.Signature | None:
        try:
            return None if self._module is None else inspect.signature(self._module.forward)
        except (TypeError, ValueError):  # compiled functions may have none
            return None


def _form(inputs: Any) -> Hashable:
    return frozenset(inputs) if isinstance(inputs, Mapping) else len(inputs)


def _refusal(signature: inspect.Signature, inputs: Any, whole: bool) -> TypeError | None:
    """Why arguments cannot be bound so, None where they can."""
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
