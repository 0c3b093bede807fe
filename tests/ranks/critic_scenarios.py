"""What the critic's processes of the tests do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from memory_scenarios import held_bytes
from scenarios import OPTIMIZER, TOTAL_STEPS, Layout, denominators, meet, mine
from shares import TrainSample, share_of

from megatron_rl.actor.critic import MegatronCritic
from megatron_rl.actor.spec import ActorSpec
from megatron_rl.actor.weights import export_hf, load_weights
from megatron_rl.algorithms.value_objective import ValueObjective
from megatron_rl.config.policy import ModelConfig, ParallelConfig, PolicyConfig
from megatron_rl.config.value_loss import ValueLossConfig
from megatron_rl.models import critic_shape, read_shape


def build(rank: int, world_size: int, url: str, folder: Path, layout: Layout) -> MegatronCritic:
    mesh = layout.mesh
    parallel = ParallelConfig(
        tensor=mesh.tensor,
        pipeline=mesh.pipeline,
        data=mesh.data,
        context=mesh.context,
        virtual=mesh.virtual,
        sequence=layout.sequence,
    )
    spec = ActorSpec(
        shape=critic_shape(read_shape(folder)),
        model=ModelConfig(path=folder, dtype=layout.dtype, recompute=layout.recompute),
        policy=PolicyConfig(parallel=parallel, optimizer=OPTIMIZER, megatron=layout.megatron),
        objective=ValueObjective(ValueLossConfig(cliprange_value=0.2)),
        temperature=1.0,
        total_steps=TOTAL_STEPS,
        seed=0,
    )
    critic = MegatronCritic(spec, rank=rank, world_size=world_size, store=meet(rank, world_size, url))
    load_weights(critic, folder)
    return critic


def step(critic: MegatronCritic, samples: list[TrainSample], layout: Layout, returns, num_updates: int):
    """(values by sample, of the whole replica; what is said about them; metrics of each update)"""
    minibatches = [mine(samples, critic, layout.num_microbatches)] * num_updates
    share = share_of(minibatches, [denominators(samples)] * num_updates, layout.alignment)
    values = critic.values(share)
    described = critic.set_targets(returns)
    return values, described, [critic.update(i, {}) for i in range(num_updates)]


def learn_epochs(rank, world_size, url, *, folder, samples, layout, returns, composition):
    """A step; see `epoch_scenarios.shares_of`. (metrics of the values, metrics of each update)"""
    from epoch_scenarios import gathered, shares_of

    critic = build(rank, world_size, url, folder, layout)
    first, *later = shares_of(critic, samples, composition)
    critic.values(first)
    told = [critic.set_targets(returns)]
    columns = gathered(critic, ["value", "return"])
    for epoch, share in enumerate([first, *later]):
        if epoch:
            critic.take(replace(share, columns=columns))
        told += [critic.update(i, {}, epoch) for i in range(len(share.minibatches))]
    critic.close()
    return told


def learn(rank, world_size, url, *, folder, samples, layout, returns, export=None):
    """Two steps of two updates each."""
    critic = build(rank, world_size, url, folder, layout)
    steps = [step(critic, samples, layout, returns, 2) for _ in range(2)]
    if export is not None:
        export_hf(critic, export)
    critic.close()
    return steps


def save_and_go_on(rank, world_size, url, *, folder, samples, layout, returns, checkpoint):
    critic = build(rank, world_size, url, folder, layout)
    step(critic, samples, layout, returns, 1)
    critic.save(checkpoint, {})
    critic.finish_save()
    after = step(critic, samples, layout, returns, 1)
    critic.close()
    return after


def resume(rank, world_size, url, *, folder, samples, layout, returns, checkpoint):
    critic = build(rank, world_size, url, folder, layout)
    critic.load(checkpoint)
    after = step(critic, samples, layout, returns, 1)
    critic.close()
    return after


def lend(rank, world_size, url, *, folder, samples, layout, target, enters):
    """Two steps of one update; if `enters`, the rank goes through all phases between them.

    Returns:
        The metrics and the values of the second step; the bytes of this rank's storages by phase; and what was refused,
        as (phase, name of the call, message).
    """
    critic = build(rank, world_size, url, folder, layout)
    returns = {sample.index: sample.tokens.logp_rollout for sample in samples}
    step(critic, samples, layout, returns, 1)
    sizes, refusals = {"training": held_bytes(critic)}, []
    share = share_of([mine(samples, critic, layout.num_microbatches)], [denominators(samples)], layout.alignment)
    calls = {
        "values": lambda: critic.values(share),
        "set_targets": lambda: critic.set_targets(returns),
        "update": lambda: critic.update(0, {}),
        "save": lambda: critic.save(target / "refused", {}),
        "load": lambda: critic.load(target / "refused"),
        "snapshot": critic.snapshot,
    }
    for phase in ("weight sync", "generating") if enters else ():
        critic.enter(phase)
        sizes[phase] = held_bytes(critic)
        for name, call in calls.items():
            try:
                call()
            except RuntimeError as error:
                refusals.append((phase, name, str(error)))
    critic.enter("training")
    values, _, metrics = step(critic, samples, layout, returns, 1)
    critic.close()
    return metrics, values, sizes, refusals
