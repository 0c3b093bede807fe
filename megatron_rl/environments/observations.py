"""How observations become tokens.

What a model has sampled is never tokenised again. The chat template is rendered for a model conversation of a question,
an answer and the observation, and the text after the answer is taken: the end of the answer's turn, the observation,
and the beginning of the next turn. Only this text is tokenised, alone.

This is right for every answer only if the template writes the answer as it was sampled, before any continuation. So
`Continuation` looks at a conversation whose answers have a thought: each beginning of it must be a beginning of the
whole. Of other answers it notes how the template rewrites them. The transcript keeps what was sampled, so training is
right; but a program that renders the conversation later gives the model other tokens than in training.

Invariants (tests/unit/environments): transcript and continuation together are the text that the template renders for
the whole conversation; an observation has at most the allowed number of tokens, plus the sentence that says that it was
cut; no text of an observation becomes a special token, or a mark such as `<tool_call>`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Render = Callable[[Sequence[Mapping[str, Any]], bool], str]
"""The text of chat turns, and whether it ends where the assistant's answer begins -> the text."""
QUESTION = {"role": "user", "content": "question"}
OBSERVED = "observation"
NUM_ROUNDS = 6
"""A thought may be dropped only when a second observation follows, or a later one."""
SHOWN = 40


class Continuation:
    """The text between the turns of a model.

    Args:
        render: the chat template, with the arguments that all rows have.
        ends: the texts of the tokens that end a turn.
        role: `tool` or `user`, the role of observations.
        delimiter: the text that ends a thought; empty if the model does not think.

    Raises:
        ValueError: the template cannot continue a transcript.
    """

    def __init__(self, render: Render, ends: Sequence[str], role: str, delimiter: str) -> None:
        self._render = render
        observation = {"role": role, "content": OBSERVED} | ({"name": "name"} if role == "tool" else {})
        text = render([QUESTION], True)
        self._answer = {"role": "assistant", "content": _answer_with_a_thought(text, delimiter)}
        self._before = text + self._answer["content"]
        turns: list[Mapping[str, str]] = [QUESTION]
        for _ in range(NUM_ROUNDS):
            turns += [self._answer, observation]
            expected, text = text + self._answer["content"], render(turns, True)
            _require_beginning(expected, text)
            if OBSERVED not in text[len(expected) :]:
                raise ValueError(f"the chat template writes nothing of a turn with the role {role!r}")
        after = text[len(expected) :]
        found = next((end for end in ends if after.startswith(end)), None)
        if found is None:
            raise ValueError(
                f"the chat template ends an answer with {after[:SHOWN]!r}, but the model ends it with one of "
                f"{', '.join(map(repr, ends))}; correct eos_token_id in generation_config.json, or the template"
            )
        self.end = found
        """The text of the token that ends a turn."""
        forms = _forms(self._answer["content"]).items()
        self.rewrites = [told for form, answer in forms if (told := self._rewrite(form, answer, observation))]
        """How the template rewrites answers of other forms in the history, a sentence each."""

    def text(self, messages: Sequence[Mapping[str, str]]) -> str:
        """What follows an answer that these observations follow, from the end of its turn on."""
        whole = self._render([QUESTION, self._answer, *messages], True)
        _require_beginning(self._before + self.end, whole)
        return whole[len(self._before) :]

    def _rewrite(self, form: str, answer: str, observation: Mapping[str, str]) -> str | None:
        written = self._render([QUESTION], True)
        text = self._render([QUESTION, {"role": "assistant", "content": answer}, observation], True)
        if text.startswith(written + answer + self.end):
            return None
        found = text[len(written) :].partition(self.end)[0]
        place = next((i for i, (a, b) in enumerate(zip(answer, found, strict=False)) if a != b), len(found))
        start = max(0, place - SHOWN // 2)
        shown = answer[start : start + SHOWN], found[start : start + SHOWN]
        return f"in the history the chat template rewrites answers {form}: {shown[0]!r} becomes {shown[1]!r}"


class Observations:
    """
    Args:
        tokenizer: the model's.
        limit: the largest number of tokens of an observation.

    Raises:
        ValueError: the end of a turn is not one token.
    """

    def __init__(self, continuation: Continuation, tokenizer: Tokenizer, limit: int) -> None:
        self._continuation, self._tokenizer, self._limit = continuation, tokenizer, limit
        end = continuation.end
        if len(self._ids(end)) != 1:
            raise ValueError(f"the end of a turn, {end!r}, is the tokens {self._ids(end)}, but must be one token")
        added = tokenizer.get_added_tokens_decoder().values()
        # `<tool_call>` and `</think>` are not special in every tokenizer. Added tokens of white space stay.
        marks = (token.content for token in added if token.special or token.content[:1] in "<[")
        self._marks = sorted({end, *marks}, key=len, reverse=True)
        self._longest = max(map(len, tokenizer.get_vocab(with_added_tokens=True)))

    def read(self, messages: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
        """The observations as the model reads them."""
        return [{**message, "content": self._short(message["content"])} for message in messages]

    def ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The tokens between a turn of the model, which has its end, and the next one.

        Args:
            messages: the observations, of `read`.
        """
        # The end of the turn is sampled already. It is tokenised with the rest because of tokens that take white space
        # with them.
        return self._ids(self._continuation.text(messages))[1:]

    def _short(self, text: str) -> str:
        """The text with at most this number of tokens, none of them a mark of the chat template."""
        text = text.encode(errors="replace").decode()
        shown = text[: self._limit * self._longest]  # a token is no longer than the longest one
        for token in self._marks:
            shown = shown.replace(token, f"{token[:1]} {token[1:]}")
        offsets = self._tokenizer.encode(shown, add_special_tokens=False).offsets
        if len(offsets) > self._limit:
            shown = shown[: offsets[self._limit][0]]
        elif len(text) <= self._limit * self._longest:
            return shown
        return f"{shown} [cut: the first {self._limit} tokens of {len(text)} characters]"

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def require_offered(render: Render, render_without: Render, schemas: Sequence[Mapping[str, Any]]) -> None:
    """
    Args:
        render: the chat template with the tools of these schemas.
        render_without: the same without tools.

    Raises:
        ValueError: the template does not tell the model about a tool.
    """
    offered, bare = render([QUESTION], True), render_without([QUESTION], True)
    names = [schema["function"]["name"] for schema in schemas]
    absent = [name for name in names if offered.count(name) <= bare.count(name)]
    if absent:
        raise ValueError(
            f"the chat template cannot offer tools: {len(absent)} of {len(names)} ({', '.join(absent)}) do not appear "
            "in a prompt that it renders with them; use a model whose template writes `tools`"
        )


def _answer_with_a_thought(prompt: str, delimiter: str) -> str:
    """An answer, with a thought before it unless the prompt has closed the thought already.

    Args:
        prompt: up to the point where the answer begins.
    """
    if not delimiter or prompt.rstrip().endswith(delimiter):
        return "answer"
    opening = "<" + delimiter.removeprefix("</") if delimiter.startswith("</") else ""
    begun = not opening or prompt.rstrip().endswith(opening)
    return f"{'' if begun else opening + chr(10)}thought\n{delimiter}\n\nanswer"


def _forms(answer: str) -> dict[str, str]:
    """Answers of the forms that templates are known to rewrite, by what is special in them."""
    call = '<tool_call>\n{"name": "f", "arguments": {"a":  1}}\n</tool_call>'
    forms = {
        "with white space at their ends": f"{answer} \n",
        "that begin with line feeds": f"\n\n{answer}",
        "with blank lines, tabs or CRLF": answer.replace("answer", "a  b\tc\r\n\n\nd"),
        "with capital letters": answer.replace("answer", "Answer: A"),
        "with marks and other scripts": answer.replace("answer", '<b> & **bold** "é" 你'),
        "of many words": answer + " word" * 1000,
        "with text before the call of a tool": answer.replace("answer", f"text\n\n{call}"),
        "without text": "",
        "of white space": " \n",
    }
    without = answer.rpartition("\n")[2]
    return forms | ({"without a thought": without} if without != answer else {})


def _require_beginning(expected: str, text: str) -> None:
    """
    Raises:
        ValueError: the text does not begin as expected.
    """
    if text.startswith(expected):
        return
    place = next((i for i, (a, b) in enumerate(zip(expected, text, strict=False)) if a != b), len(text))
    raise ValueError(
        f"the chat template writes earlier turns differently once another one follows: from character {place} of the "
        f"conversation on, {expected[place : place + SHOWN]!r} becomes {text[place : place + SHOWN]!r}. The tokens "
        "that the model has sampled would change; use a chat_template.jinja that keeps earlier turns, with their "
        "thoughts, as they are"
    )
