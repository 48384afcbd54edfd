"""Measured steps: inside or beside the range, and what alone would make a step so long."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from program_jobs import job_of

from dtlayout.base.errors import InvalidConfig
from dtlayout.cli import main
from dtlayout.costmodel.estimate import estimate
from dtlayout.planner.measured import judge, parse_measured
from dtlayout.programs.logs import read_log
from dtlayout.spec.layout import Layout

SCRIPT = str(Path(__file__).parents[1] / "programs" / "megatron" / "arrays.sh")
MEGATRON = (
    " [2026-01-02 03:04:05] iteration {n:8d}/ 100 | consumed samples: 128 | elapsed time per iteration (ms): {t} |"
)
TITAN = (
    "\x1b[36m[titan] step: {n:2d}  \x1b[32mloss:  8.1  memory: 40.1GiB(50%)  \x1b[34mtps: {t}  tflops: 301.2  mfu: 30%"
)


def job(layout=None, engine="megatron"):
    made = job_of(engine, layout or Layout(tp=8, dp_shard=4))
    return made.scenario, made.estimate


@pytest.mark.parametrize("name", ["network_bytes_per_s", "link_bytes_per_s", "peak_flops_per_s", "memory_bytes_per_s"])
def test_a_speed_that_was_made_slower_is_found_with_its_factor(name):
    scenario, now = job(Layout(tp=4, dp_shard=16, micro_batch=1))
    gpu = scenario.cluster.gpu
    slower = replace(gpu, **{name: getattr(gpu, name) / 12})
    slow = estimate(replace(scenario, cluster=replace(scenario.cluster, gpu=slower)), now.layout, now.kernels)
    verdict = judge(scenario, now, slow.step_time_s)
    names = {"network": "network_bytes_per_s", "links": "link_bytes_per_s", "matmuls": "peak_flops_per_s",
             "memory": "memory_bytes_per_s"}  # fmt: skip
    (cause,) = [each for each in verdict.causes if names.get(each.name) == name]
    assert cause.factor == pytest.approx(12, rel=0.02) and cause.part_s > cause.part_before_s
    assert cause.step_time_s == pytest.approx(slow.step_time_s, rel=0.02)
    factors = [each.factor for each in verdict.causes]
    assert factors == sorted(factors) and verdict.lost_s == pytest.approx(slow.step_time_s - now.step_time_s)


def test_a_step_is_inside_slower_or_faster_than_its_range():
    scenario, now = job()
    low, high = judge(scenario, now, now.step_time_s).interval.around(now.step_time_s)
    assert judge(scenario, now, now.step_time_s).place == "inside" and not judge(scenario, now, now.step_time_s).causes
    assert judge(scenario, now, 1.01 * high).place == "slower" and judge(scenario, now, 1.01 * high).causes
    fast = judge(scenario, now, 0.99 * low)
    assert fast.place == "faster" and not fast.causes and not fast.is_full


def test_on_one_node_the_network_is_no_cause_and_what_cannot_explain_it_is_said_so():
    scenario, now = job(Layout(dp_shard=8))
    names = {each.name: each for each in judge(scenario, now, 50 * now.step_time_s).causes}
    assert "network" not in names and names["matmuls"].factor < 1000
    alone, single = job(Layout())
    assert "links" not in {each.name for each in judge(alone, single, 2 * single.step_time_s).causes}


@pytest.mark.parametrize(
    ("text", "seconds"), [("12.5s", 12.5), ("850ms", 0.85), ("1,000", None), ("50%", None), (" 2s ", 2.0)]
)
def test_speeds_are_read_in_each_unit(text, seconds):
    scenario, now = job()
    tokens = scenario.batch.num_tokens / (1000 * 32)
    expected = seconds or (now.mfu * now.step_time_s / 0.5 if "%" in text else tokens)
    assert parse_measured(text, scenario, now) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["", "fast", "-3", "0", "nan", "inf", "120%", "3 apples"])
def test_what_is_no_speed_is_refused(text):
    with pytest.raises(InvalidConfig, match="is no speed; write 1234"):
        parse_measured(text, *job())


def write(tmp_path, lines):
    path = tmp_path / "log.txt"
    path.write_text("\n".join(lines))
    return path


def test_logs_are_read_without_their_first_steps(tmp_path):
    path = write(
        tmp_path, ["start", *(MEGATRON.format(n=n, t=t) for n, t in enumerate([9000, 3000, 1010, 1000, 1020]))]
    )
    found = read_log(path)
    assert (found.title, found.unit, found.median) == ("Megatron-LM", "s", pytest.approx(1.01))
    assert len(found.values) == 3
    path = write(tmp_path, [TITAN.format(n=n, t=t) for n, t in enumerate(["120", "4,000", "5,001", "5,003", "5,002"])])
    found = read_log(path)
    assert (found.title, found.unit, found.median) == ("torchtitan", "tokens/s/GPU", 5002)
    line = "iteration: {n} / 100 | consumed_tokens: 41.9M | time_per_iteration_ms: {t} | tokens_per_sec: 33.9K"
    found = read_log(write(tmp_path, [line.format(n=n, t=t) for n, t in enumerate(["9K", "2K", "1.25K", "1.25K"])]))
    assert (found.title, found.median) == ("nanotron", 1.25)
    bar = "\r".join(f" {n}/100 [00:{n:02d}<01:50, {t}s/it]" for n, t in enumerate([9.0, 4.0, 1.5, 1.4, 1.6], start=1))
    assert read_log(write(tmp_path, [bar])).median == pytest.approx(1.5)
    end = "{'train_runtime': 123.4, 'train_samples_per_second': 5.1, 'train_steps_per_second': 0.8, 'epoch': 1.0}"
    found = read_log(write(tmp_path, [bar, end]))
    assert (found.title, found.values) == ("Hugging Face's Trainer", (1.25,))
    loading = "\r".join(f"Loading checkpoint shards: {n}/4 [00:01<00:03, 1.2s/it]" for n in range(1, 5))
    fast = "\r".join(f" {n}/100 [00:{n:02d}<01:50, 3.1it/s]" for n in range(1, 5))
    assert read_log(write(tmp_path, [loading, fast])).median == pytest.approx(1 / 3.1)
    many = [MEGATRON.format(n=n, t=1000 if n > 10 else 5000) for n in range(100)]
    assert len(read_log(write(tmp_path, many)).values) == 90


def test_a_file_without_speeds_is_refused(tmp_path):
    for text in ("", "loss 3.2", "elapsed time per iteration (ms): 0\nelapsed time per iteration (ms): 0"):
        with pytest.raises(InvalidConfig, match="has no speed of steps as these print them: Megatron-LM, torchtitan"):
            read_log(write(tmp_path, [text]))
    with pytest.raises(InvalidConfig, match="cannot be read"):
        read_log(tmp_path / "none")


def test_explain_says_what_a_slow_step_would_need(tmp_path, capsys):
    asked = ["explain", SCRIPT, "--gpu", "h100-80g-sxm"]
    assert main([*asked, "--measured", "400", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["measured"]
    assert found["place"] == "slower" and found["tokens_per_s_per_gpu"] == pytest.approx(400)
    assert found["causes"][0]["factor"] < 5 and found["slower"] > 0.5
    assert main([*asked, "--measured", "400"]) == 0
    text = capsys.readouterr().out
    assert "slower than the range" in text and "One of these alone would explain it:" in text
    assert "times slower" in text and "for data, a save, or another rank" in text
    path = write(tmp_path, [MEGATRON.format(n=n, t=15000) for n in range(5)])
    assert main([*asked, "--log", str(path)]) == 0
    text = capsys.readouterr().out
    assert "15.000 s" in text and "the median of 3 steps in a log of Megatron-LM" in text
    assert "faster than the range" in text and "See whether both count the same GPUs" in text
    assert main([*asked, "--log", str(path), "--measured", "1s"]) == 2
    assert "--measured and --log both say a speed" in capsys.readouterr().err
    assert main([*asked, "--measured", "soon"]) == 2
    own = str(Path(__file__).parents[2] / "configs" / "debug.toml")
    assert main(["explain", own, "--gpu", "cpu", "--measured", "30%"]) == 2
