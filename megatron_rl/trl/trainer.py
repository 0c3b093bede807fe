"""What the trainers of TRL have in common, whose runs are this project's.

Invariants (tests/unit/trl, tests/doors): what a trainer is given is used or refused by name, all faults at once;
callbacks see the steps of the run while it goes on, and can stop it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from transformers import TrainerState
from transformers.trainer_utils import TrainOutput

from megatron_rl.api import Inputs, Run, holds_run, start
from megatron_rl.loop.checkpoints import find_checkpoints
from megatron_rl.trl.adapters import adapters_of
from megatron_rl.trl.after_training import Accelerator, Finished
from megatron_rl.trl.callbacks import Callbacks
from megatron_rl.trl.configuration import as_arguments
from megatron_rl.trl.metrics import named
from megatron_rl.trl.models import GivenModel
from megatron_rl.trl.notices import tell
from megatron_rl.trl.progress import RunProgress

T = TypeVar("T")
REFUSED = {
    "optimizers": "policy.optimizer in `sections` of the configuration has Adam and Muon",
    "quantization_config": "frozen weights of adapters can be fp8, with sections={'policy': {'lora': {'base': 'fp8'}}}",
}
"""What no trainer takes."""


class Faults:
    """Everything that is wrong with what a trainer was given."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._told: list[str] = []
        self._raised: list[Exception] = []

    def add(self, text: str, error: Exception | None = None) -> None:
        self._told.append(text)
        if error is not None:
            self._raised.append(error)

    def tried(self, make: Callable[[], T]) -> T | None:
        try:
            return make()
        except (TypeError, ValueError) as error:
            self.add(str(error).removeprefix(f"{self._name}: "), error)
            return None

    def require_none(self) -> None:
        if self._told:
            kind = TypeError if any(isinstance(error, TypeError) for error in self._raised) else ValueError
            raise kind(f"{self._name}: " + "; ".join(self._told)) from next(iter(self._raised), None)


class RunTrainer(Finished):
    kind: ClassVar[str]
    """The command."""
    config: ClassVar[Any]
    """The class of the arguments."""
    refused: ClassVar[Mapping[str, str]]
    others: ClassVar[tuple[str, ...]]
    """The arguments that are taken by name."""
    has_head: ClassVar[bool] = False
    """Whether it trains a reward model."""
    train_dataset: Any
    eval_dataset: Any
    _lora: dict[str, Any] | None

    def _given(self, train: Any, heldout: Any) -> Any:
        """What a run of these rows is made of, a GivenGrpo or a GivenOffline. The rows have lengths."""
        raise NotImplementedError

    def _all_given(self) -> Any:
        """The same for the trainer's own rows. Rows that are read one by one become lists.

        Raises:
            ValueError: there is no end of them.
        """
        raise NotImplementedError

    def _rewards(self, folder: Path) -> Any:
        """The rewards of a run in this folder."""
        return ()

    def _other_rows(self, given: Any) -> Any:
        """Rows for an evaluation in a run of its own."""
        return list(given)

    def _take(self, model: Any, args: Any, others: dict[str, Any]) -> Faults:
        """Look at what all trainers are given."""
        faults = Faults(type(self).__name__)
        if unknown := sorted(others.keys() - {*self.others, *self.refused}):
            told = f"there is no argument {', '.join(map(repr, unknown))}"
            faults.add(told, TypeError(told))
        options = None if args is None else getattr(args, "model_init_kwargs", None)
        given = faults.tried(lambda: GivenModel(model, others.get("processing_class"), options))
        self.args: Any = (
            self.config(output_dir=f"{given.name if given else 'model'}-{self.config.NAME.removesuffix('Config')}")
            if args is None
            else faults.tried(lambda: as_arguments(args, self.config))
        )
        for name, why in self.refused.items():
            if others.get(name) not in (None, (None, None)):
                faults.add(f"{name} is not supported: {why}")
        if given is not None:
            self._given_model = given
        return faults

    def _begin(self, faults: Faults, others: dict[str, Any]) -> None:
        """Take callbacks and adapters, and tell all faults.

        Raises:
            TypeError, ValueError: there are faults.
        """
        state, given = TrainerState(), vars(self).get("_given_model")
        callbacks = faults.tried(lambda: Callbacks(others.get("callbacks") or (), self.args, state))
        self._lora = faults.tried(lambda: _lora(given, others.get("peft_config"), self.has_head))
        faults.require_none()
        assert callbacks is not None
        self.run: Run | None = None
        self.accelerator = Accelerator()
        self._loaded: dict[Path | None, Any] = {}
        self._progress = RunProgress(callbacks, state)
        callbacks.tell("on_init_end")

    @property
    def control(self) -> Any:
        return self._progress.callbacks.control

    @property
    def processing_class(self) -> Any:
        """The tokenizer of the run."""
        return self._given_model.tokenizer

    tokenizer = processing_class

    @property
    def model(self) -> Any:
        """The trained model, which is loaded when it is first asked for; before `train`, the given one."""
        from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

        if self.run is None and not isinstance(self._given_model.given, str):
            return self._given_model.given
        source = None if self.run is None else self.trained()
        if source not in self._loaded:
            folder = source or self._given_model.folder()
            kind: Any = AutoModelForSequenceClassification if self.has_head else AutoModelForCausalLM
            options = {"num_labels": 1} if self.has_head else {}
            self._loaded = {source: kind.from_pretrained(folder, dtype="auto", **options)}
        return self._loaded[source]

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
        model = self._given_model.save(folder / "model")
        inputs = Inputs(model, given.rows, given.heldout, self._rewards(folder))
        self._progress.callbacks.processing_class = self._given_model.tokenizer_if_read
        begun = time.monotonic()
        self._progress.begin(sections["run"]["steps"], given, folder if continued else None)
        self.run = start(self.kind, inputs, folder.name, (), sections, self._progress.watch, continued)
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
            rows = self._other_rows(eval_dataset)
            model = self._given_model.save(self._output / "model") if self.run is None else self.trained()
            found = [self._evaluated(self._given(rows, rows), model)]
        else:
            found = [] if self.run is None else self.run.evaluations
        if not found:
            raise ValueError("nothing was evaluated: give an eval_dataset, or call train first")
        return {
            name.replace("eval", metric_key_prefix, 1): value
            for name, value in named(found[-1]).items()
            if name.startswith("eval")
        }

    def _evaluated(self, given: Any, model: Path) -> dict[str, float]:
        """The record of an evaluation of rows that are no part of a training, by our names. It is a run in the folder
        `evaluations` that stops when it has evaluated its model.

        Raises:
            ValueError, RuntimeError: the run is refused, or has failed.
        """
        output = self._output / "evaluations"
        folder = next(one for i in count(1) if not (one := output / str(i)).exists())
        args: Any = replace(given.args, max_steps=given.updates, eval_strategy="no", save_strategy="no")
        given = replace(given, args=args)
        inputs = Inputs(model, given.rows, given.heldout, self._rewards(folder))
        run = start(self.kind, inputs, folder.name, (), given.sections(folder), lambda run: bool(run.evaluations))
        return run.evaluations[0]

    def save_model(self, output_dir: str | Path | None = None, _internal_call: bool = False) -> None:
        """Copy the trained model's folder.

        Raises:
            ValueError: the run has not done all its steps.
        """
        shutil.copytree(self.trained(), Path(output_dir or self._output), dirs_exist_ok=True)

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


def _lora(model: GivenModel | None, peft_config: Any, has_head: bool) -> dict[str, Any] | None:
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
    return adapters_of(asked, model_type, layers, has_head)
