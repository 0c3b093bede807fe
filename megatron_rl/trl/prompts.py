"""How long the prompts of a script are. TRL has no bound for them, and a run must know one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jinja2 import TemplateError

from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.trl.environments import GivenEnvironments
from megatron_rl.trl.models import GivenModel
from megatron_rl.trl.rows import images_of

USUAL = RolloutConfig().max_prompt_tokens
"""The bound of a run whose prompts are all shorter."""
TEMPLATE_BYTES = 256
"""What a chat template may add to a short prompt; longer ones are counted by the tokenizer."""


def longest_prompt(model: GivenModel, args: Any, train: Any, heldout: Any, environments: GivenEnvironments) -> int:
    """The bound `rollout.max_prompt_tokens`: the longest prompt if it is longer than usual.

    Raises:
        ValueError: a prompt is longer than `max_prompt_length`, or than what the model leaves for it with an answer.
    """
    positions = int(model.config.get("max_position_embeddings") or 0)
    room = positions - args.max_completion_length
    bound = args.max_prompt_length or (min(USUAL, room) if room > 0 else USUAL)
    skips = (args.sections or {}).get("data", {}).get("on_bad_row") == "skip"
    longest, name, number = 0, "", 0
    for dataset, rows in () if skips else (("train_dataset", train), ("eval_dataset", heldout)):
        for index, row in enumerate(rows or ()):
            if (found := _length(model, row, bound, args, environments.tools)) > longest:
                longest, name, number = found, dataset, index
    opened = args.max_prompt_length is None and environments.open_prompts
    if longest <= bound and not opened:
        return int(bound)
    told = f"row {number} of {name} has a prompt of {longest} tokens"
    if args.max_prompt_length is not None:
        raise ValueError(
            f"GRPOConfig: max_prompt_length={bound}, but {told}; prompts are not cut, as in TRL since 1.0: leave the "
            "argument out or raise it, or leave out longer rows with sections={'data': {'on_bad_row': 'skip'}}"
        )
    if 0 < room < longest:
        raise ValueError(
            f"GRPOConfig: {told}, and with max_completion_length={args.max_completion_length} that is more than the "
            f"model's {positions} positions; lower max_completion_length, or leave the row out"
        )
    # What `reset` appends is not known before. As much again as usual is left for it.
    longest = max(longest, bound) + USUAL if opened else longest
    return min(longest, room) if room > 0 else longest


def _length(model: GivenModel, row: Any, bound: int, args: Any, tools: Any) -> int:
    """The number of a prompt's tokens; 0 if it is certainly within the bound, or if it cannot be counted, about which
    the run says more."""
    prompt = row.get("prompt") if isinstance(row, Mapping) else None
    if not isinstance(prompt, str | list) or not prompt:
        return 0
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False, default=str)
    images = images_of(row) + [part["image"] for part in _parts(prompt) if part.get("image") is not None]
    if len(text.encode(errors="replace")) + TEMPLATE_BYTES <= bound and not tools and not images:
        return 0
    try:
        if isinstance(prompt, str):
            return len(model.tokenizer(prompt, add_special_tokens=False)["input_ids"])
        told = model.tokenizer.apply_chat_template(
            prompt,
            tools=list(tools) or None,
            add_generation_prompt=True,
            tokenize=False,
            **{**(args.chat_template_kwargs or {}), **(row.get("chat_template_kwargs") or {})},
        )
        length = len(model.tokenizer(told, add_special_tokens=False)["input_ids"])
        return length + sum(max(model.image_tokens(image) - 1, 0) for image in images)  # the text has one of each
    except (TemplateError, ValueError, TypeError, KeyError, AttributeError, OSError):
        return 0


def _parts(prompt: str | list[Any]) -> list[Mapping[str, Any]]:
    """The content parts of all turns."""
    contents = [turn.get("content") for turn in prompt if isinstance(turn, Mapping)]
    return [part for content in contents if isinstance(content, list) for part in content if isinstance(part, Mapping)]
