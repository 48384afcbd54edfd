"""Tracing: from a config.json to the description of its model, whatever decoder `transformers` builds of it.

The model is built on the meta device and runs once on fake tensors (`tracing/record.py`). What its blocks do is
recognised (`tracing/recognize.py`), blocks that do the same are one kind, and weights outside of blocks belong to the
first stage or to the last one, by when they are read. No weights are read and no code of a folder is run.
"""

import copy
import json
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dtlayout.base.errors import InvalidConfig
from dtlayout.base.files import write
from dtlayout.base.formatting import find_version, first_line
from dtlayout.models.description import EMBEDDING, FINAL_NORM, HEAD, NO_ATTENTION, Description, Operation
from dtlayout.models.operations import Linear, Norm, SelfAttention
from dtlayout.models.routed_experts import RoutedExperts
from dtlayout.models.traced import FAMILY, Divided, Trace, read_trace
from dtlayout.models.weight import Weight
from dtlayout.spec.model_shape import Experts, ModelShape
from dtlayout.tracing.attention import make_mask
from dtlayout.tracing.block_runs import BlockRunner
from dtlayout.tracing.building import build_causal, build_model, without_dropout
from dtlayout.tracing.causality import find_acausal
from dtlayout.tracing.limits import find_sequence_limits, find_whole_backward
from dtlayout.tracing.parts import BLOCKS, find_parts
from dtlayout.tracing.recognize import recognize
from dtlayout.tracing.record import BlockRecord, Recorder, record
from dtlayout.tracing.scores import ScoreMeter
from dtlayout.tracing.split import Rehearsal, Split, find_split
from dtlayout.tracing.states import measure_states

ATTENTION = "dtlayout-trace"
"""Name by which transformers knows the attention that a trace records."""


def trace_config(config: Mapping[str, Any], name: str = "traced") -> Trace:
    """The trace of the model that a config.json describes; InvalidConfig with the reason where there can be none."""
    with _quiet():
        try:
            return _trace(config, name, torch.bfloat16)
        except (RuntimeError, LookupError, AttributeError, TypeError):  # perhaps code that computes in fp32 alone
            pass
        try:
            return _trace(config, name, torch.float32)
        except RuntimeError as error:
            raise InvalidConfig(f"{_describe_type(config)} cannot be traced: {first_line(error)}") from None
        except (LookupError, AttributeError, TypeError) as error:  # code of a form that nobody has thought of
            reason = f"its code is not understood: {first_line(error)}"
            raise InvalidConfig(f"{_describe_type(config)} cannot be traced: {reason}") from error


def _trace(config: Mapping[str, Any], name: str, dtype: torch.dtype) -> Trace:
    parsed = parse_config(config)
    model, recorder = build(parsed, dtype), Recorder()
    number = _count_parameters(model)
    try:
        blocks_name, blocks = find_blocks(model)
        ends = _watch_ends(model, recorder, blocks_name)
        with _recording_attention(recorder), _one_document():
            records = record(model, blocks, recorder)
        recorder.release()
        own = config
        if parsed.model_type != config.get("model_type"):  # the part that reads text, of a config with several
            own = {**json.loads(parsed.to_json_string(use_diff=False)), "model_type": parsed.model_type}
        trace = _describe(model, blocks_name, blocks, records, recorder, ends, name, parsed=parsed)
        if reason := find_acausal(own, trace.shape.block_kinds):
            raise InvalidConfig(reason)
        _check_parameters(trace, number)
        trace = _measure(trace, BlockRunner(model, blocks_name, recorder.fake), recorder.local_sizes)
        return replace(trace, config=own, library=find_version("transformers"))
    except InvalidConfig as error:
        raise InvalidConfig([f"{_describe_type(config)} cannot be traced: {each}" for each in error.problems]) from None


def describe_module(
    module: nn.Module, example_inputs: Mapping[str, Tensor], file: str | Path, name: str = "own"
) -> ModelShape:
    """The shape of a causal model of one's own, a module with a list of blocks that each attend once, for predictions.

    A copy of the module runs on fake tensors like the first sequence of `example_inputs`, its arguments by name, of
    which the first are tokens [B, S]. The trace is written to `file`, which commands take as --model. The list of
    blocks is an `nn.ModuleList` or an `nn.Sequential`. The head is the last `nn.Linear` behind them, and the embedding
    the `nn.Embedding` before them with as many rows, else with most. InvalidConfig if the module is no such model,
    attends to later tokens, or reads values of tensors.
    """
    example_inputs = _take_sequence(example_inputs)
    recorder, model = Recorder(), copy.deepcopy(module).to("meta").eval()
    shared = {id(each) for each in module.parameters()}
    is_tied = len(shared) < len([*module.named_parameters(remove_duplicate=False)])
    with _quiet():
        blocks_name, blocks = find_blocks(model)
        ends = _watch_ends(model, recorder, blocks_name)
        try:
            records = record(model, blocks, recorder, example_inputs)
        except RuntimeError as error:  # of its own code, or of torch's compiler below flex_attention
            raise InvalidConfig(f"its forward fails: {first_line(error)}") from None
        recorder.release()
        if recorder.ahead is not None:
            raise InvalidConfig(
                f"attention of {recorder.ahead or 'a block'} has neither is_causal=True nor a mask: tokens read later "
                f"ones, so that it is no causal model"
            )
        trace = _describe(model, blocks_name, blocks, records, recorder, ends, name, is_tied=is_tied)
        _check_parameters(trace, _count_parameters(module))
        trace = _measure(trace, BlockRunner(model, blocks_name, recorder.fake, example_inputs))
    write(Path(file), trace.dumps(), "the trace")
    read_trace.cache_clear()
    return read_trace(str(Path(file).absolute())).shape


def _take_sequence(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The first sequence of arguments that have as many as the tokens; InvalidConfig if there are no tokens."""
    tokens = next(iter(inputs.values()), None) if isinstance(inputs, Mapping) else None
    if not isinstance(tokens, Tensor) or tokens.dim() != 2:
        raise InvalidConfig("example_inputs are arguments by name, of which the first are tokens [B, S]: {'x': tokens}")
    return {name: each[:1] if each.dim() and len(each) == len(tokens) else each for name, each in inputs.items()}


def _measure(trace: Trace, runner: BlockRunner, local_sizes: Collection[int] = ()) -> Trace:
    """A trace with what attention and states of its blocks compute and hold in training; its model is cut short.

    `local_sizes` are tokens of windows and chunks, from which on masks are made.
    """
    numbers = trace.shape.block_kinds
    runner.shorten(1 + max(numbers.index(kind) for kind in range(len(trace.kinds))))
    kinds = ScoreMeter(runner, local_sizes).measure(trace.kinds, numbers)
    return replace(trace, kinds=measure_states(runner, kinds, numbers))


def build(parsed: Any, dtype: torch.dtype) -> nn.Module:
    """The model of a `PretrainedConfig` on the meta device; InvalidConfig if transformers builds no decoder of it.

    In bf16 a recording shows which tensors a model's code computes in fp32.
    """
    _register_attention()
    problem = ""
    for attention in (ATTENTION, None):
        options = {} if attention is None else {"attn_implementation": attention}
        try:
            with torch.device("meta"):
                model: nn.Module = build_causal(without_dropout(parsed), dtype=dtype, **options)
            if attention is None or model._supports_attention_backend:
                return model.eval()
        except InvalidConfig:
            raise
        except Exception as error:  # whatever a model's own code raises
            problem = first_line(error)
    raise InvalidConfig(f"transformers cannot build {parsed.model_type}: {problem}")


def parse_config(config: Mapping[str, Any]) -> Any:
    """The `PretrainedConfig` of a config.json, of the part that reads text; InvalidConfig where there is none."""
    try:
        import transformers
    except ImportError as error:
        raise InvalidConfig(
            f"{_describe_type(config)} is not described here; pip install transformers lets it be traced ({error})"
        ) from None
    try:
        parsed = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(dict(config)).get_text_config(decoder=True)
    except KeyError:
        raise InvalidConfig(f"transformers {transformers.__version__} knows no {_describe_type(config)}") from None
    except Exception as error:  # whatever a config's own code raises
        raise InvalidConfig(f"transformers cannot read the config.json: {first_line(error)}") from None
    if getattr(parsed, "is_encoder_decoder", False):
        raise InvalidConfig(f"{parsed.model_type} has an encoder beside its decoder")
    return parsed


def _describe_type(config: Mapping[str, Any]) -> str:
    kind = config.get("model_type")
    return f"model_type={kind!r}" if isinstance(kind, str) else "config.json without model_type"


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what transformers warns of, which is meant for those who load weights, and without what torch logs of
    calls that fail."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


_RECORDERS: list[Recorder] = []
"""The recorder of the trace that is under way."""


def _attend(module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any = None, **asked: Any) -> Any:
    """Attention as transformers calls it: it notes what is asked for."""
    result = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    sinks, window = asked.get("s_aux") is not None, asked.get("sliding_window")
    # A kernel's result lies as its queries do, and the transpose below copies it from another order.
    copies = query.shape == result.shape and not torch.empty_like(query).transpose(1, 2).is_contiguous()
    noted = {"window": window, "softcap": asked.get("softcap"), "sinks": sinks, "copies": copies}
    noted["mask"] = attention_mask is not None  # base models make none here that code does not ask for
    if attention_mask is not None:
        noted["adds"] = id(attention_mask)  # numbers have a gradient, flags have none
    _RECORDERS[-1].note_attention(result, noted)
    return result.transpose(1, 2).contiguous(), None


def _make_mask(*, allow_is_causal_skip: bool = True, local_size: int | None = None, **options: Any) -> Tensor | None:
    """The mask that transformers makes for a sequence; None where attention may know by itself that it is causal.

    Code that reads the mask, as an indexer does, says that it must be made. The tokens of a window or of a chunk are
    noted.
    """
    if local_size is not None:
        _RECORDERS[-1].local_sizes.add(local_size)
    if allow_is_causal_skip:
        return None
    return make_mask(allow_is_causal_skip=False, local_size=local_size, **options)


@cache
def _register_attention() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, _make_mask)


@contextmanager
def _recording_attention(recorder: Recorder) -> Iterator[None]:
    _RECORDERS.append(recorder)
    try:
        yield
    finally:
        _RECORDERS.pop()


@contextmanager
def _one_document() -> Iterator[None]:
    """Inside, transformers takes each sequence for one document: by default it looks for several in the values of
    positions, which fake tensors do not have, and makes masks to be sure."""
    from transformers import masking_utils

    own = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda _: None  # type: ignore[assignment]
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = own


# Parts


def find_blocks(model: nn.Module) -> tuple[str, list[nn.Module]]:
    """Name and modules of the list that has most of a model's parameters; InvalidConfig if there is none."""

    def list_parts(kind: type[nn.ModuleList | nn.Sequential]) -> list[tuple[str, Any]]:
        return [(name, part) for name, part in model.named_modules() if name and isinstance(part, kind) and len(part)]

    lists = list_parts(nn.ModuleList) or list_parts(nn.Sequential)
    sizes = {name: sum(each.numel() for each in part.parameters()) for name, part in lists}
    if not lists:
        raise InvalidConfig("it has no list of blocks")
    name, blocks = max(lists, key=lambda each: sizes[each[0]])
    beside = [other for other, _ in lists if not other.startswith(name) and sizes[other] > sizes[name] / 100]
    if beside:
        raise InvalidConfig(f"it has two lists of blocks, {name} and {beside[0]}")
    owners = dict[int, int]()
    for number, block in enumerate(blocks):
        for own, parameter in block.named_parameters():
            if (owner := owners.setdefault(id(parameter), number)) != number:
                raise InvalidConfig(f"its blocks {owner} and {number} share {own}")
    return name, list(blocks)


def _watch_ends(model: nn.Module, recorder: Recorder, blocks_name: str) -> dict[str, int]:
    """Modules outside of blocks, in the order in which they will be called → how many blocks had run before."""
    called = dict[str, int]()
    for name, module in model.named_modules():
        if not f"{name}.".startswith(f"{blocks_name}."):
            module.register_forward_hook(
                lambda _, __, ___, name=name: (called.setdefault(name, len(recorder.blocks)), None)[1]
            )
    return called


def _describe(
    model: nn.Module, blocks_name: str, blocks: Sequence[nn.Module], records: Sequence[BlockRecord],
    recorder: Recorder, ends: Mapping[str, int], name: str, *, parsed: Any = None, is_tied: bool = False,
) -> Trace:  # fmt: skip
    """The trace of a model that ran; `parsed` is its `PretrainedConfig`, None for a module of one's own."""
    kinds, problems, of_sequence = dict[tuple[tuple[Operation, ...], Divided], int](), list[str](), list[str]()
    numbers, tried = list[int](), dict[Any, Split]()
    if len(records) != len(blocks):
        raise InvalidConfig(f"{len(records)} of {len(blocks)} blocks ran, each is asked to run once")
    for one, block, inputs in zip(records, blocks, recorder.inputs, strict=True):
        found = recognize(one, block)
        code = (found.operations, one.code)
        if code not in tried:
            tried[code] = Split() if found.problems else _split(block, found.operations, inputs, recorder)
            problems += [tried[code].problem] * bool(tried[code].problem)
        numbers.append(kinds.setdefault((found.operations, tried[code].divided), len(kinds)))
        problems += found.problems
        of_sequence += found.sequence_problems
    sides = _EndReader(model, blocks_name, ends, len(blocks))
    hidden_size = records[0].shapes[records[0].enters][-1]
    final_norm = _complete_norm(
        sides.final_norm(hidden_size),
        model.get_submodule(sides.names.get(FINAL_NORM, "")),
        blocks[0],
        next(iter(kinds))[0],
    )
    described = [
        Description(sides.embedding, operations, final_norm, sides.head, sides.before, sides.after)
        for operations, _ in kinds
    ]
    shape = _find_shape(described, numbers, hidden_size, name, is_tied=sides.is_tied or is_tied)
    on_disk = {ours: _name_on_disk(model, own) for ours, own in sides.names.items()}
    own = {ours: name for ours, name in on_disk.items() if ours != name}
    states = [f"{each.module} carries a state along the sequence" for kind in described for each in kind.mixers]
    reasons = {
        "tp": states + problems, "sequence_parallel": of_sequence, **dict.fromkeys(("cp", "document_mask"), states),
    }  # fmt: skip
    whole = {axis: "; ".join(dict.fromkeys(found)) for axis, found in reasons.items() if found}
    if parsed is None:
        whole["training"] = "it is a module of one's own, which dtlayout train does not build"
    elif any(each.experts for each in described):
        whole["training"] = "a mixture of experts is traced for predictions alone"
    elif problem := _find_untrained(
        parsed, sides.names, whole, described, [*zip(blocks, numbers, strict=True)], records
    ):
        whole["training"] = problem
    return Trace(
        shape=shape,
        kinds=tuple(described),
        config={},
        library="",
        whole=whole,
        names=own,
        divided=tuple(each for _, each in kinds),
    )


def _count_parameters(model: nn.Module) -> int:
    """Elements of all parameters, each counted once, before it is given memory."""
    return sum({id(each): each.numel() for each in model.parameters()}.values())


def _check_parameters(trace: Trace, number: int) -> None:
    """InvalidConfig if the operations of a trace do not have all parameters of its model, `number` elements."""
    shape, first = trace.shape, trace.kinds[0]
    ends = [*first.before_blocks, *first.after_blocks, *[first.head] * (not shape.tied_embeddings)]
    traced = sum(each.numel for each in ends)
    traced += sum(each.numel for kind in shape.block_kinds for each in trace.kinds[kind].block_weights)
    if traced != number:
        raise InvalidConfig(f"its blocks and ends are seen to read {traced:,} of its {number:,} parameters")


def _split(
    block: nn.Module, operations: Sequence[Operation], inputs: tuple[tuple[Any, ...], dict[str, Any]],
    recorder: Recorder,
) -> Split:  # fmt: skip
    """How tp splits a kind of block; of one with experts, or with several attentions, nothing is asked."""
    num_attentions = sum(isinstance(each, SelfAttention) for each in operations)
    if num_attentions != 1 or any(isinstance(each, RoutedExperts) for each in operations):
        return Split()
    return find_split(Rehearsal(block, operations, inputs, recorder, _recording_attention))


def _complete_norm(norm: Norm, module: nn.Module, block: nn.Module, operations: Sequence[Operation]) -> Norm:
    """The final norm, computed as a norm of the stream in a block is: one of the class of `module`, if there is one."""
    in_block = [each for each in operations if isinstance(each, Norm) and not each.is_of_heads]
    modules = dict(block.named_modules())  # a norm may be a function's
    alike = [each for each in in_block if type(modules.get(each.module)) is type(module)]
    for each in alike or in_block[: not norm.parameters]:
        return replace(norm, keeps=each.keeps, initial=each.initial)
    return norm


def _name_on_disk(model: nn.Module, name: str) -> str:
    """The name under which folders hold a module, where transformers renames it as it loads them: GPT-NeoX's head.

    Its rules are turned round, as they are when it saves. Those inside of a block, which mixtures of experts and models
    with state have, are left out: none of these models is trained.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming
    except ImportError:  # before transformers 5 nothing is renamed
        return name
    if not hasattr(model, "base_model_prefix"):  # a module of one's own
        return name
    stored = f"{name}.weight"
    for rule in reversed(get_model_conversion_mapping(model, add_legacy=False)):  # type: ignore[arg-type]
        if isinstance(rule, WeightRenaming):
            stored, _ = rule.reverse_transform().rename_source_key(stored)
    return stored.removesuffix(".weight")


def _find_untrained(
    parsed: Any, names: Mapping[str, str], whole: dict[str, str], described: Sequence[Description],
    kinds: Sequence[tuple[nn.Module, int]], records: Sequence[BlockRecord],
) -> str:  # fmt: skip
    """The reason why the trainer cannot take a model's stages apart; empty if it can.

    `whole` gets reasons where the trainer can, but not with all layouts. `kinds` are the blocks with their kinds'
    numbers.
    """
    try:
        with torch.device("meta"):
            model = build_model(parsed, torch.float32)
            parts = find_parts(model)
    except InvalidConfig as error:
        return "; ".join(error.problems)
    whole |= find_sequence_limits(
        model, model.get_submodule(parts.base), [*model.get_submodule(parts.blocks)],
        [each.attention for each in described], [asked for one in records for asked in one.attention.values()],
    )  # fmt: skip
    if reason := next(filter(None, (find_whole_backward(block, described[kind].block) for block, kind in kinds)), ""):
        whole["splits_backward"] = reason
    if not parts.can_shard_sequence:
        whole.setdefault("sequence_parallel", "what stands before its blocks reads whole sequences")
    own = {key: value for key, value in parts.names.items() if key in names}
    return "" if own == dict(names) else f"its parts are called {own}, and {dict(names)} in its trace"


def _find_table_and_head(model: nn.Module, ends: Mapping[str, int], num_blocks: int) -> tuple[Any, Any]:
    """Embedding of tokens and head of a model, as it names them or as it calls them; None where there is none."""
    if isinstance(getattr(model, "get_output_embeddings", None), Callable):  # type: ignore[arg-type]
        return model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    called = [(model.get_submodule(name), place) for name, place in ends.items()]
    tables = [module for module, place in called if isinstance(module, nn.Embedding) and not place]
    heads = [module for module, place in called if isinstance(module, nn.Linear) and place >= num_blocks]
    head = heads[-1] if heads else None

    def rank(table: nn.Embedding) -> tuple[bool, int]:  # a table of positions may have more rows than that of tokens
        return head is not None and table.num_embeddings == head.out_features, table.num_embeddings

    return max(tables, key=rank, default=None), head


class _EndReader:
    """Weights outside of blocks: embedding, final norm, head, and what stands beside them."""

    def __init__(self, model: nn.Module, blocks_name: str, ends: Mapping[str, int], num_blocks: int):
        embedding, head = _find_table_and_head(model, ends, num_blocks)
        modules = {id(module): name for name, module in model.named_modules()}
        if embedding is None or head is None or id(embedding) not in modules or id(head) not in modules:
            raise InvalidConfig(
                "it has no embedding before its blocks, or no head behind them: an nn.Embedding and an nn.Linear, "
                "which may share their weight"
            )
        read_text = getattr(getattr(model, "config", None), "get_text_config", None)
        is_tied = read_text is not None and bool(read_text().tie_word_embeddings)
        self.is_tied = is_tied or head.weight is embedding.weight
        self.names = {EMBEDDING: modules[id(embedding)], BLOCKS: blocks_name, HEAD: modules[id(head)]}
        self.embedding = Weight(f"{EMBEDDING}.weight", tuple(embedding.weight.shape), "normal", "embedding", 0)
        self.head = Weight(f"{HEAD}.weight", tuple(head.weight.shape), "normal", "head", 0)
        self.before, self.after, self.norm = tuple[Weight, ...](), tuple[Weight, ...](), tuple[Weight, ...]()
        if head.bias is not None:
            self.after = (Weight(f"{HEAD}.bias", (len(head.bias),), "zeros", "vector", 0),)
        known = (modules[id(embedding)], modules[id(head)])
        for name, module in model.named_modules():
            own = dict(module.named_parameters(recurse=False))
            if not own or name in known or f"{name}.".startswith(f"{blocks_name}."):
                continue
            if name not in ends:
                raise InvalidConfig(f"{name} has parameters, and is not called")
            self._sort(name, own, is_after=ends[name] >= num_blocks)

    def _sort(self, name: str, own: Mapping[str, nn.Parameter], *, is_after: bool) -> None:
        is_norm = is_after and all(each.dim() == 1 for each in own.values()) and not self.norm
        is_norm = is_norm and own.keys() <= {"weight", "bias"}
        place = FINAL_NORM if is_norm else f"model.{name.rpartition('.')[2]}"
        self.names[place] = name
        weights = tuple(
            Weight(
                f"{place}.{key}", tuple(each.shape),
                "normal" if each.dim() > 1 else "zeros" if key == "bias" else "ones",
                "embedding" if each.dim() > 1 else "vector",
            )
            for key, each in own.items()
        )  # fmt: skip
        if is_norm:
            self.norm = weights
        elif is_after:
            self.after += weights
        else:
            self.before += weights

    def final_norm(self, hidden_size: int) -> Norm:
        """The norm before the head; without parameters where no module after the blocks has some."""
        return Norm(FINAL_NORM, hidden_size, parameters=tuple(each.name.rpartition(".")[2] for each in self.norm))  # type: ignore[misc]


def _find_shape(
    described: Sequence[Description], numbers: Sequence[int], hidden_size: int, name: str, *, is_tied: bool
) -> ModelShape:
    """Sizes of a model; they speak of the most frequent kind of block that attends, or of all where none does.

    Such a model has one head, as wide as the model.
    """
    often = [described[kind] for kind, _ in Counter(numbers).most_common()]
    for each in often:
        times = sum(isinstance(operation, SelfAttention) for operation in each.block)
        if times > 1 or (not times and not any(one.mixers for one in often)):
            raise InvalidConfig(f"a block attends {times} times; blocks with one attention can be planned")
    main = next((each for each in often if each.attention is not NO_ATTENTION), often[0])
    attention, experts = main.attention, main.experts
    if attention is NO_ATTENTION:
        attention = SelfAttention(1, 1, hidden_size, hidden_size)
    inner, found = [size for kind in described for size in _list_inner(kind)], None
    if experts is not None:
        dense = next((i for i, each in enumerate(numbers) if described[each].experts is not None), 0)
        if any(described[each].experts is None for each in numbers[dense:]):
            raise InvalidConfig("blocks without experts follow on blocks with some")
        found = Experts(
            number=experts.number, per_token=experts.per_token, ffn_size=experts.inner_width,
            shared_ffn_size=sum(_list_inner(main)), dense_layers=dense, bias=experts.bias,
        )  # fmt: skip
    return ModelShape(
        name=name, family=FAMILY, hidden_size=hidden_size, num_layers=len(numbers), num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads, head_dim=attention.head_width,
        ffn_size=max(inner, default=experts.inner_width if experts else hidden_size),
        vocab_size=main.embedding.shape[0], tied_embeddings=is_tied, experts=found, block_kinds=tuple(numbers),
    )  # fmt: skip


def _list_inner(described: Description) -> list[int]:
    """Inner widths of a block's feed-forwards."""
    return [each.inputs for each in described.block if isinstance(each, Linear) and each.reads.endswith(".active")]
