"""The blocks of hybrid models whose layers have one block each (Nemotron-H, arXiv:2504.03624): Mamba-2, an MLP and
experts with a squared ReLU, and what stands in the place of the block that a layer does not have.

An absent block has no heads, or the size 0. So it has no work, keeps nothing, and every mesh divides it: what sums over
the blocks of a layer needs no case for it. Its norm is absent, too.

A manifest (convert/manifest.py) has the fields of blocks, and no names of classes. So a block that is also another one
has one more field, by which it is read back as what it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_rl.types.blocks import DELTA_CHUNK, DeltaNet, GatedMlp, Mixture
from megatron_rl.types.mesh import Division, Mesh


@dataclass(frozen=True, slots=True)
class Mamba2(DeltaNet):
    """Mamba-2 (Dao and Gu 2024, arXiv:2405.21060): linear attention like `DeltaNet`'s, whose state decays and gets new
    values, but without the delta rule. The paper calls q, k and v of a token C, B and x: the groups of B and C are the
    key heads, the size of a state is the size of a key, and the heads of x are the value heads. The decay and the
    factor of x follow from one step size for each head, which the input gives."""

    interleaved: bool = False
    rule: Literal["sum"] = "sum"
    """The state becomes the sum of the old one and what a token writes."""

    @property
    def channels(self) -> int:
        """The channels of the convolution: x, B and C."""
        return self.value_width + 2 * self.key_width

    @property
    def context_width(self) -> int:
        """See `DeltaNet`."""
        return 2 * (self.value_width + self.key_width) + self.num_value_heads

    def sizes(self) -> dict[str, int]:
        """See `ModelShape.sizes`."""
        return {
            "mamba_groups": self.num_key_heads,
            "mamba_key": self.key_width,
            "mamba_value": self.value_width,
            "mamba_channels": self.channels,
            "mamba_input": self.value_width + self.channels + self.num_value_heads,
            "mamba_heads": self.num_value_heads,
            "convolution": self.convolution,
        }

    def divisions(self, mesh: Mesh) -> list[Division]:
        """Each rank of a context group computes a part of its groups."""
        groups, name = self.num_key_heads, "groups of Mamba-2"
        of_rank = f"{name} on a tensor-parallel rank"
        return [
            Division(name, groups, mesh.tensor, "tensor"),
            Division(of_rank, groups // mesh.tensor, mesh.context, "context"),
        ]

    def multiplications(self, hidden: int) -> int:
        """The multiplications of one token in the weights, and in the recurrence in whole chunks of C tokens
        (actor/mamba.py). A group multiplies each C with the B of all tokens of the chunk. A head adds up the C values
        of the chunk, reads the state once and changes it once."""
        key, value = self.key_size, self.value_size
        projections = hidden * (self.value_width + self.channels + self.num_value_heads + self.value_width)
        of_heads = DELTA_CHUNK * value + 2 * key * value
        return projections + self.num_key_heads * DELTA_CHUNK * key + self.num_value_heads * of_heads


@dataclass(frozen=True, slots=True)
class SquaredReluMlp(GatedMlp):
    """An MLP of two matrices: down(relu(up(x))^2) (Primer, arXiv:2109.08668). It is a gated MLP whose gate is the ReLU
    of up itself."""

    unit: Literal["squared_relu"] = "squared_relu"

    def multiplications(self, hidden: int) -> int:
        """The multiplications of one token."""
        return 2 * hidden * self.size

    def inner_width(self, hidden: int, tensor: int, expert_parallel: bool) -> float:
        """The elements of a token in an engine: up and its square."""
        return 2 * (self.size / tensor)


@dataclass(frozen=True, slots=True)
class SquaredReluMixture(Mixture):
    """A mixture of experts, routed and shared ones, that are each a `SquaredReluMlp`."""

    unit: Literal["squared_relu"] = "squared_relu"

    def multiplications(self, hidden: int) -> int:
        """The multiplications of one token."""
        width = self.num_active * self.ffn_size + self.shared_ffn_size
        return hidden * self.num_experts + 2 * hidden * width

    def inner_width(self, hidden: int, tensor: int, expert_parallel: bool) -> float:
        """See `Mixture`: the rows of up are half as wide as the ones of gate and up."""
        inner = self.ffn_size / (1 if expert_parallel else tensor)
        return self.num_active * 2 * max(inner, hidden) + hidden


NO_ATTENTION = Mamba2(num_key_heads=0, num_value_heads=0, key_size=0, value_size=0, convolution=0)
"""What stands in the place of attention in a layer with an MLP only."""
NO_MLP = SquaredReluMlp(0)
"""What stands in the place of the MLP in a layer with attention or Mamba-2 only."""


def is_absent(block: object) -> bool:
    return block in (NO_ATTENTION, NO_MLP)
