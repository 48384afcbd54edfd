"""Activations in the host's memory: what a block keeps for its backward goes there, and comes back one block ahead.

While a block runs in forward, what the block before has kept is copied; at the end of it the device lets that go. While
a block runs in backward, the block that follows in backward gets back what it has kept. So the device holds what two
blocks keep, whatever the depth and the number of microbatches in flight. What a block keeps whose backward is the next
thing that the rank does never leaves. Where blocks are recomputed it is their inputs, and what is kept beside these.

[Note: what is not copied]
Parameters, which FSDP2 frees and gathers again. What several blocks read: RoPE's tables, the mask of documents. The
input of a stage's first block that came from another rank, which the runtime holds for its gradient. Less than a page
of CUDA's allocator, such as a random seed. Each storage is copied once and whole, however many tensors stand on it.

[Note: order on a GPU]
Copies run on two streams of their own, one in each direction of the link. They begin when a block's forward is over,
when nothing that it keeps still waits for a collective; a copy back begins where the compute stream stands, since its
memory comes from there. The compute stream waits for a copy before the memory of what was copied is used again, and
before what has come back is read. The host waits for nothing.
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

LEAST_BYTES = 512
"""What CUDA's allocator gives out at least."""
ModuleForward = Callable[..., Any]


class OffloadPass(NamedTuple):
    """A forward or a backward of a stage."""

    is_forward: bool
    stage: int
    microbatch: int


class ActivationOffloader:
    """What the blocks of all stages of a rank keep for their backward."""

    def __init__(self, device_type: str):
        """Of tensors on this type of device."""
        self.device_type = device_type
        self.to_host, self.to_device = (torch.cuda.Stream() if device_type == "cuda" else None for _ in range(2))
        self._ends: dict[tuple[int, int], _Block] = {}
        """Stage and microbatch → its last block, as long as its backward has not begun."""
        self._work: OffloadPass | None = None
        self._following: OffloadPass | None = None
        self._last: _Block | None = None
        self._copied: _Block | None = None
        """The block of which the device still holds what is copied."""
        self.current: _Block | None = None
        """The block whose forward runs."""

    def before_work(self, work: tuple[bool, int, int], following: tuple[bool, int, int] | None) -> None:
        """Call before each `OffloadPass` of the rank, with the one that it does then."""
        self._work, self._following = OffloadPass(*work), None if following is None else OffloadPass(*following)
        self._let_go(waited=True)
        if not self._work.is_forward:
            self._ends.pop(self._work[1:], None)

    def wrap(self, forward: ModuleForward, block: nn.Module, *, is_first: bool, is_last: bool) -> ModuleForward:
        """The forward of a block, which is the stage's first or last or both; it takes the residual stream first."""

        def run(stream: Tensor, *others: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(stream, *others)
            if is_last and (ahead := self._find_following()):
                ahead.come_back()
            read = [*block.parameters(), *each_tensor(others), *([stream] if stream.is_leaf else [])]
            kept = self.current = _Block(self, None if is_first else self._last, _storages(read))
            with saved_tensors_hooks(kept.pack, unpack):
                output = forward(stream, *others)
            self.current, self._last = None, kept
            if is_last and self._work is not None:
                self._ends[self._work[1:]] = kept
            self._let_go()  # while this block ran, what the one before it had kept was copied
            if not (is_last and self._turns):
                kept.leave()
                self._copied = kept
            return output

        return run

    def begin_backward(self, kept: "_Block") -> None:
        """The backward of a block begins."""
        kept.come_back()
        self._let_go(waited=True)
        if self._copied:
            self._copied.has_waited = True
        if ahead := kept.before or self._find_following():
            ahead.come_back()

    def _let_go(self, *, waited: bool = False) -> None:
        """The device lets go of what is being copied; if `waited`, only where a block's backward has begun since."""
        if self._copied is not None and (self._copied.has_waited or not waited):
            self._copied.free_device_copy()
            self._copied = None

    @property
    def _turns(self) -> bool:
        """Whether the backward of this forward is what the rank does next."""
        return self._work is not None and self._following == self._work._replace(is_forward=False)

    def _find_following(self) -> "_Block | None":
        """The block whose backward comes first in what the rank does next; None if that is a forward."""
        following = self._following
        return None if following is None or following.is_forward else self._ends.get(following[1:])


class _Block:
    """What one block keeps of one microbatch."""

    def __init__(self, owner: ActivationOffloader, before: "_Block | None", shared: set[int]):
        """`before` is the block before it in the stage; storages in `shared` stay where they are."""
        self.owner, self.before, self.shared = owner, before, shared
        self.copies: dict[int, _Copy] = {}
        self.has_waited = False
        """Whether a block's backward has begun since it left."""
        self.has_begun = False
        """Whether its backward has."""
        self.left: torch.cuda.Event | None = None
        self.arrived: torch.cuda.Event | None = None

    def pack(self, tensor: Tensor) -> Any:
        """What autograd keeps in the place of a tensor."""
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
    def leave(self) -> None:
        """Its forward is over: begin to copy."""
        with _after_this(self.owner.to_host) as self.left:
            for copy in self.copies.values():
                copy.on_host = copy_to_host(copy.on_device)

    def free_device_copy(self) -> None:
        """The device needs the memory of what was copied, unless it is wanted back already."""
        _wait_for(self.left)
        for copy in self.copies.values():
            copy.on_device = None

    @torch.no_grad()
    def come_back(self) -> None:
        """Begin to copy back what the device does not have; from then on autograd alone holds it."""
        gone = [copy for copy in self.copies.values() if copy.on_device is None]
        self.copies = {}
        if not gone:
            return
        for copy in gone:
            copy.on_device = torch.empty_like(copy.on_host, device=self.owner.device_type)  # type: ignore[arg-type]
        with _after_this(self.owner.to_device) as self.arrived:
            for copy in gone:
                copy.on_device.copy_(copy.on_host, non_blocking=True)  # type: ignore[union-attr,arg-type]
                copy.on_host = None  # pinned memory is used again only when what was launched has read it


class _Copy:
    """A storage, flat: on the device, on the host or on both."""

    __slots__ = ("block", "on_device", "on_host")

    def __init__(self, block: _Block, flat: Tensor):
        self.block = block
        self.on_device: Tensor | None = flat
        self.on_host: Tensor | None = None


class _Saved(NamedTuple):
    """What autograd keeps in the place of a tensor."""

    copy: _Copy
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


def unpack(kept: Any) -> Any:
    """The tensor that was packed, on the device; anything else is itself."""
    if not isinstance(kept, _Saved):
        return kept
    block = kept.copy.block
    if not block.has_begun:
        block.has_begun = True
        block.owner.begin_backward(block)
    _wait_for(block.arrived)
    assert kept.copy.on_device is not None, "it has come back"
    return kept.copy.on_device.view(kept.dtype).as_strided(kept.shape, kept.stride, kept.offset)


@contextmanager
def _after_this(stream: torch.cuda.Stream | None) -> Iterator[torch.cuda.Event | None]:
    """What is launched inside runs on a stream, after what the current one was given; the event says when it is done.

    A CPU has no streams, and is done at once.
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
    """The current stream does not go on before."""
    if done is not None:
        torch.cuda.current_stream().wait_event(done)


def keep_results(operations: Collection[str], owner: ActivationOffloader) -> tuple[Any, Any]:
    """As `create_selective_checkpoint_contexts`: results of these operators are kept, on the host too."""
    results: defaultdict[str, list[Any]] = defaultdict(list)
    return _Keep(operations, owner, results), _Give(operations, results)


class _Keep(TorchDispatchMode):
    """Keeps results of operators for the recomputation."""

    def __init__(self, operations: Collection[str], owner: ActivationOffloader, results: defaultdict[str, list[Any]]):
        super().__init__()
        self.operations, self.owner, self.results = operations, owner, results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        block = self.owner.current
        if str(func) in self.operations:
            assert block is not None, "a block's forward runs"
            kept = tree_map(lambda each: block.pack(each.detach()) if isinstance(each, Tensor) else each, result)
            self.results[str(func)].append(kept)
        return result


class _Give(TorchDispatchMode):
    """Gives, in the recomputation, what was kept."""

    def __init__(self, operations: Collection[str], results: defaultdict[str, list[Any]]):
        super().__init__()
        self.operations, self.results = operations, results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) not in self.operations:
            return func(*args, **(kwargs or {}))
        kept = self.results[str(func)].pop(0)
        return tree_map(unpack, kept, is_leaf=lambda each: isinstance(each, _Saved))


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    """The storages of tensors, by identity."""
    return {id(local.untyped_storage()) for tensor in tensors for local in each_local_tensor(tensor)}
