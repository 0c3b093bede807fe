"""The multi-token head of a family: the layers that predict tokens after the next one.

A run or a conversion carries the head as it is, or leaves it out. The actor can also train a head of one layer
(DeepSeek-V3, arXiv:2412.19437, section 2.2); its tensors are then rows of the model (`ModelShape.multi_token`). The
last pipeline stage has them, and a copy of the embedding if it is not the first stage, too.

Invariants (tests/unit/models): the rows name every tensor of a published head but its copies of embedding and output
layer; the shards of all ranks partition them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megatron_rl.models.rule import HfTensor, Ignored, Rule
from megatron_rl.models.splits import REPLICATED
from megatron_rl.models.view import FileTensor, View
from megatron_rl.types import ModelShape

HEAD_LAYER = "mtp.layers.0."
"""What the names of a head's parameters begin with, as in Megatron."""
HEAD_EMBEDDING = "mtp.embedding.word_embeddings.weight"
"""The name of the embedding that the head reads on a last stage that is not the first one. It is a copy, which is not
trained."""


def is_of_head(local_name: str) -> bool:
    """Whether a parameter of a trainer belongs to its multi-token head."""
    return ".mtp." in f".{local_name}"


@dataclass(frozen=True, slots=True)
class MultiTokenHead(Ignored):
    """The tensors of a family's head."""

    key: str
    """The key of config.json with the number of its layers, as vLLM reads it (config/speculative.py)."""
    prefix: str = ""
    """What the HF names begin with; NUM_LAYERS as in `pattern`."""
    layer: str = ""
    """What the HF names of its layer's tensors have after `prefix`."""
    rows: tuple[Rule, ...] = ()
    """The rows around its layer: three norms and a matrix."""
    copies: tuple[tuple[str, Literal["embedding", "output"]], ...] = ()
    """The names after the prefix under which files have the embedding and the output layer a second time. They are
    never read. They are always written, because vLLM's class of DeepSeek-V3's head refuses a folder without them."""

    def rules(self, layer: Sequence[Rule]) -> list[Rule]:
        """The rows of a head that is trained.

        Args:
            layer: the rows of a layer after the last one.
        """
        return [*map(self._moved, layer), *self.rows]

    def _moved(self, rule: Rule) -> Rule:
        inner = "transformer_layer."
        return replace(
            rule,
            hf=tuple(replace(tensor, name=self.layer + tensor.name) for tensor in rule.hf),
            megatron=inner + rule.megatron,
            fused=rule.fused and inner + rule.fused,
        )

    def own_name(self, hf_name: str) -> str:
        """The name without what stands in front of the names of rows."""
        return hf_name.removeprefix(self.prefix).removeprefix(self.layer)

    def hf_prefix(self, shape: ModelShape) -> str:
        return self.prefix.replace("NUM_LAYERS", str(shape.num_layers))

    def copied(self, shape: ModelShape, ends: Mapping[str, Rule]) -> Iterator[tuple[str, FileTensor]]:
        """Yield the copies, by name.

        Args:
            ends: the rows of the embedding and of the output layer.
        """
        for ending, end in self.copies:
            name = self.hf_prefix(shape) + ending
            [(held, extents)] = ends[end].hf_names(shape.sizes())
            yield name, FileTensor(extents, {held: View(name, extents, 0, (extents[1], 1))})


def head_rows(embedding_norm: str, hidden_norm: str, projection: str, last_norm: str) -> tuple[Rule, ...]:
    """The rows around a head's layer.

    Args:
        projection: the HF name of the matrix that makes one vector of the embedding, which is first, and the hidden
            state.
    """
    width = ("hidden",)
    return (
        Rule(REPLICATED, hf=(HfTensor(embedding_norm, width),), megatron="enorm.weight"),
        Rule(REPLICATED, hf=(HfTensor(hidden_norm, width),), megatron="hnorm.weight"),
        Rule(REPLICATED, hf=(HfTensor(projection, ("hidden", "two_hidden")),), megatron="eh_proj.weight"),
        Rule(REPLICATED, hf=(HfTensor(last_norm, width),), megatron="final_layernorm.weight"),
    )
