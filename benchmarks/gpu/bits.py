"""Checks that trainings which are repeated or resumed end with equal bits, and that train.py runs."""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import dtlayout
from benchmarks.gpu.cells import RepeatCheck, ResumeCheck, StepCheck, TrainerCheck
from benchmarks.gpu.checks import MODELS, build_step, gather_parameters, largest_error, make_batch
from benchmarks.gpu.rows import Checked
from dtlayout.base.errors import DtlayoutError, InvalidConfig
from dtlayout.checkpoint.copies import HostCopies
from dtlayout.checkpoint.sharded import collect_state, load_checkpoint, save_checkpoint
from dtlayout.config.loading import load_config
from dtlayout.data import prepare, tokenizing
from dtlayout.data.sources import Corpus
from dtlayout.mesh.build import open_host_group
from dtlayout.spec.device import Device
from dtlayout.spec.kernel_records import KernelRequest
from dtlayout.spec.optimizers import AdamW
from dtlayout.training.build import Assembly
from dtlayout.training.metrics import MetricsFile
from dtlayout.training.optimizer import set_learning_rate
from dtlayout.training.step import TrainStep

NUM_STEPS = 4
LEARNING_RATE = 1e-2
TRAINER_LIMIT_S = 140
"""Seconds for both runs of train.py together: less than a cell may take."""
ROOT = Path(dtlayout.__file__).parents[1]
_CONFIG = """
[model]
name = "debug"
[batch]
global_batch = 4
seq_len = 256
[layout]
micro_batch = 2
[data]
source = "{folder}/text.txt"
folder = "{folder}/tokens"
document_mask = true
[train]
steps = 3
run_folder = "{folder}/run"
device = "{device_type}"
[metrics]
memory = true
timeline = true
"""


def check_repeat(cell: RepeatCheck, device: Device) -> Checked:
    """Train twice."""
    refuse_unrepeatable(cell.step, device)
    first, second = (_train(*build_step(cell.step, device), cell.step, device, NUM_STEPS) for _ in range(2))
    return _compare(second, first)


def check_resume(cell: ResumeCheck, device: Device) -> Checked:
    """Train, copy the state halfway and go on; save the copies, load them into another trainer, and go on there."""
    refuse_unrepeatable(cell.step, device)
    shape, half = MODELS[cell.step.model], NUM_STEPS // 2
    host = open_host_group(60, 60)
    assembly, step = build_step(cell.step, device)
    with tempfile.TemporaryDirectory() as folder:
        _train(assembly, step, cell.step, device, half)
        tensors = collect_state(assembly.modules, step.optimizer, shape, AdamW())
        wait_for_copies = HostCopies(step.optimizer, device.type).take(tensors)
        expected = _train(assembly, step, cell.step, device, NUM_STEPS - half)
        saved = save_checkpoint(Path(folder), half, wait_for_copies(), shape, AdamW(), keep=1, group=host)
        assembly, step = build_step(cell.step, device)
        done = load_checkpoint(saved, assembly.modules, step.optimizer, shape, AdamW(), group=host)
    assert done == half, f"{done} steps were saved"
    return _compare(_train(assembly, step, cell.step, device, NUM_STEPS - half), expected)


def refuse_unrepeatable(cell: StepCheck, device: Device) -> None:
    """InvalidConfig as from `train.deterministic`."""
    cell.kernels.check(KernelRequest(device=device, compute=cell.compute, deterministic=True))


def _train(assembly: Assembly, step: TrainStep, cell: StepCheck, device: Device, num_steps: int) -> dict[str, Tensor]:
    """Losses and parameters after some steps on one batch."""
    set_learning_rate(step.optimizer, LEARNING_RATE)
    batch = make_batch(cell, device.type)
    losses = [step(*batch).loss for _ in range(num_steps)]
    return {"losses": torch.tensor(losses, dtype=torch.float64), **gather_parameters(assembly)}


def _compare(found: dict[str, Tensor], expected: dict[str, Tensor]) -> Checked:
    differing = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    error, where = largest_error(found, expected)
    problem = f"other bits in {len(differing)} of {len(expected)} tensors" if differing else ""
    return Checked(error=error, where=where, limit=0.0, problem=problem)


def check_trainer(cell: TrainerCheck, device: Device) -> Checked:
    """train.py alone in a process of its own, then once more for two further steps."""
    for name in ("rich", "tomli_w"):
        if find_spec(name) is None:
            raise InvalidConfig(f"train.py needs the package {name}, which is not here; install it: pip install {name}")
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "check.toml")
        config.write_text(_CONFIG.format(folder=folder, device_type=device.type), encoding="utf-8")
        with made_up_text(Path(folder, "text.txt")):
            prepare.prepare_tokens(load_config(config).data)
        for more in ([], ["--train.steps=5"]):
            run = subprocess.run(
                [sys.executable, str(ROOT / "train.py"), str(config), *more],
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=TRAINER_LIMIT_S / 2,
            )
            if run.returncode:
                last = (run.stderr.strip().splitlines() or ["no word"])[-1]
                raise DtlayoutError(f"{' '.join(['train.py', *more])} ended with exit code {run.returncode}: {last}")
        steps = [line["step"] for line in MetricsFile(Path(folder, "run", "metrics.jsonl")).read()]
    problem = "" if steps == [1, 2, 3, 4, 5] else f"metrics.jsonl has steps {steps}"
    return Checked(error=0.0, where="exit code", limit=0.0, problem=problem)


@contextmanager
def made_up_text(path: Path) -> Iterator[None]:
    """Inside, tokens are prepared from made-up documents in place of this file, whose reader needs a package."""
    path.write_text("made up\n", encoding="utf-8")
    rows = [{"text": " ".join(str(i * j % 97) for j in range(50))} for i in range(400)]
    with patch.object(tokenizing, "open_corpus", lambda source, *_: Corpus(source, [], rows)):
        yield


MEASURES: dict[type[Any], Callable[[Any, Device], Checked]] = {
    RepeatCheck: check_repeat,
    ResumeCheck: check_resume,
    TrainerCheck: check_trainer,
}
