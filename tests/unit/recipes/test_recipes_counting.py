"""The drawings of the recipe that counts."""

from __future__ import annotations

import random

import numpy as np
import pytest

from megatron_rl.recipes.counting.task import LARGEST, drawing


@pytest.mark.parametrize("seed", [0, 434, 1154])
def test_a_drawing_ends_with_all_of_its_discs(seed):
    """The first discs of two of these seeds leave no place for the ninth."""
    pixels = np.asarray(drawing(LARGEST, random.Random(seed))).astype(int)
    left = {tuple(place) for place in np.argwhere((pixels != pixels[0, 0]).any(-1)).tolist()}
    sizes = []
    while left:
        disc = [left.pop()]
        for row, column in disc:
            beside = {(row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)} & left
            left -= beside
            disc += beside
        sizes.append(len(disc))
    assert len(sizes) == LARGEST and all(40 < size < 60 for size in sizes)
