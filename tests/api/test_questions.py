"""Questions in Python answer as the commands do, whatever form the model, the layout and the GPU are given in."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hf_models import SIZES as HF_SIZES
from tiny import ROOT

import dtlayout as dl
from dtlayout.api import job
from dtlayout.base.errors import InvalidConfig, InvalidLayout
from dtlayout.cli import main

SIZES = {
    "hidden_size": 1024, "num_layers": 8, "num_heads": 16, "num_kv_heads": 4, "ffn_size": 4096, "vocab_size": 32000,
}  # fmt: skip
JOB = {"gpu": "h100-80g-sxm", "gpus": 8, "seq_len": 2048, "global_batch": 64}
CONFIG = """
[model]
name = "own"
{model}
[batch]
global_batch = 64
seq_len = 2048
[layout]
tp = 2
pp = 2
micro_batch = 2
[cluster]
gpu = "h100-80g-sxm"
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The job as a config, with tp2·pp2."""
    path = tmp_path / "own.toml"
    path.write_text(CONFIG.format(model="\n".join(f"{name} = {size}" for name, size in SIZES.items())))
    return path


def answer(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict:
    """The document of a command."""
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_explain_is_the_commands_document(config, capsys):
    expected = answer(capsys, "explain", config, "--gpus", "8")
    found = dl.explain(SIZES, "tp2 pp2 mb2", **JOB)
    assert json.loads(json.dumps(found.to_dict())) == expected
    assert found.bound_by == expected["limit"]["component"] and len(found.changes) == len(expected["changes"])
    assert str(found).startswith("layout        pp2·dp2·tp2+sp mb2 1f1b zero1 on 8 x h100-80g-sxm")


def test_the_page_of_an_explained_layout_names_its_limit_as_the_text_does():
    for model, kind in ((SIZES, "tp: "), ("llama3.1-70b", "memory: ")):
        found = dl.explain(model, "tp2 mb1", **JOB)
        (bound,) = (line.partition("bound by")[2].strip() for line in str(found).splitlines() if "bound by" in line)
        assert bound.startswith(kind) and f"<p>Bound by {bound}.</p>" in found._repr_html_()


def test_what_a_gpu_is_taken_for_is_told_once(capsys, monkeypatch):
    monkeypatch.setattr(job, "_TOLD", set())
    for ask in (dl.predict, dl.explain, dl.recommend):
        assert ask(SIZES, **{**JOB, "gpu": "H100"}).scenario.cluster.gpu.name == "h100-80g-sxm"
    assert capsys.readouterr().err.count("note: H100 is taken as h100-80g-sxm") == 1


def test_a_prediction_is_the_explained_one(config, capsys):
    expected = answer(capsys, "explain", config, "--gpus", "8")
    found = dl.predict(SIZES, "tp2 pp2 mb2", **JOB)
    assert (found.step_time_s, found.peak_bytes) == (expected["step_time_s"], expected["peak_memory_bytes"])
    assert list(found.step_time_range_s) == expected["step_time_range_s"]
    assert [{**rank, "total": sum(rank.values())} for rank in found.memory_bytes] == expected["memory_bytes"]
    assert found.to_dict()["tokens_per_s_per_gpu"] == expected["tokens_per_s_per_gpu"] and found.fits
    assert "it fits" in str(found) and repr(found) == str(found)


def test_recommend_is_the_commands_document(config, capsys):
    shared = ["--gpu", "h100-80g-sxm", "--gpus", "8", "--seq-len", "2048", "--global-batch", "64"]
    asked = ["--fix", "tp=2", "--avoid", "recompute=full", "--why-not", "tp=4", "--top", "2"]
    expected = answer(capsys, "recommend", "--model", config, *shared, *asked)
    found = dl.recommend(SIZES, **JOB, fix={"tp": 2}, avoid="recompute=full", why_not="tp=4", top=2)
    assert json.loads(json.dumps(found.to_dict())) == expected
    assert [each.step_time_s for each in found.layouts] == [each["step_time_s"] for each in expected["layouts"]]
    assert found.best.layout.tp == 2 and "Why not" in str(found)


def test_a_dry_run_counts_what_the_command_counts(capsys):
    shared = ["--world", "2", "--gpu", "cpu", "--layout.tp=2", "--ranks", "1"]
    asked = [
        "--batch.seq_len=64",
        "--batch.global_batch=4",
        "--layout.pp=1",
        "--layout.micro_batch=1",
        "--precision.compute=bfloat16",
    ]
    expected = answer(capsys, "dryrun", "configs/debug.toml", *shared, *asked)
    found = dl.dry_run("debug", tp=2, gpu="cpu", gpus=2, seq_len=64, global_batch=4, ranks=[1])
    assert found.peak_bytes == {1: expected["ranks"][0]["peak_bytes"]} and found.fits
    assert found.plot().axes[0].get_title(loc="left") == "memory at the peak, MiB"


@pytest.mark.parametrize(
    ("model", "keywords"),
    [
        (SIZES, {}),
        (None, SIZES),
        (dl.ModelShape(name="own", **SIZES), {}),
        (dl.ModelShape(name="own", **{**SIZES, "num_layers": 4}), {"num_layers": 8}),
    ],
)
@pytest.mark.parametrize(
    ("layout", "choices"),
    [
        ("pp2·dp2·tp2+sp mb2 1f1b zero1", {}),
        ("tp=2, pp=2, mb=2", {}),
        (None, {"tp": 2, "pp": 2, "micro_batch": 2}),
        ({"tp": 2, "pp": 2}, {"micro_batch": 2}),
        (dl.Layout(pp=2, dp_shard=2, tp=2, micro_batch=2), {}),
    ],
)
def test_every_form_of_a_model_and_of_a_layout_is_the_same_job(model, keywords, layout, choices):
    found = dl.predict(model, layout, **keywords, **choices, **{**JOB, "gpu": "H100"})
    assert found == dl.predict(SIZES, "tp2 pp2 mb2", **JOB)


def test_presets_folders_and_cluster_files_are_taken(tmp_path):
    sizes = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 320,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False, "max_position_embeddings": 128,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    (tmp_path / "lab.toml").write_text('gpu = "a100-80g-sxm"\ngpus = 4\ngpus_per_node = 4\n')
    found = dl.predict(tmp_path, cluster=tmp_path / "lab.toml", seq_len=128, global_batch=8)
    assert str(found.layout) == "dp4 mb1 zero1" and found.scenario.cluster.gpu.name == "a100-80g-sxm"
    assert dl.predict("llama3.1-8b", "zero3", **JOB).scenario.model == dl.find_preset("llama3.1-8b")


def test_a_cpu_has_no_seconds_and_no_mfu():
    found = dl.predict("debug", "tp2", gpu="cpu", gpus=2, seq_len=64, global_batch=4)
    assert (found.step_time_s, found.step_time_range_s, found.mfu, found.time_s) == (None, None, None, None)
    assert "no step time" in str(found) and len(found.plot().axes) == 1


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"layout": "tp3"}, "world size 8 does not fit the layout"),
        ({"tpp": 2}, "tpp is unknown; did you mean tp?"),
        ({"seqlen": 2}, "seqlen is unknown; did you mean seq_len?"),
        ({"gpus": 64.5}, "gpus=64.5 must be a whole number above 0"),
        ({"gpus_per_node": 0}, "gpus_per_node=0 must be a whole number above 0"),
        ({"layout": "quick"}, "'quick' is no choice; write a layout as it is printed"),
        ({"kernels": {"norm": "fast"}}, "kernels.norm='fast' is unknown"),
        ({"gpu": "h1000"}, "GPU type 'h1000' is unknown"),
        ({"gpu": None}, 'the GPU type is missing; give gpu="h100"'),
        ({"cluster": "lab.toml"}, "cluster names the GPU type itself; give cluster or gpu, not both"),
        ({"model": None}, "model.name='own' is no preset"),
        ({"model": 3}, "model is a int; give a name, a folder, sizes, or describe_module"),
        ({"model": {**SIZES, "layers": 3}}, "model.layers is unknown"),
        ({"optimizer": "adam"}, "optimizer.name='adam' is unknown"),
    ],
)
def test_what_is_wrong_is_refused_as_the_commands_refuse_it(asked, said):
    with pytest.raises((InvalidConfig, InvalidLayout)) as refused:
        dl.predict(**{"model": SIZES, **JOB, **asked})
    assert str(refused.value).startswith(said)


def test_a_search_refuses_degrees_as_keywords_and_asks_for_the_number_of_gpus():
    with pytest.raises(InvalidConfig, match=r"tp: the search finds it; fix=\{'tp': …\} holds it"):
        dl.recommend(SIZES, tp=2, **JOB)
    with pytest.raises(InvalidConfig, match="the number of GPUs is missing; give gpus=N"):
        dl.recommend(SIZES, **{**JOB, "gpus": None})
    with pytest.raises(InvalidConfig, match="steps=-1 must not be negative"):
        dl.dry_run(SIZES, **JOB, steps=-1)


def test_layouts_stand_side_by_side_with_what_each_costs(tmp_path):
    first = dl.predict(SIZES, "tp2 mb1", **JOB)
    found = dl.compare(first, "pp2·tp2 mb2", dl.Layout(dp_shard=8), dl.recommend(SIZES, **JOB, top=1))
    assert [each.layout.world_size for each in found.layouts] == [8] * 4
    assert found.layouts[0] is first and found.layouts[1].layout.dp_shard == 2
    assert found.layouts[2].step_time_s == dl.predict(SIZES, dl.Layout(dp_shard=8), **JOB).step_time_s
    second = found.to_dict()["layouts"][1]
    times = found.layouts[1].time_s
    assert second["bubble"] == times["bubble"] / second["step_time_s"] > 0
    assert second["exposed_communication"] == sum(times[each] for each in ("tp", "pp", "dp")) / second["step_time_s"]
    text = str(found)
    assert text.startswith("own on 8 x h100-80g-sxm, 4 layouts\n  1  dp4·tp2+sp mb1 zero1, ")
    for name in ("step, s", "tokens/s/GPU", "MFU", "peak memory", "bubble", "exposed communication"):
        assert f"\n{name} " in text
    assert f" {second['step_time_s']:.3f} (" in text and len(found.plot().axes) == 2
    page = found._repr_html_()
    assert page.startswith('<div class="dtlayout">') and "exposed communication</" in page and "side by side" in page
    assert (
        f"<th class=t>1  {first.layout},<br>{first.kernels.attention},<br>compile {first.kernels.compile}</th>" in page
    )
    on_cpu = dl.predict("debug", gpu="cpu", gpus=2, seq_len=64, global_batch=4)
    unknown = dl.compare(on_cpu, "tp2")
    assert unknown.to_dict()["layouts"][1]["bubble"] is None and "no step time" in str(unknown)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (lambda first: (first,), "compare takes two layouts or more"),
        (lambda first: ("tp2", first), "tp2 has no job: give a prediction first"),
        (lambda first: (first, 3), "compare takes predictions and layouts, and 3 is a int"),
        (lambda first: (first, dl.Layout()), "1 rank mb1 zero1 is for 1 GPUs, and the job has 8"),
        (lambda first: (first, "tp16"), "tp16+sp mb1 zero1 is for 16 GPUs, and the job has 8"),
        (lambda first: (first, "attention=quick"), "attention"),
    ],
)
def test_what_cannot_be_compared_is_refused(asked, said):
    with pytest.raises((InvalidConfig, InvalidLayout)) as refused:
        dl.compare(*asked(dl.predict(SIZES, **JOB)))
    assert said in str(refused.value)


def test_a_search_writes_the_best_layout(tmp_path):
    dl.recommend(SIZES, **JOB, emit=tmp_path / "best.toml")
    assert "# Run it: dtlayout train best.toml --ranks 8" in (tmp_path / "best.toml").read_text()


def test_what_is_written_for_a_folder_starts_from_its_weights_and_nothing_else_does(tmp_path, monkeypatch):
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.chdir(tmp_path)
    LlamaForCausalLM(LlamaConfig(**HF_SIZES | {"vocab_size": 337})).save_pretrained("given")
    found = dl.recommend("given", **JOB, emit="best.toml")
    assert (found.scenario.model.num_ids, found.scenario.model.vocab_size % 2) == (337, 0)
    assert f'init_from = "{tmp_path / "given"}"' in Path("best.toml").read_text()
    dl.recommend(SIZES, **JOB, emit="own.toml")  # a model without a folder, beside a folder of any name
    assert "init_from" not in Path("own.toml").read_text()


def test_predictions_need_neither_torch_nor_matplotlib_and_dry_runs_no_guard(tmp_path):
    (tmp_path / "script.py").write_text(
        "import sys\nimport dtlayout as dl\n"
        'print(dl.predict("debug", gpu="cpu", gpus=1, seq_len=64, global_batch=4).fits)\n'
        'print({"torch", "matplotlib"} & {*sys.modules})\n'
        'print(dl.dry_run("debug", gpu="cpu", gpus=1, seq_len=64, global_batch=4).fits)\n'
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "True\nset()\nTrue\n"), done.stderr
