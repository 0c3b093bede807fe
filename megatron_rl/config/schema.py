"""The configuration: every key of every recipe, validated once at the start.

The sections are frozen pydantic models that refuse unknown keys. The docstring under a field is the reference of its
key. A section that exists in several kinds is a union, and its key `kind` chooses one. Derived values are properties,
never keys. Importing this module loads neither torch nor any vendor's package.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import (
    Field,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from megatron_rl.config.advantages import GaeAdvantage
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.balance import BalanceConfig
from megatron_rl.config.cluster import BridgeConfig, ClusterConfig
from megatron_rl.config.critic import CriticConfig
from megatron_rl.config.data import DataConfig, Rows
from megatron_rl.config.health import HealthRule
from megatron_rl.config.observe import ObserverConfigs
from megatron_rl.config.policy import ModelConfig, PolicyConfig
from megatron_rl.config.preferences import BradleyTerryLoss, DpoLoss, PreferenceLoss, PreferenceLossConfig
from megatron_rl.config.rewards import (
    ExactAnswerReward,
    GroundTruthReward,
    RewardConfig,
    RewardModelReward,
)
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.config.section import Section
from megatron_rl.config.slurm import SlurmConfig
from megatron_rl.config.teachers import TeacherConfig
from megatron_rl.types import Adapters, ModelShape, images_of_rollouts


class OfflineConfig(Section):
    """What supervised training and the training on preferences have: rows with answers, which no engine samples."""

    rows: Rows
    eval: Rows | None = None
    """Held-out rows, whose loss is reported as `eval/loss`; null means none."""
    eval_every: Annotated[int, Field(ge=0)] = 0
    """The number of steps between evaluations; 0 evaluates only before the first step and after the last one."""
    rows_per_step: PositiveInt = 64
    """The number of rows in a training step."""
    max_tokens: PositiveInt = 4096
    """The largest length of an answer with its prompt, in tokens. If it is not given, at most the model's positions."""
    on_bad_row: Literal["fail", "skip", "cut"] = "fail"
    """What happens to an unreadable row and to one that is too long. `fail` stops the run and names file and line;
    `skip` leaves the row out and counts it. `cut` cuts the end of a row that is too long, as TRL does, and leaves it
    out if nothing of its answer is left; unreadable rows stop the run."""

    def conflicts(self, run: OfflineRunConfig) -> Iterator[str]:
        cap, key, command = run.balance.max_tokens_per_microbatch, run.section, run.section.replace("_", "-")
        if self.eval_every and self.eval is None:
            has_none = f"but {key}.eval gives no held-out rows; give them, or remove it"
            yield f"{key}.eval_every is {self.eval_every}, {has_none}"
        if run.policy.routing_replay:
            has_none = f"and `megatron-rl {command}` has none; remove it"
            yield f"policy.routing_replay replays the choices of engines, {has_none}"
        if run.cluster.colocate:
            yield f"cluster.colocate: `megatron-rl {command}` has no engines; remove it"
        if run.balance.oversize == "refuse" and cap < self.max_tokens:
            yield (
                f"balance.max_tokens_per_microbatch ({cap}) is below {key}.max_tokens ({self.max_tokens}), so the "
                f"longest row fits no micro-batch; raise max_tokens_per_microbatch, lower {key}.max_tokens, or set "
                "balance.oversize to alone"
            )


class SftConfig(OfflineConfig):
    rows: Rows
    """The rows, from the same kinds of files as `data.train`. A row has `prompt` and `completion`, or `messages` whose
    last turn is the assistant's, or `text` (all tokens are trained), or `conversations` (ShareGPT), or `instruction`,
    `input` and `output` (Alpaca)."""
    turns: Literal["all", "last", "whole"] = "all"
    """The assistant's turns that are trained in a row of chat turns, each with its stop token. If the chat template
    writes an earlier turn differently once later turns follow, as templates do that leave out earlier reasoning, each
    turn is trained as a text of its own, after what the model sees when it answers. `last` trains only the last turn.
    `whole` trains all tokens of a row, prompts too, as the chat template writes it."""


class DpoConfig(OfflineConfig):
    rows: Rows
    """The rows, with `prompt`, `chosen` and `rejected`; without `prompt` it is the turns that both chats begin with.
    For `kto` also `prompt`, `completion`, `label`."""
    loss: PreferenceLoss = DpoLoss()


class RewardModelConfig(OfflineConfig):
    rows: Rows
    """The rows, as those of `dpo.rows`, with pairs only; optionally with `margin`, a number. `chosen` and `rejected` as
    texts may have their prompt in them."""
    loss: BradleyTerryLoss = BradleyTerryLoss()

    def conflicts(self, run: OfflineRunConfig) -> Iterator[str]:
        yield from super().conflicts(run)
        if run.policy.multi_token != "drop":
            yield f"policy.multi_token is {run.policy.multi_token}, but a reward model writes no text; remove it"
        if self.on_bad_row == "cut":
            yield "reward_model.on_bad_row is cut, but a reward model scores whole answers; set it to skip"


class EvalConfig(Section):
    every: Annotated[int, Field(ge=0)] = 0
    """The number of steps between evaluations; 0 evaluates only before the first step and after the last one."""
    num_prompts: PositiveInt = 256
    """The number of prompts, taken from the beginning of `data.eval`."""
    samples_per_prompt: PositiveInt = 1
    """The number of answers to each prompt, n. With two or more, `eval/pass@k` and `eval/maj@n` are reported, too."""
    verifier: str | None = None
    """The name of the reward that decides whether an answer is right, with a score of 1 or more; `eval/accuracy` is the
    share of right answers. null means, for each row, the first reward that compares with a ground truth and scores this
    row; if there is none, only `eval/reward_mean` is reported."""

    def conflicts(self, run: GrpoRunConfig) -> Iterator[str]:
        labels = [reward.label for reward in run.rewards]
        if self.verifier is not None and self.verifier not in labels:
            yield f"eval.verifier is {self.verifier!r}, but the rewards are named {labels}; choose one of them"


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
    """The name of an evaluation metric, such as `eval/accuracy`: the evaluated checkpoint with the largest value is
    kept (of `eval/loss` the smallest). A checkpoint is evaluated if its step is a multiple of `eval.every`
    (`sft.eval_every` and its like). null: none is kept for its value."""
    export_every: Annotated[int, Field(ge=0)] = 0
    """The number of steps between exports of the model as a Hugging Face folder, `exports/step_000010`. All exports are
    kept. 0 exports only the final model, as `hf`. `megatron-rl export` exports any checkpoint later."""

    def conflicts(self, run: BaseConfig) -> Iterator[str]:
        if self.keep_best is None or self.keep_best in run.eval_metrics:
            return
        if run.eval_metrics:
            yield (
                f"checkpoint.keep_best is {self.keep_best}, which no evaluation of this run reports; choose one of "
                f"{', '.join(run.eval_metrics)}"
            )
        else:
            key = f"{run.section}.eval" if isinstance(run, OfflineRunConfig) else "data.eval"
            yield (
                f"checkpoint.keep_best is {self.keep_best}, but this run evaluates nothing; give held-out rows in {key}"
            )


class RunConfig(Section):
    name: str
    """The run's name; its files go to `folder`/`name`."""
    folder: Path = Path("runs")
    """The folder of all runs."""
    steps: PositiveInt
    """The number of training steps of the whole run. It is required, unless `epochs` is given."""
    epochs: PositiveFloat | None = None
    """The number of passes over the training rows, in place of `steps`, which is then rows x epochs /
    `rollout.prompts_per_step` (`sft.rows_per_step`, `dpo.rows_per_step`), rounded up. Skipped (`on_bad_row`) and
    removed rows (`data.deduplicate`) do not count. It is refused with a mixture of sources, and with
    `active_sampling`."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """The seed of the data's order, of sampling and of the training ranks."""
    stop_on: tuple[HealthRule, ...] = ()
    """The health rules that end the run, with its state saved, in place of a warning; see docs/monitoring.md."""
    recorded_answers: Annotated[int, Field(ge=0)] = 4
    """The number of answers of each step that samples.jsonl records with their tokens, for people to read in the
    report: the answers of the step's first groups, in order. 0 records none."""


class BaseConfig(Section):
    run: RunConfig
    model: ModelConfig
    policy: PolicyConfig = PolicyConfig()
    balance: BalanceConfig = BalanceConfig()
    cluster: ClusterConfig = ClusterConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    observe: ObserverConfigs = ()
    """What watches the run in addition to its own files: experiment trackers, an endpoint for Prometheus, traces and
    profiles of chosen steps."""
    slurm: SlurmConfig | None = None
    """The Slurm job of a run that is started with `--slurm`; null means its defaults."""

    @property
    def run_folder(self) -> Path:
        return self.run.folder / self.run.name

    @property
    def eval_metrics(self) -> list[str]:
        """The metrics of an evaluation by which checkpoints can be compared, without the bounds of their intervals;
        empty if the run has no held-out rows."""
        return []

    @model_validator(mode="after")
    def _no_conflicts(self) -> Self:
        """Each section reports its conflicts with other sections. All are reported at once."""
        sections: list[Section] = [self, *self.sections()]
        found = [conflict for section in sections for conflict in section.conflicts(self)]
        if found:
            raise ValueError("\n  ".join(found))
        return self


class OfflineRunConfig(BaseConfig):
    """What the configurations of `megatron-rl sft`, `megatron-rl dpo` and `megatron-rl reward-model` have in common."""

    section: ClassVar[str]
    """The name of the section that has the rows, and with hyphens of the command."""

    @property
    def offline(self) -> OfflineConfig:
        """This section."""
        section: OfflineConfig = getattr(self, self.section)
        return section

    @property
    def preferences(self) -> PreferenceLossConfig | None:
        """The loss of training on preferences; None for supervised rows."""
        return None

    @property
    def samples_per_row(self) -> int:
        """The number of texts that a row is trained on."""
        return 2 if self.preferences else 1

    @property
    def eval_metrics(self) -> list[str]:
        if self.offline.eval is None:
            return []
        return ["eval/loss", "eval/accuracy"] if self.preferences else ["eval/loss"]


class SftRunConfig(OfflineRunConfig):
    """The configuration of `megatron-rl sft`."""

    section: ClassVar[str] = "sft"
    sft: SftConfig


class DpoRunConfig(OfflineRunConfig):
    """The configuration of `megatron-rl dpo`."""

    section: ClassVar[str] = "dpo"
    dpo: DpoConfig

    @property
    def preferences(self) -> PreferenceLossConfig:
        return self.dpo.loss


class RewardModelRunConfig(OfflineRunConfig):
    """The configuration of `megatron-rl reward-model`."""

    section: ClassVar[str] = "reward_model"
    reward_model: RewardModelConfig

    @property
    def preferences(self) -> PreferenceLossConfig:
        return self.reward_model.loss


class GrpoRunConfig(BaseConfig):
    """The configuration of `megatron-rl grpo`."""

    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    bridge: BridgeConfig = BridgeConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig | None = None
    """The critic of PPO; null means that there is none."""
    teachers: tuple[TeacherConfig, ...] = ()
    """The models that the policy learns from, with `algorithm.distillation`. A row has the first one that teaches its
    data set."""
    rewards: Annotated[tuple[RewardConfig, ...], Field(min_length=1)] = (ExactAnswerReward(),)
    """The reward functions. An answer's reward is the sum of their scores, each multiplied by its weight."""
    eval: EvalConfig = EvalConfig()

    @property
    def scored_by_model(self) -> list[int]:
        """The indices of the rewards that have a process of their own: reward models with a folder."""
        return [i for i, one in enumerate(self.rewards) if isinstance(one, RewardModelReward) and one.path is not None]

    @property
    def pictures_folder(self) -> Path:
        """The folder of the run's images, if its model sees images."""
        if self.rollout.replay and not self.data.cache:
            return images_of_rollouts(self.rollout.replay)
        return (self.data.cache or self.run_folder) / "images"

    @property
    def deciding_rewards(self) -> list[int]:
        """The indices of the rewards that can decide whether an answer is right. The first one that scores the answer
        decides."""
        if self.eval.verifier is not None:
            return [i for i, reward in enumerate(self.rewards) if reward.label == self.eval.verifier]
        return [i for i, reward in enumerate(self.rewards) if isinstance(reward, GroundTruthReward)]

    @property
    def eval_metrics(self) -> list[str]:
        if not self.data.eval:
            return []
        names = ["eval/reward_mean"]
        if self.deciding_rewards:
            beams, num = self.rollout.beams, self.eval.samples_per_prompt
            sizes = [2**i for i in range(1, (beams.width if beams else num).bit_length())]
            names += ["eval/accuracy", *(f"eval/pass@{k}" for k in sizes)]
            if beams:
                names += [f"eval/recall@{k}" for k in (1, *sizes)]
            elif num > 1:
                names.append(f"eval/maj@{num}")
        return names

    @property
    def num_trainer_ranks(self) -> int:
        """The number of Megatron ranks of policy and critic together."""
        critic = self.critic.parallel.mesh.world_size if self.critic else 0
        return self.policy.parallel.mesh.world_size + critic

    @property
    def num_warmup_steps(self) -> int:
        """The number of first steps in which only the critic is trained."""
        return self.critic.warmup_steps if self.critic else 0

    @property
    def served_adapters(self) -> Adapters | None:
        """The adapters that engines compute with; None: engines have plain weights, merged with adapters if there are
        any."""
        return self.policy.adapters if self.rollout.lora == "served" else None

    def pushed(self, shape: ModelShape) -> ModelShape:
        """What a push brings of the policy's model: of a shape with adapters them alone, otherwise all weights; the
        multi-token head's only if engines draft with it."""
        pushed, drafts = shape if self.rollout.lora == "served" else shape.base, self.rollout.speculative
        return pushed if drafts is not None and drafts.kind == "multi_token" else pushed.served

    def conflicts(self, run: GrpoRunConfig) -> Iterator[str]:
        labels = [reward.label for reward in self.rewards]
        if len(set(labels)) < len(labels):
            yield f"rewards: the names {labels} are not distinct; give each reward its own `name`"


class PpoRunConfig(GrpoRunConfig):
    """The configuration of `megatron-rl ppo`."""

    algorithm: AlgorithmConfig = AlgorithmConfig(adv_estimator=GaeAdvantage())
    critic: CriticConfig = CriticConfig()
