"""Waits until the named nodes have joined Ray: python -m megatron_rl.cluster.wait_for_nodes SECONDS NODE ...

The address and the token of Ray come from the environment (RAY_ADDRESS, RAY_AUTH_TOKEN).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from ray._raylet import GcsClient, RpcError
from ray.core.generated.gcs_pb2 import GcsNodeInfo

TICK_S = 0.2


def missing_nodes(address: str, names: Sequence[str], seconds: float) -> list[str]:
    """Wait until every named node is alive in Ray, at most this number of seconds; returns the nodes that are not.

    Ray is only asked for its nodes: a driver that joins Ray would make it start a worker for each CPU.
    """
    end = time.monotonic() + seconds
    ray = None
    missing = list(names)
    while missing and time.monotonic() < end:
        with suppress(RpcError):  # the first node of Ray is not there yet, or is busy
            ray = ray or GcsClient(address=address)
            nodes = ray.get_all_node_info(timeout=seconds).values()
            alive = {node.node_name for node in nodes if node.state == GcsNodeInfo.ALIVE}
            missing = [name for name in names if name not in alive]
        if missing:
            time.sleep(TICK_S)
    return missing


def main(arguments: Sequence[str] | None = None) -> int:
    seconds, *names = sys.argv[1:] if arguments is None else arguments
    missing = missing_nodes(os.environ["RAY_ADDRESS"], names, float(seconds))
    if missing:
        print(
            f"{len(missing)} of {len(names)} nodes did not join Ray within {seconds} s: {' '.join(missing)}; "
            "their logs (..._ray_....log) say why",
            file=sys.stderr,
        )
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
