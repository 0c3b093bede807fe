"""Counting in pictures: how many discs does a drawing of 48 x 48 pixels have, 1 to 9?

The command draws the pictures, and writes the rows and a small Qwen3-VL, with a vision tower of two layers. It has been
trained for about two minutes, first on right answers, and then on answers most of which are wrong. All depends only on
the seed.

    python -m megatron_rl.recipes.counting.task runs/counting/task
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image

from megatron_rl.recipes.tiny.model import chat_tokenizer, write_task_of

SIZE, LARGEST = 48, 9
NUM_TRAIN, NUM_EVAL = 2000, 200
MOST_TRIES = 10_000
"""The places that are tried for a disc. Then the drawing begins again."""
WRONG = 0.6
"""The share of wrong answers in the second part of the warm start; they differ from the right one by 1 or 2."""
RIGHT_STEPS, WRONG_STEPS, BATCH = 450, 120, 64
"""The steps of the warm start, with right answers alone and then with wrong ones, and their pictures."""
PICTURE = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
TEMPLATE = (
    "{% for m in messages %}<turn>{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<end>{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant:{% endif %}"
)
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 8,
    "temporal_patch_size": 1,
    "merge_size": 2,
    "size": {"shortest_edge": SIZE * SIZE, "longest_edge": SIZE * SIZE},
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}


def drawing(count: int, source: random.Random) -> PIL.Image.Image:
    """Discs of random colours that do not touch, on a grey ground."""
    ground = np.full((SIZE, SIZE, 3), source.randrange(90, 140), np.uint8)
    rows, columns = np.mgrid[:SIZE, :SIZE]
    pixels, centres, num_tries = ground.copy(), list[tuple[float, float]](), 0
    while len(centres) < count:
        if (num_tries := num_tries + 1) > MOST_TRIES:  # these discs leave no place for another one
            pixels, centres, num_tries = ground.copy(), [], 0
        row, column = (source.uniform(5, SIZE - 6) for _ in range(2))
        if all((row - r) ** 2 + (column - c) ** 2 > 11**2 for r, c in centres):
            centres.append((row, column))
            num_tries = 0
            colour = [source.choice((source.randrange(0, 50), source.randrange(190, 256))) for _ in range(3)]
            pixels[(rows - row) ** 2 + (columns - column) ** 2 <= 4**2] = colour
    return PIL.Image.fromarray(pixels)


def tokenizer() -> Any:
    return chat_tokenizer(("<turn>", *PICTURE), (), "abcdefghijklmnopqrstuvwxyzHT?: 0123456789", TEMPLATE)


def write_model(folder: Path, seed: int) -> Any:
    """Write the model's configuration and tokenizer, and return it with random weights."""
    import torch
    from transformers.models.qwen3_vl import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    letters = tokenizer()
    names = ("vision_start", "image", "vision_end", "video")
    ids = dict(zip(names, letters.convert_tokens_to_ids(PICTURE), strict=True))
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    text: dict[str, Any] = dict(
        hidden_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=32
    )
    text |= dict(intermediate_size=192, vocab_size=64, max_position_embeddings=128, rope_parameters=rope)
    text |= dict(eos_token_id=letters.eos_token_id, pad_token_id=letters.pad_token_id, tie_word_embeddings=False)
    tower: dict[str, Any] = dict(
        depth=2, hidden_size=64, intermediate_size=128, num_heads=4, out_hidden_size=96, patch_size=8
    )
    tower |= dict(temporal_patch_size=1, spatial_merge_size=2, num_position_embeddings=36, deepstack_visual_indexes=[0])
    torch.manual_seed(seed)
    named = {f"{name}_token_id": value for name, value in ids.items()}
    config = Qwen3VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=False, dtype="float32", **named)
    letters.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return Qwen3VLForConditionalGeneration(config)


def warm_start(model: Any, folder: Path, pictures: Sequence[PIL.Image.Image], counts: Sequence[int], seed: int) -> None:
    """Train the model on answers some of which are wrong."""
    import torch
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    torch.set_num_threads(1)  # the tower computes each picture by itself, too little for two threads
    letters, source = tokenizer(), random.Random(seed)
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    text = letters.apply_chat_template([question()], tokenize=False, add_generation_prompt=True)
    ids = letters(text.replace("<|image_pad|>", "<|image_pad|>" * 9))["input_ids"]
    patches = torch.from_numpy(processor(images=list(pictures), return_tensors="np")["pixel_values"])
    patches = patches.view(len(pictures), -1, patches.shape[-1])
    steps = RIGHT_STEPS + WRONG_STEPS
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps)
    for step in range(steps):
        batch = source.sample(range(len(pictures)), BATCH)
        wrong = WRONG if step >= RIGHT_STEPS else 0.0
        said = [misjudged(counts[i], source) if source.random() < wrong else counts[i] for i in batch]
        answers = torch.tensor([letters.convert_tokens_to_ids([str(count), "<end>"]) for count in said])
        whole = torch.cat((torch.tensor(ids).repeat(len(batch), 1), answers), 1)
        out = model(
            input_ids=whole,
            pixel_values=patches[batch].flatten(0, 1),
            image_grid_thw=torch.tensor([[1, 6, 6]] * len(batch)),
            mm_token_type_ids=(whole == model.config.image_token_id).int(),
        )
        loss = torch.nn.functional.cross_entropy(out.logits[:, -3:-1].flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()


def misjudged(count: int, source: random.Random) -> int:
    return source.choice([n for n in range(count - 2, count + 3) if n != count and 1 <= n <= LARGEST])


def question() -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "How many?"}]}


def write_task(folder: Path, seed: int = 0) -> None:
    """Write pictures, train.jsonl, eval.jsonl and the model."""
    source = random.Random(seed)
    counts = [source.randint(1, LARGEST) for _ in range(NUM_TRAIN + NUM_EVAL)]
    pictures = [drawing(count, source) for count in counts]
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    lines = []
    for number, (count, picture) in enumerate(zip(counts, pictures, strict=True)):
        picture.save(folder / f"pictures/{number}.png")
        row = {"messages": [{"role": "user", "content": "<image>How many?"}], "images": [f"pictures/{number}.png"]}
        lines.append(json.dumps(row | {"ground_truth": str(count), "dataset": "discs"}) + "\n")
    (folder / "train.jsonl").write_text("".join(lines[:NUM_TRAIN]))
    (folder / "eval.jsonl").write_text("".join(lines[NUM_TRAIN:]))
    model = write_model(folder / "model", seed)
    warm_start(model, folder / "model", pictures[:NUM_TRAIN], counts[:NUM_TRAIN], seed)
    model.save_pretrained(folder / "model")


def main(arguments: Sequence[str] | None = None) -> int:
    return write_task_of(__doc__, write_task, arguments)


if __name__ == "__main__":
    sys.exit(main())
