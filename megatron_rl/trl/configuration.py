"""TRL's arguments as typed dataclasses, which parsers of command lines read and scripts extend.

Invariants (tests/unit/trl, tests/doors): a value that is not supported is refused when it is given, with all others; an
argument of an earlier release of TRL has its meaning.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, field, fields, is_dataclass, make_dataclass
from difflib import get_close_matches
from enum import Enum
from typing import Any, ClassVar, Self

from megatron_rl.config.machine import count_gpus
from megatron_rl.trl.arguments import (
    ARGUMENTS,
    CPO_ARGUMENTS,
    DPO_ARGUMENTS,
    FORMER,
    FORMER_COMMON,
    FORMER_SFT,
    GKD_ARGUMENTS,
    KTO_ARGUMENTS,
    ORPO_ARGUMENTS,
    REWARD_ARGUMENTS,
    SFT_ARGUMENTS,
    Argument,
    type_of,
)
from megatron_rl.trl.distillation import faults_of_gkd
from megatron_rl.trl.mapping import faults_of_grpo
from megatron_rl.trl.offline import faults_of_dpo, faults_of_reward, faults_of_sft

RENAMED = {
    "evaluation_strategy": "eval_strategy",
    "wandb_log_unique_prompts": "log_unique_prompts",
    "max_seq_length": "max_length",
}
LEVELS = {"passive": logging.WARNING, "critical": logging.CRITICAL, "warn": logging.WARNING}


class Arguments:
    """What all configurations of TRL's form have: refusals, access by name, and what scripts ask of
    `TrainingArguments`."""

    NAME: ClassVar[str]
    """TRL's name of the class, also of a script's subclass."""
    KNOWN: ClassVar[Mapping[str, Argument]]
    faults: ClassVar[Callable[[Any], list[str]]]
    """What cannot be expressed for any model and rows."""
    sections: Any
    output_dir: str | None
    seed: int

    def __new__(cls, *values: Any, **given: Any) -> Self:
        known = [one.name for one in fields(cls)]  # type: ignore[arg-type]  # its subclasses are dataclasses
        if unknown := [name for name in given if name not in known]:
            told = [f"has no argument {name!r}: {_near(name, known)}" for name in unknown]
            try:
                cls(*values, **{name: value for name, value in given.items() if name in known})
            except ValueError as error:
                told.append(str(error).removeprefix(f"{cls.NAME}: "))
            raise TypeError(f"{cls.NAME} " + "; ".join(told))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for one in fields(self):  # type: ignore[arg-type]
            value = getattr(self, one.name)
            if isinstance(value, str) and value.startswith("{"):  # as a command line gives it
                with suppress(ValueError):
                    setattr(self, one.name, json.loads(value))
        for name, today in RENAMED.items():
            if vars(self).get(name) is not None:
                setattr(self, today, vars(self)[name])
        if vars(self).get("loss_type") == "chunked_nll":
            self.loss_type = "nll"  # an earlier name of it
        ratio = vars(self)["warmup_ratio"]
        if ratio and not vars(self)["warmup_steps"]:
            self.warmup_steps = float(ratio)
        faults = _refused(vars(self), self.KNOWN)
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            faults.append(
                "start the script with `python`, not with accelerate or torchrun: the run starts its own ranks"
            )
        faults += type(self).faults(self)
        if faults:
            raise ValueError(f"{self.NAME}: " + "; ".join(faults))

    @property
    def device(self) -> Any:
        """The script's own: the run's processes have theirs."""
        import torch

        return torch.device("cpu")

    @property
    def n_gpu(self) -> int:
        return min(1, count_gpus())

    world_size = 1
    process_index = local_process_index = 0
    should_save = should_log = True
    distributed_state = None
    """The script is one process; the run's ranks are elsewhere."""

    def get_process_log_level(self) -> int:
        level = str(getattr(self, "log_level", "passive"))
        return LEVELS.get(level) or int(logging.getLevelNamesMapping().get(level.upper(), logging.WARNING))

    def get_warmup_steps(self, num_training_steps: int) -> int:
        count = float(vars(self)["warmup_steps"])
        return int(count) if count >= 1 else -int(-count * num_training_steps // 1)

    @contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        yield

    def to_dict(self) -> dict[str, Any]:
        plain = {name: value.value if isinstance(value, Enum) else value for name, value in asdict(self).items()}  # type: ignore[call-overload]
        return {name: f"<{name.upper()}>" if name.endswith("_token") else value for name, value in plain.items()}

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2, default=str)

    def to_sanitized_dict(self) -> dict[str, Any]:
        return {
            name: value if isinstance(value, bool | int | float | str) else str(value)
            for name, value in self.to_dict().items()
        }

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{self.NAME} of megatron_rl has no {name!r}: it has TRL's arguments, and the run's own keys are in "
            f"`sections`; docs/coming_from_trl.md lists them"
        )


def _near(name: str, known: list[str]) -> str:
    near = get_close_matches(name, known, 1)
    return f"did you mean {near[0]!r}?" if near else "docs/coming_from_trl.md lists all arguments"


def _refused(given: Mapping[str, Any], known: Mapping[str, Argument]) -> list[str]:
    """What is wrong with values that are not the default of an argument that has no other here. Arguments with the
    same reason are one sentence."""
    by_reason: dict[str, list[str]] = {}
    for name, argument in known.items():
        value = given.get(name)
        if argument.treatment == "refused" and value not in (argument.default, None, [], ()):
            by_reason.setdefault(argument.says, []).append(f"{name}={value!r}")
    return [
        f"{', '.join(values)} {'is' if len(values) == 1 else 'are'} not supported: {says}"
        for says, values in by_reason.items()
    ]


def _field(name: str, argument: Argument) -> tuple[str, Any, Any]:
    default, told = argument.default, {"help": argument.says.replace("%", "%%")}
    if isinstance(default, tuple):
        return name, type_of(name, argument), field(default_factory=lambda: list(default), metadata=told)
    return name, type_of(name, argument), field(default=default, metadata=told)


def _config(
    name: str,
    arguments: Mapping[str, Argument],
    former: Mapping[str, Argument],
    faults: Callable[[Any], list[str]],
) -> Any:
    made = make_dataclass(
        name,
        [
            *(_field(one, argument) for one, argument in {**arguments, **former}.items()),
            ("sections", dict[str, Any] | str | None, field(default=None, metadata={"help": "keys of megatron_rl"})),
        ],
        bases=(Arguments,),
        namespace={
            "__doc__": f"TRL's {name}. `sections` has keys of ours, such as {{'cluster': {{'gpus_per_trainer': 1}}}}.",
            "NAME": name,
            "KNOWN": arguments,
            "faults": staticmethod(faults),
        },
    )
    made.__module__ = __name__
    return made


GRPOConfig: Any = _config("GRPOConfig", ARGUMENTS, FORMER, faults_of_grpo)
DPOConfig: Any = _config("DPOConfig", DPO_ARGUMENTS, FORMER_COMMON, faults_of_dpo)
KTOConfig: Any = _config("KTOConfig", KTO_ARGUMENTS, FORMER_COMMON, faults_of_dpo)
ORPOConfig: Any = _config("ORPOConfig", ORPO_ARGUMENTS, FORMER_COMMON, faults_of_dpo)
CPOConfig: Any = _config("CPOConfig", CPO_ARGUMENTS, FORMER_COMMON, faults_of_dpo)
GKDConfig: Any = _config("GKDConfig", GKD_ARGUMENTS, FORMER_SFT, faults_of_gkd)
SFTConfig: Any = _config("SFTConfig", SFT_ARGUMENTS, FORMER_SFT, faults_of_sft)
RewardConfig: Any = _config("RewardConfig", REWARD_ARGUMENTS, FORMER_COMMON, faults_of_reward)
OWN = {"GRPOConfig": "num_generations", "DPOConfig": "f_divergence_type", "SFTConfig": "assistant_only_loss"}
OWN |= {"RewardConfig": "center_rewards_coefficient", "KTOConfig": "desirable_weight"}
OWN |= {"ORPOConfig": "padding_value", "CPOConfig": "cpo_alpha", "GKDConfig": "lmbda"}
"""An argument by which a configuration of TRL is known."""


def as_arguments(args: Any, config: Any = GRPOConfig) -> Any:
    """The same as a configuration of this project, if it is TRL's own.

    Raises:
        TypeError: it is neither of them.
        ValueError: a value of it is not supported.
    """
    name = config.NAME
    if isinstance(args, Arguments) and name == args.NAME:
        Arguments.__post_init__(args)  # a script may have set attributes since
        return args
    if isinstance(args, Arguments | type) or not (is_dataclass(args) and hasattr(args, OWN[name])):
        raise TypeError(
            f"{name.replace('Config', 'Trainer')}: args is a {type(args).__name__}; give a {name}, "
            f"`from megatron_rl.trl import {name}`"
        )
    given = {one: getattr(args, one) for one in config.KNOWN if hasattr(args, one)}
    if given.get("steps_per_generation"):  # TRL computes each from the other
        given["generation_batch_size"] = None
    if given.get("steps_per_generation") == given["gradient_accumulation_steps"]:
        given.pop("steps_per_generation", None)
    return config(**given)
