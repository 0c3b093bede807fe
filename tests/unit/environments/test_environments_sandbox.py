"""Sandboxes of answers: what programs may do, and what hostile ones cannot."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from patience import deadline

from megatron_rl.config.environment import ToolsEnvironment
from megatron_rl.environments import EnvironmentFault, Sessions
from megatron_rl.environments.sandbox import Box, BoxError, BoxLimits, Ran
from megatron_rl.environments.sandbox.spares import Spares
from megatron_rl.environments.sandbox.workspace import Workspace

try:
    Box().close()
except BoxError as error:
    pytest.skip(f"this machine permits no sandbox: {error}", allow_module_level=True)

LIMITS = BoxLimits(timeout_s=deadline(20), grace_s=0.2, memory_bytes=256 << 20, files_bytes=8 << 20, num_processes=24)


@pytest.fixture(scope="module")
def box() -> Iterator[Box]:
    with Box({"main.py": "print(6 * 7)", "folder/text": b"\xff\n"}, LIMITS) as made:
        yield made


def python(text: str) -> str:
    return f"python3 -c '{text}'"


def test_a_tree_has_its_files_and_its_own(box):
    assert box.run("python3 main.py; pwd; id -u") == Ran("42\n/tree\n1000\n", 0)
    assert box.read("folder/text") == b"\xff\n"
    box.write("new/deep", "text")
    assert box.run("cat new/deep; exit 3") == Ran("text", 3)
    with pytest.raises(OSError, match="No such file or directory: missing"):
        box.read("missing")
    assert box.read("main.py", 5) == b"print"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda box: box.run("echo a\0b"), "embedded null byte: the command"),
        (lambda box: box.run("echo \ud83d"), "surrogates not allowed: the command"),
        (lambda box: box.run("x" * 300000), "Argument list too long: the command"),
        (lambda box: box.read("\0"), "embedded null byte: "),
        (lambda box: box.write("a/\ud800", "x"), r"surrogates not allowed: a/\\ud800"),
        (lambda box: box.read("\udc80"), r"No such file or directory: \\udc80"),
        (lambda box: box.read("main.py", 1 << 80), "index-sized integer: main.py"),
        (lambda box: box.read("."), "Is a directory: ."),
        (lambda box: box.read("/dev/stdin"), "not a file: /dev/stdin"),
        (lambda box: box.read("/dev/zero"), "not a file: /dev/zero"),
        (lambda box: box.run("mkfifo pipe") and box.read("pipe"), "not a file: pipe"),
        *((lambda box, path=path: box.write(path, "x"), f"not a file: {path}") for path in
          ("", ".", "..", "/", "//", "/tmp", "//tmp/", "../tmp", "/tmp/x/..", "/tree", "new/..", "/logs", "/tests")),
    ],
)  # fmt: skip
def test_what_the_first_process_cannot_do_is_an_error_of_this_call_alone(box, call, said):
    box.write("/tmp/kept", "x")
    with pytest.raises(OSError, match=said):
        call(box)
    assert box.run("cat main.py /tmp/kept; rm -f pipe") == Ran("print(6 * 7)x", 0), "it goes on, and lost nothing"


def test_a_file_takes_the_place_of_folders_of_any_depth(box):
    box.run(python('import os\nfor _ in range(3000): os.mkdir("d"); os.chdir("d")') + "; chmod 000 d/d d")
    box.write("d", "text")
    assert box.read("d") == b"text"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("exit 124", Ran("", 124)),
        ("exit 137", Ran("", 137)),
        ("kill -9 $$", Ran("", -9)),
        ("sleep 100", Ran("", None, "timed out")),
        ("trap '' TERM; while true; do sleep 1; done", Ran("", None, "timed out")),
        ("trap 'echo saved; exit 0' TERM; sleep 100 & wait", Ran("saved\n", None, "timed out")),
    ],
)
def test_a_limit_is_told_apart_from_the_program_s_own_end(box, command, expected):
    assert box.run(command, 0.5) == expected


SECRET = Path(__file__).resolve()
HOSTILE = {
    # processes
    "a fork bomb": python("import os\nwhile 1:\n try: os.fork()\n except OSError: pass"),
    "a shell's fork bomb": "f() { f | f & }; f",
    "a daemon": python("import os, time\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0: time.sleep(1000)"),
    "a process in the background": "sleep 1000 & nohup sleep 1000 >/dev/null 2>&1 & disown 2>/dev/null; true",
    "a signal to everybody": "kill -9 -1",
    "a signal to the first process": "kill -9 1; kill -TERM 1; kill -STOP 1; sleep 0.1",
    "a signal to its parent": "kill -9 $PPID; kill -INT $PPID; kill -HUP $PPID; kill -PIPE $PPID; kill -USR1 $PPID",
    "a stopped process": "kill -STOP $$",
    "many threads": python(
        "import threading, time\nfor _ in range(500): threading.Thread(target=time.sleep, args=(9,)).start()"
    ),
    # memory and files
    "a large list": python("x = [0] * (1 << 30)"),
    "memory bit by bit": python("x = []\nwhile 1: x.append(bytearray(1 << 20))"),
    "memory of many processes": "for i in $(seq 20); do "
    + python("x = bytearray(60 << 20)\nimport time\ntime.sleep(9)")
    + " & done; wait",
    "a full disk": "dd if=/dev/zero of=big bs=1M count=100 2>/dev/null; rm -f big",
    "a full /tmp": "dd if=/dev/zero of=/tmp/big bs=1M count=100 2>/dev/null; rm -f /tmp/big",
    "shared memory": "dd if=/dev/zero of=/dev/shm/big bs=1M count=100 2>/dev/null; rm -f /dev/shm/big",
    "a large file with holes": "truncate -s 1T hole; rm -f hole",
    "many files": python(
        'import os\ntry:\n for i in range(10**7): open(str(i), "w")\nexcept OSError: os.system("rm -rf *")'
    ),
    "deep folders": python(
        'import os\nfor _ in range(3000):\n try: os.mkdir("d"); os.chdir("d")\n except OSError: break'
    ),
    "a file in the root": "echo x > /x; echo x > /usr/x; echo x > /etc/x; mkdir /new; echo x > /dev/x",
    "a symbolic link out": "ln -s / out; cat out/home/*/.bashrc out/etc/shadow out/proc/1/environ >/dev/null; rm out",
    "a device": "mknod disk b 8 0; cat /dev/sda /dev/mem /dev/kmsg",
    "a fifo that nobody writes": "mkfifo pipe; cat pipe",
    # output
    "endless output": "yes",
    "a long line": python('print("x" * (1 << 26))'),
    "bytes that are no text": "head -c 100000 /dev/urandom",
    "control characters": "printf '\\033[2J\\007\\000'",
    "a line for the owner": 'echo \'{"output": "", "status": 0}\'; echo \'{}\' > /proc/1/fd/1',
    "output of the first process": "cat /proc/1/fd/0; echo x > /proc/1/fd/2",
    "a process that keeps the output": "(trap '' TERM HUP INT; sleep 1000) & disown; exit 0",
    "a shell that starts others": 'while :; do sh -c "sleep 1000 & sleep 1000 &"; done',
    # network
    "a connection": python('import socket\nsocket.create_connection(("1.1.1.1", 80), 1)'),
    "a name": python('import socket\nsocket.gethostbyname("example.org")'),
    "an abstract socket": python(
        'import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect(chr(0) + "/tmp/.X11-unix/X0")'
    ),
    "a raw socket": python("import socket\nsocket.socket(socket.AF_INET, socket.SOCK_RAW, 1)"),
    "a netlink socket": python("import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).bind((0, 0))"),
    # rights
    "another user": "su -c id; sudo id; setpriv --reuid 0 id",
    "a new namespace": "unshare -Ur id; unshare -m true",
    "a mount": "mount -t tmpfs none /tmp; mount -o remount,rw /; umount /proc",
    "a changed root": "chroot / id; pivot_root . .",
    "a new limit": "ulimit -v unlimited; ulimit -u 100000; " + python("x = bytearray(1 << 30)"),
    "another priority": "nice -n -20 true; renice -n -20 1",
    "a kernel setting": "echo 1 > /proc/sys/kernel/panic; echo c > /proc/sysrq-trigger; sysctl -w vm.drop_caches=3",
    "a module": "insmod x.ko; modprobe loop",
    "a trace of the first process": python("import ctypes\nctypes.CDLL(None).ptrace(16, 1, 0, 0)"),
    "memory of the first process": "cat /proc/1/mem /proc/1/maps | head -c 10; gdb -p 1",
    "another clock": "date -s 2000-01-01; hwclock -w",
    "a reboot": "reboot -f; " + python("import ctypes\nctypes.CDLL(None).reboot(0x1234567)"),
    "another name of the machine": "hostname evil",
    "calls of the kernel that others have escaped by": python(
        "import ctypes\nfor n in (248, 298, 304, 321, 323, 425, 435): ctypes.CDLL(None).syscall(n, 0, 0, 0, 0, 0)"
    ),
    "shared memory of System V": python(
        "import ctypes\nlibc = ctypes.CDLL(None)\nfor i in range(5000): libc.shmget(0, 1 << 28, 0o1600)"
    ),
    "message queues": python(
        'import ctypes\nlibc = ctypes.CDLL(None)\nfor i in range(5000): libc.mq_open(b"/q%d" % i, 66, 0o600, None)'
    ),
    "a dump of memory": "ulimit -c unlimited; kill -SEGV $$",
    # the tree
    "files in the folders of the test": "mkdir -p /tests/x /logs/x; dd if=/dev/zero of=/tests/big bs=1M count=100; "
    "dd if=/dev/zero of=/logs/big bs=1M count=100; rm -rf /tests/* /logs/*",
    "no tree": "rm -rf /tree /tree/* /tmp /logs /tests",
    "no rights on the tree": "chmod 000 /tree; ls /tree",
    "a name with a line feed": "touch \"$(printf 'a\\nb')\"; ls; rm -f a*",
    # what belongs to others
    "the machine's files": f"cat {SECRET} /etc/passwd /etc/shadow ~root/.ssh/id_rsa; ls ~root /home /var /srv /mnt",
    "the machine's processes": "ls /proc | grep -c '^[0-9]'",
    "the machine's environment": "env; cat /proc/1/environ",
    "python of the machine": python("import torch"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_is_contained(box, name):
    start = time.monotonic()
    ran = box.run(HOSTILE[name], 1.0)
    assert time.monotonic() - start < deadline(10)
    assert len(ran.output) <= LIMITS.output_bytes and "def test_a_hostile_program" not in ran.output
    box.run("chmod 755 /tree; rm -rf /tree/* /tmp/* 2>/dev/null")
    after = box.run("echo ok; ls -A /tree /x /new /usr/x 2>/dev/null; ls /proc | grep -c '^[0-9]'")
    assert after.output.splitlines()[0] == "ok" and int(after.output.splitlines()[-1]) <= 5
    assert "/x" not in after.output and not Path("/tmp/big").exists()


def test_a_flood_is_cut_and_counted(box):
    ran = box.run("head -c 1000000 /dev/zero | tr '\\0' x")
    assert (len(ran.output), ran.num_more, ran.status) == (LIMITS.output_bytes, 1000000 - LIMITS.output_bytes, 0)


SEGMENTS = """import ctypes, time
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
for _ in range(6):
    at = libc.shmat(libc.shmget(0, 50 << 20, 0o1600), None, 0)
    ctypes.memset(at, 1, 50 << 20)
    libc.shmdt(ctypes.c_void_p(at))
time.sleep(30)"""
HIDDEN = """import ctypes, os, threading, time
def hold():
    x = bytearray(140 << 20)
    time.sleep(30)
os.fork()
threading.Thread(target=hold).start()
exit_thread = {"x86_64": 60, "aarch64": 93}[os.uname().machine]
ctypes.CDLL(None).syscall(exit_thread, 0)"""
SHARED = """import os, time
x = bytearray(90 << 20)
for _ in range(6):
    if os.fork() == 0: break
time.sleep(0.3)"""


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("for i in 1 2 3 4 5 6; do python3 -c 'x = bytearray(50 << 20); import time; time.sleep(30)' & done; wait",
         "out of memory"),
        (python(SEGMENTS), "out of memory"),
        (python(HIDDEN), "out of memory"),
        (python(SHARED), ""),
        ("for i in $(seq 30); do sleep 30 & done; wait", "too many processes"),
    ],
    ids=["many", "segments", "without the first thread", "shared", "processes"],
)  # fmt: skip
def test_memory_and_number_of_all_processes_are_limited(command, why):
    with Box({}, BoxLimits(memory_bytes=256 << 20, num_processes=24, timeout_s=deadline(20))) as own:
        assert own.run(command).why == why
        assert own.run("tail -n +2 /proc/sysvipc/shm") == Ran("", 0)


def test_memory_that_no_count_shows_is_refused(box):
    said = box.run(python('import os\nos.memfd_create("x")') + "; unshare -Urm mount -t tmpfs none /tmp").output
    assert "Function not implemented" in said and "unshare failed: Operation not permitted" in said
    assert box.run(python("import threading\nthreading.Thread(target=print, args=[1]).start()")).output == "1\n"


def processes_of(name: str) -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if name in (folder / "cmdline").read_text():
                found.append(folder.name)
        except OSError:
            continue
    return found


def gone(name: str) -> bool:
    end = time.monotonic() + deadline(20)
    while processes_of(name):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def test_nothing_is_left_after_the_owner_was_killed():
    """Also in the middle of a command."""
    text = "from megatron_rl.environments.sandbox import Box; box = Box(); print('made', flush=True); "
    text += "box.run('sleep 98765')"
    owner = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, env={**os.environ})
    assert owner.stdout.readline() == b"made\n"
    end = time.monotonic() + deadline(20)
    while not processes_of("98765"):
        assert time.monotonic() < end, "the command has not begun"
        time.sleep(0.02)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert gone("98765")


def test_a_sandbox_that_is_lost_is_no_verdict():
    with Box() as own:
        pid = own._process.pid
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
        with pytest.raises(BoxError, match="the sandbox has ended"):
            for _ in range(3):
                own.run("true")
        with pytest.raises(BoxError, match="the sandbox has ended: it said nothing"):
            own.read("main.py")


def test_a_machine_without_bubblewrap_is_told_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BoxError, match="install the package bubblewrap"):
        Box()


def test_a_kernel_without_user_namespaces_is_told_what_to_allow():
    text = "from megatron_rl.environments.sandbox import Box; Box()"
    # A user without a name in its namespace may make no other one.
    ran = subprocess.run(["unshare", "-U", sys.executable, "-c", text], stderr=subprocess.PIPE, text=True)
    assert "BoxError: the sandbox has ended: bwrap: No permissions to create new namespace" in ran.stderr
    assert "; allow unprivileged user namespaces (sysctl user.max_user_namespaces, " in ran.stderr


ROW = {
    "files": {"add.py": "def add(a, b):\n    return a - b\n"},
    "test": "python3 check.py",
    "test_files": {"check.py": "from add import add\nassert add(2, 2) == 4\n"},
}


@pytest.mark.parametrize(
    ("turns", "reward"),
    [
        ([("edit_file", {"path": "add.py", "old": "a - b", "new": "a + b"})], 1.0),
        ([("run", {"command": "sed -i s/-/+/ add.py && ls"})], 1.0),
        ([("write_file", {"path": "add.py", "text": "def add(a, b):\n    return 4\n"})], 1.0),
        ([("write_file", {"path": "check.py", "text": "pass"})], 0.0),
        ([("run", {"command": "echo exit > check.py; chmod 444 check.py; kill -9 -1"})], 0.0),
        ([("run", {"command": "mkdir check.py; touch check.py/x; chmod 000 check.py"})], 0.0),
        ([("run", {"command": "ln -s /proc/1/fd/1 check.py"})], 0.0),
        ([("run", {"command": "rm -rf add.py; chmod 000 ."})], 0.0),
        ([], 0.0),
    ],
)
def test_a_repaired_program_passes_its_test(turns, reward):
    async def play() -> tuple[list[str], float | None]:
        path = "megatron_rl.environments.sandbox.workspace:Workspace"
        session = Sessions(ToolsEnvironment(objects=path), "").new()
        await session.begin(ROW)
        try:
            said = []
            for name, arguments in turns:
                call = json.dumps({"name": name, "arguments": arguments})
                reaction = await session.react(f"<tool_call>{call}</tool_call>")
                said += [message["content"] for message in reaction.messages]
            return said, (await session.closing()).reward
        finally:
            await session.end()

    said, given = asyncio.run(play())
    assert given == reward and not any(text.startswith("Error") for text in said)


def test_the_tools_of_a_workspace_tell_what_they_did():
    with Workspace() as own:
        own.reset(**ROW)
        assert own.read_file("add.py") == "1 def add(a, b):\n2     return a - b"
        assert own.run("ls; false") == "add.py\n\n[exit status 1]", "the test is not there"
        with pytest.raises(ValueError, match="the text is 2 times in add.py"):
            own.edit_file("add.py", " b", "c")
        own.write_file("long", "x\n" * 1000)
        assert own.read_file("long", 500).endswith("\n899 x\n[101 more lines]")
        with pytest.raises(ValueError, match="first_line is 0, but must be at least 1"):
            own.read_file("long", 0)
        own.run("yes 1234567 | head -n 200000 > long")
        assert own.read_file("long", 199999) == "199999 1234567\n200000 1234567"
        assert own.read_file("long").endswith("\n[199600 more lines]")
        own.run("head -c 17000000 /dev/zero > large; echo end >> large")
        for call in (lambda: own.edit_file("large", "end", "no end"), lambda: own.read_file("large")):
            with pytest.raises(ValueError, match="large has more than 16 MiB"):
                call()
        assert own.run("tail -c 4 large").startswith("end\n")


def test_the_tools_write_in_the_place_of_files_alone():
    with Workspace() as own:
        own.reset(**ROW)
        own.run("mkdir -p folder/in && touch folder/in/kept && ln -s folder link")
        for path, said in (("folder", "Is a directory: folder"), ("add.py/x", "File exists: add.py/x")):
            with pytest.raises(OSError, match=said):
                own.write_file(path, "text")
        own.write_file("link/new/text", "one")
        own.run("echo 'echo one' > tool; chmod 755 tool")
        own.edit_file("tool", "one", "two")
        assert own.run("cat folder/new/text; ls folder/in; ./tool; cat add.py").splitlines()[:4] == [
            *("onekept", "two", "def add(a, b):", "    return a - b")
        ]


def test_a_setup_that_fails_is_a_fault(spares):
    async def begin() -> None:
        path = "megatron_rl.environments.sandbox.workspace:Workspace"
        session = Sessions(ToolsEnvironment(objects=path), "").new()
        try:
            await session.begin({**ROW, "setup": "echo no compiler; exit 2"})
        finally:
            await session.end()

    def sandboxes() -> int:  # of this process: others run their own
        return sum(one.name() == "bwrap" for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE)

    before = sandboxes()
    with pytest.raises(EnvironmentFault, match="the row's setup 'echo no compiler; exit 2' exit status 2: no compiler"):
        asyncio.run(begin())
    spares.close()
    assert sandboxes() == before, "its sandbox was closed"


def waiting(spares: Spares, number: int) -> list[Box]:
    """The sandboxes that were begun ahead, once there are as many as this number."""
    end = time.monotonic() + deadline(20)
    while len(spares._waiting) < number:
        assert time.monotonic() < end, "no sandbox has begun"
        time.sleep(0.01)
    return list(spares._waiting)


def test_an_answer_gets_a_sandbox_that_was_begun_ahead_and_that_nobody_had(spares):
    with Workspace() as first:
        first.reset(**ROW)
        first.run("echo left > left; echo left > /tmp/left; touch /dev/shm/left")
        used = first._box
    (ready,) = waiting(spares, 1)
    with Workspace() as second, Workspace() as third:
        second.reset(**ROW)
        third.reset(**ROW)
        assert second._box is ready is not used and third._box not in (ready, used)
        assert second.run("ls /tree /tmp /dev/shm") == "/dev/shm:\n\n/tmp:\n\n/tree:\nadd.py\n\n[exit status 0]"
        assert second.get_reward() == third.get_reward() == 0.0
    assert used._process.poll() is not None and not used.is_alive


def test_sandboxes_that_wait_are_bounded_and_of_the_kind_that_is_asked_for(spares):
    large = BoxLimits(memory_bytes=2 << 30)
    for _ in range(3):
        spares.replace(Box())
    first, _ = waiting(spares, 2)
    with spares.take(large, "/app") as own:
        assert own.limits == large and len(spares._waiting) == 2, "it was begun for this answer"
    spares.replace(Box({}, large))
    end = time.monotonic() + deadline(20)
    while first.is_alive:
        assert time.monotonic() < end, "the oldest one makes room"
        time.sleep(0.01)
    assert [box.limits for box in spares._waiting] == [BoxLimits(), large]


def test_a_sandbox_that_has_ended_while_it_waited_is_not_given(spares):
    spares.replace(Box())
    (ready,) = waiting(spares, 1)
    ready._process.kill()
    ready._process.wait()
    with spares.take(BoxLimits()) as other:
        assert other is not ready and other.run("echo ok").output == "ok\n"


def test_a_subclass_may_have_an_image(monkeypatch):
    class InAnImage(Workspace):
        image = "python:3.12"

    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BoxError, match="the image python:3.12 needs one of podman, docker, apptainer"):
        InAnImage().reset(**ROW)
