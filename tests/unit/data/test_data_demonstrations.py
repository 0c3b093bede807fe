"""What is trained of a demonstration, with templates that write as those of known families do."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_rl.data import Rules, load_prompts, load_supervised
from megatron_rl.data.tokenizer import end_ids, end_texts

ENDS = ("<end>", "<call>", "<u>", "<o>", "<doc>")
USER = {"role": "user", "content": "hi there"}
ANSWER = {"role": "assistant", "content": "good day"}
CALL = {"type": "function", "function": {"name": "get", "arguments": {"city": 'Rome "x"', "days": 3}}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": '{"t":20}'}


def template(assistant: str, prompt: str = "<a>", tool: str = "{{ m.content }}", last: str = "") -> str:
    """A template of turns that end with <end>.

    Args:
        assistant: what it writes of an assistant's turn `m`, with the end.
        prompt: the generation prompt.
        last: what it writes at the end.
    """
    return (
        "{% for m in messages %}{% if m.role == 'assistant' %}<a>" + assistant + "{% elif m.role == 'tool' %}<o>" + tool
        + "<end>{% elif m.role == 'user' %}<u>{{ m.content }}<end>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}" + prompt + "{% else %}" + last + "{% endif %}"
    )  # fmt: skip


def tokenizer_of(source: str) -> PreTrainedTokenizerFast:
    """Bytes, and the tokens that end a turn."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(ENDS))
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<doc>", chat_template=source)


@pytest.fixture
def write(tmp_path):
    def write(*rows) -> object:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


@pytest.fixture
def trained(write):
    """The texts that are trained, and everything that is written, of chat turns."""

    def trained(source: str, *turns, ends=("<end>", "<call>"), which="all") -> tuple[list[str], str]:
        tokenizer = tokenizer_of(source)
        row = turns[0] if "role" not in turns[0] else {"messages": turns}
        [(_, samples)], _ = load_supervised(write(row), tokenizer, 9999, "fail", ends, which)
        found: list[list[int]] = []
        for tokens in samples:
            before = False
            for token, is_action in zip(tokens.ids, tokens.action_mask, strict=True):
                if is_action and not before:
                    found.append([])
                if is_action:
                    found[-1].append(token)
                before = is_action
        return [tokenizer.decode(ids) for ids in found], "|".join(tokenizer.decode(tokens.ids) for tokens in samples)

    return trained


PLAIN = template("{{ m.content }}<end>\n")
THINKS = template("<think>{{ m.reasoning_content or '' }}</think>{{ m.content }}<end>")
FORGETS = template("{% if loop.last %}<think>{{ m.reasoning_content or '' }}</think>{% endif %}{{ m.content }}<end>")
OPENS = template("<think>{{ '\n' + m.reasoning_content if m.reasoning_content }}</think>{{ m.content }}<end>",
                 "<a>{% if enable_thinking is false %}<think></think>{% else %}<think>\n{% endif %}")  # fmt: skip
CLOSES = template("<think>{{ m.reasoning_content }}</think>{{ m.content }}<end>",
                  "<a><think>{{ '</think>' if not enable_thinking }}")  # fmt: skip
CUTS = template("{{ m.content.split('</think>')[-1] }}<end>", "<a><think>\n")
KEEPS = template("{{ m.content }}<end>", "<a><think>\n")
HARMONY = template(
    "{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}{{ m.tool_calls[0].function.arguments | tojson }}<call>"
    "{% else %}{{ m.content }}{{ '<end>' if not loop.last else '<doc>' }}{% endif %}",
    tool="{{ m.content | tojson }}",
)
HARMONY_CALL = 'get{"city": "Rome \\"x\\"", "days": 3}<call>'
GLM = template("{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
               "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}{% endfor %}")  # fmt: skip
GLM_THINKS = template("{% if loop.last and m.reasoning_content %}{{ m.reasoning_content }};{% endif %}{{ m.content }}")
PHI = template("{{ m.content }}<end>\n", last="<doc>")


@pytest.mark.parametrize(
    ("source", "turns", "ends", "expected"),
    [
        (PLAIN, [USER, ANSWER], ("<end>",), ["good day<end>"]),
        (PLAIN, [USER, ANSWER, USER, ANSWER], ("<end>",), ["good day<end>", "good day<end>"]),
        (THINKS, [USER, ANSWER | {"reasoning_content": "hm"}] * 2, ("<end>",), ["<think>hm</think>good day<end>"] * 2),
        (HARMONY, [USER, CALLS], ("<call>",), [HARMONY_CALL]),
        (HARMONY, [USER, CALLS, RESULT, ANSWER], ("<call>",), [HARMONY_CALL, "good day<doc>"]),
        (GLM, [USER, ANSWER], ("<u>", "<o>"), ["good day<u>"]),
        (GLM, [USER, CALLS, RESULT, ANSWER], ("<u>", "<o>"), ['getcity=Rome "x"days=3<o>', "good day<u>"]),
        (GLM, [USER, CALLS], ("<u>", "<o>"), ['getcity=Rome "x"days=3<o>']),
        (GLM_THINKS, [USER, ANSWER | {"reasoning_content": "hm"}], ("<u>", "<o>"), ["hm;good day<u>"]),
        (GLM, [USER, ANSWER], (), ["good day<doc>"]),
        (template(" {{ m.content }}<end>", "<a>\n"), [USER, ANSWER], ("<end>",), ["good day<end>"]),
        (PHI, [USER, ANSWER, USER, ANSWER], ("<end>",), ["good day<end>", "good day<end>"]),
        (OPENS, [USER, ANSWER | {"reasoning_content": "hm"}], ("<end>",), ["hm</think>good day<end>"]),
        (KEEPS, [USER, ANSWER | {"content": "<think>hm</think>good day"}], ("<end>",), ["hm</think>good day<end>"]),
        (KEEPS, [USER, ANSWER | {"content": "<think>\nhm</think>good day"}], ("<end>",), ["hm</think>good day<end>"]),
    ],
)  # fmt: skip
def test_what_the_model_would_sample_is_trained(trained, source, turns, ends, expected):
    texts, whole = trained(source, *turns, ends=ends)
    assert texts == expected and whole.startswith("<u>hi there<end><a>") and whole.endswith(expected[-1])
    assert trained(source, *turns, ends=ends, which="last")[0] == expected[-1:]


def test_only_turns_of_the_completion_are_trained(trained):
    row = {"prompt": [USER, ANSWER, USER], "completion": [CALLS, RESULT, ANSWER]}
    source = template("{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}<end>")
    [call, answer], whole = trained(source, row)
    assert '"get"' in call and answer == "good day<end>" and whole.count("good day") == 2
    assert trained(source, row, which="last")[0] == [answer]


def test_turns_of_weight_0_are_read_and_not_trained(trained):
    """OpenAI's form of rows has the key."""
    wrong = {"role": "assistant", "content": "a mistake", "weight": 0}
    texts, whole = trained(PLAIN, USER, wrong, USER, ANSWER | {"weight": 1})
    assert texts == ["good day<end>"] and "a mistake<end>" in whole
    with pytest.raises(ValueError, match="`weight`.*is 0"):
        trained(PLAIN, USER, wrong)
    with pytest.raises(ValueError, match="turn 2.*`weight` 0.5; it is 1"):
        trained(PLAIN, USER, ANSWER | {"weight": 0.5})


def test_turns_that_are_written_differently_later_are_texts_of_their_own(trained):
    """Each trained turn comes after what the model sees when it answers; thoughts of earlier turns are left out."""
    turns = [USER, ANSWER | {"reasoning_content": "hm"}]
    asked, answered = "<u>hi there<end><a>", "<think>hm</think>good day<end>"
    assert trained(FORGETS, *turns) == ([answered], asked + answered)
    whole = f"{asked}{answered}|{asked}good day<end>{asked}{answered}"
    assert trained(FORGETS, *turns, *turns) == ([answered] * 2, whole)
    assert trained(FORGETS, *turns, *turns, which="last") == ([answered], whole.partition("|")[2])
    first = ANSWER | {"reasoning_content": "hm", "weight": 0}
    assert trained(FORGETS, USER, first, *turns) == ([answered], whole.partition("|")[2])
    no_ends = template("{{ m.content }}")
    with pytest.raises(ValueError, match="turn 2.*sft.turns"):
        trained(no_ends, *turns[:1], ANSWER, USER, ANSWER)


CALLS_NAMED = template("{{ m.content }}{% for c in m.tool_calls or [] if c.type == 'function' %}{{ c.function.name }}"
                       "{{ c.function.arguments | tojson }}{% endfor %}<end>")  # fmt: skip
CONCATENATES = template("{{ '!' + m.tool_calls[0].function.arguments }}<end>")
EITHER = template("{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% else %}{{ m.content }}{% endif %}<end>")


@pytest.mark.parametrize(
    ("source", "turn", "message"),
    [
        (PLAIN, ANSWER | {"reasoning_content": "hm"}, "`reasoning_content` .'hm' is missing.*it writes no reasoning"),
        (THINKS, ANSWER | {"thinking": "hm"}, "`thinking` .*the template writes `reasoning_content`: rename the key"),
        (THINKS, ANSWER | {"thought": [{"type": "text", "text": "hm"}]}, "`thought` .*rename the key"),
        (THINKS, ANSWER | {"refusal": "never"}, "does not write `refusal`"),
        (PLAIN, CALLS, "does not write `tool_calls`"),
        (PLAIN, {"role": "assistant", "function_call": CALL["function"], "content": None}, "`function_call`"),
        (CALLS_NAMED, ANSWER | {"function_call": CALL["function"]}, "`function_call` .*the template writes `tool_c"),
        (CALLS_NAMED, ANSWER | {"tool_calls": [{"function": CALL["function"]}]}, "the template writes `tool_"),
        (EITHER, ANSWER | {"tool_calls": [CALL]}, "`content` .*it writes no text next to calls"),
        (HARMONY, CALLS | {"tool_calls": [CALL, {"function": {"name": "get", "arguments": {"x": 7}}}]}, "`tool_ca"),
        (HARMONY, CALLS | {"tool_calls": [CALL, CALL]}, "does not write `tool_calls`"),
        (CONCATENATES, CALLS, "the arguments of a tool call are a mapping, and this template may need JSON text"),
        (PLAIN, ANSWER | {"content": "  \n"}, "turn 2 of the role assistant is blank"),
        (CUTS, ANSWER | {"content": "<think>\nhm</think>good day"}, "`content` .'hm' is missing.*it may cut reasoning"),
        (CUTS, ANSWER, r"turn 2 has no reasoning, .*'<a><think>\\n', which opens it; use a chat_template.jinja"),
        (KEEPS, ANSWER, "turn 2 has no reasoning, .* begin its `content` with the reasoning, from <think>"),
        (OPENS, ANSWER, "turn 2 has no reasoning, .*`reasoning_content`, or give the row .*.enable_thinking.: false"),
        (CLOSES, ANSWER | {"reasoning_content": "hm"}, "has reasoning, .*; give .*enable_thinking.: true"),
        (template("{{ m.content }}<end>", "<a>Answer:"), ANSWER, "does not write 'Answer:' of it before this answer"),
        ("{{ messages | length }}" + PLAIN, ANSWER, "writes the earlier turns differently once the answer is there"),
    ],
)  # fmt: skip
def test_an_answer_that_is_not_wholly_written_is_refused_with_a_remedy(trained, source, turn, message):
    with pytest.raises(ValueError, match=f"rows.jsonl:1: .*{message}"):
        trained(source, USER, turn)


def test_the_remedies_are_right(trained):
    assert trained(OPENS, {"messages": [USER, ANSWER], "chat_template_kwargs": {"enable_thinking": False}})[0] == [
        "good day<end>"
    ]
    both = ANSWER | {"reasoning_content": "hm", "reasoning": "hm"}  # servers give a thought under two keys
    assert trained(THINKS, USER, both)[0] == ["<think>hm</think>good day<end>"]


@pytest.mark.parametrize(
    "written", ["{{ m.content | tojson }}", "{{ m.content | e }}", "{{ m.content | tojson | e }}", "{{ m.content }}"]
)
@pytest.mark.parametrize("content", ['{"temp":20}', '"sunny"', "<b>&</b>", "x'y", 'ä"ö\n', "R&D", "\\frac"])
def test_a_turn_may_be_written_as_json_or_html(trained, write, written, content):
    source = template(written + "<end>", tool=written)
    [_, answer], _ = trained(source, USER, ANSWER, RESULT | {"content": content}, ANSWER | {"content": content})
    assert answer.endswith("<end>") and len(answer) >= len(content.strip())
    turns = [USER, ANSWER | {"content": content}, {"role": "tool", "content": content}]
    assert len(load_prompts(write({"messages": turns}), tokenizer_of(source), Rules(999))) == 1


@pytest.mark.parametrize(
    ("source", "turn", "message"),
    [
        (PLAIN, CALLS, "does not write `tool_calls`"),
        (PLAIN, CALLS | {"tool_calls": [{"function": {"name": "hi", "arguments": {}}}]}, "does not write `tool_calls`"),
        (EITHER, ANSWER | {"tool_calls": [CALL]}, "does not write `content`"),
        (PLAIN, ANSWER | {"reasoning_content": "hm"}, None),
        (CUTS, ANSWER | {"content": "<think>hm</think>good day"}, None),
        (HARMONY, CALLS, None),
    ],
)
def test_histories_may_lose_thoughts_but_no_text_and_no_call(write, source, turn, message):
    path = write({"messages": [USER, turn, USER]})
    if message is None:
        assert len(load_prompts(path, tokenizer_of(source), Rules(999))) == 1
    else:
        with pytest.raises(ValueError, match=f"turn 2 of the role assistant: .*{message}"):
            load_prompts(path, tokenizer_of(source), Rules(999))
    demonstration = write({"messages": [USER, turn, USER, ANSWER]})
    if message is not None:
        with pytest.raises(ValueError, match=message):
            load_supervised(demonstration, tokenizer_of(source), 999, turns="last")


def test_the_name_of_a_lost_call_may_stand_elsewhere(write):
    source = "{% for tool in tools %}{{ tool.name }}{% endfor %}" + PLAIN
    call = CALLS | {"tool_calls": [{"function": {"name": "get", "arguments": {}}}]}
    with pytest.raises(ValueError, match="turn 2.*`tool_calls`"):
        load_prompts(
            write({"messages": [USER, call, USER], "tools": [{"name": "get"}]}), tokenizer_of(source), Rules(999)
        )


@pytest.mark.parametrize("calls", ["text", [1], {"name": "get"}])
def test_calls_are_a_list_of_mappings(trained, calls):
    with pytest.raises(ValueError, match=r"`messages\[1\]`.*`tool_calls`"):
        trained(PLAIN, USER, ANSWER | {"tool_calls": calls})


def test_the_texts_that_end_answers(tmp_path):
    tokenizer = tokenizer_of(PLAIN)
    first = tokenizer.convert_tokens_to_ids("<end>")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [first, first + 1, 9999]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": first}))
    assert end_ids(tmp_path) == {first, first + 1, 9999}
    known = {first: "<end>", first + 1: "<call>", 9999: "two"}
    assert end_texts(tmp_path, known.get, lambda text: tokenizer.encode(text)) == ("<end>", "<call>")


def test_all_tokens_of_a_text_are_trained_but_the_first(trained):
    texts, whole = trained(PLAIN, {"text": "once upon"})
    assert texts == ["nce upon<doc>"] and whole == "once upon<doc>"
    assert trained(PLAIN, {"text": "once<end>"})[1] == "once<end>"
    with pytest.raises(ValueError, match="`text` is blank"):
        trained(PLAIN, {"text": " "})


def test_sharegpt_and_alpaca_are_chats(trained):
    row = {"conversations": [{"from": "human", "value": "hi there"}, {"from": "gpt", "value": "good day"}]}
    assert trained(PLAIN, row) == trained(PLAIN, USER, ANSWER)
    assert trained(PLAIN, {"instruction": "hi there", "output": "good day"}) == trained(PLAIN, USER, ANSWER)


def test_a_whole_row_is_trained_as_the_template_writes_it(trained):
    later = [USER, ANSWER, USER, ANSWER]
    [text], whole = trained(FORGETS, *later, which="whole")
    assert whole == "<u>hi there<end><a>good day<end><u>hi there<end><a><think></think>good day<end>"
    assert text == whole.removeprefix("<u>"), "all tokens but the first"
    [text], whole = trained(PLAIN, {"prompt": "2+2=", "completion": "4"}, which="whole")
    assert (text, whole) == ("+2=4<doc>", "2+2=4<doc>")


def test_a_long_row_is_cut_or_left_out_if_nothing_of_its_answer_is_left(write):
    rows = [{"prompt": "12", "completion": "34567"}, {"prompt": "123456", "completion": "7"}]
    chat = {"messages": [USER, ANSWER, USER, ANSWER]}
    tokenizer = tokenizer_of(PLAIN)
    [(_, [tokens])], skipped = load_supervised(write(*rows), tokenizer, 6, "cut")
    assert tokenizer.decode(tokens.ids) == "123456" and tokens.action_mask.tolist() == [False] * 2 + [True] * 4
    assert skipped == 1
    [(_, [tokens])], _ = load_supervised(write(chat), tokenizer, 30, "cut", ("<end>",))
    assert tokenizer.decode(tokens.ids) == "<u>hi there<end><a>good day<end>", "the next question is not trained"
    with pytest.raises(ValueError, match="`completion` is blank"):
        load_supervised(write({"prompt": "1", "completion": " "}), tokenizer, 6, "cut")
