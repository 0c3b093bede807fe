"""Checks what rewards need outside of the run: the keys of servers, and the folders of reward models. Servers need not
run yet, and no model is loaded."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from megatron_rl.config.rewards import RewardModelReward, ServiceReward
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.preflight.tokenizer_files import TokenizerFiles


def faults_of_services(config: GrpoRunConfig, planning: bool, tell: Callable[[str], None]) -> list[str]:
    """The faults of keys and folders.

    Args:
        planning: whether this is a dry run, for which a folder may be missing.
    """
    faults = []
    for reward in config.rewards:
        if not isinstance(reward, ServiceReward):
            continue
        folder = reward.path if isinstance(reward, RewardModelReward) else None
        if folder and planning and not folder.exists():
            tell(f"not checked, because the folder {folder} is not there: the reward model")
            continue
        try:
            reward.api_key(os.environ)
            if folder:
                _check(folder)
        except (OSError, ValueError) as error:
            faults.append(str(error))
    return faults


def _check(folder: Path) -> None:
    """
    Raises:
        OSError, ValueError: the folder is no classifier with one class, or has no tokenizer.
    """
    fields = json.loads((folder / "config.json").read_text())
    if not any(name.endswith("ForSequenceClassification") for name in fields.get("architectures") or ()):
        raise ValueError(
            f"rewards: {folder} is no reward model: its config.json names {fields.get('architectures')}, and no class "
            "...ForSequenceClassification; `megatron-rl reward-model` trains one"
        )
    num_classes = len(fields.get("id2label") or {0: "", 1: ""})  # transformers takes two if nothing is there
    if num_classes != 1:
        raise ValueError(f"rewards: {folder} has {num_classes} classes, but a reward model has one")
    try:
        TokenizerFiles(folder)
    except ValueError as error:
        raise ValueError(str(error).replace("model.path", "rewards", 1)) from error
