"""Callbacks of transformers, which are told what the run does, soon after it has done it.

Invariant (tests/unit/trl): a method that would never be called, or that needs what is in other processes, is refused by
its name.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

TOLD = (
    *("on_init_end", "on_train_begin", "on_epoch_begin", "on_step_begin", "on_log", "on_evaluate", "on_step_end"),
    *("on_epoch_end", "on_save", "on_train_end"),
)
"""The events that callbacks are told."""
NEVER = {
    "on_substep_end": "the passes of an optimizer step are in the trainers' processes; on_step_end comes after all",
    "on_pre_optimizer_step": "gradients are in the trainers' processes",
    "on_optimizer_step": "gradients are in the trainers' processes; on_step_end comes after the optimizer's step",
    "on_prediction_step": "the engine evaluates all rows at once; on_evaluate has the result",
    "on_predict": "there is no predict; on_evaluate has an evaluation's result",
    "on_push_begin": "the model is uploaded after the run; on_train_end comes before it",
}
ABSENT = ("model", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader")
"""What transformers also gives to callbacks; here it is in other processes."""
SHIPPED = ("transformers.", "trl.")
"""Modules whose callbacks show a progress, and may have methods that are never called."""


class Callbacks:
    def __init__(self, given: Iterable[Any], args: Any, state: TrainerState) -> None:
        self.control = TrainerControl()
        self._args, self._state = args, state
        self._made: list[Any] = []
        self.processing_class: Any = None
        """What callbacks get under this name."""
        for one in given:
            self.add(one)

    def add(self, callback: Any) -> Any:
        """
        Raises:
            TypeError: it is no callback of transformers.
            ValueError: one of its methods cannot do here what it does there.
        """
        made = callback() if inspect.isclass(callback) else callback
        if missing := [event for event in TOLD if not callable(getattr(made, event, None))]:
            raise TypeError(
                f"callbacks: {callback!r} has no method {missing[0]}, so it is no callback; give a subclass of "
                "transformers.TrainerCallback, or an object of one"
            )
        if faults := _faults(made):
            raise ValueError("callbacks: " + "; ".join(faults))
        self._made.append(made)
        return made

    def remove(self, callback: Any) -> Any:
        """Remove and return the first callback that is the given one, or of the given class."""
        for one in self._made:
            if one is callback or (inspect.isclass(callback) and type(one) is callback):
                self._made.remove(one)
                return one
        return None

    def tell(self, event: str, **values: Any) -> None:
        for callback in self._made:
            method = getattr(callback, event)
            answer = method(self._args, self._state, self.control, processing_class=self.processing_class, **values)
            self.control = answer or self.control


def _faults(made: Any) -> list[str]:
    name = type(made).__name__
    if name == "EarlyStoppingCallback":
        return [
            f"{name} needs load_best_model_at_end, which is refused; write a callback whose on_evaluate reads metrics "
            "and sets control.should_training_stop, and checkpoint.keep_best keeps the best checkpoint"
        ]
    found = []
    if not type(made).__module__.startswith(SHIPPED):
        found += [
            f"{name}.{event} would never be called: {why}; remove the method"
            for event, why in NEVER.items()
            if _own(made, event)
        ]
    for event in TOLD:
        given = inspect.signature(getattr(made, event)).parameters.values()
        needed = [one.name for one in given if one.default is one.empty and one.kind is not one.VAR_KEYWORD]
        if lacking := [one for one in ABSENT if one in needed]:
            found.append(f"{name}.{event} needs {lacking[0]}, which is in other processes; remove the parameter")
    return found


def _own(made: Any, event: str) -> bool:
    """Whether it has a method of its own for an event."""
    method = getattr(type(made), event, None)
    return method is not None and method is not getattr(TrainerCallback, event, None)
