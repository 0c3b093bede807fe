"""Trackers: what each package really stores, and a run that outlives a tracker that fails."""

from __future__ import annotations

import io
import json
import posixpath
import re
import shlex
import sqlite3
import struct
import threading
from importlib.util import find_spec

import pytest
from rich.console import Console

from megatron_rl.config.load import validate
from megatron_rl.config.schema import SftRunConfig
from megatron_rl.observe import RunSink, missing_packages, open_trackers
from megatron_rl.observe.provenance import flat
from megatron_rl.observe.records import read_lines
from megatron_rl.observe.trackers import TrackerFeed, mlflow_name


def config_of(folder, *observe: dict) -> SftRunConfig:
    return validate(
        SftRunConfig,
        {
            "run": {"name": "r", "folder": str(folder), "steps": 9},
            "model": {"path": "models/tiny"},
            "balance": {"max_tokens_per_microbatch": 4096},
            "sft": {"rows": "rows.jsonl"},
            "observe": list(observe),
        },
    )


def sink_of(config, resume_at=None) -> tuple[RunSink, io.StringIO]:
    screen = io.StringIO()
    return RunSink(config.run_folder, config.run, Console(file=screen, width=100), None, "", resume_at), screen


def run(config, steps: range, loss: float, resume_at: int | None = None) -> str:
    """Log these steps through a sink and its trackers; returns the screen."""
    sink, screen = sink_of(config, resume_at)
    sink.feed(open_trackers(config, resume_at))
    with sink:
        for step in steps:
            sink.log(step, {"loss": loss + step})
    return screen.getvalue()


class Recorded:
    """A tracker in memory, whose server fails from a step on."""

    where = "memory"

    def __init__(self, fails_at: int, error: BaseException | None = None) -> None:
        self.fails_at, self.error, self.steps, self.finished = fails_at, error, [], None

    def log(self, record) -> None:
        if record["step"] >= self.fails_at:
            raise self.error
        self.steps.append(record["step"])

    def close(self, finished: bool) -> None:
        self.finished = finished


def test_a_tracker_gets_every_record_in_order(tmp_path):
    tracker = Recorded(fails_at=100)
    sink, screen = sink_of(config_of(tmp_path))
    sink.feed([TrackerFeed("wandb", tracker)])
    with sink:
        for step in range(20):
            sink.log(step, {})
    assert tracker.steps == list(range(20)) and tracker.finished is True
    assert screen.getvalue().startswith("wandb: memory\n") and "warning" not in screen.getvalue()
    assert not (sink.run_folder / "logs").exists()


@pytest.mark.parametrize("error", [ConnectionError, SystemExit, KeyboardInterrupt, GeneratorExit])
def test_a_failing_tracker_is_told_once_and_counted_and_the_run_goes_on(tmp_path, error):
    config = config_of(tmp_path)
    sink, screen = sink_of(config)
    feed = TrackerFeed("wandb", Recorded(fails_at=2, error=error("the server is away")))
    sink.feed([feed])
    with sink:
        for step in range(5):
            sink.log(step, {"loss": 1.0})
    assert feed.num_lost == 3
    assert [record["loss"] for record in read_lines(config.run_folder / "metrics.jsonl")] == [1.0] * 5
    text = screen.getvalue()
    assert text.count(f"wandb does not accept the run's numbers ({error.__name__}: the server is away)") == 1
    assert text.count("wandb lost 3 records") == 1
    assert (config.run_folder / "logs" / "warnings.log").read_text().count("\n") == 2


def test_lost_records_are_a_metric(tmp_path):
    config = config_of(tmp_path)
    sink, _ = sink_of(config)
    feed = TrackerFeed("mlflow", Recorded(fails_at=0))
    sink.feed([feed])
    sink.log(0, {})
    feed.close(finished=True)  # joins the thread: the failure is known
    sink.log(1, {})
    first, second = read_lines(config.run_folder / "metrics.jsonl")
    assert "observe/mlflow_lost" not in first and second["observe/mlflow_lost"] == 1


def test_the_end_does_not_wait_for_a_server_that_hangs():
    gate = threading.Event()

    class Hangs(Recorded):
        def log(self, record) -> None:
            gate.wait()

    feed = TrackerFeed("wandb", Hangs(fails_at=100), close_s=0.05)
    for step in range(3):
        feed.log({"step": step})
    feed.close(finished=True)
    assert feed.num_lost == 3 and "no answer within 0.05 s" in feed.failure
    gate.set()


def test_a_run_that_raised_is_closed_as_failed(tmp_path):
    tracker = Recorded(fails_at=100)
    sink, _ = sink_of(config_of(tmp_path))
    sink.feed([TrackerFeed("wandb", tracker)])
    with pytest.raises(KeyError), sink:
        raise KeyError
    assert tracker.finished is False


def test_a_missing_package_is_refused_with_the_command_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_rl.observe.trackers.find_spec", lambda name: None)
    config = config_of(tmp_path, {"kind": "tensorboard"}, {"kind": "mlflow"})
    assert [sentence.split("`")[1] for sentence in missing_packages(config)] == [
        "pip install tensorboard",
        "pip install mlflow",
    ]
    with pytest.raises(ValueError, match="pip install tensorboard"):
        open_trackers(config, None)
    assert not config.run_folder.exists()


def test_a_folder_of_the_packages_name_is_no_package(tmp_path, monkeypatch):
    """wandb leaves a folder `wandb` where it runs, which Python takes for a namespace package."""
    if find_spec("wandb") is not None:
        pytest.skip("the package is there")
    (tmp_path / "wandb").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert len(missing_packages(config_of(tmp_path, {"kind": "wandb"}))) == 1


@pytest.mark.parametrize(
    ("observe", "message"),
    [
        ([{"kind": "wandb"}, {"kind": "wandb"}], "observe: the kind wandb is given 2 times"),
        ([{"kind": "comet"}], "comet"),
        ([{"kind": "wandb", "projekt": "x"}], "did you mean observe.0.project"),
    ],
)
def test_wrong_sections(tmp_path, observe, message):
    with pytest.raises(ValueError, match=message):
        config_of(tmp_path, *observe)


def test_flat():
    nested = {"a": {"b": 1}, "c": [1, 2], "d": [{"kind": "x"}, {"kind": "y"}], "e": None}
    assert flat(nested) == {"a.b": 1, "c": [1, 2], "d.0.kind": "x", "d.1.kind": "y", "e": None}


def test_tensorboard_drops_what_a_resumed_run_repeats(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = config_of(tmp_path, {"kind": "tensorboard"})
    text = run(config, range(5), loss=0.0)
    assert f"tensorboard --logdir {config.run_folder / 'tensorboard'}" in text.replace("\n", "")
    run(config, range(3, 6), loss=100.0, resume_at=3)
    events = EventAccumulator(str(config.run_folder / "tensorboard"))
    events.Reload()
    losses = {event.step: event.value for event in events.Scalars("loss")}
    assert losses == {0: 0, 1: 1, 2: 2, 3: 103, 4: 104, 5: 105}
    [written] = events.Tensors("config/text_summary")
    assert b'"name": "r"' in written.tensor_proto.string_val[0]


KNOWN_TO_MLFLOW = re.compile(r"[/\w.\- ]+")
"""What MLflow asks of a metric's name, in addition to being a plain path."""


@pytest.mark.parametrize(
    "name",
    ["eval/pass@2", "eval/maj@4_low", "dataset/math (hard)/score_mean", "dataset/../groups", "dataset/c++/groups"]
    + ["dataset/a,b/groups", "dataset/50%/groups", "dataset//groups", f"dataset/{'x' * 300}/groups", "mathé/x:y"],
)
def test_a_name_of_any_metric_is_one_of_mlflow(name):
    known = mlflow_name(name)
    assert KNOWN_TO_MLFLOW.fullmatch(known) and len(known) <= 250 and posixpath.normpath(known) == known


def test_names_that_mlflow_knows_stay_and_two_stay_two():
    assert [mlflow_name(name) for name in ("loss", "eval/pass@2", "a/b c.d-e")] == [
        "loss",
        "eval/pass_at_2",
        "a/b c.d-e",
    ]
    names = [
        "dataset/a,b/x",
        "dataset/a;b/x",
        "dataset/a_b/x",
        "dataset/../x",
        "dataset/./x",
        *("y" * 300 + c for c in "ab"),
    ]
    assert len({mlflow_name(name) for name in names}) == len(names)


def test_mlflow_continues_the_same_run(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    if find_spec("sqlalchemy") is None:
        pytest.skip("MLflow without SQLAlchemy keeps no database")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    config = config_of(tmp_path, {"kind": "mlflow", "tracking_uri": uri, "experiment": "adds"})
    run(config, range(3), loss=0.0)
    run(config, range(2, 4), loss=100.0, resume_at=2)
    client = mlflow.MlflowClient(tracking_uri=uri)
    [stored] = client.search_runs([client.get_experiment_by_name("adds").experiment_id])
    history = [(metric.step, metric.value) for metric in client.get_metric_history(stored.info.run_id, "loss")]
    assert sorted(history) == [(0, 0), (1, 1), (2, 2), (2, 102), (3, 103)]
    assert stored.info.status == "FINISHED" and stored.data.params["config.run.name"] == "r"


def test_an_mlflow_server_that_is_away_is_refused_at_the_start(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    config = config_of(tmp_path, {"kind": "mlflow", "tracking_uri": "http://127.0.0.1:9"})
    config.run_folder.mkdir()
    with pytest.raises(ValueError, match="mlflow .*MlflowException"):
        open_trackers(config, None)


def test_an_mlflow_database_that_breaks_does_not_end_the_run(tmp_path):
    pytest.importorskip("mlflow")
    if find_spec("sqlalchemy") is None:
        pytest.skip("MLflow without SQLAlchemy keeps no database")
    config = config_of(tmp_path, {"kind": "mlflow", "tracking_uri": f"sqlite:///{tmp_path}/mlflow.db"})
    sink, screen = sink_of(config)
    [feed] = open_trackers(config, None)
    sink.feed([feed])
    with sink:
        with sqlite3.connect(tmp_path / "mlflow.db") as database:
            database.execute("DROP TABLE latest_metrics")
        sink.log(0, {"loss": 1.0})
    assert feed.num_lost == 1 and "mlflow lost 1 records" in screen.getvalue()
    assert len(read_lines(config.run_folder / "metrics.jsonl")) == 1


@pytest.mark.parametrize("content", [b"", b"\0" * 16, b'{"wandb": "a1', b"\xff", b'["a1"]', b'{"wandb": 3}'])
def test_a_damaged_file_of_ids_is_named_with_what_to_do(tmp_path, content):
    config = config_of(tmp_path)
    config.run_folder.mkdir()
    path = config.run_folder / "trackers.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{path} is damaged .*remove the file, and the trackers begin new runs"):
        open_trackers(config, 3)
    assert open_trackers(config, None) == [], "a new run does not read it"


def test_a_printed_command_works_with_a_space_in_the_folder(tmp_path):
    pytest.importorskip("tensorboard")
    config = config_of(tmp_path / "a b", {"kind": "tensorboard"})
    config.run_folder.mkdir(parents=True)
    [feed] = open_trackers(config, None)
    feed.close(finished=True)
    assert shlex.split(feed.where)[-1] == str(config.run_folder / "tensorboard")


def test_wandb_offline_keeps_records_and_the_runs_id(tmp_path):
    pytest.importorskip("wandb")
    config = config_of(tmp_path, {"kind": "wandb", "mode": "offline", "project": "adds"})
    text = run(config, range(3), loss=0.0)
    first = json.loads((config.run_folder / "trackers.json").read_text())["wandb"]
    assert "wandb sync" in text
    run(config, range(2, 4), loss=100.0, resume_at=2)
    assert json.loads((config.run_folder / "trackers.json").read_text())["wandb"] == first
    folders = sorted((config.run_folder / "wandb").glob(f"offline-run-*-{first}"))
    stored = [losses_of(next(folder.glob("*.wandb"))) for folder in folders]
    assert [(step, loss) for losses in stored for step, loss in losses] == [
        (0, 0),
        (1, 1),
        (2, 2),
        (2, 102),
        (3, 103),
    ]


def losses_of(path) -> list[tuple[int, float]]:
    """(step, loss) of each record in a file of W&B's: 7 bytes, then LevelDB's log of blocks of 32 KiB. A record
    is one or more pieces, each headed by checksum (4 bytes), length (2) and kind (1: whole, 2 to 4: first to last)."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole, found = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # no room for a head: the block's rest is padding
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record, whole = wandb_internal_pb2.Record.FromString(whole), b""
            values = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            if "loss" in values:
                found.append((values["step"], values["loss"]))
    return found
