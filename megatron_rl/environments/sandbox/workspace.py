"""A tree of files and a shell as the tools of an answer, judged by a command.

    rollout:
      environment: {kind: tools, objects: "megatron_rl.environments.sandbox.workspace:Workspace", max_turns: 8}
    rewards: [{kind: environment}]

A row has the columns `files` (the tree: texts by their paths), `test` (a command, whose exit status 0 is the reward 1,
and any other 0), and, by choice, `test_files`, which are written before the test, over what the model has left there,
and `setup`, a command that prepares the tree. A subclass with other `limits` or more methods serves as well.

Invariants (tests/unit/environments): the files of the test are not in the tree before it; a sandbox that is lost is a
failure, and never a reward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from megatron_rl.environments.sandbox.box import BoxError, BoxLimits
from megatron_rl.environments.sandbox.spares import SPARES

MOST_READ = 16 << 20
SHOWN_LINES = 400


class Workspace:
    limits = BoxLimits()
    image: str | None = None
    """See `Box.image`."""
    test_timeout_s = 60.0
    """The longest time of `setup`, and of `test`."""

    def reset(
        self,
        files: Mapping[str, str],
        test: str,
        test_files: Mapping[str, str] | None = None,
        setup: str | None = None,
    ) -> None:
        """
        Raises:
            BoxError: the sandbox cannot be made, or `setup` failed.
        """
        self._test, self._test_files = test, dict(test_files or {})
        self._box = SPARES.take(self.limits, image=self.image)
        for path, text in files.items():
            self._box.write(path, text)
        if setup is not None:
            ran = self._box.run(setup, self.test_timeout_s)
            if ran.status != 0:
                raise BoxError(f"the row's setup {setup!r} {ran.end}: {ran.output[-300:]}")

    def run(self, command: str) -> str:
        """Run a command of a shell in the folder of the files, and return its output. Nothing that it starts goes on.

        Args:
            command: the command.
        """
        ran = self._box.run(command)
        more = f"\n[{ran.num_more} more bytes]" if ran.num_more else ""
        return f"{ran.output}{more}\n[{ran.end}]"

    def read_file(self, path: str, first_line: int = 1) -> str:
        """Return at most 400 lines of a file, each with its number.

        Args:
            path: the path of the file.
            first_line: the number of the first line, at least 1.
        """
        if first_line < 1:
            raise ValueError(f"first_line is {first_line}, but must be at least 1")
        lines = self._held(path).decode(errors="replace").splitlines()
        shown = lines[first_line - 1 : first_line - 1 + SHOWN_LINES]
        more = len(lines) - first_line + 1 - len(shown)
        numbered = [f"{number} {line}" for number, line in enumerate(shown, first_line)]
        return "\n".join([*numbered, f"[{more} more lines]"] if more > 0 else numbered)

    def write_file(self, path: str, text: str) -> str:
        """Write a file.

        Args:
            path: the path of the file.
            text: the whole text.
        """
        self._box.write(path, text, by_force=False)
        return f"wrote {len(text.splitlines())} lines"

    def edit_file(self, path: str, old: str, new: str) -> str:
        """Replace a text of a file, which must be there exactly once.

        Args:
            path: the path of the file.
            old: the text, with its white space.
            new: the text in its place.
        """
        text = self._held(path).decode(errors="surrogateescape")
        if (count := text.count(old)) != 1:
            raise ValueError(f"the text is {count} times in {path}, but must be there exactly once")
        self._box.write(path, text.replace(old, new).encode(errors="surrogateescape"), by_force=False)
        return "replaced"

    def _held(self, path: str) -> bytes:
        """
        Raises:
            ValueError: the file is too large for `read_file` and `edit_file`.
        """
        held = self._box.read(path, MOST_READ + 1)
        if len(held) > MOST_READ:
            raise ValueError(f"{path} has more than {MOST_READ >> 20} MiB; use a command")
        return held

    def get_reward(self) -> float:
        """
        Raises:
            BoxError: the sandbox is lost.
        """
        for path, text in self._test_files.items():
            self._box.write(path, text)
        return float(self._box.run(self._test, self.test_timeout_s).status == 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        if (box := getattr(self, "_box", None)) is not None:
            SPARES.replace(box)
