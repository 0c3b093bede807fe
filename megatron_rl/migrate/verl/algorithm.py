"""The meaning of verl's settings of the algorithm: advantages, losses, KL, entropy, and the correction of log-probs.

Every function takes the settings, the key and its value, and returns a `Meaning`. The formulas were compared with
verl's `trainer/ppo/core_algos.py` and `rollout_corr_helper.py` of August 2026.
"""

from __future__ import annotations

from typing import Any

from megatron_rl.migrate.verl.settings import ACTOR, Meaning, Settings, implied, mapped, refused, used

ESTIMATORS = {
    **dict.fromkeys(("grpo", "grpo_vectorized"), "grpo"),
    **dict.fromkeys(("rloo", "rloo_vectorized"), "rloo"),
    **{name: name for name in ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "opo", "gpg", "gae")},
    "grpo_passk": "grpo_passk",
    "gdpo": "gdpo",
    "optimal_token_baseline": "optimal_token_baseline",
}
"""verl's estimator -> ours."""
COMPARING = {*ESTIMATORS.values()} - {"reinforce_plus_plus", "remax", "gae"}
"""Our estimators that compare the answers of a group."""
CLIPPED = ("vanilla", "gspo", "geo_mean", "cispo", "clip_cov", "clip-cov")
"""verl's losses that clip the ratio on both sides."""
WHOLE_SAMPLES = ("gspo", "sapo", "geo_mean")
"""Losses that verl averages over the tokens of an answer and then over answers, for every loss_agg_mode."""
KL = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def estimator(settings: Settings, key: str, value: Any) -> Meaning:
    ours = ESTIMATORS.get(value)
    if ours is None:
        why = f"there is no such estimator here; choose one of {', '.join(sorted(set(ESTIMATORS.values())))}"
        return Meaning("refused", {"algorithm.adv_estimator.kind": value}, why)
    to: dict[str, Any] = {"algorithm.adv_estimator.kind": ours}
    if ours in ("grpo", "grpo_passk"):
        to["algorithm.adv_estimator.std"] = "group" if settings["algorithm.norm_adv_by_std_in_grpo"] else "none"
    if ours == "gae":
        to |= {f"algorithm.adv_estimator.{name}": settings[f"algorithm.{name}"] for name in ("gamma", "lam")}
    to["algorithm.drop_zero_signal"] = False
    told = "groups of equal rewards stay in the denominators, as in verl"
    if ours == "optimal_token_baseline":
        told += "; their advantages are 0, while in verl the end of the longest answer has its reward"
    return mapped(to, told)


def discount(settings: Settings, key: str, value: Any) -> Meaning:
    """`gamma` and `lam`."""
    name, ours = key.rpartition(".")[2], settings["algorithm.adv_estimator"]
    if ours == "gae":
        return used({f"algorithm.adv_estimator.{name}": value})
    if name == "gamma" and ours == "reinforce_plus_plus" and value != 1:
        return refused("rewards are not discounted with reinforce_plus_plus here; use gamma 1")
    return implied(f"the estimator {ours} does not read it")


def clip(settings: Settings, key: str, value: Any) -> Meaning:
    """The bounds of the ratio. `clip_ratio` is the bound of each side whose own key is null."""
    sides = ("low", "high") if key.endswith("clip_ratio") else (key.rpartition("_")[2],)
    bounds = {side: settings[f"{ACTOR}.clip_ratio_{side}"] for side in sides}
    loss, both = settings[f"{ACTOR}.policy_loss.loss_mode"], settings[f"{ACTOR}.clip_ratio"]
    if bounds.get("low") is not None and len(sides) == 1 and loss == "cispo" and bounds["low"] > 1:
        return mapped({"algorithm.loss.clip_ratio_low": 1.0}, "a ratio is never below 0, so 1 is no bound too")
    if len(sides) == 1:
        return used({f"algorithm.loss.{key.rpartition('.')[2]}": both if value is None else value})
    to = {f"algorithm.loss.clip_ratio_{side}": both for side, bound in bounds.items() if bound is None}
    if to and loss in CLIPPED:
        return used(to, "it is the bound of the sides whose own key is null")
    return implied("verl does not read it, because clip_ratio_low is {low} and clip_ratio_high {high}".format(**bounds))


def aggregation(settings: Settings, key: str, value: Any) -> Meaning:
    to = {"algorithm.loss_agg_mode": value}
    if settings[f"{ACTOR}.policy_loss.loss_mode"] in WHOLE_SAMPLES:
        return implied("with this loss verl always averages answers, as it is here")
    if value == "seq-mean-token-sum-norm":
        length = settings[f"{ACTOR}.loss_scale_factor"] or settings["data.max_response_length"]
        why = "the sum over tokens is divided by this length, and by the number of answers"
        return mapped({**to, "algorithm.loss_agg_tokens": length}, why)
    if value in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean"):
        return used(to)
    return Meaning("refused", to, "there is no such aggregation here")


def kl_place(settings: Settings) -> tuple[str | None, str]:
    """The place of the KL penalty, `loss` or `reward`, and otherwise None with the reason."""
    if settings[f"{ACTOR}.use_kl_loss"] and settings[f"{ACTOR}.kl_loss_coef"]:
        kind = str(settings[f"{ACTOR}.kl_loss_type"])
        ours = KL.get(kind.rstrip("+"))
        if ours is None:
            return None, f"there is no KL of type {kind} here; use low_var_kl or mse"
        if ours == "k1" and not kind.endswith("+"):
            return None, "the expected gradient of k1 in the loss is zero; use low_var_kl, mse or kl+"
        return "loss", ""
    if not settings["algorithm.use_kl_in_reward"]:
        return None, ""
    name, kind = settings["algorithm.adv_estimator"], settings["algorithm.kl_penalty"]
    if name not in ("gae", "reinforce_plus_plus"):
        return None, f"{name} gives all tokens one advantage here, so the KL cannot be in the reward; use use_kl_loss"
    if KL.get(kind) is None:
        return None, f"there is no KL of type {kind} for rewards here; use kl, abs, mse or low_var_kl"
    return "reward", ""


def kl_switch(settings: Settings, key: str, value: Any) -> Meaning:
    """`use_kl_loss` and `use_kl_in_reward`."""
    place, problem = kl_place(settings)
    if not value:
        return implied("no penalty is the default")
    if problem:
        return refused(problem)
    if place is None:
        return implied("the coefficient is 0")
    if place == ("loss" if key.endswith("use_kl_loss") else "reward"):
        return mapped({"algorithm.kl.place": place})
    return refused("there is one KL penalty here, which is in the loss; set one of the two to False")


def kl_part(settings: Settings, key: str, value: Any) -> Meaning:
    """The type and the coefficient of the KL in the loss or in the reward."""
    name = key.rpartition(".")[2]
    mine = "loss" if key.startswith(ACTOR) else "reward"
    place, problem = kl_place(settings)
    is_type = name in ("kl_loss_type", "kl_penalty")
    if place != mine:
        is_on = settings[f"{ACTOR}.use_kl_loss" if mine == "loss" else "algorithm.use_kl_in_reward"]
        if not (is_on and problem):
            return implied(f"there is no KL in the {mine}")
        is_fault = key in settings and is_type
        return (
            refused(problem) if is_fault else implied("see the key that switches the KL penalty on, which is refused")
        )
    if is_type:
        ours = KL[value.rstrip("+")]
        more = {"algorithm.kl.straight_through": True} if value.endswith("+") and ours != "k2" else {}
        return mapped({"algorithm.kl.estimator": ours, **more})
    control = {ours: settings[f"algorithm.kl_ctrl.{ours}"] for ours in ("type", "kl_coef", "target_kl", "horizon")}
    if mine == "reward" and control["type"] != "fixed":
        ends = {"initial": control["kl_coef"], "target": control["target_kl"], "horizon": control["horizon"]}
        why = "here the KL is a mean over tokens"
        return mapped({"algorithm.kl.coefficient": {"kind": "adaptive", **ends}}, why)
    if name not in ("kl_loss_coef", "kl_coef", "type"):
        return implied("only an adaptive coefficient reads it")
    coefficient = settings[f"{ACTOR}.kl_loss_coef"] if mine == "loss" else control["kl_coef"]
    return mapped({"algorithm.kl.coefficient": {"kind": "fixed", "value": coefficient}})


def entropy(settings: Settings, key: str, value: Any) -> Meaning:
    if not value:
        return implied("no entropy bonus is the default")
    return used({"algorithm.entropy.coefficient": {"kind": "fixed", "value": value}})


def correction(settings: Settings, key: str, value: Any) -> Meaning:
    """The keys of `algorithm.rollout_correction`."""
    name, prefix = key.rpartition(".")[2], "algorithm.rollout_correction."
    weight, rejection = settings[prefix + "rollout_is"], settings[prefix + "rollout_rs"]
    if settings[prefix + "bypass_mode"]:
        return _bypass(settings, name, rejection)
    if name in ("bypass_mode", "loss_type"):
        return implied("the ratio is taken to the trainer's policy")
    if name.startswith("rollout_rs"):
        if not rejection:
            return implied("nothing is rejected")
        rules = _rejections(str(rejection), settings[prefix + "rollout_rs_threshold"])
        if rules is None:
            return refused("the rule is not known; megatron-rl config algorithm.correction.reject prints what there is")
        return mapped({"algorithm.correction.reject": rules}, "for k1 verl has the inverse bounds")
    if weight not in ("token", "sequence"):
        if name != "rollout_is":
            return implied("only weights read it")
        nothing: dict[str, Any] = {"algorithm.correction.weight" if rejection else "algorithm.correction": None}
        return mapped(nothing, "verl corrects nothing")
    try:
        *low, high = map(float, str(settings[prefix + "rollout_is_threshold"]).split("_"))
    except ValueError:
        return refused("correct rollout_is_threshold: it is a number, or low_high")
    ours: dict[str, Any] = {"level": "token", "normalise": bool(settings[prefix + "rollout_is_batch_normalize"])}
    ours |= {"kind": "mask", "low": low[0], "high": high} if low else {"kind": "truncate", "cap": high}
    if weight == "token":
        return mapped({"algorithm.correction.weight": ours})
    why = "verl takes the product of a sequence's ratios; here each token has its own weight"
    return Meaning("refused", {"algorithm.correction.weight": ours}, why)


def _bypass(settings: Settings, name: str, rejection: Any) -> Meaning:
    """verl's bypass mode: the engine's log-probs are pi_old, so that the ratio is the importance weight, too."""
    if rejection:
        return refused("rules of rejection are not known with the ratio to the engine's policy")
    if settings["algorithm.rollout_correction.loss_type"] != "ppo_clip":
        return refused("with bypass_mode only loss_type ppo_clip is known")
    if name != "bypass_mode":
        return implied("bypass_mode has the importance weight in its ratio")
    ours: dict[str, Any] = {"algorithm.anchor": "engine", "algorithm.correction": None}
    return mapped(ours, "the ratio is taken to the engine's policy")


def _rejections(rules: str, thresholds: Any) -> list[dict[str, Any]] | None:
    """Our rules of rejection; None if one is not known. verl's k1 is the engine's probability over the trainer's, and
    ours is its inverse, so a pair of bounds (a, b) becomes (1 / b, 1 / a)."""
    names = [name.strip() for name in rules.split(",") if name.strip()]
    bounds = str(thresholds).split(",")
    bounds = bounds * len(names) if len(bounds) == 1 else bounds
    found: list[dict[str, Any]] = []
    for name, bound in zip(names, bounds, strict=False):
        try:
            level, *over, statistic = name.split("_")
            numbers = [float(number) for number in bound.split("_")]
        except ValueError:
            return None
        if statistic not in ("k1", "k2", "k3") or level not in ("token", "seq") or len(bounds) != len(names):
            return None
        rule: dict[str, Any] = {"level": "token" if level == "token" else "sequence", "statistic": statistic}
        rule |= {"over": over[0]} if level == "seq" else {}
        if statistic == "k1":
            low, high = numbers if len(numbers) == 2 else (1 / numbers[0], numbers[0])
            rule |= {"low": 1 / high, "high": 1 / low}
        else:
            rule["high"] = numbers[0]
        found.append(rule)
    return found


def filter_groups(settings: Settings, key: str, value: Any) -> Meaning:
    """The switch and its largest number of batches, after which groups without a signal fill a step up."""
    if not settings["algorithm.filter_groups.enable"]:
        return implied("groups are not replaced by default")
    why = "other prompts replace the groups whose rewards are all equal"
    most = settings["algorithm.filter_groups.max_num_gen_batches"]
    if most == 1:
        why += "; the smallest number of batches is 2 here"
    return mapped({"rollout.active_sampling": max(2, most) if most and most > 0 else True}, why)


def filter_metric(settings: Settings, key: str, value: Any) -> Meaning:
    """Groups are compared by their scores, before long answers are punished."""
    is_own = settings["custom_reward_function.path"] is not None
    is_shaped = any(key.endswith("overlong_buffer_cfg.enable") and settings[key] for key in settings.given)
    same = ("score", *(() if is_own else ("acc",)), *(() if is_shaped else ("seq_reward", "seq_final_reward")))
    if value in (None, *same) or not settings["algorithm.filter_groups.enable"]:
        return implied("groups are compared by their scores")
    return refused(f"groups are compared by their scores here; use {' or '.join(same)}")


def group_size(settings: Settings, key: str, value: Any) -> Meaning:
    name = settings["algorithm.adv_estimator"]
    if value == 1 and ESTIMATORS.get(name) in COMPARING:
        why = f"with {name} the answers to a prompt are compared, and one alone has no gradient here; use 2 or more"
        return Meaning("refused", {"rollout.samples_per_prompt": 1}, why)
    return used({"rollout.samples_per_prompt": value})
