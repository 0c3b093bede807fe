"""Jobs under a real Slurm that end early: they leave nothing, and who goes on has the same numbers."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.deep


def test_scancel_leaves_nothing_and_the_next_of_a_singleton_chain_continues(slurm, whole):
    before = slurm.unused_shared_memory()
    slurm.close_gate()
    number = slurm.submit("grpo", *slurm.recipe("chain", *slurm.ON_TWO_NODES))
    script = slurm.folder / "runs" / "chain" / "slurm" / "train.sbatch"
    successor = int(slurm.call("sbatch", "--parsable", "--dependency=singleton", script))
    slurm.wait_at_gate(number)
    assert slurm.job(successor)["JobState"] == "PENDING"
    assert len(slurm.processes(number)) > 10
    slurm.call("scontrol", "hold", str(successor))
    slurm.call("scancel", str(number))
    assert slurm.ends(number)[0] == "CANCELLED"
    slurm.wait_until(lambda: not slurm.processes(number), number)
    assert slurm.unused_shared_memory() <= before
    slurm.open_gate()
    slurm.call("scontrol", "release", str(successor))
    assert slurm.ends(successor) == ("COMPLETED", "0"), slurm.output(successor)
    assert "Continuing with step 1." in slurm.output(successor)
    assert slurm.metrics("chain") == whole


def test_a_dead_node_costs_the_steps_since_the_last_checkpoint(slurm, whole):
    slurm.close_gate()
    number = slurm.submit("grpo", *slurm.recipe("node", *slurm.ON_TWO_NODES))
    slurm.wait_at_gate(number)
    slurm.kill_node("n2")
    slurm.wait_until(lambda: slurm.job(number)["Restarts"] != "0", number)
    slurm.open_gate()
    assert slurm.ends(number) == ("COMPLETED", "0"), slurm.output(number)
    assert "Ray on n2 ended" in slurm.output(number)
    assert slurm.job(number)["NodeList"] == "n[1,3]", "the dead node is not used again"
    assert slurm.metrics("node") == whole
