"""The data types that all packages share. They are plain values and compute nothing but their own derived numbers.

One answer goes through eight shapes: a row of a file, `Prompt`, `rollout.program.Completion` in the engine, `Rollout`
with its `Tokens` and its `Verdict`, `StepBatch`, `Credit`, `Share`, and `actor.packing.Microbatch` on a rank. Nothing
here imports torch.

Between them an answer is a part of something else, or seen by somebody: `Transcript` while its program goes on, `Group`
on its way to verifier and loop, `Answer` in rewards, and `Terms` in losses.
"""

from megatron_rl.types.blocks import (
    DELTA_CHUNK,
    Attention,
    DeltaNet,
    GatedMlp,
    LatentAttention,
    Mixture,
    Mlp,
    SoftmaxAttention,
)
from megatron_rl.types.mesh import HOLDS, Division, Mesh, Phase
from megatron_rl.types.model import Adapters, Layer, ModelShape
from megatron_rl.types.rollouts import (
    FROM_PROMPT,
    LARGEST_SCORE,
    NOT_JUDGED,
    UTILITY,
    Branch,
    Conversation,
    Episode,
    Group,
    GroupRequest,
    Prompt,
    Rollout,
    Tokenizer,
    TokenReward,
    Tokens,
    Verdict,
)
from megatron_rl.types.rope import LinearRope, Llama3Rope, Rope, Scaling, YarnRope
from megatron_rl.types.step import (
    AnnotatedBatch,
    Credit,
    Denominators,
    Epochs,
    Gradient,
    GroupSums,
    Metrics,
    MicrobatchPlan,
    Minibatches,
    Rollouts,
    Share,
    Shares,
    StepBatch,
    TokenNumbers,
    TokenRewards,
    TokenSpan,
    TrainingRow,
)
from megatron_rl.types.vision import MOST_SEEN_BYTES, Picture, Vision, text_of_turn

__all__ = [
    "Adapters",
    "AnnotatedBatch",
    "Attention",
    "DELTA_CHUNK",
    "FROM_PROMPT",
    "HOLDS",
    "LARGEST_SCORE",
    "NOT_JUDGED",
    "UTILITY",
    "Branch",
    "Conversation",
    "Credit",
    "DeltaNet",
    "Denominators",
    "Division",
    "Episode",
    "Epochs",
    "GatedMlp",
    "Gradient",
    "Group",
    "GroupRequest",
    "GroupSums",
    "LatentAttention",
    "LinearRope",
    "Layer",
    "Llama3Rope",
    "MOST_SEEN_BYTES",
    "Mesh",
    "Metrics",
    "MicrobatchPlan",
    "Minibatches",
    "Mixture",
    "Mlp",
    "ModelShape",
    "Phase",
    "Picture",
    "Prompt",
    "Rollout",
    "Rollouts",
    "Rope",
    "Share",
    "Shares",
    "Scaling",
    "SoftmaxAttention",
    "StepBatch",
    "TokenNumbers",
    "TokenReward",
    "TokenRewards",
    "TokenSpan",
    "TrainingRow",
    "Tokenizer",
    "Tokens",
    "Verdict",
    "Vision",
    "YarnRope",
    "text_of_turn",
]
