"""The record of unfinished answers, with the outputs that vLLM's steps have."""

from __future__ import annotations

import numpy as np
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import LogprobsLists

from megatron_rl.rollout.progress import ROW, Progress, recorded, remove_records


def step(version: int, *tokens: tuple[str, int, float], finished: tuple[str, ...] = ()) -> EngineCoreOutputs:
    """One token for each named request."""
    outputs = [
        EngineCoreOutput(
            name,
            [token],
            new_logprobs=LogprobsLists(np.array([[token]]), np.array([[logp]], np.float32), np.array([1])),
            finish_reason=FinishReason.STOP if name in finished else None,
        )
        for name, token, logp in tokens
    ]
    return EngineCoreOutputs(outputs=outputs, weight_version=str(version))


def test_the_tokens_of_an_answer_are_found_in_the_order_of_its_engines(tmp_path):
    first, second = Progress(tmp_path / "a"), Progress(tmp_path / "b")
    first.begin("x", 5, 0)
    first.begin("y", 5, 1)
    first.write(step(3, ("x", 11, -0.5), ("y", 12, -0.25), ("evaluation", 9, -1.0)))
    first.write(step(4, ("x", 13, -1.5)))
    second.begin("z", 5, 0)
    second.write(step(4, ("z", 14, -2.0)))
    paths = [tmp_path / "a", tmp_path / "b", tmp_path / "gone with its node"]
    assert recorded(paths, 5, 0).tolist() == [
        (5 * 2**20, 11, 3, -0.5),
        (5 * 2**20, 13, 4, -1.5),
        (5 * 2**20, 14, 4, -2.0),
    ]
    assert recorded(paths, 5, 1)["token"].tolist() == [12]
    assert len(recorded(paths, 6, 0)) == len(recorded(paths, 5, 2)) == len(recorded([], 5, 0)) == 0
    first.write(step(5, ("y", 15, -0.125)))
    assert recorded(paths, 5, 1)["token"].tolist() == [12, 15], "a file that has grown is read again"
    remove_records(tmp_path / "no folder")


def test_a_row_that_was_cut_off_by_a_kill_is_not_read(tmp_path):
    progress = Progress(tmp_path / "a")
    progress.begin("x", 0, 0)
    progress.write(step(0, ("x", 11, -0.5)))
    whole = (tmp_path / "a").read_bytes()
    for size in range(1, ROW.itemsize):
        (tmp_path / "b").write_bytes(whole + whole[:size])
        assert recorded([tmp_path / "b"], 0, 0)["token"].tolist() == [11]


def test_the_file_does_not_grow_with_the_run(tmp_path):
    progress = Progress(tmp_path / "a", max_bytes=40 * ROW.itemsize)
    progress.begin("long", 10**6, 0)
    for group in range(200):
        progress.begin(str(group), group, 0)
        for token in range(5):
            progress.write(step(0, (str(group), token, -1.0), finished=(str(group),) if token == 4 else ()))
        progress.write(step(0, ("long", group, -1.0)))
        progress.done(group)
    assert recorded([tmp_path / "a"], 10**6, 0)["token"].tolist() == list(range(200))
    assert (tmp_path / "a").stat().st_size < 600 * ROW.itemsize
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_requests_that_were_aborted_are_not_recorded_any_more(tmp_path):
    progress = Progress(tmp_path / "a")
    progress.begin("x", 0, 0)
    progress.forget()
    progress.write(step(0, ("x", 11, -0.5)))
    assert not (tmp_path / "a").read_bytes()
