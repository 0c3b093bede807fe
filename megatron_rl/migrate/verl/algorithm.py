"""The meaning of verl's settings of the algorithm: advantages, losses, KL, entropy, and the correction of log-probs.

Every function takes the settings, the key and its value, and returns a `Meaning`. The formulas were compared with
verl's `trainer/ppo/core_algos.py` and `rollout_corr_helper.py` of August 2026.
"""

from __future__ import annotations

from typing import Any

from megatron_rl.migrate.verl.settings import ACTOR, Meaning, Settings

ESTIMATORS = {
    **dict.fromkeys(("grpo", "grpo_vectorized"), "grpo"),
    **dict.fromkeys(("rloo", "rloo_vectorized"), "rloo"),
    **{name: name for name in ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "opo", "gpg", "gae")},
    "grpo_passk": "grpo_passk",
    "gdpo": "gdpo",
}
"""verl's estimator -> ours."""
COMPARING = ("grpo", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg", "grpo_passk", "gdpo")
"""Our estimators that compare the answers of a group."""
WITH_STD = ("grpo", "grpo_passk")
CLIPPED = ("vanilla", "gspo", "geo_mean", "cispo", "clip_cov", "clip-cov")
"""verl's losses that clip the ratio on both sides."""
WHOLE_SAMPLES = ("gspo", "sapo", "geo_mean")
"""Losses that verl averages over the tokens of an answer and then over answers, for every loss_agg_mode."""
KL = {
    **dict.fromkeys(("kl", "k1"), "k1"),
    "abs": "abs",
    **dict.fromkeys(("mse", "k2"), "k2"),
    **dict.fromkeys(("low_var_kl", "k3"), "k3"),
}


def estimator(settings: Settings, key: str, value: Any) -> Meaning:
    ours = ESTIMATORS.get(value)
    if ours is None:
        why = f"there is no such estimator here; choose one of {', '.join(sorted(set(ESTIMATORS.values())))}"
        return Meaning("refused", {"algorithm.adv_estimator.kind": value}, why)
    to: dict[str, Any] = {"algorithm.adv_estimator.kind": ours}
    if ours in WITH_STD:
        to["algorithm.adv_estimator.std"] = "group" if settings["algorithm.norm_adv_by_std_in_grpo"] else "none"
    if ours == "gae":
        to |= {"algorithm.adv_estimator.gamma": settings["algorithm.gamma"]}
        to |= {"algorithm.adv_estimator.lam": settings["algorithm.lam"]}
    to["algorithm.drop_zero_signal"] = False
    return Meaning("mapped", to, "groups of equal rewards stay in the denominators, as in verl")


def discount(settings: Settings, key: str, value: Any) -> Meaning:
    """`gamma` and `lam`."""
    name, ours = key.rpartition(".")[2], settings["algorithm.adv_estimator"]
    if ours == "gae":
        return Meaning("used", {f"algorithm.adv_estimator.{name}": value})
    if name == "gamma" and ours == "reinforce_plus_plus" and value != 1:
        return Meaning("refused", {}, "rewards are not discounted with reinforce_plus_plus here; use gamma 1")
    return Meaning("implied", {}, f"the estimator {ours} does not read it")


def clip_ratio(settings: Settings, key: str, value: Any) -> Meaning:
    low, high = settings[f"{ACTOR}.clip_ratio_low"], settings[f"{ACTOR}.clip_ratio_high"]
    found = [_clip(settings, side, None) for side, bound in (("low", low), ("high", high)) if bound is None]
    if found and settings[f"{ACTOR}.policy_loss.loss_mode"] in CLIPPED:
        to = {target: bound for one in found for target, bound in one.to.items()}
        return Meaning("used", to, "it is the bound of the sides whose own key is null")
    return Meaning("implied", {}, f"verl does not read it, because clip_ratio_low is {low} and clip_ratio_high {high}")


def clip_low(settings: Settings, key: str, value: Any) -> Meaning:
    if settings[f"{ACTOR}.policy_loss.loss_mode"] == "cispo" and value is not None and value > 1:
        why = "a ratio is never below 0, so 1 is no bound too"
        return Meaning("mapped", {"algorithm.loss.clip_ratio_low": 1.0}, why)
    return _clip(settings, "low", value)


def clip_high(settings: Settings, key: str, value: Any) -> Meaning:
    return _clip(settings, "high", value)


def _clip(settings: Settings, side: str, value: Any) -> Meaning:
    """A bound of the ratio; for null verl takes clip_ratio."""
    return Meaning(
        "used", {f"algorithm.loss.clip_ratio_{side}": settings[f"{ACTOR}.clip_ratio"] if value is None else value}
    )


def aggregation(settings: Settings, key: str, value: Any) -> Meaning:
    loss = settings[f"{ACTOR}.policy_loss.loss_mode"]
    if loss in WHOLE_SAMPLES:
        return Meaning("implied", {}, "with this loss verl always averages answers, as it is here")
    if value == "seq-mean-token-sum-norm":
        length = settings[f"{ACTOR}.loss_scale_factor"] or settings["data.max_response_length"]
        to = {"algorithm.loss_agg_mode": value, "algorithm.loss_agg_tokens": length}
        return Meaning("mapped", to, "the sum over tokens is divided by this length, and by the number of answers")
    if value in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean"):
        return Meaning("used", {"algorithm.loss_agg_mode": value})
    return Meaning("refused", {"algorithm.loss_agg_mode": value}, "there is no such aggregation here")


def kl_place(settings: Settings) -> tuple[str | None, str]:
    """The place of the KL penalty, `loss` or `reward`, and otherwise None with the reason."""
    if settings[f"{ACTOR}.use_kl_loss"] and settings[f"{ACTOR}.kl_loss_coef"]:
        kind = str(settings[f"{ACTOR}.kl_loss_type"])
        if KL.get(kind.rstrip("+")) is None:
            return None, f"there is no KL of type {kind} here; use low_var_kl or mse"
        if KL[kind.rstrip("+")] == "k1" and not kind.endswith("+"):
            return None, "the expected gradient of k1 in the loss is zero; use low_var_kl, mse or kl+"
        return "loss", ""
    if settings["algorithm.use_kl_in_reward"]:
        name, kind = settings["algorithm.adv_estimator"], str(settings["algorithm.kl_penalty"])
        if name not in ("gae", "reinforce_plus_plus"):
            return (
                None,
                f"{name} gives all tokens one advantage here, so the KL cannot be in the reward; use use_kl_loss",
            )
        if KL.get(kind) is None:
            return None, f"there is no KL of type {kind} for rewards here; use kl, abs, mse or low_var_kl"
        return "reward", ""
    return None, ""


def kl_switch(settings: Settings, key: str, value: Any) -> Meaning:
    """`use_kl_loss` and `use_kl_in_reward`."""
    if not value:
        return Meaning("implied", {}, "no penalty is the default")
    place, problem = kl_place(settings)
    if problem:
        return Meaning("refused", {}, problem)
    if place == ("loss" if key.endswith("use_kl_loss") else "reward"):
        return Meaning("mapped", {"algorithm.kl.place": place})
    if place is None:
        return Meaning("implied", {}, "the coefficient is 0")
    return Meaning("refused", {}, "there is one KL penalty here, which is in the loss; set one of the two to False")


def kl_part(settings: Settings, key: str, value: Any) -> Meaning:
    """The type and the coefficient of the KL in the loss or in the reward."""
    name = key.rpartition(".")[2]
    mine = "loss" if key.startswith(ACTOR) else "reward"
    place, problem = kl_place(settings)
    is_on = settings[f"{ACTOR}.use_kl_loss" if mine == "loss" else "algorithm.use_kl_in_reward"]
    if place != mine:
        if is_on and problem:
            is_fault = key in settings and name in ("kl_loss_type", "kl_penalty")
            why = problem if is_fault else "see the key that switches the KL penalty on, which is refused"
            return Meaning("refused" if is_fault else "implied", {}, why)
        return Meaning("implied", {}, f"there is no KL in the {mine}")
    if name in ("kl_loss_type", "kl_penalty"):
        to: dict[str, Any] = {"algorithm.kl.estimator": KL[value.rstrip("+")]}
        if value.endswith("+") and KL[value.rstrip("+")] != "k2":
            to["algorithm.kl.straight_through"] = True
        return Meaning("mapped", to)
    if mine == "loss" or settings["algorithm.kl_ctrl.type"] == "fixed":
        if name in ("kl_loss_coef", "kl_coef", "type"):
            coefficient = settings[f"{ACTOR}.kl_loss_coef" if mine == "loss" else "algorithm.kl_ctrl.kl_coef"]
            return Meaning("mapped", {"algorithm.kl.coefficient": {"kind": "fixed", "value": coefficient}})
        return Meaning("implied", {}, "only an adaptive coefficient reads it")
    coefficient = {
        "kind": "adaptive",
        "initial": settings["algorithm.kl_ctrl.kl_coef"],
        "target": settings["algorithm.kl_ctrl.target_kl"],
        "horizon": settings["algorithm.kl_ctrl.horizon"],
    }
    return Meaning("mapped", {"algorithm.kl.coefficient": coefficient}, "here the KL is a mean over tokens")


def entropy(settings: Settings, key: str, value: Any) -> Meaning:
    if not value:
        return Meaning("implied", {}, "no entropy bonus is the default")
    return Meaning("used", {"algorithm.entropy.coefficient": {"kind": "fixed", "value": value}})


def correction(settings: Settings, key: str, value: Any) -> Meaning:
    """The keys of `algorithm.rollout_correction`."""
    name, prefix = key.rpartition(".")[2], "algorithm.rollout_correction."
    weight, rejection = settings[prefix + "rollout_is"], settings[prefix + "rollout_rs"]
    if settings[prefix + "bypass_mode"]:
        return _bypass(settings, name, rejection)
    if name == "rollout_is":
        if value in ("token", "sequence"):
            ours = {"level": "token", "normalise": bool(settings[prefix + "rollout_is_batch_normalize"])}
            bounds = str(settings[prefix + "rollout_is_threshold"]).split("_")
            try:
                *low, high = map(float, bounds)
            except ValueError:
                return Meaning("refused", {}, "correct rollout_is_threshold: it is a number, or low_high")
            ours |= {"kind": "mask", "low": low[0], "high": high} if low else {"kind": "truncate", "cap": high}
            if value == "token":
                return Meaning("mapped", {"algorithm.correction.weight": ours})
            why = "verl takes the product of a sequence's ratios; here each token has its own weight"
            return Meaning("refused", {"algorithm.correction.weight": ours}, why)
        nothing: dict[str, Any] = {"algorithm.correction.weight" if rejection else "algorithm.correction": None}
        return Meaning("mapped", nothing, "verl corrects nothing")
    if name in ("rollout_is_threshold", "rollout_is_batch_normalize"):
        if weight in ("token", "sequence"):
            return correction(settings, prefix + "rollout_is", weight)
        return Meaning("implied", {}, "only weights read it")
    if name in ("rollout_rs", "rollout_rs_threshold"):
        if not rejection:
            return Meaning("implied", {}, "nothing is rejected")
        rules = _rejections(str(rejection), settings[prefix + "rollout_rs_threshold"])
        if rules is None:
            why = "the rule is not known here; megatron-rl config algorithm.correction.reject prints what there is"
            return Meaning("refused", {}, why)
        return Meaning("mapped", {"algorithm.correction.reject": rules}, "for k1 verl has the inverse bounds")
    if name in ("bypass_mode", "loss_type"):
        return Meaning("implied", {}, "the ratio is taken to the trainer's policy")
    return Meaning("refused", {}, "not known")


def _bypass(settings: Settings, name: str, rejection: Any) -> Meaning:
    """verl's bypass mode: the engine's log-probs are pi_old, so that the ratio is the importance weight, too."""
    if rejection:
        return Meaning("refused", {}, "rules of rejection are not known with the ratio to the engine's policy")
    if settings["algorithm.rollout_correction.loss_type"] != "ppo_clip":
        return Meaning("refused", {}, "with bypass_mode only loss_type ppo_clip is known")
    if name == "bypass_mode":
        ours: dict[str, Any] = {"algorithm.anchor": "engine", "algorithm.correction": None}
        return Meaning("mapped", ours, "the ratio is taken to the engine's policy")
    return Meaning("implied", {}, "bypass_mode has the importance weight in its ratio")


def _rejections(rules: str, thresholds: Any) -> list[dict[str, Any]] | None:
    """Our rules of rejection. verl's k1 is the engine's probability over the trainer's, and ours is its inverse, so a
    pair of bounds (a, b) becomes (1 / b, 1 / a)."""
    names = [name.strip() for name in rules.split(",") if name.strip()]
    bounds = [bound.strip() for bound in str(thresholds).split(",")]
    bounds = bounds * len(names) if len(bounds) == 1 else bounds
    found: list[dict[str, Any]] = []
    for name, bound in zip(names, bounds, strict=False):
        words = name.split("_")
        if words[-1] not in ("k1", "k2", "k3") or words[0] not in ("token", "seq") or len(bounds) != len(names):
            return None
        rule: dict[str, Any] = {"level": "token" if words[0] == "token" else "sequence", "statistic": words[-1]}
        if words[0] == "seq":
            rule["over"] = words[1]
        try:
            numbers = [float(number) for number in bound.split("_")]
        except ValueError:
            return None
        if words[-1] == "k1":
            low, high = numbers if len(numbers) == 2 else (1 / numbers[0], numbers[0])
            rule |= {"low": 1 / high, "high": 1 / low}
        else:
            rule["high"] = numbers[0]
        found.append(rule)
    return found


def filter_groups(settings: Settings, key: str, value: Any) -> Meaning:
    """The switch and its largest number of batches, after which groups without a signal fill a step up."""
    if not settings["algorithm.filter_groups.enable"]:
        return Meaning("implied", {}, "groups are not replaced by default")
    why = "engines generate while the trainer trains, so half of the GPUs are the engines' own"
    most = settings["algorithm.filter_groups.max_num_gen_batches"]
    return Meaning("mapped", {"rollout.active_sampling": max(2, most) if most and most > 0 else True}, why)


def filter_metric(settings: Settings, key: str, value: Any) -> Meaning:
    """Groups are compared by their scores, before long answers are punished."""
    if value is None or not settings["algorithm.filter_groups.enable"]:
        return Meaning("implied", {}, "groups are compared by their scores")
    is_own = settings["custom_reward_function.path"] is not None
    is_shaped = any(key.endswith("overlong_buffer_cfg.enable") and settings[key] for key in settings.given)
    same = ("score", *(() if is_own else ("acc",)), *(() if is_shaped else ("seq_reward", "seq_final_reward")))
    if value in same:
        return Meaning("implied", {}, "groups are compared by their scores")
    return Meaning("refused", {}, f"groups are compared by their scores here; use {' or '.join(same)}")


def group_size(settings: Settings, key: str, value: Any) -> Meaning:
    name = settings["algorithm.adv_estimator"]
    if value == 1 and ESTIMATORS.get(name) in COMPARING:
        why = f"with {name} the answers to a prompt are compared, and one alone has no gradient here; use 2 or more"
        return Meaning("refused", {"rollout.samples_per_prompt": 1}, why)
    return Meaning("used", {"rollout.samples_per_prompt": value})
