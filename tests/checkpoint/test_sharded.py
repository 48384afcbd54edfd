"""Sharded checkpoints: every layout reads every other's to the bit, and what is not whole is not taken for one."""

import errno
import json
import pickle
import re
import shutil
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import numpy as np
import parity
import pytest
import torch
from checkpoint_ranks import (
    ADAMW,
    State,
    build,
    find_newest,
    load_each,
    merge,
    message_of,
    refusal,
    refusals_of_unequal,
    save,
    train_and_save,
    update,
    whole_state,
)
from hypothesis import given
from hypothesis import strategies as st
from parity import BALANCED, MIXTURE, Case, Outcome, largest_difference, run_reference
from resuming import MODEL, NUM_STEPS, list_scheduled, pair_randomly, resume
from thorough import mostly_thorough, thorough
from tiny import SHAPE
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter

from dtlayout.base.checkpoint_names import MANIFEST_NAME, list_checkpoints
from dtlayout.base.errors import CheckpointError
from dtlayout.checkpoint import folder as checkpoint_folder
from dtlayout.checkpoint import manifest, sharded
from dtlayout.checkpoint.equality import digest
from dtlayout.checkpoint.folder import clean, set_aside
from dtlayout.checkpoint.hf import export_weights
from dtlayout.checkpoint.manifest import find_checkpoint, find_damage, read_manifest
from dtlayout.checkpoint.reader import Reader
from dtlayout.checkpoint.sharded import find_changes, find_intact, load_checkpoint, read_origin
from dtlayout.models.families import find_weight
from dtlayout.spec.adapter import Adapter
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.optimizers import SGD, AdamW, Muon, Optimizer

TIED = replace(SHAPE, tied_embeddings=True)
LAYOUTS = [
    Layout(tp=4),
    Layout(cp=2, dp_shard=2, cp_method="gather"),
    Layout(cp=2, tp=2),
    Layout(dp_shard=4),
    Layout(dp_replicate=2, dp_shard=2, zero=3, offload="disk", offload_folder=gettempdir()),
    Layout(pp=4),
    *(layout for layout in list_scheduled() if layout.num_stages <= 4),
]
OF_EXPERTS = [
    Layout(dp_shard=4),
    Layout(dp_shard=4, ep=2, zero=3),
    Layout(dp_shard=2, tp=2, ep=4),
    Layout(dp_replicate=2, tp=2),
    Layout(pp=2, dp_shard=2, ep=2, offload="optimizer"),
]
"""Experts on one rank, two and four, sharded over more ranks or none."""


class Killed(BaseException):
    """Ends a save where a kill would."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory, ranks4) -> Path:
    """The folder with a checkpoint of two steps as dp4."""
    folder = tmp_path_factory.mktemp("whole")
    ranks4.run(train_and_save, Layout(dp_shard=4), SHAPE, folder, 2, 1)
    return folder


@pytest.fixture
def path(whole, tmp_path) -> Path:
    """A copy of that checkpoint, to be spoilt."""
    return Path(shutil.copytree(whole / "step-00000002", tmp_path / "step-00000002"))


def names_in(folder: Path) -> list[str]:
    """Folders, and links to folders."""
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


@pytest.mark.parametrize(
    ("saved_as", "model", "settings"),
    [
        thorough((Layout(pp=2, dp_shard=2), TIED, ADAMW)),
        thorough((Layout(pp=2, tp=2, schedule="zb-v", virtual_stages=2), TIED, ADAMW)),
        thorough((Layout(dp_shard=2, tp=2, zero=2), SHAPE, ADAMW)),
        (Layout(dp_shard=4, ep=4), BALANCED, AdamW(state_format="bfloat16")),
        thorough((Layout(dp_shard=4, ep=4), BALANCED, ADAMW)),
        (Layout(pp=2, tp=2, schedule="zb-h1"), replace(TIED, adapter=Adapter(rank=3)), ADAMW),
        thorough((Layout(dp_shard=2, tp=2), TIED, SGD())),
        (Layout(dp_shard=2, tp=2), TIED, Muon()),
        thorough((Layout(dp_shard=2, tp=2, ep=4), MIXTURE, Muon())),
        thorough(
            (
                Layout(dp_shard=4, ep=4),
                replace(MIXTURE, adapter=Adapter(method="ia3", targets=("k_proj", "down_proj"))),
                ADAMW,
            )
        ),
    ],
    ids=[
        "pp2 dp2, tied",
        "pp2 tp2 zb-v, tied",
        "dp2 tp2",
        "ep4, bf16 moments",
        "ep4",
        "lora",
        "sgd",
        "muon",
        "muon of experts",
        "ia3 of experts",
    ],
)
def test_what_one_layout_saves_every_other_loads_to_the_bit(ranks4, tmp_path, saved_as, model, settings):
    by_rank = ranks4.run(train_and_save, saved_as, model, tmp_path, 2, 1, settings)
    saved, continued = (merge([states[i] for states in by_rank]) for i in (0, 1))
    (path,) = list_checkpoints(tmp_path)
    layouts = OF_EXPERTS if model.experts else LAYOUTS if settings != Muon() else LAYOUTS[:8]  # two schedules too
    layouts = layouts if model.adapter is None else LAYOUTS[2:6]  # each axis
    results = ranks4.run(load_each, layouts, model, path, settings, timeout_s=150)
    for i, layout in enumerate(layouts):
        steps, loaded, after = zip(*(result[i] for result in results), strict=True)
        assert steps == (2, 2, 2, 2), layout
        assert_equal(merge(list(loaded)), saved, str(layout), settings, model)
        for name, array in merge(list(after)).items():
            np.testing.assert_allclose(array, continued[name], rtol=1e-5, atol=1e-7, err_msg=f"{layout}: {name}")


PAIRS = [pair for seed in range(4) for pair in pair_randomly(list_scheduled(), seed)]
NUM_SCHEDULED = len(list_scheduled())


@cache
def run_uninterrupted(model: ModelShape) -> Outcome:
    """Three steps of a model on one process."""
    return replace(run_reference(Case(Layout(), global_batch=8, model=model, num_steps=NUM_STEPS)), gradients={})


@pytest.mark.parametrize(("saved_as", "resumed_as"), mostly_thorough(PAIRS, lambda i, _: i < NUM_SCHEDULED), ids=str)
def test_tied_weights_go_on_under_another_layout_as_if_nothing_had_been_saved(ranks4, tmp_path, saved_as, resumed_as):
    """Of eight blocks where a layout has eight stages, of four where both have fewer."""
    model = replace(MODEL, num_layers=max(4, saved_as.num_stages, resumed_as.num_stages))
    saved, resumed = (Case(layout, global_batch=8, model=model) for layout in (saved_as, resumed_as))
    outcome = parity.merge(ranks4.run(resume, saved, resumed, tmp_path))
    difference, where = largest_difference(outcome, run_uninterrupted(model))
    assert difference < 1e-9, f"{where} differs by {difference}"


def test_copies_that_differ_after_a_load_are_named_on_every_rank(ranks4, tmp_path):
    ranks4.run(train_and_save, Layout(dp_shard=4), TIED, tmp_path / "own", 1, 1)
    (path,) = list_checkpoints(tmp_path / "own")
    export_weights(path, tmp_path / "hf", number_format="float32")
    embedding, norm = "model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"
    cases = [
        (Layout(dp_replicate=4), f"parameters.{norm}"),
        (Layout(dp_replicate=2, dp_shard=2), f"exp_avg.{embedding}"),
        (Layout(tp=4), f"exp_avg_sq.{norm}"),
        (Layout(pp=4), f"exp_avg.{embedding}"),
        (Layout(pp=2, tp=2, schedule="zb-v", virtual_stages=2), f"parameters.{embedding}"),
        (Layout(pp=2, dp_shard=2, schedule="v-min", virtual_stages=2, zero=3), f"exp_avg_sq.{embedding}"),
    ]
    by_rank = ranks4.run(refusals_of_unequal, cases, 0, TIED, path, tmp_path / "hf")
    assert all(of_rank == by_rank[0] for of_rank in by_rank)
    for (layout, name), (of_checkpoint, of_folder) in zip(cases, by_rank[0], strict=True):
        problem = "is loaded, and copies of 1 tensor that must be equal are not"
        assert of_checkpoint is not None and f"{path} {problem}: {name}; " in of_checkpoint, layout
        if layout.tp < 4:  # which shards the embedding, so that nobody has a copy
            assert of_folder is not None and f"{tmp_path / 'hf'} {problem}: {embedding}; " in of_folder, layout


@given(st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int8]), st.integers(1, 40), st.data())
def test_a_digest_tells_any_bit_and_any_place_apart(dtype, size, data):
    tensor = torch.randint(-128, 128, (size * dtype.itemsize,), dtype=torch.int8).view(dtype)
    same, bits = digest(tensor), tensor.clone().view(torch.uint8)
    assert digest(tensor.clone()) == same
    bits[data.draw(st.integers(0, bits.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert digest(bits.view(dtype)) != same
    ordered = torch.arange(size).to(dtype)
    assert size == 1 or digest(ordered) != digest(ordered.flip(0)) or torch.equal(ordered, ordered.flip(0))


def test_a_digest_tells_numbers_apart_that_differ_in_their_highest_bits():
    ordered = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)
    assert digest(ordered) != digest(ordered.flip(0))


def assert_equal(loaded: State, saved: State, where: str, settings: Optimizer, model: ModelShape) -> None:
    assert loaded.keys() == saved.keys(), where
    weights = [find_weight(model, name.partition(" ")[2]) for name in saved if name.startswith("parameter ")]
    owners = [settings.of_role(weight.role) for weight in weights if weight.trains and not weight.is_counter]
    assert len(saved) == len(weights) + sum(len(owner.state) + (owner.step_bytes > 0) for owner in owners)
    for name, array in saved.items():
        assert np.array_equal(loaded[name], array), f"{where}: {name}"
        assert np.any(array), f"{name}: a state of zeros would prove nothing"


@pytest.mark.usefixtures("one_rank")
def test_the_newest_stay_and_are_listed_oldest_first(tmp_path):
    folder = tmp_path / "checkpoints"
    train_and_save(Layout(), SHAPE, folder, num_steps=11, keep=2)
    assert [path.name for path in list_checkpoints(folder)] == ["step-00000010", "step-00000011"]
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-00000010", "step-00000011"]
    assert (folder / "latest").resolve() == folder / "step-00000011"


@pytest.mark.usefixtures("one_rank")
def test_the_saves_of_a_run_are_planned_once(tmp_path, monkeypatch):
    planned, plan = [], DefaultSavePlanner.create_local_plan
    monkeypatch.setattr(DefaultSavePlanner, "create_local_plan", lambda self: planned.append(self) or plan(self))
    train_and_save(Layout(), SHAPE, tmp_path, num_steps=3, keep=3)
    assert len(planned) == 1 and [find_damage(path) for path in list_checkpoints(tmp_path)] == [[]] * 3


def test_a_run_without_checkpoints_lists_none(tmp_path):
    assert list_checkpoints(tmp_path / "not there") == []


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("where", "moment"),
    [
        (FileSystemWriter, "write_data"),
        (FileSystemWriter, "finish"),
        (sharded, "json.dumps"),
        (checkpoint_folder, "os.replace"),
    ],
    ids=["tensors", "their index", "json.dumps", "os.replace"],
)
def test_a_kill_while_saving_leaves_nothing_that_looks_whole_and_the_next_save_succeeds(
    tmp_path, monkeypatch, where, moment
):
    assembly, optimizer = build(Layout(), SHAPE, seed=1)
    update(assembly, optimizer)
    save(tmp_path, 1, assembly, optimizer, SHAPE, keep=2)

    def kill(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        name, _, of_module = moment.partition(".")
        patch.setattr(where, name, _Stub(getattr(where, name), moment, kill) if of_module else kill)
        with pytest.raises(Killed):
            save(tmp_path, 2, assembly, optimizer, SHAPE, keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000001"]
    save(tmp_path, 2, assembly, optimizer, SHAPE, keep=2)
    assert names_in(tmp_path) == ["latest", "step-00000001", "step-00000002"]
    assert load_checkpoint(tmp_path / "step-00000002", assembly.modules, optimizer, SHAPE, ADAMW) == 2


class _Stub:
    """A module with one function replaced, for its importer alone."""

    def __init__(self, module: object, name: str, function: object):
        self._module, self._name, self._function = module, name.partition(".")[2], function

    def __getattr__(self, name: str) -> object:
        return self._function if name == self._name else getattr(self._module, name)


@pytest.mark.usefixtures("one_rank")
def test_a_kill_while_an_old_one_is_removed_leaves_nothing_that_looks_whole(tmp_path, monkeypatch):
    assembly, optimizer = build(Layout(), SHAPE, seed=1)
    update(assembly, optimizer)
    save(tmp_path, 1, assembly, optimizer, SHAPE, keep=1)

    def remove_half(path: Path, **_: object) -> None:
        if (path / "tensors").exists():
            shutil.rmtree(path / "tensors")
            raise Killed

    monkeypatch.setattr(checkpoint_folder, "shutil", _Stub(shutil, "shutil.rmtree", remove_half))
    with pytest.raises(Killed):
        save(tmp_path, 2, assembly, optimizer, SHAPE, keep=1)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000002"]


@pytest.mark.usefixtures("one_rank")
def test_a_folder_that_lacks_a_file_since_it_was_whole_is_a_damaged_checkpoint_and_not_none(path):
    (path / "state.json").unlink()
    assert list_checkpoints(path.parent) == [path]
    assert find_damage(path) == ["state.json is missing"]
    (path / MANIFEST_NAME).unlink()
    assert find_damage(path)[0].startswith("manifest.json cannot be read: FileNotFoundError")
    with pytest.raises(CheckpointError, match=r"damaged: manifest.json cannot be read.*remove it"):
        find_intact(path.parent, print, falls_back=True)  # there is no other, and a run never begins anew by itself


@pytest.mark.usefixtures("one_rank")
def test_a_folder_of_checkpoints_that_cannot_be_read_is_no_empty_one(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(manifest.os, "listdir", refuse)
    for ask in (
        lambda: find_intact(tmp_path / "checkpoints", print, falls_back=True),
        lambda: find_checkpoint(tmp_path),
    ):
        with pytest.raises(CheckpointError, match="checkpoints cannot be read: Permission denied"):
            ask()


@pytest.mark.usefixtures("one_rank")
def test_another_model_is_refused_with_what_differs(path):
    wanted = replace(SHAPE, num_layers=2, ffn_size=64, name="other")
    assembly, optimizer = build(Layout(), wanted, seed=2)
    assert message_of(lambda: load_checkpoint(path, assembly.modules, optimizer, wanted, ADAMW)) == (
        f"{path} holds another model: num_layers=4 (config: 2), ffn_size=48 (config: 64); use another train.run_folder"
    )


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("saved", "wanted", "differing"),
    [
        (ADAMW, SGD(), "name=adamw (config: sgd), state=['exp_avg', 'exp_avg_sq'] (config: ['momentum_buffer'])"),
        (SGD(momentum=0.0), SGD(), "state=[] (config: ['momentum_buffer'])"),
        (SGD(), SGD(state_format="bfloat16"), "state_format=[''] (config: ['bfloat16'])"),
        (AdamW(state_format="bfloat16"), ADAMW, "state_format=['bfloat16'] (config: [''])"),
    ],
    ids=["another", "another state", "another format", "that of the parameters"],
)
def test_another_optimizer_is_refused_with_what_differs(tmp_path, saved, wanted, differing):
    train_and_save(Layout(), SHAPE, tmp_path, num_steps=1, keep=1, settings=saved)
    (path,) = list_checkpoints(tmp_path)
    assembly, optimizer = build(Layout(), SHAPE, 2, wanted)
    assert message_of(lambda: load_checkpoint(path, assembly.modules, optimizer, SHAPE, wanted)) == (
        f"{path} holds another optimizer: {differing}; use another train.run_folder"
    )


@pytest.mark.usefixtures("one_rank")
def test_moments_are_saved_and_loaded_in_the_format_that_they_are_kept_in(tmp_path):
    settings, name = AdamW(state_format="bfloat16"), "model.layers.0.mlp.up_proj.weight"
    saved, _ = train_and_save(Layout(), SHAPE, tmp_path, num_steps=1, keep=1, settings=settings)
    (path,) = list_checkpoints(tmp_path)
    kinds = Reader(path / "tensors").read_metadata().state_dict_metadata
    formats = {kind: kinds[f"{kind}.{name}"].properties.dtype for kind in ("parameters", "exp_avg", "exp_avg_sq")}
    assert formats == {"parameters": torch.float32, "exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16}
    assembly, optimizer = build(Layout(), SHAPE, 2, settings)
    assert load_checkpoint(path, assembly.modules, optimizer, SHAPE, settings) == 1
    loaded = whole_state(assembly, optimizer, SHAPE)
    assert all(np.array_equal(loaded[name], array) for name, array in saved.items())
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.bfloat16}


@pytest.mark.parametrize("tied", [False, True])
def test_rows_that_are_no_tokens_are_zero_after_a_load_and_all_others_are_exact(ranks4, tmp_path, tied):
    odd = replace(SHAPE, vocab_size=261, tied_embeddings=tied)
    padded = replace(odd, vocab_size=264, unused_rows=3)
    layouts = {odd: Layout(dp_shard=4), padded: Layout(tp=2, dp_shard=2, zero=3)}
    for model, other in ((odd, padded), (padded, odd)):
        folder = tmp_path / str(model.vocab_size)
        saved = merge([state for state, _ in ranks4.run(train_and_save, layouts[model], model, folder, 2, 1)])
        by_rank = ranks4.run(load_each, [layouts[other]], other, folder / "step-00000002")
        loaded = merge([state for ((_, state, _),) in by_rank])
        assert loaded.keys() == saved.keys()
        for name, array in loaded.items():
            num_kept = min(len(array), len(saved[name])) if array.shape else 1
            assert np.array_equal(
                array[:num_kept] if array.shape else array, saved[name][:num_kept] if array.shape else saved[name]
            )
            assert not array.shape or not array[num_kept:].any()
        grown = [name for name, array in loaded.items() if array.shape != saved[name].shape]
        assert len(grown) == 3 * (1 if tied else 2)  # a weight and its two moments


@pytest.mark.usefixtures("one_rank")
def test_another_name_is_no_other_model(path):
    renamed = replace(SHAPE, name="other")
    assembly, optimizer = build(Layout(), renamed, seed=2)
    assert load_checkpoint(path, assembly.modules, optimizer, renamed, ADAMW) == 2


@pytest.mark.usefixtures("one_rank")
def test_a_model_saved_before_it_had_a_family_is_the_same_model(path):
    state = json.loads((path / "state.json").read_text())
    state["model"] = {name: value for name, value in state["model"].items() if name not in ("family", "qk_norm")}
    (path / "state.json").write_text(json.dumps(state))
    assembly, optimizer = build(Layout(), SHAPE, seed=2)
    assert load_checkpoint(path, assembly.modules, optimizer, SHAPE, ADAMW) == 2


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", None], ids=["empty", "torn", "binary", "missing"])
def test_a_state_that_cannot_be_read_is_refused(path, content):
    (path / "state.json").unlink()
    if content is not None:
        (path / "state.json").write_bytes(content)
    assembly, optimizer = build(Layout(), SHAPE, seed=2)
    message = message_of(lambda: load_checkpoint(path, assembly.modules, optimizer, SHAPE, ADAMW))
    assert message is not None
    assert message.startswith(f"{path} cannot be read: ") and message.endswith(
        "; remove it to resume from an older one or from the start"
    )


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("state", [{}, [], {"step": 2, "model": 3}])
def test_a_state_of_another_form_is_refused(path, state):
    (path / "state.json").write_text(json.dumps(state))
    assembly, optimizer = build(Layout(), SHAPE, seed=2)
    assert message_of(lambda: load_checkpoint(path, assembly.modules, optimizer, SHAPE, ADAMW)) is not None


def flip(path: Path, place: int = -1) -> None:
    """Another byte in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[place if place >= 0 else len(content) // 2] ^= 0x10
    path.write_bytes(content)


def test_a_byte_that_changes_in_any_file_is_found_by_name(whole, path):
    assert find_damage(path) == []
    files = sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())
    assert len(files) == 4 + 3  # of each rank, and metadata, state and manifest
    for name in files:
        flip(path / name)
        (problem,) = find_damage(path)
        assert problem.startswith(name), problem
        shutil.copyfile(whole / path.name / name, path / name)
        (path / name).unlink()
        (problem,) = find_damage(path)
        assert problem.startswith(name), problem
        shutil.copyfile(whole / path.name / name, path / name)
    assert find_damage(path) == []


def test_those_who_share_the_reading_find_what_one_finds(path):
    flip(path / "tensors" / "__2_0.distcp")
    found = [find_damage(path, first, 3) for first in range(3)]
    assert sorted(map(len, found)) == [0, 0, 1]
    assert [problem for problems in found for problem in problems] == find_damage(path)


def test_a_checkpoint_of_a_version_without_manifests_is_taken_as_it_is(path):
    (path / MANIFEST_NAME).unlink()
    assert find_damage(path) != []
    state = json.loads((path / "state.json").read_text())
    del state["format"]
    (path / "state.json").write_text(json.dumps(state))
    assert find_damage(path) == [] and read_manifest(path) is None


def test_ranks_go_on_from_the_newest_that_is_intact(ranks4, tmp_path):
    ranks4.run(train_and_save, Layout(dp_shard=4), SHAPE, tmp_path, 3, 3)
    names = ["step-00000001", "step-00000002", "step-00000003"]
    assert {path.name for path, _ in ranks4.run(find_newest, tmp_path, True)} == {names[2]}
    flip(tmp_path / names[2] / "tensors" / "__1_0.distcp")
    (tmp_path / names[1] / "tensors" / ".metadata").unlink()
    for path, said in ranks4.run(find_newest, tmp_path, True):
        assert path.name == names[0]
        assert (
            "step-00000003 is damaged, an older one is tried: tensors/__1_0.distcp is not what was written" in said[0]
        )
        assert "step-00000002 is damaged, an older one is tried: tensors/.metadata is missing" in said[1]
    for message in ranks4.run(find_newest, tmp_path, False):
        assert "step-00000003 is damaged: tensors/__1_0" in message and 'fallback="previous"' in message
    set_aside(tmp_path / names[0], lambda: None)
    assert [path.name for path in list_checkpoints(tmp_path)] == names[:1]
    assert len(list(tmp_path.glob("damaged-step-*"))) == 2
    (tmp_path / names[0] / MANIFEST_NAME).write_text("{}")
    for message in ranks4.run(find_newest, tmp_path, True):
        assert "step-00000001 is damaged: manifest.json cannot be read: KeyError" in message
        assert message.endswith("; no older one is whole: remove it, and them, to start again")
    assert ranks4.run(find_newest, tmp_path / "nothing", True) == [(None, [])] * 4


@pytest.mark.usefixtures("one_rank")
def test_what_kills_have_left_is_taken_away(tmp_path):
    for name in ("partial-00000007-node7.12.ab", "removed-step-00000003", "step-00000001", "damaged-step-00000005"):
        (tmp_path / name / "tensors").mkdir(parents=True)
        (tmp_path / name / "tensors" / "__0_0.distcp").write_bytes(b"x")
    clean(tmp_path, lambda: None)
    assert names_in(tmp_path) == ["damaged-step-00000005", "step-00000001"]


@pytest.mark.usefixtures("one_rank")
def test_a_removal_that_was_killed_is_in_nobodys_way(tmp_path):
    (tmp_path / "removed-step-00000001" / "tensors").mkdir(parents=True)
    train_and_save(Layout(), SHAPE, tmp_path, num_steps=2, keep=1)
    assert names_in(tmp_path) == ["latest", "step-00000002"]


class Hostile:
    """Pickled as a call of whoever reads it."""

    def __init__(self, proof: Path):
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.proof, "executed")


@pytest.mark.usefixtures("one_rank")
def test_nothing_that_a_checkpoint_says_is_executed(path, tmp_path):
    proof = tmp_path / "proof"
    (path / "tensors" / ".metadata").write_bytes(pickle.dumps(Hostile(proof)))
    assembly, optimizer = build(Layout(), SHAPE, seed=2)
    message = message_of(lambda: load_checkpoint(path, assembly.modules, optimizer, SHAPE, ADAMW))
    assert re.search(r"cannot be read: .*\.metadata asks for pathlib\S*Path\.write_text, which is refused", message)
    assert not proof.exists()


def spoil(path: Path, how: str) -> None:
    shard = sorted((path / "tensors").glob("*.distcp"))[1]
    metadata = path / "tensors" / ".metadata"
    if how == "a shard is cut":
        shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    elif how == "a shard is missing":
        shard.unlink()
    elif how == "a shard is empty":
        shard.write_bytes(b"")
    elif how == "the index is missing":
        metadata.unlink()
    elif how == "the index is empty":
        metadata.write_bytes(b"")
    else:
        assert how == "the index is cut"
        metadata.write_bytes(metadata.read_bytes()[:100])


@pytest.mark.parametrize(
    "how",
    ["a shard is cut", "a shard is missing", "a shard is empty", "the index is missing", "the index is empty",
     "the index is cut"],
)  # fmt: skip
def test_tensors_that_cannot_be_read_are_refused_by_every_rank_in_one_line(ranks4, path, how):
    spoil(path, how)
    for message in ranks4.run(refusal, Layout(pp=2, tp=2), SHAPE, path):
        assert message is not None
        assert message.startswith(f"{path} cannot be read: ")
        assert message.endswith("; remove it to resume from an older one or from the start")
        assert "\n" not in message


@pytest.mark.usefixtures("one_rank")
def test_a_checkpoint_that_cannot_be_written_is_refused(tmp_path):
    assembly, optimizer = build(Layout(), SHAPE, seed=1)
    update(assembly, optimizer)
    folder = tmp_path / "a file"
    folder.write_text("")
    message = message_of(lambda: save(folder, 1, assembly, optimizer, SHAPE, keep=1))
    assert message is not None
    assert "cannot be written" in message


@pytest.mark.usefixtures("one_rank")
def test_a_disk_that_is_full_while_tensors_are_written_is_refused(tmp_path, monkeypatch):
    @contextmanager
    def open_full(*_):
        with open("/dev/full", "wb", buffering=0) as file:
            yield file

    assembly, optimizer = build(Layout(), SHAPE, seed=1)
    update(assembly, optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(FileSystem, "create_stream", open_full)
        message = message_of(lambda: save(tmp_path, 1, assembly, optimizer, SHAPE, keep=1))
    assert message is not None and message.endswith(
        "step-00000001 cannot be written: OSError [Errno 28] No space left on device"
    )
    assert names_in(tmp_path) == []


@pytest.mark.usefixtures("one_rank")
def test_what_changed_since_a_checkpoint_is_found(tmp_path):
    assembly, optimizer = build(Layout(), SHAPE, seed=1)
    update(assembly, optimizer)
    path = save(tmp_path, 1, assembly, optimizer, SHAPE, keep=1, origin={"seed": 0, "global_batch": 8})
    assert find_changes(read_origin(path), {"seed": 1, "global_batch": 8, "new": 3}) == {"seed": (0, 1)}


@pytest.mark.usefixtures("one_rank")
def test_a_rank_that_is_gone_while_all_load_is_no_refusal(path, monkeypatch):
    def lose(*_, **__):
        raise RuntimeError("Connection reset by peer")

    assembly, optimizer = build(Layout(), SHAPE, seed=2)
    monkeypatch.setattr("dtlayout.checkpoint.sharded.dcp.load", lose)
    with pytest.raises(RuntimeError, match="Connection reset"):  # a crash, after which torchrun starts again
        load_checkpoint(path, assembly.modules, optimizer, SHAPE, ADAMW)
