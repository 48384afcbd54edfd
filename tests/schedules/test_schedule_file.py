"""Schedules in files: torch writes and loads the same ones, they train, and wrong ones are refused in a line."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining.schedules import ScheduleDualPipeV, ScheduleZBVZeroBubble, _PipelineScheduleRuntime

from dtlayout.base.errors import InvalidConfig, InvalidLayout
from dtlayout.models.presets import find_preset
from dtlayout.pipelining.schedule import make_schedule
from dtlayout.schedules.actions import Kind
from dtlayout.schedules.placement import Looped, VShaped
from dtlayout.schedules.schedule_file import read_schedule, write_schedule
from dtlayout.schedules.schedules import SCHEDULES, find_schedule
from dtlayout.spec.batch import Batch
from dtlayout.spec.layout import Layout
from dtlayout.spec.layout_names import read_name


def torch_runtime(runtime: type, placement, m: int):
    """Torch's runtime of the stages of rank 0, without anything that they would compute."""
    stages = [
        SimpleNamespace(
            stage_index=index, num_stages=placement.num_stages, group_size=placement.num_ranks, group_rank=0,
            is_first=index == 0, is_last=index == placement.num_stages - 1, submod=None, has_backward=True,
        )
        for index in placement.stages_of(0)
    ]  # fmt: skip
    return runtime(stages, m)


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_written_is_read_again_and_by_torch(name: str, tmp_path: Path) -> None:
    schedule, path = find_schedule(name), tmp_path / "order.csv"
    placement = schedule.place(4, schedule.least_virtual_stages)
    orders = schedule.orders(placement, 8)
    write_schedule(orders, path)
    found = read_schedule(str(path))
    assert found.orders(placement, 8) == orders and found.splits_backward == schedule.splits_backward
    assert type(found.place(4, found.least_virtual_stages)) is type(placement)
    runtime = torch_runtime(_PipelineScheduleRuntime, placement, 8)
    runtime.stage_index_to_group_rank = {s: placement.rank_of(s) for s in range(placement.num_stages)}
    runtime._load_csv(str(path))
    assert [[str(a) for a in rank] for rank in runtime.pipeline_order.values()] == [[*map(str, o)] for o in orders]


@pytest.mark.parametrize("written", ["compute_only", "compute_comms"])
@pytest.mark.parametrize("runtime", [ScheduleZBVZeroBubble, ScheduleDualPipeV])
def test_what_torch_writes_is_a_schedule_of_a_layout(runtime: type, written: str, tmp_path: Path) -> None:
    path = tmp_path / "torch.csv"
    torch_runtime(runtime, VShaped(2, 2), 8)._dump_csv(str(path), format=written)
    layout, batch = Layout(pp=2, virtual_stages=2, schedule=f"csv:{path}"), Batch(global_batch=8, seq_len=8)
    layout.check(find_preset("llama3.2-1b"), batch)
    schedule = make_schedule(layout, batch)
    kinds = {action.kind for rank in schedule.ranks for action in rank}
    assert {Kind.BACKWARD_INPUT, Kind.SEND_FORWARD} <= kinds and isinstance(schedule.placement, VShaped)


def test_a_file_is_for_its_own_ranks_and_microbatches_and_its_name_can_be_pasted(tmp_path: Path) -> None:
    path = tmp_path / "order.csv"
    write_schedule(find_schedule("1f1b").orders(Looped(2), 4), path)
    model, name = find_preset("llama3.2-1b"), f"csv:{path}"
    layout = Layout(pp=2, schedule=name)
    layout.check(model, Batch(global_batch=4, seq_len=8))
    assert Layout(**read_name(str(layout))) == layout
    (problem,) = layout.problems(model, Batch(global_batch=6, seq_len=8))
    assert problem == (
        f"schedule={name} is written for 4 microbatches, but global_batch=6 with dp=1 and micro_batch=1 gives 6; "
        f"use global_batch=4"
    )
    (problem,) = Layout(pp=4, schedule=name).problems(model, Batch(global_batch=4, seq_len=8))
    assert problem.startswith(f"schedule={name} is written for pp=2, but pp=4; use pp=2 with virtual_stages=1")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "it is empty"),
        ("0F0,0B0\n\n", "rank 1 has no actions"),
        ("0F0,0X0\n1F0,1B0\n", "rank 0: '0X0' is no action such as 0F0, 0B0, 0I0 or 0W0"),
        (
            "0F0,0B0,0F1\n1F0,1B0,1F1,1B1\n",
            "rank 0 does F with microbatch 1 on stage 0; write F and then B, or F, I and W",
        ),
        ("0F0,0I0\n1F0,1B0\n", "rank 0 does FI with microbatch 0 on stage 0"),
        ("0F0,0B0\n1F0,1B0\n2F0,3F0\n", "4 stages do not lie on 3 ranks in equal numbers"),
        (
            "0F0,2F0,0B0,2B0\n1F0,3F0,3B0,1B0\n",
            "it never ends: rank 0 at 0B0, rank 1 at 1B0 wait for each other",
        ),
        (
            "0F0,1F0,1B0,0B0\n2F0,3F0,3B0,2B0\n",
            "rank 0 has 1F0, but stages lie neither looped nor in a V with stage 1 there",
        ),
        ("0F0,0F1,0B0,0B1\n1F1,1F0,1B0,1B1,1B1\n", "rank 1 does FBB with microbatch 1 on stage 1"),
    ],
)
def test_a_wrong_file_is_refused_with_rank_and_action(text: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.csv"
    path.write_text(text)
    with pytest.raises(InvalidLayout) as caught:
        Layout(pp=2, schedule=f"csv:{path}")
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(f"layout.schedule=csv:{path}: {problem}")


def test_a_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "bytes.csv").write_bytes(b"\x80\x87")
    with pytest.raises(InvalidConfig, match="no text, but bytes that are no UTF-8"):
        read_schedule(str(tmp_path / "bytes.csv"))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="No such file"):
        read_schedule(str(tmp_path / "none.csv"))
