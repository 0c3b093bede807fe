"""The code that the rollout adds to vLLM's own processes. vLLM imports it there.

`RolloutWorker` is a `worker_extension_cls`. `die_with_parent` is an entry point `vllm.general_plugins`, which vLLM
calls in every process that it starts. Without it a worker whose owner was killed would stay and keep its GPU memory.
"""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import signal
import sys

from megatron_rl.processes import STACKS

PR_SET_PDEATHSIG = 1
"""A constant of linux/prctl.h."""


class RolloutWorker:
    """Methods that every vLLM worker gets. Each is called on all ranks of an engine together."""

    def seed_sampling(self, seed: int) -> None:
        """Restart the sampler's random stream, in the same way on every rank."""
        from vllm.utils.torch_utils import set_random_seed

        set_random_seed(seed)

    def take_weights(self, version: int) -> str | None:
        """Receive all weights through vLLM's weight transfer engine. Returns None, or the message of an error.

        The error is returned instead of raised: after an exception vLLM would leave the results of the other ranks
        unread, and would take them for results of the next call.
        """
        try:
            self.start_weight_update()
            self.update_weights({"version": version})
            self.finish_weight_update()
        except Exception as error:
            self._weight_update_active = False  # otherwise vLLM refuses the next update
            return str(error) or repr(error)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends for any reason. This affects vLLM's own processes, not
    the process that uses vLLM."""
    if multiprocessing.parent_process() is not None and sys.platform == "linux":
        faulthandler.register(STACKS, file=2, all_threads=True)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
