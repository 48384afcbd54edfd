"""dtlayout train: a config on ranks of this machine, checked first; the last lines are the trainer's own.

Before several ranks start, small data are prepared here: a bad row is refused while no rank waits, and no GPU is taken.
One rank is this process, which becomes the trainer. Several are started by torchrun's agent, in this process. Its
messages and its traceback are left out: the trainer's ranks have said why they end. Ranks on several nodes are started
by a torchrun on each, with `-m dtlayout.launch CONFIG`.

The first line comes before torch is imported and data are prepared, which takes seconds. A signal until the ranks are
there ends the command as it ends a rank before its first step.
"""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtlayout.base.checkpoint_names import CHECKPOINTS, list_checkpoints, read_step
from dtlayout.base.errors import EXIT_CRASHED, EXIT_DONE, EXIT_NON_FINITE, EXIT_REFUSED, EXIT_STOPPED, InvalidConfig
from dtlayout.base.files import expand
from dtlayout.base.formatting import plural
from dtlayout.base.interpreter import run_module
from dtlayout.base.signals import STOPPED_EARLY, ending_early
from dtlayout.commands.arguments import add_config
from dtlayout.config.checking import check_layout
from dtlayout.config.config import Config
from dtlayout.config.loading import load_config
from dtlayout.training.metrics import has_done_all, read_summary

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

EXAMPLE = "dtlayout train configs/debug.toml --ranks 8"
SHUTDOWN_S = 3600
"""Seconds that ranks have for the step and the checkpoint after a signal; torchrun's own limit is 30."""
_SAID_BY_RANKS = (EXIT_REFUSED, EXIT_STOPPED, EXIT_NON_FINITE)
"""Exit codes of the trainer, before which a rank has printed the reason."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the config and the ranks."""
    add_config(parser)
    text = "processes on this machine, one a GPU; the fewest that the layout needs by default, if it leaves none open"
    parser.add_argument("--ranks", type=int, metavar="N", help=text)
    parser.add_argument(
        "--max-restarts", type=int, default=0, metavar="K", help="times that all ranks are started again after a crash"
    )


def run(options: argparse.Namespace) -> int:
    """Check, then train; the exit code of the trainer, of the rank that failed first."""
    if options.json:
        raise InvalidConfig("--json is for answers; a run writes metrics.jsonl and summary.json into train.run_folder")
    if "RANK" in os.environ:
        raise InvalidConfig("this is a rank of torchrun already; let torchrun start -m dtlayout.launch CONFIG")
    if options.max_restarts < 0:
        raise InvalidConfig(f"--max-restarts={options.max_restarts} must not be negative")
    with ending_early():
        config = load_config(options.config, options.overrides)
        num_ranks = _choose_ranks(config, options.ranks)
        layout = check_layout(config, num_ranks)
        if num_ranks > 1:
            print(f"checking the device and the data, then starting {num_ranks} ranks", file=sys.stderr, flush=True)
            from dtlayout.training.devices import refuse_missing  # only now: it imports torch, as the ranks' agent does

            refuse_missing(config.train.device)
            _check_data(config)
    print(f"starting {plural(num_ranks, 'rank')}: {config.model.name} as {layout}", file=sys.stderr, flush=True)
    program = run_module("dtlayout.launch", str(options.config), *options.overrides)
    if num_ranks == 1:
        os.execv(program[0], program)
    return run_ranks(program, num_ranks, options.max_restarts, Path(config.train.run_folder))


def _check_data(config: Config) -> None:
    """Check the data, and every row of small ones; a note on stderr for others. DataError as the ranks would raise it.

    A run that is done already reads none.
    """
    from dtlayout.data.check import check_data, prepare_small  # only now: they import numpy

    if has_done_all(read_summary(Path(config.train.run_folder)), config.train):
        return
    check_data(config)
    for line in prepare_small(config):
        print(f"note: {line}", file=sys.stderr, flush=True)


def _choose_ranks(config: Config, asked: int | None) -> int:
    """Number of ranks; InvalidConfig if nobody says it, or it is below 1."""
    if asked is not None:
        if asked < 1:
            raise InvalidConfig(f"--ranks={asked} must be at least 1")
        return asked
    if config.layout.dp_shard == -1:
        fewest = plural(config.layout.smallest_world_size, "rank")
        raise InvalidConfig(f"the layout takes {fewest} or a multiple of that: say how many with --ranks N")
    return config.layout.smallest_world_size


def run_ranks(program: list[str], num_ranks: int, max_restarts: int = 0, run_folder: Path | None = None) -> int:
    """Run a program as ranks of this machine, by torchrun's agent; its exit code, that of the first rank that failed.

    The first Ctrl-C is handed on to the ranks, which finish their step and save. A second one kills them, with a line
    about the newest checkpoint in `run_folder`.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, which warns of it
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_S))
    with ending_early():
        from torch.distributed.elastic.multiprocessing import SignalException  # only now: it takes seconds
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.run import parse_args
        from torch.distributed.run import run as start_agent

    ours = ["--standalone", f"--nproc-per-node={num_ranks}", f"--max-restarts={max_restarts}"]
    agent = parse_args([*ours, "--signals-to-handle=SIGTERM,SIGHUP,SIGQUIT", "--no-python", *program])
    logging.disable(logging.CRITICAL)  # what the agent says is about itself
    before = signal.signal(signal.SIGINT, _interrupt(SignalException, run_folder))
    try:
        start_agent(agent)
    except ChildFailedError as error:
        return _describe_failure(error)
    except SignalException as error:
        return EXIT_STOPPED if error.sigval is not signal.SIGKILL else EXIT_CRASHED
    finally:
        signal.signal(signal.SIGINT, before)
        logging.disable(logging.NOTSET)
    return EXIT_DONE


def _interrupt(error: type[Exception], run_folder: Path | None) -> Callable[..., None]:
    """A handler of Ctrl-C: the first raises `error` where the agent waits, which stops the ranks; the next kills."""
    is_second = False

    def handle(*_: Any) -> None:
        nonlocal is_second
        if is_second:
            for pid in _list_children():
                with suppress(OSError):
                    os.killpg(pid, signal.SIGKILL)
            print(_describe_kill(run_folder), file=sys.stderr, flush=True)
            raise error("killed", signal.SIGKILL)
        is_second = True
        if not _list_children():  # no rank is there that could say it
            print(STOPPED_EARLY, file=sys.stderr)
            raise error("stopped", signal.SIGTERM)
        print("Ctrl-C again kills the ranks, and loses the steps since the last checkpoint", file=sys.stderr)
        raise error("stopped", signal.SIGTERM)

    return handle


def _describe_kill(run_folder: Path | None) -> str:
    """A line on what is left of a run whose ranks are killed."""
    try:
        saved = list_checkpoints(expand(str(run_folder)) / CHECKPOINTS) if run_folder else []
    except (OSError, InvalidConfig):
        return "killed"
    if not saved:
        return "killed: no checkpoint is there, so that all steps are lost"
    num_steps = plural(read_step(saved[-1]), "step")
    return f"killed: the newest checkpoint is {saved[-1]}, and what came after its {num_steps} is lost"


def _list_children() -> list[int]:
    """Processes that this one has started, on Linux."""
    files = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return [int(pid) for file in files for pid in file.read_text().split()]


def _describe_failure(error: "ChildFailedError") -> int:
    """The exit code of the rank that failed first; a line about it where it could not say why by itself."""
    rank, failure = error.get_first_failure()
    if failure.exitcode in _SAID_BY_RANKS:
        return int(failure.exitcode)
    how = f"exit code {failure.exitcode}"
    if failure.exitcode < 0:
        how = f"signal {signal.Signals(-failure.exitcode).name}"
    print(f"rank {rank} ended with {how}, and so the run has ended; its own lines are above", file=sys.stderr)
    return EXIT_CRASHED
