"""Sums over batches: walks over the data, rows by layer, and the memory budget."""
