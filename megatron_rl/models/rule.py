"""The rows of a family's table: each is one fused parameter of Megatron, and the HF tensors that it is made of."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from megatron_rl.models.splits import REPLICATED, Sizes, SplitKind
from megatron_rl.models.view import InFile, View
from megatron_rl.types import ModelShape


@dataclass(frozen=True, slots=True)
class HfTensor:
    name: str
    """The name in the checkpoint, without the prefix of the layer. `{}` stands for the number of the expert."""
    dims: tuple[str, ...]
    """The extent of each dim, as a key of `ModelShape.sizes`: q, kv, hidden, ffn, ..."""
    file: InFile | None = None
    """How files hold a tensor of a layer, if not under this name and in this form."""

    def is_named(self, name: str) -> bool:
        """Whether this is the name of the tensor, or of the one that files hold it in, for any expert."""
        names = (self.name, self.file.name) if self.file else (self.name,)
        return any(re.fullmatch(re.escape(one).replace(re.escape("{}"), r"\d+"), name) for one in names)

    def __str__(self) -> str:
        held = f", which files hold in {self.file.name}" if self.file else ""
        return f"{self.name} [{', '.join(self.dims)}]{held}"


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of a family's table. Names are relative to the prefix of a layer; the embedding, the final norm and the
    output layer have whole names."""

    split: SplitKind
    hf: tuple[HfTensor, ...]
    megatron: str
    """Megatron's name. `{}` stands for the expert, counted from 0 on each rank."""
    vllm: str | tuple[str, ...] | None = None
    """vLLM's name, if it differs from the HF tensor's. A row of experts without `{}` is one parameter that stacks the
    experts of the rank along a new first dim. Several names: one for each HF tensor (interleaving.py)."""
    fused: str | None = None
    """Megatron's name with Transformer Engine's layers, if it differs: these fuse a norm into the linear layer after
    it, and put the experts into one grouped layer."""
    when: Callable[[Any], bool] | None = None
    """Whether a block of attention, or an MLP, has this row; None: every block that the list of rows is for has it."""
    float32: bool = False
    """Trainer and engine hold the parameter in float32 for every dtype of the model, and it is sent as float32."""
    negated_exp: bool = False
    """The engine holds -exp(x) of each number x."""
    served_float32: bool = False
    """The engine alone holds the parameter in float32 for every dtype of the model. It is sent as float32; trainer and
    files have the model's dtype."""

    on_every_stage: bool = False
    """vLLM builds this row of an end of the model on every pipeline stage."""
    scaled: bool = False
    """The embedding's output is multiplied by sqrt(hidden size), rounded to the model's dtype."""
    zero_centred: bool = False
    """The model holds the weights of this norm minus 1, and of all other norms of hidden states, q and k."""

    @property
    def is_sent_as_float32(self) -> bool:
        return self.float32 or self.served_float32

    def of_vllm(self) -> Iterator[tuple[str, Rule]]:
        """Yield each of vLLM's parameters: its name, and the row with what it holds."""
        if isinstance(self.vllm, tuple):
            for name, tensor in zip(self.vllm, self.hf, strict=True):
                yield name, replace(self, hf=(tensor,))
        else:
            yield self.vllm or self.hf[0].name, self

    @property
    def per_expert(self) -> bool:
        return "{}" in self.hf[0].name

    def extents(self, sizes: Sizes) -> list[tuple[int, ...]]:
        """The extents of each HF tensor of the row."""
        return [tuple(sizes[dim] for dim in tensor.dims) for tensor in self.hf]

    def hf_names(self, sizes: Sizes) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield (name, extents) of every HF tensor of the row, expert after expert."""
        for expert in range(sizes["experts"] if self.per_expert else 1):
            for tensor, extents in zip(self.hf, self.extents(sizes), strict=True):
                yield tensor.name.format(expert), extents

    def views(self, sizes: Sizes, prefix: str) -> Iterator[tuple[str, View]]:
        """Yield (name, view) of every HF tensor of the row that files hold in another form.

        Args:
            prefix: the layer's prefix; the names begin with it.
        """
        experts = sizes["experts"] if self.per_expert else 0
        for tensor, extents in zip(self.hf, self.extents(sizes), strict=True):
            if tensor.file:
                for expert in range(experts or 1):
                    yield prefix + tensor.name.format(expert), tensor.file.view(extents, prefix, expert, experts)


VALUE_HEAD = Rule(
    REPLICATED,
    hf=(HfTensor("score.weight", ("value_head", "hidden")),),
    megatron="value_head.weight",
)
"""The row of a critic in every family. Its HF tensor is the head of transformers' classes
`...ForSequenceClassification` with one label."""


@dataclass(frozen=True, slots=True)
class Ignored:
    """Tensors of a checkpoint that the model does not need. They are counted and reported."""

    pattern: str
    """A regular expression that matches whole names. NUM_LAYERS stands for the model's number of layers."""
    reason: str

    def matches(self, name: str, shape: ModelShape) -> bool:
        return re.fullmatch(self.pattern.replace("NUM_LAYERS", str(shape.num_layers)), name) is not None
