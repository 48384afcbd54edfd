"""dtlayout recommend: the best layouts with their reasons, every question that can be asked, every refusal."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny import ROOT

from dtlayout.cli import main
from dtlayout.commands.recommend_answer import find_alike
from dtlayout.config import check_layout, load_config
from dtlayout.models.presets import PRESETS

LLAMA = ["--model", "llama-7b", "--gpu", "a100-80g-sxm", "--gpus", "16", "--seq-len", "2048", "--global-batch", "128"]
DEBUG = ["--model", "debug", "--gpu", "cpu", "--gpus", "4", "--seq-len", "64", "--global-batch", "8"]
HF = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "tie_word_embeddings": False, "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip


def with_model(arguments, model):
    return [*arguments[:1], str(model), *arguments[2:]]


def ask(capsys, *arguments):
    """The JSON document that answers."""
    assert main(["recommend", *arguments, "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return json.loads(printed.out)


def ask_with_progress(capsys, *arguments):
    """The same of a question whose answer takes a while."""
    assert main(["recommend", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refuse(capsys, *arguments):
    """The lines that refuse."""
    assert main(["recommend", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err


def test_the_best_come_first_with_cost_and_reason(capsys):
    document = ask(capsys, *LLAMA, "--top", "4")
    layouts = document["layouts"]
    times = [layout["step_time_s"] for layout in layouts]
    assert len(layouts) == 4 and all(later >= 0.995 * times[0] for later in times)
    for layout in layouts:
        assert sum(layout["time"].values()) == pytest.approx(layout["step_time_s"])
        assert sum(layout["memory"][layout["busiest_rank"]].values()) == pytest.approx(layout["peak_bytes"])
        assert layout["peak_bytes"] <= document["scenario"]["allowed_bytes"]
        interval = document["scenario"]["intervals"]["step_time"]
        assert layout["step_time_range_s"] == [layout["step_time_s"] * interval[bound] for bound in ("low", "high")]
        assert layout["peak_range_bytes"][0] < layout["peak_range_bytes"][1]
    assert all(layout["why"] for layout in layouts[:-1]) and layouts[-1]["why"] is None
    assert document["scenario"]["calibrated"] is False
    assert document["alike"]["places"] == 4 and document["alike"]["pairs"] > document["alike"]["right"] > 0
    assert sum(document["searched"]["counts"].values()) == document["searched"]["layouts"]


def test_people_get_a_table_with_bands_bars_shares_and_reasons(capsys):
    assert main(["recommend", *LLAMA, "--top", "2"]) == 0
    text = capsys.readouterr().out
    for expected in (
        "uncalibrated",
        "uncalibrated: no run of it on a100-80g-sxm is known; nothing like it was measured\nstep ",
        " times as predicted, for 90% of ",
        "laces 1 to 2 cannot be told apart: layouts predicted within ",
        "█",
        "of the step, %",
        "bubble",
        "1  ",
        "Against other choices",
        "not legal",
    ):
        assert expected in text
    assert len(text.split(" layouts: ")) == 2


def test_leading_layouts_are_told_apart_where_their_steps_differ_by_enough():
    near, far = find_alike([1.0, 1.004, 1.3], "dtlayout"), find_alike([1.0, 1.3], "dtlayout")
    assert (near.places, near.least, near.most) == (2, 0.0, 0.005)
    assert near.right < 0.7 * near.pairs
    assert str(near).startswith("Places 1 to 2 cannot be told apart: layouts predicted within 0.5% of each other came ")
    assert (far.places, far.most) == (1, None) and far.right > 0.9 * far.pairs
    assert str(far).startswith(f"1 is apart from 2: layouts predicted {far.least:.1%} apart or more came in that order")
    assert find_alike([1.0], "dtlayout") is None


def test_other_choices_are_judged_each_with_a_reason(capsys):
    against = {entry["change"]: entry for entry in ask(capsys, *LLAMA)["against"]}
    assert against["attention=sdpa-math"]["outcome"] in ("slower", "does not fit")
    assert against["norm=eager"]["outcome"] == "as fast"  # compiled blocks fuse it
    assert all(entry["problems"] for entry in against.values())
    assert {"not legal", "does not fit", "slower", "as fast"} >= {entry["outcome"] for entry in against.values()}


def test_fixed_and_avoided_choices_hold(capsys):
    document = ask(capsys, *LLAMA, "--fix", "tp=2", "--fix", "norm=eager", "--avoid", "recompute=none")
    for found in document["layouts"]:
        assert (found["layout"]["tp"], found["kernels"]["norm"]) == (2, "eager")
        assert found["layout"]["recompute"] != "none"


def test_less_memory_may_be_allowed(capsys):
    document = ask(capsys, *LLAMA, "--max-memory", "0.3")
    capacity = document["layouts"][0]["capacity_bytes"]
    assert document["scenario"]["allowed_bytes"] == pytest.approx(0.3 * capacity)
    assert all(found["peak_bytes"] <= 0.3 * capacity for found in document["layouts"])


@pytest.mark.parametrize(
    ("choices", "outcome", "problem"),
    [
        ("tp=3", "not legal", "needs 15 GPUs, the cluster has 16"),
        ("micro_batch=3", "not legal", "is not a multiple of dp * micro_batch"),
        ("micro_batch=8,recompute=none", "does not fit", "pipeline rank 0 needs"),
        ("tp=4,pp=4,micro_batch=2", "slower", "% slower: "),
    ],
)
def test_why_not_says_what_stands_against_a_layout(capsys, choices, outcome, problem):
    why_not = ask(capsys, *LLAMA, "--why-not", choices)["why_not"]
    assert why_not["outcome"] == outcome
    assert any(problem in line for line in why_not["problems"])
    if outcome == "does not fit":
        assert "GiB too much: activations" in why_not["problems"][0]
    if outcome == "slower":
        assert "more in" in why_not["problems"][0]


def test_why_not_also_says_what_these_choices_reach_at_best(capsys):
    assert main(["recommend", *LLAMA, "--why-not", "tp=4,pp=4,micro_batch=2"]) == 0
    assert "The best with these choices" in capsys.readouterr().out
    assert main(["recommend", *LLAMA, "--why-not", "micro_batch=3"]) == 0
    assert "No layout with these choices is legal and fits." in capsys.readouterr().out


@pytest.mark.parametrize("baseline", ["thumb", "playbook"])
def test_a_baseline_costs_what_it_costs(capsys, baseline):
    document = ask(capsys, *LLAMA, "--baseline", baseline)
    found = document["baseline"]
    assert found["steps"] and found["slower_than_best"] >= -0.005
    best = document["layouts"][0]["step_time_s"]
    assert found["layout"]["step_time_s"] / best - 1 == pytest.approx(found["slower_than_best"])


@pytest.mark.parametrize(
    ("model", "gpus", "thumb"),
    [
        ("llama3.1-8b", 64, {"tp": 1, "pp": 1, "zero": 1}),
        ("llama3.1-405b", 2048, {"tp": 8}),
    ],
)
def test_the_rule_of_thumb_takes_data_then_tensor_then_pipeline_parallelism(capsys, model, gpus, thumb):
    arguments = ["--model", model, "--gpu", "h100-80g-sxm", "--gpus", str(gpus), "--seq-len", "4096"]
    document = ask(capsys, *arguments, "--global-batch", "2048", "--top", "1", "--baseline", "thumb")
    assert document["baseline"]["layout"]["layout"].items() >= thumb.items()


def test_scale_gives_one_row_a_cluster(capsys):
    arguments = [*LLAMA[:4], *LLAMA[6:]]  # without --gpus
    rows = ask(capsys, *arguments, "--scale", "1,16,64")["scale"]
    assert [row["num_gpus"] for row in rows] == [1, 16, 64]
    assert rows[0]["layout"] is None and rows[0]["efficiency"] is None
    assert rows[1]["efficiency"] == 1.0 and 0 < rows[2]["efficiency"] <= 1.05
    assert main(["recommend", *arguments, "--scale", "1,16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].split(maxsplit=1) == ["1", "no layout is legal and fits"]
    assert lines[-1].split()[0] == "16"


def test_min_gpus_is_the_smallest_cluster_that_works(capsys):
    arguments = [*LLAMA[:4], *LLAMA[6:]]
    document = ask(capsys, *arguments, "--min-gpus")
    smallest = document["scenario"]["num_gpus"]
    assert smallest in (2, 4)
    assert "no layout can train" in refuse(capsys, *arguments, "--gpus", str(smallest // 2))


def test_min_gpus_gives_up_where_no_cluster_is_large_enough(capsys):
    arguments = ["--model", "llama-7b", "--gpu", "rtx4090-24g", "--seq-len", "262144", "--global-batch", "1"]
    assert "no layout fits on any cluster of up to" in refuse(capsys, *arguments, "--min-gpus", "--fix", "tp=1")


@pytest.mark.parametrize("extra", [[], ["--fix", "pp=2"], ["--engine", "aa-scaling", "--fix", "pp=4"]])
def test_an_emitted_config_loads_and_is_legal_on_that_world(capsys, tmp_path, extra):
    path = tmp_path / "best.toml"
    document = ask(capsys, *LLAMA, "--vocab", "50_000", "--emit", str(path), *extra)
    config = load_config(path)
    layout = check_layout(config, 16)
    best = document["layouts"][0]
    assert {
        name: getattr(layout, name) for name in ("tp", "pp", "dp_shard", "dp_replicate", "micro_batch", "zero")
    } == {name: best["layout"][name] for name in ("tp", "pp", "dp_shard", "dp_replicate", "micro_batch", "zero")}
    assert (config.model.vocab_size, config.train.device, config.cluster.gpu) == (50_000, "cuda", "a100-80g-sxm")
    text = path.read_text()
    assert text.startswith("# llama-7b on 16 x a100-80g-sxm") and "# Run it: torchrun --nnodes 2 " in text
    assert "uncalibrated" in text or extra[:1] == ["--engine"]


def test_an_emitted_config_for_the_cpu_needs_no_gpu_and_no_file(capsys, tmp_path):
    path = tmp_path / "debug.toml"
    assert main(["recommend", *DEBUG, "--precision", "compute=float32", "--emit", str(path), "--top", "1"]) == 0
    assert f"1 is written to {path}" in capsys.readouterr().out
    config = load_config(path)
    assert check_layout(config, 4).world_size == 4
    assert (config.train.device, config.data.source, config.data.tokenizer) == ("cpu", "python-stdlib", "bytes")
    assert config.model == PRESETS["debug"] and config.precision.compute == "float32"


def test_a_vocabulary_too_small_for_bytes_asks_for_a_tokenizer(capsys, tmp_path):
    path = tmp_path / "small.toml"
    ask(capsys, *DEBUG, "--vocab", "64", "--emit", str(path))
    assert load_config(path).data.tokenizer == "data/tokenizer.json"
    assert "Bytes need 257 ids, the model has 64" in path.read_text()


def test_a_model_comes_from_a_huggingface_config_or_toml(capsys, tmp_path):
    hf = tmp_path / "config.json"
    hf.write_text(json.dumps(HF))
    own = tmp_path / "own.toml"
    own.write_text('[model]\nname = "llama-7b"\nnum_layers = 16\n')
    found = ask(capsys, *with_model(LLAMA, hf))["scenario"]["model"]
    preset = ask(capsys, *with_model(LLAMA, "llama3.1-8b"))["scenario"]["model"]
    assert {**found, "name": "llama3.1-8b"} == preset
    assert ask(capsys, *with_model(LLAMA, tmp_path))["scenario"]["model"] == found
    assert ask(capsys, *with_model(LLAMA, own))["scenario"]["model"]["num_layers"] == 16


def test_an_own_model_is_emitted_with_all_sizes(capsys, tmp_path):
    hf, path = tmp_path / "config.json", tmp_path / "best.toml"
    hf.write_text(json.dumps(HF))
    ask(capsys, *with_model(LLAMA, hf), "--emit", str(path))
    model = load_config(path).model
    assert model.rope_scaling == PRESETS["llama3.1-8b"].rope_scaling and model.num_kv_heads == 8


def test_a_cluster_comes_from_a_file(capsys, tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text('gpu = "h100-80g-sxm"\ngpus = 32\ngpus_per_node = 4\n')
    arguments = [*LLAMA[:2], *LLAMA[6:], "--cluster", str(path)]
    scenario = ask(capsys, *arguments)["scenario"]
    assert (scenario["gpu"], scenario["num_gpus"], scenario["gpus_per_node"]) == ("h100-80g-sxm", 32, 4)
    assert ask(capsys, *arguments, "--gpus", "16")["scenario"]["num_gpus"] == 16
    assert "not both" in refuse(capsys, *arguments, "--gpu", "cpu")


def test_a_rack_is_described_with_what_its_links_join(capsys, tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text('gpu = "gb200"\ngpus = 8\n')
    assert main(["recommend", *LLAMA[:2], *LLAMA[6:], "--cluster", str(path), "--top", "1"]) == 0
    assert "on 8 x gb200 in nodes of 4, 8 joined by fast links; 128 sequences" in capsys.readouterr().out
    path.write_text(f'{path.read_text()}[gpus_linked]\nvalue = 4\nunit = "GPU"\nsource = "no switch"\n')
    assert main(["recommend", *LLAMA[:2], *LLAMA[6:], "--cluster", str(path), "--top", "1"]) == 0
    assert "on 8 x gb200 in nodes of 4; 128 sequences" in capsys.readouterr().out


def test_an_engine_with_measured_runs_is_not_called_uncalibrated(capsys):
    assert main(["recommend", *LLAMA, "--engine", "aa-scaling", "--top", "1"]) == 0
    assert "uncalibrated" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (with_model(LLAMA, "llama-7c"), "model 'llama-7c' is no preset, config.json or TOML file; did you mean"),
        (with_model(LLAMA, "none.json"), "model none.json cannot be read: No such file"),
        ([*LLAMA, "--fix", "tpp=2"], "tpp is unknown; did you mean tp?"),
        ([*LLAMA, "--avoid", "recompute=ful"], "layout.recompute='ful' is unknown"),
        ([*LLAMA, "--why-not", "tp"], "'tp' is no choice"),
        ([*LLAMA, "--engine", "own"], "engine 'own' is unknown"),
        ([*LLAMA, "--optimizer", "adam"], "optimizer.name='adam' is unknown; use one of adamw, sgd"),
        ([*LLAMA, "--precision", "params=float8"], "precision.params='float8' is unknown"),
        ([*LLAMA, "--precision", "weights=float32"], "precision 'weights' is unknown"),
        ([*LLAMA, "--top", "0"], "--top=0 must be at least 1"),
        ([*LLAMA, "--max-memory", "1.5"], "--max-memory=1.5 must lie above 0"),
        ([*LLAMA, "--scale", "8,x"], "--scale=8,x is no list of numbers"),
        ([*LLAMA, "--scale", "0"], "--scale=0 must name at least 1 GPU"),
        ([*LLAMA, "--scale", "8", "--min-gpus"], "--scale compares clusters"),
        ([*LLAMA[:4], *LLAMA[6:]], "the number of GPUs is missing; give --gpus N"),
        ([*LLAMA[:2], *LLAMA[4:]], "the cluster is missing; give --gpu NAME --gpus N, or --cluster FILE"),
        ([*LLAMA, "--gpus", "0"], "num_gpus=0 must be a whole number"),
        ([*LLAMA, "--gpu", "a1000"], "GPU type 'a1000' is unknown"),
        (
            [*LLAMA, "--emit", "none/none/best.toml"],
            "none/none/best.toml cannot be written: there is no folder none/none",
        ),
    ],
)
def test_what_cannot_be_answered_is_refused_in_a_line(capsys, arguments, problem):
    assert refuse(capsys, *arguments).startswith(problem)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "is not JSON"),
        ("[]", "it is no table of sizes"),
        (
            json.dumps({**HF, "model_type": "mixtral"}),
            "model_type='mixtral' is not known; use one of llama, qwen2, qwen3",
        ),
        (json.dumps({**HF, "attention_bias": True}), "attention_bias=true is not known"),
        (json.dumps({**HF, "hidden_size": None}), "hidden_size is missing"),
        (json.dumps({**HF, "hidden_size": "4096"}), "model.hidden_size='4096' must be a whole number"),
        (json.dumps({**HF, "head_dim": 63}), "head_dim=63 must be even"),
        (json.dumps({**HF, "use_sliding_window": True}), "use_sliding_window=true is not known"),
        (json.dumps({**HF, "rope_scaling": {"type": "linear"}}), "rope_scaling of type 'linear' is not known"),
        (json.dumps({**HF, "rope_scaling": {"type": "llama3"}}), "rope_scaling.factor is missing"),
    ],
)
def test_a_config_json_that_is_no_llama_is_refused(capsys, tmp_path, content, problem):
    path = tmp_path / "config.json"
    path.write_text(content)
    assert problem in refuse(capsys, *with_model(LLAMA, path))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("[model", "is not TOML"),
        ("[batch]", "it has no section [model]"),
        ('[model]\nname = "own"', "model.hidden_size is missing"),
        ('[model]\nname = "debug"\nhiden_size = 3', "model.hiden_size is unknown; did you mean model.hidden_size?"),
        (
            '[model]\nname = "debug"\nrope_scaling = 2',
            "model.rope_scaling is a table: write [model.rope_scaling] with factor",
        ),
        ('[model]\nname = "debug"\nrope_scaling = {factor = 2.0}', "model.rope_scaling.low_freq_factor is missing"),
        ('[model]\nname = "debug"\nnum_layers = 0', "model.num_layers=0 must be at least 1"),
    ],
)
def test_a_model_file_that_makes_no_model_is_refused(capsys, tmp_path, content, problem):
    path = tmp_path / "own.toml"
    path.write_text(content)
    assert problem in refuse(capsys, *with_model(LLAMA, path))


def test_an_emitted_config_can_say_whatever_its_model_and_its_cluster_say(capsys, tmp_path):
    hf = {**HF, "rope_theta": 1e300, "num_hidden_layers": 4}
    folder, path = tmp_path / "llama 😀 \x7f", tmp_path / "emitted.toml"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf))
    assert main(["recommend", *with_model(LLAMA, folder), "--emit", str(path)]) == 0
    model = load_config(path).model
    assert (model.name, model.rope_theta) == (folder.name, 1e300)


def test_where_nothing_fits_the_nearest_and_what_helps_are_named(capsys):
    problems = refuse(capsys, *with_model(LLAMA, "llama3.1-405b")).splitlines()
    assert problems[0].startswith("no layout can train llama3.1-405b here: ")
    assert problems[1].startswith("the one that misses by least, ") and "GiB too much" in problems[1]
    assert "--min-gpus" in problems[2]


def test_where_nothing_is_legal_an_example_says_why(capsys):
    problems = refuse(capsys, *LLAMA, "--fix", "tp=16", "--fix", "pp=2")
    assert "tp" in problems and "fewer --fix and --avoid" in problems
    assert "layout.cp=2 can be predicted, not trained yet" in refuse(capsys, *LLAMA, "--fix", "cp=2")


def test_cp_can_be_asked_for_of_an_engine_that_has_it(capsys):
    document = ask(capsys, *LLAMA, "--engine", "megatron", "--fix", "cp=2")
    assert document["layouts"] and {found["layout"]["cp"] for found in document["layouts"]} == {2}


def test_a_refusal_is_a_document_too(capsys):
    assert main(["recommend", *LLAMA, "--fix", "tpp=2", "--json"]) == 2
    assert json.loads(capsys.readouterr().out) == {"ok": False, "problems": ["tpp is unknown; did you mean tp?"]}


def test_recommending_imports_nothing_heavy():
    code = (
        "import sys; from dtlayout.cli import main; code = main(sys.argv[1:]);"
        "print(sorted({'torch', 'numpy', 'rich'} & set(sys.modules))); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "recommend", *LLAMA, "--baseline", "thumb", "--why-not", "tp=2"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "[]"


def test_nothing_is_written_where_nothing_was_asked(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ask(capsys, *DEBUG)
    assert list(Path().iterdir()) == []


def test_the_best_are_dry_run_and_a_misfit_is_dropped(capsys, monkeypatch):
    """Predictions are right here, so that only a planted oom leaves anything to correct."""
    one = [*DEBUG, "--fix", "zero=1", "--fix", "micro_batch=2", "--top", "3"]
    honest = ask_with_progress(capsys, *one, "--verify", "2")
    assert [v["fits"] for v in honest["verified"]] == [True, True]
    for found in honest["verified"]:
        assert found["peak_memory_bytes"] == pytest.approx(found["predicted_peak_memory_bytes"], rel=0.05)

    def find_oom(config, layout, kernels, ranks, **_):
        is_best = json.loads(json.dumps(asdict(layout))) == honest["layouts"][0]["layout"]
        return [SimpleNamespace(peak_bytes=2**40 if is_best else 2**20)]

    monkeypatch.setattr("dtlayout.dryrun.ranks.dry_run_ranks", find_oom)
    corrected = ask_with_progress(capsys, *one, "--verify", "1")
    assert [v["fits"] for v in corrected["verified"]] == [False, True]
    assert corrected["layouts"][0]["layout"] == honest["layouts"][1]["layout"]
    assert "does not fit" in refuse(capsys, *one[:-1], "1", "--verify", "1")
    monkeypatch.setattr("dtlayout.dryrun.ranks.dry_run_ranks", lambda *_, **__: [SimpleNamespace(peak_bytes=2**20)])
    assert [v["fits"] for v in ask_with_progress(capsys, *one, "--verify", "9")["verified"]] == [True] * 3


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--verify", "-1"], "--verify=-1"),
        (["--verify", "1", "--engine", "megatron"], "--engine=megatron"),
        (["--verify", "1", "--scale", "4,8"], "--scale"),
    ],
)
def test_what_cannot_be_dry_run_is_refused(capsys, arguments, reason):
    assert reason in refuse(capsys, *DEBUG, *arguments)
