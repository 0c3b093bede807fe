"""The tiny Qwen3 of the CPU runs, with two layers and random weights. Each task has its own vocabulary."""

from __future__ import annotations

from pathlib import Path


def write_random_qwen3(folder: Path, seed: int, **vocabulary: int) -> None:
    """Write config.json, generation_config.json and the weights.

    Args:
        vocabulary: the keys vocab_size, pad_token_id, eos_token_id and max_position_embeddings of config.json.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
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
        **vocabulary,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def tell_written(folder: Path) -> None:
    """Print what a task's folder holds: `runs/tiny/task has eval.jsonl (256 rows), model, train.jsonl (8,192 rows)`."""

    def name(path: Path) -> str:
        if path.suffix != ".jsonl":
            return path.name
        return f"{path.name} ({len(path.read_bytes().splitlines()):,} rows)"

    print(f"{folder} has {', '.join(name(path) for path in sorted(folder.iterdir()))}")
