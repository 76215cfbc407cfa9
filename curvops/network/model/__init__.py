"""The user's model: its snapshot, its parameters and how it is called."""
