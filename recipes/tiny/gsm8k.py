"""Makes the model for configs/run/gsm8k_tiny_cpu.yaml: a tiny Qwen3 with random weights, and a byte-level tokenizer
that is trained on rows of GSM8K.

python -m megatron_rl.recipes.tiny.gsm8k runs/gsm8k_tiny [rows.jsonl]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.recipes.tiny.model import tell_written, write_random_qwen3

ROWS = Path(__file__).parent / "data" / "gsm8k_train_sample.jsonl"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def write_model(folder: Path, rows: Path = ROWS, vocab_size: int = 512, seed: int = 0) -> None:
    """Write config.json, random weights and a tokenizer with a chat template to folder/model."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    texts = [message["content"] for line in rows.read_text().splitlines() for message in json.loads(line)["messages"]]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size - 2, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        ),
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")  # type: ignore[no-untyped-call]
    fast.add_tokens(["<think>", "</think>"])  # they are text of the answer and no special tokens
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder / "model")
    write_random_qwen3(
        folder / "model",
        seed,
        vocab_size=vocab_size,
        pad_token_id=fast.pad_token_id,
        eos_token_id=fast.eos_token_id,
        max_position_embeddings=4096,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the model goes to FOLDER/model")
    parser.add_argument("rows", type=Path, nargs="?", default=ROWS, help="JSON lines whose text trains the tokenizer")
    options = parser.parse_args(arguments)
    write_model(options.folder, options.rows)
    tell_written(options.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
