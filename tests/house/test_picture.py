"""README's picture shows a run of today's demo: `docs/images/demo.json` has the run's numbers, and a digest of
everything that the demo is made of.

`python tests/house/test_picture.py runs/tiny/seed_0/grpo` writes both files from a run of `make demo`.
"""

from __future__ import annotations

import json
import sys
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.image import imread

from megatron_rl.observe.curves import draw
from megatron_rl.observe.panels import run_panels
from megatron_rl.observe.records import read_metrics

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "docs/images/demo.json"
PICTURE = RECORD.with_suffix(".png")
PAGES = [ROOT / "README.md", ROOT / "docs/index.md"]
SHOWN = ("step", "reward/mean", "eval/accuracy")


def digest() -> str:
    """Of the demo's configuration, task and first weights."""
    names = ["configs/run/tiny_grpo.yaml", "recipes/tiny/task.py", "recipes/tiny/data/warm_start/model.safetensors"]
    return sha256(b"".join((ROOT / name).read_bytes() for name in names)).hexdigest()


def picture(metrics: list[dict[str, Any]]) -> bytes:
    """The first panel of the run's own `curves.png`, so narrow that its letters can be read on a telephone."""
    figure, written = draw(run_panels(metrics)[:1]), BytesIO()
    figure.set_size_inches(8.6, 2.9)
    figure.savefig(written, dpi=160, bbox_inches="tight", format="png")
    return written.getvalue()


def test_the_picture_is_of_todays_demo_and_the_pages_have_its_numbers():
    record = json.loads(RECORD.read_text())
    how = "run `make demo`, then `python tests/house/test_picture.py runs/tiny/seed_0/grpo`"
    assert record["demo"] == digest(), f"the demo has changed: {how}"
    accuracies = [step["eval/accuracy"] for step in record["metrics"] if "eval/accuracy" in step]
    for page in PAGES:
        assert all(f"{number:.3f}" in page.read_text() for number in (accuracies[0], accuracies[-1])), page.name
    drawn, shown = imread(BytesIO(picture(record["metrics"]))), imread(PICTURE)
    same = drawn.shape == shown.shape and (np.abs(drawn - shown) > 0.1).mean() < 0.001
    assert same, f"the report draws another picture: {how}"


if __name__ == "__main__":
    run = Path(sys.argv[1])
    kept = [{name: step[name] for name in SHOWN if name in step} for step in read_metrics(run)]
    commit = json.loads((run / "config.json").read_text())["git"]["commit"]
    lines = ",\n".join(json.dumps(step) for step in kept)
    RECORD.write_text(f'{{"demo": "{digest()}", "commit": "{commit}", "metrics": [\n{lines}\n]}}\n')
    PICTURE.write_bytes(picture(kept))
