"""The table of kernels, to which `register_kernel` adds; docs/reference/kernels.md says how to add one."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from importlib.util import find_spec
from typing import TypeVar

from dtlayout.base.errors import InvalidConfig
from dtlayout.spec.kernel_records import (
    AttentionKernel,
    ExpertsKernel,
    Kernel,
    LossKernel,
    NormKernel,
    Package,
    RopeKernel,
    SwigluKernel,
)
from dtlayout.spec.precision import Format

K = TypeVar("K", bound=Kernel)


def find_kernel(operation: type[K], name: str) -> K:
    """The kernel of an operation that has this name."""
    kernel = KERNELS[operation.operation].get(name)
    assert isinstance(kernel, operation), f"{operation.operation}={name} is resolved and checked before it is looked at"
    return kernel


def list_kernels(operation: type[K]) -> list[K]:
    """All kernels of an operation; for `Kernel` itself, those of every operation."""
    everything = (kernel for known in KERNELS.values() for kernel in known.values())
    return [kernel for kernel in everything if isinstance(kernel, operation)]


def find_packages() -> frozenset[str]:
    """Names of the modules of optional packages that are installed here; nothing is imported."""
    modules = {kernel.package.module for kernel in list_kernels(Kernel) if kernel.package}
    return frozenset(filter(is_installed, modules))


def is_installed(module: str) -> bool:
    """Whether a module is installed here; nothing is imported, the packages that hold it neither.

    A folder of the same name, such as ./wandb of other runs, has no origin and does not count.
    """
    top, *parts = module.split(".")
    spec, name = find_spec(top), top
    for part in parts:
        folders = spec.submodule_search_locations if spec else None
        if not folders:
            return False
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, folders)
    return spec is not None and spec.origin is not None


def register_kernel(kernel: Kernel) -> None:
    """Make a kernel of your own a choice in `[kernels]`; InvalidConfig if its name is taken."""
    if kernel.name in (*KERNELS[kernel.operation], "auto"):
        raise InvalidConfig(f"kernels.{kernel.operation}={kernel.name} is there already; give yours another name")
    KERNELS[kernel.operation][kernel.name] = kernel


@contextmanager
def kernels_replaced(*kernels: Kernel) -> Iterator[None]:
    """A context in which these kernels replace those of their names, or are added where a name is new."""
    before = {operation: dict(known) for operation, known in KERNELS.items()}
    for kernel in kernels:
        KERNELS[kernel.operation][kernel.name] = kernel
    try:
        yield
    finally:
        KERNELS.update(before)


_BF16: tuple[Format, ...] = ("bfloat16",)
_HALVES: tuple[Format, ...] = ("bfloat16", "float16")
_UP_TO_FP32: tuple[Format, ...] = ("float32", *_HALVES)
_AMPERE = 8
_FLASH_OPERATORS = (
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "torch_attn._varlen_attn.default",
)
_FLASH_PARTIAL = "dtlayout.ops.partial:FLASH"
_FLASH_ATTN = Package("flash_attn", "pip install 'dtlayout[flash-attn]'")
_FLASH_ATTN_3 = Package(
    "flash_attn_interface",
    "python setup.py install, in the folder hopper of https://github.com/Dao-AILab/flash-attention",
)
_FLASH_ATTN_4 = Package("flash_attn.cute", "pip install flash-attn-4")
_PLAIN = "it needs no package"
_LIGER = Package("liger_kernel", "pip install 'dtlayout[liger]'")

_KERNELS: tuple[Kernel, ...] = (
    AttentionKernel(
        name="sdpa-math", backend="MATH", traces=(r"^aten::_scaled_dot_product_attention_math$",),
        preference=5, reason="it computes everything", operators=("aten.bmm.default",),
        traffic="softmax_traffic_bytes", saved="score_saved_bytes", copies_exactly=True, keeps_mask=False,
        partial="dtlayout.ops.partial:SCORES",
    ),
    AttentionKernel(
        name="sdpa-efficient", cpu=(), cuda=_UP_TO_FP32, preference=4, reason="the fused one for fp32 and old GPUs",
        backend="EFFICIENT_ATTENTION", traces=(r"\bfmha_cutlassF",),
        operators=("aten._scaled_dot_product_efficient_attention.default",), efficiency="efficient_efficiency",
        repeats_heads=True,
    ),
    AttentionKernel(
        name="sdpa-flash", cuda=_HALVES, oldest=_AMPERE, backend="FLASH_ATTENTION", is_searched=True, offsets=("cuda",),
        preference=3, reason="PyTorch's own flash kernel", widest_head=256,
        traces=(r"^aten::_scaled_dot_product_flash_attention_for_cpu$", r"\bpytorch_flash::flash_fwd"),
        operators=_FLASH_OPERATORS, efficiency="flash2_efficiency", partial=_FLASH_PARTIAL,
    ),
    AttentionKernel(
        name="sdpa-cudnn", cpu=(), cuda=_HALVES, oldest=_AMPERE, backend="CUDNN_ATTENTION", is_repeatable=False,
        preference=2, reason="the fastest of PyTorch's on Hopper and Blackwell", preferred_on=(9, 10), widest_head=128,
        head_multiple=8,
        traces=(r"^cudnn_generated_fort_native_sdpa(?!.*bprop)",),
        operators=("aten._scaled_dot_product_cudnn_attention.default",), efficiency="flash3_efficiency",
    ),
    AttentionKernel(
        name="flash-attn", cpu=(), cuda=_HALVES, oldest=_AMPERE, package=_FLASH_ATTN,
        backend="FLASH_ATTENTION", flash="flash-attn", widest_head=256, offsets=("cuda",),
        traces=(r"\bflash::flash_fwd",), operators=_FLASH_OPERATORS,
        efficiency="flash2_efficiency", partial=_FLASH_PARTIAL,
    ),
    AttentionKernel(
        name="fa3", cpu=(), cuda=_HALVES, capabilities=(9,), package=_FLASH_ATTN_3, backend="FLASH_ATTENTION",
        flash="FA3", preference=1, reason="made for Hopper, and its package is here", widest_head=256,
        offsets=("cuda",), traces=(r"\bflash::FlashAttnFwdSm90\b",), operators=_FLASH_OPERATORS,
        efficiency="flash3_efficiency", partial=_FLASH_PARTIAL,
    ),
    AttentionKernel(
        name="fa4", cpu=(), cuda=_HALVES, capabilities=(9, 10), package=_FLASH_ATTN_4, backend="FLASH_ATTENTION",
        flash="FA4", widest_head=128, offsets=("cuda",), traces=(r"FlashAttentionForwardSm(90|100)",),
        operators=_FLASH_OPERATORS, efficiency="flash3_efficiency", partial=_FLASH_PARTIAL,
    ),
    AttentionKernel(
        name="blockwise", cuda=(), function="dtlayout.ops.blockwise:blockwise_attention", preference=1,
        reason="as fast as a CPU's matmuls", traces=(r"^dtlayout::(blockwise_attention|chunked_part)$",),
        operators=("dtlayout.blockwise_attention.default",), efficiency="efficient_efficiency",
        partial="dtlayout.ops.partial:CHUNKS",
    ),
    AttentionKernel(
        name="flash1", cpu=(), cuda=(), efficiency="flash1_efficiency", saved="flash1_saved_bytes", keeps_mask=False
    ),
    AttentionKernel(
        name="megatron-softmax", cpu=(), cuda=(), traffic="fused_softmax_traffic_bytes",
        saved="fused_score_saved_bytes", keeps_mask=False,
    ),
    AttentionKernel(
        name="torch", cpu=(), cuda=(), traffic="softmax_traffic_bytes", saved="score_saved_bytes", keeps_mask=False
    ),
    NormKernel(name="eager", function="dtlayout.ops.norm:eager_rms_norm", separate=("cpu", "cuda")),
    NormKernel(
        name="fused", function="dtlayout.ops.norm:fused_rms_norm", separate=("cpu",),
        preference=2, reason="one kernel of PyTorch's", keeps_exact=True, traces=(r"^aten::_fused_rms_norm$",),
    ),
    NormKernel(
        name="liger", function="dtlayout.ops.norm:liger_rms_norm", cpu=(), cuda=_UP_TO_FP32, package=_LIGER,
        preference=1, reason="one kernel, and its package is here", is_opaque=True,
        traces=(r"^(_block)?_rms_norm_forward_kernel",),
    ),
    RopeKernel(name="eager", function="dtlayout.ops.rope:eager_rope", is_fused=False, preference=2, reason=_PLAIN),
    RopeKernel(
        name="liger", function="dtlayout.ops.rope:liger_rope", cpu=(), cuda=_UP_TO_FP32, package=_LIGER,
        preference=1, reason="one kernel, and its package is here", is_opaque=True,
        traces=(r"^_triton_rope",),
    ),
    SwigluKernel(
        name="eager", function="dtlayout.ops.mlp:eager_swiglu", num_kept=4, traces=(r"^aten::silu$",), preference=2,
        reason=_PLAIN,
    ),
    SwigluKernel(
        name="liger", function="dtlayout.ops.mlp:liger_swiglu", cpu=(), cuda=_UP_TO_FP32, package=_LIGER,
        preference=1, reason="one kernel, and its package is here", is_opaque=True,
        traces=(r"^_swiglu_forward_kernel",),
    ),
    LossKernel(name="eager", function="dtlayout.ops.loss:eager_loss", in_chunks=False),
    LossKernel(name="chunked", function="dtlayout.ops.loss:chunked_loss", is_searched=True),
    LossKernel(name="linear", function="dtlayout.ops.loss:linear_loss", is_searched=True, joins_matmul=True),
    # The logarithmic softmax, and the gradients of its result and of its input.
    LossKernel(name="torch", cpu=(), cuda=(), in_chunks=False, num_exact=3),
    ExpertsKernel(
        name="grouped", function="dtlayout.ops.grouped:GROUPED", cpu=_UP_TO_FP32, cuda=_BF16, row_bytes=16,
        single_on=(9, 10),  # elsewhere PyTorch copies the ends to the host and loops, pytorch issue 186620
        preference=1, reason="one kernel for all experts", traces=(r"^aten::_grouped_mm$",),
    ),
    ExpertsKernel(
        name="loop", function="dtlayout.ops.grouped:LOOP", preference=2, reason="it computes everything",
        scales=True, traces=(r"^dtlayout::(scaled_)?grouped_mm$",),
    ),
)  # fmt: skip
KERNELS: dict[str, dict[str, Kernel]] = {}
"""Key of `[kernels]` → name → kernel of all that it may name."""
for _each in _KERNELS:
    KERNELS.setdefault(_each.operation, {})[_each.name] = _each
