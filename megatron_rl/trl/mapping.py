"""Maps the arguments of TRL's GRPOConfig to the sections of a run.

Invariants (tests/unit/trl): batches, steps and losses have the values that TRL computes from the same arguments; what
cannot be expressed is an error that names the argument.
"""

from __future__ import annotations

import math
from typing import Any

from megatron_rl.trl.common import Calendar, common_sections, faults_of, replicas_of
from megatron_rl.trl.notices import tell
from megatron_rl.trl.step_sizes import StepSizes


def faults_of_grpo(args: Any) -> list[str]:
    """What cannot be expressed for any model and rows."""
    parts = (_sampling, _loss, _estimator, _correction, _entropy)
    return faults_of(
        args,
        (
            lambda: _updates_of(StepSizes.of(args, replicas_of(args)), args),
            *(lambda part=part: part(args) for part in parts),
        ),
    )


def _sampling(args: Any) -> None:
    if args.temperature <= 0:
        raise ValueError(f"GRPOConfig: temperature={args.temperature} samples nothing to learn from; write 1.0")
    if args.num_generations < 2:
        raise ValueError(f"GRPOConfig: num_generations={args.num_generations}: a group needs two answers or more")


def _updates_of(sizes: StepSizes, args: Any) -> None:
    if args.importance_sampling_level == "sequence" and args.beta and args.use_bias_correction_kl:
        raise ValueError(
            "GRPOConfig: use_bias_correction_kl=True with importance_sampling_level='sequence' weighs the KL by a "
            "sequence's ratio, which is not expressed here; write False"
        )
    if sizes.updates > 1 and args.beta and args.use_bias_correction_kl:
        cause = "num_iterations" if sizes.epochs > 1 else "steps_per_generation"
        raise ValueError(
            f"GRPOConfig: use_bias_correction_kl=True with {sizes.updates} optimizer steps on a batch of answers "
            f"weighs the KL by the ratio, which is not expressed here; write False (TRL has True), or lower {cause}"
        )


def _updates(sizes: StepSizes) -> dict[str, Any]:
    """TRL's iterations have the same mini-batches."""
    repeated = {"epochs": sizes.epochs, "reshuffle": False} if sizes.epochs > 1 else {}
    return {"updates_per_step": sizes.minibatches, **repeated}


def configuration(args: Any, num_rows: int, num_replicas: int = 1) -> dict[str, Any]:
    """The sections of a run with these arguments, without model, rows and rewards.

    Args:
        num_rows: of the training rows, which give the number of steps if there is no `max_steps`.
        num_replicas: `policy.parallel.data`: TRL's number of processes.

    Raises:
        ValueError: a value cannot be expressed; the message names the argument.
    """
    sizes = StepSizes.of(args, num_replicas)
    _updates_of(sizes, args)
    updates = sizes.optimizer_steps(args, num_rows, num_replicas)
    calendar = Calendar(updates, sizes.updates, num_rows // sizes.prompts)
    rollout: dict[str, Any] = {
        "prompts_per_step": sizes.prompts,
        "samples_per_prompt": args.num_generations,
        "max_response_tokens": args.max_completion_length,
        "sampling": {"temperature": args.temperature},
        "delimiter": "",
    }
    if args.use_vllm:
        rollout["gpu_memory_utilization"] = args.vllm_gpu_memory_utilization
        rollout["parallel"] = {"tensor": args.vllm_tensor_parallel_size}
    if args.max_prompt_length is not None:
        rollout["max_prompt_tokens"] = args.max_prompt_length
    return {
        **common_sections(args, calendar),
        "rollout": rollout,
        "algorithm": _algorithm(args) | _updates(sizes),
        "data": {"chat_template": dict(args.chat_template_kwargs or {}), "shuffle": args.shuffle_dataset},
        "eval": {
            "every": calendar.every(args, "eval"),
            "samples_per_prompt": args.num_generations_eval or args.num_generations,
        },
    }


def _algorithm(args: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        **_loss(args),
        "adv_estimator": _estimator(args),
        **_correction(args),
        "drop_zero_signal": False,  # TRL counts such samples in its denominators
        "overlong_filter": args.mask_truncated_completions,
        "top_entropy_share": args.top_entropy_quantile,
    }
    if args.beta:
        found["kl"] = {
            "estimator": "k3",
            "cap": None,
            "straight_through": args.use_bias_correction_kl,
            "coefficient": {"kind": "fixed", "value": args.beta},
        }
    if entropy := _entropy(args):
        found["entropy"] = entropy
    return found


def _entropy(args: Any) -> dict[str, Any] | None:
    """TRL's bonus is the mean over the tokens for every loss."""
    if not args.use_adaptive_entropy and not args.entropy_coef:
        return None
    if args.top_entropy_quantile < 1:
        raise ValueError(
            "GRPOConfig: entropy_coef with top_entropy_quantile: TRL's bonus is of the tokens of high entropy alone, "
            "and here it is of all; give one of the two"
        )
    coefficient: dict[str, Any] = {"kind": "fixed", "value": args.entropy_coef}
    if args.use_adaptive_entropy:
        coefficient = {
            "kind": "adaptive",
            "initial": args.entropy_coef,
            "target": args.entropy_target,
            "delta": args.entropy_coef_delta,
            "maximum": args.entropy_coef_max,
        }
    return {"coefficient": coefficient, "aggregation": "token-mean"}


def _loss(args: Any) -> dict[str, Any]:
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    aggregations = {
        "grpo": "seq-mean-token-mean",
        "dapo": "token-mean",
        "bnpo": "token-mean",
        "dr_grpo": "seq-mean-token-sum-norm",
        "cispo": "token-mean",
        "sapo": "seq-mean-token-mean",
        "luspo": "seq-mean-token-sum",
        "vespo": "token-mean",
    }
    if args.loss_type not in aggregations:
        raise ValueError(f"GRPOConfig: loss_type={args.loss_type!r} is not known; known are {', '.join(aggregations)}")
    found: dict[str, Any] = {"loss_agg_mode": aggregations[args.loss_type]}
    if args.importance_sampling_level == "sequence" and args.loss_type in ("bnpo", "dr_grpo", "dapo"):
        tell(
            f"importance_sampling_level='sequence' with loss_type={args.loss_type!r} adds up tokens, so that a "
            "sequence weighs by its length; GSPO's paper has loss_type='grpo'"
        )
    if args.importance_sampling_level == "sequence" and args.loss_type in ("cispo", "sapo", "vespo"):
        raise ValueError(
            f"GRPOConfig: importance_sampling_level='sequence' with loss_type={args.loss_type!r} is not supported: the "
            "loss has a ratio for each token here; write token"
        )
    if args.loss_type == "dr_grpo":
        found["loss_agg_tokens"] = args.max_completion_length
    if args.loss_type == "cispo":
        if high <= 0:
            raise ValueError(f"GRPOConfig: epsilon_high={high} with cispo is the largest weight itself; write 5.0")
        return found | {"loss": {"kind": "cispo", "clip_ratio_low": 1.0, "clip_ratio_high": high - 1}}
    if args.loss_type == "sapo":
        low = {"tau_pos": args.sapo_temperature_pos, "tau_neg": args.sapo_temperature_neg}
        return found | {"loss": {"kind": "sapo", **low}}
    if args.loss_type == "vespo":
        return found | {"loss": _vespo(args)}
    clip = {"clip_ratio_low": args.epsilon, "clip_ratio_high": high}
    if args.delta is not None and args.delta < 1 + high:
        raise ValueError(
            f"GRPOConfig: delta={args.delta} is below 1 + epsilon_high = {1 + high:g}, where TRL's bound also cuts "
            "ratios of positive advantages, which is not expressed here; raise it"
        )
    if args.importance_sampling_level == "token":
        return found | {"loss": {"kind": "dual_clip", **clip, "clip_ratio_c": args.delta}}
    if args.importance_sampling_level == "sequence" and args.delta is None:
        return found | {"loss": {"kind": "gspo", **clip}}
    raise ValueError(
        f"GRPOConfig: importance_sampling_level={args.importance_sampling_level!r} with delta={args.delta} is not "
        f"supported; write token, or sequence without delta"
    )


def _vespo(args: Any) -> dict[str, Any]:
    """VESPO's weight contains TRL's correction of a token. Without vLLM TRL has none; see `_correction`."""
    cap = None
    if args.off_policy_mask_threshold is not None:
        raise ValueError("GRPOConfig: off_policy_mask_threshold with loss_type='vespo' is not supported; remove it")
    if args.use_vllm:
        mode, low = args.vllm_importance_sampling_mode, args.vllm_importance_sampling_clip_min
        if not args.vllm_importance_sampling_correction or mode != "token_truncate" or low is not None:
            raise ValueError(
                "GRPOConfig: loss_type='vespo' weighs by the engine's policy here; write "
                "vllm_importance_sampling_correction=True, vllm_importance_sampling_mode='token_truncate' and no "
                "vllm_importance_sampling_clip_min"
            )
        cap = args.vllm_importance_sampling_clip_max
    names = {name: getattr(args, f"vespo_{name}") for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")}
    return {"kind": "vespo", **names, "cap": cap}


def _estimator(args: Any) -> dict[str, Any]:
    scale = {True: "group", False: "none"}.get(args.scale_rewards, args.scale_rewards)
    if scale not in ("group", "batch", "none"):
        raise ValueError(f"GRPOConfig: scale_rewards={scale!r} is not known; write group, batch or none")
    if args.multi_objective_aggregation == "sum_then_normalize":
        return {"kind": "grpo", "std": scale}
    if args.multi_objective_aggregation == "normalize_then_sum":
        return {"kind": "gdpo"}
    raise ValueError(f"GRPOConfig: multi_objective_aggregation={args.multi_objective_aggregation!r} is not known")


def _correction(args: Any) -> dict[str, Any]:
    """The key `correction`. TRL corrects only for vLLM; its other engine shares the trainer's weights. Here vLLM always
    generates, so a script without vLLM has the correction that runs have by default."""
    if args.loss_type == "vespo":
        return {"correction": None}
    found: dict[str, Any] = {"weight": None, "reject": []}
    low, high = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
    if not args.use_vllm:
        found.pop("weight")
    elif args.vllm_importance_sampling_correction:
        mode = args.vllm_importance_sampling_mode
        if mode == "sequence_mask":
            found["weight"] = {"kind": "truncate", "level": "token", "cap": 2.0}
            bounds = {"low": low, "high": high}
            found["reject"].append({"level": "sequence", "statistic": "k1", "over": "sum", **bounds})
        elif mode == "token_truncate" and low is None:
            found["weight"] = {"kind": "truncate", "level": "token", "cap": high}
        elif mode in ("token_truncate", "token_mask"):
            kind = "mask" if mode == "token_mask" else "clip"
            found["weight"] = {"kind": kind, "level": "token", "low": low or 1e-9, "high": high or 1e9}
        else:
            raise ValueError(
                f"GRPOConfig: vllm_importance_sampling_mode={mode!r} is not supported: a weight for a whole sample is "
                f"the geometric mean of its ratios here; write token_truncate, token_mask or sequence_mask"
            )
    if args.off_policy_mask_threshold is not None:
        found["reject"].append(
            {
                "level": "sequence",
                "statistic": "k1",
                "over": "mean",
                "policy": "current",
                "low": math.exp(-args.off_policy_mask_threshold),
                "only_negative": True,
            }
        )
    if not args.use_vllm and not found["reject"]:
        return {}
    return {"correction": found if found.get("weight", True) or found["reject"] else None}
