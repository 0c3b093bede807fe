"""Replaces the settings whose default depends on the model or on the machine by what they mean for this run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any, TypeVar

from megatron_rl.commands.row_counts import num_training_rows
from megatron_rl.config.correction import CorrectionConfig, TruncatedWeight
from megatron_rl.config.load import merge_arguments, validate
from megatron_rl.config.machine import count_gpus
from megatron_rl.config.rewards import FormatReward
from megatron_rl.config.schema import BaseConfig, GrpoRunConfig, OfflineRunConfig
from megatron_rl.data.rows import counted
from megatron_rl.planning.shapes import planned_shape
from megatron_rl.planning.stages import with_layers
from megatron_rl.preflight.tokenizer_files import TokenizerFiles

Config = TypeVar("Config", bound=BaseConfig)
Grpo = TypeVar("Grpo", bound=GrpoRunConfig)
Offline = TypeVar("Offline", bound=OfflineRunConfig)

NEAR_LAG = 4
"""The largest lag with which the clip around an interpolated policy was seen to hold. With 8, what was learnt was lost
in one of two runs, and the clip around the engine's policy, which learns more slowly, held (docs/asynchronous.md)."""


def read_config(
    kind: type[Config],
    arguments: Sequence[str],
    tell: Callable[[str], None] = lambda note: None,
    *,
    planning: bool = False,
    in_job: bool = False,
) -> Config:
    """The configuration of a run from YAML files and overrides; see `with_defaults`.

    Args:
        planning: whether this is a dry run, which asks no Ray for its GPUs.
        in_job: whether the run will be a Slurm job, on other machines.

    Raises:
        ValueError: the configuration is refused, or there is no Ray at `cluster.ray_address`.
    """
    given = merge_arguments(arguments)
    if _key(given, "run", "epochs") is not None:
        given = _with_steps(kind, given, tell)

    def has_gpus() -> bool:
        if in_job and (per_node := _key(given, "slurm", "gpus_per_node")) is not None:
            return bool(per_node)
        address = _key(given, "cluster", "ray_address")
        if count_gpus() or planning or in_job or not isinstance(address, str):
            return count_gpus() > 0
        from megatron_rl.cluster.session import count_gpus_of_ray  # it imports Ray, which takes seconds

        return count_gpus_of_ray(address) > 0

    return with_defaults(validate(kind, given, has_gpus), tell)


def _with_steps(kind: type[Config], given: Mapping[str, Any], tell: Callable[[str], None]) -> dict[str, Any]:
    """The configuration of a run with the number of steps of its epochs.

    Raises:
        ValueError: it gives the number of steps, too, or is refused, or its rows cannot be counted.
    """
    if _key(given, "run", "steps") is not None:
        raise ValueError(
            "run.epochs and run.steps are both given, and each says how long the run is; remove one of them, or add "
            "run.epochs=null"
        )
    with_one = {**given, "run": {**given["run"], "steps": 1}}
    config = with_defaults(validate(kind, with_one, lambda: False))
    assert config.run.epochs is not None, "the caller has looked"
    assert isinstance(config, OfflineRunConfig | GrpoRunConfig), "each kind of run trains on rows"
    num_rows = num_training_rows(config)
    per_step = config.offline.rows_per_step if isinstance(config, OfflineRunConfig) else config.rollout.prompts_per_step
    steps = max(1, ceil(Fraction(str(config.run.epochs)) * num_rows / per_step))
    epochs = f"{config.run.epochs:g} epoch{'s' * (config.run.epochs != 1)}"
    tell(f"run.steps is {steps:,}: {epochs} of {counted(num_rows, 'row')}, {per_step} in a step")
    # The run has only the number, so that the configuration in its folder can be given again.
    return {**with_one, "run": {**with_one["run"], "steps": steps, "epochs": None}}


def _key(given: Mapping[str, Any], section: str, key: str) -> Any:
    keys = given.get(section)
    return keys.get(key) if isinstance(keys, Mapping) else None


def with_defaults(config: Config, tell: Callable[[str], None] = lambda note: None) -> Config:
    """The configuration of a run, with numbers of layers in the place of `auto`, and without a delimiter that the model
    does not have, and with rows that its positions hold.

    Args:
        tell: is called with a sentence about each value that the user may not expect, the data type included.

    Raises:
        ValueError: the model has fewer layers than the pipeline has parts, or its files cannot be read.
    """
    if "dtype" not in config.model.model_fields_set and config.model.dtype == "float32":
        tell("model.dtype is float32, because trainers run on the CPU, which has no units for bfloat16")
    config = with_layers(config)
    if isinstance(config, OfflineRunConfig):
        return _with_length(config, tell)
    if not isinstance(config, GrpoRunConfig):
        return config
    return _with_delimiter(_with_room(_with_anchor(config, tell), tell), tell)


def _with_length(config: Offline, tell: Callable[[str], None]) -> Offline:
    section, offline = config.section, config.offline
    if "max_tokens" in offline.model_fields_set:
        return config
    positions = _positions(config)
    if positions is None or positions >= offline.max_tokens:
        return config
    tell(f"{section}.max_tokens is {positions}, the positions of {config.model.path}")
    return config.model_copy(update={section: offline.model_copy(update={"max_tokens": positions})})


def _with_anchor(config: Grpo, tell: Callable[[str], None]) -> Grpo:
    """A clip that bounds how far the policy moves away from weights of several steps before: without one, three of five
    runs with the demo's task and a lag of 4 lost what they had learnt."""
    algorithm, loss = config.algorithm, config.algorithm.loss
    is_given = bool(algorithm.model_fields_set & {"anchor", "correction"})
    chooses = loss.clips_ratio and config.rollout.max_lag > 1 and not is_given
    clips = sorted(name for name in loss.model_fields_set if name.startswith("clip_ratio"))
    if loss.clips_ratio and clips and algorithm.num_updates == 1 and not (algorithm.is_around_engine or chooses):
        tell(
            f"algorithm.loss.{clips[0]} never acts: with algorithm.updates_per_step and algorithm.epochs 1 each update "
            "begins at pi_old, where the ratio is 1"
        )
    if algorithm.updates_per_step > 1 and not loss.has_ratio:
        tell(
            f"algorithm.updates_per_step is {algorithm.updates_per_step}, but loss {loss.kind} has no ratio to pi_old, "
            "so that only the first update of a step follows the policy gradient"
        )
    if config.rollout.max_lag <= 1 or algorithm.is_bounded:
        return config
    lag = f"rollout.max_lag is {config.rollout.max_lag}"
    if algorithm.stop_epochs is not None:
        tell(
            f"algorithm.anchor stays old, because algorithm.stop_epochs compares with pi_old, although {lag}; without "
            "stop_epochs the clip would be around the weights that sampled"
        )
        return config
    near = config.rollout.max_lag <= NEAR_LAG
    if chooses:
        chosen: dict[str, object] = {"anchor": "engine", "correction": None}
        told, around = "engine and algorithm.correction null", "the weights that sampled"
        if near:
            weight = TruncatedWeight(cap=5.0)
            chosen = {"anchor": "interpolated", "correction": CorrectionConfig(weight=weight)}
            told = "interpolated and algorithm.correction.weight.cap 5"
            around = "a policy between the weights that sampled and the current ones"
        tell(f"algorithm.anchor is {told}, because {lag}: the clip of {loss.kind} is around {around}")
        return config.model_copy(update={"algorithm": algorithm.model_copy(update=chosen)})
    choices = ["algorithm.loss.kind=dppo_tv without algorithm.correction", "rules in algorithm.correction.reject"]
    if loss.clips_ratio:
        choices.insert(0, "algorithm.anchor=" + ("interpolated" if near else "engine without algorithm.correction"))
    tell(
        f"{lag}, and nothing bounds how far the policy moves away from the weights that sampled: {loss.kind} has no "
        f"bound that acts on it. Consider one of these: {'; '.join(choices)}"
    )
    return config


def _with_room(config: Grpo, tell: Callable[[str], None]) -> Grpo:
    """Prompts that are not longer than half of the positions, and answers that fit into the rest, where these lengths
    are not given."""
    rollout, positions = config.rollout, _positions(config)
    given = rollout.model_fields_set
    if positions is None or "max_response_tokens" in given or rollout.thinking is not None:
        return config
    prompt = (
        rollout.max_prompt_tokens if "max_prompt_tokens" in given else min(rollout.max_prompt_tokens, positions // 2)
    )
    if positions >= rollout.max_model_tokens or prompt >= positions:
        return config
    response = positions - prompt
    tell(
        f"rollout.max_prompt_tokens is {prompt} and rollout.max_response_tokens {response}, because "
        f"{config.model.path} has {positions} positions"
    )
    room = {"max_prompt_tokens": prompt, "max_response_tokens": response}
    return config.model_copy(update={"rollout": rollout.model_copy(update=room)})


def _positions(config: BaseConfig) -> int | None:
    """The number of positions of the model; None if its files cannot be read, which the preflight tells."""
    try:
        return planned_shape(config).max_positions
    except (ValueError, OSError):
        return None


def _with_delimiter(config: Grpo, tell: Callable[[str], None]) -> Grpo:
    rollout, folder = config.rollout, config.model.path
    is_given = "delimiter" in rollout.model_fields_set
    is_needed = (
        rollout.thinking is not None
        or (rollout.prefix_values is not None and rollout.environment is None)
        or any(isinstance(reward, FormatReward) for reward in config.rewards)
    )
    if (is_needed and not is_given) or not rollout.delimiter or not folder.is_dir():
        return config
    try:
        thinks = _thinks(folder, rollout.delimiter)
    except ValueError:  # the preflight tells it, with all other faults
        return config
    if thinks:
        return config
    if is_given:
        tell(
            f"rollout.delimiter is {rollout.delimiter!r}, which neither chat template nor vocabulary of {folder} "
            f"has: an answer without it scores 0. If the model does not think, write an empty text"
        )
        return config
    tell(
        f"rollout.delimiter is empty, because neither the chat template nor the vocabulary of {folder} has "
        f"{rollout.delimiter}: whole answers are judged. If the model thinks, give the text that ends its reasoning"
    )
    return config.model_copy(update={"rollout": rollout.model_copy(update={"delimiter": ""})})


def _thinks(folder: Path, delimiter: str) -> bool:
    """Whether the model's files know the text that ends a thought. A tokenizer of another form than tokenizer.json may
    have it."""
    files = TokenizerFiles(folder)
    in_template = files.template is not None and delimiter in files.template
    return in_template or files.core is None or files.core.token_to_id(delimiter) is not None
