"""Which tokens a metric of a step comes from (`megatron-rl explain`)."""
