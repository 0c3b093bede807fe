"""verl's settings of one run: the overrides of the script over verl's defaults.

verl's trainer is chosen by `model_engine` (its trainer/config/model_engine and ppo_trainer.yaml of August 2026: `dp` is
the default and FSDP), and in earlier versions by `--config-name`. The engine decides which keys verl reads.

`DEFAULTS` has only keys that the conversion reads. Invariant: a key that the script gives twice has its last value, as
in Hydra.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath
from typing import Any, Literal

from megatron_rl.migrate.verl.call import Override, VerlCall
from megatron_rl.migrate.verl.keys import DEFAULTS, ENGINES, old_name
from megatron_rl.migrate.verl.lexer import ScriptError
from megatron_rl.migrate.verl.values import parse

Status = Literal["used", "mapped", "implied", "left out", "refused"]
"""`left out` trains the same, and something besides differs: evaluations, records, checkpoints, the machine. `refused`
would train something else, and ends the conversion."""

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
STRATEGIES = dict.fromkeys(("fsdp", "fsdp2", "fsdp_turbo"), "dp") | {name: name for name in ENGINES if name != "dp"}
"""The values of `actor.strategy` -> the engine that has it."""
ENGINE_GROUP = f"actor@{ACTOR}"
"""Hydra's name of the configuration that `model_engine` chooses."""
SEQUENCE_RANKS = {
    "dp": ("ulysses_sequence_parallel_size", "fsdp_config.ulysses_sequence_parallel_size"),
    "megatron": ("megatron.context_parallel_size",),
    "veomni": ("veomni.ulysses_parallel_size",),
    "torchtitan": ("torchtitan.context_parallel_size",),
}
"""The actor's keys of the number of GPUs over which an engine splits the tokens of a sequence."""
OF_ENGINES: dict[str, dict[str, Any]] = {
    "veomni": {"optim.lr_scheduler_type": "cosine"},
    "torchtitan": {"optim.decay_type": "linear"},
}
"""Defaults of the actor and the critic that differ between engines."""


class NoSuchEngine(ScriptError):
    """The script chooses an engine that verl does not have."""


ENGINE_PARTS = {"fsdp_config": "dp", "fsdp": "dp", **{name: name for name in ENGINES if name != "dp"}}
"""Sections of the actor, the reference and the critic that one engine alone reads -> the engine."""


def engine_of(key: str) -> str | None:
    """The engine that alone reads a key; None if all do."""
    owner = re.match(r"actor_rollout_ref\.(?:actor|ref)\.|critic\.(?:model\.)?", key)
    return ENGINE_PARTS.get(key[owner.end() :].partition(".")[0]) if owner else None


def owner_of(key: str) -> str:
    """The section of ours that a key of verl's actor or critic belongs to."""
    return "critic" if key.startswith("critic.") else "policy"


@dataclass(frozen=True, slots=True)
class Meaning:
    """What becomes of a setting: the keys of megatron_rl that it maps to, and a phrase why or what differs."""

    status: Status
    to: dict[str, Any]
    why: str = ""


def used(to: dict[str, Any], why: str = "") -> Meaning:
    return Meaning("used", to, why)


def mapped(to: dict[str, Any], why: str = "") -> Meaning:
    return Meaning("mapped", to, why)


def implied(why: str) -> Meaning:
    return Meaning("implied", {}, why)


def refused(why: str) -> Meaning:
    return Meaning("refused", {}, why)


class Settings:
    """The settings of a call, by verl's keys."""

    def __init__(self, call: VerlCall, rows: Sequence[int] | None = None) -> None:
        self.call = call
        self.rows = rows
        """The numbers of training rows of each file, if the user has given them or the files have told them."""
        self.mesh: dict[str, int] | None = None
        """The trainer's sizes where verl's trainer is FSDP, by our names; None until they are chosen."""
        self.mesh_reason = "a first guess"
        self.more_stages = 1
        """The factor by which an engine has more stages than in verl, to fit."""
        self.given: dict[str, Override] = {}
        for override in call.overrides:
            if override.problem is None and override.prefix != "~":
                self.given[old_name(override.key)] = override
        self._values = {key: parse(override.text) for key, override in self.given.items()}

    def __getitem__(self, key: str) -> Any:
        """The value of a key: the script's, or verl's default, or None."""
        value = self._values.get(key) if key in self._values else self._default(key)
        if isinstance(value, str) and (found := re.fullmatch(r"\$\{([\w.]+)\}", value)):
            return self[found[1]] if found[1] != key else None
        if isinstance(value, str) and "${" in value:
            return re.sub(r"\$\{([\w.]+)\}", lambda found: str(self[found[1]]), value)
        return value

    def _default(self, key: str) -> Any:
        """verl's default, which may be another key's value, or differ between engines."""
        if key.startswith((f"{ACTOR}.optim.", "critic.optim.")):
            name = f"optim.{key.rpartition('.')[2]}"
            if name in OF_ENGINES.get(self.engine, {}):
                return OF_ENGINES[self.engine][name]
        found = DEFAULTS.get(key)
        if isinstance(found, str) and found.startswith("="):
            return self[found[1:].replace("@", "actor_rollout_ref.")]
        return found

    def __contains__(self, key: str) -> bool:
        """Whether the script gives the key."""
        return key in self._values

    @property
    def num_rows(self) -> int | None:
        return None if self.rows is None else sum(self.rows)

    @cached_property
    def engine(self) -> str:
        """verl's engine: the key of ENGINES.

        Raises:
            NoSuchEngine: verl has none of this name, or the script names two.
        """
        given = {key: self._values.get(key) for key in ("model_engine", ENGINE_GROUP, f"{ACTOR}.strategy")}
        legal: dict[str, dict[str, str]] = {
            "model_engine": ENGINES,
            ENGINE_GROUP: {f"{one}_actor": one for one in ENGINES},
        }
        found: dict[str, str] = {}
        if (group := given[ENGINE_GROUP]) is not None:
            given[ENGINE_GROUP] = f"{str(group).removesuffix('_actor')}_actor"
        for key, name in given.items():
            known = legal.get(key, STRATEGIES)
            if name is not None and name not in known:
                what = f"{self._where(key)} names an engine that is not verl's own; verl has {', '.join(known)}"
                raise NoSuchEngine(f"{what}. Choose one of them, with its keys")
            if name is not None:
                found[key] = name if key == "model_engine" else known[name]
        if len(set(found.values())) > 1:
            both = " and ".join(self._where(key) for key in found)
            raise NoSuchEngine(f"{both} name different engines; keep one of them")
        option = self.call.options.get("--config-name")
        default = "megatron" if option is not None and "megatron" in option.text else "dp"
        return next(iter(found.values()), default)

    def _where(self, key: str) -> str:
        given = self.given[key]
        return f"{f'line {given.line}: ' if given.line else ''}{key}={given.text}"

    @property
    def trainer(self) -> str:
        """The name of verl's trainer, for sentences."""
        return ENGINES[self.engine]

    @property
    def is_megatron(self) -> bool:
        """Whether verl's trainer is Megatron-Core."""
        return self.engine == "megatron"

    @property
    def is_apart(self) -> bool:
        """Whether the engines have GPUs of their own, and work at the same time as the trainers."""
        return "one_step_off" in self.call.module or self["rollout.nnodes"] is not None

    @property
    def has_critic(self) -> bool:
        return bool(self["algorithm.adv_estimator"] == "gae")

    @property
    def num_trainer_gpus(self) -> int:
        return int(self["trainer.nnodes"]) * int(self["trainer.n_gpus_per_node"])

    @property
    def num_engine_gpus(self) -> int:
        if self.is_apart and self["rollout.n_gpus_per_node"] is not None:
            return int(self["rollout.nnodes"] or 1) * int(self["rollout.n_gpus_per_node"])
        return self.num_trainer_gpus

    def updates_per_step(self, owner: str) -> int:
        """The optimizer steps of a training step of ACTOR or `critic`."""
        return max(-(-int(self["data.train_batch_size"]) // int(self[f"{owner}.ppo_mini_batch_size"])), 1)

    def optimizer_steps(self, owner: str) -> int:
        """`updates_per_step` in all epochs of a training step."""
        return self.updates_per_step(owner) * int(self[f"{owner}.ppo_epochs"])

    @property
    def context(self) -> int:
        """The number of GPUs over which verl's trainer splits the tokens of a sequence."""
        return max(int(self[f"{ACTOR}.{name}"] or 1) for name in SEQUENCE_RANKS[self.engine])

    @property
    def longest(self) -> int:
        return int(self["data.max_prompt_length"]) + int(self["data.max_response_length"])

    @property
    def model_name(self) -> str:
        return PurePath(str(self["actor_rollout_ref.model.path"] or "")).name
