"""What watches the steps of a run: its machines always, traces and profiles if the configuration asks for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from megatron_rl.cluster.machines import Machines
from megatron_rl.cluster.process import Process
from megatron_rl.cluster.profiling import StepProfiles
from megatron_rl.cluster.tracing import StepTraces
from megatron_rl.config.observe import StepProfile, StepTrace
from megatron_rl.config.schema import BaseConfig
from megatron_rl.observe.records import TRACES
from megatron_rl.observe.sink import RunSink, Watcher


class ProcessGroup(Protocol):
    """The processes of a role."""

    @property
    def role(self) -> str: ...

    @property
    def processes(self) -> Sequence[Process]: ...


def observe_run(config: BaseConfig, sink: RunSink, groups: Sequence[ProcessGroup]) -> None:
    """Let the sink watch all processes of a run from now on."""

    def present() -> Mapping[str, Sequence[Process]]:
        return {group.role: group.processes for group in groups}

    watchers: list[Watcher] = [Machines(present, config.run_folder)]
    for section in config.observe:
        if isinstance(section, StepTrace):
            sink.tell(f"trace: steps {', '.join(map(str, section.steps))}, into {config.run_folder / 'traces'}")
            watchers.append(StepTraces(section.steps, config.run_folder / TRACES, present, sink.tell))
        elif isinstance(section, StepProfile):
            folder = config.run_folder / "profiles"
            sink.tell(f"profile: {section.tool}, steps {', '.join(map(str, section.steps))}, into {folder}")
            watchers.append(StepProfiles(section, folder, lambda: present()["trainer"], sink.tell))
    sink.watch(watchers)
