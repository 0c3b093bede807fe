"""A small model with a vision tower, and rows with images."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path

import numpy as np
import PIL.Image
import torch
import transformers
from composites import DELTA, EXPERTS, GATED, TEXT, TOWER
from safetensors.torch import load_file, save_file
from tiny_chat import characters
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from megatron_rl.data.pictures import Pictures
from megatron_rl.types import Tokens

ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
"""Of heads of 32 dims, the smallest that vLLM's attention has on CPUs."""
TEMPLATE = (
    "{% for m in messages %}<turn>{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<end>{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant:{% endif %}"
)
LETTERS = characters()
SPECIAL = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
LETTERS.add_special_tokens([AddedToken(one, special=True) for one in SPECIAL])
START, IMAGE_TOKEN, END, VIDEO = (LETTERS.token_to_id(one) for one in SPECIAL)
PROCESSOR = dict(patch_size=4, merge_size=2, temporal_patch_size=1, image_mean=[0.5] * 3, image_std=[0.5] * 3)
PROCESSOR |= dict(size={"shortest_edge": 64, "longest_edge": 1024})


TOWERS = {
    "qwen2_5_vl": dict(out_hidden_size=128, window_size=16, fullatt_block_indexes=[1]),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), dict(deepstack_visual_indexes=[0, 1])),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), {}),
}
"""What only this tower has. A window has two tokens of a side."""
QUARTER = {"partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}
OF_DELTA = (
    {"mtp_num_hidden_layers": 1}
    | DELTA
    | dict(linear_key_head_dim=64, linear_value_head_dim=64, rope_parameters=ROPE | QUARTER, head_dim=32)
)
"""vLLM's kernel on CPUs knows heads of linear attention of 64 dims and of 128."""
MODELS = {
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        dict(hidden_size=128, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None),
    ),
    "qwen3_vl": ("Qwen3VL", {"tie_word_embeddings": True}),
    "qwen3_vl_moe": ("Qwen3VLMoe", EXPERTS | {"moe_intermediate_size": 24, "norm_topk_prob": True}),
    "qwen3_5": ("Qwen3_5", OF_DELTA | {"tie_word_embeddings": True}),
    "qwen3_5_moe": ("Qwen3_5Moe", OF_DELTA | GATED | {"tie_word_embeddings": False}),
}
"""The beginning of the names of transformers' classes, and what only this text model has."""


def write_model(folder: Path, kind: str = "qwen3_vl", **tower: int) -> transformers.PreTrainedModel:
    """A model of four layers, as it is published; its tower has three, and one of a Qwen3-VL adds to the outputs of
    two.

    Args:
        tower: more keys of `vision_config`.
    """
    name, own = MODELS[kind]
    text = (
        TEXT
        | {
            "max_position_embeddings": 512,
            "vocab_size": LETTERS.get_vocab_size() + 3,
            "head_dim": 32,
            "rope_parameters": ROPE,
        }
        | own
    )
    config = getattr(transformers, f"{name}Config")(
        text_config=text,
        vision_config=TOWER | {"depth": 3} | TOWERS[kind] | tower,
        tie_word_embeddings=text["tie_word_embeddings"],
        dtype="float32",
        image_token_id=IMAGE_TOKEN,
        vision_start_token_id=START,
        vision_end_token_id=END,
        video_token_id=VIDEO,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    for tensor in model.state_dict().values():
        tensor.normal_(0, 0.2)
        if OF_DELTA.items() <= own.items():
            tensor.copy_(tensor.bfloat16())  # the dtype of its engines
    model.save_pretrained(folder)
    as_published(folder)
    (folder / "preprocessor_config.json").write_text(
        json.dumps(PROCESSOR | {"image_processor_type": "Qwen2VLImageProcessor"})
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=LETTERS, eos_token="<end>", pad_token="<unk>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    return model


def as_published(folder: Path) -> None:
    """Write the model again in the form that the hub has."""
    path = folder / "config.json"
    config, published = json.loads(path.read_text()), {}
    if config["model_type"] == "qwen2_5_vl":
        text = config.pop("text_config") | {"model_type": "qwen2_5_vl"}
        rope = text.pop("rope_parameters")
        text |= {"rope_theta": rope["rope_theta"]}
        text |= {"rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}}
        path.write_text(json.dumps(text | config))
    for name, tensor in load_file(folder / "model.safetensors").items():
        is_other = ".experts." in name and config["model_type"] == "qwen3_vl_moe"
        published[name] = tensor.transpose(1, 2).contiguous() if is_other else tensor
    save_file(published, folder / "model.safetensors", metadata={"format": "pt"})


def drawing(height: int, width: int, seed: int) -> PIL.Image.Image:
    return PIL.Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def row(pictures: Pictures, parts: list, seed: int) -> Tokens:
    """Random tokens of text, as many as a number says, and images; the text after the last image is the answer."""
    rng = np.random.default_rng(seed)
    ids: list[int] = []
    own = []
    for part in parts:
        if isinstance(part, int):
            ids += rng.integers(0, IMAGE_TOKEN, part).tolist()
            continue
        part.save(data := BytesIO(), "png")
        own.append(pictures.add(data.getvalue()))
        ids += [START, *[IMAGE_TOKEN] * (own[-1].num_rows * own[-1].num_columns // 4), END]
    length = len(ids)
    mask = np.arange(length) >= length - parts[-1]
    mask[0] = False
    version = np.where(mask, 0, -1).astype(np.int32)
    return Tokens(np.array(ids, np.int32), mask, np.zeros(length, np.float32), version, pictures=tuple(own))
