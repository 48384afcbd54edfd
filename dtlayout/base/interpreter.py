"""Commands that start another Python, which does not import from the working directory.

`python -m NAME` and `python -c CODE` look into the working directory before the standard library, so a file there that
is called ctypes.py would run in place of the module. Python 3.11 has -P against that; this works for 3.10 as well.
PYTHONPATH stays.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""Environment of a program that starts Pythons of its own: from 3.11 on they don't import from the directory either."""
_DROP = "import sys; sys.path[:] = filter(None, sys.path)"
_RUN = (
    f"{_DROP}; sys.path.append(sys.argv.pop(1)); from runpy import run_module; del sys.argv[0]; "
    "run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)
"""Code that runs a module. Arguments: the folder of dtlayout, since Python may not look there, and the module."""


def run_module(module: str, *arguments: str) -> list[str]:
    """The command that runs a module as `python -m` does.

    >>> run_module("json.tool", "--help")[-2:]
    ['json.tool', '--help']
    """
    return [sys.executable, "-c", _RUN, str(Path(__file__).parents[2]), module, *arguments]


def run_code(code: str) -> list[str]:
    """The command that runs some code as `python -c` does."""
    return [sys.executable, "-c", f"{_DROP}; {code}"]


def torchrun(options: Sequence[str], module: str, *arguments: str) -> list[str]:
    """Command that runs a module on the ranks of one host; `options` are torchrun's.

    torchrun starts each rank with `python -m`, unless it is told that the program is no Python.
    """
    return run_module("torch.distributed.run", *options, "--no-python", *run_module(module, *arguments))


@contextmanager
def elsewhere() -> Iterator[None]:
    """A block in which this process, with all its threads, has "/" as its working directory.

    Start multiprocessing's workers inside: they are `python -c`, which imports from the working directory first. Each
    worker then returns to the parent's directory by itself; the servers that start workers stay in "/". Relative paths
    do not work in the block. FileNotFoundError if the working directory was removed.
    """
    here = os.getcwd()
    os.chdir(os.sep)
    try:
        yield
    finally:
        os.chdir(here)
