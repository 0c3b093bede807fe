"""Maps TRL's arguments to the sections of a run.

Invariants (tests/unit/trl): batches, steps and losses have the values that TRL computes from the same arguments; what
cannot be expressed is an error that names the argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

from megatron_rl.trl.notices import tell
from megatron_rl.trl.step_sizes import StepSizes

TRACKERS = ("wandb", "tensorboard", "mlflow")
OTHER_TRACKERS = (
    *("azure_ml", "clearml", "codecarbon", "comet_ml", "dagshub", "dvclive", "flyte", "kubeflow", "neptune"),
    *("swanlab", "trackio"),
)
"""Trackers of transformers that are none here."""
LOADING = ("attn_implementation", "device_map", "use_cache", "low_cpu_mem_usage")
"""Entries of model_init_kwargs that say how transformers loads and runs a model, which the run does in its own way."""


def faults_of(args: Any) -> list[str]:
    """What cannot be expressed for any model and rows."""
    own = args.sections if isinstance(args.sections, dict) else {}
    replicas = own.get("policy", {}).get("parallel", {}).get("data", 1)
    found: list[str] = []
    parts: tuple[Callable[[], object], ...] = (
        lambda: _updates_of(StepSizes.of(args, replicas), args),
        *(
            lambda part=part: part(args)
            for part in (_sampling, _optimizer, _schedule, _dtype, _loss, _estimator, _correction, _entropy)
        ),
        lambda: _trackers(args),
        *(
            lambda name=name: _strategy(name, getattr(args, name), ("no", "steps", "epoch"))
            for name in ("eval_strategy", "save_strategy")
        ),
    )
    for part in parts:
        try:
            part()
        except ValueError as error:
            found.append(str(error).removeprefix("GRPOConfig: "))
    return found


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
        raise ValueError(
            f"GRPOConfig: use_bias_correction_kl=True with {sizes.updates} optimizer steps on a batch of answers "
            "weighs the KL by the ratio, which is not expressed here; write False, or lower steps_per_generation"
        )


def _updates(sizes: StepSizes) -> dict[str, Any]:
    """TRL's iterations have the same mini-batches."""
    repeated = {"epochs": sizes.epochs, "reshuffle": False} if sizes.epochs > 1 else {}
    return {"updates_per_step": sizes.minibatches, **repeated}


def _strategy(argument: str, value: Any, known: Sequence[str]) -> str:
    kind = str(getattr(value, "value", value))
    if kind not in known:
        raise ValueError(f"GRPOConfig: {argument}={kind!r} is not known; write no, steps or epoch")
    return kind


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
    steps = updates // sizes.updates

    def in_steps(argument: str, count: float) -> int:
        """The number of our steps: TRL's is one of optimizer steps, or a share of all of them."""
        if not count:
            return 0
        return max(1, round((count if count >= 1 else math.ceil(count * updates)) / sizes.updates))

    def every(argument: str, strategy: Any, count: float | None) -> int:
        kind = _strategy(argument, strategy, ("no", "steps", "epoch"))
        if kind == "epoch":
            return max(1, num_rows // sizes.prompts)
        return 0 if kind == "no" else in_steps(argument, count or args.logging_steps)

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
        rollout["parallel"] = {"tensor": args.vllm_tensor_parallel_size}
    if args.max_prompt_length is not None:
        rollout["max_prompt_tokens"] = args.max_prompt_length
    policy: dict[str, Any] = {
        "optimizer": {
            "kind": _optimizer(args),
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
        "algorithm": _algorithm(args) | _updates(sizes),
        "data": {"chat_template": dict(args.chat_template_kwargs or {}), "shuffle": args.shuffle_dataset},
        "eval": {
            "every": every("eval_strategy", args.eval_strategy, args.eval_steps),
            "samples_per_prompt": args.num_generations_eval or args.num_generations,
        },
        "checkpoint": {
            "every": every("save_strategy", args.save_strategy, args.save_steps),
            **({"keep": args.save_total_limit} if args.save_total_limit else {}),
        },
        "observe": _trackers(args),
    }


def _optimizer(args: Any) -> str:
    name = str(getattr(args.optim, "value", args.optim))
    if not name.removeprefix("paged_").startswith("adamw"):
        raise ValueError(f"GRPOConfig: optim={name!r} is not known; adamw is, and section policy.optimizer has Muon")
    if "bit" in name or name == "adamw_anyprecision":
        tell(
            f"optim={name!r}: Adam's state is in fp32 here, which needs more memory; policy.optimizer.moments: "
            "bfloat16 in `sections` saves half of it"
        )
    return "adam"


def _schedule(args: Any) -> dict[str, Any]:
    kind = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    options = dict(args.lr_scheduler_kwargs or {})
    least = options.pop("min_lr_rate", 0.0)
    if "min_lr" in options:
        least = options.pop("min_lr") / args.learning_rate
    known = {
        "constant": ("constant", 1.0),
        "constant_with_warmup": ("constant", 1.0),
        "linear": ("linear", 0.0),
        "cosine": ("cosine", 0.0),
        "cosine_with_min_lr": ("cosine", least),
    }
    if kind == "cosine_with_restarts" and options.get("num_cycles", 1) == 1:
        kind, options = "cosine", {}  # without a restart
    if kind not in known or options:
        raise ValueError(
            f"GRPOConfig: lr_scheduler_type={kind!r} with {options or 'no options'} is not known; known are "
            f"{', '.join(known)} (with min_lr_rate or min_lr)"
        )
    schedule, ratio = known[kind]
    return {"schedule": schedule, "min_lr_ratio": ratio}


def _dtype(args: Any) -> str:
    options = {name: value for name, value in dict(args.model_init_kwargs or {}).items() if name not in LOADING}
    options.pop("revision", None)
    asked = str(options.pop("dtype", None) or options.pop("torch_dtype", None) or "auto").removeprefix("torch.")
    rest = {name: value for name, value in options.items() if value not in (None, False)}
    if rest.pop("trust_remote_code", False):
        raise ValueError("GRPOConfig: model_init_kwargs: trust_remote_code: the code of a model folder is not run")
    if rest or asked not in ("auto", "float32", "bfloat16", "float16"):
        raise ValueError(
            f"GRPOConfig: model_init_kwargs has {rest or asked!r}; `dtype` may be float32, bfloat16, float16"
        )
    if args.fp16:
        if args.bf16:
            raise ValueError("GRPOConfig: fp16 and bf16 are both true; choose one of them")
        return "float16"
    if args.bf16 is not None:
        return "bfloat16" if args.bf16 else "float32"
    return "auto" if asked == "float32" else asked


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
    return {"correction": found if found.get("weight", True) or found["reject"] else None}


def _trackers(args: Any) -> list[dict[str, str]]:
    asked = [args.report_to] if isinstance(args.report_to, str) else list(args.report_to or ())
    if "all" in asked:
        asked = [name for name in TRACKERS if find_spec(name)]
    if left := [name for name in asked if name in OTHER_TRACKERS]:
        tell(
            f"report_to: {', '.join(left)} is no tracker here ({', '.join(TRACKERS)} are); metrics.jsonl and "
            "report.html in output_dir have all numbers"
        )
    if unknown := [name for name in asked if name not in (*TRACKERS, *OTHER_TRACKERS, "none")]:
        raise ValueError(f"GRPOConfig: report_to={unknown[0]!r} is not known; known are {', '.join(TRACKERS)}")
    return [{"kind": name} for name in asked if name in TRACKERS]
