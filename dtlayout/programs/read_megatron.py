"""Megatron-LM, read: the arguments of pretrain_gpt.py, in a shell script or alone, as our config.

Defaults are those of the commit that `megatron.MEGATRON` names. Options that only name data, logs, checkpoints or the
learning rate's course change no prediction.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dtlayout.base.errors import InvalidConfig
from dtlayout.programs.megatron import ATTENTION, CONTEXT, MATMULS, MEGATRON, SHARDED
from dtlayout.programs.options import OptionReader, positive, real, string, whole
from dtlayout.programs.shell import Command, Unknown, read_commands
from dtlayout.programs.understood import OtherFile, Row, Understood

_SIZES: Mapping[str, str] = {
    "--num-layers": "num_layers", "--hidden-size": "hidden_size", "--ffn-hidden-size": "ffn_size",
    "--num-attention-heads": "num_heads", "--vocab-size": "vocab_size", "--padded-vocab-size": "vocab_size",
}  # fmt: skip
"""Option → size of the model."""
_EXPERTS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "--num-experts": ("number", whole), "--moe-router-topk": ("per_token", whole),
    "--moe-ffn-hidden-size": ("ffn_size", whole),
    "--moe-shared-expert-intermediate-size": ("shared_ffn_size", whole),
    "--moe-router-score-function": ("score", string), "--moe-router-num-groups": ("groups", whole),
    "--moe-router-group-topk": ("groups_per_token", whole), "--moe-router-topk-scaling-factor": ("scale", real),
    "--moe-router-bias-update-rate": ("bias_rate", real), "--moe-z-loss-coeff": ("z_loss", real),
    "--moe-aux-loss-coeff": ("balance_loss", real),
}  # fmt: skip
_DEGREES: Mapping[str, str] = {
    "--tensor-model-parallel-size": "tp", "--pipeline-model-parallel-size": "pp", "--context-parallel-size": "cp",
    "--expert-model-parallel-size": "ep", "--micro-batch-size": "micro_batch",
}  # fmt: skip
_OPTIMIZER: Mapping[str, str] = {
    "--lr": "lr", "--weight-decay": "weight_decay", "--clip-grad": "max_norm", "--adam-beta1": "beta1",
    "--adam-beta2": "beta2", "--adam-eps": "eps", "--sgd-momentum": "momentum",
}  # fmt: skip
_FLAGS = frozenset((
    "--add-qkv-bias", "--bf16", "--disable-bias-linear", "--fp16", "--grad-reduce-in-bf16",
    "--group-query-attention", "--moe-enable-deepep", "--moe-router-enable-expert-bias",
    "--moe-router-pre-softmax", "--no-overlap-p2p-communication", "--overlap-grad-reduce",
    "--overlap-moe-expert-parallel-comm", "--overlap-param-gather", "--qk-layernorm", "--recompute-activations",
    "--sequence-parallel", "--swiglu", "--tp-comm-overlap", "--untie-embeddings-and-output-weights",
    "--use-custom-fsdp", "--use-distributed-optimizer", "--use-flash-attn", "--use-megatron-fsdp",
    "--use-rope-scaling",
))  # fmt: skip
"""Options without a value."""
_OTHERWISE = (
    r"--(no-bias-.*-fusion|no-masked-softmax-fusion|no-rope-fusion|no-persist-layer-norm|no-gradient-accumulation-fusion"
    r"|cross-entropy-.*|fp8-param-gather|fp8-wgrad|empty-unused-.*|delay-wgrad.*|accumulate-allreduce-grads-in-fp32"
    r"|overlap-param-gather-with-optimizer-step|align-.*|train-sync-interval|DDP-impl)"
)
"""Options that change a little of time or memory, which is predicted as if they were not there."""
_RANKS = ("--nproc_per_node", "--nproc-per-node"), ("--nnodes",)
_IGNORED: Mapping[str, str] = {
    "data": r"--(data-path|.*-data-path|data-cache-path|split|mock-data|tokenizer-.*|vocab-file|merge-file"
    r"|dataloader-type|num-workers|reset-position-ids|reset-attention-mask|eod-mask-loss|no-create-.*"
    r"|num-dataset-builder-threads|data-args-path|num-tokens|no-mmap-bin-files|tiktoken-.*|trust-remote-code"
    r"|create-attention-mask.*|extra-vocab-size|patch-tokenizer-type|dataset)",
    "logs and evaluation": r"--(log-.*|tensorboard-.*|wandb-.*|eval-.*|timing-.*|no-log-.*|profile.*|one-logger.*"
    r"|no-one-logger|enable-one-logger|logging-level|.*exit-.*)",
    "checkpoints": r"--(save.*|load|no-save-.*|no-load-.*|ckpt-.*|auto-detect-ckpt-format|async-save|dist-ckpt-.*"
    r"|use-dist-ckpt|use-checkpoint-.*|override-opt.*|finetune|non-persistent-.*|pretrained-checkpoint)",
    "the course of the learning rate": r"--(min-lr|lr-.*|train-iters|train-samples|override-lr.*|use-checkpoint-opt.*"
    r"|start-weight-decay|end-weight-decay|weight-decay-incr-style)",
    "initial values and chance": r"--(init-method-.*|seed|data-parallel-random-init|no-initialization"
    r"|apply-layernorm-1p|initial-loss-scale|min-loss-scale|loss-scale.*|hysteresis|no-query-key-layer-scaling|decoupled-.*)",
    "how ranks meet": r"--(distributed-backend|distributed-timeout-minutes|local-rank|lazy-mpu-init|use-mcore-models"
    r"|use-legacy-models|no-async-tensor-.*|manual-gc.*|no-check-for-nan.*|check-for-nan.*"
    r"|rerun-mode|enable-experimental|nccl-.*|use-tp-pp-dp-mapping|disable-straggler.*|high-priority-stream-groups)",
    "dropout": r"--(attention|hidden)-dropout",
    "what its blocks do alike": r"--(no-position-embedding|ddp-num-.*|ddp-bucket-size|ddp-average-.*|tp-comm-.*-.*"
    r"|bias-.*-fusion|use-fused-.*|moe-grouped-gemm|moe-permute-fusion|moe-router-fusion|moe-router-dtype"
    r"|moe-per-layer-logging|moe-input-jitter-eps|attention-softmax-in-fp32|use-rotary-.*|position-.*"
    r"|max-position-embeddings|rotary-(percent|interleaved|seq-.*)|original-max-.*|rope-.*|fp8-margin|fp8-amax-.*"
    r"|fp8-interval|moe-router-padding-.*|cuda-graph-warmup-steps|te-rng-tracker|use-te-rng-tracker"
    r"|moe-router-pre-softmax-scale|calculate-per-token-loss|use-cpu-initialization|apply-query-key-layer-scaling)",
}  # fmt: skip
"""Subject of options that change no prediction here → a pattern of their names."""


def read(file: OtherFile) -> Understood:
    """The job of a script or of a list of arguments; InvalidConfig with a line for each option that is not understood,
    or whose value the file alone does not say."""
    command = _find_command(file.text, file.given)
    found = Understood(MEGATRON.engine, MEGATRON.title)
    options, ranks = _split(command, found)
    MegatronReader(found, options, ranks, file.num_gpus).read()
    if command.passes_arguments:
        found.ignore(
            '"$@"', "options that the script itself is given are not known: --given @='…' says them", "assumed"
        )
    return found


def is_ours(file: OtherFile) -> bool:
    """True for a text with arguments of Megatron-LM."""
    return "--num-layers" in file.text or "pretrain_gpt.py" in file.text


def _find_command(text: str, given: Mapping[str, str]) -> Command:
    """The last command with the model's sizes; of a list of arguments, which may have several lines, all of it.

    A word that holds a whole command, as behind eval or sh -c, is read like a script.
    """
    if text.lstrip().startswith("--"):
        text = text.replace("\n", " ")
    commands = read_commands(text, given)
    for command in reversed(commands):
        if any(_name(word) == "--num-layers" for word in command.words):
            if command.condition:
                raise InvalidConfig(
                    f"the command with --num-layers lies in {command.condition}; take it out, or give its words alone"
                )
            return command
        inner = " ".join(command.words[1:]) if command.words[0] == "eval" else ""
        inner = inner or next((word for word in command.words if " --num-layers" in word), "")
        if " --num-layers" in inner:
            return replace(_find_command(inner, given), line=command.line)
    raise InvalidConfig("no command of the script has --num-layers: give the script that says the model's sizes")


def _name(word: str) -> str:
    return word.partition("=")[0]


def _split(command: Command, found: Understood) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Options with their values, and torchrun's options before the program's own.

    A word that is not known is a problem, unless it is the value of an option: it may be an option itself.
    """
    words = list(command.words)
    programs = [place for place, word in enumerate(words) if word.endswith(".py") and not word.startswith("-")]
    own, before = words[programs[-1] + 1 :] if programs else words, words[: programs[-1]] if programs else []
    return dict(_pair(own, found)), {name: " ".join(values) for name, values in _pair(before, None)}


def _pair(words: Sequence[str], found: Understood | None) -> Iterator[tuple[str, list[str]]]:
    name, values = "", list[str]()
    for word in words:
        if word.startswith("--"):
            if name:
                yield name, values
            name, _, value = word.partition("=")
            values = [value] if "=" in word else []
            if "=" in word and isinstance(word, Unknown):
                values = [Unknown(value, word.variable, word.reason)]
        elif isinstance(word, Unknown) and found is not None and (not name or values or name in _FLAGS):
            how = f"--given {word.variable}='…' says it, and may be empty" if word.variable else "write it out"
            found.problems.append(f"{word} may hold options, and is {word.reason}: {how}")
        elif name:
            values.append(word)
    if name:
        yield name, values


class MegatronReader(OptionReader):
    """Reads Megatron-LM's options, each with the list of its words."""

    def __init__(self, found: Understood, options: Mapping[str, list[str]], ranks: Mapping[str, str], num_gpus: int):
        super().__init__(found, options)
        self.ranks, self.num_gpus = ranks, num_gpus

    def read(self) -> None:
        """Fill the value that was given, section by section."""
        self._read_ranks()
        self._read_model()
        self._read_experts()
        self._read_batch()
        self._read_layout()
        self._read_formats()
        self._read_optimizer()
        self._read_engine()
        self.read_rest(_IGNORED, _OTHERWISE)

    def has(self, name: str) -> bool:
        """True if the option is there, which is then used; a flag with a value is a problem."""
        if not super().has(name):
            return False
        if name in _FLAGS and self.options[name]:
            self.found.problems.append(f"{name} takes no value, and has {' '.join(self.options[name])}")
        return True

    def one(self, name: str) -> Any:
        """The word of an option that has one; None otherwise, which is a problem then."""
        words = self.options[name]
        if len(words) != 1:
            self.found.problems.append(f"{name} has {len(words)} values, and takes one")
            return None
        return self.known(name, words[0])

    def show(self, name: str) -> str:
        """The option as the file has it."""
        return " ".join([name, *self.options[name]])

    def _read_ranks(self) -> None:
        counts = []
        for names in _RANKS:
            word = next((self.ranks[name] for name in names if name in self.ranks), None)
            counts.append(int(word) if word is not None and word.isdigit() else 0)
        per_node, nodes = counts
        if per_node:
            self.found.gpus_per_node = per_node
            has_nodes = any(name in self.ranks for name in _RANKS[1])
            self.found.num_gpus = per_node * (nodes if has_nodes else 1)
        self.found.num_gpus = self.num_gpus or self.found.num_gpus

    def _read_model(self) -> None:
        found = self.found
        self.assume("model", {"name": "megatron", "family": "llama"}, "", "blocks are those of a Llama, but as below")
        for name, key in _SIZES.items():
            self.put("model", key, name, positive)
        hidden, heads = found.get("model", "hidden_size"), found.get("model", "num_heads")
        if hidden and not found.get("model", "ffn_size"):
            gated = "--swiglu" in self.options
            size = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
            self.assume("model", {"ffn_size": size}, "--ffn-hidden-size", "its default, from the hidden size")
        groups = self.value("--num-query-groups", positive)
        grouped = self.has("--group-query-attention")
        if grouped and groups:
            found.put("model", {"num_kv_heads": groups}, self.show("--num-query-groups"))
        elif grouped:
            self.assume("model", {"num_kv_heads": 1}, "--group-query-attention", "its default of --num-query-groups")
        elif heads:
            found.put("model", {"num_kv_heads": heads}, "", "assumed", "no --group-query-attention")
            if groups:
                found.ignore(self.show("--num-query-groups"), "without --group-query-attention", "no effect")
        width = self.value("--kv-channels", positive)
        if width and hidden and heads and width * heads != hidden:
            found.put("model", {"head_dim": width}, self.show("--kv-channels"))
        elif width:
            found.ignore(self.show("--kv-channels"), "it is hidden size / heads")
        self._pad_vocabulary()
        if self.has("--swiglu"):
            found.put("model", {"gated_ffn": True}, "--swiglu")
        else:
            self.assume("model", {"gated_ffn": False}, "", "no --swiglu: an activation without a gate")
        self._read_norms()
        tied = not self.has("--untie-embeddings-and-output-weights")
        found.put("model", {"tied_embeddings": tied}, "" if tied else "--untie-embeddings-and-output-weights",
                  "assumed" if tied else "read", "its default" if tied else "")  # fmt: skip
        base = self.value("--rotary-base", real)
        if base:
            found.put("model", {"rope_theta": base}, self.show("--rotary-base"))
        kind = self.value("--position-embedding-type", string) or "learned_absolute"
        if kind != "rope":
            note = f"positions of {kind} cost a token less than rotary ones, and no matmul"
            found.ignore(f"--position-embedding-type {kind}", note)

    def _pad_vocabulary(self) -> None:
        """Rows are added up to a multiple of tp and of a number, unless the script says them padded."""
        step = (self.value("--make-vocab-size-divisible-by", positive) or 128) * (
            self.value("--tensor-model-parallel-size", positive) or 1
        )
        size = self.found.get("model", "vocab_size")
        if size and size % step and "--padded-vocab-size" not in self.options:
            padded = -(-size // step) * step
            self.assume("model", {"vocab_size": padded}, self.show("--vocab-size"), f"padded to a multiple of {step}")

    def _read_norms(self) -> None:
        found = self.found
        norm = self.value("--normalization", string) or "LayerNorm"
        if norm != "RMSNorm":
            found.ignore(f"--normalization {norm}", "a norm's time and memory are those of an RMSNorm here")
        self.put("model", "norm_eps", "--norm-epsilon", real)
        self._read_scaling()
        if self.has("--disable-bias-linear"):
            found.ignore("--disable-bias-linear", "our blocks have no biases either")
        else:
            found.ignore("", "biases of linear layers, its default, are left out: a thousandth of the parameters")
        if self.has("--add-qkv-bias"):
            found.put("model", {"family": "qwen2", "qkv_bias": True}, "--add-qkv-bias")
        if self.has("--qk-layernorm"):
            found.put("model", {"family": "qwen3", "qk_norm": True}, "--qk-layernorm")

    def _read_scaling(self) -> None:
        if self.has("--use-rope-scaling"):
            factor = self.value("--rope-scaling-factor", real) or 8.0
            scaling = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_context": 8192}
            self.found.put("model", {"rope_scaling": scaling}, "--use-rope-scaling")

    def _read_experts(self) -> None:
        if not self.has("--num-experts"):
            for name in (
                *_EXPERTS,
                "--moe-layer-freq",
                "--moe-router-load-balancing-type",
                "--moe-token-dispatcher-type",
            ):
                if self.has(name):
                    self.found.ignore(self.show(name), "without --num-experts", "no effect")
            return
        experts: dict[str, Any] = {}
        for name, (key, kind) in _EXPERTS.items():
            if (value := self.value(name, kind)) is not None:
                experts[key] = value
                self.found.rows.append(_row(self.show(name), f"model.experts.{key}={value}"))
        experts.setdefault("per_token", 2)
        experts.setdefault("ffn_size", self.found.get("model", "ffn_size"))
        pattern = self.value("--moe-layer-freq", string)
        if pattern:
            dense = _count_dense(pattern)
            if dense is None:
                self.found.problems.append(f"--moe-layer-freq {pattern}: only dense blocks before those with experts")
            else:
                experts["dense_layers"] = dense
                self.found.rows.append(_row(self.show("--moe-layer-freq"), f"model.experts.dense_layers={dense}"))
        if self.has("--moe-router-enable-expert-bias"):
            experts["correction_bias"] = True
        if self.has("--moe-router-pre-softmax"):
            experts["normalized"] = False
        self.value("--moe-router-load-balancing-type", string)
        tp = self.value("--tensor-model-parallel-size", positive) or 1
        if (cut := self.value("--expert-tensor-parallel-size", positive) or tp) > 1:
            self.found.problems.append(
                f"experts are cut by {cut} ranks of tp, which is not predicted; --expert-tensor-parallel-size 1 is"
            )
        if (limit := self.value("--moe-token-dispatcher-type", string)) in (None, "allgather"):
            note = "its default is allgather" if limit is None else "predicted as alltoall"
            self.assume("layout", {"ep_dispatcher": "alltoall"}, "--moe-token-dispatcher-type", note)
        family = "qwen3_moe" if self.found.get("model", "qk_norm") else "mixtral"
        self.found.tables["model"] |= {"experts": experts, "family": family}

    def _read_batch(self) -> None:
        self.put("batch", "seq_len", "--seq-length", positive)
        self.put("batch", "global_batch", "--global-batch-size", positive)
        if self.has("--rampup-batch-size"):
            self.found.ignore(self.show("--rampup-batch-size"), "the batch that it ends with is predicted")

    def _read_layout(self) -> None:
        found = self.found
        for name, key in _DEGREES.items():
            self.put("layout", key, name, positive)
        layout = found.tables.setdefault("layout", {})
        tp, pp, cp = (layout.get(key, 1) for key in ("tp", "pp", "cp"))
        if self.has("--sequence-parallel"):
            if tp == 1:
                found.ignore("--sequence-parallel", "tp is 1", "no effect")
            layout["sequence_parallel"] = True
        else:
            self.assume("layout", {"sequence_parallel": False}, "", "no --sequence-parallel")
        if self.has("--tp-comm-overlap"):
            found.put("layout", {"tp_overlap": True}, "--tp-comm-overlap")
        if method := self.value("--cp-comm-type", string):
            names = {theirs: ours for ours, theirs in CONTEXT.items()}
            if method in names:
                found.put("layout", {"cp_method": names[method]}, self.show("--cp-comm-type"))
            else:
                found.problems.append(
                    f"--cp-comm-type {method} is nothing that is known here; use {' or '.join(names)}"
                )
        elif cp > 1:
            self.assume("layout", {"cp_method": "ring"}, "--cp-comm-type", "its default, p2p")
        self._read_stages(pp)
        self._read_sharding(tp * pp * cp)
        self._read_recompute()
        dispatcher = self.value("--moe-token-dispatcher-type", string)
        deep = self.has("--moe-enable-deepep")
        if dispatcher == "flex" or deep:
            found.put("layout", {"ep_dispatcher": "deepep"}, "--moe-token-dispatcher-type flex")
        if self.has("--overlap-moe-expert-parallel-comm"):
            found.put("layout", {"ep_overlap": True}, "--overlap-moe-expert-parallel-comm")

    def _read_stages(self, pp: int) -> None:
        found, layers = self.found, self.found.get("model", "num_layers", 0)
        virtual = self.value("--num-virtual-stages-per-pipeline-rank", positive)
        if size := self.value("--num-layers-per-virtual-pipeline-stage", positive):
            virtual = layers // pp // size
            if pp * virtual * size != layers:
                found.problems.append(
                    f"--num-layers-per-virtual-pipeline-stage {size} does not divide the {layers} blocks of {pp} ranks"
                )
        text = self.value("--pipeline-model-parallel-layout", string)
        if text:
            stages = read_stages(text)
            virtual = len(stages) // pp
            found.put("layout", {"stage_layers": stages}, self.show("--pipeline-model-parallel-layout"))
        first = self.value("--decoder-first-pipeline-num-layers", whole)
        last = self.value("--decoder-last-pipeline-num-layers", whole)
        if first is not None or last is not None:
            ends = [each for each in (first, last) if each is not None]
            between = pp - len(ends)
            rest = (layers - sum(ends)) // between if between else 0
            stages = [*([first] if first is not None else []), *[rest] * between, *([last] if last is not None else [])]
            found.put("layout", {"stage_layers": stages}, "--decoder-first/last-pipeline-num-layers")
        if virtual and virtual > 1:
            found.put(
                "layout", {"virtual_stages": virtual, "schedule": "interleaved-1f1b"}, f"{virtual} virtual stages"
            )

    def _read_sharding(self, ranks_of_model: int) -> None:
        found, num_gpus = self.found, self.found.num_gpus
        copies = self.value("--num-distributed-optimizer-instances", positive) or 1
        sharded = self.has("--use-distributed-optimizer")
        strategy = self.value("--data-parallel-sharding-strategy", string)
        fsdp = self.has("--use-megatron-fsdp") or self.has("--use-custom-fsdp")
        dp = num_gpus // ranks_of_model if num_gpus else 0
        if num_gpus and num_gpus % ranks_of_model:
            found.problems.append(f"{num_gpus} GPUs are no multiple of tp * pp * cp = {ranks_of_model}")
        if fsdp:
            stages = {theirs: stage for stage, theirs in SHARDED.items()} | {"optim": 1, "no_shard": 1}
            zero = stages.get(strategy or "no_shard")
            if zero is None:
                found.problems.append(f"--data-parallel-sharding-strategy {strategy} is nothing that is known here")
                return
            found.put("layout", {"zero": zero}, f"--data-parallel-sharding-strategy {strategy or 'no_shard'}")
        if not dp:
            found.ignore("(GPUs)", "dp is what tp, pp and cp leave of them", "assumed")
        elif copies > 1 and dp % copies:
            found.problems.append(f"--num-distributed-optimizer-instances {copies} does not divide dp = {dp}")
        elif sharded or fsdp:
            found.put("layout", {"dp_shard": dp // copies, "dp_replicate": copies}, "--use-distributed-optimizer")
        else:
            self.assume("layout", {"dp_replicate": dp, "dp_shard": 1}, "", "no --use-distributed-optimizer")

    def _read_recompute(self) -> None:
        found = self.found
        how = self.value("--recompute-granularity", string)
        method, number = self.value("--recompute-method", string), self.value("--recompute-num-layers", positive)
        modules = self.options.get("--recompute-modules", []) if self.has("--recompute-modules") else []
        if self.has("--recompute-activations"):
            how = how or "selective"
        if how is None:
            if method or number:
                found.ignore("--recompute-method", "without --recompute-granularity", "no effect")
            return
        if how == "selective":
            if modules and modules != ["core_attn"]:
                found.put("layout", {"recompute": "selective"}, "--recompute-modules " + " ".join(modules), "assumed",
                          "attention alone is computed again here")  # fmt: skip
            else:
                found.put("layout", {"recompute": "selective"}, "--recompute-granularity selective")
            return
        stages = found.get("layout", "pp", 1) * found.get("layout", "virtual_stages", 1)
        per_stage = max(1, found.get("model", "num_layers", 1) // stages)
        if method == "block" and number and number <= 0.75 * per_stage:
            every = max(2, round(per_stage / number))
            option, note = f"--recompute-method block, {number} blocks", f"{number} of {per_stage} blocks of a stage"
            found.put("layout", {"recompute": f"every-{every}"}, option, "assumed", note)
            return
        note = "several blocks keep one input" if method == "uniform" and (number or 1) > 1 else ""
        if method == "block" and number and number < per_stage:
            note = f"{number} of {per_stage} blocks of a stage, predicted as all"
        found.put("layout", {"recompute": "full"}, f"--recompute-granularity full, {method} {number or 1}",
                  "assumed" if note else "read", note)  # fmt: skip

    def _read_formats(self) -> None:
        found = self.found
        if self.has("--fp16"):
            found.put("precision", {"compute": "float16"}, "--fp16")
        elif self.has("--bf16"):
            found.put("precision", {"compute": "bfloat16"}, "--bf16")
        else:
            found.put("precision", {"compute": "float32"}, "", "assumed", "neither --bf16 nor --fp16")
        recipe, is_fp8 = self.value("--fp8-recipe", string), self.value("--fp8-format", string)
        four = self.value("--fp4-format", string)
        self.value("--fp4-recipe", string)
        if is_fp8:
            names = {words[3]: ours for ours, words in MATMULS.items()} | {"delayed": "fp8-tensorwise"}
            ours = names.get(recipe or "delayed")
            if ours is None:
                found.problems.append(f"--fp8-recipe {recipe} is nothing that is known here; use {' or '.join(names)}")
            else:
                found.put("precision", {"matmuls": ours}, f"--fp8-format {is_fp8} --fp8-recipe {recipe or 'delayed'}")
        elif recipe:
            found.ignore(f"--fp8-recipe {recipe}", "without --fp8-format", "no effect")
        if four:
            found.put("precision", {"matmuls": "nvfp4"}, f"--fp4-format {four}")
        backend = self.value("--attention-backend", string)
        if self.has("--use-flash-attn"):
            backend = backend or "flash"
        known = {theirs: ours for ours, theirs in reversed(ATTENTION.items())}
        if backend in known:
            found.put("kernels", {"attention": known[backend]}, f"--attention-backend {backend}")
        elif backend and backend != "auto":
            found.problems.append(f"--attention-backend {backend} is nothing that is known here")

    def _read_optimizer(self) -> None:
        name = self.value("--optimizer", string) or "adam"
        ours = {"adam": "adamw", "sgd": "sgd", "muon": "muon"}.get(name)
        if ours is None:
            self.found.problems.append(f"--optimizer {name} is nothing that is known here; use adam or sgd")
            return
        self.found.put("optimizer", {"name": ours}, f"--optimizer {name}")
        for option, key in _OPTIMIZER.items():
            belongs = {"beta1": "adamw", "beta2": "adamw", "eps": "adamw", "momentum": "sgd"}.get(key, ours)
            if belongs == ours:
                self.put("optimizer", key, option, real)
            elif self.has(option):
                self.found.ignore(self.show(option), f"with --optimizer {name}", "no effect")

    def _read_engine(self) -> None:
        """Settings of the engine: what overlaps, graphs, the format of gradients."""
        found = self.found
        overlaps = self.has("--overlap-grad-reduce")
        self.has("--overlap-param-gather")
        found.told["overlap_dp"] = "true" if overlaps else "false"
        found.rows.append(
            _row("--overlap-grad-reduce" if overlaps else "", f"engine overlap_dp={found.told['overlap_dp']}")
        )
        if self.has("--no-overlap-p2p-communication"):
            found.told["overlap_pp"] = "false"
            found.rows.append(_row("--no-overlap-p2p-communication", "engine overlap_pp=false"))
        if self.has("--grad-reduce-in-bf16"):
            found.put("precision", {"reduce": "bfloat16"}, "--grad-reduce-in-bf16")
        impl = self.value("--cuda-graph-impl", string)
        scope = self.options["--cuda-graph-scope"][0] if self.has("--cuda-graph-scope") else None
        if impl and impl != "none":
            graphs = "full" if scope == "full_iteration" or (impl == "local" and scope is None) else "attention"
            found.told["cuda_graphs"] = graphs
            found.rows.append(_row(f"--cuda-graph-impl {impl}", f"engine cuda_graphs={graphs}"))


def _row(option: str, ours: str) -> Row:
    return Row(option, ours, "read" if option else "assumed")


def _count_dense(pattern: str) -> int | None:
    """Dense blocks at the beginning, of a pattern such as ([0]*3+[1]*58); None for another one."""
    bare = re.sub(r"[\s'\"]", "", pattern)
    if bare == "1":
        return 0
    bare = re.sub(r"^\((.*)\)(\*1)?$", r"\1", bare)
    match = re.fullmatch(r"(?:\[0\](?:\*(\d+))?\+)?\[1\](?:\*\d+)?", bare)
    if match is None:
        return None
    return int(match[1] or 1) if bare.startswith("[0]") else 0


def read_stages(text: str) -> list[int]:
    """Blocks of each stage from --pipeline-model-parallel-layout; InvalidConfig for another language.

    >>> read_stages("Et*3|(t*4|)*2t*3L")
    [3, 4, 4, 3]
    """
    bare = re.sub(r"\(([^()]*)\)\*(\d+)", lambda match: match[1] * int(match[2]), text.strip("'\"").replace(",", ""))
    stages = []
    for stage in bare.split("|"):
        if not re.fullmatch(r"(?:[A-Za-z](?:\*\d+)?)*", stage):
            raise InvalidConfig(f"--pipeline-model-parallel-layout {text}: {stage!r} is no stage")
        count = 0
        for letter, times in re.findall(r"([A-Za-z])(?:\*(\d+))?", stage):
            if letter not in "EtLm":
                raise InvalidConfig(f"--pipeline-model-parallel-layout {text}: {letter!r} is no part of a stage")
            count += (int(times) if times else 1) * (letter == "t")
        stages.append(count)
    return stages
