"""The policy's trainer. Its public methods are collectives, as in trainer.py, which describes what both classes share.

Invariants (tests/ranks): log-probs, advantages and gradients do not depend on the layout or on the number of
micro-batches.

Shape letters: T packed tokens of a micro-batch, U untrained tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.actor import fp8_weights, platform
from megatron_rl.actor.agreement import sum_over_data_ranks
from megatron_rl.actor.credit import require_finite_rewards
from megatron_rl.actor.mamba import write_negated_exp
from megatron_rl.actor.packing import at_ends, by_sample
from megatron_rl.actor.spec import ActorSpec
from megatron_rl.actor.teacher import FrozenTeacher
from megatron_rl.actor.trainer import MegatronTrainer
from megatron_rl.actor.untrained_tokens import row_norms, untrained_rows
from megatron_rl.algorithms.columns import FirstPass
from megatron_rl.algorithms.objective import Metric, mismatch, over_judged
from megatron_rl.models import FAMILIES, Box
from megatron_rl.models.adapters import B, is_adapter
from megatron_rl.models.multi_token import is_of_head
from megatron_rl.types import Metrics, ModelShape, Share


class MegatronActor(MegatronTrainer):
    def __init__(self, spec: ActorSpec, *, rank: int, world_size: int, store: dist.Store) -> None:
        """See `MegatronTrainer`."""
        super().__init__(spec, rank=rank, world_size=world_size, store=store)
        self._reference: dict[str, Tensor] = {}
        """The reference policy's weights, on the CPU; empty if the objective needs no reference."""
        self._sent: dict[str, Tensor] = {}
        """The copies of `sent`."""
        self._teacher: FrozenTeacher | None = None
        self._untrained: list[int] | None = None
        """The tokens that `find_untrained` found; None until the first step."""

    def score(self, share: Share) -> dict[int, float]:
        """The log-prob of all actions of each sample together, in nats, under the present weights at temperature 1, for
        every sampling temperature. With a value head it is the value at the sample's last token.

        Args:
            share: see `take`, which must follow before the next update. It has one mini-batch.

        Returns:
            The numbers of this replica's samples, by their indices in the batch. Only the rank that reports the
            replica's metrics has them; on others it is empty.

        Raises:
            ValueError: see `take`.
        """
        self.take(share)
        passes = self._forward(list(self.rows), temperature=1.0)
        found: dict[int, float] = {}
        for batch, one in zip(self.rows, passes, strict=True) if self.reports_metrics else ():
            if self.spec.shape.value_head:
                found |= at_ends(batch, one.logp_T)
                continue
            found |= {index: float(logp.sum(dtype=np.float64)) for index, logp in by_sample(batch, one.logp_T).items()}
        return found

    def begin(self, share: Share, coefficients: Mapping[str, float]) -> Metrics:
        """Take the samples of a training step that belong to this data-parallel rank, and compute the log-probs that
        the objective needs of the policy and its reference at the step's start.

        These are the passes over all samples in `Needs.passes`.

        Args:
            share: see `take`. It has the columns that other models compute, such as a critic's values.
            coefficients: see `update`.

        Returns:
            The mismatch of trainer and engine over all ranks' action tokens (`objective.mismatch`), if logp_old is
            computed here; otherwise the first update reports it. `kl`, the mean KL to the reference policy, if it is
            in the reward.

        Raises:
            ValueError: see `take`, or a log-prob or value that advantages are computed from is not finite.
        """
        self.take(share)
        self._at_start = []
        needs, metrics = self.spec.objective.needs, self._describe_untrained()
        for one in needs.passes(len(share.minibatches) * share.epochs):
            if one.leaves == "logp_ref":
                with self._as_reference():
                    self._keep("logp_ref", self._forward(list(self.rows)))
            elif one.leaves == "support":
                self._keep_numbers("support", self.schedule.top(list(self.rows), self.spec.top_k))
            elif one.model == "teacher":
                self._ask_teacher()
            elif one.leaves == "logp_old":
                results = self._forward(list(self.rows))
                remaining = iter(results)
                self._at_start = [list(islice(remaining, len(rows))) for rows in self.rows.minibatches]
                self._keep("logp_old", results)
                self._keep_numbers("energy", [one.energy_T for one in results if one.energy_T is not None])
                metrics |= self._describe_mismatch()
        if needs.credit:
            metrics |= self._give_credit(coefficients)
        return metrics

    @torch.no_grad()
    def sent(self, shape: ModelShape) -> Mapping[str, Tensor]:
        """What a push sends, by the names of the shards: the live parameters. Of adapters it is a copy with the present
        values, always in the same memory, with B times the scale.

        Args:
            shape: what the engines get: adapters, or a model without them. A multi-token head that drafts is a part.
        """
        if (adapters := shape.adapters) is None:
            live = self.parameters() if shape.multi_token else self._policy_parameters()
            return {name: own for name, own in live.items() if not is_adapter(name)}
        for name, parameter in self.parameters().items():
            if is_adapter(name):
                copied = self._sent.setdefault(name, torch.empty_like(parameter))
                torch.mul(parameter, adapters.scale if f".{B}" in name else 1.0, out=copied)
        return self._sent

    def made(self, shape: ModelShape) -> Mapping[str, Callable[[Box, Tensor], None]]:
        """The weights that a push does not send as they are, and what writes a rectangle of them with the present
        values: weights with adapters, weights in fp8 blocks, and rates of Mamba-2. A push of adapters sends none."""
        family = FAMILIES[shape.family]
        rates = {name: own for name, own in self.parameters().items() if family.has_negated_exp(name)}
        made: dict[str, Callable[[Box, Tensor], None]]
        made = {name: partial(write_negated_exp, own) for name, own in rates.items()}
        if self.adapting is not None:
            made |= fp8_weights.writers(self.parameters()) | self.adapting.merges
        return made

    def _policy_parameters(self) -> dict[str, Tensor]:
        """The live parameters without a multi-token head, which no log-prob depends on."""
        return {name: parameter for name, parameter in self.parameters().items() if not is_of_head(name)}

    def keep_reference(self) -> None:
        """Keep a copy of the present weights as the reference policy's, if the objective needs a reference. With
        adapters the reference is the base model, and nothing is copied."""
        if "logp_ref" in self.spec.objective.needs and self.spec.shape.adapters is None:
            live = self._policy_parameters()
            self._reference = {name: parameter.detach().cpu().clone() for name, parameter in live.items()}

    @contextmanager
    def _as_reference(self) -> Iterator[None]:
        """Inside the block the model has the reference policy's weights; afterwards it has its own again, bit for bit.
        The tensors are exchanged one at a time, so that the device holds at most one of them twice. With adapters they
        are off."""
        if self.adapting is not None:
            with self.adapting.off():
                yield
            return

        def exchange() -> None:
            with torch.no_grad():
                for name, parameter in self._policy_parameters().items():
                    mine = parameter.detach().cpu().clone()
                    parameter.copy_(self._reference[name])
                    self._reference[name] = mine

        exchange()
        try:
            yield
        finally:
            exchange()

    def load_teacher(self) -> None:
        """Load the frozen teacher, if the objective needs one on these ranks."""
        if (model := self.spec.teacher) is not None:
            self._teacher = FrozenTeacher(self, model)

    def _ask_teacher(self) -> None:
        """Give the rows the teacher's log-probs of the sampled tokens, of its own most probable tokens, or of the
        support that the policy has left."""
        teacher, rows = self._teacher, list(self.rows)
        assert teacher is not None, "`load_teacher` comes first"
        if self.spec.objective.needs.teacher == "teacher":
            self._keep_numbers("support", teacher.top(rows, self.spec.top_k))
        self._keep_numbers("logp_teacher", teacher.log_probs(list(self.rows)))

    def _keep(self, column: str, passes: Sequence[FirstPass]) -> None:
        """Store the log-probs of the passes as a column of the rows."""
        self._keep_numbers(column, [one.logp_T for one in passes])

    def _keep_numbers(self, column: str, numbers: Sequence[Tensor]) -> None:
        """Store what the last pipeline stage has of each row; the others have nothing."""
        if numbers:
            self.rows.set(column, numbers)

    def _give_credit(self, coefficients: Mapping[str, float]) -> Metrics:
        """Give the step's tokens the advantages that the objective computes."""
        objective, reports = self.spec.objective, []
        with self.agreement.on_errors():
            if self.is_last_stage:
                require_finite_rewards(self.rows)
        if self.is_last_stage:
            has_kl = "logp_ref" in objective.needs.credit
            columns, kl = objective.credit(
                self.rows.columns, coefficients["kl"] if has_kl else 0.0, sum_over_data_ranks
            )
            self.rows.set_columns(columns)
            if has_kl and self.reports_metrics:
                reports.append({"kl": Metric(kl / self.rows.num_tokens, "sum")})
        return self.agreement.reduce(reports)

    def find_untrained(self) -> list[int]:
        """The tokens whose embeddings no training had moved at the first call, in ascending order
        (untrained_tokens.py). Collective: every rank must call it."""
        if self._untrained is not None:
            return self._untrained
        own = np.zeros(0, np.float32)
        tensor, stage, data = self.mesh.coordinates(self.rank)
        if stage == data == 0 and self.mesh.context_rank(self.rank) == 0:
            [weight_VH] = [p for name, p in self.parameters().items() if name.endswith("word_embeddings.weight")]
            first = tensor * len(weight_VH)
            num_real = max(0, min(self.spec.shape.vocab_size - first, len(weight_VH)))
            own = row_norms(weight_VH[:num_real])
        # The parts of the tensor ranks are in the order of the ranks.
        self._untrained = untrained_rows(np.concatenate(self.agreement.gather(own)))
        return self._untrained

    def _describe_untrained(self) -> Metrics:
        """The share of the step's actions whose tokens are untrained, if the model has such tokens."""
        # With adapters no embedding has a gradient.
        if self.spec.shape.adapters is not None or not (untrained := self.find_untrained()):
            return {}
        untrained_U = torch.tensor(untrained, device=platform.device())
        reports = []
        for batch in self.rows if self.reports_metrics else []:
            found_T = torch.isin(batch.target_T, untrained_U) & batch.columns.action_mask_T
            reports.append({"tokens/untrained": Metric(found_T.sum() / self.rows.num_tokens, "sum")})
        return self.agreement.reduce(reports)

    def _describe_mismatch(self) -> Metrics:
        columns = [batch.columns for batch in self.rows if batch.names] if self.reports_metrics else []
        reports = []
        for c in columns:
            assert c.logp_old_T is not None, "`begin` has just computed them"
            reports.append(mismatch(c.logp_old_T, c, self.rows.num_tokens))
        return over_judged(self.agreement.reduce(reports))
