"""Kernel: one record for each choice of `[kernels]`, and the table of them, to which `register_kernel` adds.

A record is all that checks, predictions, dry runs and the trainer know of a kernel. No torch: `Kernel.load` imports the
function of a kernel when a model is built. docs/reference/kernels.md says how to add one.

Legend: B batch, H query heads, G key-value heads, S sequence, K head width, T tokens, D model width, V vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, ClassVar, Literal, TypeVar

from typing_extensions import Self

from dtlayout.base.errors import InvalidConfig
from dtlayout.spec.device import Device, DeviceType
from dtlayout.spec.layout_keys import LayoutKeys
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.precision import Format

EVERY_FORMAT: tuple[Format, ...] = ("float64", "float32", "bfloat16")


@dataclass(frozen=True)
class Package:
    """A package that is installed by choice."""

    module: str
    """Name of the module that is imported."""
    install: str
    """Command that installs it."""


@dataclass(frozen=True, kw_only=True)
class KernelRequest:
    """Everything about a run that decides which kernels can run it, and which of them auto takes.

    Where a fact about the device is not known, auto takes no kernel that needs it, and no kernel is refused for it.
    """

    device: Device
    compute: Format
    """Number format of forward and backward."""
    head_width: int = 0
    """Width of an attention head, by which auto chooses; 0 where there is no auto."""
    tp: int = 1
    """Degree of tensor parallelism."""
    recompute: str = "none"
    """Kind of recomputation, as in `Layout.recompute`."""
    deterministic: bool = False
    """Whether each step has to give the same bits again."""
    document_mask: bool = False
    """Whether packed documents do not see each other."""
    in_parts: bool = False
    """Whether attention is joined from parts, `Layout.attends_in_parts`."""
    splits_backward: bool = False
    """Whether gradients of weights come apart from those of inputs, `Layout.splits_backward`."""
    offloads_activations: bool = False
    """Whether what blocks keep lies on the host, `Layout.offloads_activations`."""

    @classmethod
    def of(
        cls,
        device: Device,
        model: ModelShape,
        compute: Format,
        layout: LayoutKeys,
        *,
        document_mask: bool,
        deterministic: bool = False,
    ) -> Self:
        """Everything that a model in a layout asks of kernels on a device."""
        return cls(
            device=device,
            compute=compute,
            head_width=model.head_width,
            tp=layout.tp,
            recompute=layout.recompute,
            deterministic=deterministic,
            document_mask=document_mask,
            in_parts=layout.attends_in_parts,
            splits_backward=layout.splits_backward,
            offloads_activations=layout.offloads_activations,
        )


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One implementation of an operation."""

    operation: ClassVar[str]
    """The key of `[kernels]`."""
    name: str
    """The value of that key."""
    cpu: tuple[Format, ...] = EVERY_FORMAT
    """Number formats in which it computes on a CPU; empty if it does not run there."""
    cuda: tuple[Format, ...] = EVERY_FORMAT
    """Number formats in which it computes on CUDA. A kernel with no format on any device can only be predicted."""
    capability: int | None = None
    """First number of the compute capability of the GPUs on which it runs; None for all GPUs."""
    package: Package | None = None
    """Package that the kernel needs beside torch."""
    function: str | Callable[..., Any] = ""
    """Function that computes it, or "module:name" of one; the class of the operation says its arguments."""
    is_searched: bool = False
    """Whether a search compares it with other kernels, unless the user fixes one."""
    is_repeatable: bool = True
    """Whether it gives the same bits each time on CUDA, at least where torch is told to be deterministic."""
    preference: int = 0
    """Place among the kernels that auto may take, from 1 on; the first that will do is taken. 0: it is never taken."""
    reason: str = ""
    """Reason why auto takes it, for a run's log."""
    is_opaque: bool = False
    """Whether torch.compile cannot look into it; a compiled block fuses it with nothing."""
    traces: tuple[str, ...] = ()
    """Patterns of the names that torch's profiler gives its forward; empty if no name is the kernel's alone."""

    def formats(self, device_type: str = "auto") -> tuple[Format, ...]:
        """Number formats in which it computes on such a device; for auto, those on any device."""
        if device_type == "auto":
            return tuple(dict.fromkeys((*self.cpu, *self.cuda)))
        return self.cpu if device_type == "cpu" else self.cuda

    def suits(self, device: Device, compute: Format) -> bool:
        """Whether it runs on a device in a format, as far as the device is known; its package may be missing."""
        return compute in self.formats(device.type) and not self.is_for_others(device)

    def is_for_others(self, device: Device) -> bool:
        """Whether it is made for another generation of GPUs than that of the device, if this is known."""
        return bool(device.capability) and self.capability not in (None, device.capability[0])

    def is_missing(self, device: Device) -> bool:
        """Whether its package is known to be missing on the device."""
        return self.package is not None and device.packages is not None and self.package.module not in device.packages

    def will_do(self, request: KernelRequest) -> bool:
        """Whether auto may take it: it surely runs on the device, and fulfils the request."""
        device = request.device
        known = replace(device, capability=device.capability or (0, 0), packages=device.packages or frozenset())
        formats = {*self.cpu} & {*self.cuda} if known.type == "auto" else self.formats(known.type)
        runs = request.compute in formats and not self.is_for_others(known) and not self.is_missing(known)
        repeats = self.is_repeatable or not request.deterministic or known.type == "cpu"
        return self.preference > 0 and runs and repeats

    def load(self) -> Callable[..., Any]:
        """The function that computes it, imported."""
        import pkgutil  # only now: what predicts and checks loads none

        return pkgutil.resolve_name(self.function) if isinstance(self.function, str) else self.function


@dataclass(frozen=True, kw_only=True)
class AttentionKernel(Kernel):
    """Causal attention: q [B, H, S, K], k and v [B, G, S, K] and a mask or None → [B, H, S, K].

    With packed documents the mask is added to the scores, [B, 1, S, S], and holds causality too, or it is what
    `offsets` says.
    """

    operation = "attention"
    backend: str = ""
    """Member of torch's SDPBackend that computes it; empty if `function` does."""
    flash: str = ""
    """Flash implementation that torch has to use while this kernel runs; empty for torch's own."""
    offsets: tuple[DeviceType, ...] = ()
    """Devices on which packed documents come as offsets, [N + 1] into the row of all tokens, and not as a mask."""
    partial: str = ""
    """Place, "module:name", of a `Partial` of ops/partial.py. It attends to a part of the keys, and also returns the
    log-sum-exp of the scores. Without one, cp can only split the heads."""
    operators: tuple[str, ...] = ()
    """Operators whose results selective recomputation keeps."""
    efficiency: str = ""
    """Name of the constant of the cost model (`Constants`) for the share of the peak that it reaches. Without one, the
    kernel holds scores, and counts as matmuls and passes over the scores."""
    traffic: str = ""
    """Name of the constant for the bytes that it moves for each score in forward."""
    saved: str = ""
    """Name of the constant for the bytes that it keeps beside q, k, v and its output: bytes for each score if it holds
    scores; else for each token and unit of width, beside a number for each row of scores."""
    copies_exactly: bool = False
    """Whether it keeps q, k, v and its scores in fp32 or finer, with keys and values for every query head."""
    widest_head: int | None = None
    """Width of the widest head that it computes on CUDA; None for any width."""
    head_multiple: int = 1
    """Number of which the width of a head must be a multiple on CUDA."""
    preferred_on: int | None = None
    """First number of the compute capability of the GPUs on which auto may take it; None for all that it runs on."""
    repeats_heads: bool = False
    """Whether keys and values are repeated for every query head before it gets them."""
    keeps_mask: bool = True
    """Whether its backward reads the mask."""

    def __post_init__(self) -> None:
        if bool(self.efficiency) == bool(self.traffic):
            raise InvalidConfig(
                f"kernels.attention={self.name} needs one constant that prices it; "
                f"name efficiency, or traffic where it holds scores"
            )

    @property
    def holds_scores(self) -> bool:
        """Whether it holds the S² scores of each head in memory."""
        return not self.efficiency

    def will_do(self, request: KernelRequest) -> bool:
        """Whether auto may take it: it also computes heads of this width, and is known to be fast on this GPU."""
        width, on_cpu = request.head_width, request.device.type == "cpu"
        fits = on_cpu or (width <= (self.widest_head or width) and width % self.head_multiple == 0)
        is_fast = self.preferred_on is None or request.device.capability[:1] == (self.preferred_on,)
        joins = not request.in_parts or bool(self.partial)
        return super().will_do(request) and fits and is_fast and joins

    def needs_mask(self, device_type: str) -> bool:
        """Whether it keeps packed documents apart by a mask of S² numbers for each sample, and not by offsets."""
        return device_type not in self.offsets


@dataclass(frozen=True, kw_only=True)
class NormKernel(Kernel):
    """RMSNorm: x [..., D], its weight [D] and eps → [..., D]; on CUDA it may be computed with x a shard of S."""

    operation = "norm"
    separate: tuple[DeviceType, ...] = ()
    """Devices on which it is several operations, each of which writes its result to memory."""
    keeps_exact: bool = False
    """Whether it keeps input · scale in fp32 or finer, where it is separate operations."""

    @property
    def is_eager(self) -> bool:
        """Whether it is several operations on CUDA too; the cost model has constants for that."""
        return "cuda" in self.separate


@dataclass(frozen=True, kw_only=True)
class RopeKernel(Kernel):
    """Rotary embedding: q [B, H, S, K], k [B, G, S, K] and tables cos and sin of S or more positions → both rotated."""

    operation = "rope"
    is_fused: bool = True
    """Whether it reads and writes its tensors once."""


@dataclass(frozen=True, kw_only=True)
class SwigluKernel(Kernel):
    """silu(gate) · up: two tensors of the FFN's width → one."""

    operation = "swiglu"
    num_kept: Literal[3, 4] = 3
    """Number of tensors that it keeps for backward: gate, up and the product; and silu(gate), unless backward computes
    it again."""


@dataclass(frozen=True, kw_only=True)
class LossKernel(Kernel):
    """Head and cross-entropy: hidden states [T, D], weight [V, D], targets [T], the `Head` and the scale → a scalar."""

    operation = "loss"
    in_chunks: bool = True
    """Whether the softmax in the exact format is in memory for one chunk of tokens at a time."""
    num_exact: int = 1
    """Number of tensors in the exact format, as large as the logits of a chunk, that are in memory at once. 1: the
    gradient takes the place of the softmax."""
    joins_matmul: bool = False
    """Whether the logits too are in memory for one chunk at a time. The gradients of hidden states and weight are then
    computed in forward."""


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
    """Whether a module is installed here. Only the packages that hold it are imported.

    A folder of the same name, such as ./wandb of other runs, has no origin and does not count.
    """
    try:
        spec = find_spec(module)
    except ImportError:  # the package that a part of it would be in is not here
        return False
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
_UP_TO_FP32: tuple[Format, ...] = ("float32", "bfloat16")
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
        name="sdpa-efficient", cpu=(), cuda=_UP_TO_FP32, preference=4, reason="the fused one that computes in fp32",
        backend="EFFICIENT_ATTENTION", traces=(r"\bfmha_cutlassF",),
        operators=("aten._scaled_dot_product_efficient_attention.default",), efficiency="efficient_efficiency",
        repeats_heads=True,
    ),
    AttentionKernel(
        name="sdpa-flash", cuda=_BF16, backend="FLASH_ATTENTION", is_searched=True, offsets=("cuda",),
        preference=3, reason="PyTorch's own flash kernel", widest_head=256,
        traces=(r"^aten::_scaled_dot_product_flash_attention_for_cpu$", r"\bpytorch_flash::flash_fwd"),
        operators=_FLASH_OPERATORS, efficiency="flash2_efficiency", partial=_FLASH_PARTIAL,
    ),
    AttentionKernel(
        name="sdpa-cudnn", cpu=(), cuda=_BF16, backend="CUDNN_ATTENTION", is_repeatable=False,
        preference=2, reason="the fastest of PyTorch's on Hopper", preferred_on=9, widest_head=128, head_multiple=8,
        traces=(r"^cudnn_generated_fort_native_sdpa(?!.*bprop)",),
        operators=("aten._scaled_dot_product_cudnn_attention.default",), efficiency="flash3_efficiency",
    ),
    AttentionKernel(
        name="flash-attn", cpu=(), cuda=_BF16, package=_FLASH_ATTN, backend="FLASH_ATTENTION", flash="flash-attn",
        widest_head=256, offsets=("cuda",), traces=(r"\bflash::flash_fwd",), operators=_FLASH_OPERATORS,
        efficiency="flash2_efficiency", partial=_FLASH_PARTIAL,
    ),
    AttentionKernel(
        name="fa3", cpu=(), cuda=_BF16, capability=9, package=_FLASH_ATTN_3, backend="FLASH_ATTENTION", flash="FA3",
        preference=1, reason="made for Hopper, and its package is here", widest_head=256, offsets=("cuda",),
        traces=(r"\bflash::FlashAttnFwdSm90\b",), operators=_FLASH_OPERATORS,
        efficiency="flash3_efficiency", partial=_FLASH_PARTIAL,
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
)  # fmt: skip
KERNELS: dict[str, dict[str, Kernel]] = {}
"""Key of `[kernels]` → name → kernel of all that it may name."""
for _each in _KERNELS:
    KERNELS.setdefault(_each.operation, {})[_each.name] = _each
