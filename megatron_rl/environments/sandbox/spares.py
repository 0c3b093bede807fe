"""Sandboxes that are begun ahead, so that an answer does not wait for its own.

A sandbox that is closed leaves a new one of its kind, which starts while the model writes other answers or learns. So
there are as many as answers had one at the same time, up to a limit.

Invariants (tests/unit/environments): no answer gets a sandbox that another one had; one that has ended while it waited
is not given; nothing is left when their process ends.
"""

from __future__ import annotations

import threading

from megatron_rl.environments.sandbox.box import FOLDER, Box, BoxError, BoxLimits

MOST = 128
"""The largest number of sandboxes that wait; each has about 7 MB of memory."""


class Spares:
    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._waiting: list[Box] = []
        self._lock, self._turn = threading.Lock(), threading.Lock()

    def take(self, limits: BoxLimits, folder: str = FOLDER, image: str | None = None) -> Box:
        """A sandbox with an empty tree. One of an image is always new, because most images belong to a single task.

        Raises:
            BoxError: none waits, and a new one cannot be made.
        """
        while image is None:
            with self._lock:
                found = next((box for box in self._waiting if (box.limits, box.folder) == (limits, folder)), None)
                if found is None:
                    break
                self._waiting.remove(found)
            if found.is_alive:
                return found
            found.close()
        return Box({}, limits, folder, image)

    def replace(self, box: Box) -> None:
        """Close a sandbox, and begin a new one in its place."""
        box.close()
        if box.image is None:
            threading.Thread(target=self._begin, args=(box.limits, box.folder), daemon=True).start()

    def close(self) -> None:
        """Close all that wait. No other one begins."""
        self._most = 0
        with self._turn:
            for box in self._waiting:
                box.close()

    def _begin(self, limits: BoxLimits, folder: str) -> None:
        with self._turn:  # one after another, because answers go on meanwhile
            with self._lock:
                if sum((box.limits, box.folder) == (limits, folder) for box in self._waiting) >= self._most:
                    return
            try:
                box = Box({}, limits, folder)
            except BoxError:  # an answer that begins its own tells why
                return
            with self._lock:
                self._waiting.append(box)
                oldest = self._waiting.pop(0) if len(self._waiting) > self._most else None
            if oldest is not None:
                oldest.close()


SPARES = Spares()
"""The sandboxes of this process."""
