"""The parts of a causal model that `transformers` builds: embedding, blocks, other ends, head; and their names.

Nothing here knows a family. The tree of modules says where parameters lie. A run of the base model without its blocks
and ends says in which order they are called, and what the blocks are given beside hidden states. A model that does
something else than embed tokens, run one list of blocks, normalise and multiply by a head is refused.

Parameters have the same names in every model: `model.embed_tokens`, `model.layers.<number>`, `model.norm`, `lm_head`;
other ends keep the name of their attribute: `model.wpe`. Inside a block names are the family's own.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dtlayout.base.errors import InvalidConfig
from dtlayout.models.description import BLOCKS as PATTERN
from dtlayout.models.description import EMBEDDING, FINAL_NORM, HEAD
from dtlayout.models.traced import rename
from dtlayout.tracing.base_run import BaseRun, has_parameters
from dtlayout.tracing.logits import Logits, find_logits
from dtlayout.tracing.shell import compute_tables, own_tables, takes_positions

BLOCKS = PATTERN.removesuffix(".*")
"""Our name of the list of blocks."""
_ATTENTION_KINDS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
"""Values of a config's `layer_types` that are attention with a mask."""


@dataclass(frozen=True)
class ModelParts:
    """Paths of the parts of a causal model, which begin at the causal model, and what is done between them."""

    base: str
    """Path of the base model, the module that runs the blocks."""
    blocks: str
    """Path of the list of blocks."""
    num_blocks: int
    """Number of blocks."""
    embedding: str
    """Path of the embedding of tokens."""
    before: Mapping[str, int] = field(default_factory=dict)
    """Path of each other module with parameters that runs before the blocks → width of what it returns."""
    after: tuple[str, ...] = ()
    """Paths of the modules that run on hidden states behind the blocks, in the order of their calls."""
    head: str = ""
    """Path of the head."""
    is_tied: bool = False
    """True if embedding and head are one weight."""
    head_bias: bool = False
    """True if the head has a bias."""
    logits: Logits = field(default_factory=Logits)
    """Factor and softcap of the head's product."""
    embedding_scale: float = 1.0
    """Factor by which the embedding module multiplies what it looks up."""
    returns_tuple: bool = False
    """True if blocks return a tuple that begins with the hidden states."""
    can_shard_sequence: bool = True
    """True if what enters the blocks can be made of a part of a sequence: positions can be given, or none are read."""

    @property
    def names(self) -> dict[str, str]:
        """Our name of each part → the family's path of it."""
        norm = next((path for path in self.after if _is_norm(path.rpartition(".")[2])), None)
        ends = {FINAL_NORM if path == norm else f"model.{path.rpartition('.')[2]}": path for path in self.ends}
        return {EMBEDDING: self.embedding, BLOCKS: self.blocks, **ends, HEAD: self.head}

    @property
    def ends(self) -> tuple[str, ...]:
        """Paths of the ends beside embedding and head."""
        return (*self.before, *self.after)

    def name_ours(self, path: str) -> str:
        """Our name of a part."""
        return next(ours for ours, own in self.names.items() if own == path)

    def to_family(self, name: str) -> str:
        """The family's name of a parameter, given ours.

        >>> ModelParts("gpt", "gpt.h", 2, "gpt.wte").to_family("model.layers.1.mlp.weight")
        'gpt.h.1.mlp.weight'
        """
        return rename(name, self.names)

    def from_family(self, name: str) -> str:
        """Our name of a parameter, given the family's."""
        return rename(name, {own: ours for ours, own in self.names.items()})


def _is_norm(attribute: str) -> bool:
    return "norm" in attribute or attribute.startswith("ln")


def find_parts(model: Any) -> ModelParts:
    """The parts of a causal model of `transformers` on the meta device, which is as before when this returns.

    InvalidConfig with a reason of one line where it is no plain decoder.
    """
    name, config = type(model).__name__, model.config
    kinds = set(getattr(config, "layer_types", None) or ()) - _ATTENTION_KINDS
    if kinds:
        raise InvalidConfig(f"{name} has blocks without attention: layer_types of {sorted(kinds)}")
    if getattr(config, "output_router_logits", False):
        raise InvalidConfig(f"{name} adds a loss of its routers; set output_router_logits to false")
    blocks = _find_blocks(model)
    base = blocks.rpartition(".")[0]
    if not base:
        raise InvalidConfig(f"{name} has no base model beside its head")
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear):
        raise InvalidConfig(f"{name} has no table of embeddings or no matrix as head")
    paths = {id(module): path for path, module in model.named_modules()}
    _check_owners(model, blocks)
    outside = [path for path in _find_outside(model, blocks) if path not in (paths[id(embedding)], paths[id(head)])]
    _check_state(model, embedding)
    run = BaseRun(model, base, blocks, outside)
    returns_tuple, before, after = run.find_order()
    parts = ModelParts(
        base=base,
        blocks=blocks,
        num_blocks=len(model.get_submodule(blocks)),
        embedding=paths[id(embedding)],
        before=before,
        after=after,
        head=paths[id(head)],
        is_tied=head.weight is embedding.weight,
        head_bias=head.bias is not None,
        logits=find_logits(model, base, paths[id(head)]),
        embedding_scale=_find_scale(model, embedding),
        returns_tuple=returns_tuple,
        can_shard_sequence=not run.reads_positions or takes_positions(model.get_submodule(base)),
    )
    if len(parts.names) < len(parts.ends) + 3:
        raise InvalidConfig(f"{name} has ends with the same name: {', '.join(parts.ends)}")
    return parts


def _find_blocks(model: nn.Module) -> str:
    """Path of the only outermost list of modules with parameters."""
    name = type(model).__name__
    lists = [path for path, module in _walk(model) if isinstance(module, nn.ModuleList) and has_parameters(module)]
    if not lists:
        raise InvalidConfig(f"{name} has no list of blocks")
    if len(lists) > 1:
        raise InvalidConfig(f"{name} has more than one list of blocks: {', '.join(lists)}")
    for number, block in enumerate(model.get_submodule(lists[0]).children()):
        if not any("attention" in type(part).__name__.lower() for part in block.modules()):
            raise InvalidConfig(f"{name} has blocks without attention: {lists[0]}.{number} is a {type(block).__name__}")
    return lists[0]


def _check_owners(model: nn.Module, blocks: str) -> None:
    """No module around the blocks has a parameter of its own."""
    for path, module in _walk(model):
        if _is_around(path, blocks):
            for name, _ in module.named_parameters(recurse=False):
                raise InvalidConfig(f"{type(model).__name__} has a parameter outside of blocks and ends: {name}")


def _find_outside(model: nn.Module, blocks: str) -> Iterator[str]:
    """Paths of the outermost modules that don't contain the blocks, but for lists, which nobody calls."""
    found: list[str] = []
    for path, module in _walk(model):
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            continue
        if path != blocks and not _is_around(path, blocks) and not path.startswith(tuple(f"{p}." for p in found)):
            found.append(path)
            yield path


def _is_around(path: str, blocks: str) -> bool:
    return not path or blocks.startswith(f"{path}.")


def _walk(model: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Modules in their order with their paths; nothing inside of a list, nor of a leaf of the tree around lists."""
    yield path, model
    if _holds_list(model):
        for name, child in model.named_children():
            below = f"{path}.{name}" if path else name
            if isinstance(child, nn.ModuleList):
                yield below, child
            else:
                yield from _walk(child, below)


def _holds_list(module: nn.Module) -> bool:
    return any(isinstance(part, nn.ModuleList) and has_parameters(part) for part in module.modules())


def _check_state(model: nn.Module, embedding: nn.Module) -> None:
    """Only embedding and head may be one parameter, and tensors beside parameters are buffers that code can fill."""
    name = type(model).__name__
    owners = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    shared = [n for n, p in model.named_parameters() if owners[id(p)] > 1 and p is not embedding.weight]
    if shared:
        raise InvalidConfig(f"{name} uses a parameter in several places: {shared[0]}")
    known = set(model.state_dict()) - {n for n, _ in model.named_parameters(remove_duplicate=False)}
    if known:
        raise InvalidConfig(f"{name} keeps in its checkpoint what is not trained: {min(known)}")
    for path, part in model.named_modules():
        hidden = [attribute for attribute, value in vars(part).items() if isinstance(value, Tensor)]
        if hidden:
            raise InvalidConfig(f"{name} keeps a tensor that is no buffer: {path}.{hidden[0]}")
    for part in {part for part, _ in own_tables(model)}:
        filled = [compute_tables(model, part, fill) for fill in (0.0, 1.0)]
        for table, values in filled[0].items():
            if not torch.equal(values, filled[1][table]):
                raise InvalidConfig(f"{name} has no code that fills {type(part).__name__}.{table}")


def _find_scale(model: Any, embedding: nn.Embedding) -> float:
    """The factor of an embedding module whose class is its family's own."""
    if type(embedding) is nn.Embedding:
        return 1.0
    width = embedding.embedding_dim
    weight = torch.linspace(1, 2, 2 * width, dtype=torch.float64, device="cpu").view(2, width)
    tokens = torch.tensor([[1, 0, 1]], device="cpu")
    with torch.device("cpu"), torch.no_grad():
        tables = compute_tables(model, embedding, exact=True)
        state: dict[str, Tensor] = {"weight": weight, **tables}
        padding, embedding.padding_idx = embedding.padding_idx, None
        try:
            found = torch.func.functional_call(embedding, state, (tokens,))
        finally:
            embedding.padding_idx = padding
    plain = F.embedding(tokens, weight)
    scale = float((found / plain).flatten()[0])
    if not torch.allclose(found, plain * scale, rtol=1e-12):
        raise InvalidConfig(f"{type(embedding).__name__} does more than look up and multiply by a number")
    return scale
