"""Parity: train one step under a layout on every rank, and the same step on one process, and compare every tensor.

The reference shares no parallel code: a plain `Llama`, autograd over the whole batch at once, torch's own clipping.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial, partialmethod
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from checkpoint_ranks import gather
from outside import V_GPIPE, registered
from plugged import plugged_in
from torch import Tensor
from torch.distributed import _symmetric_memory
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from whole_muon import WholeMuon

from dtlayout.data.samples import find_starts
from dtlayout.mesh.axes import dp_rank
from dtlayout.models.families import find_weight
from dtlayout.models.feed_forward import Mixture
from dtlayout.models.llama import Llama
from dtlayout.ops.documents import Documents
from dtlayout.ops.offload import copy_to_host
from dtlayout.ops.quantized import QUANTIZERS
from dtlayout.plans.collectives import Group
from dtlayout.plans.init import initialize
from dtlayout.plans.plan import find_fake_quantized, find_quantized, find_scaled, match_names
from dtlayout.plans.quantize import QuantizedWeight, named_weights
from dtlayout.spec.batch import IGNORED, Batch
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import Experts, ModelShape
from dtlayout.spec.optimizers import AdamW, Muon, Optimizer
from dtlayout.spec.precision import Precision
from dtlayout.training.batches import take_own
from dtlayout.training.build import Assembly, assemble
from dtlayout.training.loss_scale import LossScale
from dtlayout.training.optimizer import JointOptimizer, build_optimizer, set_learning_rate
from dtlayout.training.result import StepResult
from dtlayout.training.step import TrainStep

SHAPE = ModelShape(
    name="parity", hidden_size=32, num_layers=4, num_heads=8, num_kv_heads=4, ffn_size=48, vocab_size=88
)  # fmt: skip
"""Four blocks are a first, a last and two between, or two of each of two stages; a test takes as long as its blocks."""
TIED = replace(SHAPE, tied_embeddings=True)
QWEN2 = replace(SHAPE, family="qwen2", qkv_bias=True, tied_embeddings=True)
QWEN3 = replace(SHAPE, family="qwen3", qk_norm=True, head_dim=6)
MIXTURE = replace(SHAPE, experts=Experts(number=8, per_token=2, ffn_size=24, shared_ffn_size=16, dense_layers=1))
BALANCED = replace(
    SHAPE,
    experts=Experts(
        number=8, per_token=2, ffn_size=24, score="sigmoid", groups=4, groups_per_token=2, scale=2.5,
        correction_bias=True, bias_rate=0.02, balance_loss=0.3, z_loss=0.1,
    ),
)  # fmt: skip
SEQ_LEN, MAX_NORM, SEED = 16, 0.05, 7
EXACT = Precision(params="float64", compute="float64", reduce="float64")
FP32 = Precision(params="float32", compute="float32", reduce="float32")
BF16 = Precision()
FP16 = Precision(compute="float16")
SMOOTH = AdamW(lr=1e-2, eps=1e-3)
"""With an epsilon that keeps the update smooth in the gradient, so that errors are not amplified."""
LEAN = replace(SMOOTH, state_format="bfloat16")


@dataclass(frozen=True)
class Case:
    """Steps on one batch to compare; the last one's numbers count.

    A model that has fewer blocks than the layout has stages gets one for each, or as many as its list of them says.
    """

    layout: Layout
    global_batch: int = 0
    """0: eight sequences, or as few as make a first, a middle and a last microbatch and fill a pipeline twice."""
    model: ModelShape = SHAPE
    precision: Precision = EXACT
    kernels: Kernels = field(default_factory=Kernels)
    documents: bool = False
    seq_len: int = SEQ_LEN
    optimizer: Optimizer = SMOOTH
    num_steps: int = 1
    loss_scale: float | None = None

    def __post_init__(self) -> None:
        fewest = max(self.layout.num_stages, sum(self.layout.stage_layers))
        if self.model.num_layers < fewest:
            object.__setattr__(self, "model", replace(self.model, num_layers=fewest))

    @property
    def batch(self) -> Batch:
        enough = self.layout.dp * self.layout.micro_batch * max(3, 2 * self.layout.pp * (self.layout.pp > 1))
        return Batch(global_batch=self.global_batch or min(8, enough), seq_len=self.seq_len)


@dataclass(frozen=True)
class Outcome:
    """What a step computed: whole tensors by name."""

    loss: float
    grad_norm: float
    gradients: dict[str, np.ndarray]
    parameters: dict[str, np.ndarray]


class Part(NamedTuple):
    """Values of a tensor that a rank has, with their places along each axis of the whole."""

    size: tuple[int, ...]
    places: tuple[np.ndarray, ...]
    values: np.ndarray


@dataclass(frozen=True)
class Share:
    """Parts of an outcome that a rank has; `merge` puts tensors together without a collective for each."""

    numbers: tuple[float, float] | None
    """Loss and gradient norm, of the first rank of a stage."""
    gradients: dict[str, Part]
    parameters: dict[str, Part]


def make_tokens(batch: Batch, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of a global batch; every sequence has another number of padding targets, one has no others."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(vocab_size, (batch.global_batch, batch.seq_len), generator=generator)
    targets = torch.randint(vocab_size, (batch.global_batch, batch.seq_len), generator=generator)
    for row in range(batch.global_batch):
        targets[row, : row * 5 % batch.seq_len] = IGNORED
    targets[1] = IGNORED
    return tokens, targets


def make_starts(case: Case, tokens: Tensor) -> Tensor | None:
    """Where documents start, if the case has any: a quarter of the tokens end one, but none early in every second."""
    ends = tokens % 4 == 0
    ends[::2, : case.seq_len * 2 // 3] = False
    return find_starts(ends) if case.documents else None


def run_reference(case: Case) -> Outcome:
    """The steps on one process in the format of the master parameters, or wholly in `case.precision.compute`."""
    dtype = getattr(torch, case.precision.compute)
    model = Llama(case.model, case.kernels, case.seq_len, dtype=getattr(torch, case.precision.params))
    initialize([model], case.model, SEED, "cpu")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(find_weight(case.model, name).trains)
    if case.precision.matmul_format:
        _swap_linears(model, case)
    if case.precision.fake_quant != "none":
        _round_weights(model, case)
    parameters = {name: torch.nn.Parameter(p.detach().clone(), p.requires_grad) for name, p in model.named_parameters()}
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    for name in _list_quantized(case, parameters):
        parameters[name].data = _round_to(case.precision.base, parameters[name].data, dtype)
    optimizer = make_optimizer(case.optimizer, trained, case.model)
    tokens, targets = make_tokens(case.batch, case.model.vocab_size)
    starts = make_starts(case, tokens)
    documents = None if starts is None else Documents.from_starts(starts)
    for _ in range(case.num_steps):
        for name, parameter in model.named_parameters():
            parameter.data, parameter.grad = parameters[name].detach().to(dtype), None
        scale = case.loss_scale or 1.0
        loss = sum(_run_microbatches(model, case, tokens, documents, targets)) / scale
        found = {name: p.grad for name, p in model.named_parameters() if name in trained}
        gradients = {name: gradient.to(trained[name].dtype) / scale for name, gradient in found.items()}
        for name, parameter in trained.items():
            parameter.grad = gradients[name].clone()
        norm = torch.nn.utils.clip_grad_norm_(list(trained.values()), MAX_NORM)
        optimizer.step()
        _move_biases(model, parameters)
    return Outcome(loss.item(), norm.item(), _to_numpy(gradients), _to_numpy(parameters))


def _swap_linears(model: Llama, case: Case) -> None:
    """Let torchao compute the linear layers that multiply below the compute format."""
    from torchao.float8 import Float8LinearConfig  # here, since it takes seconds
    from torchao.float8.float8_linear import Float8Linear

    recipe = Float8LinearConfig.from_recipe_name(case.precision.matmuls.removeprefix("fp8-"))
    names = [name for name, _ in model.named_modules()]
    for name in (name for pattern in find_scaled(case.model) for name in match_names(pattern, names)):
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, Float8Linear.from_float(model.get_submodule(name), recipe))


def _round_weights(model: Llama, case: Case) -> None:
    """Let the linear layers that round their weights multiply by what a quantizer of the export makes of them."""
    names = [name for name, _ in model.named_modules()]
    for name in (name for pattern in find_fake_quantized(case.model) for name in match_names(pattern, names)):
        model.get_submodule(name).forward = partial(_multiply_rounded, model.get_submodule(name), case)


def _multiply_rounded(linear: torch.nn.Linear, case: Case, x: Tensor) -> Tensor:
    weight = linear.weight
    exact = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
    if case.precision.fake_quant == "int8":
        scales = (exact.abs().amax(1, keepdim=True) / 127.5).clamp(min=torch.finfo(torch.float32).eps)
        values = (exact * (1 / scales)).round().clamp(-128, 127) * scales
    else:
        groups = exact.unflatten(1, (-1, 128))
        least, most = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        scales = ((most - least) / 15).clamp(min=1e-6)
        scales, zeros = scales.bfloat16(), (least + 8 * scales).bfloat16()
        codes = ((groups - (zeros - 8 * scales)) / scales).round()
        values = ((codes.clamp(0, 15) - 8) * scales + zeros).flatten(1)
    return torch.nn.functional.linear(x, values.to(weight.dtype) + (weight - weight.detach()), linear.bias)


def _list_quantized(case: Case, names: Iterable[str]) -> list[str]:
    """Names of the weights that the case stores in few bits."""
    if case.precision.base == "compute":
        return []
    patterns = find_quantized(case.model)
    return [name for pattern in patterns for name in match_names(f"{pattern}.weight", names)]


def _round_to(base: str, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight that a format of few bits holds of one that is in the compute format `dtype`."""
    quantizer = QUANTIZERS[base]
    return quantizer.dequantize(*quantizer.quantize(weight.to(dtype), dtype)).to(weight.dtype)


def _run_microbatches(
    model: Llama, case: Case, tokens: Tensor, documents: Documents | None, targets: Tensor
) -> Iterator[Tensor]:
    """Forward and backward of the batch: at once, or in microbatches, by which routers count and whose tensors have a
    scale each."""
    experts, num_targets = case.model.experts, float((targets != IGNORED).sum()) / (case.loss_scale or 1.0)
    by_microbatch = experts is not None and (experts.balance_loss or experts.z_loss)
    by_microbatch = by_microbatch or case.precision.matmul_format is not None
    for mixture in list_mixtures(model).values():
        mixture.counts.num_targets = num_targets
    size = case.layout.micro_batch if by_microbatch else len(tokens)
    assert documents is None or not by_microbatch, "documents are not split here"
    for rows, wanted in zip(tokens.split(size), targets.split(size), strict=True):
        loss = model(rows, documents, targets=wanted, num_targets=num_targets)
        loss.backward()
        yield loss.detach()


def list_mixtures(model: torch.nn.Module) -> dict[str, Mixture]:
    """The mixtures of a model by their names."""
    return {name: part for name, part in model.named_modules() if isinstance(part, Mixture)}


@torch.no_grad()
def _move_biases(model: Llama, parameters: dict[str, torch.nn.Parameter]) -> None:
    """Each expert's bias goes up by the rate if it had fewer tokens than the mean, down if more."""
    for name, mixture in list_mixtures(model).items():
        counts = mixture.counts.take()[: mixture.rules.number]
        if mixture.rules.bias_rate:
            parameters[f"{name}.correction_bias"] += mixture.rules.bias_rate * (counts.mean() - counts).sign()


def run_layout(case: Case) -> Share:
    """The steps under a layout, on every rank at once."""
    assembly, step = build_step(case)
    gradients: dict[str, Part] = {}

    def keep_gradients(*_: object) -> None:
        gradients.clear()
        for name, parameter in named_parameters(assembly, case):
            if find_weight(case.model, name).trains:
                note_part(gradients, name, parameter.grad)
            elif isinstance(parameter, Tensor):
                assert parameter.grad is None and parameter not in step.optimizer.state, f"{name} is frozen"

    step.optimizer.register_step_pre_hook(keep_gradients)
    tokens, targets = local_rows(case)
    for _ in range(case.num_steps):
        result = step(tokens, targets, local_starts(case), loss_scale=case.loss_scale)
    clipped = min(1.0, MAX_NORM / (result.grad_norm + 1e-6))
    scale = (case.loss_scale or 1.0) if step.divides_in_update else clipped  # what they have been multiplied by
    scaled_back = {name: part._replace(values=part.values / scale) for name, part in gradients.items()}
    return Share(find_numbers(assembly, result), scaled_back, take_weights(assembly, case))


def find_numbers(assembly: Assembly, result: StepResult) -> tuple[float, float] | None:
    """Loss and gradient norm of a step, if this rank is the first of its stage."""
    return None if any(assembly.mesh.get_coordinate()[1:]) else (result.loss, result.grad_norm)


def take_weights(assembly: Assembly, case: Case) -> dict[str, Part]:
    """This rank's parts of weights by name; of a quantized one the whole of what its codes and scales stand for."""
    found: dict[str, Part] = {}
    for name, weight in named_parameters(assembly, case):
        if isinstance(weight, QuantizedWeight):
            weight = QUANTIZERS[weight.format.name].dequantize(gather(weight.codes), gather(weight.scales))
        note_part(found, name, weight)
    return found


def note_part(found: dict[str, Part], name: str, tensor: Tensor) -> None:
    """Add this rank's part of a tensor, of which two stages of the rank may have a copy each, to the bit the same."""
    tensor = tensor.detach()
    places = tuple(np.arange(n) for n in tensor.shape)
    size, local = tuple(tensor.shape), tensor
    if isinstance(tensor, DTensor):
        assert not any(placement.is_partial() for placement in tensor.placements), name
        places, local = _find_places(tensor), tensor.to_local()
    assert tuple(map(len, places)) == tuple(local.shape), name
    local = local.float() if local.dtype == torch.bfloat16 else local  # which numpy has not
    values = local.clone().numpy()
    part = found.setdefault(name, Part(size, places, values))
    assert np.array_equal(part.values, values), f"{name} differs between two stages of a rank"


def _find_places(tensor: DTensor) -> tuple[np.ndarray, ...]:
    """Where the elements of this rank lie in the whole tensor, along each axis of it."""
    places, mesh = [torch.arange(n) for n in tensor.shape], tensor.device_mesh
    for along, placement in enumerate(tensor.placements):
        axis = getattr(placement, "dim", None)
        if axis is None:
            continue
        own, parts = mesh.get_coordinate()[along], places[axis].chunk(getattr(placement, "split_factor", 1))
        chunks = [part.chunk(mesh.size(along)) for part in parts]
        places[axis] = torch.cat([each[own] if own < len(each) else each[0][:0] for each in chunks])
    return tuple(each.numpy() for each in places)


def evaluate_around_steps(case: Case) -> list[float]:
    """The loss of the batch that two steps train on, as it is evaluated before each, and as each has it."""
    _, step = build_step(case)
    rows, targets = local_rows(case)
    losses = []
    for _ in range(2):
        loss, count, is_stopped = step.evaluate(rows, targets, local_starts(case))
        assert not is_stopped and count == (make_tokens(case.batch, case.model.vocab_size)[1] != IGNORED).sum()
        losses.append(loss)
        losses.append(step(rows, targets, local_starts(case)).loss)
    return losses


def run_over_symmetric_memory(case: Case) -> Share:
    """As `run_layout`, as if tp's ranks saw each other's memory: torch's own references stand for its CUDA kernels."""
    for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"symm_mem::{name}", "CPU"):
            torch.library.impl(f"symm_mem::{name}", "CPU", getattr(_symmetric_memory, f"_{name}_fallback"))
    of_mesh = Group.of

    def with_shared_memory(mesh: DeviceMesh) -> Group:
        return of_mesh(mesh)._replace(shares_memory=True)

    with mock.patch.object(Group, "of", with_shared_memory):
        return run_layout(case)


def run_frozen(case: Case) -> Share:
    """As `run_layout`, of a model of which some weights are frozen."""
    with plugged_in("partly_frozen"):
        return run_layout(case)


def run_torch_muon(case: Case) -> Share:
    """As `run_layout`, with matrices updated by torch's Muon, and the rest by the case's optimizer."""
    with plugged_in("muon") as muon:
        return run_layout(replace(case, optimizer=muon.TorchMuon(rest=case.optimizer)))


@contextmanager
def choosing(experts: tuple[int, ...]) -> Iterator[None]:
    """Every token is computed by these experts, whatever its scores say."""

    def choose(scores_TE: Tensor, rules: Experts, correction_E: Tensor | None = None) -> Tensor:
        return torch.tensor(experts).expand(len(scores_TE), -1).contiguous()

    with mock.patch("dtlayout.models.feed_forward.choose", choose):
        yield


on_one_expert, on_some_experts = partial(choosing, (5, 5)), partial(choosing, (1, 0))


def run_on_one_expert(case: Case) -> Share:
    """As `run_layout`, with every token computed twice by one expert, and the others getting none."""
    with on_one_expert():
        return run_layout(case)


def run_on_some_experts(case: Case) -> Share:
    """As `run_layout`, with every token computed by two experts that lie on one rank."""
    with on_some_experts():
        return run_layout(case)


def run_in_a_v(case: Case) -> Share:
    """As `run_layout`, with a schedule whose stages lie in a V."""
    with registered(V_GPIPE):
        return run_layout(case)


@contextmanager
def compiling_with(backend: str) -> Iterator[None]:
    """Whatever is compiled in the block is compiled by this backend."""
    compile_function, compile_module = torch.compile, torch.nn.Module.compile
    torch.compile = partial(compile_function, backend=backend)
    torch.nn.Module.compile = partialmethod(compile_module, backend=backend)
    try:
        yield
    finally:
        torch.compile, torch.nn.Module.compile = compile_function, compile_module


def build_step(case: Case) -> tuple[Assembly, TrainStep]:
    """What training builds."""
    case.layout.check(case.model, case.batch)
    assembly = assemble(case.model, case.batch, case.layout, case.kernels, case.precision, seed=SEED, device_type="cpu")
    optimizer = build_optimizer(assembly.modules, case.model, case.optimizer, assembly.disk)
    set_learning_rate(optimizer, case.optimizer.lr)
    return assembly, TrainStep(assembly.runtime, optimizer, max_norm=MAX_NORM, mesh=assembly.mesh, model=case.model)


def named_parameters(assembly: Assembly, case: Case) -> list[tuple[str, Any]]:
    """This rank's weights by the name that they have in the whole model, a quantized one as its two parameters."""
    return [
        (case.model.aliases.get(name, name), parameter)
        for module in assembly.modules
        for name, parameter in named_weights(module)
    ]


def local_rows(case: Case) -> tuple[Tensor, Tensor]:
    """This rank's share of the global batch: rows, and of each the tokens of its cp rank."""
    rows = [each[_own_rows(case)] for each in make_tokens(case.batch, case.model.vocab_size)]
    tokens, targets = take_own(rows, local_starts(case), case.layout, dist.get_rank())
    return tokens, targets


def local_starts(case: Case) -> Tensor | None:
    """Where documents start in this rank's rows, all of them."""
    starts = make_starts(case, make_tokens(case.batch, case.model.vocab_size)[0])
    return starts if starts is None else starts[_own_rows(case)]


def _own_rows(case: Case) -> slice:
    """Those of the global batch that are this rank's."""
    size = case.batch.global_batch // case.layout.dp
    first = dp_rank(dist.get_rank(), case.layout) * size
    return slice(first, first + size)


def make_optimizer(
    settings: Optimizer, parameters: dict[str, torch.nn.Parameter], model: ModelShape
) -> torch.optim.Optimizer:
    """As people write it who have one process."""
    values = asdict(settings)
    if settings.name == "torch-muon":
        roles = {name: find_weight(model, name).role for name in parameters}
        rest = {name: parameter for name, parameter in parameters.items() if roles[name] != "matrix"}
        matrices = [{"params": [p for name, p in parameters.items() if name not in rest]}]
        decay = {"lr": values["lr"], "weight_decay": values["weight_decay"]}
        by_muon = torch.optim.Muon(matrices, momentum=values["momentum"], **decay)
        return JointOptimizer([by_muon, make_optimizer(settings.rest, rest, model)])
    if isinstance(settings, Muon):
        of_muon = {name: p for name, p in parameters.items() if find_weight(model, name).role in ("matrix", "expert")}
        rest = {name: parameter for name, parameter in parameters.items() if name not in of_muon}
        return JointOptimizer([WholeMuon(of_muon.values(), settings), make_optimizer(settings.rest, rest, model)])
    matrices, vectors = ([p for p in parameters.values() if (p.dim() > 1) == is_matrix] for is_matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": values["weight_decay"]}, {"params": vectors, "weight_decay": 0.0}]
    if settings.name == "sgd":
        return torch.optim.SGD(groups, lr=values["lr"], momentum=values["momentum"])
    betas = values["beta1"], values["beta2"]
    adamw = torch.optim.AdamW(groups, lr=values["lr"], betas=betas, eps=values["eps"], fused=True)
    if settings.state_format:
        adamw.register_step_post_hook(_round_moments)
    return adamw


def _round_moments(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Leave in both moments what bf16 keeps of them, in the parameters' format."""
    for state in optimizer.state.values():
        for kind in ("exp_avg", "exp_avg_sq"):
            state[kind] = state[kind].bfloat16().to(state[kind].dtype)


def merge(shares: list[Share]) -> Outcome:
    """One outcome from the shares of all ranks; where several hold the same, the first one's counts."""
    (loss, grad_norm), *others = (share.numbers for share in shares if share.numbers is not None)
    assert all(other == (loss, grad_norm) for other in others)
    whole = (_put_together([getattr(share, kind) for share in shares]) for kind in ("gradients", "parameters"))
    return Outcome(loss, grad_norm, *whole)


def _put_together(shares: list[dict[str, Part]]) -> dict[str, np.ndarray]:
    """Whole tensors by name."""
    whole: dict[str, np.ndarray] = {}
    missing: dict[str, np.ndarray] = {}
    for share in reversed(shares):
        for name, part in share.items():
            tensor = whole.setdefault(name, np.empty(part.size, part.values.dtype))
            left = missing.setdefault(name, np.ones(part.size, bool))
            tensor[np.ix_(*part.places)], left[np.ix_(*part.places)] = part.values, False
    assert not any(left.any() for left in missing.values()), [name for name, left in missing.items() if left.any()]
    return whole


def largest_difference(outcome: Outcome, reference: Outcome) -> tuple[float, str]:
    """The largest relative difference, ‖a - b‖ / ‖b‖, of loss, norm, gradients and parameters, and whose it is."""
    assert outcome.gradients.keys() == reference.gradients.keys()
    assert outcome.parameters.keys() == reference.parameters.keys()
    differences = [
        (relative_difference(np.array(outcome.loss), np.array(reference.loss)), "loss"),
        (relative_difference(np.array(outcome.grad_norm), np.array(reference.grad_norm)), "norm"),
    ]
    for kind in ("gradients", "parameters"):
        for name, expected in getattr(reference, kind).items():
            got = getattr(outcome, kind)[name]
            assert got.dtype == expected.dtype and got.shape == expected.shape, f"{kind} of {name}"
            differences.append((relative_difference(got, expected), f"{kind} of {name}"))
    return max(differences)


def relative_difference(got: np.ndarray, expected: np.ndarray) -> float:
    """‖got - expected‖ / ‖expected‖, infinite for NaN, which no comparison would find; 0 for equal zeros."""
    if np.array_equal(got, expected):
        return 0.0
    difference, size = (float(np.linalg.norm(each.ravel())) for each in (got - expected, expected))
    return difference / size if size and np.isfinite(difference) else np.inf


def _to_numpy(tensors: dict) -> dict[str, np.ndarray]:
    return {name: tensor.detach().clone().numpy() for name, tensor in tensors.items()}


def skip_between_steps(case: Case) -> bool:
    """Whether two steps end with the same bits on this rank if one stands between them that is not finite.

    A weight of the last rank alone is poisoned for it, or its gradients overflow at a huge scale where the case has
    one. AssertionError if that step changes a bit of anything.
    """
    ends = []
    for is_poisoned in (False, True):
        assembly, step = build_step(case)
        tokens, targets = local_rows(case)
        weights = [_to_local(parameter) for module in assembly.modules for parameter in module.parameters()]
        step(tokens, targets, loss_scale=case.loss_scale)
        if is_poisoned and case.loss_scale:
            before = _read_bits(weights, step)
            assert step(tokens, targets, loss_scale=2.0**60).overflows, "the overflow was not seen"
            assert all(map(torch.equal, before, _read_bits(weights, step))), "a step that overflows has updated"
        elif is_poisoned:
            place = weights[-1].view(-1)[:1]
            value = place.clone()
            if dist.get_rank() == dist.get_world_size() - 1:
                place.fill_(torch.nan)
            before = _read_bits(weights, step)
            assert not step(tokens, targets).is_finite, "the poison was not seen"
            assert all(map(torch.equal, before, _read_bits(weights, step))), "a step that is not finite has updated"
            place.copy_(value)
        step(tokens, targets, loss_scale=case.loss_scale)
        ends.append(_read_bits(weights, step))
    return all(map(torch.equal, *ends))


def evaluate_after(case: Case) -> float:
    """The loss after `num_steps` steps."""
    _, step = build_step(case)
    for _ in range(case.num_steps):
        step(*local_rows(case), local_starts(case))
    return step.evaluate(*local_rows(case), local_starts(case))[0]


def train_with_overflows(case: Case) -> tuple[float, list[float]]:
    """The loss after `num_steps` updates, and the scales of all steps, of which some overflow and update nothing.

    The first scale is far too large, and soon grows to be so again.
    """
    _, step = build_step(case)
    scale, scales, num_updates = LossScale(2.0**28, 4), list[float](), 0
    while num_updates < case.num_steps:
        result = step(*local_rows(case), local_starts(case), loss_scale=scale.value)
        assert result.is_finite or result.overflows
        num_updates += result.is_finite
        scales.append(scale.value)
        scale.add(result)
    return step.evaluate(*local_rows(case), local_starts(case))[0], scales


def offload_without_a_bit(case: Case) -> int:
    """Bytes of activations that go to the host in the second of two steps.

    AssertionError if a bit of anything on this rank is another one than in the same layout without offload.
    """
    ends, sent = [], []

    def count_bytes(tensor: Tensor) -> Tensor:
        sent.append(tensor.nbytes)
        return copy_to_host(tensor)

    for offload in ("none", case.layout.offload):
        assembly, step = build_step(replace(case, layout=replace(case.layout, offload=offload)))
        numbers = [step(*local_rows(case), local_starts(case))]
        sent.clear()
        with mock.patch("dtlayout.plans.offload.copy_to_host", count_bytes):
            numbers.append(step(*local_rows(case), local_starts(case)))
        weights = [_to_local(parameter) for _, parameter in named_parameters(assembly, case)]
        ends.append((numbers, _read_bits(weights, step)))
    (numbers, bits), (others, offloaded) = ends
    assert numbers == others
    assert len(bits) == len(offloaded) and all(map(torch.equal, bits, offloaded))
    return sum(sent)


def _read_bits(weights: list[Tensor], step: TrainStep) -> list[Tensor]:
    """Parameters and the optimizer's state, counts of steps too, of which NaN equals NaN."""
    states = [step.optimizer.state.get(p, {}) for module in step.modules for p in module.parameters()]
    assert sum(map(bool, states)) == len(step.optimizer.state) > 0
    kept = [state[kind] for state in states for kind in sorted(state) if isinstance(state[kind], Tensor)]
    return [_to_local(tensor).clone().reshape(-1).view(torch.uint8) for tensor in (*weights, *kept)]


def _to_local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
