"""The metrics of a run by TRL's names."""

from __future__ import annotations

import re
from collections.abc import Mapping

NAMES = {
    "lr": "learning_rate",
    "reward/mean": "reward",
    "reward/std": "reward_std",
    "length/response_mean": "completions/mean_length",
    "length/response_max": "completions/max_length",
    "length/response_cut": "completions/clipped_ratio",
    "pg_clipfrac": "clip_ratio/region_mean",
    "mismatch/mean_abs": "sampling/sampling_logp_difference/mean",
    "mismatch/max_abs": "sampling/sampling_logp_difference/max",
    "eval/reward_mean": "eval_reward",
    "eval/accuracy": "eval_accuracy",
    "eval/response_mean": "eval_completions/mean_length",
    "time/total_s": "step_time",
    "environment/tool_calls": "tools/call_frequency",
    "eval/loss": "eval_loss",
    "preference/accuracy": "rewards/accuracies",
}
"""Our metrics by TRL's names. The others, such as `loss`, `grad_norm`, `entropy` and `kl`, keep theirs."""
OF_SETS = {"reward_mean": "reward", "response_mean": "completions/mean_length"}
OWN = ("mean", "std", "abstained", "failed", "seconds", "signal")
"""The last parts of the names `reward/<name>/...` that the run writes; others were logged by the function."""


def named(record: Mapping[str, float]) -> dict[str, float]:
    """A record with TRL's names."""
    found: dict[str, float] = {}
    for name, value in record.items():
        if found_reward := re.fullmatch(r"reward/([^/]+)/(.+)", name):
            label, what = found_reward.groups()
            found[f"rewards/{label}/{what}" if what in OWN else what] = value
        elif of_set := re.fullmatch(r"eval/dataset/(.+)/(reward_mean|response_mean)", name):
            found[f"eval_{of_set[1]}_{OF_SETS[of_set[2]]}"] = value
        else:
            found[NAMES.get(name, name)] = value
    if "eval/loss" in record and "eval_accuracy" in found:
        found["eval_rewards/accuracies"] = found.pop("eval_accuracy")
    if "environment/tool_errors" in record:
        found["tools/failure_frequency"] = record["environment/tool_errors"] / (record["environment/tool_calls"] or 1)
    return found
