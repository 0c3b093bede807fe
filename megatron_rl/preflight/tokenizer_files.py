"""Reads vocabulary, special tokens and chat template from the tokenizer's files, without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from megatron_rl.data.encode import template_fault
from megatron_rl.data.rows import BadRow
from megatron_rl.data.tokenizer import end_texts

SLOW_FORMS = (("tokenizer.model",), ("vocab.json", "merges.txt"), ("vocab.txt",))
"""The files that transformers can read if there is no tokenizer.json: SentencePiece, byte-level BPE, WordPiece."""
SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


class TokenizerFiles:
    """The tokenizer in a model's folder.

    Attributes:
        core: the tokenizer in tokenizer.json; None if the folder has a tokenizer of another form.
        special: the special tokens by their roles, without roles that have no token.
        ends: the texts of the tokens that end an answer, as far as they are known.
        template: the source of the chat template; None if there is none.

    Raises:
        ValueError: there is no tokenizer, or one of its files cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        config = _read(folder / "tokenizer_config.json")
        path = folder / "tokenizer.json"
        self.core: Tokenizer | None = None
        if path.is_file():
            try:
                self.core = Tokenizer.from_file(str(path))
            except Exception as error:  # tokenizers raises plain Exception
                raise ValueError(f"{path} cannot be read ({error}); copy it again") from error
        elif (folder / "tiktoken.model").is_file():
            raise ValueError(
                f"model.path: {folder} has a tokenizer of ranks and code (tiktoken.model), which no run executes; "
                f"`megatron-rl convert to-hf {folder} TARGET` writes the model with a tokenizer.json, and "
                f"model.path=TARGET uses it"
            )
        elif not any(all((folder / name).is_file() for name in names) for names in SLOW_FORMS):
            raise ValueError(
                f"model.path: {folder} has no tokenizer: neither tokenizer.json nor tokenizer.model is there; copy it "
                f"from the checkpoint that the model was made of"
            )
        named = _read(folder / "special_tokens_map.json") | config
        tokens = {role: named.get(role) for role in SPECIAL}
        self.special = {
            role: token if isinstance(token, str) else token["content"] for role, token in tokens.items() if token
        }
        self.template = _template(folder, config)
        ends = end_texts(folder, self.core.id_to_token, self.ids) if self.core else ()
        self.ends = tuple(dict.fromkeys((*([eos] if (eos := self.special.get("eos_token")) else []), *ends)))

    def ids(self, text: str) -> list[int]:
        """The tokens of the text, without special tokens that a post-processor would add. `core` must not be None."""
        assert self.core is not None
        ids: list[int] = self.core.encode(text, add_special_tokens=False).ids
        return ids


class ChatTemplate:
    """Renders chat turns as transformers does, as far as this is possible with jinja2 alone.

    Raises:
        jinja2.TemplateError: the template has a tag that only transformers knows.
        ValueError: the template has an error; the message has its line.
    """

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template: Template = environment.from_string(source)
        except TemplateSyntaxError as error:
            if "unknown tag 'generation'" in str(error):  # transformers marks the assistant's tokens by it
                raise
            raise ValueError(f"the chat template has an error in line {error.lineno}: {error.message}") from error
        self._special = special

    def render(
        self, turns: Sequence[Mapping[str, Any]], add_generation_prompt: bool, arguments: Mapping[str, Any]
    ) -> str | None:
        """The text of the turns; None if the template needs something that only transformers provides.

        Args:
            arguments: further arguments of the template, such as `tools`.

        Raises:
            BadRow: the template refuses the turns, or fails on them.
        """
        try:
            given = {"tools": None, "documents": None, **self._special, **arguments}
            return self._template.render(messages=turns, add_generation_prompt=add_generation_prompt, **given)
        except BadRow:
            raise
        except Exception as error:
            # Others of its own errors are about what only transformers has, such as a filter; the run finds them.
            if isinstance(error, TemplateError) and "object' has no attribute" not in str(error):
                return None
            raise template_fault(error, turns) from error


def _refuse(message: str) -> NoReturn:
    raise BadRow(f"the chat template refuses `messages`: {message}")


def _tojson(value: Any, indent: int | None = None, **ignored: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    found = _read(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(found, list):  # there are several templates, each with a name
        found = next((one["template"] for one in found if one["name"] == "default"), None)
    return found


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); copy it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, but it holds a {type(content).__name__}; copy it again")
    return content
