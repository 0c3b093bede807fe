"""The parts of a Hugging Face folder that are not tensors: file names, index, configuration and tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron_rl.convert import tiktoken_files
from megatron_rl.data.tokenizer import padding_id
from megatron_rl.models import FAMILIES, critic_config
from megatron_rl.models.composite import read_config

MAX_FILE_BYTES = 4 * 2**30
COMPANIONS = (
    "generation_config.json",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "*_tokens*.json",
    "chat_template*",
)
"""The files that a model folder may hold in addition to weights and config.json, as glob patterns."""


def file_name(stem: str, i: int, num_files: int) -> str:
    return f"{stem}.safetensors" if num_files == 1 else f"{stem}-{i + 1:05d}-of-{num_files:05d}.safetensors"


def index_text(files: Sequence[Iterable[str]], total_bytes: int) -> str:
    """The content of the index file.

    Args:
        files: the names of the tensors in each file.
        total_bytes: the bytes of all tensors.
    """
    weight_map = {name: file_name("model", i, len(files)) for i, names in enumerate(files) for name in names}
    return json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": weight_map}, indent=2)


def companions(
    folder: Path,
    dtype: str | None,
    value_head: bool = False,
    multi_token: bool | None = None,
    has_tower: bool = False,
) -> dict[str, bytes]:
    """The contents of the configuration, tokenizer, chat template and generation configuration, by file name.
    config.json is the text model's, and loses its `quantization_config`, because no written tensor is quantised. A
    tokenizer of ranks and code becomes tokenizer.json.

    Args:
        dtype: the dtype that config.json is to name; None keeps the one that it names.
        value_head: config.json is to describe the same model with a value head.
        multi_token: whether a multi-token head is kept; None if there is none. Unless it is kept, config.json says that
            there is none, which some readers do not take for granted.
        has_tower: whether the folder keeps its vision tower, so that config.json is the whole model's.
    """
    config, fields = (folder / "config.json").read_bytes(), read_config(folder)
    head = FAMILIES[fields["model_type"]].multi_token
    is_left_out = head and not multi_token and (fields.get(head.key) or multi_token is False)
    if has_tower:
        if head and is_left_out:
            whole = json.loads(config)
            whole["text_config"][head.key] = 0
            config = json.dumps(whole, indent=2).encode()
        files = {path.name: path.read_bytes() for path in sorted(folder.glob("*preprocessor_config.json"))}
        return files | {"config.json": config} | _others(folder)
    is_quantised = fields.pop("quantization_config", None) is not None
    if dtype is not None:
        fields.pop("torch_dtype", None)  # the older name of the same key
        fields["dtype"] = dtype
    elif is_quantised and fields.get("dtype", fields.get("torch_dtype")) is None:
        fields["dtype"] = "bfloat16"  # the converter's for mxfp4
    if head and is_left_out:
        fields[head.key] = 0
    if value_head:
        fields = critic_config(fields, padding_id(folder))
    if fields != json.loads(config):
        config = json.dumps(fields, indent=2).encode()
    return {"config.json": config} | _others(folder)


def _others(folder: Path) -> dict[str, bytes]:
    """Tokenizer, chat template and generation configuration."""
    files = {}
    for pattern in COMPANIONS:
        for path in sorted(folder.glob(pattern)):
            if path.is_file():
                files[path.name] = path.read_bytes()
    return files | (tiktoken_files.tokenizer_files(folder) if tiktoken_files.is_needed(folder) else {})
