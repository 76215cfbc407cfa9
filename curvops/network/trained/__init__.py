"""A network with its data and its likelihood: read, checked against each other, and recorded."""

from curvops.network.trained import network_record

__all__ = ["network_record"]
