"""How many answers an optimizer step has, and how many optimizer steps a run.

Invariant (tests/unit/trl, tests/doors): both are TRL's, or an argument is refused by its name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megatron_rl.trl.notices import tell


@dataclass(frozen=True, slots=True)
class StepSizes:
    """TRL counts optimizer steps, and we count batches of answers.

    Example: per_device_train_batch_size 8, gradient_accumulation_steps 4, steps_per_generation 8 and 16 generations on
    one replica are batches of 64 answers to 4 prompts, in two mini-batches of 32. With num_iterations 2 each batch is
    trained on in four optimizer steps.
    """

    prompts: int
    minibatches: int = 1
    epochs: int = 1

    @property
    def updates(self) -> int:
        """The optimizer steps on a batch of answers."""
        return self.minibatches * self.epochs

    @classmethod
    def of(cls, args: Any, num_replicas: int = 1) -> StepSizes:
        """
        Raises:
            ValueError: the sizes do not divide each other.
        """
        size, accumulated = args.per_device_train_batch_size * num_replicas, args.gradient_accumulation_steps
        group = args.num_generations
        if args.num_iterations != int(args.num_iterations) or args.num_iterations < 1:
            raise ValueError(
                f"GRPOConfig: num_iterations={args.num_iterations} must be a whole number of at least 1, the passes "
                "over a batch of answers"
            )
        if args.generation_batch_size is not None and args.steps_per_generation is not None:
            raise ValueError("GRPOConfig: give generation_batch_size or steps_per_generation, not both")
        samples = args.generation_batch_size or size * (args.steps_per_generation or accumulated)
        passes, rest = divmod(samples, size)
        if rest:
            raise ValueError(
                f"GRPOConfig: generation_batch_size {samples} is not a multiple of {size}, the batch of a pass"
            )
        if passes % accumulated and accumulated % passes:
            raise ValueError(
                f"GRPOConfig: of {passes} passes over a batch of answers and {accumulated} passes of an optimizer step "
                f"one must be a multiple of the other; change gradient_accumulation_steps"
            )
        batches = max(1, accumulated // passes)
        if batches > 1 and args.num_iterations > 1:
            raise ValueError(
                f"GRPOConfig: num_iterations={args.num_iterations} repeats a batch of answers within an optimizer step,"
                f" because {accumulated} accumulated passes are more than the {passes} of a batch; set "
                f"gradient_accumulation_steps to {passes}, or num_iterations to 1"
            )
        if samples * batches < group and args.generation_batch_size is None and args.steps_per_generation is None:
            tell(
                f"{samples * batches} answers are less than a group of {group}, which TRL refuses; the run takes one "
                "group for each optimizer step, as Unsloth does"
            )
            return cls(1, epochs=args.num_iterations)
        prompts, rest = divmod(samples * batches, group)
        if rest:
            raise ValueError(
                f"GRPOConfig: {samples * batches} answers are no whole number of groups of {group}; "
                f"change per_device_train_batch_size or num_generations"
            )
        minibatches = max(1, passes // accumulated)
        if prompts % minibatches:
            fitting = [one for one in range(accumulated, passes + 1) if passes % one == 0]
            fits = next(one for one in fitting if prompts % (passes // one) == 0)  # at the latest `passes`
            raise ValueError(
                f"GRPOConfig: an optimizer step has {size * accumulated} answers, which is no whole number of groups "
                f"of {group}, and groups are not divided; set gradient_accumulation_steps to {fits}"
            )
        return cls(prompts, minibatches, args.num_iterations)

    @staticmethod
    def rows_of_batch(args: Any, num_replicas: int = 1) -> int:
        """The number of rows of a batch of answers. TRL's sampler takes whole batches in each epoch."""
        passes = args.steps_per_generation or args.gradient_accumulation_steps
        samples = args.generation_batch_size or args.per_device_train_batch_size * num_replicas * passes
        return max(1, int(samples) // int(args.num_generations))

    def optimizer_steps(self, args: Any, num_rows: int, num_replicas: int = 1) -> int:
        """The number of optimizer steps, as TRL's sampler and transformers count them: the rows of an epoch that fill
        no batch of answers are left out, and the passes over the others are optimizer steps; the last one may
        be incomplete.

        Raises:
            ValueError: there are not enough rows, or the last batch of answers would be trained on in part.
        """
        if args.max_steps > 0:
            total = int(args.max_steps)
        else:
            size, accumulated = args.per_device_train_batch_size * num_replicas, args.gradient_accumulation_steps
            samples = args.generation_batch_size or size * (args.steps_per_generation or accumulated)
            batch = self.rows_of_batch(args, num_replicas)
            passes = num_rows // batch * max(1, samples // size) * args.num_iterations
            if not passes:
                raise ValueError(
                    f"GRPOConfig: train_dataset has {num_rows} rows, less than the {batch} of a batch, so that TRL "
                    "would train nothing; give max_steps, or lower the batch"
                )
            total = math.ceil(args.num_train_epochs * math.ceil(passes / accumulated))
        if total % self.updates:
            whole = [number * self.updates for number in (total // self.updates, total // self.updates + 1) if number]
            raise ValueError(
                f"GRPOConfig: {total} optimizer steps end within a batch of answers, which has {self.updates}; set "
                f"max_steps to {' or '.join(map(str, whole))}"
            )
        return total
