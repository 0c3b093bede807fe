"""Mixtures of experts: the router, and the replay of the engine's choices."""
