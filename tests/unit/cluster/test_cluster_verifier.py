"""The verifier's process shapes the rewards."""

from __future__ import annotations

import numpy as np

from megatron_rl.cluster.verifier import shape
from megatron_rl.config.advantages import RepetitionShaping, SoftOverlongShaping
from megatron_rl.types import Prompt, Tokens, Verdict


def test_shaping_sees_the_response_alone_and_leaves_scores_and_abstentions():
    prompt = Prompt("row", (7, 7), "")

    def tokens(*response):
        ids = np.array([7, 7, *response], np.int32)
        return Tokens(ids, ids > 0, np.zeros(len(ids), np.float32), ids)

    groups = [[tokens(1, 2, 3, 4), tokens(1, 1, 1, 1, 1, 1)], [tokens(9)]]
    verdicts = [[Verdict(1.0, "good"), Verdict(1.0)], [Verdict(None, "the judge was away")]]
    shaping = [SoftOverlongShaping(max_tokens=6, cache_tokens=4), RepetitionShaping(ngram_size=1, max_penalty=-0.6)]
    shaped = shape(verdicts, [prompt, prompt], groups, shaping)
    # Four tokens are half of the way into the cache; six are all of it, and five of the six repeat.
    assert [v.shaped for v in shaped[0]] == [1.0 - 0.5, 1.0 - 1.0 - 0.5]
    assert [v.score for v in shaped[0]] == [1.0, 1.0] and shaped[0][0].reason == "good"
    assert shaped[1] == [Verdict(None, "the judge was away", shaped=None)]
