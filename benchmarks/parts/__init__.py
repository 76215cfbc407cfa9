"""The parts of `benchmarks.operators`, one module each: what an operator costs, and beside what."""
