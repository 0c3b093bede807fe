"""How the state of a streamed optimizer is cut into pieces, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from megatron_rl.actor import platform  # noqa: F401  before Megatron: it silences its import
from megatron_rl.actor.optimizer.intervals import Interval
from megatron_rl.actor.optimizer.streaming import cut
from megatron_rl.config.optimizer import AdamConfig
from megatron_rl.config.policy import PolicyConfig


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 25)), max_size=6), st.integers(1, 12))
def test_pieces_hold_every_element_once_and_in_order(bounds, num_elements):
    owned = [Interval(None, None, start, start + size, i) for i, (start, size) in enumerate(bounds)]
    pieces = list(cut(owned, num_elements))
    found = [(s.interval.group, i) for segments in pieces for s in segments for i in range(s.start, s.stop)]
    assert found == [(one.group, i) for one in owned for i in range(one.start, one.stop)]
    for number, segments in enumerate(pieces):
        places = [i for s in segments for i in range(s.place.start, s.place.stop)]
        assert places == list(range(len(places))) and all(s.stop > s.start for s in segments)
        assert sum(s.stop - s.start for s in segments) == len(places)
        assert len(places) == num_elements or (number == len(pieces) - 1 and 0 < len(places) < num_elements)


def test_a_moment_that_bfloat16_never_lets_decay_is_refused():
    significands = torch.arange(128, 256).bfloat16()  # all of bfloat16's
    kept = {beta: int(((significands.float() * beta).bfloat16() == significands).sum()) for beta in (0.996, 0.999)}
    assert kept == {0.996: 0, 0.999: 128}
    assert AdamConfig(moments="bfloat16", betas=(0.9, 0.996)).is_streamed
    with pytest.raises(ValidationError, match="keeps 0.999.*below 0.99609375"):
        AdamConfig(moments="bfloat16", betas=(0.9, 0.999))
    assert not AdamConfig(betas=(0.9, 0.999)).is_streamed


@pytest.mark.parametrize("megatron", [{"transformer": {"fp8_param": True}}, {"ddp": {"fp8_param_gather": True}}])
def test_a_streamed_state_beside_weights_in_fp8_is_refused(megatron):
    assert PolicyConfig(megatron=megatron, optimizer={}).megatron.model_dump(exclude_defaults=True) == megatron
    with pytest.raises(ValidationError, match="megatron.transformer"):
        PolicyConfig(megatron=megatron, optimizer={"offload": True})
