"""The supported families, by the `model_type` of their HF config.json."""

from __future__ import annotations

import sys

from megatron_rl.models.families.deepseek_v3 import DEEPSEEK_V3, GLM4_MOE_LITE, KIMI_K2
from megatron_rl.models.families.gemma3 import GEMMA3_TEXT
from megatron_rl.models.families.glm4_moe import GLM4_MOE
from megatron_rl.models.families.gpt_oss import GPT_OSS
from megatron_rl.models.families.llama import LLAMA
from megatron_rl.models.families.minimax_m2 import MINIMAX_M2
from megatron_rl.models.families.mistral import MISTRAL
from megatron_rl.models.families.mixtral import MIXTRAL
from megatron_rl.models.families.nemotron_h import NEMOTRON_H
from megatron_rl.models.families.olmo import OLMO2, OLMO3
from megatron_rl.models.families.qwen2 import QWEN2
from megatron_rl.models.families.qwen3 import QWEN3
from megatron_rl.models.families.qwen3_5 import QWEN3_5_MOE_TEXT, QWEN3_5_TEXT
from megatron_rl.models.families.qwen3_moe import QWEN3_MOE
from megatron_rl.models.families.qwen3_next import QWEN3_NEXT
from megatron_rl.models.family import Family

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        *(LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE, QWEN3_NEXT, QWEN3_5_TEXT, QWEN3_5_MOE_TEXT, MIXTRAL, OLMO2, OLMO3),
        *(DEEPSEEK_V3, KIMI_K2, GLM4_MOE_LITE, GLM4_MOE, GPT_OSS, MINIMAX_M2, GEMMA3_TEXT, NEMOTRON_H),
    )
}


def module_of(family: str) -> str:
    """The name of the module here that has a family's table, under the family's name in capitals. Other modules may
    import it, but none of them is named like the family."""
    holders = [
        name.removeprefix(f"{__name__}.")
        for name, module in sys.modules.items()
        if name.startswith(f"{__name__}.") and vars(module).get(family.upper()) is FAMILIES[family]
    ]
    return family if family in holders else holders[0]
