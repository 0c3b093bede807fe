#!/usr/bin/env bash
# The whole road at the demo's scale: supervised training, delta learning, reinforcement; beside it the same without
# preferences. The stronger model is the supervised one, and the weaker one its weights after 200 of 600 steps.
#
#     recipes/tiny/road.sh 0 1 2
set -euo pipefail
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
rl() { "${PYTHON:-python}" -m megatron_rl "$@"; }

for seed in "${@:-0}"; do
    home="runs/road/seed_$seed"
    task="$home/task"
    common=("run.folder=$home" "run.seed=$seed")
    [ -d "$task" ] || "${PYTHON:-python}" -m megatron_rl.recipes.tiny.task "$task" --seed "$seed"
    [ -d "$home/sft/hf" ] || rl sft configs/run/tiny_sft.yaml "${common[@]}" run.name=sft "model.path=$task/model" \
        "sft.rows=$task/demonstrations.jsonl" checkpoint.export_every=200 --resume auto
    prompts=(configs/run/tiny_grpo.yaml "data.train=$task/train.jsonl" "data.eval=$task/eval.jsonl" "${common[@]}")
    for name in stronger weaker; do
        model="$home/sft/hf"
        [ "$name" = stronger ] || model="$home/sft/exports/step_000200"
        [ -d "$home/$name" ] || rl generate "${prompts[@]}" run.name=generate "model.path=$model" \
            rollout.prompts_per_step=1024 rollout.samples_per_prompt=2 --steps 1 \
            --out "$home/$name"
    done
    rl pairs "$home/stronger" --rejected "$home/weaker" --tokenizer "$home/sft/hf" --out "$home/pairs.jsonl"
    [ -d "$home/dpo/hf" ] || rl dpo "${common[@]}" run.name=dpo run.epochs=1 "model.path=$home/sft/hf" \
        model.dtype=float32 cluster.device=cpu policy.optimizer.lr=1e-4 "dpo.rows=$home/pairs.jsonl" --resume auto
    for start in sft dpo; do
        [ -d "$home/${start}_grpo/hf" ] || rl grpo "${prompts[@]}" "run.name=${start}_grpo" run.steps=20 \
            "model.path=$home/$start/hf" --resume auto
    done
done
