"""The loop against small in-process ports: order, versions, what stops it, what it counts. The real ports meet it in
tests/e2e."""

from __future__ import annotations

import numpy as np
import pytest
from small_ports import PROMPTS, StopAfter, World, config, open_checkpoints, run

from megatron_rl.algorithms.outcomes import gdpo
from megatron_rl.data import ShuffledStream
from megatron_rl.types import Verdict


def test_a_step_pushes_answers_trains_and_saves_in_this_order(tmp_path):
    world, stream = World(), ShuffledStream(PROMPTS, 4, seed=0)
    assert run(world, tmp_path / "c", config(), heldout=PROMPTS[:3]) == 3
    expected = ["push 0", *[f"ask -{i + 1}: row {i} x 1" for i in range(3)]]
    for step in range(3):
        numbered = stream.take(4)
        assert [world.seeds[number] for number, _ in numbered] == [(step, i) for i in range(4)]
        expected += [f"ask {number}: {prompt.uid} x 2" for number, prompt in numbered]
        expected += ["begin", "update 0", f"save step_{step + 1:06d}", f"push {step + 1}"]
    assert world.calls == [*expected, *[f"ask -{i + 4}: row {i} x 1" for i in range(3)]]
    assert [world.seeds[-i] for i in range(1, 7)] == [(2**20 - 1, i) for i in (0, 1, 2)] * 2, "comparable evaluations"
    assert [step for step, _ in world.logged] == [0, 1, 2, 3]
    assert [("eval/accuracy" in m, "loss" in m) for _, m in world.logged] == [(1, 1), (0, 1), (0, 1), (1, 0)]
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["step_000002", "step_000003"]


def test_stop_and_resume_continue_where_the_run_stood(tmp_path):
    whole, broken, resumed = World(), World(), World()
    run(whole, tmp_path / "whole", config())
    assert run(broken, tmp_path / "c", config(), stopping=StopAfter(broken, 2)) == 2
    assert run(resumed, tmp_path / "c", config(), resume="auto") == 3
    assert resumed.updates == whole.updates == 3
    assert resumed.calls == whole.calls[whole.calls.index("push 2") :]
    assert resumed.names == whole.names


def test_a_folder_with_checkpoints_is_not_overwritten(tmp_path):
    run(World(), tmp_path / "c", config())
    with pytest.raises(ValueError, match="newest: step 3.*--resume auto"):
        run(World(), tmp_path / "c", config())


def test_half_written_checkpoints_do_not_count(tmp_path):
    (tmp_path / "step_000007.tmp-1").mkdir()
    assert open_checkpoints(tmp_path, config(), "auto").first_step == 0


def test_updates_per_step_are_mini_batches_of_whole_groups(tmp_path):
    world = World()
    run(world, tmp_path / "c", config(algorithm={"updates_per_step": 2}))
    assert world.updates == 6
    first = world.logged[0][1]
    assert (first["loss"], first["ratio/max"], first["ratio/min"], first["on_policy/ratio_error"]) == (
        1.5,
        2.0,
        0.75,
        0.0,
    )
    for minibatch in world.share.minibatches:
        samples = [s for micro in minibatch for s in micro]
        assert len(samples) == 4 and len(set(world.share.index[samples] // 2)) == 2


def test_epochs_have_metrics_of_their_own(tmp_path):
    world = World()
    run(world, tmp_path / "c", config(algorithm={"updates_per_step": 2, "epochs": 3}))
    assert world.updates == 18 and len(world.share.minibatches) == 2 and len(world.later) == 2
    first = world.logged[0][1]
    assert first["epochs"] == 3 and first["loss"] == 3.5
    # The world's update i of a step has the largest ratio 1 + i.
    assert [first[f"epoch_{number}/ratio/max"] for number in (1, 2, 3)] == [2, 4, 6]
    composition = [[sorted(share.index[list(sum(rows, ()))]) for rows in share.minibatches] for [share] in world.later]
    assert composition[0] != composition[1], "each epoch has its own mini-batches"
    for of_epoch in composition:
        assert sorted(sum(of_epoch, [])) == list(range(8))


def test_without_reshuffling_the_epochs_have_the_same_shares(tmp_path):
    world = World()
    run(world, tmp_path / "c", config(algorithm={"updates_per_step": 2, "epochs": 2, "reshuffle": False}))
    [[share]] = world.later
    assert share is world.share


def test_a_step_that_is_stopped_describes_the_updates_that_were_made(tmp_path):
    world = World(stops_at=3)
    run(world, tmp_path / "c", config(algorithm={"updates_per_step": 2, "epochs": 2, "stop_epochs": {"kl": 0.1}}))
    first = world.logged[0][1]
    assert first["epochs"] == 1.5 and first["loss"] == 2.0 and "stopped" not in first
    assert first["epoch_2/ratio/max"] == 3


def test_an_epoch_whose_tokens_are_all_masked_is_told(tmp_path):
    world = World(masked_from=2)
    run(world, tmp_path / "c", config(algorithm={"updates_per_step": 2, "epochs": 2}))
    assert any("in epoch 2 no token has a policy loss: algorithm.correction.reject" in told for told in world.warnings)


def test_zero_signal_groups_leave_the_step_and_are_counted(tmp_path):
    world = World(score=lambda group, i: 1.0 if group < 3 else float(i))
    run(world, tmp_path / "c", config())
    metrics = world.logged[0][1]
    assert metrics["groups/zero_signal"] == 3 and metrics["samples/active"] == 2
    assert sorted(world.share.index) == [6, 7]
    assert world.share.denominators[0].num_tokens == 4 and world.share.denominators[0].num_samples == 2


def test_a_step_without_signal_has_no_update(tmp_path):
    world = World(score=lambda group, i: 0.0)
    assert run(world, tmp_path / "c", config()) == 3
    assert world.updates == 0 and "begin" not in world.calls


def test_abstentions_are_counted_and_silence_stops_the_run(tmp_path):
    world = World(score=lambda group, i: None if group == 0 else float(i))
    run(world, tmp_path / "a", config())
    assert world.logged[0][1]["samples/abstained"] == 2 and world.logged[0][1]["samples/active"] == 6
    with pytest.raises(ValueError, match="8 answers .*the judge was away"):
        run(World(score=lambda group, i: None), tmp_path / "b", config())


@pytest.mark.parametrize("seen", [0.3, float("nan")])
def test_disagreement_of_engine_and_trainer_stops_before_the_update(tmp_path, seen):
    world = World()
    world.mismatch = seen
    with pytest.raises(ValueError, match="step 0.*algorithm.max_mismatch = 0.2"):
        run(world, tmp_path / "c", config())
    assert world.updates == 0


def test_the_weights_of_a_mini_batch_are_of_its_own_counts(tmp_path):
    world = World()
    run(world, tmp_path / "c", config(algorithm={"updates_per_step": 2, "loss_agg_mode": "seq-mean-token-mean"}))
    assert world.weights.tolist() == [1 / (4 * 2)] * 8  # four samples of two action tokens each


def test_adaptive_coefficients_follow_the_metrics_and_survive_a_resume(tmp_path):
    algorithm = {"kl": {"coefficient": {"kind": "adaptive", "initial": 0.1, "target": 0.01, "horizon": 100}}}
    whole, broken, resumed = World(), World(), World()
    run(whole, tmp_path / "whole", config(algorithm=algorithm))
    # The KL is twice the target: the error is clipped to 0.2, eight samples of a horizon of 100.
    assert [used["kl"] for used in whole.coefficients] == pytest.approx([0.1, 0.1 * 1.016, 0.1 * 1.016**2])
    assert [logged["coefficient/kl"] for _, logged in whole.logged[:3]] == [u["kl"] for u in whole.coefficients]
    run(broken, tmp_path / "c", config(algorithm=algorithm), stopping=StopAfter(broken, 2))
    run(resumed, tmp_path / "c", config(algorithm=algorithm), resume="auto")
    assert broken.coefficients + resumed.coefficients == whole.coefficients


def test_shaping_reaches_the_estimator_and_not_the_evaluation(tmp_path):
    world = World(score=lambda group, i: Verdict(1.0, parts=(1.0,), shaped=1.0 - 0.5 * i))
    run(world, tmp_path / "c", config(), heldout=PROMPTS[:3])
    assert (world.advantages[::2] > 0).all() and (world.advantages[1::2] < 0).all()
    assert world.logged[0][1]["eval/accuracy"] == 1.0 and world.logged[0][1]["reward/mean"] == 0.75


def test_remax_asks_for_a_greedy_answer_to_each_prompt(tmp_path):
    world = World(score=lambda group, i: float(group == 0) + i)  # a greedy answer is answer 0 of its group
    run(world, tmp_path / "c", config(algorithm={"adv_estimator": {"kind": "remax"}, "drop_zero_signal": False}))
    asked = [call.split(": ")[1].removesuffix(" x 2") for call in world.calls[1:5]]
    assert world.calls[5:9] == [f"ask -{i + 1}: {uid} x 1, greedy" for i, uid in enumerate(asked)]
    assert world.advantages.tolist() == [0.0, 1.0] * 4


def test_gdpo_sees_the_rewards_apart(tmp_path):
    world = World(score=lambda group, i: Verdict(2.0 * i - 3.0, parts=(float(i), -1.0)))
    rewards = [{"kind": "function", "path": "a:b", "weight": 2.0}, {"kind": "function", "path": "a:c", "weight": 3.0}]
    run(world, tmp_path / "c", config(algorithm={"adv_estimator": {"kind": "gdpo"}}, rewards=rewards))
    parts = np.array([[0.0, -1.0], [1.0, -1.0]] * 4)
    expected = gdpo(parts, np.array([2.0, 3.0]), np.arange(8) // 2)
    assert world.advantages.tolist() == expected.tolist() and expected.any()


@pytest.mark.parametrize(
    ("algorithm", "reason"),
    [
        ({"adv_estimator": {"kind": "gae"}}, "gae needs a critic; add the section critic"),
        ({"adv_estimator": {"kind": "grpo_process"}}, "needs rewards at single tokens, which rollout.prefix_values"),
        ({"kl": {"place": "reward"}}, "gives each token a reward, which adv_estimator grpo ignores"),
    ],
)
def test_what_this_recipe_cannot_feed_is_refused(algorithm, reason):
    with pytest.raises(ValueError, match=reason):
        config(algorithm=algorithm)


def test_an_estimator_without_groups_takes_single_answers():
    rollout = {"prompts_per_step": 4, "samples_per_prompt": 1, "max_prompt_tokens": 8, "max_response_tokens": 8}
    config(algorithm={"adv_estimator": {"kind": "reinforce_plus_plus"}}, rollout=rollout)
    with pytest.raises(ValueError, match="every rloo advantage"):
        config(algorithm={"adv_estimator": {"kind": "rloo"}}, rollout=rollout)
