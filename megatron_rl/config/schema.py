"""The configuration: every key of every recipe, validated once at the start.

The sections are frozen pydantic models that refuse unknown keys. The docstring under a field is the reference of its
key. A section that exists in several kinds is a union, and its key `kind` chooses one. Derived values are properties,
never keys. Importing this module loads neither torch nor any vendor's package.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    Field,
    PositiveInt,
    model_validator,
)

from megatron_rl.config.advantages import GaeAdvantage
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.balance import BalanceConfig
from megatron_rl.config.cluster import BridgeConfig, ClusterConfig
from megatron_rl.config.critic import CriticConfig
from megatron_rl.config.data import DataConfig, Rows
from megatron_rl.config.observe import TrackerConfigs
from megatron_rl.config.policy import ModelConfig, PolicyConfig
from megatron_rl.config.rewards import (
    EnvironmentReward,
    ExactAnswerReward,
    FormatReward,
    GroundTruthReward,
    RewardConfig,
)
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.config.section import Section
from megatron_rl.config.slurm import SlurmConfig
from megatron_rl.config.thinking import QuantileBudget, ThinkingBudget


class SftConfig(Section):
    rows: Rows
    """The rows, from the same kinds of files as `data.train`. A row has `prompt` and `completion`, or `messages` whose
    last turn is the assistant's."""
    rows_per_step: PositiveInt = 64
    """The number of rows in a training step."""
    max_tokens: PositiveInt = 4096
    """The largest length of a row in tokens, prompt and completion together."""
    on_bad_row: Literal["fail", "skip"] = "fail"
    """What happens to an unreadable row and to one that is too long. `fail` stops the run and names file and line;
    `skip` leaves the row out and counts it."""


class EvalConfig(Section):
    every: Annotated[int, Field(ge=0)] = 0
    """The number of steps between evaluations; 0 evaluates only before the first step and after the last one."""
    num_prompts: PositiveInt = 256
    """The number of prompts, taken from the beginning of `data.eval`."""
    samples_per_prompt: PositiveInt = 1
    """The number of answers to each prompt, n. With two or more, `eval/pass@k` and `eval/maj@n` are reported, too."""
    verifier: str | None = None
    """The name of the reward that decides whether an answer is right, which means a score of 1 or more.
    `eval/accuracy` is the share of right answers. null means, for each row, the first reward that compares answers with
    a ground truth and scores this row; if there is none, only `eval/reward_mean` is reported."""


class CheckpointConfig(Section):
    every: Annotated[int, Field(ge=0)] = 0
    """The number of steps between checkpoints; 0 writes one only when the run ends, unless it ends because a trainer
    died."""
    asynchronous: bool = True
    """Whether training goes on while a checkpoint is written. Each rank then copies its state to CPU memory first, and
    a thread writes the copy."""
    keep: PositiveInt = 2
    """The number of newest checkpoints that are kept. Older ones are deleted once a new checkpoint is complete."""
    keep_every: Annotated[int, Field(ge=0)] = 0
    """The checkpoints of steps that are multiples of this number are never deleted; 0 means none."""
    keep_best: str | None = None
    """The name of a metric of evaluations, such as `eval/accuracy`: of all checkpoints that were evaluated, the one
    with the largest value is kept. A checkpoint is evaluated if its step is a multiple of `eval.every`. null means that
    none is kept for its value."""
    export_every: Annotated[int, Field(ge=0)] = 0
    """The number of steps between exports of the model as a Hugging Face folder, `exports/step_000010`, all of which
    are kept; 0 exports only the final model, as `hf`. tools/export_checkpoint.py exports any checkpoint later."""


class RunConfig(Section):
    name: str
    """The run's name; its files go to `folder`/`name`."""
    folder: Path = Path("runs")
    """The folder of all runs."""
    steps: PositiveInt
    """The number of training steps of the whole run."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """The seed of the data's order, of sampling and of the training ranks."""


class BaseConfig(Section):
    run: RunConfig
    model: ModelConfig
    policy: PolicyConfig = PolicyConfig()
    balance: BalanceConfig
    cluster: ClusterConfig = ClusterConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    observe: TrackerConfigs = ()
    """The experiment trackers that receive each logged record in addition to metrics.jsonl."""
    slurm: SlurmConfig | None = None
    """The Slurm job of a run that is started with `--slurm`; null means its defaults."""

    @property
    def run_folder(self) -> Path:
        return self.run.folder / self.run.name

    @model_validator(mode="after")
    def _world_size_fits(self) -> Self:
        mesh, world = self.policy.parallel.mesh, self.cluster.world_size
        if world is not None and world != mesh.world_size:
            raise ValueError(
                f"cluster.world_size is {world}, but policy.parallel needs {mesh.tensor} x {mesh.pipeline} x "
                f"{mesh.data} x {mesh.context} = {mesh.world_size} ranks (tensor x pipeline x data x context); change "
                "one of them"
            )
        return self


class SftRunConfig(BaseConfig):
    """The configuration of recipes/sft.py."""

    sft: SftConfig

    @model_validator(mode="after")
    def _no_engine_to_replay(self) -> Self:
        if self.policy.routing_replay:
            raise ValueError(
                "policy.routing_replay replays the choices of engines, and supervised training has none; remove it"
            )
        return self

    @model_validator(mode="after")
    def _cap_holds_the_longest_row(self) -> Self:
        if self.cluster.colocate:
            raise ValueError("cluster.colocate: supervised training has no engines; remove it")
        if self.balance.oversize == "refuse" and self.balance.max_tokens_per_microbatch < self.sft.max_tokens:
            raise ValueError(
                f"balance.max_tokens_per_microbatch ({self.balance.max_tokens_per_microbatch}) is below sft.max_tokens "
                f"({self.sft.max_tokens}), so the longest row fits no micro-batch; raise max_tokens_per_microbatch, "
                "lower sft.max_tokens, or set balance.oversize to alone"
            )
        return self


class GrpoRunConfig(BaseConfig):
    """The configuration of recipes/grpo.py."""

    data: DataConfig
    rollout: RolloutConfig
    bridge: BridgeConfig = BridgeConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig | None = None
    """The critic of PPO; null means that there is none."""
    rewards: Annotated[tuple[RewardConfig, ...], Field(min_length=1)] = (ExactAnswerReward(),)
    """The reward functions. An answer's reward is the sum of their scores, each multiplied by its weight."""
    eval: EvalConfig = EvalConfig()

    @model_validator(mode="after")
    def _cross_checks(self) -> Self:
        cap, longest = self.balance.max_tokens_per_microbatch, self.rollout.max_model_tokens
        if self.balance.oversize == "refuse" and cap < longest:
            raise ValueError(
                f"balance.max_tokens_per_microbatch ({cap}) is below the longest sample, rollout.max_prompt_tokens + "
                f"rollout.max_response_tokens = {longest}, which would fit no micro-batch; raise "
                "max_tokens_per_microbatch, or set balance.oversize to alone"
            )
        if self.bridge.chains is not None and self.bridge.chains > self.rollout.num_engines:
            raise ValueError(
                f"bridge.chains is {self.bridge.chains}, but there are {self.rollout.num_engines} engines "
                "(rollout.num_engines); every chain needs at least one engine, so lower bridge.chains"
            )
        estimator = self.algorithm.adv_estimator
        if "group" in estimator.needs and self.rollout.samples_per_prompt == 1:
            raise ValueError(
                f"rollout.samples_per_prompt is 1, so every {estimator.kind} advantage would be 0; use 2 or more"
            )
        environment = self.rollout.environment
        gives_rewards = self.rollout.prefix_values or (environment is not None and environment.kind != "tools")
        if "token_rewards" in estimator.needs and not gives_rewards:
            raise ValueError(
                f"algorithm.adv_estimator {estimator.kind} needs rewards at single tokens, which "
                "rollout.prefix_values gives for passages of a thought, and rollout.environment of kind class for "
                "turns; set one of them, or choose another estimator"
            )
        if self.rollout.prefix_values and not estimator.needs & {"token_rewards", "values"}:
            raise ValueError(
                f"rollout.prefix_values gives rewards at single tokens, which algorithm.adv_estimator {estimator.kind} "
                "does not use; choose grpo_process or gae, or remove rollout.prefix_values"
            )
        if "thoughts" in estimator.needs and self.rollout.beams is None:
            raise ValueError(
                f"algorithm.adv_estimator {estimator.kind} compares the items of a thought, and without rollout.beams "
                "there are none; set rollout.beams, or choose another estimator"
            )
        if self.rollout.max_lag and self.rollout.prefix_cache == "salted":
            raise ValueError(
                "rollout.prefix_cache: salted lets running answers keep the keys and values of older weights, so with "
                "rollout.max_lag no token could show whether engine and trainer agree; set prefix_cache to cleared"
            )
        if self.rollout.late != "wait" and not self.rollout.is_asynchronous:
            raise ValueError(
                f"rollout.late: {self.rollout.late} has no effect without rollout.max_lag and rollout.active_sampling, "
                "because every group is then of the step that waits for it; remove it"
            )
        if self.rollout.pipeline > 1:
            self._check_stages()
        if self.rollout.replay is not None:
            self._check_replay()
        if self.cluster.colocate:
            self._check_colocation()
        self._check_critic()
        labels = [reward.label for reward in self.rewards]
        if len(set(labels)) < len(labels):
            raise ValueError(f"rewards: the names {labels} are not distinct; give each reward its own `name`")
        if self.eval.verifier is not None and self.eval.verifier not in labels:
            raise ValueError(
                f"eval.verifier is {self.eval.verifier!r}, but the rewards are named {labels}; choose one of them"
            )
        if not self.rollout.delimiter and any(isinstance(reward, FormatReward) for reward in self.rewards):
            raise ValueError("rewards: the kind format looks for rollout.delimiter, which is empty; remove the reward")
        if self.rollout.thinking:
            self._check_thinking(self.rollout.thinking)
        self._check_environment()
        if self.rollout.prompts_per_step < self.algorithm.updates_per_step:
            raise ValueError(
                "algorithm.updates_per_step exceeds rollout.prompts_per_step, so some updates would be empty; lower it"
            )
        return self

    @property
    def deciding_rewards(self) -> list[int]:
        """The indices of the rewards of which the first one that scores an answer decides whether it is right."""
        if self.eval.verifier is not None:
            return [[reward.label for reward in self.rewards].index(self.eval.verifier)]
        return [i for i, reward in enumerate(self.rewards) if isinstance(reward, GroundTruthReward)]

    def _check_stages(self) -> None:
        """Refuse what an engine with pipeline stages cannot do."""
        pipeline, most = self.rollout.pipeline, self.rollout.max_sequences
        if self.policy.routing_replay:
            raise ValueError(
                f"policy.routing_replay needs the experts of all layers, and vLLM gives none with pipeline stages "
                f"(rollout.pipeline is {pipeline}); set rollout.pipeline to 1 and raise rollout.tensor, or remove "
                "policy.routing_replay"
            )
        if most < pipeline:
            raise ValueError(
                f"rollout.max_sequences ({most}) is below rollout.pipeline ({pipeline}), so that some stages would "
                "always wait, because each works on other answers; raise max_sequences or lower pipeline"
            )

    def _check_replay(self) -> None:
        """Refuse what needs engines."""
        needs = {
            "data.eval": self.data.eval,
            "cluster.colocate": self.cluster.colocate,
            "rollout.dump": self.rollout.dump,
        }
        for name, value in needs.items():
            if value:
                raise ValueError(
                    f"rollout.replay trains on saved rollouts without engines, and {name} needs engines; remove one of "
                    "the two"
                )

    def _check_thinking(self, thinking: ThinkingBudget) -> None:
        delimiter, most = self.rollout.delimiter, self.rollout.max_response_tokens
        if not delimiter:
            raise ValueError("rollout.thinking needs rollout.delimiter, the text that ends the thought; set it")
        if thinking.closing is not None and not thinking.closing.endswith(delimiter):
            raise ValueError(
                f"rollout.thinking.closing {thinking.closing!r} must end with rollout.delimiter {delimiter!r}, or the "
                "thought would go on"
            )
        longest, needs_delimiter = thinking.thought_tokens.largest, thinking.mode != "truncate"
        needed = longest + thinking.response_tokens + needs_delimiter
        if needed > most:
            raise ValueError(
                f"rollout.max_response_tokens ({most}) is below {needed}, which is the largest of "
                f"thinking.thought_tokens ({longest}) + thinking.response_tokens ({thinking.response_tokens})"
                + (" + at least 1 for the delimiter" if needs_delimiter else "")
                + "; raise it"
            )
        if isinstance(thinking.thought_tokens, QuantileBudget) and not self.deciding_rewards:
            raise ValueError(
                "rollout.thinking.thought_tokens of kind quantile follows the thoughts of right answers, but no reward "
                "says which answers are right; name one in eval.verifier"
            )

    def _check_environment(self) -> None:
        environment = self.rollout.environment
        rewards = [reward.label for reward in self.rewards if isinstance(reward, EnvironmentReward)]
        if rewards and (environment is None or environment.kind == "tools"):
            raise ValueError(
                f"rewards: {rewards[0]} needs the rewards of rollout.environment with kind class, which is "
                + ("null" if environment is None else "of kind tools, and tools give none")
                + "; remove one of the two"
            )
        if environment is None:
            return
        if self.rollout.thinking:
            raise ValueError(
                "rollout.thinking has a budget for one thought, but with rollout.environment an answer has one in each "
                "turn; set rollout.thinking to null, and bound the turns with rollout.environment.turn_tokens"
            )
        train = self.data.train if isinstance(self.data.train, tuple) else ()
        if any(source.chat_template is not None for source in train):
            raise ValueError(
                "data.train: with rollout.environment all rows have the same arguments of the chat template, because "
                "the observations have them too; remove chat_template from the sources, and set data.chat_template"
            )

    def _check_colocation(self) -> None:
        """Refuse what needs trainers and engines at the same time."""
        rollout, cluster = self.rollout, self.cluster
        ranks, trainers = rollout.num_engines * rollout.engine_ranks, self.policy.parallel.mesh.world_size
        sizes = (rollout.num_engines, rollout.tensor, *((rollout.pipeline,) if rollout.pipeline > 1 else ()))
        if ranks != trainers:
            raise ValueError(
                f"cluster.colocate: trainers and engines share GPUs rank by rank, but there are {trainers} trainer "
                f"ranks (policy.parallel) and {' x '.join(map(str, sizes))} = {ranks} ranks of engines; change "
                f"rollout.num_engines, rollout.tensor or rollout.pipeline so that their product is {trainers}"
            )
        of_critic = self.critic.parallel.mesh.world_size if self.critic else trainers
        if of_critic != trainers:
            raise ValueError(
                f"cluster.colocate: the critic has the GPUs of the policy, rank by rank, but there are {trainers} "
                f"ranks of the policy (policy.parallel) and {of_critic} of the critic (critic.parallel); make the "
                "two numbers equal"
            )
        if rollout.is_asynchronous:
            name = "rollout.max_lag" if rollout.max_lag else "rollout.active_sampling"
            raise ValueError(
                f"cluster.colocate: engines have no memory while trainers train, so that {name}, with which they "
                "answer meanwhile, is not possible; remove one of the two"
            )
        if cluster.mirror:
            raise ValueError(
                "cluster.colocate: the trainer's state is in the node's memory while engines generate, which is when "
                "cluster.mirror would copy it from the GPUs; set cluster.mirror to false"
            )
        if cluster.gpus_per_trainer != cluster.gpus_per_engine_rank or cluster.gpus_per_trainer not in (0, 1):
            raise ValueError(
                "cluster.colocate: cluster.gpus_per_trainer and cluster.gpus_per_engine_rank must both be 1, or both 0 "
                f"on CPUs; they are {cluster.gpus_per_trainer:g} and {cluster.gpus_per_engine_rank:g}"
            )
        if cluster.pools.get("trainer") != cluster.pools.get("engine"):
            raise ValueError(
                "cluster.colocate: trainers and engines are on the same nodes, so cluster.pools must give both the "
                "same pool, or none"
            )
        if self.critic and cluster.pools.get("critic") != cluster.pools.get("trainer"):
            raise ValueError(
                "cluster.colocate: trainers and critic are on the same nodes, so cluster.pools must give both the "
                "same pool, or none"
            )

    @property
    def num_trainer_ranks(self) -> int:
        """The number of Megatron ranks of policy and critic together."""
        critic = self.critic.parallel.mesh.world_size if self.critic else 0
        return self.policy.parallel.mesh.world_size + critic

    def _check_critic(self) -> None:
        estimator = self.algorithm.adv_estimator
        if "values" in estimator.needs and self.critic is None:
            raise ValueError(
                f"algorithm.adv_estimator {estimator.kind} needs a critic; add the section critic (recipes/ppo.py has "
                "one), or choose another estimator"
            )
        if self.critic is None:
            return
        if "values" not in estimator.needs:
            raise ValueError(
                f"critic: algorithm.adv_estimator {estimator.kind} uses no critic; choose gae, or remove the section"
            )
        if self.critic.warmup_steps >= self.run.steps:
            raise ValueError(
                f"critic.warmup_steps ({self.critic.warmup_steps}) leaves none of the {self.run.steps} run.steps for "
                "the policy; lower it"
            )
        if self.rollout.prompts_per_step < (self.critic.updates_per_step or 1):
            raise ValueError(
                "critic.updates_per_step exceeds rollout.prompts_per_step, so some updates would be empty; lower it"
            )
        weights = getattr(estimator, "weights", {})
        sums_turns = any(isinstance(reward, EnvironmentReward) for reward in self.rewards)
        if sums_turns and weights.get("outcome", 1.0) and weights.get("environment", 1.0):
            raise ValueError(
                "algorithm.adv_estimator gae adds the rewards of turns, and the reward environment is their sum, so "
                "that they would count twice; set adv_estimator.weights to {outcome: 0}, or to {environment: 0}"
            )


class PpoRunConfig(GrpoRunConfig):
    """The configuration of recipes/ppo.py."""

    algorithm: AlgorithmConfig = AlgorithmConfig(adv_estimator=GaeAdvantage())
    critic: CriticConfig = CriticConfig()
