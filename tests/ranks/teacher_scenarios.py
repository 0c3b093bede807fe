"""What trainer processes of the tests do that have a frozen teacher."""

from __future__ import annotations

from dataclasses import replace

from epoch_scenarios import gathered
from scenarios import COEFFICIENTS, Layout, build, denominators, mine
from shares import share_of

from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.policy import ModelConfig


def weight_of(index: int) -> float:
    """The weight of a sample's teacher: one of three has none."""
    return float(index % 3)


def learn(rank, world_size, url, *, folder, teacher, samples, layout: Layout, algorithm: AlgorithmConfig, **settings):
    """Two epochs of one update: the metrics of each."""
    actor = build(rank, world_size, url, folder, layout, algorithm, **settings)
    model = ModelConfig(path=teacher, dtype=layout.dtype)
    actor.spec = replace(actor.spec, teacher=model, top_k=algorithm.distillation.top_k)
    actor.load_teacher()
    share = share_of([mine(samples, actor, layout.num_microbatches)], [denominators(samples)], layout.alignment)
    weights = [weight_of(index) for index in share.index]
    share = replace(share, teacher_weights=share.weights * 0 + weights, epochs=2)
    actor.begin(share, COEFFICIENTS)
    told = [actor.update(0, COEFFICIENTS)]
    columns = gathered(actor, actor.spec.objective.needs.kept)
    actor.take(replace(share, columns=columns))
    told.append(actor.update(0, COEFFICIENTS, 1))
    actor.close()
    return told
