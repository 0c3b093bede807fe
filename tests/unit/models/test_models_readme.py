"""The page of models has the families of the code."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_rl.models import FAMILIES
from megatron_rl.models.composite import COMPOSITES


def test_the_table_of_families_is_the_codes():
    text = (Path(__file__).parents[3] / "docs/models.md").read_text()
    section = text.split("## Families\n\n")[1].split("\n\n")[0]
    told = [name for row in section.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(told) == sorted({*FAMILIES, *COMPOSITES})
