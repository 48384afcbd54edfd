"""Mixtures of experts in Hugging Face folders: one by one there, in stacks here, and equal to the bit both ways.

`transformers` itself is asked which weights a folder holds; it keeps gate and up of all experts in one tensor.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_ranks import join_starts, start_and_save, start_from_hf
from hf_models import MIXTURES, open_made, read_by_transformers, save_made
from launching import launch
from safetensors.torch import load_file, save_file
from tiny import write_tiny

from benchmarks.convert import measure
from dtlayout.base.errors import CheckpointError, InvalidConfig
from dtlayout.checkpoint import sharded
from dtlayout.checkpoint.first_weights import load_weights
from dtlayout.checkpoint.hf import export_weights, import_weights
from dtlayout.checkpoint.manifest import find_checkpoint
from dtlayout.checkpoint.parts import Part, load_parts
from dtlayout.checkpoint.sharded import load_checkpoint
from dtlayout.cli import main
from dtlayout.config.loading import parse_config
from dtlayout.models import families
from dtlayout.models.beside import update_config
from dtlayout.models.files import find_model, strip_training, to_hf
from dtlayout.models.hf_config import parse_hf
from dtlayout.models.llama import Llama
from dtlayout.models.presets import find_preset
from dtlayout.models.stored import find_weights
from dtlayout.models.weights import check_init_from, list_stored, list_weights
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import Experts
from dtlayout.spec.optimizers import SGD
from dtlayout.training.optimizer import build_optimizer

TOKENS = torch.arange(40)[None] * 7 % 260
LAYOUTS = [
    Layout(dp_shard=4, ep=4),
    Layout(dp_shard=4, ep=2, zero=3),
    Layout(dp_shard=4, zero=3),
    Layout(dp_shard=2, tp=2, ep=2),
    Layout(pp=2, dp_shard=2, ep=2),
    Layout(dp_replicate=2, dp_shard=2, ep=2),
    Layout(tp=4),
]
OF_RANKS = ("mixtral", "qwen3_moe")


@pytest.fixture(scope="module", params=MIXTURES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts that `transformers` made and saved, in several files."""
    return save_made(request.param, tmp_path_factory.mktemp("made"))


@pytest.fixture
def mixtral(tmp_path: Path) -> Path:
    """A Mixtral, for tests to spoil, in one file."""
    made, saved = save_made("mixtral", tmp_path / "made"), tmp_path / "mixtral"
    saved.mkdir()
    (saved / "config.json").write_text((made / "config.json").read_text())
    save_file(read_tensors(made), saved / "model.safetensors")
    return saved


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def load(folder: Path) -> Llama:
    """Our model with a folder's weights, on one process."""
    model = find_model(str(folder))
    with torch.device("meta"):
        ours = Llama(model, Kernels(), 64)
    load_weights(folder, [ours], model, 0, "cpu")
    return ours


def test_a_folder_comes_in_with_every_value_and_computes_what_transformers_does(folder):
    assert len([*folder.glob("*.safetensors")]) > 1 and check_init_from(str(folder), find_model(str(folder))) == []
    ours, theirs = load(folder), read_by_transformers(folder)
    own = dict(ours.named_parameters())
    assert own.keys() == theirs.keys()
    for name, value in own.items():
        assert torch.equal(value, theirs[name]), name
    with torch.no_grad():
        torch.testing.assert_close(ours(TOKENS), open_made(folder)(TOKENS).logits, rtol=1e-4, atol=1e-4)


def test_a_checkpoint_and_out_again_it_has_the_same_tensors_and_opens_in_transformers(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(sharded, "_PIECE_BYTES", 5000)  # some experts of a stack
    import_weights(folder, tmp_path / "run")
    export_weights(find_checkpoint(tmp_path / "run"), tmp_path / "out", number_format="float32", file_bytes=5000)
    before, after = read_tensors(folder), read_tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())
    theirs, again = read_by_transformers(folder), read_by_transformers(tmp_path / "out")
    assert theirs.keys() == again.keys() and all(torch.equal(value, again[name]) for name, value in theirs.items())
    model = find_model(str(folder))
    assert replace(find_model(str(tmp_path / "out")), name=model.name) == model
    read, written = (open_made(path).config for path in (folder, tmp_path / "out"))
    for key in (*families.find_family(model.family).experts.values(), "output_router_logits"):
        assert getattr(read, key) == getattr(written, key), key


def test_no_file_is_larger_than_asked_where_a_stack_is(folder, tmp_path):
    import_weights(folder, tmp_path / "run")
    export_weights(find_checkpoint(tmp_path / "run"), tmp_path / "out", number_format="float32", file_bytes=13_000)
    for file in (tmp_path / "out").glob("*.safetensors"):
        sizes = [tensor.nbytes for tensor in load_file(file).values()]
        assert sum(sizes) <= 13_000 or len(sizes) == 1
    stacks = [weight for weight in list_stored(find_model(str(folder))) if weight.is_stack]
    files = [{find_weights(tmp_path / "out")[name].file for name in weight.tensors} for weight in stacks]
    assert any(len(each) > 1 for each in files) and any(
        len(each) < len(weight.tensors) for each, weight in zip(files, stacks, strict=True)
    )


@pytest.mark.parametrize("folder", OF_RANKS, indirect=True)
def test_every_rank_reads_the_experts_that_it_has_and_no_others(ranks4, folder):
    model, stored = find_model(str(folder)), read_by_transformers(folder)
    by_rank = ranks4.run(start_from_hf, LAYOUTS, model, folder, timeout_s=150)
    for number, layout in enumerate(LAYOUTS):
        found, num_read = join_starts(by_rank, number)
        assert found.keys() == {name for name, _ in list_weights(model)}
        for name, value in found.items():
            np.testing.assert_array_equal(value, stored[name].numpy(), err_msg=f"{layout} {name}")
        assert num_read == sum(value.numel() for value in stored.values())


@pytest.mark.parametrize("folder", OF_RANKS, indirect=True)
@pytest.mark.parametrize("layout", [LAYOUTS[1], LAYOUTS[3], LAYOUTS[4]], ids=str)
def test_what_ranks_saved_goes_out_as_it_came(ranks4, folder, layout, tmp_path):
    ranks4.run(start_and_save, layout, find_model(str(folder)), folder, tmp_path / "checkpoints")
    export_weights(
        tmp_path / "checkpoints" / "step-00000000", tmp_path / "out", number_format="float32", file_bytes=20_000
    )
    before, after = read_tensors(folder), read_tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())


@pytest.mark.parametrize("folder", ["dots1"], indirect=True)
def test_in_bf16_a_correction_bias_keeps_its_bits(folder, tmp_path):
    import_weights(folder, tmp_path / "run")
    export_weights(find_checkpoint(tmp_path / "run"), tmp_path / "out")
    before, after = read_tensors(folder), read_tensors(tmp_path / "out")
    for name, tensor in after.items():
        is_counter = "e_score_correction_bias" in name
        assert tensor.dtype == (torch.float32 if is_counter else torch.bfloat16)
        assert torch.equal(tensor, before[name].to(tensor.dtype)), name
    assert sum("e_score_correction_bias" in name for name in after) == 3


def test_memory_is_that_of_a_piece_and_of_a_file_where_a_stack_is_larger(tmp_path):
    model = replace(
        find_preset("mixtral-8x7b"), hidden_size=256, ffn_size=1024, num_layers=6, vocab_size=8000,
        experts=Experts(number=64, per_token=2, ffn_size=1024),
    )  # fmt: skip
    into_checkpoint, out = measure(model, tmp_path, 8 << 20, 4 << 20)  # of stacks of 32 MiB
    assert into_checkpoint["num_bytes"] == out["num_bytes"] > 600e6
    assert into_checkpoint["peak_bytes"] - into_checkpoint["base_bytes"] < 100e6
    assert out["peak_bytes"] - out["base_bytes"] < 150e6


def test_what_is_wrong_with_experts_is_named_as_the_folder_names_them(mixtral):
    tensors = read_tensors(mixtral)
    block = "model.layers.1.block_sparse_moe.experts"
    spoilt = {**tensors, f"{block}.4.w1.weight": torch.zeros(48, 32), f"{block}.1.w3.weight": torch.zeros(32, 48)}
    del spoilt[f"{block}.2.w2.weight"]
    spoilt["model.layers.0.mlp.experts.gate_up_proj"] = torch.zeros(4, 96, 32)
    save_file(spoilt, mixtral / "model.safetensors")
    where = f"train.init_from={str(mixtral)!r}: "
    problems = [
        f"{block}.2.w2.weight is missing",
        "model.layers.0.mlp.experts.gate_up_proj is in none of the model's modules",
        f"{block}.4.w1.weight is in none of the model's modules",
        f"{block}.1.w3.weight has the shape [32, 48], where the model's is [48, 32]",
    ]
    assert check_init_from(str(mixtral), find_model(str(mixtral))) == [where + each for each in problems]
    with pytest.raises(InvalidConfig) as caught:
        import_weights(mixtral, mixtral / "run")
    assert caught.value.problems == [f"{mixtral}: {each}" for each in problems]


def test_values_that_are_no_numbers_are_counted_for_each_expert(mixtral, tmp_path):
    tensors = read_tensors(mixtral)
    name = "model.layers.3.block_sparse_moe.experts.2.w3.weight"
    tensors[name][4, :3] = torch.inf
    save_file(tensors, mixtral / "model.safetensors")
    for come_in in (lambda: load(mixtral), lambda: import_weights(mixtral, tmp_path / "run")):
        with pytest.raises(InvalidConfig, match=f"{name} is NaN or infinite in 3 places"):
            come_in()
    assert not (tmp_path / "run").exists()


def test_what_no_tensor_tells_about_experts_must_be_the_folders(mixtral):
    model = find_model(str(mixtral))
    other = replace(model, experts=replace(model.experts, per_token=3, scale=2.0, balance_loss=0.01, z_loss=0.001))
    assert [problem.partition(": ")[2] for problem in check_init_from(str(mixtral), other)] == [
        "its config.json has experts.per_token=2, the model experts.per_token=3",
        "its config.json has experts.scale=1.0, the model experts.scale=2.0",
    ]


def test_experts_of_several_formats_make_a_stack_that_holds_all_their_values(mixtral, tmp_path):
    tensors = read_tensors(mixtral)
    name = "model.layers.0.block_sparse_moe.experts.{}.w1.weight"
    tensors |= {name.format(0): tensors[name.format(0)].half(), name.format(1): tensors[name.format(1)].bfloat16()}
    save_file(tensors, mixtral / "model.safetensors")
    import_weights(mixtral, tmp_path / "run")
    export_weights(find_checkpoint(tmp_path / "run"), tmp_path / "out", number_format="float32")
    for number in range(4):
        out = read_tensors(tmp_path / "out")[name.format(number)]
        assert torch.equal(out, tensors[name.format(number)].float())


def test_a_model_trained_with_losses_of_the_router_goes_out(mixtral, tmp_path):
    model = find_model(str(mixtral))
    trained = replace(model, experts=replace(model.experts, balance_loss=0.02, z_loss=0.001, imbalance=1.5))
    config = to_hf(trained, "bfloat16")
    assert (config["output_router_logits"], config["router_aux_loss_coef"]) == (True, 0.02)
    assert to_hf(model, "bfloat16")["output_router_logits"] is False
    with pytest.raises(InvalidConfig, match=r"has what no config.json of model_type='mixtral' says"):
        to_hf(replace(model, experts=replace(model.experts, normalized=False)), "bfloat16")


def test_a_run_goes_on_with_other_losses_and_not_with_another_router(mixtral, tmp_path, one_rank):
    import_weights(mixtral, tmp_path / "run")
    checkpoint, ours = find_checkpoint(tmp_path / "run"), load(mixtral)
    optimizer = build_optimizer([ours], find_model(str(mixtral)), SGD())
    for change, is_taken in (({"balance_loss": 0.01, "z_loss": 0.001}, True), ({"per_token": 3}, False)):
        model = find_model(str(mixtral))
        model = replace(model, experts=replace(model.experts, **change))
        if is_taken:
            assert load_checkpoint(checkpoint, [ours], optimizer, model, SGD()) == 0
            continue
        with pytest.raises(CheckpointError, match=r"holds another model: experts=.*'per_token': 2"):
            load_checkpoint(checkpoint, [ours], optimizer, model, SGD())


def test_a_config_says_of_experts_what_differs_from_the_model_that_it_names(mixtral):
    tables = {"batch": {"global_batch": 2, "seq_len": 16}, "train": {"steps": 1}}
    for name in ("qwen3-30b-a3b", str(mixtral)):
        model = find_model(name)
        changed = parse_config({**tables, "model": {"name": name, "experts": {"z_loss": 0.001}}}).model
        assert changed == replace(model, experts=replace(model.experts, z_loss=0.001))
        assert strip_training(changed) == strip_training(model) != strip_training(replace(model, num_layers=2))


def test_a_size_that_the_base_says_by_another_key_is_said_once(mixtral):
    base = json.loads((mixtral / "config.json").read_text())
    base["num_experts"] = base.pop("num_local_experts")
    model = find_model(str(mixtral))
    assert update_config(base, model, "float32", None) == base
    larger = replace(model, experts=replace(model.experts, number=6))
    assert parse_hf(update_config(base, larger, "float32", None), model.name) == larger


def test_a_checkpoint_that_has_no_such_experts_is_named(mixtral, tmp_path):
    import_weights(mixtral, tmp_path / "run")
    checkpoint, stack = find_checkpoint(tmp_path / "run"), "model.layers.0.mlp.experts.up_proj.weight"
    for first, memory, why in (
        (2, torch.empty(3, 48, 32), r"\[4, 48, 32\]"),
        (0, torch.empty(1, 32, 48), "not the model's"),
    ):
        with pytest.raises(CheckpointError, match=f"{stack} has the shape .*{why}"):
            load_parts(checkpoint, [Part(stack, first, memory)])
    with pytest.raises(CheckpointError, match=r"it has no model\.extra"):
        load_parts(checkpoint, [Part("model.extra", 0, torch.empty(1))])


def test_the_command_takes_them_both_ways(mixtral, tmp_path, capsys):
    assert main(["convert", str(mixtral), str(tmp_path / "run")]) == 0
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "out"), "--format", "float32"]) == 0
    assert "model.safetensors" in capsys.readouterr().out
    before, after = read_tensors(mixtral), read_tensors(tmp_path / "out")
    assert before.keys() == after.keys() and all(torch.equal(before[name], each) for name, each in after.items())
    said = [json.loads((path / "config.json").read_text()) for path in (mixtral, tmp_path / "out")]
    assert said[0] == said[1]


def test_a_run_with_ep_starts_from_a_folder_and_leaves_one(mixtral, tmp_path):
    files, log = write_tiny(tmp_path, steps=2), tmp_path / "log"
    sizes = find_model(str(mixtral))
    options = (
        f"--train.init_from={mixtral}", f"--model.name={mixtral}", f"--model.norm_eps={sizes.norm_eps}",
        "--model.family=mixtral", f"--model.rope_theta={sizes.rope_theta}", "--model.experts.balance_loss=0.01",
        "--layout.ep=2", "--layout.dp_shard=2", "--checkpoint.export=true",
    )  # fmt: skip
    assert launch(2, files.config, *options, log=log) == 0, log.read_text()
    opened = open_made(files.run / "hf")
    assert opened.config.output_router_logits is True and opened.config.router_aux_loss_coef == 0.01
    with torch.no_grad():
        assert opened(TOKENS).logits.isfinite().all()
    before, after = read_by_transformers(mixtral), read_by_transformers(files.run / "hf")
    moved = [(after[name] - value).abs().max() for name, value in before.items() if "experts" in name]
    assert len(moved) == 12 and all(0 < each < 0.1 for each in moved)
