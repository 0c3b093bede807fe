"""vLLM's classes of models with a vision tower, for requests whose images are patches already.

vLLM would process an image itself, and count its tokens a second time. Here `data/pictures.py` does both, once for all,
and the engine gets ids with all image tokens. So vLLM needs none of transformers' processors, some of which need
torchvision, which the packages for CPUs lack: vLLM's modules import its names alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

import torch
from transformers import PretrainedConfig

from megatron_rl.data.pictures import Pictures
from megatron_rl.types import Picture, Vision

_IMPORTED = (
    "torchvision",
    "torchvision.transforms",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
)


def _stand_in_for_torchvision() -> None:
    """Let vLLM's modules import torchvision where it is not installed. Nothing calls it."""
    from transformers.utils.import_utils import is_torchvision_available

    if is_torchvision_available() or PathFinder.find_spec("torchvision"):  # transformers keeps its answer: no
        return
    for name in _IMPORTED:
        module = ModuleType(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None), []
        sys.modules[name] = module
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, module)


_stand_in_for_torchvision()

from vllm.inputs.engine import MultiModalInput, mm_input  # noqa: E402
from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration  # noqa: E402
from vllm.model_executor.models.qwen3_5 import (  # noqa: E402
    Qwen3_5ForCausalLM,  # noqa: F401 - worker
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForCausalLM,  # noqa: F401 - worker
    Qwen3_5MoeForConditionalGeneration,
)
from vllm.model_executor.models.qwen3_vl import (  # noqa: E402
    Qwen3VLDummyInputsBuilder,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMultiModalProcessor,
    Qwen3VLProcessingInfo,
)
from vllm.model_executor.models.qwen3_vl_moe import Qwen3VLMoeForConditionalGeneration  # noqa: E402
from vllm.multimodal import MULTIMODAL_REGISTRY  # noqa: E402
from vllm.multimodal.inputs import (  # noqa: E402
    MultiModalFieldConfig,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)


class ImageLimits(Qwen3VLProcessingInfo):  # type: ignore[misc]
    """What vLLM asks of the processor of a model before a request comes."""

    def get_hf_config(self) -> PretrainedConfig:
        found: PretrainedConfig = self.ctx.get_hf_config()
        return found

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        return dict.fromkeys(mm_counts, seq_len)


class FinishedImages(Qwen3VLMultiModalProcessor):  # type: ignore[misc]
    requires_tokenizer = False


_with_finished_images = MULTIMODAL_REGISTRY.register_processor(
    FinishedImages, info=ImageLimits, dummy_inputs=Qwen3VLDummyInputsBuilder
)
"""`worker.die_with_parent` gives vLLM these classes in place of its own."""


@_with_finished_images
class Qwen25VL(Qwen2_5_VLForConditionalGeneration):  # type: ignore[misc]
    pass


@_with_finished_images
class Qwen3VL(Qwen3VLForConditionalGeneration):  # type: ignore[misc]
    pass


@_with_finished_images
class Qwen3VLMoe(Qwen3VLMoeForConditionalGeneration):  # type: ignore[misc]
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a folder as it is published, or as transformers 5 writes it, with the matrices of experts transposed.
        vLLM knows the first."""
        return super().load_weights((name, self._published(name, tensor)) for name, tensor in weights)  # type: ignore

    def _published(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        axis = {"gate_up_proj": 1, "down_proj": 2}.get(name.rpartition(".")[2])
        is_other = axis and tensor.shape[axis] != self.config.text_config.hidden_size
        return tensor.transpose(1, 2) if is_other else tensor


@_with_finished_images
class Qwen35(Qwen3_5ForConditionalGeneration):  # type: ignore[misc]
    pass


@_with_finished_images
class Qwen35Moe(Qwen3_5MoeForConditionalGeneration):  # type: ignore[misc]
    pass


def request_of(ids: Sequence[int], pictures: Sequence[Picture], vision: Vision, files: Pictures) -> MultiModalInput:
    """vLLM's input of a prompt whose ids have all tokens of its images."""
    offset, items, places = 0, [], []
    for picture in pictures:
        offset = ids.index(vision.image_token, offset)
        items.append(_item(torch.from_numpy(files.patches(picture)), picture))
        places.append(PlaceholderRange(offset=offset, length=vision.num_tokens(picture)))
        offset += places[-1].length
    hashes = {"image": [picture.digest for picture in pictures]}
    return mm_input(list(ids), MultiModalKwargsItems({"image": items}), hashes, {"image": places})


def _item(patches: torch.Tensor, picture: Picture) -> MultiModalKwargsItem:
    grid = torch.tensor([[1, picture.num_rows, picture.num_columns]])
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", grid.prod(-1)),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    [item] = MultiModalKwargsItems.from_hf_inputs({"pixel_values": patches, "image_grid_thw": grid}, fields)["image"]
    return item
