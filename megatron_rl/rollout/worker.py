"""The code that the rollout adds to vLLM's own processes. vLLM imports it there.

`RolloutWorker` is a `worker_extension_cls`. `die_with_parent` is an entry point `vllm.general_plugins`, which vLLM
calls in every process that it starts. Without it a worker whose owner was killed would stay and keep its GPU memory,
and on CPUs the ranks of an engine that spans nodes would wait for each other for ever.
"""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import signal
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megatron_rl.processes import STACKS
from megatron_rl.rollout.coupling import SeededSampler
from megatron_rl.types import ModelShape

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import LogprobsTensors, ModelRunnerOutput

    from megatron_rl.layout import Recording

PR_SET_PDEATHSIG = 1
"""A constant of linux/prctl.h."""


class RolloutWorker:
    """Methods that every vLLM worker gets. Each is called on all ranks of an engine together."""

    model_runner: Any
    """vLLM's workers have this, and all that follows."""
    weight_transfer_engine: Any
    start_weight_update: Callable[[], None]
    update_weights: Callable[[dict[str, Any]], None]
    finish_weight_update: Callable[[], None]

    def sample_by_seed(self) -> None:
        """Draw the noise of a token from its request's seed and its position, as vLLM does on GPUs (its model runner
        V2). On a CPU vLLM would ask a generator for each request and step: it costs 3 us, its state is where chance
        puts it after an engine's death, and for a prompt that is computed in parts vLLM sets it back, which a CPU's
        generator cannot do."""
        runner = self.model_runner
        seeded = SeededSampler(runner)
        runner.sampler.topk_topp_sampler.forward = seeded.draw
        if (speculation := runner.speculative_config) is None:
            return
        runner.rejection_sampler, execute_model = seeded.verify, runner.execute_model
        if speculation.method == "mtp":  # its head reads the tokens of every step
            runner.model.drafter = runner.drafter.model  # where pushes and `sleep_on_a_cpu` find its parameters
            return

        def prepare_for_drafts_and_execute(step: SchedulerOutput, *others: Any) -> Any:
            # Otherwise vLLM prepares for them in every step.
            runner.speculative_config = speculation if step.scheduled_spec_decode_tokens else None
            return execute_model(step, *others)

        runner.execute_model = prepare_for_drafts_and_execute

    def score_together(self) -> None:
        """Compute the log-probs of the prompts that are scored (`Call.num_scored`) for all requests of a step at once,
        and for their last tokens alone. On a CPU vLLM would compute them for whole prompts, one request after the
        other."""
        runner = self.model_runner

        def of_step(hidden: torch.Tensor, num_scheduled: Mapping[str, int]) -> dict[str, LogprobsTensors]:
            found: dict[str, LogprobsTensors] = {}
            row_of, targets, places = [], [], []
            for name in [name for name in runner.num_prompt_logprobs if name in num_scheduled]:
                request = runner.requests[name]
                ids, start, stop = request.prompt_token_ids, request.num_computed_tokens, num_scheduled[name]
                stop += start
                if request.in_progress_prompt_logprobs_cpu is None:
                    request.in_progress_prompt_logprobs_cpu = LogprobsTensors.empty_cpu(len(ids) - 1, 1)
                place = request.in_progress_prompt_logprobs_cpu
                # The hidden state of each token gives the log-prob of the next one.
                scored = range(
                    max(start, len(ids) - 1 - request.sampling_params.extra_args["num_scored"]),
                    min(stop, len(ids) - 1),
                )
                offset = int(runner.query_start_loc.np[runner.input_batch.req_id_to_index[name]]) - start
                row_of += [offset + i for i in scored]
                targets += ids[scored.start + 1 : scored.stop + 1]
                places.append((place, scored))
                if stop >= len(ids):
                    found[name] = place
            if row_of:
                logits = runner.model.compute_logits(hidden[row_of])
                target_R = torch.tensor(targets)
                logp_R = logits.float().log_softmax(-1).gather(-1, target_R[:, None])[:, 0]
                parts = zip(places, logp_R.split([len(scored) for _, scored in places]), strict=True)
                for (place, scored), logp in parts:
                    place.logprobs[scored.start : scored.stop, 0] = logp
            for name in found:
                del runner.num_prompt_logprobs[name]
                runner.requests[name].in_progress_prompt_logprobs_cpu = None
            return found

        from vllm.v1.outputs import LogprobsTensors

        runner._get_prompt_logprobs_dict = of_step

    def forbid(self, tokens: Sequence[int]) -> None:
        """Give these tokens the logit -inf in everything that this rank computes, so that they are never sampled, and
        log-probs belong to the distribution that is left. Both of vLLM's model runners ask the model for its logits
        outside their graphs; on a GPU this has not been run."""
        model = self.model_runner.model
        compute_logits = model.compute_logits
        columns = torch.tensor(tokens, device=self.model_runner.device)

        def without_forbidden(*arguments: Any, **keywords: Any) -> torch.Tensor | None:
            logits: torch.Tensor | None = compute_logits(*arguments, **keywords)
            # With tensor parallelism some ranks get none.
            return logits if logits is None else logits.index_fill_(-1, columns, -torch.inf)

        model.compute_logits = without_forbidden

    def open_adapter_slots(self) -> None:
        """Make the run's adapter known to vLLM, as zeros; a push brings its weights."""
        self.weight_transfer_engine.open_slots(self.model_runner)

    def pin_adapter(self) -> None:
        """Keep the run's adapter, as the last push has brought it, next to what later pushes bring."""
        self.weight_transfer_engine.pin()

    def serve_adapters_on_a_cpu(self) -> None:
        """Multiply all tokens of a step that have the same adapter with it at once. On a CPU vLLM would copy the
        adapter for each token."""
        wrappers = self.model_runner.lora_manager._adapter_manager.punica_wrapper_mapping
        for punica in wrappers.values():
            punica.add_lora_linear = partial(add_by_adapter, punica)

    def receive_stages_on_a_cpu(self) -> None:
        """Give a later pipeline stage the buffer where its model runner keeps the hidden states of the previous stage.
        vLLM makes it in its trial pass, and a CPU without compilation has none."""
        from vllm.distributed import get_pp_group

        runner = self.model_runner
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )

    def sleep_on_a_cpu(self) -> None:
        """Give this worker the methods `sleep` and `wake_up`, which do nothing in vLLM's worker on a CPU. As on a GPU,
        level 2 gives up what is left of weights and KV cache, and later both have new memory at the same tensors; level
        1 keeps the weights. The cache begins with zeros, as at vLLM's start, because attention on CPUs also reads
        positions that no token has."""
        runner = self.model_runner
        lent: dict[str, list[tuple[torch.UntypedStorage, int]]] = {"weights": [], "kv_cache": []}

        def sleep(level: int) -> None:
            weights = runner.model.parameters() if level == 2 else ()
            for tag, tensors in (("weights", weights), ("kv_cache", runner.kv_caches)):
                for storage in (tensor.untyped_storage() for tensor in tensors):
                    if storage.nbytes():
                        lent[tag].append((storage, storage.nbytes()))
                        storage.resize_(0)

        def wake_up(tags: list[str]) -> None:
            for tag in tags:
                for storage, num_bytes in lent[tag]:
                    storage.resize_(num_bytes)
                    if tag == "kv_cache":
                        storage.fill_(0)  # type: ignore[attr-defined]  # torch's types lack it
                lent[tag] = []

        self.sleep, self.wake_up = sleep, wake_up

    def return_routes(self) -> None:
        """Let the output of every step hold the experts of its tokens. vLLM's model runner V2 does this by itself, but
        it does not run on a CPU. So vLLM's own collector gets the steps of the other model runner here."""
        from vllm.distributed.aux_output_connector.worker import get_aux_output_connector

        runner = self.model_runner
        collector = get_aux_output_connector(runner.model, runner.vllm_config, runner.kv_cache_config)
        execute_model, sample_tokens = runner.execute_model, runner.sample_tokens

        def begin_and_execute(scheduler_output: SchedulerOutput, *others: Any) -> Any:
            collector.begin_step(scheduler_output.aux_output_connector_metadata)
            return execute_model(scheduler_output, *others)

        def sample_and_collect(grammar_output: Any) -> ModelRunnerOutput:
            batch, size = runner.input_batch, runner.input_batch.num_reqs
            step = SimpleNamespace(
                req_ids=list(batch.req_ids),
                query_start_loc_np=runner.query_start_loc.np[: size + 1].copy(),
                num_computed_tokens_np=batch.num_computed_tokens_cpu[:size].copy(),
            )
            pending = collector.prepare_output(step)
            num_rows = np.array([len(drafts) + 1 for drafts in batch.spec_token_ids[:size]])
            output = sample_tokens(grammar_output)
            if pending is not None:  # the first tensor-parallel rank
                num_sampled = np.array([len(tokens) for tokens in output.sampled_token_ids])
                pending.enqueue_cpu_copy(num_sampled, np.where(num_rows > 1, num_rows - num_sampled, 0))
                output.aux_output_connector_output = pending.process_output()
            return output

        runner.execute_model, runner.sample_tokens = begin_and_execute, sample_and_collect

    def record_loading(self, shape: ModelShape) -> Recording | str:
        """What this rank holds of a checkpoint, or the message of an error; see `take_weights`."""
        try:
            recorded: Recording = self.weight_transfer_engine.record(shape)
            return recorded
        except Exception as error:
            return str(error) or repr(error)

    def take_weights(self, version: int, verify: bool) -> dict[str, str] | str:
        """Receive all weights through vLLM's weight transfer engine. Returns digests of what the rank holds, by the
        modules that were verified, or the message of an error.

        The error is returned instead of raised: after an exception vLLM would leave the results of the other ranks
        unread, and would take them for results of the next call.
        """
        try:
            update = {"version": version, "verify": verify}
            if self.weight_transfer_engine.brings_adapters:
                self.weight_transfer_engine.update_weights(update)  # vLLM's session ends with no adapters
            else:
                self.start_weight_update()
                self.update_weights(update)
                self.finish_weight_update()
            digests: dict[str, str] = self.weight_transfer_engine.digests
            return digests
        except Exception as error:
            self._weight_update_active = False  # otherwise vLLM refuses the next update
            return str(error) or repr(error)


def add_by_adapter(
    punica: Any,
    output_TO: torch.Tensor,
    input_TH: torch.Tensor,
    a_of_slots: Sequence[torch.Tensor],
    b_of_slots: Sequence[torch.Tensor],
    scale: float,
    widths: Sequence[int],
    **options: Any,
) -> torch.Tensor:
    """Add `scale B A x` to the outputs of a layer, with the A and B of each token's slot.

    Args:
        punica: vLLM's wrapper, which knows the slot of each token; -1 means none.
        a_of_slots: [slots, 1, rank, H] for each weight that the layer fuses.
        b_of_slots: the same, [slots, 1, outputs, rank].
        widths: the outputs of each weight.
    """
    slot_T = punica.token_lora_indices
    parts = list(zip(torch.split(output_TO, list(widths), -1), a_of_slots, b_of_slots, strict=True))
    for slot in slot_T.unique().tolist():
        if slot < 0:
            continue
        tokens = slice(None) if (slot_T == slot).all() else slot_T == slot
        for part_TO, a, b in parts:
            part_TO[tokens] += scale * (input_TH[tokens] @ a[slot, 0].t()) @ b[slot, 0].t()
    return output_TO


IMPORT_TORCHVISION = {
    "Qwen2_5_VLForConditionalGeneration": "Qwen25VL",
    "Qwen3VLForConditionalGeneration": "Qwen3VL",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3VLMoe",
    "Qwen3_5ForConditionalGeneration": "Qwen35",
    "Qwen3_5MoeForConditionalGeneration": "Qwen35Moe",
    "Qwen3_5ForCausalLM": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM": "Qwen3_5MoeForCausalLM",
}
"""vLLM's classes whose modules import torchvision, and their names in `vision_models`, which vLLM imports when it needs
one. The classes of Qwen3.5's text are its own."""


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends for any reason. This affects vLLM's own processes, not
    the process that uses vLLM. On a CPU it also tells the nodes apart (`tell_nodes_apart`). The process gets our
    classes of models that see images, too."""
    from vllm import ModelRegistry
    from vllm.platforms import current_platform

    for name, ours in IMPORT_TORCHVISION.items():
        ModelRegistry.register_model(name, f"megatron_rl.rollout.vision_models:{ours}")

    if current_platform.is_cpu():
        tell_nodes_apart()
    if multiprocessing.parent_process() is not None and sys.platform == "linux":
        faulthandler.register(STACKS, file=2, all_threads=True)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def tell_nodes_apart() -> None:
    """Let the ranks of an engine exchange messages through shared memory only if they have one in common. On a CPU vLLM
    compares the names of their memory for this, and gives all ranks of an engine the same name, even on different
    nodes."""
    from vllm.distributed.device_communicators import cpu_communicator

    shared = cpu_communicator._CPUSHMDistributed
    if not hasattr(shared, "name_in_a_node"):  # vLLM calls its plugins more than once
        shared.name_in_a_node = staticmethod(shared.make_group_name)
        shared.make_group_name = staticmethod(lambda one: f"{_shared_memory()}-{shared.name_in_a_node(one)}")


def _shared_memory() -> str:
    """What names the machine that runs, and its folder /dev/shm, which containers of a machine have of their own."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return f"{zlib.crc32(boot.encode()):x}-{os.stat('/dev/shm').st_dev:x}"
