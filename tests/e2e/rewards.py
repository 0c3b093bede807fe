"""A reward that a random model can earn, with a gate that holds a run between two steps, one that tells a test which
step comes next, and two that hang."""

from __future__ import annotations

import json
import time
from pathlib import Path
from urllib.request import urlopen

HERE = Path(__file__).parent

calls = 0


def share_of_digits(prompts, completions, completion_ids, **columns) -> list[float]:
    """Share of digits among an answer's characters. While the file `gate` lies beside this one, every call but
    the process's first one waits, and leaves the file `waiting`: the run stands until it is killed, or the gate is
    gone."""
    global calls
    calls += 1
    while calls > 1 and (HERE / "gate").exists():
        (HERE / "waiting").touch()
        time.sleep(0.05)
    texts = [answer if isinstance(answer, str) else answer[0]["content"] for answer in completions]
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in texts]


def hangs(prompts, completions, completion_ids, **columns) -> list[float]:
    """Does not return in the step of the second call, if there is a file `hang`, which it takes away."""
    if calls > 1 and (HERE / "hang").exists():
        (HERE / "hang").unlink()
        while True:
            time.sleep(0.05)
    return [0.0] * len(completions)


def tells_the_step(prompts, completions, completion_ids, trainer_state, listener, **columns) -> list[float]:
    """Share of digits. Before it returns, a server learns the number of the step that comes next."""
    urlopen(listener, json.dumps({"step": trainer_state.global_step + 1}).encode()).close()
    return share_of_digits(prompts, completions, completion_ids)


def stumbles(solution_str) -> float:
    """Does not return, once, if there is a file `hang`, which it takes away."""
    if (HERE / "hang").exists():
        (HERE / "hang").unlink()
        while True:
            time.sleep(0.05)
    return 1.0
