"""Environments that tell where they run, or hold their process up."""

from __future__ import annotations

import asyncio
import os
import time


class Place:
    def reset(self, row) -> None:
        self.row = row

    def step(self, text: str):
        if text == "fail":
            raise OSError("the disk is gone")
        return f"{os.getpid()} {self.row['name']}", 1.0, False


class Node:
    """Tells on which node of Ray it is, after a moment."""

    def reset(self, row) -> None:
        pass

    async def step(self, text: str):
        import ray

        await asyncio.sleep(0.05)
        return ray.get_runtime_context().get_node_id(), 1.0, False


class Blocks:
    """Blocks the event loop of its process."""

    def reset(self, row) -> None:
        pass

    async def step(self, text: str):
        if text == "block":
            time.sleep(3600)
        return text, None, False
