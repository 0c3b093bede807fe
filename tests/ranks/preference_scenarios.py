"""What trainer ranks do with preferences in tests/ranks/test_actor_preferences.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import scenarios
from shares import share_of


def train(rank, world_size, url, *, folder, samples, layout, loss, logp_reference, num_updates=3, **settings):
    """The metrics of updates on the same pairs, which are split over micro-batches and data-parallel ranks.

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
    actor.close()
    return found
