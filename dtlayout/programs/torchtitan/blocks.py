"""Blocks of torchtitan, read: what they compute again, what is compiled, and the format of their matmuls."""

from collections.abc import Mapping
from typing import Any

from dtlayout.programs.options import OptionReader, several, string, yes
from dtlayout.programs.understood import Understood
from dtlayout.spec.model_shape import ModelShape

_P, _AC, _FP8, _MX = "parallelism.", "activation_checkpoint.", "quantize.linear.float8.", "quantize.linear.mx."
_FORMATS = {"tensorwise": "fp8-tensorwise", "rowwise": "fp8-rowwise", "rowwise_with_gw_hp": "fp8-rowwise"}


class BlocksReader(OptionReader):
    """Reads options of blocks by the names of 0.2.2."""

    def __init__(self, found: Understood, options: Mapping[str, Any], release: str):
        super().__init__(found, options)
        self.release = release
        """Release whose names the file has: 0.0, 0.1, 0.2.2 or 0.3."""
        self.tp = 1
        """Degree of tensor parallelism."""
        self.is_whole = False
        """True if each rank of a stage and of tp has the whole state."""
        self.model: ModelShape | None = None
        """The model; None where its sizes are in the program's code."""

    def refuse(self, name: str, why: str) -> None:
        """Note that an option with its value is a problem."""
        self.found.problems.append(f"{name}={self.options[name]} {why}" if self.has(name) else f"{name} {why}")

    def take_back(self, section: str, values: Mapping[str, Any], name: str, note: str) -> None:
        """Note what stands in the place of an option's value, since another one keeps the program from using it."""
        self.found.rows = [row for row in self.found.rows if row.option.partition(" ")[0] != name]
        self.found.put(section, values, self.show(name) if self.has(name) else name, "no effect", note)

    def read_recompute(self) -> None:
        """Blocks that are computed again; all of 0.3 that are selective keep results."""
        name, option = f"{_AC}mode", f"{_AC}selective_ac_option"
        mode = self.value(name, string) or "selective"
        every = str(self.one(option)) if self.has(option) else "op" if self.release == "0.3" else "2"
        is_selective = mode == "selective"
        if mode not in ("none", "full", "selective") or (is_selective and every != "op" and not every.isdigit()):
            self.refuse(option if is_selective else name, "is nothing that is known here")
            return
        ours = mode
        if is_selective and every != "op":
            ours = f"every-{int(every)}" if int(every) > 1 else "full"
        shown = f"{name} = {mode}" + f", {option} = {every}" * is_selective
        said = name if self.has(name) else option
        self.put_or_default("layout", {"recompute": ours}, said, "its default", shown)
        if self.has(option) and not is_selective:
            self.found.ignore(self.show(option), f"mode is {mode}", "no effect")

    def read_kernels(self) -> None:
        """Compiled blocks, and the options that take effect only then."""
        parts, is_on = self.value("compile.components", several), self.value("compile.enable", yes) or False
        compiles = is_on and (parts is None or "model" in parts)
        kind, name = "blocks" if compiles else "none", f"{_P}enable_async_tensor_parallel"
        self.put_or_default("kernels", {"compile": kind}, "compile.enable", "its default")
        if is_on and parts is not None and compiles != ("loss" in parts):
            self.tell("fused_loss", "never" if compiles else "always", self.show("compile.components"))
        elif compiles and self.release == "0.0":
            self.tell("fused_loss", "never", "", "it compiles the loss since 2025")
        if self.found.get("layout", "tp_overlap") and self.tp == 1:
            self.take_back("layout", {"tp_overlap": False}, name, "tp is 1")
        elif self.found.get("layout", "tp_overlap") and not compiles:
            self.refuse(name, "takes compile.enable, with model among compile.components")
        if self.tp == 1 and self.has(f"{_P}enable_sequence_parallel"):
            self.found.ignore(self.show(f"{_P}enable_sequence_parallel"), "tp is 1", "no effect")
        if self.release == "0.3" and not self.value("training.disable_cuda_graphs", yes):
            note = "kernels are predicted as started one by one"
            self.found.ignore("training.disable_cuda_graphs", f"CUDA graphs are on by default; {note}", "assumed")

    def read_formats(self) -> None:
        """The format of matmuls, by the converter that is named and its own options."""
        converters = self.value("model.converters", several) or []
        if self.value(f"{_FP8}enable_float8_linear", yes):
            converters = [*converters, "float8"]
        kinds = [each.rpartition(".")[2] for each in converters if "grouped_mm" not in each]
        for kind in kinds:
            if kind not in ("float8", "mx"):
                self.refuse("model.converters", f"has {kind}, which is nothing that is known here")
        if len({*kinds}) > 1:
            self.refuse("model.converters", "has two formats")
        recipe = self.choice(f"{_FP8}recipe_name", _FORMATS)
        scaled = self.value(f"{_MX}recipe_name", string) or "mxfp8"
        if "mx" in kinds and (not scaled.startswith("mxfp8") or scaled.endswith("emulated")):
            self.refuse(f"{_MX}recipe_name", "is nothing that is known here")
        idle = tuple(prefix for prefix in (_FP8, _MX) if prefix.split(".")[2] not in kinds)
        for name in self.options:
            if name.startswith(idle) and name != f"{_FP8}enable_float8_linear":
                self.has(name)
                self.found.ignore(self.show(name), "its converter is not in model.converters", "no effect")
        if not kinds:
            if converters:
                self.found.ignore(self.show("model.converters"), "experts are predicted as without it", "assumed")
            return
        name = f"{_FP8}enable_fsdp_float8_all_gather"
        gathers = self.value(name, yes)
        if gathers and recipe and "float8" in kinds:
            self.refuse(name, "does not go with recipe_name")
        if "mx" in kinds and self.tp > 1 and self.release != "0.3" and self.found.get("kernels", "compile") == "blocks":
            self.refuse("model.converters", "with mx beside tp takes compile.enable = false")
        if (compute := self.found.get("precision", "compute")) != "bfloat16":
            why = f"computes in {compute}" + ", since nothing is sharded beside tp or pp" * self.is_whole
            self.refuse("model.converters", f"{why}; fp8 is predicted beside bfloat16 alone")
        ours = "mxfp8" if "mx" in kinds else recipe or "fp8-tensorwise"
        self.found.put("precision", {"matmuls": ours}, f"model.converters = {', '.join(converters)}")
        if ours == "fp8-tensorwise" and not gathers:
            self.found.ignore(name, "weights are predicted as gathered in fp8", "assumed")
        name = (_MX if "mx" in kinds else _FP8) + "filter_fqns"
        kept = self.value(name, several)
        if kept not in (["output"], ["lm_head"]) and not (kept is None and "mx" in kinds):
            note = "predicted as if it named the head alone"
            self.found.ignore(self.show(name) if self.has(name) else name, note, "assumed")
        if self.model and self.model.experts and len(kinds) == len(converters):
            self.found.ignore("model.converters", "experts are predicted in the format of linear layers", "assumed")
