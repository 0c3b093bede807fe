"""What every metric of a run means; `megatron-rl metrics --markdown` makes docs/metrics.md of it.

Invariant (tests/e2e/conftest.py): every name in the metrics.jsonl of a tested run is here. A name in braces, as in
`reward/{reward}/mean`, stands for names that the run gives.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from megatron_rl.config.health import MEANINGS

HEAD = """# Metrics

Each line of `metrics.jsonl` is a step, and has the metrics below that belong to the run. After reading this page you
know what each of them says. `step` counts from 0; the record of step s was measured with the weights of version s. The
value of a step with several updates is the mean over them, of names that end in `/max` or `/min` the largest or the
smallest. Names in braces are given by the run: `{reward}` is the name of a reward, `{dataset}` a value of the column
`dataset`, `{k}` a number. A loss function of your own adds its columns
under their own names. This page is written by `megatron-rl metrics --markdown`.
"""

SECTIONS: Mapping[str, Mapping[str, str]] = {
    "Rewards": {
        "reward/mean": "the mean reward of the answers: the weighted sum of all rewards, after shaping",
        "reward/std": "the standard deviation within a group, as the mean over groups",
        "reward/{reward}/mean": "the mean score of one reward, without its weight",
        "reward/{reward}/std": "the standard deviation of these scores over the step's answers",
        "reward/{reward}/abstained": "the share of its answers that a reward did not score",
        "reward/{reward}/failed": "the share of answers that a reward could not score: an error, a time-out, a NaN",
        "reward/{reward}/seconds": "the seconds of all calls of a reward, added up over processes",
        "reward/{reward}/{logged}": "the mean of what a reward function has logged with `log_metric`",
        "reward/{reward}/signal": "the reward's share in the differences between the answers to a prompt",
        "score/mean": "the mean reward before shaping, if `algorithm.shaping` is given",
        "groups/zero_signal": "the number of groups that train nothing, because all their advantages are 0",
        "samples/active": "answers that were trained on",
        "samples/abstained": "answers without a score",
        "samples/overlong": "answers left out because they were cut (`algorithm.overlong_filter`)",
        "dataset/{dataset}/groups": "groups of a data set; a row of several data sets counts in each",
        "dataset/{dataset}/zero_signal": "the share of these groups whose scores are all equal",
        "dataset/{dataset}/response_mean": "the mean length of the answers, in tokens",
        "dataset/{dataset}/score_mean": "the mean score",
        "verifier/restarts": "processes of verifiers that had to be started again",
    },
    "Answers": {
        "length/response_mean": "tokens of an answer, with its reasoning and with forced tokens",
        "length/response_max": "tokens of the longest answer",
        "length/response_cut": "the share of answers that ended at a limit, not by themselves",
        "length/duplicates": "the share of answers of 64 tokens or more that equal an earlier one to their prompt",
        "length/thought_mean": "tokens of the reasoning",
        "length/thought_cut": "the share of answers whose reasoning the budget ended",
        "length/answer_mean": "sampled tokens after the reasoning",
        "thought/budget_mean": "the mean budget of the reasoning, in tokens",
        "thought/over_budget": "answers whose reasoning has more sampled tokens than its budget; should be 0",
        "thought/cut_reward_mean": "the mean reward of answers whose reasoning the budget ended",
        "thought/whole_reward_mean": "the mean reward of the other answers",
        "rollout/num_samples": "answers of the step",
        "rollout/num_tokens": "tokens of these answers",
        "rollout/tokens_per_s": "new tokens of the engines for each second while they were asked for any",
        "rollout/idle": "the share of that time while an engine had no request",
        "rollout/preempted": "requests that vLLM preempted for lack of KV cache since the last weight sync",
        "rollout/drafted": "tokens that engines drafted between the last two weight syncs, also for evaluations "
        "(`rollout.speculative`)",
        "rollout/accepted": "the drafted tokens that the model sampled, too",
        "rollout/accepted/share": "the share of accepted drafts in all tokens of the answers that ended",
        "rollout/accepted/depth_{depth}": "the share of drafts that were accepted, of the first drafts of an answer in "
        "a step, the second ones and so on",
        "rollout/accepted/running_{answers}": "the share of accepted drafts in steps of an engine with this number of "
        "answers, rounded up to a power of 2",
        "environment/turns_mean": "turns of the model in an answer",
        "environment/turns_max": "the most turns of an answer",
        "environment/tool_calls": "calls of tools in an answer",
        "environment/abandoned": "calls of agents that nobody waited for any more; they are left out",
        "environment/retried": "calls of agents that they repeated to go on from a later answer; they are left out",
        "environment/conversations": "samples of an answer: several if its history was changed",
        "environment/tool_errors": "errors of tools in an answer",
        "environment/tool_errors/{kind}": "by kind: `unclosed`, `malformed`, `unknown_tool`, wrong `arguments`, "
        "`raised`, `timed_out`",
        "environment/failed": "the share of answers whose environment failed",
        "environment/began_again": "attempts at answers whose environment failed, and that began again",
        "environment/step_s": "seconds that a turn waited for the environment",
        "beams/ended_thoughts": "answers without a search, because the model ended them within the reasoning",
        "beams/missing": "beams that found no item (`rollout.beams.candidates`)",
        "passages/mean": "rewarded passages of the reasoning (`rollout.prefix_values`)",
        "passages/single": "the share of answers with at most one passage",
        "passages/utility_mean": "the mean reward of a passage",
        "passages/helpful": "the share of passages with a reward above 0",
    },
    "Evaluation": {
        "eval/reward_mean": "the mean reward of the held-out answers",
        "eval/accuracy": "the share of right answers: a score of 1 or more by `eval.verifier`",
        "eval/accuracy_{bound}": "`low` and `high`, the bounds of its 95 % interval",
        "eval/pass@{k}": "the share of prompts with a right answer among k, and its bounds",
        "eval/maj@{k}": "the share of prompts whose most frequent final answer is right, and its bounds",
        "eval/recall@{k}": "the share of the right items that are among the first k (`rollout.beams`)",
        "eval/num_samples": "held-out answers",
        "eval/abstained": "held-out answers without a score",
        "eval/loss": "the mean loss of a trained token of `sft.eval`, in nats, or of a held-out row of preferences",
        "eval/tokens": "the number of trained tokens of `sft.eval`",
        "eval/response_mean": "the mean length of a held-out answer, in tokens",
        "eval/dataset/{dataset}/reward_mean": "the same of the rows of one data set, if there are several",
        "eval/dataset/{dataset}/response_mean": "the mean length of the answers to these rows, in tokens",
    },
    "Preferences": {
        "preference/accuracy": "the share of pairs whose chosen answer is ahead; for KTO of answers on their side of z",
        "preference/margin": "the mean lead of the chosen answer, in what the loss compares: log-probs or scores",
        "preference/chosen": "the mean of these numbers of chosen answers",
        "preference/rejected": "the mean of rejected answers",
        "preference/kl": "z of KTO: the estimate of the KL from the reference model, in nats",
    },
    "Policy": {
        "loss": "the loss whose gradient is taken, with KL and entropy terms",
        "pg_loss": "the policy's part of it",
        "pg_clipfrac": "the share of tokens whose gradient the clip removes",
        "pg_clipfrac_lower": "the share of tokens at the bound for negative advantages (dual clip)",
        "ppo_kl": "KL of the policy from the ratio's anchor (`algorithm.anchor`), estimator k3",
        "kl": "KL from the reference policy, by the configured estimator",
        "teacher/kl": "KL(policy || teacher) in nats by sampled tokens, or the divergence of `algorithm.distillation`",
        "teacher/scored": "the share of tokens that a teacher has scored",
        "entropy": "the mean entropy of a token's distribution, in nats",
        "logp/mean": "the mean log-prob of the sampled tokens; on policy its negative estimates the entropy",
        "tokens/untrained": "the share of sampled tokens whose embeddings no training has moved, if there are any",
        "masked": "the share of tokens without a policy loss: rejected, or of low entropy",
        "cov/chosen": "the share of tokens that the covariance losses choose",
        "vespo/weight": "the mean weight of the loss `vespo`",
        "ratio/mean": "the probability ratio of policy and anchor, as the mean over tokens",
        "ratio/max": "the largest ratio",
        "ratio/min": "the smallest ratio",
        "on_policy/ratio_error": "the largest distance of a ratio from 1 in the first update; should be 0",
        "mismatch/mean_abs": "|log-prob of the trainer - log-prob of the engine|, as the mean over tokens",
        "mismatch/max_abs": "the largest one",
        "mismatch/k3": "KL between both, estimator k3",
        "mismatch/judged": "the share of tokens that could be compared, if not all could",
        "correction/mean": "the mean importance weight of the correction",
        "correction/bounded": "the share of weights at a bound",
        "correction/ess": "the effective sample size as a share: mean squared by mean of squares",
        "rejected/{rule}": "the share of tokens that a rule of `algorithm.correction.reject` rejected",
        "coefficient/{name}": "the coefficient in force of `kl` or `entropy`, and `max_mismatch`",
        "epochs": "the epochs that were trained, with a part of the last one if `algorithm.stop_epochs` ended it",
        "epoch_{number}/{name}": "the metrics `ratio/...`, `pg_clipfrac`, `ppo_kl` and `masked` of one epoch, from 1",
        "lag/mean": "versions between an answer's oldest token and the step, as the mean over answers",
        "lag/max": "the largest lag",
        "lag/updates": "the mean lag in optimizer steps without `algorithm.stop_epochs`, if a step has several",
    },
    "Optimizer": {
        "lr": "the learning rate of the update",
        "grad_norm": "the norm of the gradient before it is clipped",
        "param_norm": "the norm of the weights",
        "update_ratio": "the norm of the update by the norm of the weights",
        "update_changed": "the share of the weights in bfloat16 or float16 that an update has given other bits",
        "update_repeated": "how often the gradient of an update was computed again, because it overflowed float16",
        "loss_scale": "the scale of the loss in the backward pass of a model in float16",
        "critic/value_mean": "the mean value that the critic predicted",
        "critic/return_mean": "the mean return",
        "critic/explained_variance": "the share of the returns' variance that the values explain",
        "critic/clipfrac": "the share of tokens whose value loss is clipped",
        "critic/{name}": "the metric of this name of the critic's update",
        "experts/load/max": "tokens of the busiest expert by the mean of its layer, in the worst layer",
        "experts/load_mean": "the same, as the mean over layers",
        "experts/unused": "the share of experts that got no token",
        "experts/auxiliary_loss": "the sum of the auxiliary losses over layers",
        "multi_token/loss": "the mean cross-entropy of the multi-token head's targets, in nats",
        "multi_token/accuracy": "the share of the sampled tokens that have its largest logit",
        "routing/replayed": "the share of expert choices taken from the engine",
        "routing/differing": "the share of these that the trainer would not have made",
    },
    "Balance": {
        "balance/tokens": "tokens of the step's micro-batches, without padding",
        "balance/flops": "FLOPs of the step with recomputation",
        "balance/model_flops": "FLOPs of forward and backward pass alone",
        "balance/num_microbatches": "micro-batches of a rank",
        "balance/imbalance": "the relative excess of the costliest rank",
        "balance/lockstep": "cost if ranks wait after each micro-batch, by a lower bound of all plans",
        "balance/fill": "the share of the token cap that is used",
        "balance/padding": "the share of padding in the packed tokens",
        "balance/bubble": "the estimated share of time while a pipeline stage is idle",
        "balance/oversize": "samples that are longer than the cap, and have a micro-batch of their own",
    },
    "Time and machines": {
        "time/total_s": "seconds of the step",
        "time/{phase}_s": "seconds of a phase, such as sync, generate, plan, logprobs, update, evaluate, checkpoint",
        "time/other_s": "seconds outside all phases",
        "perf/tokens_per_s": "trained tokens for each second of the updates, on all ranks together",
        "perf/mfu": "model FLOPs utilisation (Chowdhery et al. 2022) by the H100's peak; only on GPUs",
        "perf/critic_values_s": "seconds that the critic needed for the values",
        "memory/trainer_bytes/max": "the peak memory of the fullest trainer rank, in bytes",
        "memory/{role}_resident_bytes": "resident bytes of the largest process of driver, trainer, critic, engine or "
        "verifier; a growth from step to step is a leak",
        "memory/shm_bytes": "used bytes of /dev/shm on the node that uses most",
        "memory/object_store_bytes": "bytes in Ray's object stores",
        "memory/{role}_gpu_bytes_before/{phase}": "bytes on the fullest GPU before a rank of trainer or critic entered "
        "a phase; before `training` the engines sleep",
        "memory/{role}_gpu_bytes_in/{phase}": "the same after it had entered",
        "memory/{role}_pinned_bytes": "pinned host memory of the rank that has most",
        "machine/{role}_cores": "CPU seconds of a role's processes for each second of the step; `ray` is all that "
        "the driver has started otherwise",
        "machine/waiting": "the share of all cores' time that no process of the run used",
        "machine/disk_free_bytes": "free bytes on the disk of the run's folder",
        "machine/missing_nodes": "nodes that did not tell their memory in time",
        "sync/bytes": "bytes that the trainer ranks sent in the weight sync",
        "sync/paused_s": "seconds that the engines took no step for the weight sync",
        "sync/transfer_s": "seconds of the slowest trainer rank's transfer in the weight sync",
        "sync/repeated": "attempts of the weight sync after the first one",
        "sync/replaced_engines": "engines that were replaced since the last weight sync",
        "mirror/bytes": "bytes of the mirrored state",
        "mirror/copies": "mirrors of the rank that has the fewest",
        "mirror/seconds": "seconds of the slowest mirror",
        "slowest_rank/ratio": "how much longer a matrix product takes on the slowest rank than on the median rank",
        "stream/running": "groups that the engines work on",
        "stream/ready": "groups that wait for the trainer",
        "stream/useless": "groups without a signal that active sampling replaced",
        "stream/surplus": "groups that came after the batch was full",
        "stream/resting": "prompts that rest because the policy has learnt them",
        "stream/late": "groups that were older than the lag allows",
        "stream/asked_again": "requests that went to another engine after a death",
        "observe/{tracker}_lost": "records that a tracker did not accept",
    },
}
"""The metrics by section, with their meaning and unit."""


def _matcher(name: str) -> re.Pattern[str]:
    parts = re.split(r"\{[a-z]+\}", name)
    return re.compile(".+".join(map(re.escape, parts)))


_MATCHERS = [(_matcher(name), meaning) for names in SECTIONS.values() for name, meaning in names.items()]
_EXACT = {name: meaning for names in SECTIONS.values() for name, meaning in names.items()}


def meaning(name: str) -> str | None:
    """What a metric says; None if it is unknown. `meaning("reward/brevity/mean")` is the text of
    `reward/{reward}/mean`."""
    found = _EXACT.get(name)
    return found or next((said for matcher, said in _MATCHERS if matcher.fullmatch(name)), None)


def markdown() -> str:
    """The page docs/metrics.md."""
    lines = [HEAD]
    for title, names in SECTIONS.items():
        lines += [f"## {title}", "| name | meaning |", "|---|---|"]
        lines += [f"| `{name}` | {said.replace('|', chr(92) + '|')} |" for name, said in names.items()]
        lines.append("")
    lines += ["## Health rules", "| `run.stop_on` | it is broken if |", "|---|---|"]
    lines += [f"| `{rule}` | {said} |" for rule, said in MEANINGS.items()]
    return "\n".join(lines).rstrip() + "\n"
