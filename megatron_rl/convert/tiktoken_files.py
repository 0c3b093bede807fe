"""Tokenizers that are published as tiktoken's ranks and Python code, as Moonshot AI's Kimi and Moonlight are.

Such a folder has tiktoken.model (a token's bytes and its rank in each line) and a module that `auto_map` of
tokenizer_config.json names. Only the module knows the pattern that cuts a text into words. It is read from the module's
text, and nothing of the module is executed. Invariant (tests/unit/convert): tokenizer.json gives
the tokens of `tiktoken.Encoding` with the same ranks and pattern.
"""

from __future__ import annotations

import ast
import json
from base64 import b64decode
from pathlib import Path
from typing import Any

from megatron_rl.models.composite import read_config

RANKS = "tiktoken.model"
PATTERN = "pat_str"
"""The name that the modules give to the pattern."""


def is_needed(folder: Path) -> bool:
    """Whether the folder has a tokenizer in this form alone."""
    return (folder / RANKS).is_file() and not (folder / "tokenizer.json").is_file()


def tokenizer_files(folder: Path) -> dict[str, bytes]:
    """The contents of tokenizer.json and tokenizer_config.json, by file name.

    Raises:
        ValueError: a file is missing or damaged, or the module has no pattern that can be read.
    """
    from transformers.convert_slow_tokenizer import TikTokenConverter  # takes seconds, and few folders need it

    config, vocab_size = _read(folder / "tokenizer_config.json"), read_config(folder)["vocab_size"]
    ranks = read_ranks(folder / RANKS)
    named = {int(number): token["content"] for number, token in config.get("added_tokens_decoder", {}).items()}
    # The module names the rows that are left so; ids of a template must not move.
    special = [named.get(number, f"<|reserved_token_{number}|>") for number in range(len(ranks), vocab_size)]
    pattern = read_pattern(folder, config)
    converter: Any = TikTokenConverter(pattern=pattern, extra_special_tokens=special)  # type: ignore[no-untyped-call]
    converter.load_tiktoken_bpe = lambda _: ranks
    made = converter.converted()
    kept = {key: value for key, value in config.items() if key != "auto_map"}
    return {
        "tokenizer.json": made.to_str().encode(),
        "tokenizer_config.json": json.dumps(
            kept | {"tokenizer_class": "PreTrainedTokenizerFast"}, indent=2, ensure_ascii=False
        ).encode(),
    }


def read_ranks(path: Path) -> dict[bytes, int]:
    """Each token's bytes and its rank.

    The library tiktoken is not asked, because it keeps what it has once read by its path, in a folder of the machine: a
    file that was copied again would be read as it was before.

    Raises:
        ValueError: a line is not a token in base64 and a number.
    """
    ranks = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} cannot be read ({error}); copy it again") from error
    return ranks


def read_pattern(folder: Path, config: dict[str, Any]) -> str:
    """The pattern of the module that tokenizer_config.json names.

    Raises:
        ValueError: there is no such module, or its pattern is not written as a text, or as texts that are joined.
    """
    named = config.get("auto_map", {}).get("AutoTokenizer") or [None]
    module = str(named[0] if isinstance(named, list) else named).partition(".")[0]
    path = folder / f"{module}.py"
    if not path.is_file():
        raise ValueError(
            f"{folder} has {RANKS} and no tokenizer.json, so {module}.py must be there, whose `{PATTERN}` cuts texts "
            f"into words (it is only read); fetch the whole folder of the model"
        )
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == PATTERN:
            return _text(node.value, path)  # type: ignore[attr-defined]  # an assignment, with or without a type
    raise ValueError(
        f"{path} has no `{PATTERN}`, so its tokenizer cannot be converted; take a release with tokenizer.json"
    )


def _text(node: ast.expr, path: Path) -> str:
    """The text that an expression is: a constant, or `separator.join([...])` of such."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Call(func=ast.Attribute(value=separator, attr="join"), args=[ast.List(elts=parts)], keywords=[]):
            return _text(separator, path).join(_text(part, path) for part in parts)
    raise ValueError(
        f"{path}, line {node.lineno}: `{PATTERN}` is neither a text nor a list of texts that are joined, and the "
        f"module is not executed; take a release with tokenizer.json"
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}); copy it again") from error
    return fields
