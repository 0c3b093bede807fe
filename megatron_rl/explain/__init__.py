"""Finds the tokens that a metric of a step comes from (`megatron-rl explain`)."""
