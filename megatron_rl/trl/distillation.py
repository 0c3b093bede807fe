"""Maps the arguments of TRL's GKDConfig to the sections of a run with a teacher on the policy's ranks, and rows to its
prompts.

Invariants (tests/unit/trl, tests/doors): over the whole vocabulary the divergence is TRL's; what has no counterpart is
an error that names the argument.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.trl.common import Calendar, common_sections, completed, faults_of, replicas_of
from megatron_rl.trl.models import GivenModel

FORMS = {0.0: "forward", 0.5: "jensen_shannon", 1.0: "reverse"}
"""`algorithm.distillation.form` by TRL's beta."""


def faults_of_gkd(args: Any) -> list[str]:
    return faults_of(args, (lambda: _sizes(args), lambda: _mix(args), lambda: _temperature(args), lambda: form(args)))


def _sizes(args: Any) -> None:
    if min(args.per_device_train_batch_size, args.gradient_accumulation_steps, args.max_new_tokens) < 1:
        raise ValueError(
            "per_device_train_batch_size, gradient_accumulation_steps and max_new_tokens must be at least 1"
        )


def _mix(args: Any) -> None:
    if args.lmbda != 1:
        raise ValueError(
            f"lmbda={args.lmbda} is not supported: all answers are the student's own here, so write 1.0; `megatron-rl "
            "sft` trains on answers of the rows or of a teacher"
        )


def _temperature(args: Any) -> None:
    if args.temperature != 1:
        raise ValueError(
            f"temperature={args.temperature} is not supported: the divergence has the temperature of sampling here, "
            "and in TRL 1; write 1.0"
        )


def form(args: Any) -> str:
    """
    Raises:
        ValueError: beta is between the three divergences.
    """
    if args.beta not in FORMS:
        raise ValueError(
            f"beta={args.beta} is not supported: write 0 (forward KL), 0.5 (Jensen-Shannon) or 1 (reverse KL)"
        )
    return FORMS[float(args.beta)]


def prompts_of(rows: Iterable[Any]) -> list[dict[str, Any]]:
    """The rows with their prompts: the chat before the last answer, as TRL's collator takes it.

    Raises:
        ValueError: a row has no chat that ends with an answer, and no prompt.
    """
    found = []
    for i, given in enumerate(rows):
        row = dict(given)
        turns = row.pop("messages", None)
        if turns is not None:
            if len(turns) < 2 or turns[-1]["role"] != "assistant":
                raise ValueError(f"row {i} of train_dataset: messages must end with the assistant's answer to a prompt")
            row["prompt"] = list(turns[:-1])
        if row.get("prompt") is None:
            raise ValueError(f"row {i} of train_dataset has neither messages nor prompt")
        found.append({name: value for name, value in row.items() if name != "completion"})
    return found


def no_reward(completions: Sequence[Any], **columns: Any) -> list[float]:
    """The policy learns from its teacher alone."""
    return [0.0] * len(completions)


@dataclass(frozen=True, slots=True)
class GivenGkd:
    """The arguments that a script gave to GKDTrainer."""

    args: Any
    model: GivenModel
    teacher: GivenModel
    rows: Sequence[Mapping[str, Any]]
    lora: dict[str, Any] | None
    heldout = None
    updates = 1
    """The optimizer steps of a step."""

    @property
    def rows_per_step(self) -> int:
        args = self.args
        return int(args.per_device_train_batch_size) * replicas_of(args) * int(args.gradient_accumulation_steps)

    @property
    def updates_per_epoch(self) -> int:
        return max(1, math.ceil(len(self.rows) / self.rows_per_step))

    def sections(self, folder: Path) -> dict[str, Any]:
        """The sections of the run in this folder; `sections` of the arguments have the last word.

        Raises:
            ValueError: a value cannot be expressed; the message names the argument.
        """
        args = self.args
        epochs = math.ceil(len(self.rows) * args.num_train_epochs / self.rows_per_step)
        calendar = Calendar(int(args.max_steps) if args.max_steps > 0 else epochs, 1, self.updates_per_epoch)
        room = int(self.model.config.get("max_position_embeddings") or math.inf) - args.max_new_tokens
        rollout = {
            "prompts_per_step": self.rows_per_step,
            "samples_per_prompt": 1,
            "max_prompt_tokens": max(1, min(args.max_length or room, room)),
            "max_response_tokens": args.max_new_tokens,
            "sampling": {"temperature": args.temperature},
            "delimiter": "",
        }
        sections = {
            **common_sections(args, calendar),
            "rollout": rollout,
            "teachers": [{"path": str(self.teacher.save(folder / "teacher"))}],
            "algorithm": {"distillation": {"form": form(args), "by": "trainer"}, "loss_agg_mode": "token-mean"},
            "eval": {"every": 0},
        }
        return completed(sections, args, self.model.config, self.lora, folder)
