"""What a class of `rollout.backend` declares is read in its source, and compared with the configuration."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, models

from megatron_rl.config.load import validate
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.preflight.backend_source import faults_of_backend
from megatron_rl.rollout.backend import ABILITIES, Sampler
from megatron_rl.rollout.vllm_sampler import VllmSampler

SOURCE = """
from megatron_rl.rollout.backend import Sampler
from megatron_rl.rollout.vllm_sampler import VllmSampler as Ours
raise SystemExit("this module must not be run")
class Nothing(Sampler):
    async def sample(self, request): ...
class Some(Sampler):
    abilities: ClassVar = frozenset({"forbid", "greedy"})
    async def sample(self, request): ...
class More(Some):
    abilities = frozenset(["weights", "lag"])
class Same(More): pass
class Held(Mixin, Ours): pass
class Misspelt(Sampler):
    abilities = {"quantisation"}
    async def sample(self, request): ...
class Computed(Sampler):
    abilities = Some.abilities | {"lag"}
    async def sample(self, request): ...
class Old:
    async def answer(self): ...
class Blocking(Sampler):
    def sample(self, request): ...
class Empty(Sampler):
    abilities = frozenset()
def function(): ...
"""


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(SOURCE)
    return tmp_path


def faults(name: str, trains: bool = False, rollout=None, **changes) -> list[str]:
    values = {
        "run": {"name": "run", "steps": 1},
        "model": {"path": "model", "dtype": "float32"},
        "data": {"train": "train.jsonl"},
        "balance": {"max_tokens_per_microbatch": 8192},
        "rollout": {"backend": f"mine.py:{name}", **(rollout or {})},
    }
    return faults_of_backend(validate(GrpoRunConfig, values | changes), trains)


NATIVE = {"mode": "native", "thought_tokens": 4, "response_tokens": 4}
PROCESS = {"adv_estimator": {"kind": "grpo_process"}}


@pytest.mark.parametrize(
    ("ability", "key", "rollout", "changes"),
    [
        ("quantization", "rollout.quantization", {"quantization": "fp8"}, {}),
        ("forbid", "rollout.sampling.forbid", {"sampling": {"forbid": ["<pad>"]}}, {}),
        ("truncate", "rollout.sampling.top_p", {"sampling": {"top_p": 0.9}}, {}),
        ("truncate", "rollout.sampling.top_k", {"sampling": {"top_k": 5}}, {}),
        ("native_budget", "rollout.thinking.mode", {"thinking": NATIVE}, {}),
        ("prompt_logp", "rollout.prefix_values", {"prefix_values": {}}, {"algorithm": PROCESS}),
        ("salted", "rollout.prefix_cache", {"prefix_cache": "salted"}, {}),
        ("ranks", "rollout.parallel", {"parallel": {"tensor": 2}}, {}),
        ("greedy", "algorithm.adv_estimator", {}, {"algorithm": {"adv_estimator": {"kind": "remax"}}}),
        ("routes", "policy.routing_replay", {}, {"policy": {"routing_replay": True}}),
        ("adapters", "policy.lora", {}, {"policy": {"lora": {"rank": 4}}}),
        ("memory", "cluster.colocate", {}, {"cluster": {"colocate": True}}),
    ],
)
def test_a_key_whose_ability_is_not_declared_is_refused(ability, key, rollout, changes):
    [fault] = faults("Nothing", rollout=rollout, **changes)
    assert fault.startswith(f"{key} needs a sampler with the ability '{ability}', and mine.py:Nothing")
    assert not faults("Held", rollout=rollout, **changes), "a subclass of vLLM's has them all"


def test_a_run_that_trains_needs_weights_and_with_a_lag_it_needs_them_at_any_time():
    assert [fault.split()[0] for fault in faults("Some", True, {"max_lag": 2})] == ["training", "rollout.max_lag"]
    assert not faults("Same", True, {"max_lag": 2}), "the first base class that says it"
    assert not faults("Some", False, {"max_lag": 2}), "nothing is pushed"
    assert faults("Same", rollout={"sampling": {"forbid": ["<pad>"]}}), "abilities are not added up"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Computed", "the source of mine.py:Computed does not say what it is able to do"),
        ("Old", "mine.py:Old is no subclass of megatron_rl.rollout.backend.Sampler"),
        ("Blocking", "mine.py:Blocking needs `async def sample(self, request)`"),
        ("Empty", "mine.py:Empty needs `async def sample(self, request)`"),
        ("Misspelt", "declares 'quantisation', which is no ability; they are adapters, candidates, forbid"),
        ("function", "mine.py:function is a function, and the key needs a class"),
        ("Absent", "has no function 'Absent'"),
    ],
)
def test_a_class_that_is_no_sampler_or_whose_abilities_cannot_be_read_is_refused(name, told):
    [fault] = faults(name)
    assert fault.startswith("rollout.backend: ") and told in fault


def test_a_vocabulary_with_rows_that_have_no_token_needs_forbid(home):
    model = home / "model"
    model.mkdir()
    shape = {"model_type": "qwen3", "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    shape |= {"head_dim": 4, "intermediate_size": 8, "vocab_size": 3, "max_position_embeddings": 64}
    shape |= {"num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 10000, "tie_word_embeddings": False}
    (model / "config.json").write_text(json.dumps(shape | {"eos_token_id": 0}))
    for num_tokens, is_refused in ((3, False), (2, True)):
        words = {f"word {i}": i for i in range(num_tokens)}
        Tokenizer(models.WordLevel(words, unk_token="word 0")).save(str(model / "tokenizer.json"))
        assert [fault.split(":")[0] for fault in faults("Nothing", rollout={"delimiter": ""})] == ["model.path"] * (
            is_refused
        )
        assert not faults("Some", rollout={"delimiter": ""})


def test_what_the_check_says_of_our_classes_is_true():
    assert Sampler.abilities == frozenset() and VllmSampler.abilities == ABILITIES
