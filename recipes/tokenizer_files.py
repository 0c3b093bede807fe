"""A model folder's tokenizer as its files say, without transformers: vocabulary, special tokens, chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from megatron_rl.data.rows import BadRow

SLOW_FORMS = (("tokenizer.model",), ("vocab.json", "merges.txt"), ("vocab.txt",))
"""What transformers reads where there is no tokenizer.json: SentencePiece, byte-level BPE, WordPiece."""
SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


class TokenizerFiles:
    """
    Attributes:
        core: the tokenizer of tokenizer.json; None where the folder has another form of one.
        special: role -> token, of those that the folder names.
        template: the source of the chat template; None where there is none.

    Raises:
        ValueError: there is no tokenizer, or a file of it cannot be read.
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

    def ids(self, text: str) -> list[int]:
        """The text's tokens, without the special ones that a post-processor would add. It needs a tokenizer.json."""
        return self.core.encode(text, add_special_tokens=False).ids


class ChatTemplate:
    """Renders chat turns as transformers does, or says that it cannot.

    Raises:
        jinja2.TemplateError: the source is no template that plain jinja2 compiles.
    """

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._template: Template = environment.from_string(source)
        self._special = special

    def render(self, turns: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str | None:
        """The text of the turns; None where the template asks for more than is known here.

        Raises:
            BadRow: the template refuses the turns.
        """
        try:
            return self._template.render(
                messages=turns, tools=None, documents=None, add_generation_prompt=add_generation_prompt, **self._special
            )
        except BadRow:
            raise
        except Exception:  # a template is a program and raises what it likes; transformers will judge it
            return None


def _refuse(message: str) -> NoReturn:
    raise BadRow(f"the chat template refuses `messages`: {message}")


def _tojson(value: Any, indent: int | None = None, **ignored: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    found = _read(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(found, list):  # several, by name
        found = next((one["template"] for one in found if one["name"] == "default"), None)
    return found


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}); copy it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, it holds a {type(content).__name__}; copy it again")
    return content
