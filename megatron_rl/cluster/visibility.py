"""Asks every node of a run, before any process starts there, whether it sees what the processes will need.

A path that one node does not see would otherwise be an error of a single process, minutes later. All nodes are asked
at the same time.

Invariants (tests/nodes): the error names every node that lacks something, by host name and address, what it lacks and
what to do; a node that does not answer is named too; no file is left behind.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megatron_rl.cluster.network import Interface, find_interface
from megatron_rl.cluster.placement import Placement
from megatron_rl.cluster.waiting import settle
from megatron_rl.config.rewards import RewardModelReward
from megatron_rl.config.schema import BaseConfig, GrpoRunConfig
from megatron_rl.config.section import import_paths

ANSWER_S = 100.0
"""The longest time that the nodes may take to answer. Python's first start on a shared file system takes many
seconds."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NodeNeeds:
    """What every node must see. Paths are absolute."""

    models: tuple[Path, ...]
    """The model's folder, which trainers, engines and the verifier read, the folder of its weights if it differs, and
    those of reward models."""
    run_folder: Path
    """The run's folder, into which all processes write."""
    mark: str
    """The name of a file in the run's folder. Its content is its name: a node that reads it has the same folder."""
    modules: tuple[str, ...]
    """The top-level modules of the functions that the configuration names."""
    files: tuple[Path, ...]
    """The files with reward functions (`folder/file.py:name`), and the catalogue of `rollout.beams`."""


def check_nodes(config: BaseConfig, placement: Placement) -> None:
    """Check that every node on which a process will run sees the files of the run, whose paths must be absolute.

    The rows of the data are not asked for: the driver alone reads them.

    Raises:
        ValueError: a node does not see something, or does not answer. The message has one line for each fault.
    """
    functions = import_paths(config)
    files = {str(path.file) for path in functions if path.file}
    modules = {path.module.partition(".")[0] for path in functions if not path.file}
    if isinstance(config, GrpoRunConfig) and config.rollout.beams is not None:
        files.add(str(config.rollout.beams.catalogue))
    of_rewards = config.rewards if isinstance(config, GrpoRunConfig) else ()
    scoring = [one.path for one in of_rewards if isinstance(one, RewardModelReward)]
    models = tuple(path for path in (config.model.path, config.model.weights, *scoring) if path is not None)
    mark_name = f".seen_by_nodes_{secrets.token_hex(8)}"
    needs = NodeNeeds(models, config.run_folder, mark_name, tuple(sorted(modules)), tuple(map(Path, sorted(files))))
    mark = needs.run_folder / needs.mark
    mark.write_text(needs.mark)
    try:
        faults = _ask(needs, _nodes_of(placement), min(ANSWER_S, config.cluster.start_timeout_s))
    finally:
        mark.unlink()
    if faults:
        raise ValueError("\n".join(faults))


def _nodes_of(placement: Placement) -> list[dict[str, Any]]:
    """The entries of `ray.nodes()` on whose nodes a process will run."""
    used = {rank.node.id for groups in placement.groups.values() for group in groups for rank in group}
    return [node for node in ray.nodes() if node["NodeID"] in used]


def _ask(needs: NodeNeeds, nodes: Sequence[dict[str, Any]], timeout_s: float) -> list[str]:
    """The faults of the nodes."""
    calls = []
    for node in nodes:
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        calls.append(ray.remote(look).options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(needs))
    faults = []
    for node, answer in zip(nodes, settle(calls, timeout_s), strict=True):
        name = f"node {node_name(node)}"
        if isinstance(answer, GetTimeoutError):
            faults.append(
                f"{name} has not answered in {timeout_s:g} s whether it sees {needs.models[0]} and {needs.run_folder}; "
                "does a file system hang there?"
            )
        elif isinstance(answer, RayTaskError):
            faults.append(
                f"{name} cannot run the code of this run ({answer.cause}); give it the same Python environment "
                f"({sys.prefix}) and working folder ({Path.cwd()})"
            )
        elif isinstance(answer, Exception):
            faults.append(f"{name} could not be asked what it sees: {answer}")
        else:
            missing, interface = answer
            faults += [f"{name} {fault}" for fault in missing]
            log.info("%s talks to other nodes through %s", name, interface)
    return faults


def node_name(node: dict[str, Any]) -> str:
    """The host name and the address of one of `ray.nodes()`; host names alone need not differ."""
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"


def look(needs: NodeNeeds) -> tuple[list[str], Interface | None]:
    """What the node that runs this lacks, in phrases whose subject is the node; and the interface of its processes."""
    faults = []
    for model in needs.models:
        if not any((model / name).is_file() for name in ("config.json", "manifest.json")):
            faults.append(f"does not see {model}; put it on a file system that all nodes share, or copy it there")
    try:
        if (needs.run_folder / needs.mark).read_text() != needs.mark:
            raise FileNotFoundError
        with tempfile.TemporaryFile(dir=needs.run_folder):
            pass
    except FileNotFoundError:
        faults.append(
            f"does not see the driver's {needs.run_folder}; put run.folder on a file system that all nodes share"
        )
    except OSError as error:
        faults.append(f"cannot write into {needs.run_folder} ({error.strerror}); let the user of its Ray write there")
    faults += [
        f"cannot import {module}, which has a function of the run; put its folder, which must be on PYTHONPATH, on a "
        "file system that all nodes share"
        for module in needs.modules
        if find_spec(module) is None
    ]
    faults += [
        f"does not see {file}, which the run needs; put it on a file system that all nodes share"
        for file in needs.files
        if not file.is_file()
    ]
    try:
        return faults, find_interface(os.environ)
    except ValueError as error:
        return [*faults, f"cannot be reached: {error}"], None
