"""The tiny Qwen3 of the CPU runs, with two layers and random weights. Each task has its own vocabulary."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path


def write_random_qwen3(
    folder: Path,
    seed: int,
    *,
    vocab_size: int,
    max_position_embeddings: int,
    pad_token_id: int | None = None,
    eos_token_id: int | None = None,
) -> None:
    """Write config.json, generation_config.json and the weights. The numbers are keys of config.json."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.manual_seed(seed)
    config = Qwen3Config(
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        vocab_size=vocab_size,
        pad_token_id=pad_token_id,
        eos_token_id=eos_token_id,
        max_position_embeddings=max_position_embeddings,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)  # type: ignore[no-untyped-call]


def write_task_of(doc: str | None, write_task: Callable[..., object], arguments: Sequence[str] | None) -> int:
    """The command of a recipe that writes its task into a folder; returns its exit status.

    Args:
        doc: the description of the task, for `--help`.
        write_task: gets the folder and `seed`.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder for the model, the rows, and what else the task has")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    write_task(options.folder, seed=options.seed)
    tell_written(options.folder)
    return 0


def tell_written(folder: Path) -> None:
    """Print what a task's folder holds: `runs/tiny/task has eval.jsonl (256 rows), model, train.jsonl (8,192 rows)`."""

    def name(path: Path) -> str:
        if path.suffix != ".jsonl":
            return path.name
        return f"{path.name} ({len(path.read_bytes().splitlines()):,} rows)"

    print(f"{folder} has {', '.join(name(path) for path in sorted(folder.iterdir()))}")
