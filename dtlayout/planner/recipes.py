"""Recipes: the layout that a model's or a GPU's vendor, or the program itself, published for a job like the asked one.

constants/recipes.toml has them, with their sources. A vendor chose its layout by measuring, so a search that beats it
by far is either right or has found an error of the model; `GREAT_GAIN` is where the answer says so.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from dtlayout.base import toml
from dtlayout.costmodel.engine import OWN_ENGINE
from dtlayout.costmodel.estimate import Estimate
from dtlayout.costmodel.scenario import Scenario, engine_kernels, find_refusals
from dtlayout.planner.choices import parse_choices
from dtlayout.planner.neighbours import spread
from dtlayout.planner.search import Search
from dtlayout.spec.kernels import OpenKernels
from dtlayout.spec.layout import Layout

FILE = "recipes.toml"
GREAT_GAIN = 0.1
"""Share of a recipe's step above which a predicted gain over it is to be doubted."""
_LIKE_LENGTH = 2
"""Ratio of sequence lengths up to which a recipe is one for the asked job."""


@dataclass(frozen=True)
class Recipe:
    """One published layout."""

    who: str
    """Author of the recipe, as in "NVIDIA's recipe"."""
    where: str
    """Source of the recipe."""
    is_vendor: bool
    """Whether its author makes the GPUs, so that it is of interest to other programs too."""
    program: str
    """The engine that it was published for."""
    model: str
    """The model, as people call it."""
    layout: str
    """Choices as a layout is printed, without data parallelism."""


class Usual(NamedTuple):
    """A recipe in the asked scenario."""

    recipe: Recipe
    estimate: Estimate


def find_usual(search: Search) -> Usual | None:
    """The recipe for a search's scenario, with its estimate; None where none is known that the engine can run.

    A recipe of the engine's own program comes before those of others, one in the asked format before others. What a
    program publishes for itself is said of that program and of our own trainer alone.
    """
    space = search.space
    for recipe in _list_recipes(space.scenario):
        layout = spread(Layout(**parse_choices(recipe.layout)), space.scenario.cluster.num_gpus)
        if layout is None or not layout.is_legal(space.scenario.model, space.scenario.batch):
            continue
        kernels = engine_kernels(space.scenario, OpenKernels(), layout)
        if not find_refusals(space.scenario, layout, kernels):
            return Usual(recipe, search.estimator.estimate(layout, kernels))
    return None


def _list_recipes(scenario: Scenario) -> Iterator[Recipe]:
    """Recipes for a scenario's model, GPU type and sequence length, the nearest first."""
    model, gpu = scenario.model, scenario.cluster.gpu.name
    experts = 0 if model.experts is None else model.experts.number
    asked = "bf16" if scenario.precision.matmul_format is None else "fp8"
    found = list[tuple[bool, bool, Recipe]]()
    for job in _read_recipes()["recipe"]:
        is_model = (job["width"], job["blocks"]) == (model.hidden_size, model.num_layers)
        ratio = scenario.batch.seq_len / job["seq_len"]
        if not is_model or job.get("experts", 0) != experts or not 1 / _LIKE_LENGTH <= ratio <= _LIKE_LENGTH:
            continue
        for each in job["layouts"]:
            if gpu.startswith(f"{each['gpu']}-") or gpu == each["gpu"]:
                source = _read_recipes()["sources"][each["source"]]
                recipe = Recipe(**source, model=job["model"], layout=each["layout"])
                if not source["is_vendor"] and scenario.engine.name not in (recipe.program, OWN_ENGINE):
                    continue
                found.append((recipe.program != scenario.engine.name, each["format"] != asked, recipe))
    yield from (recipe for _, _, recipe in sorted(found, key=lambda each: each[:2]))


@cache
def _read_recipes() -> dict[str, Any]:
    return toml.read_constant_file(FILE)
