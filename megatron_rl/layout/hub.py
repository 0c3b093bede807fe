"""A Hugging Face folder as numbers: config.json to ModelShape, and the index of its safetensors.

Damaged or foreign folders fail here, with the file and the reason, before anything starts.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

from megatron_rl.layout.families import FAMILIES
from megatron_rl.types import Mesh, ModelShape


def read_shape(folder: Path) -> ModelShape:
    """Sizes from a checkpoint folder's config.json, or from a JSON file of that form.

    Raises:
        ValueError: the folder or its config.json is missing or unreadable, or the family is unknown.
    """
    path = folder if folder.suffix == ".json" else folder / "config.json"
    if not path.is_file():
        raise ValueError(f"model.path: {folder} has no config.json; give the folder of a Hugging Face checkpoint")
    try:
        config = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON ({error}); copy the checkpoint again") from error
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"{path}: model_type {family!r} is not supported; supported: {', '.join(sorted(FAMILIES))}")
    try:
        heads = config["num_attention_heads"]
        rope = config.get("rope_parameters") or {}
        return ModelShape(
            family=family,
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads", heads),
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            ffn_size=config["intermediate_size"],
            vocab_size=config["vocab_size"],
            # transformers 5 writes rope_parameters, earlier ones rope_theta
            rope_theta=float(rope["rope_theta"] if "rope_theta" in rope else config["rope_theta"]),
            norm_eps=config["rms_norm_eps"],
            max_positions=config["max_position_embeddings"],
            tied_embeddings=config.get("tie_word_embeddings", False),
        )
    except KeyError as error:
        raise ValueError(f"{path}: the key {error} is missing; is this the config.json of a {family} model?") from error


def check_model(folder: Path, shape: ModelShape, mesh: Mesh) -> None:
    """Everything that can be known of a checkpoint before a process starts.

    Raises:
        ValueError: heads or layers do not divide, or the weights are damaged or incomplete.
    """
    FAMILIES[shape.family].check_mesh(shape, mesh)
    read_index(folder, shape)


def read_index(folder: Path, shape: ModelShape) -> dict[str, Path]:
    """HF tensor name -> the safetensors file that holds it; only the files' headers are read.

    Raises:
        ValueError: no safetensors, a damaged or truncated file, or a tensor that is missing, unknown or
            of other extents than the family's table says; each by name.
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ValueError(f"model.path: {folder} has no *.safetensors; convert or download the weights")
    expected = FAMILIES[shape.family].hf_tensors(shape)
    index: dict[str, Path] = {}
    for path in files:
        for name, extent in _read_header(path).items():
            if shape.tied_embeddings and name == FAMILIES[shape.family].output.hf[0].name:
                continue  # some checkpoints store the tied output layer a second time
            if name not in expected:
                raise ValueError(f"{path}: tensor {name} {extent} is unknown to the family {shape.family}")
            if extent != expected[name]:
                raise ValueError(f"{path}: tensor {name} is {extent}, config.json asks for {expected[name]}")
            if name in index:
                raise ValueError(f"{path}: tensor {name} stands in {index[name].name} too; remove one of the files")
            index[name] = path
    missing = sorted(expected.keys() - index.keys())
    if missing:
        raise ValueError(
            f"{folder}: {len(missing)} tensors are missing, the first is {missing[0]}; is a shard file absent?"
        )
    return index


def _read_header(path: Path) -> dict[str, tuple[int, ...]]:
    """Names and extents from a safetensors header (8 bytes length, then JSON), checked against the file's size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if 8 + length > size:
            raise ValueError(f"{path} is truncated or no safetensors file ({size} bytes); copy it again")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise ValueError(f"{path}: the safetensors header is damaged ({error}); copy the file again") from error
    header.pop("__metadata__", None)
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if 8 + length + end != size:
        raise ValueError(f"{path} has {size} bytes, its header promises {8 + length + end}; copy it again")
    return {name: tuple(entry["shape"]) for name, entry in header.items()}
