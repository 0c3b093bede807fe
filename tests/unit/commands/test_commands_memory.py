"""The tables of the memory that a run needs, and `megatron-rl size-run`."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from megatron_rl.commands import size_run
from megatron_rl.commands.dry_run import check_memory, describe_memory
from megatron_rl.config.load import load_config
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.planning.activations import CHUNK_BYTES
from megatron_rl.planning.gpu import PHASES
from megatron_rl.planning.memory import run_memory
from megatron_rl.planning.shapes import planned_shape

ROOT = Path(__file__).parents[3]
RECIPE = str(ROOT / "recipes" / "qwen3_32b" / "qwen3_32b-dapo-4n8g-tp8.yaml")


def test_the_table_adds_up():
    screen, run = io.StringIO(), load_config(GrpoRunConfig, [RECIPE])
    memory = describe_memory(run, planned_shape(run), Console(file=screen, width=100, color_system=None))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in screen.getvalue().splitlines() if "│" in line]
    totals = [float(cell) for cell in next(row for row in rows if row[0] == memory.trainer.name)[1:]]
    first = next(i for i, row in enumerate(rows) if row[0] == memory.trainer.name) + 1
    parts = rows[first : first + len(memory.trainer.parts)]
    for phase in range(len(PHASES)):
        # Each of the cells is rounded to 0.01 GB.
        assert sum(float(row[phase + 1] or 0) for row in parts) == pytest.approx(totals[phase], abs=0.005 * 9)


def test_a_run_that_does_not_fit_is_refused():
    run = load_config(GrpoRunConfig, [RECIPE, "policy.optimizer.offload=false"])
    with pytest.raises(
        ValueError, match=r"not fit into its GPUs or nodes:\n  - training needs (.|\n)*`megatron-rl size-run`"
    ):
        check_memory(run_memory(run, planned_shape(run)))


@pytest.mark.deep
def test_the_command_prints_tables_or_json(capsys):
    assert size_run.main([RECIPE]) == 0
    shown = capsys.readouterr().out
    assert "the trainer's layouts that fit" in shown
    assert "TP8, recompute none, offload (configured)" in shown
    assert size_run.main([RECIPE, "policy.optimizer.offload=false", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert not told["fits"] and "training needs" in told["problems"][0]
    assert told["training_bytes"]["full"] < 80e9 < told["training_bytes"]["none"]
    overrides = told["layouts"][0]["overrides"]
    assert size_run.main([RECIPE, "policy.parallel={pipeline: 1, tensor: 1, context: 1}", *overrides]) == 0
    capsys.readouterr()
    assert size_run.main([RECIPE, "cluster.device=cpu", "policy.parallel={context: 1, data: 2}"]) == 0
    shown = capsys.readouterr().out
    assert "Megatron's local layers" in shown and "NCCL" not in shown and "that fit" not in shown
    assert "torch's, padded, without masks" in shown
    assert size_run.main([RECIPE, "run.steps=null", "run.epochs=2", "--json"]) == 0, "no size depends on the length"
    capsys.readouterr()
    assert size_run.main([RECIPE, "rollout.parallel.tensors=3"]) == 1
    assert "did you mean rollout.parallel.tensor" in capsys.readouterr().err


def test_the_dry_run_says_which_kernels_attention_takes():
    def shown(name: str, *overrides: str) -> str:
        [path] = sorted((ROOT / "recipes" / name).glob("*.yaml"))[:1]
        screen, run = io.StringIO(), load_config(GrpoRunConfig, [str(path), *overrides])
        describe_memory(run, planned_shape(run), Console(file=screen, width=140, color_system=None))
        return " ".join(screen.getvalue().split())

    assert "│ attention │ Transformer Engine │" in shown("qwen3_32b") and "linear attention" not in shown("qwen3_32b")
    next_80b = shown("qwen3_next_80b_a3b")
    assert "FlashAttention, one call for a row" in next_80b
    assert "│ linear attention │ flash-linear-attention's kernels │" in next_80b
    assert "torch's, padded, with masks" in shown("olmo3_32b", "model.dtype=float32")


def test_the_dry_run_says_what_is_in_the_memory_of_the_node(capsys):
    assert size_run.main([RECIPE]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "in the nodes' memory" in shown and "│ optimizer state │ 49.15 │ 393.22 │" in shown
    assert size_run.main([RECIPE, "--json"]) == 0
    host = json.loads(capsys.readouterr().out)["host_bytes"]
    assert host["trainer"]["optimizer state"] == pytest.approx(49.15e9, rel=1e-3) and host["critic"] is None


def test_the_constants_are_those_of_the_rooms_that_need_torch():
    from megatron_rl.algorithms import logprobs
    from megatron_rl.bridge.line import SLOTS

    assert CHUNK_BYTES == logprobs.CHUNK_BYTES and SLOTS == 2
