"""A kill, another layout and a step without numbers leave the bits of a run in every format, and with every optimizer.

All cases run in one launch: each is saved after two steps and goes on as the run that was not stopped does.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from parity import BALANCED, BF16, FP16, LEAN, SHAPE, SMOOTH, Case, build_step, gather, local_rows
from ranks import Ranks
from thorough import thorough
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtlayout.checkpoint.sharded import collect_state, load_checkpoint, save_checkpoint
from dtlayout.spec.adapter import Adapter
from dtlayout.spec.layout import Layout
from dtlayout.spec.optimizers import Muon
from dtlayout.spec.precision import Precision
from dtlayout.training.build import Assembly
from dtlayout.training.step import TrainStep

WIDE = replace(SHAPE, hidden_size=64, ffn_size=96, num_layers=2)
LORA = replace(WIDE, adapter=Adapter(rank=4))
WIDE_MIXTURE = replace(BALANCED, hidden_size=64, ffn_size=96)
QUANTIZABLE = replace(LORA, ffn_size=128)
TENSORWISE, ROWWISE = (Precision(matmuls=f"fp8-{name}") for name in ("tensorwise", "rowwise"))
MUON, LEAN_MUON = Muon(rest=SMOOTH), Muon(rest=LEAN)
OVERFLOW = float("inf")
"""A loss scale under which no gradient is finite."""


class Pair(NamedTuple):
    """A run, and the layout that goes on with its checkpoint."""

    case: Case
    other: Layout


def _pair(saved: Layout, other: Layout, **changes: Any) -> Pair:
    scaled = {"loss_scale": 2.0**10} if changes["precision"].compute == "float16" else {}
    return Pair(Case(saved, **{"model": WIDE, "global_batch": 8, **scaled, **changes}), other)


SHARDED, SPLIT = Layout(dp_shard=4, zero=3), Layout(dp_shard=2, tp=2, zero=2)
STAGES, EXPERTS = Layout(pp=2, tp=2, schedule="zb-h1"), Layout(dp_shard=4, ep=2, zero=3)
PAIRS = {
    "fp8, tensorwise": _pair(SHARDED, SPLIT, precision=TENSORWISE, optimizer=MUON),
    "fp8 beside adapters": _pair(SPLIT, STAGES, precision=TENSORWISE, model=LORA, optimizer=LEAN),
    "fp16 and Muon": _pair(SPLIT, SHARDED, precision=FP16, optimizer=MUON),
    "fp16 on a quantized base": _pair(
        Layout(dp_replicate=2, dp_shard=2, zero=2), SHARDED, precision=replace(FP16, base="nf4"), model=QUANTIZABLE
    ),
    "Muon beside lean moments, of experts": _pair(
        EXPERTS, Layout(dp_shard=2, tp=2, ep=4), precision=BF16, model=BALANCED, optimizer=LEAN_MUON
    ),
    "fp8 beside experts": _pair(
        EXPERTS, Layout(dp_shard=2, tp=2, ep=4), precision=TENSORWISE, model=WIDE_MIXTURE, optimizer=MUON
    ),
    "fp16 of experts": _pair(EXPERTS, Layout(dp_shard=4), precision=FP16, model=BALANCED, optimizer=LEAN),
}
FURTHER = {
    "fp8 beside experts in stages": _pair(
        Layout(pp=2, dp_shard=2, ep=2), EXPERTS, precision=ROWWISE, model=WIDE_MIXTURE, optimizer=SMOOTH
    ),
    "fp8, rowwise": _pair(STAGES, SHARDED, precision=ROWWISE, optimizer=LEAN),
    "fp8 and the host's state": _pair(
        Layout(dp_shard=4, zero=3, offload="both"), STAGES, precision=TENSORWISE, optimizer=SMOOTH
    ),
    "lean moments of adapters": _pair(STAGES, SHARDED, precision=BF16, model=LORA, optimizer=LEAN),
    "Muon beside stages": _pair(STAGES, SHARDED, precision=BF16, optimizer=LEAN_MUON),
    "fp16 of adapters in stages": _pair(STAGES, SHARDED, precision=FP16, model=LORA),
}


class Found(NamedTuple):
    """What became of one pair, as one rank saw it."""

    differs_resumed: list[str]
    """Names of tensors in which the run that was stopped differs from the one that was not."""
    differs_skipped: list[str]
    """Names of tensors that a step without numbers changed."""
    differs_loaded: list[str]
    """Names of tensors that another layout has loaded differently."""
    losses: tuple[float, float]
    """The third step's loss, under the run's layout and under the other one."""
    moved: int
    """Tensors that the third step changed."""


def go_on(pairs: list[Pair], folder: Path) -> list[Found]:
    """Each pair in turn, on every rank at once."""
    return [_go_on(*pair, folder / str(i)) for i, pair in enumerate(pairs)]


def _go_on(case: Case, other: Layout, folder: Path) -> Found:
    assembly, step = build_step(case)
    for _ in range(2):
        _take_step(step, case)
    before = _copy_state(assembly, step)
    tensors = collect_state(assembly.modules, step.optimizer, case.model, case.optimizer)
    path = save_checkpoint(folder, 2, tensors, case.model, case.optimizer, keep=1)
    saved = _gather_state(assembly, step, case)
    loss = _take_step(step, case)
    after = _copy_state(assembly, step)

    assembly, step = build_step(case)
    load_checkpoint(path, assembly.modules, step.optimizer, case.model, case.optimizer)
    _take_step(step, replace(case, loss_scale=OVERFLOW))
    skipped = _compare(_copy_state(assembly, step), before)
    _take_step(step, case)
    resumed = _compare(_copy_state(assembly, step), after)

    elsewhere = replace(case, layout=other)
    assembly, step = build_step(elsewhere)
    load_checkpoint(path, assembly.modules, step.optimizer, case.model, case.optimizer)
    loaded = _compare(_gather_state(assembly, step, elsewhere), saved)
    losses = loss, _take_step(step, elsewhere)
    dist.barrier()  # the folder is the next pair's
    return Found(resumed, skipped, loaded, losses, len(_compare(after, before)))


def _take_step(step: TrainStep, case: Case) -> float:
    return step(*local_rows(case), loss_scale=case.loss_scale).loss


def _list_state(assembly: Assembly, step: TrainStep) -> dict[str, Tensor]:
    """Parameters of this rank, and the tensors of their optimizer state."""
    found = dict[str, Tensor]()
    for module in assembly.modules:
        for name, parameter in module.named_parameters():
            found[name] = parameter.detach()
            state = step.optimizer.state.get(parameter, {}) if parameter.requires_grad else {}
            found |= {f"{name}.{key}": value for key, value in state.items() if isinstance(value, Tensor)}
    return found


def _copy_state(assembly: Assembly, step: TrainStep) -> dict[str, Tensor]:
    """This rank's parts."""
    state = _list_state(assembly, step)
    return {name: (x.to_local() if isinstance(x, DTensor) else x).clone() for name, x in state.items()}


def _gather_state(assembly: Assembly, step: TrainStep, case: Case) -> dict[str, Tensor]:
    """Whole tensors of all stages, by their names in the whole model; empty shards come from other ranks."""
    own = {case.model.aliases.get(name, name): gather(x).cpu() for name, x in _list_state(assembly, step).items()}
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, own)
    return {name: x for each in everyones for name, x in each.items()}


def _compare(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    return [name for name, x in expected.items() if not torch.equal(found[name], x)]


@pytest.mark.parametrize("pairs", [PAIRS, thorough(FURTHER)], ids=["usual", "further"])
def test_a_kill_a_reshard_and_a_step_without_numbers_change_no_bit(
    ranks4: Ranks, tmp_path: Path, pairs: dict[str, Pair]
) -> None:
    by_rank = ranks4.run(go_on, [*pairs.values()], tmp_path, timeout_s=300)
    for rank, found in enumerate(by_rank):
        for name, each in zip(pairs, found, strict=True):
            where = f"{name}, rank {rank}"
            assert (each.differs_resumed, each.differs_skipped, each.differs_loaded) == ([], [], []), where
            assert each.moved > 0, f"{where}: a third step that changes nothing shows nothing"
            one, other = each.losses
            assert other == pytest.approx(one, rel=2e-3), where
