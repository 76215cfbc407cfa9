"""The user's model: a snapshot, its parameters, how it is called."""
