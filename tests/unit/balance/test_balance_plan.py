from __future__ import annotations

from dataclasses import replace

import cover
import numpy as np
import pytest
from batches import batch_without_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import model

from megatron_rl.balance import plan_microbatches, training_flops
from megatron_rl.config.balance import BalanceConfig
from megatron_rl.config.policy import ParallelConfig
from megatron_rl.types import AnnotatedBatch, Minibatches, StepBatch, Vision

SHAPE = model("qwen3", 2, 128, 4, 2, 32, 256, 64, 512)


def batch_of(lengths, group_of=None, num_actions=None) -> StepBatch:
    """A batch in which the samples of a group need not be neighbours."""
    size = len(lengths)
    return batch_without_tokens(
        group_of=np.arange(size) if group_of is None else np.asarray(group_of),
        lengths=np.asarray(lengths, np.int64),
        num_actions=np.ones(size, np.int64) if num_actions is None else np.asarray(num_actions),
    )


def plan_of(
    lengths,
    max_tokens=100,
    updates=1,
    seed=(),
    recompute="none",
    balance=None,
    parallel=None,
    active=None,
    **columns,
):
    """A parallel configuration. With sequence parallelism its alignment is the tensor-parallel size."""
    return plan_microbatches(
        batch_of(lengths, **columns),
        np.ones(len(lengths), bool) if active is None else np.asarray(active, bool),
        SHAPE,
        ParallelConfig(**parallel or {}),
        BalanceConfig(max_tokens_per_microbatch=max_tokens, **balance or {}),
        Minibatches(updates, seed),
        recompute=recompute,
    )


def test_the_images_of_a_trained_tower_are_balanced():
    """Two of four equally long samples have an image. Each rank gets one of them."""
    tower = (("visual.patch_embed.proj.weight", (8, 3, 1, 2, 2)), ("visual.blocks.0.norm1.weight", (8,)))
    seen = Vision("x", 9, 2, 0, (4, 2, 2), True, tower, num_whole=1, trained=True)
    batch = AnnotatedBatch.of(batch_of([30] * 4), patches=[(16, 8), (64,), (), ()])
    plans = {
        is_trained: plan_microbatches(
            batch,
            np.ones(4, bool),
            replace(SHAPE, vision=replace(seen, trained=is_trained)),
            ParallelConfig(data=2, tensor=4),
            BalanceConfig(max_tokens_per_microbatch=64),
        )
        for is_trained in (False, True)
    }
    held = [set(micro) for [micro] in plans[True].minibatches[0]]
    assert all(len(own & {0, 1}) == 1 for own in held)
    # A patch: 8 x 12 with the embedding. Each pair of patches of an image: 2 x 8 in the only layer.
    [first, second] = [6 * (96 * 24 + 16 * (16**2 + 8**2)), 6 * (96 * 64 + 16 * 64**2)]
    of_text = training_flops(np.array([30]), SHAPE)[0]
    assert plans[True].metrics["balance/model_flops"] == 4 * of_text + first + second
    assert plans[False].metrics["balance/model_flops"] == 4 * of_text
    # Each of the four ranks of a model computes the whole tower, and a quarter of the layers.
    mean = 2 * of_text + 4 * (first + second) / 2
    assert plans[True].metrics["balance/imbalance"] == pytest.approx((2 * of_text + 4 * second) / mean - 1)


def test_golden():
    """One rank gets the sample of 60 tokens, the other 30 + 30. The inactive sample is in no micro-batch."""
    plan = plan_of(
        [60, 30, 50, 30],
        active=[1, 1, 0, 1],
        num_actions=[5, 4, 9, 2],
        group_of=[0, 0, 1, 1],
        max_tokens=64,
        parallel={"data": 2, "tensor": 8},
    )
    assert sorted(plan.minibatches[0]) == [((0,),), ((1, 3),)] and len(plan.minibatches) == 1
    assert [(d.num_tokens, d.num_samples) for d in plan.denominators] == [(11, 3)]
    heavy, light = training_flops(np.array([60, 30]), SHAPE)
    first = plan.minibatches[0][0][0] == (0,)
    assert plan.tokens == ((((64,), (64,))),)
    assert plan.flops == (((heavy,), (2 * light,)) if first else ((2 * light,), (heavy,)),)
    mean = (heavy + 2 * light) / 2
    expected = {
        "tokens": 120,
        "flops": heavy + 2 * light,
        "model_flops": heavy + 2 * light,
        "num_microbatches": 1,
        "imbalance": heavy / mean - 1,
        "lockstep": 1.0,  # the sample of 60 tokens makes any lower cost impossible
        "fill": 120 / 128,
        "padding": 8 / 128,
        "bubble": 0,
        "oversize": 0,
    }
    assert plan.metrics == pytest.approx({f"balance/{name}": value for name, value in expected.items()})


def test_ranks_without_a_sample_get_empty_micro_batches():
    plan = plan_of([70, 60], parallel={"data": 3})
    assert sorted(plan.minibatches[0]) == [((),), ((0,),), ((1,),)]
    assert sorted(plan.tokens[0]) == [(0,), (60,), (70,)]


def test_a_pipeline_gets_its_small_micro_batches_at_both_ends():
    lengths = [60, 70, 80, 90, 100]

    def order(pipeline: int):
        plan = plan_of(lengths, parallel={"pipeline": pipeline})
        [[microbatches]] = plan.minibatches
        assert plan.tokens == ((tuple(lengths[index] for [index] in microbatches),),)
        return [lengths[index] for [index] in microbatches], plan.metrics["balance/bubble"]

    assert order(pipeline=2)[0] == [60, 80, 100, 90, 70]
    assert order(pipeline=1) == ([100, 90, 80, 70, 60], 0)
    a, b, *_ = training_flops(np.array(lengths), SHAPE)
    idle, busy = 3 * (a + 2 * b) / 3, training_flops(np.array(lengths), SHAPE).sum()
    assert order(pipeline=4)[1] == pytest.approx(idle / (idle + busy))


def test_groups_are_dealt_in_order_and_evenly():
    group_of, active = [7, 7, 3, 3, 5, 5, 5, 1, 1, 0], [1] * 4 + [0] * 3 + [1] * 3
    plan = plan_of([10] * 10, group_of=group_of, active=active, updates=2)
    assert [sorted(i for m in ranks[0] for i in m) for ranks in plan.minibatches] == [[0, 1, 2, 3], [7, 8, 9]]


def test_a_seed_gives_other_mini_batches_of_whole_groups():
    def groups_of_each(*seed: int) -> list[tuple[int, ...]]:
        plan = plan_of([10] * 12, group_of=np.repeat(np.arange(6), 2), updates=3, seed=seed)
        return [tuple(sorted({s // 2 for m in ranks[0] for s in m})) for ranks in plan.minibatches]

    first, second, third = groups_of_each(), groups_of_each(5, 0, 1), groups_of_each(5, 0, 2)
    assert first == [(0, 1), (2, 3), (4, 5)] and sorted(sum(second, ())) == sorted(sum(third, ())) == list(range(6))
    assert first != second != third != first, "these permutations differ"
    assert groups_of_each(5, 0, 1) == second


@pytest.mark.parametrize(("active", "expected"), [([0, 0, 0], 0), ([0, 1, 0], 1), ([1, 1, 1], 3)])
def test_a_mini_batch_without_samples_is_left_out(active, expected):
    plan = plan_of([10, 10, 10], active=active, updates=3)
    assert len(plan.minibatches) == len(plan.denominators) == len(plan.tokens) == len(plan.flops) == expected


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        (
            [5, 97, 104],
            {"max_tokens": 96, "parallel": {"tensor": 8}},
            r"sample 1 \(row 1, answer 0\) has 97 tokens, 104 when padded.*2 samples.*to 104.*or set balance.oversize",
        ),
        ([5, 0], {}, r"active sample 1 \(row 1, answer 0\) has 0 tokens"),
        ([-3], {}, "active sample 0 .* has -3 tokens"),
        ([5], {"num_actions": [0]}, "0 action tokens"),
        (
            [5],
            {"max_tokens": 8, "parallel": {"tensor": 16}},
            "alignment of 16: raise .*max_tokens_per_microbatch to 16",
        ),
        ([5], {"updates": 0}, "number of mini-batches is 0"),
    ],
)
def test_errors_say_what_to_change(lengths, options, message):
    with pytest.raises(ValueError, match=message):
        plan_of(lengths, **options)


def test_a_cap_of_one_alignment_is_enough():
    assert plan_of([5], max_tokens=16, parallel={"tensor": 16}).minibatches == ((((0,),),),)


def test_an_inactive_sample_may_be_too_long():
    assert plan_of([500, 5], active=[0, 1]).minibatches == ((((1,),),),)


def test_oversize_samples_may_stand_alone():
    plan = plan_of([150, 60, 40, 120], balance={"oversize": "alone"})
    assert sorted(plan.minibatches[0][0]) == [(0,), (1, 2), (3,)]
    assert plan.metrics["balance/oversize"] == 2 and plan.max_tokens == 100


def test_groups_may_stay_together():
    lengths, group_of = [40, 30, 20, 40, 30, 20, 10], [0, 0, 0, 1, 1, 1, 2]
    plan = plan_of(lengths, group_of=group_of, balance={"groups": "together"}, parallel={"data": 2})
    owners = {tuple(sorted({group_of[i] for m in rank for i in m})) for rank in plan.minibatches[0]}
    assert owners in ({(0,), (1, 2)}, {(0, 2), (1,)})


def test_the_cost_decides_what_is_even():
    """One sample of 400 tokens and four of 100 have equally many tokens, but different FLOPs and squares."""
    lengths = [400, 100, 100, 100, 100, 60, 60]

    def tokens(**cost) -> list[int]:
        plan = plan_of(lengths, max_tokens=1000, balance={"cost": cost}, parallel={"data": 2})
        return sorted(sum(rank) for rank in plan.tokens[0])

    assert tokens(kind="tokens") == [460, 460]
    assert tokens(kind="measured", seconds_per_token=0, seconds_per_squared_token=1) == [400, 520]


def test_recomputation_counts_in_the_flops():
    plain, again = plan_of([50, 60]), plan_of([50, 60], recompute="full")
    lengths = np.array([50, 60])
    assert plain.metrics["balance/flops"] == pytest.approx(training_flops(lengths, SHAPE).sum())
    assert again.metrics["balance/flops"] == pytest.approx(training_flops(lengths, SHAPE, "full").sum())
    assert (
        again.metrics["balance/model_flops"] == plain.metrics["balance/model_flops"] == plain.metrics["balance/flops"]
    )


@st.composite
def steps(draw):
    sizes = draw(st.lists(st.integers(1, 5), max_size=8))
    num_samples = sum(sizes)
    many = lambda strategy: draw(st.lists(strategy, min_size=num_samples, max_size=num_samples))  # noqa: E731
    return {
        "lengths": np.array(many(st.integers(1, 96)), np.int64),
        "num_actions": np.array(many(st.integers(1, 9)), np.int64),
        "active": np.array(many(st.booleans()), bool),
        "group_of": np.repeat(np.arange(len(sizes)), sizes),
        "max_tokens": draw(st.integers(96, 200)),
        "updates": draw(st.integers(1, 3)),
        "seed": draw(st.sampled_from([(), (3, 7, 1)])),
        "balance": {"groups": draw(st.sampled_from(["split", "together"]))},
        "parallel": {
            "data": draw(st.integers(1, 4)),
            **draw(
                st.sampled_from([{}, {"pipeline": 2}, {"pipeline": 2, "virtual": 2}, {"pipeline": 3, "virtual": 2}])
            ),
            "tensor": draw(st.sampled_from([1, 2, 8])),
        },
    }


@pytest.mark.parametrize("part", cover.essential(range(4), 0))  # each has examples of its own
@settings(max_examples=75, deadline=None)
@given(steps())
def test_plan_properties(part, step):
    plan = plan_of(**step)
    assert plan == plan_of(**step)
    tensor = step["parallel"]["tensor"]
    multiple = step["parallel"]["pipeline"] if "virtual" in step["parallel"] else 1
    flops = training_flops(step["lengths"], SHAPE)
    everything, groups_seen = [], set()
    for i, (minibatch, denominators) in enumerate(zip(plan.minibatches, plan.denominators, strict=True)):
        assert len(minibatch) == step["parallel"]["data"]
        assert len({len(rank) for rank in minibatch}) == 1 and len(minibatch[0]) > 0
        assert len(minibatch[0]) % multiple == 0
        samples = [s for rank in minibatch for microbatch in rank for s in microbatch]
        for r, rank in enumerate(minibatch):
            for m, microbatch in enumerate(rank):
                tokens = sum(-(-step["lengths"][s] // tensor) * tensor for s in microbatch)
                assert tokens == plan.tokens[i][r][m] <= step["max_tokens"]
                assert plan.flops[i][r][m] == pytest.approx(flops[list(microbatch)].sum())
                assert list(microbatch) == sorted(microbatch)
        assert denominators.num_tokens == step["num_actions"][samples].sum()
        assert denominators.num_samples == len(samples)
        groups = set(step["group_of"][samples].tolist())
        assert groups and not groups & groups_seen
        groups_seen |= groups
        everything += samples
        if step["balance"]["groups"] == "together":
            owners = [set(step["group_of"][[s for m in rank for s in m]].tolist()) for rank in minibatch]
            assert sum(map(len, owners)) == len(groups)
    assert sorted(everything) == np.flatnonzero(step["active"]).tolist()
    active_groups = len(set(step["group_of"][step["active"]].tolist()))
    assert len(plan.minibatches) == min(step["updates"], active_groups)
    assert plan.metrics["balance/tokens"] == step["lengths"][step["active"]].sum()
    assert plan.metrics["balance/lockstep"] >= 1 - 1e-12 and 0 <= plan.metrics["balance/fill"] <= 1
    assert 0 <= plan.metrics["balance/padding"] < 1 and 0 <= plan.metrics["balance/bubble"] < 1


def test_ranks_carry_like_work():
    lengths = np.random.default_rng(1).integers(50, 2000, 512)
    group_of = np.repeat(np.arange(64), 8)
    plan = plan_of(lengths, group_of=group_of, max_tokens=8192, parallel={"data": 8, "tensor": 16})
    # If the samples were dealt to the ranks in order, the imbalance would be above 0.1.
    assert plan.metrics["balance/imbalance"] < 1e-3
    assert plan.metrics["balance/lockstep"] < 1.01
    assert plan.metrics["balance/fill"] > 0.9
