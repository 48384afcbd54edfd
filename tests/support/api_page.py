"""The public names as one page: this program writes docs/reference/api.md and dtlayout/__init__.pyi.

The page is written from signatures and docstrings as they stand in the source, because versions of Python print
signatures differently. The stub gives type checkers the names that the package loads on first use.
"""

import ast
import dataclasses
import importlib
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

import dtlayout
from dtlayout.plans.style_table import STYLE_TABLE

ROOT = Path(__file__).parents[2]
PAGE, STUB = ROOT / "docs" / "reference" / "api.md", ROOT / "dtlayout" / "__init__.pyi"
HEAD = """\
# Python API

`import dtlayout` loads neither torch nor anything else: each public name loads its module when it is first used.
A model of your own shape is predicted in five lines:

```python
import dtlayout as dl

own = dict(hidden_size=4096, num_layers=40, num_heads=32, num_kv_heads=8, ffn_size=14336, vocab_size=128256)
found = dl.predict(own, "tp2 mb1", gpu="H100", gpus=16, seq_len=8192, global_batch=128)
print(found.step_time_s, found.peak_bytes, found.fits, found, sep="\\n")
```

The model may as well be the name of a preset, the folder of a model from Hugging Face, or a module (`describe_module`).
GPUs are named as people write them. A layout is written as it is printed, or as keywords (`tp=2, micro_batch=1`). In a
notebook each answer is shown as a page, and `found.plot()` is a figure: `examples/predict_in_a_notebook.ipynb`.

What is registered is known to commands, predictions, dry runs and training. [Adding](../project/adding.md) names the
files for each, in order. `make docs-api` writes this page from the docstrings."""
SECTIONS = {
    "Questions": ["predict", "recommend", "explain", "dry_run", "compare"],
    "Answers": ["PredictedLayout", "ExplainedLayout", "RecommendedLayouts", "DryRunRanks", "ComparedLayouts"],
    "Values": [
        "Layout", "Batch", "ModelShape", "Precision", "Kernels", "Recompute", "Optimizer", "RoleOptimizer", "Adapter",
        "find_preset", "load_config", "describe_module", "DescribedModule",
    ],
    "Modules of your own": [
        "build_mesh", "Plan", "make_plan", "apply_plan", "pipeline", "train_step", "add_adapters", "apply_context",
        "own_positions", "causal_attention",
    ],
    "A pipeline in pieces": [
        "make_schedule", "write_schedule", "layer_costs", "partition", "Boundary", "build_runtime", "share_context",
    ],
    "A Llama in pieces": ["Llama", "build_stage", "stage_boundary", "initialize", "TrainStep"],
    "Errors": ["DtlayoutError", "InvalidConfig", "InvalidLayout"],
    "Registries": [
        "register_kernel", "AttentionKernel", "NormKernel", "RopeKernel", "SwigluKernel", "LossKernel", "ExpertsKernel",
        "register_schedule", "PipelineSchedule", "Action", "Kind", "register_family", "Family", "register_optimizer",
        "register_tracker", "Tracker", "register_observer", "Observer", "register_gpu", "register_engine",
    ],
}  # fmt: skip
"""Heading → public names below it, in their order."""
EXAMPLES = {
    "predict_in_a_notebook.ipynb": "predictions, layouts and a dry run in a notebook",
    "mesh_in_three_lines.py": "a layout as a mesh with named axes",
    "plan_on_your_module.py": "tensor parallelism and FSDP2 on a module of yours, by a plan",
    "pipeline_your_module.py": "a module of yours as a pipeline whose stages are sharded",
    "adapter_on_your_module.py": "LoRA beside a frozen module of yours, split over ranks",
    "long_context_on_your_module.py": "context parallelism on a module of yours, in each of its three ways",
    "stages_in_torchs_pipeline.py": "our stages and schedule in torch's own pipeline runtime",
    "train_llama_step.py": "from values to one training step of a Llama",
    "compile_experiment.py": "graphs, graph breaks and times of torch.compile by layout",
    "train_any_decoder.py": "models that nobody described: traced, proved, trained, and opened by `transformers`",
    "finetune_a_llama.py": "a Llama that is trained further, taught to answer, and asked",
}
"""File → a sentence about it."""


def write_page() -> Iterator[str]:
    """The lines of the page."""
    told: dict[tuple[type, str], str] = {}
    yield HEAD
    for heading, names in SECTIONS.items():
        yield f"\n## {heading}"
        for name in names:
            yield from describe(name, told)
            yield from write_styles() if name == "Plan" else ()
    yield "\n## Examples\n\n| file | shows |\n|---|---|"
    yield from (f"| `examples/{name}` | {text} |" for name, text in EXAMPLES.items())
    yield "\nThe first lines of each file say how to start it. Tests run them all."


def write_styles() -> Iterator[str]:
    """A table of the styles of `Plan.tensor`."""
    yield "\nStyles of `tensor`:\n\n| style | for which module | what it does |\n|---|---|---|"
    yield from (f"| `{style}` | {module} | {what} |" for style, (module, what) in STYLE_TABLE.items())
    yield (
        "\nA trained parameter between a colwise and a rowwise layer needs a style too; a plan without one is refused"
        "\nunder tp: nothing else says whether each rank computes with its own heads."
    )


def describe(name: str, told: dict[tuple[type, str], str]) -> Iterator[str]:
    """A public name: its signature, then its docstring, then the sentence of each member, inherited ones included.

    `told` has the heading below which the sentence of a member stands already, by the class that defines it: further
    classes that inherit it name the heading.
    """
    value = getattr(dtlayout, name)
    nodes = {each: _parse(each) for each in find_bases(value)}
    yield f"\n### {name}\n\n```python\n{write_signature(value, nodes)}\n```\n"
    yield from to_markdown(inspect.getdoc(value) or "")
    members = [*list_fields(nodes), *list_functions(nodes)]
    yield from ([""] if members else [])
    elsewhere: dict[str, list[str]] = {}
    for owner, member, text in members:
        heading = told.setdefault((owner, member), name)
        if heading == name:
            yield _write_item(f"`{member}`: {text}")
        else:
            elsewhere.setdefault(heading, []).append(f"`{member}`")
    for heading, names in elsewhere.items():
        yield _write_item(f"As in [{heading}](#{heading.lower()}): {', '.join(names)}.")


def _write_item(text: str) -> str:
    return textwrap.fill(text, 118, initial_indent="- ", subsequent_indent="  ", **WHOLE_WORDS)


WHOLE_WORDS: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}


def find_bases(value: Any) -> list[Any]:
    """A class and those of this package that it inherits from, which alone are documented here; a function itself."""
    if not isinstance(value, type):
        return [value]
    return [each for each in value.__mro__ if each.__module__.partition(".")[0] == dtlayout.__name__]


def _parse(value: Any) -> ast.stmt:
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(value))).body
    return node


def write_signature(value: Any, nodes: Mapping[Any, ast.stmt]) -> str:
    """The first line of a class or a function, folded where it is long; `nodes` has a class and its bases, parsed."""
    match node := nodes[value]:
        case ast.FunctionDef():
            arguments = [argument for argument in split_arguments(node.args) if argument != "self"]
            end = f") -> {ast.unparse(node.returns)}" if node.returns else ")"
            head = f"def {node.name}("
        case ast.ClassDef():
            arguments = list_arguments(value, nodes)
            head, end = f"class {node.name}(", ")"
            if not arguments:
                return f"class {node.name}"
        case _:
            raise AssertionError(f"a public name is a class or a function, not {ast.unparse(node)[:60]}")
    line = f"{head}{', '.join(arguments)}{end}"
    return line if len(line) <= 100 else "\n".join([head, *(f"    {each}," for each in arguments), end])


def split_arguments(arguments: ast.arguments) -> Iterator[str]:
    """Arguments one by one, as they are written, with `*` where only keywords follow."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    yield from map(_write_argument, positional, defaults)
    if arguments.vararg:
        yield f"*{ast.unparse(arguments.vararg)}"
    elif arguments.kwonlyargs:
        yield "*"
    yield from map(_write_argument, arguments.kwonlyargs, arguments.kw_defaults)
    if arguments.kwarg:
        yield f"**{ast.unparse(arguments.kwarg)}"


def _write_argument(argument: ast.arg, default: ast.expr | None) -> str:
    return ast.unparse(argument) + (f" = {ast.unparse(default)}" if default is not None else "")


def list_arguments(value: type, nodes: Mapping[Any, ast.stmt]) -> list[str]:
    """Public fields that a class takes, with type and default, in the order in which it does."""
    made = {field.name: field for field in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else {}
    found = {}
    for node in reversed(nodes.values()):
        for field, _ in _read_fields(node):
            name, kind = field.target.id, ast.unparse(field.annotation)
            if not kind.startswith("ClassVar") and (name not in made or made[name].init):
                found[name] = f"{name}: {kind}{_write_default(field.value, made.get(name))}"
    named = [text for name, text in found.items() if name in made and made[name].kw_only]
    return [*(text for text in found.values() if text not in named), *(["*", *named] if named else [])]


def _write_default(written: ast.expr | None, made: "dataclasses.Field[Any] | None") -> str:
    """Default of a field as a signature would have it: where a call makes the field, what comes of it."""
    if not isinstance(written, ast.Call) or made is None:
        return f" = {ast.unparse(written)}" if written else ""
    if made.default is not dataclasses.MISSING:
        return f" = {made.default!r}"
    factory = [each.value for each in written.keywords if each.arg == "default_factory"]
    return "".join(
        f" = {ast.unparse(each.body) if isinstance(each, ast.Lambda) else f'{ast.unparse(each)}()'}" for each in factory
    )


def list_fields(nodes: Mapping[Any, ast.stmt]) -> list[tuple[Any, str, str]]:
    """Public fields of a class and its bases: the class that has the sentence below it, the name, the sentence."""
    found = {
        field.target.id: (owner, field.target.id, text)
        for owner, node in reversed(nodes.items())
        for field, text in _read_fields(node)
        if text
    }
    return [*found.values()]


def _read_fields(node: ast.stmt) -> Iterator[tuple[Any, str]]:
    """Public fields in the body of a class, each with the text below it."""
    body = node.body if isinstance(node, ast.ClassDef) else []
    for field, below in zip_longest(body, body[1:]):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        match below:
            case ast.Expr(value=ast.Constant(value=str(text))):
                sentence = " ".join(text.split())
            case _:
                sentence = ""
        if not field.target.id.startswith("_"):
            yield field, sentence


def list_functions(nodes: Mapping[Any, ast.stmt]) -> list[tuple[Any, str, str]]:
    """Public properties and methods of a class and its bases: their class, the name, the first sentence."""
    found: dict[str, tuple[Any, str, str]] = {}
    for owner, node in nodes.items():
        for each in node.body if isinstance(node, ast.ClassDef) else []:
            if (
                isinstance(each, ast.FunctionDef)
                and not each.name.startswith("_")
                and (text := ast.get_docstring(each))
            ):
                decorators = {ast.unparse(decorator) for decorator in each.decorator_list}
                name = each.name if decorators & {"property", "cached_property"} else f"{each.name}()"
                found.setdefault(name, (owner, name, " ".join(text.split("\n\n")[0].split())))
    return [*found.values()]


def to_markdown(text: str) -> Iterator[str]:
    """A docstring, with its examples as code."""
    is_code = False
    for line in text.splitlines():
        if line.startswith(">>>") != is_code and (not is_code or not line.strip()):
            yield "```" if is_code else "```python"
            is_code = not is_code
        yield line.replace("<", "&lt;") if not is_code and "<" in line and "`" not in line else line
    if is_code:
        yield "```"


def write_stub() -> Iterator[str]:
    """The lines of the stub."""
    yield '"""Types of the public names; tests/support/api_page.py writes this file."""\n'
    homes = sorted((home, name) for name, home in dtlayout._HOMES.items())
    yield from (f"from {home} import {name} as {name}" for home, name in homes)
    yield "\n__version__: str\n__all__: list[str]"


def main() -> None:
    """Write both files."""
    importlib.invalidate_caches()
    PAGE.write_text("\n".join(write_page()) + "\n", encoding="utf-8")
    STUB.write_text("\n".join(write_stub()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
