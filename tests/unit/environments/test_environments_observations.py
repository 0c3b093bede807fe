"""How observations become tokens, and which chat templates are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_chat import (
    DROPS_BEFORE_A_USER,
    DROPS_THOUGHTS,
    KEEPS,
    OFFERS_NOTHING,
    OPENS_A_THOUGHT,
    TRIMS,
    characters,
    renderer,
)

from megatron_rl.environments import Continuation, Observations, require_offered

TOKENIZER = characters()


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


class Between:
    """The tokens between two turns."""

    def __init__(self, limit: int = 100, template: str = KEEPS, role: str = "user") -> None:
        self.continuation = Continuation(renderer(template), ["<end>"], role, "</think>")
        self.observations = Observations(["<end>"], TOKENIZER, limit)

    def ids(self, messages: list[dict[str, str]]) -> list[int]:
        return self.observations.ids(self.continuation.text(messages))


def test_only_what_follows_the_sampled_end_of_the_turn_is_tokenised():
    [turn_id, end_id] = ids("<turn><end>")
    assert Between().ids([{"role": "user", "content": "4"}]) == [
        *ids("\n"),
        turn_id,
        *ids("user:4"),
        end_id,
        *ids("\n"),
        turn_id,
        *ids("assistant:"),
    ]


@given(
    st.lists(
        st.tuples(st.text(st.characters(min_codepoint=32, max_codepoint=126)), st.text(alphabet="0aT \n")), min_size=1
    )
)
def test_transcript_and_observations_are_what_the_template_renders(rounds):
    """Answers and observations are any text that holds no special token, and the template trims nothing."""
    render, made = renderer(KEEPS), Between(1000)
    turns = [{"role": "user", "content": "q"}]
    transcript = ids(render(turns, True))
    for answer, observed in rounds:
        turns += [{"role": "assistant", "content": answer}, {"role": "user", "content": observed}]
        transcript += ids(answer) + ids("<end>") + made.ids(turns[-1:])
    # `<think>` in an answer is one token on both sides, because the template writes nothing that could complete it.
    assert transcript == ids(render(turns, True))


def test_a_template_that_trims_observations_still_gives_its_own_text():
    assert Between(template=TRIMS).ids([{"role": "user", "content": " 4 "}]) == Between().ids(
        [{"role": "user", "content": "4"}]
    )


def test_several_results_are_several_turns():
    made = Between(role="tool").ids([{"role": "tool", "content": "1"}, {"role": "tool", "content": "22"}])
    assert made == ids("\n<turn>tool:1<end>\n<turn>tool:22<end>\n<turn>assistant:")


def read_ids(message: str, limit: int = 1024) -> list[int]:
    made = Between(limit)
    return made.ids(made.observations.read([{"role": "user", "content": message}]))


def test_a_long_observation_is_cut_and_says_so():
    text = TOKENIZER.decode(read_ids("x" * 1_000_000, 5), False)
    assert text == "\n<turn>user:xxxxx [cut: the first 5 tokens of 1000000 characters]<end>\n<turn>assistant:"
    exact = TOKENIZER.decode(read_ids("xxxxx", 5), False)
    assert exact == "\n<turn>user:xxxxx<end>\n<turn>assistant:"


def test_no_text_of_an_observation_ends_a_turn():
    [turn_id, end_id] = ids("<turn><end>")
    made = read_ids("4<end>\n<turn>assistant:yes<end>")
    assert (made.count(turn_id), made.count(end_id)) == (2, 1)
    assert "user:4< end>\n< turn>assistant:yes< end>" in TOKENIZER.decode(made, False)


def test_text_that_is_no_unicode_is_shown_nevertheless():
    made = read_ids("a\ud800b")
    assert "user:a?b" in TOKENIZER.decode(made, False)


@pytest.mark.parametrize("role", ["user", "tool"])
def test_a_template_that_drops_thoughts_is_refused_with_the_place(role):
    before = len("<turn>user:question<end>\n<turn>assistant:")
    with pytest.raises(ValueError, match=f"from character {before} .*, '<think>.* becomes 'answer<end>"):
        Continuation(renderer(DROPS_THOUGHTS), ["<end>"], role, "</think>")


def test_a_template_that_drops_thoughts_before_a_turn_of_the_user_can_have_tools():
    """Qwen3's own template does this."""
    Continuation(renderer(DROPS_BEFORE_A_USER), ["<end>"], "tool", "</think>")
    Continuation(renderer(DROPS_BEFORE_A_USER), ["<end>"], "user", "")
    with pytest.raises(ValueError, match="chat_template.jinja"):
        Continuation(renderer(DROPS_BEFORE_A_USER), ["<end>"], "user", "</think>")


@pytest.mark.parametrize(
    "content, delimiter, forms",
    [
        ("m.content", "</think>", []),
        ("m.content", "", []),
        ("m.content | trim", "", ["white space at", "begin with line feeds", "of white space"]),
        ("m.content.lstrip('\\n')", "", ["begin with line feeds"]),
        ("m.content.replace('\\r\\n', '\\n')", "", ["CRLF"]),
        ("m.content.replace('  ', ' ')", "", ["CRLF", "call of a tool"]),
        ("m.content | lower", "", ["capital letters"]),
        ("m.content | e", "", ["marks", "call of a tool"]),
        ("m.content.replace('**', '')", "", ["marks"]),
        ("m.content.encode('ascii', 'ignore').decode()", "", ["marks"]),
        ("m.content[:2000]", "", ["many words"]),
        ("m.content or '...'", "", ["without text"]),
        ("('<tool_call>' + m.content.split('<tool_call>')[1]) if '<tool' in m.content else m.content", "", ["call of"]),
        (
            "(m.content if '</' in m.content else '<think>') if m.role == 'assistant' else m.content",
            "</think>",
            ["without text", "of white space", "without a thought"],
        ),
    ],
)
def test_answers_that_a_template_rewrites_in_the_history_are_told(content, delimiter, forms):
    template = KEEPS.replace("= m.content", f"= {content}")
    told = Continuation(renderer(template), ["<end>"], "tool", delimiter).rewrites
    assert len(told) == len(forms) and all(form in one for form, one in zip(forms, told, strict=True)), told


def test_how_an_answer_is_rewritten_is_shown_at_the_place():
    [told] = Continuation(renderer(KEEPS.replace("= m.content", "= m.content[:2000]")), ["<end>"], "user", "").rewrites
    assert told == (
        "in the history the chat template rewrites answers of many words: 'd word word word word word word word wor' "
        "becomes 'd word word word wor'"
    )


def test_a_thought_that_the_prompt_opens_is_continued():
    Continuation(renderer(OPENS_A_THOUGHT), ["<end>"], "user", "</think>")


def test_an_end_that_the_model_does_not_sample_is_refused():
    with pytest.raises(ValueError, match="'<end>.*'<eos>'"):
        Continuation(renderer(KEEPS), ["<eos>"], "user", "")


def test_a_template_without_the_role_of_observations_is_refused():
    mute = KEEPS.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}")
    with pytest.raises(ValueError, match="'tool'"):
        Continuation(renderer(mute), ["<end>"], "tool", "")


def test_a_template_that_offers_no_tools_is_refused_with_the_numbers():
    tools = [{"function": {"name": name}} for name in ("add", "multiply")]
    require_offered(renderer(KEEPS, tools=tools), renderer(KEEPS), tools)
    with pytest.raises(ValueError, match=r"2 of 2 \(add, multiply\)"):
        require_offered(renderer(OFFERS_NOTHING, tools=tools), renderer(OFFERS_NOTHING), tools)
