"""Every option that is accepted has an effect, for every engine: on the prediction, and on the file that is written."""

from dataclasses import replace
from pathlib import Path

import pytest

from dtlayout.base.errors import DtlayoutError, InvalidConfig
from dtlayout.commands.emit import make_config
from dtlayout.costmodel.engine import find_engine, find_usual, known_engines
from dtlayout.costmodel.scenario import Scenario
from dtlayout.models.presets import find_preset
from dtlayout.planner.choices import CHOICES, find_idle
from dtlayout.planner.search import Search
from dtlayout.planner.space import Space
from dtlayout.programs.program import Job
from dtlayout.programs.registry import PROGRAMS
from dtlayout.schedules.schedules import SCHEDULES
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import Cluster, find_gpu
from dtlayout.spec.kernel_table import KERNELS
from dtlayout.spec.layout_keys import OFFLOADS
from dtlayout.spec.model_shape import Experts
from dtlayout.spec.optimizers import OPTIMIZERS
from dtlayout.spec.precision import BYTES, MATMUL_FORMATS

GPU = "h100-80g-sxm"
MODELS = {
    "dense": replace(find_preset("llama3.1-8b"), num_layers=8),
    "dense, pp off": replace(find_preset("llama3.1-8b"), num_layers=8),
    "experts": replace(
        find_preset("qwen3-4b"), num_layers=8, experts=Experts(number=32, per_token=4, ffn_size=1024)
    ),
}  # fmt: skip
VALUES = {
    "pp": [4], "dp_replicate": [2], "dp_shard": [1], "cp": [4], "tp": [4], "ep": [1, 4], "micro_batch": [1],
    "cp_method": ["gather", "all-to-all"], "sequence_parallel": [False], "tp_overlap": [True], "ep_overlap": [True],
    "ep_dispatcher": ["alltoall", "deepep"], "schedule": sorted(SCHEDULES), "virtual_stages": [2],
    "stage_layers": [(3, 5)], "zero": [2, 3],
    "recompute": ["selective", "keep-attention", "keep-matmuls", "full", "every-2"], "offload": list(OFFLOADS[1:]),
    **{operation: sorted(kernels) for operation, kernels in KERNELS.items()},
    "compile": ["none", "blocks", "loss", "model"],
}  # fmt: skip
FORMATS = {"params": [*BYTES], "compute": [*BYTES], "reduce": [*BYTES], "matmuls": [*MATMUL_FORMATS]}
CASES = [
    (engine, kind)
    for engine in known_engines()
    for kind in MODELS
    if kind != "experts" or "ep" in find_engine(engine, GPU).features.axes
]


def make_scenario(engine, kind, formats, optimizer="adamw"):
    told, precision = find_engine(engine, GPU).told_formats(formats)
    seq_len = 8192 if kind == "experts" else 4096  # for shorter ones the host sets the pace, whatever a block sends
    return Scenario(
        model=MODELS[kind], batch=Batch(global_batch=256, seq_len=seq_len), engine=told, precision=precision,
        cluster=Cluster(gpu=find_gpu(GPU), num_gpus=32, gpus_per_node=4), optimizer=OPTIMIZERS[optimizer](),
    )  # fmt: skip


def choose_base(engine, kind):
    """A layout with all axes that the engine has, where all else can have an effect."""
    features = find_engine(engine, GPU).features
    degrees = {axis: 2 if axis in features.axes else 1 for axis in ("tp", "pp", "cp")}
    degrees |= {"pp": 1} if kind == "dense, pp off" else {}
    off = {"micro_batch": 2, "zero": 1, "dp_replicate": 1, "recompute": "none", "tp_overlap": False}
    off |= {"schedule": "1f1b", "virtual_stages": 1, "cp_method": features.cp_methods[0]}
    off |= {"sequence_parallel": features.has_sequence_parallel}
    return {**degrees, **off, **vars(find_usual(engine).kernels), **({"ep": 8} if kind == "experts" else {})}


def predict(scenario, fixed):
    """The only layout with what is fixed; None where it is refused."""
    try:
        space = Space(scenario, fixed)
    except DtlayoutError:
        return None
    found = [] if find_idle(space) else Search(space).run(top=1).ranked
    return found[0] if found else None


def list_numbers(estimate):
    return estimate.step_time_s, tuple(rank.total for rank in estimate.memory), tuple(estimate.host_bytes)


def write(scenario, estimate):
    """The lines that a program is given, and the gaps that are named; None where its file is refused."""
    try:
        if program := PROGRAMS.get(scenario.engine.name):
            arguments = program.write(Job(scenario, estimate, 10))
            return [*arguments.lines], [*arguments.gaps]
        text = make_config(Path("layout.toml"), scenario, estimate, [])
        return [line for line in text.splitlines() if not line.startswith("#")], []
    except DtlayoutError:
        return None


def list_options(engine, kind):
    """Each option with another value than the base's → the scenario, and what is fixed."""
    scenario, base = make_scenario(engine, kind, {}), choose_base(engine, kind)
    assert VALUES.keys() == CHOICES.keys(), "a new choice has no value here"
    for name, values in VALUES.items():
        yield from ((name, value, scenario, {**base, name: value}) for value in values if base.get(name) != value)
    for key, formats in FORMATS.items():
        for value in formats:
            if value == getattr(scenario.precision, key):
                continue
            try:
                yield key, value, make_scenario(engine, kind, {key: value}), base
            except InvalidConfig as error:
                assert f"precision.{key}={value}" in str(error)
    for name in OPTIMIZERS:
        if name != scenario.optimizer.name:
            yield "optimizer", name, make_scenario(engine, kind, {}, name), base


@pytest.mark.parametrize(("engine", "kind"), CASES)
def test_every_option_has_an_effect_or_is_refused(engine, kind):
    scenario = make_scenario(engine, kind, {})
    own = predict(scenario, choose_base(engine, kind))
    file, accepted = write(scenario, own), 0
    for name, value, asked, fixed in list_options(engine, kind):
        if (found := predict(asked, fixed)) is None:
            continue
        accepted += 1
        chosen = vars(found.layout) | vars(found.kernels)
        assert name not in chosen or chosen[name] == value, f"{name}={value} was asked for, and {chosen[name]} is given"
        written, is_usual = write(asked, found), is_what_it_does(scenario, own, name, value)
        changes_file = file is not None and written != file
        assert is_usual or changes_file or list_numbers(found) != list_numbers(own), f"{name}={value} changes nothing"
        if file is not None and not is_usual:
            assert written != file, f"{name}={value} changes the prediction, and the file says nothing of it"
    assert accepted > 5


def is_what_it_does(scenario, own, name, value):
    """Whether a value is what the engine does anyway, or the best layout has without being told."""
    does = name == "ep_dispatcher" and value == own.layout.ep_dispatcher
    # Below bf16 a step that waits for the host, and whose weights are gathered as before, takes as long.
    return (
        does
        or (name, value) == ("compute", "float16")  # as large as bf16, and as fast
        or (name == "matmuls" and MATMUL_FORMATS[value].gathered_bytes == 2.0)
        or ((vars(own.layout) | vars(own.kernels)).get(name) == value)
    )
