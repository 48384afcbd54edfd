"""Activations in the host's memory: tensors that a block keeps for its backward go there, and return one block ahead.

While a block runs in forward, the tensors that the block before has kept are copied to the host. At the end of the
block the device frees them. While a block runs in backward, the block that follows in backward gets its tensors back.
So the device holds the tensors of two blocks, whatever the depth and the number of microbatches in flight. If the
backward of a block is the next thing that the rank does, its tensors never leave. Where blocks are recomputed, the
tensors are their inputs, and the results that are kept besides.

[Note: what is not copied]
Four things stay on the device. Parameters, which FSDP2 frees and gathers again, and buffers. Tensors that several
blocks read: RoPE's tables, the mask of documents. The input of a stage's first block that came from another rank, which
the runtime holds for its gradient. And storages smaller than a page of CUDA's allocator, such as a random seed. Each
storage is copied once and whole, however many tensors use it.

[Note: order on a GPU]
Copies run on two streams of their own, one in each direction of the link. A copy to the host begins when a block's
forward is over, when none of its tensors waits for a collective. A copy back begins where the compute stream stands,
since its memory comes from there. The compute stream waits for a copy before the memory of the copied tensor is used
again, and before a returned tensor is read. The host waits for nothing.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map

from dtlayout.measure.storages import each_local_tensor, each_tensor
from dtlayout.ops.offload import copy_to_host
from dtlayout.plans.collectives import name_operator

LEAST_BYTES = 512
"""Smallest block of memory that CUDA's allocator gives out."""
ModuleForward = Callable[..., Any]


class OffloadPass(NamedTuple):
    """A forward or a backward of a stage for one microbatch."""

    is_forward: bool
    stage: int
    microbatch: int


class ActivationOffloader:
    """Copies the tensors that the blocks of all stages of a rank keep for their backward to the host and back."""

    def __init__(self, device_type: str):
        """`device_type` is the type of the device that computes."""
        self.device_type = device_type
        self.to_host_stream, self.to_device_stream = (
            torch.cuda.Stream() if device_type == "cuda" else None for _ in range(2)
        )
        self._ends: dict[tuple[int, int], _Block] = {}
        """(stage, microbatch) → its last block, as long as its backward has not begun."""
        self._work: OffloadPass | None = None
        self._following: OffloadPass | None = None
        self._last: _Block | None = None
        self._copied: _Block | None = None
        """The block that is being copied to the host, and whose tensors the device still holds."""
        self.current: _Block | None = None
        """The block whose forward runs."""

    def before_work(self, work: tuple[bool, int, int], following: tuple[bool, int, int] | None) -> None:
        """Call before each pass of the rank, with it and the next one: notes both, and frees copied tensors."""
        self._work, self._following = OffloadPass(*work), None if following is None else OffloadPass(*following)
        self._free_device_copy(waited=True)
        if not self._work.is_forward:
            self._ends.pop(self._work[1:], None)

    def wrap(self, forward: ModuleForward, block: nn.Module, *, is_first: bool, is_last: bool) -> ModuleForward:
        """Wrap the forward of a block, which may be its stage's first or last.

        The block takes the residual stream first, and returns it, or a tuple that begins with it.
        """

        def run(residual: Tensor, *others: Any, **named: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(residual, *others, **named)
            if is_last and (ahead := self._find_following()):
                ahead.to_device()
            received = [residual] if residual.is_leaf and residual.requires_grad else []
            read = [*block.parameters(), *block.buffers(), *each_tensor(others), *each_tensor(named), *received]
            kept = self.current = _Block(self, None if is_first else self._last, _storages(read))
            with saved_tensors_hooks(kept.pack, unpack):
                output = forward(residual, *others, **named)
            self._free_device_copy()  # its tensors were copied while this block ran
            has_backward = next(each_tensor(output)).requires_grad
            self.current, self._last = None, kept if has_backward else None
            if not has_backward:  # no backward comes for what selective recomputation has kept
                kept.copies = {}
                return output
            if is_last and self._work is not None:
                self._ends[self._work[1:]] = kept
            if not (is_last and self._next_is_own_backward):
                kept.to_host()
                self._copied = kept
            return output

        return run

    def begin_backward(self, kept: "_Block") -> None:
        """Note that the backward of a block begins; bring back its tensors, and those of the next one."""
        kept.to_device()
        self._free_device_copy(waited=True)
        if self._copied:
            self._copied.has_waited = True
        if ahead := kept.before or self._find_following():
            ahead.to_device()

    def _free_device_copy(self, *, waited: bool = False) -> None:
        """Free the device's tensors that are being copied; if `waited`, only if a block's backward has begun since."""
        if self._copied is not None and (self._copied.has_waited or not waited):
            self._copied.free_device_copy()
            self._copied = None

    @property
    def _next_is_own_backward(self) -> bool:
        """Whether the backward of this forward is the next thing that the rank does."""
        return self._work is not None and self._following == self._work._replace(is_forward=False)

    def _find_following(self) -> "_Block | None":
        """The first block in backward of the rank's next pass; None if that is a forward."""
        following = self._following
        return None if following is None or following.is_forward else self._ends.get(following[1:])


class _Block:
    """Tensors that one block keeps of one microbatch."""

    def __init__(self, owner: ActivationOffloader, before: "_Block | None", shared: set[int]):
        """`before` is the block before it in the stage; storages in `shared` stay where they are."""
        self.owner, self.before, self.shared = owner, before, shared
        self.copies: dict[int, _Copy] = {}
        self.has_waited = False
        """Whether a block's backward has begun since the copy to the host began."""
        self.has_begun = False
        """Whether the backward of this block has begun."""
        self.host_copy_done: torch.cuda.Event | None = None
        self.device_copy_done: torch.cuda.Event | None = None

    def pack(self, tensor: Tensor) -> Any:
        """The object that autograd keeps in place of a tensor."""
        is_wrapper = is_traceable_wrapper_subclass(tensor)
        if is_wrapper or tensor.layout is not torch.strided or tensor.device.type != self.owner.device_type:
            return tensor
        storage = tensor.untyped_storage()
        if storage.nbytes() < LEAST_BYTES or id(storage) in self.shared or storage.nbytes() % tensor.itemsize:
            return tensor
        if (copy := self.copies.get(id(storage))) is None:
            flat = tensor.detach().as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0)
            copy = self.copies[id(storage)] = _Copy(self, flat)
        return _Saved(copy, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    @torch.no_grad()
    def to_host(self) -> None:
        """Begin to copy the tensors to the host; call it when the block's forward is over."""
        with _after_this(self.owner.to_host_stream) as self.host_copy_done:
            for copy in self.copies.values():
                copy.on_host = copy_to_host(copy.on_device)

    def free_device_copy(self) -> None:
        """Free the device's copies, since their memory is needed; a block that is coming back has none here."""
        _wait_for(self.host_copy_done)
        for copy in self.copies.values():
            copy.on_device = None

    @torch.no_grad()
    def to_device(self) -> None:
        """Begin to copy back the tensors that the device lacks; from then on only autograd holds them."""
        gone = [copy for copy in self.copies.values() if copy.on_device is None]
        self.copies = {}
        if not gone:
            return
        for copy in gone:
            copy.on_device = torch.empty_like(copy.on_host, device=self.owner.device_type)  # type: ignore[arg-type]
        with _after_this(self.owner.to_device_stream) as self.device_copy_done:
            for copy in gone:
                copy.on_device.copy_(copy.on_host, non_blocking=True)  # type: ignore[union-attr,arg-type]
                copy.on_host = None  # pinned memory is reused only once the launched copy has read it


class _Copy:
    """A storage as a flat tensor: on the device, on the host or on both."""

    __slots__ = ("block", "on_device", "on_host")

    def __init__(self, block: _Block, flat: Tensor):
        self.block = block
        self.on_device: Tensor | None = flat
        self.on_host: Tensor | None = None


class _Saved(NamedTuple):
    """The view of a storage that autograd keeps in place of a tensor."""

    copy: _Copy
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


def unpack(kept: Any) -> Any:
    """The tensor on the device that `pack` replaced; any other object is returned as it is."""
    if not isinstance(kept, _Saved):
        return kept
    block = kept.copy.block
    if not block.has_begun:
        block.has_begun = True
        block.owner.begin_backward(block)
    _wait_for(block.device_copy_done)
    assert kept.copy.on_device is not None, "it has come back"
    return kept.copy.on_device.view(kept.dtype).as_strided(kept.shape, kept.stride, kept.offset)


@contextmanager
def _after_this(stream: torch.cuda.Stream | None) -> Iterator[torch.cuda.Event | None]:
    """A block whose work runs on `stream`, after the work of the current stream; the event tells when it is done.

    A CPU has no streams, and its work is done at once.
    """
    if stream is None:
        yield None
        return
    stream.wait_stream(torch.cuda.current_stream())
    done = torch.cuda.Event()
    with torch.cuda.stream(stream):
        yield done
        done.record()


def _wait_for(done: torch.cuda.Event | None) -> None:
    """Make the current stream wait for the event."""
    if done is not None:
        torch.cuda.current_stream().wait_event(done)


def keep_results(operations: Collection[str], owner: ActivationOffloader) -> tuple[Any, Any]:
    """Contexts like those of `create_selective_checkpoint_contexts`; kept results of operators go to the host too."""
    results: defaultdict[str, list[Any]] = defaultdict(list)
    return _Keep(operations, owner, results), _Give(operations, results)


class _Keep(TorchDispatchMode):
    """Keeps results of operators for the recomputation."""

    def __init__(self, operations: Collection[str], owner: ActivationOffloader, results: defaultdict[str, list[Any]]):
        super().__init__()
        self.operations, self.owner, self.results = operations, owner, results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), name_operator(func, args)
        block = self.owner.current
        if name in self.operations:
            assert block is not None, "a block's forward runs"
            kept = tree_map(lambda each: block.pack(each.detach()) if isinstance(each, Tensor) else each, result)
            self.results[name].append(kept)
        return result


class _Give(TorchDispatchMode):
    """Returns the kept results in the recomputation."""

    def __init__(self, operations: Collection[str], results: defaultdict[str, list[Any]]):
        super().__init__()
        self.operations, self.results = operations, results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := name_operator(func, args)) not in self.operations:
            return func(*args, **(kwargs or {}))
        kept = self.results[name].pop(0)
        return tree_map(unpack, kept, is_leaf=lambda each: isinstance(each, _Saved))


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    """Identities of the storages of tensors."""
    return {id(local.untyped_storage()) for tensor in tensors for local in each_local_tensor(tensor)}
