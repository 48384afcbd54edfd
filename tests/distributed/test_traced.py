"""Models that nobody described train under layouts as transformers' own model does on one process."""

import json
from collections.abc import Callable
from functools import cache as cache_calls
from pathlib import Path

import pytest
import torch
from launching import launch, losses, read_summary
from ranks import Ranks
from tiny import write_tiny
from toys import make_config
from transformers import CONFIG_MAPPING

from dtlayout.base.errors import InvalidLayout
from dtlayout.cli import main
from dtlayout.models.files import find_model, trace_model
from dtlayout.models.proofs import TOLERANCE, find_unproven, read_proof, refuse_unproven, write_proof
from dtlayout.models.traced import read_trace
from dtlayout.models.weights import list_weights
from dtlayout.ops.positions import OwnPositions
from dtlayout.plans.init import fill_initial
from dtlayout.spec.batch import Batch
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.precision import Precision
from dtlayout.tracing.shrink import shrink
from dtlayout.training import prove
from dtlayout.training.build import assemble
from dtlayout.training.prove import LAYOUTS, find_differences, find_layouts

FAMILIES = {
    "gpt_neox": 4,  # queries, keys and values of a head side by side; attention and feed-forward in parallel
    "gemma2": 4,  # kinds of blocks, norms after branches, softcaps, a scaled and tied embedding
    "phi": 4,  # biases everywhere, and of the head
    "youtu": 4,  # latent attention
    "olmo2": 4,  # norms over all heads
    "gpt2": 4,  # learned positions, matrices that lie the other way round and hold queries, keys and values
    "phi3": 4,  # gate and up in one matrix
    "mpt": 4,  # a bias of positions for each head, and numbers of heads that its code states
}
"""Family → number of axes on which it trains, of those that split its weights."""
SPLITS = ("fsdp", "pp", "tp", "sequence_parallel")
OTHERS = {
    "gpt_neox": ("cp", "offload", "splits_backward", "document_mask"),
    "gemma2": ("cp",),  # windows and softcaps: all-to-all alone
    "youtu": ("cp",),  # values of another width than keys: all-to-all alone
    "gpt2": ("cp",),  # learned positions
}
"""Family → further axes that are tried with it."""


@pytest.fixture(scope="module")
def ranks():
    with_four = Ranks(4)
    yield with_four
    with_four.close()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def make_small(family: str, folder: Path) -> ModelShape:
    kind = CONFIG_MAPPING[family]()
    config = shrink({**kind.to_dict(), "model_type": family}, [0, 1] * (kind.num_hidden_layers // 2))
    return trace_model(config, folder / "config.json", folder / f"{family}.json")


@pytest.fixture(scope="module")
def smalls(tmp_path_factory) -> Callable[[str], ModelShape]:
    """A family's small model, traced once for all tests."""
    return cache_calls(lambda family: make_small(family, tmp_path_factory.mktemp(family)))


def find_axes(small: ModelShape) -> list[str]:
    """Axes over which a model is split."""
    whole = read_trace(small.trace).whole
    return [axis for axis in SPLITS if not whole.keys() & {axis, "tp" if "sequence" in axis else axis}]


def find_other_initial_weights(small: ModelShape, axes: list[str]) -> list[str]:
    """Axis and name of each initial weight that has other bits than on one process."""
    whole = {name: torch.empty(size) for name, size in list_weights(small)}
    fill_initial(whole.items(), small, seed=3)
    others, seen = [], set()
    for axis in axes:
        built = assemble(
            small, Batch(global_batch=8, seq_len=16), LAYOUTS[axis], Kernels(), Precision(compute="float32"),
            seed=3, device_type="cpu",
        )  # fmt: skip
        for module in built.modules:
            for name, weight in module.named_parameters():
                seen.add(name)
                if not torch.equal(weight.detach().full_tensor(), whole[small.aliases.get(name, name)]):
                    others.append(f"{axis} {name}")
    assert seen and all(weight.std() > 0 for name, weight in whole.items() if weight.dim() > 1)
    return others


@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_initial_weights_have_the_same_bits_in_every_layout(ranks, family, smalls):
    small = smalls(family)
    axes = find_axes(small)
    assert ranks.run(find_other_initial_weights, small, axes, timeout_s=120) == [[]] * 4


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_every_gradient_are_those_of_one_process(ranks, family, smalls):
    small = smalls(family)
    axes = find_axes(small)
    assert len(axes) == FAMILIES[family]
    for found in ranks.run(find_differences, small, axes, timeout_s=120):
        assert found.keys() == {*axes} and max(found.values()) < TOLERANCE


@pytest.mark.parametrize("family", OTHERS)
def test_parts_of_sequences_split_backwards_and_documents_are_those_of_one_process(ranks, family, smalls):
    small = smalls(family)
    assert not read_trace(small.trace).whole.keys() & {*OTHERS[family]}
    methods = [each.cp_method for each in find_layouts("cp", small)]
    assert methods == (["all-to-all"] if family in ("gemma2", "youtu") else ["ring", "all-to-all"])
    for found in ranks.run(find_differences, small, OTHERS[family], timeout_s=120):
        assert found.keys() == {*OTHERS[family]} and max(found.values()) < TOLERANCE


def compare_beside(small: ModelShape) -> list[float]:
    """Differences of a rank under layouts that have cp beside everything else."""
    tp = Layout(cp=2, tp=2, sequence_parallel=True, cp_method="gather", micro_batch=2, offload="activations")
    pp = Layout(cp=2, pp=2, micro_batch=2, recompute="selective", schedule="zb-h1")
    with prove._InFloat64():
        expected = prove.compute_reference(small, *prove.make_rows(small), prove.make_starts())
        return [prove.compare(small, layout, expected, prove.make_starts()) for layout in (tp, pp)]


def test_cp_goes_with_tp_pp_offload_split_backwards_and_documents(ranks, smalls):
    for found in ranks.run(compare_beside, smalls("gpt_neox"), timeout_s=120):
        assert max(found) < TOLERANCE


def compare_without_positions(small: ModelShape) -> float:
    """The difference of a rank under cp whose tokens stand from 0 on."""
    held, OwnPositions.find = OwnPositions.find, lambda self, documents, device: torch.arange(8)
    try:
        with prove._InFloat64():
            expected = prove.compute_reference(small, *prove.make_rows(small))
            return prove.compare(small, LAYOUTS["cp"], expected)
    finally:
        OwnPositions.find = held


def test_wrong_positions_are_seen(ranks, smalls):
    assert max(ranks.run(compare_without_positions, smalls("gpt_neox"), timeout_s=120)) > 1e-3


def test_a_wrong_split_is_seen(ranks, tmp_path):
    """A view with the number of all heads computes something else where a rank has some."""
    trace = read_trace(make_small("opt", tmp_path).trace)
    assert [each.numbers for each in trace.divided] == [("self_attn.num_heads",)]
    (tmp_path / "forced.json").write_text(trace.dumps())
    forced = json.loads((tmp_path / "forced.json").read_text())
    forced["divided"] = [{"numbers": [], "arguments": []}]
    (tmp_path / "forced.json").write_text(json.dumps(forced))
    small = read_trace(str(tmp_path / "forced.json")).shape
    assert max(found["tp"] for found in ranks.run(find_differences, small, ["tp"], timeout_s=120)) > 0.01


def write_config(folder: Path, family: str = "gpt2") -> Path:
    """A run of a traced model on a tiny corpus."""
    files = write_tiny(folder)
    model = folder / "theirs"
    model.mkdir()
    config = {**make_config(family, vocab_size=272).to_dict(), "model_type": family}
    (model / "config.json").write_text(json.dumps(config))
    text = files.config.read_text()
    head, _, rest = text.partition("[model]\n")
    _, _, after = rest.partition("\n[")
    files.config.write_text(f'{head}[model]\nname = "{model}"\n\n[{after}')
    return files.config


def test_a_run_needs_a_proof_of_its_axes_and_train_force_goes_without(tmp_path, capsys, monkeypatch):
    config = write_config(tmp_path)
    arguments = ["check", str(config), "--world", "2", "--layout.tp=1", "--layout.dp_shard=2", "--layout.pp=1"]
    assert main(arguments) == 2
    assert (
        "no proof shows yet that it trains exactly with fsdp; dtlayout check CONFIG --world N --prove"
        in capsys.readouterr().err
    )
    assert main([*arguments, "--train.force=true"]) == 0
    capsys.readouterr()
    monkeypatch.setattr(prove, "prove", lambda model: {"fsdp": 1e-3, "tp": "a reason"})
    assert main([*arguments, "--prove"]) == 2
    monkeypatch.setattr(prove, "prove", lambda model: {"fsdp": 1e-15, "tp": "a reason"})
    capsys.readouterr()
    assert main([*arguments, "--prove"]) == 0
    said = capsys.readouterr().out
    assert "fsdp: differs from one process by 1.0e-15 at most" in said and "tp: a reason" in said
    assert main(arguments) == 0
    assert main(["check", str(config), "--world", "2", "--layout.tp=2", "--layout.pp=1"]) == 2


def test_a_proof_belongs_to_one_config_and_a_described_model_needs_none(smalls):
    first, second = (smalls(family) for family in ("gpt_neox", "phi"))
    layout = Layout(pp=2, tp=2, dp_shard=2)
    assert find_unproven(first, layout) == ["fsdp", "pp", "tp", "sequence_parallel"]
    write_proof(first, {"fsdp": 1e-15, "pp": 1e-15})
    write_proof(first, {"tp": 1e-9, "sequence_parallel": 1e-15})
    assert read_proof(first)["fsdp"] == 1e-15
    assert find_unproven(first, layout) == ["tp"] and len(find_unproven(second, layout)) == 4
    assert find_unproven(first, Layout(cp=2, offload="activations"), document_mask=True) == [
        "cp", "offload", "document_mask",
    ]  # fmt: skip
    assert find_unproven(second, Layout(pp=2, schedule="zb-h1")) == ["pp", "splits_backward"]
    with pytest.raises(InvalidLayout, match="its proof differs from one process: tp by"):
        refuse_unproven(first, layout)
    assert find_unproven(find_model("llama3.1-8b"), layout) == []


def test_a_traced_run_is_exported_under_its_own_names_and_starts_from_such_a_folder(tmp_path):
    config, run = write_config(tmp_path), tmp_path / "run"
    options = ["--train.force=true", "--train.steps=12", "--checkpoint.export=true", "--optimizer.warmup_steps=1"]
    log = tmp_path / "log"
    assert launch(2, config, "--layout.tp=2", "--layout.pp=1", *options, log=log) == 0, log.read_text()
    assert read_summary(run)["outcome"] == "done"
    assert "initial weights by the rule of gpt2" in log.read_text()
    from transformers import AutoModelForCausalLM

    _, loading = AutoModelForCausalLM.from_pretrained(run / "hf", output_loading_info=True)
    assert not any(loading.values())
    again = tmp_path / "again"
    further = [f"--train.init_from={run / 'hf'}", f"--train.run_folder={again}", "--layout.pp=2", "--layout.tp=1"]
    assert launch(2, config, *options, *further, log=log) == 0, log.read_text()
    assert log.read_text().count("initial weights") == 1  # one file has the lines of both runs
    assert losses(again)[0] < losses(run)[-1] < losses(run)[0] - 0.2
