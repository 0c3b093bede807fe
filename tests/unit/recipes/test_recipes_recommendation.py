"""The recommendation task and its rewards, by hand."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest

from megatron_rl.config.load import load_config
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.recipes.recommendation.rewards import first_hit, form, hit, hit_share, levels
from megatron_rl.recipes.recommendation.task import CATALOGUE, Item, User, demonstration, write_task
from megatron_rl.rollout.programs.budgets import Budgets

RIGHT = ["<a_1><b_4><c_3>", "<a_1><b_4><c_7>"]


def completion(thought: str, item: str) -> str:
    return f"{thought}</think><item>{item}"


COMPLETIONS = [
    completion("<a_1>", "<a_1><b_4><c_3>"),
    completion("<a_1>", "<a_1><b_4><c_1>"),
    completion("<a_3>", "<a_3><b_4><c_3>"),
    completion("<a_3>", "<a_1><b_2><c_5>"),
    "<a_3><a_1><b_4><c_3>",  # the model ended its answer in the thought
]
COLUMNS = {"prompts": ["p"] * 5, "completions": COMPLETIONS, "items": [RIGHT] * 5}


def test_rewards_by_hand():
    reported = {}
    assert hit(COMPLETIONS, [RIGHT] * 5, reported.__setitem__) == [1, 0, 0, 0, 0]
    assert reported == {"num_relevant": [2] * 5}
    assert first_hit(**COLUMNS) == [1, 1, 0, 0, 0]
    assert hit_share(**COLUMNS) == [0.5, 0.5, 0, 0, 0]
    assert levels(COMPLETIONS, [RIGHT] * 5) == pytest.approx([1, 2 / 3, 0, 1 / 3, 0])
    assert form(COMPLETIONS) == [1, 1, 1, 1, 0]


def test_equal_thoughts_of_two_users_stay_apart():
    columns = COLUMNS | {"prompts": ["p", "q", "p", "p", "p"]}
    assert hit_share(**columns) == [1, 0, 0, 0, 0]


def test_the_next_item_by_hand():
    """The example of the task."""
    user = User(Item(1, 2, 5), Item(3, 0, 1))
    assert user.prompt == "<a_1><b_2><c_5><a_3><b_0><c_1><a_1><b_3><c_4><a_3><b_1><c_0><think>"
    assert user.items == ["<a_1><b_4><c_3>", "<a_1><b_4><c_7>"]


def test_series_and_other_volumes_stay_in_the_catalogue():
    assert len(CATALOGUE) == len(set(CATALOGUE)) == 128
    for item in CATALOGUE:
        assert item.next in CATALOGUE and item.other_volume in CATALOGUE and item.other_volume != item


def test_half_of_the_demonstrations_are_about_the_wrong_series():
    user, rng = User(Item(1, 2, 5), Item(3, 0, 1)), random.Random(0)
    made = Counter(demonstration(user, rng) for _ in range(4000))
    right = sum(count for text, count in made.items() if text.startswith("<a_1></think><item><a_1>"))
    assert right / 4000 == pytest.approx(0.5, abs=0.03)
    hits = sum(made[completion("<a_1>", item)] for item in user.items)
    assert hits / right == pytest.approx(0.9 + 0.1 / 8, abs=0.02)


@pytest.mark.deep
def test_the_task_fits_the_recipe_and_its_users_are_disjoint(tmp_path):
    write_task(tmp_path / "task")
    rows = {
        name: [json.loads(line) for line in (tmp_path / "task" / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "eval", "demonstrations")
    }
    assert (len(rows["train"]), len(rows["eval"])) == (4000, 300)
    train, heldout = ({row["prompt"] for row in rows[name]} for name in ("train", "eval"))
    assert len(train) + len(heldout) == 4300 and not train & heldout
    assert {row["prompt"] for row in rows["demonstrations"]} <= train
    task = tmp_path / "task"
    changes = [f"model.path={task}/model", f"rollout.beams.catalogue={task}/items.json"]
    config = load_config(GrpoRunConfig, ["configs/run/recommendation.yaml", *changes])
    budgets = Budgets(config.model.path, config.rollout, on_gpu=False)
    assert budgets.beams.num_tokens == 3 and budgets.beams.call.num_candidates == 64
