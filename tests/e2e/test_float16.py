"""A run in float16: engines hold the trainers' bits, gradients that overflow are computed again, and kills change no
number."""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors.torch import load_file
from test_resume import arguments, lines

KEYS = [
    "model.dtype=float16",
    "policy.megatron.optimizer={initial_loss_scale: 8192.0}",
    "bridge.verify=true",
    "data.eval=null",
    "checkpoint.every=1",
    "checkpoint.keep=9",
    "algorithm.max_mismatch=0.02",
    "run.steps=6",
]


@pytest.mark.deep
@pytest.mark.deadline(900)
def test_a_run_whose_gradients_overflow_goes_on_to_the_bit_after_kills(recipe, run_here, task):
    """The run resumes after its first step. A trainer rank dies in a later one, and its state, with the loss scale,
    comes from a mirror."""
    asked = [*arguments(task, "whole"), *KEYS]
    done = recipe.run(*asked)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = recipe.folder / "runs" / "whole"
    expected = lines(folder)
    scales, repeats = ([record[name] for record in expected[:-1]] for name in ("loss_scale", "update_repeated"))
    assert repeats[0] > 0 and repeats[-1] == 0, "the first scale is too large, and the last one is not"
    halvings = [2**number - 1 for number in repeats]
    assert scales == [8192.0 / 2 ** sum(halvings[: step + 1]) for step in range(6)]
    assert expected[0]["lr"] == 2e-4 / 5, "the warm-up counts an update once"
    assert all("grad_norm" in record for record in expected[:-1]), "every step has an update"
    assert all(0 < record["mismatch/mean_abs"] < 0.02 for record in expected[:-1])
    assert json.loads((folder / "hf" / "config.json").read_text())["dtype"] == "float16"
    assert {str(tensor.dtype) for tensor in load_file(folder / "hf" / "model.safetensors").values()} == {
        "torch.float16"
    }
    for step in range(2, 7):
        shutil.rmtree(folder / "checkpoints" / f"step_{step:06d}")
    (recipe.folder / "gate").touch()
    run = recipe.start(*asked, "cluster.mirror=true", "--resume", "auto")
    recipe.wait_until(run, (recipe.folder / "waiting").exists)
    recipe.process(run, "ray::TrainerRank").kill()
    (recipe.folder / "gate").unlink()
    assert run.wait(recipe.deadline_s) == 0, (recipe.folder / "out.txt").read_text()
    assert lines(folder) == expected
