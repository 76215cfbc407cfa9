"""Names of the types that public functions take, for type checkers and for readers of signatures.

When the library runs they stand for any type: what is given is read, and refused in words, where it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from linear_operator import LinearOperator
    from torch import Tensor, nn, optim
    from torch.distributed.device_mesh import DeviceMesh

    from curvops.network.likelihoods import Likelihood
    from curvops.operators import Linearization
    from curvops.posterior import Laplace
    from curvops.sampling import Chain, Constant, Cosine, LogPosterior, RobbinsMonro, State, Transition

    Network: TypeAlias = nn.Module | tuple[Callable[..., Tensor], Mapping[str, Tensor]]
    """A module, or a function (parameters, inputs) -> outputs with its parameters by name."""
    Points: TypeAlias = Tensor | Sequence[Any] | Mapping[str, Any]
    """Points along the first dimension of a tensor, of several tensors, or of a mapping's; or a list of objects."""
    Collate: TypeAlias = Callable[[list[Any]], Any]
    """A function of a list of points that returns what the model takes."""
    Data: TypeAlias = tuple[Points, Tensor | None] | tuple[Points, Tensor | None, Tensor] | Iterable[Any]
    """Points and targets or None, with weights if there are some; or such batches, which can be read again."""
    OneLikelihood: TypeAlias = str | Likelihood | nn.Module | Callable[..., Any]
    LikelihoodChoice: TypeAlias = OneLikelihood | Mapping[Any, OneLikelihood] | Sequence[OneLikelihood]
    """A name such as "classification", a likelihood, a torch loss, or a function of outputs and targets; or several."""
    ParameterChoice: TypeAlias = str | Sequence[str] | Callable[[str, Tensor], bool] | Tensor | Sequence[int]
    """A name or globs over the names of parameters, a predicate of name and tensor, or positions."""
    CurvatureChoice: TypeAlias = str | LinearOperator | Callable[[Linearization], LinearOperator]
    """A class of curvature, or an operator."""
    PriorPrecision: TypeAlias = float | Tensor | Mapping[str, float] | LinearOperator | Laplace
    """A number, a vector, numbers by globs over names, an operator, or an earlier posterior."""
    PriorMean: TypeAlias = float | Tensor | Mapping[str, float | Tensor]
    """A number, a vector, or numbers and tensors by globs over names."""
    GivenBatch: TypeAlias = tuple[Any, ...] | Mapping[str, Any] | Tensor | None
    """A batch as the log posterior reads it."""
    Density: TypeAlias = LogPosterior | Callable[[Any, Any], Any]
    """A log posterior, of `log_posterior` or a function of parameters and batch."""
    StepSizes: TypeAlias = float | Tensor | Constant | Cosine | RobbinsMonro | Callable[[int], float]
    """A number, or one for each step."""
    Preconditioning: TypeAlias = Tensor | LinearOperator | None
    """The preconditioner of a sampler: a vector of scales or an operator."""
    Draws: TypeAlias = Chain | Tensor | Mapping[str, Tensor] | Sequence[Any]
    """Draws of a run, or tensors (chains, draws, *shape), by name if there are several."""
    SamplingMethod: TypeAlias = Transition
    """What one of the functions of `co.sampling` makes."""
    Tree: TypeAlias = Tensor | Mapping[str, Any] | Sequence[Any]
    """Parameters as a tensor, or as tensors in mappings and sequences."""
    Start: TypeAlias = Tree | State
    """Parameters, or the state in which an earlier run ended."""
    Covariance: TypeAlias = float | Tensor | LinearOperator | None
    """A number, a vector, or an operator."""
    OptimizerChoice: TypeAlias = Callable[..., optim.Optimizer]
    """A class of torch.optim, or a function of (tensors, **options)."""
    Positions: TypeAlias = Tensor | Sequence[int] | Sequence[bool]
    """Positions in a vector of weights, or a mask."""
    BlockChoice: TypeAlias = str | Sequence[str | Sequence[str] | Positions]
    """The word "layer", or groups of names or positions."""
    Variances: TypeAlias = float | Sequence[float] | Tensor
    """A number, or one for each layer."""
    Mesh: TypeAlias = DeviceMesh
    """Devices over which vectors are sharded."""
else:
    Network = Points = Data = LikelihoodChoice = ParameterChoice = CurvatureChoice = PriorPrecision = PriorMean = Any
    GivenBatch = Density = StepSizes = Preconditioning = Draws = SamplingMethod = Collate = Any
    Tree = Start = Covariance = OptimizerChoice = Positions = BlockChoice = Variances = Mesh = Any
