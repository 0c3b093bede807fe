"""An environment that gives a reward for each turn, and fails on some rows."""

from __future__ import annotations


class Digits:
    def reset(self, row) -> None:
        self.fails = row["ground_truth"] == "fails"

    def step(self, text: str):
        if self.fails:
            raise OSError("the disk is gone")
        return "0", sum(letter.isdigit() for letter in text) / max(len(text), 1), False
