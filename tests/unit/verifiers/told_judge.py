"""A judge that does to its process what an item says. Each fork server imports this module, so it imports little."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from megatron_rl.types import Verdict


def judge(item: tuple) -> Verdict:
    """Do what the item says, in a worker."""
    match item:
        case "score", value:
            return Verdict(value)
        case "file", path, value:
            with open(path, "a") as file:
                file.write(f"{value} ")
            return Verdict(value)
        case "wait for", path:
            while not os.path.exists(path):
                time.sleep(0.001)
            return Verdict(1.0)
        case "rest", seconds:
            time.sleep(seconds)
            return Verdict(1.0)
        case "raise", text:
            raise LookupError(text)
        case "exit", status:
            os._exit(status)
        case "sys.exit", status:
            sys.exit(status)
        case "signal", number:
            os.kill(os.getpid(), number)
            return Verdict(1.0)
        case ("null pointer",):
            ctypes.string_at(0)
        case ("sleep",):
            time.sleep(1e6)
        case ("loop",):
            while True:
                pass
        case ("loop in C",):  # holds the GIL
            re.fullmatch("(a|a)*b", "a" * 100)
        case "descendants", path, then:
            # One in the group, one in a session of its own, and one whose parent has ended.
            ids = [subprocess.Popen(["sleep", "1000"], start_new_session=new).pid for new in (False, True)]
            ids += [int(subprocess.check_output(["sh", "-c", "setsid sleep 1000 > /dev/null & echo $!"]))]
            Path(path).write_text(" ".join(map(str, ids)))
            return judge(then)
        case ("threads",):
            return Verdict(float(os.environ["OMP_NUM_THREADS"]))
        case ("worker",):
            return Verdict(float(os.getpid()))
        case ("fork server",):
            return Verdict(float(os.getppid()))
    return "no verdict"  # type: ignore[return-value]


def scaled(item: float, factor: float) -> Verdict:
    return Verdict(factor * item)
