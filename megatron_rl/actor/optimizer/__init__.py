"""The optimizer, its state, and how the state is kept."""
