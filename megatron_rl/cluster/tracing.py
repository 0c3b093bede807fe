"""Traces of chosen steps over all processes of a run."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import ray
from ray.exceptions import RayError

from megatron_rl import spans
from megatron_rl.cluster.machines import Processes
from megatron_rl.cluster.process import Process
from megatron_rl.cluster.waiting import in_thread, settle
from megatron_rl.observe.trace import ProcessSpans, chrome_trace, offset_ns, with_other
from megatron_rl.spans import TimeSpan
from megatron_rl.types import Metrics

ANSWER_S = 30.0
"""A process that does not answer within this time is missing from a trace: a verifier may be in a long call."""
NUM_PROBES = 5
"""How often the clock of a node is asked for; the quickest answer counts."""

log = logging.getLogger(__name__)


class StepTraces:
    """A watcher of the sink that writes a trace of each chosen step."""

    def __init__(
        self, steps: Collection[int], folder: Path, processes: Processes, tell: Callable[[str], object]
    ) -> None:
        """
        Args:
            tell: shows a line.
        """
        self._steps, self._folder, self._processes, self._tell = steps, folder, processes, tell
        self._is_on = False
        self._writing: list[Future[None]] = []
        """The traces that are being collected and written, in threads: the next step does not wait for them."""

    def begin(self, step: int) -> None:
        if (step in self._steps) != self._is_on:
            self._is_on = not self._is_on
            self._ask(self._is_on)()

    def end(self, step: int) -> Metrics:
        if self._is_on:
            self._writing.append(in_thread(partial(self._write, step, self._ask(on=True)), "trace"))
        return {}

    def close(self) -> None:
        spans.keep(False)
        for writing in self._writing:
            writing.result()

    def _write(self, step: int, answers: Callable[[], Sequence[ProcessSpans]]) -> None:
        path = self._folder / f"step_{step:06}.json"
        found = answers()
        try:
            self._folder.mkdir(exist_ok=True)
            path.write_text(json.dumps(chrome_trace(found)), encoding="utf-8")
            self._tell(f"trace of step {step}: {path}")
        except OSError as error:  # no reason to end a run
            self._tell(f"the trace of step {step} could not be written: {error}")

    def _ask(self, on: bool) -> Callable[[], list[ProcessSpans]]:
        """Ask all processes for what they have kept since the last call. Returns what waits for their answers; the
        driver comes first.

        Args:
            on: whether they keep spans from now on.
        """
        processes = [process for group in self._processes().values() for process in group]
        calls = [process.actor.trace.remote(on) for process in processes]
        return partial(_answers, processes, calls, spans.keep(on), on)


def _answers(
    processes: Sequence[Process], calls: Sequence[ray.ObjectRef], own: Sequence[TimeSpan], has_clocks: bool
) -> list[ProcessSpans]:
    found = [ProcessSpans(f"driver ({os.getpid()} on {socket.gethostname()})", with_other(own))]
    offsets = clock_offsets(processes) if has_clocks else {}
    for process, answer in zip(processes, settle(calls, ANSWER_S), strict=True):
        if isinstance(answer, RayError):
            log.warning("%s is missing from a trace: %s", process, str(answer).partition("\n")[0])
        else:
            place, kept = answer
            if len(kept) == spans.CAPACITY:
                log.warning("%s kept the last %d spans alone", process, spans.CAPACITY)
            name = f"{process}, {place}" if place else str(process)
            found.append(ProcessSpans(name, kept, offsets.get(process.placed.node, 0)))
    return found


def clock_offsets(processes: Sequence[Process]) -> dict[str, int]:
    """What the clocks of other nodes than the driver's show more than its own, in nanoseconds, by Ray's ids of the
    nodes. A node that does not answer is left out."""
    here = ray.get_runtime_context().get_node_id()
    of_nodes = {process.placed.node: process for process in processes}
    found: dict[str, int] = {}
    for node, process in of_nodes.items():
        probes: list[tuple[int, int]] = []
        for _ in range(NUM_PROBES if node != here else 0):
            asked_ns = time.perf_counter_ns()
            [told] = settle([process.actor.clock.remote()], ANSWER_S)
            answered_ns = time.perf_counter_ns()
            if isinstance(told, RayError):
                break
            probes.append((answered_ns - asked_ns, offset_ns(asked_ns, told, answered_ns)))
        if probes:
            found[node] = min(probes)[1]
    return found
