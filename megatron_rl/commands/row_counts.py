"""Counts the rows of an epoch, for `run.epochs`."""

from __future__ import annotations

from pathlib import Path

from megatron_rl.config.schema import GrpoRunConfig, OfflineRunConfig, SftRunConfig
from megatron_rl.data.files import read_rows


def num_training_rows(config: OfflineRunConfig | GrpoRunConfig) -> int:
    """The number of rows that one epoch trains.

    Where rows may be skipped or removed, all are tokenized for that, as when the run starts.

    Raises:
        ValueError: the rows cannot be read, or the steps of the run take different numbers of rows.
    """
    if isinstance(config, OfflineRunConfig):
        offline = config.offline
        key, rows = f"{config.section}.rows", offline.rows
        # For KTO a pair is two rows.
        is_as_read = offline.on_bad_row == "fail" and isinstance(config, SftRunConfig)
    else:
        data = config.data
        if isinstance(data.train, tuple):
            raise ValueError(
                "run.epochs counts the rows of one source, and data.train is a mixture, whose sources end at different "
                "times; give run.steps"
            )
        if config.rollout.active_sampling:
            raise ValueError(
                "run.epochs: with rollout.active_sampling a step takes as many rows as it needs for groups with a "
                "signal, so an epoch has no known number of steps; give run.steps"
            )
        key, rows, is_as_read = "data.train", data.train, data.on_bad_row == "fail" and not data.deduplicate
    if isinstance(rows, Path) and not rows.exists():
        raise ValueError(f"{key}: there is no {rows}, and run.epochs counts its rows")
    return sum(1 for _ in read_rows(rows)) if is_as_read else _num_kept(config)


def _num_kept(config: OfflineRunConfig | GrpoRunConfig) -> int:
    from megatron_rl.data.tokenizer import open_tokenizer  # transformers takes seconds

    tokenizer = open_tokenizer(config.model.path)
    if isinstance(config, OfflineRunConfig):
        from megatron_rl.data.supervised import load_training_rows

        return len(load_training_rows(config, config.offline.rows, tokenizer)[0])
    from megatron_rl.data import load_prompts
    from megatron_rl.preflight.row_sources import prompt_rules, training_sources

    data, [source] = config.data, training_sources(config.data, config.rollout.environment)
    return len(
        load_prompts(source.path, tokenizer, prompt_rules(config), source.reading, data.cache, lambda note: None)
    )
