"""The last import of the server of tests/warm.py. What it has imported is no garbage: a collection in a forked process
need not look at it, which takes half a second of CPU time each time and copies the memory of all of it."""

import gc

gc.collect()
gc.freeze()
