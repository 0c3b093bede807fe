"""From TRL's arguments to the sections of a run.

Invariants (tests/unit/trl): batches, steps and losses have the values that TRL computes from the same arguments; what
cannot be expressed is an error that names the argument.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class StepSizes:
    """TRL counts optimizer steps, and we count batches of answers.

    Example: per_device_train_batch_size 8, gradient_accumulation_steps 4, steps_per_generation 8 and 16 generations on
    one replica are batches of 64 answers to 4 prompts, in two optimizer steps of 32.
    """

    prompts: int
    updates: int

    @classmethod
    def of(cls, args: Any, num_replicas: int = 1) -> StepSizes:
        """
        Raises:
            ValueError: the sizes do not divide each other.
        """
        size, accumulated = args.per_device_train_batch_size * num_replicas, args.gradient_accumulation_steps
        if args.generation_batch_size is not None and args.steps_per_generation is not None:
            raise ValueError("GRPOConfig: give generation_batch_size or steps_per_generation, not both")
        samples = args.generation_batch_size or size * (args.steps_per_generation or accumulated)
        passes, rest = divmod(samples, size)
        if rest:
            raise ValueError(
                f"GRPOConfig: generation_batch_size {samples} is not a multiple of {size}, the batch of a pass"
            )
        if passes % accumulated and accumulated % passes:
            raise ValueError(
                f"GRPOConfig: of {passes} passes over a batch of answers and {accumulated} passes of an optimizer step "
                f"one must be a multiple of the other; change gradient_accumulation_steps"
            )
        batches = max(1, accumulated // passes)
        prompts, rest = divmod(samples * batches, args.num_generations)
        if rest:
            raise ValueError(
                f"GRPOConfig: {samples * batches} answers are no whole number of groups of {args.num_generations}; "
                f"change per_device_train_batch_size or num_generations"
            )
        return cls(prompts, max(1, passes // accumulated))


def configuration(args: Any, num_rows: int, num_replicas: int = 1) -> dict[str, Any]:
    """The sections of a run with these arguments, without model, rows and rewards.

    Args:
        num_rows: of the training rows, which give the number of steps if there is no `max_steps`.
        num_replicas: `policy.parallel.data`: TRL's number of processes.

    Raises:
        ValueError: a value cannot be expressed; the message names the argument.
    """
    sizes = StepSizes.of(args, num_replicas)
    updates = (
        args.max_steps
        if args.max_steps > 0
        else math.ceil(args.num_train_epochs * num_rows / sizes.prompts) * sizes.updates
    )
    steps = math.ceil(updates / sizes.updates)

    def in_steps(argument: str, count: float) -> int:
        """The number of our steps: TRL's is one of optimizer steps, or a share of all of them."""
        if not count:
            return 0
        return max(1, round((count if count >= 1 else count * updates) / sizes.updates))

    def every(argument: str, strategy: Any, count: float | None) -> int:
        kind = str(getattr(strategy, "value", strategy))
        if kind == "epoch":
            return max(1, num_rows // sizes.prompts)
        if kind in ("no", "steps"):
            return 0 if kind == "no" else in_steps(argument, count or 10)
        raise ValueError(f"GRPOConfig: {argument}={kind!r} is not known; write no, steps or epoch")

    warmup = args.warmup_steps if args.warmup_steps >= 1 else math.ceil(args.warmup_steps * updates)
    rollout: dict[str, Any] = {
        "prompts_per_step": sizes.prompts,
        "samples_per_prompt": args.num_generations,
        "max_response_tokens": args.max_completion_length,
        "sampling": {"temperature": args.temperature},
        "delimiter": "",
    }
    if args.use_vllm:
        rollout["gpu_memory_utilization"] = args.vllm_gpu_memory_utilization
        rollout["tensor"] = args.vllm_tensor_parallel_size
    policy: dict[str, Any] = {
        "optimizer": {
            **_schedule(args),
            "lr": args.learning_rate,
            "warmup_steps": int(warmup),
            "weight_decay": args.weight_decay,
            "betas": [args.adam_beta1, args.adam_beta2],
            "eps": args.adam_epsilon,
            "clip_grad": args.max_grad_norm,
        }
    }
    if args.router_aux_loss_coef is not None:
        policy["load_balancing_loss"] = args.router_aux_loss_coef
    return {
        "run": {"steps": steps, "seed": args.seed},
        "model": {"dtype": _dtype(args), "recompute": "full" if args.gradient_checkpointing else "none"},
        "policy": policy,
        "rollout": rollout,
        "algorithm": _algorithm(args) | {"updates_per_step": sizes.updates},
        "data": {"chat_template": dict(args.chat_template_kwargs or {})},
        "eval": {
            "every": every("eval_strategy", args.eval_strategy, args.eval_steps),
            "samples_per_prompt": args.num_generations_eval or args.num_generations,
        },
        "checkpoint": {
            "every": every("save_strategy", args.save_strategy, args.save_steps),
            **({} if args.save_total_limit is None else {"keep": args.save_total_limit}),
        },
        "observe": _trackers(args),
    }


def _schedule(args: Any) -> dict[str, Any]:
    if not str(getattr(args.optim, "value", args.optim)).startswith("adamw"):
        raise ValueError(
            f"GRPOConfig: optim={args.optim!r} is not known; adamw is, and section policy.optimizer has Muon"
        )
    kind = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    options = dict(args.lr_scheduler_kwargs or {})
    least = options.pop("min_lr_rate", 0.0)
    known = {
        "constant": ("constant", 1.0),
        "constant_with_warmup": ("constant", 1.0),
        "linear": ("linear", 0.0),
        "cosine": ("cosine", 0.0),
        "cosine_with_min_lr": ("cosine", least),
    }
    if kind not in known or options:
        raise ValueError(
            f"GRPOConfig: lr_scheduler_type={kind!r} with {options or 'no options'} is not known; known are "
            f"{', '.join(known)} (with min_lr_rate)"
        )
    schedule, ratio = known[kind]
    return {"kind": "adam", "schedule": schedule, "min_lr_ratio": ratio}


def _dtype(args: Any) -> str:
    options = dict(args.model_init_kwargs or {})
    options.pop("attn_implementation", None)
    asked = str(options.pop("dtype", None) or options.pop("torch_dtype", None) or "auto").removeprefix("torch.")
    if options or asked not in ("auto", "float32", "bfloat16"):
        raise ValueError(f"GRPOConfig: model_init_kwargs has {options or asked!r}; `dtype` may be float32 or bfloat16")
    if args.bf16 is not None:
        return "bfloat16" if args.bf16 else "float32"
    return "auto" if asked == "float32" else asked


def _algorithm(args: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        **_loss(args),
        "adv_estimator": _estimator(args),
        "correction": _correction(args),
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
    if args.use_adaptive_entropy:
        found["entropy"] = {
            "coefficient": {
                "kind": "adaptive",
                "initial": args.entropy_coef,
                "target": args.entropy_target,
                "delta": args.entropy_coef_delta,
                "maximum": args.entropy_coef_max,
            }
        }
    elif args.entropy_coef:
        found["entropy"] = {"coefficient": {"kind": "fixed", "value": args.entropy_coef}}
    return found


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
    }
    if args.loss_type not in aggregations:
        raise ValueError(f"GRPOConfig: loss_type={args.loss_type!r} is not known; known are {', '.join(aggregations)}")
    found: dict[str, Any] = {"loss_agg_mode": aggregations[args.loss_type]}
    if args.loss_type == "dr_grpo":
        found["loss_agg_tokens"] = args.max_completion_length
    if args.loss_type == "cispo":
        if high <= 1:
            raise ValueError(f"GRPOConfig: epsilon_high={high} with cispo is the largest weight itself; write 5.0")
        return found | {"loss": {"kind": "cispo", "clip_ratio_low": 1.0, "clip_ratio_high": high - 1}}
    if args.loss_type == "sapo":
        low = {"tau_pos": args.sapo_temperature_pos, "tau_neg": args.sapo_temperature_neg}
        return found | {"loss": {"kind": "sapo", **low}}
    clip = {"clip_ratio_low": args.epsilon, "clip_ratio_high": high}
    if args.importance_sampling_level == "token":
        return found | {"loss": {"kind": "dual_clip", **clip, "clip_ratio_c": args.delta}}
    if args.importance_sampling_level == "sequence" and args.delta is None:
        return found | {"loss": {"kind": "gspo", **clip}}
    raise ValueError(
        f"GRPOConfig: importance_sampling_level={args.importance_sampling_level!r} with delta={args.delta} is not "
        f"supported; write token, or sequence without delta"
    )


def _estimator(args: Any) -> dict[str, Any]:
    scale = {True: "group", False: "none"}.get(args.scale_rewards, args.scale_rewards)
    if scale not in ("group", "batch", "none"):
        raise ValueError(f"GRPOConfig: scale_rewards={scale!r} is not known; write group, batch or none")
    if args.multi_objective_aggregation == "sum_then_normalize":
        return {"kind": "grpo", "std": scale}
    if args.multi_objective_aggregation == "normalize_then_sum":
        return {"kind": "gdpo"}
    raise ValueError(f"GRPOConfig: multi_objective_aggregation={args.multi_objective_aggregation!r} is not known")


def _correction(args: Any) -> dict[str, Any] | None:
    """TRL corrects only for vLLM; its other engine shares the trainer's weights."""
    found: dict[str, Any] = {"weight": None, "reject": []}
    low, high = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
    if args.use_vllm and args.vllm_importance_sampling_correction:
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
    return found if found["weight"] or found["reject"] else None


def _trackers(args: Any) -> list[dict[str, str]]:
    asked = [args.report_to] if isinstance(args.report_to, str) else list(args.report_to or ())
    known = ("wandb", "tensorboard", "mlflow")
    if unknown := [name for name in asked if name not in (*known, "none")]:
        raise ValueError(f"GRPOConfig: report_to={unknown[0]!r} is not known; known are {', '.join(known)}")
    return [{"kind": name} for name in asked if name != "none"]
