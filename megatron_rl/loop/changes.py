"""The keys of the configuration that may change when a run is resumed from a checkpoint.

These are paths, durations and intervals, the layout of the trainer, the placement on machines, and the settings of the
optimizer, but not its kind. They take effect at once. All other keys define the objective or are part of the saved
state. To change one of them, start a new run from the Hugging Face export of the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from megatron_rl.config.schema import BaseConfig

MAY_CHANGE = re.compile(
    "|".join(
        [
            r"run\.(name|folder|steps|stop_on)",
            r"model\.(path|weights|recompute|layers)",
            r"(policy|critic)\.(parallel|megatron)\..*",
            # Another kind of optimizer has another state.
            r"(policy|critic)\.optimizer\.(?!kind$).*",
            r"critic\.model(\.(path|weights|recompute|layers))?",
            # The other keys of `data` would change the questions, or their order.
            r"data\.(train|train\.\d+\.path|eval|on_bad_row|deduplicate|cache)",
            r"(sft|dpo|reward_model)\.(rows|on_bad_row|eval|eval_every)",
            r"rollout\.(dump(\.last)?|lora|num_engines|parallel\.(tensor|pipeline|expert)|prefix_cache|max_sequences|gpu_memory_utilization)",
            r"rollout\.vllm(\..*)?",
            r"rollout\.environment\.(processes|step_timeout_s)",
            r"rewards\.\d+\.(on_error|timeout_s|max_silent_steps|max_failed_steps)",
            r"rewards\.\d+\.(url|api_key_env|attempts|answer_timeout_s|max_concurrency|requests_per_minute)",
            r"algorithm\.(max_mismatch|(kl|entropy)\.coefficient\.value)",
            r"(balance|bridge|checkpoint|cluster|eval|observe|slurm)(\..*)?",
        ]
    )
)
"""The dotted paths of the keys that may change. If the training rows change, their names and questions must
stay the same: otherwise the stream of the checkpoint refuses them."""

ABSENT = object()
ADAPTERS = (
    ". Of adapters the export is a folder without their base model: policy.lora.start begins with them if their rank, "
    "scale and layers stay, and otherwise `megatron-rl merge` adds them to it"
)


@dataclass(frozen=True, slots=True)
class Change:
    path: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.path}: {_shown(self.before)} -> {_shown(self.now)}"


def with_new_keys(saved: Mapping[str, Any], kind: type[BaseConfig]) -> Mapping[str, Any]:
    """The configuration of a checkpoint in JSON's types, with the defaults of the keys that have come since: they mean
    what every earlier run did. A configuration that the present schema refuses is returned as it is.

    Args:
        kind: of the run.
    """
    try:
        return kind.model_validate(saved).model_dump(mode="json")
    except ValidationError:
        return saved


def compare(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """The differences between two configurations in JSON's types.

    Raises:
        ValueError: a key has changed that may not change. The message lists all of these.
    """
    changes = [change for change in _changes(before, now, "") if not _names_the_only_kind(change)]
    refused = [change for change in changes if not MAY_CHANGE.fullmatch(change.path)]
    if refused:
        raise ValueError(
            "a resumed run cannot change these (checkpoint -> now):\n"
            + "\n".join(f"  {change}" for change in refused)
            + "\nUndo them, or export the checkpoint (megatron-rl export) and start a new run from its weights"
            + ADAPTERS * bool(before.get("policy", {}).get("lora"))
        )
    return changes


def _names_the_only_kind(change: Change) -> bool:
    """Whether the optimizer's kind was not named, because there was no other than Adam, and now is."""
    return change.path.endswith("optimizer.kind") and (change.before, change.now) == (ABSENT, "adam")


def _changes(before: Any, now: Any, path: str) -> Iterator[Change]:
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        before, now = ({str(i): value for i, value in enumerate(values)} for values in (before, now))
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys([*before, *now]):
            yield from _changes(before.get(key, ABSENT), now.get(key, ABSENT), f"{path}.{key}" if path else key)
    elif before != now:
        yield Change(path, before, now)


def _shown(value: Any) -> str:
    return "(no such key)" if value is ABSENT else repr(value)
