"""The user's model: its snapshot, its parameters and the way it is called."""
