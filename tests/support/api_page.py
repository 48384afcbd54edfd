"""The public names as one page: this program writes docs/reference/api.md and dtlayout/__init__.pyi.

The page is written from signatures and docstrings as they stand in the source, because versions of Python print
signatures differently. The stub gives type checkers the names that the package loads on first use.
"""

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator
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
    "Questions": ["predict", "recommend", "explain", "dry_run"],
    "Answers": ["PredictedLayout", "ExplainedLayout", "RecommendedLayouts", "DryRunRanks"],
    "Values": [
        "Layout", "Batch", "ModelShape", "Precision", "Kernels", "Recompute", "Optimizer", "RoleOptimizer", "Adapter",
        "find_preset", "load_config", "describe_module",
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
    yield HEAD
    for heading, names in SECTIONS.items():
        yield f"\n## {heading}"
        for name in names:
            yield from describe(name)
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


def describe(name: str) -> Iterator[str]:
    """A public name: its signature, then its docstring, then the sentence of each field."""
    value = getattr(dtlayout, name)
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(value))).body
    yield f"\n### {name}\n\n```python\n{write_signature(node)}\n```\n"
    yield from to_markdown(inspect.getdoc(value) or "")
    if isinstance(node, ast.ClassDef):
        fields = [*list_fields(node), *list_functions(node)]
        yield from ([""] if fields else [])
        for field, text in fields:
            yield textwrap.fill(f"`{field}`: {text}", 118, initial_indent="- ", subsequent_indent="  ", **WHOLE_WORDS)


WHOLE_WORDS: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}


def write_signature(node: ast.stmt) -> str:
    """The first line of a class or a function, folded where it is long."""
    match node:
        case ast.FunctionDef():
            arguments = [argument for argument in split_arguments(node.args) if argument != "self"]
            end = f") -> {ast.unparse(node.returns)}" if node.returns else ")"
            head = f"def {node.name}("
        case ast.ClassDef():
            arguments = [f"{name}: {kind}" for name, kind in list_types(node)]
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


def list_types(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Public fields of a dataclass and their types."""
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and not each.target.id.startswith("_"):
            yield each.target.id, ast.unparse(each.annotation)


def list_fields(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Public fields of a class, and the sentence below each of them."""
    public = {name for name, _ in list_types(node)}
    for field, below in zip(node.body, node.body[1:], strict=False):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                if name in public:
                    yield name, " ".join(text.split())


def list_functions(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Public properties and methods of a class with a docstring, and the first sentence of that."""
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and not each.name.startswith("_") and (text := ast.get_docstring(each)):
            decorators = {ast.unparse(decorator) for decorator in each.decorator_list}
            is_value = decorators & {"property", "cached_property"}
            sentence = " ".join(text.split("\n\n")[0].split())
            yield each.name if is_value else f"{each.name}()", sentence


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
