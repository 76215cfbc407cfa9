"""The table of layer rules; to add a layer, add a row to `RULES`."""

from fnmatch import fnmatchcase
from functools import cache

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from curvops.network.engines.rules.convolution import ConvolutionRule, TransposedConvolutionRule
from curvops.network.engines.rules.layer_rules import (
    AnyScaleRule,
    EmbeddingBagRule,
    EmbeddingRule,
    LinearRule,
    Local,
    Rule,
    ScaleRule,
    SingleRows,
    SlopeRule,
    TransposedLinearRule,
)
from curvops.ranks.process_group import has_hooks, unsharded_class

__all__ = ["RULES", "Local", "SingleRows", "Rule", "rule_for", "rule_of"]

# Classes of a package that need not be installed are listed under a glob over their full names.
RULES: dict[type | str, Rule] = {
    nn.Linear: LinearRule(),
    NonDynamicallyQuantizableLinear: LinearRule(),  # the output projection of attention
    "transformers.pytorch_utils.Conv1D": TransposedLinearRule(),
    "torch_geometric.nn.dense.linear.Linear": LinearRule(),
    nn.Conv1d: ConvolutionRule(),
    nn.Conv2d: ConvolutionRule(),
    nn.Conv3d: ConvolutionRule(),
    nn.ConvTranspose1d: TransposedConvolutionRule(),
    nn.ConvTranspose2d: TransposedConvolutionRule(),
    nn.ConvTranspose3d: TransposedConvolutionRule(),
    nn.Embedding: EmbeddingRule(),
    nn.EmbeddingBag: EmbeddingBagRule(),
    nn.LayerNorm: ScaleRule(leading=False),
    nn.RMSNorm: AnyScaleRule(leading=False),
    "transformers.models.*RMSNorm": AnyScaleRule(leading=False),
    "transformers.models.*T5LayerNorm": AnyScaleRule(leading=False),
    nn.GroupNorm: ScaleRule(leading=True),
    nn.BatchNorm1d: ScaleRule(leading=True),
    nn.BatchNorm2d: ScaleRule(leading=True),
    nn.BatchNorm3d: ScaleRule(leading=True),
    nn.InstanceNorm1d: ScaleRule(leading=True),
    nn.InstanceNorm2d: ScaleRule(leading=True),
    nn.InstanceNorm3d: ScaleRule(leading=True),
    nn.PReLU: SlopeRule(leading=True),
}


def rule_of(kind: type) -> Rule | None:
    """Return the row of `RULES` for exactly this class, not for a base class; None if there is none."""
    kind = unsharded_class(kind)
    return RULES.get(kind) or _row_named(f"{kind.__module__}.{kind.__qualname__}")


@cache  # of names, since classes in a cache would stay in memory with all that their methods refer to
def _row_named(name: str) -> Rule | None:
    return next((rule for known, rule in RULES.items() if isinstance(known, str) and fnmatchcase(name, known)), None)


def rule_for(layer: nn.Module) -> Rule | None:
    """Return the rule of a layer, or None: subclasses and parametrised or hooked layers may do anything."""
    rule = rule_of(type(layer))
    if rule is None or has_hooks(layer):
        return None
    parameters = dict(layer.named_parameters(recurse=False))
    return rule if parameters.keys() <= {"weight", "bias"} and rule.supports(layer) else None
