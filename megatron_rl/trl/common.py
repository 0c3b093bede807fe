"""What all trainers of TRL have in common: optimizer, schedule, data type, checkpoints and trackers.

Invariant (tests/unit/trl): an argument has TRL's meaning, or is refused by its name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_rl.config.load import merge
from megatron_rl.trl.notices import tell

TRACKERS = ("wandb", "tensorboard", "mlflow")
OTHER_TRACKERS = (
    *("azure_ml", "clearml", "codecarbon", "comet_ml", "dagshub", "dvclive", "flyte", "kubeflow", "neptune"),
    *("swanlab", "trackio"),
)
"""Trackers of transformers that are none here."""
LOADING = ("attn_implementation", "device_map", "use_cache", "low_cpu_mem_usage")
"""Entries of model_init_kwargs that say how transformers loads and runs a model, which the run does in its own way."""


@dataclass(frozen=True, slots=True)
class Calendar:
    """When things happen in a run."""

    updates: int
    """The optimizer steps of the run, in which TRL counts."""
    updates_per_step: int
    steps_per_epoch: int

    @property
    def steps(self) -> int:
        return self.updates // self.updates_per_step

    def in_steps(self, count: float) -> int:
        """The number of our steps: TRL's is one of optimizer steps, or a share of all of them."""
        if not count:
            return 0
        return max(1, round((count if count >= 1 else math.ceil(count * self.updates)) / self.updates_per_step))

    def every(self, args: Any, what: str) -> int:
        """How often something happens by `<what>_strategy` and `<what>_steps`."""
        kind = strategy(f"{what}_strategy", getattr(args, f"{what}_strategy"), ("no", "steps", "epoch"))
        if kind == "epoch":
            return max(1, self.steps_per_epoch)
        return 0 if kind == "no" else self.in_steps(getattr(args, f"{what}_steps") or args.logging_steps)


def replicas_of(args: Any) -> int:
    """`policy.parallel.data`: TRL's number of processes."""
    own = args.sections if isinstance(args.sections, dict) else {}
    return int(own.get("policy", {}).get("parallel", {}).get("data", 1))


def faults_of(args: Any, parts: Iterable[Callable[[], object]]) -> list[str]:
    """What cannot be expressed for any model and rows.

    Args:
        parts: what a trainer's own arguments need; each raises ValueError.
    """
    found: list[str] = []
    common: tuple[Callable[[], object], ...] = (
        *(lambda part=part: part(args) for part in (optimizer, schedule, dtype, trackers)),
        *(
            lambda name=name: strategy(name, getattr(args, name), ("no", "steps", "epoch"))
            for name in ("eval_strategy", "save_strategy")
        ),
    )
    for part in (*parts, *common):
        try:
            part()
        except ValueError as error:
            found.append(str(error).removeprefix("GRPOConfig: "))
    return found


def common_sections(args: Any, calendar: Calendar) -> dict[str, Any]:
    """The sections that every run has.

    Raises:
        ValueError: a value cannot be expressed; the message names the argument.
    """
    warmup = args.warmup_steps if args.warmup_steps >= 1 else math.ceil(args.warmup_steps * calendar.updates)
    policy: dict[str, Any] = {
        "optimizer": {
            "kind": optimizer(args),
            **schedule(args),
            "lr": args.learning_rate,
            "warmup_steps": int(warmup),
            "weight_decay": args.weight_decay,
            "betas": [args.adam_beta1, args.adam_beta2],
            "eps": args.adam_epsilon,
            "clip_grad": args.max_grad_norm,
        }
    }
    if (coefficient := vars(args).get("router_aux_loss_coef")) is not None:
        policy["load_balancing_loss"] = coefficient
    return {
        "run": {"steps": calendar.steps, "seed": args.seed},
        "model": {"dtype": dtype(args), "recompute": "full" if args.gradient_checkpointing else "none"},
        "policy": policy,
        "checkpoint": {
            "every": calendar.every(args, "save"),
            **({"keep": args.save_total_limit} if args.save_total_limit else {}),
        },
        "observe": trackers(args),
    }


def strategy(argument: str, value: Any, known: Sequence[str]) -> str:
    kind = str(getattr(value, "value", value))
    if kind not in known:
        raise ValueError(f"{argument}={kind!r} is not known; write no, steps or epoch")
    return kind


def optimizer(args: Any) -> str:
    name = str(getattr(args.optim, "value", args.optim))
    if not name.removeprefix("paged_").startswith("adamw"):
        raise ValueError(f"optim={name!r} is not known; adamw is, and section policy.optimizer has Muon")
    if "bit" in name or name == "adamw_anyprecision":
        tell(
            f"optim={name!r}: Adam's state is in fp32 here, which needs more memory; policy.optimizer.moments: "
            "bfloat16 in `sections` saves half of it"
        )
    return "adam"


def schedule(args: Any) -> dict[str, Any]:
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
            f"lr_scheduler_type={kind!r} with {options or 'no options'} is not known; known are "
            f"{', '.join(known)} (with min_lr_rate or min_lr)"
        )
    schedule, ratio = known[kind]
    return {"schedule": schedule, "min_lr_ratio": ratio}


def dtype(args: Any) -> str:
    options = {name: value for name, value in dict(args.model_init_kwargs or {}).items() if name not in LOADING}
    options.pop("revision", None)
    asked = str(options.pop("dtype", None) or options.pop("torch_dtype", None) or "auto").removeprefix("torch.")
    rest = {name: value for name, value in options.items() if value not in (None, False)}
    if rest.pop("trust_remote_code", False):
        raise ValueError("model_init_kwargs: trust_remote_code: the code of a model folder is not run")
    if rest or asked not in ("auto", "float32", "bfloat16", "float16"):
        raise ValueError(f"model_init_kwargs has {rest or asked!r}; `dtype` may be float32, bfloat16, float16")
    if args.fp16:
        if args.bf16:
            raise ValueError("fp16 and bf16 are both true; choose one of them")
        return "float16"
    if args.bf16 is not None:
        return "bfloat16" if args.bf16 else "float32"
    return "auto" if asked == "float32" else asked


def trackers(args: Any) -> list[dict[str, str]]:
    asked = [args.report_to] if isinstance(args.report_to, str) else list(args.report_to or ())
    if "all" in asked:
        asked = [name for name in TRACKERS if find_spec(name)]
    if left := [name for name in asked if name in OTHER_TRACKERS]:
        tell(
            f"report_to: {', '.join(left)} is no tracker here ({', '.join(TRACKERS)} are); metrics.jsonl and "
            "report.html in output_dir have all numbers"
        )
    if unknown := [name for name in asked if name not in (*TRACKERS, *OTHER_TRACKERS, "none")]:
        raise ValueError(f"report_to={unknown[0]!r} is not known; known are {', '.join(TRACKERS)}")
    return [{"kind": name} for name in asked if name in TRACKERS]


def completed(
    sections: dict[str, Any], args: Any, model: Mapping[str, Any], lora: dict[str, Any] | None, folder: Path
) -> dict[str, Any]:
    """The sections with adapters and the run's folder; `sections` of the arguments have the last word.

    Args:
        model: of its config.json.
    """
    coefficient = model.get("router_aux_loss_coef") if "output_router_logits" in model else 0
    if vars(args).get("router_aux_loss_coef", 0) is None and coefficient:
        tell(
            f"router_aux_loss_coef is not given, so that there is no load-balancing loss; TRL would add one with the "
            f"{coefficient} of the model's config.json, over all layers together"
        )
    if lora is not None:
        sections["policy"]["lora"] = lora
    merge(sections, {"run": {"folder": str(folder.parent)}})
    merge(sections, dict(args.sections or {}))
    return sections
