"""What every algorithm shares: vectors, results, limits, memory."""
