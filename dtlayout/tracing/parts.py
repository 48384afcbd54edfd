"""The parts of a causal model that `transformers` builds: embedding, blocks, other ends, head; and their names.

Nothing here knows a family. The tree of modules says where parameters lie. A run of the base model without its blocks
and ends says in which order they are called, and what the blocks are given beside hidden states. A model that does
something else than embed tokens, run one list of blocks, normalise and multiply by a head is refused.

Parameters have the same names in every model: `model.embed_tokens`, `model.layers.<number>`, `model.norm`, `lm_head`;
other ends keep the name of their attribute: `model.wpe`. Inside a block names are the family's own.
"""

import copy
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dtlayout.base.errors import InvalidConfig
from dtlayout.tracing.attention import NAME, register
from dtlayout.tracing.logits import Logits, find_logits
from dtlayout.tracing.shell import Stub, compute_tables, delegate, own_tables, replace, takes_positions

EMBEDDING, BLOCKS, NORM, HEAD = "model.embed_tokens", "model.layers", "model.norm", "lm_head"
"""Our names of parts that every model has; a model may lack the final norm."""
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
    """Whether embedding and head are one weight."""
    head_bias: bool = False
    """Whether the head has a bias."""
    logits: Logits = field(default_factory=Logits)
    """Factor and softcap of the head's product."""
    embedding_scale: float = 1.0
    """Factor by which the embedding module multiplies what it looks up."""
    returns_tuple: bool = False
    """Whether blocks return a tuple that begins with the hidden states."""

    can_shard_sequence: bool = True
    """Whether what enters the blocks can be made of a part of a sequence: positions can be given, or none are read."""

    @property
    def names(self) -> dict[str, str]:
        """Our name of each part → the family's path of it."""
        norm = next((path for path in self.after if _is_norm(path.rpartition(".")[2])), None)
        ends = {NORM if path == norm else f"model.{path.rpartition('.')[2]}": path for path in self.ends}
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
        return _rename(name, self.names)

    def from_family(self, name: str) -> str:
        """Our name of a parameter, given the family's."""
        return _rename(name, {own: ours for ours, own in self.names.items()})


def _is_norm(attribute: str) -> bool:
    return "norm" in attribute or attribute.startswith("ln")


def _rename(name: str, prefixes: Mapping[str, str]) -> str:
    for prefix, other in prefixes.items():
        if name.startswith(f"{prefix}."):
            return other + name[len(prefix) :]
    raise KeyError(name)


def build_model(config: Any, dtype: torch.dtype) -> Any:
    """The causal model of a config on the meta device, without dropout, with our attention where the family takes it.

    InvalidConfig for encoder-decoders, for models that need code from elsewhere, and for others that `transformers`
    does not build as causal models.
    """
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    register()
    if getattr(config, "is_encoder_decoder", False):
        raise InvalidConfig(f"{config.model_type} has an encoder and a decoder; train a model with a decoder alone")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InvalidConfig(
            f"transformers itself has no causal model of {config.model_type!r}, and code of a repository is never run"
        )
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    attention = NAME if kind._supports_attention_backend else "sdpa" if kind._supports_sdpa else "eager"
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(without_dropout(config), attn_implementation=attention, dtype=dtype)
    except Exception as error:
        raise InvalidConfig(f"transformers does not build {config.model_type!r}: {_first(error)}") from error


def without_dropout(config: Any) -> Any:
    """A copy of a config in which nothing is left to chance: probabilities of dropout, layerdrop and noise are 0."""
    still = copy.deepcopy(config)
    for name, value in config.to_dict().items():
        if _is_chance(name) and isinstance(value, int | float):
            setattr(still, name, type(value)(0))
        part = vars(still).get(name)
        if isinstance(value, dict) and hasattr(part, "to_dict"):
            setattr(still, name, without_dropout(part))
    return still


def _is_chance(name: Any) -> bool:
    """Whether a key of a config is a probability, or a strength of noise."""
    return any(word in str(name) for word in ("dropout", "pdrop", "layerdrop", "jitter"))


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
    _check_sharing(model, blocks, embedding, head)
    run = _BaseRun(model, base, blocks, outside)
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
    lists = [path for path, module in _walk(model) if isinstance(module, nn.ModuleList) and _has_parameters(module)]
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
    if any(isinstance(part, nn.ModuleList) for part in model.children()) or _holds_list(model):
        for name, child in model.named_children():
            below = f"{path}.{name}" if path else name
            if isinstance(child, nn.ModuleList):
                yield below, child
            else:
                yield from _walk(child, below)


def _holds_list(module: nn.Module) -> bool:
    return any(isinstance(part, nn.ModuleList) and _has_parameters(part) for part in module.modules())


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _check_sharing(model: nn.Module, blocks: str, embedding: nn.Module, head: nn.Module) -> None:
    """Only embedding and head may be one parameter; what blocks hold beside parameters can be computed again."""
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


class _BaseRun:
    """Runs of a base model without its blocks and ends, on a few tokens, which note what is called when."""

    def __init__(self, model: Any, base: str, blocks: str, ends: list[str]):
        """`ends` are the outermost modules beside the blocks, with parameters or without."""
        self.model, self.base, self.blocks, self.ends = model, base, blocks, ends
        self.returns_tuple = False
        self.width = model.get_input_embeddings().embedding_dim
        self._forget()

    def _forget(self) -> None:
        self.blocks_seen, self.widths, self.after = list[int](), dict[str, int](), list[str]()
        self.last: Any = None
        self.reads_positions = False
        """Whether an end before the blocks reads something else than embedded tokens."""

    def find_order(self) -> tuple[bool, dict[str, int], tuple[str, ...]]:
        """Whether blocks return tuples, the ends before them with their widths, and the ends behind them."""
        for self.returns_tuple in (True, False):
            self._forget()
            try:
                self._run()
            except InvalidConfig:
                raise
            except Exception as error:
                if not self.returns_tuple:
                    raise self._refuse(f"does not run without its blocks: {_first(error)}") from error
            else:
                break
        num_blocks = len(self.model.get_submodule(self.blocks))
        if self.blocks_seen != [*range(num_blocks)]:
            raise self._refuse("does not run each of its blocks once, in their order")
        unused = [
            path
            for path in self.ends
            if path not in self.widths and path not in self.after and _has_parameters(self.model.get_submodule(path))
        ]
        if unused:
            raise self._refuse(f"has parameters that its base model does not read: {', '.join(unused)}")
        return self.returns_tuple, self.widths, tuple(self.after)

    def _run(self) -> None:
        """One forward on the CPU; each tensor is checked to be the one that the part before has returned."""
        originals: list[tuple[str, nn.Module]] = []
        tables = [(part, name, part._buffers[name]) for part, name in self._list_tables()]
        try:
            blocks = self.model.get_submodule(self.blocks)
            originals.append((self.blocks, replace(self.model, self.blocks, delegate(blocks, self._step))))
            for path in self.ends:
                end = self.model.get_submodule(path)
                originals.append((path, replace(self.model, path, Stub(self._make_end(path, end)))))
            for part in {id(part): part for part, _, _ in tables}.values():
                part._buffers.update(compute_tables(self.model, part))
            with torch.device("cpu"):
                inputs = torch.zeros(2, 3, self.width, requires_grad=True).clone()
                options = {}
                if self.model.config._attn_implementation == NAME:
                    options["attention_mask"] = torch.ones(2, 3, dtype=torch.int64)
                base = self.model.get_submodule(self.base)
                version = inputs._version
                result = base(inputs_embeds=inputs, use_cache=False, **options)[0]
            if inputs._version != version:
                raise self._refuse("changes embedded tokens in place")
            if result is not self.last and getattr(result, "_base", None) is not self.last:
                raise self._refuse("changes hidden states behind its final norm")
        finally:
            for path, module in originals:
                replace(self.model, path, module)
            for part, name, buffer in tables:
                part._buffers[name] = buffer

    def _list_tables(self) -> Iterator[tuple[nn.Module, str]]:
        """Buffers outside of blocks and of ends with parameters."""
        paths = [self.blocks, *(path for path in self.ends if _has_parameters(self.model.get_submodule(path)))]
        inside = {id(part) for path in paths for part in self.model.get_submodule(path).modules()}
        return ((part, name) for part, name in own_tables(self.model) if id(part) not in inside)

    def _step(self, number: int, h: Any, named: dict[str, Any]) -> Any:
        if not isinstance(h, Tensor):
            raise TypeError("blocks return no tuples")
        if self.after:
            raise self._refuse(f"runs {self.after[0]} neither before nor behind all of its blocks")
        if number != len(self.blocks_seen):
            raise self._refuse("does not run each of its blocks once, in their order")
        if number > 0 and h is not self.last:
            raise self._refuse("changes hidden states between its blocks")
        if number == 0 and not h.requires_grad:
            raise self._refuse("gives its blocks something else than embedded tokens")
        for name, value in named.items():
            if any(each.requires_grad for each in _tensors(value)):
                raise self._refuse(f"gives its blocks more than hidden states that weights make: {name}")
            if hasattr(value, "update") and not any(True for _ in _tensors(value)):
                raise self._refuse(f"carries state from block to block: {name}")
        self.blocks_seen.append(number)
        self.last = h.clone()
        return (self.last,) if self.returns_tuple else self.last

    def _make_end(self, path: str, end: nn.Module) -> Any:
        def run_before(*arguments: Any, **named: Any) -> Tensor:
            shape = end(*map(_on_meta, arguments), **{k: _on_meta(v) for k, v in named.items()}).shape
            self.widths[path] = shape[-1]
            self.reads_positions |= not any(each.requires_grad for each in _tensors([*arguments, *named.values()]))
            return torch.zeros(shape, device="cpu", requires_grad=True).clone()  # families add in place

        def run(*arguments: Any, **named: Any) -> Any:
            if not self.blocks_seen and not _has_parameters(end):
                return end(*arguments, **named)
            if not self.blocks_seen:
                return run_before(*arguments, **named)
            if not _has_parameters(end) and not (arguments and arguments[0] is self.last):
                return end(*arguments, **named)
            if arguments[0] is not self.last or path in self.after or path in self.widths:
                raise self._refuse(f"runs {path} neither before nor behind all of its blocks")
            self.after.append(path)
            self.last = arguments[0].clone()
            return self.last

        return run

    def _refuse(self, what: str) -> InvalidConfig:
        return InvalidConfig(f"{type(self.model).__name__} {what}")


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _on_meta(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to("meta", torch.get_default_dtype()) if value.is_floating_point() else value.to("meta")


def _first(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
