"""TRL's GRPOTrainer, whose runs are this project's: Megatron trains, vLLM answers.

Invariants (tests/unit/trl, tests/doors): what the trainer is given is used or refused by name, all faults at once;
functions of the script reach the verifiers; callbacks see the steps of the run while it goes on, and can stop it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any, TypeVar

from transformers import TrainerState
from transformers.trainer_utils import TrainOutput

from megatron_rl.api import Inputs, Run, holds_run, start
from megatron_rl.loop.checkpoints import find_checkpoints
from megatron_rl.trl.adapters import adapters_of
from megatron_rl.trl.after_training import Accelerator, Finished
from megatron_rl.trl.callbacks import Callbacks
from megatron_rl.trl.configuration import GRPOConfig, as_arguments
from megatron_rl.trl.environments import GivenEnvironments
from megatron_rl.trl.metrics import named
from megatron_rl.trl.models import GivenModel
from megatron_rl.trl.notices import tell
from megatron_rl.trl.progress import RunProgress
from megatron_rl.trl.rewards import GivenRewards
from megatron_rl.trl.rows import joined
from megatron_rl.trl.sections import Given

T = TypeVar("T")
REFUSED = {
    "optimizers": "policy.optimizer in GRPOConfig(sections=...) has Adam and Muon",
    "quantization_config": "frozen weights of adapters can be fp8: GRPOConfig(sections={'policy': {'lora': {'base': "
    "'fp8'}}, 'rollout': {'lora': 'merged'}})",
    "rollout_func": "it would have the weights of the script's process; rollout.environment in "
    "GRPOConfig(sections=...) names an agent, which calls the run's engines",
}
OTHERS = ("processing_class", "reward_processing_classes", "callbacks", "tools", "peft_config", "environment_factory")


class GRPOTrainer(Finished):
    """
    Args:
        model: a Hugging Face folder, the name of a model that is in the hub's cache, or a model of transformers or of
            PEFT.
        reward_funcs: functions, objects that can be called, or reward models with one label, as folders, names of the
            hub's cache or objects.
        train_dataset: a data set or a list of rows, with `prompt` as text or chat turns. Of an iterable one, the rows
            that the steps need.
        eval_dataset: in the same form, or a mapping of several, whose names are in the metrics.
        others: `processing_class`, the tokenizer in the place of the model's own; `reward_processing_classes`, the
            tokenizers of reward models; `callbacks` of transformers, which are called soon after what they are told;
            `tools`, functions that the model's turns call; `environment_factory`, what makes objects with such methods;
            `peft_config`, PEFT's LoraConfig, which becomes `policy.lora`.

    Raises:
        ValueError: an argument is not supported; the message has all of them and says what to do.
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
        unknown = sorted(others.keys() - {*OTHERS, *REFUSED})
        faults = [f"there is no argument {', '.join(map(repr, unknown))}"] if unknown else []
        raised: list[Exception] = [TypeError(faults[0])] if unknown else []

        def tried(make: Callable[[], T]) -> T | None:
            try:
                return make()
            except (TypeError, ValueError) as error:
                faults.append(str(error).removeprefix("GRPOTrainer: "))
                raised.append(error)
                return None

        options = None if args is None else getattr(args, "model_init_kwargs", None)
        given = tried(lambda: GivenModel(model, others.get("processing_class"), options))
        self.args: Any = (
            GRPOConfig(output_dir=f"{given.name if given else 'model'}-GRPO")
            if args is None
            else (tried(lambda: as_arguments(args)))
        )
        faults += [
            f"{name} is not supported: {why}"
            for name, why in REFUSED.items()
            if others.get(name) not in (None, (None, None))
        ]
        weights = self.args and self.args.reward_weights
        classes = others.get("reward_processing_classes")
        environments = tried(lambda: GivenEnvironments(others.get("environment_factory"), others.get("tools")))
        own = () if environments is None else environments.rewards
        rewards = tried(lambda: GivenRewards(reward_funcs, weights, classes, own))
        self.train_dataset: Any = None
        if environments is not None and self.args is not None:
            self.train_dataset = tried(lambda: environments.rows(train_dataset, self.args))
        self.eval_dataset = tried(lambda: joined(eval_dataset))
        state = TrainerState()
        callbacks = tried(lambda: Callbacks(others.get("callbacks") or (), self.args, state))
        self._lora = tried(lambda: _lora(given, others.get("peft_config")))
        if faults:
            kind = TypeError if any(isinstance(error, TypeError) for error in raised) else ValueError
            raise kind("GRPOTrainer: " + "; ".join(faults)) from next(iter(raised), None)
        assert given is not None and rewards is not None and environments is not None
        self._given, self._rewards, self._environments = given, rewards, environments
        self.run: Run | None = None
        self.accelerator = Accelerator()
        self._loaded: dict[Path | None, Any] = {}
        assert callbacks is not None
        self._progress = RunProgress(callbacks, state)
        callbacks.tell("on_init_end")

    @property
    def control(self) -> Any:
        return self._progress.callbacks.control

    @property
    def processing_class(self) -> Any:
        """The tokenizer of the run."""
        return self._given.tokenizer

    tokenizer = processing_class

    @property
    def model(self) -> Any:
        """The trained model, which is loaded when it is first asked for; before `train`, the given one."""
        from transformers import AutoModelForCausalLM

        if self.run is None and not isinstance(self._given.given, str):
            return self._given.given
        source = None if self.run is None else self.trained()
        if source not in self._loaded:
            folder = source or self._given.folder()
            self._loaded = {source: AutoModelForCausalLM.from_pretrained(folder, dtype="auto")}
        return self._loaded[source]

    @property
    def reward_funcs(self) -> list[Any]:
        return self._rewards.given

    def add_callback(self, callback: Any) -> None:
        """
        Raises:
            TypeError, ValueError: see `Callbacks.add`.
        """
        self._progress.callbacks.add(callback)

    def remove_callback(self, callback: Any) -> None:
        self._progress.callbacks.remove(callback)

    def pop_callback(self, callback: Any) -> Any:
        return self._progress.callbacks.remove(callback)

    def train(self, resume_from_checkpoint: bool | str | Path | None = None, **others: Any) -> TrainOutput:
        """Train to the end; Ctrl-C stops with a checkpoint. `trainer.run` has the run's folder, metrics and model.

        Args:
            resume_from_checkpoint: True, or the path of the newest checkpoint, continues the run of `output_dir`, with
                the arguments and rows of this trainer; a change of the run's meaning is refused. If there is no
                checkpoint, True begins the run.
            others: `trial` and `ignore_keys_for_eval` of transformers, which must be None.

        Raises:
            ValueError: the configuration is refused, or there is no such checkpoint.
        """
        if set_ := {name for name, value in others.items() if value is not None}:
            raise TypeError(f"train has no argument {sorted(set_)[0]!r}")
        folder = self._output
        continued = self._continues(folder, resume_from_checkpoint)
        if not continued and holds_run(folder):
            raise ValueError(
                f"{folder} has a run already: train(resume_from_checkpoint=True) continues it; or give another "
                "output_dir"
            )
        given = self._all_given()
        sections = given.sections(folder)
        rewards = self._rewards.entries(folder / "reward_models")
        inputs = Inputs(self._given.save(folder / "model"), given.rows, given.heldout, rewards)
        self._progress.callbacks.processing_class = self._given.tokenizer_if_read
        begun = time.monotonic()
        steps, updates = sections["run"]["steps"], given.sizes.updates
        self._progress.begin(steps, updates, given.updates_per_epoch, folder if continued else None)
        self.run = start("grpo", inputs, folder.name, (), sections, self._progress.watch, continued)
        closing = self._progress.close(self.run, time.monotonic() - begun)
        self._progress.callbacks.tell("on_train_end")
        if self.args.push_to_hub and self.run.model is not None:
            try:
                self.push_to_hub()
            except ValueError as error:  # the run is done, and its model is there
                tell(f"push_to_hub: {error}")
        return TrainOutput(self.state.global_step, closing["train_loss"], closing)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """The newest evaluation of the run. With an eval_dataset a run evaluates before its first step, after its last
        one, and as `eval_strategy` says. Other rows are evaluated in a run of their own, with the trained model, or
        before `train` with the given one.

        Raises:
            ValueError: there is none.
        """
        if eval_dataset is not None and eval_dataset is not self.eval_dataset:
            rows = self._environments.complete(list(joined(eval_dataset) or ()))
            given = Given(self.args, self._given, rows, rows, self._environments, self._lora)
            model = self._given.save(self._output / "model") if self.run is None else self.trained()
            found = [_evaluated(given, self._rewards, model, self._output)]
        else:
            found = [] if self.run is None else self.run.evaluations
        if not found:
            raise ValueError("nothing was evaluated: give an eval_dataset, or call train first")
        return {
            name.replace("eval", metric_key_prefix, 1): value
            for name, value in named(found[-1]).items()
            if name.startswith("eval")
        }

    def save_model(self, output_dir: str | Path | None = None, _internal_call: bool = False) -> None:
        """Copy the trained model's folder.

        Raises:
            ValueError: the run has not done all its steps.
        """
        shutil.copytree(self.trained(), Path(output_dir or self._output), dirs_exist_ok=True)

    def _all_given(self) -> Given:
        """What the run is made of. Rows that are read one by one become lists.

        Raises:
            ValueError: there is no end of them.
        """
        if not hasattr(self.train_dataset, "__len__"):
            if self.args.max_steps <= 0:
                raise ValueError("an iterable train_dataset has no length: give max_steps")
            sizes = Given(self.args, self._given, (), None, self._environments, None).sizes
            self.train_dataset = list(islice(self.train_dataset, self.args.max_steps * sizes.prompts))
        if self.eval_dataset is not None and not hasattr(self.eval_dataset, "__len__"):
            self.eval_dataset = list(self.eval_dataset)
        train, heldout = map(self._environments.complete, (self.train_dataset, self.eval_dataset))
        return Given(self.args, self._given, train, heldout, self._environments, self._lora)

    def _continues(self, folder: Path, asked: Any) -> bool:
        """Whether the run of `output_dir` goes on.

        Raises:
            ValueError: a checkpoint is named that is not the newest one of the run.
        """
        asked = self.args.resume_from_checkpoint if asked is None else asked
        if not asked or str(asked).lower() == "true":
            return bool(asked)
        asked = Path(asked)
        checkpoints = find_checkpoints(folder / "checkpoints")
        newest = checkpoints[max(checkpoints)] if checkpoints else None
        if not asked.is_dir():
            raise ValueError(
                f"resume_from_checkpoint={str(asked)!r}: there is no such folder; "
                + (f"the newest checkpoint is {newest}" if newest else f"{folder} has no checkpoint")
            )
        if newest is None or asked.resolve() not in (newest.resolve(), folder.resolve()):
            raise ValueError(
                f"resume_from_checkpoint={str(asked)!r} is not the newest checkpoint of the run in {folder}, "
                f"{newest or 'which has none'}; a run goes on from its newest one: give True, or delete newer ones"
            )
        return True


def _lora(model: GivenModel | None, peft_config: Any) -> dict[str, Any] | None:
    """The section `policy.lora`; None without adapters.

    Raises:
        ValueError: there are two configurations, or one cannot be expressed.
    """
    own = None if model is None else model.peft_config
    if own is not None and peft_config is not None:
        raise ValueError("model has adapters of PEFT, and peft_config would add others; give one of the two")
    asked = own if own is not None else peft_config
    if asked is None:
        return None
    try:
        model_type, layers = (None, None) if model is None else (model.config.get("model_type"), model.layers())
    except (OSError, ValueError):  # the model's own fault, which is told when it is read
        model_type, layers = None, None
    return adapters_of(asked, model_type, layers)


def _evaluated(given: Given, rewards: GivenRewards, model: Path, output: Path) -> dict[str, float]:
    """The record of an evaluation of rows that are no part of a training, by our names. It is a run that stops when it
    has evaluated its model.

    Args:
        given: of a trainer, with the rows as `heldout`.
        model: the folder of the model.
        output: the trainer's folder. Its folder `evaluations` has the runs.

    Raises:
        ValueError, RuntimeError: the run is refused, or has failed.
    """
    folder = next(one for i in count(1) if not (one := output / "evaluations" / str(i)).exists())
    args: Any = replace(given.args, max_steps=given.sizes.updates, eval_strategy="no", save_strategy="no")
    given = replace(given, args=args, train=given.heldout)
    inputs = Inputs(model, given.train, given.heldout, rewards.entries(folder / "reward_models"))
    run = start("grpo", inputs, folder.name, (), given.sections(folder), lambda run: bool(run.evaluations))
    return run.evaluations[0]
