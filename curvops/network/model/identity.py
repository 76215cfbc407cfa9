"""The identity of a network: dtype, shape and fingerprint of every tensor that it holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from curvops.network.data.fingerprints import fingerprint


def identity_of(named: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return dtype, shape and fingerprint of each tensor by name. One pass over the values."""
    return {
        name: {
            "dtype": str(tensor.dtype),
            "shape": list(tensor.shape),
            "fingerprint": int(fingerprint([tensor.detach()])) if tensor.numel() else 0,
        }
        for name, tensor in named.items()
    }


def require_same_network(known: Mapping[str, Any], given: Mapping[str, Tensor]) -> None:
    """Raise ValueError, with the names and the remedy, unless the given tensors equal the known ones."""
    missing, further = known.keys() - given.keys(), given.keys() - known.keys()
    if missing or further:
        lacks, more = (_some(sorted(names)) or "nothing" for names in (missing, further))
        raise ValueError(
            f"this is not the model that was saved: it lacks {lacks}, and also has {more}. Build it as it was then."
        )
    found = identity_of(given)
    for what in ("shape", "dtype"):
        other = [name for name in known if known[name][what] != found[name][what]]
        if other:
            was, now = (_written(each[other[0]][what]) for each in (known, found))
            remedy = {
                "shape": "Build the model with the sizes that it had then.",
                "dtype": "Convert a copy of the model first, as model.double() and model.float() do.",
            }
            raise ValueError(
                f"the saved model has another {what} of {_some(other)} ({other[0]!r}: {was}, here {now}). "
                f"{remedy[what]}"
            )
    other = [name for name in known if known[name]["fingerprint"] != found[name]["fingerprint"]]
    if other:
        raise ValueError(
            f"the model has other values than when it was saved in {len(other)} of {len(known)} tensors: "
            f"{_some(other)}. Load the weights at which it was linearised (model.load_state_dict); those of the "
            "selected parameters are in the safetensors file of the saved folder, as linearization.weights.NAME."
        )


def _written(value: Any) -> str:
    return str(tuple(value)) if isinstance(value, list) else str(value)


def _some(names: Iterable[str], most: int = 4) -> str:
    listed = list(names)
    return ", ".join(map(repr, listed[:most])) + (f", … ({len(listed)} in all)" if len(listed) > most else "")
