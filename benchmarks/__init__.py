"""Speed and memory of products, in units of one loss gradient. Nothing here asserts a time."""
