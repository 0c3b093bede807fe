"""What the roles of a run need, as a pure value for `placement.py`."""

from __future__ import annotations

from dataclasses import replace
from math import lcm

from megatron_rl.cluster.placement import Demand
from megatron_rl.config.schema import BaseConfig, GrpoRunConfig
from megatron_rl.config.teachers import served_teachers
from megatron_rl.types import Mesh


def demands_of(config: BaseConfig) -> tuple[Demand, ...]:
    """What the roles of a run need."""
    cluster, mesh = config.cluster, config.policy.parallel.mesh
    of_critic = config.critic.parallel.mesh if isinstance(config, GrpoRunConfig) and config.critic else Mesh()
    shared = 1  # ranks of other groups that share the GPUs of these ranks, and must also be in one node
    if isinstance(config, GrpoRunConfig) and cluster.colocate:
        guests = [teacher.parallel.num_ranks for _, teacher in served_teachers(config) if teacher.path is not None]
        shared = lcm(config.rollout.engine_ranks, of_critic.tensor, of_critic.expert_ways, *guests)
    trainer = Demand(
        role="trainer",
        num_groups=1,
        group_size=mesh.world_size,
        block=lcm(mesh.tensor, mesh.expert_ways, shared),  # tensor-parallel groups are consecutive ranks
        cpus=cluster.cpus_per_trainer,
        gpus=cluster.gpus_per_trainer,
        advice="lower policy.parallel (or rollout.parallel.tensor), cluster.cpus_per_trainer or gpus_per_trainer",
        pool=cluster.pools.get("trainer"),
    )
    trainers = [trainer]
    if isinstance(config, GrpoRunConfig) and config.critic is not None:
        block = lcm(of_critic.tensor, of_critic.expert_ways)
        critic = replace(trainer, role="critic", group_size=of_critic.world_size, block=block)
        advice = "lower critic.parallel, cluster.cpus_per_trainer or cluster.gpus_per_trainer"
        critic = replace(critic, advice=advice, pool=cluster.pools.get("critic"))
        trainers.append(replace(critic, gpus=0, beside="trainer") if cluster.colocate else critic)
    if not isinstance(config, GrpoRunConfig) or config.rollout.replay is not None:
        return tuple(trainers)
    engine = Demand(
        role="engine",
        num_groups=config.rollout.num_engines,
        group_size=config.rollout.engine_ranks,
        block=config.rollout.engine_ranks,
        cpus=0,
        gpus=cluster.gpus_per_engine_rank,
        advice="lower rollout.num_engines, rollout.parallel.tensor or rollout.parallel.pipeline",
        pool=cluster.pools.get("engine"),
        can_span=not cluster.colocate,
        beside="trainer" if cluster.colocate else None,
        stage=config.rollout.parallel.tensor,
    )
    teachers = [
        replace(
            engine,
            role=role_of_teacher(number),
            num_groups=teacher.num_engines,
            group_size=teacher.parallel.num_ranks,
            block=teacher.parallel.num_ranks,
            gpus=cluster.gpus_per_engine_rank if teacher.path is not None and not cluster.colocate else 0,
            advice=f"lower teachers.{number}.num_engines or teachers.{number}.parallel",
            pool=cluster.pools.get("teacher"),
            can_span=not cluster.colocate,
            beside="trainer" if cluster.colocate and teacher.path is not None else None,
            stage=teacher.parallel.tensor,
        )
        for number, teacher in served_teachers(config)
    ]
    verifier = Demand("verifier", cluster.verifiers, 1, 1, cpus=0, gpus=0, pool=cluster.pools.get("verifier"))
    num, gpus, pool = len(config.scored_by_model), cluster.reward_model_gpus, cluster.pools.get("reward_model")
    model = Demand("reward_model", num, 1, 1, 0, gpus, "lower cluster.gpus_per_reward_model", pool)
    return (*trainers, engine, *teachers, verifier, *([model] if num else []))


def role_of_teacher(number: int) -> str:
    return f"teacher {number} engine"
