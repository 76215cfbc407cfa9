"""Whatever sums over batches."""
