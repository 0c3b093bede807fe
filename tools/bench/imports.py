"""Import every module of megatron_rl: a missing package, or an API that has changed, ends it with an error.

    python -m megatron_rl.tools.bench.imports

`make gpu-env` does this with the GPU packages. `slurm.launch` is left out where NeMo-Run is not installed, which has an
environment of its own.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil


def main() -> None:
    package = importlib.import_module("megatron_rl")
    has_nemo_run = importlib.util.find_spec("nemo_run") is not None
    names = [
        module.name
        for module in pkgutil.walk_packages(package.__path__, "megatron_rl.")
        if not module.name.endswith(".__main__") and (has_nemo_run or module.name != "megatron_rl.slurm.launch")
    ]
    for name in names:
        importlib.import_module(name)
    print(f"imports: {len(names)} modules")


if __name__ == "__main__":
    main()
