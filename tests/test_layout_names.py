"""A layout that was printed can be read again."""

import random

import pytest

from dtlayout.errors import InvalidConfig
from dtlayout.layout import Layout

VALUES = {
    "pp": (1, 2, 8), "dp_replicate": (1, 4), "dp_shard": (1, 16), "cp": (1, 2), "tp": (1, 4), "ep": (1, 8),
    "cp_method": ("ring", "gather", "all-to-all"), "ep_dispatcher": ("alltoall", "deepep"),
    "sequence_parallel": (True, False), "tp_overlap": (True, False), "ep_overlap": (True, False),
    "micro_batch": (1, 3), "schedule": ("1f1b", "gpipe", "interleaved-1f1b"), "virtual_stages": (1, 3),
    "zero": (1, 2, 3), "recompute": ("none", "full", "every-4", "keep-attention"),
    "offload": ("none", "activations", "optimizer", "both"),
}  # fmt: skip


def test_every_printed_layout_reads_as_one_that_is_printed_so():
    chance = random.Random(0)
    for _ in range(300):
        layout = Layout(**{name: chance.choice(values) for name, values in VALUES.items()})
        read = Layout(**Layout.read(str(layout)))
        assert str(read) == str(layout)
        assert (read.world_size, read.shards_sequence, read.overlaps_tp, read.offload) == (
            layout.world_size, layout.shards_sequence, layout.overlaps_tp, layout.offload
        )  # fmt: skip


def test_a_part_of_a_name_sets_no_more_than_it_says():
    assert Layout.read("dp128") == Layout.read("dp=128") == {"dp_shard": 128}
    assert Layout.read("pp8·dp2·tp4") == {"pp": 8, "dp_shard": 2, "tp": 4}


def test_a_whole_name_also_says_what_is_off():
    read = Layout.read("dp8 mb1 zero3")
    assert (read["pp"], read["tp"], read["recompute"], read["stage_layers"]) == (1, 1, "none", ())


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("quick", "'quick' is no choice; write a layout as it is printed"),
        ("xyz=2", "layout.xyz is unknown; known: "),
        ("tp=two", "layout.tp='two' must be a whole number"),
        ("tp0", "layout.tp=0 must be at least 1"),
    ],
)
def test_what_is_no_name_is_refused(name, problem):
    with pytest.raises(InvalidConfig) as caught:
        Layout.read(name)
    assert str(caught.value).startswith(problem)
