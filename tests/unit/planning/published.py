"""Times and memory on H100 nodes that others have published, and the runs that they belong to.

Sources: MB, NVIDIA Megatron-Bridge, docs/performance-summary.md of the release in front; AM, NVIDIA NeMo AutoModel,
docs/performance-summary.md; TT, pytorch/torchtitan, benchmarks/; NRL, NVIDIA-NeMo/RL, docs/about/performance-summary.md
of the release in front (v0.3: NVIDIA-NeMo/RL#959); verl, verl-project/verl, docs/perf/dpsk.md and examples; MZ,
yanring/Megatron-MoE-ModelZoo, best_practice; miles, radixark/miles#976; prime, PrimeIntellect-ai/prime-rl,
benchmarks/baselines; MLM, NVIDIA/Megatron-LM, megatron/training/theoretical_memory_usage.py. Others are named in full.
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
QWEN3_4B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000000,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
    "max_position_embeddings": 262144,
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
OTHER_MODELS = LLAMAS | {"Qwen3-4B": QWEN3_4B}
"""The ones that have no file in configs/model."""


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
    tflops: float = 0.0
    """TFLOP/s of a GPU on the same page."""


def of_rate(*values, tokens_per_gpu: float, tflops: float = 0.0) -> Training:
    """From the published tokens per second of a GPU."""
    run = Training(*values, seconds=0.0, tflops=tflops)
    return run._replace(seconds=run.batch * run.tokens / (tokens_per_gpu * run.gpus))


BF16 = [
    of_rate("TT Llama-3.1, FSDP", "Llama-3-8B", 8, 16, 2, 8192, 1, 1, 1, 1, 1, tokens_per_gpu=5762),
    of_rate("TT Llama-3.1, FSDP, compiled", "Llama-3-8B", 8, 16, 2, 8192, 1, 1, 1, 1, 1, tokens_per_gpu=6667),
    of_rate("TT Llama-3.1, FSDP, compiled", "Llama-3-8B", 128, 256, 2, 8192, 1, 1, 1, 1, 1, tokens_per_gpu=6514),
    of_rate("MB 26.04", "gpt-oss-120b", 64, 1280, 1, 4096, 1, 4, 1, 1, 8, tokens_per_gpu=5824, tflops=158),
    of_rate("MB 25.11", "gpt-oss-120b", 64, 512, 4, 4096, 1, 4, 1, 1, 8, tokens_per_gpu=5630, tflops=153),
    of_rate("MB 25.09", "Qwen3-235B-A22B", 256, 2048, 1, 4096, 2, 8, 1, 4, 32, tokens_per_gpu=1204, tflops=178),
    of_rate("MB 25.09, dropless", "DeepSeek-V3", 1024, 8192, 1, 4096, 2, 8, 1, 4, 64, tokens_per_gpu=1297, tflops=338),
    Training("AM", "DeepSeek-V3", 1024, 8192, 1, 4096, 1, 4, 1, 8, 64, 37.87, 216),
    Training("AM", "DeepSeek-V3", 256, 512, 1, 4096, 1, 4, 1, 8, 64, 8.18, 250),
    Training("AM", "Kimi-K2-Instruct", 256, 512, 1, 4096, 1, 8, 1, 4, 32, 8.86, 189),
    Training("AM", "Qwen3-30B-A3B", 8, 512, 4, 4096, 1, 1, 1, 1, 8, 21.773, 277),
    Training("AM", "gpt-oss-20b", 8, 256, 2, 4096, 1, 1, 1, 1, 1, 10.04, 279),
    Training("AM, FSDP", "Llama-3-70B", 64, 128, 1, 8192, 1, 1, 2, 1, 1, 18.90, 389),
]
FP8 = [
    of_rate("MB 25.11, FSDP", "Llama-3-8B", 8, 128, 1, 8192, 1, 1, 1, 1, 1, tokens_per_gpu=14451, tflops=744),
    of_rate("Megatron-LM", "Llama-3-8B", 8, 128, 1, 8192, 1, 1, 2, 1, 1, tokens_per_gpu=13812, tflops=800),
    of_rate("MB 25.11", "Llama-3-70B", 64, 128, 1, 8192, 4, 8, 1, 5, 1, tokens_per_gpu=1602, tflops=719),
    of_rate("MB 26.04", "Llama-3-70B", 64, 256, 1, 8192, 4, 8, 1, 5, 1, tokens_per_gpu=1664, tflops=731),
    of_rate("MB 26.06, SFT", "Llama-3-70B", 32, 32, 1, 4096, 4, 4, 1, 5, 1, tokens_per_gpu=1638, tflops=710),
    of_rate("MB 25.11", "Llama-3-405B", 1024, 512, 1, 8192, 8, 8, 2, 8, 1, tokens_per_gpu=292, tflops=737),
    of_rate("MB 26.06", "Llama-3-405B", 1024, 1536, 1, 8192, 8, 8, 2, 8, 1, tokens_per_gpu=326, tflops=822),
    of_rate("MB 26.06", "Qwen3-30B-A3B", 16, 1024, 1, 4096, 1, 1, 1, 1, 16, tokens_per_gpu=8826, tflops=203),
    of_rate("MB 26.02", "Qwen3-30B-A3B", 16, 1024, 1, 4096, 1, 2, 1, 12, 8, tokens_per_gpu=9058, tflops=208),
    of_rate("MB 25.11", "Qwen3-30B-A3B", 16, 512, 2, 4096, 1, 2, 1, 24, 8, tokens_per_gpu=5275, tflops=121),
    of_rate("MB 26.04", "Qwen3-235B-A22B", 256, 8192, 1, 4096, 2, 8, 1, 4, 32, tokens_per_gpu=1712, tflops=253),
]
COUNTED = Training("AM, FSDP", "gpt-oss-120b", 64, 512, 2, 4096, 1, 1, 1, 1, 1, 4.30, 231)
"""Its seconds are not compared: 64 replicas of 117B parameters do not fit here."""


class Passes(NamedTuple):
    """Updates with full recomputation and FSDP, which is not modelled here, on one node."""

    model: str
    gpus: int
    tokens: int
    """Tokens of a sequence; each GPU has two micro-batches of one."""
    tokens_per_s: float
    """Of all GPUs."""


PRIME = [
    Passes("Qwen3-4B", 8, 16384, 26026),
    Passes("Qwen3-4B", 8, 65536, 28966),
    Passes("Qwen3-4B", 8, 16384, 49717),
    Passes("Qwen3-0.6B", 1, 16384, 11896),
    Passes("Qwen3-0.6B", 1, 65536, 10147),
    Passes("Qwen3-0.6B", 1, 16384, 25486),
    Passes("Qwen3-30B-A3B", 8, 16384, 6113),
    Passes("Qwen3-30B-A3B", 8, 65536, 12748),
    Passes("Qwen3-30B-A3B", 8, 16384, 35026),
]
"""Three of each model: the loss of reinforcement learning with 16k and with 64k tokens, and fine-tuning, which takes
half of the time for the same products. The last two are from H200 GPUs, which have the same peak."""


class Step(NamedTuple):
    """A whole step of reinforcement learning: generation, two passes for log-probs, updates, a push."""

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
    batch: int = 512
    """Samples of an update."""
    generation: float = 0.0
    """The seconds of generation on the same page."""


STEPS = {
    "NRL v0.3": [
        Step("Llama-3-8B", 8, 8, 2048, 4096, 945, 1, 1, 1, 1, 2, "none", 0, 112, generation=58),
        Step("Llama-3-70B", 64, 64, 2048, 4096, 548, 8, 4, 1, 1, 4, "none", 0, 147, generation=84),
    ],
    "NRL v0.4": [
        Step("Llama-3-8B", 16, 16, 2048, 4096, 1060, 1, 1, 1, 1, 2, "full", 0, 97.7),
        Step("Llama-3-8B", 8, 8, 2048, 4096, 1129, 1, 1, 1, 1, 2, "full", 1, 74.6),
        Step("DeepSeek-V3", 256, 256, 512, 1536, 745, 32, 1, 1, 16, 16, "full", 0, 154),
        Step("DeepSeek-V3", 256, 256, 512, 1536, 744, 32, 1, 1, 16, 16, "full", 1, 77.9),
        Step("Qwen3-235B-A22B", 128, 128, 512, 8192, 5671, 16, 2, 2, 16, 8, "full", 0, 506),
        Step("Qwen3-235B-A22B", 128, 128, 512, 8192, 5691, 8, 4, 1, 16, 8, "full", 1, 241),
        Step("Qwen3-30B-A3B", 32, 32, 2048, 4096, 3154, 4, 2, 1, 8, 1, "none", 0, 225),
        Step("Qwen3-30B-A3B", 16, 16, 2048, 4096, 3158, 4, 2, 1, 8, 1, "none", 1, 244),
        Step("Qwen3-32B", 32, 32, 2048, 4096, 3206, 4, 4, 1, 1, 4, "none", 0, 393),
        Step("Qwen3-32B", 32, 32, 2048, 4096, 3207, 4, 4, 1, 1, 4, "none", 1, 215),
    ],
    "NRL v0.5": [
        Step("Llama-3-8B", 16, 16, 2048, 4096, 1019, 1, 1, 1, 1, 2, "full", 0, 92.8),
        Step("Llama-3-8B", 8, 8, 2048, 4096, 1123, 1, 1, 1, 1, 1, "full", 1, 64.8),
        Step("DeepSeek-V3", 256, 256, 512, 1536, 744, 32, 1, 1, 16, 16, "full", 0, 134),
        Step("DeepSeek-V3", 256, 256, 512, 1536, 738, 32, 1, 1, 16, 16, "full", 1, 64.9),
        Step("Qwen3-235B-A22B", 128, 128, 512, 8192, 5700, 16, 2, 2, 16, 8, "full", 0, 431),
        Step("Qwen3-235B-A22B", 128, 128, 512, 8192, 5707, 8, 4, 1, 16, 8, "full", 1, 203),
        Step("Qwen3-30B-A3B", 32, 32, 2048, 4096, 3196, 2, 1, 1, 8, 1, "none", 0, 198),
        Step("Qwen3-30B-A3B", 16, 16, 2048, 4096, 3201, 2, 1, 1, 8, 2, "none", 1, 154),
        Step("Qwen3-32B", 32, 32, 2048, 4096, 3251, 4, 4, 1, 1, 4, "none", 0, 376),
        Step("Qwen3-32B", 32, 32, 2048, 4096, 3252, 4, 4, 1, 1, 4, "none", 1, 200),
    ],
    "NRL v0.6": [
        Step("DeepSeek-V3", 256, 256, 512, 1536, 701, 32, 1, 1, 16, 16, "full", 0, 134),
        Step("DeepSeek-V3", 512, 512, 512, 1536, 697, 32, 1, 1, 16, 16, "full", 0, 111),
        Step("DeepSeek-V3", 256, 256, 512, 1536, 710, 32, 1, 1, 16, 16, "full", 1, 64.1),
        Step("Qwen3-235B-A22B", 128, 128, 512, 8192, 5698, 16, 2, 2, 16, 8, "full", 0, 395),
        Step("Qwen3-235B-A22B", 256, 256, 512, 8192, 5713, 16, 2, 2, 16, 8, "full", 0, 312),
        Step("Qwen3-235B-A22B", 128, 128, 512, 8192, 5721, 8, 4, 1, 16, 8, "full", 1, 231),
        Step("Qwen3-30B-A3B", 32, 32, 2048, 4096, 3203, 2, 1, 1, 8, 1, "none", 0, 192),
        Step("Qwen3-30B-A3B", 16, 16, 2048, 4096, 3201, 2, 1, 1, 8, 2, "none", 1, 152),
        Step("Qwen3-30B-A3B", 128, 64, 2048, 4096, 3206, 2, 1, 1, 8, 1, "none", 8, 34.5),
    ],
}
"""v0.5 is the half that the rates of decoding and of whole steps are fitted to. Its row of DAPO (DeepSeek-V3, 458 s)
is left out, because it generates an unknown number of groups that it drops."""
REFIT = {False: 1342e9 / 36.8, True: 1342e9 / 14.2}
"""Bytes of a model per second in the pushes of these steps, by whether the engines have GPUs of their own: what NRL's
docs/guides/checkpoint-engine-refit.md has measured with DeepSeek-V3, with whole experts and over NCCL."""
VERL = Step("DeepSeek-V3", 96, 96, 768, 10240, 2216, 32, 8, 1, 8, 12, "full", 0, 1700, 256, 1050)
"""On H20 GPUs: 148 TFLOP/s and 4 TB/s. Answers of 1,960 tokens, behind prompts of 256, which is assumed; a CPU updates
the optimizer's state."""


class Push(NamedTuple):
    """A push from trainers on some nodes to engines on others, in bfloat16. Each of the columns of seconds is another
    way; 0: not published."""

    source: str
    model: str
    tensor: int
    pipeline: int
    context: int
    data: int
    expert: int
    engines: int
    engine_tensor: int
    expert_parallel: bool
    direct: float = 0.0
    """NCCL from shard to shard, as here: every rank sends its own part, and receives its own part."""
    gathered: float = 0.0
    """NCCL after an all-gather: one rank of each pipeline stage broadcasts whole tensors to all engine ranks."""
    one_sided: float = 0.0
    """Writes into the engines' memory, without NCCL: Mooncake or NIXL."""


XFER, POINTS = "NVIDIA-NeMo/RL#2808", "NVIDIA-NeMo/RL#2971, DGX-H100, point to point and broadcast among replicas"
PUSHES = [
    Push(XFER, "Qwen3-30B-A3B", 2, 1, 1, 8, 4, 4, 4, False, direct=0.605),
    Push(XFER, "Qwen3-30B-A3B", 2, 2, 1, 4, 4, 4, 4, False, direct=0.5),
    Push(XFER, "Qwen3-30B-A3B", 1, 2, 1, 8, 8, 8, 2, False, direct=0.53),
    Push(XFER, "Qwen3-30B-A3B", 1, 2, 1, 8, 8, 2, 8, False, direct=0.505),
    Push(XFER, "Qwen3-235B-A22B", 4, 8, 1, 4, 16, 16, 8, False, direct=4.7),
    Push(XFER, "DeepSeek-V3", 1, 16, 1, 16, 16, 8, 32, False, direct=8.8),
    Push(POINTS, "Qwen3-30B-A3B", 2, 1, 1, 8, 4, 4, 4, False, direct=1.33),
    Push(POINTS, "Qwen3-30B-A3B", 2, 2, 1, 4, 4, 4, 4, False, direct=0.955),
    Push(POINTS, "Qwen3-30B-A3B", 1, 2, 1, 8, 8, 8, 2, False, direct=1.365),
    Push(POINTS, "Qwen3-30B-A3B", 1, 2, 1, 8, 8, 2, 8, False, direct=0.87),
    Push(POINTS, "Qwen3-30B-A3B", 2, 1, 2, 4, 8, 4, 4, False, direct=1.235),
    Push("miles", "Qwen3-30B-A3B", 4, 1, 1, 4, 8, 2, 8, True, gathered=2.67, one_sided=2.16),
    Push("miles", "Qwen3-235B-A22B", 4, 4, 2, 2, 16, 2, 32, True, gathered=10.8, one_sided=3.16),
    Push("NRL", "DeepSeek-V3", 1, 16, 1, 16, 16, 1, 32, True, gathered=14.2, one_sided=9.25),
    Push("miles, in fp8", "Kimi-K2-Instruct", 8, 8, 4, 1, 32, 8, 32, True, gathered=53.3, one_sided=7.23),
]
"""Where a page has a range, its middle. XFER names the sizes of its groups, whose product is taken for the number of
trainers; NRL's recipes for H100 have its layouts."""


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
RUNS_OUT = [
    Fits("NVIDIA/Megatron-LM#2762, one node of its MZ layout", "Qwen3-30B-A3B", 8, 4096, 1, 1, 1, 1, 8),
    Fits("verl-project/verl#2935, 80 GB A100", "Qwen3-30B-A3B", 32, 32000, 4, 1, 1, 1, 32),
    Fits("verl-project/verl#3360", "Qwen3-235B-A22B", 32, 6864, 4, 8, 1, 1, 4, offload=True),
    Fits("NovaSky-AI/SkyRL#368", "Qwen3-30B-A3B", 16, 6144, 2, 1, 1, 1, 8),
    Fits("modelscope/ms-swift#8084, 80 GB A100", "Qwen3-30B-A3B", 8, 4096, 4, 1, 1, 1, 8, "full"),
]
"""Trainers that have run out of the memory of GPUs of 80 GB. verl brings its state back to the GPUs for an update, but
for #3360, where a CPU updates it, in the layout that its pages give for 32 GPUs. All of them make whole logits."""
ACCEPTED = RUNS_OUT[3:]
"""Here they would fit by less than 5 GB. SkyRL's GPUs also have an engine, which sleeps, and ms-swift's a vision
tower: neither is counted."""
LOGIT_BYTES = 7_468_090_368 / (16_384 * 37_984)
"""What whole logits and their log-probs take for a token and a word: measured on one H100. The trainer here has them in
pieces."""
CARD = {"num_hidden_layers": 4}
"""What ran out on an H100 here, of Qwen3-32B: these layers on one GPU with eight samples of 2,048 tokens, without
recomputation, in Transformer Engine's layers or local ones; 78.3 GB were in use."""


class State(NamedTuple):
    """Weights, gradients and optimizer state of a rank by MLM's formula."""

    model: str
    gpus: int
    tensor: int
    pipeline: int
    context: int
    expert: int
    gigabytes: float


STATES = [
    State("Qwen3-32B", 32, 4, 4, 1, 1, 25.74),
    State("Qwen3-30B-A3B", 32, 1, 1, 1, 8, 42.44),
    State("Qwen3-30B-A3B", 32, 4, 1, 8, 8, 35.58),
]
PRIME_PEAK = 80.1
"""GB that prime measures on each GPU for Qwen3-30B-A3B on 8 H100 with FSDP, 16,384 tokens and full recomputation."""
VERL_PEAK = 66.0
"""GB that verl's page gives for a GPU of VERL, of all that runs on it. Engines have 0.6 of an H20's 96 GB."""
