"""Launch: the program train.py. It checks a config without torch, and trains only if the checks pass.

torchrun restarts workers after any exit code but 0 (`--max-restarts`), also after a refusal or a non-finite loss. So a
restarted process reads RUN/summary.json first. If the run has ended there, the process ends the same way again. A start
that may not write there has left its reason elsewhere (`restarts`).

Results of an earlier run in the folder stay in summary.json until this run has reached something. A start that is
refused only adds its reason, under "refused".
"""

import os
import sys
import time

if __name__ == "__main__":  # first of all: the imports below take a second
    from dtlayout.base.signals import end_at_once

    end_at_once()

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from dtlayout.base.errors import EXIT_DONE, EXIT_REFUSED, EXIT_STOPPED, DtlayoutError, InvalidConfig, LostRanks
from dtlayout.base.formatting import plural
from dtlayout.base.lease import LEASE_NAME, Lease, hold
from dtlayout.base.process import leave
from dtlayout.base.restarts import find_refusal, is_restart
from dtlayout.base.signals import STOPPED_EARLY, Stopped, StopRequest, note_signals
from dtlayout.base.terminal import guarded
from dtlayout.config.checking import check_layout
from dtlayout.config.config import Config
from dtlayout.config.loading import load_config
from dtlayout.models.proofs import refuse_unproven
from dtlayout.training.metrics import Summary, has_done_all, note_crash, read_summary, write_summary

SECONDS_TO_SAY_WHY = 5.0
_LAUNCHERS = (  # how many processes it started, which of them this one is
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),  # SLURM_NTASKS and SLURM_PROCID are there in a batch script too
    ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("mpirun", "PMI_SIZE", "PMI_RANK"),  # MPICH's and Intel's
)
USAGE = (
    "usage: dtlayout train CONFIG.toml --ranks N [--section.key=value ...], or on each of several nodes "
    "torchrun ... -m dtlayout.launch CONFIG.toml [--section.key=value ...]"
)


def main(arguments: Sequence[str]) -> int:
    """Run train.py with these arguments; its exit code. Refusals are lines on stderr, from one rank a node."""
    with guarded(is_answer=False):
        return _main(arguments)


def _main(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else EXIT_REFUSED
    try:
        if refusal := find_refusal():
            raise InvalidConfig(f"not tried again: {refusal}")
        with note_signals() as stop:
            stop.early_end = _leave
            refuse_separate_worlds()
            return _run(load_config(arguments[0], arguments[1:]), stop)
    except Stopped:
        _say_stopped()
        return EXIT_STOPPED
    except DtlayoutError as error:
        if _says_why():
            print(error, file=sys.stderr, flush=True)
        else:
            # torchrun ends all ranks as soon as one has failed: let that be the one that says why.
            time.sleep(SECONDS_TO_SAY_WHY)
        return error.exit_code


def refuse_separate_worlds() -> None:
    """InvalidConfig if another launcher than torchrun started several processes, each of which would train alone.

    All of them would write one run folder. A task of srun differs from a batch script: only a task has a number of
    tasks of its own step, while both have that of the job.
    """
    if "RANK" in os.environ:
        return
    for name, size, _ in _LAUNCHERS:
        if (number := _count(size)) > 1:
            raise InvalidConfig(
                f"{name} started {number} processes ({size}={number}) without saying which rank each is, so that every "
                f"one would train alone and write the same run folder; let {name} start one torchrun a node, or set "
                f"RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for each process"
            )


def _says_why() -> bool:
    """Whether this process prints a refusal: one a node under torchrun, the first process of srun or mpirun.

    Ranks that something else numbered all print theirs: a refusal may be one rank's alone, and nothing ends the others.
    """
    if "RANK" not in os.environ and any(_count(size) > 1 and _count(rank) > 0 for _, size, rank in _LAUNCHERS):
        return False
    return os.environ.get("LOCAL_RANK", "0") == "0" or "LOCAL_WORLD_SIZE" not in os.environ


def _count(variable: str) -> int:
    """The number in an environment variable; 0 if there is none."""
    value = os.environ.get(variable, "")
    return int(value) if value.isdecimal() else 0


def _run(config: Config, stop: StopRequest) -> int:
    folder, is_writer = Path(config.train.run_folder), os.environ.get("RANK", "0") == "0"
    summary = read_summary(folder)
    reached = {**summary, "refused": []} if summary.get("steps") else {}
    try:
        layout = check_layout(config, _count("WORLD_SIZE") or 1)
        if not config.train.force:
            refuse_unproven(config.model, layout, document_mask=config.data.document_mask)
    except DtlayoutError as error:
        # Keep the summary of an earlier run. Where there is a lease, a run is going on or has just begun.
        if is_writer and not summary and not (folder / LEASE_NAME).exists():
            _write_refusal(error, folder, {})
        raise
    if is_restart() and (ended := _find_end(summary, layout.world_size)) is not None:
        return ended
    if has_done_all(summary, config.train):
        _refuse_another_run(config, folder)
        if is_writer:
            longer = "train.epochs" if config.train.epochs else "train.steps"
            print(
                f"{folder} has done its {plural(summary['steps'], 'step')}; raise {longer} (and "
                f"optimizer.decay_steps, if the learning rate is to fall over all of them), "
                f"or use another train.run_folder"
            )
        return EXIT_DONE
    with hold(folder) if is_writer else nullcontext() as lease:
        try:
            if lease:
                with stop.changing:
                    if not is_restart():
                        _write_outcome("running", None, folder, reached)
                    stop.early_end = partial(_leave, partial(_tidy, lease, folder, reached))
                # The others hear of what is wrong on their nodes: `data.nodes`.
                from dtlayout.data.check import check_data  # only now: it imports numpy

                check_data(config)
            from dtlayout.training.run import train  # only now: it imports torch

            return train(config, layout, stop, lease)
        except (Stopped, DtlayoutError) as error:
            if lease:
                with suppress(OSError):
                    lease.check()
                _write_end(error, folder, reached)
            raise


def _write_end(error: Stopped | DtlayoutError, folder: Path, reached: dict[str, Any]) -> None:
    """Write to summary.json why a start has ended early."""
    if isinstance(error, Stopped):
        _write_stopped(folder, reached)
    elif isinstance(error, LostRanks):
        note_crash(folder, str(error), is_refusal=False)
    else:
        _write_refusal(error, folder, reached)


def _tidy(lease: Lease, folder: Path, reached: dict[str, Any]) -> None:
    """Leave the folder of a start that is stopped early: write how it ended, and release the lease."""
    lease.check()
    _write_stopped(folder, reached)
    lease.release()


def _leave(tidy: Callable[[], None] = lambda: None) -> NoReturn:
    """End this process before it has trained; `tidy` first notes the end in a run folder that it has begun to write."""
    try:
        tidy()
        _say_stopped()
    finally:
        os._exit(EXIT_STOPPED)  # the main thread may be anywhere


def _say_stopped() -> None:
    if _says_why():
        print(STOPPED_EARLY, file=sys.stderr, flush=True)


def _write_stopped(folder: Path, reached: dict[str, Any]) -> None:
    # torchrun ends ranks in this way too where another one has died, and starts them again.
    code = None if "TORCHELASTIC_RUN_ID" in os.environ else EXIT_STOPPED
    _write_outcome("stopped", code, folder, reached)


def _write_outcome(outcome: str, exit_code: int | None, folder: Path, reached: dict[str, Any]) -> None:
    """Write an outcome to summary.json; the other fields stay those that an earlier run reached."""
    _write({**Summary(outcome=outcome).to_dict(), **reached, "outcome": outcome, "exit_code": exit_code}, folder)


def _find_end(summary: dict[str, Any], world_size: int) -> int | None:
    """Exit code of the last start of a run; None if it has not ended, or goes on with another number of ranks."""
    if summary.get("refused"):
        return EXIT_REFUSED
    # Ranks that torchrun stops because a node has come or gone save as for anybody who stops them.
    if summary.get("outcome") == "stopped" and summary.get("world_size") != world_size:
        return None
    code = summary.get("exit_code")
    return None if code is None else int(code)


def _refuse_another_run(config: Config, folder: Path) -> None:
    """InvalidConfig if the finished run in a folder had another model, batch, data, optimizer or seed."""
    try:
        ended = load_config(folder / "config.toml")
    except InvalidConfig:  # of another version, perhaps: nobody can tell
        return
    if not config.optimizer.decay_steps:  # what it was when the run began
        ended = replace(ended, optimizer=replace(ended.optimizer, decay_steps=0))
    sections = ("model", "batch", "data", "optimizer")
    pair = [_without_names(each) for each in (ended, config)]
    differing = [name for name in sections if getattr(pair[0], name) != getattr(pair[1], name)]
    values = ("seed", "init_from")
    differing += [f"train.{name}" for name in values if getattr(ended.train, name) != getattr(config.train, name)]
    if differing:
        raise InvalidConfig(
            f"train.run_folder={str(folder)!r} holds a finished run with another {', '.join(differing)}; "
            f"use another folder"
        )


def _without_names(config: Config) -> Config:
    """The config with a fixed model name, and with the real path of its tokenizer."""
    tokenizer = config.data.tokenizer
    place = tokenizer if tokenizer == "bytes" else os.path.realpath(tokenizer)
    return replace(config, model=replace(config.model, name="any"), data=replace(config.data, tokenizer=place))


def _write_refusal(error: DtlayoutError, folder: Path, reached: dict[str, Any]) -> None:
    """Write to summary.json why a start was refused; results of an earlier one stay."""
    problems = str(error).splitlines()
    refused = Summary(outcome="refused", exit_code=error.exit_code, problems=problems)
    _write({**reached, "refused": problems} if reached else refused.to_dict(), folder)


def _write(summary: dict[str, Any], folder: Path) -> None:
    try:
        write_summary(summary, folder)
    except OSError as error:
        raise DtlayoutError(f"train.run_folder={str(folder)!r} cannot be written: {error.strerror}") from None


if __name__ == "__main__":  # as train.py, for who has no checkout
    leave(main(sys.argv[1:]))
