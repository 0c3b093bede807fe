"""What is wrong with the teachers of a run, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.config.teachers import TeacherConfig, engine_config
from megatron_rl.models import FAMILIES, read_shape, scan
from megatron_rl.models.composite import check_text_alone
from megatron_rl.models.quantisation import check_unquantised
from megatron_rl.preflight.rows import Tell
from megatron_rl.preflight.tokenizer_files import TokenizerFiles


def faults_of_teachers(config: GrpoRunConfig, tokenizer: TokenizerFiles | None, tell: Tell) -> list[str]:
    """
    Args:
        tokenizer: the policy's; None if it cannot be read here.
        tell: is called with a sentence about a teacher that is not checked.
    """
    faults = []
    for number, teacher in enumerate(config.teachers):
        key = f"teachers.{number}"
        if teacher.path is None:
            continue
        if not teacher.path.exists():
            tell(f"not checked, because the folder {teacher.path} is not there: {key}")
            continue
        try:
            faults += [f"{key}: {fault}" for fault in _faults(config, number, teacher, teacher.path, tokenizer)]
        except (ValueError, OSError) as error:
            faults.append(f"{key}: {str(error).replace('model.path: ', '')}")
    return faults


def _faults(
    config: GrpoRunConfig, number: int, teacher: TeacherConfig, path: Path, tokenizer: TokenizerFiles | None
) -> Iterator[str]:
    shape = read_shape(path)
    if shape.value_head:
        yield f"{path} ends with one number in place of logits, so it gives no log-probs; give a language model"
        return
    longest = config.rollout.max_model_tokens
    if config.algorithm.distillation and config.algorithm.distillation.by == "trainer":
        FAMILIES[shape.family].check_mesh(shape, config.policy.parallel.mesh)
    else:
        own = teacher.parallel
        FAMILIES[shape.family].check_engine(shape, own.tensor, own.expert_parallel, own.pipeline)
        longest = engine_config(config, number).rollout.max_engine_tokens
        check_text_alone(path)
    if longest > shape.max_positions:
        yield (
            f"{path} has {shape.max_positions} positions, and with its prompt and the token that an engine adds, an "
            f"answer may have {longest}; lower rollout.max_response_tokens, or choose another teacher"
        )
    check_unquantised(path)
    scan(path, shape)
    theirs = TokenizerFiles(path).core
    if tokenizer is None or tokenizer.core is None or theirs is None:
        return
    ours = sorted(tokenizer.core.get_vocab().items(), key=lambda pair: pair[1])
    differing = next(((token, i) for token, i in ours if theirs.id_to_token(i) != token), None)
    if differing is not None:
        token, i = differing
        yield (
            f"the tokenizer of {path} is not that of {config.model.path}: token {i} is {token!r} for the policy, and "
            f"{theirs.id_to_token(i)!r} for the teacher; choose a teacher with the policy's tokens"
        )
