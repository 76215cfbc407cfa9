"""Checks at the door: what is right comes back as plain numbers, what is wrong is refused by name."""

import math

import numpy as np
import pytest
import torch

from curvops.checks import (
    IN_WORDS,
    check_choice,
    check_flag,
    check_generator,
    check_options,
    checked_number,
    checked_whole,
    refuse_tangents,
)

RIGHT = {
    "an integer": (lambda: checked_number("a", 2), 2.0),
    "NumPy's": (lambda: checked_number("a", np.float32(0.5)), 0.5),
    "a closed end": (lambda: checked_number("a", 0, "[0, 1)"), 0.0),
    "a count": (lambda: checked_whole("k", np.int64(3)), 3),
    "the most": (lambda: checked_whole("k", 5, 1, 5), 5),
    "no options": (lambda: check_options(rtol=None, maxiter=None, steps=None, generator=None), None),
    "bytes as a float": (lambda: check_options(memory_budget=1e9), None),
}


@pytest.mark.parametrize("case", RIGHT)
def test_what_is_right_passes(case):
    call, expected = RIGHT[case]
    found = call()
    assert found == expected and type(found) is type(expected)


WRONG = {
    "text": (lambda: checked_number("a", "1"), TypeError, "a must be a number, got '1'"),
    "a flag": (lambda: checked_number("a", True), TypeError, "a must be a number, got True"),
    "NaN": (lambda: checked_number("a", math.nan, "[0, inf]"), ValueError, "got nan"),
    "an open end": (lambda: checked_number("a", 0), ValueError, "a must be positive and finite, got 0"),
    "the other end": (lambda: checked_number("a", 1, "[0, 1)"), ValueError, r"a must lie in \[0, 1\), got 1"),
    "too large": (lambda: checked_number("a", math.inf), ValueError, "got inf"),
    "a half": (lambda: checked_whole("k", 2.5, kind="a number of draws"), TypeError, "k must be a number of draws"),
    "a true count": (lambda: checked_whole("k", True), TypeError, "k must be a whole number, got True"),
    "none": (lambda: checked_whole("k", 0), ValueError, "k must be at least 1, got 0"),
    "too many": (lambda: checked_whole("k", 6, 1, 5), ValueError, "k must lie between 1 and the 5 there are, got 6"),
    "rtol": (lambda: check_options(rtol=0.0), ValueError, "rtol must be positive and finite, got 0.0"),
    "a level": (lambda: check_options(level=95), ValueError, "level must lie strictly between 0 and 1, got 95"),
    "steps": (lambda: check_options(steps=0), ValueError, "steps must be at least 1, got 0"),
    "iterations": (lambda: check_options(maxiter=-1), ValueError, "maxiter must not be negative, got -1"),
    "bytes": (lambda: check_options(memory_budget=-1), ValueError, "memory_budget must not be negative, got -1"),
    "a seed": (lambda: check_generator(0), TypeError, "manual_seed"),
    "a vector for a flag": (
        lambda: check_flag("w", torch.ones(2), "See X."),
        TypeError,
        r"got Tensor of shape \(2,\). See X.",
    ),
    "one for a flag": (lambda: check_flag("w", 1), TypeError, "w must be True or False, got 1"),
    "a choice": (lambda: check_choice("c", "z", ("x", "y")), ValueError, "c must be one of 'x', 'y', got 'z'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_refused_by_name(case):
    call, error, message = WRONG[case]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("interval", IN_WORDS)
def test_words_of_an_interval_say_what_it_refuses(interval):
    for value in (-math.inf, math.nan):
        with pytest.raises(ValueError, match=f"a must {IN_WORDS[interval]}, got {value}"):
            checked_number("a", value, interval)


def test_transforms_and_tangents_are_refused():
    seen = []

    def function(x):
        try:
            refuse_tangents([x])
            seen.append(False)
        except RuntimeError:
            seen.append(True)
        return x.sum()

    x = torch.ones(2)
    function(x)
    torch.func.vmap(function)(torch.ones(2, 2))
    torch.func.grad(function)(x)
    torch.func.jvp(function, (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        function(x)
        function(torch.autograd.forward_ad.make_dual(x, x))
    assert seen == [False, True, True, True, False, True]
