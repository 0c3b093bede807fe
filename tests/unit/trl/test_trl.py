"""TRL's arguments against what TRL computes from them, by hand."""

from __future__ import annotations

from dataclasses import fields
from math import exp
from pathlib import Path

import pytest

from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.load import validate
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.trl import ARGUMENTS, GRPOConfig, GRPOTrainer
from megatron_rl.trl.mapping import configuration
from megatron_rl.trl.step_sizes import StepSizes

ROWS = [{"prompt": f"{i}+1=", "ground_truth": str(i + 1)} for i in range(100)]


def mapped(num_rows: int = 100, num_replicas: int = 1, **arguments) -> GrpoRunConfig:
    """The validated configuration of a run with these arguments."""
    sections = configuration(GRPOConfig(**arguments), num_rows, num_replicas)
    sections["run"]["name"], sections["model"]["path"], sections["data"]["train"] = "run", "model", "rows.jsonl"
    return validate(GrpoRunConfig, sections)


def test_names_and_defaults_are_those_of_trl():
    trl = pytest.importorskip("trl", reason="TRL is not among the packages; tests/unit/trl says how to compare")
    theirs = {one.name: one.default for one in fields(trl.GRPOConfig)}
    assert theirs.keys() == ARGUMENTS.keys()


@pytest.mark.parametrize(
    ("arguments", "replicas", "prompts", "updates"),
    [
        ({}, 1, 1, 1),  # 8 answers of 8
        ({"gradient_accumulation_steps": 4}, 1, 4, 1),
        ({"gradient_accumulation_steps": 4}, 2, 8, 1),
        ({"steps_per_generation": 4}, 1, 4, 4),
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 8, "num_generations": 16}, 1, 4, 2),
        ({"generation_batch_size": 64, "gradient_accumulation_steps": 2}, 1, 8, 4),
        ({"gradient_accumulation_steps": 8, "steps_per_generation": 4}, 1, 8, 1),  # two batches for one step
    ],
)
def test_batches_are_those_of_trl(arguments, replicas, prompts, updates):
    assert StepSizes.of(GRPOConfig(**arguments), replicas) == StepSizes(prompts, updates)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"num_generations": 3}, "8 answers are no whole number of groups of 3"),
        ({"generation_batch_size": 12}, "generation_batch_size 12 is not a multiple of 8"),
        ({"generation_batch_size": 16, "steps_per_generation": 2}, "not both"),
        ({"steps_per_generation": 3, "gradient_accumulation_steps": 2, "num_generations": 2}, "one must be a multiple"),
        ({"loss_type": "vespa"}, "loss_type='vespa' is not known"),
        ({"loss_type": "vespo", "use_vllm": True}, "vllm_importance_sampling_mode='token_truncate'"),
        ({"loss_type": "vespo", "off_policy_mask_threshold": 0.1}, "off_policy_mask_threshold"),
        ({"loss_type": "cispo", "epsilon_high": 0.0}, "epsilon_high=0.0 with cispo is the largest weight itself"),
        (
            {"importance_sampling_level": "sequence", "delta": 2.0},
            "importance_sampling_level='sequence' with delta=2.0",
        ),
        (
            {"use_vllm": True, "vllm_importance_sampling_mode": "sequence_truncate"},
            "sequence_truncate' is not supported",
        ),
        ({"lr_scheduler_type": "polynomial"}, "lr_scheduler_type='polynomial'"),
        ({"optim": "adafactor"}, "optim='adafactor' is not known"),
        ({"report_to": ["trackoi"]}, "report_to='trackoi' is not known"),
        ({"model_init_kwargs": {"num_labels": 2}}, "model_init_kwargs has {'num_labels': 2}"),
        ({"model_init_kwargs": {"trust_remote_code": True}}, "trust_remote_code: the code of a model folder"),
        ({"delta": 1.1}, "delta=1.1 is below 1 .* epsilon_high = 1.2"),
        (
            {"num_iterations": 2, "steps_per_generation": 1, "gradient_accumulation_steps": 2},
            "num_iterations=2 repeats a batch of answers within an optimizer step",
        ),
        ({"num_iterations": 0}, "num_iterations=0 must be a whole number of at least 1"),
        ({"num_iterations": 1.5}, "num_iterations=1.5 must be a whole number"),
        ({"num_iterations": 2, "max_steps": 9}, "9 optimizer steps end within .* set max_steps to 8 or 10"),
        ({"beta": 0.1, "num_iterations": 2}, "with 2 optimizer steps .* or lower num_iterations"),
        ({"beta": 0.1, "steps_per_generation": 2}, "with 2 optimizer steps .* or lower steps_per_generation"),
        ({"entropy_coef": 0.1, "top_entropy_quantile": 0.2}, "entropy_coef with top_entropy_quantile"),
        (
            {"steps_per_generation": 8, "per_device_train_batch_size": 1},
            "has 1 answers, .* set gradient_accumulation_steps to 8",
        ),
        ({"steps_per_generation": 3, "num_generations": 12}, "has 8 answers, .* set gradient_accumulation_steps to 3"),
        (
            {"per_device_train_batch_size": 12, "steps_per_generation": 2, "num_generations": 8},
            "an optimizer step has 12 answers, which is no whole number of groups of 8, .* to 2",
        ),
        ({"max_steps": 10, "steps_per_generation": 4}, "10 optimizer steps end within .* set max_steps to 8 or 12"),
        ({"per_device_train_batch_size": 1024}, "train_dataset has 100 rows, less than the 128 of a batch"),
        ({"scale_rewards": "all"}, "scale_rewards='all'"),
        ({"save_strategy": "best"}, "save_strategy='best' is not known"),
    ],
)
def test_what_cannot_be_expressed_is_refused_by_its_name(arguments, said):
    with pytest.raises(ValueError, match=f"GRPOConfig: .*{said}".replace("[", r"\[").replace("{", r"\{")):
        mapped(**arguments)


def test_arguments_that_change_the_meaning_are_refused_together():
    told = r"sync_ref_model=True is not supported: .*loss_type='v' is not .*"
    with pytest.raises(ValueError, match=told + "scale_rewards='all'"):
        GRPOConfig(sync_ref_model=True, top_p=0.9, top_k=3, loss_type="v", scale_rewards="all")
    with pytest.raises(TypeError, match="'num_generation'.*'num_generations'"):
        GRPOConfig(num_generation=4)
    with pytest.raises(TypeError, match="'max_prompt_len'.*'one'.*top_p=0.9"):
        GRPOConfig(max_prompt_len=3, one=1, top_p=0.9)


@pytest.mark.parametrize(
    ("arguments", "every"),
    [({"eval_steps": 3}, 3), ({}, 10), ({"logging_steps": 1}, 1), ({"eval_steps": 0.1, "max_steps": 25}, 3)],
)
def test_evaluations_come_as_often_as_in_transformers(arguments, every):
    """Without eval_steps as often as logs; a share of the steps is rounded up."""
    assert mapped(eval_strategy="steps", **arguments).eval.every == every


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"loss_type": "sapo", "importance_sampling_level": "sequence"}, "sequence' with loss_type='sapo' is not"),
        (
            {"loss_type": "cispo", "importance_sampling_level": "sequence", "epsilon_high": 5.0},
            "with loss_type='cispo'",
        ),
        ({"beta": 0.1, "importance_sampling_level": "sequence"}, "weighs the KL by a sequence's ratio"),
        ({"temperature": 0.0}, "temperature=0.0 samples nothing to learn from"),
        ({"num_generations": 1}, "num_generations=1: a group needs two answers"),
    ],
)
def test_a_meaning_that_is_another_one_here_is_refused(arguments, told):
    with pytest.raises(ValueError, match=told):
        GRPOConfig(**arguments)


def test_no_limit_of_saves_is_no_number():
    assert mapped(save_total_limit=0).checkpoint.keep == mapped().checkpoint.keep


def test_a_script_learns_all_its_faults_at_once():
    wrong = {
        "nonsense": 1,
        "sync_ref_model": True,
        "top_p": 0.5,
        "optim": "sgd",
        "delta": 1.1,
        "lr_scheduler_type": "polynomial",
    }
    with pytest.raises(TypeError) as raised:
        GRPOConfig(**wrong)
    assert all(name in str(raised.value) for name in wrong)
    with pytest.raises(TypeError) as raised:
        GRPOTrainer("nowhere", None, rollout_func=print, optimizers=(1, 2), compute_metrics=print, callbacks=[print])
    told = str(raised.value)
    assert all(name in told for name in ("rollout_func", "optimizers", "compute_metrics", "on_init_end"))
    assert "reward" in told and "train_dataset" in told


def test_a_script_under_a_launcher_is_told_to_start_plainly(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(ValueError, match="`python`"):
        GRPOConfig()


def test_steps_come_from_epochs_or_from_optimizer_steps():
    assert mapped(num_rows=100, num_train_epochs=2, gradient_accumulation_steps=4).run.steps == 50  # 4 prompts a step
    config = mapped(max_steps=32, steps_per_generation=4, save_steps=10, eval_strategy="steps", eval_steps=0.2)
    assert (config.run.steps, config.algorithm.updates_per_step) == (8, 4)  # 32 optimizer steps of four a batch
    assert config.checkpoint.every == 2 and config.eval.every == 2  # 10 of 4; a fifth of 32 are 6 of 4
    assert mapped(max_steps=40, warmup_steps=0.1).policy.optimizer.warmup_steps == 4
    assert mapped(save_strategy="no").checkpoint.every == 0
    assert mapped(num_rows=100, eval_strategy="epoch", gradient_accumulation_steps=10).eval.every == 10


@pytest.mark.parametrize(
    ("arguments", "loss", "aggregation"),
    [
        ({}, {"kind": "dual_clip", "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": None}, "token-mean"),
        ({"loss_type": "grpo", "epsilon_high": 0.28}, {"clip_ratio_high": 0.28}, "seq-mean-token-mean"),
        ({"loss_type": "bnpo", "delta": 4.0}, {"clip_ratio_c": 4.0}, "token-mean"),
        ({"loss_type": "dr_grpo"}, {"kind": "dual_clip"}, "seq-mean-token-sum-norm"),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, {"kind": "cispo", "clip_ratio_high": 4.0}, "token-mean"),
        ({"loss_type": "cispo"}, {"kind": "cispo", "clip_ratio_high": -0.8}, "token-mean"),
        ({"loss_type": "sapo"}, {"kind": "sapo", "tau_neg": 1.05}, "seq-mean-token-mean"),
        ({"loss_type": "vespo", "vespo_k_neg": 2.5}, {"kind": "vespo", "k_neg": 2.5, "cap": None}, "token-mean"),
        (
            {"loss_type": "vespo", "use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"},
            {"kind": "vespo", "lambda_pos": 3.0, "cap": 3.0},
            "token-mean",
        ),
        ({"loss_type": "luspo", "importance_sampling_level": "sequence"}, {"kind": "gspo"}, "seq-mean-token-sum"),
    ],
)
def test_losses_are_those_of_trl(arguments, loss, aggregation):
    algorithm = mapped(**arguments).algorithm
    assert loss.items() <= algorithm.loss.model_dump().items() and algorithm.loss_agg_mode == aggregation
    assert algorithm.loss_agg_tokens == (512 if aggregation == "seq-mean-token-sum-norm" else None)
    assert not algorithm.drop_zero_signal, "TRL counts samples without a signal in its denominators"


def test_the_correction_is_that_of_the_mode():
    assert mapped().algorithm.correction == AlgorithmConfig().correction, "vLLM generates, so it has the usual one"
    assert mapped(off_policy_mask_threshold=0.1).algorithm.correction.weight is not None
    masked = mapped(use_vllm=True).algorithm.correction
    [rule] = masked.reject
    assert (rule.level, rule.over, rule.low, rule.high) == ("sequence", "sum", None, 3.0)
    cut = mapped(use_vllm=True, vllm_importance_sampling_mode="token_truncate", off_policy_mask_threshold=0.1)
    assert cut.algorithm.correction.weight.cap == 3.0
    assert cut.algorithm.correction.reject[0].low == pytest.approx(exp(-0.1))
    assert mapped(use_vllm=True, vllm_importance_sampling_correction=False).algorithm.correction is None


def test_terms_and_numbers_of_the_optimizer():
    config = mapped(beta=0.04, entropy_coef=0.01, learning_rate=3e-6, adam_beta2=0.99, lr_scheduler_type="cosine")
    assert config.algorithm.kl.coefficient.value == 0.04 and config.algorithm.kl.straight_through
    assert config.algorithm.entropy.coefficient.value == 0.01
    assert config.algorithm.entropy.aggregation == "token-mean", "TRL's bonus is a mean for every loss_type"
    optimizer = config.policy.optimizer
    assert (optimizer.lr, optimizer.betas, optimizer.schedule, optimizer.min_lr_ratio) == (
        3e-6,
        (0.9, 0.99),
        "cosine",
        0,
    )
    assert mapped(gradient_checkpointing=False).model.recompute == "none"


@pytest.mark.parametrize(
    ("arguments", "dtype"),
    [
        ({"bf16": True}, "bfloat16"),
        ({"bf16": False}, "float32"),
        ({"fp16": True}, "float16"),
        ({"fp16": True, "bf16": False}, "float16"),
        ({"model_init_kwargs": {"dtype": "float16"}}, "float16"),
        ({"model_init_kwargs": {"torch_dtype": "torch.float16"}}, "float16"),
    ],
)
def test_the_type_of_the_model_is_mapped(arguments, dtype):
    assert mapped(**arguments).model.dtype == dtype


def test_two_types_at_once_are_refused():
    with pytest.raises(ValueError, match="fp16 and bf16 are both true"):
        mapped(fp16=True, bf16=True)


def test_a_trainer_refuses_by_name_what_it_would_ignore():
    given = {"model": "model", "train_dataset": ROWS, "reward_funcs": len}
    told = "reward_weights has 2 numbers for 1 reward_funcs; peft_config: object is no LoraConfig of PEFT"
    with pytest.raises(ValueError, match=f"GRPOTrainer: rollout_func is not supported: .*; {told}"):
        args = GRPOConfig(reward_weights=[1.0, 2.0])
        GRPOTrainer(**given, args=args, peft_config=object(), rollout_func=len)
    with pytest.raises(ValueError, match="`hf download a/b --local-dir models/b`"):
        GRPOTrainer(**given | {"model": "a/b"}, args=GRPOConfig()).train()
    with pytest.raises(TypeError, match="on_init_end.*TrainerCallback"):
        GRPOTrainer(**given, callbacks=[lambda *told: None])
    with pytest.raises(ValueError, match="nothing was evaluated"):
        GRPOTrainer(**given).evaluate()


def test_the_page_for_those_who_come_from_trl_has_all_arguments():
    from megatron_rl.trl.__main__ import page

    root = Path(__file__).parents[3]
    assert (root / "docs" / "coming_from_trl.md").read_text() == page() + "\n", "python -m megatron_rl.trl writes it"
