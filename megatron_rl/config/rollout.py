"""How engines generate answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import (
    Field,
    JsonValue,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StrictBool,
    field_validator,
    model_validator,
)

from megatron_rl.config.beams import Beams
from megatron_rl.config.engine_options import refusals
from megatron_rl.config.environment import EnvironmentConfig
from megatron_rl.config.function import FunctionPath
from megatron_rl.config.prefix_values import PrefixValues
from megatron_rl.config.section import Section
from megatron_rl.config.speculative import Speculative
from megatron_rl.config.thinking import ColumnBudget, ThinkingBudget

if TYPE_CHECKING:
    from megatron_rl.config.schema import GrpoRunConfig


Quantization = Literal["fp8", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block", "mxfp8", "mxfp4"]
"""vLLM quantises all linear layers, experts included, under these names, while it loads them."""


class SamplingConfig(Section):
    temperature: Annotated[float, Field(gt=0, le=2)] = 1.0
    """The sampling temperature. The trainer divides its logits by the same number. vLLM allows at most 2."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The engine samples only from the most probable tokens whose probabilities add up to this; 1 means all tokens. A
    training run needs all tokens, because the trainer computes log-probs over the full distribution. Tools that only
    generate may use fewer."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """The engine samples only from this number of most probable tokens; 0 means all tokens. See `top_p`."""
    forbid: tuple[str, ...] = ()
    """Tokens of the tokenizer's vocabulary that are never sampled, such as `<pad>`. The engine samples as if their
    logits were -inf, and the trainer computes log-probs and entropies in the same way. Rows of the vocabulary without a
    token are always forbidden. A token that ends answers or reasoning cannot be forbidden."""


class LastSteps(Section):
    last: PositiveInt
    """The number of last steps that are kept. A step that breaks a health rule about its numbers is kept, too."""


LONGEST_TAIL = 14
"""The largest quotient of the 99 % quantile and the mean of a log-normal distribution is 15."""


class ExpectedTokens(Section):
    """How long answers are expected to be, for the estimates of the dry run alone."""

    mean: PositiveFloat
    """The mean length of an answer, in tokens."""
    tail: PositiveFloat
    """The length, in tokens, that one of a hundred answers exceeds."""
    prompt: PositiveInt | None = None
    """The mean length of a prompt, in tokens; null means `rollout.max_prompt_tokens`."""
    useful: Annotated[float, Field(ge=0.01, le=1)] = 1.0
    """The share of groups whose rewards are not all equal. With `active_sampling` the others are generated, too."""

    @model_validator(mode="after")
    def _a_tail_that_the_mean_can_have(self) -> ExpectedTokens:
        if not self.mean < self.tail <= LONGEST_TAIL * self.mean:
            raise ValueError(
                f"tail ({self.tail:g}) must be above the mean ({self.mean:g}) and at most {LONGEST_TAIL} times as "
                "long; lengths are taken to be log-normal"
            )
        return self


class EngineParallel(Section):
    """How each engine is split over ranks: tensor x pipeline of them."""

    tensor: PositiveInt = 1
    """Tensor parallelism (TP): the number of ranks over which the matrices of each layer are split."""
    pipeline: PositiveInt = 1
    """Pipeline parallelism (PP): the number of stages into which the layers are split, which work on different batches
    of answers at the same time. Only the ranks of a stage exchange much data: each stage is in one node, and the stages
    may be in several."""
    expert: PositiveInt = 1
    """Expert parallelism (EP): the number of ranks over which whole experts are distributed, which is the number of
    tensor ranks. 1: each expert is split over all tensor ranks."""

    @model_validator(mode="after")
    def _experts_over_all_tensor_ranks(self) -> Self:
        if self.expert not in (1, self.tensor):
            raise ValueError(
                f"expert is {self.expert}, but vLLM distributes whole experts over all {self.tensor} tensor ranks of "
                f"an engine; set it to 1{f' or {self.tensor}' * (self.tensor > 1)}"
            )
        return self

    @property
    def expert_parallel(self) -> bool:
        """Whether each tensor rank holds some of the experts whole."""
        return self.expert > 1

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.pipeline


class RolloutConfig(Section):
    num_engines: PositiveInt = 1
    """The number of engines."""
    backend: FunctionPath | None = None
    """The place of a subclass of `megatron_rl.rollout.backend.Sampler` (`package.module:Class`, `folder/file.py:Class`)
    that samples in vLLM's place. Keys that need an ability which it does not declare are refused. null means vLLM."""
    parallel: EngineParallel = EngineParallel()
    """How each engine is split over ranks."""
    prompts_per_step: PositiveInt = 64
    """The number of prompts in a training step."""
    samples_per_prompt: PositiveInt = 8
    """The number of answers to each prompt, which form a group."""
    max_prompt_tokens: PositiveInt = 1024
    """The largest length of a prompt, in tokens. `data.on_bad_row` decides what happens to a longer one.
    The default is at most half of the model's positions."""
    max_response_tokens: PositiveInt = 4096
    """The largest number of tokens after the prompt, reasoning and answer together. The default is at most what the
    prompt leaves of the model's positions."""
    expected_tokens: ExpectedTokens | None = None
    """The lengths of answers for a second estimate of the dry run, next to the one where every answer has the
    longest length. null means the lengths in the metrics of `run.folder`, if it has a run."""
    max_lag: NonNegativeInt = 0
    """The largest number of training steps between the weights that sampled a token and the weights that train on it.
    0: the run is synchronous. Otherwise engines and trainer work at the same time, and up to max_lag + 1 batches are in
    progress or wait. What bounds the distance of old answers is `algorithm.anchor`."""
    late: Literal["wait", "requeue", "drop"] = "wait"
    """What a step with a full batch does about running groups that would be too old for the next step. `wait`: it
    waits. `requeue`: their prompts are generated again with the next weights. `drop`: these groups are discarded.
    `requeue` and `drop` bias training towards short answers, because long ones are late more often; `stream/late`
    counts the groups."""
    active_sampling: StrictBool | Annotated[int, Field(ge=2)] = False
    """Whether groups whose rewards are all equal are replaced by other prompts until the batch is full. A number is the
    largest number of batches of prompts that a step takes for that; then groups without a signal fill the batch. With
    `true` a run ends with an error if 64 batches in a row have no signal. A prompt whose answers were all right
    (`eval.verifier`) rests for one epoch, and for up to eight if it stays easy."""
    delimiter: str = "</think>"
    """The text that ends the reasoning, one or more of the model's tokens. Empty: the model does not reason, and whole
    answers are judged. If the key is not given, it is also empty if neither chat template nor vocabulary has
    `</think>`, and no `thinking`, `prefix_values` or reward of kind `format` needs it."""
    thinking: ThinkingBudget | None = None
    """Separate budgets for reasoning and answer; null means that there is no budget for reasoning, and both share
    `max_response_tokens`."""
    environment: EnvironmentConfig | None = None
    """The environment or tools that respond to the model's turns, so that an answer has several turns; null means that
    an answer is one turn."""
    beams: Beams | None = None
    """The beam search for items of a catalogue after the reasoning; null means that the model samples the answer. With
    it, `samples_per_prompt` is the number of reasoning traces, and a group has `width` samples for each of them."""
    prefix_values: PrefixValues | None = None
    """The rewards for passages of the reasoning, by the probability of the right answer after each prefix; null means
    none. With `environment` the passages are the turns before the last one, each with its observation."""
    sampling: SamplingConfig = SamplingConfig()
    """How the engine samples training answers and evaluation answers."""
    dump: bool | LastSteps = False
    """Whether the verified rollouts of each step are written as `rollouts/step_000000.groups` and so on, for which the
    driver fetches the tokens. `{last: 20}` keeps the last 20 steps; with `checkpoint.every: 20` `megatron-rl explain`
    can then compute any of them again exactly. A run that replays writes none."""
    replay: Path | None = None
    """The folder with the rollouts that another run has written (`dump`). The run trains on them and starts no engine
    and no verifier, so it evaluates nothing. null means that engines generate."""
    prefix_cache: Literal["cleared", "salted"] = "cleared"
    """What a weight sync does to the KV cache of older weights. `cleared` drops the whole cache, and running
    requests are recomputed with the new weights. `salted` lets running requests keep their cache, and hides it from
    later requests."""
    quantization: Quantization | None = None
    """One of vLLM's online quantisations, which the engine applies to all weights that it gets; null means none. The
    engine's policy then differs from the trainer's by more than rounding: see `algorithm.correction` and
    `algorithm.max_mismatch`."""
    lora: Literal["served", "merged"] = "served"
    """How engines get the adapters of `policy.lora`. `served`: a weight sync has only A and B, and vLLM computes with
    them next to the base model of `model.path`. `merged`: trainers add the product of B and A to the weights while they
    send them, so a sync has the size of the model. It works where vLLM cannot serve adapters: experts, latent
    attention, `quantization`."""
    max_sequences: PositiveInt = 1024
    """The largest number of answers that an engine decodes at the same time; others wait in a queue, the oldest first.
    On a GPU it also sets the sizes of vLLM's CUDA graphs. In an asynchronous run choose the number where the throughput
    stops growing: with more, batches are decoded next to each other, and all end late."""
    speculative: Speculative | None = None
    """Drafts, so that a step gives several tokens of an answer, which stay the same. null means none."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.85
    """The share of each GPU's memory that vLLM may use. Without a GPU this key has no effect, and the KV cache has
    1 GiB."""
    vllm: dict[str, JsonValue] = {}
    """Further arguments of vLLM's engine, by the names that `vllm.EngineArgs` has in the installed version, such as
    `{moe_backend: triton, max_num_batched_tokens: 8192}`. Names that vLLM does not have, values that its command line
    refuses, and arguments that this project sets are refused before a run starts (`config/engine_options.py`). The
    estimates of the dry run follow `max_num_batched_tokens`, `performance_mode` and `moe_backend`."""

    @field_validator("vllm")
    @classmethod
    def _none_that_is_set_elsewhere(cls, options: dict[str, JsonValue]) -> dict[str, JsonValue]:
        told = refusals(options)
        tokens = options.get("max_num_batched_tokens", 1)
        if type(tokens) is not int or tokens < 1:
            told.append(f"max_num_batched_tokens must be a whole number above 0 (got {tokens!r})")
        if told:
            raise ValueError("; ".join(told))
        return options

    @property
    def overlaps(self) -> bool:
        """Whether engines answer prompts of later steps while the trainer trains. Otherwise nothing runs when a step
        is trained, also with `active_sampling`."""
        return self.max_lag > 0

    @property
    def one_by_one(self) -> bool:
        """Whether each group is judged and handed out as soon as its answers are complete, because further prompts
        depend on it, or an earlier step may take it. Otherwise all groups of a step are handed out together."""
        return self.overlaps or bool(self.active_sampling)

    @property
    def num_adapters(self) -> int:
        """The number of versions of a run's adapters that an engine holds. While engines answer and the trainer trains,
        an evaluation keeps the version that it began with, next to the newest one."""
        return 2 if self.overlaps else 1

    @property
    def engine_ranks(self) -> int:
        """The number of ranks of an engine."""
        return self.parallel.num_ranks

    @property
    def max_model_tokens(self) -> int:
        """The length of the longest possible sample, in tokens."""
        return self.max_prompt_tokens + self.max_response_tokens

    @property
    def max_engine_tokens(self) -> int:
        """The length of the longest request to an engine, in tokens."""
        return self.max_model_tokens + (self.prefix_values.num_scored if self.prefix_values else 0)

    @property
    def samples_per_group(self) -> int:
        """The largest number of samples in a group."""
        return self.samples_per_prompt * (self.beams.width if self.beams else 1)

    @property
    def thought_column(self) -> ColumnBudget | None:
        """The column of the rows that has the thinking budget and its bounds; None if the rows have none."""
        tokens = self.thinking and self.thinking.thought_tokens
        return tokens if isinstance(tokens, ColumnBudget) else None

    def conflicts(self, run: GrpoRunConfig) -> Iterator[str]:
        cap, longest = run.balance.max_tokens_per_microbatch, self.max_model_tokens
        if run.balance.oversize == "refuse" and cap < longest:
            yield (
                f"balance.max_tokens_per_microbatch ({cap}) is below the longest sample, rollout.max_prompt_tokens + "
                f"rollout.max_response_tokens = {longest}, which would fit no micro-batch; raise "
                "max_tokens_per_microbatch, or set balance.oversize to alone"
            )
        if self.prefix_cache == "salted" and (self.max_lag or run.policy.vision_tower == "trained"):
            yield (
                "rollout.prefix_cache: salted lets running answers keep what older weights have computed; with max_lag "
                "or a trained policy.vision_tower engine and trainer then disagree; set prefix_cache to cleared"
            )
        if self.late != "wait" and not self.one_by_one:
            yield (
                f"rollout.late: {self.late} has no effect without rollout.max_lag or rollout.active_sampling, "
                "because every group is then of the step that waits for it; remove it"
            )
        if self.parallel.pipeline > 1 and run.policy.routing_replay:
            yield (
                "policy.routing_replay needs the experts of all layers, and vLLM gives none with pipeline stages "
                f"(rollout.parallel.pipeline is {self.parallel.pipeline}); set rollout.parallel.pipeline to 1 "
                "and raise rollout.parallel.tensor, or remove policy.routing_replay"
            )
        if self.max_sequences < self.parallel.pipeline:
            yield (
                f"rollout.max_sequences ({self.max_sequences}) is below rollout.parallel.pipeline "
                f"({self.parallel.pipeline}), so that some stages would always wait, because each works on other "
                "answers; raise max_sequences or lower rollout.parallel.pipeline"
            )
        tokens = self.vllm.get("max_num_batched_tokens")
        if isinstance(tokens, int) and tokens < self.max_sequences:
            yield (
                f"rollout.vllm.max_num_batched_tokens ({tokens}) is below rollout.max_sequences "
                f"({self.max_sequences}), and a step computes at least one token of each answer; raise it, or lower "
                "max_sequences"
            )
        if (expected := self.expected_tokens) is not None:
            for name, given, key, bound in (
                ("mean", expected.mean, "rollout.max_response_tokens", self.max_response_tokens),
                ("prompt", expected.prompt or 0, "rollout.max_prompt_tokens", self.max_prompt_tokens),
            ):
                if given > bound:
                    yield f"rollout.expected_tokens.{name} is {given:g}, and {key} is {bound}; lower the first"
        if self.vllm and self.backend is not None:
            yield "rollout.vllm has no effect, because rollout.backend answers in vLLM's place; remove one of the two"
        if self.lora == "merged" and run.policy.lora is None:
            yield "rollout.lora: merged has no effect without policy.lora; remove it"
        if self.replay is not None:
            engines_for = {
                "data.eval": run.data.eval,
                "cluster.colocate": run.cluster.colocate,
                "rollout.dump": self.dump is True,
            }
            for name in [name for name, value in engines_for.items() if value]:
                yield (
                    f"rollout.replay trains on saved rollouts without engines, and {name} needs engines; remove one of "
                    "the two"
                )
        train = run.data.train if isinstance(run.data.train, tuple) else ()
        if self.environment is not None and any(source.chat_template is not None for source in train):
            yield (
                "data.train: with rollout.environment all rows have the same arguments of the chat template, because "
                "the observations have them too; remove chat_template from the sources, and set data.chat_template"
            )
        if run.cluster.colocate:
            yield from self._conflicts_of_sharing(run)

    def _conflicts_of_sharing(self, run: GrpoRunConfig) -> Iterator[str]:
        """What needs trainers and engines at the same time, although they share GPUs."""
        cluster, trainers = run.cluster, run.policy.parallel.mesh.world_size
        ranks = self.num_engines * self.engine_ranks
        sizes = [self.num_engines, self.parallel.tensor] + [self.parallel.pipeline] * (self.parallel.pipeline > 1)
        if ranks != trainers:
            yield (
                f"cluster.colocate: trainers and engines share GPUs rank by rank, but there are {trainers} trainer "
                f"ranks (policy.parallel) and {' x '.join(map(str, sizes))} = {ranks} ranks of engines; change "
                "rollout.num_engines, rollout.parallel.tensor or rollout.parallel.pipeline so that their product is "
                f"{trainers}"
            )
        if cluster.gpus_per_node is not None and cluster.gpus_per_trainer and self.engine_ranks > cluster.gpus_per_node:
            yield (
                f"cluster.colocate: an engine that shares its GPUs must be in one node, but its {self.engine_ranks} "
                f"ranks (rollout.parallel.tensor x rollout.parallel.pipeline) are more than the "
                f"{cluster.gpus_per_node} GPUs of a node (cluster.gpus_per_node); lower rollout.parallel.tensor or "
                "rollout.parallel.pipeline, or give trainers and engines GPUs of their own"
            )
        if self.overlaps:
            yield (
                "cluster.colocate: engines have no memory while trainers train, so that rollout.max_lag, with which "
                "they answer meanwhile, is not possible; remove one of the two"
            )
        if cluster.mirror:
            yield (
                "cluster.colocate: the trainer's state is in the node's memory while engines generate, which is when "
                "cluster.mirror would copy it from the GPUs; set cluster.mirror to false"
            )
        if cluster.gpus_per_trainer != cluster.gpus_per_engine_rank or cluster.gpus_per_trainer not in (0, 1):
            yield (
                "cluster.colocate: cluster.gpus_per_trainer and cluster.gpus_per_engine_rank must both be 1, or both 0 "
                f"on CPUs; they are {cluster.gpus_per_trainer:g} and {cluster.gpus_per_engine_rank:g}"
            )
        if cluster.pools.get("trainer") != cluster.pools.get("engine"):
            yield (
                "cluster.colocate: trainers and engines are on the same nodes, so cluster.pools must give both the "
                "same pool, or none"
            )
