"""Checking: all that keeps a config from training on so many ranks, found before a process starts.

Each owner has its own rules: the layout, the sections beside each other, our trainer's engine and the kernels.
`check_layout` is the one place that asks all of them, so that all problems are reported at once. No torch.
"""

from collections.abc import Callable
from math import frexp, gcd, lcm, log2

from dtlayout.base.errors import InvalidConfig, InvalidLayout
from dtlayout.base.refusals import Refusal, describe
from dtlayout.config.config import Config
from dtlayout.config.loading import has_begun
from dtlayout.config.new_rows import count_ids
from dtlayout.costmodel.engine import OWN_ENGINE, find_engine
from dtlayout.costmodel.engine_rules import find_training_lacks
from dtlayout.models.families import describe as describe_model
from dtlayout.models.families import find_family, find_target_problems
from dtlayout.models.traced import FAMILY, find_changed_sizes, find_whole
from dtlayout.models.weights import check_init_from, describe_no_new_rows
from dtlayout.spec.device import Device, check_formats, check_update_format, expect_device
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import divisors
from dtlayout.spec.optimizers import AdamW, RoleOptimizer, check_state_format
from dtlayout.spec.trackers import package_problems


def check_layout(config: Config, world_size: int, device: Device | None = None) -> Layout:
    """The config's layout on `world_size` ranks; InvalidLayout with everything that is wrong with the config there.

    `device` is where the config is to run, perhaps elsewhere. Without one it runs here, on the device that
    `train.device` names; an auto is left to torch.
    """
    problems = package_problems(config.metrics.to) if device is None else []
    device = device or expect_device(config.train.device, None)
    try:
        layout = config.layout.resolve(world_size)
    except InvalidLayout:
        layout = config.layout.resolve(config.layout.smallest_world_size)
        problems.append(_describe_mismatch(config, world_size))
    model, kernels = config.model, config.choose_kernels(device, layout).kernels
    trainer = find_engine(OWN_ENGINE, "cpu")  # its features are those on any device
    problems += _find_batch_problems(config, layout) + config.optimizer.layout_problems(layout)
    problems += describe([broken for rule in _RULES for broken in rule(config)])
    problems += find_training_lacks(trainer, layout, model, config.precision)
    problems += describe(check_formats(device, config.precision) + check_update_format(device, config.optimizer))
    problems += describe(check_state_format(config.optimizer))
    problems += kernels.problems(config.request_kernels(device, layout))
    if problems:
        raise InvalidLayout(problems)
    return layout


def _find_batch_problems(config: Config, layout: Layout) -> list[str]:
    """Reasons why the layout cannot train with the batch, or else with a size of its ramp."""
    if problems := layout.problems(config.model, config.batch):
        return problems
    found = [
        (stage, problem)
        for stage, batch in zip(config.train.batch_ramp, config.batches, strict=False)
        for problem in layout.problems(config.model, batch)
    ]
    return [f"train.batch_ramp until {stage.until} samples: {problem}" for stage, problem in found]


def _describe_mismatch(config: Config, world_size: int) -> str:
    """A line on a world size that does not fit the layout, with the nearest ones for which the layout is legal."""
    smallest = config.layout.smallest_world_size
    shared = gcd(*(batch.global_batch for batch in config.batches))  # dp divides each batch
    shards = divisors(shared) if config.layout.dp_shard == -1 else [1]
    sizes = [smallest * n for n in shards]
    legal = [
        size
        for size in sizes
        if all(config.layout.resolve(size).is_legal(config.model, batch) for batch in config.batches)
    ]
    nearest = sorted(sorted(legal, key=lambda size: abs(size - world_size))[:2])
    return config.layout.describe_mismatch(world_size, nearest or [smallest])


def _check_family(config: Config) -> list[Refusal]:
    """The model's family is known."""
    try:
        find_family(config.model.family)
    except InvalidConfig as error:
        return [Refusal("model.family", problem) for problem in error.problems]
    return []


def _check_traced(config: Config) -> list[Refusal]:
    """A traced model has the sizes of its trace, and keeps documents apart if its code can."""
    changed = [Refusal("model", each, "trace a config.json that has it") for each in find_changed_sizes(config.model)]
    if changed or not config.data.document_mask or "document_mask" not in (whole := find_whole(config.model)):
        return changed
    what = f"data.document_mask=true cannot keep documents apart: {whole['document_mask']}"
    return [Refusal("data.document_mask", what, "use document_mask=false")]


def _check_first_weights(config: Config) -> list[Refusal]:
    """A new run can start from the weights that it names, and one with an adapter goes on beside them."""
    if not config.train.init_from or (has_begun(config.train.run_folder) and config.model.adapter is None):
        return []
    return [Refusal("train.init_from", problem) for problem in check_init_from(config.train.init_from, config.model)]


def _check_tokens(config: Config) -> list[Refusal]:
    """An adapter's frozen model has a row for each token: it gets no new ones."""
    model, num_ids = config.model, count_ids(config.data.tokenizer)
    if model.adapter is None or not config.train.init_from or num_ids <= model.num_ids:
        return []
    return [Refusal("data.tokenizer", describe_no_new_rows(f"the tokenizer has {num_ids} ids", num_ids, model.num_ids))]


def _check_filling(config: Config) -> list[Refusal]:
    """An adapter's frozen model has rows that tp divides: none fill it up."""
    model, tp = config.model, config.layout.tp
    if model.adapter is None or not config.train.init_from or tp < 2 or model.vocab_size % tp == 0:
        return []
    what = f"beside [adapter] no rows fill up vocab_size={model.vocab_size} for tp={tp}"
    advice = (
        f"resize the frozen model, by transformers: model.resize_token_embeddings({model.vocab_size}, "
        f"pad_to_multiple_of={lcm(8, tp)}), and save_pretrained to a new folder for train.init_from"
    )
    return [Refusal("train.init_from", what, advice)]


def describe_start(config: Config) -> list[str]:
    """Lines on a start that is hardly meant: a rate of pretraining for a model that is trained, no weights to adapt."""
    lines = []
    if config.train.init_from and config.optimizer.lr == AdamW.lr:
        usual = "1e-4 to 2e-4 for LoRA" if config.model.adapter else "1e-5 to 2e-5 for a whole model of 8B"
        warmup = ", and optimizer.warmup_steps is 0" * (not config.optimizer.warmup_steps)
        lines.append(
            f"optimizer.lr={AdamW.lr:g} is the default, for a model that has learnt nothing{warmup}; fine-tuning "
            f"mostly takes {usual}, with a warm-up"
        )
    if config.model.adapter is not None and not config.train.init_from:
        lines.append("the frozen model beside [adapter] is drawn at random; train.init_from names its weights")
    return lines


def _check_traced_rows(config: Config) -> list[Refusal]:
    """A traced model has a row for each token, and rows that tp divides: its code is built with those of its folder."""
    model, tp = config.model, config.layout.tp
    if model.family != FAMILY or model.adapter is not None or not config.train.init_from:
        return []
    num_rows, num_ids = model.vocab_size, count_ids(config.data.tokenizer)
    found = []
    if num_ids > num_rows:
        found.append(f"the tokenizer has {num_ids} ids, the model {num_rows} rows of embedding and head")
    if tp > 1 and num_rows % tp:
        found.append(f"tp={tp} does not divide {num_rows} rows")
    advice = (
        f"resize it, by transformers: model.resize_token_embeddings({max(num_rows, num_ids)}, "
        f"pad_to_multiple_of={lcm(8, tp)}), and save_pretrained to a new folder for model.name and train.init_from"
    )
    what = f"a traced model gets no new rows: {'; '.join(found)}"
    return [Refusal("model.vocab_size", what, advice)] if found else []


def _check_export(config: Config) -> list[Refusal]:
    """Weights are exported out of a checkpoint."""
    if not config.checkpoint.export or config.checkpoint.save:
        return []
    what = "checkpoint.export=true writes what was saved, but checkpoint.save=false"
    return [Refusal("checkpoint.export", what, "use save=true")]


def _check_spikes(config: Config) -> list[Refusal]:
    """The state that met a spike is saved like a checkpoint."""
    if config.spikes.action != "save" or config.checkpoint.save:
        return []
    what = 'spikes.action="save" saves a state, but checkpoint.save=false'
    return [Refusal("spikes.action", what, 'use save=true or action="skip"')]


def check_warmup(config: Config) -> list[Refusal]:
    """The learning rate reaches its highest value before the run ends, or before it has fallen.

    Nothing is refused where `train.epochs` says the length, before the number of steps is known.
    """
    optimizer = config.optimizer
    name, num_steps = "train.steps", config.train.steps
    if optimizer.decay_steps:
        name, num_steps = "optimizer.decay_steps", optimizer.decay_steps
    if optimizer.warmup_steps <= num_steps or not num_steps:
        return []
    warmup = f"optimizer.warmup_steps={optimizer.warmup_steps} is more than {name}={num_steps}"
    advice = "use fewer, or optimizer.decay_steps=N for the first steps of a run of N"
    return [Refusal("warmup", f"{warmup}, so that the learning rate would never reach optimizer.lr", advice)]


def _check_ramp(config: Config) -> list[Refusal]:
    """The curve of memory is drawn of steps that are predicted."""
    if not config.train.batch_ramp or not config.metrics.memory:
        return []
    what = "metrics.memory=true draws the first steps, which train.batch_ramp makes smaller than what is predicted"
    return [Refusal("metrics.memory", what, "use memory=false, or no ramp")]


def _check_adapter(config: Config) -> list[Refusal]:
    """The model has the modules that get an adapter."""
    return [Refusal("adapter.targets", problem) for problem in find_target_problems(config.model)]


def _check_roles(config: Config) -> list[Refusal]:
    """An optimizer of some roles has weights to update."""
    optimizer, model = config.optimizer, config.model
    if not isinstance(optimizer, RoleOptimizer):
        return []
    kinds = [kind for kind, _ in model.kinds(range(model.num_layers))]
    weights = [weight for kind in kinds for weight in describe_model(kind).block_weights]
    if any(weight.trains and weight.role in optimizer.roles for weight in weights):
        return []
    of_roles = f"no weight of role {' or '.join(sorted(optimizer.roles))} in a block is trained"
    what = f"optimizer.name={optimizer.name} would update nothing: {of_roles}"
    return [Refusal("optimizer.name", what, f"use optimizer.name={optimizer.rest.name}")]


def _check_loss_scale(config: Config) -> list[Refusal]:
    """A factor of the loss is one that changes no bit of a gradient, and is used."""
    factor = config.train.loss_scale
    if factor and config.precision.compute != "float16":
        what = f"train.loss_scale={factor:g} scales no loss in precision.compute={config.precision.compute}"
        return [Refusal("train.loss_scale", what, "use loss_scale=0")]
    if factor and (factor < 1 or frexp(factor)[0] != 0.5):
        what = f"train.loss_scale={factor:g} is no power of two from 1 on, so that it would round gradients"
        return [Refusal("train.loss_scale", what, f"use loss_scale={2.0 ** max(0, round(log2(factor))):g}")]
    return []


def _check_disk(config: Config) -> list[Refusal]:
    """State on disk has a folder there; whether that has room is asked where the run starts."""
    layout = config.layout
    if not layout.has_state_on_disk or layout.offload_folder:
        return []
    what, advice = "layout.offload=disk needs layout.offload_folder", "name a folder on a fast local disk"
    return [Refusal("layout.offload_folder", what, advice)]


_RULES: tuple[Callable[[Config], list[Refusal]], ...] = (
    _check_family, _check_adapter, _check_first_weights, _check_tokens, _check_filling, _check_export, _check_spikes,
    check_warmup, _check_roles, _check_ramp, _check_loss_scale, _check_disk, _check_traced, _check_traced_rows,
)  # fmt: skip
"""Rules of sections beside each other."""
