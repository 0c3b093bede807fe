"""Losses, aggregations, corrections and KL against a slow reference: plain loops over samples and tokens, float64.

Stop-gradients are `.detach()`; the gradient comes from the loops themselves.
"""

from __future__ import annotations

import math

import pytest
import torch
from test_algorithms_invariance import VARIANTS, config
from toy_batch import COEFFICIENTS, step, toy_samples, toy_theta, weigh

from megatron_rl.algorithms.selection import hash_key
from megatron_rl.config.algorithm import AlgorithmConfig, EntropyConfig, FixedCoefficient, KlConfig
from megatron_rl.config.losses import AGGREGATIONS


def number(x: torch.Tensor) -> float:
    return x.detach().item()


def clamp(x, low, high):
    return torch.clamp(x, low, high)


def clipped_surrogate(ratio, a, low, high):
    return torch.max(-a * ratio, -a * clamp(ratio, 1 - low, 1 + high))


def token_loss(cfg, token, sample, chosen) -> torch.Tensor:
    logp, old, mu, a = token["logp"], token["old"], token["rollout"], token["adv"]
    ratio = torch.exp(logp - old)
    match cfg.kind:
        case "dual_clip":
            loss = clipped_surrogate(ratio, a, cfg.clip_ratio_low, cfg.clip_ratio_high)
            return loss.clamp(max=-a * cfg.clip_ratio_c) if a < 0 else loss
        case "gspo":
            log_s = sum(number(t["logp"] - t["old"]) for t in sample) / len(sample)
            q = math.exp(log_s) * torch.exp(logp - logp.detach())
            return clipped_surrogate(q, a, cfg.clip_ratio_low, cfg.clip_ratio_high)
        case "gmpo":
            total = 0.0
            for t in sample:
                plain = t["logp"] - t["old"]
                bounded = clamp(plain, -cfg.clip_ratio_low, cfg.clip_ratio_high)
                total = total + (torch.min(plain, bounded) if a > 0 else torch.max(plain, bounded))
            return -a * torch.exp(total / len(sample))
        case "cispo":
            return -number(clamp(ratio, 1 - cfg.clip_ratio_low, 1 + cfg.clip_ratio_high)) * a * logp
        case "sapo":
            tau = cfg.tau_pos if a > 0 else cfg.tau_neg
            return -a * 4 / tau / (1 + torch.exp(-tau * (ratio - 1)))
        case "dro":
            return -a * logp + cfg.beta * (logp - old) ** 2 / 2
        case "a2po":
            return (cfg.beta * sum(t["logp"] - t["ref"] for t in sample) - a) ** 2
        case "vespo":
            w = 1.0
            for t in sample:
                behaviour = math.exp(t["old"] - t["rollout"])
                w *= math.exp(number(t["logp"]) - t["old"]) * min(behaviour, cfg.cap or math.inf)
            k, lam = (cfg.k_pos, cfg.lambda_pos) if a >= 0 else (cfg.k_neg, cfg.lambda_neg)
            return -math.exp(lam) * w**k * math.exp(-lam * w) * a * logp
        case "reinforce" | "gpg":
            return -a * logp
        case "clip_cov":
            return 0.0 * logp if chosen else clipped_surrogate(ratio, a, cfg.clip_ratio_low, cfg.clip_ratio_high)
        case "kl_cov":
            return -a * ratio + (cfg.coef * (logp - old).abs() if chosen else 0.0)
        case "function":  # that of recipes/tiny/losses.py
            return -a * ratio + 0.25 * (logp - old) ** 2
        case "dppo_tv" | "dppo_kl":
            p, q = math.exp(number(logp)), math.exp(mu)
            distance = abs(p - q)
            if cfg.kind == "dppo_kl":
                distance = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
            if (a > 0 and p > q and distance > cfg.high) or (a < 0 and p < q and distance > cfg.low):
                return 0.0 * logp
            return -min(p / q, cfg.c) * a * logp


def choose(cfg: AlgorithmConfig, tokens) -> set[int]:
    """Names of the tokens that Clip-Cov or KL-Cov single out."""
    if cfg.loss.kind not in ("clip_cov", "kl_cov"):
        return set()
    mean_logp = sum(number(t["logp"]) for t in tokens) / len(tokens)
    mean_a = sum(t["adv"] for t in tokens) / len(tokens)
    cov = {t["name"]: (number(t["logp"]) - mean_logp) * (t["adv"] - mean_a) for t in tokens}
    count = max(1, int(cfg.loss.share * len(tokens)))
    if cfg.loss.kind == "kl_cov":
        return set(sorted(cov, key=cov.get)[-count:])

    def flat(t):
        ratio = math.exp(number(t["logp"]) - t["old"])
        low, high = 1 - cfg.loss.clip_ratio_low, 1 + cfg.loss.clip_ratio_high
        return (t["adv"] > 0 and ratio > high) or (t["adv"] < 0 and ratio < low)

    drawn = [t["name"] for t in tokens if cfg.loss.cov_low < cov[t["name"]] < cfg.loss.cov_high and not flat(t)]
    return set(sorted(drawn, key=lambda name: int(hash_key(torch.tensor([name]))))[-count:])


def runs(sample):
    """Actions of a sample in runs of neighbours."""
    groups = []
    for token in sample:
        if groups and groups[-1][-1]["place"] == token["place"] - 1:
            groups[-1].append(token)
        else:
            groups.append([token])
    return groups


def shares_of(level, sample):
    """Tokens of a sample that are judged as one."""
    return {"token": [[t] for t in sample], "segment": runs(sample), "sequence": [sample]}[level] if sample else []


def weights_of(cfg, samples) -> dict[int, float]:
    """Importance weight by token name."""
    if cfg is None or cfg.weight is None:
        return {t["name"]: 1.0 for s in samples for t in s}
    cfg, weights = cfg.weight, {}
    for sample in samples:
        for share in shares_of(cfg.level, sample):
            w = math.exp(sum(t["old"] - t["rollout"] for t in share) / len(share))
            if cfg.kind == "truncate":
                w = min(w, cfg.cap)
            elif cfg.kind == "mask":
                w = w if cfg.low <= w <= cfg.high else 0.0
            else:
                w = min(max(w, cfg.low), cfg.high)
            weights |= {t["name"]: w for t in share}
    if cfg.normalise:
        mean = sum(weights.values()) / len(weights)
        weights = {name: w / mean for name, w in weights.items()}
    return weights


def rejected_by(rule, samples) -> set[int]:
    """Names of the tokens that a rule takes out."""

    def statistic(t) -> float:
        mu, pi = t["rollout"], t["old"] if rule.policy == "old" else number(t["logp"])
        log_w = pi - mu
        match rule.statistic:
            case "k1":
                return log_w
            case "k2":
                return log_w**2 / 2
            case "k3":
                return math.exp(log_w) - 1 - log_w
            case "binary_kl":
                p, q = math.exp(mu), math.exp(pi)
                one = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
                other = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
                return max(one, other)

    names = set()
    for sample in samples:
        for share in shares_of(rule.level, sample):
            values = [statistic(t) for t in share]
            judged = {None: values, "sum": [sum(values)], "mean": [sum(values) / len(values)], "max": values}[rule.over]
            if rule.statistic == "k1":
                low, high = rule.low or 0.0, rule.high or math.inf
                out = any(not low <= math.exp(x) <= high for x in judged)
            else:
                out = any(x > rule.high for x in judged)
            if out and not (rule.only_negative and share[0]["adv"] >= 0):
                names |= {t["name"] for t in share}
    return names


def aggregate(mode, length, samples, losses: dict[int, torch.Tensor]):
    """`losses` by token name; `samples` hold the tokens of each, silent ones too."""
    sums = [sum(losses[t["name"]] for t in sample) for sample in samples]
    counts = [len(sample) for sample in samples]
    if mode == "token-mean":
        return sum(sums) / sum(counts)
    if mode == "seq-mean-token-sum":
        return sum(sums) / len(samples)
    if mode == "seq-mean-token-mean":
        return sum(x / n for x, n in zip(sums, counts, strict=True) if n) / len(samples)
    if mode == "seq-mean-token-sum-norm":
        return sum(x / length for x in sums) / len(samples)
    prompts = [range(i, i + 3) for i in range(0, len(samples), 3)]  # groups of three
    return sum(sum(sums[i] for i in p) / sum(counts[i] for i in p) for p in prompts) / len(prompts)


def reference(cfg: AlgorithmConfig, toys) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, gradient of theta)."""
    theta = toy_theta()
    samples = []
    for s in toys:
        sample = []
        for t in range(1, len(s.ids)):
            if s.mask[t]:
                log_probs = torch.log_softmax(theta[s.ids[t - 1]], -1)
                old, mu, part = s.old[t], s.rollout[t], s.lag[t] / (s.lag[t] + 1)
                if cfg.anchor == "interpolated":
                    old = mu + part * (number(log_probs[s.ids[t]]) - mu)
                sample.append(
                    {
                        "logp": log_probs[s.ids[t]],
                        "entropy": -(log_probs.exp() * log_probs).sum(),
                        "old": old,
                        "rollout": mu,
                        "ref": s.ref[t],
                        "lag": s.lag[t],
                        "adv": s.advantage,
                        "name": s.index * 1000 + t,
                        "place": t,
                    }
                )
        samples.append(sample)
    tokens = [t for sample in samples for t in sample]
    chosen, weights = choose(cfg, tokens), weights_of(cfg.correction, samples)
    count = len(tokens) - math.ceil(round((len(tokens) - 1) * (1 - cfg.top_entropy_share), 6))
    lowest = sorted((number(t["entropy"]) for t in tokens), reverse=True)[count - 1]
    losses = {}
    out = set().union(*(rejected_by(rule, samples) for rule in (cfg.correction.reject if cfg.correction else ())))
    for sample in samples:
        for t in sample:
            loss = token_loss(cfg.loss, t, sample, t["name"] in chosen) * weights[t["name"]]
            if t["name"] in out or number(t["entropy"]) < lowest - 1e-7:
                loss = 0.0 * loss
            if cfg.kl:
                d = t["logp"] - t["ref"]
                k2 = d**2 / 2
                value = {"k1": d, "k2": k2, "k3": (torch.exp(-d) - 1 + d).clamp(max=cfg.kl.cap), "abs": abs(d)}[
                    cfg.kl.estimator
                ]
                if cfg.kl.straight_through:
                    value = value.detach() + k2 - k2.detach()
                loss = loss + COEFFICIENTS["kl"] * value
            if cfg.entropy and cfg.entropy.aggregation == "loss":
                loss = loss - COEFFICIENTS["entropy"] * t["entropy"]
            losses[t["name"]] = loss
    total = aggregate(cfg.aggregation, cfg.loss_agg_tokens, samples, losses)
    if cfg.entropy and cfg.entropy.aggregation == "token-mean":
        total = total - COEFFICIENTS["entropy"] * torch.stack([t["entropy"] for t in tokens]).mean()
    total.backward()
    return total.detach(), theta.grad


def check(cfg: AlgorithmConfig, seed: int) -> None:
    toys = toy_samples(seed)
    denominators = weigh(toys, cfg)
    gradient, metrics = step([[toys[:7], toys[7:]]], cfg, denominators)
    expected_loss, expected = reference(cfg, toys)
    # float64, two ways to add some sixty terms.
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)
    assert metrics["loss"] == pytest.approx(expected_loss.item(), rel=1e-9)


@pytest.mark.parametrize("loss", VARIANTS, ids=lambda loss: loss.kind)
@pytest.mark.parametrize("seed", range(4))
def test_losses(loss, seed):
    check(config(loss, "token-mean"), seed)


@pytest.mark.parametrize("loss", [loss for loss in VARIANTS if loss.clips_ratio], ids=lambda loss: loss.kind)
@pytest.mark.parametrize("seed", range(2))
def test_losses_around_a_policy_between_the_engine_and_the_present_one(loss, seed):
    check(config(loss, "token-mean", anchor="interpolated"), seed)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_aggregations(mode):
    check(config(VARIANTS[0], mode), seed=5)
    check(config(VARIANTS[2], mode), seed=5)


@pytest.mark.parametrize("level", ["token", "segment", "sequence"])
@pytest.mark.parametrize(
    "weight",
    [
        {"cap": 1.1},
        {"cap": 1.5, "normalise": True},
        {"kind": "mask", "low": 0.7, "high": 1.5},
        {"kind": "clip", "low": 0.8, "high": 1.2},
    ],
    ids=str,
)
def test_weights(level, weight):
    check(AlgorithmConfig(correction={"weight": {"level": level, **weight}}), seed=6)


# Bounds that some of the toy samples' tokens, segments and samples break, and others do not.
BOUNDS = {"k1": {"low": 0.8, "high": 1.3}, "k2": {"high": 0.1}, "k3": {"high": 0.1}, "binary_kl": {"high": 0.01}}
RULES = [
    {"level": level, "statistic": statistic, "over": over, **bounds}
    for level in ("token", "segment", "sequence")
    for statistic, bounds in BOUNDS.items()
    for over in ([None] if level == "token" else ["sum", "mean", "max"])
] + [
    {"level": "sequence", "statistic": "k1", "over": "max", "low": 0.5},
    {"level": "sequence", "statistic": "k1", "over": "mean", "low": 0.9, "policy": "current", "only_negative": True},
    {"level": "token", "statistic": "k3", "high": 0.05, "only_negative": True},
]


@pytest.mark.parametrize("rule", RULES, ids=lambda r: "-".join(str(v) for v in r.values()))
def test_rejection(rule):
    cfg = AlgorithmConfig(correction={"weight": {"cap": 1.2}, "reject": [rule]})
    check(cfg, seed=6)
    toys = toy_samples(6)
    _, metrics = step([[toys]], cfg, weigh(toys, cfg))
    (share,) = [value for name, value in metrics.items() if name.startswith("rejected/")]
    assert 0 < share < 1 and metrics["masked"] == pytest.approx(share)


def test_rules_add_up_and_rejection_needs_no_weight():
    token, sequence = RULES[0], {"level": "sequence", "statistic": "k3", "over": "mean", "high": 0.05}
    check(AlgorithmConfig(correction={"weight": None, "reject": [token, sequence]}), seed=6)
    check(AlgorithmConfig(correction={"weight": {"normalise": True}, "reject": [token, sequence]}), seed=6)


@pytest.mark.parametrize(
    ("estimator", "straight_through"),
    [("k2", False), ("k3", False), ("abs", False), ("k1", True), ("k3", True), ("abs", True)],
)
def test_kl_in_the_loss(estimator, straight_through):
    check(AlgorithmConfig(kl=KlConfig(estimator=estimator, straight_through=straight_through)), seed=7)


@pytest.mark.parametrize("share", [0.01, 0.2, 0.8])
def test_entropy_bonus_and_tokens_of_high_entropy(share):
    entropy = {"coefficient": FixedCoefficient(value=0.2)}
    check(AlgorithmConfig(entropy=entropy, top_entropy_share=share), seed=8)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_an_entropy_bonus_may_be_a_mean_over_tokens_whatever_the_losses_are(mode):
    entropy = {"coefficient": FixedCoefficient(value=0.2), "aggregation": "token-mean"}
    check(config(VARIANTS[0], mode).model_copy(update={"entropy": EntropyConfig.model_validate(entropy)}), seed=8)
