"""The warnings of a run: about its metrics (`rules`), its answers (`answers`) and slow ranks (`stragglers`).

`run` keeps the answers and checkpoints that `megatron-rl explain` needs."""
