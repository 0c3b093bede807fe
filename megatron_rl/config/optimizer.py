"""The kinds of optimizer, and what they keep of a parameter between two updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from megatron_rl.config.section import Section, default_kind

PIECE_ELEMENTS, IN_FLIGHT = 2**24, 3
"""The number of elements of a piece that a streamed optimizer updates; and the number of pieces of an offloaded state
that are on the device at once: one arrives, one is updated, and one leaves."""

ADAM_MOMENTS, MUON_MOMENTS = ("exp_avg", "exp_avg_sq"), ("momentum_buffer",)
"""Megatron-Core's names of the parts of a parameter's state, without the fp32 copy of a parameter in two bytes."""


def moments(kind: str, is_matrix: bool) -> tuple[str, ...]:
    """The names of the parts of a parameter's state, in memory and in checkpoints.

    Args:
        kind: of the optimizer.
        is_matrix: whether `layout.is_matrix` says so of the parameter.
    """
    return MUON_MOMENTS if kind == "muon" and is_matrix else ADAM_MOMENTS


class OptimizerConfig(Section):
    """What all kinds of optimizer have."""

    kind: str
    lr: Annotated[float, Field(gt=0)] = 1e-6
    """The learning rate after the warm-up."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0
    """The schedule's lowest learning rate, divided by `lr`; 1 keeps the learning rate constant."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """The learning rate rises linearly from 0 to `lr` during this number of optimizer steps; 0 means no warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls from `lr` to `lr` x `min_lr_ratio` over the run's optimizer steps after the warm-up.
    As in transformers the first one has `lr`, and a step after the last one would have the lowest rate."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """The coefficient of the decoupled weight decay; 0 means none."""
    clip_grad: Annotated[float, Field(ge=0)] = 1.0
    """The gradient is scaled down if its global norm exceeds this bound; 0 means no bound."""
    rounding: Literal["nearest", "dithered"] = "dithered"
    """How an update rounds the fp32 copies of weights in 16 bits. `nearest`: most weights stand still while an update
    is far smaller than the distance between two numbers. `dithered`: each element has its own point above which it is
    rounded up, the same in all updates and layouts, so that the mean of the weights follows the copies."""
    gradients: Literal["float32", "bfloat16"] = "float32"
    """The data type of gradients while micro-batches and data-parallel ranks add theirs. bfloat16 needs weights in
    bfloat16. It saves 2 bytes a parameter on the GPU and a third of what data-parallel ranks exchange, and rounds every
    sum: with many micro-batches small gradients are lost."""

    def wider_gradients(self, section: str, dtype: str) -> Iterator[str]:
        """What is wrong if weights of this data type cannot have these gradients."""
        if self.gradients == "bfloat16" and dtype in ("float32", "float16"):
            yield f"{section}.optimizer.gradients: bfloat16 needs model.dtype: bfloat16; change one of them"

    @property
    def is_offloaded(self) -> bool:
        """Whether the state is in the memory of the node between two updates."""
        return False

    @property
    def is_streamed(self) -> bool:
        """Whether an update takes the state piece by piece from where, or from how, it is kept between two updates."""
        return False

    def moment_bytes(self, is_matrix: bool) -> int:
        """The bytes of a parameter's state between two updates, without an fp32 copy."""
        return 4 * len(moments(self.kind, is_matrix))


Decay = Annotated[float, Field(ge=0, lt=1)]


class AdamRule(Section):
    """The numbers of Adam's formula."""

    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Adam's decay rates of the first and the second moment."""
    eps: float = 1e-8
    """Adam's epsilon, which is added to the root of the second moment."""


class AdamConfig(AdamRule, OptimizerConfig):
    """Adam with decoupled weight decay (arXiv:1711.05101)."""

    kind: Literal["adam"] = "adam"
    offload: bool = False
    """true: Adam's state, with the fp32 copies of bf16 weights, is in the memory of the node. An update copies it to
    the GPU and back piece by piece: 24 bytes a parameter each way with bf16 weights and fp32 moments. No bit of the
    result changes. false: the state stays on the GPU."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """The data type of Adam's moments between two updates, also in checkpoints. Updates compute in fp32. bfloat16 saves
    4 bytes a parameter and rounds both moments after every update; DeepSeek-V3 was trained so (arXiv:2412.19437)."""

    @property
    def is_offloaded(self) -> bool:
        return self.offload

    @property
    def is_streamed(self) -> bool:
        return self.offload or self.moments != "float32"

    @property
    def adam_rule(self) -> AdamRule:
        """The rule of the parameters that Adam updates."""
        return self

    def moment_bytes(self, is_matrix: bool) -> int:
        return len(ADAM_MOMENTS) * (2 if self.moments == "bfloat16" else 4)

    @model_validator(mode="after")
    def _moments_must_decay(self) -> AdamConfig:
        # Half a unit in the last place of bfloat16 is at most 2^-8 of the number.
        if self.moments == "bfloat16" and max(self.betas) >= 1 - 2**-8:
            raise ValueError(
                f"betas {list(self.betas)} with moments bfloat16: a moment that keeps {max(self.betas)} of itself in "
                f"an update is rounded back to what it was, and never decays; both must be below {1 - 2**-8}"
            )
        return self


class MuonConfig(OptimizerConfig):
    """Muon: the update of a matrix inside a layer is the orthogonal matrix next to its momentum, which Newton-Schulz
    iterations approximate (Jordan et al. 2024, kellerjordan.github.io/posts/muon; arXiv:2502.16982). A matrix is a
    tensor of the Hugging Face folder: q, k and v, gate and up, and the matrices of each expert are orthogonalised
    separately, and in every layout the update is computed from the whole matrix. Adam updates embedding, output layer,
    value head and all that is one-dimensional, with the same learning rate and decay. The state of a matrix has one
    momentum in place of two moments."""

    ADAM_ONLY: ClassVar = ("offload", "moments")

    kind: Literal["muon"] = "muon"
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """The decay rate of the momentum M, which an update with the gradient G turns into `momentum` x M + G."""
    nesterov: bool = True
    """true: G + `momentum` x M is orthogonalised, with the new M; false: M."""
    num_iterations: PositiveInt = 5
    """The number of Newton-Schulz iterations of an update."""
    scale: Literal["moonlight", "original"] = "moonlight"
    """The factor of the orthogonalised matrix. `moonlight`: 0.2 x sqrt(max(rows, columns)), which gives its elements
    the root mean square of Adam's updates, so that Adam's learning rates carry over (arXiv:2502.16982). `original`:
    sqrt(max(1, rows / columns)), which needs its own learning rates."""
    adam: AdamRule = AdamRule()
    """Adam's numbers, for what Muon does not update."""

    @property
    def adam_rule(self) -> AdamRule:
        return self.adam

    @model_validator(mode="before")
    @classmethod
    def _keys_of_adam(cls, values: Any) -> Any:
        for key in cls.ADAM_ONLY if isinstance(values, Mapping) else ():
            if key in values:
                raise ValueError(f"optimizer.{key} belongs to kind adam alone; leave it out, or set kind to adam")
        return values


AnyOptimizerConfig = Annotated[AdamConfig | MuonConfig, Field(discriminator="kind"), default_kind("adam")]
