"""A program in which one engine of two ranks, on two Ray nodes of one GPU each, receives pushes and answers. It prints
one line of JSON with the nodes of its ranks, as planned and as Ray has them, and the ids and log-probs of an answer.

Its arguments are the folders whose weights are pushed one after the other, a folder for logs, and the ids of a prompt
with commas between them.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

# A token of the user, or of another test, would be used by some of the processes alone. Ray reads this at its import.
os.environ["RAY_AUTH_MODE"] = "disabled"

import ray  # noqa: E402
import warm  # noqa: E402
from ray._private.state import actors  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402
from tiny_trainers import TinyTrainers  # noqa: E402

from megatron_rl.cluster.engines import EngineGroup  # noqa: E402
from megatron_rl.cluster.nodes import RayPlacement  # noqa: E402
from megatron_rl.cluster.restarts import Restarts  # noqa: E402
from megatron_rl.config.load import validate  # noqa: E402
from megatron_rl.config.schema import GrpoRunConfig  # noqa: E402
from megatron_rl.layout import Engines  # noqa: E402
from megatron_rl.rollout.shared_memory import remove_leftovers  # noqa: E402
from megatron_rl.types import GroupRequest, Mesh, Prompt  # noqa: E402

if __name__ == "__main__":
    *folders, logs, prompt = sys.argv[1:]
    ids = tuple(int(token) for token in prompt.split(","))
    rollout = {"prompts_per_step": 1, "samples_per_prompt": 2, "max_prompt_tokens": 8, "max_response_tokens": 16}
    config = validate(
        GrpoRunConfig,
        {
            "run": {"name": "x", "steps": 1},
            "model": {"path": folders[0], "dtype": "float32"},
            "data": {"train": "none"},
            "balance": {"max_tokens_per_microbatch": 64},
            "rollout": rollout | {"parallel": {"tensor": 2}, "delimiter": ""},
            "cluster": {"gpus_per_engine_rank": 1},
        },
    )
    warm.IMPORTS[:] = ["megatron_rl.bridge.sender"]  # two trainers are all that its server starts
    cluster = Cluster()
    for num_gpus in (0, 1, 1):
        cluster.add_node(num_cpus=2, num_gpus=num_gpus, object_store_memory=80 * 2**20, include_dashboard=False)
    environment = {name: os.environ[name] for name in ("PYTHONPATH", "OMP_NUM_THREADS")}
    environment["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    ray.init(address=cluster.address, log_to_driver=False, runtime_env={"env_vars": environment})
    trainers = TinyTrainers(Path(folders[0]), Mesh(tensor=2), Engines(1, 2), "float32")
    placement = RayPlacement(config)
    engines = EngineGroup(config, Path(logs), placement, Restarts(0))
    engines.wait()
    [engine] = engines.engines
    ray.get(engine.connect.remote(trainers.setup.as_dict(), 0))
    for version, folder in enumerate(folders):
        trainers.begin_push(Path(folder), version)
        ray.get(engine.take.remote(version, False))
        ray.get(engine.commit.remote(version, None))
        trainers.end_push()
    request, version = GroupRequest(-1, Prompt("row", ids, ""), 1, (0,), is_greedy=True), len(folders) - 1
    call = engines.engines[0].answer.options(num_returns=2)
    _, [tokens] = ray.get(call.remote(0, request, range(1), version, (0, 1), []))
    workers = sorted(
        (actor for actor in actors().values() if actor["ActorClassName"] == "RayWorkerProc"), key=lambda a: a["Name"]
    )  # their names end with TP0, TP1, ...
    print(
        json.dumps(
            {
                "planned": [rank.node.id for rank in placement.plan.groups["engine"][0]],
                "nodes": [actor["Address"]["NodeID"] for actor in workers],
                "ids": tokens.ids[len(ids) :].tolist(),
                "logp": tokens.logp_rollout[len(ids) :].tolist(),
            }
        )
    )
    engines.close()
    trainers.close()
    ray.shutdown()
    cluster.shutdown()
    remove_leftovers()  # as the driver of a run does at its end
