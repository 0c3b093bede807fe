"""Reads a GGUF file, the form of llama.cpp, into a Hugging Face folder.

transformers and the package gguf do the reading: names, the order of rotary dimensions, blocks, tokenizer. What they
silently ignore is checked here. A quantised file gives a dequantised model: its values are the ones that the blocks
stand for, and config.json says so under `dequantised_from`.

Invariants (tests/e2e/test_real_model.py): the folder has every value of the file, each as the formula of
its kind gives it, and rounded once to the dtype; a value that cannot be carried over is an error that names it.
"""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.convert.source import open_checkpoint
from megatron_rl.convert.work import require_new
from megatron_rl.models import FAMILIES

PACKAGES = ("gguf", "accelerate")
"""What transformers needs to read GGUF."""
PLAIN = ("F32", "F16", "BF16")
KINDS = (*PLAIN, "Q8_0", "Q4_1", "Q4_0")
"""The kinds of tensors whose values the tests compare."""
ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""GGUF's names of the families that the tests compare. A Mixtral is a `llama` there, too, and is refused."""
GPT2_SPLITS = ("default", "gpt-2", "gpt2")
"""`tokenizer.ggml.pre` of vocabularies that split text as GPT-2 does, which transformers takes for all that it does not
know."""
SPLITS_OF_DIGITS = ("smollm",)
"""`tokenizer.ggml.pre` of vocabularies that split off each digit first, which transformers does not know."""


@dataclass(frozen=True)
class Dequantised:
    """What was read."""

    family: str
    kinds: dict[str, int]
    """The number of tensors of each kind, the most frequent one first."""
    num_parameters: int
    notes: tuple[str, ...]
    """Sentences about what the folder may lack."""

    @property
    def is_quantised(self) -> bool:
        """Whether the file holds blocks, so that the folder has what they stand for."""
        return not set(self.kinds) <= set(PLAIN)

    @property
    def described(self) -> str:
        return ", ".join(f"{kind} ({count} tensor{'s' * (count > 1)})" for kind, count in self.kinds.items())


def from_gguf(file: Path, target: Path, dtype: str = "float32") -> Dequantised:
    """Write a Hugging Face folder with the model, the tokenizer and the chat template of a GGUF file.

    Args:
        target: a folder that does not exist yet. It is whole or absent, however this ends.
        dtype: the dtype of all tensors, such as `bfloat16`.

    Raises:
        ValueError: the target exists, a package is missing, or the file is damaged or has something that cannot be
            carried over.
    """
    require_new(target)
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise ValueError(
            f"GGUF files are read with the packages {' and '.join(PACKAGES)}, and this Python lacks "
            f"{' and '.join(missing)}: pip install {' '.join(missing)}"
        )
    fields, tensors, num_values = _header(file)
    kinds = dict(Counter(tensors.values()).most_common())
    _check(file, fields, tensors)
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    read, info = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=getattr(torch, dtype), output_loading_info=True
    )
    if missing_keys := sorted(info["missing_keys"]):
        raise ValueError(f"{file} lacks {len(missing_keys)} tensors of the model that it describes: {missing_keys[0]}")
    num_parameters = sum(parameter.numel() for parameter in read.parameters())
    if num_parameters != num_values:
        raise ValueError(
            f"{file} holds {num_values:,} values, but {num_parameters:,} have a place in a {read.config.model_type}: "
            "the model is a variant that is not known; take its release as a Hugging Face folder"
        )
    result = Dequantised(read.config.model_type, kinds, num_parameters, _notes(fields))

    # transformers does not save what it has read from GGUF, so a plain model of the same configuration takes the state.
    settings = read.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(key, None)
    # The file has float32, and 1e-5 in float32 is 9.999999747378752e-06.
    settings |= {key: float(str(np.float32(value))) for key, value in settings.items() if isinstance(value, float)}
    if "head_dim" in settings:  # transformers takes the default of some families
        settings["head_dim"] = fields.get(
            f"{fields['general.architecture']}.attention.key_length", settings["head_dim"]
        )
    if result.is_quantised:
        settings["dequantised_from"] = f"{file.name}: {result.described}"
    config = AutoConfig.for_model(**settings)
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))  # type: ignore[no-untyped-call]
    plain.load_state_dict(read.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=_ends(fields), pad_token_id=config.pad_token_id
    )
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a conversion that was killed
    plain.save_pretrained(partial)
    _tokenizer(file, fields).save_pretrained(partial)
    open_checkpoint(partial)  # every tensor of the family is there, in its extents
    partial.rename(target)
    return result


def _header(file: Path) -> tuple[dict[str, Any], dict[str, str], int]:
    """The fields without long lists, the kind of each tensor, and the number of all values.

    Raises:
        ValueError: the file is no GGUF file, or is damaged.
    """
    from gguf import GGUFReader

    if not file.is_file():
        raise ValueError(f"{file} is no file; give a .gguf file")
    try:
        reader = GGUFReader(file)
    except (ValueError, IndexError, KeyError) as error:
        raise ValueError(f"{file} cannot be read as GGUF ({error}); copy it again") from error
    # A list has one part for each entry; a text or a number has one in all.
    fields = {name: field.contents() for name, field in reader.fields.items() if len(field.data) == 1}
    tensors = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    return fields, tensors, sum(int(tensor.n_elements) for tensor in reader.tensors)


def _check(file: Path, fields: dict[str, Any], tensors: dict[str, str]) -> None:
    """
    Raises:
        ValueError: the file has an architecture, a kind or a scaling that is not read.
    """
    architecture = fields.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"{file} has the architecture {architecture}, of which no GGUF is read (only {', '.join(ARCHITECTURES)}); "
            f"take its release as a Hugging Face folder (families: {', '.join(FAMILIES)})"
        )
    if unknown := {name: kind for name, kind in tensors.items() if kind not in KINDS}:
        name, kind = next(iter(unknown.items()))
        raise ValueError(
            f"{file}: {len(unknown)} tensors are in a quantisation that is not read, such as {name} in {kind}; take a "
            f"file in {', '.join(KINDS[:-1])} or {KINDS[-1]}"
        )
    scaling = fields.get(f"{architecture}.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in tensors:
        raise ValueError(
            f"{file} scales the frequencies of its rotary positions, which transformers leaves out when it reads GGUF; "
            "take the model's release as a Hugging Face folder"
        )


def _ends(fields: dict[str, Any]) -> int | list[int] | None:
    """The tokens that end an answer: of the sequence and, where the file tells them apart, of a turn."""
    named = (fields.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot"))
    ids = list(dict.fromkeys(int(token) for token in named if token is not None))
    return ids[0] if len(ids) == 1 else ids or None


def _notes(fields: dict[str, Any]) -> tuple[str, ...]:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    notes = []
    split = fields.get("tokenizer.ggml.pre", "default")
    is_bytes = fields.get("tokenizer.ggml.model") == "gpt2"
    if is_bytes and split not in {*GGUF_PRE_TOKENIZER_SPLITS, *GPT2_SPLITS, *SPLITS_OF_DIGITS}:
        notes.append(
            f"the file's way to split text, {split!r}, is not known, and GPT-2's takes its place: copy tokenizer.json "
            "from the model's release"
        )
    if "tokenizer.chat_template" not in fields:
        notes.append("the file has no chat template")
    return tuple(notes)


def _tokenizer(file: Path, fields: dict[str, Any]) -> Any:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    if fields.get("tokenizer.ggml.pre") in SPLITS_OF_DIGITS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    for key in ("is_local", "local_files_only"):  # how it was read says nothing about what it is
        tokenizer.init_kwargs.pop(key, None)
    return tokenizer
