"""Everything by which people watch a run: the live view, the run's files, the trackers, the report, the summary."""

from __future__ import annotations

from megatron_rl.observe.provenance import write_provenance
from megatron_rl.observe.report import write_comparison, write_report
from megatron_rl.observe.sink import RunSink
from megatron_rl.observe.summary import print_summary
from megatron_rl.observe.trackers import missing_packages, open_trackers

__all__ = [
    "RunSink",
    "missing_packages",
    "open_trackers",
    "print_summary",
    "write_comparison",
    "write_provenance",
    "write_report",
]
