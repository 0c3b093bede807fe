"""How many answers start: small cases by hand, and a simulated engine with long-tailed lengths."""

from __future__ import annotations

import random

import numpy as np
import pytest

from megatron_rl.rollout.kv_budget import BINS, KvBudget

LONGEST, PROMPT, BLOCK = 6400, 100, 16


def test_what_fits_with_its_largest_length_starts():
    budget = KvBudget(capacity=4 * (LONGEST + PROMPT + BLOCK), longest=LONGEST, block=BLOCK)
    assert budget.num_fitting([(PROMPT + 50, 50)], [PROMPT] * 3) == 3
    assert budget.num_fitting([], []) == 0


def test_an_idle_engine_takes_one_answer_however_long():
    assert KvBudget(capacity=10, longest=LONGEST, block=BLOCK).num_fitting([], [PROMPT] * 3) == 1
    assert KvBudget(capacity=10, longest=LONGEST, block=BLOCK).num_fitting([(20, 3)], [PROMPT] * 3) == 0


def test_the_survival_function_counts_the_answers_that_still_run():
    """Of 8 answers 4 ended in class 0 and 4 have reached class 1. One uniform answer is added: Kaplan and Meier."""
    budget = KvBudget(capacity=1, longest=BINS, block=0)
    for _ in range(4):
        budget.finished(0)
    survival = budget._survival(np.array([1, 1, 1, 1]))
    assert survival[0] == 1 and survival[BINS] == 0
    assert survival[1] == pytest.approx(1 - (4 + 1 / BINS) / 9)
    uniform = (BINS - 1) / BINS
    assert survival[2] == pytest.approx(survival[1] * (1 - 1 / BINS / uniform))
    for _ in range(4):
        budget.finished(1)
    assert budget._survival(np.array([], int))[2] == pytest.approx(62 / 64 / 9)


def test_mean_and_variance_by_hand():
    """Lengths are 1 or 3 classes, equally likely; two answers have just started, and one has reached class 2."""
    budget = KvBudget(capacity=1, longest=BINS * 10, block=0)
    survival = np.array([1.0, 1.0, 0.5, 0.5, *[0.0] * (BINS - 3)])
    mean, variance = budget._demand(np.array([5.0, 7.0]), survival)
    assert mean[:5].tolist() == [12, 15 + 17, 25 + 27, 0.5 * (35 + 37), 0.5 * (45 + 47)] and not mean[5:].any()
    assert variance[:5].tolist() == [0, 0, 0, 0.25 * (35**2 + 37**2), 0.25 * (45**2 + 47**2)]
    mean, variance = budget._demand(np.array([25.0]), survival[2:])
    assert mean[:4].tolist() == [25, 35, 45, 0] and not variance.any()


def simulate(num_starting, capacity: int, steps: int, budget: KvBudget) -> tuple[int, int, list[float]]:
    """An engine that always has answers to start. The running ones sample 10 tokens in a step; if they hold too many,
    the youngest is preempted. Returns how many answers ended, how many were preempted after the first 500 steps, and
    the number of answers that ran in each step.

    Args:
        num_starting: says how many answers start, given the tokens (held, sampled) of those that run.
    """
    rng, running = random.Random(0), []
    num_ended = num_preempted = 0
    num_running = []
    for step in range(steps):
        for _ in range(num_starting([(held, sampled) for held, sampled, _ in running])):
            running.append([PROMPT, 0, min(LONGEST, int(rng.lognormvariate(6.2, 1.2)))])
        for answer in running:
            answer[:2] = answer[0] + 10, answer[1] + 10
        ended = [answer for answer in running if answer[1] >= answer[2]]
        for _, _, length in ended:
            budget.finished(length)
        num_ended += len(ended)
        running = [answer for answer in running if answer[1] < answer[2]]
        while sum(answer[0] for answer in running) > capacity:
            running.pop()
            num_preempted += step >= 500
        num_running.append(len(running))
    return num_ended, num_preempted, num_running


def test_almost_nothing_is_preempted_and_the_cache_is_used():
    """The distribution is known after some 500 steps; before, a few answers may be preempted."""
    capacity, steps = 100_000, 1200
    budget = KvBudget(capacity, LONGEST, BLOCK)
    largest = capacity // (LONGEST + PROMPT)
    worst_case, none, few = simulate(lambda running: largest - len(running), capacity, steps, budget)
    assert none == 0 and max(few) == largest
    budget.forget()
    num_ended, num_preempted, many = simulate(lambda r: budget.num_fitting(r, [PROMPT] * 64), capacity, steps, budget)
    assert num_preempted <= 0.005 * num_ended
    assert num_ended > 3 * worst_case
    assert sum(many[500:]) > 3 * sum(few[500:])
