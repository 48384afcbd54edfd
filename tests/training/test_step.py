"""When a step's numbers go to the host, and when the host waits for them."""

from unittest.mock import Mock

import pytest
import torch
from cuda import Event, Race
from parity import Case, make_tokens

from dtlayout.mesh.parts import local_part
from dtlayout.spec.batch import IGNORED
from dtlayout.spec.layout import Layout
from dtlayout.spec.optimizers import SGD, AdamW, Muon
from dtlayout.spec.precision import Precision
from dtlayout.training import step
from dtlayout.training.build import assemble
from dtlayout.training.optimizer import build_optimizer, set_learning_rate
from dtlayout.training.step import TrainStep
from dtlayout.training.transfer import OnHost, send_to_device


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("params", ["float64", "float32"])
def test_the_numbers_leave_before_the_update_and_are_waited_for_after_it(monkeypatch, params):
    done: list[str] = []

    class Recorded(OnHost):
        def __init__(self, tensor):
            done.append("numbers leave")
            super().__init__(tensor)

        def wait(self):
            done.append("wait")
            return super().wait()

    case = Case(Layout(), precision=Precision(params=params, compute=params, reduce=params))
    assembly = assemble(case.model, case.batch, case.layout, case.kernels, case.precision, seed=0, device_type="cpu")
    optimizer = build_optimizer(assembly.modules, case.model, case.optimizer)
    optimizer.register_step_pre_hook(lambda *_: done.append("update"))
    monkeypatch.setattr(step, "OnHost", Recorded)
    monkeypatch.setattr(step, "clip_gradients", lambda *_: done.append("clip"))
    train_step = TrainStep(assembly.runtime, optimizer, max_norm=1.0, mesh=assembly.mesh, model=case.model)
    tokens, targets = make_tokens(case.batch, case.model.vocab_size)
    launched = train_step.launch(tokens, targets, stop=True)
    assert done == ["numbers leave", *["clip"] * (params == "float64"), "update"]
    result = launched.wait()
    assert done[-1:] == ["wait"] and done.count("wait") == 1
    assert result.is_finite and result.stop_requested and result.loss > 0


OPTIMIZERS = {
    "adamw": AdamW(lr=0.01),
    "moments in bf16": AdamW(lr=0.01, state_format="bfloat16", beta2=0.95),
    "sgd": SGD(lr=0.01),
    "muon": Muon(lr=0.01),
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("loss_scale", [None, 1024.0])
def test_updates_that_divide_gradients_clip_as_a_pass_does(optimizer, loss_scale):
    case = Case(Layout(), precision=Precision(params="float32", compute="float32", reduce="float32"))
    found = []
    for divides in (True, False):
        assembly = assemble(
            case.model, case.batch, case.layout, case.kernels, case.precision, seed=0, device_type="cpu"
        )
        built = build_optimizer(assembly.modules, case.model, optimizer)
        set_learning_rate(built, optimizer.lr)
        train_step = TrainStep(assembly.runtime, built, max_norm=1.0, mesh=assembly.mesh, model=case.model)
        assert train_step.divides_in_update == getattr(built, "_step_supports_amp_scaling", False)
        train_step.divides_in_update = train_step.divides_in_update and divides
        before = [local_part(p).detach().clone() for p in assembly.modules[0].parameters()]
        for number, train_step.max_norm in enumerate((1e6, 0.05)):  # the first step is not clipped
            tokens, targets = (each.roll(number, 1) for each in make_tokens(case.batch, case.model.vocab_size))
            train_step.launch(tokens, targets, loss_scale=loss_scale).wait()
        after = [local_part(p).detach() for p in assembly.modules[0].parameters()]
        found.append([mine - other for mine, other in zip(after, before, strict=True)])
    for mine, other in zip(*found, strict=True):
        assert (mine - other).norm() <= 0.01 * other.norm()  # moments in bf16 are rounded, and Muon iterates in it


@pytest.mark.usefixtures("one_rank")
def test_a_batch_without_a_target_is_a_step_of_no_loss(monkeypatch):
    case = Case(Layout())
    assembly = assemble(case.model, case.batch, case.layout, case.kernels, case.precision, seed=0, device_type="cpu")
    optimizer = build_optimizer(assembly.modules, case.model, case.optimizer)
    train_step = TrainStep(assembly.runtime, optimizer, max_norm=1.0, mesh=assembly.mesh, model=case.model)
    tokens, targets = make_tokens(case.batch, case.model.vocab_size)
    result = train_step(tokens, torch.full_like(targets, IGNORED))
    assert (result.loss, result.grad_norm) == (0, 0)
    assert all(p.isfinite().all() for module in assembly.modules for p in module.parameters())


def test_a_gpus_numbers_are_copied_to_pinned_memory_and_the_host_waits_for_that_copy_alone(cuda):
    numbers = torch.full((3,), 4.0)
    coming = OnHost(numbers)
    assert cuda.done == ["compute copies", "compute records an event"] and len(cuda.pinned_by) == 1
    numbers.sqrt_()  # an update
    here = coming.wait()
    assert cuda.done[2:] == ["the host waits for an event of compute"]
    assert here.tolist() == [4.0] * 3 and here.device.type == "cpu" and numbers.tolist() == [2.0] * 3


def test_numbers_that_are_read_before_they_have_come_are_a_race(cuda, monkeypatch):
    """So that the test above would see it."""
    monkeypatch.setattr(Event, "synchronize", lambda event: None)
    with pytest.raises(Race, match="on host does not wait for what compute has written"):
        OnHost(torch.ones(3)).wait().sum()


def test_a_batch_goes_to_a_gpu_through_pinned_memory_without_waiting(cuda):
    there = send_to_device(cuda.on_host(torch.arange(3)), "cuda")
    assert there.device.type == "cuda" and there.tolist() == [0, 1, 2]
    assert cuda.done == ["compute copies"] and len(cuda.pinned_by) == 1


def test_what_is_on_a_cpu_already_is_not_copied():
    tensor = torch.ones(3)
    assert send_to_device(tensor, "cpu") is OnHost(tensor).wait() is tensor


@pytest.mark.usefixtures("one_rank")
def test_documents_of_microbatches_are_pinned_beside_a_gpu(cuda, monkeypatch):
    pinned = Mock()
    monkeypatch.setattr(step.Documents, "pinned", pinned)
    starts = torch.zeros(4, 6, dtype=torch.int32)
    for device_type in ("cpu", "cuda"):
        train_step = object.__new__(TrainStep)
        train_step.mesh, train_step.runtime = Mock(device_type=device_type), Mock()
        train_step.runtime.schedule.num_microbatches = 2
        found = train_step._split_documents(starts)
        assert (found == [pinned.return_value] * 2) == (device_type == "cuda")
        assert train_step._split_documents(None) == []
    assert pinned.call_count == 2
