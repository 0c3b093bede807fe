"""What Prometheus reads, and the dashboard that asks for it."""

from __future__ import annotations

import json
import re
import socket
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from test_observe_trackers import config_of, run, sink_of

from megatron_rl.observe import open_trackers
from megatron_rl.observe.metric_names import SECTIONS
from megatron_rl.observe.prometheus import NewestRecord, Relabelled, metric_name

ROOT = Path(__file__).parents[3]
VLLM = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:generation_tokens_total",
}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def read(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return answer.read().decode()


def served(collector) -> dict[str, tuple[str, dict, float]]:
    """The samples by name: the kind, the labels and the value."""
    registry = CollectorRegistry()
    registry.register(collector)
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {sample.name: (family.type, sample.labels, sample.value) for family in families for sample in family.samples}


def test_every_number_of_a_record_is_a_gauge_with_a_valid_name():
    newest = NewestRecord('a "run"')
    newest.record = {"step": 4, "reward/mean": 0.5, "eval/pass@8": 1.0, "reward/x-y/mean": float("nan")}
    found = served(newest)
    assert found["megatron_rl_reward_mean"] == ("gauge", {"run": 'a "run"'}, 0.5)
    assert found["megatron_rl_step"][2] == 4 and found["megatron_rl_eval_pass_8"][2] == 1
    assert str(found["megatron_rl_reward_x_y_mean"][2]) == "nan"
    newest.record = {"step": 5}
    assert list(served(newest)) == ["megatron_rl_step"], "an old number is not shown as a new one"


def test_names_that_become_the_same_are_served_once():
    newest = NewestRecord("r")
    newest.record = {"a/b": 1.0, "a@b": 2.0}
    assert served(newest) == {"megatron_rl_a_b": ("gauge", {"run": "r"}, 2.0)}


def test_the_endpoint_answers_until_the_run_ends(tmp_path):
    port = free_port()
    config = config_of(tmp_path, {"kind": "prometheus", "port": port})
    sink, screen = sink_of(config)
    [feed] = open_trackers(config, None)
    sink.feed([feed])
    with sink:
        sink.log(0, {"loss": 0.25})
        feed._work.join()  # the thread has taken the record
        assert 'megatron_rl_loss{run="r"} 0.25' in read(port)
    assert f":{port}/metrics" in screen.getvalue() and not feed.num_lost
    with pytest.raises(OSError):
        read(port)


def test_a_port_that_is_taken_is_refused_at_the_start(tmp_path):
    with socket.create_server(("0.0.0.0", 0)) as server:
        config = config_of(tmp_path, {"kind": "prometheus", "port": server.getsockname()[1]})
        config.run_folder.mkdir()
        with pytest.raises(ValueError, match="observe: prometheus does not start: .*in use"):
            run(config, range(1), loss=0.0)


def test_metrics_of_vllm_get_the_number_of_the_engine():
    registry = CollectorRegistry()
    Gauge("vllm:num_requests_running", "text", ["model_name", "engine"], registry=registry).labels("m", "0").set(7)
    Counter("vllm:generation_tokens", "text", ["model_name", "engine"], registry=registry).labels("m", "0").inc(3)
    Gauge("python_info", "of the process", registry=registry).set(1)
    found = served(Relabelled(registry, engine=2))
    assert found["vllm:num_requests_running"] == ("gauge", {"model_name": "m", "engine": "2"}, 7)
    assert found["vllm:generation_tokens_total"] == ("counter", {"model_name": "m", "engine": "2"}, 3)
    assert "python_info" not in found


def test_the_dashboard_asks_for_metrics_that_exist():
    board = json.loads((ROOT / "configs/grafana/megatron_rl.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    known = {metric_name(name) for section in SECTIONS.values() for name in section} | {"megatron_rl_step"}
    patterns = [
        re.compile(".+".join(map(re.escape, re.split("__[a-z]+_", metric_name(name).replace("{", "_")))))
        for section in SECTIONS.values()
        for name in section
        if "{" in name
    ]
    found = {name for query in asked for name in re.findall(r"(?:megatron_rl_|vllm:)\w+", query)}
    selectors = {"megatron_rl_time_", "megatron_rl_time_total_s"}  # the beginning of a selector, and what it excludes
    for name in found - VLLM - selectors:
        assert name in known or any(pattern.fullmatch(name) for pattern in patterns), name
    assert found >= VLLM | {"megatron_rl_reward_mean"}
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_vllm_still_has_the_metrics_that_the_dashboard_asks_for():
    """Their names stand in its source; importing it would take seconds."""
    from importlib.util import find_spec

    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    source = (Path(spec.origin).parent / "v1/metrics/loggers.py").read_text()
    for name in VLLM:
        assert f'"{name.removesuffix("_total")}"' in source
