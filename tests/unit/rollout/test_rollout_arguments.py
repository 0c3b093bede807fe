"""vLLM's arguments: what an engine gets on an H100, what `rollout.vllm` may set, and which experts keep their form."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from megatron_rl.config.engine_options import ELSEWHERE, REFUSED
from megatron_rl.config.load import validate
from megatron_rl.config.rollout import Quantization
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.planning.engine import repacks_experts, step_tokens
from megatron_rl.preflight.devices import CPU_HEAD_DIMS
from megatron_rl.preflight.engine_options import argument_names
from megatron_rl.rollout import plugins
from megatron_rl.rollout.arguments import refused
from megatron_rl.rollout.backend import EngineSpec
from megatron_rl.rollout.start import make_engine, set_cpu_environment

H100 = SimpleNamespace(
    get_device_total_memory=lambda: 80 << 30,
    get_device_name=lambda: "NVIDIA H100 80GB HBM3",
    is_tpu=lambda: False,
    is_cpu=lambda: False,
)


@pytest.fixture(autouse=True)
def environment():
    before = dict(os.environ)
    set_cpu_environment()
    yield
    os.environ.clear()
    os.environ.update(before)


def run(folder, gpu_memory_gb: float = 80, dtype: str = "float32", **rollout) -> GrpoRunConfig:
    sizes = {"max_prompt_tokens": 64, "max_response_tokens": 64}
    return validate(
        GrpoRunConfig,
        {
            "run": {"name": "x", "steps": 1},
            "model": {"path": folder, "dtype": dtype},
            "data": {"train": "rows"},
            "balance": {"max_tokens_per_microbatch": 4096},
            "cluster": {"gpu_memory_gb": gpu_memory_gb},
            "rollout": sizes | rollout,
        },
    )


class Made(Exception):
    """The configuration is made, and no engine starts."""


@pytest.fixture
def on_an_h100(monkeypatch):
    """Gives vLLM's configuration of an engine. The process has no GPU; only where vLLM looks at the GPU to choose the
    sizes of a step, it sees an H100."""
    from vllm.engine import arg_utils
    from vllm.v1.engine import llm_engine

    chosen = arg_utils.EngineArgs.get_batch_defaults
    here = arg_utils.current_platform

    def choose(world_size: int):
        arg_utils.current_platform = H100
        try:
            return chosen(world_size)
        finally:
            arg_utils.current_platform = here

    def instead(config, *_, **__):
        raise Made(config)

    monkeypatch.setattr(arg_utils.EngineArgs, "get_batch_defaults", staticmethod(choose))
    monkeypatch.setattr(llm_engine, "LLMEngine", instead)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def configuration(config: GrpoRunConfig):
        with pytest.raises(Made) as made:
            make_engine(EngineSpec(config.model, config.rollout, 0), None)
        return made.value.args[0]

    return configuration


@pytest.mark.parametrize(
    ("options", "tokens"),
    [({}, 16_384), ({"performance_mode": "throughput"}, 32_768), ({"max_num_batched_tokens": 4096}, 4096)],
)
def test_an_h100_computes_as_many_tokens_in_a_step_as_in_vllms_own_class(folders, on_an_h100, options, tokens):
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    config = run(folders[0], vllm=options)
    scheduler = on_an_h100(config).scheduler_config
    offline = EngineArgs(str(folders[0]), skip_tokenizer_init=True, max_model_len=128, max_num_seqs=1024, **options)
    expected = offline.create_engine_config(UsageContext.LLM_CLASS).scheduler_config.max_num_batched_tokens
    assert scheduler.max_num_batched_tokens == expected == step_tokens(config) == tokens
    assert scheduler.max_num_seqs == 1024


def test_few_short_answers_bound_the_tokens_of_a_step(folders, on_an_h100):
    config = run(folders[0], max_sequences=8)
    assert on_an_h100(config).scheduler_config.max_num_batched_tokens == step_tokens(config) == 8 * 128


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_logits_of_an_engine_are_float32_for_every_dtype(folders, on_an_h100, dtype):
    model = on_an_h100(run(folders[0], dtype=dtype)).model_config
    assert (model.dtype, model.head_dtype) == (getattr(torch, dtype), torch.float32)


def test_every_argument_that_is_refused_is_one_of_vllms(folders):
    import dataclasses

    from vllm.engine.arg_utils import EngineArgs

    names = argument_names()
    assert names == [field.name for field in dataclasses.fields(EngineArgs) if not field.name.startswith("_")]
    assert (ELSEWHERE | REFUSED).keys() <= set(names) and not ELSEWHERE.keys() & REFUSED.keys()


def test_values_are_refused_in_vllms_own_words():
    right = {
        "moe_backend": "triton",
        "attention_backend": "FLASH_ATTN",
        "compilation_config": {"mode": 3},
        "enforce_eager": False,
        "cudagraph_capture_sizes": [1, 2],
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
        "kv_cache_dtype": None,
    }
    assert refused(right) == {}
    wrong = {"moe_backend": "tritn", "compilation_config": {"modee": 3}, "watermark": "much", "enforce_eager": 3}
    told = refused(right | wrong)
    assert told.keys() == wrong.keys()
    assert "invalid choice: 'tritn'" in told["moe_backend"] and "modee" in told["compilation_config"]


@pytest.fixture
def experts(folders, on_an_h100):
    """vLLM's configuration of a layer of four experts, in its real classes."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType

    with set_current_vllm_config(on_an_h100(run(folders[0]))):
        yield FusedMoEConfig(
            num_experts=4,
            experts_per_token=2,
            hidden_dim=64,
            intermediate_size=64,
            num_local_experts=4,
            num_logical_experts=4,
            moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
            activation=MoEActivation.SILU,
            in_dtype=torch.bfloat16,
            device="cpu",
            routing_method=RoutingMethodType.Renormalize,
            max_num_tokens=64,
        )


def test_experts_are_written_in_place_where_vllm_keeps_the_form_of_the_checkpoint(experts):
    from vllm.model_executor.layers.fused_moe.oracle import unquantized
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    from megatron_rl.bridge.model_parameters import _is_repacked

    kinds = unquantized.UnquantizedMoeBackend
    method = UnquantizedFusedMoEMethod(experts)
    assert method.unquantized_backend == kinds.CPU and not _is_repacked(SimpleNamespace(quant_method=method))
    weights = torch.randn(4, 128, 64), torch.randn(4, 64, 64)
    in_place = set()
    for kind in kinds:
        method.unquantized_backend = kind
        if not _is_repacked(SimpleNamespace(quant_method=method)):
            in_place.add(kind)
    assert in_place == {kinds.TRITON, kinds.BATCHED_TRITON, kinds.CPU}
    for kind in (kinds.TRITON, kinds.BATCHED_TRITON, kinds.FLASHINFER_CUTLASS):  # the others need their kernels
        formed = unquantized.convert_to_unquantized_kernel_format(kind, experts, *(w.clone() for w in weights))
        assert all(map(torch.equal, formed, weights)) == (kind in in_place), kind


def test_an_engine_whose_plugins_vllm_cannot_find_does_not_start(monkeypatch):
    monkeypatch.setattr(plugins, "entry_points", lambda group: ())
    with pytest.raises(ValueError, match="^the entry points vllm.general_plugins: megatron_rl_bridge, "):
        make_engine(None, None)


def test_vllm_has_every_quantisation_and_it_is_one_of_all_linear_layers():
    from vllm.config.quantization import _ONLINE_SHORTHANDS
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    online = {name for name, one in _ONLINE_SHORTHANDS.items() if one.linear is not None and one.moe is not None}
    assert set(get_args(Quantization)) == {"fp8"} | online and "fp8" in QUANTIZATION_METHODS


@pytest.mark.parametrize(("family", "gpu_memory_gb"), [(80, 80), (90, 80), (90, 136), (100, 180)])
def test_the_planner_knows_what_vllm_prefers_on_each_gpu(folders, experts, monkeypatch, family, gpu_memory_gb):
    """FlashInfer's kernels come before Triton's on Blackwell. Ampere has none of them."""
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    gpu = SimpleNamespace(
        is_rocm=lambda: False, is_cuda=lambda: True, is_device_capability_family=lambda asked: asked == family
    )
    monkeypatch.setattr(unquantized, "current_platform", gpu)
    preferred = unquantized._get_priority_backends(experts)
    if family == 80:
        preferred = [kind for kind in preferred if "FlashInfer" not in kind.value]
    assert repacks_experts(run(folders[0], gpu_memory_gb)) == (preferred[0].value != "TRITON")


@pytest.mark.parametrize(
    ("rollout", "repacks"),
    [
        ({"vllm": {"moe_backend": "flashinfer_cutlass"}}, True),
        ({"vllm": {"moe_backend": "triton"}, "quantization": "fp8"}, True),
        ({"vllm": {"moe_backend": "triton"}}, False),
    ],
)
def test_a_chosen_kernel_decides_before_the_gpu(rollout, repacks):
    assert repacks_experts(run("model", 180 if not repacks else 80, **rollout)) == repacks


def test_the_head_dims_of_a_cpu_are_those_of_the_installed_vllm():
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert list(CPU_HEAD_DIMS) == CPUAttentionBackend.get_supported_head_sizes()
