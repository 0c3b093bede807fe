"""Packs samples into micro-batches: the sequences follow each other in one row, padded only to the alignment. A prompt
that several samples of a row have in common is in the row once, if the layers can do this (`SharedPrompts`).

Invariants (tests/unit/actor): entry t of every column belongs to the token that position t predicts, which is the next
token of the same sample; a sample's last position and the padding predict nothing and are not actions; each sample's
columns do not depend on the packing.

Shape letters: T packed tokens, S samples of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from megatron_rl.actor.row_images import RowImages, row_images
from megatron_rl.algorithms.columns import ComparedColumns, GroupedColumns, PackedColumns, TaughtColumns
from megatron_rl.algorithms.process_rewards import at_actions
from megatron_rl.types import ModelShape, Picture, Share, Tokens, Vision


@dataclass(frozen=True, slots=True)
class Routes:
    """The experts that the engine chose for the tokens of a row, in all L layers K each."""

    expert_TLK: Tensor
    """uint8; int16 if the engine told 16 bits (`Tokens.routes`)"""
    is_known_T: Tensor
    """bool: whether the engine told its choice for the token. Where it is False, `expert_TLK` means nothing."""


@dataclass(frozen=True, slots=True)
class RoutedRow:
    """What routers know of a row: how often each token counts (`multiplicity`), and the choices that they replay."""

    multiplicity_T: Tensor
    routes: Routes | None


@dataclass(frozen=True, slots=True)
class SharedPrompts:
    """The prompts that sequences of a row have in common. The first sequence with a prompt holds all of it. The others
    begin with its last token, which predicts their first action, and see the tokens before it in that sequence.

    Example: the prompt 5 6 7 has the answers 8 9 and 4. The row is 5 6 7 8 9 7 4, with sequences of 5 and 2 tokens. The
    second one has start 0 and length 2: it sees 5 6, and its own 7 is at position 2 of the sample.
    """

    start_S: Tensor
    """int64, on the CPU: the packed position of the first token that each sequence shares."""
    length_S: Tensor
    """int64, on the CPU: how many tokens it shares; 0 if it holds all its tokens itself."""


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One packed row. A micro-batch without samples holds one dummy sequence without actions.

    Entry t of a column describes the token that position t predicts. Example: the prompt 5 6, and the actions 31 1
    after it: ids 5 6 31 1, targets 6 31 1 0, and the mask of actions 0 1 1 0.
    """

    names: tuple[str, ...]
    """The names of the samples; `columns.sample_T` indexes them."""
    lengths_S: Tensor
    """int64 [S], on the CPU: the number of tokens of each sequence, padding included. The sum is T."""
    ids_T: Tensor
    target_T: Tensor
    """The next token of the same sample; 0 where there is none."""
    padding_T: Tensor
    """bool: True for the padding of each sequence, and for the whole dummy sequence."""
    columns: PackedColumns
    routes: Routes | None = None
    """None if the engine told no choice for any token."""
    shared: SharedPrompts | None = None
    """None if every sequence holds all its tokens."""
    images: RowImages | None = None
    """None if no sequence has an image."""

    def to(self, device: torch.device) -> Microbatch:
        columns = {f.name: getattr(self.columns, f.name) for f in fields(self.columns)}
        moved = {name: x_T.to(device) for name, x_T in columns.items() if x_T is not None}
        return replace(
            self,
            ids_T=self.ids_T.to(device),
            target_T=self.target_T.to(device),
            padding_T=self.padding_T.to(device),
            columns=replace(self.columns, **moved),
            routes=self.routes and Routes(self.routes.expert_TLK.to(device), self.routes.is_known_T.to(device)),
        )


def multiplicity(batch: Microbatch) -> Tensor:
    """int64 [T]: how many tokens of samples each token of the row is: the number of the samples that have it in common
    in a shared prompt, 0 for padding, and 1 for all others."""
    count_T = (~batch.padding_T).long()
    if batch.shared is not None:
        for start, length in zip(batch.shared.start_S.tolist(), batch.shared.length_S.tolist(), strict=True):
            count_T[start : start + length] += 1
    return count_T


SHORTEST_SHARED = 16
"""Prompts of fewer tokens are not shared: there is little to win, and each shared prompt has its own kernel calls."""


def pack(share: Share, share_prompts: bool = False, vision: Vision | None = None) -> list[list[Microbatch]]:
    """Pack the samples of a share, whose tokens are at hand, as `[mini-batch][micro-batch]`.

    Args:
        share_prompts: whether a prompt that several samples of a row have in common is in the row once.
        vision: how the model sees the samples' images.

    Raises:
        ValueError: a sample is empty, its arrays differ in length, or its tokens are not the ones of its images; the
            error names the sample.
    """
    rows = share.minibatches
    return [[_pack_row(share, samples, share_prompts, vision) for samples in minibatch] for minibatch in rows]


def _pack_row(share: Share, samples: Sequence[int], share_prompts: bool, vision: Vision | None) -> Microbatch:
    names, tokens = [share.names[i] for i in samples], [share.tokens[i] for i in samples]
    lengths = [_length(name, of_sample) for name, of_sample in zip(names, tokens, strict=True)]
    holders = _holders(tokens) if share_prompts else [(i, 0) for i in range(len(tokens))]
    own = [length - skipped for length, (_, skipped) in zip(lengths, holders, strict=True)]
    padded = [-(-length // share.alignment) * share.alignment for length in own] or [share.alignment]
    starts, num_tokens = [*np.cumsum([0, *padded[:-1]])], sum(padded)
    ids_T, target_T = np.zeros(num_tokens, np.int64), np.zeros(num_tokens, np.int64)
    action_mask_T, logp_rollout_T = np.zeros(num_tokens, bool), np.zeros(num_tokens, np.float32)
    token_T, lag_T = np.zeros(num_tokens, np.int64), np.zeros(num_tokens, np.int32)
    padding_T, reward_T = np.ones(num_tokens, bool), np.zeros(num_tokens)
    logp_teacher_T = np.full(num_tokens, np.nan, np.float32)
    entry_T = np.full(num_tokens, 0 if share.sums is None else share.sums.size, np.int64)
    for i, (sample, mine, start, (_, skipped)) in enumerate(zip(samples, tokens, starts, holders, strict=False)):
        here, predicting = slice(start, start + own[i]), slice(start, start + own[i] - 1)
        ids_T[here] = mine.ids[skipped:]
        padding_T[here] = False
        action_T = mine.action_mask[skipped + 1 :]
        target_T[predicting] = mine.ids[skipped + 1 :]
        action_mask_T[predicting] = action_T
        logp_rollout_T[predicting] = mine.logp_rollout[skipped + 1 :]
        if mine.logp_teacher is not None:
            logp_teacher_T[predicting] = mine.logp_teacher[skipped + 1 :]
        reward_T[predicting] = _rewards(share, sample, mine)[skipped + 1 :]
        if share.sums is not None:
            mine_T = share.sums.first[sample] + action_T.cumsum() - 1
            entry_T[predicting] = np.where(action_T & (mine_T < share.sums.stop[sample]), mine_T, share.sums.size)
        lag_T[predicting] = np.where(action_T, share.version - mine.version[skipped + 1 :], 0)
        token_T[start : start + padded[i]] = (int(share.index[sample]) << 32) + skipped + np.arange(1, padded[i] + 1)

    def spread(values: np.ndarray, dtype: type = np.float32) -> Tensor:
        of_samples = values[list(samples)] if samples else np.zeros(1)
        return torch.from_numpy(np.repeat(of_samples.astype(dtype), padded))

    columns = PackedColumns(
        action_mask_T=torch.from_numpy(action_mask_T),
        sample_T=torch.from_numpy(np.repeat(np.arange(len(padded)), padded)),
        token_T=torch.from_numpy(token_T),
        weight_T=spread(share.weights),
        advantage_T=spread(share.advantages),
        logp_rollout_T=torch.from_numpy(logp_rollout_T),
        lag_T=torch.from_numpy(lag_T),
        reward_T=None if share.token_rewards is None else torch.from_numpy(reward_T),
    )
    packed = {f.name: getattr(columns, f.name) for f in fields(columns)}
    if share.teacher_weights is not None:
        weight_T, logp_T = spread(share.teacher_weights), torch.from_numpy(logp_teacher_T)
        columns = TaughtColumns(**packed, teacher_weight_T=weight_T, logp_teacher_T=logp_T)
    if share.sums is not None:
        columns = GroupedColumns(**packed, entry_T=torch.from_numpy(entry_T), size=torch.tensor(share.sums.size))
    if share.logp_reference is not None:
        columns = ComparedColumns(**packed, logp_reference_T=spread(share.logp_reference, np.float64))
    return Microbatch(
        names=tuple(names),
        lengths_S=torch.tensor(padded),
        ids_T=torch.from_numpy(ids_T),
        target_T=torch.from_numpy(target_T),
        padding_T=torch.from_numpy(padding_T),
        columns=columns,
        routes=_pack_routes(tokens, padded, [skipped for _, skipped in holders]),
        shared=_shared(starts, holders),
        images=row_images(names, tokens, padded, [skipped for _, skipped in holders], vision),
    )


def _holders(tokens: Sequence[Tokens]) -> list[tuple[int, int]]:
    """Find the sample of a row that holds the prompt of each sample: the first one with the same prompt, and the same
    choices of experts for its tokens.

    Returns:
        for each sample the index of that sample, and the number of tokens of the prompt that it leaves out: 0 for the
        first sample, and all but the last token for the others.
    """
    first: dict[tuple[bytes, bytes, tuple[Picture, ...]], int] = {}
    holders = []
    for i, mine in enumerate(tokens):
        num_before, holder = int(mine.action_mask.argmax()), i
        if num_before >= SHORTEST_SHARED:
            routes = b"" if mine.routes is None else mine.routes[: num_before - 1].tobytes()
            holder = first.setdefault((mine.ids[:num_before].tobytes(), routes, mine.pictures), i)
        holders.append((holder, 0 if holder == i else num_before - 1))
    return holders


def _shared(starts: Sequence[int], holders: Sequence[tuple[int, int]]) -> SharedPrompts | None:
    if not any(skipped for _, skipped in holders):
        return None
    return SharedPrompts(
        torch.tensor([starts[holder] for holder, _ in holders]), torch.tensor([skipped for _, skipped in holders])
    )


def targets_after_next(batch: Microbatch) -> tuple[Tensor, Tensor]:
    """The token after the next one at each position of a row, and whether it is a target of a multi-token head: it and
    the token before it are actions.

    The next entry of a column belongs to the same sample wherever the entry itself is an action, so a shift of the row
    by one crosses no boundary. Example: the prompt 5 6, and the actions 31 1 7 after it. The targets are 6 31 1 7 0
    with the mask of actions 0 1 1 1 0, and the head's are 31 1 7 0 6 with the mask 0 1 1 0 0.
    """
    mask_T, after_T = batch.columns.action_mask_T, torch.roll(batch.target_T, -1)
    return after_T, mask_T & torch.roll(mask_T, -1)


def by_sample(batch: Microbatch, x_T: Tensor) -> dict[int, np.ndarray]:
    """A column as numbers at the tokens of each sample, each [L], or [L, K], in float32, or in the column's float64, by
    the sample's index in the step. A sample's first token, which nothing predicts, has 0."""
    values_T = (x_T.detach() if x_T.dtype == torch.float64 else x_T.detach().float()).cpu().numpy()
    return {
        index: np.concatenate([np.zeros_like(values_T[:1]), values_T[shared], values_T[own]])
        for index, shared, own in _predicting(batch)
    }


def at_ends(batch: Microbatch, x_T: Tensor) -> dict[int, float]:
    """The entry of a column at the last token of each sample, by the sample's index in the step."""
    values_T = x_T.detach().double().cpu()
    return {index: float(values_T[own.stop]) for index, _, own in _predicting(batch)}


def column_of(batch: Microbatch, numbers: Mapping[int, np.ndarray]) -> Tensor:
    """The inverse of `by_sample`: a column with these numbers, on the device of the micro-batch; 0 at other tokens. A
    shared prompt has the numbers of the sample that holds it."""
    like = next(iter(numbers.values()), np.zeros(0, np.float32))
    column_T = np.zeros((len(batch.ids_T), *like.shape[1:]), like.dtype)
    for index, shared, own in _predicting(batch):
        column_T[own] = numbers[index][1 + shared.stop - shared.start :]
    return torch.from_numpy(column_T).to(batch.ids_T.device)


def _predicting(batch: Microbatch) -> Iterator[tuple[int, slice, slice]]:
    """The index of each sample in the step, and the positions that predict its tokens: in the sequence that holds its
    prompt, and in its own."""
    is_token_T, token_T = (~batch.padding_T).cpu(), batch.columns.token_T.cpu()
    start = 0
    for i, room in enumerate(batch.lengths_S.tolist() if batch.names else ()):
        length = int(is_token_T[start : start + room].sum())
        first, skipped = (
            (0, 0) if batch.shared is None else (int(batch.shared.start_S[i]), int(batch.shared.length_S[i]))
        )
        yield int(token_T[start]) >> 32, slice(first, first + skipped), slice(start, start + length - 1)
        start += room


def _rewards(share: Share, sample: int, tokens: Tokens) -> np.ndarray:
    """The rewards at each token of a sample; 0 if there are none."""
    rewards = share.token_rewards
    if rewards is None:
        return np.zeros(len(tokens.ids))
    own = rewards.sample == sample
    try:
        return at_actions(rewards.position[own], rewards.value[own], tokens.action_mask)
    except ValueError as error:
        raise ValueError(f"sample {share.names[sample]}: {error}") from None


def _pack_routes(tokens: Sequence[Tokens], padded: Sequence[int], skipped: Sequence[int]) -> Routes | None:
    """
    Args:
        padded: the numbers of tokens of the samples in the row, padding included.
        skipped: how many of its first tokens each sample leaves out.
    """
    given = next((mine.routes for mine in tokens if mine.routes is not None), None)
    if given is None:
        return None
    # torch computes with few of its unsigned dtypes, and no model has 2^15 experts.
    dtype = np.uint8 if given.dtype == np.uint8 else np.int16
    expert_TLK, is_known_T = np.zeros((sum(padded), *given.shape[1:]), dtype), np.zeros(sum(padded), bool)
    start = 0
    for mine, room, left_out in zip(tokens, padded, skipped, strict=True):
        if mine.routes is not None:
            here = slice(start, start + max(0, len(mine.routes) - left_out))
            expert_TLK[here], is_known_T[here] = mine.routes[left_out:], True
        start += room
    return Routes(torch.from_numpy(expert_TLK), torch.from_numpy(is_known_T))


def _length(name: str, tokens: Tokens) -> int:
    lengths = [len(x) for x in (tokens.ids, tokens.action_mask, tokens.logp_rollout, tokens.version)]
    if len(set(lengths)) != 1 or not lengths[0]:
        raise ValueError(
            f"sample {name}: ids, action_mask, logp_rollout and version have {', '.join(map(str, lengths))} "
            "entries; the four numbers must be equal and at least 1"
        )
    if tokens.routes is not None and len(tokens.routes) > lengths[0]:
        raise ValueError(f"sample {name}: routes has {len(tokens.routes)} entries, but there are {lengths[0]} tokens")
    return lengths[0]


def check_alignment(alignment: int, needed: int) -> None:
    """
    Args:
        alignment: the share's.
        needed: `policy.parallel.alignment`.

    Raises:
        ValueError: the sequences cannot be split over the ranks.
    """
    if alignment % needed:
        raise ValueError(
            f"alignment {alignment} is not a multiple of {needed}, which policy.parallel requires: it splits every "
            f"sequence over the tensor-parallel and context-parallel ranks; plan the micro-batches with alignment "
            f"{needed}"
        )


def check_microbatch(batch: Microbatch, shape: ModelShape) -> None:
    """
    Raises:
        ValueError: a token is outside the vocabulary, or the engine's choices of experts do not fit this model. The
            message names the sample.
    """
    wrong = ((batch.ids_T < 0) | (batch.ids_T >= shape.vocab_size)).nonzero()
    if len(wrong):
        raise ValueError(
            f"sample {_name_at(batch, wrong[0])} has the token id {int(batch.ids_T[wrong[0]])}, but the vocabulary has "
            f"{shape.vocab_size} tokens; do engine and trainer use the same tokenizer?"
        )
    if batch.routes is None or (mixture := shape.mixture) is None:
        return
    expected, found = (shape.num_layers, mixture.num_active), tuple(batch.routes.expert_TLK.shape[1:])
    if found != expected:
        raise ValueError(
            f"sample {batch.names[0]}: the engine's choices of experts have {found[0]} layers with {found[1]} experts, "
            f"but the model has {expected[0]} with {expected[1]}; do engine and trainer use the same model?"
        )
    wrong = (batch.routes.expert_TLK >= mixture.num_experts).flatten(1).any(1).nonzero()
    if len(wrong):
        raise ValueError(
            f"sample {_name_at(batch, wrong[0])}: the engine chose the expert "
            f"{int(batch.routes.expert_TLK[wrong[0]].max())}, but the model has {mixture.num_experts}; do engine "
            f"and trainer use the same model?"
        )


def _name_at(batch: Microbatch, position: Tensor) -> str:
    """The name of the sample at a position of the row."""
    return batch.names[int(batch.columns.sample_T[int(position)])]
