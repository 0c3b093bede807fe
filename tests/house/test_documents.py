"""The documents keep their size, and every code block says how it is run."""

from __future__ import annotations

import re

import pytest
import yaml
from pages import PAGES, ROOT, Block, blocks, num_words

from megatron_rl.config.load import merge, read_yaml, validate
from megatron_rl.config.schema import GrpoRunConfig, PpoRunConfig, SftRunConfig

BLOCKS = [block for page in PAGES for block in blocks(page)]
ROOM_READMES = sorted({*ROOT.glob("megatron_rl/*/README.md"), ROOT / "slurm/README.md"})


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
    assert num_words(ROOT / "README.md") <= 900
    assert num_words(ROOT / "CONTRIBUTING.md") <= 600


def test_the_readmes_of_rooms_have_at_most_40_lines():
    long = {str(path.relative_to(ROOT)) for path in ROOM_READMES if len(path.read_text().splitlines()) > 40}
    assert not long


def test_every_block_says_how_it_is_run():
    unmarked = [block.where for block in BLOCKS if not block.mark]
    assert not unmarked, (
        "write <!-- run -->, <!-- file: NAME -->, <!-- keys -->, <!-- shows --> or <!-- not run: ... -->"
    )
    assert not [block.where for block in BLOCKS if block.mark == "run" and block.language not in ("bash", "python")]
    prompts = [block.where for block in BLOCKS if block.language == "bash" and re.search(r"(?m)^\s*\$ ", block.text)]
    assert not prompts, "remove the `$ `, which the site's copy button would copy"


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.mark == "keys"], ids=lambda block: block.where)
def test_a_fragment_of_a_configuration_is_valid(block: Block):
    given = yaml.safe_load(block.text)
    if "sft" in given:
        kind, base = SftRunConfig, {"run": {"name": "x", "steps": 1}, "model": {"path": "x"}, "sft": {"rows": "x"}}
    else:
        kind = PpoRunConfig if "critic" in given else GrpoRunConfig
        base = read_yaml(ROOT / "configs/run/gsm8k_tiny_cpu.yaml")
    merge(base, given)
    validate(kind, base)
