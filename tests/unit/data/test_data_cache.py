from __future__ import annotations

import json
import resource
import threading
from pathlib import Path

import cover
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_rl.data import Rules, load_prompts
from megatron_rl.data.forms import Reading
from megatron_rl.data.prompt_table import DamagedTable, PromptTable, Tally
from megatron_rl.types import Prompt

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}!"
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
PROMPTS = st.builds(
    Prompt,
    uid=st.text(st.characters()),
    token_ids=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5).map(tuple),
    messages=st.text() | st.lists(st.dictionaries(st.text(), st.text(), max_size=2), max_size=2).map(tuple),
    columns=st.dictionaries(st.text(), VALUES, max_size=3),
)


def tokenizer_of(template: str = TEMPLATE, more: str = "") -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({c: i for i, c in enumerate("?!0123456789+=" + more)}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="?", chat_template=template)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tokenizer_of()


@pytest.fixture
def path(tmp_path) -> Path:
    return write(tmp_path / "rows.jsonl", *({"prompt": f"{i}+1=", "ground_truth": i + 1} for i in range(3)))


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def stored(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("part", cover.essential(range(4), 0))  # each has examples of its own
@settings(max_examples=10)
@given(st.lists(PROMPTS, max_size=3))
def test_what_is_read_equals_what_was_written(part, prompts):
    table = PromptTable.of(lambda tally: iter(prompts))
    assert list(table) == prompts and len(table) == len(prompts)
    assert table[1:] == prompts[1:] and [table[-1 - i] for i in range(len(table))] == prompts[::-1]


def test_more_prompts_than_one_batch_holds():
    table = PromptTable.of(lambda tally: (Prompt(str(i), (i,), "x") for i in range(2049)))
    assert [prompt.token_ids[0] for prompt in table] == list(range(2049))


def test_bytes_that_were_cut_off_or_changed_anywhere_are_refused():
    import pyarrow

    from megatron_rl.data.prompt_table import write_table

    class Bytes(bytearray):
        write = bytearray.extend

    whole = Bytes()
    write_table(whole, lambda tally: iter([Prompt("a:1", (1, 2), "x")]))
    assert len(PromptTable(pyarrow.py_buffer(bytes(whole)))) == 1
    for end in range(len(whole)):
        with pytest.raises(DamagedTable):
            PromptTable(pyarrow.py_buffer(bytes(whole[:end])))
        changed = whole.copy()
        changed[end] ^= 1
        with pytest.raises(DamagedTable):
            PromptTable(pyarrow.py_buffer(bytes(changed)))


def test_the_second_start_reads_neither_rows_nor_tokenizes_them(path, tokenizer, tmp_path, monkeypatch):
    cache = tmp_path / "a" / "cache"
    first = load_prompts(path, tokenizer, Rules(10), cache=cache)
    assert len(stored(cache)) == 1 and stored(cache)[0].endswith(".prompts")
    monkeypatch.setattr("megatron_rl.data.prompts.read_rows", None)
    second = load_prompts(path, tokenizer, Rules(10), cache=cache)
    assert list(first) == list(second) and first.tally == second.tally and first.tally.num_rows == 3
    assert second[2] == Prompt("rows.jsonl:3", (4, 12, 3, 13), "2+1=", {"ground_truth": 3})


def test_a_tokenizer_that_was_loaded_twice_has_the_same_digests(tokenizer, tmp_path):
    from megatron_rl.data.cache import tokenizer_digests

    tokenizer.save_pretrained(tmp_path)
    loaded = [PreTrainedTokenizerFast.from_pretrained(tmp_path) for _ in range(2)]
    assert tokenizer_digests(loaded[0]) == tokenizer_digests(loaded[1])


CHANGES = {
    "rows": lambda path: write(path, {"prompt": "1+1=", "ground_truth": 2}),
    "name": lambda path: path.rename(path.with_name("others.jsonl")),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_other_files_are_read_anew(path, tokenizer, tmp_path, change):
    load_prompts(path, tokenizer, Rules(10), cache=tmp_path / "cache")
    path = change(path)
    assert list(load_prompts(path, tokenizer, Rules(10), cache=tmp_path / "cache")) == list(
        load_prompts(path, tokenizer, Rules(10))
    )
    assert len(stored(tmp_path / "cache")) == 2


@pytest.mark.parametrize(
    "changed",
    [
        {"rules": Rules(11)},
        {"rules": Rules(10, "skip")},
        {"rules": Rules(10, required_columns=("ground_truth",))},
        {"rules": Rules(10, deduplicate=True)},
        {"reading": Reading({"messages": "prompt"})},
        {"reading": Reading(dataset="sums")},
        {"reading": Reading({"messages": "prompt"}, "1+1=")},
        {"reading": Reading({"messages": "prompt"}, chat_template={"thinking": True})},
        {"tokenizer": tokenizer_of(TEMPLATE + "=")},
        {"tokenizer": tokenizer_of(more="-")},
    ],
    ids=str,
)
def test_whatever_prompts_depend_on_makes_another_file(path, tokenizer, tmp_path, changed):
    cache = tmp_path / "cache"
    given = {"rules": Rules(10), "tokenizer": tokenizer}
    load_prompts(path, **given, cache=cache)
    for _ in range(2):
        assert list(load_prompts(path, **given | changed, cache=cache)) == list(load_prompts(path, **given | changed))
        assert len(stored(cache)) == 2


def test_a_moved_folder_of_rows_is_known_again(tokenizer, tmp_path):
    (tmp_path / "one").mkdir()
    write(tmp_path / "one" / "a.jsonl", {"prompt": "1+1="})
    load_prompts(tmp_path / "one", tokenizer, Rules(10), cache=tmp_path / "cache")
    (tmp_path / "one").rename(tmp_path / "other")
    load_prompts(tmp_path / "other", tokenizer, Rules(10), cache=tmp_path / "cache")
    assert len(stored(tmp_path / "cache")) == 1


@pytest.mark.parametrize("damage", [lambda whole: whole[:-7], lambda whole: b"", lambda whole: b"x" + whole[1:]])
def test_a_damaged_file_is_told_and_made_anew(path, tokenizer, tmp_path, damage):
    cache, notes = tmp_path / "cache", []
    expected = list(load_prompts(path, tokenizer, Rules(10), cache=cache))
    [file] = cache.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert list(load_prompts(path, tokenizer, Rules(10), cache=cache, tell=notes.append)) == expected
    assert len(notes) == 1 and f"{file} cannot be used (it" in notes[0] and "tokenized again" in notes[0]
    assert file.read_bytes() == whole
    load_prompts(path, tokenizer, Rules(10), cache=cache, tell=notes.append)
    assert len(notes) == 1


def test_a_folder_that_cannot_be_made_only_costs_the_cache(path, tokenizer, tmp_path):
    notes = []
    (tmp_path / "file").write_text("")
    prompts = load_prompts(path, tokenizer, Rules(10), cache=tmp_path / "file" / "cache", tell=notes.append)
    assert len(prompts) == 3
    assert len(notes) == 1 and "cannot be written (Not a directory); the prompts of" in notes[0]


def test_a_full_disk_only_costs_the_cache_and_leaves_nothing(path, tokenizer, tmp_path):
    """A limit on the length of files stands for the disk."""
    notes: list[str] = []
    rows = write(tmp_path / "many.jsonl", *({"prompt": "1+1=", "more": "x" * 1000} for _ in range(3000)))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        prompts = load_prompts(rows, tokenizer, Rules(10), cache=tmp_path / "cache", tell=notes.append)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(prompts) == 3000 and prompts.tally.num_rows == 3000
    assert len(notes) == 1 and "cannot be written (File too large); the prompts of" in notes[0]
    assert stored(tmp_path / "cache") == []


def test_a_bad_row_leaves_no_file(tokenizer, tmp_path):
    rows = write(tmp_path / "rows.jsonl", {"prompt": "1"}, {"question": "1"})
    with pytest.raises(ValueError, match="rows.jsonl:2: a row must have"):
        load_prompts(rows, tokenizer, Rules(10), cache=tmp_path / "cache")
    assert stored(tmp_path / "cache") == []


def test_rows_that_change_while_they_are_read_are_refused(path, tokenizer, tmp_path, monkeypatch):
    from megatron_rl.data import prompts as module

    def read_rows(source):
        yield from reads(source)
        write(path, {"prompt": "5"})

    reads = module.read_rows
    monkeypatch.setattr(module, "read_rows", read_rows)
    with pytest.raises(ValueError, match="rows.jsonl changed"):
        load_prompts(path, tokenizer, Rules(10), cache=tmp_path / "cache")
    assert stored(tmp_path / "cache") == []


def test_two_runs_at_once_do_not_disturb_each_other(path, tokenizer, tmp_path, monkeypatch):
    """Both find no file, and both write one before the other's has its name."""
    from megatron_rl.data import cache as module

    both = threading.Barrier(2, timeout=60)
    replace = module.os.replace
    monkeypatch.setattr(module.os, "replace", lambda *names: (both.wait(), replace(*names)))
    found: list[list[Prompt]] = []
    tokenizers = [tokenizer_of(), tokenizer_of()]

    def run(mine: PreTrainedTokenizerFast) -> None:
        found.append(list(load_prompts(path, mine, Rules(10), cache=tmp_path / "cache")))

    runs = [threading.Thread(target=run, args=(mine,)) for mine in tokenizers]
    for one in runs:
        one.start()
    for one in runs:
        one.join()
    assert found == [list(load_prompts(path, tokenizer, Rules(10)))] * 2
    assert len(stored(tmp_path / "cache")) == 1


def test_a_name_of_the_hub_is_not_kept(tokenizer, tmp_path, monkeypatch):
    from megatron_rl.data import prompts as module
    from megatron_rl.data.files import ReadRow

    notes: list[str] = []
    monkeypatch.setattr(module, "read_rows", lambda source: iter([ReadRow("o/n:1", "hf://o/n:1", {"prompt": "1"})]))
    assert len(load_prompts("hf://o/n", tokenizer, Rules(10), cache=tmp_path, tell=notes.append)) == 1
    assert notes == [
        f"the prompts of hf://o/n are not kept in {tmp_path}, because a name of the hub may get other rows"
    ]
    assert stored(tmp_path) == []


def test_duplicates_are_left_out_and_ambiguous_questions_are_counted(tokenizer, tmp_path):
    rows = write(
        tmp_path / "rows.jsonl",
        {"prompt": "1+1=", "ground_truth": {"a": 1, "b": 2}},
        {"prompt": "1+2=", "ground_truth": "3"},
        {"prompt": "1+1=", "ground_truth": {"b": 2, "a": 1}, "pass_rate": 0.5, "id": 7},
        {"prompt": "1+2=", "ground_truth": 3},
        {"prompt": "1+2=", "ground_truth": "3"},
        {"prompt": "1+3="},
        {"prompt": "12345678901"},
        {"question": "1"},
    )
    kept = load_prompts(rows, tokenizer, Rules(10, "skip", deduplicate=True))
    assert [prompt.uid for prompt in kept] == [f"rows.jsonl:{i}" for i in (1, 2, 4, 6)]
    assert kept.tally == Tally(
        num_rows=8,
        skipped={"malformed": 1, "too long": 1},
        first_skipped="rows.jsonl:8: a row must have either `messages` (chat turns) or `prompt` (text, or chat turns "
        "as TRL and verl have them), but this one has only ['question']; set data.columns, for example "
        "data.columns={messages: question}",
        num_duplicates=2,
        num_ambiguous=1,
        digest=kept.tally.digest,
    )
    told = str(kept.tally)
    assert told.startswith("8 rows; skipped 1 malformed, 1 too long (the first one is rows.jsonl:8: a row must")
    assert told.endswith("; left out 2 duplicates; 1 question has several ground truths")
    everything = load_prompts(rows, tokenizer, Rules(10, "skip"))
    assert len(everything) == 6 and everything.tally.num_duplicates == 0
    assert everything.tally.digest != kept.tally.digest


@pytest.mark.parametrize(
    ("column", "values", "kept"),
    [
        ("solution", ("1", "2"), 2),
        ("reward_model", ({"ground_truth": "1"}, {"ground_truth": "2"}), 2),
        ("dataset", ("a", "b"), 2),
        ("answer_idx", (0, 1), 2),
        ("target", (None, 1), 2),
        ("target", (None, None), 1),
        ("extra_info", ({"index": 1, "answer": "1"}, {"index": 2, "answer": "1"}), 1),
        ("extra_info", ({"index": 1, "answer": "1"}, {"index": 1, "answer": "2"}), 2),
        ("question_id", (1, 2), 1),
        ("pass_rate", (0.1, 0.2), 1),
        ("chat_template_kwargs", ({}, {"effort": "high"}), 1),
    ],
)
def test_rows_whose_rewards_get_other_columns_are_no_duplicates(tokenizer, tmp_path, column, values, kept):
    rows = write(tmp_path / "rows.jsonl", *({"prompt": "1+1=", column: value} for value in values), {"prompt": "2"})
    assert len(load_prompts(rows, tokenizer, Rules(10, deduplicate=True))) == kept + 1


def test_text_that_is_no_unicode_is_a_bad_row(tokenizer, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1"}\n{"prompt": "\\ud83d"}\n')
    with pytest.raises(ValueError, match="rows.jsonl:2"):
        load_prompts(tmp_path / "rows.jsonl", tokenizer, Rules(10))
