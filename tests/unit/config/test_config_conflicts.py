"""What one section says about another: every message, and that all of them are told at once."""

from __future__ import annotations

import pytest

from megatron_rl.config.load import merge_arguments, validate
from megatron_rl.config.schema import GrpoRunConfig, PpoRunConfig, SftRunConfig

RUN = ["run={name: x, steps: 4}", "model.path=m", "data.train=rows.jsonl"]
SHORT = "rollout={prompts_per_step: 4, samples_per_prompt: 2, max_prompt_tokens: 8, max_response_tokens: 24}"
THINKING = "rollout.thinking={thought_tokens: 8, response_tokens: 8}"
VALUES = ["rollout.prefix_values={}", "algorithm.adv_estimator={kind: grpo_process}"]
TEACHER = "{path: t}"
BASELINE = "algorithm.adv_estimator={kind: optimal_token_baseline}"
TURNS = "rollout.environment={kind: class, path: 'turns:Turns'}"
COLOCATED = "cluster.colocate=true"
EXPANDABLE = "cluster.environment={PYTORCH_ALLOC_CONF: 'max_split_size_mb:512, expandable_segments:True'}"

CONFLICTS = [
    ([f"teachers=[{TEACHER}]"], "teachers have no effect without algorithm.distillation"),
    (["algorithm.distillation={}"], "there are none; give teachers"),
    (
        [f"teachers=[{TEACHER}, {TEACHER}]", "algorithm.distillation={}"],
        r"teachers\[0\] has no datasets, .* put it last",
    ),
    ([f"teachers=[{TEACHER}]", "algorithm.distillation={top_k: 4}"], "top_k has no effect with form sampled"),
    (["teachers=[{}]", "algorithm.distillation={}"], "is the policy, which needs another prompt"),
    (["teachers=[{path: t, server: s}]", "algorithm.distillation={}"], "remove one of the two"),
    *(
        ([f"teachers=[{TEACHER}]", f"algorithm.distillation={{{how}}}", override], message)
        for how, override, message in (
            ("by: engine, form: sampled", "rollout.sampling.temperature=0.8", "temperature is 0.8"),
            (
                "by: engine, form: reverse",
                "algorithm.distillation.top_k=4",
                "needs the teacher's log-probs of 4 tokens",
            ),
            ("by: engine, form: sampled", "algorithm.kl={}", "algorithm.kl pulls the policy to its beginning"),
            (
                "by: engine, form: sampled",
                "algorithm.loss.kind=a2po",
                "algorithm.loss a2po pulls the policy to its beginning",
            ),
            ("by: engine, form: sampled", "algorithm.loss={kind: gspo}", "loss gspo has one ratio for each sample"),
            ("by: engine, form: sampled", "rollout.active_sampling=true", "and a teacher teaches them, too"),
            ("by: engine, form: sampled", "algorithm.adv_estimator={kind: grpo_process}", "has no use"),
            ("by: engine, outcome: true", BASELINE, "optimal_token_baseline is not defined together with teachers"),
            (
                "by: engine, form: sampled",
                "teachers=[{server: s}]\nrollout.sampling.forbid=['<pad>']",
                "forbids tokens",
            ),
            ("by: engine, outcome: true", "rollout.samples_per_prompt=1", "every grpo advantage would be 0"),
            (
                "by: engine, form: sampled",
                f"{COLOCATED}\nteachers=[{{path: t, num_engines: 3}}]",
                "the engines of t have GPUs of the 1 trainer ranks, and 3 of 1 ranks do not fit",
            ),
            (
                "by: engine, form: sampled",
                f"{COLOCATED}\ncluster.pools={{teacher: large}}",
                "cluster.pools: teacher has no effect",
            ),
            ("by: trainer, form: sampled", f"teachers=[{TEACHER}, {TEACHER}]", "room for one teacher"),
            ("by: trainer, form: sampled", "teachers=[{server: s}]", "room for one teacher"),
            (
                "by: trainer, form: sampled",
                "teachers=[{path: t, prompt: hint}]",
                "needs algorithm.distillation.by engine",
            ),
        )
    ),
    ([BASELINE, "algorithm.overlong_filter=true"], "overlong_filter takes answers out of the step"),
    (["cluster.world_size=8", "policy.parallel={tensor: 2, context: 2}"], "needs 2 x 1 x 1 x 2 = 4 ranks"),
    (["balance.max_tokens_per_microbatch=31"], "is below the longest sample"),
    *(
        (
            [f"model.dtype={dtype}", "policy.optimizer.gradients=bfloat16"],
            "policy.optimizer.gradients: bfloat16 needs model.dtype: bfloat16",
        )
        for dtype in ("float16", "float32")
    ),
    (["bridge.chains=2"], "bridge.chains is 2, but there are 1 engines"),
    (["rollout.samples_per_prompt=1"], "every grpo advantage would be 0"),
    (["algorithm.adv_estimator={kind: grpo_process}"], "needs rewards at single tokens"),
    (["rollout.prefix_values={}"], "algorithm.adv_estimator grpo does not use"),
    (["algorithm.adv_estimator={kind: two_stage}"], "without rollout.beams there are none"),
    (["algorithm.adv_estimator={kind: gae}"], "gae needs a critic"),
    (["algorithm.updates_per_step=5"], "algorithm.updates_per_step exceeds rollout.prompts_per_step"),
    (
        ["algorithm.epochs=2", "algorithm.loss={kind: reinforce}"],
        "epochs is 2, but loss reinforce has no ratio to pi_old",
    ),
    (["algorithm.stop_epochs={kl: 0.1}"], "stop_epochs is for the second epoch and later ones, but epochs is 1"),
    (["algorithm.epochs=2", "algorithm.stop_epochs={}"], "stop_epochs has no bound"),
    (
        ["algorithm={epochs: 2, stop_epochs: {kl: 0.1}, anchor: engine, correction: null}"],
        "stop_epochs compares pi with pi_old, but the ratio here is to another policy",
    ),
    (["rollout.max_lag=1", "rollout.prefix_cache=salted"], "set prefix_cache to cleared"),
    (["policy.vision_tower=trained", "rollout.prefix_cache=salted"], "or a trained policy.vision_tower"),
    (["rollout.late=drop"], "rollout.late: drop has no effect"),
    (["rollout.expected_tokens={mean: 900, tail: 1000}"], "expected_tokens.mean is 900, and rollout.max_response_"),
    (
        ["rollout.expected_tokens={mean: 2, tail: 3, prompt: 99}"],
        "expected_tokens.prompt is 99, and rollout.max_prompt",
    ),
    (
        ["cluster={device: gpu, gpus_per_node: 8}", "slurm={gpus_per_node: 4}"],
        "slurm.gpus_per_node is 4, but the run is planned for 8 GPUs on a node",
    ),
    (
        [COLOCATED, "cluster={device: gpu, gpus_per_node: 1}", "rollout.parallel.tensor=2"],
        "its 2 ranks .rollout.parallel.tensor x rollout.parallel.pipeline. are more than the 1 GPUs of a node",
    ),
    (["rollout.vllm.max_num_batched_tokens=512"], "512. is below rollout.max_sequences .1024."),
    (["rollout.vllm.moe_backend=triton", "rollout.backend=mine:Engine"], "rollout.vllm has no effect"),
    (
        ["rollout.vllm={seed: 3, hf_token: x, load_format: auto}"],
        "vllm: seed must not be set here; run.seed decides it",
    ),
    (["rollout.vllm.spec_method=ngram"], "spec_method must not be set here; rollout.speculative decides it"),
    (["rollout.vllm.max_num_batched_tokens=16k"], "max_num_batched_tokens must be a whole number above 0"),
    (["rollout.parallel.pipeline=2", "policy.routing_replay=true"], "vLLM gives none with pipeline stages"),
    (["rollout.parallel.pipeline=4", "rollout.max_sequences=3"], "is below rollout.parallel.pipeline"),
    (["rollout.replay=r", "data.eval=held.jsonl"], "data.eval needs engines"),
    (["rollout.replay=r", "rollout.dump=true"], "rollout.dump needs engines"),
    (["rewards=[{kind: length, target: 3}, {kind: length, target: 4}]"], "are not distinct"),
    (["eval.verifier=other"], "eval.verifier is 'other', but the rewards are named"),
    (["rollout.delimiter=''", "rewards=[{kind: format}]"], "the kind format looks for rollout.delimiter"),
    (["rewards=[{kind: environment}]"], "needs the rewards of rollout.environment .*, which is null"),
    ([THINKING, "rollout.delimiter="], "rollout.thinking needs rollout.delimiter"),
    ([THINKING, "rollout.thinking.closing=stop"], "must end with rollout.delimiter"),
    ([THINKING, "rollout.thinking.response_tokens=17"], r"max_response_tokens \(24\) is below 26"),
    ([THINKING, TURNS, "rollout.thinking.mode=truncate"], "would end the answer in the first turn"),
    ([TURNS, "rollout.environment.thought_tokens=9"], "set rollout.thinking with the budget of a turn"),
    (
        [
            "rewards=[{kind: length, target: 3}]",
            "rollout.thinking={thought_tokens: {kind: quantile, quantile: .5, low: 1, high: 8, start: 4}, "
            "response_tokens: 8}",
        ],
        "no reward says which answers are right",
    ),
    (
        [TURNS, "data.train=[{name: a, path: a.jsonl, weight: 1, chat_template: {x: 1}}]"],
        "all rows have the same arguments",
    ),
    ([*VALUES, "rollout.prefix_values.by=trainer", "rollout.max_lag=1"], "set it to engine"),
    ([*VALUES, "rollout.beams={width: 2, catalogue: items.json}", THINKING], "rollout.beams has several answers"),
    ([*VALUES, "rollout.environment={kind: agent, path: 'agents:agent'}"], "an agent's calls may be neither"),
    ([*VALUES, "rollout.prefix_values.rollouts=2", TURNS], "in the middle of an answer"),
    ([*VALUES, "rollout.delimiter=''"], "with an empty rollout.delimiter there is none"),
    (["rollout.beams={width: 2, catalogue: items.json}"], "set rollout.thinking with mode two_call"),
    (["rollout.beams={width: 2, catalogue: i.json}", THINKING, "rollout.thinking.thought_tokens=0"], "may be 0"),
    (["rollout.beams={width: 2, catalogue: i.json}", THINKING, "rollout.sampling.top_k=5"], "the engine's full"),
    (["policy.multi_token_targets=policy"], "policy.multi_token is drop, so that no head is trained"),
    (["rollout.speculative={kind: multi_token}"], "multi_token is drop, so that no weight sync brings a head"),
    (
        ["rollout.speculative={kind: multi_token}", "policy.multi_token=keep"],
        "multi_token is keep, so that no weight sync brings a head",
    ),
    (
        ["rollout.speculative={kind: multi_token}", "policy={multi_token: train, routing_replay: true}"],
        "no head next to policy.routing_replay",
    ),
    (["rollout.speculative={}", "cluster.gpus_per_engine_rank=1"], "is for engines on CPUs"),
    (["rollout.speculative={}", "rollout.parallel.pipeline=2"], "and with pipeline stages"),
    (["rollout.speculative={}", THINKING, "rollout.thinking.mode=native"], "set mode to two_call or truncate"),
    ([COLOCATED, "policy.parallel.data=2"], "there are 2 trainer ranks"),
    ([COLOCATED, "cluster.mirror=true"], "set cluster.mirror to false"),
    ([COLOCATED, "cluster.gpus_per_trainer=1"], "must both be 1, or both 0"),
    (["cluster.node_memory_gb=500"], "set cluster.gpus_per_node"),
    (["cluster.collective_timeout_s=600"], "collective_timeout_s is 600, but .* cluster.start_timeout_s, 1800 s"),
    ([COLOCATED, EXPANDABLE], "environment.PYTORCH_ALLOC_CONF has expandable_segments:True, but with cluster.colocate"),
    (["cluster.device=cpu", "cluster.gpus_per_engine_rank=1"], "device is cpu, but cluster.gpus_per_engine_rank is 1"),
    ([COLOCATED, "cluster.pools={trainer: a, engine: b}"], "trainers and engines are on the same nodes"),
]
OF_CRITICS = [
    (["algorithm.adv_estimator={kind: grpo}"], "grpo uses no critic"),
    (["critic.warmup_steps=4"], "leaves none of the 4 run.steps"),
    (["critic.updates_per_step=5"], "critic.updates_per_step exceeds"),
    ([COLOCATED, "critic.parallel.data=2"], "and 2 of the critic"),
    ([COLOCATED, "cluster.pools={trainer: a, engine: a, critic: b}"], "trainers and critic are on the same nodes"),
    ([TURNS, "rewards=[{kind: environment}]"], "would count twice"),
]
OF_SFT = [
    (["policy.routing_replay=true"], "`megatron-rl sft` has none"),
    (["policy.megatron.optimizer={initial_loss_scale: 1000.0}"], "initial_loss_scale is 1000; take a power of two"),
    (["policy.megatron.optimizer={min_loss_scale: 0}"], "min_loss_scale is 0; take a power of two"),
    (["policy.megatron.optimizer={min_loss_scale: true}"], "min_loss_scale is True; take a power of two"),
    (["policy.megatron.optimizer={initial_loss_scale: 1, min_loss_scale: 2}"], "is 1, below min_loss_scale 2"),
    (["policy.megatron.optimizer={loss_scale_window: 2.9}"], "loss_scale_window is 2.9"),
    (["policy.megatron.optimizer={hysteresis: 2}"], "each overflow lowers the loss scale; remove this key"),
    ([COLOCATED], "`megatron-rl sft` has no engines"),
    (["balance.max_tokens_per_microbatch=4095"], r"is below sft.max_tokens \(4096\)"),
]


@pytest.mark.parametrize(
    ("kind", "overrides", "message"),
    [
        *((GrpoRunConfig, *case) for case in CONFLICTS),
        *((PpoRunConfig, *case) for case in OF_CRITICS),
        *((SftRunConfig, *case) for case in OF_SFT),
    ],
)
def test_sections_that_do_not_go_together_are_told(kind, overrides, message):
    whole = [*RUN[:2], "sft.rows=rows.jsonl"] if kind is SftRunConfig else [*RUN, SHORT]
    validate(kind, merge_arguments(whole))  # without the overrides there is no conflict
    with pytest.raises(ValueError, match=message):
        validate(kind, merge_arguments([*whole, *(one for given in overrides for one in given.split("\n"))]))


def test_all_conflicts_are_told_at_once():
    with pytest.raises(ValueError, match="refused") as refused:
        validate(GrpoRunConfig, merge_arguments([*RUN, SHORT, "bridge.chains=2", "rollout.late=drop"]))
    assert [line.split(" ")[2] for line in str(refused.value).splitlines()[1:]] == ["rollout.late:", "bridge.chains"]


def test_a_run_needs_a_name_steps_a_model_and_rows_and_nothing_else():
    config = validate(GrpoRunConfig, merge_arguments(RUN))
    assert config.rollout.max_model_tokens <= config.balance.max_tokens_per_microbatch
