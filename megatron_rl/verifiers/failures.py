"""The file `logs/rewards.log`, with the answers that a reward could not score, one JSON object in each line.

Invariant (tests/unit/verifiers): the file has the first failures of each reward, and the number of the later ones.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.processes import open_text
from megatron_rl.types import Prompt, Verdict

NUM_KEPT = 100
"""The number of failures of each reward that are written in full. Later ones are only counted, in one line for each
step."""


class FailureLog:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_written: Counter[str] = Counter()
        self._lock = threading.Lock()
        """Several verifiers may write at the same time."""

    def write(self, step: int, reward: str, prompts: Sequence[Prompt], verdicts: Sequence[Verdict]) -> None:
        """Write the failed verdicts of one reward.

        Args:
            prompts: the prompt of each verdict.
        """
        failed = [(p, v) for p, v in zip(prompts, verdicts, strict=True) if v.failed]
        if not failed:
            return
        with self._lock:
            room = max(0, NUM_KEPT - self._num_written[reward])
            lines = [
                {"step": step, "reward": reward, "row": prompt.uid, "error": verdict.reason}
                for prompt, verdict in failed[:room]
            ]
            if len(failed) > room:
                lines.append({"step": step, "reward": reward, "more_failures": len(failed) - room})
            self._num_written[reward] += len(failed[:room])
            with open_text(self._path, "a") as file:
                file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
