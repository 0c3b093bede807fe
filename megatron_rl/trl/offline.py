"""Maps the arguments of TRL's configurations for preferences, SFT and reward models to the sections of a run, and rows
to its rows.

Invariants (tests/unit/trl, tests/doors): batches and losses have the values that TRL computes from the same arguments;
what cannot be expressed is an error that names the argument; texts have the tokens that TRL's tokenizer adds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

from megatron_rl.trl.common import Calendar, common_sections, completed, faults_of, replicas_of
from megatron_rl.trl.models import GivenModel
from megatron_rl.trl.notices import tell

LOSSES = {"sigmoid": "dpo", "ipo": "ipo"}
ALWAYS_BEGIN = ("ORPOConfig", "CPOConfig")
"""Trainers of TRL that write the first token of texts also if the tokenizer does not."""
WEIGHTS = ("desirable_weight", "undesirable_weight")
"""KTOConfig's."""
READ = 1000
"""The number of rows whose lengths say how many a block of packed rows would hold."""
PLAIN = ("text", "prompt")
"""The columns of plain text before which a tokenizer writes its first token; without a prompt, `chosen` has none."""
ANSWERS = ("chosen", "rejected")
"""The same of a reward model's rows without a prompt."""


def faults_of_dpo(args: Any) -> list[str]:
    return faults_of(args, (lambda: _sizes(args), lambda: loss_of(args)))


def faults_of_sft(args: Any) -> list[str]:
    def packed() -> None:
        if args.packing and args.max_length is None:
            raise ValueError("packing=True needs max_length, the tokens of a block")

    return faults_of(args, (lambda: _sizes(args), packed))


def faults_of_reward(args: Any) -> list[str]:
    def center() -> None:
        if (args.center_rewards_coefficient or 0) < 0:
            raise ValueError(f"center_rewards_coefficient={args.center_rewards_coefficient} must not be negative")

    return faults_of(args, (lambda: _sizes(args), center))


def _sizes(args: Any) -> None:
    if min(args.per_device_train_batch_size, args.gradient_accumulation_steps) < 1:
        raise ValueError("per_device_train_batch_size and gradient_accumulation_steps must be at least 1")
    if args.max_length is not None and args.max_length < 2:
        raise ValueError(f"max_length={args.max_length} leaves nothing to train; raise it")


def loss_of(args: Any) -> dict[str, Any]:
    """`dpo.loss`.

    Raises:
        ValueError: it cannot be expressed; the message names the argument.
    """
    if args.beta <= 0:
        raise ValueError(f"beta={args.beta} must be positive")
    if weights := {name: value for name, value in vars(args).items() if name in WEIGHTS}:
        return {"kind": "kto", "beta": args.beta, **weights}
    if args.NAME == "ORPOConfig":
        return {"kind": "orpo", "beta": args.beta}
    if args.NAME == "CPOConfig":
        return _cpo_loss(args)
    if isinstance(args.loss_type, str):
        args.loss_type = [args.loss_type]
    if len(args.loss_type) != 1 or args.loss_type[0] not in LOSSES:
        raise ValueError(
            f"loss_type={args.loss_type!r} is not supported; known are {', '.join(LOSSES)}, one at a time. "
            "`megatron-rl dpo` has others (dpo.loss.kind)"
        )
    return {"kind": LOSSES[args.loss_type[0]], "beta": args.beta}


def _cpo_loss(args: Any) -> dict[str, Any]:
    own = {"beta": args.beta, "alpha": args.cpo_alpha}
    if args.loss_type == "sigmoid":
        return {"kind": "cpo", **own, "label_smoothing": args.label_smoothing}
    if args.loss_type == "simpo" and not args.label_smoothing:
        return {"kind": "simpo", **own, "gamma": args.simpo_gamma}
    raise ValueError(
        f"loss_type={args.loss_type!r} with label_smoothing={args.label_smoothing} is not supported; known are "
        "sigmoid, and simpo without label_smoothing"
    )


@dataclass(frozen=True, slots=True)
class OfflineRows:
    """A script's rows, in the form of a run's rows."""

    section: str
    args: Any
    tokenizer: Any
    formatting: Callable[[Any], str] | None = None
    """SFTTrainer's `formatting_func`."""

    def prepared(self, given: Any) -> Any:
        """The rows; the given object if nothing is changed.

        Raises:
            ValueError: they are several data sets, or have images.
        """
        if given is None:
            return None
        if isinstance(given, Mapping):
            raise ValueError(f"the rows are a {type(given).__name__} of {', '.join(map(str, given))}; give one of them")
        first = next(rows := iter(given), None)
        if rows is given:
            given = chain((first,), rows)
        if images := {"image", "images"} & set(first or ()):
            raise ValueError(f"the rows have a column {images.pop()!r}, and models read only text here")
        field, begin = vars(self.args).get("dataset_text_field", "text"), self._begin
        if not self.formatting and not (first and field in first and field != "text") and not begin:
            return given
        made = (self._row(dict(row), field, begin) for row in given)
        return list(made) if hasattr(given, "__len__") else made

    def turns(self, first: Mapping[str, Any] | None) -> str:
        """`sft.turns`, by the first row, as TRL decides it.

        Raises:
            ValueError: `assistant_only_loss` needs chats.
        """
        args, row = self.args, first or {}
        is_pair = "prompt" in row and "completion" in row and self.formatting is None
        if args.assistant_only_loss:
            if self.formatting or isinstance(row.get("prompt") if is_pair else row.get("text"), str):
                raise ValueError("SFTConfig: assistant_only_loss=True needs chats, and the rows are texts; write False")
            return "all"
        only = is_pair if args.completion_only_loss is None else args.completion_only_loss
        if only and not is_pair:
            raise ValueError("SFTConfig: completion_only_loss=True needs rows with `prompt` and `completion`")
        return "all" if only else "whole"

    @property
    def _begin(self) -> str:
        """What the tokenizer writes before plain text, such as `<s>`; chat templates write it themselves."""
        if (bos := self.tokenizer.bos_token_id) is None:
            return ""
        writes = self.args.NAME in ALWAYS_BEGIN or self.tokenizer("x")["input_ids"][:1] == [bos]
        return str(self.tokenizer.bos_token) if writes else ""

    def _row(self, row: dict[str, Any], field: str, begin: str) -> dict[str, Any]:
        if self.formatting is not None:
            row = {"text": self.formatting(row)}
        elif field != "text" and field in row:
            row["text"] = row.pop(field)
        is_chat = isinstance(row.get("chosen"), list) or "messages" in row
        is_whole = self.section == "reward_model" and row.get("prompt") is None
        for column in () if is_chat else ANSWERS if is_whole else PLAIN:
            if isinstance(text := row.get(column), str):
                row[column] = begin + text
        return row


@dataclass(frozen=True)
class GivenOffline:
    """The arguments that a script gave to an offline trainer."""

    section: str
    args: Any
    model: GivenModel
    rows: Any
    """The training rows, which have a length."""
    heldout: Any
    rows_form: OfflineRows
    lora: dict[str, Any] | None
    updates = 1
    """The optimizer steps of a step."""

    @cached_property
    def rows_per_step(self) -> int:
        args = self.args
        sizes = int(args.per_device_train_batch_size) * replicas_of(args) * int(args.gradient_accumulation_steps)
        return sizes * self._rows_of_block() if vars(args).get("packing") else sizes

    @property
    def updates_per_epoch(self) -> int:
        return max(1, math.ceil(self._num_rows / self.rows_per_step))

    @property
    def _num_rows(self) -> int:
        """A pair is two rows of KTO."""
        is_pair = WEIGHTS[0] in vars(self.args) and "chosen" in (_first(self.rows) or {})
        return len(self.rows) * (2 if is_pair else 1)

    @property
    def max_tokens(self) -> int:
        positions = int(self.model.config.get("max_position_embeddings") or self.args.max_length or 4096)
        return min(self.args.max_length or positions, positions)

    def sections(self, folder: Path) -> dict[str, Any]:
        """The sections of the run in this folder; `sections` of the arguments have the last word.

        Raises:
            ValueError: a value cannot be expressed; the message names the argument.
        """
        args, per_step = self.args, self.rows_per_step
        epochs = math.ceil(self._num_rows * args.num_train_epochs / per_step)
        calendar = Calendar(int(args.max_steps) if args.max_steps > 0 else epochs, 1, self.updates_per_epoch)
        own: dict[str, Any] = {"rows_per_step": per_step, "max_tokens": self.max_tokens}
        if self.heldout is not None:
            own["eval_every"] = calendar.every(args, "eval")
        if args.max_length is not None:
            own["on_bad_row"] = "skip" if self.section == "reward_model" else "cut"
        if self.section == "sft":
            own["turns"] = self.rows_form.turns(_first(self.rows))
        else:
            center = {"center": vars(args).get("center_rewards_coefficient") or 0.0}
            own["loss"] = loss_of(args) if self.section == "dpo" else center
        sections = {**common_sections(args, calendar), self.section: own, "balance": {"oversize": "alone"}}
        return completed(sections, args, self.model.config, self.lora, folder)

    def _rows_of_block(self) -> int:
        """How many rows a block of `max_length` tokens would hold, by the lengths of the first rows."""
        form, tokenizer = self.rows_form, self.model.tokenizer

        def length(row: Mapping[str, Any]) -> int:
            texts = [row.get(name) for name in ("prompt", "completion", "text")]
            turns = row.get("messages") or [one for text in texts if isinstance(text, list) for one in text]
            if turns:
                template = dict(row.get("chat_template_kwargs") or {})
                texts = [tokenizer.apply_chat_template(turns, tools=row.get("tools"), tokenize=False, **template)]
            return len(tokenizer("".join(map(str, filter(None, texts))), add_special_tokens=False)["input_ids"])

        bound = int(form.args.max_length)
        lengths = [min(length(row), bound) for row in islice(self.rows, READ)]
        found = max(1, round(len(lengths) * bound / max(1, sum(lengths))))
        tell(
            f"packing: rows of {sum(lengths) / len(lengths):.0f} tokens on average are about {found} in a block of "
            f"{bound}, so a step has {found} rows for each of TRL's blocks"
        )
        return found


def _first(rows: Iterable[Any]) -> Any:
    return next(iter(rows), None)
