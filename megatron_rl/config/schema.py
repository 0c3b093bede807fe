"""The configuration: every key of every recipe, judged once at the start.

Frozen pydantic models, unknown keys fail, a docstring under each field, unions by `kind:`. Derived values are
properties, never keys. Importing this module loads neither torch nor any vendor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, model_validator

from megatron_rl.config.algorithm import BEHAVIOUR_LOSSES, AlgorithmConfig
from megatron_rl.config.balance import BalanceConfig
from megatron_rl.config.observe import TrackerConfigs
from megatron_rl.config.section import Section
from megatron_rl.config.shipped import find_shipped
from megatron_rl.types import Mesh

InputPath = Annotated[Path, AfterValidator(find_shipped)]
"""A file to read: of the working folder, or one that ships with the package."""


class ParallelConfig(Section):
    """How the trainer is split. World size = tensor x pipeline x data."""

    tensor: PositiveInt = 1
    """Tensor parallelism (TP): the matrices of a layer."""
    pipeline: PositiveInt = 1
    """Pipeline parallelism (PP): the layers."""
    data: PositiveInt = 1
    """Data parallelism (DP): the samples; the optimizer's state is split over it."""
    expert: PositiveInt = 1
    """Expert parallelism (EP): the experts of a mixture, shared out over the ranks of tensor x data."""
    expert_tensor: PositiveInt | None = None
    """Ways in which each expert is split; null: as `tensor`."""
    sequence: bool = True
    """Sequence parallelism with TP > 1: norms and residuals split over the tokens."""

    @property
    def mesh(self) -> Mesh:
        return Mesh(
            tensor=self.tensor,
            pipeline=self.pipeline,
            data=self.data,
            expert=self.expert,
            expert_tensor=self.expert_tensor,
        )

    @property
    def sequence_parallel(self) -> bool:
        return self.sequence and self.tensor > 1

    @property
    def alignment(self) -> int:
        """Packed sequences are padded to a multiple of this: sequence parallelism splits them evenly."""
        return self.tensor if self.sequence_parallel else 1


class OptimizerConfig(Section):
    """Adam with decoupled weight decay."""

    lr: Annotated[float, Field(gt=0)] = 1e-6
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0
    """The schedule's last learning rate over its first; 1 is constant."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Linear from 0 to lr."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """From lr to lr * min_lr_ratio over the run's steps after the warm-up."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    clip_grad: Annotated[float, Field(ge=0)] = 1.0
    """Bound of the global gradient norm; 0 is none."""


class ModelConfig(Section):
    path: Path
    """A Hugging Face folder: config.json, safetensors, tokenizer."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of the trainer's forward and of the engine; the optimizer's state is fp32."""
    recompute: Literal["none", "full"] = "none"
    """full: keep only each layer's input and compute the rest again in the backward pass."""


class PolicyConfig(Section):
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()


class SamplingConfig(Section):
    temperature: Annotated[float, Field(gt=0, le=2)] = 1.0
    """The trainer divides its logits by the same number. vLLM takes at most 2."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    """0 is all."""


class ThinkingBudget(Section):
    """Two calls: the thought gets `thought_tokens`; if the delimiter is missing it is forced (and is no
    action), then the answer gets `response_tokens`, answer tokens of the first call included."""

    thought_tokens: PositiveInt
    response_tokens: PositiveInt


class RolloutConfig(Section):
    num_engines: PositiveInt = 1
    tensor: PositiveInt = 1
    """Tensor parallelism of each engine."""
    expert_parallel: bool = False
    """The experts of a mixture are shared out over an engine's tensor ranks, in place of each being split over them."""
    prompts_per_step: PositiveInt
    samples_per_prompt: PositiveInt
    """G, the group."""
    max_prompt_tokens: PositiveInt
    max_response_tokens: PositiveInt
    """Of everything after the prompt: thought, delimiter and answer."""
    delimiter: str = "</think>"
    """Text that ends the thought, in one or more of the model's own tokens; empty for a model that does not think."""
    thinking: ThinkingBudget | None = None
    """null: thought and answer share max_response_tokens."""
    sampling: SamplingConfig = SamplingConfig()
    prefix_cache: Literal["cleared", "salted"] = "cleared"
    """What a push does to what older weights have cached. cleared: nothing stays, and running requests are computed
    anew with the new weights; salted: running requests keep what they have, and later ones cannot see it."""
    quantization: str | None = None
    """vLLM's name of a quantisation that it does itself (`fp8`, `fp8_per_channel`): of whatever arrives with a push.
    The engine is then another policy than the trainer by more than rounding: see algorithm.correction, max_mismatch."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.85
    """vLLM's share of each GPU; without a GPU its KV cache is 1 GiB."""

    @property
    def max_model_tokens(self) -> int:
        """The longest sample."""
        return self.max_prompt_tokens + self.max_response_tokens


class _Reward(Section):
    name: str | None = None
    """The reward's name in metrics and logs; null takes the kind, or the function's name. No two rewards share one."""
    weight: float = 1.0
    on_error: Literal["abstain", "stop"] = "abstain"
    """What becomes of an answer that this reward cannot score (an exception, a NaN, a result of the wrong form, a
    time-out): abstain leaves it out of the sum, counts it, and writes row and error to `logs/rewards.log`; stop ends
    the run, after a checkpoint."""
    timeout_s: PositiveFloat = 600
    """The longest that scoring the answers of one step may take. The verifier's process is then replaced, and the
    answers count as those that this reward cannot score."""
    max_silent_steps: PositiveInt | None = 3
    """The run stops when this reward scored no answer at all in so many steps in a row; null: never."""


class ExactAnswerReward(_Reward):
    """1 if the text after the thought is the row's `ground_truth`, else 0."""

    kind: Literal["exact_answer"] = "exact_answer"
    answer: Literal["all", "last_number"] = "all"
    """all: the whole text after the delimiter, stripped; last_number: its last number, compared as a number."""
    require_stop: bool = True
    """An answer that a budget cut scores 0."""

    @property
    def label(self) -> str:
        return self.name or self.kind


class FunctionReward(_Reward):
    """Any function with TRL's contract: f(prompts, completions, completion_ids, **columns) -> list[float | None]."""

    kind: Literal["function"] = "function"
    path: str
    """`package.module:function`"""

    @property
    def label(self) -> str:
        return self.name or self.path.rpartition(":")[2]


RewardConfig = Annotated[ExactAnswerReward | FunctionReward, Field(discriminator="kind")]


class DataConfig(Section):
    train: InputPath
    """JSON lines: `messages` (chat turns) or `prompt` (plain text), `ground_truth`, any other column."""
    eval: InputPath | None = None
    """Held-out rows of the same form."""
    on_bad_row: Literal["fail", "skip"] = "fail"
    """An unreadable row or an over-long prompt: stop with file and line, or skip and count."""


class SftConfig(Section):
    rows: InputPath
    """JSON lines: `prompt` and `completion`, or `messages` whose last turn is the assistant's."""
    rows_per_step: PositiveInt = 64
    max_tokens: PositiveInt = 4096
    """Longest row, prompt and completion."""
    on_bad_row: Literal["fail", "skip"] = "fail"
    """An unreadable or over-long row: stop with file and line, or skip and count."""


class EvalConfig(Section):
    every: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations; 0: only before the first and after the last."""
    num_prompts: PositiveInt = 256
    samples_per_prompt: PositiveInt = 1
    verifier: str | None = None
    """Name of the reward that decides whether an answer is right: a score of 1 or more. `eval/accuracy` is the share of
    right answers. null takes the first exact_answer reward; without one there is `eval/reward_mean` alone."""


class CheckpointConfig(Section):
    every: Annotated[int, Field(ge=0)] = 0
    """Steps between checkpoints; 0: only when the run ends, for whatever reason but the death of a trainer."""
    keep: PositiveInt = 2
    """The newest checkpoints that stay; the others are deleted after a new one is whole."""
    export_every: Annotated[int, Field(ge=0)] = 0
    """Steps between exports of the model as a Hugging Face folder, `exports/step_000010`, which all stay; 0: only `hf`
    after the last step. tools/export_checkpoint.py exports any checkpoint later."""


class RunConfig(Section):
    name: str
    folder: Path = Path("runs")
    """The run's files go to folder/name."""
    steps: PositiveInt
    seed: int = 0


class BridgeConfig(Section):
    bucket_mib: Annotated[float, Field(gt=0)] = 64
    """Bound of a message. A rank holds two of them beside its weights."""
    chains: PositiveInt | None = None
    """Engines are fed in so many chains, each engine by the one before it: the trainers send so many copies of the
    weights, whatever the number of engines. null: the trainers feed every engine."""
    verify: bool = False
    """Engines read back what each push wrote and compare it with the trainers' checksums. The first push always is."""
    timeout_s: Annotated[float, Field(gt=0)] = 300
    """Of a push."""


class ClusterConfig(Section):
    ray_address: str | None = None
    """null starts a Ray of our own on this machine and stops it at the end; `auto` joins a running one."""
    cpus_per_trainer: Annotated[float, Field(gt=0)] = 1
    gpus_per_trainer: Annotated[float, Field(ge=0)] = 0
    gpus_per_engine_rank: Annotated[float, Field(ge=0)] = 0
    world_size: PositiveInt | None = None
    """Trainer ranks that the job has; null takes what the parallel sizes need."""
    start_timeout_s: PositiveFloat = 1800
    """The longest that placing a process, or starting it with its model, may take."""
    step_timeout_s: PositiveFloat = 7200
    """The longest that one part of a step may take: a generation, a forward pass, an update, a checkpoint. The run then
    ends with the name of the process that does not answer."""


class BaseConfig(Section):
    run: RunConfig
    model: ModelConfig
    policy: PolicyConfig = PolicyConfig()
    balance: BalanceConfig
    cluster: ClusterConfig = ClusterConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    observe: TrackerConfigs = ()
    """Trackers that receive each logged record beside metrics.jsonl."""

    @property
    def run_folder(self) -> Path:
        return self.run.folder / self.run.name

    @model_validator(mode="after")
    def _world_size_fits(self) -> Self:
        mesh, world = self.policy.parallel.mesh, self.cluster.world_size
        if world is not None and world != mesh.world_size:
            raise ValueError(
                f"cluster.world_size is {world}, but policy.parallel needs {mesh.tensor} x {mesh.pipeline} x "
                f"{mesh.data} = {mesh.world_size} ranks (tensor x pipeline x data); change one of them"
            )
        return self


class SftRunConfig(BaseConfig):
    """What recipes/sft.py reads."""

    sft: SftConfig

    @model_validator(mode="after")
    def _cap_holds_the_longest_row(self) -> Self:
        if self.balance.oversize == "refuse" and self.balance.max_tokens_per_microbatch < self.sft.max_tokens:
            raise ValueError(
                f"balance.max_tokens_per_microbatch ({self.balance.max_tokens_per_microbatch}) is below sft.max_tokens "
                f"({self.sft.max_tokens}): the longest row fits no micro-batch; raise the cap, lower max_tokens, "
                "or set balance.oversize to alone"
            )
        return self


class GrpoRunConfig(BaseConfig):
    """What recipes/grpo.py reads."""

    data: DataConfig
    rollout: RolloutConfig
    bridge: BridgeConfig = BridgeConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    rewards: Annotated[tuple[RewardConfig, ...], Field(min_length=1)] = (ExactAnswerReward(),)
    """The scores are added, each times its weight."""
    eval: EvalConfig = EvalConfig()

    @model_validator(mode="after")
    def _cross_checks(self) -> Self:
        cap, longest = self.balance.max_tokens_per_microbatch, self.rollout.max_model_tokens
        if self.balance.oversize == "refuse" and cap < longest:
            raise ValueError(
                f"balance.max_tokens_per_microbatch ({cap}) is below the longest sample, rollout.max_prompt_tokens + "
                f"rollout.max_response_tokens = {longest}: it would fit no micro-batch; raise the cap, "
                "or set balance.oversize to alone"
            )
        if self.bridge.chains is not None and self.bridge.chains > self.rollout.num_engines:
            raise ValueError(
                f"bridge.chains is {self.bridge.chains}, but there are {self.rollout.num_engines} engines "
                "(rollout.num_engines); a chain has one at least"
            )
        thinking = self.rollout.thinking
        if thinking and not self.rollout.delimiter:
            raise ValueError("rollout.thinking needs rollout.delimiter, the text that ends the thought")
        if thinking and thinking.thought_tokens + thinking.response_tokens >= self.rollout.max_response_tokens:
            raise ValueError(
                f"rollout.max_response_tokens ({self.rollout.max_response_tokens}) must exceed thinking.thought_tokens "
                f"+ thinking.response_tokens ({thinking.thought_tokens + thinking.response_tokens}): the delimiter "
                "needs room"
            )
        sampling = self.rollout.sampling
        weighs = isinstance(self.algorithm.loss, BEHAVIOUR_LOSSES)
        if (self.algorithm.correction or weighs) and (sampling.top_p < 1 or sampling.top_k > 0):
            name = f"loss {self.algorithm.loss.kind}" if weighs else "correction"
            other = "another loss" if weighs else "algorithm.correction to null"
            raise ValueError(
                f"algorithm.{name} needs the engine's full distribution: set rollout.sampling.top_p to 1 and top_k "
                f"to 0, or choose {other}"
            )
        estimator = self.algorithm.adv_estimator
        if "group" in estimator.needs and self.rollout.samples_per_prompt == 1:
            raise ValueError(
                f"rollout.samples_per_prompt is 1: every {estimator.kind} advantage would be 0; use 2 or more"
            )
        self._reject_what_is_not_collected()
        labels = [reward.label for reward in self.rewards]
        if len(set(labels)) < len(labels):
            raise ValueError(f"rewards: the names {labels} are not distinct; give each reward its own `name`")
        if self.eval.verifier is not None and self.eval.verifier not in labels:
            raise ValueError(f"eval.verifier is {self.eval.verifier!r}, but the rewards are {labels}")
        if self.rollout.prompts_per_step < self.algorithm.updates_per_step:
            raise ValueError("algorithm.updates_per_step exceeds rollout.prompts_per_step: some updates would be empty")
        return self

    @property
    def deciding_reward(self) -> int | None:
        """Index of the reward that decides whether an answer is right; None: no reward does."""
        if self.eval.verifier is not None:
            return [reward.label for reward in self.rewards].index(self.eval.verifier)
        return next((i for i, r in enumerate(self.rewards) if isinstance(r, ExactAnswerReward)), None)

    def _reject_what_is_not_collected(self) -> None:
        """The algorithms room has them; this recipe has nobody who makes their input."""
        estimator, kl = self.algorithm.adv_estimator, self.algorithm.kl
        missing = {
            "values": "a critic, and none is trained",
            "step_rewards": "rewards of single steps, and the verifiers give one reward an answer",
        }
        for need in sorted(estimator.needs & missing.keys()):
            raise ValueError(
                f"algorithm.adv_estimator {estimator.kind} needs {missing[need]}; choose another estimator"
            )
        if kl and kl.place == "reward":
            raise ValueError(
                "algorithm.kl.place: reward needs advantages of single tokens, and they are estimated one a sample; "
                "use place: loss"
            )
