"""Which file a tensor is taken from, and when two tensors are equal."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from dtlayout.base.errors import InvalidConfig
from dtlayout.models import stored
from dtlayout.models.stored import INDEX, SINGLE_FILE, are_equal, find_weights

FORMATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
IN_ANY_FOLDER = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def write_index(folder: Path, mapping: object) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": mapping}))


def read(folder: Path, name: str) -> float:
    """The value of a tensor that holds one, in the file that is taken."""
    from safetensors import safe_open

    with safe_open(find_weights(folder)[name].file, framework="pt") as file:
        return float(file.get_tensor(name))


@IN_ANY_FOLDER
@given(st.data())
def test_a_tensor_is_taken_from_the_file_that_the_index_names(tmp_path, data):
    """Whatever files hold copies of it."""
    for left in tmp_path.iterdir():
        left.unlink()
    files = [f"model-{i}.safetensors" for i in range(3)]
    names = ("a", "b", "c")
    owner = {name: data.draw(st.sampled_from(files), label=name) for name in names}
    for number, file in enumerate(files):
        copies = data.draw(st.sets(st.sampled_from(names)), label=file)
        held = copies | {name for name in names if owner[name] == file}
        save_file({name: torch.tensor(float(number)) for name in held}, tmp_path / file)
    write_index(tmp_path, owner)
    assert {name: files[int(read(tmp_path, name))] for name in names} == owner


@pytest.fixture
def two_files(tmp_path) -> Path:
    save_file({"a": torch.zeros(1), "both": torch.zeros(1)}, tmp_path / "one.safetensors")
    save_file({"b": torch.ones(1), "both": torch.ones(1)}, tmp_path / "two.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    ("mapping", "said"),
    [
        ({"a": "two.safetensors"}, "says that a is in two.safetensors, which does not hold it"),
        ({"a": "one.safetensors", "b": "two.safetensors"}, "both is in one.safetensors and in two.safetensors, and"),
        ({"a": "three.safetensors"}, "has no three.safetensors"),
        ({"a": 3}, f"{INDEX} cannot be read: TypeError a file of weight_map is no text"),
        ({"a": ["one.safetensors"]}, f"{INDEX} cannot be read"),
        (["one.safetensors"], f"{INDEX} cannot be read"),
    ],
)
def test_an_index_that_contradicts_its_files_is_refused(two_files, mapping, said):
    write_index(two_files, mapping)
    with pytest.raises(InvalidConfig, match=said):
        find_weights(two_files)


def test_an_index_of_other_files_beside_a_single_file_is_refused(two_files):
    mapping = {"a": "one.safetensors", "b": "two.safetensors", "both": "two.safetensors"}
    write_index(two_files, mapping)
    assert find_weights(two_files)["both"].file.name == "two.safetensors"
    save_file({"a": torch.zeros(1)}, two_files / SINGLE_FILE)
    with pytest.raises(InvalidConfig, match=f"has {SINGLE_FILE}, and {INDEX} names 2 other files, such as one"):
        find_weights(two_files)
    write_index(two_files, {"a": SINGLE_FILE})
    assert find_weights(two_files).keys() == {"a"}


def test_weights_outside_the_folder_are_refused_however_they_are_named(tmp_path):
    folder, outside = tmp_path / "model", tmp_path / "x.safetensors"
    folder.mkdir()
    save_file({"a": torch.zeros(1)}, outside)
    (folder / "link.safetensors").symlink_to(outside)
    (folder / "up").symlink_to(tmp_path)
    for name in ("../x.safetensors", str(outside), "link.safetensors", "up/x.safetensors", "none/../../x.safetensors"):
        write_index(folder, {"a": name})
        with pytest.raises(InvalidConfig, match=r"leads out of .*copy that file into the folder"):
            find_weights(folder)
    write_index(folder, {"a": "x\0.safetensors"})
    with pytest.raises(InvalidConfig, match="is no file of"):
        find_weights(folder)
    (folder / INDEX).unlink()
    (folder / SINGLE_FILE).symlink_to(outside)
    with pytest.raises(InvalidConfig, match="leads out of"):
        find_weights(folder)
    (folder / SINGLE_FILE).unlink()
    (folder / "real").write_bytes(outside.read_bytes())
    (folder / SINGLE_FILE).symlink_to("real")  # a link that stays
    (tmp_path / "by-link").symlink_to(folder)
    for way in (folder, tmp_path / "by-link"):
        assert find_weights(way).keys() == {"a"}


def test_a_link_leads_to_a_file_of_its_name_or_to_a_blob(tmp_path):
    shared, blobs, folder = tmp_path / "shared", tmp_path / "models--a--b" / "blobs", tmp_path / "model"
    for each in (shared, blobs, folder):
        each.mkdir(parents=True)
    for file in (shared / SINGLE_FILE, blobs / "f00d"):
        save_file({"a": torch.zeros(1)}, file)
        (folder / SINGLE_FILE).symlink_to(file)
        assert find_weights(folder).keys() == {"a"}
        (folder / SINGLE_FILE).unlink()
    (tmp_path / "blobs").mkdir()
    (blobs / "f00d").rename(tmp_path / "blobs" / "f00d")
    (folder / SINGLE_FILE).symlink_to(tmp_path / "blobs" / "f00d")  # of nobody's cache
    with pytest.raises(InvalidConfig, match="leads out of"):
        find_weights(folder)


def test_a_snapshot_in_the_hubs_cache_is_links_to_its_blobs(tmp_path):
    repository = tmp_path / "models--someone--Small-1B"
    snapshot, blobs = repository / "snapshots" / "0123abc", repository / "blobs"
    for folder in (snapshot, blobs, tmp_path / "other"):
        folder.mkdir(parents=True)
    save_file({"a": torch.zeros(1)}, blobs / "f00d")
    (snapshot / SINGLE_FILE).symlink_to("../../blobs/f00d")
    assert find_weights(snapshot).keys() == {"a"}
    (tmp_path / "other" / "f00d").write_bytes((blobs / "f00d").read_bytes())
    (blobs / "f00d").unlink()
    (blobs / "f00d").symlink_to("../../other/f00d")
    with pytest.raises(InvalidConfig, match="leads out of"):
        find_weights(snapshot)


@IN_ANY_FOLDER
@given(
    formats=st.tuples(st.sampled_from(FORMATS), st.sampled_from(FORMATS)),
    shape=st.sampled_from([(7,), (3, 5), (8, 4), (0, 2), ()]),
    changed=st.one_of(st.none(), st.integers(0, 31)),
    nan=st.booleans(),
)
def test_equal_is_what_torch_calls_equal(tmp_path, formats, shape, changed, nan):
    """Of values that all formats hold, across pieces, and one that may differ."""
    first = torch.arange(-8, 8 * 4, dtype=torch.float64)[: max(1, int(torch.Size(shape).numel()))] / 4
    first = first[: torch.Size(shape).numel()].reshape(shape)
    second = first.clone()
    if nan and first.numel():
        first.view(-1)[0] = second.view(-1)[0] = float("nan")
    if changed is not None and second.numel():
        second.view(-1)[changed % second.numel()] += 0.5
    is_changed = not torch.equal(first.nan_to_num(0.125), second.nan_to_num(0.125))
    file = tmp_path / SINGLE_FILE
    save_file({"a": first.to(formats[0]), "b": second.to(formats[1])}, file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored, "_VALUES_AT_ONCE", 4)
        assert are_equal(find_weights(tmp_path), "a", "b") is not is_changed


def test_tensors_of_other_shapes_or_that_cannot_be_compared_are_not_equal(tmp_path):
    tensors = {"a": torch.zeros(6), "b": torch.zeros(2, 3), "c": torch.zeros(6, dtype=torch.int8)}
    save_file(tensors, tmp_path / SINGLE_FILE)
    found = find_weights(tmp_path)
    assert not are_equal(found, "a", "b") and not are_equal(found, "a", "c") and are_equal(found, "a", "a")
    (tmp_path / SINGLE_FILE).write_bytes(b"")
    with pytest.raises(InvalidConfig, match="cannot be read"):
        are_equal(found, "a", "a")
