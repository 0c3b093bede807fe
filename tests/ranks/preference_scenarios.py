"""What trainer ranks do with preferences in tests/ranks/test_actor_preferences.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import scenarios
from shares import share_of

from megatron_rl.actor.weights import export_hf


def train(
    rank, world_size, url, *, folder, samples, layout, loss, logp_reference, num_updates=3, export=None, **settings
):
    """The metrics of updates on the same pairs, which are split over micro-batches and data-parallel ranks. With
    `export`, the folder to write afterwards, also what the model then says of each sample of this replica.

    Args:
        logp_reference: by the index of a sample.
    """
    actor = scenarios.build(rank, world_size, url, folder, layout, loss, **settings)
    own = scenarios.mine(samples, actor, layout.num_microbatches)
    share = share_of([own], [scenarios.denominators(samples)], layout.alignment)
    share = replace(share, logp_reference=np.array([logp_reference[i] for i in share.index]))
    found = []
    for _ in range(num_updates):
        actor.begin(share, {})
        found.append(actor.update(0, {}))
    scores = None
    if export is not None:
        scores = actor.score(share)
        export_hf(actor, export)
    actor.close()
    return found if export is None else (found, scores)
