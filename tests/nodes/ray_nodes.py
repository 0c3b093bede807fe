"""Ray on three nodes of this machine, and runs on it."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from leaks import lasting
from patience import deadline

from megatron_rl.observe.records import METRICS, read_lines
from megatron_rl.tools.bench.namespaces import Namespaces, NetworkNode, make_switch

ROOT = Path(__file__).parents[2]
RAY_ON_CPU = ROOT / "tests" / "unit" / "rollout" / "ray_on_cpu"
"""With it vLLM's Ray executor runs on nodes that only say that they have GPUs."""
RAY_PORT = 6390
HEALTH_CHECKS = {
    "RAY_health_check_initial_delay_ms": "5000",
    "RAY_health_check_period_ms": "2000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_worker_niceness": "0",
}
"""See megatron_rl/cluster/README.md: a node that cannot be reached is lost after 20 s or so."""
TRAINER = ["--num-cpus=1"]
ENGINE = ["--num-cpus=0", "--labels=pool=rollout"]
STAGE = ["--num-cpus=0", "--num-gpus=1", "--labels=pool=stages"]
"""What the Ray of a node has room for."""


class Cluster:
    """Ray on three nodes, with a token, and the folder that all nodes share. The first node is the head. The first two
    nodes have room for a trainer each, and the third is the engines' pool."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        token = folder / "token"
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "GLOO_", "NCCL_"))}
        self.environment = (
            kept
            | HEALTH_CHECKS
            | {
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN_PATH": str(token),
                "PYTHONPATH": os.pathsep.join(map(str, (ROOT, RAY_ON_CPU))),
                "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
                "PYTHONUNBUFFERED": "1",
                "OMP_NUM_THREADS": "1",
            }
        )
        self._switch: Namespaces | None = None
        self.nodes: list[NetworkNode] = []

    def __enter__(self) -> Cluster:
        self._switch = make_switch()
        self.nodes = [NetworkNode(self._switch, number) for number in (1, 2, 3)]
        self._start_ray((self.nodes[0], TRAINER))
        self._start_ray((self.nodes[1], TRAINER), (self.nodes[2], ENGINE))
        return self

    def __exit__(self, *_: object) -> None:
        for one in (*self.nodes, self._switch):
            one.end()

    def _start_ray(self, *starts: tuple[NetworkNode, Sequence[str]]) -> None:
        """Start Ray on nodes, each with its room. Ray itself gives a node 30 s, which a busy machine may exceed: it is
        then started again."""
        remaining = list(starts)
        for _ in range(4):
            processes = [(node, room, self._start_process(node, *room)) for node, room in remaining]
            remaining = [(node, room) for node, room, process in processes if process.wait(deadline(60))]
            if not remaining:
                return
            for node, _ in remaining:
                node.do(sys.executable, "-m", "ray.scripts.scripts", "stop", "--force")
        raise AssertionError(self.said("ray_*.txt"))

    def _start_process(self, node: NetworkNode, *room: str) -> subprocess.Popen:
        """The process ends when Ray is ready."""
        head = ["--head", f"--port={RAY_PORT}", "--include-dashboard=false", "--disable-usage-stats"]
        joins = [f"--address={self.address}"]
        words = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--node-ip-address={node.address}"]
        words += [
            *(head if node is self.nodes[0] else joins),
            "--num-gpus=0",
            *room,
            f"--object-store-memory={100 * 2**20}",
        ]
        # Ray's working folder is not that of the run.
        return node.start(Path("/"), self.folder / f"ray_{node.name}.txt", self.environment, *words)

    def add(self, room: Sequence[str]) -> None:
        """Add a node for a trainer, an engine or a part of one."""
        with lasting("module"):
            self.nodes.append(NetworkNode(self._switch, len(self.nodes) + 1))
            self._start_ray((self.nodes[-1], room))

    def said(self, pattern: str) -> str:
        return "\n".join(f"{path.name}: {path.read_text()}" for path in sorted(self.folder.glob(pattern)))

    @property
    def arguments(self) -> list[str]:
        """Those of a run on these nodes."""
        return [f"cluster.ray_address={self.address}", "cluster.pools={engine: rollout}"]

    @property
    def address(self) -> str:
        return f"{self.nodes[0].address}:{RAY_PORT}"


class Run:
    """A run of the tiny recipe in the cluster's folder, with relative paths, from the first node."""

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        *arguments: str,
        environment: dict[str, str] | None = None,
        program: Sequence[str] = ("-m", "megatron_rl", "grpo"),
    ) -> None:
        """
        Args:
            program: the words after `python` that start the recipe.
        """
        self._cluster, self.folder = cluster, cluster.folder / "runs" / name
        self._out = cluster.folder / f"{name}.txt"
        words = [sys.executable, *program, "configs/run/tiny_grpo.yaml", f"run.name={name}"]
        words += [*SMALL, *arguments]
        self._process = cluster.nodes[0].start(
            cluster.folder, self._out, cluster.environment | (environment or {}), *words
        )

    def wait_until(self, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + deadline(120)
        while not holds():
            assert self._process.poll() is None and time.monotonic() < end, self.text
            time.sleep(0.02)

    def end(self) -> int:
        """The exit status."""
        return self._process.wait(deadline(240))

    @property
    def text(self) -> str:
        return self._out.read_text()

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return read_lines(self.folder / METRICS)

    def log(self, name: str) -> str:
        path = self.folder / "logs" / f"{name}.log"
        return path.read_text() if path.exists() else ""


SMALL = [
    "run.steps=2",
    "model.path=task/model",
    "data.train=task/train.jsonl",
    "data.eval=null",
    "policy.parallel.tensor=1",
    "policy.parallel.data=2",
    "rollout.prompts_per_step=8",
    "rollout.samples_per_prompt=4",
    "rollout.max_response_tokens=24",
    "rewards=[{kind: function, path: 'rewards:share_of_digits'}]",
    "checkpoint.every=0",
]
"""A data-parallel rank on each of two nodes."""
