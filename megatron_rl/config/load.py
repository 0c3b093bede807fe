"""Reads the command line into one validated configuration: YAML files and dotted overrides, merged from left to right.

Invariants (tests/unit/config): a later argument wins key by key; mappings are merged, and any other value replaces the
earlier one; the error about an unknown key gives its dotted path and the nearest known key; nothing here imports torch.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from megatron_rl.config import key_hints
from megatron_rl.config.machine import count_gpus, with_data_types, with_device
from megatron_rl.config.package_files import find_shipped
from megatron_rl.config.schema import BaseConfig
from megatron_rl.processes import read_text

Config = TypeVar("Config", bound=BaseConfig)
DEMANDS = {
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "dict_type": "must be a section of keys",
    "list_type": "must be a list",
    "model_attributes_type": "must be a section of keys, with the name as `kind`",
    "model_type": "must be a section of keys",
    "path_type": "must be text",
    "string_type": "must be text",
    "tuple_type": "must be a list",
}
"""What a value must be, by pydantic's names of faults."""


def load_config(kind: type[Config], arguments: Sequence[str]) -> Config:
    """Read `file.yaml ... section.key=value ...` into a configuration of type `kind`.

    Raises:
        ValueError: something is wrong. One message lists every fault with its dotted path and with what to write
            instead.
    """
    return validate(kind, merge_arguments(arguments))


def merge_arguments(arguments: Sequence[str]) -> dict[str, Any]:
    """Merge the files and overrides into one mapping, which is not validated yet."""
    merged: dict[str, Any] = {}
    for argument in arguments:
        if "=" in argument:
            path, _, text = argument.partition("=")
            merge(merged, nest(path.split("."), parse_value(text)))
        else:
            merge(merged, read_yaml(Path(argument)))
    return merged


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a file of the working folder, or one that ships with the package.

    Raises:
        ValueError: the file does not exist, or it is not a YAML mapping. The message names the file and, for a syntax
            error, the line.
    """
    path = find_shipped(path)
    if not path.is_file():
        what = "it is a folder" if path.is_dir() else "no such file"
        raise ValueError(f"{path}: {what}; give a YAML file, or an override like policy.optimizer.lr=1e-6")
    try:
        content = yaml.load(read_text(path), Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    content = {} if content is None else content
    if not isinstance(content, dict):
        raise ValueError(f"{path}: the top level must be a mapping of sections, not a {type(content).__name__}")
    return content


def parse_value(text: str) -> Any:
    """Parse the value of an override as YAML: `3`, `1e-6`, `null`, `[a, b]`, `{kind: grpo}`."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"the value {text!r} is not valid YAML: {error}") from error


def nest(keys: Sequence[str], value: Any) -> dict[str, Any]:
    """Example: the keys `a`, `b` and the value 3 become {"a": {"b": 3}}."""
    if not all(keys):
        raise ValueError(f"{'.'.join(keys)!r} has an empty key; write an override as section.key=value")
    return {keys[0]: value if len(keys) == 1 else nest(keys[1:], value)}


def merge(into: dict[str, Any], new: Mapping[str, Any]) -> None:
    """Merge `new` into `into` key by key. A section with another `kind` replaces the whole old section, because their
    keys differ, and so does an empty one, `{}`."""
    for key, value in new.items():
        old = into.get(key)
        if (
            isinstance(old, dict)
            and isinstance(value, Mapping)
            and value
            and value.get("kind", old.get("kind")) == old.get("kind")
        ):
            merge(old, value)
        else:
            into[key] = dict(value) if isinstance(value, Mapping) else value


def validate(kind: type[Config], merged: Mapping[str, Any], has_gpus: Callable[[], object] = count_gpus) -> Config:
    """
    Args:
        has_gpus: whether the machines of the run have GPUs.

    Raises:
        ValueError: see `load_config`.
    """
    try:
        return with_data_types(kind.model_validate(with_device(merged, has_gpus)))
    except ValidationError as error:
        told = error.errors(include_url=False)
        # A list all of whose items are refused is also "too short".
        inside = {fault["loc"][:size] for fault in told for size in range(len(fault["loc"]))}
        told = [fault for fault in told if fault["type"] != "too_short" or fault["loc"] not in inside]
        faults = [_explain(kind, together) for together in _by_key(kind, told)]
        raise ValueError("the configuration is refused:\n" + "\n".join(f"  {fault}" for fault in faults)) from error


def _by_key(kind: type[BaseModel], told: Sequence[Any]) -> list[list[Any]]:
    """The faults of each key. A key that may have values of several types has a fault for each of them, unless the
    fault is a key inside one."""
    by_key: dict[tuple[str, ...], list[Any]] = {}
    for number, fault in enumerate(told):
        keys, _, is_choice = _locate(kind, fault["loc"])
        by_key.setdefault((*keys, "") if is_choice else (*keys, str(number)), []).append(fault)
    inner = {keys[:size] for keys in by_key for size in range(len(keys) - 1)}
    return [faults for keys, faults in by_key.items() if keys[-1] or keys[:-1] not in inner]


def _explain(kind: type[BaseModel], faults: Sequence[Any]) -> str:
    """
    Args:
        faults: of one key; if there are several, the one for each type that it may have.
    """
    fault, *others = faults
    unknown = fault["type"] == "extra_forbidden"
    inside, model, _ = _locate(kind, fault["loc"][:-1] if unknown else fault["loc"])
    path = ".".join(inside)
    if unknown:
        key = str(fault["loc"][-1])
        names = list(model.model_fields) if model else []
        near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
        hint = f"did you mean {'.'.join([*inside, near[0]])}?" if near else f"known here: {', '.join(names)}"
        return f"{'.'.join([*inside, key])}: unknown key; {key_hints.hint(inside, key) or hint}"
    if fault["type"] in ("union_tag_invalid", "union_tag_not_found"):
        tags = [tag.strip(" '") for tag in fault.get("ctx", {}).get("expected_tags", "").split(",")]
        if fault["type"] == "union_tag_not_found":
            return f"{path}: it needs a `kind`"
        given = fault["ctx"]["tag"]
        near = difflib.get_close_matches(given, tags, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(tags)}"
        return f"{path}.kind: there is no kind {given!r}; {hint}"
    if fault["type"] == "missing":
        keys = [".".join([*inside, *key]) for key in (_required(model) if model else [()])]
        told = {key: "this key is required, but no file and no override sets it" for key in keys}
        if "run.steps" in told:
            told["run.steps"] += "; run.epochs may take its place"
        return "\n  ".join(f"{key}: {what}" for key, what in told.items())
    if fault["type"] == "value_error":
        message = fault["msg"].removeprefix("Value error, ")
        return f"{path}: {message}" if path else message
    return f"{path}: {', or '.join(dict.fromkeys(map(_demand, faults)))} (got {fault['input']!r})"


def _demand(fault: Any) -> str:
    """What a value must be, without pydantic's names of types."""
    if (known := DEMANDS.get(fault["type"])) is not None:
        return known
    if fault["type"] == "too_short":
        return f"must be a list of at least {fault['ctx']['min_length']}"
    message: str = fault["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    return message


def _locate(kind: type[BaseModel], location: Sequence[str | int]) -> tuple[list[str], type[BaseModel] | None, bool]:
    """The keys that lead to a fault, as a user writes them, the model at that place, and whether the fault is one of
    several, for each type that the last key's value may have. In pydantic's location such a type is a step of its own,
    and so is the `kind` of a union, but they are no keys."""
    here: Any = kind
    keys: list[str] = []
    is_choice = False
    for step in location:
        is_choice = False
        candidates = _models(here)
        inside = [m.model_fields[step].annotation for m in candidates if step in m.model_fields]
        chosen = [m for m in candidates if "kind" in m.model_fields and m.model_fields["kind"].default == step]
        if chosen and len(candidates) > 1:  # a kind may have the name of a key
            here = Union[tuple(chosen)]  # noqa: UP007
            continue
        if isinstance(step, str) and not inside and _is_choice(here):
            here = next((model for model in candidates if model.__name__ == step), None)
            is_choice = True
            continue
        keys.append(str(step))
        here = inside[0] if inside else here
    models = _models(here)
    return keys, models[0] if models else None, is_choice


def _is_choice(annotation: Any) -> bool:
    """Whether a value may have several types, and none of them is a mapping with keys of the user's own."""
    arms = [arm for arm in get_args(annotation) if arm is not NoneType]
    origins = {get_origin(arm) for arm in arms}
    return get_origin(annotation) in (Union, UnionType) and len(arms) > 1 and not origins & {dict, Mapping}


def _required(model: type[BaseModel]) -> list[tuple[str, ...]]:
    """The keys without a default in a section and in the sections inside it."""
    found: list[tuple[str, ...]] = []
    for name, key in model.model_fields.items():
        if not key.is_required():
            continue
        section = key.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            found += [(name, *inner) for inner in _required(section)]
        else:
            found.append((name,))
    return found


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) is None:
        return []
    return [model for argument in get_args(annotation) for model in _models(argument)]


class _Loader(yaml.SafeLoader):
    """Reads floats as YAML 1.2 does: `1e-6` is a number. PyYAML follows YAML 1.1, which reads it as text. A key that is
    there twice is an error, where PyYAML keeps the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key, _ in node.value:
            name = getattr(key, "value", None)
            if isinstance(key, yaml.ScalarNode) and name != "<<":
                if name in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {name!r} is there twice", key.start_mark
                    )
                seen.add(name)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    key: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:float"]
    for key, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$"),
    list("-+0123456789."),
)
