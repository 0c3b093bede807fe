"""The vision tower of the first pipeline stage: transformers' own module, with frozen weights, in every rank of the
stage. What it computes of an image takes the place of the embeddings of the image's tokens, and is added to the outputs
of the first layers (DeepStack).

Invariant (tests/ranks): log-probs and gradients equal transformers' for the whole model, in every layout.

Shape letters: M image tokens of a row, I of a rank, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor, nn

from megatron_rl.actor import platform
from megatron_rl.actor.spec import ActorSpec
from megatron_rl.actor.tower_weights import tower_weights
from megatron_rl.data.pictures import Pictures
from megatron_rl.types import MOST_SEEN_BYTES, Picture, Vision


class SeenImages(NamedTuple):
    """What a tower has computed for the image tokens that a rank has of a row."""

    index_I: Tensor
    """int64: their places among the rank's tokens."""
    embedding_IH: Tensor
    deep: tuple[Tensor, ...]
    """[I, H] each: what is added to the output of the first layers."""


class Tower:
    def __init__(self, folder: Path, pictures: Pictures, dtype: torch.dtype) -> None:
        """
        Args:
            folder: the Hugging Face folder of the whole model.

        Raises:
            ValueError: the folder does not hold the weights of its tower.
        """
        from transformers import AutoConfig, AutoModel

        self._pictures, self._dtype = pictures, dtype
        config = AutoConfig.from_pretrained(folder).vision_config
        build: Any = AutoModel.from_config
        self._module: nn.Module = build(config, dtype=dtype).eval().requires_grad_(False)
        self._module.load_state_dict(tower_weights(folder, dtype))
        self._module.to(platform.device())
        self._known: dict[str, tuple[Tensor, ...]] = {}
        """What it has computed, by the digests of the images. It never changes, because the tower is frozen."""

    @torch.no_grad()
    def outputs(self, pictures: Sequence[Picture]) -> list[Tensor]:
        """[M, H] each: the embeddings of the tokens of these images in turn, and what each of the first layers adds."""
        if sum(part.nbytes for parts in self._known.values() for part in parts) > MOST_SEEN_BYTES:
            self._known.clear()
        for picture in pictures:
            if picture.digest not in self._known:
                patches = torch.from_numpy(self._pictures.patches(picture)).to(platform.device(), self._dtype)
                grid = torch.tensor([[1, picture.num_rows, picture.num_columns]], device=platform.device())
                out = self._module(patches, grid_thw=grid)
                self._known[picture.digest] = (out.pooler_output, *getattr(out, "deepstack_features", ()))
        return [torch.cat(parts) for parts in zip(*(self._known[one.digest] for one in pictures), strict=True)]


def tower_of(spec: ActorSpec, stage: int) -> Tower | None:
    """The tower of a rank of the first stage, if the model sees images."""
    if stage or spec.shape.vision is None:
        return None
    folder = Path(spec.model.path)
    return Tower(folder, Pictures(folder, Path(spec.pictures)), getattr(torch, spec.model.dtype))


def add_deep(gpt: GPTModel, vision: Vision) -> None:
    """Let the first layers add what the tower computes. They are all on the first stage (`divisions.check_mesh`)."""
    for number in range(vision.num_deep):
        gpt.decoder.layers[number].register_forward_hook(partial(_added, number), with_kwargs=True)


def _added(number: int, layer: nn.Module, arguments: Any, options: dict[str, Any], output: Any) -> Any:
    seen: SeenImages | None = options["packed_seq_params"].images
    if seen is None or not len(seen.index_I):
        return output
    hidden_t1H, *others = output
    return (hidden_t1H.index_add(0, seen.index_I, seen.deep[number][:, None].to(hidden_t1H.dtype)), *others)
