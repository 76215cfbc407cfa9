"""Public docstrings: parameters are described, what is returned and raised is said, and an example runs.

Tests `argument_types.py`.
"""

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import griffe

import curvops as co
from curvops import metrics, plots
from curvops.network import likelihoods

MODULES = (
    co,
    co.operators,
    co.posterior,
    co.linalg,
    likelihoods,
    co.evidence,
    co.sampling,
    co.sampling.diagnostics,
    co.gp,
    plots,
    metrics,
)
SETTINGS = {*likelihoods.__all__, "Constant", "Cosine", "RobbinsMonro", "StochasticDescent"}
"""Dataclasses that users build; the fields of others are results, which prose describes."""


def public() -> dict[str, Any]:
    """The public functions and classes by name; exceptions and enums are described by their first line."""
    found = {f"{module.__name__}.{name}": getattr(module, name) for module in MODULES for name in module.__all__}
    return {
        name: value
        for name, value in found.items()
        if inspect.isfunction(value) or (inspect.isclass(value) and not issubclass(value, (BaseException, Enum)))
    }


def calls() -> Iterator[tuple[str, Callable[..., Any], str]]:
    """Each public call: its name, what is called, and the docstring that describes it."""
    for name, value in public().items():
        if inspect.isfunction(value):
            yield name, value, inspect.getdoc(value) or ""
            continue
        ours = getattr(value.__init__, "__module__", "").startswith("curvops.")
        if value.__name__ in SETTINGS if dataclasses.is_dataclass(value) else ours:
            yield name, value, inspect.getdoc(value) or ""
        for method, given in vars(value).items():
            function = getattr(given, "__func__", given)  # of a class method
            if inspect.isfunction(function) and not method.startswith("_"):
                yield f"{name}.{method}", function, inspect.getdoc(getattr(value, method)) or ""


CALLS = {name: (call, text) for name, call, text in calls()}


def sections(text: str) -> dict[str, set[str]]:
    """The kinds of sections of a docstring, with the names that each describes."""
    parsed = griffe.Docstring(text, lineno=1, parser=griffe.Parser.google).parsed
    return {
        section.kind.value: {getattr(each, "name", "").lstrip("*") for each in section.value}
        if isinstance(section.value, list)
        else set()
        for section in parsed
    }


def raises(call: Callable[..., Any]) -> bool:
    """Say whether the call itself, not one that it makes, raises an error of its own."""
    if isinstance(call, type):
        name = "__post_init__" if dataclasses.is_dataclass(call) else "__init__"
        return hasattr(call, name) and raises(getattr(call, name))
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(call))))
    return any(isinstance(node, ast.Raise) and node.exc is not None for node in ast.walk(tree))


def gaps(name: str) -> list[str]:
    """What the docstring of a public call lacks; a method may say it in a sentence, but a section is complete."""
    call, text = CALLS[name]
    signature, found = inspect.signature(call), sections(text)
    parameters = [parameter for parameter in signature.parameters if parameter not in ("self", "cls")]
    described = found.get("parameters", set())
    method = name.rsplit(".", 1)[0] in public()
    lacking = [f"no parameter {parameter}" for parameter in described - set(parameters)]
    if described or not method:
        lacking += [f"{parameter} is not described" for parameter in parameters if parameter not in described]
    if not method:
        if "returns" not in found and signature.return_annotation not in (None, "None", inspect.Signature.empty):
            lacking.append("no Returns")
        if "raises" not in found and raises(call):
            lacking.append("no Raises")
    return lacking


def test_docstrings_describe_each_parameter_the_result_and_the_errors() -> None:
    assert len(CALLS) > 350
    lacking = {name: found for name in CALLS if (found := gaps(name))}
    assert not lacking, "\n".join(f"{name}: {', '.join(found)}" for name, found in lacking.items())


def test_every_public_function_and_class_has_an_example() -> None:
    """Which runs, as every `>>>` in the package does."""
    lacking = [name for name, value in public().items() if ">>> " not in (inspect.getdoc(value) or "")]
    assert not lacking, lacking


UNTYPED = {
    "A",
    "blocks",
    "covariance",
    "indices",
    "low_rank_mat",
    "make",
    "matrix",
    "mean",
    "mesh",
    "optimizer",
    "params",
}
UNTYPED |= {"bias_variance", "points", "scores", "start", "state", "vectors", "weight_variance"}
"""Parameters that take anything of a foreign kind: trees, layouts, classes of others."""


def test_signatures_name_the_types_that_calls_take() -> None:
    """A hover over a call shows more than `Any`: the names of `argument_types.py`."""
    of_any = {
        f"{name}: {parameter.name}"
        for name, (call, _) in CALLS.items()
        for parameter in inspect.signature(call).parameters.values()
        if str(parameter.annotation) == "Any"
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if parameter.name not in UNTYPED
    }
    assert not of_any, sorted(of_any)
    assert inspect.signature(co.laplace).parameters["prior_precision"].annotation == "PriorPrecision | None"
