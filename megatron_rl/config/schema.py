"""The configuration: every key of every recipe, validated once at the start.

The sections are frozen pydantic models that refuse unknown keys. The docstring under a field is the reference of its
key. A section that exists in several kinds is a union, and its key `kind` chooses one. Derived values are properties,
never keys. Importing this module loads neither torch nor any vendor's package.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.balance import BalanceConfig
from megatron_rl.config.observe import TrackerConfigs
from megatron_rl.config.section import Section
from megatron_rl.config.shipped import find_shipped
from megatron_rl.config.slurm import SlurmConfig
from megatron_rl.types import Mesh

InputPath = Annotated[Path, AfterValidator(find_shipped)]
"""A file to read: a path from the working folder, or one of the files that ship with the package."""


class ParallelConfig(Section):
    """How the trainer is split over ranks. The world size is tensor x context x pipeline x data."""

    tensor: PositiveInt = 1
    """Tensor parallelism (TP): the number of ranks over which the matrices of each layer are split."""
    pipeline: PositiveInt = 1
    """Pipeline parallelism (PP): the number of stages into which the layers are split."""
    virtual: PositiveInt = 1
    """Virtual pipeline stages (VPP): the number of parts of the model that each pipeline rank holds. More parts shorten
    the time in which the pipeline fills and drains, and need more communication. The number of micro-batches is then
    rounded up to a multiple of `pipeline`."""
    layers: tuple[PositiveInt, ...] | Literal["auto"] | None = None
    """The number of layers of each pipeline stage, from the first layer of the model to the last; with virtual stages,
    of each of the `pipeline` x `virtual` parts. `auto` balances the FLOPs of the stages, so that the last one, which
    has the output layer, gets fewer layers. null means that all have the same number."""
    context: PositiveInt = 1
    """Context parallelism (CP): the number of ranks over which the tokens of each sequence are split."""
    data: PositiveInt = 1
    """Data parallelism (DP): the number of replicas that share the samples. The optimizer's state is split over
    them."""
    expert: PositiveInt = 1
    """Expert parallelism (EP): the number of ranks, out of tensor x context x data, over which the experts of a layer
    are distributed."""
    expert_tensor: PositiveInt | None = None
    """The number of ranks over which each expert's matrices are split; null means the same number as `tensor`."""
    sequence: bool = True
    """Whether norms and residuals are split over the tokens (sequence parallelism). It has an effect only if `tensor`
    is above 1."""

    @property
    def mesh(self) -> Mesh:
        return Mesh(
            tensor=self.tensor,
            pipeline=self.pipeline,
            data=self.data,
            context=self.context,
            expert=self.expert,
            expert_tensor=self.expert_tensor,
            virtual=self.virtual,
            layers=self.layers,
        )

    @property
    def sequence_parallel(self) -> bool:
        return self.sequence and self.tensor > 1

    @property
    def alignment(self) -> int:
        """Every packed sequence is padded to a multiple of this number of tokens. Then context parallelism can cut it
        into 2 x context equal chunks, and sequence parallelism can split the tokens of a row evenly."""
        chunks = 2 if self.context > 1 else 1
        return self.context * math.lcm(chunks, self.tensor if self.sequence_parallel else 1)

    @property
    def microbatch_multiple(self) -> int:
        """The number of micro-batches is a multiple of this number, as Megatron's interleaved schedule needs it."""
        return self.pipeline if self.virtual > 1 else 1


class OptimizerConfig(Section):
    """Adam with decoupled weight decay."""

    lr: Annotated[float, Field(gt=0)] = 1e-6
    """The learning rate after the warm-up."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0
    """The learning rate at the end of the schedule, divided by `lr`; 1 keeps the learning rate constant."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """The number of optimizer steps in which the learning rate rises linearly from 0 to `lr`; 0 means no warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls from `lr` to `lr` x `min_lr_ratio` over the run's steps after the warm-up."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Adam's decay rates of the first and the second moment."""
    eps: float = 1e-8
    """Adam's epsilon, which is added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """The coefficient of the decoupled weight decay; 0 means none."""
    clip_grad: Annotated[float, Field(ge=0)] = 1.0
    """The gradient is scaled down if its global norm exceeds this bound; 0 means no bound."""


class ModelConfig(Section):
    path: Path
    """The model's folder in Hugging Face's format, with config.json, safetensors files and a tokenizer."""
    weights: Path | None = None
    """The folder with the weights that the run begins with, if they are not in `path`: one that tools/hf_to_megatron.py
    has written, or a checkpoint of another run. `path` may then be its subfolder `hf`, which has everything but the
    weights."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """The data type of the weights in the trainer's forward pass and in the engine. The optimizer's state is fp32."""
    layers: Literal["auto", "transformer_engine", "local"] = "auto"
    """The trainer's layers. `transformer_engine`: the fused layers of that library, on GPUs. `local`: Megatron's own
    linear layers with this project's attention and norms, which run everywhere. `auto`: Transformer Engine's if it is
    installed, `dtype` is bfloat16 and its layers can express the model, otherwise the local ones."""
    recompute: Literal["none", "full"] = "none"
    """`full` keeps only each layer's input and computes the other activations again in the backward pass, which saves
    memory; `none` keeps all activations."""


Switch = bool | int | float | str | tuple[str, ...] | None
"""The value of one of Megatron-Core's own settings."""


class MegatronConfig(Section):
    """Settings of Megatron-Core that have no key of their own here, by their names there. The names are checked when a
    run starts; what the project sets itself, and what would change the loss, is refused.

    On GPUs `overlap_grad_reduce` is on where gradients are reduced, and with Transformer Engine's layers so are
    `moe_permute_fusion` and, if Apex has its extension, `gradient_accumulation_fusion`; false turns them off."""

    transformer: dict[str, Switch] = {}
    """Fields of `TransformerConfig`, for example `{recompute_granularity: selective, recompute_modules: [mlp]}`, or
    `{recompute_granularity: full, recompute_method: block, recompute_num_layers: 4}`."""
    ddp: dict[str, Switch] = {}
    """Fields of `DistributedDataParallelConfig`, for example `{overlap_grad_reduce: false}`."""
    optimizer: dict[str, Switch] = {}
    """Fields of `OptimizerConfig`."""


class PolicyConfig(Section):
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    megatron: MegatronConfig = MegatronConfig()
    router_bias_update_rate: Annotated[float, Field(ge=0)] = 0.0
    """The amount by which every optimizer step raises the router's bias of experts with fewer tokens than the average,
    and lowers that of the others (arXiv:2408.15664; DeepSeek-V3's pre-training used 0.001). For models whose routers
    have such a bias. 0 means that the bias stays as it is: a bias that moves makes tokens go to other experts, so it
    changes the policy without a gradient, and also where no reward asked for it."""
    routing_replay: bool = False
    """true: in training every token goes to the experts that the engine chose for it (R3, arXiv:2510.11370); the
    experts' weights are the trainer's own. For models with at most 256 experts. The choices need one byte for each
    token, layer and active expert beside a token's other 13 bytes. false: the trainer chooses; in bf16 some of its
    choices differ from the engine's, which shows in the mismatch."""
    load_balancing_loss: Annotated[float, Field(ge=0)] = 0.0
    """The coefficient of the load-balancing loss of each layer with experts (arXiv:2101.03961): the number of experts
    times the sum over the experts of their share of the choices times their mean score. Shares and means are over all
    tokens of a mini-batch, prompts included and padding left out, so the loss is the same in every layout. The shares
    must be known before the first gradient, so each mini-batch needs one more forward pass. 0 means no such loss."""
    router_z_loss: Annotated[float, Field(ge=0)] = 0.0
    """The coefficient of the z-loss of each layer with experts (arXiv:2202.08906): the mean over all tokens of a
    mini-batch of the squared log-sum-exp of the router's logits, which keeps the logits small. 0 means no such
    loss."""


class SamplingConfig(Section):
    temperature: Annotated[float, Field(gt=0, le=2)] = 1.0
    """The sampling temperature. The trainer divides its logits by the same number. vLLM allows at most 2."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The engine samples only from the most probable tokens whose probabilities add up to this; 1 means all tokens."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """The engine samples only from this number of most probable tokens; 0 means all tokens."""


class ThinkingBudget(Section):
    """Separate token budgets for the thought and for the answer, by two calls of the engine.

    The first call samples the thought. If it ends without the delimiter, the delimiter is appended as forced tokens,
    which are no actions. The second call samples the rest of the answer."""

    thought_tokens: PositiveInt
    """The largest number of tokens that the first call may sample."""
    response_tokens: PositiveInt
    """The largest number of answer tokens. Tokens that the first call sampled after the delimiter count here."""


class RolloutConfig(Section):
    num_engines: PositiveInt = 1
    """The number of vLLM engines."""
    tensor: PositiveInt = 1
    """Tensor parallelism of each engine: the number of ranks over which its matrices are split."""
    expert_parallel: bool = False
    """true: each tensor rank of an engine holds some of the experts whole. false: each expert is split over all tensor
    ranks."""
    prompts_per_step: PositiveInt
    """The number of prompts in a training step."""
    samples_per_prompt: PositiveInt
    """The number of answers to each prompt, which form a group."""
    max_prompt_tokens: PositiveInt
    """The largest length of a prompt, in tokens. `data.on_bad_row` decides what becomes of a longer one."""
    max_response_tokens: PositiveInt
    """The largest number of tokens after the prompt: thought, delimiter and answer together."""
    max_lag: NonNegativeInt = 0
    """The largest number of training steps between the weights that sampled a token and those that it trains. 0: the
    engines and the trainer work in turns. Otherwise they work at the same time: answers go on while new weights arrive,
    and up to max_lag + 1 batches of prompts are under way or wait for a step. Use it with `algorithm.correction`."""
    late: Literal["wait", "requeue", "drop"] = "wait"
    """What a step does, once it has a full batch, about groups that are still running and would be too old for the next
    step. `wait`: it waits for them. `requeue`: it begins, and their prompts are asked again, from the start, with the
    next weights. `drop`: it begins, and nobody trains on them. With the last two the policy sees fewer long answers
    than it gives, because these are late more often; `stream/late` counts the groups."""
    active_sampling: bool = False
    """Whether groups without a signal, in which all rewards are equal, are replaced by other prompts until the batch is
    full. A prompt whose answers were all right (see `eval.verifier`) then rests for one epoch, and for up to eight if
    it stays easy."""
    delimiter: str = "</think>"
    """The text that ends the thought. It may be one or more of the model's tokens. An empty text means that the model
    does not think."""
    thinking: ThinkingBudget | None = None
    """Separate budgets for thought and answer; null means that both share `max_response_tokens`."""
    sampling: SamplingConfig = SamplingConfig()
    """How the engine samples training answers and evaluation answers."""
    prefix_cache: Literal["cleared", "salted"] = "cleared"
    """What a push of new weights does to the KV cache of older weights. `cleared` drops it all, and running requests
    are computed again with the new weights. `salted` lets running requests keep their cache, and hides it from later
    requests."""
    quantization: str | None = None
    """The name of one of vLLM's online quantisations (`fp8`, `fp8_per_channel`), which the engine applies to the
    weights of each push; null means none. The engine's policy then differs from the trainer's by more than rounding:
    see `algorithm.correction` and `algorithm.max_mismatch`."""
    max_sequences: PositiveInt = 1024
    """The largest number of answers that an engine decodes at the same time; more of them wait, the oldest first. On a
    GPU vLLM chooses the sizes of its CUDA graphs by it. In an asynchronous run, choose the number at which the engine's
    throughput stops growing: with more, batches are decoded side by side, and all of them end late."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.85
    """The share of each GPU's memory that vLLM may use. Without a GPU this key has no effect, and the KV cache has
    1 GiB."""

    @property
    def max_model_tokens(self) -> int:
        """The length of the longest possible sample, in tokens."""
        return self.max_prompt_tokens + self.max_response_tokens


class _Reward(Section):
    name: str | None = None
    """The reward's name in metrics and logs, which must be unique; null means the reward's kind, or the name of its
    function."""
    weight: float = 1.0
    """The factor of this reward's score in the sum of all rewards."""
    on_error: Literal["abstain", "stop"] = "abstain"
    """What happens when this reward cannot score an answer (an exception, a NaN, a result of the wrong form, a
    time-out). `abstain` leaves the reward out of the answer's sum, counts the failure, and writes the row and the error
    to `logs/rewards.log`. `stop` ends the run after a checkpoint."""
    timeout_s: PositiveFloat = 600
    """The longest time, in seconds, that scoring the answers of one step may take. After that the verifier's process is
    replaced, and `on_error` decides about the answers."""
    max_silent_steps: PositiveInt | None = 3
    """The run stops when this reward has scored no answer at all in this number of steps in a row; null means never."""


class ExactAnswerReward(_Reward):
    """The score is 1 if the text after the thought equals the row's `ground_truth`, else 0."""

    kind: Literal["exact_answer"] = "exact_answer"
    answer: Literal["all", "last_number"] = "all"
    """What is compared. `all` is the whole text after the delimiter, without white space at its ends. `last_number` is
    the last number of that text, compared as a number."""
    require_stop: bool = True
    """true: an answer that a token budget cut scores 0. false: it is compared like any other answer."""

    @property
    def label(self) -> str:
        return self.name or self.kind


class FunctionReward(_Reward):
    """Any Python function with TRL's signature: f(prompts, completions, completion_ids, **columns) ->
    list[float | None]."""

    kind: Literal["function"] = "function"
    path: str
    """The function's import path, as `package.module:function`."""

    @property
    def label(self) -> str:
        return self.name or self.path.rpartition(":")[2]


RewardConfig = Annotated[ExactAnswerReward | FunctionReward, Field(discriminator="kind")]


class DataConfig(Section):
    train: InputPath
    """The training rows, as a file of JSON lines. A row has `messages` (chat turns) or `prompt` (plain text), for
    example a `ground_truth`, and any other columns, which the rewards receive."""
    eval: InputPath | None = None
    """The held-out rows for evaluations, in the same form; null means that nothing is evaluated."""
    on_bad_row: Literal["fail", "skip"] = "fail"
    """What happens to an unreadable row and to a prompt that is too long. `fail` stops the run and names file and line;
    `skip` leaves the row out and counts it."""


class SftConfig(Section):
    rows: InputPath
    """The rows, as a file of JSON lines. A row has `prompt` and `completion`, or `messages` whose last turn is the
    assistant's."""
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
    """The number of answers to each prompt."""
    verifier: str | None = None
    """The name of the reward that decides whether an answer is right, which means a score of 1 or more.
    `eval/accuracy` is the share of right answers. null means the first exact_answer reward; if there is none, only
    `eval/reward_mean` is reported."""


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
    seed: int = 0
    """The seed of the data's order, of sampling and of the training ranks."""


class BridgeConfig(Section):
    bucket_mib: Annotated[float, Field(gt=0)] = 64
    """The largest size of one message, in MiB. Each rank holds two such buffers besides its weights."""
    chains: PositiveInt | None = None
    """The number of chains in which the engines receive weights. The trainers send to the first engine of each chain,
    and each engine sends to the next one, so the trainers send this number of copies, however many engines there are.
    null means that the trainers send to every engine."""
    verify: bool = False
    """true: after each push the engines read back what they wrote and compare it with the trainers' checksums. false:
    they do so after the first push only."""
    timeout_s: Annotated[float, Field(gt=0)] = 300
    """The longest time, in seconds, that a push may take."""


SECRET = re.compile("SECRET|PASSWORD|PASSWD|CREDENTIAL|TOKEN(?!IZER)|(?<!P)KEY", re.IGNORECASE)
"""The names of variables whose values must not be written down. InfiniBand's partition keys (PKEY) are no secrets."""


def _refuse_secret(name: str) -> str:
    if SECRET.search(name):
        raise ValueError(
            f"the name {name} is one of a secret, and the configuration is written into the run's folder; export the "
            "variable on each node before Ray starts there"
        )
    return name


def _number_as_text(value: object) -> object:
    return str(value) if type(value) in (int, float) else value


Environment = dict[Annotated[str, AfterValidator(_refuse_secret)], Annotated[str, BeforeValidator(_number_as_text)]]
"""Environment variables and their values."""


class ClusterConfig(Section):
    ray_address: str | None = None
    """The address of a running Ray cluster; `auto` finds it. null starts Ray on this machine and stops it at the
    end."""
    environment: Environment = {}
    """Environment variables of all processes of the run, such as `{NCCL_IB_HCA: mlx5}`. They override those of the
    driver's shell, of which only the variables of the network are handed on (`NCCL_*`, `GLOO_*`, `UCX_*`, `FI_*`,
    `RES_OPTIONS`). Secrets are refused."""
    interface: str | None = None
    """The network interface through which processes of different nodes talk to each other, such as `ib0`. null means
    GLOO_SOCKET_IFNAME if that variable is set, and otherwise, on each node, the interface that has the address with
    which Ray knows the node."""
    cpus_per_trainer: Annotated[float, Field(gt=0)] = 1
    """The number of CPUs that Ray reserves for each trainer rank."""
    gpus_per_trainer: Annotated[float, Field(ge=0)] = 0
    """The number of GPUs that Ray reserves for each trainer rank; 0 means that trainers run on the CPU."""
    gpus_per_engine_rank: Annotated[float, Field(ge=0)] = 0
    """The number of GPUs that Ray reserves for each rank of an engine; 0 means that engines run on the CPU."""
    colocate: bool = False
    """true: trainers and engines share GPUs. While engines generate, the trainer's weights, gradients and optimizer
    state are in the node's memory; while trainers train, the engines have nothing on the GPUs. There must be as many
    ranks of engines as trainer ranks. false: each has GPUs of its own."""
    pools: dict[Literal["trainer", "engine", "verifier"], str] = {}
    """The pool of nodes that a role uses, such as {trainer: train, engine: rollout}. A node is in the pool `train` if
    its Ray was started with `ray start --labels pool=train`. A role without an entry may use every node."""
    verifiers: PositiveInt = 1
    """The number of processes that compute rewards. Answers are divided among them."""
    gpus_per_node: PositiveInt | None = None
    """The number of GPUs of a node, for the dry run alone, which prints what runs on which node. A run reads from Ray
    what the nodes have. null prints no nodes."""
    gpu_memory_gb: PositiveFloat = 80
    """The memory of a GPU in GB, for the estimates of the dry run. The default is an H100's, which reports 5 GB more:
    CUDA's context and the gaps of the allocator take these. An H200 has 136 by the same count."""
    world_size: PositiveInt | None = None
    """The number of trainer ranks that the job has. It must equal what `policy.parallel` needs; null skips this
    check."""
    start_timeout_s: PositiveFloat = 1800
    """The longest time, in seconds, that Ray may take to place a process, and that the process may take to load its
    model."""
    step_timeout_s: PositiveFloat = 7200
    """The longest time, in seconds, that one part of a step may take: a generation, a forward pass, an update or a
    checkpoint. After that the process that does not answer counts as lost."""
    restarts_per_hour: NonNegativeInt = 5
    """The number of restarts in the last hour (of the trainer, of an engine or of the verifier) that a run survives. At
    the next one it ends and tells their causes. 0 means that the first loss ends the run."""
    mirror: bool = False
    """true: the trainer's state of the last two steps also lies in the host memory of its own node and of another one,
    so that a restart of the trainer loses no finished step. It is copied while the engines generate. false: a restart
    of the trainer continues from the newest checkpoint."""


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
                f"{mesh.data} = {mesh.world_size} ranks (tensor x pipeline x data); change one of them"
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
        thinking = self.rollout.thinking
        if thinking and not self.rollout.delimiter:
            raise ValueError("rollout.thinking needs rollout.delimiter, the text that ends the thought; set it")
        if thinking and thinking.thought_tokens + thinking.response_tokens >= self.rollout.max_response_tokens:
            raise ValueError(
                f"rollout.max_response_tokens ({self.rollout.max_response_tokens}) must exceed thinking.thought_tokens "
                f"+ thinking.response_tokens ({thinking.thought_tokens + thinking.response_tokens}), because the "
                "delimiter needs room too; raise it"
            )
        sampling = self.rollout.sampling
        weighs = self.algorithm.loss.corrects
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
                f"rollout.samples_per_prompt is 1, so every {estimator.kind} advantage would be 0; use 2 or more"
            )
        if self.rollout.max_lag and self.rollout.prefix_cache == "salted":
            raise ValueError(
                "rollout.prefix_cache: salted lets running answers keep the keys and values of older weights, so with "
                "rollout.max_lag no token could show whether engine and trainer agree; set prefix_cache to cleared"
            )
        if self.rollout.late != "wait" and not (self.rollout.max_lag or self.rollout.active_sampling):
            raise ValueError(
                f"rollout.late: {self.rollout.late} has no effect without rollout.max_lag and rollout.active_sampling, "
                "because every group is then of the step that waits for it; remove it"
            )
        if self.cluster.colocate:
            self._check_colocation()
        self._refuse_missing_inputs()
        labels = [reward.label for reward in self.rewards]
        if len(set(labels)) < len(labels):
            raise ValueError(f"rewards: the names {labels} are not distinct; give each reward its own `name`")
        if self.eval.verifier is not None and self.eval.verifier not in labels:
            raise ValueError(
                f"eval.verifier is {self.eval.verifier!r}, but the rewards are named {labels}; choose one of them"
            )
        if self.rollout.prompts_per_step < self.algorithm.updates_per_step:
            raise ValueError(
                "algorithm.updates_per_step exceeds rollout.prompts_per_step, so some updates would be empty; lower it"
            )
        return self

    @property
    def deciding_reward(self) -> int | None:
        """The index of the reward that decides whether an answer is right; None if no reward does."""
        if self.eval.verifier is not None:
            return [reward.label for reward in self.rewards].index(self.eval.verifier)
        return next((i for i, r in enumerate(self.rewards) if isinstance(r, ExactAnswerReward)), None)

    def _check_colocation(self) -> None:
        """Refuse what needs trainers and engines at the same time."""
        rollout, cluster = self.rollout, self.cluster
        ranks, trainers = rollout.num_engines * rollout.tensor, self.policy.parallel.mesh.world_size
        if ranks != trainers:
            raise ValueError(
                f"cluster.colocate: trainers and engines share GPUs rank by rank, but there are {trainers} trainer "
                f"ranks (policy.parallel) and {rollout.num_engines} x {rollout.tensor} = {ranks} ranks of engines; "
                f"change rollout.num_engines or rollout.tensor so that their product is {trainers}"
            )
        if rollout.max_lag or rollout.active_sampling:
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

    def _refuse_missing_inputs(self) -> None:
        """Refuse the algorithms that are implemented, but whose inputs this recipe does not produce."""
        estimator, kl = self.algorithm.adv_estimator, self.algorithm.kl
        missing = {
            "values": "a critic, and this recipe trains none",
            "step_rewards": "rewards of single steps, but the verifiers give one reward for each answer",
        }
        for need in sorted(estimator.needs & missing.keys()):
            raise ValueError(
                f"algorithm.adv_estimator {estimator.kind} needs {missing[need]}; choose another estimator"
            )
        if kl and kl.place == "reward":
            raise ValueError(
                "algorithm.kl.place: reward needs one advantage for each token, but this recipe estimates one for each "
                "sample; use place: loss"
            )
