"""Checks of arguments: numbers, counts, flags, names, gradients. The lowest floor; every public call uses them."""

from __future__ import annotations

import numbers
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.autograd import forward_ad

NO_RULES = (
    "operators have no rules for torch.func (vmap, grad, jvp, ...) and forward mode: use torch.autograd, and in place "
    "of vmap a block (n, K). A @ v is linear: its tangent is A @ tangent, and its gradient A.mT @ gradient."
)
IN_WORDS = {
    "(0, inf)": "be positive and finite",
    "(0, inf]": "be positive",
    "[0, inf)": "be finite and not negative",
    "[0, inf]": "not be negative",
    "(-inf, inf)": "be finite",
    "(0, 1)": "lie strictly between 0 and 1",
}


def shown(value: object) -> str:
    """Return a value as an error message shows it: an array of numbers by its shape, a long value by its type."""
    if isinstance(value, torch.Tensor | np.ndarray) and value.ndim:
        return f"{type(value).__name__} of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 200 else f"a {type(value).__name__}"


def check_tensor(name: str, value: object) -> None:
    """Raise TypeError unless the value is a tensor, or another object with its attributes; a NumPy array is none."""
    of_numpy = isinstance(value, np.ndarray | np.generic)
    if of_numpy or not hasattr(value, "shape"):
        of_numbers = of_numpy or isinstance(value, list | tuple | numbers.Number)
        hint = f"; pass torch.as_tensor({name})" if of_numbers else ""
        raise TypeError(f"{name} must be a tensor, got {shown(value)}{hint}.")


def checked_number(name: str, value: object, interval: str = "(0, inf)", kind: str = "a number") -> float:
    """Return ``value`` as a float if it is a number in this interval; "[0, 1)" includes only its left end.

    Raises:
        TypeError: it is not a number; the message says that it must be of this ``kind``.
        ValueError: it is outside the interval.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be {kind}, got {shown(value)}.")
    number, (low, high) = float(value), map(float, interval[1:-1].split(","))
    at_end = (interval[0] == "[" and number == low) or (interval[-1] == "]" and number == high)
    if not (low < number < high or at_end):
        raise ValueError(f"{name} must {IN_WORDS.get(interval, f'lie in {interval}')}, got {value}.")
    return number


def checked_whole(
    name: str, value: object, least: int = 1, most: int | None = None, kind: str = "a whole number"
) -> int:
    """Return ``value`` as an int if it is a whole number of at least ``least`` and at most ``most``.

    Raises:
        TypeError: it is not a whole number; the message says that it must be of this ``kind``.
        ValueError: it is too small or too large.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be {kind}, got {shown(value)}.")
    number = int(value)
    if number < least or (most is not None and number > most):
        limits = f"be at least {least}" if most is None else f"lie between {least} and the {most:,} there are"
        raise ValueError(f"{name} must {limits}, got {number}.")
    return number


def check_options(**options: object) -> None:
    """Check options of a public call by their names, which mean the same in every call; None is an option left out.

    A name that is not listed here counts something, of which there is at least one.

    Raises:
        TypeError, ValueError: an option is of another kind, or outside its interval.
    """
    for name, value in options.items():
        if name == "generator":
            check_generator(value)
        elif value is None:
            continue
        elif name == "progress":
            if not (isinstance(value, bool) or callable(value)):
                wanted = "None, False, True or a function (what, done, total)"
                raise TypeError(f"progress must be {wanted}, got {value!r}.")
        elif name in ("rtol", "xtol", "atol", "temperature", "step_size", "bandwidth"):
            checked_number(name, value)
        elif name in ("maxiter", "max_matvecs", "memory_budget"):
            checked_number(name, value, "[0, inf]")
        elif name == "level":
            checked_number(name, value, "(0, 1)")
        else:
            checked_whole(name, value, 0 if name in ("rank", "max_rank", "warmup") else 1)


def refuse(is_wrong: object, message: str) -> None:
    """Raise ValueError with this message for arguments that would otherwise be ignored, or end as NaN."""
    if is_wrong:
        raise ValueError(message)


def check_generator(generator: object) -> None:
    """Raise TypeError for anything that is neither a torch.Generator nor None."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(
            f"generator must be a torch.Generator or None, got {shown(generator)}; to fix a seed, pass "
            "torch.Generator().manual_seed(0)."
        )


def drawn_seed(generator: torch.Generator | None) -> int:
    """Return a seed drawn from a generator, by default torch's own; raise TypeError for anything else."""
    check_generator(generator)
    device = None if generator is None else generator.device
    return int(torch.randint(2**62, (), generator=generator, device=device))


def refuse_modes(dtype: torch.dtype, device: torch.device) -> None:
    """Raise an error under a mode in which products would be wrong, or what is kept of them useless.

    Raises:
        ValueError: `torch.autocast` is on in single precision, and rounds matrix products to half precision.
        RuntimeError: the call is inside a transform of `torch.func`, whose tensors are not to be kept.
    """
    if dtype == torch.float32 and torch.is_autocast_enabled(device.type):
        raise ValueError(
            "torch.autocast is on, which would round these products to half precision: make this call outside of it, "
            f"or under torch.autocast({device.type!r}, enabled=False). A model may use autocast in its own forward."
        )
    if in_functorch():
        raise RuntimeError(NO_RULES)


def rounds_to_tf32(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the user has let matrix products in single precision be rounded to TF32 on this device."""
    if dtype != torch.float32 or device.type != "cuda":
        return False
    try:
        return bool(torch._C._get_cublas_allow_tf32())
    except RuntimeError:  # set by the settings of torch 2.9
        return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def check_flag(name: str, value: object, hint: str = "") -> None:
    """Raise TypeError unless ``value`` is True or False; the ``hint`` is the end of the message."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {shown(value)}.{hint and ' '}{hint}")


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Raise ValueError, listing the choices, unless the value is one of them."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {shown(value)}.")


def check_kind(name: str, value: object, kind: type | tuple[type, ...], wanted: str) -> None:
    """Raise TypeError unless ``value`` is of this type; the message says what is ``wanted``, and how it is made."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {wanted}, got {type(value).__name__}.")


def check_shape(name: str, value: Any, shape: Sequence[int], hint: str = "") -> None:
    """Raise ValueError unless a tensor or an operator has this shape, where another would be broadcast."""
    if tuple(value.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(value.shape)}.{hint and ' '}{hint}")


def check_like(name: str, value: Any, like: Any, owner: str, remedy: str = "convert it") -> None:
    """Raise ValueError unless a tensor or an operator has the dtype and the device of the ``owner``'s."""
    if (value.dtype, value.device) != (like.dtype, like.device):
        given, wanted = (f"{entry.dtype} on {entry.device}" for entry in (value, like))
        raise ValueError(f"{name} is {given}, but {owner} {wanted}: {remedy}.")


def checked_indices(indices: Any, size: int) -> Int[Tensor, " S"]:
    """Return indices or a boolean mask as distinct positions below `size`; raise ValueError or TypeError for others."""
    index = torch.as_tensor(indices)
    if index.dtype == torch.bool:
        check_shape("the mask", index, (size,))
        index = index.nonzero().squeeze(1)
    refuse(not index.numel(), "indices select nothing: choose at least one.")
    if index.is_floating_point() or index.ndim != 1:
        raise TypeError(f"indices must be a vector of integers, got {index.dtype} of shape {tuple(index.shape)}.")
    is_outside = int(index.min()) < 0 or int(index.max()) >= size
    refuse(is_outside, f"indices must be at least 0 and less than {size}, the number of rows.")
    refuse(len(index.unique()) < len(index), "the indices contain a position twice.")
    return index.long().clone()


def carries_graph(tensors: Sequence[Tensor]) -> bool:
    """Return whether a value computed from these tensors now would carry a graph."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def in_functorch() -> bool:
    """Return whether the call is inside a transform of `torch.func`, such as `vmap`."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def refuse_tangents(values: Iterable[Any]) -> None:
    """Raise RuntimeError inside a transform of `torch.func`, or if tangents of tensors or operators would be lost."""
    if in_functorch():
        raise RuntimeError(NO_RULES)
    if forward_ad._current_level < 0:
        return
    for value in values:
        # Sharded vectors have no tangents.
        tensors = value.representation() if hasattr(value, "representation") else (value,)
        if any(forward_ad.unpack_dual(t).tangent is not None for t in tensors if isinstance(t, Tensor)):
            raise RuntimeError(NO_RULES)


def require_no_graph(tensors: Sequence[Tensor], what: str) -> None:
    """Raise ValueError if a gradient is needed that `what` lacks, which would silently be zero."""
    if carries_graph(tensors):
        raise ValueError(
            f"{what} has no gradient for the tensors inside its matrix, and one of them requires a gradient (the "
            "likelihood's noise or a prior precision, for example): detach it, or build it under torch.no_grad()."
        )
