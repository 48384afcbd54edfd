"""What programs of others print as their peak: what PyTorch's own loss holds, fragments, and where both end."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtlayout.costmodel.compute import head_time
from dtlayout.costmodel.engine import find_engine
from dtlayout.costmodel.estimate import Estimator, estimate
from dtlayout.costmodel.fsdp2.sizes import Sizes
from dtlayout.costmodel.operators import pass_s
from dtlayout.costmodel.scenario import Scenario
from dtlayout.measure.memory import StorageTracker
from dtlayout.models.presets import find_preset
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import Cluster, find_gpu
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout

GPU = "h100-96g-500w"
T, V, TP = 64, 4000, 4


def scenario(engine: str, *, gpu: str = GPU, global_batch: int = 16, **changes) -> Scenario:
    found = find_engine(engine, gpu)
    return Scenario(
        model=find_preset("llama3.1-8b"),
        batch=Batch(global_batch=global_batch, seq_len=8192),
        cluster=Cluster(gpu=find_gpu(gpu), num_gpus=8, gpus_per_node=8),
        engine=replace(found, features=replace(found.features, **changes)),
    )


@pytest.fixture
def mesh():
    """Ranks of which there is one, and collectives that send nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=TP)
    yield init_device_mesh("cpu", (TP,))
    dist.destroy_process_group()


def bytes_a_logit(num_columns: int, to_logits=lambda own: own, *, keeps_logits: bool) -> float:
    """Held at once by the loss of plain PyTorch and its backward, for each of a rank's own logits."""
    hidden = torch.randn(T, 2, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(num_columns, 2, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(V, (T,))
    with StorageTracker() as tracker:
        logits = to_logits(hidden @ weight.T)
        loss = F.cross_entropy(logits.float(), targets)
        if not keeps_logits:
            del logits
        loss.backward()
    return tracker.ledger.peak_bytes / (T * num_columns)


def predicted_bytes_a_logit(engine: str, layout: Layout) -> float:
    found = Sizes(scenario(engine), layout, Kernels(loss="torch"))
    return 2 * found.loss / found.logits


@pytest.mark.parametrize(("engine", "keeps_logits", "known"), [("torchtitan", False, 12), ("prime-rl", True, 14)])
def test_the_loss_of_plain_pytorch_holds_what_is_predicted(engine, keeps_logits, known):
    held = bytes_a_logit(V, keeps_logits=keeps_logits)
    assert predicted_bytes_a_logit(engine, Layout(dp_shard=8)) == known == pytest.approx(held, rel=0.02)


def bytes_kept_compiled(num_columns: int, to_logits=lambda own: own) -> float:
    """Kept by autograd of a compiled loss for each of a rank's own logits, two numbers a token left out."""

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.float(), targets)

    kept = dict[int, int]()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    logits = to_logits(torch.randn(T, num_columns, dtype=torch.bfloat16)).requires_grad_()
    targets = torch.randint(V, (T,))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        torch.compile(loss)(logits, targets)
    return sum(size for size in kept.values() if size > 16 * T) / (T * num_columns)


def test_a_compiled_loss_keeps_the_logits_and_that_of_dtensors_a_softmax(mesh):
    fused, never = Kernels(loss="torch", compile="blocks"), {"fused_loss": "never"}
    whole, split = Layout(dp_shard=8), Layout(dp_shard=2, tp=TP)

    def held(layout: Layout, kernels: Kernels = fused, **changes: str) -> float:
        found = Sizes(scenario("torchtitan", **changes), layout, kernels)
        return 2 * found.loss / found.logits

    gradient, logits = 2, 2
    assert bytes_kept_compiled(V) == logits and held(whole) == logits + gradient
    with loss_parallel():
        kept = bytes_kept_compiled(V // TP, lambda own: DTensor.from_local(own, mesh, [Shard(1)]))
    assert kept == 4 and held(split) == kept + gradient
    assert held(whole, **never) == held(whole, Kernels(loss="torch")) == 12
    assert held(whole, Kernels(loss="torch"), fused_loss="always") == held(whole)


def test_the_largest_tensor_of_a_fused_loss_is_the_logits():
    layout, kernels = Layout(dp_shard=8, zero=3, recompute="full"), Kernels(loss="torch", compile="blocks")
    eager = scenario("torchtitan", fused_loss="never")
    (fused,), (plain,) = (Estimator(s).memory(layout, kernels) for s in (scenario("torchtitan"), eager))
    share = eager.engine.constants.fragment_share
    held, held_plain = (sum((each.activations, each.gradients, each.buffers)) for each in (fused, plain))
    logits = 8192 * eager.model.vocab_size
    assert fused.fragments == pytest.approx(2 * logits + share * held)
    assert plain.fragments == pytest.approx(4 * logits + share * held_plain)


def test_a_loss_of_transformer_engine_holds_the_logits_alone():
    layout, kernels = Layout(dp_shard=4, tp=2), Kernels()
    fused, plain = scenario("megatron", fused_loss="always"), scenario("megatron")
    (own,), (other,) = (Estimator(s).memory(layout, kernels) for s in (fused, plain))
    logits = 8192 * plain.model.vocab_size / 2
    assert own.logits == 2 * logits and other.logits == plain.engine.constants.logit_bytes * logits
    seconds = [head_time(s, layout, kernels).gpu_s for s in (fused, plain)]
    passes = 8, plain.engine.constants.logit_traffic_bytes
    assert seconds[1] - seconds[0] == pytest.approx(pass_s(plain, (passes[1] - passes[0]) * logits))


def test_the_loss_of_dtensors_holds_a_softmax_more(mesh):
    with loss_parallel():
        held = bytes_a_logit(V // TP, lambda own: DTensor.from_local(own, mesh, [Shard(1)]), keeps_logits=False)
    assert predicted_bytes_a_logit("torchtitan", Layout(dp_shard=2, tp=TP)) == 16 == pytest.approx(held, rel=0.02)


def test_what_is_reserved_has_room_for_one_more_of_the_largest_tensor_and_a_share_of_what_comes_and_goes():
    layout, kernels = Layout(dp_shard=8, zero=3, recompute="full"), Kernels(loss="torch")
    given_out = scenario("torchtitan", reports_reserved=False)
    (allocated,), (reserved,) = (Estimator(s).memory(layout, kernels) for s in (given_out, scenario("torchtitan")))
    comes_and_goes = allocated.activations + allocated.gradients + allocated.buffers
    logits = 8192 * given_out.model.vocab_size
    share = given_out.engine.constants.fragment_share
    assert allocated.fragments == 0
    assert reserved.fragments == pytest.approx(4 * logits + share * comes_and_goes)
    assert reserved.needed == allocated.total == pytest.approx(reserved.total - reserved.fragments)


def test_any_fsdp2_engine_is_told_what_its_allocator_reserves_beside_its_peak():
    layout, kernels = Layout(pp=2, dp_shard=4, micro_batch=1, zero=1), Kernels(loss="torch")
    reports = Estimator(scenario("torchtitan"))
    silent = Estimator(scenario("torchtitan", reports_reserved=False))
    most = reports.memory(layout, kernels).peak_bytes
    assert reports.peak_reserved_bytes(layout, kernels) == silent.peak_reserved_bytes(layout, kernels) == round(most)
    assert silent.memory(layout, kernels).peak_bytes < most
    assert Estimator(scenario("megatron")).peak_reserved_bytes(layout, kernels) is None
    host = replace(silent.scenario, cluster=replace(silent.scenario.cluster, gpu=find_gpu("cpu")))
    assert Estimator(host).peak_reserved_bytes(layout, kernels) is None


def test_a_rank_without_head_has_no_hole_of_the_size_of_logits():
    """On the last rank the loss is where most is held; on the first one less fragments are left."""
    layout = Layout(pp=2, dp_shard=4, micro_batch=1, zero=1)
    first, last = Estimator(scenario("torchtitan")).memory(layout, Kernels(loss="torch"))
    share = find_engine("torchtitan", GPU).constants.fragment_share
    assert first.fragments == pytest.approx(share * (first.activations + first.gradients + first.buffers))
    assert last.fragments > 4 * 8192 * 128_256


@pytest.mark.parametrize(
    ("engine", "gpu", "layout"),
    [
        ("torchtitan", GPU, Layout(dp_shard=8, zero=3, recompute="full")),
        ("nanotron", "h100-80g-sxm", Layout(tp=8, sequence_parallel=True)),
    ],
    ids=["fragments", "run-ahead"],
)
def test_what_a_rank_has_only_where_there_is_room_ends_at_the_capacity(engine, gpu, layout):
    takes_all = 0
    for micro_batch in range(1, 9):
        setting = scenario(engine, gpu=gpu, global_batch=64 * micro_batch)
        found = estimate(setting, replace(layout, micro_batch=micro_batch), Kernels(loss="torch"))
        (rank,) = found.memory
        assert rank.total <= max(found.capacity_bytes * (1 + 1e-9), rank.needed)
        assert found.fits == (rank.needed <= found.capacity_bytes)
        takes_all += rank.needed < 0.99 * rank.total and rank.total == pytest.approx(found.capacity_bytes)
    assert takes_all, "one of the sizes needs less than there is"


def test_our_own_trainer_is_predicted_what_it_allocates():
    (rank,) = Estimator(scenario("dtlayout")).memory(Layout(dp_shard=8, zero=3), Kernels())
    assert rank.fragments == rank.run_ahead == 0 and rank.needed == rank.total
