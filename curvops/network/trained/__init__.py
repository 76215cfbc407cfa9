"""A network with its data and its likelihood: read, checked against each other, and recorded."""
