"""The reference of all keys, from the docstrings of the sections: `megatron-rl config`, and a page of the site for
each section.

Invariant (tests/unit/config): every key has a description, and its default is what the sections say.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import JsonValue
from pydantic.fields import FieldInfo

from megatron_rl.config.function import FunctionPath
from megatron_rl.config.key_hints import hint
from megatron_rl.config.losses import PolicyLoss
from megatron_rl.config.schema import DpoRunConfig, GrpoRunConfig, RewardModelRunConfig, SftRunConfig
from megatron_rl.config.section import Method, Section

HEAD = """# Configuration

Every key of a run, with its type, its default and its meaning. A key is written in a YAML file, below its section, or
on the command line as `section.key=value`; later arguments win. A section with several kinds is chosen by its key
`kind`, and has a heading for each kind, such as `algorithm.loss[dual_clip]`. `megatron-rl sft` has the sections `run`,
`model`, `policy`, `balance`, `cluster`, `checkpoint`, `observe`, `slurm` and `sft`; `megatron-rl dpo` has `dpo` in its
place, `megatron-rl reward-model` has `reward_model`, and the other recipes have all but these three.
"""
BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "min_length": "of length >="}
NAMES: dict[Any, str] = {int: "integer", float: "number", bool: "boolean", str: "text", Path: "path"}
NAMES |= {Any: "any value", JsonValue: "any value"}

ADVANCED = {
    f"{section}.{key}"
    for section, keys in {
        "algorithm.correction.reject": "only_negative policy",
        "algorithm.entropy.coefficient": "delta initial maximum",
        "algorithm.kl": "cap straight_through",
        "algorithm.kl.coefficient": "horizon initial",
        "algorithm.loss": "cov_high cov_low",
        "balance": "groups",
        "balance.cost": "seconds_per_squared_token seconds_per_token",
        "bridge": "bucket_mib timeout_s verify",
        "cluster": "calibration collective_timeout_s restarts_per_hour start_timeout_s step_timeout_s verifier_workers",
        "critic.loss": "huber_delta",
        "data": "easy_first_epochs",
        "policy.optimizer": "nesterov num_iterations scale",
        "rollout.prefix_values": "column floor idle_below idle_cost positive_only scale several",
    }.items()
    for key in keys.split()
}
"""Keys, without kinds, that no recipe sets. The site describes them on a page of their own."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key.

    >>> key = Key("rollout.num_engines", "integer > 0", "1", "The number of vLLM engines.")
    """

    path: str
    """The dotted path. A section of a certain kind has it in brackets: `algorithm.loss[dual_clip].clip_low`."""
    type: str
    default: str | None
    """The default as YAML writes it; None means that the key is required."""
    meaning: str

    @property
    def is_advanced(self) -> bool:
        return plain(self.path) in ADVANCED


@dataclass(frozen=True, slots=True)
class Heading:
    """The heading of a section, or of one kind of it, with its keys."""

    path: str
    """Empty for the whole configuration."""
    meaning: str
    keys: tuple[Key, ...]
    same_as: str = ""
    """The path of the section that has the same keys, and where they are described."""


@cache
def parts() -> list[Heading]:
    """All sections, each followed by the sections inside."""
    fields = {
        **_fields(GrpoRunConfig),
        "sft": _fields(SftRunConfig)["sft"],
        "dpo": _fields(DpoRunConfig)["dpo"],
        "reward_model": _fields(RewardModelRunConfig)["reward_model"],
    }
    return [part for part in _parts("", "", fields, {}) if part.path]


def find(path: str) -> list[Heading]:
    """What the reference has about a section with everything inside, or about one key.

    Raises:
        ValueError: there is no such section and no such key.
    """
    every = parts()
    inside = [part for part in every if part.path == path or part.path.startswith((f"{path}.", f"{path}["))]
    if inside:
        return inside
    of_key = [
        Heading(part.path, "", (key,)) for part in every for key in part.keys if path in (key.path, plain(key.path))
    ]
    if of_key:
        return of_key
    if path.endswith(".kind"):
        kinds = [part for part in every if part.path.startswith(f"{path.removesuffix('.kind')}[") and part.keys]
        if kinds := [part for part in kinds if plain(part.path) == path.removesuffix(".kind")]:
            return kinds
    for part in every:  # a section that has the keys of another one
        if part.same_as and path.startswith(f"{plain(part.path)}."):
            return find(plain(part.same_as) + path.removeprefix(plain(part.path)))
    known = {plain(name) for part in every for name in (part.path, *(key.path for key in part.keys))}
    near = difflib.get_close_matches(path, sorted(known), n=3, cutoff=0.4)
    told = f"did you mean {' or '.join(near)}?" if near else "`megatron-rl config` lists the sections"
    *section, name = path.split(".")
    raise ValueError(f"there is no key and no section {path!r}; {hint(section, name) or told}")


def plain(path: str) -> str:
    """A path without kinds: `rewards[judge].url` is `rewards.url`."""
    return ".".join(name.partition("[")[0] for name in path.split("."))


def markdown(shown: list[Heading]) -> str:
    """Parts as Markdown, one heading for each."""
    return "\n\n".join("\n\n".join(_blocks(part)) for part in shown)


def _blocks(part: Heading) -> Iterator[str]:
    yield f"## {part.path}"
    if part.meaning:
        yield part.meaning
    if part.keys:
        yield "\n".join(_line(key) for key in part.keys)


def _line(key: Key) -> str:
    default = "required" if key.default is None else f"default `{key.default}`"
    meaning = key.meaning or f"See `{key.path}`."
    return f"- **`{key.path.rpartition('.')[2]}`** ({key.type}; {default}). {meaning}"


def _parts(
    path: str, meaning: str, fields: Mapping[str, tuple[FieldInfo, str]], described: dict[type[Section], str]
) -> Iterator[Heading]:
    """
    Args:
        fields: the fields of a section (`_fields`).
        described: where each class of section is described. A section of the same class refers to it.
    """
    keys, inside = [], list[Heading]()
    for name, (field, docstring) in fields.items():
        own = f"{path}.{name}" if path else name
        kinds = _sections(_annotation(field))
        if name == "kind" and len(get_args(field.annotation)) == 1:
            continue
        if not kinds or path:  # the sections of the whole configuration are headings, and no keys
            keys.append(Key(own, _type(_annotation(field)), _default(field), _text(docstring)))
        for kind in kinds:
            tags = get_args(kind.model_fields["kind"].annotation) if "kind" in kind.model_fields else ()
            place = f"{own}[{tags[0]}]" if len(tags) == 1 else own
            text = _text(kind.__doc__ if kind.__doc__ != Section.__doc__ and kind.__doc__ else docstring)
            if issubclass(kind, Method):
                text += f" Formula: {_text(kind.formula)} ({kind.source})."
            if issubclass(kind, PolicyLoss):
                text += f" Aggregation: {kind.aggregation}."
            if kind in described:
                inside.append(Heading(place, f"The same keys as `{described[kind]}`. {text}", (), described[kind]))
            else:
                described[kind] = place
                inside += _parts(place, text, _fields(kind), described)
    yield Heading(path, meaning, tuple(keys))
    yield from inside


def _fields(section: type[Section]) -> dict[str, tuple[FieldInfo, str]]:
    """Each field of a section, and the docstring below it. Pydantic can keep these docstrings, but then it reads the
    sources of all sections in each process that imports them, which takes 0.2 s."""
    docstrings = {}
    for kind in reversed(section.__mro__):
        if not issubclass(kind, Section):
            continue
        [definition] = ast.parse(dedent(inspect.getsource(kind))).body
        assert isinstance(definition, ast.ClassDef)
        for one in pairwise(definition.body):
            match one:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    docstrings[name] = text
    return {name: (field, docstrings.get(name, "")) for name, field in section.model_fields.items()}


def _annotation(field: FieldInfo) -> Any:
    return Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation


def _sections(annotation: Any) -> list[type[Section]]:
    """The kinds of section that a key can have."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return list(dict.fromkeys(kind for one in get_args(annotation) for kind in _sections(one)))


def _type(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        bounds = [
            f"{sign} {getattr(rule, name)}"
            for rule in inner[1:]
            for name, sign in BOUNDS.items()
            if getattr(rule, name, None) is not None
        ]
        return " ".join([_type(inner[0]), " and ".join(bounds)]).strip()
    if origin in (Union, UnionType):
        names = [_type(one) for one in inner if one is not NoneType]
        return " or ".join(dict.fromkeys([*names, *(["null"] if NoneType in inner else [])]))
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in inner)
    if origin is tuple:
        return f"list of {_type(inner[0])}" if inner[1:] in ((), (...,)) else f"list of {len(inner)}"
    if origin in (dict, Mapping):
        return f"mapping of {_type(inner[0])} to {_type(inner[1])}"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "section"
    if annotation is FunctionPath:
        return "place of a function"
    return NAMES.get(annotation, "text")


def _default(field: FieldInfo) -> str | None:
    if field.is_required():
        return None
    return json.dumps(_shown(field.get_default(call_default_factory=True)), default=str, ensure_ascii=False)


def _shown(value: Any) -> Any:
    """A default in YAML's types; of a section its kind, and what differs from its own defaults."""
    if isinstance(value, tuple):
        return [_shown(one) for one in value]
    if not isinstance(value, Section):
        return value
    kind = {"kind": value.kind} if "kind" in type(value).model_fields else {}  # type: ignore[attr-defined]
    return {**kind, **value.model_dump(mode="json", exclude_defaults=True)}


def _text(text: str) -> str:
    """A docstring in one line."""
    return " ".join(text.split())
