"""The objective as a whole: its metrics by hand, masks, numbers that are not finite. Values and gradients of all
combinations: test_algorithms_reference.py and test_algorithms_invariance.py."""

from __future__ import annotations

import math
import pickle
import re
from dataclasses import replace

import pytest
import torch
import yaml

from megatron_rl.algorithms import PackedColumns, PolicyObjective, SupervisedObjective
from megatron_rl.algorithms.columns import FirstPass
from megatron_rl.algorithms.losses import LOSSES
from megatron_rl.algorithms.objective import NotFiniteError, mismatch
from megatron_rl.algorithms.whitening import one_rank
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.losses import AGGREGATIONS, DppoTvLoss, FunctionLoss
from megatron_rl.types import Denominators

NONE = {"kl": 0.0, "entropy": 0.0}
MASKED = {"weight": {"kind": "mask"}}


def real(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def columns_of(mask, advantage, old, rollout=None, sample=None, weight=1.0) -> PackedColumns:
    num = len(mask)
    return PackedColumns(
        action_mask_T=torch.tensor(mask, dtype=torch.bool),
        sample_T=torch.tensor(sample or [0] * num),
        token_T=torch.arange(num),
        weight_T=torch.full((num,), weight, dtype=torch.float64),
        advantage_T=real(advantage),
        logp_rollout_T=real(old if rollout is None else rollout),
        lag_T=torch.zeros(num, dtype=torch.int64),
        logp_old_T=real(old),
    )


def evaluate(objective, logp, columns: PackedColumns, denominators: Denominators, entropy=None):
    """(loss, gradient of logp, metrics as numbers)"""
    logp_T = torch.as_tensor(logp, dtype=torch.float64).clone().requires_grad_()
    entropy_T = torch.zeros_like(logp_T) if entropy is None else real(entropy)
    (prepared,) = objective.prepare([columns], None, denominators, lambda x: x)
    loss, metrics = objective(logp_T, entropy_T, prepared, denominators, NONE)
    loss.backward()
    numbers = objective.conclude({name: m.value.item() for name, m in metrics.items()}, math.inf)
    return loss.item(), logp_T.grad.tolist(), numbers


def test_a_loss_in_a_file_reaches_another_process(tmp_path):
    """By its path: no process can import a module whose name is a path."""
    (tmp_path / "mine.py").write_text("def squared(terms):\n    return terms.log_ratio_T.square(), {}\n")
    cfg = AlgorithmConfig(loss={"kind": "function", "path": f"{tmp_path}/mine.py:squared"})
    columns, logp = columns_of([1, 1], [1.0, 1.0], [-1.0, -2.0]), [-1.5, -2.0]
    objective = PolicyObjective(cfg)
    arrived = pickle.loads(pickle.dumps(objective))
    [of_one, of_other] = [evaluate(one, logp, columns, Denominators(2, 1))[:2] for one in (objective, arrived)]
    assert of_one == of_other == (0.25, [-1.0, 0.0])


def test_policy_objective_golden():
    """Three actions of four tokens, the denominator of a larger mini-batch: 10."""
    old, rollout = [-1.0, -2.0, -1.0, 0.0], [-1.0, -2.0 - math.log(1.5), -1.0 - math.log(4.0), 0.0]
    columns = columns_of([1, 1, 1, 0], [1.0, -2.0, -1.0, 5.0], old, rollout, weight=0.1)
    logp = real(old) + real([2.0, 0.5, 5.0, 9.0]).log()
    loss, _, got = evaluate(
        PolicyObjective(AlgorithmConfig()), logp, columns, Denominators(10, 2), entropy=[1.0, 2.0, 3.0, 4.0]
    )
    # -1.2 (clipped) x 1, 1.6 (clipped) x 1.5, 3.0 (bounded) x 2.0 (capped)
    assert loss == pytest.approx((-1.2 + 1.6 * 1.5 + 3.0 * 2.0) / 10)
    k3 = (1 - math.log(2)) + (-0.5 - math.log(0.5)) + (4 - math.log(5))
    expected = {
        "loss": 0.72,
        "pg_loss": 0.72,
        "pg_clipfrac": 0.2,
        "pg_clipfrac_lower": 0.1,
        "ppo_kl": k3 / 10,
        "ratio/mean": 0.75,
        "ratio/max": 5.0,
        "ratio/min": 0.5,
        "logp/mean": (-1 - 2 - 1 + math.log(2 * 0.5 * 5)) / 10,
        "entropy": 0.6,
        "masked": 0.0,
        "correction/mean": 0.45,
        "correction/bounded": 0.1,
        "correction/ess": 4.5**2 / (1 + 2.25 + 4) / 10,
    }
    assert got == pytest.approx(expected, rel=1e-6)


def test_correction_can_be_off():
    objective = PolicyObjective(AlgorithmConfig(correction=None))
    loss, _, metrics = evaluate(objective, [-1.0], columns_of([1], [1.0], [-1.0], [-9.0]), Denominators(1, 1))
    assert loss == -1.0 and not any(name.startswith("correction") for name in metrics)


def test_on_policy_is_exactly_one_and_zero():
    """In fp32, with numbers as a model gives them."""
    generator = torch.Generator().manual_seed(3)
    logp_T = -torch.rand(50, generator=generator) * 8
    columns = columns_of([1] * 50, [0.5] * 50, [0.0] * 50)
    columns = replace(columns, logp_old_T=logp_T, logp_rollout_T=logp_T)
    _, metrics = PolicyObjective(AlgorithmConfig(correction=None))(logp_T, None, columns, Denominators(50, 1), NONE)
    values = {name: metric.value.item() for name, metric in metrics.items()}
    assert (values["ratio/mean"], values["ratio/max"], values["ratio/min"], values["ppo_kl"]) == (1, 1, 1, 0)
    assert values["pg_clipfrac"] == values["pg_clipfrac_lower"] == 0


def test_an_empty_micro_batch_gives_the_identities():
    columns = columns_of([0, 0], [1.0, 1.0], [-1.0, -1.0])
    loss, slope, metrics = evaluate(PolicyObjective(AlgorithmConfig()), [0.0, 0.0], columns, Denominators(3, 1))
    assert loss == 0 and slope == [0, 0]
    assert metrics.pop("ratio/max") == -math.inf and metrics.pop("ratio/min") == math.inf
    assert set(metrics.values()) == {0}


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("objective", [PolicyObjective(AlgorithmConfig()), SupervisedObjective()])
def test_what_stands_at_no_action_reaches_neither_loss_nor_gradient(objective, junk):
    columns = columns_of([1, 0], [1.0, junk], [-1.0, junk], [-1.0, -junk], weight=0.5)
    columns = replace(columns, weight_T=real([0.5, junk]))
    loss, slope, metrics = evaluate(objective, [-1.0, junk], columns, Denominators(2, 1), entropy=[1.0, junk])
    assert abs(loss) == 0.5 and slope == [-0.5, 0.0]
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize(("gap", "advantage"), [(500.0, 1.0), (500.0, -1.0), (-500.0, 1.0), (-500.0, -1.0)])
def test_a_huge_log_ratio_stays_finite(gap, advantage):
    columns = columns_of([1], [advantage], [-600.0], rollout=[-600.0 + gap])
    columns = replace(columns, logp_old_T=columns.logp_old_T.float())  # in fp32 exp(500) is infinite
    loss, slope, metrics = evaluate(PolicyObjective(AlgorithmConfig()), [-600.0 + gap], columns, Denominators(1, 1))
    assert abs(loss) <= 3.0 and slope == [0.0]
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("column", ["logp", "logp_old", "logp_rollout", "advantage"])
def test_a_number_that_is_not_finite_names_its_sample(column, bad):
    values = {name: [-1.0, -1.0, -1.0] for name in ("logp", "logp_old", "logp_rollout", "advantage")}
    values[column][1] = bad
    columns = columns_of([1, 1, 1], values["advantage"], values["logp_old"], values["logp_rollout"], sample=[0, 2, 2])
    with pytest.raises(ValueError, match=rf"sample 2 of the micro-batch .* position 1 .*{column} {bad}"):
        evaluate(PolicyObjective(AlgorithmConfig()), values["logp"], columns, Denominators(3, 2))


def test_minus_infinity_of_the_trainer_is_refused_and_of_the_engine_is_an_extreme_ratio():
    impossible = columns_of([1, 1], [1.0, 1.0], [-1.0, -1.0], [-1.0, -math.inf], sample=[0, 1], weight=0.5)
    with pytest.raises(ValueError, match=r"sample 1 .*\(logp -inf"):
        evaluate(PolicyObjective(AlgorithmConfig()), [-1.0, -math.inf], impossible, Denominators(2, 2))
    capped = PolicyObjective(AlgorithmConfig(correction={"weight": {"cap": 2.0}}))
    loss, _, metrics = evaluate(capped, [-1.0, -1.0], impossible, Denominators(2, 2))
    assert loss == -1.5 and metrics["correction/bounded"] == 0.5
    masked = PolicyObjective(AlgorithmConfig(correction=MASKED))
    loss, slope, metrics = evaluate(masked, [-1.0, -1.0], impossible, Denominators(2, 2))
    assert (loss, slope, metrics["masked"]) == (-0.5, [-0.5, 0.0], 0.5)


def test_a_loss_around_the_engine_needs_no_old_log_probs_and_reports_the_mismatch():
    objective = PolicyObjective(AlgorithmConfig(loss=DppoTvLoss(), correction=None))
    assert "logp_old" not in objective.needs
    columns = replace(columns_of([1, 1], [1.0, 1.0], [0.0, 0.0], [-1.0, -2.0]), logp_old_T=None)
    _, _, metrics = evaluate(objective, [-1.1, -1.7], columns, Denominators(2, 1))
    assert metrics["mismatch/mean_abs"] == pytest.approx(0.2)
    assert metrics["mismatch/max_abs"] == pytest.approx(0.3)
    assert metrics["mismatch/k3"] == pytest.approx((math.exp(-0.1) - 0.9 + math.exp(0.3) - 1.3) / 2)


@pytest.mark.parametrize("kind", ["dual_clip", "gspo", "gmpo", "cispo", "sapo", "dro"])
def test_around_the_engine_a_loss_is_what_it_is_around_an_old_policy_that_sampled(kind):
    """Ratios to the engine on both sides of all clips; pi_old, which has no effect, is somewhere else."""
    engine, ratios = [-1.0, -2.0, -1.5, -3.0, -0.5], real([2.0, 1.1, 0.3, 0.9, 6.0])
    columns = columns_of([1] * 5, [1.0, -1.0, -2.0, 0.5, -1.0], [-9.0] * 5, engine, sample=[0, 0, 1, 1, 2], weight=0.2)
    logp, cfg = real(engine) + ratios.log(), AlgorithmConfig(loss={"kind": kind}, correction=None, anchor="engine")
    around_engine = PolicyObjective(cfg)
    assert "logp_old" not in around_engine.needs
    found = evaluate(around_engine, logp, replace(columns, logp_old_T=None), Denominators(5, 3))
    usual = PolicyObjective(AlgorithmConfig(loss={"kind": kind}, correction=None))
    expected = evaluate(usual, logp, replace(columns, logp_old_T=real(engine)), Denominators(5, 3))
    assert found[:2] == expected[:2] and found[2].items() >= expected[2].items()
    assert evaluate(around_engine, logp, columns, Denominators(5, 3))[:2] == expected[:2]


def test_a_clip_around_a_policy_between_the_engine_and_the_present_one():
    """Three versions later pi is e^0.8 mu: p is e^0.6 mu, the weight min(e^0.6, 1.5), and the ratio e^0.2 is clipped at
    1.2. With lag 0 p is mu: the weight is 1, and the ratio e^0.1."""
    cfg = AlgorithmConfig(anchor="interpolated", correction={"weight": {"cap": 1.5}})
    columns = columns_of([1, 1], [1.0, 1.0], [0.0, 0.0], [-2.0, -2.0], weight=0.5)
    columns = replace(columns, logp_old_T=None, lag_T=torch.tensor([3, 0]))
    loss, slope, metrics = evaluate(PolicyObjective(cfg), [-1.2, -1.9], columns, Denominators(2, 1))
    assert loss == pytest.approx(-0.5 * (1.5 * 1.2 + math.exp(0.1)))
    assert slope == pytest.approx([0.0, -0.5 * math.exp(0.1)])
    assert metrics["correction/bounded"] == metrics["pg_clipfrac"] == 0.5
    assert metrics["ratio/max"] == pytest.approx(math.exp(0.2))


def test_only_tokens_of_the_steps_own_weights_are_judged():
    objective = PolicyObjective(AlgorithmConfig(loss=DppoTvLoss(), correction=None))
    columns = replace(columns_of([1] * 3, [1.0] * 3, [0.0] * 3, [-1.0, -2.0, -3.0]), logp_old_T=None)

    def judged(lag):
        _, _, metrics = evaluate(
            objective, [-1.1, -1.7, -9.0], replace(columns, lag_T=torch.tensor(lag)), Denominators(3, 1)
        )
        return objective.conclude(metrics, 0.25)

    metrics = judged([0, 0, 1])
    assert metrics["mismatch/mean_abs"] == pytest.approx(0.2) and metrics["mismatch/judged"] == pytest.approx(2 / 3)
    assert metrics["mismatch/max_abs"] == pytest.approx(0.3)
    assert metrics["mismatch/k3"] == pytest.approx((math.exp(-0.1) - 0.9 + math.exp(0.3) - 1.3) / 2)
    with pytest.raises(ValueError, match="mean of .* is 2.13e"):
        judged([0, 0, 0])
    assert {name: x for name, x in judged([1, 1, 1]).items() if "mismatch" in name} == {"mismatch/judged": 0.0}


def test_masking_leaves_the_denominator_alone():
    """CONTRACTS: rejection changes numerators only."""
    columns = columns_of([1, 1], [1.0, 1.0], [-1.0, -1.0], [-1.0, -9.0], weight=0.5)
    masked = PolicyObjective(AlgorithmConfig(correction=MASKED))
    loss, _, metrics = evaluate(masked, [-1.0, -1.0], columns, Denominators(2, 1))
    assert loss == -0.5 and metrics["ratio/mean"] == 1.0


def test_supervised_golden():
    columns = columns_of([1, 0, 1], [0.0] * 3, [0.0] * 3, weight=1 / 8)
    loss, slope, metrics = evaluate(SupervisedObjective(), [-1.0, math.nan, -3.0], columns, Denominators(8, 2))
    assert loss == metrics["loss"] == 0.5 and slope == [-1 / 8, 0, -1 / 8]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"loss": {"kind": "dual_clip", "clip_ratio_c": 1.0}}, "greater than 1"),
        ({"loss": {"kind": "gspo"}, "correction": MASKED}, "masks parts of a sample contradicts"),
        (
            {
                "loss": {"kind": "gmpo"},
                "correction": {"reject": [{"level": "segment", "statistic": "k2", "over": "sum", "high": 1}]},
            },
            "masks parts of a sample contradicts.*correction.reject, to sequence",
        ),
        ({"loss": {"kind": "gmpo"}, "top_entropy_share": 0.2}, "top_entropy_share masks single tokens"),
        ({"loss": {"kind": "dppo_tv"}, "correction": {}}, "a correction would apply it twice"),
        ({"anchor": "engine", "correction": {}}, "the ratio of anchor engine contains .* a correction would apply it"),
        ({"anchor": "engine", "loss": {"kind": "reinforce"}, "correction": None}, "reinforce does not, or has its own"),
        ({"anchor": "interpolated", "loss": {"kind": "dppo_tv"}}, "anchor interpolated is for losses .* has its own"),
        ({"anchor": "interpolated", "correction": {"weight": {"normalise": True}}}, "set normalise to false"),
        ({"loss": {"kind": "clip_cov", "cov_low": 5.0}}, "must be below cov_high"),
        ({"kl": {"estimator": "k1"}}, "the expectation of its gradient.*is zero"),
        ({"kl": {"place": "reward", "straight_through": True}}, "a KL in the reward has none"),
        ({"kl": {"estimator": "k2", "straight_through": True}}, "which k2 has"),
        ({"correction": {"weight": {"kind": "mask", "low": 1.0}}}, "less than 1"),
        ({"correction": {"weight": {"cap": 0.5}}}, "greater than or equal to 1"),
        ({"loss_agg_mode": "seq-mean-token-sum-norm"}, "give both or neither"),
        ({"loss_agg_tokens": 9}, "give both or neither"),
        ({"loss": {"kind": "ppo"}}, "dual_clip"),
    ],
)
def test_combinations_that_mean_nothing_are_refused_with_the_reason(changes, reason):
    with pytest.raises(ValueError, match=reason):
        AlgorithmConfig(**changes)


@pytest.mark.parametrize("given", [{"loss": {"kind": "dppo_kl"}}, {"anchor": "engine"}])
def test_a_loss_that_contains_the_weight_has_no_correction_by_default(given):
    config = AlgorithmConfig(**given)
    assert config.correction is None
    assert AlgorithmConfig(**config.model_dump(exclude_unset=True)) == AlgorithmConfig(**config.model_dump()) == config
    assert AlgorithmConfig().correction is not None


@pytest.mark.parametrize("level", ["sequence", "segment"])
def test_a_shared_weight_is_of_the_log_ratios_as_they_are(level):
    """One token of -90 among 40: the geometric mean is 0.11, and not 0.61 as with -20 in its place."""
    rollout = [-1.0 + 90] + [-1.0] * 39
    columns = columns_of([1] * 40, [1.0] * 40, [-1.0] * 40, rollout, weight=1 / 40)
    objective = PolicyObjective(AlgorithmConfig(correction={"weight": {"level": level}}))
    loss, _, _ = evaluate(objective, [-1.0] * 40, columns, Denominators(40, 1))
    assert loss == pytest.approx(-math.exp(-90 / 40))


def test_each_rule_counts_what_it_takes_out_and_the_denominator_stays():
    # Two samples of two tokens, log w = 0, 0 and log 3, 0.
    columns = columns_of([1] * 4, [1.0] * 4, [-1.0] * 4, [-1.0, -1.0, -1.0 - math.log(3), -1.0], [0, 0, 1, 1], 0.25)
    rules = [
        {"level": "token", "statistic": "k1", "low": 0.5, "high": 2.0},
        {"level": "sequence", "statistic": "k1", "over": "mean", "high": 1.5},
        {"level": "sequence", "statistic": "k3", "over": "max", "high": 1.0},
    ]
    objective = PolicyObjective(AlgorithmConfig(correction={"weight": {"cap": 2.0}, "reject": rules}))
    loss, slope, metrics = evaluate(objective, [-1.0] * 4, columns, Denominators(4, 2))
    assert (loss, slope) == (-0.5, [-0.25, -0.25, 0, 0])
    rejected = {name: value for name, value in metrics.items() if name.startswith("rejected")}
    assert rejected == {
        "rejected/token_k1": 0.25,
        "rejected/sequence_mean_k1": 0.5,  # the geometric mean is sqrt 3
        "rejected/sequence_max_k3": 0.0,  # 3 - 1 - log 3 = 0.90
    }
    assert metrics["masked"] == 0.5 and metrics["correction/mean"] == 5 / 4


def test_rejection_around_the_current_policy_follows_the_update():
    rule = {"level": "sequence", "statistic": "k1", "over": "mean", "low": 0.6, "policy": "current"}
    cfg = AlgorithmConfig(correction={"weight": None, "reject": [{**rule, "only_negative": True}]})
    columns = columns_of([1, 1], [-1.0, 0.5], [-1.0, -1.0], sample=[0, 1], weight=0.5)
    _, _, metrics = evaluate(PolicyObjective(cfg), [-1.0, -1.0], columns, Denominators(2, 2))
    assert metrics["rejected/sequence_mean_k1_current_negative"] == 0
    # Both have become half as likely; the one with A > 0 stays.
    _, slope, metrics = evaluate(PolicyObjective(cfg), [-1.0 - math.log(2)] * 2, columns, Denominators(2, 2))
    assert metrics["rejected/sequence_mean_k1_current_negative"] == 0.5 and slope[0] == 0 and slope[1] != 0


@pytest.mark.parametrize(
    "changes", [{"entropy": {"coefficient": {"kind": "fixed", "value": 0.1}}}, {"top_entropy_share": 0.5}]
)
def test_an_entropy_that_is_used_must_be_finite(changes):
    objective = PolicyObjective(AlgorithmConfig(**changes))
    columns = columns_of([1, 1, 0], [1.0] * 3, [-1.0] * 3, sample=[0, 1, 1])
    logp_T = real([-1.0] * 3)
    (prepared,) = objective.prepare([columns], [FirstPass(logp_T, real([0.5, 0.7, 0.0]))], Denominators(2, 2), one_rank)
    objective(logp_T, real([0.5, 0.7, math.nan]), prepared, Denominators(2, 2), NONE)  # not at an action
    with pytest.raises(NotFiniteError, match="sample 1 .*nan") as caught:
        objective(logp_T, real([0.5, math.nan, 0.7]), prepared, Denominators(2, 2), NONE)
    assert caught.value.sample == 1


# What has statistics of the whole mini-batch; all else is known within a micro-batch, which has its samples whole.
WHOLE = [
    {"loss": {"kind": "clip_cov"}},
    {"loss": {"kind": "kl_cov"}},
    {"top_entropy_share": 0.5},
    {"correction": {"weight": {"normalise": True}}},
]
OWN = [
    {"loss": {"kind": kind}} for kind in ("dual_clip", "gspo", "gmpo", "cispo", "sapo", "dro", "reinforce", "gpg")
] + [
    {
        "correction": {
            "weight": {"level": level},
            "reject": [{"level": level, "statistic": "k3", "over": "sum", "high": 9}],
        }
    }
    for level in ("segment", "sequence")
]


def test_only_statistics_of_the_mini_batch_need_a_pass_before_the_update():
    for changes in WHOLE:
        assert PolicyObjective(AlgorithmConfig(**changes)).needs.is_before_update
    for changes in OWN:
        needs = PolicyObjective(AlgorithmConfig(**changes)).needs
        assert "logp_old" in needs and not needs.is_before_update


@pytest.mark.parametrize("changes", OWN, ids=str)
def test_without_logp_old_the_log_probs_of_the_update_stand_for_it_to_the_bit(changes):
    generator = torch.Generator().manual_seed(3)
    logp_T = (-torch.rand(50, generator=generator) * 8).requires_grad_()
    columns = columns_of([1] * 50, [0.5, -0.5] * 25, [0.0] * 50, sample=[t // 10 for t in range(50)], weight=0.02)
    columns = replace(columns, logp_rollout_T=logp_T.detach() + 0.3 * torch.randn(50, generator=generator))
    objective = PolicyObjective(AlgorithmConfig(**changes))
    given = {"with": replace(columns, logp_old_T=logp_T.detach().clone()), "without": replace(columns, logp_old_T=None)}
    results = {}
    for name, row in given.items():
        logp_T.grad = None
        loss, metrics = objective(logp_T, None, row, Denominators(50, 5), NONE)
        loss.backward()
        results[name] = logp_T.grad, {name: metric.value.item() for name, metric in metrics.items()}
    assert torch.equal(results["with"][0], results["without"][0])
    before = {name: m.value.item() for name, m in mismatch(logp_T.detach(), columns, 50).items()}
    assert results["with"][1] | before == results["without"][1]


def test_an_update_of_a_policy_that_is_not_the_engines_is_refused():
    objective = PolicyObjective(AlgorithmConfig())
    for seen in (0.02, math.nan):
        with pytest.raises(ValueError, match="algorithm.max_mismatch = 0.01"):
            objective.conclude({"mismatch/mean_abs": seen}, 0.01)
        assert objective.conclude({"mismatch/mean_abs": seen, "loss": 1.0}, None) == {"loss": 1.0}, "policy has moved"
    assert objective.conclude({"mismatch/mean_abs": 0.01}, 0.01) == {"mismatch/mean_abs": 0.01}


def test_an_impossible_token_of_the_engine_is_floored_in_the_mismatch_too():
    columns = columns_of([1, 1], [1.0, 1.0], [-1.0, -1.0], [-1.0, -math.inf])
    got = {name: metric.value.item() for name, metric in mismatch(real([-1.0, -1.0]), columns, 2).items()}
    assert got["mismatch/mean_abs"] == 99 / 2 and got["mismatch/max_abs"] == 99


def test_the_default_aggregation_is_the_papers():
    own = {
        kind.model_fields["kind"].default: AlgorithmConfig(loss=kind(), correction=None).aggregation
        for kind in LOSSES
        if kind is not FunctionLoss
    }
    assert {name for name, mode in own.items() if mode == "seq-mean-token-mean"} == {"gspo", "gmpo", "sapo", "a2po"}
    assert own.pop("reinforce") == "seq-mean-token-sum"
    assert {mode for mode in own.values()} == {"seq-mean-token-mean", "token-mean"}
    assert AlgorithmConfig(loss={"kind": "gspo"}, loss_agg_mode="token-mean").aggregation == "token-mean"


@pytest.mark.parametrize(
    ("correction", "reason"),
    [
        ({"weight": None}, "set algorithm.correction to null"),
        (
            {"reject": [{"level": "token", "statistic": "k3", "over": "mean", "high": 1}]},
            "the level is token; leave it",
        ),
        ({"reject": [{"level": "sequence", "statistic": "k3", "high": 1}]}, "over is missing: choose the sum"),
        ({"reject": [{"level": "token", "statistic": "k3"}]}, "needs a bound"),
        ({"reject": [{"level": "token", "statistic": "k2", "low": 0.1}]}, "low is for k1 only"),
        ({"reject": [{"level": "token", "statistic": "k1", "low": 1.1}]}, "w is 1 where engine and trainer agree"),
        ({"reject": [{"level": "token", "statistic": "k2", "high": h} for h in (1, 2)]}, "two rules token_k2"),
        (
            {"kind": "mask", "high": 4.0, "veto": 1e-4},
            r"correction: \{weight: \{kind: mask, high: 4.0\}, "
            r"reject: \[\{level: sequence, statistic: k1, over: max, low: 0.0001\}\]\}",
        ),
        ({"level": "sequence", "off_policy_kl": 0.5}, "over: mean, low: 0.607, policy: current, only_negative: true"),
    ],
)
def test_a_correction_that_means_nothing_is_refused_with_what_to_write(correction, reason):
    with pytest.raises(ValueError, match=reason):
        AlgorithmConfig(correction=correction)


def test_what_the_error_tells_to_write_is_a_configuration():
    told = "{weight: {kind: mask, low: 0.3}, reject: [{level: sequence, statistic: k1, over: max, low: 0.1}]}"
    with pytest.raises(ValueError, match=re.escape(told)):
        AlgorithmConfig(correction={"kind": "mask", "low": 0.3, "veto": 0.1})
    assert AlgorithmConfig(correction=yaml.safe_load(told)).correction.reject[0].low == 0.1


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_every_aggregation_is_a_valid_choice(mode):
    AlgorithmConfig(loss_agg_mode=mode, loss_agg_tokens=9 if mode.endswith("norm") else None)


@pytest.mark.parametrize(
    ("changes", "num_updates", "expected"),
    [
        ({}, 1, ["policy gradient 0"]),
        ({}, 2, ["policy log-probs logp_old", "policy gradient 0", "policy gradient 1"]),
        ({"loss": {"kind": "dppo_tv"}, "correction": None}, 2, ["policy gradient 0", "policy gradient 1"]),
        (
            {"kl": {}, "top_entropy_share": 0.2},
            2,
            [
                "reference log-probs logp_ref",
                "policy log-probs logp_old",
                "policy gradient 0",
                "policy log-probs 1",
                "policy gradient 1",
            ],
        ),
        ({"adv_estimator": {"kind": "gae"}}, 1, ["critic values value", "policy gradient 0"]),
        (
            {"adv_estimator": {"kind": "reinforce_plus_plus"}, "kl": {"place": "reward"}},
            1,
            ["reference log-probs logp_ref", "policy log-probs logp_old", "policy gradient 0"],
        ),
    ],
)
def test_the_passes_of_a_step_follow_from_the_columns_that_are_needed(changes, num_updates, expected):
    passes = PolicyObjective(AlgorithmConfig(**changes)).needs.passes(num_updates)
    found = [f"{one.model} {one.computes} {one.leaves if one.update is None else one.update}" for one in passes]
    assert found == expected


@pytest.mark.parametrize(
    ("bounds", "metrics", "stops"),
    [
        ({"kl": 0.1}, {"ppo_kl": 0.11, "ratio/max": 1.0, "ratio/min": 1.0}, True),
        ({"kl": 0.1}, {"ppo_kl": 0.1, "ratio/max": 9.0, "ratio/min": 0.1}, False),
        ({"ratio": 4.0}, {"ppo_kl": 9.0, "ratio/max": 4.0, "ratio/min": 0.25}, False),
        ({"ratio": 4.0}, {"ppo_kl": 0.0, "ratio/max": 4.1, "ratio/min": 0.25}, True),
        ({"ratio": 4.0}, {"ppo_kl": 0.0, "ratio/max": 1.0, "ratio/min": 0.2}, True),
        ({"ratio": 4.0}, {"ppo_kl": 0.0, "ratio/max": 1.0, "ratio/min": 0.0}, True),
    ],
)
def test_a_step_stops_beyond_a_bound(bounds, metrics, stops):
    assert PolicyObjective(AlgorithmConfig(epochs=2, stop_epochs=bounds)).stops(metrics) == stops
