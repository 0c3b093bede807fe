"""Reinforcement learning: Megatron trains, vLLM generates answers, and the bridge brings the weights from one to the
other.

megatron-rl grpo FILE.yaml ... section.key=value ... [--dry-run] [--resume auto]
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rich.console import Console

from megatron_rl.commands.interrupt import Interrupt
from megatron_rl.commands.launch import launch, quiet_environment, show
from megatron_rl.commands.screen import console

quiet_environment()

from megatron_rl.commands.dry_run import (  # noqa: E402
    check_memory,
    describe_hours,
    describe_memory,
    describe_placement,
    describe_policy,
    describe_rollout,
)
from megatron_rl.commands.screen import waiting  # noqa: E402
from megatron_rl.config.machine import num_cores, threads_of_ranks  # noqa: E402
from megatron_rl.config.schema import GrpoRunConfig  # noqa: E402
from megatron_rl.config.teachers import teacher_on_ranks  # noqa: E402
from megatron_rl.layout import Links  # noqa: E402
from megatron_rl.loop.checkpoints import Checkpoints  # noqa: E402
from megatron_rl.loop.replay import ports_without_engines  # noqa: E402
from megatron_rl.models import check_model, critic_shape, read_shape  # noqa: E402
from megatron_rl.ports import Ports  # noqa: E402
from megatron_rl.preflight.row_sources import RowSource, heldout_source, prompt_rules, training_sources  # noqa: E402
from megatron_rl.types import ModelShape, Prompt, Tokenizer  # noqa: E402

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatron_rl.actor.spec import ActorSpec
    from megatron_rl.cluster.critic import CriticGroup
    from megatron_rl.cluster.engines import EngineGroup
    from megatron_rl.cluster.nodes import RayPlacement
    from megatron_rl.cluster.restarts import Restarts
    from megatron_rl.cluster.teachers import Teachers
    from megatron_rl.data.prompt_table import PromptTable
    from megatron_rl.loop.source import Prompts


def run(config: GrpoRunConfig, checkpoints: Checkpoints, interrupt: Interrupt) -> int:
    """Connect the packages and train; returns the number of steps that are done."""
    shape = read_shape(config.model.path)
    if config.model.weights is None:
        check_model(config.model.path, config.policy.adapted(shape).base, config.policy.parallel.mesh)

    # These imports take seconds. They are here so that a dry run, or an error in the configuration, does not wait.
    from megatron_rl.cluster.bridge import RayBridge
    from megatron_rl.cluster.colocation import Colocation, shared_links
    from megatron_rl.cluster.models import Models
    from megatron_rl.cluster.nodes import RayPlacement
    from megatron_rl.cluster.policy import PolicyGroup
    from megatron_rl.cluster.restarts import Restarts
    from megatron_rl.cluster.session import ray_session
    from megatron_rl.cluster.stream import open_stream
    from megatron_rl.cluster.verifier import VerifierGroup
    from megatron_rl.cluster.visibility import check_nodes
    from megatron_rl.cluster.watchers import observe_run
    from megatron_rl.data.tokenizer import open_tokenizer
    from megatron_rl.loop.train import train
    from megatron_rl.observe import RunSink, open_trackers, write_provenance
    from megatron_rl.rollout.shared_memory import remove_leftovers

    folder, logs = config.run_folder, config.run_folder / "logs"
    write_provenance(folder, config, checkpoints.first_step)
    spec = policy_spec(config, shape)
    with ExitStack() as cleaning:
        cleaning.callback(remove_leftovers)  # engines that were killed during their start leave shared memory
        with waiting(console, "Ray starts") as tell:
            cleaning.enter_context(
                ray_session(
                    config.cluster,
                    config.num_trainer_ranks,
                    logs,
                    interrupt.check,
                    interrupt.on_loss,
                    num_threads=threads_of_ranks(config, num_cores()),
                )
            )
            tell("the processes of engines, verifiers and trainer ranks start")
            placement, restarts = RayPlacement(config), Restarts(config.cluster.restarts_per_hour)
            if config.cluster.ray_address is not None:  # the preflight has looked at this machine
                check_nodes(config, placement.plan)
            if config.rollout.replay is None:
                engines, teachers = start_engines(config, logs, placement, restarts, cleaning)
                verifier = VerifierGroup(config, logs, placement, restarts)
            others = start_others(config, shape, logs, placement)
            policy = PolicyGroup(spec, config.cluster, logs, placement)
            models = Models(policy, restarts, others, config.num_warmup_steps)
            # While all processes import their libraries, the driver imports its own and reads the rows.
            tell("the driver reads tokenizer and rows")
            tokenizer = open_tokenizer(config.model.path)
            prompts = read_prompts(config, tokenizer)
            decoder = cast(Tokenizer, tokenizer)  # it gives one text for one list of tokens
            sink = RunSink(folder, config.run, console, decoder, config.rollout.delimiter, checkpoints.resume_at)
            sink.feed(open_trackers(config, checkpoints.resume_at))
            links = Links()
            if config.cluster.colocate:
                tell("the engines start vLLM (logs/engine_0.log)")
                Colocation(policy, engines, others.values(), teachers.guests).start_engines()
                links = shared_links(placement.plan)
            tell("the trainer ranks import Megatron-Core and load the weights (logs/trainer_0.log)")
            models.start(is_resumed=checkpoints.first_step > 0)
            if config.rollout.replay is None:
                tell("the engines start vLLM (logs/engine_0.log)")
                engines.wait()
                teachers.wait()
                tell("the verifiers load the rewards (logs/verifier.log)")
                verifier.wait()
                bridge = RayBridge(config, spec, policy, engines, logs, links)
                ports = Ports(models, bridge, open_stream(config, engines, verifier, teachers))
                observe_run(config, sink, [*models.groups, engines, *([teachers] if config.teachers else []), verifier])
            else:
                ports = ports_without_engines(models)
                observe_run(config, sink, models.groups)
        with sink, interrupt.training():
            done = train(config, spec.shape, ports, prompts, (sink, checkpoints), interrupt)
        if done == config.run.steps:
            policy.export_hf(folder / "hf")
            for name, other in others.items():
                other.export_hf(folder / f"{name}_hf")
    if done == config.run.steps:
        show(folder)
    return done


def policy_spec(config: GrpoRunConfig, shape: ModelShape) -> ActorSpec:
    """What the ranks of the policy are built from."""
    from megatron_rl.actor.spec import ActorSpec
    from megatron_rl.algorithms import PolicyObjective
    from megatron_rl.rollout.vocabulary import forbidden_ids

    return ActorSpec(
        shape=config.policy.adapted(shape),
        model=config.model,
        policy=config.policy,
        objective=PolicyObjective(config.algorithm),
        temperature=config.rollout.sampling.temperature,
        total_steps=(config.run.steps - config.num_warmup_steps) * config.algorithm.num_updates,
        seed=config.run.seed,
        collective_timeout=config.cluster.collective_timeout,
        teacher=teacher_on_ranks(config),
        top_k=config.algorithm.distillation.top_k if config.algorithm.distillation else 0,
        forbidden=forbidden_ids(config.model.path, shape.vocab_size, config.rollout),
        pictures=str(config.pictures_folder),
    )


def start_engines(
    config: GrpoRunConfig, logs: Path, placement: RayPlacement, restarts: Restarts, cleaning: ExitStack
) -> tuple[EngineGroup, Teachers]:
    """The processes of the engines, the policy's and the teachers', which end with the context."""
    from megatron_rl.cluster.engines import EngineGroup
    from megatron_rl.cluster.teachers import Teachers

    engines = EngineGroup(config, logs, placement, restarts)
    cleaning.callback(engines.close)
    teachers = Teachers(config, logs, placement, restarts, engines)
    cleaning.callback(teachers.close)
    return engines, teachers


def start_others(
    config: GrpoRunConfig, shape: ModelShape, logs: Path, placement: RayPlacement
) -> dict[str, CriticGroup]:
    """The processes of the models beside the policy, by the models' names in the passes of a step."""
    from megatron_rl.actor.spec import ActorSpec
    from megatron_rl.algorithms.value_objective import ValueObjective
    from megatron_rl.cluster.critic import CriticGroup

    if (critic := config.critic) is None:
        return {}
    model = critic.model or config.model
    spec = ActorSpec(
        shape=critic.trainer.adapted(critic_shape(shape if critic.model is None else read_shape(model.path))),
        model=model,
        policy=critic.trainer,
        objective=ValueObjective(critic.loss),
        temperature=1.0,
        total_steps=config.run.steps * math.prod(critic.updates_of(config.algorithm)),
        seed=config.run.seed,
        collective_timeout=config.cluster.collective_timeout,
    )
    return {"critic": CriticGroup(spec, config.cluster, logs, placement)}


def read_prompts(config: GrpoRunConfig, tokenizer: PreTrainedTokenizerBase) -> Prompts:
    """The training prompts as a stream, and the held-out prompts. Prints what became of the rows of each source."""
    import numpy as np

    from megatron_rl.data import ItemSource, ShuffledStream, load_prompts
    from megatron_rl.loop.source import Prompts

    data, rollout, rules = config.data, config.rollout, prompt_rules(config)

    def tell(note: str, style: str | None = "yellow") -> None:
        console.print(note, style=style, markup=False, highlight=False, soft_wrap=True)

    def read(source: RowSource) -> PromptTable:
        table = load_prompts(source.path, tokenizer, rules, source.reading, data.cache, tell)
        tell(f"{source.key}: {source.path}: {table.tally}", "yellow" if table.tally.skipped else None)
        return table

    sources: dict[str, ItemSource[Prompt]] = {}
    for source in training_sources(data, rollout.environment):
        table = read(source)
        rates = np.array([prompt.columns["pass_rate"] for prompt in table]) if source.reading.rated else None
        sources[source.name] = ItemSource(table, table.tally.digest, source.share, rates)
    seed, easy = config.run.seed, data.easy_first_epochs
    stream = ShuffledStream(sources, rollout.prompts_per_step, seed, easy, data.shuffle)
    heldout = heldout_source(data, rollout.environment)
    return Prompts(stream, read(heldout)[: config.eval.num_prompts] if heldout else [])


def describe(config: GrpoRunConfig, console: Console) -> None:
    shape = describe_policy(config, console)
    if config.rollout.replay is None:
        describe_rollout(config, shape, console)
    describe_placement(config, console)
    if config.cluster.gpus_per_trainer:
        memory = describe_memory(config, shape, console)
        describe_hours(config, shape, memory, console)
        check_memory(memory)


def main(arguments: Sequence[str] | None = None) -> int:
    return launch(GrpoRunConfig, arguments, program="grpo", describe=describe, run=run)


if __name__ == "__main__":
    sys.exit(main())
