"""Tasks of Harbor: what they may need, what their sandbox has, and what their tests say."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megatron_rl.environments.sandbox import Box, BoxError
from megatron_rl.environments.sandbox.box import container
from megatron_rl.environments.sandbox.harbor import HarborTask, copied, main, read_settings, reward_of

try:
    Box().close()
except BoxError as error:
    pytest.skip(f"this machine permits no sandbox: {error}", allow_module_level=True)

TEST = """#!/bin/bash
if grep -qx "Hello, world!" /app/hello.txt && [ "$WORD" = "two words" ] && python3 /tests/check.py; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0.25 > /logs/verifier/reward.txt
fi
"""
SETTINGS = """
version = "1.0"
[metadata]
difficulty = "easy"
[verifier]
timeout_sec = 60.0
env = { WORD = "two words" }
[agent]
timeout_sec = 60.0
[environment]
memory_mb = 512
"""
DOCKERFILE = """FROM python:3.12-slim
# where the agent works
WORKDIR /app
COPY data tools/
COPY greet.sh /notes.txt ./
COPY one.txt /app
CMD ["bash"]
"""


def task_at(folder: Path, dockerfile: str = DOCKERFILE) -> Path:
    files = {
        "instruction.md": "Write hello.txt.",
        "task.toml": SETTINGS,
        "environment/Dockerfile": dockerfile,
        "environment/greet.sh": "#!/bin/sh\necho Hello, world!\n",
        "environment/notes.txt": "notes",
        "environment/one.txt": "1",
        "environment/data/a/one.txt": "1",
        "tests/test.sh": TEST,
        "tests/check.py": "import sys; sys.exit(0)",
        "solution/solve.sh": "secret",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "environment/greet.sh").chmod(0o755)
    return folder


def test_a_task_is_played_and_its_own_test_decides(tmp_path):
    with HarborTask() as own:
        own.reset(str(task_at(tmp_path)))
        listed = own.run("pwd; find . -type f | sort; ls -A /tests /logs")
        files = ["./greet.sh", "./notes.txt", "./one.txt", "./tools/a/one.txt"]
        assert listed.splitlines()[:6] == ["/app", *files, "/logs:"]
        assert "secret" not in listed and "test.sh" not in listed
        assert own.get_reward() == 0.25
        assert own.run("./greet.sh > hello.txt; echo exit 1 > /tests/check.py; mkdir -p /tests/x /logs/verifier; "
                       "echo 5 > /logs/verifier/reward.json").endswith("[exit status 0]")  # fmt: skip
        assert own.get_reward() == 1.0, "what the model left in /tests and /logs is gone"


def test_a_copy_goes_into_a_folder_that_an_earlier_line_has_made(tmp_path):
    lines = "FROM a\nWORKDIR /app/src\nWORKDIR /app\nCOPY data tools\nCOPY one.txt tools\nCOPY one.txt tools/a\n"
    task_at(tmp_path, dockerfile=lines + "COPY notes.txt src\nCOPY notes.txt src/notes.txt\nCOPY notes.txt too\n")
    workdir, files = copied(tmp_path)
    assert workdir == "/app" and {path: source.name for path, source in files.items()} == {
        "tools/a/one.txt": "one.txt", "tools/one.txt": "one.txt", "src/notes.txt": "notes.txt", "too": "notes.txt",
    }  # fmt: skip


def test_a_test_without_a_reward_is_a_failure_that_says_why(tmp_path):
    with HarborTask() as own:
        own.reset(str(task_at(tmp_path)))
        (tmp_path / "tests/test.sh").write_text("echo no curl; exit 3")
        with pytest.raises(BoxError, match="wrote no reward and exit status 3: no curl"):
            own.get_reward()
        (tmp_path / "tests/test.sh").write_text("mkfifo /logs/verifier/reward.txt")
        with pytest.raises(BoxError, match="wrote no reward and exit status 0"):
            own.get_reward()
        (tmp_path / "tests/test.sh").write_text("printf '\\357\\273\\277.50' > /logs/verifier/reward.txt")
        assert own.get_reward() == 0.5, "also with a byte order mark"
        own._settings["verifier"]["timeout_sec"] = 0.5
        (tmp_path / "tests/test.sh").write_text("echo 1 > /logs/verifier/reward.txt; sleep 100")
        with pytest.raises(BoxError, match="tests/test.sh timed out"):
            own.get_reward()
        own._settings["verifier"]["timeout_sec"] = 60
        (tmp_path / "tests/test.sh").write_text("echo good > /logs/verifier/reward.txt")
        with pytest.raises(BoxError, match="reward.txt: "):
            own.get_reward()


@pytest.mark.parametrize(
    ("text", "reward"),
    [("1\n", 1.0), ("0.5", 0.5), ('{"reward": 0.5, "style": 1}', 0.5), ('{"only": 1}', 1.0), ("-2", -2.0),
     (".50", 0.5), ("1.", 1.0), ("+1", 1.0)],
)  # fmt: skip
def test_rewards(text, reward):
    assert reward_of(text, text.startswith("{")) == reward


@pytest.mark.parametrize("text", ["", "good", "true", "NaN", "Infinity", '{"a": 1, "b": 2}', "{}", "[1]", '"1"'])
@pytest.mark.parametrize("is_json", [True, False])
def test_what_is_no_reward_is_refused(text, is_json):
    with pytest.raises(ValueError):
        reward_of(text, is_json)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("task.toml", "version = ", "task.toml: "),
        ("task.toml", "[environment]\ngpus = 1\n[verifier]\ncollect = ['x']", "environment.gpus, verifier.collect"),
        ("environment/docker-compose.yaml", "x", "environment/docker-compose.yaml: not supported"),
        ("environment/Dockerfile", "FROM a\nRUN apt install \\\n gcc", "'RUN apt install   gcc' needs an image"),
        ("environment/Dockerfile", "FROM a\nCOPY --from=b x y", "'COPY --from=b x y' needs an image"),
        ("environment/Dockerfile", "FROM a\nCOPY nothing .", "copies nothing, which is not there"),
        ("environment/Dockerfile", "FROM a\nCOPY notes.txt /etc/notes", "outside of /app"),
        ("environment/Dockerfile", "FROM a\nCOPY notes.txt x\nWORKDIR /b", "'WORKDIR /b' needs an image"),
        ("environment/Dockerfile", "FROM a\nCOPY *.txt .", "copies *.txt, and patterns are not supported"),
        ("environment/Dockerfile", "FROM a\nCOPY ../instruction.md .", "instruction.md, which is outside of "),
        *(("environment/Dockerfile", f"FROM a\nWORKDIR {path}", "is a folder of every sandbox, in one or above one")
          for path in ("/", "/usr/src/app", "/bin/x", "/proc/x", "/logs", "/tests", "/app/../usr")),
        ("task.toml", "environment = 3", "environment = 3, but must be a table"),
        ("task.toml", "verifier.env = 3", "verifier.env = 3, but must be a table"),
        ("task.toml", "verifier.timeout_sec = 'ten'", "verifier.timeout_sec = 'ten', but must be a positive number"),
        ("task.toml", "verifier.timeout_sec = -1", "verifier.timeout_sec = -1, but"),
        ("task.toml", "verifier.timeout_sec = inf", "verifier.timeout_sec = inf, but"),
        ("task.toml", "environment.memory_mb = '2048'", "memory_mb = '2048', but must be a positive integer"),
        ("task.toml", "environment.memory_mb = -5", "environment.memory_mb = -5, but"),
        ("task.toml", "environment.memory_mb = true", "environment.memory_mb = True, but"),
        ("task.toml", "environment.memory = '2G'", "environment.memory (write memory_mb): not supported"),
        ("task.toml", "environment.storage = '2G'", "environment.storage (write storage_mb): not supported"),
        ("task.toml", "verifier.env = {A = '${HOME}'}", "verifier.env with ${...}: not supported"),
        ("task.toml", b"\xff", "task.toml: 'utf-8' codec can't decode"),
        ("environment/Dockerfile", b"\xff", "Dockerfile: 'utf-8' codec can't decode"),
    ],
    ids=lambda one: str(one)[:20],
)  # fmt: skip
def test_a_task_that_needs_more_is_refused_by_name(tmp_path, name, text, said):
    task_at(tmp_path)
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError) as told:
        read_settings(tmp_path)
        copied(tmp_path)
    assert said in str(told.value)


def test_rows_of_the_tasks_that_can_run(tmp_path, capsys):
    task_at(tmp_path / "tasks/b")
    task_at(tmp_path / "tasks/a", dockerfile="FROM a\nRUN make")
    image = task_at(tmp_path / "tasks/c", dockerfile="FROM a\nRUN make")
    (image / "task.toml").write_text('[environment]\ndocker_image = "a:1"')
    (tmp_path / "tasks/a/tests/test.sh").unlink()
    (task_at(tmp_path / "tasks/d") / "instruction.md").write_bytes(b"\xff")
    assert main([str(tmp_path / "tasks"), str(tmp_path / "new/folder/rows.jsonl")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "new/folder/rows.jsonl").read_text().splitlines()]
    assert [Path(row["task"]).name for row in rows] == ["b", "c"]
    assert rows[0]["messages"] == [{"role": "user", "content": "Write hello.txt."}]
    assert "left out: " in (told := capsys.readouterr().err) and "tests/test.sh is missing" in told
    assert "d/instruction.md: 'utf-8' codec can't decode" in told
    assert [path.name for path in (tmp_path / "new/folder").iterdir()] == ["rows.jsonl"]


def test_a_machine_that_runs_no_image_is_told_what_it_needs(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BoxError, match="the image a:1 needs one of podman, docker, apptainer, and none is installed"):
        container("a:1", HarborTask.limits, "/app")


@pytest.mark.deep
@pytest.mark.skipif("TEST_IMAGE" not in os.environ, reason="TEST_IMAGE names no image with python3, bash and find")
def test_a_task_with_an_image_is_played_in_a_container(tmp_path):
    task_at(tmp_path)
    (tmp_path / "task.toml").write_text(SETTINGS + f'docker_image = "{os.environ["TEST_IMAGE"]}"\nworkdir = "/tmp"')
    (tmp_path / "tests/test.sh").write_text(TEST.replace("/app/", "/tmp/"))
    with HarborTask() as own:
        own.reset(str(tmp_path))
        assert own.run("pwd").startswith("/tmp\n") and own.get_reward() == 0.25
        own.write_file("hello.txt", "Hello, world!\n")
        hostile = "(sleep 100 &) ; python3 -c 'import socket; socket.create_connection((\"1.1.1.1\", 80), 1)'"
        assert "unreachable" in own.run(hostile)
        assert "timed out" in own._box.run("python3 -c 'while True: pass'", 0.5).end
        assert own.run("ls /proc | grep -c '^[0-9]'").splitlines()[0] in ("3", "4", "5")
        assert own.get_reward() == 1.0
