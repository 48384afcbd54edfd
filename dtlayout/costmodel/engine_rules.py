"""The rules of an engine: what a training program does not have of a legal layout, a model or a precision.

Each rule reads the engine's `Features`, so what a program has is said by its file alone, constants/engines/NAME.toml.
The check of our own trainer asks these rules, as the check of any other engine does.
"""

from dataclasses import replace

from dtlayout.base.refusals import Refusal, describe, show_value
from dtlayout.costmodel.engine import OWN_ENGINE, Engine
from dtlayout.costmodel.engine_features import KNOWN_AXES
from dtlayout.costmodel.recompute_modules import MODULES, USUAL_MODULES, find_missing, list_parts
from dtlayout.models.families import FAMILIES
from dtlayout.models.families import describe as describe_model
from dtlayout.models.operations import Linear
from dtlayout.models.traced import FAMILY, find_state, find_whole
from dtlayout.spec.base_format import BASE_FORMATS
from dtlayout.spec.fake_quant import FAKE_QUANT_FORMATS
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape, divisors
from dtlayout.spec.precision import ALIGNMENT, Precision
from dtlayout.spec.recompute import Recompute

_OFF = Layout()
_NEEDS_EP = {"experts": "mixture of experts", "latent_attention": "multi-head latent attention"}
"""Keys of a model that only engines with ep train, and what a value there is called."""


def find_layout_lacks(engine: Engine, layout: Layout, model: ModelShape) -> list[str]:
    """A line for everything in a legal layout of a model that the engine does not have."""
    return describe([
        *_check_axes(engine, layout),
        *_check_dispatcher(engine, layout),
        *_check_ep_overlap(engine, layout),
        *check_schedule(engine, layout.schedule),
        *check_zero(engine, layout.zero, layout.pp),
        *check_recompute(engine, layout.recompute, model),
        *check_data_parallel(engine, layout.dp_replicate, layout.dp_shard),
        *_check_sequence_parallel(engine, layout),
        *_check_stages(engine, layout, model),
        *_check_tokens_of_experts(layout, model),
        *_check_adapter(layout, model),
        *_check_state(layout, model),
        *_check_kept_whole(engine, layout, model),
        *check_copies_of_experts(engine, layout.ep, layout.dp_replicate, layout.dp_shard * layout.cp * layout.tp),
    ])  # fmt: skip


def find_model_lacks(engine: Engine, model: ModelShape) -> list[str]:
    """A line for everything in a model that the engine cannot be predicted with."""
    return describe(_check_model(engine, model))


def find_training_lacks(engine: Engine, layout: Layout, model: ModelShape, precision: Precision) -> list[str]:
    """A line for everything that the engine does not have, or can only be predicted with, and so cannot train."""
    asked = layout.effective
    if model.experts is None:  # a rule of the layout refuses ep then
        asked = replace(asked, ep=1)
    lacks = describe([
        *check_matmuls(engine, precision), *_check_untrained(engine, model), *check_base(precision, model, layout.tp),
        *check_scaled_model(engine, precision, model), *check_scaled(engine, precision, model, layout),
        *check_fake_quant_model(engine, precision, model), *check_fake_quant(precision, model, layout),
        *_check_traced(engine, layout, model, precision),
    ])  # fmt: skip
    return [*lacks, *find_model_lacks(engine, model), *find_layout_lacks(engine, asked, model)]


def check_matmuls(engine: Engine, precision: Precision) -> list[Refusal]:
    """The format below bf16 in which linear layers multiply is one of the engine's."""
    known = ("compute", *engine.features.matmuls)
    if precision.matmul_format is None or precision.matmuls in known:
        return []
    key = "precision.matmuls=" if engine.name == OWN_ENGINE else ""
    return [_lack(engine, f"precision.matmuls={precision.matmuls}", f"use {key}{' or '.join(known)}")]


def check_schedule(engine: Engine, schedule: str) -> list[Refusal]:
    """The pipeline schedule is one of the engine's."""
    known = engine.features.schedules or (schedule,)
    return [] if schedule in known else [_lack(engine, f"layout.schedule={schedule}", f"use {' or '.join(known)}")]


def check_zero(engine: Engine, zero: int, pp: int) -> list[Refusal]:
    """The stage of ZeRO is one that the engine has, in a pipeline too if there is one."""
    most, where = engine.features.highest_zero, ""
    if pp > 1 and engine.features.pipeline_zero < most:
        most, where = engine.features.pipeline_zero, " in a pipeline"
    if zero <= most:
        return []
    return [_lack(engine, f"layout.zero={zero}{where}", f"use zero={most}{' or less' * (most > 1)}")]


def check_recompute(engine: Engine, recompute: str, model: ModelShape) -> list[Refusal]:
    """The kind of recomputation is one of the engine's: those it names, or those its checkpointing can do.

    The model has the modules that a selective one computes again, where the program would refuse them.
    """
    asked = f"layout.recompute={recompute}"
    if known := engine.features.recompute:
        parsed = Recompute.parse(recompute)
        kind = recompute if not parsed.is_partial else "every-N" if parsed.number == 1 else "N-of-M"
        return [] if kind in known else [_lack(engine, asked, f"use {' or '.join(known)}")]
    parsed = Recompute.parse(recompute)
    if engine.features.checkpointing == "torch" or not parsed.is_selective:
        return []
    if len(parsed.kept) == 1:
        return [_lack(engine, asked, f"use selective, which computes {_show_modules(engine)} again, or full")]
    return _check_modules(engine, model)


def _show_modules(engine: Engine) -> str:
    modules = engine.features.recompute_modules
    return "attention alone" if modules == USUAL_MODULES else " and ".join(modules)


def _check_modules(engine: Engine, model: ModelShape) -> list[Refusal]:
    """The model has parts of which one of the modules is made, and those that the program takes no module without."""
    modules = engine.features.recompute_modules
    if modules == USUAL_MODULES:
        return []
    missing = find_missing(modules, list_parts(model))
    has_none = len(missing) == len(modules)
    return [
        Refusal(
            "recompute_modules", f"recompute_modules={name} needs {parts}, and {model.name} has none",
            f"leave {name} out of recompute_modules",
        )
        for name, parts in missing.items()
        if has_none or MODULES[name].is_refused
    ]  # fmt: skip


def check_data_parallel(engine: Engine, dp_replicate: int, dp_shard: int) -> list[Refusal]:
    """The layout's kind of data parallelism is one that the engine has.

    The kind is "sharded" without replicas, "hybrid" with replicas of shards, and "replicated" with replicas alone.
    """
    known = engine.features.data_parallel
    kind = "sharded" if dp_replicate == 1 else "hybrid" if dp_shard > 1 else "replicated"
    if kind in known:
        return []
    where = "without shards" if kind == "replicated" else f"beside dp_shard={dp_shard}"
    others = " or dp_shard=1" * (kind == "hybrid" and "replicated" in known)
    return [_lack(engine, f"layout.dp_replicate={dp_replicate} {where}", f"use dp_replicate=1{others}")]


def _check_axes(engine: Engine, layout: Layout) -> list[Refusal]:
    """The engine has each axis above 1, the method of cp, and the offload."""
    features, lacks = engine.features, list[Refusal]()
    if layout.offload not in features.offloads:
        use = f"use layout.offload={' or '.join(features.offloads)}"
        lacks.append(_lack(engine, f"layout.offload={layout.offload}", use))
    if layout.cp > 1 and layout.cp_method not in features.cp_methods:
        use = f"use layout.cp_method={' or '.join(features.cp_methods)}"
        lacks.append(_lack(engine, f"layout.cp_method={layout.cp_method}", use))
    for name in KNOWN_AXES:
        value, off = getattr(layout, name), getattr(_OFF, name)
        if name not in features.axes and value != off:
            use = f"use layout.{name}={show_value(off)}"
            lacks.append(_lack(engine, f"layout.{name}={show_value(value)}", use))
    return lacks


def _check_sequence_parallel(engine: Engine, layout: Layout) -> list[Refusal]:
    """tp goes without sequence parallelism where the engine can switch that off, and with it where it has that."""
    if layout.shards_sequence and not engine.features.has_sequence_parallel:
        return [_lack(engine, "layout.sequence_parallel=true", "use layout.sequence_parallel=false")]
    if layout.tp == 1 or layout.sequence_parallel or not engine.features.always_sequence_parallel:
        return []
    return [_lack(engine, "layout.sequence_parallel=false", "use layout.sequence_parallel=true")]


def _check_stages(engine: Engine, layout: Layout, model: ModelShape) -> list[Refusal]:
    """Stages have as many blocks each where the engine asks for that; embedding and head may count as a block each."""
    layers = model.num_layers
    if not engine.features.even_stages or not all((layers + ends) % layout.num_stages for ends in (0, 1, 2)):
        return []
    what = (
        f"{layers} blocks, or one or two more for embedding and head, make no {layout.num_stages} even stages, as "
        f"{engine.name} asks"
    )
    return [Refusal("stages", what, "use another pp or virtual_stages")]


def _check_tokens_of_experts(layout: Layout, model: ModelShape) -> list[Refusal]:
    """Each token is sent once by the ranks of tp: where it has experts, they share it by sequence parallelism."""
    if not model.experts or layout.tp == 1 or layout.sequence_parallel:
        return []
    what = "tp beside experts without sequence_parallel sends each token tp times"
    return [Refusal("sequence_parallel", what, "use sequence_parallel=true")]


def _check_adapter(layout: Layout, model: ModelShape) -> list[Refusal]:
    """Matmuls that tp overlaps with its collectives have no adapter beside them."""
    if model.adapter is None or not layout.overlaps_tp:
        return []
    what = "layout.tp_overlap sends the parts of frozen matmuls, and none of [adapter] beside them"
    return [Refusal("tp_overlap", what, "use tp_overlap=false")]


def check_base(precision: Precision, model: ModelShape, tp: int) -> list[Refusal]:
    """A base in few bits is frozen, and tp splits the rows of its weights between blocks."""
    if (base := BASE_FORMATS.get(precision.base)) is None:
        return []
    asked = f"precision.base={base.name}"
    if model.adapter is None:
        what = f"{asked} stores frozen weights, and without [adapter] all are trained"
        return [Refusal("precision.base", what, "use base=compute, or [adapter]")]
    broken = dict[str, Refusal]()
    for kind, _ in model.kinds(range(model.num_layers)):
        for weight in (each for each in describe_model(kind).block_weights if each.can_be_quantized):
            (_, columns), ranks = weight.shape, tp if weight.split == 1 else 1
            if columns % (base.block * ranks) == 0:
                continue
            legal = [n for n in divisors(tp) if columns % (base.block * n) == 0]
            name = weight.name.removesuffix(".weight")
            what = f"{asked} stores blocks of {base.block}, and a row of {name} has {columns // ranks} elements"
            what += f" on each of {ranks} ranks of tp" * (ranks > 1)
            advice = f"use tp={' or '.join(map(str, legal))}" if legal else "use base=compute"
            broken.setdefault(name, Refusal("precision.base", what, advice))
    return [*broken.values()]


def check_scaled_model(engine: Engine, precision: Precision, model: ModelShape) -> list[Refusal]:
    """Linear layers that our own trainer multiplies below the compute format are there, whatever the layout.

    Beside such layers it has no base of few bits.
    """
    if engine.name != OWN_ENGINE or precision.matmuls not in engine.features.matmuls:
        return []
    asked, broken = f"precision.matmuls={precision.matmuls}", list[Refusal]()
    if precision.base in BASE_FORMATS:
        what = f"{asked} casts weights in the compute format, and precision.base={precision.base} has none"
        broken.append(Refusal("precision.base", what, "use precision.base=compute or precision.matmuls=compute"))
    if not _list_scaled(model):
        what = f"{asked} needs linear layers with sizes that {ALIGNMENT} divides, and no block has one"
        broken.append(Refusal("precision.matmuls", what, "use precision.matmuls=compute"))
    return broken


def _list_scaled(model: ModelShape) -> list[Linear]:
    """Linear layers of each kind of block that our own trainer multiplies below the compute format."""
    blocks = [describe_model(kind).block for kind, _ in model.kinds(range(model.num_layers))]
    return [each for block in blocks for each in block if isinstance(each, Linear) and each.is_scaled(ALIGNMENT)]


def check_scaled(engine: Engine, precision: Precision, model: ModelShape, layout: Layout) -> list[Refusal]:
    """Parts of such linear layers on tp's ranks are ones that kernels take, and no matmul comes in pieces."""
    if engine.name != OWN_ENGINE or precision.matmuls not in engine.features.matmuls:
        return []
    asked, broken = f"precision.matmuls={precision.matmuls}", list[Refusal]()
    if layout.overlaps_tp:
        what = f"{asked} casts whole tensors, and layout.tp_overlap multiplies pieces"
        broken.append(Refusal("tp_overlap", what, "use tp_overlap=false"))
    for linear in _list_scaled(model):
        side = "outputs" if linear.style == "colwise" else "inputs"
        size: int = getattr(linear, side)
        if size % (ALIGNMENT * layout.tp) == 0:
            continue
        legal = [n for n in divisors(layout.tp) if size % (ALIGNMENT * n) == 0]
        what = f"{asked}: {ALIGNMENT} does not divide the part of {linear.module} on {layout.tp} ranks of tp, which "
        what += f"has {size} {side}"
        broken.append(Refusal("precision.matmuls", what, f"use tp={' or '.join(map(str, legal))}"))
    return broken


def check_fake_quant_model(engine: Engine, precision: Precision, model: ModelShape) -> list[Refusal]:
    """Rounded weights are all trained, their export can store them, and our own trainer multiplies by them."""
    if (fmt := FAKE_QUANT_FORMATS.get(precision.fake_quant)) is None:
        return []
    asked, advice, broken = f"precision.fake_quant={fmt.name}", "use precision.fake_quant=none", list[Refusal]()
    if engine.name != OWN_ENGINE:
        return [Refusal("precision.fake_quant", f"{asked} is nothing that {engine.name} has", advice)]
    if model.experts is not None:
        what = f"{asked} beside experts is nothing that {engine.name} has: no export stores their stacks in {fmt.name}"
        broken.append(Refusal("precision.fake_quant", what, advice))
    if model.adapter is not None:
        what = (
            f"{asked} rounds weights that are trained, and with [adapter] an export rounds sums that no step has seen"
        )
        broken.append(Refusal("precision.fake_quant", what, f"{advice}, or precision.base for a base of few bits"))
    odd = [each for each in list_rounded(model) if each.inputs % (fmt.group or 1)]
    if odd:
        what = f"{asked} has groups of {fmt.group} columns, which do not divide the {odd[0].inputs} of {odd[0].module}"
        able = [each.name for each in FAKE_QUANT_FORMATS.values() if not any(i.inputs % (each.group or 1) for i in odd)]
        broken.append(Refusal("precision.fake_quant", what, f"use precision.fake_quant={' or '.join((*able, 'none'))}"))
    return broken


def list_rounded(model: ModelShape) -> list[Linear]:
    """Linear layers of a block whose weights `precision.fake_quant` rounds."""
    return [each for each in describe_model(model).block if isinstance(each, Linear) and each.is_split]


def check_fake_quant(precision: Precision, model: ModelShape, layout: Layout) -> list[Refusal]:
    """Ranks of tp hold whole groups of rounded weights, and no matmul comes in pieces."""
    if (fmt := FAKE_QUANT_FORMATS.get(precision.fake_quant)) is None:
        return []
    asked, broken = f"precision.fake_quant={fmt.name}", list[Refusal]()
    if layout.overlaps_tp:
        what = f"{asked} rounds weights before each matmul, and layout.tp_overlap multiplies by them as they are"
        broken.append(Refusal("tp_overlap", what, "use tp_overlap=false"))
    for linear in list_rounded(model):
        if linear.style == "colwise" or not fmt.group or linear.inputs % fmt.group:
            continue
        if linear.inputs % (fmt.group * layout.tp):
            legal = [n for n in divisors(layout.tp) if linear.inputs % (fmt.group * n) == 0]
            what = (
                f"{asked}: {layout.tp} ranks of tp would cut groups of {fmt.group} columns in the {linear.inputs} of "
            )
            what += linear.module
            broken.append(Refusal("precision.fake_quant", what, f"use tp={' or '.join(map(str, legal))}"))
    return broken


def check_copies_of_experts(engine: Engine, ep: int, dp_replicate: int, copy_size: int) -> list[Refusal]:
    """Copies of FSDP2's shards have all experts each: ep splits them among the `copy_size` ranks of one copy."""
    if engine.features.sharding != "fsdp2" or dp_replicate == 1 or copy_size % ep == 0:
        return []
    what = f"ep={ep} does not divide dp_shard * cp * tp={copy_size}, and copies of dp_replicate share no experts"
    return [Refusal("ep", what, "use a divisor, or dp_replicate=1")]


def _check_model(engine: Engine, model: ModelShape) -> list[Refusal]:
    """The engine has ep where the model has a part that needs it."""
    return [
        Refusal(name, f"model.{name}: {engine.name} has no {words}", "use a model without, or another engine")
        for name, words in _NEEDS_EP.items()
        if "ep" not in engine.features.axes and getattr(model, name) is not None
    ]


def _check_state(layout: Layout, model: ModelShape) -> list[Refusal]:
    """A state along the sequence is split over no ranks, by no program: what that would send is not known."""
    state = find_state(model) if layout.tp > 1 or layout.cp > 1 else ""
    return [
        Refusal(key, f"layout.{key}={size}: {state} carries a state along the sequence", f"use {key}=1")
        for key, size in (("tp", layout.tp), ("cp", layout.cp))
        if state and size > 1
    ]


def _check_kept_whole(engine: Engine, layout: Layout, model: ModelShape) -> list[Refusal]:
    """A traced model is split as its trace allows; of states `_check_state` speaks."""
    if model.family != FAMILY or engine.name != OWN_ENGINE or find_state(model):
        return []
    whole = find_whole(model)
    able = [name for name in engine.features.cp_methods if name not in whole]
    used = {
        "tp": (layout.tp > 1, "tp", f"layout.tp={layout.tp}", "tp=1"),
        "sequence_parallel": (
            layout.shards_sequence, "sequence_parallel", "layout.sequence_parallel", "sequence_parallel=false"
        ),
        "cp": (layout.cp > 1, "cp", f"layout.cp={layout.cp}", "cp=1"),
        layout.cp_method: (
            layout.cp > 1 and "cp" not in whole, "cp_method", f"layout.cp_method={layout.cp_method}",
            f"cp_method={' or '.join(able)}",
        ),
        "splits_backward": (
            layout.splits_backward, "schedule", f"layout.schedule={layout.schedule} splits the backward",
            "schedule=1f1b",
        ),
    }  # fmt: skip
    return [
        Refusal(key, f"{what}: {whole[axis]}", f"use {instead}")
        for axis, (is_used, key, what, instead) in used.items()
        if is_used and axis in whole
    ]


def _check_traced(engine: Engine, layout: Layout, model: ModelShape, precision: Precision) -> list[Refusal]:
    """A traced model has none of what reads a description's modules."""
    if model.family != FAMILY or engine.name != OWN_ENGINE:
        return []
    if reason := find_whole(model).get("training"):
        return [Refusal("family", f"model.family={FAMILY}: {reason}", "it can be predicted, not trained")]
    asked = {
        "tp_overlap": layout.overlaps_tp,
        "precision.matmuls": precision.matmul_format is not None,
        "precision.base": precision.base != "compute", "precision.fake_quant": precision.fake_quant != "none",
        "adapter": model.adapter is not None,
    }  # fmt: skip
    return [
        Refusal(key, f"{key} is for models that are described, and {model.name} was traced", "leave it out")
        for key, is_asked in asked.items()
        if is_asked
    ]


def find_kept_whole(engine: Engine, model: ModelShape) -> frozenset[str]:
    """Axes over which our trainer does not split a model, methods of cp that don't go, and "sequence_parallel" if not
    that either; empty for a model that is described, and for another program those over which no program splits it."""
    if model.family != FAMILY or engine.name != OWN_ENGINE:
        return frozenset({"tp", "cp"} if find_state(model) else ())
    whole = find_whole(model)
    if "training" in whole:  # it is predicted alone, and may have experts
        return frozenset(whole.keys() - {"training"})
    return frozenset({"tp_overlap", "ep", *whole})


def _check_untrained(engine: Engine, model: ModelShape) -> list[Refusal]:
    """The engine trains the model's family, and keys of the model that it cannot train are at their defaults."""
    family = FAMILIES.get(model.family)
    if "family" in engine.features.untrained and family and family.untrained:
        what = f"model.family={family.name} is planned, not trained: {family.untrained}"
        traced = "trace it: dtlayout trace FOLDER --output model.json, and name model.json as the model; or "
        is_traced = family.has_class and not model.experts
        others = "use a model of another family, or --engine for another program"
        return [Refusal("model.family", what, traced + others if is_traced else others)]
    return [
        _only_predicted(f"model.{name}", "use a model without")
        if default is None
        else _only_predicted(f"model.{name}={show_value(value)}", f"use {name}={show_value(default)}")
        for name, value, default in engine.features.find_untrained(model)
    ]


def _check_dispatcher(engine: Engine, layout: Layout) -> list[Refusal]:
    """The engine sends copies of tokens to the experts in this way."""
    known = engine.features.ep_dispatchers
    if layout.ep_dispatcher in known or (layout.ep == 1 and layout.ep_dispatcher == _OFF.ep_dispatcher):
        return []
    return [_lack(engine, f"layout.ep_dispatcher={layout.ep_dispatcher}", f"use layout.ep_dispatcher={known[0]}")]


def allows_ep_overlap(engine: Engine, recompute: str, is_interleaved: bool) -> bool:
    """True if tokens can be exchanged beside another microbatch; a pipeline has one where it interleaves stages.

    What exchanges them once more in backward has no microbatch beside it.
    """
    return is_interleaved and not engine.features.routes_again(Recompute.parse(recompute))


def _check_ep_overlap(engine: Engine, layout: Layout) -> list[Refusal]:
    """There is another microbatch to compute meanwhile, and nothing that computes it again as a whole."""
    is_interleaved = not layout.is_pipelined or layout.virtual_stages > 1
    if not layout.overlaps_ep or allows_ep_overlap(engine, layout.recompute, is_interleaved):
        return []
    if is_interleaved and Recompute.parse(layout.recompute).is_selective:
        what = "layout.ep_overlap beside recompute_modules=moe: tokens that go again in backward overlap with nothing"
        return [Refusal("ep_overlap", what, "use ep_overlap=false, or leave moe out of recompute_modules")]
    what = "layout.ep_overlap takes interleaved stages in a pipeline, and no full recomputation"
    return [Refusal("ep_overlap", what, "use ep_overlap=false, or virtual_stages=2 and recompute=selective")]


def _lack(engine: Engine, asked: str, advice: str) -> Refusal:
    """A refusal of something that the engine does not have; what our own trainer lacks, other engines have."""
    if engine.name == OWN_ENGINE:
        return _only_predicted(asked, advice)
    return Refusal(asked.partition("=")[0], f"{asked} is nothing that {engine.name} has", advice)


def _only_predicted(asked: str, advice: str) -> Refusal:
    """A refusal of something that predictions know, and our own trainer cannot train."""
    return Refusal(asked.partition("=")[0], f"{asked} can be predicted, not trained", advice)
