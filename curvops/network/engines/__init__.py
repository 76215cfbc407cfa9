"""Products with J on one batch, and the choice of the engine that computes them.

A new layer is a row of `RULES`; another device has its own `Rates` in `plan`.
"""

from curvops.network.engines.rules import RULES, Rule, rule_for, rule_of

__all__ = ["RULES", "Rule", "rule_for", "rule_of"]
