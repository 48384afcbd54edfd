"""Engines: what their files may say, and which of several values of a constant stands."""

from dataclasses import fields, replace
from importlib.resources import files
from itertools import pairwise

import pytest
from engines import forget_engines

from dtlayout.base import toml
from dtlayout.base.errors import InvalidConfig
from dtlayout.costmodel.engine import (
    ANY_GPU,
    find_engine,
    find_unfitted,
    find_usual,
    known_engines,
    register_engine,
)
from dtlayout.costmodel.engine_constants import BOUNDS, Constants, RunAheadConstants
from dtlayout.costmodel.engine_features import CHOICES, Features
from dtlayout.spec.cluster import known_gpus

GPU = "h100-80g-sxm"
FITTED = [
    (name, gpu) for name in known_engines() for gpu in (*known_gpus(), "cpu") if find_engine(name, gpu).is_calibrated
]


@pytest.fixture
def install(tmp_path, monkeypatch):
    """A package with these constants instead of the shipped ones."""

    def write(text: str, achieved: str = "") -> None:
        folder = tmp_path / "constants" / "engines"
        folder.mkdir(parents=True)
        (folder / "mine.toml").write_text('engine = "mine"\n' + text, encoding="utf-8")
        (tmp_path / "constants" / "achieved.toml").write_text(achieved, encoding="utf-8")
        monkeypatch.setattr(toml, "__file__", str(tmp_path / "base/toml.py"))
        forget_engines()

    yield write
    monkeypatch.undo()
    forget_engines()


def problems_of(name: str = "mine") -> list[str]:
    with pytest.raises(InvalidConfig) as caught:
        find_engine(name, GPU)
    return caught.value.problems


@pytest.mark.parametrize("gpu", [*known_gpus(), "cpu"])
def test_every_engine_loads_for_every_gpu_type(gpu):
    for name in ("aa-scaling", "dtlayout", "megatron", "nanotron", "torchtitan"):
        found = find_engine(name, gpu)
        assert (found.name, found.gpu) == (name, gpu)
        assert found.is_calibrated == ("uncalibrated" not in found.source)


def test_files_are_named_like_their_engines_and_fit_known_gpu_types():
    for entry in (files("dtlayout") / "constants" / "engines").iterdir():
        table = toml.loads(entry.read_text(encoding="utf-8"))
        assert entry.name == table["engine"] + ".toml"
        assert set(table) <= {"engine", "like", "features", "constants", "beside_gpu", "usual", "fitted"}
        assert set(table.get("fitted", {})) <= {*known_gpus(), ANY_GPU}
        assert set(table.get("fitted", {}).get(ANY_GPU, {}).get("gpus", ())) <= set(known_gpus())
    achieved = toml.loads((files("dtlayout") / "constants" / "achieved.toml").read_text(encoding="utf-8"))
    described = {entry.name.removesuffix(".toml") for entry in (files("dtlayout") / "constants" / "clusters").iterdir()}
    assert set(achieved) == described - {"cpu"}
    for table in achieved.values():
        assert table.pop("source") and {"matmul_efficiency"} <= set(table) <= set(BOUNDS)
        assert all(BOUNDS[name][0] < value < BOUNDS[name][1] for name, value in table.items())


def test_one_chip_sustains_flops_by_its_power_limit():
    """By the rule of docs/theory/time-model.md, FLOP/s to which each further watt adds less."""
    gpus = [known_gpus()[f"h100-{name}"] for name in ("94g-nvl", "96g-500w", "80g-sxm")]
    powers = [gpu.board_power_w or 0 for gpu in gpus]
    sustained = [gpu.peak_flops_per_s * find_engine("megatron", gpu.name).constants.matmul_efficiency for gpu in gpus]
    for (less, slower), (more, faster) in pairwise(zip(powers, sustained, strict=True)):
        assert less < more
        assert faster / slower == pytest.approx((more / less) ** 0.7, rel=0.02)


def test_constants_were_fitted_for_both_published_sweeps():
    assert set(FITTED) >= {("aa-scaling", "a100-80g-sxm"), ("nanotron", "h100-80g-sxm")}


@pytest.mark.parametrize(("name", "gpu"), FITTED)
def test_fitted_constants_are_few_and_lie_between_their_bounds(name, gpu):
    found = find_engine(name, gpu)
    assert len(found.fitted) + len(found.shared) <= 16
    for constant in (*found.fitted, *found.shared):
        low, high = BOUNDS[constant]
        assert low < getattr(found.constants, constant) < high, constant


def test_every_general_constant_is_within_its_bounds_and_has_a_unit():
    assert set(BOUNDS) == {f.name for f in fields(RunAheadConstants)}
    RunAheadConstants()
    assert all(f.metadata["unit"] for f in fields(RunAheadConstants))


def test_what_a_host_takes_to_start_kernels_holds_beside_gpus_alone():
    for name in ("dtlayout", "torchtitan"):
        gpu, cpu = find_engine(name, GPU).constants, find_engine(name, "cpu").constants
        assert gpu.layer_host_tp_s > gpu.layer_host_s > gpu.compiled_host_s > 0
        assert cpu.layer_host_s == cpu.layer_host_tp_s == 0


def test_an_unknown_engine_is_refused_with_those_there_are():
    assert problems_of("megatorn") == [
        "engine 'megatorn' is unknown; use one of aa-scaling, accelerate, automodel, deepspeed, dtlayout, fsdp1, "
        "internevo, kempnerforge, megatron, megatron-2021, nanotron, prime-rl, simumax, torchtitan"
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[features]\nsharing = 1", "mine.toml: features.sharing is unknown; did you mean features.sharding?"),
        (
            '[features]\nloss = "none"',
            "mine.toml: features.loss='none' is unknown; use one of ['vocab-parallel', 'replicated']",
        ),
        ("[constants]\noverlab = 1.0", "mine.toml: constants.overlab is unknown; did you mean constants.overlap?"),
        ("[constants]\noverlap = '1'", "mine.toml: constants.overlap='1' must be a number"),
        (
            "[constants]\nrun_ahead_bytes = 1.0",
            "mine.toml: constants.run_ahead_bytes is unknown; did you mean constants.overhead_bytes?",
        ),
        ("[constants]\noverlap = 1.5", "mine.toml: constants.overlap=1.5 lies outside [0.0, 1.0]"),
        ("[beside_gpu]\nlayer_host_s = -1.0", "mine.toml: beside_gpu.layer_host_s=-1.0 lies outside [0.0, 0.1]"),
        (
            f"[fitted.{GPU}]\nsource = 'runs'\noverlab = 1.0",
            f"mine.toml: fitted.{GPU}.overlab is unknown; did you mean fitted.{GPU}.overlap?",
        ),
        ("[fitted.any]\ngpus = 'all'", "mine.toml: fitted.any.gpus='all' must be a list"),
        (
            f"[fitted.{GPU}]\nmatmul_efficiency = 0.1",
            f"mine.toml: fitted.{GPU}.matmul_efficiency=0.1 lies outside [0.4, 0.95]",
        ),
    ],
)
def test_what_a_file_may_not_say_is_refused_with_its_name(install, text, problem):
    install(text)
    assert problems_of() == [problem]


def test_all_problems_of_a_file_are_told_at_once(install):
    install("[features]\nsharing = 1\n[constants]\nspeed = 1.0\noverlap = 2.0")
    assert len(problems_of()) == 3


def test_a_fitted_constant_stands_before_the_engines_and_that_before_the_gpu_types(install):
    install(
        f"""
[constants]
flash2_efficiency = 0.41
memory_efficiency = 0.61
[fitted.{GPU}]
source = "runs"
flash2_efficiency = 0.42
""",
        achieved=f"""
[{GPU}]
source = "a benchmark"
flash2_efficiency = 0.43
memory_efficiency = 0.63
link_efficiency = 0.53
""",
    )
    found = find_engine("mine", GPU)
    assert found.constants.flash2_efficiency == 0.42  # fitted
    assert found.constants.memory_efficiency == 0.61  # the engine's
    assert found.constants.link_efficiency == 0.53  # the GPU type's
    assert found.constants.overlap == Constants().overlap  # general
    assert (found.fitted, found.source) == (("flash2_efficiency",), "runs")
    assert found.features == Features()
    elsewhere = find_engine("mine", "a100-80g-sxm")
    assert (elsewhere.constants.flash2_efficiency, elsewhere.constants.link_efficiency) == (0.41, 0.7)
    assert not elsewhere.is_calibrated


def test_constants_fitted_on_all_gpu_types_stand_below_those_of_one(install):
    install(
        f"""
[constants]
overlap = 0.5
[fitted.any]
source = "all runs"
gpus = ["{GPU}", "h200-141g-sxm"]
flash2_efficiency = 0.41
overlap = 0.6
[fitted.{GPU}]
source = "its runs"
flash2_efficiency = 0.42
""",
        achieved="""
[a100-80g-sxm]
flash2_efficiency = 0.43
link_efficiency = 0.53
""",
    )
    own, other, foreign = (find_engine("mine", gpu) for gpu in (GPU, "h200-141g-sxm", "a100-80g-sxm"))
    assert (own.constants.flash2_efficiency, own.constants.overlap) == (0.42, 0.6)
    assert (own.fitted, own.shared, own.source) == (("flash2_efficiency",), ("overlap",), "its runs; all runs")
    assert (other.fitted, other.shared) == ((), ("flash2_efficiency", "overlap"))
    assert (other.is_calibrated, other.source) == (True, "all runs")
    assert (foreign.constants.flash2_efficiency, foreign.constants.link_efficiency) == (0.41, 0.53)
    assert not foreign.is_calibrated and foreign.source.startswith("uncalibrated: ")
    assert foreign.source.endswith("; constants from all runs")
    unfitted = find_unfitted("mine", "a100-80g-sxm")
    assert (unfitted.constants.flash2_efficiency, unfitted.constants.overlap, unfitted.shared) == (0.43, 0.5, ())


def test_an_engine_takes_other_constants_within_their_bounds():
    found = find_engine("dtlayout", GPU)
    changed = found.with_constants(overlap=0.5, step_host_s=0.1)
    assert (changed.constants.overlap, changed.constants.step_host_s) == (0.5, 0.1)
    assert changed.with_constants(overlap=found.constants.overlap, step_host_s=found.constants.step_host_s) == found
    with pytest.raises(InvalidConfig) as caught:
        found.with_constants(overlap=-0.1, step_host_s=0.6)
    assert caught.value.problems == [
        "step_host_s=0.6 lies outside [0.0, 0.5]",
        "overlap=-0.1 lies outside [0.0, 1.0]",
    ]


def test_our_matmuls_lose_as_much_as_those_of_torchtitan_until_a_gpu_has_run_them():
    own, other = (find_engine(name, "h100-80g-sxm").constants.matmul_share for name in ("dtlayout", "torchtitan"))
    assert own == pytest.approx(other, rel=0.01)


@pytest.fixture
def register(tmp_path):
    """Makes known an engine of a file called mine.toml, as long as a test runs."""

    def write(text: str) -> None:
        (tmp_path / "mine.toml").write_text('engine = "mine"\n' + text, encoding="utf-8")
        register_engine(tmp_path / "mine.toml")

    yield write
    forget_engines()


def test_an_engine_like_another_has_what_that_one_has_where_it_names_nothing(register):
    register(
        f"""
like = "megatron"
[features]
overlap_dp = false
[usual]
tp_overlap = false
[usual.kernels]
norm = "eager"
[constants]
link_efficiency = 0.41
[fitted.any]
source = "its runs"
gpus = ["{GPU}"]
matmul_share = 0.77
"""
    )
    found, other = find_engine("mine", GPU), find_engine("megatron", GPU)
    assert found.features == replace(other.features, overlap_dp=False)
    assert (found.constants.link_efficiency, found.constants.matmul_share) == (0.41, 0.77)
    assert found.constants.fp8_efficiency == other.constants.fp8_efficiency  # fitted to the other's runs
    assert (found.fitted, found.shared) == ((), ("matmul_share",))
    assert find_unfitted("mine", GPU).constants.matmul_share == other.constants.matmul_share
    usual = find_usual("mine")
    assert (usual.tp_overlap, usual.gradients) == (False, find_usual("megatron").gradients)
    assert usual.kernels == replace(find_usual("megatron").kernels, norm="eager")


def test_an_engine_like_none_that_is_known_is_refused(register):
    with pytest.raises(InvalidConfig, match=r"mine\.toml: like='steam' is unknown; use one of aa-scaling, "):
        register('like = "steam"')


def test_a_run_of_an_engine_can_be_told_its_choices_alone():
    megatron = find_engine("megatron", GPU)
    told = megatron.told({"overlap_dp": "false", "cuda_graphs": "full"})
    assert (told.features.overlap_dp, told.features.cuda_graphs) == (False, "full")
    assert told.constants == megatron.constants
    assert megatron.told({}) is megatron
    with pytest.raises(InvalidConfig) as caught:
        megatron.told({"overlap_tp": "true", "cuda_graphs": "some"})
    assert caught.value.problems == [
        "engine megatron: overlap_tp=true is no choice of this engine; use one of overlap_dp, overlap_pp, cuda_graphs, "
        "fused_loss, recompute_modules",
        "engine megatron: cuda_graphs=some is unknown; use none or attention or full",
    ]
    with pytest.raises(InvalidConfig, match="engine dtlayout: overlap_dp=false is no choice of this engine; it has no"):
        find_engine("dtlayout", GPU).told({"overlap_dp": "false"})


def test_what_a_prediction_assumes_of_an_engine_is_said_with_its_words():
    megatron, precision = find_engine("megatron", GPU).told({"overlap_pp": "false"}).told_formats({})
    values = {name: value for name, (value, _) in megatron.assumptions(precision).items()}
    assert values == {
        "precision.reduce": "float32", "overlap_dp": "true", "overlap_pp": "false", "cuda_graphs": "none",
        "fused_loss": "never", "recompute_modules": "core_attn",
    }  # fmt: skip
    own, precision = find_engine("dtlayout", GPU).told_formats({"reduce": "bfloat16"})
    assert own.assumptions(precision)["precision.reduce"][0] == "bfloat16"
    assert set(values) == {"precision.reduce", *CHOICES}
    assert "recompute_modules" not in own.assumptions(precision), "torch's checkpoints know no modules"
    assert "fused_loss" not in own.assumptions(precision), "its loss is one of its kernels"
    titan, precision = find_engine("torchtitan", GPU).told_formats({})
    assert titan.assumptions(precision)["fused_loss"][0] == "beside-blocks"


def test_a_run_is_told_several_modules_at_once_in_any_order():
    megatron, precision = find_engine("megatron", GPU).told_formats({})
    told = megatron.told({"recompute_modules": "moe_act+layernorm+moe_act"})
    assert told.features.recompute_modules == ("layernorm", "moe_act")
    assert told.assumptions(precision)["recompute_modules"][0] == "layernorm+moe_act"
    for word in ("layernorm+gelu", "", "layernorm+"):
        with pytest.raises(InvalidConfig) as caught:
            find_engine("megatron", GPU).told({"recompute_modules": word})
        assert caught.value.problems == [
            f"engine megatron: recompute_modules={word} is unknown; use core_attn or layernorm or mla_up_proj or mlp "
            "or moe or moe_act or shared_experts, several joined by +"
        ]
    for engine in ("megatron-2021", "torchtitan"):
        with pytest.raises(InvalidConfig, match=f"engine {engine}: recompute_modules=mlp is no choice of this engine"):
            find_engine(engine, GPU).told({"recompute_modules": "mlp"})
    with pytest.raises(
        InvalidConfig, match=r"features\.recompute_modules: 'gelu' is unknown; use some of \['core_attn', "
    ):
        Features(recompute_modules=("gelu",))


def test_constants_change_and_what_a_run_is_told_stays():
    told = find_engine("megatron", GPU).told({"overlap_dp": "false"})
    fitted = find_engine("megatron", GPU).with_constants(overlap=0.31)
    both = told.with_constants_of(fitted)
    assert (both.features.overlap_dp, both.constants.overlap) == (False, 0.31)
