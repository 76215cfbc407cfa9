"""Batches, inputs, and fingerprints of data.

Walks and models know data by these: what a user gives becomes a source of batches (`as_source`, read by a `Reading`),
and inputs of any form are counted, cut, named and moved.
"""

from curvops.network.data.batches import Batches, Reading, as_source
from curvops.network.data.inputs import as_inputs, take

__all__ = ["Batches", "Reading", "as_inputs", "as_source", "take"]
