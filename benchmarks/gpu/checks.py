"""Is it right? Kernels, and steps of the trainer, against float64 on the CPU; errors are ‖a - b‖ / ‖b‖.

The reference of a step is a plain `Llama` over the whole batch at once, with separate operations, no FSDP2, and the
trained model's own weights, rounded to the format that it computes in.

Legend: B batch, H query heads, G key-value heads, S sequence, K head width, D model width, V vocabulary.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks.gpu.cells import OperationCheck, StepCheck, WeightsCheck
from benchmarks.gpu.rows import Checked
from dtlayout.data.samples import find_starts
from dtlayout.measure.kernels import KernelRecorder
from dtlayout.models.llama import Llama
from dtlayout.ops.attention import causal_attention, prepare_mask
from dtlayout.ops.documents import Documents
from dtlayout.ops.grouped import GroupedMatmul, multiply_groups
from dtlayout.ops.loss import Head
from dtlayout.plans.init import initialize
from dtlayout.spec.batch import IGNORED, Batch
from dtlayout.spec.device import Device
from dtlayout.spec.kernel_records import KernelRequest
from dtlayout.spec.kernel_table import KERNELS
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import Experts, ModelShape
from dtlayout.spec.optimizers import AdamW
from dtlayout.training.build import Assembly, assemble
from dtlayout.training.kernels import first_forward
from dtlayout.training.optimizer import build_optimizer
from dtlayout.training.step import TrainStep

LIMITS = {"float64": 1e-10, "float32": 2e-5, "bfloat16": 4e-2}
"""The largest error of a result or a gradient, by the format that is computed in. On a CPU the largest that is seen is
a third of it."""
WEIGHTS_LIMIT = 1e-6
"""Largest error of initial weights in fp32: the device's inverse error function is not the CPU's."""
_LLAMA = ModelShape(
    name="check", hidden_size=256, num_layers=2, num_heads=4, num_kv_heads=2, ffn_size=512, vocab_size=512
)
MODELS = {
    "llama": _LLAMA,
    "tied": replace(_LLAMA, tied_embeddings=True),
    "qwen3": replace(_LLAMA, family="qwen3", qk_norm=True, head_dim=32),
    "mixture": replace(_LLAMA, experts=Experts(number=8, per_token=2, ffn_size=128)),
    "mixture of all": replace(_LLAMA, experts=Experts(number=4, per_token=4, ffn_size=128, shared_ffn_size=128)),
}
"""In bf16 a router chooses other experts for a few tokens than in float64, unless it chooses all."""
BATCH = Batch(global_batch=4, seq_len=128)
LAYOUT = Layout(micro_batch=2)
EXACT = Kernels(attention="sdpa-math", norm="eager", loss="eager")
SEED = 5
_ONE_IN = 16
"""One in so many tokens ends a document."""
Tensors = Mapping[str, Tensor]


def check_step(cell: StepCheck, device: Device) -> Checked:
    """One step, its loss and each gradient."""
    assembly, step = build_step(cell, device)
    weights = gather_parameters(assembly)
    gradients: dict[str, Tensor] = {}

    def keep_gradients(*_: object) -> None:
        for name, parameter in assembly.modules[0].named_parameters():
            gradients[name] = parameter.grad.full_tensor().cpu()  # type: ignore[union-attr]

    step.optimizer.register_step_pre_hook(keep_gradients)
    with first_forward(assembly.runtime, recorder := KernelRecorder()):
        result = step(*make_batch(cell, device.type))
    loss, expected = run_reference(cell, weights)
    found = {"loss": torch.tensor(result.loss), **{f"gradient of {name}": value for name, value in gradients.items()}}
    error, where = largest_error(found, {"loss": loss, **{f"gradient of {name}": g for name, g in expected.items()}})
    return Checked(
        error=error,
        where=where,
        limit=LIMITS[cell.compute],
        ran=describe_ran(recorder),
        problem=find_other_kernels(cell.kernels, recorder.executed, has_experts=MODELS[cell.model].experts is not None),
    )


def gather_parameters(assembly: Assembly) -> dict[str, Tensor]:
    """Copies on the CPU."""
    named = assembly.modules[0].named_parameters()
    return {name: p.detach().full_tensor().cpu().clone() for name, p in named}  # type: ignore[attr-defined]


def build_step(cell: StepCheck, device: Device) -> tuple[Assembly, TrainStep]:
    """The trainer of a step, which clips nothing."""
    shape, layout = MODELS[cell.model], replace(LAYOUT, recompute=cell.recompute, offload=cell.offload)
    cell.kernels.check(KernelRequest(device=device, compute=cell.compute, recompute=cell.recompute))
    layout.check(shape, BATCH)
    assembly = assemble(shape, BATCH, layout, cell.kernels, cell.precision, seed=SEED, device_type=device.type)
    optimizer = build_optimizer(assembly.modules, shape, AdamW())
    return assembly, TrainStep(assembly.runtime, optimizer, max_norm=float("inf"), mesh=assembly.mesh, model=shape)


def make_batch(cell: StepCheck, device_type: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tokens, targets of which some are ignored, and where documents start, as `TrainStep` takes them."""
    generator = torch.Generator().manual_seed(SEED)
    size, vocab_size = (BATCH.global_batch, BATCH.seq_len), MODELS[cell.model].vocab_size
    tokens, targets = (torch.randint(vocab_size, size, generator=generator) for _ in range(2))
    targets[1, : BATCH.seq_len // 3] = IGNORED
    starts = find_starts(tokens % _ONE_IN == 0) if cell.documents else None
    return tokens.to(device_type), targets.to(device_type), starts


def run_reference(cell: StepCheck, weights: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients in float64 on the CPU with these weights, rounded as FSDP2 rounds them."""
    tokens, targets, starts = make_batch(cell, "cpu")
    model = Llama(MODELS[cell.model], EXACT, BATCH.seq_len, dtype=torch.float64)
    rounded = {name: weight.to(getattr(torch, cell.compute)).double() for name, weight in weights.items()}
    model.load_state_dict(rounded, strict=False)  # a tied head is there once
    documents = None if starts is None else Documents.from_starts(starts)
    loss = model(tokens, documents, targets=targets, num_targets=float((targets != IGNORED).sum()))
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}  # type: ignore[misc]


def check_weights(cell: WeightsCheck, device: Device) -> Checked:
    """The model's initial weights as this device and as the CPU computes them."""
    here, there = (Llama(_LLAMA, Kernels(), BATCH.seq_len) for _ in range(2))
    initialize([here], _LLAMA, SEED, device.type)
    initialize([there], _LLAMA, SEED, "cpu")
    found, expected = ({name: p.detach().cpu() for name, p in model.named_parameters()} for model in (here, there))
    error, where = largest_error(found, expected)
    return Checked(error=error, where=where, limit=WEIGHTS_LIMIT)


def check_operation(cell: OperationCheck, device: Device) -> Checked:
    """One kernel's results and the gradients of its inputs, of random ones that its format holds exactly."""
    cell.kernels.check(KernelRequest(device=device, compute=cell.compute))
    dtype, generator = getattr(torch, cell.compute), torch.Generator().manual_seed(SEED)
    make_inputs, exact, run = OPERATIONS[cell.operation]
    inputs = [torch.randn(size, generator=generator).to(dtype) for size in make_inputs]

    def results_of(kernel: str, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
        """Outputs, and the gradients of the inputs for random gradients of the outputs."""
        leaves = [x.requires_grad_() for x in inputs]
        outputs = run(kernel, cell.documents, *leaves)
        generator = torch.Generator().manual_seed(SEED)
        upstream = [torch.randn(x.shape, generator=generator).to(dtype).to(x) for x in outputs]
        gradients = torch.autograd.grad(outputs, leaves, upstream)
        named = [(f"output {i}", x) for i, x in enumerate(outputs)]
        named += [(f"gradient of input {i}", x) for i, x in enumerate(gradients)]
        return {name: x.detach().cpu() for name, x in named}

    found = results_of(cell.kernel, [x.to(device.type) for x in inputs])
    error, where = largest_error(found, results_of(exact, [x.double() for x in inputs]))
    return Checked(error=error, where=where, limit=LIMITS[cell.compute])


def _attend(kernel: str, documents: bool, q_BHSK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor) -> list[Tensor]:
    starts = find_starts(torch.arange(q_BHSK.shape[2]).expand(len(q_BHSK), -1) % 37 == 0)
    mask = prepare_mask(Documents.from_starts(starts), kernel, q_BHSK) if documents else None
    return [causal_attention(q_BHSK, k_BGSK, v_BGSK, kernel, mask)]


def _normalize(kernel: str, documents: bool, x_BSD: Tensor, weight_D: Tensor) -> list[Tensor]:
    return [KERNELS["norm"][kernel].load()(x_BSD, weight_D, 1e-5)]


def _rotate(kernel: str, documents: bool, q_BHSK: Tensor, k_BGSK: Tensor) -> list[Tensor]:
    seq_len, width = q_BHSK.shape[2:]
    angles = torch.outer(torch.arange(seq_len), 100.0 ** -torch.linspace(0, 1, width // 2).double()).repeat(1, 2)
    exact = torch.promote_types(q_BHSK.dtype, torch.float32)
    cos, sin = (table.to(q_BHSK.device, exact) for table in (angles.cos(), angles.sin()))
    return list(KERNELS["rope"][kernel].load()(q_BHSK, k_BGSK, cos, sin))


def _gate(kernel: str, documents: bool, gate: Tensor, up: Tensor) -> list[Tensor]:
    # Copies, since one of them writes its gradients over its inputs.
    return [KERNELS["swiglu"][kernel].load()(gate.clone(), up.clone())]


def _compare_with_targets(kernel: str, documents: bool, h_TD: Tensor, weight_VD: Tensor) -> list[Tensor]:
    head = Head(h_TD.shape[1], len(weight_VD), kernel, h_TD.dtype)
    targets = torch.arange(len(h_TD), device=h_TD.device) % len(weight_VD)
    targets[::5] = IGNORED
    return [KERNELS["loss"][kernel].load()(h_TD, weight_VD, targets, head, 1 / len(targets))]


def _multiply_groups(kernel: str, documents: bool, x_RD: Tensor, weight_END: Tensor, scores_R: Tensor) -> list[Tensor]:
    ends = torch.tensor([100, 100, 613, 2000], dtype=torch.int32, device=x_RD.device)  # the second has no rows
    exact = torch.promote_types(scores_R.dtype, torch.float32)
    matmul = cast(GroupedMatmul, KERNELS["experts"][kernel].load())
    return [multiply_groups(x_RD, weight_END, ends, matmul, scores_R.to(exact))]


_HEADS = (2, 8, 256, 128), (2, 2, 256, 128)
OPERATIONS: dict[str, tuple[Sequence[tuple[int, ...]], str, Callable[..., list[Tensor]]]] = {
    "attention": ((_HEADS[0], _HEADS[1], _HEADS[1]), "sdpa-math", _attend),
    "norm": (((4, 128, 512), (512,)), "eager", _normalize),
    "rope": (_HEADS, "eager", _rotate),
    "swiglu": (((4, 128, 512), (4, 128, 512)), "eager", _gate),
    "loss": (((2048, 128), (1024, 128)), "eager", _compare_with_targets),
    "experts": (((2000, 256), (4, 512, 256), (2000,)), "loop", _multiply_groups),
}
"""Operation → sizes of its inputs, the kernel that computes the reference, and a call of it."""


def largest_error(found: Tensors, expected: Tensors) -> tuple[float, str]:
    """The largest ‖a - b‖ / ‖b‖ and whose it is; what is not finite counts as infinitely wrong."""
    assert found.keys() == expected.keys(), f"{found.keys() ^ expected.keys()} is on one side alone"
    return max(((_error(found[name], expected[name]), name) for name in expected), key=itemgetter(0))


def _error(found: Tensor, expected: Tensor) -> float:
    error = float((found.double() - expected.double()).norm() / expected.double().norm())
    return error if error < float("inf") else float("inf")  # not so where it is not a number


def describe_ran(recorder: KernelRecorder) -> tuple[str, ...]:
    """Operations and their kernels that ran."""
    return tuple(f"{operation} {' '.join(names)}" for operation, names in recorder.executed.items() if names)


def find_other_kernels(asked: Kernels, executed: Mapping[str, Iterable[str]], *, has_experts: bool) -> str:
    """Problem with a profile that does not show each kernel that has a name there, or shows others of its operation.

    Compiled code melts most of them together; what remains must be what was asked for.
    """
    problems = []
    for kernel in asked.records:
        if kernel.operation == "experts" and not has_experts:
            continue
        ran, name = set(executed.get(kernel.operation, ())), kernel.name.removeprefix("sdpa-")
        wanted = {name} if kernel.traces else set()
        if ran - wanted or (wanted - ran and asked.compile == "none"):
            problems.append(f"{kernel.operation}={kernel.name}, but {' '.join(sorted(ran)) or 'none with a name'} ran")
    return "; ".join(problems)


MEASURES: dict[type[Any], Callable[[Any, Device], Checked]] = {
    StepCheck: check_step,
    OperationCheck: check_operation,
    WeightsCheck: check_weights,
}
