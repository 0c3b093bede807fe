"""`megatron-rl gpu-day`: what a CPU cannot show, checked on one GPU, on a node, or with the whole loop."""
