"""What the checkpoint tools have in common: arguments, the progress bar, tables, and errors that fit on one line."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from megatron_rl.convert.conversion import Conversion, Options
from megatron_rl.convert.hub import MAX_FILE_BYTES
from megatron_rl.convert.work import carry_out, require_new
from megatron_rl.processes import failed


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


class Bar:
    """A progress bar on the error stream, so that standard output holds only tables or JSON. It appears with the first
    report."""

    def __init__(self, what: str, num_bytes: int):
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self._progress = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))
        self._task = self._progress.add_task(what, total=num_bytes)

    def __enter__(self) -> Callable[[int], None]:
        return self._report

    def _report(self, done_bytes: int) -> None:
        self._progress.start()
        self._progress.update(self._task, completed=done_bytes)

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()


def conversion_parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path, help="a folder that does not exist yet")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="convert all tensors to this dtype; by default each tensor keeps its own",
    )
    parser.add_argument(
        "--max-file-bytes",
        type=int,
        default=MAX_FILE_BYTES,
        help=f"start a new file above this size; default: {MAX_FILE_BYTES}",
    )
    parser.add_argument(
        "--multi-token",
        choices=["keep", "drop"],
        default="keep",
        help="carry the layers of a multi-token head as they are, or leave them out; default: keep",
    )
    parser.add_argument("--dry-run", action="store_true", help="show the files and their sizes and write nothing")
    add_common(parser)
    return parser


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """
    Raises:
        ValueError: the target exists.
    """
    given = parser.parse_args(arguments)
    if not given.dry_run:
        require_new(given.target)
    return given


def add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, default=num_cores(), help="number of processes; default: one per core")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def options(given: argparse.Namespace) -> Options:
    return Options(given.dtype, given.max_file_bytes, given.multi_token)


def convert(conversion: Conversion, given: argparse.Namespace) -> None:
    """Carry out the conversion, or only plan it with --dry-run, and print a report."""
    tensors = [tensor for file in conversion.files for tensor, _ in file.tensors()]
    report: dict[str, Any] = {
        "source": str(given.source),
        "target": str(given.target),
        "form": conversion.form,
        "family": conversion.shape.family,
        "num_files": len(conversion.files),
        "num_tensors": len(tensors),
        "num_bytes": conversion.num_bytes,
        "largest_tensor_bytes": max(tensor.num_bytes for tensor in tensors),
        "ignored": conversion.left_out,
        "multi_token": conversion.num_kept,
    }
    if given.dry_run:
        report["files"] = [{"name": file.name, "bytes": file.num_bytes} for file in conversion.files]
    else:
        start = time.perf_counter()
        with Bar("converting", conversion.num_bytes) as bar:
            outcome = carry_out(conversion, given.target, given.workers, bar)
        report |= {"num_reused_files": outcome.num_reused, "seconds": time.perf_counter() - start}
    print(json.dumps(report) if given.json else "", end="\n" if given.json else "")
    if not given.json:
        _show(report)


def _show(report: dict[str, Any]) -> None:
    console = Console()
    if "files" in report:
        table = Table("file", "bytes")
        for file in report["files"]:
            table.add_row(file["name"], f"{file['bytes']:,}")
        console.print(table)
    done = "would be written" if "files" in report else "written"
    console.print(
        f"{report['family']} as {report['form']}: {report['num_tensors']} tensors, {report['num_bytes']:,} bytes in "
        f"{report['num_files']} files {done}: {report['target']}"
    )
    if report["multi_token"]:
        console.print(f"{report['multi_token']} tensors of the multi-token head were kept as they are")
    for reason, count in report["ignored"].items():
        console.print(f"{count} tensors were left out: {reason}")
    if "seconds" in report:
        rate = report["num_bytes"] / report["seconds"] / 1e9
        reused = f", {report['num_reused_files']} files were already there" if report["num_reused_files"] else ""
        console.print(f"{report['seconds']:.1f} s, {rate:.2f} GB/s{reused}")


def run(work: Callable[[Sequence[str] | None], None], arguments: Sequence[str] | None) -> int:
    """Run `work` and return the exit status. Errors of a checkpoint or a disk become one line on the error stream."""
    try:
        work(arguments)
    except (ValueError, OSError) as error:
        return failed(error)
    except KeyboardInterrupt:
        print(
            "interrupted; finished files stay in the .partial folder, and the same command continues from there",
            file=sys.stderr,
        )
        return 130
    return 0
