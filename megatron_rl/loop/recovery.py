"""Recovery of a lost policy: the loop restarts the policy, loads the newest state that is left, and continues from
there.

Invariant (tests/unit/loop, tests/e2e): the steps that are done again have the same losses, because a step is a function
of its state, and the answers of an interrupted step are kept.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_rl.loop.checkpoints import WholeState
from megatron_rl.ports import Policy, PolicyLost, Sink


def run_and_recover(
    train_from: Callable[[int], None],
    step: int,
    policy: Policy,
    whole: WholeState,
    sink: Sink,
    rejoin: Callable[[], object] = lambda: None,
) -> None:
    """Call `train_from(step)`. Whenever the policy is lost, restore it, and call again with the step of its state.

    Args:
        rejoin: connects the engines with the restarted policy.

    Raises:
        TooManyRestarts: the policy was lost more often than the run allows.
    """
    lost: PolicyLost | None = None
    while True:
        try:
            if lost is not None:
                whole.lose()
                with sink.phase("recover"):
                    step = whole.recover(policy.restart(lost))
                    rejoin()
                sink.rewind(step)
                sink.warn(f"the trainer was restarted and continues with step {step}, because {lost}")
                lost = None
            return train_from(step)
        except PolicyLost as error:
            lost = error
