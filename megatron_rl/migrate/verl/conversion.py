"""From a call of verl to our configuration, and a row for every key.

Invariants (tests/unit/tools): every override of the call has exactly one row; the same key of ours never gets two
values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron_rl.migrate.verl import algorithm, content, machine
from megatron_rl.migrate.verl.call import Override, VerlCall
from megatron_rl.migrate.verl.keys import RULES
from megatron_rl.migrate.verl.lexer import ScriptError
from megatron_rl.migrate.verl.names import nearest, rule_of
from megatron_rl.migrate.verl.rules import KeyRule
from megatron_rl.migrate.verl.settings import ACTOR, DEFAULTS, Meaning, Settings, Status, engine_of, old_name
from megatron_rl.migrate.verl.values import parse

NAMES = {int: "an integer", float: "a number", bool: "True or False", str: "a text", list: "a list"}
READ_NULL = (
    *(algorithm.loss_part, algorithm.correction, machine.parallel, content.rewards, content.reward_part),
    *(machine.engines, content.eval_rows),
)
"""The judges that give null a meaning of its own."""
NULLABLE = (
    *(f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high", "trainer.total_training_steps"),
    *(f"{owner}.optim.{name}" for owner in (ACTOR, "critic") for name in ("lr_warmup_steps", "lr_warmup_steps_ratio")),
    *(f"actor_rollout_ref.rollout.{name}" for name in ("pipeline_model_parallel_size", "data_parallel_size")),
    *("algorithm.rollout_correction.rollout_is_threshold", "reward_model.enable"),
)
PARTS = ("verl.trainer.main_ppo", "one_step_off_policy.main_ppo", "main_dapo", "main_ppo_split.py")


@dataclass(frozen=True, slots=True)
class KeyRow:
    """What becomes of one key of the script, or of one default of verl's; the line of a default is None."""

    key: str
    value: str
    line: int | None
    status: Status
    to: dict[str, Any]
    why: str

    def as_dict(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "value": self.value,
            "line": self.line,
            "status": self.status,
            "to": self.to,
            "why": self.why,
        }


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
    for rule in RULES:
        if rule.always and rule.pattern not in settings:
            value = settings[rule.pattern]
            verdict = _judge(settings, rule, rule.pattern, value)
            if verdict.to or verdict.status == "refused":
                row = KeyRow(rule.pattern, str(value), None, verdict.status, verdict.to, verdict.why)
                found.defaults.append(row)
                if verdict.status == "refused":
                    found.refused.append(f"verl's default {rule.pattern}={value}: {verdict.why}")
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
    rule = rule_of(key)
    if rule is None:
        return Meaning("refused", {}, f"verl has no such key; did you mean {nearest(override.key)}?")
    if engine_of(key) not in (None, settings.engine):
        return Meaning("implied", {}, f"verl's trainer of this script is {settings.trainer}, which does not read it")
    value = settings[key]
    if isinstance(value, str) and "${" in value:
        return Meaning("refused", {}, f"Hydra computes {value}; write its value")
    _check_type(rule, override, parse(override.text) if not isinstance(value, str) else value)
    if isinstance(value, bool | int | float) and rule.kinds == (str,):
        value = override.text
    return _judge(settings, rule, key, value)


def _judge(settings: Settings, rule: KeyRule, key: str, value: Any) -> Meaning:
    if value is None and rule.kinds and rule.judge not in READ_NULL:
        return Meaning("implied", {}, "null is off")
    return rule.judge(settings, key, value)


def _check_type(rule: KeyRule, override: Override, value: Any) -> None:
    where = f"line {override.line}: " if override.line else ""
    if value is None:
        default = DEFAULTS.get(old_name(override.key))
        if isinstance(default, int | float) and old_name(override.key) not in NULLABLE:
            raise ScriptError(f"{where}{override.key} is null, but must be a value such as {default}; correct it")
        return
    if not rule.kinds or (rule.kinds == (str,) and not isinstance(value, list | dict)):
        return
    is_right = isinstance(value, rule.kinds) and (bool in rule.kinds or not isinstance(value, bool))
    if not is_right:
        wanted = NAMES[rule.kinds[-1]]
        raise ScriptError(f"{where}{override.key} is {override.text!r}, but must be {wanted}; correct it")


def check_types(settings: Settings) -> None:
    """Refuse an engine that verl does not have, and values of the wrong type, before anything is computed with them.

    Raises:
        NoSuchEngine: as it says.
        ScriptError: a value has the wrong type.
    """
    assert settings.engine
    for key, override in settings.given.items():
        rule = rule_of(key)
        if rule is not None:
            value = parse(override.text)
            if not (isinstance(value, str) and "${" in value):
                _check_type(rule, override, value)
