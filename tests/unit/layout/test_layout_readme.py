"""The README's table of families agrees with the code."""

from __future__ import annotations

import re
from pathlib import Path

import megatron_rl.layout
from megatron_rl.layout import FAMILIES


def test_the_table_of_families_is_the_codes():
    text = (Path(megatron_rl.layout.__file__).parent / "README.md").read_text()
    rows = re.findall(r"^\| (`[a-z0-9_`, ]+`) \|[^|]+\| `(\w+)` \|$", text, flags=re.MULTILINE)
    told = {name: vllm for names, vllm in rows for name in re.findall(r"`(\w+)`", names)}
    assert told == {name: family.vllm_model for name, family in FAMILIES.items()}
