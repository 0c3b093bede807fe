"""Converts a call of verl into a configuration of this project, with a row for every key.

Invariants (tests/unit/migrate): every override of the call has exactly one row; the same key of ours never gets two
values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron_rl.migrate.verl import adapters, algorithm, content, machine, training
from megatron_rl.migrate.verl.call import Override
from megatron_rl.migrate.verl.keys import ROWS, TableRow, nearest, old_name, row_of
from megatron_rl.migrate.verl.lexer import ScriptError
from megatron_rl.migrate.verl.settings import Meaning, Settings, Status, engine_of, implied, owner_of, refused
from megatron_rl.migrate.verl.values import parse

NAMES = {int: "an integer", float: "a number", bool: "True or False", str: "a text", list: "a list"}
MODULES = (adapters, algorithm, content, machine, training)
OFF: tuple[Any, ...] = (None, False, 0, "", [], {})


@dataclass(frozen=True, slots=True)
class KeyRow:
    """What becomes of one key of the script, or of one default of verl's; the line of a default is None."""

    key: str
    value: str
    line: int | None
    status: Status
    to: dict[str, Any]
    why: str


@dataclass(slots=True)
class Converted:
    configuration: dict[str, Any] = field(default_factory=dict)
    rows: list[KeyRow] = field(default_factory=list)
    """One for every override of the call, in its order, and one for each of Hydra's options."""
    defaults: list[KeyRow] = field(default_factory=list)
    """verl's defaults that the configuration has, because ours are different or may change."""
    refused: list[str] = field(default_factory=list)
    """The keys without which, or as this project would have them, something else would be trained, with the reasons."""
    open: list[str] = field(default_factory=list)
    """Sentences about what has to be decided before a run, such as a layout that fits."""

    def counts(self) -> dict[str, int]:
        found = dict.fromkeys(("used", "mapped", "implied", "left out", "refused"), 0)
        for row in self.rows:
            found[row.status] += 1
        return found


def convert(settings: Settings) -> Converted:
    """Judge every key.

    Raises:
        ScriptError: a value has the wrong type.
    """
    found = Converted()

    def add(rows: list[KeyRow], key: str, value: str, line: int | None, verdict: Meaning) -> None:
        rows.append(KeyRow(key, value, line, verdict.status, verdict.to, verdict.why))
        if verdict.status == "refused":
            where = "verl's default " if line is None else f"line {line}: " if line else ""
            found.refused.append(f"{where}{key}{f'={value}' if value else ''}: {verdict.why}")

    for name, option in settings.call.options.items():
        add(found.rows, name, option.text, settings.call.line, _option(name, option.text))
    for override in settings.call.overrides:
        text = override.text if override.problem is None else ""
        add(found.rows, override.prefix + override.key, text, override.line, _judge_override(settings, override))
    for known in ROWS:
        key = known.pattern
        if "always" in known.words and key not in settings and engine_of(key) in (None, settings.engine):
            value = settings[key]
            verdict = meaning_of(settings, known, key, value)
            if verdict.to or verdict.status == "refused":
                add(found.defaults, key, str(value), None, verdict)
    for row in (*found.rows, *found.defaults):
        for target, value in row.to.items():
            put(found.configuration, target, value)
    return found


def put(configuration: dict[str, Any], target: str, value: Any) -> None:
    """Set a dotted key."""
    *sections, name = target.split(".")
    place = configuration
    for section in sections:
        place = place.setdefault(section, {})
    assert place.get(name, value) == value, f"{target} is {place.get(name)!r} and {value!r}"
    place[name] = value


def _option(name: str, text: str) -> Meaning:
    if name != "--config-name":
        return implied("an option of Hydra")
    plain = text.removesuffix(".yaml")
    if plain in ("ppo_trainer", "ppo_megatron_trainer") or plain.startswith("one_step_off_ppo"):
        return implied("it chooses verl's engine" if "megatron" in plain else "verl's own configuration")
    return refused("the file is not read; add the keys that it sets to the command, as key=value")


def _judge_override(settings: Settings, override: Override) -> Meaning:
    if override.problem is not None:
        return refused(override.problem)
    if override.prefix == "~":
        return refused("a default of verl cannot be removed here; give the value that verl then has")
    key = old_name(override.key)
    last, row, value = settings.given[key], row_of(key), settings[key]
    if last is not override:
        where = f"line {last.line} gives it again" if last.line else "it is given again"
        return implied(f"{where}, and the last value counts")
    if row is None:
        return refused(f"verl has no such key; did you mean {nearest(override.key)}?")
    if engine_of(key) not in (None, settings.engine):
        return _unread(settings)
    if isinstance(value, str) and "${" in value:
        return refused(f"Hydra computes {value}; write its value")
    _check_type(row, override, parse(override.text) if not isinstance(value, str) else value)
    if isinstance(value, bool | int | float) and row.kinds == (str,):
        value = override.text
    return meaning_of(settings, row, key, value)


def _unread(settings: Settings) -> Meaning:
    return implied(f"verl's trainer of this script is {settings.trainer}, which does not read it")


def meaning_of(settings: Settings, row: TableRow, key: str, value: Any) -> Meaning:
    """What becomes of a key with this value, by the words of its row (keys.py)."""
    words, owner = row.words, owner_of(key)
    if not settings.has_critic and ("critic" in words or (owner == "critic" and words.keys() & {"owner", "lora"})):
        return implied("this estimator has no critic")
    if settings.engine not in words.get("engine", settings.engine):
        return _unread(settings)
    for other, values in words.get("read", {}).items():
        other = other.replace("@", "actor_rollout_ref.")
        if settings[other] not in values:
            return implied(f"verl does not read it with {other}={settings[other]}")
    if "lora" in words and not adapters.has_adapters(settings, key):
        return implied("all weights are trained")
    if value is None and (row.kinds or "use" in words) and words.get("nulls") != "read" and "usual" not in words:
        return implied("null is off")
    if "by" in words:
        judge = next(getattr(module, words["by"]) for module in MODULES if hasattr(module, words["by"]))
        found = judge(settings, key, value)
        assert isinstance(found, Meaning)
        return found
    if "same" in words:
        return implied(words["same"])
    if value in words.get("usual", words.get("only", ())) or ("only" in words and value is None):
        return implied(words["why"])
    if not words.keys() & {"only", "never", "use"} or "set" in words:
        if value in OFF:
            return implied("it is off")
    filled = {"{key}": key, "{name}": key.rpartition(".")[2], "{owner}": owner}
    filled["{rest}"] = key.removeprefix(row.pattern.removesuffix(".*"))
    told = words.get("use") or words.get("never") or words.get("leave") or words["refuse"]
    for name, text in filled.items():
        told = told.replace(name, text)
    if "use" not in words:
        return Meaning("left out" if "leave" in words else "refused", {}, told)
    if "values" in words and value not in words["values"]:
        return refused(words["refuse"])
    ours = words["values"][value] if "values" in words else words.get("set", value)
    why = words.get("why", "") if "set" in words else ""
    return Meaning("mapped" if "values" in words or ours != value else "used", {told: ours}, why)


def _check_type(row: TableRow, override: Override, value: Any) -> None:
    where = f"line {override.line}: " if override.line else ""
    if value is None:
        if row.default is not None and not isinstance(row.default, bool) and "nulls" not in row.words:
            usual = str(row.default).removeprefix("=")
            raise ScriptError(f"{where}{override.key} is null, but must be a value such as {usual}; correct it")
        return
    if not row.kinds or (row.kinds == (str,) and not isinstance(value, list | dict)):
        return
    is_right = isinstance(value, row.kinds) and (bool in row.kinds or not isinstance(value, bool))
    if not is_right:
        wanted = NAMES[row.kinds[-1]]
        raise ScriptError(f"{where}{override.key} is {override.text!r}, but must be {wanted}; correct it")


def check_types(settings: Settings) -> None:
    """Refuse an engine that verl does not have, and values of the wrong type, before anything is computed with them.

    Raises:
        NoSuchEngine: as it says.
        ScriptError: a value has the wrong type.
    """
    assert settings.engine
    for key, override in settings.given.items():
        row = row_of(key)
        if row is not None:
            value = parse(override.text)
            if not (isinstance(value, str) and "${" in value):
                _check_type(row, override, value)
