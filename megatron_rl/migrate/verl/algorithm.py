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
WITH_STD = {"grpo": "group", "grpo_passk": "group"}
LOSSES = {
    "vanilla": "dual_clip",
    "gspo": "gspo",
    "sapo": "sapo",
    "gpg": "gpg",
    **dict.fromkeys(("clip_cov", "clip-cov"), "clip_cov"),
    **dict.fromkeys(("kl_cov", "kl-cov"), "kl_cov"),
    "geo_mean": "gmpo",
    "cispo": "cispo",
}
"""verl's loss -> ours."""
PARTS = {
    "clip_ratio_low": ("clip_ratio_low", ("dual_clip", "gspo", "gmpo", "cispo", "clip_cov")),
    "clip_ratio_high": ("clip_ratio_high", ("dual_clip", "gspo", "gmpo", "cispo", "clip_cov")),
    "clip_ratio_c": ("clip_ratio_c", ("dual_clip",)),
    "tau_pos": ("tau_pos", ("sapo",)),
    "tau_neg": ("tau_neg", ("sapo",)),
    "clip_cov_ratio": ("share", ("clip_cov",)),
    "clip_cov_lb": ("cov_low", ("clip_cov",)),
    "clip_cov_ub": ("cov_high", ("clip_cov",)),
    "kl_cov_ratio": ("share", ("kl_cov",)),
    "ppo_kl_coef": ("coef", ("kl_cov",)),
}
"""The last name of a key -> our key in `algorithm.loss`, and the losses that have it."""
WHOLE_SAMPLES = ("gspo", "sapo", "gmpo")
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
        to["algorithm.adv_estimator.std"] = WITH_STD[ours] if settings["algorithm.norm_adv_by_std_in_grpo"] else "none"
    if ours == "gae":
        to |= {"algorithm.adv_estimator.gamma": settings["algorithm.gamma"]}
        to |= {"algorithm.adv_estimator.lam": settings["algorithm.lam"]}
    to["algorithm.drop_zero_signal"] = False
    return Meaning("mapped", to, "groups of equal rewards stay in the denominators, as in verl")


def standard_deviation(settings: Settings, key: str, value: Any) -> Meaning:
    ours = ESTIMATORS.get(settings["algorithm.adv_estimator"])
    if ours not in WITH_STD:
        return Meaning("implied", {}, f"verl's estimator {settings['algorithm.adv_estimator']} does not read it")
    return Meaning("mapped", {"algorithm.adv_estimator.std": WITH_STD[ours] if value else "none"})


def discount(settings: Settings, key: str, value: Any) -> Meaning:
    """`gamma` and `lam`."""
    name, ours = key.rpartition(".")[2], settings["algorithm.adv_estimator"]
    if ours == "gae":
        return Meaning("used", {f"algorithm.adv_estimator.{name}": value})
    if name == "gamma" and ours == "reinforce_plus_plus" and value != 1:
        return Meaning("refused", {}, "rewards are not discounted with reinforce_plus_plus here; use gamma 1")
    return Meaning("implied", {}, f"the estimator {ours} does not read it")


def loss_mode(settings: Settings, key: str, value: Any) -> Meaning:
    if value not in LOSSES:
        why = f"there is no such loss here; choose one of {', '.join(LOSSES.values())}, or write it as kind: function"
        return Meaning("refused", {"algorithm.loss.kind": value}, why)
    return Meaning("mapped", {"algorithm.loss.kind": LOSSES[value]})


def loss_part(settings: Settings, key: str, value: Any) -> Meaning:
    name, loss = key.rpartition(".")[2], LOSSES.get(settings[f"{ACTOR}.policy_loss.loss_mode"], "")
    ours, losses = PARTS[name]
    if loss not in losses:
        return Meaning("implied", {}, f"verl's loss {settings[f'{ACTOR}.policy_loss.loss_mode']} does not read it")
    if value is None:  # verl then takes clip_ratio
        value = settings[f"{ACTOR}.clip_ratio"]
    if loss == "cispo" and name == "clip_ratio_low" and value > 1:
        return Meaning(
            "mapped", {"algorithm.loss.clip_ratio_low": 1.0}, "a ratio is never below 0, so 1 is no bound too"
        )
    return Meaning("used", {f"algorithm.loss.{ours}": value})


def clip_ratio(settings: Settings, key: str, value: Any) -> Meaning:
    low, high = settings[f"{ACTOR}.clip_ratio_low"], settings[f"{ACTOR}.clip_ratio_high"]
    sides = [name for name, bound in (("clip_ratio_low", low), ("clip_ratio_high", high)) if bound is None]
    if sides:
        found = [loss_part(settings, f"{ACTOR}.{name}", None) for name in sides]
        if all(one.to for one in found):
            to = {target: bound for one in found for target, bound in one.to.items()}
            return Meaning("used", to, "it is the bound of the sides whose own key is null")
    return Meaning("implied", {}, f"verl does not read it, because clip_ratio_low is {low} and clip_ratio_high {high}")


def aggregation(settings: Settings, key: str, value: Any) -> Meaning:
    loss = LOSSES.get(settings[f"{ACTOR}.policy_loss.loss_mode"])
    if loss in WHOLE_SAMPLES:
        return Meaning("implied", {}, f"with this loss verl always averages answers, as {loss} does here")
    if value == "seq-mean-token-sum-norm":
        length = settings[f"{ACTOR}.loss_scale_factor"] or settings["data.max_response_length"]
        to = {"algorithm.loss_agg_mode": value, "algorithm.loss_agg_tokens": length}
        return Meaning("mapped", to, "the sum over tokens is divided by this length, and by the number of answers")
    if value in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean"):
        return Meaning("used", {"algorithm.loss_agg_mode": value})
    return Meaning("refused", {"algorithm.loss_agg_mode": value}, "there is no such aggregation here")


def loss_length(settings: Settings, key: str, value: Any) -> Meaning:
    if settings[f"{ACTOR}.loss_agg_mode"] != "seq-mean-token-sum-norm":
        return Meaning("implied", {}, "only seq-mean-token-sum-norm reads it")
    return Meaning("used", {"algorithm.loss_agg_tokens": value})


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
            return Meaning("refused", {}, "the KL penalty is left out; see the key that switches it on")
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
