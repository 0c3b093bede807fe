"""The tiny Qwen3 of the CPU runs, with two layers and random weights, and what the tasks write for it. Each task has
its own vocabulary."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Rows = Sequence[Mapping[str, Any]]


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


def write_character_model(
    folder: Path, seed: int, vocabulary: Sequence[str], added: Sequence[str], num_positions: int
) -> None:
    """Write such a model with a tokenizer whose tokens are single characters and the texts `added`.

    Args:
        added: they are no special tokens, so that people and rewards see them in the text.
    """
    _character_tokenizer(vocabulary, ".", "<eos>", added).save_pretrained(folder)
    sizes = {"vocab_size": 64, "max_position_embeddings": num_positions}
    write_random_qwen3(folder, seed, pad_token_id=0, eos_token_id=1, **sizes)


def chat_tokenizer(turns: Sequence[str], added: Sequence[str], characters: str, template: str) -> Any:
    """A tokenizer with a chat template, whose tokens are single characters, also line feeds, and these texts.

    Args:
        turns: the texts that begin turns, as special tokens. `<end>` ends each turn.
        added: pieces of what the model writes, which are no special tokens.
    """
    vocabulary = list(dict.fromkeys(["<pad>", "<end>", "<unk>", *turns, *added, *characters]))
    tokenizer = _character_tokenizer(vocabulary, r"[\s\S]", "<end>", added, turns)
    tokenizer.chat_template = template
    return tokenizer


def _character_tokenizer(
    vocabulary: Sequence[str], character: str, end: str, added: Sequence[str], turns: Sequence[str] = ()
) -> Any:
    """
    Args:
        character: the pattern of what is a character.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(character), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token=end, unk_token="<unk>")  # type: ignore[no-untyped-call]
    if turns:
        fast.add_special_tokens({"additional_special_tokens": list(turns)})
    fast.add_tokens(list(added))
    return fast


def write_rows(folder: Path, train: Rows, heldout: Rows, demonstrations: Rows) -> None:
    """Write train.jsonl, eval.jsonl and demonstrations.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("eval", heldout), ("demonstrations", demonstrations)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


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
