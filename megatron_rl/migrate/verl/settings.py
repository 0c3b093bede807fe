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
from pathlib import PurePath
from typing import Any, Literal

from megatron_rl.migrate.verl.call import Override, VerlCall
from megatron_rl.migrate.verl.lexer import ScriptError
from megatron_rl.migrate.verl.values import parse

Status = Literal["used", "mapped", "implied", "left out", "refused"]
"""`left out` trains the same, and something besides differs: evaluations, records, checkpoints, the machine. `refused`
would train something else, and ends the conversion."""

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
ENGINES = {"dp": "FSDP", "megatron": "Megatron", "veomni": "VeOmni", "torchtitan": "TorchTitan"}
"""verl's engines -> the names of their trainers."""
STRATEGIES = {
    **dict.fromkeys(("fsdp", "fsdp2", "fsdp_turbo"), "dp"),
    **{name: name for name in ENGINES if name != "dp"},
}
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
RENAMED = {
    "reward.reward_model.model_path": "reward_model.model.path",
    "reward.reward_manager.name": "reward_model.reward_manager",
    "reward_manager.name": "reward_model.reward_manager",
    "reward.num_workers": "reward_model.num_workers",
    "reward.reward_model.": "reward_model.",
    "reward.reward_kwargs.": "reward_model.reward_kwargs.",
    "reward.reward_manager.": "reward_manager.",
    "reward.custom_reward_function.": "custom_reward_function.",
    "reward.sandbox_fusion.": "reward_model.sandbox_fusion.",
    "sandbox_fusion.": "reward_model.sandbox_fusion.",
    "critic.fsdp.": "critic.model.fsdp_config.",
}
"""New names of verl's keys -> the names that they had, which the table has. With a dot at the end it is a prefix."""
MEGATRON = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
}
OPTIMIZER = {"lr_warmup_steps": -1, "lr_warmup_steps_ratio": 0.0, "weight_decay": 0.01, "betas": [0.9, 0.999]}
MODELS = ("actor_rollout_ref.model", "critic.model")
ADAPTERS = {"lora_rank": 0, "lora_alpha": 16, "target_modules": "all-linear", "lora.rank": 0, "lora.alpha": 32}
DEFAULTS: dict[str, Any] = {
    "data.train_files": "~/data/rlhf/gsm8k/train.parquet",
    "data.val_files": "~/data/rlhf/gsm8k/test.parquet",
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.truncation": "error",
    "data.filter_overlong_prompts": False,
    "data.shuffle": True,
    "critic.loss_agg_mode": "token-mean",
    "actor_rollout_ref.hybrid_engine": True,
    "actor_rollout_ref.model.path": "~/models/deepseek-llm-7b-chat",
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    f"{ACTOR}.optim.lr": 1e-6,
    f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ACTOR}.ppo_epochs": 1,
    f"{ACTOR}.use_dynamic_bsz": False,
    f"{ACTOR}.ppo_max_token_len_per_gpu": 16384,
    f"{ACTOR}.clip_ratio": 0.2,
    f"{ACTOR}.clip_ratio_low": 0.2,
    f"{ACTOR}.clip_ratio_high": 0.2,
    f"{ACTOR}.clip_ratio_c": 3.0,
    f"{ACTOR}.tau_pos": 1.0,
    f"{ACTOR}.tau_neg": 1.05,
    f"{ACTOR}.policy_loss.loss_mode": "vanilla",
    f"{ACTOR}.policy_loss.clip_cov_ratio": 0.0002,
    f"{ACTOR}.policy_loss.clip_cov_lb": 1.0,
    f"{ACTOR}.policy_loss.clip_cov_ub": 5.0,
    f"{ACTOR}.policy_loss.kl_cov_ratio": 0.0002,
    f"{ACTOR}.policy_loss.ppo_kl_coef": 0.1,
    f"{ACTOR}.loss_agg_mode": "token-mean",
    f"{ACTOR}.entropy_coeff": 0,
    f"{ACTOR}.use_kl_loss": False,
    f"{ACTOR}.kl_loss_coef": 0.001,
    f"{ACTOR}.kl_loss_type": "low_var_kl",
    f"{ACTOR}.ulysses_sequence_parallel_size": 1,
    f"{ROLLOUT}.n": 1,
    f"{ROLLOUT}.temperature": 1.0,
    f"{ROLLOUT}.dtype": "bfloat16",
    f"{ROLLOUT}.tensor_model_parallel_size": 2,
    f"{ROLLOUT}.pipeline_model_parallel_size": 1,
    f"{ROLLOUT}.data_parallel_size": 1,
    f"{ROLLOUT}.expert_parallel_size": 1,
    f"{ROLLOUT}.gpu_memory_utilization": 0.5,
    f"{ROLLOUT}.max_num_seqs": 256,
    f"{ROLLOUT}.val_kwargs.temperature": 0,
    f"{ROLLOUT}.val_kwargs.do_sample": False,
    f"{ROLLOUT}.val_kwargs.n": 1,
    "critic.optim.lr": 1e-5,
    "critic.cliprange_value": 0.5,
    "algorithm.adv_estimator": "gae",
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.horizon": 10000,
    "algorithm.kl_ctrl.target_kl": 0.1,
    "algorithm.filter_groups.enable": False,
    "algorithm.rollout_correction.rollout_is_threshold": 2.0,
    "algorithm.rollout_correction.rollout_is_batch_normalize": False,
    "algorithm.rollout_correction.bypass_mode": False,
    "algorithm.rollout_correction.loss_type": "ppo_clip",
    "custom_reward_function.name": "compute_score",
    "reward_model.enable": False,
    "reward_model.reward_manager": "naive",
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "trainer.total_epochs": 30,
    "trainer.project_name": "verl_examples",
    "trainer.experiment_name": "gsm8k",
    "trainer.logger": ["console", "wandb"],
    "trainer.val_before_train": True,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.critic_warmup": 0,
    "trainer.resume_mode": "auto",
    **{f"{model}.{name}": value for name, value in ADAPTERS.items() for model in MODELS},
    **{f"{ACTOR}.megatron.{name}": size for name, size in MEGATRON.items()},
    **{f"{owner}.optim.{name}": value for name, value in OPTIMIZER.items() for owner in (ACTOR, "critic")},
}


OF_ENGINES: dict[str, dict[str, Any]] = {
    "veomni": {"optim.lr_scheduler_type": "cosine"},
    "torchtitan": {"optim.decay_type": "linear"},
}
"""Defaults of the actor and the critic that differ between engines."""


class NoSuchEngine(ScriptError):
    """The script chooses an engine that verl does not have."""


def old_name(key: str) -> str:
    """The name that a key had before verl renamed it."""
    for new, old in RENAMED.items():
        if key == new or (new.endswith(".") and key.startswith(new)):
            return old + key.removeprefix(new)
    return key


ENGINE_PARTS = {
    "fsdp_config": "dp",
    "fsdp": "dp",
    "megatron": "megatron",
    "veomni": "veomni",
    "torchtitan": "torchtitan",
}
"""Sections of the actor, the reference and the critic that one engine alone reads -> the engine."""


def engine_of(key: str) -> str | None:
    """The engine that alone reads a key; None if all do."""
    owner = re.match(r"actor_rollout_ref\.(?:actor|ref)\.|critic\.(?:model\.)?", key)
    return ENGINE_PARTS.get(key[owner.end() :].partition(".")[0]) if owner else None


@dataclass(frozen=True, slots=True)
class Meaning:
    """What becomes of a setting: the keys of ours that it gives, and a phrase that says why or what differs."""

    status: Status
    to: dict[str, Any]
    why: str = ""


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
        """verl's default; some keys of the critic follow the actor."""
        owner, _, name = key.rpartition(".")
        if owner == "critic" and name in ("ppo_mini_batch_size", "ppo_epochs", "use_dynamic_bsz", "loss_agg_mode"):
            return self[f"{ACTOR}.{name}"]
        if owner == "critic.megatron":
            return MEGATRON.get(name)
        if key.startswith((f"{ACTOR}.optim.", "critic.optim.")):
            name = f"optim.{name}"
            if name in OF_ENGINES.get(self.engine, {}):
                return OF_ENGINES[self.engine][name]
        return DEFAULTS.get(key)

    def __contains__(self, key: str) -> bool:
        """Whether the script gives the key."""
        return key in self._values

    @property
    def num_rows(self) -> int | None:
        return None if self.rows is None else sum(self.rows)

    @property
    def engine(self) -> str:
        """verl's engine: the key of ENGINES.

        Raises:
            NoSuchEngine: verl has none of this name, or the script names two.
        """
        option = self.call.options.get("--config-name")
        group, strategy = self._values.get(ENGINE_GROUP), self._values.get(f"{ACTOR}.strategy")
        named = {
            "model_engine": self._values.get("model_engine"),
            ENGINE_GROUP: None if group is None else str(group).removesuffix("_actor"),
            f"{ACTOR}.strategy": None if strategy is None else STRATEGIES.get(strategy, strategy),
        }
        found = {key: name for key, name in named.items() if name is not None}
        for key, name in found.items():
            if name not in ENGINES:
                legal = ", ".join(ENGINES if key == "model_engine" else STRATEGIES)
                legal = ", ".join(f"{one}_actor" for one in ENGINES) if key == ENGINE_GROUP else legal
                what = f"{self._where(key)} names an engine that is not verl's own; verl has {legal}"
                raise NoSuchEngine(f"{what}. Choose one of them, with its keys")
        if len(set(found.values())) > 1:
            both = " and ".join(self._where(key) for key in found)
            raise NoSuchEngine(f"{both} name different engines; keep one of them")
        if found:
            return next(iter(found.values()))
        return "megatron" if option is not None and "megatron" in option.text else "dp"

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
    def is_sharing(self) -> bool:
        """Whether trainers and engines take turns on the same GPUs. Active sampling needs engines of their own."""
        return not self.is_apart and not self["algorithm.filter_groups.enable"]

    @property
    def has_critic(self) -> bool:
        return bool(self["algorithm.adv_estimator"] == "gae")

    @property
    def num_trainer_gpus(self) -> int:
        gpus = int(self["trainer.nnodes"]) * int(self["trainer.n_gpus_per_node"])
        return gpus if self.is_apart or self.is_sharing else max(gpus // 2, 1)

    @property
    def num_engine_gpus(self) -> int:
        if self.is_apart and self["rollout.n_gpus_per_node"] is not None:
            return int(self["rollout.nnodes"] or 1) * int(self["rollout.n_gpus_per_node"])
        return self.num_trainer_gpus

    @property
    def updates_per_step(self) -> int:
        return max(-(-int(self["data.train_batch_size"]) // int(self[f"{ACTOR}.ppo_mini_batch_size"])), 1)

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
