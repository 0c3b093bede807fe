"""TRL's GKDTrainer: the student answers with vLLM, and learns its teacher's distribution on its own answers."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

from megatron_rl.trl.configuration import GKDConfig
from megatron_rl.trl.distillation import GivenGkd, no_reward, prompts_of
from megatron_rl.trl.models import GivenModel
from megatron_rl.trl.offline_trainers import OfflineTrainer
from megatron_rl.trl.trainer import Faults


class GKDTrainer(OfflineTrainer):
    """
    Args:
        model: as in GRPOTrainer.
        teacher_model: the same for the teacher, whose tokens are the model's.
        train_dataset: rows with `messages`, whose last answer is not read, or with `prompt`.

    Raises:
        ValueError: an argument is not supported; the message has all of them and says what to do.
    """

    kind, config = "grpo", GKDConfig
    refused = OfflineTrainer.refused | {
        "formatting_func": "rows with messages or prompt are read as they are",
        "eval_dataset": "an evaluation needs a reward; `megatron-rl grpo` has teachers and rewards",
    }

    def __init__(self, model: Any, teacher_model: Any = None, args: Any = None, *values: Any, **others: Any) -> None:
        self._teacher_given = teacher_model
        super().__init__(model, args, *values, **others)

    def _begin_rows(self, faults: Faults, train: Any, heldout: Any, others: dict[str, Any]) -> None:
        if heldout is not None:
            faults.add(f"eval_dataset is not supported: {self.refused['eval_dataset']}")
        given = self._teacher_given or (self.args and self.args.teacher_model_name_or_path)
        if given is None:
            faults.add("teacher_model is missing; give a folder, a name or a model")
        else:
            own = None if isinstance(given, str | Path) else others.get("processing_class")
            self._teacher = faults.tried(lambda: GivenModel(given, own))
        super()._begin_rows(faults, train, None, others)

    def _prepare(self, train: Any, heldout: Any, faults: Faults) -> None:
        if train is not None and not hasattr(train, "__len__"):
            if self.args.max_steps <= 0:
                faults.add("an iterable train_dataset has no length: give max_steps")
                return
            train = list(islice(train, self.args.max_steps * self._given((), None).rows_per_step))
        self.train_dataset, self.eval_dataset = faults.tried(lambda: prompts_of(train)), None

    def _other_rows(self, given: Any) -> Any:
        raise ValueError(f"eval_dataset is not supported: {self.refused['eval_dataset']}")

    def _rewards(self, folder: Path) -> Any:
        return (no_reward,)

    def _given(self, train: Any, heldout: Any) -> GivenGkd:
        assert self._teacher is not None, "otherwise it was told"
        return GivenGkd(self.args, self._given_model, self._teacher, train, self._lora)

    def _all_given(self) -> GivenGkd:
        return self._given(self.train_dataset, None)
