"""An environment of your own: an answer of several turns, and a reward for each turn.

    python tutorials/04_own_environment.py

You will learn the two methods of an environment, how to play it by hand, how a few supervised steps teach a model the
form of a turn, and what a run shows about its episodes. You need two CPU cores, no GPU and no download. The script
takes about a minute, because it makes two runs.

The game: the environment hides a digit. The model guesses one, and after a wrong guess it reads the range that is left.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from megatron_rl import grpo, sft
from megatron_rl.recipes.calculator.task import write_model


# 1. The environment is a class with two methods, and every answer gets an object of its own. `reset` gets the columns
# of the answer's row, without its prompt: the prompt is the first thing that the model reads. `step` gets what the
# model wrote in a turn, and returns what it reads next, the reward of this turn, and whether the episode is over.
class Search:
    def reset(self, row):
        self.secret, self.low, self.high = int(row["secret"]), 0, 9

    def step(self, text):
        guess = next((int(letter) for letter in text if letter.isdigit()), None)
        if guess == self.secret:
            return "", 1.0, True
        if guess is None:  # None is no reward, which is not the reward 0
            return f"{self.low}-{self.high}", None, False
        if not self.low <= guess <= self.high:  # the model has read that this is impossible
            return f"{self.low}-{self.high}", -0.2, False
        if guess < self.secret:
            self.low = guess + 1
        else:
            self.high = guess - 1
        return f"{self.low}-{self.high}", 0.0, False


# An exception in these methods is a fault of this one episode: its answer has no score from any reward, and the run
# counts it (`environment/failed`) and goes on.

# 2. Play it by hand. Halving the range finds each digit in at most four turns.
game = Search()
game.reset({"secret": "6"})
print("by hand, the secret is 6:")
for text in ("4", "3", "no idea", "7", "6"):
    print(f"  {text!r:10} -> {game.step(text)}", flush=True)

# 3. The model has two layers with random weights, and a chat template, which an environment needs: observations become
# turns of the user. Its vocabulary has digits, a few letters and signs, and `<end>` for the end of a turn.
MODEL = Path("models/tutorial_search")
write_model(MODEL, seed=0)

# 4. A random model does not know that a turn ends, so most of its answers would be one long turn. Some supervised steps
# on conversations show it the form: one digit, and the end of the turn. The digits are random, and the model learns the
# last turn of each row.
random.seed(0)
conversations = []
for _ in range(256):
    game, observation, done, turns = Search(), "0-9", False, []
    game.reset({"secret": random.randrange(10)})
    while not done and len(turns) < random.choice((2, 4, 6)):
        guess = str(random.randrange(10))
        turns += [{"role": "user", "content": observation}, {"role": "assistant", "content": guess}]
        observation, _, done = game.step(guess)
    conversations.append({"messages": turns})
adam = {"optimizer": {"lr": 3e-3}}
taught = sft(MODEL, conversations, steps=20, sft={"rows_per_step": 32, "max_tokens": 64}, policy=adam)

# 5. Two steps with the environment. The rows must be chats. `max_turns` bounds the turns, and all tokens of an answer,
# observations included, share `max_response_tokens`. Observations are read and not trained on. The reward
# `environment` is the sum of the rewards of the turns. This model does not think, so there is no text that ends a
# reasoning: the delimiter is empty.
rows = [{"messages": [{"role": "user", "content": "0-9"}], "secret": str(number % 10)} for number in range(40)]
run = grpo(
    taught.model,
    rows,
    "environment",
    steps=2,
    policy={"optimizer": {"lr": 1e-3}},
    rollout={
        "environment": {"kind": "class", "path": Search, "max_turns": 4},
        "prompts_per_step": 8,
        "samples_per_prompt": 8,
        "max_prompt_tokens": 16,
        "max_response_tokens": 64,
        "delimiter": "",
    },
)

# 6. What the run tells about its episodes, and the whole conversation of a few of them.
names = ("reward/mean", "reward/environment/abstained", "environment/turns_mean", "environment/turns_max")
for record in run.metrics:
    print(f"\nstep {record['step']}: " + ", ".join(f"{name} {record[name]:.2f}" for name in names))
for sample in map(json.loads, (run.folder / "samples.jsonl").read_text().splitlines()):
    reward = sample["reason"] if sample["reward"] is None else f"{sample['reward']:.1f}"
    print(f"  reward {reward}: {sample['prompt']} | {sample['answer']}")
