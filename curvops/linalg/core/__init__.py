"""The parts that every algorithm shares: vectors, results, limits, memory."""
