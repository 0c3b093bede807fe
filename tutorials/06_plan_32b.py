"""Plan a run of a 32B model on 8 nodes of 8 GPUs, on a laptop.

    python tutorials/06_plan_32b.py

You will learn to read the memory of a run by phase, to change its layout, and to tell two kinds of refusals apart: a
configuration that contradicts itself, and one that does not fit. You need neither a GPU nor the weights. The script
takes about ten seconds. Its numbers are estimates, which nobody has compared with a run on such GPUs yet.
"""

from __future__ import annotations

from pathlib import Path

from megatron_rl import plan
from megatron_rl.planning.gpu import PHASES

# 1. A run is configured by files that are merged from left to right: a model, a cluster, and what is trained. They ship
# with the package. The sizes of the model come from its config.json, and for this model the package has them.
FILES = ["configs/model/qwen3_32b.yaml", "configs/cluster/h100_8n8g.yaml", "configs/run/gsm8k_32b.yaml"]
first = plan(files=FILES)

# 2. print(first) gives all tables of `megatron-rl grpo ... --dry-run`. Here we read the values. A GPU is as full as in
# its fullest phase: `training` has the activations, `weight sync` is the transfer of new weights to the engines, and
# `generating` has the KV cache of the engines. Trainers and engines have GPUs of their own in this run.
print(f"{first.trainer_ranks} GPUs train and {first.engine_ranks} GPUs answer.\n")
print(f"{'GB on the fullest GPU':<42}" + "".join(f"{phase:>12}" for phase in PHASES))
for gpu in first.memory.gpus:
    print(f"{gpu.name:<42}" + "".join(f"{total / 1e9:12.1f}" for total in gpu.totals))
    for part, sizes in sorted(gpu.parts.items(), key=lambda item: -max(item[1])):
        if max(sizes) > 1e9:
            print(f"  {part:<40}" + "".join(f"{size / 1e9:12.1f}" for size in sizes))
print(f"\nA weight sync brings {first.pushed_bytes / 1e9:.1f} GB into each rank of an engine.")
print(f"The KV cache of an engine has room for {first.memory.engine.longest} answers of the largest length at a time.")

# 3. Other layouts of the same 32 trainer GPUs. `tensor` splits every matrix, `pipeline` splits the layers into stages,
# and `data` replicates the model and splits the optimizer's state. `model.recompute: full` keeps only the inputs of the
# layers, and `none` keeps all activations, which saves time if it fits. The model's file has `full`, and a file of your
# own that comes later wins. A plan that does not fit is a result and no error: `memory.problems` has the reasons.
Path("no_recompute.yaml").write_text("model: {recompute: none}\n")
LAYOUTS = [
    ({"tensor": 4, "pipeline": 4, "data": 2}, "full"),
    ({"tensor": 4, "pipeline": 4, "data": 2}, "none"),
    ({"tensor": 8, "pipeline": 4, "data": 1}, "full"),
    ({"tensor": 8, "pipeline": 2, "data": 2}, "full"),
    ({"tensor": 4, "pipeline": 2, "data": 4}, "full"),
    ({"tensor": 2, "pipeline": 2, "data": 8}, "full"),
]
print(f"\n{'layout of the trainer':<24}{'recompute':>10}{'GB':>8}")
problems = []
for parallel, recompute in LAYOUTS:
    own = ["no_recompute.yaml"] if recompute == "none" else []
    found = plan(files=[*FILES, *own], policy={"parallel": parallel})
    name = f"TP{parallel['tensor']} x PP{parallel['pipeline']} x DP{parallel['data']}"
    size = max(found.memory.trainer.totals) / 1e9
    print(f"{name:<24}{recompute:>10}{size:8.1f}  {'does not fit' if found.memory.problems else 'fits'}")
    problems += found.memory.problems
print("\nWhat does not fit, and what would help:")
for problem in problems:
    print(f"- {problem}")

# 4. What contradicts itself is refused with a ValueError before any number is computed. The message has the keys, their
# values, and what they may be.
REFUSED = {
    "a split that does not divide the model": {"policy": {"parallel": {"tensor": 3}}, "cluster": {"world_size": 24}},
    "fewer ranks than the job has": {"policy": {"parallel": {"data": 1}}},
    "answers that no micro-batch holds": {"rollout": {"max_response_tokens": 32768, "thinking": None}},
    "a key with a typing error": {"rollout": {"num_engine": 8}},
}
print("\nRefused:")
for what, sections in REFUSED.items():
    try:
        plan(files=FILES, **sections)
    except ValueError as error:
        print(f"- {what}:\n    " + str(error).replace("\n", "\n    "))

# 5. `megatron-rl size-run` takes the same files and lists the layouts that fit, the fastest first. `megatron-rl grpo`
# with the same files and `--slurm --dry-run` prints the job that would be submitted.
print("\nNext: megatron-rl size-run " + " ".join(FILES))
