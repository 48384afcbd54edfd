"""Real runs of train.py, under torchrun and alone: what they leave, how they resume, stop and end."""

import json
import math
import os
import re
import shutil
import signal
from pathlib import Path
from unittest import mock

import pytest
from launching import finish, launch, losses, read_lines, read_summary, started, wait_for_start, wait_for_steps
from planted import plant_noise
from tiny import SHAPE, TinyFiles, write_tiny
from tracked import read_tensorboard, read_wandb

from dtlayout.base.lease import LEASE_NAME
from dtlayout.checkpoint.manifest import read_manifest
from dtlayout.cli import main
from dtlayout.config.loading import load_config
from dtlayout.models.counting import count_parameters
from dtlayout.records.run import Run
from dtlayout.spec.device import Device
from dtlayout.spec.kernel_records import KernelRequest
from dtlayout.spec.kernels import Kernels, OpenKernels

KEYS = [
    "step", "loss", "grad_norm", "lr", "tokens", "step_time_s", "tokens_per_s", "tokens_per_s_per_gpu",
    "model_tflops_per_gpu", "mfu", "peak_memory_bytes", "peak_reserved_bytes", "validation_loss", "data_wait_s",
    "spike", "loss_scale", "layout", "resumed", "fullest_expert", "fullest_expert_block", "expert_imbalance",
    "router_entropy", "router_square", "validation_losses",
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def offline():
    """What W&B gets stays here."""
    with mock.patch.dict(os.environ, WANDB_MODE="offline"):
        yield


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> TinyFiles:
    """Six steps of a model with tied embeddings as tp2, with a checkpoint after each third, validated by twos."""
    folder = tmp_path_factory.mktemp("straight")
    files, log = write_tiny(folder, steps=6, tied=True), folder / "log"
    held_out = folder / "held_out.txt"
    held_out.write_text("".join(f"{i} plus {i} is {i + i}. " for i in range(100)), encoding="utf-8")
    validation = (f"--validation.source={held_out}", "--validation.every=2", "--validation.batches=3")
    trackers = '--metrics.to=["tensorboard", "wandb"]'
    overrides = ("--layout.tp=2", "--checkpoint.every=3", "--metrics.memory=true", trackers, *validation)
    assert launch(2, files.config, *overrides, log=log) == 0, log.read_text()
    return files


def test_trackers_get_each_number_of_each_step_from_one_rank(straight):
    lines = read_lines(straight.run)
    shown, ((config, logged),) = read_tensorboard(straight.run), read_wandb(straight.run)
    assert shown["train/loss"] == pytest.approx({line["step"]: line["loss"] for line in lines})
    assert [numbers["train/loss"] for numbers in logged.values()] == losses(straight.run)
    assert list(shown["validation/loss"]) == [2, 4, 6]
    assert [step for step, numbers in logged.items() if "validation/loss" in numbers] == [2, 4, 6]
    assert config["layout"]["tp"] == 2
    log = (straight.config.parent / "log").read_text()
    assert log.count("tensorboard --logdir") == log.count("wandb sync") == 1


def test_validation_is_noted_when_it_is_due_and_summed_up(straight):
    losses = {line["step"]: line["validation_loss"] for line in read_lines(straight.run)}
    measured = {step: loss for step, loss in losses.items() if loss is not None}
    assert list(measured) == [2, 4, 6]
    assert measured[2] > measured[6]
    best = min(measured, key=lambda step: measured[step])
    summed_up = {"last": measured[6], "best": measured[best], "best_step": best}
    assert read_summary(straight.run)["validation"] == summed_up


def test_a_run_says_how_much_of_its_data_it_reads(straight):
    log = (straight.config.parent / "log").read_text()
    num_samples = straight.corpus.stat().st_size // 16
    epochs = f"{48 / num_samples:.3g} epochs of {num_samples} samples with {16 * num_samples:,} targets"
    assert f"6 steps read 48 samples: {epochs}\n" in log
    held_out = (straight.config.parent / "held_out.txt").stat().st_size // 16
    assert f"validation measures 24 samples of {held_out}, 3 batches of {-(-held_out // 8)}: batches=3\n" in log


def test_all_of_several_held_out_sets_is_measured_also_before_the_first_step_alike_in_every_layout(tmp_path):
    """Of one a batch and a half, of the other less than one."""
    files, log, found = write_tiny(tmp_path, steps=1, num_layers=2), tmp_path / "log", {}
    for name, num_samples in (("long", 12), ("short", 3)):
        text = "".join(f"{i} plus {i} is {i + i}. " for i in range(40))
        (tmp_path / f"{name}.txt").write_text(text[: 16 * num_samples])  # and its end
    sets = ", ".join(f"{{name='{name}', source='{tmp_path / name}.txt'}}" for name in ("long", "short"))
    overrides = [files.config, f"--validation.sets=[{sets}]", "--validation.at_start=true", "--validation.batches=0"]
    in_threes = ("--batch.global_batch=3", "--layout.micro_batch=3")
    for name, num_ranks, more in (("one", 1, ()), ("pp2", 2, ("--layout.pp=2",)), ("in threes", 1, in_threes)):
        assert launch(num_ranks, *overrides, *more, f"--train.run_folder={tmp_path / name}", log=log) == 0, (
            log.read_text()
        )
        start, end = read_lines(tmp_path / name)
        assert (start["step"], start["loss"], end["step"]) == (0, None, 1)
        found[name] = start["validation_losses"]
        assert start["validation_loss"] == found[name]["long"] > end["validation_losses"]["long"]
        summary = read_summary(tmp_path / name)
        assert summary["validation_sets"]["short"]["last"] == end["validation_losses"]["short"]
        assert summary["validation"]["best_step"] == 1 and summary["final_loss"] == end["loss"]
    assert found["pp2"] == pytest.approx(found["one"], rel=1e-6) and found["in threes"] == pytest.approx(found["one"])
    said = log.read_text()
    assert "validation long measures 12 samples of 12\nvalidation short measures 3 samples of 3\n" in said
    assert f"step 0/1  validation loss {found['one']['long']:.4f}  long {found['one']['long']:.4f}  short " in said


@pytest.fixture
def half_done(straight, tmp_path) -> Path:
    """The run as a kill during the fifth step would have left it: the newest checkpoint is of the third."""
    run = Path(shutil.copytree(straight.run, tmp_path / "run", symlinks=True))
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    (run / "summary.json").unlink()
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:4]) + lines[4][:40])
    return run


def test_a_run_leaves_its_metrics_its_config_and_how_it_ended(straight):
    lines = read_lines(straight.run)
    assert [list(line) for line in lines] == [KEYS] * 6
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["tokens"] for line in lines] == [128 * step for step in range(1, 7)]
    assert [line["lr"] for line in lines] == sorted((line["lr"] for line in lines), reverse=True)
    for line in lines:
        assert line["tokens_per_s"] == pytest.approx(128 / line["step_time_s"])
        assert line["tokens_per_s_per_gpu"] == line["tokens_per_s"] / 2
        assert line["mfu"] is None
    assert [line["peak_memory_bytes"] is not None for line in lines] == [False, True, False, False, False, True]

    summary, config = read_summary(straight.run), load_config(straight.run / "config.toml")
    assert (summary["outcome"], summary["exit_code"], summary["steps"], summary["world_size"]) == ("done", 0, 6, 2)
    assert summary["final_loss"] == pytest.approx(sum(losses(straight.run)) / 6)
    assert summary["parameters"] == count_parameters(config.model) == count_parameters(SHAPE) - 260 * 32
    assert summary["attention_kernels"] == ["blockwise"]
    assert summary["kernels"] == {"attention": ["blockwise"], "norm": ["fused"], "rope": [], "swiglu": ["eager"]}
    assert config.kernels.attention == "auto"  # as it was written
    assert summary["peak_memory_bytes_by_pp_rank"] == [max(line["peak_memory_bytes"] or 0 for line in lines)]
    predicted, measured = summary["predicted"], summary["measured"]
    assert measured["step_time_s"] == summary["step_time_s"]
    assert measured["peak_memory_bytes"] == summary["peak_memory_bytes_by_pp_rank"]
    assert (measured["mfu"], predicted["mfu"], predicted["gpu"], predicted["calibrated"]) == (None, None, "cpu", False)
    assert predicted["step_time_s"] is None and len(predicted["peak_memory_bytes"]) == 1
    run = Run.from_dict(summary["run"])
    assert (run.outcome, run.layout, run.scenario.model) == ("ok", config.layout.resolve(2), config.model)
    assert (run.kernels, run.measured.tokens_per_s) == (Kernels(attention="blockwise"), summary["tokens_per_s"])
    assert run.predicted.memory[0].total == pytest.approx(predicted["peak_memory_bytes"][0], abs=1)
    log = (straight.config.parent / "log").read_text()
    assert (
        summary["chosen"]
        == OpenKernels().resolve(KernelRequest(device=Device("cpu"), compute="float32", head_width=8)).describe()
    )
    assert all(log.splitlines().count(line) == 1 for line in summary["chosen"]) and len(summary["chosen"]) == 5
    assert "USDT" not in log  # what the profiler says to nobody
    assert len(re.findall(r"^predicted: peak .* MiB on pipeline rank 0 \(no step time: .*\)$", log, re.M)) == 1
    assert re.search(r"step time +│ [\d.]+ s +│", log) and re.search(
        r"rank 0 +│ .* [KM]iB, predicted .* [KM]iB \(", log
    )
    speed = re.search(r"tokens/s/GPU +│ ([\d,]+) +│", log)
    assert speed is not None and speed[1] == f"{summary['tokens_per_s'] / 2:,.0f}"
    assert (config.layout.tp, config.layout.dp_shard, config.train.steps) == (2, 1, 6)
    names = sorted(path.name for path in (straight.run / "checkpoints").iterdir())
    assert names == ["latest", "step-00000003", "step-00000006"]


def test_the_memory_of_the_first_steps_is_that_of_a_dry_run(straight, capsys):
    run = straight.run
    assert main(["dryrun", str(run / "config.toml"), "--world", "2", "--gpu", "cpu", "--run", str(run), "--json"]) == 0
    (rank,) = json.loads(capsys.readouterr().out)["ranks"]
    measured, dry = rank["measured"], rank["curve"]
    assert [part["action"] for part in measured] == [part["action"] for part in dry]
    assert [part["action"] for part in dry].count("update") == 4
    for held, counted, predicted in zip(measured, dry, rank["predicted_curve"], strict=True):
        assert held["nbytes"] == pytest.approx(counted["nbytes"], rel=0.03)
        assert predicted == pytest.approx(counted["nbytes"], rel=0.1)


def test_the_config_that_a_run_leaves_resumes_it_to_the_bit(straight, half_done, tmp_path):
    # A CPU's kernels repeat their bits whatever train.deterministic says.
    arguments = [half_done / "config.toml", f"--train.run_folder={half_done}", "--train.deterministic=true"]
    assert launch(2, *arguments, log=tmp_path / "log") == 0, (tmp_path / "log").read_text()
    assert "after 3 steps" in (tmp_path / "log").read_text()
    assert [line["step"] for line in read_lines(half_done) if line["resumed"]] == [4]
    for key in ("step", "loss", "grad_norm", "lr", "tokens"):
        assert [line[key] for line in read_lines(half_done)] == [line[key] for line in read_lines(straight.run)]
    assert read_summary(half_done)["outcome"] == "done"
    resumed = read_tensorboard(half_done)["train/loss"]  # which refuses a step that is there twice
    assert resumed == pytest.approx(read_tensorboard(straight.run)["train/loss"])
    assert [list(steps) for _, steps in read_wandb(half_done)] == [[1, 2, 3, 4, 5, 6], [5, 6]]  # four were noted


def test_a_run_whose_newest_checkpoint_is_damaged_resumes_from_the_one_before_elsewhere_and_for_longer(
    straight, half_done, tmp_path, capsys
):
    newest = shutil.copytree(
        straight.run / "checkpoints" / "step-00000006", half_done / "checkpoints" / "step-00000006"
    )
    assert main(["checkpoint", "verify", str(half_done)]) == 0
    content = bytearray((newest / "tensors" / "__1_0.distcp").read_bytes())
    content[len(content) // 2] ^= 1
    (newest / "tensors" / "__1_0.distcp").write_bytes(content)
    assert main(["checkpoint", "verify", str(half_done)]) == 2
    whole, damaged = capsys.readouterr().out.splitlines()[2:]
    assert whole.endswith("step-00000003: whole") and "__1_0.distcp is not what was written" in damaged
    in_v = (
        "--layout.pp=2",
        "--layout.schedule=zb-v",
        "--layout.virtual_stages=2",
    )  # both ends of the tied weights here
    arguments = [straight.config, f"--train.run_folder={half_done}", *in_v, "--train.steps=8"]
    assert launch(2, *arguments, log=tmp_path / "log") == 0, (tmp_path / "log").read_text()
    assert "step-00000006 is damaged, an older one is tried: tensors/__1_0.distcp" in (tmp_path / "log").read_text()
    names = [path.name for path in (half_done / "checkpoints").iterdir()]
    assert sorted(names) == ["damaged-step-00000006", "latest", "step-00000003", "step-00000008"]
    assert main(["checkpoint", "list", str(half_done), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(each["step"], each["layout"]) for each in listed] == [
        (3, "tp2+sp mb2 zero1"),
        (8, "pp2 mb2 zb-v v2 zero1"),
    ]
    assert main(["checkpoint", "show", str(half_done)]) == 0
    assert "samples: 64" in capsys.readouterr().out
    resolved = load_config(half_done / "config.toml")
    assert (resolved.layout.pp, resolved.train.steps, resolved.optimizer.decay_steps) == (2, 8, 6)
    assert len(read_lines(half_done)) == 8
    assert losses(half_done)[:3] == losses(straight.run)[:3]
    assert losses(half_done)[:6] == pytest.approx(losses(straight.run), rel=1e-5)
    rates = [[line["lr"] for line in read_lines(run)] for run in (straight.run, half_done)]
    assert rates[1] == [*rates[0], rates[0][-1], rates[0][-1]]
    assert "note: the learning rate falls over 6 steps, as when this run began" in (tmp_path / "log").read_text()


def test_a_stopped_run_saves_says_so_and_goes_on_where_it_stopped(tmp_path):
    """SIGTERM to torchrun on two ranks, then on one SIGINT, SIGUSR1 before the first step, and nothing."""
    files, log, steps_done = write_tiny(tmp_path, steps=30, num_layers=1), tmp_path / "log", 0
    for num_ranks, number in ((2, signal.SIGTERM), (1, signal.SIGINT)):
        with started(num_ranks, files.config, "--checkpoint.keep=9", log=log) as process:
            wait_for_steps(process, files.run, steps_done + 2, log)
            process.send_signal(number)
            exit_code = finish(process, log)
        summary, lines = read_summary(files.run), read_lines(files.run)
        assert (summary["outcome"], summary["exit_code"]) == ("stopped", 3), log.read_text()
        assert exit_code == 3 if num_ranks == 1 else exit_code != 0  # torchrun has codes of its own
        assert steps_done + 2 <= summary["steps"] == len(lines) < 30
        steps_done = summary["steps"]
        assert (files.run / "checkpoints" / f"step-{steps_done:08d}" / "state.json").exists()
    with started(1, files.config, log=log) as process:
        wait_for_start(process, files.run, log)  # and torch is not imported yet
        process.send_signal(signal.SIGUSR1)
        assert finish(process, log) == 3, log.read_text()
    summary = read_summary(files.run)
    assert (summary["outcome"], summary["exit_code"], summary["steps"]) == ("stopped", 3, steps_done)
    assert (
        "stopped before the first step" in log.read_text() and "Traceback" not in log.read_text().split("resumed")[-1]
    )
    assert not (files.run / LEASE_NAME).exists()
    assert launch(1, files.config, log=log) == 0, log.read_text()
    assert (read_summary(files.run)["outcome"], read_summary(files.run)["steps"]) == ("done", 30)
    assert [line["step"] for line in read_lines(files.run)] == list(range(1, 31))
    assert len(re.findall("resumed from", log.read_text())) == 2
    assert len(re.findall(r"finishing step \d+ or \d+, then a checkpoint", log.read_text())) == 2
    assert len([line for line in read_lines(files.run) if line["resumed"]]) == 2


def test_a_loss_that_is_not_finite_ends_the_run_without_a_checkpoint(tmp_path):
    files, log = write_tiny(tmp_path, steps=5, num_layers=1), tmp_path / "log"
    assert launch(1, files.config, "--optimizer.lr=1e30", log=log) == 4, log.read_text()
    summary, lines = read_summary(files.run), read_lines(files.run)
    assert (summary["outcome"], summary["exit_code"]) == ("non_finite", 4)
    assert 1 <= len(lines) == summary["steps"] < 5
    assert not (files.run / "checkpoints").exists()
    assert "Traceback" not in log.read_text()


def test_a_spike_is_left_out_by_all_ranks_also_right_after_a_resume_and_a_quiet_run_has_none(tmp_path):
    """A batch of noise as the 30th of 32; only the last stage's rank computes its loss."""
    files, log = write_tiny(tmp_path, steps=32, num_layers=2), tmp_path / "log"
    spikes = ("--spikes.action=skip", "--spikes.window=16", "--spikes.min_steps=16")
    options = [files.config, "--layout.pp=2", "--checkpoint.every=1", "--checkpoint.keep=4", *spikes]
    assert launch(2, *options, f"--train.run_folder={tmp_path / 'quiet'}", log=log) == 0, log.read_text()
    assert read_summary(tmp_path / "quiet")["spikes"] == [] and not list(tmp_path.glob("quiet/spike-*"))
    plant_noise(files, 30, tmp_path / "before")
    assert launch(2, *options, log=log) == 0, log.read_text()
    assert read_summary(files.run)["spikes"] == [30] and log.read_text().count("step 30: a spike: ") == 1
    met, left = (read_manifest(files.run / "checkpoints" / f"step-000000{step}")["files"] for step in (29, 30))
    parts = [name for name in met if name.endswith(".distcp")]
    assert {name[:11] for name in parts} == {"tensors/__0", "tensors/__1"}
    assert [met[name]["sha256"] for name in parts] == [left[name]["sha256"] for name in parts]

    resumed = Path(shutil.copytree(files.run, tmp_path / "resumed", symlinks=True))
    for step in (30, 31, 32):
        shutil.rmtree(resumed / "checkpoints" / f"step-000000{step}")
    (resumed / "summary.json").unlink()
    assert launch(2, *options, f"--train.run_folder={resumed}", log=log) == 0, log.read_text()
    assert read_summary(resumed)["spikes"] == [30]
    for key in ("step", "loss", "grad_norm", "spike"):
        assert [line[key] for line in read_lines(resumed)] == [line[key] for line in read_lines(files.run)]


def test_sources_of_text_and_conversations_train_alike_in_every_layout(tmp_path):
    files, log = write_tiny(tmp_path, steps=6, num_layers=2), tmp_path / "log"
    sums, chats = tmp_path / "sums.jsonl", tmp_path / "chats.jsonl"
    sums.write_text("".join(json.dumps({"text": f"{i} + {i}"}) + "\n" for i in range(2000)), encoding="utf-8")
    talk = [[{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}!"}] for i in range(2000)]
    chats.write_text("".join(json.dumps({"messages": each}) + "\n" for each in talk), encoding="utf-8")
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }} {% endfor %}", encoding="utf-8")
    mixture = f"[{{source='{sums}', weight=2}}, {{source='{chats}', messages_field='messages'}}]"
    data = (f"--data.mixture={mixture}", f"--data.chat_template={template}")
    best_fit = ("--data.samples=best-fit", "--data.document_mask=true")
    runs = {
        "alone": (1, ("--data.document_mask=true",)),
        "pp2": (2, ("--data.document_mask=true", "--layout.pp=2")),
        "without": (1, ()),
        "padded": (2, ("--data.samples=padded", "--layout.tp=2")),
        "best-fit": (1, best_fit),
        "best-fit, cp2": (2, (*best_fit, "--layout.cp=2")),
    }
    found = {}
    for name, (num_ranks, arguments) in runs.items():
        folder = f"--train.run_folder={tmp_path / name}"
        assert launch(num_ranks, files.config, *data, folder, *arguments, log=log) == 0, log.read_text()
        found[name] = losses(tmp_path / name)
    assert found["pp2"] == pytest.approx(found["alone"], rel=1e-5)
    assert found["best-fit, cp2"] == pytest.approx(found["best-fit"], rel=1e-5)
    for source in (sums, chats):
        assert log.read_text().count(f"{source}, best-fit: ") == 2
    for name in ("without", "padded", "best-fit"):
        assert abs(found[name][-1] - found["alone"][-1]) > 1e-3
    for name in runs:
        assert found[name][-1] < found[name][0] - 0.5  # it learns
    assert load_config(tmp_path / "alone" / "config.toml").data.document_mask


def test_eight_ranks_learn_what_one_process_learns_while_batches_grow_and_others_go_on(tmp_path):
    """Batches of 4 for six steps and of 8 then; one process goes on from the fourth of them."""
    files, log = write_tiny(tmp_path, steps=20, num_layers=2), tmp_path / "log"
    eight, ramp = tmp_path / "eight", "--train.batch_ramp=[{until=22, global_batch=4}]"
    (tmp_path / "other.txt").write_text("".join(f"{i} plus {i} is {i + i}. " for i in range(100)), encoding="utf-8")
    held_out = (f"--validation.source={tmp_path}/other.txt", "--validation.every=7", "--validation.batches=1")
    arguments = ["--layout.pp=2", "--layout.tp=2", f"--train.run_folder={eight}", "--layout.micro_batch=1"]
    arguments += ["--checkpoint.every=4", "--checkpoint.keep=9", "--metrics.timeline=true", ramp, *held_out]
    assert launch(8, files.config, *arguments, log=log) == 0, log.read_text()
    assert launch(1, files.config, ramp, *held_out, log=log) == 0, log.read_text()
    resumed = Path(shutil.copytree(eight, tmp_path / "resumed", symlinks=True))
    for path in {*(resumed / "checkpoints").glob("step-*")} - {resumed / "checkpoints" / "step-00000004"}:
        shutil.rmtree(path)
    (resumed / "summary.json").unlink()
    assert launch(1, files.config, ramp, *held_out, f"--train.run_folder={resumed}", log=log) == 0, log.read_text()
    assert "after 4 steps" in log.read_text() and losses(resumed) == pytest.approx(losses(files.run), rel=1e-4)
    for run in (files.run, eight, resumed):
        lines = read_lines(run)
        assert [line["tokens"] for line in lines] == [16 * (4 * n + 4 * max(0, n - 6)) for n in range(1, 21)]
        assert [line["validation_loss"] for line in lines] == [
            value and pytest.approx(value, rel=1e-4)
            for value in (line["validation_loss"] for line in read_lines(eight))
        ]
    assert [each["step"] for each in json.loads((eight / "timeline.json").read_text())["steps"]] == [9]
    assert main(["timeline", str(eight)]) == 0
    assert read_summary(eight)["layout"]["dp_shard"] == 2
    assert losses(files.run)[-1] < losses(files.run)[0] - 1  # it learns
    assert losses(eight) == pytest.approx(losses(files.run), rel=1e-4)
    assert len(read_summary(eight)["peak_memory_bytes_by_pp_rank"]) == 2


def test_a_mixture_of_experts_is_balanced_by_its_biases_and_resumes_to_the_bit(tmp_path):
    files, log = write_tiny(tmp_path, steps=40, num_layers=2), tmp_path / "log"
    rules = {
        "number": 8, "per_token": 2, "ffn_size": 32, "dense_layers": 1, "score": '"sigmoid"',
        "correction_bias": "true", "bias_rate": 0.02,
    }  # fmt: skip
    options = [f"--model.experts.{key}={value}" for key, value in rules.items()]
    options += ["--layout.ep=2", "--checkpoint.every=20", "--checkpoint.keep=2"]
    assert launch(2, files.config, *options, log=log) == 0, log.read_text()
    lines = read_lines(files.run)
    assert losses(files.run)[-1] < losses(files.run)[0] - 0.5  # it learns
    fullest = [line["fullest_expert"] for line in lines]
    assert sum(fullest[-5:]) < 0.6 * sum(fullest[:5])
    for line in lines:
        assert 1 <= line["expert_imbalance"] <= line["fullest_expert"] <= 4  # at most every token, of two experts
        assert line["fullest_expert_block"] == 1 and 0 < line["router_entropy"] <= math.log(8)
    imbalance = sum(line["expert_imbalance"] for line in lines[-10:]) / 10
    assert read_summary(files.run)["expert_imbalance"] == pytest.approx(imbalance)
    assert f"experts.imbalance               │ {imbalance:.2f}, predicted 1.00" in log.read_text()
    again = Path(shutil.copytree(files.run, tmp_path / "again", symlinks=True))
    shutil.rmtree(again / "checkpoints" / "step-00000040")
    (again / "summary.json").unlink()
    assert launch(2, files.config, *options, f"--train.run_folder={again}", log=log) == 0, log.read_text()
    assert "after 20 steps" in log.read_text()
    for key in ("loss", "grad_norm", "fullest_expert", "router_entropy"):
        assert [line[key] for line in read_lines(again)] == [line[key] for line in lines]


def test_a_run_in_fp16_says_what_overflows_at_which_scale_and_resumes_to_the_bit(tmp_path):
    files, log = write_tiny(tmp_path, steps=14, num_layers=2), tmp_path / "log"
    options = [
        "--precision.compute=float16", "--train.loss_scale=4194304", "--train.loss_scale_steps=3", "--layout.tp=2",
        "--checkpoint.every=5", "--checkpoint.keep=3", "--checkpoint.export=true",
    ]  # fmt: skip
    assert launch(2, files.config, *options, log=log) == 0, log.read_text()
    assert json.loads((files.run / "hf" / "config.json").read_text())["torch_dtype"] == "float16"
    lines, said = read_lines(files.run), log.read_text()
    scales = {line["step"]: line["loss_scale"] for line in lines}
    skipped = read_summary(files.run)["skipped"]
    assert skipped and sorted([*scales, *skipped]) == list(range(1, 15)) and 1 in skipped
    expected, num_fine = 2.0**22, 0
    for step in range(1, 15):
        if step in skipped:
            assert f"step {step}: gradients overflow at the loss scale {expected:g}: nothing is updated; it is " in said
            expected, num_fine = expected / 2, 0
            continue
        assert scales[step] == expected
        num_fine += 1
        if num_fine == 3:
            expected, num_fine = expected * 2, 0
    assert skipped != list(range(1, len(skipped) + 1)), "it has grown until it overflowed again"
    again = Path(shutil.copytree(files.run, tmp_path / "again", symlinks=True))
    for step in (10, 14):  # in the middle of steps without an overflow
        shutil.rmtree(again / "checkpoints" / f"step-{step:08}")
    (again / "summary.json").unlink()
    assert launch(2, files.config, *options, f"--train.run_folder={again}", log=log) == 0, log.read_text()
    assert "after 5 steps" in log.read_text()
    for key in ("step", "loss", "grad_norm", "loss_scale"):
        assert [line[key] for line in read_lines(again)] == [line[key] for line in lines]
