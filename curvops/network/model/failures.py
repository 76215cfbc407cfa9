"""Errors of a model that cannot be run: the inputs that it was given, and the remedy."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import torch

from curvops.network.data.inputs import Inputs, components

# Patterns of torch's messages and the remedy for each; the first that matches counts.
REMEDIES: tuple[tuple[str, str], ...] = (
    (
        r"same device|different device|device type",
        "Inputs are moved to the parameters' device. A tensor that is neither parameter nor buffer stays where it was "
        "made: register it with register_buffer.",
    ),
    (
        r"scalar type|same dtype|dtype|indices.*FloatTensor",
        "Floating inputs are cast to the parameters' dtype, others keep theirs: give indices in an integer dtype, real "
        "numbers in a floating one, and cast inside the model where its parts have several dtypes.",
    ),
    (
        r"index out of range|out of bounds|device-side assert",
        "An index is beyond a table, such as a token beyond its embedding: compare the largest with num_embeddings.",
    ),
    (
        r"unexpected keyword|missing \d+ required|positional argument|multiple values",
        "Tensors and tuples are positional arguments, mappings keyword arguments (or, where forward names none of "
        "them, its only one): name them as forward does.",
    ),
    (
        r"shape|size|dimension|channels|rank",
        "Inputs must have the shape that the model takes, with the points along the first dimension.",
    ),
)
OTHERWISE = "Call the model itself on these points: it should return the outputs (N, C)."
MISSING = "forward looks up an entry that the inputs do not have: name the mapping's entries as it does."


@contextlib.contextmanager
def explain(inputs: Inputs) -> Iterator[None]:
    """Add to an error of the model the inputs that it was run on and a remedy; the error itself becomes the cause.

    Raises TypeError for a TypeError, else ValueError. Out-of-memory errors pass through unchanged.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        given = ", ".join(f"{name} {tuple(t.shape)} of {t.dtype}" for name, t in components(inputs))
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(
            f"the model failed on {given}: {type(error).__name__}: {_first_lines(error)} {_remedy(error)}"
        ) from error


def _remedy(error: Exception) -> str:
    if isinstance(error, KeyError | AttributeError):
        return MISSING if isinstance(error, KeyError) else OTHERWISE
    return next((text for pattern, text in REMEDIES if re.search(pattern, str(error), re.IGNORECASE)), OTHERWISE)


def _first_lines(error: Exception) -> str:
    text = " ".join(str(error).split("\n\n")[0].split())
    return text if text.endswith((".", "!", "?")) else f"{text}."
