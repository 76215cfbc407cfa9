"""One command for a machine with a GPU, `python -m benchmarks.gpu`: what is right, what it costs, what it scales to."""
