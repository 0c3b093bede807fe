"""Environments that tell where they run, or hold their process up."""

from __future__ import annotations

import os
import time


class Place:
    def reset(self, row) -> None:
        self.row = row

    def step(self, text: str):
        if text == "fail":
            raise OSError("the disk is gone")
        return f"{os.getpid()} {self.row['name']}", 1.0, False


class Blocks:
    """Blocks the event loop of its process."""

    def reset(self, row) -> None:
        pass

    async def step(self, text: str):
        if text == "block":
            time.sleep(3600)
        return text, None, False
