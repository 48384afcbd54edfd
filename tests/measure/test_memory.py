"""All sizes are worked out by hand: fp32, so 4 bytes an element."""

import gc
import weakref
from itertools import accumulate

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from dtlayout.measure.ledger import Footprint
from dtlayout.measure.memory import StorageTracker

PARAMETER_BYTES = 4 * (8 * 16 + 16 + 16 * 8 + 8)
DATA_BYTES = 4 * 5 * 8
HIDDEN_BYTES = 4 * 5 * 16
OUTPUT_BYTES = 4 * 5 * 8


def build_mlp() -> nn.Module:
    """Saves the ReLU's result for backward, and nothing else of its own."""
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


class Blocks(nn.Module):
    """Four blocks that each save two [8, 16] results, 512 bytes each."""

    def __init__(self, recompute: str = "none"):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU()) for _ in range(4)
        )
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.recompute == "none":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
        return x


class Square(torch.autograd.Function):
    """A custom function: its forward runs with gradients disabled and saves a new tensor."""

    @staticmethod
    def forward(ctx, x):
        doubled = 2 * x
        ctx.save_for_backward(doubled)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (doubled,) = ctx.saved_tensors
        return grad * doubled


class SquareModule(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Square.apply(x)


def test_a_step_has_the_bytes_worked_out_by_hand():
    model = build_mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    tracker = StorageTracker([model], [optimizer])
    x = torch.randn(5, 8)
    with tracker:
        y = model(x)
        assert tracker.current == Footprint(
            parameter=PARAMETER_BYTES, other=DATA_BYTES, activation=HIDDEN_BYTES + OUTPUT_BYTES
        )
        loss = y.sum()
        del y
        loss.backward()
        del loss
        assert tracker.current == Footprint(parameter=PARAMETER_BYTES, other=DATA_BYTES, gradient=PARAMETER_BYTES)
        optimizer.step()
        state_bytes = 2 * PARAMETER_BYTES + 4 * 4  # two moments, and a step count for each of four parameters
        assert tracker.current == Footprint(
            parameter=PARAMETER_BYTES, other=DATA_BYTES, gradient=PARAMETER_BYTES, optimizer=state_bytes
        )
        optimizer.zero_grad(set_to_none=True)
    assert tracker.current == Footprint(parameter=PARAMETER_BYTES, other=DATA_BYTES, optimizer=state_bytes)
    # The loss comes while the output is still there; backward's seed when it is gone.
    assert tracker.ledger.category_peaks.activation == HIDDEN_BYTES + OUTPUT_BYTES + 4
    assert tracker.ledger.peak.total == tracker.ledger.peak_bytes
    assert tracker.ledger.peak.optimizer == state_bytes  # although this was known only after the step


def test_the_peak_is_the_largest_sum_of_what_was_alive():
    tracker = StorageTracker()
    with tracker:
        first = torch.empty(100)
        second = torch.empty(200)
        del first
        third = torch.empty(50)
        del second, third
    assert tracker.ledger.curve_bytes == [0, 400, 1200, 800, 1000, 200, 0]
    assert tracker.ledger.peak_bytes == 1200
    assert tracker.current.total == 0


def test_the_peak_is_that_of_the_allocator_to_the_byte():
    model = Blocks()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    tracker = StorageTracker([model], [optimizer])

    def step() -> None:
        for _ in range(2):
            model(torch.ones(8, 16, requires_grad=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    gc.collect()
    with tracker:
        before_bytes = tracker.current.total
        step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    allocator_peak_bytes = max(accumulate(event.nbytes() for event in events))
    assert tracker.ledger.peak_bytes - before_bytes == allocator_peak_bytes


def test_the_second_step_peaks_like_the_third():
    model = build_mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    tracker = StorageTracker([model], [optimizer])
    x = torch.randn(5, 8)
    peaks = []
    for _ in range(3):
        tracker.ledger.forget_peak()
        with tracker:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        peaks.append((tracker.ledger.peak, tracker.ledger.category_peaks, tracker.current))
    assert peaks[1] == peaks[2]


def test_four_calls_before_backward_hold_four_times_the_activations():
    model = build_mlp()
    tracker = StorageTracker([model])
    x = torch.randn(5, 8)
    with tracker:
        outputs = [model(x) for _ in range(4)]
        assert tracker.current.activation == 4 * (HIDDEN_BYTES + OUTPUT_BYTES)
        for output in outputs:
            output.sum().backward()
        del outputs, output
        assert tracker.current.activation == 0


@pytest.mark.parametrize("recompute", ["reentrant", "non-reentrant"])
def test_recomputation_lowers_the_activation_peak_exactly(recompute):
    x = torch.randn(8, 16, requires_grad=True)
    peaks_bytes = {}
    for name in ["none", recompute]:
        model = Blocks(name)
        tracker = StorageTracker([model])
        with tracker:
            model(x).sum().backward()
        peaks_bytes[name] = tracker.ledger.category_peaks.activation
    # 8: the loss and backward's seed. Kept: 4 blocks of 2 results. Recomputed: 3 inputs and one block's 2 results.
    assert peaks_bytes == {"none": 8 * 512 + 8, recompute: (3 + 2) * 512 + 8}


def test_what_a_custom_function_saves_is_an_activation_also_when_recomputed():
    model = SquareModule()
    x = torch.randn(10, requires_grad=True)
    tracker = StorageTracker([model])
    with tracker:
        y = model(x)
        assert tracker.current.activation == 80  # 2x, saved, and the result
        y.sum().backward()
        del y
        tracker.ledger.forget_peak()
        assert tracker.current.activation == 0
        checkpoint(model, x, use_reentrant=False).sum().backward()
    assert tracker.ledger.category_peaks.activation == 40 + 8  # recomputed 2x, the loss and backward's seed


def test_temporaries_of_a_forward_are_not_activations():
    class Temporary(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x + 1).sum()

    x = torch.zeros(100, requires_grad=True)
    tracker = StorageTracker()
    with tracker:
        loss = Temporary()(x)
        assert tracker.current == Footprint(activation=4, other=400)
    assert loss.nbytes == 4
    assert tracker.ledger.peak == Footprint(activation=4, other=800)


def test_a_forward_without_gradients_leaves_only_its_output():
    model = build_mlp()
    tracker = StorageTracker([model])
    x = torch.randn(5, 8)
    with tracker, torch.no_grad():
        y = model(x)
        z = y + 1
        assert tracker.current.activation == y.nbytes
        assert tracker.current.other == x.nbytes + z.nbytes


def test_views_and_in_place_operators_count_nothing():
    tracker = StorageTracker()
    with tracker:
        x = torch.zeros(100)
        y = x.view(10, 10)[2:].t().detach()
        x.add_(1).mul_(2)
        del x
        assert tracker.current.total == 400
        del y
        assert tracker.current.total == 0


def test_out_variants_and_resize_count_the_new_size():
    tracker = StorageTracker()
    with tracker:
        out = torch.empty(0)
        torch.add(torch.zeros(10), 1, out=out)
        assert tracker.current.total == 40
        out.resize_(100)
        assert tracker.current.total == 400


def test_a_storage_resized_to_nothing_is_free_and_counts_again_when_it_is_back():
    tracker = StorageTracker()
    with tracker:
        x = torch.zeros(100)
        x.untyped_storage().resize_(0)
        assert tracker.current.total == 0
        x.untyped_storage().resize_(400)
        assert tracker.current.total == 400
    x.untyped_storage().resize_(0)
    with tracker:
        assert tracker.current.total == 0


def test_an_older_storage_counts_from_its_first_operator_or_resize():
    touched, resized, never = torch.zeros(10), torch.zeros(20), torch.zeros(30)
    tracker = StorageTracker()
    with tracker:
        touched.add_(1)
        assert tracker.current == Footprint(other=40)
        resized.untyped_storage().resize_(400)
        assert tracker.current == Footprint(other=440)
    assert never.nbytes == 120


def test_storages_in_reference_cycles_live_until_they_are_collected():
    class Node:
        pass

    tracker = StorageTracker()
    gc.disable()
    try:
        with tracker:
            node = Node()
            node.me, node.tensor = node, torch.zeros(100)
            del node
            assert tracker.current.total == 400
            gc.collect()
            assert tracker.current.total == 0
    finally:
        gc.enable()


def test_a_retained_tensor_raises_every_total_by_exactly_its_bytes():
    model = build_mlp()
    optimizer = torch.optim.SGD(model.parameters())
    x = torch.randn(5, 8)
    tracker = StorageTracker([model], [optimizer])
    retained, peaks_bytes, ends_bytes = [], [], []
    for num_elements in [0, 1000]:
        tracker.ledger.forget_peak()
        with tracker:
            retained.append(torch.zeros(num_elements))
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        peaks_bytes.append(tracker.ledger.peak_bytes)
        ends_bytes.append(tracker.current.total)
    assert peaks_bytes[1] - peaks_bytes[0] == ends_bytes[1] - ends_bytes[0] == 4000


def test_gradients_accumulate_in_place_and_go_with_zero_grad():
    model = build_mlp()
    tracker = StorageTracker([model])
    x = torch.randn(5, 8)
    with tracker:
        for _ in range(3):
            model(x).sum().backward()
            assert tracker.current.gradient == PARAMETER_BYTES
        model.zero_grad(set_to_none=True)
        assert tracker.current.gradient == 0


def test_gradients_set_by_hand_are_gradients_by_the_optimizer_step():
    parameter = nn.Parameter(torch.zeros(10))
    optimizer = torch.optim.SGD([parameter])
    tracker = StorageTracker(optimizers=[optimizer])
    with tracker:
        parameter.grad = torch.ones(10)
        optimizer.step()
        parameter.grad = None
    assert tracker.ledger.category_peaks.gradient == 40


def test_gradients_and_states_from_before_count_on_entering():
    model = build_mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 8)).sum().backward()
    optimizer.step()
    with StorageTracker([model], [optimizer]) as tracker:
        assert tracker.current == Footprint(
            parameter=PARAMETER_BYTES, gradient=PARAMETER_BYTES, optimizer=2 * PARAMETER_BYTES + 16
        )


def test_buffers_and_tied_parameters_count_once():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    model.register_buffer("table", torch.zeros(10))
    with StorageTracker([model, model]) as tracker:
        assert tracker.current == Footprint(parameter=64 + 40)


def test_another_device_type_counts_nothing():
    tracker = StorageTracker(device_type="cuda")
    with tracker:
        torch.zeros(100)
        torch.zeros(100, device="meta")
    assert tracker.ledger.peak_bytes == 0


def test_meta_tensors_never_count():
    with StorageTracker() as tracker:
        torch.zeros(100, device="meta") + 1
    assert tracker.ledger.peak_bytes == 0


def test_fake_tensors_have_the_footprint_of_real_ones():
    def measure() -> tuple[Footprint, Footprint]:
        model = build_mlp()
        optimizer = torch.optim.AdamW(model.parameters())
        tracker = StorageTracker([model], [optimizer])
        x = torch.randn(5, 8)
        with tracker:
            model(x).sum().backward()
            optimizer.step()
        return tracker.ledger.peak, tracker.current

    real = measure()
    with FakeTensorMode():
        assert measure() == real


def test_fake_tensors_of_someone_else_do_not_count():
    with StorageTracker() as tracker, FakeTensorMode():
        torch.zeros(100)
    assert tracker.ledger.peak_bytes == 0


def test_an_exception_leaves_nothing_patched():
    model = build_mlp()
    hooks = nn.modules.module._global_forward_hooks
    assert "resize_" not in vars(torch.UntypedStorage)
    tracker = StorageTracker([model], [torch.optim.SGD(model.parameters())])
    with pytest.raises(ValueError, match="inside"), tracker:
        assert "resize_" in vars(torch.UntypedStorage)
        raise ValueError("inside")
    with pytest.raises(AttributeError), StorageTracker([None]):
        pass
    assert "resize_" not in vars(torch.UntypedStorage)
    assert not hooks
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    with tracker:
        assert tracker.current == Footprint(parameter=PARAMETER_BYTES)


def test_nested_trackers_agree_and_restore_in_order():
    with StorageTracker() as outer:
        with StorageTracker() as inner:
            x = torch.zeros(100)
            x.untyped_storage().resize_(40)
        assert "resize_" in vars(torch.UntypedStorage)
        x.untyped_storage().resize_(0)
        assert outer.current.total == 0
    assert outer.ledger.peak_bytes == inner.ledger.peak_bytes == 400
    assert "resize_" not in vars(torch.UntypedStorage)


def test_the_tracker_keeps_nothing_alive():
    tracker = StorageTracker()
    with tracker:
        x = torch.zeros(100)
    storage = weakref.ref(x.untyped_storage())
    del x
    assert storage() is None
    assert tracker.current.total == 0
