"""The whole configuration of a run: what the arguments say, and what only model, rows and tools can say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.trl.common import completed, replicas_of
from megatron_rl.trl.environments import GivenEnvironments
from megatron_rl.trl.mapping import configuration
from megatron_rl.trl.models import GivenModel
from megatron_rl.trl.prompts import longest_prompt
from megatron_rl.trl.step_sizes import StepSizes


@dataclass(frozen=True, slots=True)
class GivenGrpo:
    """The arguments that a script gave to GRPOTrainer."""

    args: Any
    model: GivenModel
    train: Any
    """The training rows, which have a length."""
    heldout: Any
    """The rows for evaluations, which have a length; None if there are none."""
    environments: GivenEnvironments
    lora: dict[str, Any] | None
    """The section `policy.lora`."""

    @property
    def sizes(self) -> StepSizes:
        return StepSizes.of(self.args, replicas_of(self.args))

    @property
    def updates(self) -> int:
        return self.sizes.updates

    @property
    def updates_per_epoch(self) -> int:
        return max(1, len(self.train) // self.sizes.prompts) * self.sizes.updates

    @property
    def rows(self) -> Any:
        """The training rows. In their own order, the last ones that fill no batch of answers never have their turn."""
        kept = len(self.train) - len(self.train) % StepSizes.rows_of_batch(self.args, replicas_of(self.args))
        if self.args.shuffle_dataset or not kept or kept == len(self.train):
            return self.train
        return [self.train[index] for index in range(kept)]

    def sections(self, folder: Path) -> dict[str, Any]:
        """The sections of the run in this folder; `sections` of the arguments have the last word.

        Raises:
            ValueError: a value cannot be expressed; the message names the argument.
        """
        args, own = self.args, dict(self.args.sections or {})
        sections = configuration(args, len(self.train), replicas_of(args))
        if self.heldout is not None:
            sections["eval"]["num_prompts"] = len(self.heldout)
        if "max_prompt_tokens" not in own.get("rollout", {}):
            bound = longest_prompt(self.model, args, self.train, self.heldout, self.environments)
            sections["rollout"]["max_prompt_tokens"] = bound
        if self.model.vision is not None:
            tower = "trained" if self.lora is None else "frozen"
            sections["model"]["layers"], sections["policy"]["vision_tower"] = "local", tower
        if self.environments:
            sections["rollout"]["environment"] = self.environments.section(args)
        return completed(sections, args, self.model.config, self.lora, folder)
