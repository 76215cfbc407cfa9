"""The parts shared by every algorithm: vectors, results, limits, memory."""
