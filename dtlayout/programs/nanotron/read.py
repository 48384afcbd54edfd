"""nanotron, read: the YAML file of run_train.py as our config.

Defaults are those of the commit that `nanotron.NANOTRON` names. In files of release 0.4 the numbers of Adam stand
beside the optimizer's others, and `data` in the place of `data_stages`.
"""

import re
from collections.abc import Mapping
from typing import Any

from dtlayout.base.errors import InvalidConfig
from dtlayout.programs.nanotron.write import NANOTRON, OPTIONS, SIZES
from dtlayout.programs.options import Option, OptionReader, positive, whole, yes
from dtlayout.programs.understood import How, OtherFile, Understood

_OLDER: Mapping[str, str] = {
    f"optimizer.optimizer_factory.{name}": f"optimizer.{name}" for name in ("adam_beta1", "adam_beta2", "adam_eps")
}
"""Option → its name in release 0.4."""
_FAMILIES = ("is_llama_config", "is_qwen2_config")
_USUAL: Mapping[str, Any] = {
    "parallelism.tp_linear_async_communication": True, "parallelism.tp_recompute_allgather": True,
    "optimizer.optimizer_factory.torch_adam_is_fused": True, "optimizer.torch_adam_is_fused": True,
    "model.ddp_bucket_cap_mb": 25, "model.model_config.hidden_act": "silu",
    "model.model_config._attn_implementation": "flash_attention_2", "model.model_config.z_loss_enabled": False,
    "model.model_config._use_doc_masking": False, "model.model_config._fused_rms_norm": False,
    "model.model_config._fused_rotary_emb": False, "model.model_config._use_qkv_packed": False,
    "model.model_config.no_rope_layer": None, "model.model_config.flex_attention_mask": None,
}  # fmt: skip
"""Option → the value with which nanotron is predicted, whatever a file says."""
_IDLE: Mapping[str, str] = {
    "parallelism.pp_engine": "pp", "parallelism.tp_mode": "tp", "parallelism.tp_linear_async_communication": "tp",
    "parallelism.tp_recompute_allgather": "tp",
}  # fmt: skip
"""Option → the degree that has to be above 1 for it to have an effect."""
_OF_ADAM = ("beta1", "beta2", "eps")
_IGNORED = {
    "where a run writes": r"general\..*|checkpoints(\..*)?|s3_upload(\..*)?|kill_switch_path|experiment_logger(\..*)?",
    "data and tokens": r"data_stages|(brrr_)?data(\..*)?|tokenizer(\..*)?"
    r"|tokens\.(train_steps|val_check_interval|limit_(val|test)_batches)",
    "logs and evaluation": r"(logging|profiler|lighteval|metrics_logging)(\..*)?",
    "the course of the learning rate": r"optimizer\.learning_rate_scheduler\..*",
    "weights at the start, and those without decay": r"model\.init_method(\..*)?|model\.model_config\.initializer_range"
    r"|optimizer\.weight_decay_exclude_named_params",
    "what its blocks do alike": r"model\.model_config\.((bos|eos|pad)_token_id|pretraining_tp|use_cache"
    r"|rope_interleaved|interleaved_rotary|max_position_embeddings|rope_scaling(\..*)?|z_loss_coefficient)",
}


def is_ours(file: OtherFile) -> bool:
    """True for a YAML file with nanotron's sections and a model_config."""
    if file.tree is None or file.tree.language != "yaml":
        return False
    sections = {name.partition(".")[0] for name in file.tree.values}
    has_model = any(name.startswith("model.model_config.") for name in file.tree.values)
    return has_model and {"parallelism", "model", "tokens"} <= sections


def read(file: OtherFile) -> Understood:
    """The job of a file; what is not understood is in its `problems`, and a model of another kind an InvalidConfig."""
    assert file.tree is not None, "is_ours has seen it"
    found = Understood(NANOTRON.engine, NANOTRON.title, num_gpus=file.num_gpus)
    _NanotronReader(found, file.tree.values).read()
    return found


class _NanotronReader(OptionReader):
    def read(self) -> None:
        """Fill the value that was given, section by section."""
        degrees = {name: self._peek(f"parallelism.{name}") for name in ("pp", "tp")}
        self._read_family()
        self._read_sizes(degrees["tp"])
        idle = [name for name, degree in _IDLE.items() if degrees[degree] == 1]
        self.read_table(
            self._as_named(option) for option in OPTIONS if option.name not in idle and self._counts(option)
        )
        for name in idle:
            self._note(name, f"{_IDLE[name]} is 1", "no effect")
        self._read_degrees()
        self._read_batch()
        self._read_recompute()
        if self.found.get("optimizer", "name") == "sgd":
            self.assume("optimizer", {"momentum": 0.0}, "", "its SGD has none")
        self._read_formats()
        self._read_usual()
        self.read_rest(_IGNORED)

    def _peek(self, name: str) -> int:
        """A degree, before its row is noted; 1 where there is none that is known."""
        try:
            return positive(self.options.get(name, 1))
        except (ValueError, TypeError, OverflowError):
            return 1

    def _note(self, name: str, note: str, how: How) -> None:
        """Note an option that is there, and that changes nothing."""
        if self.has(name):
            self.found.ignore(self.show(name), note, how)

    def _as_named(self, option: Option) -> Option:
        """The row of an option by the name that the file has."""
        older = _OLDER.get(option.name, "")
        return option._replace(name=older) if older in self.options else option

    def _counts(self, option: Option) -> bool:
        """True for an option that the file's optimizer reads; another one has no effect."""
        counts = option.key not in _OF_ADAM or self.options.get("optimizer.optimizer_factory.name") != "sgd"
        if not counts:
            self._note(self._as_named(option).name, "its SGD has no moments", "no effect")
        return counts

    def _read_family(self) -> None:
        """The family of the blocks; InvalidConfig for one that is neither Llama nor Qwen2."""
        names = [name for name in self.options if re.fullmatch(r"model\.model_config\.is_\w+_config", name)]
        if other := [name for name in names if name.rpartition(".")[2] not in _FAMILIES]:
            raise InvalidConfig(f"{other[0]}: of its models Llama and Qwen2 are predicted")
        self.assume(
            "model", {"name": NANOTRON.engine, "family": "llama"}, "", "blocks are those of a Llama, but as below"
        )
        for name in names:
            self._note(name, "its blocks are those of a Llama", "read")
        bias = "model.model_config.attention_bias"
        if self.value(bias, yes):
            self.found.put("model", {"family": "qwen2", "qkv_bias": True}, self.show(bias))
        self._read_experts()

    def _read_experts(self) -> None:
        moe = "model.model_config.moe_config"
        if [name for name in self.options if name.startswith(moe) and self.has(name)]:
            self.found.problems.append(f"{moe} has experts, with which nanotron is not predicted")
            return
        name = "parallelism.expert_parallel_size"
        if (self.value(name, positive) or 1) > 1:
            self.found.problems.append(f"{name}={self.options[name]} shares out experts, and the model has none")
        else:
            self._note(name, "the model has no experts", "no effect")
        self._note("parallelism.moe_layer_recompute", "the model has no experts", "no effect")

    def _read_sizes(self, tp: int) -> None:
        rows = "model.model_config.vocab_size"
        is_of_data = self.options.get(rows) == -1
        self.read_table(option for option in SIZES if not (is_of_data and option.name == rows))
        model = self.found.tables["model"]
        if "num_kv_heads" not in model and "num_heads" in model:
            heads = {"num_kv_heads": model["num_heads"]}
            self.assume("model", heads, "model.model_config.num_key_value_heads", "its default, as many as heads")
        if is_of_data:
            self._note(rows, "-1 stands for that of the data", "read")
            if size := _find_vocabulary(self.options.get("data_stages")):
                self.has("data_stages")
                self.found.put("model", {"vocab_size": size}, "data_stages", "read", "vocab_size of the first data set")
        step = "model.make_vocab_size_divisible_by"
        multiple, size = (self.value(step, positive) or 1) * tp, model.get("vocab_size")
        if size is not None and size < 1:
            self.found.problems.append(f"{rows}={size} is no whole number above 0, and no -1 for that of the data")
        elif size and size % multiple:
            padded = -(-size // multiple) * multiple
            self.assume("model", {"vocab_size": padded}, rows, f"padded to a multiple of {multiple}, tp · {step}")
        if window := self.value("model.model_config.sliding_window_size", positive):
            values = {"window": window, "window_share": 1.0}
            self.found.put("model", values, self.show("model.model_config.sliding_window_size"))

    def _read_degrees(self) -> None:
        """Data parallelism and its share of the state, and with them the number of GPUs."""
        layout = self.found.tables.setdefault("layout", {})
        ranks = layout.get("pp", 1) * layout.get("tp", 1) * layout.get("cp", 1)
        num_gpus, dp = self.found.num_gpus, self.value("parallelism.dp", positive)
        if dp is None:
            dp = max(1, num_gpus // ranks)
            self.found.ignore("parallelism.dp", f"not said, and predicted as {dp}", "assumed")
        if num_gpus and num_gpus != dp * ranks:
            self.found.problems.append(f"dp · tp · pp · cp is {dp * ranks}, and the job has {num_gpus} GPUs")
        self.found.num_gpus = dp * ranks
        stage = self.choice("optimizer.zero_stage", {0: 0, 1: 1}, whole)
        values = {"dp_shard": dp, "dp_replicate": 1} if stage else {"dp_replicate": dp, "dp_shard": 1}
        said = [self.show(name) for name in ("parallelism.dp", "optimizer.zero_stage") if name in self.options]
        default = "without zero_stage each rank has the whole state"
        self.put_or_default("layout", values, "optimizer.zero_stage", default, ", ".join(said))

    def _read_batch(self) -> None:
        """The sequences of a step, which are those of a microbatch, of each accumulation and of each rank of dp."""
        name, layout = "tokens.batch_accumulation_per_replica", self.found.tables["layout"]
        times = self.value(name, positive)
        if times and "micro_batch" in layout:
            total = layout["micro_batch"] * times * layout["dp_shard"] * layout["dp_replicate"]
            self.found.put("batch", {"global_batch": total}, self.show(name), "read", "times micro_batch_size and dp")

    def _read_recompute(self) -> None:
        name = "parallelism.recompute_layer"
        recomputes = self.value(name, yes) or False
        values = {"recompute": "full" if recomputes else "none"}
        self.put_or_default("layout", values, name, "its default", self.show_if_there(name))
        method = str(self.options.get("model.model_config._attn_implementation", ""))
        if self.found.get("layout", "cp", 1) > 1 and method.startswith("ring"):
            self.found.put("layout", {"cp_method": "ring"}, self.show("model.model_config._attn_implementation"))

    def _read_formats(self) -> None:
        if self.found.get("precision", "reduce") == "bfloat16":
            self.found.problems.append(
                "optimizer.accumulate_grad_in_fp32=false keeps parameters and gradients in the format of the model "
                "alone, which is not predicted; true is"
            )
        asynchronous, mode = "parallelism.tp_linear_async_communication", "parallelism.tp_mode"
        is_sharded = self.found.get("layout", "sequence_parallel")
        if is_sharded is False and self.value(asynchronous, yes):
            self.found.problems.append(f"{asynchronous}=true runs only with {mode}: REDUCE_SCATTER")

    def _read_usual(self) -> None:
        """Options that are predicted at one value alone."""
        for name, usual in _USUAL.items():
            if name not in self.used and self.has(name) and self.one(name) not in (None, usual):
                told = "if it were not there" if usual is None else f"with {str(usual).lower()}"
                self.found.ignore(self.show(name), f"predicted as {told}", "assumed")


def _find_vocabulary(stages: Any) -> int | None:
    """Rows of the vocabulary that the first data set has; None where none says them."""
    for stage in stages if isinstance(stages, list) else []:
        data = stage.get("data") if isinstance(stage, Mapping) else None
        dataset = data.get("dataset") if isinstance(data, Mapping) else None
        rows = dataset.get("vocab_size") if isinstance(dataset, Mapping) else None
        if isinstance(rows, int) and rows > 0:
            return rows
    return None
