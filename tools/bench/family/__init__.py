"""`megatron-rl family`: proposes the table of a model that has no family yet, and checks the proposal."""
