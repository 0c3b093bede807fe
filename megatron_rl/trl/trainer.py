"""TRL's GRPOTrainer, whose runs are this project's: Megatron trains, vLLM answers.

Invariants (tests/unit/trl): what the trainer is given is used or refused by name; functions of the script reach the
verifiers; callbacks see the steps of the run while it goes on, and can stop it.
"""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Mapping, Sequence
from itertools import islice
from math import nan
from pathlib import Path
from statistics import fmean
from typing import Any

from transformers import TrainerControl, TrainerState
from transformers.trainer_utils import TrainOutput

from megatron_rl.api import OF_STEPS, Inputs, Run, start
from megatron_rl.config.load import merge
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.loop.checkpoints import find_checkpoints
from megatron_rl.observe.records import read_metrics
from megatron_rl.trl.adapters import adapters_of
from megatron_rl.trl.arguments import GRPOConfig
from megatron_rl.trl.mapping import StepSizes, configuration

NAMES = {
    "lr": "learning_rate",
    "reward/mean": "reward",
    "reward/std": "reward_std",
    "length/response_mean": "completions/mean_length",
    "length/response_max": "completions/max_length",
    "length/response_cut": "completions/clipped_ratio",
    "pg_clipfrac": "clip_ratio/region_mean",
    "mismatch/mean_abs": "sampling/sampling_logp_difference/mean",
    "mismatch/max_abs": "sampling/sampling_logp_difference/max",
    "eval/reward_mean": "eval_reward",
    "eval/accuracy": "eval_accuracy",
    "eval/response_mean": "eval_completions/mean_length",
    "time/total_s": "step_time",
}
"""Our metrics by TRL's names. The others, such as `loss`, `grad_norm`, `entropy` and `kl`, keep theirs."""
REFUSED = {
    "optimizers": "policy.optimizer in GRPOConfig(sections=...) has Adam and Muon",
    "quantization_config": "frozen weights of adapters can be fp8: GRPOConfig(sections={'policy': {'lora': {'base': "
    "'fp8'}}, 'rollout': {'lora': 'merged'}})",
    "rollout_func": "rollout.environment in GRPOConfig(sections=...) names an environment or an agent",
    "environment_factory": "rollout.environment in GRPOConfig(sections=...) names the class",
}

EVENTS = ("on_train_begin", "on_log", "on_evaluate", "on_step_end", "on_save", "on_train_end")
"""What callbacks are told."""
OTHERS = ("processing_class", "reward_processing_classes", "callbacks", "tools", "peft_config")


class GRPOTrainer:
    """
    Args:
        model: a Hugging Face folder, the name of a model that is in the hub's cache, or a model of transformers.
        reward_funcs: functions, objects that can be called, or folders of reward models with one label.
        train_dataset: a data set or a list of rows, with `prompt` as text or chat turns. Of an iterable one, the rows
            that the steps need.
        others: `processing_class`, which is saved with a `model` that is no folder; `callbacks` of transformers, which
            are called with `args`, `state` and `control` when training begins and ends, and for each step and
            checkpoint, soon after it; `tools`, functions that the model's turns call; `peft_config`, PEFT's LoraConfig,
            which becomes `policy.lora`.

    Raises:
        ValueError: an argument is not supported; the message says what to do.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        **others: Any,
    ) -> None:
        if unknown := sorted(others.keys() - {*OTHERS, *REFUSED}):
            raise TypeError(f"GRPOTrainer has no argument {unknown[0]!r}")
        empty = (None, (None, None))
        if faults := [f"{name}: {why}" for name, why in REFUSED.items() if others.get(name) not in empty]:
            raise ValueError("GRPOTrainer does not support " + "; ".join(faults))
        callbacks, tools = others.get("callbacks"), others.get("tools")
        if isinstance(eval_dataset, Mapping):
            raise ValueError("GRPOTrainer takes one eval_dataset; a column `dataset` in its rows separates the metrics")
        if train_dataset is None:
            raise ValueError("GRPOTrainer needs a train_dataset")
        if hasattr(model, "peft_config"):
            raise ValueError(
                f"model is a {type(model).__name__} of PEFT: give its base model as model and its LoraConfig as "
                "peft_config; trained adapters begin a run with GRPOConfig(sections={'policy': {'lora': {'start': "
                "FOLDER}}}), where FOLDER is what save_pretrained has written"
            )
        self.args: Any = args or GRPOConfig(output_dir=f"{_name_of(model)}-GRPO")
        self.state, self.control = TrainerState(), TrainerControl()
        self.run: Run | None = None
        self._model, self._processing_class = model, others.get("processing_class")
        several = isinstance(reward_funcs, Sequence) and not isinstance(reward_funcs, str)
        self._rewards = list(reward_funcs) if several else [reward_funcs]
        self._train, self._eval, self._tools = train_dataset, eval_dataset, list(tools or ())
        given = others.get("peft_config")
        self._lora = None if given is None else adapters_of(given)
        self._callbacks: list[Any] = []
        for one in callbacks or ():
            self.add_callback(one)
        self._seen, self._saved = 0, 0
        self._lost: list[dict[str, float]] = []
        """The steps after the newest checkpoint, as long as the continued run has not removed them."""

    def add_callback(self, callback: Any) -> None:
        """
        Raises:
            TypeError: it is no callback of transformers.
        """
        made = callback() if inspect.isclass(callback) else callback
        if missing := [event for event in EVENTS if not callable(getattr(made, event, None))]:
            raise TypeError(
                f"callbacks: {callback!r} has no method {missing[0]}, so it is no callback; give a subclass of "
                "transformers.TrainerCallback, or an object of one"
            )
        self._callbacks.append(made)

    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainOutput:
        """Train to the end; Ctrl-C stops with a checkpoint. `trainer.run` has the run's folder, metrics and model.

        Args:
            resume_from_checkpoint: continues the run of `output_dir` from its newest checkpoint, with the arguments
                and rows of this trainer; a change of the run's meaning is refused. If there is no checkpoint, the run
                begins.
        """
        folder = Path(self.args.output_dir or "trainer_output").absolute()
        continued = bool(resume_from_checkpoint or self.args.resume_from_checkpoint)
        sections = self._sections(folder)
        self.state.max_steps = sections["run"]["steps"] * sections["algorithm"]["updates_per_step"]
        self._recall(folder if continued else None)
        self._tell("on_train_begin")
        self.run = start(
            "grpo",
            Inputs(self._model_folder(folder), self._train, self._eval, self._entries()),
            folder.name,
            (),
            sections,
            self._watch,
            continued,
        )
        self._tell("on_train_end")
        losses = [record["loss"] for record in self.run.metrics if "loss" in record]
        mean = fmean(losses) if losses else nan
        return TrainOutput(self.state.global_step, mean, {"train_loss": mean})

    def evaluate(self) -> dict[str, float]:
        """The newest evaluation of the run. With an eval_dataset a run evaluates before its first step, after its last
        one, and as `eval_strategy` says.

        Raises:
            ValueError: there is none.
        """
        found = [] if self.run is None else self.run.evaluations
        if not found:
            raise ValueError("nothing was evaluated: give an eval_dataset, and call train first")
        return {name: value for name, value in _named(found[-1]).items() if name.startswith("eval")}

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Copy the trained model's folder.

        Raises:
            ValueError: the run has not done all its steps.
        """
        trained = None if self.run is None else self.run.model
        if trained is None:
            raise ValueError("there is no trained model yet: the run has not done all its steps")
        shutil.copytree(trained, Path(output_dir or self.args.output_dir or "trainer_output"), dirs_exist_ok=True)

    def _sections(self, folder: Path) -> dict[str, Any]:
        """The sections of the run; `sections` of the arguments have the last word."""
        own = dict(self.args.sections or {})
        replicas = own.get("policy", {}).get("parallel", {}).get("data", 1)
        if not hasattr(self._train, "__len__"):
            if self.args.max_steps <= 0:
                raise ValueError("an iterable train_dataset has no length: give max_steps")
            sizes = StepSizes.of(self.args, replicas)
            self._train = list(islice(self._train, self.args.max_steps * sizes.prompts))
        sections = configuration(self.args, len(self._train), replicas)
        positions = _positions(self._model)
        room = positions - self.args.max_completion_length
        if 0 < room < RolloutConfig().max_prompt_tokens:
            sections["rollout"]["max_prompt_tokens"] = room
        if self._tools:
            turns = (
                {}
                if self.args.max_tool_calling_iterations is None
                else {"max_turns": self.args.max_tool_calling_iterations + 1}
            )
            sections["rollout"]["environment"] = {"kind": "tools", "paths": self._tools, **turns}
        if self._lora is not None:
            sections["policy"]["lora"] = self._lora
        merge(sections, {"run": {"folder": str(folder.parent)}})
        merge(sections, own)
        return sections

    def _entries(self) -> list[dict[str, Any]]:
        weights = self.args.reward_weights or [1.0] * len(self._rewards)
        if len(weights) != len(self._rewards):
            raise ValueError(f"reward_weights has {len(weights)} numbers for {len(self._rewards)} reward_funcs")
        entries = []
        for reward, weight in zip(self._rewards, weights, strict=True):
            # TRL goes on if a function abstains on every row, which may be of another task.
            entry = {"kind": "function", "path": reward, "weight": float(weight), "max_silent_steps": None}
            if isinstance(reward, str):
                path = str(_folder_of(reward).absolute())
                entry |= {"path": "megatron_rl.trl.reward_model:ModelReward", "arguments": {"path": path}}
            elif not callable(reward):
                raise ValueError(f"the reward {reward!r} is neither a function nor the folder of a reward model")
            entries.append(entry)
        return entries

    def _model_folder(self, folder: Path) -> Path:
        if isinstance(self._model, str | Path):
            return _folder_of(str(self._model))
        saved = folder / "model"
        self._model.save_pretrained(saved)
        if self._processing_class is None:
            raise ValueError("give processing_class, the tokenizer that belongs to the model")
        self._processing_class.save_pretrained(saved)
        return saved

    def _recall(self, folder: Path | None) -> None:
        """Take the state of the newest checkpoint of a run, which the callbacks have seen; None if there is no run."""
        checkpoints = [] if folder is None else list(find_checkpoints(folder / "checkpoints"))
        records = [] if folder is None else read_metrics(folder)
        self._saved = self.state.global_step = max(checkpoints, default=0)
        self._seen = sum(record["step"] < self._saved for record in records)
        self._lost = records[self._seen :]
        self.state.log_history = [{**_named(one), "step": _global_step(one)} for one in records[: self._seen]]

    def _watch(self, run: Run) -> bool:
        """Tell the callbacks about new steps and checkpoints; True if one of them wants to stop."""
        records = read_metrics(run.folder)[self._seen :]
        if records != self._lost:
            self._lost = []
        for record in () if self._lost else records:
            self._seen += 1  # first: Ctrl-C may come while a callback runs
            logs = _named(record)
            self.state.global_step = _global_step(record)
            self.state.log_history.append({**logs, "step": self.state.global_step})
            self._tell("on_log", logs=logs)
            if "eval_reward" in logs:
                self._tell("on_evaluate", metrics={k: v for k, v in logs.items() if k.startswith("eval")})
            if record.keys() & OF_STEPS:
                self._tell("on_step_end")
        steps = list(find_checkpoints(run.folder / "checkpoints"))
        if steps and max(steps) > self._saved:
            self._saved = max(steps)
            self._tell("on_save")
        return bool(self.control.should_training_stop)

    def _tell(self, event: str, **values: Any) -> None:
        for callback in self._callbacks:
            answer = getattr(callback, event)(self.args, self.state, self.control, **values)
            self.control = answer or self.control


def _global_step(record: Mapping[str, float]) -> int:
    """The number of steps after a record, which may have an evaluation alone."""
    return int(record["step"]) + bool(record.keys() & OF_STEPS)


def _named(record: Mapping[str, float]) -> dict[str, float]:
    """A record with TRL's names."""
    found = {}
    for name, value in record.items():
        label = name.removeprefix("reward/")
        mine = f"rewards/{label}" if name.startswith("reward/") and label.endswith("/mean") else name
        found[NAMES.get(name, mine)] = value
    return found


def _positions(model: Any) -> int:
    """How many tokens a prompt and its answer may have; 0 if the model does not say."""
    if not isinstance(model, str | Path):
        return int(getattr(model.config, "max_position_embeddings", 0))
    return int(json.loads((_folder_of(str(model)) / "config.json").read_text()).get("max_position_embeddings", 0))


def _name_of(model: Any) -> str:
    name = str(model if isinstance(model, str | Path) else getattr(model.config, "_name_or_path", "") or "model")
    return Path(name).name


def _folder_of(name: str) -> Path:
    """The folder of a model, which may be in the hub's cache.

    Raises:
        ValueError: it is in neither place.
    """
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name))
    except (OSError, ValueError) as error:
        folder = f"models/{name.rpartition('/')[2]}"
        raise ValueError(
            f"{name} is neither a folder nor in the hub's cache ({type(error).__name__}); get it with "
            f"`hf download {name} --local-dir {folder}` and write {folder!r}"
        ) from error
