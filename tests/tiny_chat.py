"""Chat templates and a tokenizer of characters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

HEAD = "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
TURN = "<turn>{{ m.role }}:{{ content }}<end>\n"
TAIL = "{% if add_generation_prompt %}<turn>assistant:{% endif %}"
KEEPS = f"{HEAD}{{% for m in messages %}}{{% set content = m.content %}}{TURN}{{% endfor %}}{TAIL}"
DROPS_THOUGHTS = KEEPS.replace("= m.content", "= m.content if loop.last else m.content.split('</think>')[-1].lstrip()")
DROPS_BEFORE_A_USER = KEEPS.replace(
    "= m.content",
    "= m.content.split('</think>')[-1] "
    "if messages[loop.index:] | selectattr('role', 'equalto', 'user') | list else m.content",
)
TRIMS = KEEPS.replace("= m.content", "= m.content | trim")
OFFERS_NOTHING = KEEPS.replace(HEAD, "")
OPENS_A_THOUGHT = KEEPS.replace(TAIL, "{% if add_generation_prompt %}<turn>assistant:<think>\n{% endif %}").replace(
    "= m.content",
    "= ('<think>\n' + m.content) if m.role == 'assistant' and not m.content.startswith('<think>') else m.content",
)


def renderer(template: str, **arguments: Any):
    compiled = Environment().from_string(template)

    def render(turns: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        return compiled.render(messages=turns, add_generation_prompt=add_generation_prompt, **arguments)

    return render


def characters() -> Tokenizer:
    """Every printable character is a token, and so are `<turn>` and `<end>`, which are special, and the thought's
    delimiters, which are not."""
    letters = ["<unk>", "\n", *map(chr, range(32, 127))]
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken("<turn>", special=True), AddedToken("<end>", special=True)])
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer
