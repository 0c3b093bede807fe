"""The vision tower of the first pipeline stage: transformers' own module, whole in every rank of the stage. What it
computes of an image takes the place of the embeddings of the image's tokens, and is added to the outputs of the first
layers (DeepStack).

A trained tower is a part of the model (`GPTModel.visual`), with a row in the family's table for each of its tensors. A
rank has the gradient of its own tokens, and the ranks' gradients are added up as those of norms are.

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
    deep: Sequence[Tensor]
    """[I, H] each: what is added to the output of the first layers."""


class Tower:
    def __init__(self, module: nn.Module, pictures: Pictures, dtype: torch.dtype) -> None:
        self._module, self._pictures, self._dtype = module, pictures, dtype
        self.trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        """All of its parameters, or none if it is frozen."""
        self._known: dict[str, tuple[Tensor, ...]] = {}
        """What a frozen tower has computed, by the digests of the images. It never changes."""

    def outputs(self, pictures: Sequence[Picture]) -> list[Tensor]:
        """[M, H] each: the embeddings of the tokens of these images in turn, and what each of the first layers adds."""
        known: dict[str, tuple[Tensor, ...]] = {} if self.trained else self._known
        if sum(part.nbytes for parts in known.values() for part in parts) > MOST_SEEN_BYTES:
            known.clear()
        for picture in pictures:
            if picture.digest not in known:
                patches = torch.from_numpy(self._pictures.patches(picture)).to(platform.device(), self._dtype)
                grid = torch.tensor([[1, picture.num_rows, picture.num_columns]], device=platform.device())
                out = self._module(patches, grid_thw=grid)
                known[picture.digest] = (out.pooler_output, *getattr(out, "deepstack_features", ()))
        return [torch.cat(parts) for parts in zip(*(known[one.digest] for one in pictures), strict=True)]


def build_tower(folder: Path, dtype: torch.dtype, recompute: bool) -> nn.Module:
    """The module of the tower of the whole model in a Hugging Face folder, without its weights.

    Args:
        recompute: it keeps the inputs of its layers alone, and computes them again in the backward pass.
    """
    from transformers import AutoConfig, AutoModel

    build: Any = AutoModel.from_config
    module: Any = build(AutoConfig.from_pretrained(folder).vision_config, dtype=dtype).eval()
    if recompute:
        module.train()  # transformers asks for it, and the tower has no dropout
        module.gradient_checkpointing_enable({"use_reentrant": False})
    on_device: nn.Module = module.to(platform.device())
    return on_device


def tower_of(spec: ActorSpec, stage: int, gpt: Any) -> Tower | None:
    """The tower of a rank of the first stage, if the model sees images.

    Args:
        gpt: the rank's first model, which has the tower if it is trained.

    Raises:
        ValueError: a tower is frozen, and the model's folder does not hold its weights.
    """
    if stage or spec.shape.vision is None:
        return None
    folder, dtype = Path(spec.model.path), getattr(torch, spec.model.dtype)
    if spec.shape.vision.trained:
        module = gpt.visual
    else:
        module = build_tower(folder, dtype, recompute=False).requires_grad_(False)
        weights = tower_weights(folder, dtype)
        if missing := module.state_dict().keys() - weights.keys():
            raise ValueError(
                f"model.path: {folder} lacks {len(missing)} tensors of its vision tower, which a checkpoint leaves out "
                "if it is frozen; set model.path to the folder of the whole model"
            )
        module.load_state_dict(weights)
    return Tower(module, Pictures(folder, Path(spec.pictures)), dtype)


def beside(hidden: Tensor, others: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The first layer's input as it is, and copies of other tensors, which layers may read.

    In the backward pass the input's gradient is complete when all layers have computed theirs, also if a layer is
    computed again there. The others then get the gradients of their copies, or zeros: every parameter of a tower takes
    part in each backward pass, because the reduction over the ranks waits for all of them.
    """
    copies = [other.detach().requires_grad_(other.requires_grad) for other in others]
    output: Tensor = _Beside.apply(hidden, copies, *others)  # type: ignore[no-untyped-call]  # torch has no types
    return output, copies


class _Beside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, copies: Sequence[Tensor], *others: Tensor) -> Tensor:
        ctx.copies = copies
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, None, *(torch.zeros_like(copy) if copy.grad is None else copy.grad for copy in ctx.copies)


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
