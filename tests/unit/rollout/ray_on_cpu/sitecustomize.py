"""With this folder on PYTHONPATH, vLLM's Ray executor runs without a GPU. vLLM refuses to run it on a CPU only because
its CPU platform has no name for Ray's resource."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys


class NameTheResource(importlib.abc.MetaPathFinder):
    """Makes vLLM's workers ask Ray for GPUs; the test's Ray offers some although there are none."""

    def find_spec(self, name, path, target=None):
        if name != "vllm.platforms.cpu":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_and_name(module):
            load(module)
            module.CpuPlatform.ray_device_key = "GPU"

        spec.loader.exec_module = load_and_name
        return spec


sys.meta_path.insert(0, NameTheResource())
