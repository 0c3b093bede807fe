"""The model, how it is split over ranks, and how it is optimized."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from megatron_rl.config.optimizer import AdamConfig, AnyOptimizerConfig
from megatron_rl.config.section import Section
from megatron_rl.types import Adapters, Mesh, ModelShape

if TYPE_CHECKING:
    from megatron_rl.config.schema import BaseConfig


class ParallelConfig(Section):
    """How the trainer is split over ranks: the axes of `types.Mesh`, and `sequence`. The world size is tensor x context
    x pipeline x data."""

    tensor: PositiveInt = 1
    """Tensor parallelism (TP): the number of ranks over which the matrices of each layer are split."""
    pipeline: PositiveInt = 1
    """Pipeline parallelism (PP): the number of stages into which the layers are split."""
    virtual: PositiveInt = 1
    """Virtual pipeline stages (VPP): the number of parts of the model that each pipeline rank holds. With more parts
    the pipeline fills and drains in less time, but communicates more. The number of micro-batches is then rounded up to
    a multiple of `pipeline`."""
    layers: tuple[PositiveInt, ...] | Literal["auto"] | None = None
    """The number of layers of each pipeline stage, from the first layer to the last; with virtual stages, of each of
    the `pipeline` x `virtual` parts. `auto` balances the FLOPs of the stages, so that the last one, with the output
    layer, gets fewer layers. null: all have the same number."""
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

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        _ = self.mesh  # raises where the sizes do not
        return self

    @property
    def mesh(self) -> Mesh:
        return Mesh(**{axis.name: getattr(self, axis.name) for axis in fields(Mesh)})

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


class ModelConfig(Section):
    path: Path
    """The model's folder in Hugging Face's format, with config.json, safetensors files and a tokenizer."""
    weights: Path | None = None
    """The folder with the weights that the run begins with, if they are not in `path`: one that `megatron-rl convert
    to-megatron` has written, or a checkpoint of another run. `path` may then be its subfolder `hf`, which has
    everything but the weights."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The data type of the weights in the trainer's forward pass and in the engine. The optimizer computes in fp32.
    `auto`: bfloat16 on GPUs, and on CPUs that have units for it; float32 on other CPUs, where a product in bfloat16
    takes much longer. `float16` rounds 8 times as finely as bfloat16 (arXiv:2510.26788), and holds no number
    above 65,504. Gradients that overflow are computed again with a smaller loss scale, which `loss_scale_window`
    updates without an overflow double. An overflow at `min_loss_scale`, of a weight or of an activation is an error.
    `policy.megatron.optimizer` has these settings, and `initial_loss_scale` (65536)."""
    layers: Literal["auto", "transformer_engine", "local"] = "auto"
    """The trainer's layers. `transformer_engine`: that library's fused layers, on GPUs. `local`: Megatron's linear
    layers with this project's attention and norms, everywhere. `auto`: Transformer Engine's if it is installed, `dtype`
    is not float32 and its layers can express the model, otherwise the local ones."""
    recompute: Literal["none", "full"] = "none"
    """`full` keeps only each layer's input and computes the other activations again in the backward pass, which saves
    memory; `none` keeps all activations."""


Switch = bool | int | float | str | tuple[str, ...] | None
"""The value of one of Megatron-Core's own settings."""


class MegatronConfig(Section):
    """Fields of Megatron-Core's configuration classes that have no key here. When a run starts, unknown names are
    refused. Fields that the project sets itself and the fields in `actor/megatron_settings.py` are refused too, each
    with its reason.

    On GPUs `overlap_grad_reduce` and `overlap_param_gather` are on where the optimizer's state is split, and with
    Transformer Engine's layers so are `moe_permute_fusion` and `gradient_accumulation_fusion`; false turns them off."""

    transformer: dict[str, Switch] = {}
    """Fields of `TransformerConfig`, for example `{recompute_granularity: selective, recompute_modules: [mlp]}`, or
    `{recompute_granularity: full, recompute_method: block, recompute_num_layers: 4}`."""
    ddp: dict[str, Switch] = {}
    """Fields of `DistributedDataParallelConfig`, for example `{overlap_grad_reduce: false}`."""
    optimizer: dict[str, Switch] = {}
    """Fields of `OptimizerConfig`."""

    def wrong_loss_scales(self) -> Iterator[str]:
        """What is wrong with the settings of the loss scale of float16."""
        key = "policy.megatron.optimizer"
        if "hysteresis" in self.optimizer:
            yield f"{key}.hysteresis: each overflow lowers the loss scale; remove this key"
        found: dict[str, float] = {}
        for name in ("initial_loss_scale", "min_loss_scale"):
            value = self.optimizer.get(name, 1)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                yield f"{key}.{name} is {value!r}; take a power of two, such as 1024"
            elif math.frexp(value)[0] != 0.5:
                yield f"{key}.{name} is {value:g}; take a power of two, which rounds no gradient"
            elif name in self.optimizer:
                found[name] = value
        if found.get("initial_loss_scale", math.inf) < found.get("min_loss_scale", 0):
            first, lowest = found["initial_loss_scale"], found["min_loss_scale"]
            yield f"{key}.initial_loss_scale is {first:g}, below min_loss_scale {lowest:g}; raise it"
        window = self.optimizer.get("loss_scale_window", 1)
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            yield f"{key}.loss_scale_window is {window!r}; it is a number of updates, 1 or more"


class LoraConfig(Section):
    """Low-rank adapters (LoRA, arXiv:2106.09685): the model's weights are frozen, and for each chosen linear layer
    a product of two small matrices is trained, `alpha / rank` B A."""

    rank: PositiveInt = 32
    """The number of rows of A and of columns of B."""
    alpha: PositiveFloat = 64.0
    """The numerator of the product's scale."""
    targets: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"
    """The layers that have adapters, by the last part of their names in the checkpoint, such as `[q_proj, v_proj]`;
    `all-linear`: all linear layers of attention, MLPs and experts. As in PEFT `lm_head` has one only if it is named; it
    must not be the embedding, and needs `rollout.lora: merged`."""
    rank_stabilised: bool = False
    """Whether the scale is alpha / sqrt(rank) (arXiv:2312.03732)."""
    start: Path | None = None
    """A folder of adapters in PEFT's form that the run begins with. null: B is zero and A random."""
    base: Literal["unquantised", "fp8"] = "unquantised"
    """How trainers hold the frozen weights of linear layers. `unquantised`: in `model.dtype`. `fp8`: one byte a number
    and a scale for each block of 128 x 128, made from any checkpoint; each product dequantises its weight. Log-probs,
    reference policy and the exported model are the rounded weights', so engines need `rollout.lora: merged`. The output
    layer, embedding, norms and routers stay as they are."""

    @field_validator("targets")
    @classmethod
    def _each_once(cls, targets: str | tuple[str, ...]) -> str | tuple[str, ...]:
        twice = [] if isinstance(targets, str) else [name for name, count in Counter(targets).items() if count > 1]
        if twice:
            raise ValueError(f"{', '.join(twice)} is there twice; name each layer once")
        return targets

    @property
    def adapters(self) -> Adapters:
        targets = () if self.targets == "all-linear" else self.targets
        return Adapters(self.rank, self.alpha, targets, self.rank_stabilised, self.base)


class PolicyConfig(Section):
    parallel: ParallelConfig = ParallelConfig()
    optimizer: AnyOptimizerConfig = AdamConfig()
    megatron: MegatronConfig = MegatronConfig()
    lora: LoraConfig | None = None
    """Adapters that are trained in place of the weights. null: the weights are trained."""
    router_bias_update_rate: Annotated[float, Field(ge=0)] = 0.0
    """The amount by which every optimizer step raises the router's bias of experts with fewer tokens than the average
    and lowers the others' (arXiv:2408.15664; DeepSeek-V3's pre-training used 0.001), for models that have such a bias.
    0 keeps the bias, because a bias that moves changes the policy without a gradient."""
    routing_replay: bool = False
    """true: in training every token goes to the experts that the engine chose for it (R3, arXiv:2510.11370), with the
    trainer's own weights for them. The choices need one byte for each token, layer and active expert (two with more
    than 256 experts), besides the 13 bytes of a token. false: the trainer chooses; in bf16 some choices differ, which
    shows in the mismatch."""
    load_balancing_loss: Annotated[float, Field(ge=0)] = 0.0
    """The coefficient of the load-balancing loss of each layer with experts (arXiv:2101.03961): the number of experts
    times the sum over them of their share of the choices times their mean score, over all tokens of a mini-batch
    without padding, so it is the same in every layout. Each mini-batch needs one more forward pass for it. 0 means no
    such loss."""
    router_z_loss: Annotated[float, Field(ge=0)] = 0.0
    """The coefficient of the z-loss of each layer with experts (arXiv:2202.08906): the mean over all tokens of a
    mini-batch of the squared log-sum-exp of the router's logits, which keeps the logits small. 0 means no such
    loss."""

    multi_token: Literal["drop", "keep", "train"] = "drop"
    """What becomes of the multi-token head, the layers that predict tokens after the next one (DeepSeek-V3, GLM-4.5,
    Qwen3-Next, Qwen3.5) and draft for an engine. `drop`: checkpoints and exports have none. `keep`: they have the head
    of `model.path`, which drafts for the policy that the run began with. `train` (DeepSeek-V3 and GLM-4.5): every
    update also trains it, by a cross-entropy over the sampled answers. The policy gets no gradient from it, and its
    gradient is clipped by its own norm."""
    multi_token_targets: Literal["sampled", "policy"] = "sampled"
    """What a trained head learns: the `sampled` tokens, or the distribution of the `policy` over its 32 most probable
    tokens."""

    vision_tower: Literal["frozen", "trained"] = "frozen"
    """Whether the vision tower of a model that sees images is trained with its text, or stays as in `model.path`."""

    @property
    def adapters(self) -> Adapters | None:
        return self.lora.adapters if self.lora else None

    def adapted(self, shape: ModelShape) -> ModelShape:
        """The model with the adapters, the multi-token head and the vision tower that are trained."""
        vision = shape.vision and replace(shape.vision, trained=self.vision_tower == "trained")
        return replace(shape, adapters=self.adapters, multi_token=self.multi_token == "train", vision=vision)

    def conflicts(self, run: BaseConfig) -> Iterator[str]:
        yield from self.optimizer.wider_gradients("policy", run.model.dtype)
        yield from self.megatron.wrong_loss_scales()
        if self.multi_token_targets != "sampled" and self.multi_token != "train":
            yield (
                f"policy.multi_token_targets is {self.multi_token_targets}, but policy.multi_token is "
                f"{self.multi_token}, so that no head is trained; set it to train, or remove the targets"
            )

    @model_validator(mode="after")
    def _no_streamed_state_of_fp8_weights(self) -> PolicyConfig:
        in_fp8 = self.megatron.transformer.get("fp8_param") or self.megatron.ddp.get("fp8_param_gather")
        if self.optimizer.is_streamed and in_fp8:
            raise ValueError(
                "optimizer.offload and optimizer.moments need weights in bfloat16 or float32; leave out "
                "megatron.transformer.fp8_param and megatron.ddp.fp8_param_gather"
            )
        return self
