"""Memory that a step really holds: every storage from its creation to its death, by category.

A storage has one category for its whole life, the strongest of these (see ledger.py):

- parameter: storage of a parameter or buffer of `modules`, or of a parameter of `optimizers`, when a `with` block is
  entered. Under FSDP2 these are the local shards: enter with the units resharded, as they are between steps.
- gathered: storage of a tensor that is a parameter of `modules` only inside the block: an unsharded FSDP2 parameter.
- optimizer: storage of a tensor in an optimizer's state.
- gradient: storage that autograd accumulated into the `.grad` of a parameter or gathered parameter. Also storage that
  is found there on entry, before `optimizer.step` and on exit (zero-bubble schedules set it by hand), that is added
  to a gradient, or that FSDP2 copies into a reduce-scatter: it keeps unreduced gradients in the reduce dtype out of
  `.grad`.
- activation: storage born in a *forward* that is still alive when this forward is over, whoever holds it: saved
  tensors, inputs of checkpointed blocks, stage outputs, and tensors that a recomputation in backward saves again. A
  forward is a call of an outermost module (with or without gradients), or work done with gradients enabled outside of
  one, such as the loss. Such work is over at the first operator with gradients disabled, usually backward's. So the
  seed of `loss.backward()` counts, 4 bytes; a batch counts if it was made inside the block. FSDP2's communication
  buffers don't.
- communication: storage that went into a collective or a message, or came out of one, or that FSDP2 copies through.
- on the host: storages in a ledger of their own, which are not counted with these. They are the results of
  `ops.offload.copy_to_host` and, with `state_on="host"`, the parameters that are there on entry, their gradients as
  soon as FSDP2 reduces the next ones, and the optimizer's state. On a CPU it is the same memory.
- on disk: with `state_on="disk"`, these parameters and the optimizer's state but for counts of steps, in a third
  ledger. How many of their pages are in memory is not told.
- other: the rest. Temporaries, gradients of activations, and all data older than the block that is none of the above,
  from the first operator that touches it.

Sizes are `UntypedStorage.nbytes()` on one device type. Three things are not seen: memory that a kernel or a custom
operator allocates and frees inside one call, unless it is a composite of ops/composite.py; a caching allocator's
rounding; and storages that no operator touches, such as the random state that `torch.utils.checkpoint` keeps for each
call (5 kB on CPU). While a block is active torch runs compiled modules eagerly, so their figures are those of eager.

[Note: storages and finalizers]
torch keeps one Python object per storage as long as the C++ storage lives, even when only autograd's saved tensors hold
it. So a weak reference to that object fires exactly when the memory is freed. Callbacks can come at any bytecode
(garbage collection), so they only queue the death. The queue is emptied before anything else is looked up or added,
since a new storage may get the address of a dead one. Sizes also change without an operator: FSDP2 frees and
re-allocates gathered parameters by `UntypedStorage.resize_`, which is patched inside the block.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from dtlayout.measure.ledger import Allocation, Category, Footprint, Ledger
from dtlayout.measure.storages import any_wraps, each_storage, each_tensor
from dtlayout.ops.composite import call_seen
from dtlayout.ops.offload import COPY_TO_HOST

StatePlace = Literal["device", "host", "disk"]
"""Place of the state that an optimizer updates."""
_COMMUNICATION = ("c10d", "_c10d_functional", "fsdp")
"""Namespaces of operators that communicate, or that copy for those that do."""


class StorageTracker(TorchDispatchMode):
    """Counts the bytes of every storage on `device_type` while it is entered; enter it again for the next step.

    >>> tracker = StorageTracker(modules=[model], optimizers=[optimizer])  # doctest: +SKIP
    >>> with tracker:  # doctest: +SKIP
    ...     step()
    >>> tracker.ledger.peak_bytes, tracker.ledger.peak.activation  # doctest: +SKIP
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        modules: Sequence[nn.Module] = (),
        optimizers: Sequence[Optimizer] = (),
        device_type: str = "cpu",
        on_peak: Callable[[], None] = lambda: None,
        observers: Sequence[Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]] = (),
        *,
        state_on: StatePlace = "device",
    ) -> None:
        """`on_peak` is called whenever the device holds more than ever before.

        `observers` get each operator on plain tensors, with its arguments, keyword arguments and result. They could be
        modes of their own, but each mode costs as much as an operator on fake tensors does.
        """
        super().__init__()
        self._modules = list(modules)
        self._optimizers = list(optimizers)
        self._device_type = device_type
        self._observers = list(observers)
        self._fake_mode: FakeTensorMode | None = None
        self._ledger, self._host, self._disk = Ledger(on_peak), Ledger(), Ledger()
        self._state_on = state_on
        self._elsewhere: dict[int, Ledger] = {}
        """Storages that are not on the device, with the ledger that counts them."""
        self._sharded: set[int] = set()
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], Allocation]] = {}
        self._dead: deque[int] = deque()
        self._born_in_forward: dict[int, Allocation] = {}
        self._forward_depth = 0
        self._forward_is_over = False
        self._met: set[int] = set()
        self._undo = ExitStack()
        self._is_active = False

    @property
    def current(self) -> Footprint:
        """Bytes that are alive now, by category."""
        self._write_deaths()
        if self._forward_is_over:
            self._settle_forward()
        return self._ledger.current

    @property
    def ledger(self) -> Ledger:
        """Ledger of the device's memory until now; its window is the last block, which `Ledger.mark` divides."""
        self._write_deaths()
        return self._ledger

    @property
    def host(self) -> Ledger:
        """Ledger of the host's memory beside a device, like `ledger`."""
        self._write_deaths()
        return self._host

    @property
    def disk(self) -> Ledger:
        """Ledger of files on the host's disk, like `ledger`."""
        self._write_deaths()
        return self._disk

    def __enter__(self) -> "StorageTracker":
        assert not self._is_active, "one tracker cannot count the same operator twice"
        with ExitStack() as undo:
            self._undo = undo
            self._fake_mode = active_fake_mode()
            self._forward_depth = 0
            self._met.clear()
            self._take_stock()
            undo.callback(self._close_block)
            undo.enter_context(_watch_resize(self._measure_resized))
            undo.callback(register_module_forward_pre_hook(self._enter_forward).remove)
            undo.callback(register_module_forward_hook(self._leave_forward, always_call=True).remove)
            for optimizer in self._optimizers:
                undo.callback(optimizer.register_step_pre_hook(lambda *_: self._claim_gradients()).remove)
                undo.callback(optimizer.register_step_post_hook(lambda *_: self._claim_optimizer_states()).remove)
            super().__enter__()
            self._undo = undo.pop_all()
            self._is_active = True
        return self

    def __exit__(self, *exception: Any) -> None:
        self._is_active = False
        with self._undo:
            super().__exit__(*exception)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "prim":  # a question to a tensor, such as for its device
            return func(*args, **(kwargs or {}))
        if any_wraps(types):
            # The operators on the local tensors come here too; but only here is a DTensor parameter still a parameter.
            self._meet_parameters(each_tensor(args))
            return NotImplemented
        kwargs = kwargs or {}
        result = call_seen(self, func, args, kwargs)
        self._observe_operator(func, (args, kwargs), result)
        for observe in self._observers:
            observe(func, args, kwargs, result)
        return result

    def _observe_operator(self, func: Any, arguments: Any, result: Any) -> None:
        self._write_deaths()
        in_forward = self._forward_depth > 0 or torch.is_grad_enabled()
        if self._forward_is_over or not in_forward:
            self._settle_forward()
        inputs, outputs = list(each_tensor(arguments)), list(each_tensor(result))
        if str(func) == COPY_TO_HOST:
            self._claim_elsewhere(outputs, Category.ACTIVATION, self._host)
        allocations = self._measure(inputs)
        self._meet_parameters(inputs)
        for storage in self._storages(outputs):
            is_newborn = in_forward and id(storage) not in self._alive and id(storage) not in self._elsewhere
            allocation = self._measure_storage(storage)
            if is_newborn:
                self._born_in_forward[id(storage)] = allocation
        if func is torch.ops.aten.copy_.default and self._comes_back(inputs):
            allocations[0].claim(Category.ACTIVATION)
        if func is torch.ops.aten.add_.Tensor and [a.category for a in allocations[:1]] == [Category.GRADIENT]:
            for added in allocations[1:]:
                added.claim(Category.GRADIENT)
        if func.namespace in _COMMUNICATION:
            self._claim(inputs + outputs, Category.COMMUNICATION)
        if func.namespace == "fsdp":
            # FSDP2's buffers may outlive a forward (for overlap), but they are none of its results.
            for storage in self._storages(inputs + outputs):
                self._born_in_forward.pop(id(storage), None)
            if func is torch.ops.fsdp.chunk_cat.default:
                unreduced = arguments[0][0]  # chunk_cat(tensors, dim, num_chunks, *, out)
                self._claim(unreduced, Category.GRADIENT)
                if self._state_on != "device":
                    self._claim_gradients()

    def _comes_back(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Whether the source of this copy is an activation on the host."""
        *_, source = [key for tensor in inputs for key in map(id, self._storages([tensor]))] or [0]
        return source in self._elsewhere and self._alive[source][1].category is Category.ACTIVATION

    # Storages: birth, change of size, death

    def _storages(self, tensors: Iterable[torch.Tensor]) -> Iterator[torch.UntypedStorage]:
        for tensor in tensors:
            yield from each_storage(tensor, self._device_type, self._fake_mode)

    def _measure(self, tensors: Iterable[torch.Tensor]) -> list[Allocation]:
        return [self._measure_storage(storage) for storage in self._storages(tensors)]

    def _measure_storage(self, storage: torch.UntypedStorage) -> Allocation:
        """Note the size of a storage, known or new."""
        self._write_deaths()
        key, dead = id(storage), self._dead
        if key not in self._alive:
            self._alive[key] = weakref.ref(storage, lambda _: dead.append(key)), Allocation()
        _, allocation = self._alive[key]
        self._ledger_of(key).set_bytes(allocation, storage.nbytes())
        return allocation

    def _ledger_of(self, key: int) -> Ledger:
        return self._elsewhere.get(key, self._ledger)

    def _measure_resized(self, storage: torch.UntypedStorage) -> None:
        # A fake storage says that its device is meta: an unknown one is measured with its tensor's next operator.
        if id(storage) in self._alive or storage.device.type == self._device_type:
            self._measure_storage(storage)

    def _write_deaths(self) -> None:
        while self._dead:
            key = self._dead.popleft()
            _, allocation = self._alive.pop(key)
            self._born_in_forward.pop(key, None)
            self._ledger_of(key).set_bytes(allocation, 0)
            self._elsewhere.pop(key, None)

    # Blocks

    def _take_stock(self) -> None:
        """Register the storages that are alive when the measured code begins, and start all ledgers.

        Parameters, buffers, optimizer states and gradients get their categories.
        """
        for ref, _ in list(self._alive.values()):
            if (storage := ref()) is not None:
                self._measure_storage(storage)
        if self._state_on != "device":
            sharded = [tensor for tensor in self._each_module_tensor() if isinstance(tensor, nn.Parameter)]
            self._sharded = set(map(id, sharded))
            self._claim_elsewhere(sharded, Category.PARAMETER, self._host if self._state_on == "host" else self._disk)
        for tensor in self._each_module_tensor():
            for allocation in self._measure([tensor]):
                if allocation.category is not Category.GATHERED:
                    allocation.claim(Category.PARAMETER)
            self._watch_gradient(tensor)
        self._claim_optimizer_states()
        self._claim_gradients()
        self._write_deaths()
        self._ledger.begin_window()
        self._host.begin_window()
        self._disk.begin_window()

    def _close_block(self) -> None:
        self._write_deaths()
        self._settle_forward()
        self._claim_gradients()
        self._claim_optimizer_states()

    # Categories

    def _enter_forward(self, *_: Any) -> None:
        self._forward_depth += 1

    def _leave_forward(self, module: nn.Module, *_: Any) -> None:
        self._forward_depth -= 1
        # Operators may have seen only the local tensor of a DTensor.
        self._meet_parameters(module.parameters(recurse=False))
        # Tensors that only the call's frames hold die on the way out: look when the next operator comes.
        self._forward_is_over = self._forward_is_over or self._forward_depth == 0

    def _settle_forward(self) -> None:
        """Make storages that the forward left alive activations."""
        for allocation in self._born_in_forward.values():
            allocation.claim(Category.ACTIVATION)
        self._born_in_forward.clear()
        self._forward_is_over = False

    def _each_module_tensor(self) -> Iterator[torch.Tensor]:
        for module in self._modules:
            yield from module.parameters()
            yield from module.buffers()
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]

    def _meet_parameters(self, tensors: Iterable[torch.Tensor]) -> None:
        """Look at the modules again when a parameter comes by for the first time: FSDP2 has gathered a unit."""
        for tensor in tensors:
            if isinstance(tensor, nn.Parameter) and id(tensor) not in self._met:
                for parameter in self._each_module_tensor():
                    if isinstance(parameter, nn.Parameter) and id(parameter) not in self._met:
                        self._claim([parameter], Category.GATHERED)
                        self._watch_gradient(parameter)
                self._met.add(id(tensor))

    def _watch_gradient(self, tensor: torch.Tensor) -> None:
        if id(tensor) not in self._met:
            self._met.add(id(tensor))
            if tensor.requires_grad and tensor.is_leaf:
                self._undo.callback(tensor.register_post_accumulate_grad_hook(self._claim_gradient).remove)

    def _claim_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            if id(parameter) in self._sharded:
                self._claim_elsewhere([parameter.grad], Category.GRADIENT, self._host)
            else:
                self._claim([parameter.grad], Category.GRADIENT)

    def _claim_gradients(self) -> None:
        for tensor in self._each_module_tensor():
            self._claim_gradient(tensor)

    def _claim_optimizer_states(self) -> None:
        for optimizer in self._optimizers:
            for kept in each_tensor(list(optimizer.state.values())):
                if self._state_on == "device":
                    self._claim([kept], Category.OPTIMIZER)
                else:
                    is_on_disk = self._state_on == "disk" and kept.dim() > 0  # counts of steps have no dimension
                    self._claim_elsewhere([kept], Category.OPTIMIZER, self._disk if is_on_disk else self._host)

    def _claim_elsewhere(self, tensors: Iterable[torch.Tensor], category: Category, ledger: Ledger) -> None:
        """Claim storages that lie on the host or its disk, or that do from now on, like `_claim`."""
        for storage in self._storages(tensors):
            self._write_deaths()
            key = id(storage)
            if key in self._alive and key not in self._elsewhere:
                self._ledger.set_bytes(self._alive[key][1], 0)
            self._elsewhere.setdefault(key, ledger)
            self._measure_storage(storage).claim(category)

    def _claim(self, tensors: Iterable[torch.Tensor], category: Category) -> None:
        for allocation in self._measure(tensors):
            allocation.claim(category)


def _watch_resize(observe: Callable[[torch.UntypedStorage], None]) -> AbstractContextManager[Any]:
    """Call `observe` after every `UntypedStorage.resize_` made from Python."""
    resize = torch.UntypedStorage.resize_

    def resize_and_tell(storage: torch.UntypedStorage, nbytes: int) -> Any:
        result = resize(storage, nbytes)
        observe(storage)
        return result

    return patch.object(torch.UntypedStorage, "resize_", resize_and_tell)
