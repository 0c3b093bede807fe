"""The images of observations: read and kept as those of rows, and counted against the tokens of a conversation."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.data.prompts import ImageRules
from megatron_rl.data.row_images import expanded
from megatron_rl.data.rows import BadRow
from megatron_rl.environments import EnvironmentFault
from megatron_rl.models.vision import vision_of
from megatron_rl.types import Picture


class ObservedImages:
    """
    Args:
        model: the model's folder.
        folder: of the run's images (data/pictures.py).
    """

    def __init__(self, model: Path, folder: Path) -> None:
        vision = vision_of(model)
        self._rules = ImageRules(vision, model, folder) if vision else None

    async def taken(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], tuple[Picture, ...]]:
        """The observations with a part for the place of each image, and their images, which are resized and kept.

        Raises:
            EnvironmentFault: an image cannot be read, or the model sees none.
        """
        seen, pictures = list[Mapping[str, Any]](), tuple[Picture, ...]()
        for message in messages:
            own: tuple[Picture, ...] = ()
            if not isinstance(message["content"], str):
                if self._rules is None:
                    raise EnvironmentFault("an observation has an image, and the model is trained as one of text")
                try:
                    message, own = await asyncio.to_thread(self._rules.observed, message)
                except BadRow as error:
                    raise EnvironmentFault(f"an observation: {error}") from error
            seen.append(message)
            pictures += own
        return seen, pictures

    def expanded(self, ids: Sequence[int], pictures: Sequence[Picture]) -> list[int]:
        """These tokens with all tokens of the images.

        Raises:
            EnvironmentFault: the chat template leaves an image out.
        """
        try:
            return expanded(ids, pictures, self._rules.vision) if self._rules else list(ids)
        except BadRow as error:
            raise EnvironmentFault(f"an observation: {error}") from error
