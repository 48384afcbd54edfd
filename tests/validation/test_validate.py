"""Every row gets a prediction, also where no schedule plays its layout; a model can be left out of the fit."""

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from dtlayout.base.errors import InvalidConfig
from dtlayout.costmodel.engine import Engine, find_engine, without_fit
from dtlayout.costmodel.engine_constants import RunAheadConstants
from dtlayout.costmodel.estimate import Estimate, Estimator
from dtlayout.costmodel.scenario import Scenario
from dtlayout.records.run import Performance, Run
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import Cluster, find_gpu
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape
from dtlayout.validation.cross_validation import leave_engines_out, leave_gpus_out, leave_models_out
from dtlayout.validation.predict import (
    ablate,
    describe_changes,
    fit_engines,
    group_for_fit,
    group_runs,
    normalise_run,
    predict,
    with_engines,
)
from dtlayout.validation.scores import score
from dtlayout.validation.tables import read_tables

HEADER = (
    "table,row,model,hidden,layers,heads,kv_heads,ffn,vocab,tied,seq_len,engine,gpu,gpus,gpus_per_node,global_batch,"
    "micro_batch,dp,tp,pp,cp,virtual_stages,sequence_parallel,zero,recompute,kernel,status,step_time_s,mfu,"
    "peak_memory_gb"
)
ROW = (
    "sweep,0,small,1024,8,16,4,2816,32000,True,2048,megatron,h100-80g-sxm,8,8,64,1,4,2,1,1,1,True,1,none,flash2,ok,"
    "1.5,0.25,12.5"
)
NARROW = ModelShape(
    name="narrow", hidden_size=2048, num_layers=8, num_heads=16, num_kv_heads=16, ffn_size=5632, vocab_size=32000
)  # fmt: skip
WIDE = replace(NARROW, name="wide", hidden_size=4096, num_heads=32, num_kv_heads=32, ffn_size=11008)


def make_run(
    layout: Layout,
    *,
    model: ModelShape = NARROW,
    engine: str | Engine = "megatron",
    gpus: int = 0,
    batch: int = 64,
    mfu: float = 0.3,
) -> Run:
    gpu = find_gpu("h100-80g-sxm" if isinstance(engine, str) else engine.gpu)
    scenario = Scenario(
        model=model, batch=Batch(global_batch=batch, seq_len=2048),
        cluster=Cluster(gpu=gpu, num_gpus=gpus or layout.world_size, gpus_per_node=8),
        engine=find_engine(engine, gpu.name) if isinstance(engine, str) else engine,
    )  # fmt: skip
    measured = Performance(step_time_s=1.0, mfu=mfu)
    return Run(table="t", row="0", scenario=scenario, layout=layout, kernels=Kernels(), outcome="ok", measured=measured)


def estimate(run: Run):
    (prediction,) = predict([run])
    assert prediction.run is run
    found = prediction.estimate
    assert all(seconds >= 0 for seconds in found.time.as_dict().values())
    assert 0 < found.mfu < 1 and math.isfinite(found.peak_bytes)
    return found


def test_a_run_that_can_be_played_is_predicted_as_it_is():
    run = make_run(Layout(pp=2, dp_shard=4, tp=2))
    assert normalise_run(run) is run
    assert estimate(run) == Estimator(run.scenario).estimate(run.layout, run.kernels)


@pytest.mark.parametrize(
    ("run", "change"),
    [
        (make_run(Layout(dp_shard=4, micro_batch=2), batch=57), "global_batch is no multiple of dp * micro_batch: "),
        (make_run(Layout(tp=2), gpus=8), "its degrees do not make its GPUs: "),
        (make_run(Layout(pp=16)), "more pipeline ranks than blocks: "),
        (make_run(Layout(pp=4, virtual_stages=4, schedule="interleaved-1f1b")), "fewer virtual stages, "),
        (make_run(Layout(pp=4, virtual_stages=2, schedule="interleaved-1f1b"), batch=6), "interleaved stages without "),
    ],
)
def test_what_is_changed_to_predict_a_run_is_said(run, change):
    (said,) = describe_changes(run)
    assert said.startswith(change)
    assert describe_changes(make_run(Layout(dp_shard=4))) == []


@pytest.mark.parametrize("engine", ["aa-scaling", "dtlayout", "megatron", "nanotron", "torchtitan"])
@pytest.mark.parametrize(
    ("layout", "batch"),
    [
        (Layout(pp=4, dp_shard=8), 16),  # 2 microbatches, fewer than stages
        (Layout(tp=3), 64),  # heads not divisible
        (Layout(pp=16), 64),  # more ranks than blocks
        (Layout(pp=4, virtual_stages=8, schedule="interleaved-1f1b"), 64),  # more stages than blocks
        (Layout(pp=1, virtual_stages=4, schedule="interleaved-1f1b"), 64),
        (Layout(pp=4, virtual_stages=2, schedule="interleaved-1f1b"), 7),  # no whole rounds
        (Layout(pp=4, virtual_stages=2, schedule="interleaved-1f1b"), 1),
        (Layout(cp=8, tp=2), 64),
        (Layout(dp_shard=8, zero=2), 64),
        (Layout(dp_shard=8, pp=2, zero=3, recompute="selective"), 64),
        (Layout(dp_replicate=3, micro_batch=5), 64),  # no whole microbatches
        (Layout(dp_shard=128), 64),  # less than a microbatch
        (Layout(dp_shard=64, tp=8, pp=8, sequence_parallel=False), 2048),  # thousands of GPUs
    ],
    ids=str,
)
def test_every_engine_predicts_what_our_trainer_refuses(engine, layout, batch):
    estimate(make_run(layout, engine=engine, batch=batch))


def test_a_batch_of_no_whole_microbatches_takes_as_long_as_the_next_whole_one_for_fewer_tokens():
    layout = Layout(dp_shard=4, micro_batch=2)
    odd, whole = (estimate(make_run(layout, batch=batch)) for batch in (57, 64))
    assert odd.step_time_s == whole.step_time_s
    assert odd.mfu == pytest.approx(whole.mfu * 57 / 64)


def test_less_than_a_microbatch_takes_as_long_as_one():
    few, one = (estimate(make_run(Layout(dp_shard=8, micro_batch=4), batch=batch)) for batch in (3, 32))
    assert few.step_time_s == one.step_time_s
    assert few.mfu == pytest.approx(one.mfu * 3 / 32)


def test_interleaved_rounds_that_are_not_whole_take_what_their_microbatches_add():
    layout = Layout(pp=4, virtual_stages=2, schedule="interleaved-1f1b")
    times = [estimate(make_run(layout, batch=batch)).step_time_s for batch in range(1, 13)]
    steps = [later - earlier for earlier, later in pairwise(times)]
    assert min(steps) > 0
    assert max(steps) == pytest.approx(min(steps), rel=0.2)
    round_of_4 = Estimator(make_run(layout, batch=8).scenario).estimate(layout, Kernels()).step_time_s
    assert times[7] == pytest.approx(round_of_4)


def test_dp_is_what_the_other_degrees_leave_of_the_gpus():
    sharded = normalise_run(make_run(Layout(tp=2, pp=2, dp_shard=2), gpus=32)).layout
    assert (sharded.dp_shard, sharded.dp_replicate) == (8, 1)
    replicated = normalise_run(make_run(Layout(tp=2, pp=2, dp_replicate=2), gpus=32)).layout
    assert (replicated.dp_shard, replicated.dp_replicate) == (1, 8)


def test_idle_gpus_count_in_mfu_and_missing_ones_do_not():
    busy, idle, missing = (estimate(make_run(Layout(tp=2, pp=2), gpus=gpus)) for gpus in (4, 7, 3))
    assert idle.step_time_s == missing.step_time_s == busy.step_time_s
    assert idle.mfu == pytest.approx(busy.mfu * 4 / 7)
    assert missing.mfu == pytest.approx(busy.mfu)


def test_more_ranks_than_blocks_take_as_long_as_a_block_on_each():
    layout, deeper = Layout(pp=16), replace(NARROW, num_layers=16)
    few, many = estimate(make_run(layout)), estimate(make_run(layout, model=deeper))
    assert few.step_time_s == many.step_time_s and few.peak_bytes == many.peak_bytes
    assert few.mfu < many.mfu


def test_an_engine_that_leaves_stages_empty_does_so():
    found = estimate(make_run(Layout(pp=16), engine="nanotron"))
    assert (len(found.stage_layers), sum(found.stage_layers), min(found.stage_layers)) == (16, 8, 0)


# Leaving out.


def generate_runs(engine: Engine) -> list[Run]:
    """Runs of two models as this engine would take them, measured without noise."""
    layouts = [Layout(dp_shard=8 // tp // pp, tp=tp, pp=pp, micro_batch=mb)
               for tp in (1, 2, 4) for pp in (1, 2) for mb in (1, 2)]  # fmt: skip
    runs = [make_run(layout, model=model, engine=engine) for model in (NARROW, WIDE) for layout in layouts]
    return [replace(p.run, measured=measure(p.estimate)) for p in predict(runs)]


def measure(found: Estimate) -> Performance:
    return Performance(mfu=found.mfu, step_time_s=found.step_time_s, peak_memory_bytes=(round(found.memory[0].total),))


def known_engine(gpu: str = "h100-80g-sxm", shared: tuple[str, ...] = (), **constants: float) -> Engine:
    """nanotron with few fitted constants, at values that differ from the general ones."""
    engine = without_fit(find_engine("nanotron", gpu)).with_constants(**constants)
    return replace(engine, fitted=tuple(name for name in constants if name not in shared), shared=shared)


TRUE = {"matmul_efficiency": 0.62, "link_efficiency": 0.4, "logit_bytes": 9.0}


@pytest.fixture(scope="module")
def true_engine() -> Engine:
    return known_engine(**TRUE)


def test_a_fit_recovers_the_constants_that_made_the_runs(true_engine):
    runs = generate_runs(true_engine)
    (fitted,) = fit_engines(runs, [without_fit(true_engine)])
    assert fitted.at_bounds == ()
    assert {name: getattr(fitted.constants, name) for name in TRUE} == pytest.approx(TRUE, rel=0.02)


def test_few_runs_move_a_constant_less_than_many_that_say_the_same():
    true = known_engine(link_efficiency=0.25)
    run = next(run for run in generate_runs(true) if run.layout.tp == 2)
    few, many = (fit_engines([run] * times, [without_fit(true)])[0].constants.link_efficiency for times in (1, 40))
    assert abs(many - 0.25) < 1e-4 < 5e-4 < few - 0.25 < 0.01


def test_a_constant_that_no_run_speaks_of_stays_as_it_is(true_engine):
    """Between the others, where the steps of the fit would have carried it anywhere."""
    start = replace(
        without_fit(true_engine), fitted=("matmul_efficiency", "fp8_efficiency", "link_efficiency", "memory_efficiency")
    )
    (fitted,) = fit_engines(generate_runs(true_engine), [start])
    told = {name: getattr(fitted.constants, name) for name in start.fitted if name != "fp8_efficiency"}
    assert all(value != getattr(start.constants, name) for name, value in told.items())
    assert fitted == start.with_constants(**told)


def test_a_model_is_predicted_by_constants_of_the_other_alone(true_engine):
    runs = generate_runs(true_engine)
    told = []
    left_out = leave_models_out(runs, told.append)
    assert left_out.kept == {}
    assert told == [f"fitting nanotron on h100-80g-sxm without {name}" for name in ("narrow", "wide")]
    for name, rows in left_out.predictions.items():
        assert {row.run.scenario.model.name for row in rows} == {name}
        found = score(rows)
        assert found.rows == 12
        assert found.mape < 0.01 and found.memory < 0.01 and found.tau > 0.95
    assert score(predict(with_engines(runs, without_fit(true_engine)))).mape > 0.05


def test_many_models_are_left_out_in_eight_lots_each_by_the_others():
    start = known_engine(matmul_efficiency=0.62)
    models = [replace(NARROW, name=f"model-{i}", num_layers=2 + i) for i in range(10)]
    runs = [make_run(Layout(dp_shard=8), model=model, engine=start) for model in models]
    told = []
    left_out = leave_models_out(runs, told.append)
    assert len(told) == 8 and told[0].endswith(" without model-0, model-8") and told[-1].endswith(" without model-7")
    assert sorted(left_out.predictions) == sorted(model.name for model in models)
    assert all(rows[0].run.scenario.model.name == name for name, rows in left_out.predictions.items())
    lot, other = ({left_out.predictions[name][0].run.scenario.engine for name in names}
                  for names in (("model-0", "model-8"), ("model-0", "model-1")))  # fmt: skip
    assert (len(lot), len(other)) == (1, 2)


def test_what_the_left_out_model_measured_does_not_enter_its_fit(true_engine):
    runs = generate_runs(true_engine)
    halved = [replace(run, measured=replace(run.measured, mfu=run.mfu / 2)) for run in runs]
    spoilt = [half if half.scenario.model.name == "wide" else run for half, run in zip(halved, runs, strict=True)]
    before, after = (leave_models_out(each).predictions["wide"] for each in (runs, spoilt))
    assert [p.estimate.mfu for p in after] == [p.estimate.mfu for p in before]
    assert score(after).mape > 0.9


def test_a_group_of_one_model_is_predicted_as_it_is_and_told_apart(true_engine):
    runs = [run for run in generate_runs(true_engine) if run.scenario.model.name == "wide"]
    other = make_run(Layout(dp_shard=8), engine="dtlayout")
    left_out = leave_models_out([*runs, other])
    assert {model: len(rows) for model, rows in left_out.predictions.items()} == {"narrow": 1}
    assert left_out.kept == {"nanotron on h100-80g-sxm": predict(runs)}


@pytest.fixture(scope="module")
def engines_that_share() -> list[Engine]:
    """An engine on two GPU types: links alike, matmuls not."""
    shared, link = ("link_efficiency",), {"link_efficiency": 0.4}
    return [
        known_engine("h100-80g-sxm", shared, matmul_efficiency=0.62, **link),
        known_engine("a100-80g-sxm", shared, matmul_efficiency=0.71, **link),
    ]


def test_constants_of_all_gpu_types_and_of_each_are_fitted_at_once(engines_that_share):
    runs = [run for engine in engines_that_share for run in generate_runs(engine)]
    fitted = fit_engines(runs, [without_fit(engine) for engine in engines_that_share])
    for found, true in zip(fitted, engines_that_share, strict=True):
        assert found.constants.link_efficiency == fitted[0].constants.link_efficiency
        assert vars(found.constants) == pytest.approx(vars(true.constants), rel=0.02)


def test_a_gpu_types_own_constants_stay_where_none_of_its_runs_is_seen(engines_that_share):
    h100, a100 = (without_fit(engine) for engine in engines_that_share)
    found = fit_engines(generate_runs(engines_that_share[0]), [h100, a100])[1]
    assert found.constants.link_efficiency == pytest.approx(0.4, rel=0.02)
    assert found == a100.with_constants(link_efficiency=found.constants.link_efficiency)


def test_a_gpu_type_is_predicted_by_constants_of_the_others_alone(engines_that_share):
    runs = [run for engine in engines_that_share for run in generate_runs(engine)]
    told = []
    left_out = leave_gpus_out(runs, told.append)
    assert told == ["fitting nanotron without h100-80g-sxm", "fitting nanotron without a100-80g-sxm"]
    for true, (group, rows) in zip(engines_that_share, left_out.predictions.items(), strict=True):
        constants = {row.run.scenario.engine.constants for row in rows}
        assert group == f"nanotron, {true.gpu}" and len(rows) == 24 and len(constants) == 1
        (found,) = constants
        assert found.link_efficiency == pytest.approx(0.4, rel=0.02)
        assert found.matmul_efficiency == without_fit(true).constants.matmul_efficiency


def test_without_constants_of_all_types_a_gpu_type_is_left_with_general_ones(true_engine):
    runs = generate_runs(true_engine)
    told = []
    (rows,) = leave_gpus_out(runs, told.append).predictions.values()
    assert not told and rows == leave_engines_out(runs).all_predictions
    assert rows == predict(with_engines(runs, without_fit(true_engine)))


def test_each_constant_of_all_types_and_of_each_is_ablated(engines_that_share):
    runs = [run for engine in engines_that_share for run in generate_runs(engine)[::4]]
    found = {(a.gpu, a.constant): a for a in ablate(runs, engines_that_share)}
    fitted = [("any", "link_efficiency"), *((engine.gpu, "matmul_efficiency") for engine in engines_that_share)]
    assert list(found)[:3] == fitted
    assert all(found[each].scores.mape > 0.005 for each in fitted)


def test_an_engine_without_fitted_constants_is_scored_as_it_is():
    runs = [make_run(Layout(dp_shard=8), model=model, engine="dtlayout") for model in (NARROW, WIDE)]
    assert not runs[0].scenario.engine.is_calibrated
    left_out = leave_models_out([*runs, make_run(Layout(tp=8), model=WIDE, engine="dtlayout")]).predictions
    assert {model: len(rows) for model, rows in left_out.items()} == {"narrow": 1, "wide": 2}
    assert left_out["narrow"][0].estimate == predict(runs)[0].estimate


def test_runs_that_had_to_be_changed_in_batch_and_runs_of_no_speed_are_not_fitted_to(true_engine):
    runs = generate_runs(true_engine)
    odd = [make_run(Layout(dp_shard=8), engine=true_engine, batch=9), make_run(Layout(), engine=true_engine, mfu=0.0)]
    start = without_fit(true_engine)
    assert fit_engines([*runs, *odd], [start]) == fit_engines(runs, [start])


def test_a_constant_is_worth_what_the_scores_lose_without_it(true_engine):
    runs = generate_runs(true_engine)
    rows = ablate(runs, [true_engine])
    lost = {a.constant: a.scores for a in rows}
    assert [(a.constant, a.neutral) for a in rows[: len(TRUE)]] == [
        (name, getattr(without_fit(true_engine).constants, name)) for name in TRUE
    ]
    by_hand = {a.constant: a.neutral for a in rows[len(TRUE) :]}
    assert by_hand and all(
        getattr(true_engine.constants, name) != value == getattr(RunAheadConstants(), name)
        for name, value in by_hand.items()
    )
    assert lost["link_efficiency"].mape > 0.005 > lost["logit_bytes"].mape
    assert lost["logit_bytes"].memory > 0.001 > lost["link_efficiency"].memory


def test_runs_are_grouped_by_engine_and_gpu_type():
    runs = [make_run(Layout(), engine=name) for name in ("nanotron", "megatron", "nanotron")]
    assert {key: len(group) for key, group in group_runs(runs).items()} == {
        ("nanotron", "h100-80g-sxm"): 2, ("megatron", "h100-80g-sxm"): 1,
    }  # fmt: skip


def test_runs_whose_engine_has_constants_of_all_gpu_types_are_one_group(engines_that_share):
    runs = [make_run(Layout(), engine=engine) for engine in engines_that_share]
    runs += [make_run(Layout(), engine="dtlayout")]
    assert {key: len(group) for key, group in group_for_fit(runs).items()} == {
        ("nanotron", "any"): 2, ("dtlayout", "h100-80g-sxm"): 1,
    }  # fmt: skip


# Cells.


def write(path: Path, *rows: str) -> Path:
    path.write_text("\n".join([HEADER, *rows]) + "\n", encoding="utf-8")
    return path


def with_cell(column: str, text: str) -> str:
    cells = ROW.split(",")
    cells[HEADER.split(",").index(column)] = text
    return ",".join(cells)


def test_tables_are_read_as_runs(tmp_path):
    (run,) = read_tables([write(tmp_path / "runs.csv", ROW)]).runs
    assert run.scenario.model.name == "small"


@pytest.mark.parametrize(
    ("column", "text", "problem"),
    [
        ("layers", "many", "'many' must be a whole number of at least 1"),
        ("layers", "8.5", "'8.5' must be a whole number of at least 1"),
        ("hidden", "", "'' must be a whole number of at least 1"),
        ("tp", "0", "'0' must be a whole number of at least 1"),
        ("cp", "-1", "'-1' must be a whole number of at least 1"),
        ("zero", "4", "'4' must be a whole number, 0 to 3"),
        ("tied", "perhaps", "'perhaps' is unknown; use true, false"),
        ("recompute", "some", "layout.recompute='some' is unknown; use none, full"),
        ("kernel", "fast", "'fast' is unknown; use torch, megatron-softmax, flash1"),
        ("status", "fine", "'fine' is unknown; use ok, oom, crashed_or_oom"),
        ("step_time_s", "0", "'0' must be empty or a number above 0"),
        ("step_time_s", "nan", "'nan' must be empty or a number above 0"),
        ("peak_memory_gb", "inf", "'inf' must be empty or a number above 0"),
        ("mfu", "45.2", "'45.2' must be empty or a fraction of the bf16 peak, 0 to 1, below bf16 to 8"),
        ("mfu", "fast", "'fast' must be empty or a fraction of the bf16 peak"),
    ],
)
def test_a_wrong_cell_is_refused_with_file_line_and_column(tmp_path, column, text, problem):
    path = write(tmp_path / "runs.csv", ROW, with_cell(column, text))
    with pytest.raises(InvalidConfig) as caught:
        read_tables([path])
    assert str(caught.value).startswith(f"table {path}, line 3, column {column}: {problem}")


def test_all_wrong_cells_are_named_at_once(tmp_path):
    one, two = (
        write(tmp_path / "one.csv", with_cell("tp", "x"), with_cell("pp", "y")),
        write(tmp_path / "two.csv", "a,b"),
    )
    with pytest.raises(InvalidConfig) as caught:
        read_tables([one, two])
    assert [line.partition(":")[0] for line in caught.value.problems[:3]] == [
        f"table {one}, line 2, column tp", f"table {one}, line 3, column pp", f"table {two}, line 2, column hidden",
    ]  # fmt: skip


def test_a_wrong_column_does_not_name_every_row(tmp_path):
    with pytest.raises(InvalidConfig) as caught:
        read_tables([write(tmp_path / "runs.csv", *[with_cell("tp", "x")] * 100)])
    assert len(caught.value.problems) == 21
    assert caught.value.problems[-1].endswith("80 more cells are wrong")


def test_a_row_with_too_many_cells_is_refused(tmp_path):
    with pytest.raises(InvalidConfig, match="line 2: more cells than the 30 columns"):
        read_tables([write(tmp_path / "runs.csv", f"{ROW},1")])


def test_what_is_wrong_only_together_is_refused_with_file_and_line(tmp_path):
    with pytest.raises(InvalidConfig, match=r"line 2: model\.hidden_size=1024 does not split into num_heads=7"):
        read_tables([write(tmp_path / "runs.csv", with_cell("heads", "7"))])
    with pytest.raises(InvalidConfig, match=r"line 2: dp·cp·tp·pp is \d+, but gpus=24"):
        read_tables([write(tmp_path / "runs.csv", with_cell("gpus", "24"))])


def test_an_engine_takes_the_place_of_a_tables_unknown_one(tmp_path):
    path = write(tmp_path / "runs.csv", with_cell("engine", "steam"))
    assert read_tables([path], engine="nanotron").runs[0].scenario.engine.name == "nanotron"
    with pytest.raises(InvalidConfig, match=r"^--engine=steam is unknown; use one of aa-scaling, "):
        read_tables([path], engine="steam")


def test_a_file_that_is_no_table_is_refused(tmp_path):
    with pytest.raises(InvalidConfig, match="cannot be read: No such file"):
        read_tables([tmp_path / "none.csv"])
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidConfig, match="is not CSV"):
        read_tables([tmp_path / "binary.csv"])
