"""The parts shared by every algorithm: vectors, results, limits, memory.

A new algorithm needs three of them: `algorithm` puts its options in force, it touches `vectors` only by their
primitives, and `solve_routes` is the table in which a solver is chosen.
"""

from curvops.linalg.core import solve_routes, vectors
from curvops.linalg.core.algorithm import algorithm

__all__ = ["algorithm", "solve_routes", "vectors"]
