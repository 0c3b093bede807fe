"""A loss and an advantage estimator of your own, next to the built-in ones.

    python tutorials/03_own_loss.py

You will learn what a loss is given and what it returns, how to look at its gradient on a few numbers before you train
with it, and the same for an estimator of advantages. Nothing in the package has to be changed. You need two CPU cores,
no GPU and no download. The script takes about half a minute.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from megatron_rl import grpo
from megatron_rl.algorithms.losses.dual_clip import dual_clip_loss
from megatron_rl.algorithms.losses.terms import Terms
from megatron_rl.algorithms.outcomes import grpo as grpo_advantages
from megatron_rl.config.losses import DualClipLoss
from megatron_rl.recipes.tiny.task import write_model

# 1. A loss. It is called on every rank, for each micro-batch, with the terms of T packed tokens, and it returns the
# loss of each token. The weights that turn these into one number (`algorithm.loss_agg_mode`) are applied afterwards, so
# a loss does not need to know how tokens are split over ranks. The second result has columns for the metrics.
#
# This one is "simple policy optimisation" (arXiv:2401.16025): where PPO's clip makes the gradient zero, it pulls the
# ratio back to the edge of the range with a square.
EPSILON = 0.2


def simple(terms):
    distance_T = terms.ratio_T - 1
    pull_T = terms.advantage_T.abs() * distance_T.square() / (2 * EPSILON)
    return -terms.advantage_T * terms.ratio_T + pull_T, {"pull": pull_T}


# 2. Compare it with the built-in loss by hand: seven tokens, with ratios pi / pi_old from 0.5 to 2. What matters is the
# gradient with respect to the log-probability. Below 0 means that the update makes the token more probable.
RATIOS = torch.tensor([0.5, 0.8, 0.95, 1.0, 1.1, 1.2, 2.0])


def gradients(loss, advantage):
    logp_T, zeros_T = RATIOS.log().requires_grad_(), torch.zeros(len(RATIOS))
    terms = Terms(
        mask_T=torch.ones(len(RATIOS), dtype=torch.bool),  # all of them are tokens that the policy sampled
        sample_T=torch.zeros(len(RATIOS), dtype=torch.int64),  # of one answer
        advantage_T=torch.full((len(RATIOS),), advantage),
        logp_T=logp_T,
        anchor_T=zeros_T,  # log pi_old: here every token had the probability 1, so the ratio is exp(logp)
        logp_rollout_T=zeros_T,
        lag_T=zeros_T.int(),
        selected_T=None,
    )
    loss(terms)[0].sum().backward()
    return logp_T.grad


built_in = dual_clip_loss(DualClipLoss())  # the default of algorithm.loss
print("gradient at the ratio   " + "".join(f"{ratio:8.2f}" for ratio in RATIOS.tolist()))
for advantage in (1.0, -1.0):
    for name, loss in (("dual_clip", built_in), ("simple", simple)):
        print(f"A = {advantage:+.0f}  {name:<15}" + "".join(f"{g:8.2f}" for g in gradients(loss, advantage).tolist()))

# 3. An estimator of advantages. It is called once in a step, on the driver, with the answers of the whole step: the
# reward of each answer, NaN without a reward, and the group that it belongs to. It returns one number for
# each answer. (The batch has more; see `megatron_rl.types.StepBatch`.) GRPO's mean and deviation are moved by one
# extreme reward, and a median is not.


def above_median(batch):
    advantages = np.zeros(len(batch.rewards))
    for group in np.unique(batch.group_of):
        mine = batch.group_of == group
        advantages[mine] = batch.rewards[mine] - np.nanmedian(batch.rewards[mine])
    return advantages


# 4. By hand: a group of five answers, and the last one has an extreme reward.
batch = SimpleNamespace(rewards=np.array([0.0, 0.1, 0.2, 0.3, 5.0]), group_of=np.zeros(5, np.int64))
print("\nrewards                 " + "".join(f"{reward:8.2f}" for reward in batch.rewards))
for name, advantages in (
    ("grpo, std group", grpo_advantages(batch.rewards, batch.group_of, "group")),
    ("above_median", above_median(batch)),
):
    print(f"{name:<24}" + "".join(f"{one:8.2f}" for one in advantages), flush=True)


# 5. Two steps with both. With one optimizer step for each batch the ratio is 1 everywhere, so a clip and a pull have no
# effect. `updates_per_step` makes two optimizer steps, and the second one sees other ratios. With the command instead
# of Python: algorithm.loss='{kind: function, path: "my_losses.py:simple"}'. recipes/tiny/losses.py is such a file.
def digits(completions, **others):
    return [sum(map(str.isdigit, text)) / max(len(text), 1) for text in completions]


MODEL = Path("models/tutorial_sums")
write_model(MODEL, seed=0)
run = grpo(
    MODEL,
    [{"prompt": f"{a}+{a}="} for a in range(10, 42)],
    digits,
    steps=2,
    policy={"optimizer": {"lr": 1e-3}},
    rollout={"prompts_per_step": 8, "samples_per_prompt": 8, "max_prompt_tokens": 8, "max_response_tokens": 24},
    algorithm={
        "loss": {"kind": "function", "path": simple},
        "adv_estimator": {"kind": "function", "path": above_median},
        "updates_per_step": 2,
    },
)
# 6. The column `pull` has become a metric: its mean over the sampled tokens.
print("\nstep     reward       loss  grad_norm       pull")
for record in run.metrics:
    print(f"{record['step']:>4}" + "".join(f"{record[n]:11.5f}" for n in ("reward/mean", "loss", "grad_norm", "pull")))
