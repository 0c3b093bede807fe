from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.client import HTTPConnection
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from megatron_rl.commands.watch import ReportServer, main


@contextmanager
def served(folder):
    """A server of the folder in a thread; gives its address."""
    with ReportServer(folder, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.url
        finally:
            server.shutdown()
            thread.join()


def read(url: str) -> tuple[str, str]:
    with urlopen(url, timeout=30) as reply:
        return reply.headers["Content-Type"], reply.read().decode("utf-8")


def log(folder, step: int, **sample) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "reward/mean": step / 4, "time/total_s": 1.0}) + "\n")
    with (folder / "samples.jsonl").open("a") as file:
        plain = {"uid": "r:1", "prompt": "q", "thought": "", "answer": "a", "reward": 1.0, "finish": "stop"}
        file.write(json.dumps({"step": step} | plain | sample) + "\n")


def test_a_page_follows_its_run(tmp_path):
    with served(tmp_path) as url:
        kind, page = read(url)
        assert kind == "text/html; charset=utf-8" and "No step is logged yet" in page and 'id="live"' in page
        version = json.loads(read(f"{url}/version.json")[1])["version"]
        assert json.loads(re.findall(r'id="data">(.*?)</script>', page)[0])["version"] == version
        assert json.loads(read(f"{url}/version.json")[1])["version"] == version, "nothing has changed"

        log(tmp_path, 0)
        log(tmp_path, 1, answer="</script>ä\ud800")
        kind, text = read(f"{url}/data.json?again")
        data = json.loads(text)
        assert kind == "application/json; charset=utf-8"
        assert data["version"] == json.loads(read(f"{url}/version.json")[1])["version"] != version
        assert [one["answer"] for one in data["samples"]] == ["a", "</script>ä\ud800"]
        assert data["panels"][0]["lines"][0]["values"] == [0.0, 0.25] and "0.250</b>" in data["overview"]
        assert "0.250</b>" in read(url)[1], "a page that is opened later"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:{}", 200),
        ("LOCALHOST", 200),
        ("127.0.0.1", 200),
        ("[::1]:8642", 200),
        ("10.0.0.7:80", 200),
        ("attacker.example:{}", 403),
        ("localhost.attacker.example", 403),
        ("127.0.0.1.attacker.example:{}", 403),
        ("", 403),
    ],
)
def test_a_page_under_another_name_learns_nothing(tmp_path, host, status):
    """A site whose name points to this machine for a moment would read the answers."""
    log(tmp_path, 0)
    with served(tmp_path) as url:
        port = int(url.rpartition(":")[2])
        for path in ("/", "/data.json", "/version.json"):
            connection = HTTPConnection("127.0.0.1", port, timeout=30)
            connection.request("GET", path, headers={"Host": host.format(port)})
            reply = connection.getresponse()
            body = reply.read().decode()
            connection.close()
            assert reply.status == status and (status == 200 or body.startswith("this server has no name"))


def test_what_cannot_be_shown_is_told(tmp_path):
    log(tmp_path, 0)
    with served(tmp_path) as url:
        with pytest.raises(HTTPError) as missing:
            read(f"{url}/curves.png")
        assert missing.value.code == 404
        (tmp_path / "metrics.jsonl").write_text('{"step"\n')
        with pytest.raises(HTTPError) as spoilt:
            read(f"{url}/data.json")
        assert spoilt.value.code == 500 and "metrics.jsonl:1 is not JSON" in json.load(spoilt.value)["error"]
        missing.value.close()


def test_a_wrong_folder_and_a_busy_port_are_told(tmp_path, capsys):
    assert main([str(tmp_path / "none")]) == 1
    assert "none is no folder; give the folder of a run" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 1
    assert "has no config.json and no metrics.jsonl, so it is no run's folder" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    with ReportServer(tmp_path, "127.0.0.1", 0) as busy:
        assert main([str(tmp_path), "--port", str(busy.server_port)]) == 1
    told = f"127.0.0.1:{busy.server_port} is in use; choose another port with --port"
    assert told in capsys.readouterr().err
    assert main([str(tmp_path), "--host", "192.0.2.1"]) == 1
    assert "cannot listen at 192.0.2.1:8642" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--port", "65536"])
    assert "65536 is no port" in capsys.readouterr().err


def test_ctrl_c_ends_the_command_with_status_0(tmp_path):
    log(tmp_path, 0)
    command = [sys.executable, "-m", "megatron_rl", "watch", str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        url = re.match(r"(http://127\.0\.0\.1:\d+) shows ", line)[1]
        assert 'id="curves-title"' in read(url)[1]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 0 and not errors
