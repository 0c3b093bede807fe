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

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from megatron_rl.environments.asked_calls import QUESTION, Render, rendering_calls, without_end, written, written_call
from megatron_rl.environments.call_formats import AskedCall

if TYPE_CHECKING:
    from tokenizers import Tokenizer

OBSERVED, TOOL = "observation", "some_tool"
CALL_ID = "call00000"
"""The id of a call to which the model has given none. Mistral's template wants nine characters."""
NUM_ROUNDS = 6
"""A thought may be dropped only when a second observation follows, or a later one."""
SHOWN = 40


class ChangedHistory(ValueError):
    """A chat template changes earlier turns when another one follows."""


class Continuation:
    """The text between the turns of a model.

    Args:
        render: the chat template, with the arguments that all rows have.
        ends: the texts of the tokens that end a turn.
        role: `tool` or `user`, the role of observations.
        delimiter: the text that ends a thought; empty if the model does not think.

    Raises:
        ChangedHistory: the template changes what was sampled.
        ValueError: the template does not write such a turn, or does not end one as the model does.
    """

    def __init__(self, render: Render, ends: Sequence[str], role: str, delimiter: str) -> None:
        self._render, self._ends = rendering_calls(render), ends
        self._writes_calls = role == "tool" and TOOL in written_call(render, ends, TOOL)[0]
        observation = {"role": role, "content": OBSERVED}
        if role == "tool":
            observation |= {"name": TOOL, "tool_call_id": CALL_ID}
        text = render([QUESTION], True)
        self.opening = opening_of(text, delimiter)
        """What the template writes at the beginning of an answer to open its reasoning."""
        self._content = _answer_with_a_thought(self.opening, text, delimiter)
        if self._writes_calls and "thought" not in self._content:
            self._content = ""  # some templates write a call without text (Llama 3, Mistral)
        turns, answer = [QUESTION], self._answer([observation])
        for _ in range(NUM_ROUNDS):
            turns += [answer, observation]
            before, text = text, self._render(turns, True)
            expected = self._before(before, text)
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
        """The text of the token that ends a turn before an observation."""
        self.begins_next = self._writes_calls and not without_end(self._render([QUESTION, answer], False), ends)[1]
        """Whether this token is the beginning of the next turn, as GLM's `<|observation|>`."""
        forms = _forms(self._content).items()
        self.rewrites = [told for form, said in forms if (told := self._rewrite(form, said, observation))]
        """How the template rewrites answers of other forms in the history, a sentence each."""

    def text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """What follows an answer that these observations follow, from the end of its turn on."""
        messages = [{"tool_call_id": CALL_ID, **one} if one["role"] == "tool" else one for one in messages]
        whole = self._render([QUESTION, self._answer(messages), *messages], True)
        before = self._before(self._render([QUESTION], True), whole)
        _require_beginning(before + self.end, whole)
        return whole[len(before) :]

    def _answer(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """An answer that these observations may follow."""
        answer = {"role": "assistant", "content": self.opening + self._content}
        if not self._writes_calls:
            return answer
        calls = [AskedCall(0, 0, True, one["name"], id=one["tool_call_id"]) for one in messages]
        return answer | {"tool_calls": [written(call) for call in calls]}

    def _before(self, text: str, whole: str) -> str:
        """The text up to the end of an answer.

        Args:
            text: what the template writes before the answer.
            whole: what it writes of the conversation with the answer and what follows it.
        """
        if not self._writes_calls:
            return text + self._content
        _require_beginning(text, whole)
        places = (whole.find(end, len(text)) for end in self._ends)
        stop = min((place for place in places if place >= 0), default=len(whole))
        if "thought" in self._content and "thought" not in whole[len(text) : stop]:
            return text + self._content
        return whole[:stop]

    def _rewrite(self, form: str, answer: str, observation: Mapping[str, str]) -> str | None:
        written = self._render([QUESTION], True)
        try:
            text = self._render([QUESTION, {"role": "assistant", "content": answer}, observation], True)
        except (TemplateError, ValueError):  # a result must follow a call
            return None
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
        ends: the texts of the tokens that end a turn.
        tokenizer: the model's.
        limit: the largest number of tokens of an observation.

    Raises:
        ValueError: the end of a turn is not one token.
    """

    def __init__(self, ends: Sequence[str], tokenizer: Tokenizer, limit: int) -> None:
        self._tokenizer, self._limit = tokenizer, limit
        for end in ends:
            if len(self._ids(end)) != 1:
                raise ValueError(f"the end of a turn, {end!r}, is the tokens {self._ids(end)}, but must be one token")
        added = tokenizer.get_added_tokens_decoder().values()
        # `<tool_call>` and `</think>` are not special in every tokenizer. Added tokens of white space stay.
        marks = (token.content for token in added if token.special or token.content[:1] in "<[")
        self._marks = sorted({*ends, *marks}, key=len, reverse=True)
        self._longest = max(map(len, tokenizer.get_vocab(with_added_tokens=True)))

    def read(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The observations as the model reads them. The texts of one with images share the limit."""
        return [{**message, "content": self._read(message["content"])} for message in messages]

    def _read(self, content: str | Sequence[Mapping[str, Any]]) -> str | list[Mapping[str, Any]]:
        if isinstance(content, str):
            return self._short(content, self._limit)
        parts, left = list[Mapping[str, Any]](), self._limit
        for part in content:
            if "text" in part:
                part = {**part, "text": self._short(part["text"], left)}
                left = max(0, left - len(self._ids(part["text"])))
            parts.append(part)
        return parts

    def ids(self, text: str) -> list[int]:
        """The tokens between a turn of the model, which has its end, and the next one.

        Args:
            text: from the end of the turn on.
        """
        # The end of the turn is sampled already. It is tokenised with the rest because of tokens that take white space
        # with them.
        return self._ids(text)[1:]

    def _short(self, text: str, limit: int) -> str:
        """The text with at most this number of tokens, none of them a mark of the chat template."""
        text = text.encode(errors="replace").decode()
        shown = text[: limit * self._longest]  # a token is no longer than the longest one
        for token in self._marks:
            shown = shown.replace(token, f"{token[:1]} {token[1:]}")
        offsets = self._tokenizer.encode(shown, add_special_tokens=False).offsets
        if len(offsets) > limit:
            shown = shown[: offsets[limit][0]]
        elif len(text) <= limit * self._longest:
            return shown
        return f"{shown} [cut: the first {limit} tokens of {len(text)} characters]"

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


def opening_of(prompt: str, delimiter: str) -> str:
    """The end of a prompt that opens the reasoning of the answer; empty if the model opens it, or does not reason."""
    if not delimiter.startswith("</"):
        return ""
    mark = "<" + delimiter.removeprefix("</")
    place = len(prompt.rstrip()) - len(mark)
    return prompt[place:] if prompt.rstrip().endswith(mark) else ""


def _answer_with_a_thought(opening: str, prompt: str, delimiter: str) -> str:
    """An answer as the model samples it; without a thought if the model does not think, or the prompt has closed the
    thought already.

    Args:
        opening: see `opening_of`.
        prompt: up to the point where the answer begins.
    """
    if not delimiter or prompt.rstrip().endswith(delimiter):
        return "answer"
    begins = "" if opening or not delimiter.startswith("</") else f"<{delimiter.removeprefix('</')}\n"
    return f"{begins}thought\n{delimiter}\n\nanswer"


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
        ChangedHistory: the text does not begin as expected.
    """
    if text.startswith(expected):
        return
    place = next((i for i, (a, b) in enumerate(zip(expected, text, strict=False)) if a != b), len(text))
    raise ChangedHistory(
        f"the chat template writes earlier turns differently once another one follows: from character {place} of the "
        f"conversation on, {expected[place : place + SHOWN]!r} becomes {text[place : place + SHOWN]!r}. The tokens "
        "that the model has sampled would change; use a chat_template.jinja that keeps earlier turns, with their "
        "reasoning, as they are"
    )
