"""The folders of what a script gives as objects: the model with its tokenizer, and reward models.

Invariants (tests/unit/trl, tests/doors): a run has the tokenizer and the chat template that the script has given; a
folder of the user is never changed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from shutil import rmtree
from typing import Any

from megatron_rl.data.pictures import pictures_of
from megatron_rl.models.vision import read_vision
from megatron_rl.trl.rows import size_of
from megatron_rl.types import Vision

TOKENIZER_FILES = re.compile(
    r"tokenizer.*|vocab.*|merges\.txt|special_tokens_map\.json|added_tokens\.json|chat_template.*|.*\.model"
)
"""The files of a folder that save_pretrained of a tokenizer writes, or that it replaces."""


def folder_of(name: str, revision: str | None = None) -> Path:
    """The folder of a model, which may be in the hub's cache.

    Raises:
        ValueError: it is in neither place.
    """
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision))
    except (OSError, ValueError) as error:
        folder = f"models/{name.rpartition('/')[2]}"
        raise ValueError(
            f"{name} is neither a folder nor in the hub's cache ({type(error).__name__}); get it with "
            f"`hf download {name} --local-dir {folder}` and write {folder!r}"
        ) from error


class GivenModel:
    """The model of a script: a name, a folder, a model of transformers, or a model of PEFT with adapters on it."""

    def __init__(self, given: Any, processing_class: Any, options: Mapping[str, Any] | None = None) -> None:
        """
        Args:
            processing_class: the tokenizer; None means the model's own.
            options: `model_init_kwargs`; only `revision` is read.

        Raises:
            ValueError: one of the two is not what it must be.
        """
        self.peft_config = None
        """The configuration of a PEFT model's adapters."""
        if isinstance(configs := getattr(given, "peft_config", None), Mapping) and hasattr(given, "get_base_model"):
            self.peft_config = _only_adapters(given, configs)
        elif not isinstance(given, str | Path) and not hasattr(given, "save_pretrained"):
            raise ValueError(f"model is a {type(given).__name__}; give a name, a folder or a model of transformers")
        self.given: Any = str(given) if isinstance(given, Path) else given
        self._revision = (options or {}).get("revision")
        tokenizer = getattr(processing_class, "tokenizer", processing_class)  # a processor has one
        if tokenizer is not None and not (hasattr(tokenizer, "get_vocab") and hasattr(tokenizer, "save_pretrained")):
            raise ValueError(
                f"processing_class is {processing_class!r:.80}, which is no tokenizer of transformers; give "
                "AutoTokenizer.from_pretrained(...)"
            )
        self._tokenizer = tokenizer

    @property
    def name(self) -> str:
        """The last part of its name."""
        name = self.given if isinstance(self.given, str) else getattr(self.given.config, "_name_or_path", "")
        return Path(str(name or "model")).name

    @property
    def config(self) -> dict[str, Any]:
        """The keys of the model's config.json. A model that sees images has the keys of its text model, too."""
        if isinstance(self.given, str):
            found: dict[str, Any] = json.loads((self.folder() / "config.json").read_text())
        else:
            own = self.given.config
            found = dict(own.to_dict() if hasattr(own, "to_dict") else vars(own))
        return {**(found.get("text_config") or {}), **found}

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that the script gave, or the model's own.

        Raises:
            ValueError: the model is an object whose tokenizer cannot be found.
        """
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(self.folder())
        return self._tokenizer

    @property
    def tokenizer_if_read(self) -> Any:
        """None if nobody has asked for it yet, because reading it takes a second."""
        return self._tokenizer

    @cached_property
    def vision(self) -> Vision | None:
        """How the model sees images; None if it sees none."""
        try:
            return read_vision(self.config)
        except (ValueError, OSError):  # the run says more
            return None

    def image_tokens(self, image: Any) -> int:
        """The number of an image's tokens in a prompt; 0 if the model sees no images.

        Raises:
            ValueError, OSError: it cannot be read.
        """
        if self.vision is None:
            return 0
        width, height = size_of(image)
        processor = pictures_of(self.folder(), Path()).processor
        return int(processor.get_number_of_image_patches(height, width, {})) // self.vision.merge**2

    def layers(self) -> set[str] | None:
        """The names of its layers that have weights; None if they cannot be read."""
        if not isinstance(self.given, str):
            whole = {name.rpartition(".")[0] for name, _ in self.given.named_parameters() if ".lora_" not in name}
            return {name.removeprefix("base_model.model.").removesuffix(".base_layer") for name in whole}
        from safetensors import safe_open

        names: set[str] = set()
        for file in self.folder().glob("*.safetensors"):
            with safe_open(file, "pt") as opened:
                names.update(opened.keys())
        return {name.rpartition(".")[0] for name in names} or None

    def save(self, into: Path) -> Path:
        """The folder of the run's model. It is `into` if the script has given objects, with links to the model's files
        if only the tokenizer is one."""
        if not isinstance(self.given, str):
            model = self.given
            if self.peft_config is None:
                model.save_pretrained(into)
            else:
                _save_base(model, into)
            self.tokenizer.save_pretrained(into)
            return into
        folder = self.folder()
        if self._tokenizer is None or _same_tokenizer(folder, self._tokenizer):
            return folder
        rows = self.config.get("vocab_size")
        if rows is not None and len(self._tokenizer) > rows:
            raise ValueError(
                f"processing_class has {len(self._tokenizer)} tokens, and the model {rows}; load the model, call its "
                "resize_token_embeddings, and give the object as model"
            )
        linked(folder, into, self._tokenizer)
        return into

    def folder(self) -> Path:
        """The model's own folder, or the one that it was read from."""
        if isinstance(self.given, str):
            return folder_of(self.given, self._revision)
        name = str(getattr(self.given.config, "_name_or_path", "") or "")
        if not name:
            raise ValueError("give processing_class, the tokenizer that belongs to the model")
        return folder_of(name)


def linked(folder: Path, into: Path, tokenizer: Any) -> None:
    """Make a folder of a model whose files are links to another one's, with another tokenizer."""
    into.mkdir(parents=True, exist_ok=True)
    for old in into.iterdir():
        rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
    for file in folder.iterdir():
        if not TOKENIZER_FILES.fullmatch(file.name):
            (into / file.name).symlink_to(file.resolve())
    tokenizer.save_pretrained(into)


def _same_tokenizer(folder: Path, tokenizer: Any) -> bool:
    from transformers import AutoTokenizer

    try:
        own = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError):  # there is none
        return False
    described = [
        (
            one.chat_template,
            one.special_tokens_map,
            one.get_vocab(),
            one.backend_tokenizer.to_str() if getattr(one, "is_fast", False) else type(one).__name__,
        )
        for one in (own, tokenizer)
    ]
    return described[0] == described[1]


def _only_adapters(model: Any, configs: Mapping[str, Any]) -> Any:
    """The configuration of a PEFT model's only adapters, which have not been trained.

    Raises:
        ValueError: there are several, or they have been trained.
    """
    if len(configs) != 1:
        raise ValueError(f"model has the adapters {', '.join(configs)}; give a model of PEFT with one")
    if any("lora_B" in name and bool(value.any()) for name, value in model.named_parameters()):
        raise ValueError(
            "the adapters of model have been trained; give its base model as model, its LoraConfig as peft_config, and "
            "GRPOConfig(sections={'policy': {'lora': {'start': FOLDER}}}), where FOLDER is what save_pretrained has "
            "written"
        )
    return next(iter(configs.values()))


def same_weights(one: Any, other: Any) -> bool:
    """Whether two models, as names, folders or objects of transformers, have the same weights, up to the rounding of
    the coarser data type."""
    if isinstance(one, str | Path) and str(one) == str(other):
        return True
    first, second = _weights(one), _weights(other)
    return bool(first) and all(
        name in second and value.shape == (found := second[name]).shape and _rounded(value, found)
        for name, value in first.items()
    )


def _rounded(one: Any, other: Any) -> bool:
    coarser = min(one.dtype, other.dtype, key=lambda dtype: dtype.itemsize)
    return bool((one.to(coarser) == other.to(coarser)).all())


def _weights(model: Any) -> dict[str, Any]:
    if not isinstance(model, str | Path):
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        return {
            name.replace(".base_layer.", "."): one.detach().cpu()
            for name, one in base.named_parameters()
            if not re.search(r"\.lora_\w+\.", name)
        }
    from safetensors.torch import load_file

    found: dict[str, Any] = {}
    for file in folder_of(str(model)).glob("*.safetensors"):
        found |= load_file(file)
    return found


def _save_base(model: Any, into: Path) -> None:
    """Save the model below the adapters, which PEFT has put between its layers."""
    base = model.get_base_model()
    weights = {
        name.replace(".base_layer.", "."): value
        for name, value in base.state_dict().items()
        if not re.search(r"\.lora_\w+\.", name)
    }
    base.save_pretrained(into, state_dict=weights)
