"""docs/verl_keys.md: the table of verl's keys in words, as `megatron-rl from-verl --markdown` prints it.

A row whose judge is a function of its own has its words in `WORDS`; the others say themselves what they do.
Invariant (tests/unit/tools): every row of the table is on the page.
"""

from __future__ import annotations

from itertools import groupby

from megatron_rl.migrate.verl import adapters
from megatron_rl.migrate.verl import algorithm as how
from megatron_rl.migrate.verl import content as what
from megatron_rl.migrate.verl import fields as field
from megatron_rl.migrate.verl import machine as where
from megatron_rl.migrate.verl import precision as types
from megatron_rl.migrate.verl.keys import TABLE
from megatron_rl.migrate.verl.rules import Judge, KeyRule, Shared
from megatron_rl.migrate.verl.settings import DEFAULTS, ENGINES, RENAMED

HEAD = """# The keys of verl

All keys of verl that `megatron-rl from-verl` knows, and what becomes of them here; the [guide](coming_from_verl.md)
explains the words. A `*` is any text, in names that verl has. A key with a default in brackets enters the configuration
also where a script does not give it. A key that verl does not have is refused, with the nearest one that it has. This
page is written by `megatron-rl from-verl --markdown`.
"""
WORDS: dict[Judge, str] = {
    what.train_rows: "`data.train`",
    what.eval_rows: "`data.eval` and `eval.num_prompts`; one file",
    what.batch_of_generation: "the same as `data.train_batch_size`, unless groups are filtered",
    what.long_prompts: "`data.on_bad_row`; a prompt that is too long is left out or ends the run, and is never cut",
    what.column: "`data.columns`, unless it is the name in verl's own rows",
    what.chat_argument: "`data.chat_template`",
    what.model_path: "`model.path`, `critic.model.path`; a name on the hub with its download",
    what.recompute: "`model.recompute`, except with Megatron",
    adapters.lora: "`policy.lora` or `critic.lora`; `lora.merge` is `rollout.lora: merged`",
    where.mini_batch: "`algorithm.updates_per_step`, `critic.updates_per_step`: prompts of a step / of a mini-batch",
    types.trainer_dtype: "`model.dtype`, which is the engine's, too",
    types.weights_dtype: "`model.dtype`; the optimizer's weights are float32",
    types.reduced_in: "`optimizer.gradients`; weights are bfloat16",
    what.entry: "one by one, as `KEY.NAME`",
    what.engine_of_actor: "the engine of `model_engine` alone",
    what.resume_path: "implied: `resume_mode=resume_path` alone reads it",
    how.filter_metric: "the rewards of a group",
    where.epochs: "1 alone: every answer is trained on once",
    where.is_dynamic: "samples are always packed, up to `balance.max_tokens_per_microbatch`",
    where.token_bound: "`balance.max_tokens_per_microbatch`, times the ranks of a sequence",
    how.clip_ratio: "the bounds whose own key is null",
    how.loss_part: "the key of `algorithm.loss`, if the loss has it",
    how.loss_mode: "`algorithm.loss.kind`",
    how.aggregation: "`algorithm.loss_agg_mode`",
    how.loss_length: "`algorithm.loss_agg_tokens`",
    how.entropy: "`algorithm.entropy.coefficient`",
    how.kl_switch: "`algorithm.kl.place`",
    how.kl_part: "`algorithm.kl.estimator` and `algorithm.kl.coefficient`",
    field.routing: "`policy.routing_replay`; R3 alone",
    what.save_contents: "`checkpoint.export_every` for `hf_model`; the rest is always saved",
    where.optimizer: "the key of `policy.optimizer` or `critic.optimizer`",
    where.warmup: "`optimizer.warmup_steps`: training steps x optimizer steps of each",
    where.schedule: "`optimizer.schedule`, from the key that verl's engine reads",
    where.lowest_rate: "`optimizer.min_lr_ratio`",
    where.clip_grad: "`optimizer.clip_grad`",
    field.optimizer: "`optimizer.offload`, `moments`, `gradients`, `eps`; speed has no meaning; others are refused",
    where.parallel: "the key of `policy.parallel` or `critic.parallel`, with Megatron",
    where.fsdp: "`policy.parallel`, chosen by the planner; the ranks of a sequence are `context`",
    what.granularity: "`model.recompute`, or `policy.megatron.transformer`",
    where.stages: "`policy.parallel.layers: auto`",
    field.transformer: "`policy.load_balancing_loss`, `router_z_loss`, `router_bias_update_rate`; speed has no meaning "
    "here; others are refused",
    field.ddp: "speed has no meaning here; others are refused",
    what.engine: "Megatron-Core trains; its layout is the script's with `megatron`, and otherwise the planner's",
    where.hybrid: "`cluster.colocate`",
    how.group_size: "`rollout.samples_per_prompt`",
    where.engines: "`rollout.tensor`, `rollout.pipeline`, and from them `rollout.num_engines`",
    where.engine_replicas: "1 alone: a replica is an engine (`rollout.num_engines`)",
    where.engine_experts: "`rollout.expert_parallel`",
    types.dtype: "`model.dtype`",
    what.eval_sampling: "as in training; others are refused",
    what.multi_turn: "`rollout.environment`, to be written; without tools an answer is one turn",
    what.engine_length: "the lengths of `data`; others are refused",
    how.estimator: "`algorithm.adv_estimator.kind`",
    how.standard_deviation: "`algorithm.adv_estimator.std`",
    how.discount: "the key of `algorithm.adv_estimator`, with `gae`",
    how.correction: "`algorithm.correction`",
    how.filter_groups: "`rollout.active_sampling`",
    what.rewards: "`rewards`",
    what.reward_part: "a part of `rewards`",
    what.manager: "verl's own managers; others are refused",
    what.overlong_buffer: "`algorithm.shaping` of kind `soft_overlong`",
    where.value_clip: "`critic.loss.cliprange_value`",
    what.total_steps: "`run.steps`",
    what.names: "`run.name` and `run.folder`",
    what.loggers: "`observe`",
    where.gpus: "`cluster.gpus_per_node`, and `policy.parallel.data`",
    what.save_every: "`checkpoint.every`",
    what.evaluation: "`eval.every`",
    what.critic_warmup: "`critic.warmup_steps`, one less",
    what.resume: "`--resume`",
    what.dumped: "`rollout.dump`",
}


def words_of(judge: Judge) -> str:
    return judge.words if isinstance(judge, Shared) else WORDS[judge]


def _keys(rules: list[KeyRule]) -> str:
    shown = []
    for rule in rules:
        default = DEFAULTS.get(rule.pattern)
        shown.append(f"`{rule.pattern}`" + (f" ({default})" if rule.always and default is not None else ""))
    return ", ".join(shown)


def markdown() -> str:
    """The whole page."""
    engines = ", ".join(f"`{name}` ({trainer})" for name, trainer in ENGINES.items())
    lines = [HEAD, f"`model_engine` is one of {engines}; another one is an error.", ""]
    for section, rules in TABLE.items():
        lines += [f"## {section[0].upper()}{section[1:]}", "", "| verl | here |", "|---|---|"]
        for judge, same in groupby(rules, key=lambda rule: rule.judge):
            lines.append(f"| {_keys(list(same))} | {words_of(judge)} |")
        lines.append("")
    lines += [
        "## New names",
        "",
        "verl has renamed these; both names are read.",
        "",
        "| now | in the tables |",
        "|---|---|",
    ]
    for new, old in RENAMED.items():
        star = "*" if new.endswith(".") else ""
        lines.append(f"| `{new}{star}` | `{old}{star}` |")
    return "\n".join(lines) + "\n"
