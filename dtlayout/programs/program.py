"""Program: how another training program is told a layout, and what it cannot be told.

A program's file has a function from a `Job` to `Arguments`, whose option names are those of one published version, and
a `Program` that `registry.PROGRAMS` lists. What a layout has and the program's options cannot say is a gap: a sentence
that names what is written instead. What the program would refuse at its start is an InvalidLayout or InvalidConfig.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from dtlayout.costmodel.engine import find_usual
from dtlayout.costmodel.estimate import Estimate
from dtlayout.costmodel.scenario import Scenario, count_state_shards
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape

TORCH_SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved-1f1b": "Interleaved1F1B"}
"""Our name of a schedule → that of torch.distributed.pipelining."""


@dataclass(frozen=True)
class Job:
    """A job for a program: the scenario, the estimate whose layout and kernels it runs, and the number of steps."""

    scenario: Scenario
    estimate: Estimate
    steps: int

    @property
    def layout(self) -> Layout:
        """The layout."""
        return self.estimate.layout

    @property
    def model(self) -> ModelShape:
        """The model."""
        return self.scenario.model

    @property
    def num_microbatches(self) -> int:
        """Forwards of one data-parallel rank in a step."""
        return self.layout.num_microbatches(self.scenario.batch)

    @property
    def sequences_at_once(self) -> int:
        """Sequences that a data-parallel rank is given at once: a pipeline gets those of all its microbatches."""
        return self.layout.micro_batch * (self.num_microbatches if self.layout.is_pipelined else 1)

    @property
    def shards_state(self) -> bool:
        """Whether several ranks share the optimizer's state."""
        return count_state_shards(self.layout) > 1

    @property
    def torchrun(self) -> str:
        """The command by which each node starts its ranks, up to the program's own file."""
        cluster = self.scenario.cluster
        processes = min(cluster.num_gpus, cluster.gpus_per_node)
        nodes = cluster.num_nodes
        meeting = "" if nodes == 1 else f" --nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:PORT"
        return f"torchrun --nproc-per-node {processes}{meeting}"

    def odd_state(self) -> list[str]:
        """A gap if the optimizer keeps its state in a format of its own, which no program is told."""
        formats = {each: kind for part in self.scenario.optimizer.parts for kind, each in part.state.items() if each}
        return [
            f"optimizer.state_format={each} is not written: the state stays in float32, and takes more memory"
            for each in formats
        ]

    def odd_kernels(self, said: Sequence[str] = (), **own: Any) -> list[str]:
        """A gap for each kernel that is not the program's usual one.

        `said` are keys that its options can say, which make no gap. `own` are usual kernels of the version whose
        options are written, where published runs have others.
        """
        usual, kernels = replace(find_usual(self.scenario.engine.name).kernels, **own), self.estimate.kernels
        keys = [f.name for f in fields(Kernels) if f.name not in said]
        odd = [key for key in keys if getattr(kernels, key) != getattr(usual, key)]
        return [f"kernels.{key}={getattr(kernels, key)} is no option: the program takes its own" for key in odd]


@dataclass(frozen=True)
class Arguments:
    """Arguments in a program's own form."""

    lines: Sequence[str]
    """Lines of the file, without the comments above them."""
    start: str
    """Command that starts the program on each node; FILE stands for the file."""
    gaps: Sequence[str] = ()
    """Facts about the job that the arguments cannot say, a sentence each."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A training program for which an engine predicts, and which can be given arguments."""

    engine: str
    """Name of the engine."""
    title: str
    """Name of the program for people."""
    version: str
    """Version or commit whose options are written."""
    parser: str
    """File of that version that reads the options."""
    write: Callable[[Job], Arguments]
    """Function that writes the arguments of a job."""
    options: Callable[[Job], tuple[dict[str, Any], list[str]]]
    """Function that says the options which all but the model decides, by their names as a reader has them, and gaps;
    None stands for an option that is left out. Two jobs differ in a file as their options do."""
    together: tuple[frozenset[str], ...] = ()
    """Options that say one thing together: where one of them is changed, others of a file are taken out that the change
    does not have."""
    first_line: str = ""
    """Line above the comments."""


def nest(options: Mapping[str, Any]) -> dict[str, Any]:
    """Tables of options by dotted name, without those that are None.

    >>> nest({"training.steps": 3, "training.seq_len": None, "compile.enable": True})
    {'training': {'steps': 3}, 'compile': {'enable': True}}
    """
    tables: dict[str, Any] = {}
    for name, value in options.items():
        *path, last = name.split(".")
        if value is not None:
            table = tables
            for key in path:
                table = table.setdefault(key, {})
            table[last] = value
    return tables


def name_stages(
    stage_layers: Sequence[int], *, first: str, block: str, last: Sequence[str], every: Sequence[str] = ()
) -> list[list[str]]:
    """Names of the modules of each stage. `block` is a form that takes the number of a block.

    >>> name_stages((1, 2), first="embedding", block="layers.{}", last=["norm"])
    [['embedding', 'layers.0'], ['layers.1', 'layers.2', 'norm']]
    """
    blocks = iter(range(sum(stage_layers)))
    stages = [[block.format(next(blocks)) for _ in range(count)] for count in stage_layers]
    stages[0].insert(0, first)
    stages[-1] += last
    return [[*stage, *every] for stage in stages]


def choose(what: str, value: str, known: Mapping[str, str], instead: str) -> tuple[str, list[str]]:
    """The program's name for a value, and no gap; or `instead` and a gap, if `known` has no name for the value."""
    if value in known:
        return known[value], []
    return instead, [f"{what}={value} is nothing that it has: {instead} is written instead"]
