"""Tells what is not healthy about a run's steps, and keeps what `megatron-rl explain` needs of one whose gradient norm
jumps."""

from __future__ import annotations

from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.data.saved_rollouts import keep_step, path_of
from megatron_rl.loop.checkpoints import Checkpoints
from megatron_rl.loop.health import Health
from megatron_rl.loop.replay import dump
from megatron_rl.ports import Sink, Stream
from megatron_rl.types import Metrics, Rollouts

MOST_KEPT = 5
"""The number of jumps whose answers are kept. A run that jumps all the time would fill the disk."""


class RunHealth:
    def __init__(self, config: GrpoRunConfig, stream: Stream, sink: Sink, checkpoints: Checkpoints) -> None:
        self._config, self._stream, self._checkpoints = config, stream, checkpoints
        self._health = Health(sink, config)
        self._num_kept = 0

    def look(self, step: int, metrics: Metrics, rollouts: Rollouts) -> None:
        """Look at a step that is done, and warn.

        Raises:
            ValueError: a rule of `run.stop_on` is broken.
        """

        def kept(message: str) -> str:
            if self._num_kept == MOST_KEPT:
                return f"{message}. {MOST_KEPT} such steps are kept already, and this one is not"
            self._num_kept += 1
            self._keep(step, rollouts)
            return (
                f"{message}. The step's answers and the newest checkpoint before it are kept; this command names the "
                f"tokens: megatron-rl explain {self._config.run_folder} --step {step}"
            )

        self._health.look(step, metrics, kept)

    def _keep(self, step: int, rollouts: Rollouts) -> None:
        folder = self._config.run_folder / "rollouts"
        if self._config.rollout.replay is None:
            if not path_of(folder, step).exists():
                dump(self._config, folder, self._stream, rollouts, step)
            keep_step(folder, step)
        self._checkpoints.keep(step)
