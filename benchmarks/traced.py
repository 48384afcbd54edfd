"""Traced models beside descriptions, plans, dry runs and steps that do not come from their traces, as Markdown.

    make bench NAME=traced

1. Families that are described too: the traced description beside the written one.
2. The tensor-parallel plan of a trace beside the one that `transformers` has for the family, in bytes sent.
3. Predicted memory of models of 7 billion parameters that nobody described, beside their dry runs.
4. A training step of a traced model beside one of the family's own class under FSDP2.
5. The config.json that each causal model of `transformers` has by default, and those of a folder: planned, or refused
   with a reason (`benchmarks.every_decoder`).
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.every_decoder import add_configs, print_defaults, print_folder
from benchmarks.pages.markdown import made_by, table
from dtlayout.base.formatting import GIB
from dtlayout.config.config import Config
from dtlayout.config.loading import parse_config
from dtlayout.costmodel.scenario import find_refusals
from dtlayout.dryrun.ranks import Subject, find_peaks
from dtlayout.models.counting import count_model_flops_per_token, count_parameters
from dtlayout.models.description import EMBEDDING, HEAD, Description, Operation
from dtlayout.models.families import describe
from dtlayout.models.files import trace_model
from dtlayout.models.hf_config import parse_hf
from dtlayout.models.operations import Activation, Norm, SelfAttention
from dtlayout.models.tape import PLAIN, join
from dtlayout.models.traced import find_whole, read_trace
from dtlayout.planner.prediction import own_scenario, predict
from dtlayout.plans.plan import BLOCKS, tensor_styles
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import find_gpu
from dtlayout.spec.kernels import Kernels, OpenKernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.optimizers import AdamW
from dtlayout.spec.precision import Precision

SEQ_LEN = 4096
DESCRIBED: Mapping[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14_336, "vocab_size": 128_256, "tie_word_embeddings": False,
    },
    "qwen2": {
        "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "intermediate_size": 18_944, "vocab_size": 152_064, "tie_word_embeddings": False,
    },
    "qwen3": {
        "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 12_288, "vocab_size": 151_936, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""Family → sizes of a published model, Llama-3.1 8B, Qwen2 7B and Qwen3 8B."""
PLANNED = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "olmo", "olmo2", "phi", "phi3", "granite",
    "glm", "starcoder2", "cohere", "helium", "smollm3", "ernie4_5", "seed_oss", "exaone4", "gpt_neox", "arcee",
)  # fmt: skip
"""Families with a plan of `transformers`, with the sizes that their config classes have by default."""
SEVEN_BILLION: Mapping[str, dict[str, Any]] = {
    "starcoder2": {
        "hidden_size": 4608, "num_hidden_layers": 32, "num_attention_heads": 36, "num_key_value_heads": 4,
        "intermediate_size": 18_432, "vocab_size": 49_152, "sliding_window": None, "bos_token_id": 0,
        "eos_token_id": 0, "tie_word_embeddings": False,
    },
    "gpt_neox": {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 16_384,
        "vocab_size": 50_432, "max_position_embeddings": SEQ_LEN,
    },
    "olmo": {"max_position_embeddings": SEQ_LEN},
    "gemma": {},
    "gemma2": {},
    "bloom": {"hidden_size": 4096, "n_layer": 30, "n_head": 32, "vocab_size": 250_880},
    "phi3": {
        "hidden_size": 3072, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 8192,
        "vocab_size": 32_064, "max_position_embeddings": SEQ_LEN, "sliding_window": None,
    },
    "olmo2": {"max_position_embeddings": SEQ_LEN, "vocab_size": 100_352},
    "gpt2": {"n_embd": 1536, "n_layer": 48, "n_head": 24, "n_positions": SEQ_LEN},
}  # fmt: skip
"""Family → sizes of StarCoder2 7B, Pythia 6.9B, OLMo 7B, Gemma 7B, Phi-3 mini, OLMo 2 7B and GPT-2 XL; of
Gemma 2 2B, whose attention has a softcap, and BLOOM 7.1B, which has its own: their scores lie in memory."""
LAYOUTS = (
    Layout(dp_shard=8, zero=3, micro_batch=1),
    Layout(dp_shard=8, zero=3, micro_batch=1, recompute="full"),
    Layout(tp=2, dp_shard=4, zero=3, micro_batch=1),
    Layout(pp=2, dp_shard=4, zero=2, micro_batch=1, recompute="full"),
)
_TP, _ELEMENT_BYTES = 2, 2
_FAMILY, _GPU = "starcoder2", "h100-80g-sxm"
_SMALL = {
    "hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 1024, "vocab_size": 2048, "sliding_window": None, "bos_token_id": 0, "eos_token_id": 0,
    "tie_word_embeddings": False, "residual_dropout": 0.0, "embedding_dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
_ROWS, _TOKENS, _WARM_UP = 4, 256, 3


def make_config(family: str, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a family of `transformers`."""
    import transformers

    made: dict[str, Any] = json.loads(transformers.CONFIG_MAPPING[family](**sizes).to_json_string(use_diff=False))
    return made


def trace(config: Mapping[str, Any], folder: Path) -> ModelShape:
    """The traced model of a config, whose file lies in `folder`."""
    name = str(config["model_type"])
    return trace_model(config, folder / name / "config.json", folder / f"{name}.json")


# 1. Beside descriptions


def without_code(described: Description) -> Description:
    """A description without what it says of the model's own code, which a written one leaves to our kernels."""
    block = tuple(map(_strip, described.block))
    return replace(described, block=block, final_norm=replace(described.final_norm, keeps=()))


def _strip(operation: Operation) -> Operation:
    match operation:
        case Norm():
            return replace(operation, keeps=(), moves=(0, 0), beside="")
        case Activation():
            return replace(operation, own=-1, keeps_opened=True, moves=(0, 0))
        case SelfAttention():
            return replace(operation, held=0, scores=())
    return operation


def count_kept_bytes(described: Description) -> int:
    """Bytes that a block keeps for the backward of a token in bf16, on one rank and without recomputation."""
    tape = join(entry for operation in described.block for entry in operation.record(PLAIN._replace(casts_norms=True)))
    return round(sum(each.width * (4 if each.format == "exact" else 2) for entry in tape for each in entry.saves))


def compare_descriptions(family: str, sizes: Mapping[str, Any], folder: Path) -> tuple[list[str], list[str]]:
    """Cells of a family's row, and everything that differs."""
    config = make_config(family, sizes)
    ours, traced = parse_hf(config), trace(config, folder)
    written, found = describe(ours), describe(traced)
    styles = [tensor_styles(each, Layout(tp=_TP)) for each in (ours, traced)]
    styles[1].pop("", None)  # a traced module is told its part of a sequence, a described one finds it by itself
    kinds: dict[str, Callable[[ModelShape], Any]] = {
        "parameters": count_parameters, "FLOPs": lambda model: count_model_flops_per_token(model, SEQ_LEN),
        "kept bytes": lambda model: count_kept_bytes(without_code(describe(model))),
    }  # fmt: skip
    numbers = {what: (count(ours), count(traced)) for what, count in kinds.items()}
    differences = [f"{what}: {a:,} written, {b:,} traced" for what, (a, b) in numbers.items() if a != b]
    pairs = zip(written.block, without_code(found).block, strict=False)
    differences += [f"{a} written, {b} traced" for a, b in pairs if a != b]
    differences += ["styles of tp"] * (styles[0] != styles[1])
    differences += ["the description"] * (written != without_code(found) and not differences)
    cells = [family, *(f"{a:,.0f}" for a, _ in numbers.values()), f"{count_kept_bytes(found):,}"]
    return [*cells, "nothing" if not differences else "; ".join(differences)], differences


# 2. Beside plans


def count_ours(model: ModelShape) -> tuple[float, float]:
    """Bytes that a rank sends for a token under our plan: in a block, and at both ends."""
    h = describe(model).embedding.shape[1]
    styles = tensor_styles(model, Layout(tp=_TP, sequence_parallel=False))
    block = sum(
        _reduce(h) for name, style in styles.items() if name.startswith(BLOCKS) and style in ("input", "rowwise")
    )
    # A norm over all heads adds up the squares of ranks, a number in fp32 forward and one backward.
    block += sum(2 * _reduce(1) * 4 / _ELEMENT_BYTES for style in styles.values() if style == "norm-split")
    # The head's input has a gradient that is summed; the loss sends three numbers in fp32: maximum, sum and target's.
    return block, _reduce(h) * ((EMBEDDING in styles) + (HEAD in styles)) + 3 * _reduce(1) * 4 / _ELEMENT_BYTES


def count_theirs(plan: Mapping[str, str], model: Any, blocks: str) -> tuple[float, float]:
    """Bytes that a rank sends for a token under a plan of `transformers`: in a block, and at both ends."""
    sent = {True: 0.0, False: 0.0}
    for pattern, style in plan.items():
        sent[pattern.startswith(f"{blocks}.*.")] += _count_sent(style, model.get_submodule(pattern.replace("*", "0")))
    return sent[True], sent[False]


def _count_sent(style: str, module: Any) -> float:
    """Bytes that a rank sends for a token by a style of `transformers`, forward and backward."""
    match style:
        case "colwise":
            return _reduce(module.in_features)
        case "colwise_gather_output":
            return _reduce(module.in_features) + _gather(module.out_features)
        case "rowwise":
            return _reduce(module.out_features)
        case "rowwise_split_input":  # backward gathers the gradient of what each rank had whole
            return _reduce(module.out_features) + _gather(module.in_features)
        case "embedding_rowwise":
            return _reduce(module.embedding_dim)
        case "replicated_with_grad_allreduce":  # of a weight, once a step
            return 0.0
    raise NotImplementedError(f"nobody has counted what {style} sends")


def _reduce(width: float) -> float:
    """Sent by each rank in an all-reduce on a ring, 2 (t - 1) / t of its tensor."""
    return 2 * (_TP - 1) / _TP * width * _ELEMENT_BYTES


def _gather(width: float) -> float:
    """Sent by each rank in an all-gather on a ring, (t - 1) / t of the result."""
    return (_TP - 1) / _TP * width * _ELEMENT_BYTES


def compare_plans(family: str, folder: Path) -> tuple[list[str], float | None, float]:
    """Cells of a family's row, and bytes of a block under our plan, None where we split nothing, and under theirs."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = make_config(family, {"num_hidden_layers": 2})
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    traced = trace(config, folder)
    blocks = read_trace(traced.trace).names.get("model.layers", "model.layers")
    block, ends = count_theirs(model._tp_plan, model, blocks)
    theirs, reason = [f"{block:,.0f}", f"{ends:,.0f}"], find_whole(traced).get("tp", "")
    if reason:
        return [family, "not split", *theirs[:1], "not split", *theirs[1:], reason], None, block
    own_block, own_ends = count_ours(traced)
    return [family, f"{own_block:,.0f}", theirs[0], f"{own_ends:,.0f}", theirs[1], ""], own_block, block


# 3. Beside dry runs


def rehearse(model: ModelShape, layout: Layout) -> tuple[float, float]:
    """Bytes of the peak, predicted and of a dry run, on the rank that is predicted to hold most."""
    blank = {"model": {"name": "debug"}, "batch": {"global_batch": 8, "seq_len": 16}, "train": {"steps": 1}}
    config: Config = replace(
        parse_config(blank), model=model, batch=Batch(global_batch=32, seq_len=SEQ_LEN),
        precision=Precision(reduce="bfloat16"), kernels=OpenKernels.of(Kernels()),
    )  # fmt: skip
    gpu = find_gpu(_GPU)
    scenario = own_scenario(config, layout.world_size, gpu)
    assert not find_refusals(scenario, layout, Kernels()), f"{model.name} takes {layout}"
    estimate = predict(config, layout, gpu)
    assert estimate is not None, "the GPU type is known"
    subject = Subject(config, layout, Kernels(), estimate.busiest_rank * (layout.world_size // layout.pp))
    ((_, peak_bytes),) = find_peaks([subject], device_type=gpu.device_type, gpus_per_node=gpu.gpus_per_node)
    return estimate.peak_bytes - scenario.engine.constants.overhead_bytes, peak_bytes


# 4. Beside the family's own class


def time_steps(num_pairs: int, folder: Path) -> tuple[float, float, float]:
    """Medians of a step of ours and of theirs, in seconds, and of their ratios; each pair is taken in turn."""
    config = make_config(_FAMILY, _SMALL)
    with _one_rank(folder):
        steps = [make_own_step(trace(config, folder)), make_plain_step(config)]
        generator = torch.Generator().manual_seed(1)
        rows = torch.randint(int(config["vocab_size"]), (_ROWS, _TOKENS + 1), generator=generator)
        found = [[_time(step, rows) for step in steps] for _ in range(_WARM_UP + num_pairs)][_WARM_UP:]
    ours, theirs = zip(*found, strict=True)
    return statistics.median(ours), statistics.median(theirs), statistics.median(a / b for a, b in found)


@contextmanager
def _one_rank(folder: Path) -> Iterator[None]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _time(step: Callable[[torch.Tensor, torch.Tensor], float], rows: torch.Tensor) -> float:
    started = time.perf_counter()
    step(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
    return time.perf_counter() - started


def make_own_step(model: ModelShape) -> Callable[[torch.Tensor, torch.Tensor], float]:
    """A step of a traced model as train.py does it."""
    from dtlayout.training.build import assemble
    from dtlayout.training.optimizer import build_optimizer, set_learning_rate
    from dtlayout.training.step import TrainStep

    batch = Batch(global_batch=_ROWS, seq_len=_TOKENS)
    assembly = assemble(
        model, batch, Layout(micro_batch=_ROWS, zero=3), Kernels(), Precision(compute="float32"), seed=0,
        device_type="cpu",
    )  # fmt: skip
    optimizer = build_optimizer(assembly.modules, model, AdamW())
    set_learning_rate(optimizer, 1e-3)
    step = TrainStep(assembly.runtime, optimizer, max_norm=1.0, mesh=assembly.mesh, model=model)
    return lambda tokens, targets: step(tokens, targets).loss


def make_plain_step(config: Mapping[str, Any]) -> Callable[[torch.Tensor, torch.Tensor], float]:
    """A step of a loop around the family's causal model, with FSDP2 around each block."""
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), attn_implementation="sdpa").train()
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> float:
        logits = model(input_ids=tokens, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def main() -> None:
    """Print the report."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    parser = argparse.ArgumentParser(prog="benchmarks.traced")
    parser.add_argument("--pairs", type=int, default=60, help="of steps of ours and of theirs")
    add_configs(parser)
    options = parser.parse_args()
    import transformers

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print(f"# Traced models\n\n{made_by('traced')}, transformers {transformers.__version__}.\n")
        print_descriptions(folder)
        print_plans(folder)
        print_memory(folder)
        print_speed(options.pairs, folder)
        print_defaults(folder)
        if options.configs is not None:
            print_folder(options.configs)


def print_descriptions(folder: Path) -> None:
    """The first table."""
    print("## Beside written descriptions\n")
    print(
        "Three families are described by hand; models of published sizes were traced too. FLOPs are those of a token\n"
        f"of {SEQ_LEN:,}, forward and backward. Bytes are what a block keeps for the backward of a token in bf16,\n"
        "written and traced with the kernels of this package. A traced block runs the family's own code, which keeps\n"
        "more: exact copies in its norms, and silu's result. Predictions of traced models count that.\n"
    )
    heading = ["family", "parameters", "FLOPs", "bytes kept", "by its own code", "what differs"]
    print(*table(heading, [compare_descriptions(f, s, folder)[0] for f, s in DESCRIBED.items()]), "", sep="\n")


def print_plans(folder: Path) -> None:
    """The second table."""
    rows = [compare_plans(family, folder) for family in PLANNED]
    split = [(ours, theirs) for _, ours, theirs in rows if ours is not None]
    fewer, same = sum(a < b for a, b in split), sum(a == b for a, b in split)
    print("## Beside tensor-parallel plans of transformers\n")
    print(
        f"Bytes that each of {_TP} ranks sends for a token, forward and backward, in bf16, without sequence\n"
        "parallelism. They are counted by the rules of both sides: a ring sends 2 (t - 1) / t of a tensor to sum it,\n"
        "and (t - 1) / t to gather it. Ours sums the gradient of a branch's input once. A plan of transformers sums\n"
        "it for each matmul that is split by outputs, as the styles of its class ColwiseParallel do. It gathers\n"
        "logits, where our loss sends three numbers a token. Sizes are the defaults of each family.\n"
        f"\nOf {len(rows)} families ours sends less in a block of {fewer} and as much in {same}; it does not split "
        f"{len(rows) - len(split)}.\n"
    )
    heading = ["family", "block, ours", "block, theirs", "ends, ours", "ends, theirs", "note"]
    print(*table(heading, [cells for cells, _, _ in rows]), "", sep="\n")


def print_memory(folder: Path) -> None:
    """The third table."""
    print("## Beside dry runs\n")
    print(f"Peak of the rank that is predicted to hold most, in GiB, of 8 H100 and sequences of {SEQ_LEN:,} tokens.\n")
    rows = list[list[str]]()
    for family, sizes in SEVEN_BILLION.items():
        model = trace(make_config(family, sizes), folder)
        for layout in LAYOUTS:
            predicted, dry = rehearse(model, layout)
            rows.append(
                [family, str(layout), f"{predicted / GIB:.3f}", f"{dry / GIB:.3f}", f"{predicted / dry - 1:+.2%}"]
            )
    print(*table(["family", "layout", "predicted", "dry run", "difference"], rows, num_words=2), "", sep="\n")


def print_speed(num_pairs: int, folder: Path) -> None:
    """The paragraph on speed."""
    ours, theirs, ratio = time_steps(num_pairs, folder)
    print("## Beside the family's own class\n")
    print(
        f"A step of {_FAMILY} with {_SMALL['num_hidden_layers']} blocks that are {_SMALL['hidden_size']} wide, {_ROWS} "
        f"sequences of {_TOKENS} tokens, fp32, in one\nprocess of one thread: traced, by our trainer, "
        f"{1e3 * ours:.0f} ms; the class of transformers with FSDP2 around each block,\nthe same optimizer and "
        f"clipping, {1e3 * theirs:.0f} ms. Taken in turn {num_pairs} times, the median of the ratios is {ratio:.3f}.\n"
    )


if __name__ == "__main__":
    main()
