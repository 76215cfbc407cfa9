"""The parts of `benchmarks.operators`, one module each: the cost of an operator, compared with a stated unit."""
