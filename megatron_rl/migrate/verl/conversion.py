"""From a call of verl to our configuration, and a row for every key.

Invariants (tests/unit/migrate): every override of the call has exactly one row; the same key of ours never gets two
values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron_rl.migrate.verl import adapters, algorithm, content, machine, training
from megatron_rl.migrate.verl.call import Override, VerlCall
from megatron_rl.migrate.verl.keys import ROWS, TableRow, nearest, old_name, row_of
from megatron_rl.migrate.verl.lexer import ScriptError
from megatron_rl.migrate.verl.settings import Meaning, Settings, Status, engine_of, owner_of
from megatron_rl.migrate.verl.values import parse

NAMES = {int: "an integer", float: "a number", bool: "True or False", str: "a text", list: "a list"}
MODULES = (adapters, algorithm, content, machine, training)
NO_CRITIC = Meaning("implied", {}, "this estimator has no critic")
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
    for name, option in settings.call.options.items():
        row = _option(name, option.text, settings.call)
        found.rows.append(row)
        found.refused += [f"line {row.line}: {name}={row.value}: {row.why}"] if row.status == "refused" else []
    for override in settings.call.overrides:
        verdict = _judge_override(settings, override)
        text = override.text if override.problem is None else ""
        key = override.prefix + override.key
        found.rows.append(KeyRow(key, text, override.line, verdict.status, verdict.to, verdict.why))
        if verdict.status == "refused":
            where = f"line {override.line}: " if override.line else ""
            found.refused.append(f"{where}{key}{f'={text}' if text else ''}: {verdict.why}")
    for known in ROWS:
        key = known.pattern
        if "always" in known.words and key not in settings and engine_of(key) in (None, settings.engine):
            value = settings[key]
            verdict = meaning_of(settings, known, key, value)
            if verdict.to or verdict.status == "refused":
                found.defaults.append(KeyRow(key, str(value), None, verdict.status, verdict.to, verdict.why))
                if verdict.status == "refused":
                    found.refused.append(f"verl's default {key}={value}: {verdict.why}")
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


def _option(name: str, text: str, call: VerlCall) -> KeyRow:
    if name == "--config-name":
        plain = text.removesuffix(".yaml")
        known = plain in ("ppo_trainer", "ppo_megatron_trainer") or plain.startswith("one_step_off_ppo")
        if known:
            why = "it chooses verl's engine" if "megatron" in plain else "verl's own configuration"
            return KeyRow(name, text, call.line, "implied", {}, why)
        why = "the file is not read; add the keys that it sets to the command, as key=value"
        return KeyRow(name, text, call.line, "refused", {}, why)
    return KeyRow(name, text, call.line, "implied", {}, "an option of Hydra")


def _judge_override(settings: Settings, override: Override) -> Meaning:
    if override.problem is not None:
        return Meaning("refused", {}, override.problem)
    if override.prefix == "~":
        return Meaning("refused", {}, "a default of verl cannot be removed here; give the value that verl then has")
    key = old_name(override.key)
    last = settings.given[key]
    if last is not override:
        where = f"line {last.line} gives it again" if last.line else "it is given again"
        return Meaning("implied", {}, f"{where}, and the last value counts")
    row = row_of(key)
    if row is None:
        return Meaning("refused", {}, f"verl has no such key; did you mean {nearest(override.key)}?")
    if engine_of(key) not in (None, settings.engine):
        return _unread(settings)
    value = settings[key]
    if isinstance(value, str) and "${" in value:
        return Meaning("refused", {}, f"Hydra computes {value}; write its value")
    _check_type(row, override, parse(override.text) if not isinstance(value, str) else value)
    if isinstance(value, bool | int | float) and row.kinds == (str,):
        value = override.text
    return meaning_of(settings, row, key, value)


def _unread(settings: Settings) -> Meaning:
    return Meaning("implied", {}, f"verl's trainer of this script is {settings.trainer}, which does not read it")


def meaning_of(settings: Settings, row: TableRow, key: str, value: Any) -> Meaning:
    """What becomes of a key with this value, by the words of its row (keys.py)."""
    words, of_critic = row.words, key.startswith("critic.")
    if not settings.has_critic and ("critic" in words or (of_critic and ("owner" in words or "lora" in words))):
        return NO_CRITIC
    if settings.engine not in words.get("engine", settings.engine):
        return _unread(settings)
    for other, values in words.get("read", {}).items():
        other = other.replace("@", "actor_rollout_ref.")
        if settings[other] not in values:
            return Meaning("implied", {}, f"verl does not read it with {other}={settings[other]}")
    if "lora" in words and not adapters.has_adapters(settings, f"{key.partition('.model.')[0]}.model."):
        return Meaning("implied", {}, "all weights are trained")
    if value is None and (row.kinds or "use" in words) and words.get("nulls") != "read" and "usual" not in words:
        return Meaning("implied", {}, "null is off")
    if "by" in words:
        judge = next(getattr(module, words["by"]) for module in MODULES if hasattr(module, words["by"]))
        found = judge(settings, key, value)
        assert isinstance(found, Meaning)
        return found
    if "use" in words:
        return _used(words, row, key, value)
    name = key.rpartition(".")[2]
    if "same" in words:
        return Meaning("implied", {}, words["same"])
    status: Status = "left out" if "leave" in words else "refused"
    if "only" in words:
        if value is None or value in words["only"]:
            return Meaning("implied", {}, words["why"])
    elif "never" not in words and value in OFF:
        return Meaning("implied", {}, "it is off")
    why = words.get("never") or words.get("leave") or words["refuse"]
    return Meaning(status, {}, why.replace("{name}", name).replace("{owner}", owner_of(key)))


def _used(words: dict[str, Any], row: TableRow, key: str, value: Any) -> Meaning:
    target = words["use"].replace("{owner}", owner_of(key))
    target = target.replace("{rest}", key.removeprefix(row.pattern.removesuffix(".*")))
    if value in words.get("usual", ()):
        return Meaning("implied", {}, words["why"])
    if "set" in words:
        return Meaning("mapped", {target: words["set"]})
    if "values" not in words:
        return Meaning("used", {target: value})
    if value in words["values"]:
        return Meaning("mapped", {target: words["values"][value]})
    return Meaning("refused", {}, words["refuse"])


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
