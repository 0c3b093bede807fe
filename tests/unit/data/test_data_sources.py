"""Files of every kind that hold rows, folders of them, and what cannot be read."""

from __future__ import annotations

import json
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.data.files import BATCH_ROWS, check_hub, files_of, load_rows, read_rows
from megatron_rl.data.forms import Reading, recognise
from megatron_rl.data.rows import BadRow, FilledRow

ROWS = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"What is {i} + {i}?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(2 * i)},
        "extra_info": {"split": "train", "index": i},
    }
    for i in range(5)
]


def write(path: Path, rows: list) -> Path:
    """Write rows into a file of the kind that its suffix names. `.stream.arrow` is a stream."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)
    else:
        table = pyarrow.Table.from_pylist(rows)
        new = pyarrow.ipc.new_stream if path.name.endswith(".stream.arrow") else pyarrow.ipc.new_file
        with new(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    return path


def write_saved(folder: Path, rows: list) -> Path:
    """What `save_to_disk` of the `datasets` library writes: streams of Arrow, and the list of them in state.json."""
    names = [f"data-{i:05d}-of-00002.arrow" for i in range(2)]
    for name, part in zip(names, (rows[:2], rows[2:]), strict=True):
        write(folder / "part.stream.arrow", part).rename(folder / name)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


NAMES = ("rows.jsonl", "rows.json", "rows.parquet", "rows.arrow", "rows.stream.arrow")


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_every_kind_gives_the_rows_and_their_names(tmp_path, name):
    found = list(read_rows(write(tmp_path / name, ROWS)))
    assert [one.row for one in found] == ROWS
    assert [one.uid for one in found] == [f"{name}:{number}" for number in range(1, 6)]
    assert found[2].place == f"{tmp_path / name}:3"
    assert [recognise(one.row, Reading()).columns["ground_truth"] for one in found] == ["0", "2", "4", "6", "8"]


@settings(max_examples=25)
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "prompt": st.text(min_size=1),
                "ground_truth": st.lists(st.text()) | st.none(),
                "level": st.floats(allow_nan=False) | st.none(),
                "info": st.fixed_dictionaries({"index": st.integers(-(2**63), 2**63 - 1), "seen": st.booleans()}),
            }
        ),
        min_size=1,
    )
)
def test_all_kinds_give_the_same_rows(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("kinds")
    for name in NAMES:
        read = [one.row for one in read_rows(write(folder / name, rows))]
        assert read == rows, name
        assert {isinstance(row, FilledRow) for row in read} == {not name.startswith("rows.json")}, name


def test_a_large_file_keeps_the_order_of_its_rows(tmp_path):
    rows = [{"prompt": str(i)} for i in range(2 * BATCH_ROWS + 1)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    with pyarrow.ipc.new_file(tmp_path / "a.arrow", pyarrow.schema({"prompt": pyarrow.string()})) as writer:
        writer.write_table(pyarrow.Table.from_pylist(rows))
    for name in ("a.parquet", "a.arrow"):
        assert [one.row for one in read_rows(tmp_path / name)] == rows


def test_folders(tmp_path):
    saved = list(read_rows(write_saved(tmp_path / "saved", ROWS)))
    assert [one.row for one in saved] == ROWS
    assert [one.uid for one in saved][1:3] == ["data-00000-of-00002.arrow:2", "data-00001-of-00002.arrow:1"]

    for i, part in enumerate((ROWS[:3], ROWS[3:])):
        write(tmp_path / "many" / "data" / f"train-{i:05d}-of-00002.parquet", part)
    (tmp_path / "many" / "README.md").write_text("licence")
    (tmp_path / "many" / "dataset_infos.json").write_text("{}")
    write(tmp_path / "many" / ".cache" / "rows.jsonl", ROWS)
    many = list(read_rows(tmp_path / "many"))
    assert [one.row for one in many] == ROWS
    assert many[3].uid == "data/train-00001-of-00002.parquet:1"
    assert many[3].place == f"{tmp_path}/many/data/train-00001-of-00002.parquet:1"


def test_folders_that_are_not_one_set_of_rows(tmp_path):
    for name in ("train-00000.parquet", "test-00000.parquet"):
        write(tmp_path / "mixed" / name, ROWS)
    with pytest.raises(ValueError, match=r"files of the splits \['test', 'train'\].* give a single file, or a folder"):
        files_of(tmp_path / "mixed")
    write_saved(tmp_path / "splits" / "train", ROWS)
    write_saved(tmp_path / "splits" / "test", ROWS)
    (tmp_path / "splits" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ValueError, match=r"holds the splits \['test', 'train'\].* give the folder of one of them"):
        files_of(tmp_path / "splits")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="there is no file of rows"):
        files_of(tmp_path / "empty")
    (tmp_path / "splits" / "train" / "state.json").write_text("{}")
    with pytest.raises(ValueError, match="state.json does not list"):
        files_of(tmp_path / "splits" / "train")


@pytest.mark.parametrize("name", NAMES)
def test_a_bad_row_is_named_by_file_and_row(tmp_path, name):
    path = write(tmp_path / name, [{"prompt": "good"}, {"prompt": "good"}, {"prompt": None}])

    def text(uid: str, row: dict) -> str:
        return recognise(row, Reading()).messages

    with pytest.raises(ValueError, match=rf"{path}:3: `prompt` must be text"):
        load_rows(path, text, "fail")
    assert load_rows(path, text, "skip") == (["good", "good"], 1)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.parquet", b"PAR1 is cut off", "rows.parquet cannot be read as parquet .*; copy or write it again"),
        ("rows.arrow", b"ARROW1 is cut off", "rows.arrow cannot be read as arrow"),
        ("rows.arrow", b"no stream", "rows.arrow cannot be read as arrow"),
        ("rows.json", b'[{"prompt": "1"},', "rows.json begins with `\\[`, but is not JSON"),
    ],
)
def test_a_damaged_file_stops_the_run_even_if_bad_rows_are_skipped(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_rows(tmp_path / name, lambda uid, row: row, "skip")


def test_json_may_be_lines_or_a_list_with_rows_that_are_no_objects(tmp_path):
    path = tmp_path / "rows.json"
    path.write_bytes(b'\xef\xbb\xbf\n{"prompt": "1"}\n{"prompt": "2"}\n')
    assert [(one.uid, one.row) for one in read_rows(path)] == [
        ("rows.json:2", {"prompt": "1"}),
        ("rows.json:3", {"prompt": "2"}),
    ]
    path.write_text('\n [{"prompt": "1"},\n 7]')
    first, second = read_rows(path)
    assert first.row == {"prompt": "1"} and second.uid == "rows.json:2"
    assert isinstance(second.row, BadRow) and "this one is a int" in str(second.row)


def test_values_of_parquet_become_plain_or_are_refused_by_name(tmp_path):
    values = {"day": date(2026, 1, 2), "at": datetime(2026, 1, 2, 3, 4, 5), "price": [Decimal("1.50")]}
    [row] = read_rows(write(tmp_path / "plain.parquet", [{"prompt": "1", **values}]))
    assert row.row == {"prompt": "1", "day": "2026-01-02", "at": "2026-01-02T03:04:05", "price": ["1.50"]}
    [row] = read_rows(write(tmp_path / "bytes.parquet", [{"prompt": "1", "images": [{"bytes": b"\x00\x01"}]}]))
    assert isinstance(row.row, BadRow)
    assert "column `images` holds 2 bytes, which do not begin as an image" in str(row.row)


@pytest.mark.parametrize("name", ["hf://gsm8k", "hf://a/b/c/d", "hf://a/b:"])
def test_names_of_the_hub(name):
    with pytest.raises(ValueError, match="must read hf://owner/name:split"):
        list(read_rows(name))


def test_the_datasets_library_reads_names_and_writes_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets", reason="the datasets library is optional")
    monkeypatch.chdir(tmp_path)  # the library looks for owner/name here before it looks on the hub
    write(tmp_path / "owner" / "name" / "train-00000-of-00001.parquet", ROWS)
    write(tmp_path / "owner" / "name" / "test-00000-of-00001.parquet", ROWS[:1])
    assert [one.row for one in read_rows("hf://owner/name")] == ROWS
    assert [(one.uid, one.row) for one in read_rows("hf://owner/name:test")] == [("owner/name:test:1", ROWS[0])]
    with pytest.raises(ValueError, match="hf://owner/name:other cannot be loaded: .*other"):
        list(read_rows("hf://owner/name:other"))
    check_hub("hf://owner/name:test")
    check_hub("hf://owner/name:test[:50%]")
    with pytest.raises(ValueError, match="hf://owner/name:other has no split other; it has test, train|train, test"):
        check_hub("hf://owner/name:other")
    with pytest.raises(ValueError, match="hf://owner/nothing cannot be loaded: .*nothing"):
        check_hub("hf://owner/nothing")
    saved = datasets.Dataset(pyarrow.Table.from_pylist(ROWS), fingerprint="0123456789abcdef")
    saved.save_to_disk("saved", num_shards=2)
    assert [one.row for one in read_rows(Path("saved"))] == ROWS
