"""Options of all commands: paths have a home in the place of a tilde, and numbers are finite."""

import argparse
import json
from importlib import import_module
from pathlib import Path

import pytest
from tiny import write_tiny

from dtlayout.base.errors import InvalidConfig
from dtlayout.cli import main
from dtlayout.commands.arguments import check_options, show
from dtlayout.commands.overview import COMMANDS


def list_actions(command: str) -> list[argparse.Action]:
    """The options of a command."""
    parser = argparse.ArgumentParser()
    import_module(f"dtlayout.commands.{command}").add_arguments(parser)
    return parser._actions


ACTIONS = [(command, action) for command in COMMANDS for action in list_actions(command)]
PATHS = sorted({(action.dest, action.nargs) for _, action in ACTIONS if action.type is Path}, key=str)
NUMBERS = sorted({action.dest for _, action in ACTIONS if action.type in (int, float)})


def test_options_have_the_types_that_are_looked_after():
    assert len(PATHS) > 15 and len(NUMBERS) > 15
    strange = {action.type for _, action in ACTIONS} - {None, str, int, float, Path}
    assert {kind.__name__ for kind in strange} == {"_read_tokens"}  # a number too


@pytest.mark.parametrize(("name", "nargs"), PATHS)
def test_every_path_has_a_home_in_the_place_of_its_tilde(name, nargs, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    path, home = Path("~/x"), Path("/home/me/x")
    options = argparse.Namespace(**{name: [path, Path("y")] if nargs else path}, json=True, text="~/x")
    check_options(options)
    assert getattr(options, name) == ([home, Path("y")] if nargs else home) and options.text == "~/x"
    with pytest.raises(InvalidConfig, match=r"has a name of 5,000 bytes, and no file's has more than 255"):
        check_options(argparse.Namespace(**{name: [Path("a" * 5000)] if nargs else Path("a" * 5000)}))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 10**16, -(10**400)])
def test_every_number_is_finite(value):
    with pytest.raises(InvalidConfig) as caught:
        check_options(argparse.Namespace(**dict.fromkeys(NUMBERS, value), json=False))
    assert [line.partition("=")[0] for line in caught.value.problems] == [
        f"--{name.replace('_', '-')}" for name in NUMBERS
    ]
    assert all("must be" in line and len(line) < 80 for line in caught.value.problems)


def test_a_command_line_with_such_numbers_and_paths_is_refused_in_a_line(capsys):
    scenario = ["recommend", "--model", "debug", "--gpu", "cpu", "--gpus", "1", "--seq-len", "8", "--global-batch", "1"]
    for option in ("--price=nan", "--max-memory=inf", "--tokens=nan", "--tokens=-inf"):
        assert main([*scenario, *(["--tokens", "1T"] if "price" in option else []), option]) == 2
        assert capsys.readouterr().err == f"{option} must be a finite number\n"
    for path in ("a" * 5000, "a/" * 2500):
        assert main(["check", path]) == 2
        assert main(["check", "configs/debug.toml", f"--model={path}"]) == 2
        assert main(["compare", "configs/debug.toml", path, "--gpu", "cpu"]) == 2
        assert main([*scenario, "--model", path]) == 2
        lines = capsys.readouterr().err.splitlines()
        told = [line for line in lines if not line.startswith("note: ")]
        assert len(told) == 4 and all(len(line) < 250 for line in told)


@pytest.mark.parametrize("content", ['{"a":' * depth + "1" + "}" * depth for depth in (500, 5000)] + ["[" * 5000])
def test_a_config_json_that_is_nested_too_deep_is_refused_in_a_line(tmp_path, capsys, content):
    path = tmp_path / "config.json"
    path.write_text(content)
    assert main(["check", "configs/debug.toml", f"--model={path}"]) == 2
    assert capsys.readouterr().err == f"model.name: model {path} is not JSON: it is nested more than 100 deep\n"


def test_commands_that_take_a_config_take_another_model_for_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine").mkdir()
    sizes = {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4,
             "intermediate_size": 80, "vocab_size": 300}  # fmt: skip
    (tmp_path / "mine" / "config.json").write_text(json.dumps(sizes))
    config = str(write_tiny(tmp_path).config)
    for model in (["--model", "~/mine"], ["--model=~/mine/config.json"], ["--model.name=~/mine"]):
        assert main(["check", config, "--world", "1", *model]) == 0
        printed = capsys.readouterr().out
        assert "model         mine, " in printed
    parameters = 2 * 300 * 64 + 64 + 4 * (4 * 64 * 64 + 3 * 64 * 80 + 2 * 64)
    assert main(["check", config, "--world", "1", "--model", "~/mine"]) == 0
    assert f"mine, {parameters:,} parameters" in capsys.readouterr().out
    for command in ("explain", "compare", "dryrun"):
        other = ["zero=1"] if command == "compare" else []
        gpu = ["--gpu", "cpu", "--gpus", "1"]
        assert main([command, config, *other, *gpu, "--model=~/mine", "--json"]) == 0, command
        assert capsys.readouterr().out
        assert main([command, config, *other, *gpu, "--model=~/nobody"]) == 2
        assert "model.name='~/nobody' is no preset and no Hugging Face folder" in capsys.readouterr().err


@pytest.mark.parametrize(("is_json", "printed"), [(True, '{\n  "ok": true\n}\n'), (False, "a title\n")])
def test_what_text_alone_needs_is_no_json(capsys, is_json, printed):
    document = {"ok": True, "_title": "a title"}
    assert show(argparse.Namespace(json=is_json), document, lambda each: [each["_title"]]) == 0
    assert capsys.readouterr().out == printed
