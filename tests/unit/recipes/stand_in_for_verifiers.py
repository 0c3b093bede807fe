#!/usr/bin/env python
"""Stands for the program that plays verifiers: a task says what happens to it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

environment = json.loads(sys.argv[-1])
if "refused" in environment:
    print(json.dumps({"fault": environment["refused"]}), flush=True)
    sys.exit()
for line in sys.stdin:
    order = json.loads(line)
    with Path(environment["heard"]).open("a") as heard:
        heard.write(json.dumps([os.getpid(), order]) + "\n")
    task = order.get("task", {})
    if task.get("dies"):
        os._exit(7)
    if "reply" in task:
        print(json.dumps({"number": order["number"]} | task["reply"]), flush=True)
