"""The validation loss of weights that are exported, beside that of the same weights in a format of few bits.

One block is in memory at a time: its weights are read once, the hidden states of all samples go through it, then it
gets the values that the quantized file holds, and a second set of hidden states goes through. So a model needs no more
than a block, its embedding or its head, in float32.

Samples, targets and documents are those of the run's validation: its first ones, in its order.

Legend: B samples, S sequence, D model width.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from dtlayout.checkpoint.hf import WeightSource
from dtlayout.checkpoint.quantized_export import dequantize, list_stored_names, read_weight
from dtlayout.config.sections import DataConfig
from dtlayout.data.prepare import prepare_tokens
from dtlayout.data.samples import SampleRows, find_starts, open_samples
from dtlayout.models.llama import Llama
from dtlayout.ops.documents import Documents
from dtlayout.plans.init import allocate
from dtlayout.spec.batch import IGNORED, Batch
from dtlayout.spec.device import Device
from dtlayout.spec.kernel_records import KernelRequest
from dtlayout.spec.kernels import Kernels, OpenKernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape


@dataclass(frozen=True)
class HeldOutSamples:
    """Samples on which losses are measured."""

    rows: SampleRows
    """Tokens and targets, [B, S] each."""
    documents: tuple[Documents, ...]
    """Documents of each sample; empty where documents see each other."""
    source: str
    """Name of the source that they are of."""


@dataclass(frozen=True)
class ExportLosses:
    """Mean losses in nats a token, of the same samples."""

    plain: float
    """Loss of the weights rounded to bfloat16."""
    quantized: float
    """Loss of the weights that the quantized folder holds."""
    num_samples: int
    num_targets: int


def open_held_out_samples(data: DataConfig, model: ModelShape, seq_len: int, num_samples: int) -> HeldOutSamples:
    """The first samples of a source, in the order of validation; fewer where the source has no more.

    DataError if the source cannot be read or holds no sample.
    """
    folders = [prepare_tokens(each) for each in data.sources]
    samples = open_samples(data, folders, model.vocab_size, Batch(global_batch=1, seq_len=seq_len), seed=0)
    count = min(num_samples, samples.num_samples)
    samples = replace(samples, sizes=Batch(global_batch=count, seq_len=seq_len))
    rows = samples.batch(0, range(count))
    starts = find_starts(rows.is_last).split(1) if data.document_mask else ()
    return HeldOutSamples(rows, tuple(Documents.from_starts(each) for each in starts), data.source)


@torch.no_grad()
def measure_losses(source: WeightSource, name: str, held_out: HeldOutSamples, device: Device) -> ExportLosses:
    """Losses of a model before and after its weights are in the format of this name, computed in float32.

    InvalidConfig or CheckpointError if a weight cannot be read.
    """
    kernels = _choose_kernels(source.model, held_out, device)
    targets = held_out.rows.targets
    num_targets = int((targets != IGNORED).sum())
    states = {each: list(held_out.rows.tokens.split(1)) for each in (None, name)}
    for part in _list_parts(source.model, kernels, targets.shape[1]):
        allocate([part], device.type)
        exact = dict(_read_part(part, source))
        for each, inputs in states.items():
            _fill(part, source, exact, each)
            states[each] = list(_forward(part, inputs, held_out, device.type))
    plain, quantized = (sum(float(loss) for loss in losses) / max(1, num_targets) for losses in states.values())
    return ExportLosses(plain, quantized, len(targets), num_targets)


def _choose_kernels(model: ModelShape, held_out: HeldOutSamples, device: Device) -> Kernels:
    """The fastest kernels that compute in float32 on a device, none of them compiled."""
    has_documents = bool(held_out.documents)
    request = KernelRequest.of(device, model, "float32", Layout(), document_mask=has_documents)
    return OpenKernels(compile="none").resolve(request).kernels


def _list_parts(model: ModelShape, kernels: Kernels, seq_len: int) -> Iterator[Llama]:
    """The embedding, each block, and final norm with head, on the meta device."""
    build = partial(Llama, model, kernels, seq_len, dtype=torch.float32)
    with torch.device("meta"):
        embedding, head = build(layers=[], head=False), build(layers=[], embedding=False)
    yield embedding
    for number in range(model.num_layers):
        with torch.device("meta"):
            block = build(layers=[number], embedding=False, head=False)
        yield block
    yield head


def _read_part(part: Llama, source: WeightSource) -> Iterator[tuple[str, Tensor]]:
    """Name of each parameter of a part, and its values in float32."""
    weights = list_stored_names(source.model)
    wanted = {source.model.aliases.get(name, name): name for name, _ in part.named_parameters()}
    for key, weight in weights.items():
        if weight.name in wanted:
            assert key == weight.name, "a model without experts has its own names on disk"
            yield wanted[key], read_weight(source, key, weight, torch.float32)


def _fill(part: Llama, source: WeightSource, exact: Mapping[str, Tensor], name: str | None) -> None:
    """Fill parameters with what a folder holds of their values: in bfloat16, or in the format `name`."""
    weights = list_stored_names(source.model)
    for own, parameter in part.named_parameters():
        weight = weights[source.model.aliases.get(own, own)]
        parameter.copy_(dequantize(source, weight, exact[own], name))


def _forward(part: Llama, inputs: list[Tensor], held_out: HeldOutSamples, device_type: str) -> Iterator[Tensor]:
    """Output of a part for each sample: hidden states [1, S, D], or of the head the summed loss."""
    is_head = part.lm_head is not None
    for number, (x, targets) in enumerate(zip(inputs, held_out.rows.targets.split(1), strict=True)):
        documents = held_out.documents[number] if held_out.documents else None
        yield part(x.to(device_type), documents, targets=targets.to(device_type) if is_head else None)
