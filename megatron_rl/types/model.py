"""A model: its layers, and what stands around them. Nothing here imports torch."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import Literal

from megatron_rl.types.blocks import Attention, DeltaNet, LatentAttention, Mixture, Mlp, SoftmaxAttention
from megatron_rl.types.mamba import Mamba2, SquaredReluMixture, SquaredReluMlp
from megatron_rl.types.vision import Vision


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of a decoder. Equal layers have equal parts, so that a layer is a key. A layer of one block has an absent
    one in the other place (types/mamba.py)."""

    attention: Attention | Mamba2
    mlp: Mlp | SquaredReluMlp | SquaredReluMixture
    post_norm: bool = False
    """Whether the norms are after attention and MLP, before the residual sum, instead of in front of them."""
    norms_on_both_sides: bool = False
    """Whether a layer with `post_norm` has norms in front of attention and MLP, too."""
    zero_centred: bool = False
    """Whether the weights of norms are stored minus 1, but not of the norms of linear attention's outputs."""

    @property
    def mixture(self) -> Mixture | None:
        return self.mlp if isinstance(self.mlp, Mixture) else None


@dataclass(frozen=True, slots=True)
class Adapters:
    """Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685): next to a frozen weight W [out, in] of a linear layer
    there are A [rank, in] and B [out, rank], and the layer computes W x + scale B A x. With rank 16 and alpha 32 the
    scale is 2, and a layer of 5120 x 5120 has 163,840 trained numbers in place of 26 million."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = ()
    """The linear layers that have adapters, by the last part of their name in the checkpoint, such as `q_proj`. Empty
    means all of them."""
    rank_stabilised: bool = False
    """Whether the scale is alpha / sqrt(rank) (Kalajdzievski 2023, arXiv:2312.03732) in place of alpha / rank."""
    base: Literal["unquantised", "fp8"] = "unquantised"
    """How the trainer holds the frozen weights of linear layers: in the model's dtype, or in fp8 blocks."""

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilised else self.rank)


@dataclass(frozen=True, repr=False)
class ModelShape:
    """The parts of a decoder model and their sizes, as its Hugging Face config.json and its family's table
    (`models.FAMILIES[shape.family]`) say."""

    family: str
    hidden_size: int
    vocab_size: int
    norm_eps: float
    max_positions: int
    layers: tuple[Layer, ...]
    output: Literal["own", "embedding", "value"] = "own"
    """What turns the last hidden state of a token into logits: weights of its own, or the embedding's (tied). A value
    head turns it into one number, the value."""
    adapters: Adapters | None = None
    """What is trained in place of the weights; None means the weights themselves."""
    multi_token: bool = False
    """Whether the head that predicts the token after the next one is a part of the model, and is trained. Its layer is
    in `head_layers`."""
    vision: Vision | None = None
    """How the model sees images; None if it reads text alone."""

    def __repr__(self) -> str:
        """Equal layers that follow each other are named once: 3 x Layer(...)."""
        told = {field.name: repr(getattr(self, field.name)) for field in fields(self)}
        told["layers"] = "[" + ", ".join(f"{len([*run])} x {layer!r}" for layer, run in groupby(self.layers)) + "]"
        return f"ModelShape({', '.join(f'{name}={value}' for name, value in told.items())})"

    @property
    def base(self) -> ModelShape:
        """The model without adapters."""
        return replace(self, adapters=None)

    @property
    def is_frozen_in_fp8(self) -> bool:
        """Whether the trainer holds frozen weights of linear layers in fp8 blocks."""
        return self.adapters is not None and self.adapters.base == "fp8"

    @property
    def served(self) -> ModelShape:
        """The model that an engine answers with: without a multi-token head."""
        return replace(self, multi_token=False)

    @property
    def tower(self) -> dict[str, tuple[int, ...]]:
        """The extents of the tensors of a trained vision tower, by name; empty if there is none."""
        return dict(self.vision.tower) if self.vision and self.vision.trained else {}

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def tied_embeddings(self) -> bool:
        return self.output == "embedding"

    @property
    def value_head(self) -> bool:
        return self.output == "value"

    @property
    def num_outputs(self) -> int:
        """The numbers that the model ends with for each token."""
        return 1 if self.value_head else self.vocab_size

    def sizes(self, layer: Layer | None = None) -> dict[str, int]:
        """The extents that the rows of a layer, or of what stands around the layers, name (`models.rule.HfTensor`)."""
        hidden = self.hidden_size
        known = {"hidden": hidden, "two_hidden": 2 * hidden, "vocab": self.vocab_size, "value_head": 1, "one": 1}
        if self.adapters is not None:
            known["adapter_rank"] = self.adapters.rank
        return known if layer is None else known | layer.attention.sizes() | layer.mlp.sizes()

    @property
    def attention(self) -> SoftmaxAttention | LatentAttention:
        """The attention of the layers that see all earlier tokens, or of a layer after the last one. In a model whose
        layers all have a window it has none, either."""
        known = [block for block in self.attentions if not isinstance(block, DeltaNet)]
        return next((block for block in known if block.window is None), known[0]).without_window()

    @property
    def attentions(self) -> Counter[Attention]:
        """The number of layers with each block of attention."""
        return Counter(layer.attention for layer in self.layers)

    @property
    def mixture(self) -> Mixture | None:
        """The mixture of experts, if layers have one."""
        return next((layer.mixture for layer in reversed(self.layers) if layer.mixture), None)

    @property
    def has_linear_attention(self) -> bool:
        return any(block.is_linear for block in self.attentions)

    @property
    def has_delta_rule(self) -> bool:
        """Whether a layer has the gated delta rule. Mamba-2, whose block is a subclass, does without it."""
        return any(type(block) is DeltaNet for block in self.attentions)

    @property
    def mlps(self) -> list[Mlp]:
        """The kinds of MLPs: mixtures first, and each sort as the last layers have it first."""
        kinds = dict.fromkeys(layer.mlp for layer in reversed(self.layers))
        return sorted(kinds, key=lambda mlp: not isinstance(mlp, Mixture))

    @property
    def num_experts(self) -> int:
        """The routed experts of a layer; 0 without a mixture."""
        return self.mixture.num_experts if self.mixture else 0

    @property
    def num_mixtures(self) -> int:
        """The number of layers with a mixture of experts."""
        return sum(layer.mixture is not None for layer in self.layers)

    @property
    def head_layers(self) -> tuple[Layer, ...]:
        """The layers of a multi-token head: one like the last layer, with attention to all earlier tokens, or none."""
        return (replace(self.layers[-1], attention=self.attention),) if self.multi_token else ()
