"""Records of operators as plain values and tensors: the name of the class and the arguments that rebuild it.

linear_operator rebuilds an operator from the arguments of its constructor, and a record holds these arguments. Values
computed from them are left out, except the eigenbases of Kronecker factors. Operators whose products walk over the
data (the GGN) are recorded by reference to a linearisation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.linalg import Damped, Dense, Diagonal, DirectSum, EigenKronecker, Estimate, Kronecker, LowRank
from curvops.linalg.core.cache import Cache
from curvops.linalg.core.matrix_identity import Sources
from curvops.linalg.core.partition import Partition
from curvops.linalg.core.results import Reason
from curvops.linalg.operators.algebra import Product, Scaled, Sliced, Sum, Transposed
from curvops.linalg.operators.damped import Inverse
from curvops.linalg.operators.kronecker_factors import Details
from curvops.operators.curvatures.ggn import GGN, DiagonalGGN, EmpiricalFisher, Hessian
from curvops.operators.curvatures.kfac import EKFAC, KFAC, TOLD, LayerBlocks
from curvops.operators.curvatures.subnetwork import BlockDiagonal, Subnetwork
from curvops.operators.linearized.linearization import Linearization
from curvops.operators.linearized.network_operator import NetworkOperator
from curvops.operators.linearized.user_operator import ScaledByNoise, UserOperator

TENSOR_OPERATORS: dict[str, type[LinearOperator]] = {
    kind.__name__: kind
    for kind in (
        *(Dense, Diagonal, LowRank, Kronecker, EigenKronecker, DirectSum),
        *(Damped, Inverse, Product, Scaled, Sliced, Sum, Transposed),
        *(BlockDiagonal, DiagonalGGN, EKFAC, KFAC, LayerBlocks, Subnetwork),
    )
}
DATA_OPERATORS: dict[str, type[NetworkOperator]] = {kind.__name__: kind for kind in (EmpiricalFisher, GGN, Hessian)}
"""Operators whose products need the data."""
DESCRIPTIONS = {kind.__name__: kind for kind in (Details, Estimate, Partition, Sources, *Linearization.IDENTITIES)}
"""Dataclasses that occur among an operator's arguments; they are recorded field by field."""


def record_of_operator(operator: LinearOperator, lin: Linearization, what: str = "the curvature") -> dict[str, Any]:
    """Return the record of an operator on the parameters of `lin`; raise ValueError, with the remedy, without one."""
    operator = operator.settled() if isinstance(operator, ScaledByNoise) else operator
    record = _record(operator, lin, what)
    if isinstance(operator, UserOperator) and operator.arguments is not None:
        record["asked"] = {key: record_of_value(value, lin, what) for key, value in operator.arguments.items()}
    return record


def _record(operator: LinearOperator, lin: Linearization, what: str) -> dict[str, Any]:
    name = type(operator).__name__
    if DATA_OPERATORS.get(name) is type(operator):
        return _data_record(operator, lin, what)
    if TENSOR_OPERATORS.get(name) is not type(operator):
        raise ValueError(f"{what} holds {name}, an operator that cannot be saved: use co.low_rank(op) or co.KFAC(lin).")
    kwargs = {key: v for key, v in operator._kwargs.items() if key not in TOLD and not isinstance(v, Cache)}
    record = {
        "class": name,
        "args": [record_of_value(arg, lin, what) for arg in operator._args],
        "kwargs": {key: record_of_value(value, lin, what) for key, value in kwargs.items()},
    }
    if isinstance(operator, Kronecker) and operator.known_eigen is not None:
        record["eigen"] = record_of_operator(operator.known_eigen, lin)
    return record


def operator_of_record(record: Mapping[str, Any], lin: Linearization) -> Any:
    """Return the operator of a record; raise ValueError if it needs data that `lin` does not have."""
    operator = _operator(record, lin)
    if "asked" in record:
        operator.arguments = {key: value_of_record(value, lin) for key, value in record["asked"].items()}
    return operator


def _operator(record: Mapping[str, Any], lin: Linearization) -> Any:
    name = record["class"]
    if name in DATA_OPERATORS:
        if not lin.data.is_present:
            raise ValueError(f"co.{name} walks over the training points: pass them, co.load(path, model, data).")
        options = {key: value_of_record(value, lin) for key, value in record["options"].items()}
        if options.get("draws") is not None and record.get("order", lin.data.prints.order) != lin.data.prints.order:
            raise ValueError(f"co.{name} drew targets for each point: pass the data in the order they had then.")
        hyperparameters = [value_of_record(tensor, lin) for tensor in record["hyperparameters"]]
        operator = DATA_OPERATORS[name].build_at(lin, hyperparameters, **options)
        return operator.detached_from_weights() if record["detached"] else operator
    kwargs = {key: value_of_record(value, lin) for key, value in record["kwargs"].items()}
    if name not in TENSOR_OPERATORS:
        raise ValueError(f"it holds an operator {name}, which this version does not have; upgrade curvops.")
    kind = TENSOR_OPERATORS[name]
    if issubclass(kind, LayerBlocks):
        kwargs |= {"progress": lin.passes.progress, "memory": lin.memory}
    operator = kind(*(value_of_record(arg, lin) for arg in record["args"]), **kwargs)
    if "eigen" in record:
        operator.keep_eigen(operator_of_record(record["eigen"], lin))
    return operator


def _data_record(operator: Any, lin: Linearization, what: str) -> dict[str, Any]:
    source: Linearization = operator.lin
    if source.source != lin.source or source.tangent_space.difference(lin.tangent_space):
        raise ValueError(
            f"{what} holds a curvature of other data or weights: save co.low_rank(op), or post.update(lin, rank=...)."
        )
    return {
        "class": type(operator).__name__,
        "hyperparameters": [tensor.detach() for tensor in operator._args[1:]],
        "options": {key: record_of_value(value, lin, what) for key, value in operator.options.items()},
        "order": source.data.prints.order,
        "detached": operator._kwargs.get("space") is not None,
    }


# Plain values are recorded directly, others as a mapping that names their type.


def record_of_value(value: Any, lin: Linearization, what: str = "the posterior") -> Any:
    """Return the record of an operator's argument; raise ValueError if it cannot be recorded."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        return value.detach()
    if (name := lin.name_of(value)) is not None:
        return {"own": name}
    if isinstance(value, LinearOperator):
        return {"operator": record_of_operator(value, lin, what)}
    if isinstance(value, torch.Size):
        return {"size": list(value)}
    if isinstance(value, tuple | list):
        return {"tuple": [record_of_value(member, lin, what) for member in value]}
    if isinstance(value, range):
        return {"range": [value.start, value.stop]}
    if isinstance(value, Reason):
        return {"reason": value.name}
    if isinstance(value, Mapping):
        return {"mapping": [[record_of_value(member, lin, what) for member in pair] for pair in value.items()]}
    if type(value).__name__ in DESCRIPTIONS:
        names = [field.name for field in dataclasses.fields(value)]
        fields = {name: record_of_value(getattr(value, name), lin, what) for name in names}
        return {"of": type(value).__name__, "fields": fields}
    raise ValueError(f"{what} holds a {type(value).__name__}, which cannot be saved.")


def value_of_record(value: Any, lin: Linearization) -> Any:
    """Return the value of a record, with its tensors on the device of the weights."""
    if isinstance(value, Tensor):
        return value.to(lin.theta.device)
    if not isinstance(value, dict):
        return value
    if "of" in value:
        return DESCRIPTIONS[value["of"]](
            **{name: value_of_record(content, lin) for name, content in value["fields"].items()}
        )
    ((kind, content),) = value.items()
    if kind == "own":
        return lin.source if content == "source" else lin.tangent_space
    if kind == "operator":
        return operator_of_record(content, lin)
    if kind == "mapping":
        return {value_of_record(key, lin): value_of_record(member, lin) for key, member in content}
    if kind == "tuple":
        return tuple(value_of_record(member, lin) for member in content)
    if kind == "range":
        return range(*content)
    return torch.Size(content) if kind == "size" else Reason[content]
