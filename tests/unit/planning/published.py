"""Times on H100 nodes that others have published, and the runs that they belong to.

Sources: MB, NVIDIA Megatron-Bridge, docs/performance-summary.md of the release in front; AM, NVIDIA NeMo AutoModel,
docs/performance-summary.md; TT, pytorch/torchtitan, benchmarks/; NRL, NVIDIA NeMo RL, docs/about/performance-summary.md
(v0.4 and later); verl, volcengine/verl, docs/perf and examples; MZ, yanring/Megatron-MoE-ModelZoo, best_practice;
miles, radixark/miles, its notes on weight updates.
"""

from __future__ import annotations

from typing import NamedTuple

LLAMA_3 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "attention_bias": False,
    "mlp_bias": False,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
LLAMAS = {
    f"Llama-3-{name}": {
        **LLAMA_3,
        **dict(hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers, num_attention_heads=hidden // 128),
    }
    for name, hidden, ffn, layers in [("8B", 4096, 14336, 32), ("70B", 8192, 28672, 80), ("405B", 16384, 53248, 126)]
}


class Training(NamedTuple):
    """An update of pre-training or fine-tuning, without recomputation."""

    source: str
    model: str
    gpus: int
    batch: int
    """Sequences of an update."""
    micro: int
    """Sequences of a micro-batch."""
    tokens: int
    """Tokens of a sequence."""
    tensor: int
    pipeline: int
    context: int
    virtual: int
    expert: int
    seconds: float


def of_rate(*values, tokens_per_gpu: float) -> Training:
    """From the published tokens per second of a GPU."""
    run = Training(*values, seconds=0.0)
    return run._replace(seconds=run.batch * run.tokens / (tokens_per_gpu * run.gpus))


BF16 = [
    of_rate("TT Llama-3.1, FSDP", "Llama-3-8B", 8, 16, 2, 8192, 1, 1, 1, 1, 1, tokens_per_gpu=5762),
    of_rate("TT Llama-3.1, FSDP, compiled", "Llama-3-8B", 8, 16, 2, 8192, 1, 1, 1, 1, 1, tokens_per_gpu=6667),
    of_rate("TT Llama-3.1, FSDP, compiled", "Llama-3-8B", 128, 256, 2, 8192, 1, 1, 1, 1, 1, tokens_per_gpu=6514),
    of_rate("MB 26.04", "gpt-oss-120b", 64, 1280, 1, 4096, 1, 4, 1, 1, 8, tokens_per_gpu=5824),
    of_rate("MB 25.11", "gpt-oss-120b", 64, 512, 4, 4096, 1, 4, 1, 1, 8, tokens_per_gpu=5630),
    of_rate("MB 25.09", "Qwen3-235B-A22B", 256, 2048, 1, 4096, 2, 8, 1, 4, 32, tokens_per_gpu=1204),
    of_rate("MB 25.09, dropless", "DeepSeek-V3", 1024, 8192, 1, 4096, 2, 8, 1, 4, 64, tokens_per_gpu=1297),
    Training("AM", "DeepSeek-V3", 1024, 8192, 1, 4096, 1, 4, 1, 8, 64, 37.87),
    Training("AM", "DeepSeek-V3", 256, 512, 1, 4096, 1, 4, 1, 8, 64, 8.18),
    Training("AM", "Kimi-K2-Instruct", 256, 512, 1, 4096, 1, 8, 1, 4, 32, 8.86),
    Training("AM", "Qwen3-30B-A3B", 8, 512, 4, 4096, 1, 1, 1, 1, 8, 21.773),
    Training("AM", "gpt-oss-20b", 8, 256, 2, 4096, 1, 1, 1, 1, 1, 10.04),
    Training("AM, FSDP", "Llama-3-70B", 64, 128, 1, 8192, 1, 1, 2, 1, 1, 18.90),
]
FP8 = [
    of_rate("MB 25.11, FSDP", "Llama-3-8B", 8, 128, 1, 8192, 1, 1, 1, 1, 1, tokens_per_gpu=14451),
    of_rate("Megatron-LM", "Llama-3-8B", 8, 128, 1, 8192, 1, 1, 2, 1, 1, tokens_per_gpu=13812),
    of_rate("MB 25.11", "Llama-3-70B", 64, 128, 1, 8192, 4, 8, 1, 5, 1, tokens_per_gpu=1602),
    of_rate("MB 26.04", "Llama-3-70B", 64, 256, 1, 8192, 4, 8, 1, 5, 1, tokens_per_gpu=1664),
    of_rate("MB 26.06, SFT", "Llama-3-70B", 32, 32, 1, 4096, 4, 4, 1, 5, 1, tokens_per_gpu=1638),
    of_rate("MB 25.11", "Llama-3-405B", 1024, 512, 1, 8192, 8, 8, 2, 8, 1, tokens_per_gpu=292),
    of_rate("MB 26.06", "Llama-3-405B", 1024, 1536, 1, 8192, 8, 8, 2, 8, 1, tokens_per_gpu=326),
    of_rate("MB 26.06", "Qwen3-30B-A3B", 16, 1024, 1, 4096, 1, 1, 1, 1, 16, tokens_per_gpu=8826),
    of_rate("MB 26.02", "Qwen3-30B-A3B", 16, 1024, 1, 4096, 1, 2, 1, 12, 8, tokens_per_gpu=9058),
    of_rate("MB 25.11", "Qwen3-30B-A3B", 16, 512, 2, 4096, 1, 2, 1, 24, 8, tokens_per_gpu=5275),
    of_rate("MB 26.04", "Qwen3-235B-A22B", 256, 8192, 1, 4096, 2, 8, 1, 4, 32, tokens_per_gpu=1712),
]


class Step(NamedTuple):
    """A whole step of reinforcement learning: generation, two passes for log-probs, one update, a push."""

    source: str
    model: str
    trainers: int
    engines: int
    """GPUs of all engines. They are the trainers' if the run is on-policy."""
    samples: int
    longest: int
    """Tokens of the longest sample, and of a micro-batch."""
    mean: int
    """The mean tokens of a sample."""
    engine_tensor: int
    tensor: int
    context: int
    expert: int
    pipeline: int
    recompute: str
    lag: int
    """0: on-policy, on shared GPUs."""
    seconds: float


STEPS = [
    Step("NRL", "DeepSeek-V3", 256, 256, 512, 1536, 701, 32, 1, 1, 16, 16, "full", 0, 134),
    Step("NRL", "DeepSeek-V3", 512, 512, 512, 1536, 697, 32, 1, 1, 16, 16, "full", 0, 111),
    Step("NRL", "DeepSeek-V3", 256, 256, 512, 1536, 710, 32, 1, 1, 16, 16, "full", 1, 64.1),
    Step("NRL", "Qwen3-235B-A22B", 128, 128, 512, 8192, 5698, 16, 2, 2, 16, 8, "full", 0, 395),
    Step("NRL", "Qwen3-235B-A22B", 256, 256, 512, 8192, 5713, 16, 2, 2, 16, 8, "full", 0, 312),
    Step("NRL", "Qwen3-235B-A22B", 128, 128, 512, 8192, 5721, 8, 4, 1, 16, 8, "full", 1, 231),
    Step("NRL", "Qwen3-30B-A3B", 32, 32, 2048, 4096, 3203, 2, 1, 1, 8, 1, "none", 0, 192),
    Step("NRL", "Qwen3-30B-A3B", 16, 16, 2048, 4096, 3201, 2, 1, 1, 8, 2, "none", 1, 152),
    Step("NRL", "Qwen3-30B-A3B", 128, 64, 2048, 4096, 3206, 2, 1, 1, 8, 1, "none", 8, 34.5),
    Step("NRL v0.4", "Qwen3-32B", 32, 32, 2048, 4096, 3283, 4, 4, 1, 1, 4, "none", 0, 376),
    Step("NRL v0.4", "Qwen3-32B", 32, 32, 2048, 4096, 3283, 4, 4, 1, 1, 4, "none", 1, 200),
    Step("NRL v0.4", "Llama-3-8B", 16, 16, 2048, 4096, 1060, 1, 1, 1, 1, 2, "full", 0, 97.7),
    Step("NRL v0.4", "Llama-3-8B", 8, 8, 2048, 4096, 1060, 1, 1, 1, 1, 1, "full", 1, 70.2),
]


class Push(NamedTuple):
    """A push from trainers on some nodes to engines on others; the best of the ways that were published."""

    source: str
    model: str
    tensor: int
    pipeline: int
    context: int
    data: int
    expert: int
    engines: int
    engine_tensor: int
    width: int
    """Bytes of a number."""
    seconds: float


PUSHES = [
    Push("miles, RDMA; 2.67 s over NCCL", "Qwen3-30B-A3B", 4, 1, 1, 4, 8, 2, 8, 2, 2.16),
    Push("miles, RDMA; 10.8 s over NCCL", "Qwen3-235B-A22B", 4, 4, 2, 2, 16, 2, 32, 2, 3.16),
    Push("NRL, NIXL; 14.2 s over NCCL", "DeepSeek-V3", 1, 16, 1, 16, 16, 1, 32, 2, 9.25),
    Push("miles, RDMA; 53.3 s over NCCL", "Kimi-K2-Instruct", 8, 8, 4, 1, 32, 8, 32, 1, 7.23),
]


class Fits(NamedTuple):
    """A trainer that others have run on H100 GPUs of 80 GB, in bf16. Nobody publishes everything: layers are
    distributed evenly, and where a page has no number of tokens of a micro-batch (verl, NRL's mixtures) it is the
    length of the run's samples, which is assumed. NRL sums gradients in bf16; of MB's 8B it is assumed."""

    source: str
    model: str
    gpus: int
    tokens: int
    """Tokens of a micro-batch."""
    tensor: int
    pipeline: int
    context: int
    virtual: int
    expert: int
    recompute: str = "none"
    offload: bool = False
    gradients: str = "float32"
    recomputed: tuple[str, ...] = ()


MOE = ("layernorm", "moe_act")
FITS = [
    Fits("NRL", "Qwen3-32B", 32, 4096, 4, 4, 1, 1, 1),
    Fits("NRL", "Qwen3-30B-A3B", 32, 4096, 1, 1, 1, 1, 8),
    Fits("NRL", "Qwen3-30B-A3B", 32, 40960, 4, 1, 8, 1, 8, "full"),
    Fits("NRL", "Qwen3-235B-A22B", 128, 8192, 2, 8, 2, 1, 16, "full"),
    Fits("NRL", "DeepSeek-V3", 256, 1536, 1, 16, 1, 1, 16, "full"),
    Fits("NRL", "Llama-3-8B", 8, 4096, 1, 1, 1, 1, 1, gradients="bfloat16"),
    Fits("verl", "DeepSeek-V3", 96, 10240, 8, 12, 1, 1, 8, "full", offload=True),
    Fits("verl", "Qwen3-235B-A22B", 128, 8192, 4, 8, 1, 1, 4, "full"),
    Fits("verl", "Qwen3-30B-A3B", 8, 4096, 1, 1, 1, 1, 8, "full", offload=True),
    Fits("MB", "Llama-3-70B", 64, 8192, 4, 4, 2, 5, 1),
    Fits("MB", "Llama-3-8B", 8, 8192, 1, 1, 2, 1, 1, gradients="bfloat16"),
    Fits("MB 25.09", "Qwen3-235B-A22B", 256, 4096, 2, 8, 1, 4, 32),
    Fits("MZ", "Qwen3-235B-A22B", 256, 4096, 2, 8, 1, 4, 32, recomputed=MOE),
    Fits("MZ", "Qwen3-235B-A22B", 256, 4096, 4, 8, 1, 4, 8),
    Fits("MB", "gpt-oss-120b", 64, 4096, 1, 4, 1, 1, 8, recomputed=MOE),
]
REFUSED = [FITS[11]]
"""Its page says nothing of recomputation; MZ has the same layout with it."""
