"""TRL's trainers for preferences, SFT and reward models.

Invariant (tests/unit/trl, tests/doors): a reference with other weights than the model's is refused.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from megatron_rl.trl.configuration import CPOConfig, DPOConfig, KTOConfig, ORPOConfig, RewardConfig, SFTConfig
from megatron_rl.trl.models import same_weights
from megatron_rl.trl.offline import GivenOffline, OfflineRows
from megatron_rl.trl.trainer import REFUSED, Faults, RunTrainer

_COLLATED = "rows are tokenized and packed by the run's processes"
_COMPUTED = "losses are computed by the run's processes; the metrics are in docs/metrics.md"


class OfflineTrainer(RunTrainer):
    """What trainers without engines have in common."""

    refused = REFUSED | {
        "data_collator": _COLLATED,
        "compute_metrics": _COMPUTED,
        "preprocess_logits_for_metrics": _COMPUTED,
        "compute_loss_func": _COMPUTED,
        "model_init": "give the model itself",
        "optimizer_cls_and_kwargs": REFUSED["optimizers"],
    }
    others: ClassVar[tuple[str, ...]] = ("processing_class", "callbacks", "peft_config")

    def __init__(
        self,
        model: Any,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        **others: Any,
    ) -> None:
        others |= {"data_collator": data_collator, "processing_class": processing_class}
        faults = self._take(model, args, others)
        if self.args is not None and "_given_model" in vars(self):
            faults.tried(self._change_tokenizer)
        self._begin_rows(faults, train_dataset, eval_dataset, others)

    def _begin_rows(self, faults: Faults, train: Any, heldout: Any, others: dict[str, Any]) -> None:
        """Take the rows, and everything that all trainers take."""
        if train is None:
            faults.add("train_dataset is missing; give rows")
        self._begin(faults, others)
        self._rows = OfflineRows(self.kind, self.args, self._given_model.tokenizer, others.get("formatting_func"))
        self._prepare(train, heldout, faults)
        faults.require_none()

    def _prepare(self, train: Any, heldout: Any, faults: Faults) -> None:
        self.train_dataset = faults.tried(lambda: self._rows.prepared(train))
        self.eval_dataset = faults.tried(lambda: self._rows.prepared(heldout))

    def _change_tokenizer(self) -> None:
        """Give the tokenizer the end and the chat template of the arguments, as TRL does.

        Raises:
            ValueError: the tokenizer has no such token, or the template is no file.
        """
        end, path = (vars(self.args).get(name) for name in ("eos_token", "chat_template_path"))
        if end is not None:
            if end not in self._given_model.tokenizer.get_vocab():
                raise ValueError(f"{self.config.NAME}: eos_token={end!r} is not in the vocabulary of the tokenizer")
            self._given_model.tokenizer.eos_token = end
        if path is not None:
            if not Path(path).is_file():
                raise ValueError(
                    f"{self.config.NAME}: chat_template_path={path!r} is no file; give a .jinja file. A tokenizer's "
                    "folder would add tokens to the model"
                )
            self._given_model.tokenizer.chat_template = Path(path).read_text()

    def _other_rows(self, given: Any) -> Any:
        return list(self._rows.prepared(given))

    def _given(self, train: Any, heldout: Any) -> Any:
        return GivenOffline(self.kind, self.args, self._given_model, train, heldout, self._rows, self._lora)

    def _all_given(self) -> Any:
        if not hasattr(self.train_dataset, "__len__"):
            if self.args.max_steps <= 0 or vars(self.args).get("packing"):
                raise ValueError("an iterable train_dataset has no length: give max_steps, and no packing")
            rows = self.args.max_steps * self._given((), None).rows_per_step
            self.train_dataset = list(islice(self.train_dataset, rows))
        if self.eval_dataset is not None and not hasattr(self.eval_dataset, "__len__"):
            self.eval_dataset = list(self.eval_dataset)
        return self._given(self.train_dataset, self.eval_dataset)


class DPOTrainer(OfflineTrainer):
    """
    Args:
        model: as in GRPOTrainer.
        ref_model: None, or a model with the weights of `model`: the reference is the model that the run begins with.
        train_dataset: rows with `prompt`, `chosen` and `rejected`, as text or chat turns.
        eval_dataset: in the same form.

    Raises:
        ValueError: an argument is not supported; the message has all of them and says what to do.
    """

    kind, config = "dpo", DPOConfig

    def __init__(
        self,
        model: Any,
        ref_model: Any = None,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        **others: Any,
    ) -> None:
        others |= {"data_collator": data_collator, "processing_class": processing_class}
        faults = self._take(model, args, others)
        if ref_model is not None and not faults.tried(lambda: same_weights(model, ref_model)):
            faults.add(
                "ref_model has other weights than model, and the reference is the model that the run begins with: "
                "leave ref_model out"
            )
        self._begin_rows(faults, train_dataset, eval_dataset, others)


class KTOTrainer(DPOTrainer):
    """The same for rows with `prompt`, `completion` and `label`; a pair is two of them."""

    config = KTOConfig


class ORPOTrainer(OfflineTrainer):
    """
    Args:
        model: as in GRPOTrainer.
        train_dataset: rows with `prompt`, `chosen` and `rejected`, as text or chat turns.
        eval_dataset: in the same form.

    Raises:
        ValueError: an argument is not supported; the message has all of them and says what to do.
    """

    kind, config = "dpo", ORPOConfig


class CPOTrainer(ORPOTrainer):
    """The same with the losses of CPO and SimPO."""

    config = CPOConfig


class SFTTrainer(OfflineTrainer):
    """
    Args:
        model: as in GRPOTrainer.
        train_dataset: rows in a form of docs/coming_from_sft.md.
        eval_dataset: in the same form.
        formatting_func: makes the text of a row.

    Raises:
        ValueError: an argument is not supported; the message has all of them and says what to do.
    """

    kind, config = "sft", SFTConfig
    others = (*OfflineTrainer.others, "formatting_func")


class RewardTrainer(OfflineTrainer):
    """
    Args:
        model: as in GRPOTrainer; it may be a sequence classifier with one label.
        train_dataset: rows with `chosen` and `rejected`, as text or chat turns, and optionally `prompt` and `margin`.
        eval_dataset: in the same form.

    Raises:
        ValueError: an argument is not supported; the message has all of them and says what to do.
    """

    kind, config, has_head = "reward_model", RewardConfig, True
