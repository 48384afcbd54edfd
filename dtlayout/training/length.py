"""Length of a run that is asked for in epochs: optimizer steps, once the samples are known."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dtlayout.base.checkpoint_names import read_step
from dtlayout.base.errors import CheckpointError, InvalidConfig
from dtlayout.base.formatting import plural
from dtlayout.base.refusals import refuse
from dtlayout.checkpoint.sharded import read_origin
from dtlayout.config.checking import check_warmup
from dtlayout.config.config import Config
from dtlayout.data.samples import Samples, Seen
from dtlayout.spec.batch import RampStage, count_steps_until
from dtlayout.training.position import find_seen


def count_steps(epochs: float, num_samples: int, global_batch: int, seen: Seen, ramp: Sequence[RampStage] = ()) -> int:
    """Steps of a run of so many epochs, those before `seen` included; the last step may begin another epoch.

    >>> count_steps(2, 9, 4, Seen())
    5
    >>> count_steps(2, 9, 2, Seen(step=3, samples=12, tokens=0))
    6
    """
    return seen.step + count_steps_until(epochs * num_samples, seen.samples, global_batch, ramp)


def decide_steps(config: Config, samples: Samples, newest: Path | None) -> Config:
    """The config with a number of steps in the place of `train.epochs`; unchanged where it names one.

    Steps before `newest`, the checkpoint from which the run goes on, count with the batches that they had.
    InvalidConfig if the warm-up is longer than the run, CheckpointError if the run has that length already.
    """
    epochs, batch, ramp = config.train.epochs, config.batch, config.train.batch_ramp
    if not epochs:
        return config
    seen = Seen()
    if newest is not None:
        seen, _ = find_seen(read_origin(newest), read_step(newest), batch, newest, ramp)
    num_steps = count_steps(epochs, samples.num_samples, batch.global_batch, seen, ramp)
    if newest is not None and num_steps <= seen.step:
        raise CheckpointError(
            f"{newest} has done {plural(seen.step, 'step')}, which are the {plural(num_steps, 'step')} of "
            f"train.epochs={epochs:g} or more; raise train.epochs, or use another train.run_folder"
        )
    decided = replace(config, train=replace(config.train, steps=num_steps, epochs=0.0))
    refuse(check_warmup(decided), InvalidConfig)
    return decided
