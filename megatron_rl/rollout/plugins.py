"""The entry points by which every process of vLLM finds the bridge and the engine's worker.

They are in the project's metadata, which an installed package and an editable install have. A clone that is only on
`PYTHONPATH` has none, and vLLM would say "Invalid weight transfer backend: megatron_rl" minutes later.
"""

from __future__ import annotations

from importlib.metadata import entry_points

GROUP = "vllm.general_plugins"
PLUGINS = ("megatron_rl_bridge", "megatron_rl_rollout")


def fault_of_plugins() -> str | None:
    """What is wrong with this environment's metadata, and how to mend it; None if nothing is."""
    found = {one.name for one in entry_points(group=GROUP)}
    missing = [name for name in PLUGINS if name not in found]
    if not missing:
        return None
    return (
        f"the entry points {GROUP}: {', '.join(missing)} are not in the metadata of the installed packages, so vLLM "
        "cannot find the bridge; install the project (`pip install --no-deps -e .` in the clone), or put the folder "
        "with its megatron_rl-*.dist-info on PYTHONPATH"
    )
