"""How a model is split over ranks, and what a rank has on its GPU in each phase of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Phase = Literal["training", "weight sync", "generating", "scoring"]
"""What the GPUs of a run do. Where trainers and engines share them, a phase decides who has the memory: while training
the trainers have all, while pushing both have their weights, while generating the engines have all, and while scoring
the engines of one teacher."""
HOLDS: dict[str, dict[Phase, tuple[str, ...]]] = {
    "trainer": {
        "training": ("weights", "optimizer", "gradients"),
        "weight sync": ("weights",),
        "generating": (),
        "scoring": (),
    },
    "critic": {"training": ("weights", "optimizer", "gradients"), "weight sync": (), "generating": (), "scoring": ()},
    "engine": {"training": (), "weight sync": ("weights",), "generating": ("weights", "kv_cache"), "scoring": ()},
    "teacher": {"training": (), "weight sync": (), "generating": (), "scoring": ("weights", "kv_cache")},
}
"""What a rank has on a GPU that it shares, in each phase. A critic's weights are never pushed. The parts of
engines are vLLM's tags."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """The number of parts into which a model is split along each axis, and which rank holds which part. The order of
    the ranks is Megatron-Core's `tp-cp-ep-dp-pp`.

    The world size is tensor x context x data x pipeline. The rank along the tensor axis changes fastest, then context,
    data and pipeline. For the experts the same ranks of a stage have other axes: expert_tensor changes fastest, then
    expert, then tensor x context x data / (expert_tensor x expert) replicas.

    Example: with tensor 2, data 4 and expert 4, ranks 0 and 1 share the first quarter of the experts, and ranks 2 and 3
    share the second quarter.

    Raises:
        ValueError: the sizes do not fit together.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1
    """The number of ranks over which the experts of a layer are distributed."""
    expert_tensor: int | None = None
    """The number of ranks over which each expert is split. None means the same number as `tensor`, which is Megatron's
    default; 1 is usual for small experts."""
    virtual: int = 1
    """The number of model chunks in each stage, for the interleaved schedule."""
    layers: tuple[int, ...] | Literal["auto"] | None = None
    """The number of layers in each chunk, in the order of depth: chunk 0 of every stage, then chunk 1 of every stage.
    None means that all chunks have the same number. A recipe replaces `auto` by numbers as soon as it knows the
    model."""

    def __post_init__(self) -> None:
        ways = (self.tensor, self.pipeline, self.data, self.context, self.expert, self.virtual, self.expert_ways)
        if min(ways) < 1:
            raise ValueError(f"{self}: every size must be at least 1")
        if self.stage_size % (self.expert * self.expert_ways):
            raise ValueError(
                f"{self}: tensor x context x data = {self.stage_size} is not a multiple of expert x expert_tensor = "
                f"{self.expert} x {self.expert_ways}; set expert_tensor to 1, or change the sizes"
            )
        if self.virtual > 1 and self.pipeline == 1:
            raise ValueError(f"{self}: virtual stages need a pipeline of at least 2; set virtual to 1")
        if isinstance(self.layers, tuple) and len(self.layers) != self.num_chunks:
            raise ValueError(f"{self}: layers must have {self.num_chunks} entries, one for each chunk")

    @property
    def stage_size(self) -> int:
        """The number of ranks in a pipeline stage."""
        return self.tensor * self.context * self.data

    @property
    def world_size(self) -> int:
        return self.stage_size * self.pipeline

    @property
    def expert_ways(self) -> int:
        """`expert_tensor`, with None replaced by its default."""
        return self.tensor if self.expert_tensor is None else self.expert_tensor

    @property
    def num_chunks(self) -> int:
        return self.pipeline * self.virtual

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """The (tensor, pipeline, data) rank of a global rank."""
        return rank % self.tensor, rank // self.stage_size, rank // (self.tensor * self.context) % self.data

    def context_rank(self, rank: int) -> int:
        return rank // self.tensor % self.context

    def expert_coordinates(self, rank: int) -> tuple[int, int, int]:
        """The (expert_tensor, expert, expert data) rank of a global rank inside its stage."""
        within = rank % self.stage_size
        return (
            within % self.expert_ways,
            within // self.expert_ways % self.expert,
            within // self.expert_ways // self.expert,
        )

    def layer_range(self, num_layers: int, stage: int, chunk: int = 0) -> range:
        """The layers of the model that a chunk holds.

        Args:
            num_layers: the number of layers of the whole model.

        Raises:
            ValueError: the number of chunks does not divide the number of layers, or `layers` does not add up to it.
        """
        layers = self.layers
        assert layers != "auto", "the recipe should have replaced `auto`"
        if layers is None:
            if num_layers % self.num_chunks:
                raise ValueError(
                    f"the model has {num_layers} layers, which policy.parallel.pipeline={self.pipeline} does not divide"
                    + (f" into {self.virtual} chunks a stage" if self.virtual > 1 else "")
                    + "; set policy.parallel.layers to auto, or to the number of layers of each"
                )
            layers = (num_layers // self.num_chunks,) * self.num_chunks
        elif sum(layers) != num_layers or min(layers) < 0:
            raise ValueError(f"the chunks {layers} hold {sum(layers)} layers, the model has {num_layers}")
        depth = chunk * self.pipeline + stage
        start = sum(layers[:depth])
        return range(start, start + layers[depth])


class Division(NamedTuple):
    """What an axis of a mesh divides."""

    name: str
    """The word for it in errors."""
    number: int
    ways: int
    axis: str
    """The name of the axis in `policy.parallel`."""
