from __future__ import annotations

import json

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from megatron_rl.config.environment import ObjectColumns
from megatron_rl.config.prefix_values import PrefixValues
from megatron_rl.data import Rules, load_prompts, load_supervised
from megatron_rl.data.forms import Reading
from megatron_rl.data.prompt_table import Tally

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
    "<{{ m.role[0] }}>{{ m.content }}<eos>\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """Characters; it would add <bos> to plain text if it were let."""
    vocabulary = ["<eos>", "<bos>", "<u>", "<a>", *map(chr, range(32, 127)), "\n"]
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token=" "))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("<u>|<a>|\n|."), "isolated")
    core.decoder = decoders.Fuse()
    core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", bos_token="<bos>", chat_template=TEMPLATE)


@pytest.fixture
def write(tmp_path):
    def write(*lines) -> object:
        path = tmp_path / "rows.jsonl"
        path.write_bytes(b"\n".join(x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines))
        return path

    return write


USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "yo"}
TRUTHFUL = Rules(100, required_columns=("ground_truth",))


def test_prompts_of_both_forms(tokenizer, write):
    path = write(
        b"\xef\xbb\xbf" + json.dumps({"prompt": "1+2=", "ground_truth": "3", "level": 4}).encode(),
        b"  ",
        {"messages": [USER, ASSISTANT, USER], "ground_truth": 5},
    )
    [plain, chat] = prompts = load_prompts(path, tokenizer, Rules(100))
    assert prompts.tally == Tally(num_rows=2, digest=prompts.tally.digest)
    assert (plain.uid, plain.messages) == ("rows.jsonl:1", "1+2=")
    assert plain.columns == {"ground_truth": "3", "level": 4}
    assert tokenizer.convert_ids_to_tokens(plain.token_ids) == list("1+2=")
    assert (chat.uid, chat.messages) == ("rows.jsonl:3", (USER, ASSISTANT, USER))
    assert chat.columns == {"ground_truth": 5}
    assert tokenizer.decode(chat.token_ids) == "<u>hi<eos>\n<a>yo<eos>\n<u>hi<eos>\n<a>"
    assert all(type(i) is int for i in chat.token_ids)


def test_a_row_of_verl_and_the_template_arguments_of_trl(tokenizer, write):
    tokenizer.chat_template = "{{ tools | length }}{% if not enable_thinking %}!{% endif %}" + TEMPLATE
    reward_model = {"style": "rule", "ground_truth": "3"}
    row = {"data_source": "sums", "prompt": [USER], "reward_model": reward_model, "tools": [{"name": "add"}]}
    [prompt] = load_prompts(write(row | {"chat_template_kwargs": {"enable_thinking": False}}), tokenizer, TRUTHFUL)
    assert tokenizer.decode(prompt.token_ids) == "1!<u>hi<eos>\n<a>"
    assert (prompt.messages, prompt.columns["ground_truth"], prompt.columns["dataset"]) == ((USER,), "3", "sums")


def test_rows_whose_columns_have_other_names(tokenizer, write):
    path = write({"question": "hi", "answer": {"final": "3"}})
    columns = {"messages": "question", "ground_truth": "answer.final"}
    [prompt] = load_prompts(path, tokenizer, TRUTHFUL, Reading(columns))
    assert tokenizer.decode(prompt.token_ids) == "<u>hi<eos>\n<a>" and prompt.columns["ground_truth"] == "3"
    with pytest.raises(ValueError, match="'answer', 'question'.*data.columns.*ground_truth: NAME"):
        load_prompts(path, tokenizer, TRUTHFUL, Reading({"messages": "question"}))


BAD_PROMPTS = [
    (b"{", "not JSON"),
    (b"\xff{}", "not UTF-8"),
    (b"[1]", "a row must be a JSON object, but this one is a list"),
    ({"prompt": "x", "messages": [USER]}, "this one has both"),
    ({"question": "x"}, r"this one has only \['ground_truth', 'question'\]"),
    ({"prompt": ["x"]}, r"`prompt` must be text and not empty, but it is \['x'\]"),
    ({"prompt": ""}, "must be text and not empty"),
    ({"messages": []}, "must be a list of chat turns and not empty"),
    ({"messages": [USER, {"role": "user"}]}, r"`messages\[1\]` must have `role` and `content`"),
    ({"messages": [USER, ASSISTANT]}, "ends with the assistant's turn"),
    ({"messages": [{"role": "system", "content": "x"}]}, "template refuses `messages`: no system turns"),
    ({"prompt": "12345678901"}, "11 tokens, rollout.max_prompt_tokens is 10"),
    ({"prompt": "x", "ground_truth": None}, "column `ground_truth` is missing"),
]


@pytest.mark.parametrize(("bad", "message"), BAD_PROMPTS)
def test_a_bad_prompt_stops_with_file_and_line(tokenizer, write, bad, message):
    bad = bad if isinstance(bad, bytes) else {"ground_truth": 1} | bad
    path = write({"prompt": "1", "ground_truth": 1}, b"", bad)
    with pytest.raises(ValueError, match=rf"rows.jsonl:3: .*{message}"):
        load_prompts(path, tokenizer, Rules(10, required_columns=("ground_truth",)))


def test_a_right_answer_that_no_prefix_can_be_valued_by_is_refused_with_its_line(tokenizer, write):
    rules = Rules(10, prefix_values=PrefixValues())
    path = write({"prompt": "1", "ground_truth": ["2", 3]}, {"prompt": "1"}, {"prompt": "1", "ground_truth": " "})
    with pytest.raises(ValueError, match="rows.jsonl:3.*`ground_truth`.*rollout.prefix_values"):
        load_prompts(path, tokenizer, rules)


@pytest.mark.parametrize(
    ("wanted", "good", "bad", "message"),
    [
        (
            {None: ("x", "prompt")},
            {"x": None},
            {"y": 1},
            r"asks for 'x', but it gets the row's columns \['prompt', 'y'\]",
        ),
        (
            {"a": (), "b": ()},
            {"environment": "b"},
            {"environment": "c"},
            "`environment` is 'c'; it must name one of .* a, b",
        ),
        ({"a": ()}, {"environment": "a"}, {"environment": ["a"]}, r"column `environment` is \['a'\]; it must name one"),
        (
            {"a": ()},
            {"environment": "a"},
            {},
            "column `environment` is missing; it must name one of rollout.environment",
        ),
        (
            {"a": (), "b": ("x",)},
            {"environment": "a"},
            {"environment": "b"},
            r"'b' asks for 'x', .* columns \['prompt'\]",
        ),
        (
            {"a": (), "b": ("environment",)},
            {"environment": "a"},
            {"environment": "b"},
            "'b' asks for 'environment', but",
        ),
    ],
)
def test_a_row_with_which_no_object_can_begin_is_refused_with_its_line(tokenizer, write, wanted, good, bad, message):
    path, rules = write({"prompt": "1"} | good, {"prompt": "1"} | bad), Rules(10, objects=ObjectColumns(wanted))
    with pytest.raises(ValueError, match=rf"rows.jsonl:2: .*{message}"):
        load_prompts(path, tokenizer, rules)


@pytest.mark.parametrize("role", ["human", "User", "developer"])
def test_a_turn_that_the_template_leaves_out_is_refused(tokenizer, write, role):
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role in ('system', 'user') %}{{ m.content | upper }} {% endif %}{% endfor %}<a>"
    )
    turns = [{"role": "system", "content": "hi"}, {"role": role, "content": "Question seven"}]
    with pytest.raises(ValueError, match=rf"rows.jsonl:1: .*writes nothing of turn 2, whose role is '{role}'"):
        load_prompts(write({"messages": turns}), tokenizer, Rules(100))
    [_] = load_prompts(write({"messages": [turns[0], turns[1] | {"role": "user"}]}), tokenizer, Rules(100))


def test_bad_prompts_are_skipped_and_counted(tokenizer, write):
    path = write({"prompt": "good"}, *[bad for bad, _ in BAD_PROMPTS[:-1]], {"prompt": "too"})
    prompts = load_prompts(path, tokenizer, Rules(10, "skip"))
    assert [p.messages for p in prompts] == ["good", "too"]
    assert (
        prompts.tally.num_rows == len(BAD_PROMPTS) + 1 and sum(prompts.tally.skipped.values()) == len(BAD_PROMPTS) - 1
    )


@pytest.mark.parametrize(
    ("lines", "message"),
    [([], "holds no good row; correct"), ([b"["], "first bad one is rows.jsonl:1: the row is not JSON")],
)
def test_a_file_without_a_good_row_is_an_error(tokenizer, write, lines, message):
    with pytest.raises(ValueError, match=message):
        load_prompts(write(*lines), tokenizer, Rules(10, "skip"))


def test_no_chat_template_is_no_matter_of_rows(tokenizer, write):
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        load_prompts(write({"messages": [USER]}), tokenizer, Rules(10, "skip"))


@pytest.mark.parametrize(
    ("row", "prompt", "completion"),
    [
        ({"prompt": "1+2=", "completion": "3"}, "1+2=", "3<eos>"),
        ({"prompt": "1+2=", "completion": "3<eos>"}, "1+2=", "3<eos>"),
        ({"messages": [USER, ASSISTANT]}, "<u>hi<eos>\n<a>", "yo<eos>"),
        ({"prompt": [USER], "completion": [ASSISTANT]}, "<u>hi<eos>\n<a>", "yo<eos>"),
    ],
)
def test_supervised_rows(tokenizer, write, row, prompt, completion):
    [(name, [tokens])], num_skipped = load_supervised(write(row), tokenizer, 100)
    assert name == "rows.jsonl:1" and num_skipped == 0
    assert tokenizer.decode(tokens.ids[~tokens.action_mask]) == prompt
    assert tokenizer.decode(tokens.ids[tokens.action_mask]) == completion
    assert tokenizer.decode(tokens.ids) == prompt + completion
    assert tokens.logp_rollout.tolist() == [0] * len(tokens.ids) and set(tokens.version.tolist()) == {-1}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "1", "completion": "1234567890"}, "the row has 12 tokens, but sft.max_tokens is 11"),
        ({"prompt": "1"}, "`completion` must be text"),
        ({"messages": [USER]}, "must end with a turn of the role assistant, not user"),
        ({"prompt": [USER], "completion": [USER]}, "`completion` must end with a turn of the role assistant, not user"),
        (
            {"prompt": [USER], "completion": [ASSISTANT, USER]},
            "`completion` must end with a turn of the role assistant",
        ),
        ({"prompt": "1", "completion": " "}, "`completion` is blank"),
        ({"prompt": [USER], "completion": "yo"}, "`completion` must be a list of chat turns"),
        ({"messages": [ASSISTANT]}, "the prompt has no tokens"),
    ],
)
def test_a_bad_supervised_row(tokenizer, write, row, message):
    path = write({"prompt": "1", "completion": "123456789"}, row)
    with pytest.raises(ValueError, match=f"rows.jsonl:2: .*{message}"):
        load_supervised(path, tokenizer, 11)
    assert load_supervised(path, tokenizer, 11, "skip")[1] == 1


def test_a_template_that_rewrites_the_past_is_refused(tokenizer, write):
    tokenizer.chat_template = "{{ messages | length }}" + TEMPLATE
    with pytest.raises(ValueError, match="differently once the answer is there"):
        load_supervised(write({"messages": [USER, ASSISTANT]}), tokenizer, 100)


def test_no_end_of_sequence(tokenizer, write):
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no eos_token"):
        load_supervised(write({"prompt": "1", "completion": "2"}), tokenizer, 100)
