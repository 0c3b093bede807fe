"""The documentation as a site."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from pages import ROOT


def test_the_site_builds_without_a_warning(tmp_path):
    """Strictly: a link to nowhere, a page that the navigation lacks, and a docstring that cannot be read are errors."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "grpo" in Path(tmp_path, "api", "index.html").read_text()
