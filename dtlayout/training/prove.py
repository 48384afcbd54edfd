"""Proof that a traced model trains exactly: a narrow model with its code, on four processes and on one.

The processes train one step under layouts in float64. One process runs the model of `transformers` itself, with its own
attention and torch's loss, on the whole batch at once. Loss and every gradient are compared.
"""

import json
import logging
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dtlayout.base.errors import DtlayoutError, InvalidConfig, InvalidLayout
from dtlayout.mesh.axes import dp_rank
from dtlayout.models.families import find_weight
from dtlayout.models.files import trace_model
from dtlayout.models.proofs import AXES
from dtlayout.models.traced import find_whole, read_trace
from dtlayout.models.weights import list_pieces
from dtlayout.plans.init import allocate, fill_normal, find_part
from dtlayout.spec.batch import IGNORED, Batch
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.optimizers import AdamW
from dtlayout.spec.precision import Precision
from dtlayout.training.batches import take_own
from dtlayout.training.build import assemble
from dtlayout.training.optimizer import build_optimizer, set_learning_rate
from dtlayout.training.step import TrainStep

NUM_RANKS = 4
LAYOUTS: Mapping[str, Layout] = {
    "fsdp": Layout(dp_shard=4, zero=3, micro_batch=2, recompute="full"),
    "pp": Layout(pp=2, dp_shard=2, zero=2, micro_batch=1, schedule="interleaved-1f1b", virtual_stages=2),
    "tp": Layout(tp=2, dp_replicate=2, zero=1, micro_batch=2, sequence_parallel=False),
    "sequence_parallel": Layout(tp=2, pp=2, micro_batch=2, sequence_parallel=True, recompute="selective"),
    "cp": Layout(cp=2, dp_shard=2, zero=3, micro_batch=2, recompute="selective"),
    "offload": Layout(pp=2, dp_shard=2, micro_batch=1, offload="activations"),
    "splits_backward": Layout(pp=2, dp_shard=2, micro_batch=1, schedule="zb-h1"),
    "document_mask": Layout(dp_shard=4, micro_batch=2, recompute="full"),
}
"""Axis → a layout of four ranks that has it, beside others; "document_mask" is also tried beside cp."""
_BATCH, _SEED, _LIMIT_S = Batch(global_batch=8, seq_len=16), 5, 300.0
_EXACT = Precision(params="float64", compute="float64", reduce="float64")
_STD, _LEAST_SHARE = 0.1, 1e-4
_DOCUMENT_SHARE = 0.2
"""Share of the tokens that begin a document."""
_CP_METHODS = ("ring", "all-to-all")
"""Methods of cp that are tried: gather joins parts as ring does, and differs in its messages alone."""


def find_layouts(axis: str, small: ModelShape) -> list[Layout]:
    """The layouts of an axis, in a pipeline that is not interleaved where a model has fewer blocks than stages.

    With cp there is one for a method that attends part after part, and one for all-to-all, where a model allows both.
    """
    layout = LAYOUTS[axis]
    if small.num_layers < layout.num_stages:
        layout = replace(layout, schedule="1f1b", virtual_stages=1)
    if axis not in ("cp", "document_mask"):
        return [layout]
    whole, found = find_whole(small), [layout] if axis == "document_mask" else []
    if "cp" not in whole:
        ways = [replace(LAYOUTS["cp"], cp_method=name) for name in _CP_METHODS if name not in whole]
        found += [each for each in ways if each.is_legal(small, _BATCH)]
    return found


def prove(model: ModelShape, axes: Sequence[str] = AXES) -> dict[str, float | str]:
    """Axis → the largest relative difference of loss or gradients from one process, or a reason why there is none."""
    from dtlayout.tracing.shrink import shrink

    trace = read_trace(model.trace)
    found: dict[str, float | str] = {axis: trace.whole[axis] for axis in axes if axis in trace.whole}
    if "training" in trace.whole:
        return dict.fromkeys(axes, trace.whole["training"])
    if "tp" in found and "sequence_parallel" in axes:
        found["sequence_parallel"] = found["tp"]
    with tempfile.TemporaryDirectory() as folder:
        config = shrink(trace.config, trace.shape.block_kinds)
        small = trace_model(config, Path(folder) / "config.json", Path(folder) / "trace.json")
        if len(read_trace(small.trace).kinds) < len(trace.kinds):
            return dict.fromkeys(
                axes, "its first eight blocks are not of all kinds, so that a narrow model is none of it"
            )
        if {*read_trace(small.trace).divided} != {*trace.divided}:
            return dict.fromkeys(axes, "tp divides other numbers of a narrow model, which is no proof of this one")
        for axis in axes:
            if axis not in found:
                try:
                    for layout in find_layouts(axis, small) or [LAYOUTS[axis]]:
                        layout.check(small, _BATCH)
                except (InvalidConfig, InvalidLayout) as error:
                    found[axis] = "; ".join(error.problems)
        wanted = [axis for axis in axes if axis not in found]
        found |= _try(small, wanted, folder)
    return {axis: found[axis] for axis in axes}


def _try(small: ModelShape, axes: Sequence[str], folder: str) -> dict[str, float | str]:
    """Axis → difference or reason; where one axis fails, each is tried by itself."""
    if not axes:
        return {}
    try:
        return {**_start(small, axes, folder)}
    except DtlayoutError as error:
        if len(axes) == 1:
            return {axes[0]: str(error)}
    found = dict[str, float | str]()
    for axis in axes:
        found |= _try(small, [axis], tempfile.mkdtemp(dir=folder))
    return found


def _start(small: ModelShape, axes: Sequence[str], folder: str) -> dict[str, float]:
    context = torch.multiprocessing.start_processes(
        _work, (small, axes, folder), nprocs=NUM_RANKS, join=False, start_method="spawn"
    )
    ends = time.monotonic() + _LIMIT_S
    try:
        while not context.join(timeout=1):
            if time.monotonic() > ends:
                raise DtlayoutError(f"no end after {_LIMIT_S:.0f} s")
    except (torch.multiprocessing.ProcessRaisedException, torch.multiprocessing.ProcessExitedException) as error:
        last = str(error).strip().rpartition("\n")[2]
        raise DtlayoutError(f"it fails: {last}") from None
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
            process.join()
    answers = [json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in range(NUM_RANKS)]
    return {axis: max(answer[axis] for answer in answers) for axis in axes}


def _work(rank: int, small: ModelShape, axes: Sequence[str], folder: str) -> None:
    logging.disable(logging.WARNING)  # of packages, in each process
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_RANKS)
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(find_differences(small, axes)))
    dist.destroy_process_group()


def find_differences(small: ModelShape, axes: Sequence[str]) -> dict[str, float]:
    """Axis → the largest relative difference of this rank's loss and gradients from those of one process.

    All four ranks call it, with their process group open.
    """
    found = dict[str, float]()
    with _InFloat64():
        for starts in (None, make_starts()):
            wanted = [axis for axis in axes if (axis == "document_mask") == (starts is not None)]
            expected = compute_reference(small, *make_rows(small), starts) if wanted else {}
            for axis in wanted:
                found[axis] = max(compare(small, layout, expected, starts) for layout in find_layouts(axis, small))
    return found


class _InFloat64(TorchFunctionMode):
    """Inside, tensors of float64 stay so where a model asks for float32, as norms and softmax do.

    Else a difference of 1e-16 in what comes in could become one of 1e-7 where it is rounded.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (args and isinstance(args[0], Tensor) and args[0].dtype is torch.float64):
            return function(*args, **(kwargs or {}))
        if function is Tensor.float:
            return args[0]
        widened = tuple(torch.float64 if each is torch.float32 else each for each in args)
        named = {key: torch.float64 if each is torch.float32 else each for key, each in (kwargs or {}).items()}
        return function(*widened, **named)


def make_rows(model: ModelShape) -> tuple[Tensor, Tensor]:
    """Tokens and targets of a global batch, of which some are none."""
    generator = torch.Generator().manual_seed(_SEED)
    size = (_BATCH.global_batch, _BATCH.seq_len)
    tokens, targets = (torch.randint(model.vocab_size, size, generator=generator) for _ in range(2))
    targets[:, :3] = IGNORED
    return tokens, targets


def make_starts() -> Tensor:
    """Position at which the document of each token of a global batch starts, [samples, S] int32."""
    generator = torch.Generator().manual_seed(_SEED)
    begins = torch.rand(_BATCH.global_batch, _BATCH.seq_len, generator=generator) < _DOCUMENT_SHARE
    begins[:, 0] = True
    positions = torch.arange(_BATCH.seq_len, dtype=torch.int32)
    return torch.where(begins, positions, 0).cummax(1).values


def fill(named: Sequence[tuple[str, Tensor]], model: ModelShape) -> None:
    """Give every parameter random values by its name, around 1 where its initial value is 1."""
    for name, parameter in named:
        fill_normal(parameter, _STD, _SEED, model.aliases.get(name, name))
        if find_weight(model, name).initial == "ones":
            part = find_part(parameter)[0]
            assert isinstance(part, Tensor), "nothing is quantized"
            part.add_(1.0)


def compute_reference(
    model: ModelShape, tokens: Tensor, targets: Tensor, starts: Tensor | None = None
) -> dict[str, Tensor]:
    """Loss, as "loss", and gradients by our names, as the model of `transformers` has them on one process.

    With `starts` each document is run by itself, at its positions.
    """
    from dtlayout.tracing.building import build_causal, without_dropout
    from dtlayout.tracing.parts import find_parts
    from dtlayout.tracing.stage import read_config

    config = without_dropout(read_config(model.trace))
    whole = build_causal(config, dtype=torch.float64).train()
    with torch.device("meta"):
        parts = find_parts(build_causal(config))
    whole.get_input_embeddings().padding_idx = None  # the token of padding is trained as any other
    named = {parts.from_family(name): parameter for name, parameter in whole.named_parameters()}
    with torch.no_grad():
        fill(list(_cut_pieces(named, model).items()), model)
    logits = whole(input_ids=tokens, use_cache=False).logits if starts is None else run_documents(whole, tokens, starts)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    loss = loss / (targets != IGNORED).sum()
    loss.backward()
    gradients = {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in named.items()}
    return {"loss": loss.detach(), **_cut_pieces(gradients, model)}


def run_documents(whole: Any, tokens: Tensor, starts: Tensor) -> Tensor:
    """Logits of all tokens, document after document."""
    rows = list[Tensor]()
    for row, firsts in zip(tokens, starts, strict=True):
        bounds = [*firsts.unique().tolist(), len(row)]
        documents = [torch.arange(*each) for each in pairwise(bounds)]
        rows.append(
            torch.cat([
                whole(input_ids=row[each][None], position_ids=each[None], use_cache=False).logits[0]
                for each in documents
            ])
        )  # fmt: skip
    return torch.stack(rows)


def _cut_pieces(tensors: Mapping[str, Tensor], model: ModelShape) -> dict[str, Tensor]:
    """Tensors by our names of parameters, given those by the family's, of which one may hold several of ours."""
    pieces = list_pieces(model)
    joined = {own for own, _ in pieces.values()}
    whole = {name: tensor for name, tensor in tensors.items() if name not in joined}
    return whole | {
        name: weight.piece.cut(tensors[own], slice(0, weight.shape[0]))
        for name, (own, weight) in pieces.items()
        if weight.piece is not None
    }


def compare(model: ModelShape, layout: Layout, expected: Mapping[str, Tensor], starts: Tensor | None = None) -> float:
    """The largest relative difference of this rank's loss and gradients from those of one process, `expected`.

    `starts` are those of `make_starts`, where documents are kept apart.
    """

    def give(modules: Sequence[nn.Module], model: ModelShape, seed: int, device: str) -> None:
        allocate(modules, device)
        with torch.no_grad():
            fill([named for module in modules for named in module.named_parameters()], model)

    assembly = assemble(
        model, _BATCH, layout, Kernels(), _EXACT, seed=_SEED, device_type="cpu", give_weights=give
    )  # fmt: skip
    optimizer = build_optimizer(assembly.modules, model, AdamW(), assembly.disk)
    set_learning_rate(optimizer, 0.0)
    step = TrainStep(assembly.runtime, optimizer, max_norm=1e30, mesh=assembly.mesh, model=model)
    found, least = list[float](), _LEAST_SHARE * max(float(each.norm()) for each in expected.values())

    def note(*_: Any) -> None:
        for module in assembly.modules:
            for name, parameter in module.named_parameters():
                gradient = parameter.grad
                gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
                assert gradient is not None, f"{name} has no gradient"
                found.append(_distance(gradient, expected[model.aliases.get(name, name)], least))

    optimizer.register_step_pre_hook(note)
    rows = _BATCH.global_batch // layout.dp
    first = dp_rank(dist.get_rank(), layout) * rows
    own = None if starts is None else starts[first : first + rows]
    whole = [each[first : first + rows] for each in make_rows(model)]
    tokens, targets = take_own(whole, own, layout, dist.get_rank())
    result = step(tokens, targets, own)
    found.append(_distance(torch.tensor(result.loss, dtype=torch.float64), expected["loss"], least))
    return max(found)


def _distance(ours: Tensor, theirs: Tensor, least: float) -> float:
    """‖a - b‖ / max(‖b‖, least), infinite where it is no number.

    The gradient of a bias of keys is a rounding error, so a norm below `least` says nothing.
    """
    found = float((ours - theirs).norm()) / max(float(theirs.norm()), least)
    return found if math.isfinite(found) else math.inf
