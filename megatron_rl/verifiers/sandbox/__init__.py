"""Programs that are run to judge them, and what keeps them from everything else."""
