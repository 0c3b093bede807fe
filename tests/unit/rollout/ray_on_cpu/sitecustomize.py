"""On PYTHONPATH: lets vLLM's Ray executor run without a GPU. vLLM refuses it for want of a resource's name alone."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys


class NameTheResource(importlib.abc.MetaPathFinder):
    """Ray's workers are counted as GPUs, which the test's Ray offers without having any."""

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
