"""Folders that hold a model for text together with other parts, as Gemma 3, Kimi-K2.5, Qwen2.5-VL, Qwen3-VL and Qwen3.5
are published.

config.json has the text model's own configuration under `text_config`, and the names of the text model's tensors begin
with a prefix; a vision tower lies next to it. The text model alone is read, under the names and with the config.json
that a folder of its own has. All other tensors are counted and told by the beginnings of their names.

Trainers load such a folder as it is. Of a model whose tower runs here (models/vision.py), engines and exports have all
parts. vLLM's class of Kimi-K2.5 also builds the tower, which nothing here trains, and names the parameters differently.
So engines read the configuration of the text model alone (`rollout/start.py`), for which vLLM has a class for text
(DeepseekV3ForCausalLM), and cannot load weights from it.

Sources of the names: transformers, conversion_mapping.py (`kimi_k25`), modeling_qwen3_5.py and modeling_qwen3_5_moe.py
(Qwen3_5MoeExperts); vLLM, kimi_k25.py and qwen3_5.py (`hf_to_vllm_mapper`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from megatron_rl.models.families import FAMILIES
from megatron_rl.models.family import Family
from megatron_rl.models.rule import Rule
from megatron_rl.models.view import InFile
from megatron_rl.models.vision import PREFIXES, vision_of
from megatron_rl.types import TOWER, ModelShape

T = TypeVar("T")
_DTYPE, _TIED = ("dtype", "torch_dtype"), "tie_word_embeddings"
_INHERITED = (
    *_DTYPE,
    _TIED,
    "quantization_config",
    "compression_config",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
"""What `text_config` may leave to the whole config.json, which then says it for all parts."""


@dataclass(frozen=True, slots=True)
class Composite:
    models: tuple[str, ...]
    """The class, under each of its names, that the whole config.json names in `architectures`."""
    texts: tuple[str, ...]
    """The values of `model_type` that `text_config` may have."""
    prefixes: tuple[tuple[str, str], ...]
    """(the beginning of a name in the folder's files, what stands there in a folder of the text model alone)."""
    alone: Mapping[str, Any] | None = None
    """What the config.json of a folder of the text model alone says, if the text model has another name there."""
    theta: float = 500_000.0
    """The base of the rotation of such a text model, if config.json does not say it."""
    is_flat: bool = False
    """Whether config.json may have the text model's values beside those of all parts, in place of `text_config`."""

    def own_name(self, name: str) -> str | None:
        """The name that a tensor has in a folder of the text model alone; None if it belongs to another part."""
        for theirs, own in self.prefixes:
            if name.startswith(theirs) and (own == TOWER or not name.startswith(PREFIXES)):
                return own + name.removeprefix(theirs)
        return None

    def with_tower(self) -> Composite:
        """The same for a model whose vision tower is trained as a part of it."""
        return replace(self, prefixes=(*((theirs, TOWER) for theirs in PREFIXES), *self.prefixes))

    def whole_name(self, name: str) -> str:
        """A name that a tensor of the text model alone has in a folder of all parts, the first of several."""
        return next(theirs + name.removeprefix(own) for theirs, own in self.prefixes if name.startswith(own))

    def part(self, name: str) -> str:
        """The beginning of the name of a tensor that belongs to another part, such as `model.visual.`"""
        known = [theirs.split(".") for theirs, _ in self.prefixes]
        pieces = name.split(".")
        depth = 0
        while depth + 1 < len(pieces) and any(pieces[: depth + 1] == one[: depth + 1] for one in known):
            depth += 1
        return ".".join(pieces[: depth + 1]) + "."


_KIMI = ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration")  # vLLM's and transformers' name
_QWEN3_VL = (("model.language_model.", "model."), ("lm_head.", "lm_head."))
_QWEN3_5 = (*_QWEN3_VL, ("mtp.", "mtp."))
_OF_ALL_PARTS = re.compile("vision_|image_|video_|model_type|architectures")
"""Keys that belong to the whole model, of a config.json without `text_config`."""
COMPOSITES = {
    "gemma3": Composite(("Gemma3ForConditionalGeneration",), ("gemma3_text",), (("language_model.", ""),)),
    "kimi_k25": Composite(_KIMI, ("kimi_k2", "deepseek_v3"), (("language_model.", ""),)),
    "qwen2_5_vl": Composite(
        models=("Qwen2_5_VLForConditionalGeneration",),
        texts=("qwen2_5_vl_text",),
        prefixes=(*_QWEN3_VL, ("model.", "model.")),  # the last as it is published
        alone={"model_type": "qwen2"},
        theta=1e6,
        is_flat=True,
    ),
    "qwen3_5": Composite(("Qwen3_5ForConditionalGeneration",), ("qwen3_5_text",), _QWEN3_5),
    "qwen3_5_moe": Composite(("Qwen3_5MoeForConditionalGeneration",), ("qwen3_5_moe_text",), _QWEN3_5),
    "qwen3_vl": Composite(
        ("Qwen3VLForConditionalGeneration",), ("qwen3_vl_text",), _QWEN3_VL, alone={"model_type": "qwen3"}
    ),
    "qwen3_vl_moe": Composite(
        models=("Qwen3VLMoeForConditionalGeneration",),
        texts=("qwen3_vl_moe_text",),
        prefixes=_QWEN3_VL,
        alone={"model_type": "qwen3_moe", "norm_topk_prob": True},  # which transformers' class always does
    ),
}
"""The supported ones, by the `model_type` of the whole config.json."""


def in_whole(shape: ModelShape, tensors: Mapping[str, T]) -> dict[str, T]:
    """What belongs to tensors of a text model, by their names in files of the whole model, if the model sees images."""
    if shape.vision is None:
        return dict(tensors)
    composite = COMPOSITES[shape.vision.model_type].with_tower()
    return {composite.whole_name(name): value for name, value in tensors.items()}


def name_alone(shape: ModelShape, name: str) -> str:
    """The name that a tensor of the text model has in a folder of its own."""
    return name if shape.vision is None else COMPOSITES[shape.vision.model_type].with_tower().own_name(name) or name


def text_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of the text model alone; the same one if it describes no other part.

    Raises:
        ValueError: `text_config` describes none of the supported text models, or contradicts the whole config.json.
    """
    composite = COMPOSITES.get(str(config.get("model_type")))
    if composite is None:
        return dict(config)
    if config.get("architectures") not in (None, *([model] for model in composite.models)):
        raise ValueError(
            f"architectures is {json.dumps(config['architectures'])}; for a {config['model_type']} only "
            f"{' or '.join(composite.models)} is supported"
        )
    text = config.get("text_config")
    if text is None and composite.is_flat:
        own = {key: value for key, value in config.items() if not _OF_ALL_PARTS.match(key)}
        text = own | {"model_type": composite.texts[0]}
    if not isinstance(text, Mapping) or text.get("model_type") not in composite.texts:
        found = repr(text.get("model_type")) if isinstance(text, Mapping) else "missing"
        raise ValueError(
            f"the model_type of text_config is {found}, but in a {config['model_type']} only "
            f"{' or '.join(composite.texts)} is supported"
        )
    if _TIED in text and config.get(_TIED, text[_TIED]) != text[_TIED]:  # transformers obeys the first, vLLM the second
        raise ValueError(
            f"{_TIED} is {json.dumps(config[_TIED])}, but {json.dumps(text[_TIED])} in text_config; make them equal"
        )
    left = set(_INHERITED) - (set(_DTYPE) if text.keys() & set(_DTYPE) else set())
    whole = {key: config[key] for key in config if key in left}
    # `auto_map` names code of the whole model, which is not written.
    own = {key: value for key, value in text.items() if key != "auto_map"}
    if composite.alone:
        own = _of_plain_text({"rope_theta": composite.theta, **own}, composite.alone)
    return whole | own | {"architectures": [FAMILIES[own["model_type"]].vllm_model]}


def _of_plain_text(text: Mapping[str, Any], alone: Mapping[str, Any]) -> dict[str, Any]:
    """The text model of a Qwen2.5-VL as a Qwen2.5, and of a Qwen3-VL as a Qwen3. A token of text has the same position
    in time, height and width, so that the sections of rotary frequencies mean nothing.

    Args:
        alone: see `Composite`.

    Raises:
        ValueError: `text_config` contradicts it.
    """
    own = {**text, "model_type": alone["model_type"]}
    for key, value in alone.items():
        if own.setdefault(key, value) != value:
            raise ValueError(f"{key} of text_config is {json.dumps(own[key])}; only {json.dumps(value)} is supported")
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(section := own.get(key), Mapping):
            own[key] = {
                name: "default" if value == "mrope" else value
                for name, value in section.items()
                if not name.startswith("mrope_")
            }
    return own


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a folder's text model.

    Raises:
        ValueError: see `text_of`; the error names the file.
    """
    path = folder / "config.json"
    try:
        return text_of(json.loads(path.read_text()))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def composite_of(folder: Path, with_tower: bool = False) -> Composite | None:
    """None if the folder holds a text model alone."""
    found = COMPOSITES.get(str(json.loads((folder / "config.json").read_text()).get("model_type")))
    return found.with_tower() if found and with_tower else found


def as_in_files(family: Family, shape: ModelShape, found: Mapping[str, tuple[int, ...]]) -> Family:
    """The same table for files that hold a layer's experts in two tensors, if these do: `experts.gate_up_proj`
    [experts, 2 ffn, hidden], gate above up, and `experts.down_proj` [experts, hidden, ffn], as transformers 5 writes
    Qwen3.5's composite; or the same with each matrix transposed, as Qwen3-VL is published.

    Args:
        found: the extents of the files' tensors, by the names in a folder of the text model alone.
    """
    forms = [_with_stacked_experts(family, transposed) for transposed in (False, True)]
    tensors = [form.file_tensors(shape) for form in forms]
    stacked = found.keys() & (tensors[0].keys() - family.file_tensors(shape).keys())
    if not stacked:
        return family
    fits = [all(found[name] == held[name].extents for name in stacked) for held in tensors]
    return forms[fits.index(True)] if any(fits) else forms[0]


def _with_stacked_experts(family: Family, transposed: bool) -> Family:
    rows = (_stacked(rule, transposed) if rule.per_expert else rule for rule in family.mixture)
    return replace(family, mixture=tuple(rows))


def _stacked(rule: Rule, transposed: bool) -> Rule:
    block = rule.hf[0].name.partition(".{}")[0]
    joined = "gate_up_proj" if len(rule.hf) == 2 else "down_proj"
    return replace(
        rule,
        hf=tuple(
            replace(tensor, file=InFile(f"{block}.{joined}", part, len(rule.hf), transposed=transposed))
            for part, tensor in enumerate(rule.hf)
        ),
    )


def check_text_alone(folder: Path) -> None:
    """Check that an engine can load the weights of a Hugging Face folder, as far as its parts matter.

    Raises:
        ValueError: the folder holds other parts than a text model; the error says what to do.
    """
    if composite_of(folder) and vision_of(folder) is None:
        raise ValueError(
            f"model.path: {folder} has a vision tower next to its text model, and the engines of this run load weights "
            f"from it, of which vLLM's class for text knows no names. Please take the text model out once with "
            f"`megatron-rl convert to-hf {folder} TARGET`, and give TARGET in place of it"
        )
