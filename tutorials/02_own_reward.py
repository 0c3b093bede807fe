"""A reward of your own: what it is given, what it returns, and what happens when it cannot judge an answer.

    python tutorials/02_own_reward.py

You will learn how rows, their columns and reward functions fit together, what a missing reward and an error do to an
answer, and where a run shows each reward by its name. You need two CPU cores, no GPU and no download. The script takes
about half a minute, most of it for the start of Ray, Megatron-Core and vLLM. Its three steps are too few to learn much.
"""

from __future__ import annotations

import json
from pathlib import Path

from megatron_rl import grpo
from megatron_rl.recipes.tiny.task import write_model

# 1. The model is a folder in Hugging Face's format. This one has two layers with random weights, and its tokens are
# single characters, so that a step takes less than a second. In your own run it is `models/Qwen3-0.6B` or the like.
MODEL = Path("models/tutorial_sums")
write_model(MODEL, seed=0)
LONGEST = 24  # tokens of an answer

# 2. Rows are a list of mappings here; a path of JSON lines, Parquet or Arrow files works too. The run itself reads only
# `prompt`: this is what the model sees. All other columns are yours, and reward functions get them by their names.
rows = [{"prompt": f"{a}+{b}=", "digit": str((a + b) % 10)} for a in range(10, 18) for b in range(20, 24)]


# 3. A reward has the signature of TRL's reward functions. It is called once in a step, with a list of all answers and
# with a list for each column, in the same order: digit[3] belongs to the row that completions[3] answers. Name the
# arguments that you need, and take the others as **others.
def wanted_digit(completions, digit, log_extra, **others):
    """The share of the row's digit among all digits of an answer."""
    digits = [[letter for letter in text if letter.isdigit()] for text in completions]
    # What `log_extra` gets is written next to the answers, so that you can see later what the function saw.
    log_extra("digits", ["".join(found) for found in digits])
    # None is no reward: "I cannot judge this answer". It is not the score 0, which would teach the model to avoid
    # such answers. Here we do not judge answers with fewer than three digits.
    pairs = zip(digits, digit, strict=True)
    return [found.count(wanted) / len(found) if len(found) >= 3 else None for found, wanted in pairs]


# 4. A second reward has a fault on purpose: it fails in the second step. After an exception no answer of the call has a
# score, and after a NaN its own answer has none. Both are counted as `failed`. The run goes on with the other rewards,
# and it stops with an error if a reward has scored nothing in three steps in a row (`max_silent_steps`).
def brevity(completion_ids, trainer_state, **others):
    """1 for an empty answer, and 0 for one of the largest length."""
    if trainer_state.global_step == 1:
        raise OSError("the disk is gone")
    return [1 - len(ids) / LONGEST for ids in completion_ids]


# 5. A reward is a plain function, so try it by hand before you spend a run on it.
by_hand = wanted_digit(["4414", "12=", "777"], digit=["4", "4", "4"], log_extra=lambda name, values: None)
print("by hand:", by_hand, flush=True)  # 3 of 4 digits; too few digits, so no reward; none of 3 digits

# 6. Train. The reward of an answer is the weighted sum of the scores that it got. `wanted_digit` has the weight 1, and
# `brevity` has 0.2. The functions of this script are sent to the processes that score; with the command instead of
# Python, they are in a file: rewards=[{kind: function, path: "my_rewards.py:wanted_digit"}].
run = grpo(
    MODEL,
    rows,
    [wanted_digit, {"kind": "function", "path": brevity, "weight": 0.2}],
    steps=3,
    policy={"optimizer": {"lr": 1e-3}},
    rollout={"prompts_per_step": 8, "samples_per_prompt": 8, "max_prompt_tokens": 8, "max_response_tokens": LONGEST},
)

# 7. Each reward by its name, in every step. `mean` is over the answers that it scored and has no weight in it.
# `abstained` is the share of answers without a score, and `failed` is the part of it that comes from errors. An answer
# without any score leaves the step (`samples/abstained`).
COLUMNS = {
    "reward": "reward/mean",
    "digit": "reward/wanted_digit/mean",
    "abstained": "reward/wanted_digit/abstained",
    "brevity": "reward/brevity/mean",
    "failed": "reward/brevity/failed",
    "left out": "samples/abstained",
}
print("\nstep" + "".join(f"{title:>11}" for title in COLUMNS))
for record in run.metrics:
    values = (f"{record[name]:.3f}" if name in record else "no score" for name in COLUMNS.values())
    print(f"{record['step']:>4}" + "".join(f"{value:>11}" for value in values))

# 8. samples.jsonl has a few answers of every step, with the reward, the reason of what has no score, and the extra
# columns of the rewards.
print(f"\nanswers in {run.folder / 'samples.jsonl'}:")
for sample in map(json.loads, (run.folder / "samples.jsonl").read_text().splitlines()):
    reward = "none" if sample["reward"] is None else f"{sample['reward']:.3f}"
    text = sample["thought"] + sample["answer"]
    print(
        f"  step {sample['step']}  {sample['prompt']}{text!r}  reward {reward}  {sample['details']}  {sample['reason']}"
    )

# 9. rewards.log has every answer that a reward failed on, with its row and the error.
failures = (run.folder / "logs" / "rewards.log").read_text().splitlines()
print(f"\n{len(failures)} failures in rewards.log; the first one: {json.loads(failures[0])}")
