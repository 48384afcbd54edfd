"""Suites: groups of cells, in the order in which they run, the most valuable first.

Legend: T tokens, D model width, F FFN, V vocabulary.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Literal, get_args

from benchmarks.gpu.cells import (
    BASE,
    AttentionCall,
    Calibration,
    Ceiling,
    Cell,
    Check,
    Compared,
    Copy,
    Direction,
    HostTime,
    Matmul,
    Offload,
    OperationCheck,
    RepeatCheck,
    ResumeCheck,
    Saving,
    StepCheck,
    TrainerCheck,
    Training,
    WeightsCheck,
)
from dtlayout.models.presets import find_preset
from dtlayout.spec.device import DeviceType
from dtlayout.spec.kernel_records import AttentionKernel, ExpertsKernel
from dtlayout.spec.kernel_table import KERNELS, list_kernels
from dtlayout.spec.kernels import Compile, CompileMode
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.precision import Format

_CHECKED: tuple[Format, ...] = ("bfloat16", "float32")


@dataclass(frozen=True, kw_only=True)
class Suite:
    """All that a kind of device is asked."""

    device_type: Literal["cuda", "cpu"]
    groups: Mapping[str, Sequence[Cell]]
    """Name → its cells, groups and cells in the order in which they run; a cell may belong to several."""
    savings: Sequence[Saving] = ()
    """Pairs of its cells that the end of the report compares."""
    num_steps: int = 3
    """Timed steps of a training cell."""
    cell_limit_s: float = 150
    """After it a cell counts as hung."""

    def cells(self, only: Iterable[str]) -> list[Cell]:
        """Cells of some groups, each once, in the order in which they run."""
        return list(dict.fromkeys(chain.from_iterable(self.groups[name] for name in self.groups if name in only)))


def checks(device_type: DeviceType, compiles: Sequence[Compile]) -> Iterator[Check]:
    """Steps with each kernel, recomputation and format that such a device has, then operations alone, then bits.

    A CPU, whose steps take seconds and are tested elsewhere, has one of each kind.
    """
    is_short = device_type == "cpu"
    yield StepCheck()
    attention = [kernel for kernel in list_kernels(AttentionKernel) if kernel.formats(device_type)]
    for kernel, compute, documents in product(attention, _CHECKED, (False, True)):
        if compute in kernel.formats(device_type) and not (is_short and documents and compute == "float32"):
            yield StepCheck(kernels=replace(BASE, attention=kernel.name), compute=compute, documents=documents)
    yield from (StepCheck(kernels=kernels) for kernels in (replace(BASE, norm="eager"), replace(BASE, loss="eager")))
    yield StepCheck(kernels=replace(BASE, loss="linear"))
    for recompute in ("selective",) if is_short else ("selective", "full", "keep-attention", "keep-matmuls"):
        yield StepCheck(recompute=recompute)
    offloads: Sequence[Offload] = ("both",) if is_short else ("activations", "optimizer", "both")
    yield from (StepCheck(offload=offload) for offload in offloads)
    yield StepCheck(recompute="selective", offload="activations")
    for compile in compiles:
        yield StepCheck(kernels=replace(BASE, compile=compile))
    if device_type == "cuda":  # each takes a CPU ten seconds
        compiled = StepCheck(kernels=replace(BASE, compile="blocks"))
        yield replace(compiled, documents=True)
        yield from (replace(compiled, recompute=recompute) for recompute in ("selective", "full"))
    yield from (StepCheck(model="tied"), StepCheck(model="qwen3"), WeightsCheck())
    for operation in get_args(Compared):
        for known, compute in product(KERNELS[operation].values(), _CHECKED):
            for documents in (False, True) if operation == "attention" else (False,):
                if compute in known.formats(device_type):
                    yield OperationCheck(operation=operation, kernel=known.name, compute=compute, documents=documents)
    bits = StepCheck(), StepCheck(documents=True), StepCheck(recompute="selective")
    yield from (RepeatCheck(step=step) for step in bits)
    yield from (ResumeCheck(step=bits[0]), TrainerCheck())
    yield from checks_of_experts(device_type)


def checks_of_experts(device_type: DeviceType) -> Iterator[Check]:
    """Steps of mixtures with each kernel of the experts and recomputation, and the same bits twice."""
    for kernel, compute in product(list_kernels(ExpertsKernel), _CHECKED):
        if compute in kernel.formats(device_type):
            kernels = replace(BASE, experts=kernel.name, attention="sdpa-math")
            chosen: Literal["mixture", "mixture of all"] = "mixture" if compute == "float32" else "mixture of all"
            yield StepCheck(model=chosen, kernels=kernels, compute=compute)
    of_all = StepCheck(model="mixture of all", kernels=replace(BASE, experts="grouped"))
    if device_type == "cuda":
        yield from (replace(of_all, recompute=recompute) for recompute in ("selective", "full"))
        yield replace(of_all, kernels=replace(of_all.kernels, compile="blocks"))
        yield from (RepeatCheck(step=replace(of_all, model="mixture", recompute=each)) for each in ("none", "full"))


def vary(base: Training, factors: Mapping[str, Sequence[str]]) -> Iterator[Training]:
    """The base, then one change of one kernel after the other."""
    yield base
    for factor, choices in factors.items():
        for choice in choices:
            yield replace(base, kernels=replace(base.kernels, **{factor: choice}))  # type: ignore[arg-type]


def cross(bases: Sequence[Training], compiles: Sequence[Compile], attention: Sequence[str]) -> Iterator[Training]:
    """Each attention kernel with compiled blocks and without, of all bases one after the other."""
    for kernel, compile, base in product(attention, compiles, bases):
        yield replace(base, kernels=replace(base.kernels, attention=kernel, compile=compile))


def savings_of_memory(base: Training) -> list[Saving]:
    """Passes over memory that a step of blocks does without, compiled or not, the one that is worth most first."""
    return [
        Saving(item=1, what="matmuls add to the sum", with_it=base, without=replace(base, adds_in_matmuls=False)),
        Saving(item=4, what="clipping in the update", with_it=base, without=replace(base, clips_in_update=False)),
        Saving(item=2, what="moments in bf16", with_it=replace(base, state_format="bfloat16"), without=base),
    ]


def savings(base: Training) -> list[Saving]:
    """Savings of a step of blocks that can be left out one at a time; those of compiled blocks come last."""
    compiled = replace(base, kernels=replace(base.kernels, compile="blocks"))

    def in_mode(mode: CompileMode) -> Training:
        # Beside CUDA graphs no matmul adds to a sum, so that the graphs' own worth is seen without that too.
        return replace(compiled, kernels=replace(compiled.kernels, compile_mode=mode), adds_in_matmuls=False)

    plain, tuned = in_mode("default"), in_mode("max-autotune-no-cudagraphs")
    return [
        *savings_of_memory(compiled),
        Saving(item=3, what="blocks are compiled", with_it=compiled, without=base),
        Saving(item=8, what="CUDA graphs", with_it=in_mode("reduce-overhead"), without=plain),
        Saving(item=7, what="max-autotune", with_it=tuned, without=plain),
    ]


def list_cells(found: Iterable[Saving]) -> list[Training]:
    """Cells of savings: both of a pair beside each other, so that the GPU is as warm for one as for the other."""
    return list(dict.fromkeys(cell for each in found for cell in (each.without, each.with_it)))


def sweep(base: Training, micro_batches: Sequence[int]) -> Iterator[Training]:
    """Micro-batch over recomputation; what keeps one kind of operation alone, at the first micro-batch."""
    for recompute, micro_batch in product(("none", "selective", "full"), micro_batches):
        yield replace(base, recompute=recompute, micro_batch=micro_batch)
    for recompute in ("keep-attention", "keep-matmuls"):
        yield replace(base, recompute=recompute, micro_batch=micro_batches[0])


def block_matmuls(model: ModelShape, num_tokens: int) -> Iterator[Matmul]:
    """The matmuls of a block and the head, forward; q, k and v as one."""
    width, kv_width = model.hidden_size, model.kv_width
    sizes = {  # name: n, k
        "qkv": (width + 2 * kv_width, width),
        "o": (width, width),
        "gate": (model.ffn_size, width),
        "down": (width, model.ffn_size),
        "head": (model.vocab_size, width),
    }
    for name, (n, k) in sizes.items():
        yield Matmul(label=f"{model.name} {name}", m=num_tokens, n=n, k=k)


def ceilings(
    models: Sequence[str],
    num_tokens: Sequence[int],
    squares: Sequence[int],
    copies: Sequence[int],
    attention: Sequence[str],
    kernels: Sequence[str],
) -> Iterator[Ceiling]:
    """Matmuls of `models` and squares, copies, and attention with the heads of the models that `attention` names."""
    for size in squares:
        yield Matmul(label="square", m=size, n=size, k=size)
    for num_bytes in copies:
        yield Copy(num_bytes=num_bytes)
    for model, seq_len, kernel, direction in product(attention, num_tokens, kernels, get_args(Direction)):
        yield AttentionCall(model=model, seq_len=seq_len, kernel=kernel, direction=direction)
    for model, tokens in product(models, num_tokens):
        yield from block_matmuls(find_preset(model), tokens)


# All fit into the 80 GB of an H100 by our own prediction; 65,536 tokens a step, so that the update is little of it.
_8B_BLOCKS = Training(model="llama3.1-8b", num_blocks=8, seq_len=4096, global_batch=16, micro_batch=1)
_8B_BLOCKS_8192 = Training(model="llama3.1-8b", num_blocks=6, seq_len=8192, global_batch=8, micro_batch=1)
_3B_BLOCKS = Training(model="llama3.2-3b", num_blocks=14, seq_len=4096, global_batch=16, micro_batch=1)
_3B_BLOCKS_8192 = Training(model="llama3.2-3b", num_blocks=10, seq_len=8192, global_batch=8, micro_batch=1)
_65B_BLOCKS = Training(model="llama-65b", num_blocks=2, seq_len=4096, global_batch=8, micro_batch=1)
_1B = Training(model="llama3.2-1b", seq_len=4096, global_batch=8, micro_batch=2)
_3B = Training(model="llama3.2-3b", seq_len=4096, global_batch=8, micro_batch=1)
_7B = Training(model="llama2-7b", seq_len=4096, global_batch=8, micro_batch=1)
"""The largest that an H200 trains whole without recomputation, by our own prediction."""
_30B_EXPERTS = Training(
    model="qwen3-30b-a3b", num_blocks=3, seq_len=4096, global_batch=8, micro_batch=1,
    kernels=replace(BASE, experts="grouped"),
)  # fmt: skip
_MIXTRAL = replace(_30B_EXPERTS, model="mixtral-8x7b", num_blocks=2)
_FLASH = ("sdpa-flash", "sdpa-cudnn", "fa3")

GPU = Suite(
    device_type="cuda",
    savings=savings(_8B_BLOCKS),
    groups={
        "checks": list(checks("cuda", ("blocks", "loss", "model"))),
        "savings": list_cells(savings(_8B_BLOCKS)),
        "experts": [
            *cross([_30B_EXPERTS, _MIXTRAL], compiles=("none", "blocks"), attention=_FLASH[:1]),
            *(replace(base, recompute="full") for base in (_30B_EXPERTS, _MIXTRAL)),
            replace(_30B_EXPERTS, kernels=replace(_30B_EXPERTS.kernels, experts="loop")),
        ],
        "memory": [
            replace(base, recompute=recompute)
            for base in (_1B, replace(_8B_BLOCKS, global_batch=4))
            for recompute in ("none", "selective", "full")
        ]
        + [replace(_1B, offload="activations")],
        "blocks": [
            *cross(
                [_8B_BLOCKS, _3B_BLOCKS, _8B_BLOCKS_8192, _3B_BLOCKS_8192],
                compiles=("none", "blocks"),
                attention=_FLASH,
            ),
            *cross([_65B_BLOCKS], compiles=("none", "blocks"), attention=_FLASH[:1]),
        ],
        "models": [
            *cross([_7B], compiles=("blocks", "model"), attention=("sdpa-cudnn",)),
            *cross([_1B, _3B], compiles=("none", "blocks"), attention=_FLASH),
            *cross([_1B], compiles=("loss", "model"), attention=("sdpa-cudnn",)),
            *cross([replace(_7B, recompute="full", micro_batch=4)], compiles=("blocks",), attention=("sdpa-cudnn",)),
        ],
        "host": [*(HostTime(tp=tp) for tp in (1, 8)), *(HostTime(tp=tp, compile="blocks") for tp in (1, 8))],
        "constants": [Calibration()],
        "ceilings": list(
            ceilings(
                models=("llama3.1-8b", "llama3.2-3b", "llama3.2-1b", "llama-65b"),
                num_tokens=(4096, 8192),
                squares=(4096, 8192, 16_384),
                copies=(256 << 20, 4 << 30),
                attention=("llama3.1-8b", "llama3.2-1b"),  # heads of 128 and of 64
                kernels=("sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "fa3"),
            )
        ),
        "kernels": [
            *vary(
                _8B_BLOCKS,
                {
                    "attention": ("sdpa-efficient", "sdpa-math"),
                    "norm": ("eager", "liger"),
                    "rope": ("liger",),
                    "swiglu": ("liger",),
                },
            ),
            *vary(_1B, {"loss": ("linear", "eager"), "norm": ("eager",)}),
        ],
        "sweep": [*sweep(_1B, (1, 2, 4)), replace(_1B, offload="optimizer")],
    },
)

_DEBUG = Training(model="debug", seq_len=32, global_batch=2, micro_batch=1)
_DEBUG_BLOCKS = replace(_DEBUG, num_blocks=2, seq_len=64)

CPU = Suite(
    device_type="cpu",
    savings=savings_of_memory(_DEBUG_BLOCKS),
    num_steps=2,
    groups={
        "checks": list(checks("cpu", ("blocks",))),
        "savings": list_cells(savings_of_memory(_DEBUG_BLOCKS)),
        "memory": [replace(_DEBUG, recompute="full"), replace(_DEBUG, offload="activations")],
        "blocks": list(cross([_DEBUG_BLOCKS], compiles=("none",), attention=("sdpa-flash", "sdpa-cudnn", "fa3"))),
        "models": [_DEBUG],
        "host": [HostTime(tp=1), HostTime(tp=8)],
        "constants": [Calibration()],
        "ceilings": list(
            ceilings(
                ["debug"], [64], squares=[128], copies=[1 << 20], attention=["debug"], kernels=["sdpa-flash", "fa3"]
            )
        ),
        "kernels": list(vary(_DEBUG, {"loss": ("linear", "eager"), "attention": ("sdpa-math",), "norm": ("eager",)})),
        "sweep": list(sweep(_DEBUG, (1,))),
    },
)
"""The suite with small sizes, which a CPU does in two minutes."""
