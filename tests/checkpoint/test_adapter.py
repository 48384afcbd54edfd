"""Adapters as files: `peft` computes what we do, what it saved goes on here, and a merge changes no logit."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_ranks import ADAMW, BATCH, FP32, merge, save, start_beside, update
from codes import TAKES_CODES
from hf_models import OF_BLOCKS, open_made, save_made
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from real_folders import save_words
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from dtlayout.base.errors import InvalidConfig
from dtlayout.checkpoint.adapter import export_adapter
from dtlayout.checkpoint.first_weights import load_weights
from dtlayout.checkpoint.frozen_base import FrozenBase, find_frozen_base, read_frozen_base
from dtlayout.checkpoint.hf import export_weights
from dtlayout.checkpoint.merge import merge_checkpoint, merge_peft
from dtlayout.checkpoint.optimizer_state import fill_state
from dtlayout.config.loading import parse_config
from dtlayout.data.tokenizer import find_other_tokenizer
from dtlayout.models.files import find_model
from dtlayout.models.fingerprint import fingerprint_weights
from dtlayout.models.peft import find_adapter_notes, find_base_folder, find_export_notes, list_adapter, read_adapter
from dtlayout.models.weights import check_init_from, find_adapted_model
from dtlayout.ops.quantized import QUANTIZERS
from dtlayout.spec.adapter import Adapter
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.precision import Precision
from dtlayout.training.build import Assembly, assemble
from dtlayout.training.generate import open_model
from dtlayout.training.optimizer import build_optimizer, set_learning_rate
from dtlayout.training.step import TrainStep

TOKENS = torch.arange(40)[None] * 7 % 260
LORA = Adapter(rank=3, alpha=5.0)
SOME = Adapter(rank=2, alpha=7.5, rslora=True, targets=("q_proj", "o_proj", "up_proj"))
IA3 = Adapter(method="ia3")
SCALED = Adapter(method="ia3", targets=("q_proj", "k_proj", "up_proj", "down_proj"))
CASES = {
    "lora": ("llama", LORA), "some, tied, biases": ("qwen2", SOME), "ia3": ("qwen3", IA3),
    "ia3 of biases": ("qwen2", SCALED), "beside experts": ("dots1", replace(LORA, targets=("q_proj", "o_proj"))),
    "ia3 beside experts": ("dots1", IA3),
}  # fmt: skip


def build(model: ModelShape, folder: Path, adapter: Path | None = None) -> tuple[Assembly, torch.optim.Optimizer]:
    """One rank's model beside the weights of a folder."""
    give = partial(load_weights, folder, adapter=adapter)
    assembly = assemble(model, BATCH, Layout(), Kernels(), FP32, seed=3, device_type="cpu", give_weights=give)
    optimizer = build_optimizer(assembly.modules, model, ADAMW)
    set_learning_rate(optimizer, 0.1)
    return assembly, optimizer


def train_adapter(folder: Path, adapter: Adapter, run: Path) -> Path:
    """A run folder with a checkpoint of an adapter beside the weights of a folder, after two updates."""
    model = replace(find_model(str(folder)), adapter=adapter)
    assembly, optimizer = build(model, folder)
    for _ in range(2):
        update(assembly, optimizer)
    origin = read_frozen_base(folder, model).note()
    return save(run / "checkpoints", 2, assembly, optimizer, model, keep=1, origin=origin)


def save_small(kind: str, folder: Path) -> Path:
    """The folder of `save_made` with weights as small as those of a new model, so that fp32 rounds little."""
    for file in save_made(kind, folder).glob("*.safetensors"):
        tensors = {name: t * 0.1 if t.dim() > 1 else t for name, t in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    return folder


@torch.no_grad()
def logits_of(source: Path) -> Tensor:
    """Logits of our model."""
    return open_model(source, 40, "float32", "cpu")(TOKENS)


def relative(got: Tensor, expected: Tensor) -> float:
    """The largest difference, over the largest magnitude."""
    return float((got - expected).abs().max() / expected.abs().max())


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("kind", "adapter"), CASES.values(), ids=CASES)
def test_peft_opens_it_with_equal_logits_and_a_merge_has_them_too(tmp_path, kind, adapter):
    folder = save_small(kind, tmp_path / "base")
    checkpoint = train_adapter(folder, adapter, tmp_path / "run")
    export_adapter(checkpoint, tmp_path / "out")
    opened = PeftModel.from_pretrained(open_made(folder), tmp_path / "out").eval()
    with torch.no_grad():
        theirs, plain = opened(TOKENS).logits, open_made(folder)(TOKENS).logits
    ours = logits_of(tmp_path / "run")
    assert relative(theirs, plain) > 1e-2
    assert relative(ours, theirs) < 1e-6
    assert torch.equal(logits_of(tmp_path / "out"), ours)

    export_weights(merge_checkpoint(checkpoint), tmp_path / "merged", number_format="float32", file_bytes=60_000)
    assert len([*(tmp_path / "merged").glob("*.safetensors")]) > 1
    with torch.no_grad():
        merged = open_made(tmp_path / "merged")(TOKENS).logits
    assert relative(merged, theirs) < 1e-6
    export_weights(merge_peft(tmp_path / "out"), tmp_path / "again", number_format="float32", file_bytes=60_000)
    assert all(
        file.read_bytes() == (tmp_path / "merged" / file.name).read_bytes()
        for file in (tmp_path / "again").glob("*.safetensors")
    )


@pytest.mark.usefixtures("one_rank")
def test_lora_of_feed_forwards_beside_experts_is_merged_and_said_to_be_none_for_peft(tmp_path):
    folder = save_small("dots1", tmp_path / "base")
    checkpoint = train_adapter(folder, LORA, tmp_path / "run")
    export_weights(merge_checkpoint(checkpoint), tmp_path / "merged", number_format="float32")
    with torch.no_grad():
        assert relative(open_made(tmp_path / "merged")(TOKENS).logits, logits_of(tmp_path / "run")) < 1e-6
    model = find_adapted_model(export(checkpoint, tmp_path / "out"))
    targets = json.loads((tmp_path / "out" / "adapter_config.json").read_text())["target_modules"]
    assert targets[:4] == ["q_proj", "k_proj", "v_proj", "o_proj"] and "mlp.shared_experts.down_proj" in targets
    (note,) = find_export_notes(model)
    assert note.startswith("peft beside transformers 5 takes mlp.shared_experts.gate_proj, ")
    assert not find_export_notes(replace(model, adapter=IA3))


def export(checkpoint: Path, folder: Path) -> Path:
    export_adapter(checkpoint, folder)
    return folder


def steps_of_peft(folder: Path, adapter: Path, tokens: Tensor, targets: Tensor, num_steps: int) -> list[float]:
    """Losses of steps that `peft` and torch take."""
    model = PeftModel.from_pretrained(open_made(folder), adapter, is_trainable=True).eval()  # no dropout
    trained = [each for each in model.parameters() if each.requires_grad]
    decay = ADAMW.decay_of("adapter")
    optimizer = torch.optim.AdamW(trained, 0.01, (ADAMW.beta1, ADAMW.beta2), ADAMW.eps, weight_decay=decay)
    losses = []
    for _ in range(num_steps):
        logits = model(tokens).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, ADAMW.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.usefixtures("one_rank")
def test_what_peft_saved_goes_on_here_with_the_losses_that_it_has_there(tmp_path):
    folder = save_small("qwen2", tmp_path / "base")
    torch.manual_seed(1)
    config = LoraConfig(
        r=4, lora_alpha=10, lora_dropout=0.1, target_modules=["v_proj", "q_proj"], init_lora_weights=False
    )
    made = open_made(folder)
    made.name_or_path = str(folder)
    get_peft_model(made, config).save_pretrained(tmp_path / "theirs")
    adapter = read_adapter(tmp_path / "theirs")
    assert adapter == Adapter(rank=4, alpha=10.0, targets=("q_proj", "v_proj"))
    assert find_adapter_notes(tmp_path / "theirs")[0].endswith("lora_dropout=0.1: it goes on without dropout")
    model = replace(find_model(str(folder)), adapter=adapter)
    assert check_init_from(str(tmp_path / "theirs"), model) == []

    assembly, optimizer = build(model, folder, tmp_path / "theirs")
    fill_state(optimizer, assembly.modules, model, ADAMW)
    path = save(tmp_path / "checkpoints", 0, assembly, optimizer, model, keep=1, origin=FrozenBase("", 0, "").note())
    theirs, ours = (
        load_file(each / "adapter_model.safetensors") for each in (tmp_path / "theirs", export(path, tmp_path / "out"))
    )
    assert theirs.keys() == ours.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)

    set_learning_rate(optimizer, 0.01)
    step = TrainStep(assembly.runtime, optimizer, max_norm=ADAMW.max_norm, mesh=assembly.mesh, model=model)
    rows = torch.arange(BATCH.global_batch * 17).view(-1, 17) * 7 % 260
    losses = [step(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()).loss for _ in range(4)]
    wanted = steps_of_peft(folder, tmp_path / "theirs", rows[:, :-1], rows[:, 1:], 4)
    assert losses == pytest.approx(wanted, rel=1e-5) and losses[-1] < losses[0]


@pytest.mark.usefixtures("one_rank")
def test_a_merge_into_bf16_weights_is_summed_in_fp32_and_rounded_once(tmp_path):
    folder = save_small("llama", tmp_path / "base")
    for file in folder.glob("*.safetensors"):
        save_file({name: t.bfloat16() for name, t in load_file(file).items()}, file, metadata={"format": "pt"})
    checkpoint = train_adapter(folder, SOME, tmp_path / "run")
    export_weights(merge_checkpoint(checkpoint), tmp_path / "merged")
    name = "model.layers.1.self_attn.o_proj"
    adapter = load_file(export(checkpoint, tmp_path / "out") / "adapter_model.safetensors")
    narrow, wide = (adapter[f"base_model.model.{name}.lora_{each}.weight"] for each in "AB")
    assert narrow.shape == (2, 32) and wide.shape == (32, 2) and narrow.dtype == torch.float32
    base = {key: t for file in folder.glob("*.safetensors") for key, t in load_file(file).items()}
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    exact = base[f"{name}.weight"].double() + 7.5 / 2**0.5 * (wide.double() @ narrow.double())
    assert torch.equal(merged[f"{name}.weight"], exact.float().bfloat16())
    untouched = "model.layers.1.self_attn.k_proj.weight"
    assert torch.equal(merged[untouched], base[untouched])


def write_peft(folder: Path, base: Path, **changes: Any) -> Path:
    """A PEFT folder with these keys changed; ... takes a key away."""
    folder.mkdir(exist_ok=True)
    config = {
        "peft_type": "LORA", "base_model_name_or_path": str(base), "r": 2, "lora_alpha": 4,
        "target_modules": ["q_proj"], "lora_dropout": 0.0, "use_dora": False, "rank_pattern": {}, "bias": "none",
        "auto_mapping": None,
    } | changes  # fmt: skip
    config = {key: value for key, value in config.items() if value is not ...}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {
        f"base_model.model.model.layers.{number}.self_attn.q_proj.lora_{which}.weight": torch.zeros(shape)
        for number in range(4) for which, shape in (("A", (2, 32)), ("B", (32, 2)))
    }  # fmt: skip
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize(("kind", "base"), [("LORA", "compute"), *(("IA3", "int8"), ("LORA", "nf4")) * TAKES_CODES])
def test_every_layout_gets_the_bits_of_both_folders(ranks4, tmp_path, kind, base):
    torch.manual_seed(2)
    made = LlamaForCausalLM(LlamaConfig(**OF_BLOCKS))
    made.save_pretrained(tmp_path / "base")
    made.name_or_path = str(tmp_path / "base")
    names = ["k_proj", "down_proj"]
    config = (
        LoraConfig(r=4, target_modules=names, init_lora_weights=False) if kind == "LORA"
        else IA3Config(target_modules=names, feedforward_modules=["down_proj"], init_ia3_weights=False)
    )  # fmt: skip
    theirs = get_peft_model(made, config)
    theirs.save_pretrained(tmp_path / "theirs")
    model = find_adapted_model(tmp_path / "theirs")
    precision = Precision(compute="float32", base=base)
    layouts = [
        Layout(dp_shard=2, tp=2, zero=3), Layout(pp=2, tp=2, sequence_parallel=False),
        Layout(dp_replicate=2, dp_shard=2, zero=2), Layout(dp_shard=4, offload="optimizer"),
    ]  # fmt: skip
    arguments = layouts, model, tmp_path / "base", tmp_path / "theirs", precision
    by_rank = ranks4.run(start_beside, *arguments, timeout_s=150)
    stored = load_file(tmp_path / "base" / "model.safetensors")
    adapter = load_file(tmp_path / "theirs" / "adapter_model.safetensors")
    for number, layout in enumerate(layouts):
        found = merge([states[number] for states in by_rank])
        for weight in list_adapter(model):
            assert np.array_equal(found.pop(weight.name), adapter[weight.tensors[0]].view(weight.shape)), layout
        for name, tensor in stored.items():
            parts = [tensor]
            if f"{name}_scale" in found:
                parts = [*QUANTIZERS[base].quantize(tensor, torch.float32)]
                assert np.array_equal(found.pop(f"{name}_scale"), parts[1]), (layout, name)
            assert np.array_equal(found.pop(name), parts[0]), (layout, name)
        assert not found, layout


REFUSED = {
    "use_dora": ({"use_dora": True}, "use_dora=True is not computed here; train without it"),
    "modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head'] is not computed here"),
    "ranks": ({"rank_pattern": {"q_proj": 4}}, "rank_pattern={'q_proj': 4} is not computed here"),
    "bias": ({"bias": "all"}, "bias='all' is not computed here"),
    "layers": ({"layers_to_transform": [0]}, "layers_to_transform=[0] is not computed here"),
    "parameters": ({"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters=['mlp.experts.down_proj'] is"),
    "type": ({"peft_type": "VERA"}, "peft_type='VERA' is not computed here; use one of LORA, IA3"),
    "types": ({"peft_type": ["LORA"]}, "peft_type=['LORA'] is not computed here; use one of LORA, IA3"),
    "start": ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' changes the frozen weights"),
    "regex": ({"target_modules": ".*q_proj"}, "target_modules='.*q_proj' must be a list of names"),
    "elsewhere": ({"target_modules": ["c_attn"]}, "target_modules=['c_attn'] are no linear layers of the blocks of"),
    "no rank": ({"r": ...}, "adapter_config.json has no r"),
    "a rank": ({"r": 0}, "adapter.rank=0 must be from 1 to a million"),
    "inputs": (
        {"peft_type": "IA3", "target_modules": ["k_proj", "down_proj"], "feedforward_modules": []},
        "feedforward_modules=[]: the inputs of down_proj alone are rescaled here",
    ),
    "names": (
        {"peft_type": "IA3", "feedforward_modules": "down_proj"}, "feedforward_modules='down_proj' must be a list",
    ),
    "base": ({"base_model_name_or_path": "someone/else"}, "names the frozen model 'someone/else', which is no folder"),
    "no repository": ({"base_model_name_or_path": "a/b/c"}, "names the frozen model 'a/b/c', which is no folder here"),
    "no base": ({"base_model_name_or_path": None}, "names the frozen model None, which is no folder here"),
}  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return save_made("llama", tmp_path_factory.mktemp("made") / "llama")


@pytest.mark.parametrize(("changes", "said"), REFUSED.values(), ids=REFUSED)
def test_adapters_that_are_not_computed_here_are_refused_by_name(tmp_path, llama, changes, said):
    with pytest.raises(InvalidConfig) as caught:
        read_adapter(write_peft(tmp_path / "peft", llama, **changes))
    assert any(said in problem for problem in caught.value.problems), caught.value.problems


def test_tensors_and_settings_that_do_not_fit_are_named(tmp_path, llama, monkeypatch):
    folder = write_peft(tmp_path / "peft", llama)
    model = find_adapted_model(folder)
    assert check_init_from(str(folder), model) == []
    where = f"train.init_from={str(folder)!r}: "
    assert check_init_from(str(folder), replace(model, adapter=replace(model.adapter, rank=8))) == [
        f"{where}it has rank=2, and adapter.rank is 8; leave [adapter] out"
    ]
    assert "and the model has none" in check_init_from(str(folder), model.base)[0]
    both = replace(model.adapter, targets=("q_proj", "v_proj"))
    assert (
        "layers.0.self_attn.v_proj.lora_A.weight is missing"
        in check_init_from(str(folder), replace(model, adapter=both))[0]
    )
    first, second = (f"base_model.model.model.layers.0.self_attn.q_proj.lora_{each}.weight" for each in "AB")
    tensors = load_file(folder / "adapter_model.safetensors")
    spoilt = {**tensors, first: torch.zeros(3, 32), "base_model.model.lm_head.weight": torch.zeros(2, dtype=torch.int8)}
    spoilt[second] = torch.zeros(32, 2, dtype=torch.int8)
    save_file(spoilt, folder / "adapter_model.safetensors")
    assert check_init_from(str(folder), model) == [
        f"{where}base_model.model.lm_head.weight is in none of the adapter's targets",
        f"{where}{first} has the shape [3, 32], where the adapter's is [2, 32]",
        f"{where}{second} has the format I8; weights must be of float64, float32, float16, bfloat16",
    ]
    with pytest.raises(InvalidConfig, match="in none of the adapter's targets"):
        find_adapted_model(folder)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    assert "has no adapter_model.safetensors; save it as safetensors" in check_init_from(str(folder), model)[0]
    (folder / "adapter_config.json").write_text("[]")
    with pytest.raises(InvalidConfig, match=r"adapter_config.json cannot be read: it is no table"):
        read_adapter(folder)


def test_a_config_gets_sizes_adapter_and_tokenizer_of_both_folders(tmp_path, llama):
    base = save_words(Path(shutil.copytree(llama, tmp_path / "base")), ["</s>"])
    folder = write_peft(tmp_path / "peft", base)
    tables = {"batch": {"global_batch": 2, "seq_len": 16}, "train": {"steps": 1, "init_from": str(folder)}}
    config = parse_config(tables)
    assert config.model == replace(find_model(str(base)), adapter=Adapter(rank=2, alpha=4.0, targets=("q_proj",)))
    assert config.data.tokenizer == str(base)
    assert parse_config({**tables, "adapter": {"rank": 8}}).model.adapter == Adapter(rank=8)  # refused by a check
    assert find_other_tokenizer("bytes", str(folder)) != []
    write_peft(folder, tmp_path / "nowhere")
    with pytest.raises(InvalidConfig) as caught:
        parse_config(tables)
    assert len(caught.value.problems) == 1 and "nowhere" in caught.value.problems[0]


@pytest.mark.usefixtures("one_rank")
def test_a_frozen_model_that_cannot_be_read_any_more_ends_every_rank(tmp_path, llama):
    base = Path(shutil.copytree(llama, tmp_path / "base"))
    tables = {"batch": {"global_batch": 2, "seq_len": 16}, "train": {"steps": 1, "init_from": str(base)}}
    config = parse_config({**tables, "adapter": {}})
    assert find_frozen_base(config, None) == read_frozen_base(base, config.model)
    assert find_frozen_base(parse_config(tables), None) is None
    (base / "model.safetensors.index.json").unlink()
    with pytest.raises(InvalidConfig, match=r"train.init_from='.*base': .* has no model.safetensors"):
        find_frozen_base(config, None)


def test_a_repository_in_the_cache_is_found_by_its_name(tmp_path, llama, monkeypatch):
    cached = tmp_path / "models--someone--small"
    shutil.copytree(llama, cached / "snapshots" / "abc")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    folder = write_peft(tmp_path / "peft", llama, base_model_name_or_path="someone/small")
    assert find_base_folder(folder) == cached / "snapshots" / "abc"


def test_a_fingerprint_is_of_the_weights_and_not_of_their_files(tmp_path, llama):
    model = find_model(str(llama))
    kept = fingerprint_weights(llama, model)
    tensors = {name: t for file in llama.glob("*.safetensors") for name, t in load_file(file).items()}
    one = tmp_path / "one"
    one.mkdir()
    save_file({**tensors, "extra": torch.zeros(2)}, one / "model.safetensors")
    assert fingerprint_weights(one, replace(model, adapter=LORA)) == kept
    for place in (0, -1):
        changed = {name: t.clone() for name, t in tensors.items()}
        changed["model.norm.weight"].view(torch.int32)[place] ^= 1
        save_file(changed, one / "model.safetensors")
        assert fingerprint_weights(one, model) != kept
    save_file({name: t.bfloat16() for name, t in tensors.items()}, one / "model.safetensors")
    assert fingerprint_weights(one, model) != kept
    (one / "model.safetensors").write_bytes(b"\x08" + bytes(7) + b"not json")
    with pytest.raises(InvalidConfig, match=r"model.safetensors cannot be read"):
        fingerprint_weights(one, model)
