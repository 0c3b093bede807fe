"""What the rollout adds to vLLM's own processes; vLLM imports it there.

`RolloutWorker` is a `worker_extension_cls`. `die_with_parent` is an entry point `vllm.general_plugins`, which vLLM
calls in every process that it starts: an engine core whose owner was killed would otherwise stay, with its GPU's
memory.
"""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import signal
import sys

PR_SET_PDEATHSIG = 1
"""linux/prctl.h"""


class RolloutWorker:
    """Methods of every vLLM worker, called on all ranks of an engine at once."""

    def seed_sampling(self, seed: int) -> None:
        """Start the sampler's random stream anew, on every rank alike."""
        from vllm.utils.torch_utils import set_random_seed

        set_random_seed(seed)

    def take_weights(self, version: int) -> str | None:
        """One whole update by vLLM's weight transfer engine; returns what went wrong.

        An exception would leave the answers of the other ranks unread, and vLLM would take them for those of the next
        call: an error is a value. The session is closed after one, or vLLM refuses the next.
        """
        try:
            self.start_weight_update()
            self.update_weights({"version": version})
            self.finish_weight_update()
        except Exception as error:
            self._weight_update_active = False
            return str(error) or repr(error)


def die_with_parent() -> None:
    """Ask the kernel to end this process when its parent ends, however that happens. Only for vLLM's own processes, not
    for the one that uses vLLM."""
    if multiprocessing.parent_process() is not None and sys.platform == "linux":
        faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)  # its owner asks it what it is doing
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
