"""The commands of `megatron-rl`, and what they share: launch, dry run, defaults, screen, jobs of Slurm."""
