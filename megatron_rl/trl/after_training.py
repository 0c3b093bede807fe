"""What scripts ask of a trainer after `train`: metrics in files, the model, a card, an upload.

Invariant (tests/unit/trl): an attribute of transformers' Trainer that is not there says what is in its place.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from transformers import TrainerState
from transformers import trainer_pt_utils as files

from megatron_rl.api import Run
from megatron_rl.observe.records import METRICS
from megatron_rl.trl.models import GivenModel
from megatron_rl.trl.progress import RunProgress

ELSEWHERE = {
    "optimizer": "section policy.optimizer chooses it, and it is in the trainers' processes",
    "lr_scheduler": "section policy.optimizer has the schedule",
    "ref_model": "the reference policy is in the trainers' processes; its KL is the metric kl",
    "model_wrapped": "the trained model is `trainer.model`, after train",
    "vllm_generation": "engines are processes of their own; section rollout has their keys",
    "llm": "engines are processes of their own; section rollout has their keys",
    "get_train_dataloader": "rows are read by the run; `trainer.train_dataset` has them",
    "get_eval_dataloader": "rows are read by the run; `trainer.eval_dataset` has them",
    "predict": "`megatron-rl generate` answers rows with a model's folder, `trainer.run.model`",
    "training_step": "steps are made by the run's processes; algorithm.loss may be a function of your own",
    "compute_loss": "losses are computed by the run's processes; algorithm.loss may be a function of your own",
    "hyperparameter_search": "run one script for each choice, with its own output_dir",
    "environments": "objects are in the engines' processes; reward functions get `environments`, their attributes",
    "callback_handler": "`trainer.add_callback` and `trainer.remove_callback` change the callbacks",
    "create_optimizer": "section policy.optimizer chooses it",
    "generate": "`megatron-rl generate` answers rows with a model's folder, `trainer.run.model`",
}
"""Attributes of trainers that are not here, and what is in their place."""


class Accelerator:
    """What scripts ask of `trainer.accelerator`: the script is one process, and the run's ranks are elsewhere."""

    is_main_process = is_local_main_process = is_last_process = True
    process_index = local_process_index = 0
    num_processes = 1
    state = None
    mixed_precision = "no"

    @property
    def device(self) -> Any:
        import torch

        return torch.device("cpu")

    def print(self, *values: Any, **options: Any) -> None:
        print(*values, **options)

    def wait_for_everyone(self) -> None:
        """There is nobody else."""

    def unwrap_model(self, model: Any, *values: Any, **options: Any) -> Any:
        return model

    def gather(self, value: Any) -> Any:
        return value

    gather_for_metrics = gather

    def end_training(self) -> None:
        """The run has ended already."""

    def free_memory(self, *values: Any) -> tuple[Any, ...]:
        return values

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        yield

    local_main_process_first = main_process_first

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"trainer.accelerator has no {name!r} here: the script is one process, and `policy.parallel` in "
            "`sections` of the configuration has the run's parallelism"
        )


def _http_errors() -> list[type[Exception]]:
    """The errors of the HTTP clients that huggingface_hub uses; a lost connection is none of Python's own."""
    clients = [sys.modules[name] for name in ("httpx", "httpx2") if name in sys.modules]
    return [client.HTTPError for client in clients]


class Finished:
    """The methods of a trainer that read what a run has left."""

    args: Any
    run: Run | None
    accelerator: Accelerator
    kind: ClassVar[str]
    _given_model: GivenModel
    _progress: RunProgress
    is_fsdp_enabled = is_deepspeed_enabled = False
    is_in_train = False

    @property
    def state(self) -> TrainerState:
        return self._progress.state

    log_metrics = files.log_metrics
    save_metrics = files.save_metrics
    save_state = files.save_state
    metrics_format = staticmethod(files.metrics_format)

    def end(self) -> None:
        """Trackers have ended with the run."""

    @property
    def hub_model_id(self) -> str:
        return str(self.args.hub_model_id or self._output.name)

    def is_world_process_zero(self) -> bool:
        return True

    def is_local_process_zero(self) -> bool:
        return True

    @property
    def _output(self) -> Path:
        return Path(self.args.output_dir or "trainer_output").absolute()

    def trained(self) -> Path:
        """The folder of the trained model.

        Raises:
            ValueError: the run has not done all its steps.
        """
        found = None if self.run is None else self.run.model
        if found is None:
            raise ValueError("there is no trained model yet: the run has not done all its steps")
        return found

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
        **others: Any,
    ) -> None:
        """Write README.md into `output_dir`, and into the trained model's folder if it is there.

        Args:
            others: what transformers also puts into a card, such as `language` and `license`.
        """
        own = ["megatron-rl", self.kind, *([tags] if isinstance(tags, str) else tags or [])]
        head = {"library_name": "transformers", "tags": own}
        given = self._given_model.given
        base = given if isinstance(given, str) else str(getattr(given.config, "_name_or_path", "") or "")
        if base:
            head["base_model"] = base
        if dataset_name:
            head["datasets"] = [dataset_name]
        head |= {name: value for name, value in others.items() if value is not None}
        import yaml

        last = {name: value for name, value in self._last_metrics().items() if isinstance(value, int | float)}
        rows = [f"| {name} | {value:.4g} |" for name, value in last.items()]
        text = "\n".join(
            [
                f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}---\n",
                f"# {model_name or self._output.name}\n",
                f"{'A model' if not base else f'The model `{base}`'}, trained by {self.kind.upper()} with megatron_rl "
                f"through the interface of TRL's {type(self).__name__}.\n",
                *(["| metric of the last step | value |", "|---|---|", *rows] if rows else []),
            ]
        )
        self._output.mkdir(parents=True, exist_ok=True)
        places = [self._output, *([self.run.model] if self.run is not None and self.run.model else [])]
        for place in places:
            (place / "README.md").write_text(text + "\n")

    def push_to_hub(
        self,
        commit_message: str = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **card: Any,
    ) -> Any:
        """Upload the trained model's folder to `hub_model_id`, or to a repository with the name of `output_dir`.

        Args:
            card: of `create_model_card`, which is written first.

        Raises:
            ValueError: there is no trained model, or the upload is not possible; the message says what to do.
        """
        folder = self.trained()
        if card:
            self.create_model_card(**card)
        name = self.hub_model_id
        by_hand = f"`hf auth login`, and then `hf upload {name} {folder}`, do the same later"
        try:
            from huggingface_hub import HfApi, get_token
        except ImportError as error:
            raise ValueError(f"nothing was uploaded: huggingface_hub is not installed; {by_hand}") from error
        token = token or self.args.hub_token or get_token()
        if token is None:
            raise ValueError(f"nothing was uploaded to {name}: nobody is logged in; {by_hand}")
        api = HfApi(token=token)
        revision = revision or self.args.hub_revision
        try:
            repository = api.create_repo(name, private=self.args.hub_private_repo, exist_ok=True).repo_id
            if revision:
                api.create_branch(repository, branch=revision, exist_ok=True)
            return api.upload_folder(
                repo_id=repository,
                folder_path=folder,
                commit_message=commit_message,
                revision=revision,
                run_as_future=not blocking,
            )
        except (OSError, ValueError, *_http_errors()) as error:  # type: ignore[misc]  # they are classes
            told = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise ValueError(f"nothing was uploaded to {name}: {told}; {by_hand}") from error

    def _last_metrics(self) -> Mapping[str, Any]:
        """The numbers of the last step, by TRL's names."""
        steps = [record for record in self.state.log_history if record.keys() & {"reward", "grad_norm"}]
        return steps[-1] if steps else {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        what = ELSEWHERE.get(name) or (
            "of transformers' Trainer it has train, evaluate, save_model, model and what docs/coming_from_trl.md "
            f"names; `trainer.run` has the run's folder with {METRICS} and report.html"
        )
        raise AttributeError(f"{type(self).__name__} of megatron_rl has no {name!r}: {what}")
