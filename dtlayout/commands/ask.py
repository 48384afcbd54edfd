"""ask: the question of a page, answered by the commands themselves with the document that their `--json` prints.

The arguments of the command line are made first; they go through the command's own parser, and they are what "copy
command" copies. A layout that is asked about is written as a config, as `--emit` does, and that file is explained.
"""

import argparse
import json
import os
import shlex
import threading
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from importlib import import_module
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

from dtlayout.base.confined import confined
from dtlayout.base.errors import DtlayoutError, InvalidConfig
from dtlayout.base.files import parse_json
from dtlayout.base.version import VERSION
from dtlayout.commands.arguments import check_options, parse_options, strip_private
from dtlayout.costmodel.engine import OWN_ENGINE, known_engines
from dtlayout.costmodel.estimate import estimate
from dtlayout.costmodel.scenario import Scenario
from dtlayout.models.counting import count_parameters
from dtlayout.models.families import FAMILIES
from dtlayout.models.presets import PRESETS
from dtlayout.planner import verdicts
from dtlayout.planner.choices import parse_choices
from dtlayout.programs.reading import read_program
from dtlayout.programs.registry import PROGRAMS
from dtlayout.spec.cluster import known_gpus
from dtlayout.spec.precision import MATMUL_FORMATS
from dtlayout.web.origins import list_origins
from dtlayout.web.question import FieldRefused, PageQuestion, find_fields, read_question

_LOCK = threading.Lock()
"""Lock of the one question that is answered at a time: two would not be faster, and stderr is the process's own."""
_MODEL = "your-model"
"""Name of the folder of a question's file, after which a config.json without a name is called."""
_WRITTEN = ".written"
"""Name of the folder in it for files that are written; no file of a question is called so."""
_FORMATS = ("params", "compute", "reduce", "matmuls")
"""Keys of [precision] that another program can be told."""
_EMITTED_NAMES = {"megatron": "train.sh", "automodel": "job.yaml", "nanotron": "job.yaml", "torchtitan": "job.toml"}
"""Engine → name of the file that is written for its program; of others best.toml, a config of ours."""


@dataclass(frozen=True)
class _Desk:
    """A question and the folder in which its files lie while it is answered."""

    question: PageQuestion
    folder: Path

    def write_file(self) -> Path | None:
        """Path of the file that came with the question; None without one."""
        if self.question.file is None:
            return None
        path = self.folder / self.question.file.name
        path.write_text(self.question.file.text, encoding="utf-8")
        return path

    def list_arguments(self, *left_out: str) -> list[str]:
        """Arguments of `dtlayout recommend` with the model, or the file in its place."""
        return [*self._name_model(), *self.question.list_arguments(*left_out)]

    def _name_model(self) -> list[str]:
        path, model = self.write_file(), self.question.model
        if path is None:
            return ["--model", model] if model else []
        if path.suffix == ".json" and _is_hugging_face(path):
            return ["--model", str(path)]
        return ["--like", str(path), *(["--model", model] if model else [])]


class _PageParser(argparse.ArgumentParser):
    """A parser whose errors are refusals."""

    def error(self, message: str) -> NoReturn:
        """Raise InvalidConfig with the line that the terminal prints."""
        raise InvalidConfig(f"{self.prog}: {message}")


def ask(content: Any) -> dict[str, Any]:
    """The document that answers a question, as `--json` prints it.

    Under "asked" are the command lines that ask the same in a terminal, and notes of the commands. A refusal is
    {"ok": false, "problems": […], "fields": […]}, with the field of the question that each problem is about.
    """
    commands, notes = list[list[str]](), StringIO()
    try:
        question = read_question(content)
        if question.ask not in _ANSWERS:
            raise FieldRefused("ask", f"{question.ask!r} is no question; use one of {', '.join(_ANSWERS)}")
        with _LOCK, TemporaryDirectory(prefix="dtlayout-") as parent:
            folder = os.path.join(parent, _MODEL)
            os.makedirs(os.path.join(folder, _WRITTEN))
            with confined(folder), redirect_stderr(notes):
                try:
                    document = _ANSWERS[question.ask](_Desk(question, Path(folder)), commands)
                except DtlayoutError as error:
                    document = _refuse(error, question, folder)
            document["asked"] = {"commands": [shlex.join(each) for each in commands], "notes": _list_notes(notes)}
            text = _hide(json.dumps(document), folder)
    except FieldRefused as error:
        return _refuse(error)
    said: dict[str, Any] = json.loads(text, parse_constant=lambda _: None)  # JSON has no infinity
    return said


def _hide(text: str, folder: str) -> str:
    """A text in which the files of a question have their names alone."""
    return text.replace(f"{folder}/{_WRITTEN}/", "").replace(f"{folder}/", "")


def _refuse(error: DtlayoutError, question: PageQuestion | None = None, folder: str = "") -> dict[str, Any]:
    problems = (_hide(str(error), folder) if folder else str(error)).splitlines()
    if isinstance(error, FieldRefused):
        return {"ok": False, "problems": problems, "fields": [error.name] * len(problems)}
    assert question is not None, "a question that cannot be read is refused by its field"
    return {"ok": False, "problems": problems, "fields": find_fields(problems, question)}


def _list_notes(notes: StringIO) -> list[str]:
    lines = notes.getvalue().replace("\n    ", " ").splitlines()  # a terminal has them folded
    return [line.removeprefix("note: ") for line in lines if line.startswith("note: ")]


def _parse(command: str, arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a command line, checked as those of a terminal are."""
    module = import_module(f"dtlayout.commands.{command}")
    parser = _PageParser(prog=f"dtlayout {command}", add_help=False, allow_abbrev=False)
    parser.add_argument("--json", action="store_true")
    module.add_arguments(parser)
    options = parse_options(parser, [*arguments, "--json"])
    check_options(options)
    return options


def _run(command: str, arguments: Sequence[str], commands: list[list[str]]) -> dict[str, Any]:
    """The document of a command, whose line is added to `commands`."""
    commands.append(["dtlayout", command, *arguments])
    options = _parse(command, arguments)
    document: dict[str, Any] = strip_private(import_module(f"dtlayout.commands.{command}").answer(options).document)
    return document


def _recommend(desk: _Desk, commands: list[list[str]]) -> dict[str, Any]:
    return _run("recommend", desk.list_arguments("scale"), commands)


def _scale(desk: _Desk, commands: list[list[str]]) -> dict[str, Any]:
    return _run("recommend", desk.list_arguments("gpus", "top", "why_not"), commands)


def _emit(desk: _Desk, commands: list[list[str]]) -> dict[str, Any]:
    """The file for the program of the engine, of the best layout or of the one that is named."""
    (engine,) = desk.question.texts.get("engine", (OWN_ENGINE,))
    path = desk.folder / _WRITTEN / _EMITTED_NAMES.get(engine, "best.toml")
    arguments = desk.list_arguments("scale", "why_not")
    if desk.question.layout:
        arguments += ["--fix", desk.question.layout]
    document = _run("recommend", [*arguments, "--emit", str(path)], commands)
    emitted = {**document["emitted_for"], "gaps": list(document["emitted_for"]["gaps"])}
    return {"ok": True, "name": path.name, "text": path.read_text(encoding="utf-8"), "emitted_for": emitted}


def _patch(desk: _Desk, commands: list[list[str]]) -> dict[str, Any]:
    """The file that came with the question, with the best layout in it, and the changes as a diff."""
    if desk.question.file is None:
        raise FieldRefused("file", "a file is missing, which the best layout is written into")
    name = desk.question.file.name
    changed, diff = (desk.folder / _WRITTEN / each for each in (f"changed-{name}", f"{name}.patch"))
    arguments = desk.list_arguments("scale", "why_not")
    document = _run("recommend", [*arguments, "--patch", str(changed)], commands)
    _run("recommend", [*arguments, "--patch", str(diff)], commands)
    texts = {"text": changed.read_text(encoding="utf-8"), "diff": diff.read_text(encoding="utf-8")}
    return {"ok": True, "name": changed.name, **texts, "change": document["yours"]["written_change"]}


def _explain(desk: _Desk, commands: list[list[str]]) -> dict[str, Any]:
    return _run("explain", _write_case(desk, commands), commands)


def _timeline(desk: _Desk, commands: list[list[str]]) -> dict[str, Any]:
    return _run("timeline", _write_case(desk, commands), commands)


def _compare(desk: _Desk, commands: list[list[str]]) -> dict[str, Any]:
    config, *options = _write_case(desk, commands)
    if "." in desk.question.other:
        raise FieldRefused("other", f"{desk.question.other!r} is no choice of a layout, such as tp=2 or pp2·tp4")
    return _run("compare", [config, desk.question.other, *options], commands)


def _write_case(desk: _Desk, commands: list[list[str]]) -> list[str]:
    """Arguments that name a config with the layout that is asked about, which is written, and its machines."""
    from dtlayout.commands.emit import make_config  # only now: a search does without configs
    from dtlayout.commands.recommend import read_space

    arguments = desk.list_arguments("scale", "why_not", "tokens", "price", "top")
    space = read_space(_parse("recommend", arguments))
    if not desk.question.layout:
        raise FieldRefused("layout", "layout is missing; name the one that is asked about")
    choices = parse_choices(desk.question.layout)
    found = estimate(space.scenario, *verdicts.parse_layout(space, choices))
    path = desk.folder / _WRITTEN / "layout.toml"
    path.write_text(make_config(path, space.scenario, found, []), encoding="utf-8")
    commands.append(["dtlayout", "recommend", *arguments, "--fix", desk.question.layout, "--emit", path.name])
    return [str(path), *_name_machines(space.scenario)]


def _name_machines(scenario: Scenario) -> list[str]:
    """Arguments with the GPUs and the program of a scenario; all that another program is told, since its usual formats
    and settings are not those of our configs."""
    cluster, engine = scenario.cluster, scenario.engine
    machines = ["--gpu", cluster.gpu.name, "--gpus", str(cluster.num_gpus)]
    if engine.name == OWN_ENGINE:
        return machines
    assumed = engine.assumptions(scenario.precision)
    told = [text for name in engine.features.choices for text in ("--engine-set", f"{name}={assumed[name][0]}")]
    formats = [f"--precision.{name}={getattr(scenario.precision, name)}" for name in _FORMATS]
    return [*machines, "--engine", engine.name, *told, *formats]


def _list_choices(desk: _Desk, commands: list[list[str]]) -> dict[str, Any]:
    """Everything that a page offers to choose from."""
    return {
        "ok": True, "version": VERSION,
        "models": [{"name": name, "parameters": count_parameters(model)} for name, model in PRESETS.items()],
        "gpus": [
            {"name": gpu.name, "memory_bytes": gpu.memory_bytes, "gpus_per_node": gpu.gpus_per_node}
            for gpu in known_gpus().values()
        ],
        "engines": [
            {"name": name, "program": PROGRAMS[name].title if name in PROGRAMS else "", "is_own": name == OWN_ENGINE}
            for name in known_engines()
        ],
        "matmuls": ["compute", *MATMUL_FORMATS],
    }  # fmt: skip


def _list_origins(desk: _Desk, commands: list[list[str]]) -> dict[str, Any]:
    from dtlayout.commands.recommend import read_space  # only now, as its parser

    options = _parse("recommend", desk.list_arguments("scale", "why_not", "tokens", "price", "top"))
    return list_origins(read_space(options).scenario)


def _is_hugging_face(path: Path) -> bool:
    """Whether a file is the config.json of a model; FieldRefused for a family that only its own code describes."""
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FieldRefused("file", f"{path.name} is not JSON: {error}") from None
    if read_program(path, {}) is not None:
        return False
    kind = content.get("model_type") if isinstance(content, dict) else None
    if not isinstance(kind, str) or kind not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise FieldRefused(
            "file",
            f"model_type={kind!r} of {path.name} is no described family, which are {known}; in a terminal, "
            f"dtlayout trace {path.name} reads off the code of transformers what it computes",
        )
    return True


_ANSWERS: dict[str, Callable[[_Desk, list[list[str]]], dict[str, Any]]] = {
    "recommend": _recommend, "scale": _scale, "emit": _emit, "patch": _patch, "explain": _explain,
    "timeline": _timeline, "compare": _compare, "choices": _list_choices, "origins": _list_origins,
}  # fmt: skip
"""PageQuestion → its answer."""
