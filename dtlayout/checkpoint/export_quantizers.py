"""Weights of linear layers in formats of few bits, and as the tensors of safetensors files that `transformers` opens.

int8 and int4 are tensors of torchao, which says by `flatten_tensor_state_dict` what a file holds of them and what its
header says. nf4 is bitsandbytes' format. Its codes are those of `ops.quantized`, so the package is not needed here.

torchao quantizes to int4 by mslk, which is for GPUs alone. So the codes are those of `ops.fake_quantized`, by which a
training may have multiplied, and are handed to torchao's `Int4Tensor`: -8 to 7, two to a byte with the first in the low
bits, for w ≈ scale · code + zero.

Legend: N rows, D columns, G columns of a group.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtlayout.ops.fake_quantized import FAKE_QUANTIZERS, copy_exact
from dtlayout.ops.quantized import QUANTIZERS
from dtlayout.ops.scaled import alone
from dtlayout.spec.export_format import EXPORT_FORMATS

Header = dict[str, str]
"""Metadata of a safetensors file."""


class NF4Matrix(NamedTuple):
    """A weight [N, D] in bitsandbytes' 4-bit format."""

    codes: Tensor
    """Two codes to a byte, the first in the high bits, uint8 [N · D / 2, 1]."""
    scales: Tensor
    """Largest magnitude of each group, float32 [N · D / G]."""
    rows: int

    def dequantize(self) -> Tensor:
        """The weight that the codes stand for, float32 [N, D]."""
        codes, scales = (each.view(self.rows, -1) for each in (self.codes, self.scales))
        return QUANTIZERS["nf4"].dequantize(codes, scales)

    def list_tensors(self) -> dict[str, Tensor]:
        """End of a name → tensor on disk, with the table of values and a JSON text of the settings as bytes."""
        columns = self.codes.numel() * 2 // self.rows
        state = {
            "quant_type": "nf4", "blocksize": EXPORT_FORMATS["nf4"].group, "dtype": "bfloat16",
            "shape": [self.rows, columns],
        }  # fmt: skip
        all_codes = torch.arange(16, dtype=torch.uint8)[None].repeat(1, 8)
        pairs = all_codes[:, ::2] * 16 + all_codes[:, 1::2]
        return {
            "": self.codes,
            ".absmax": self.scales,
            ".quant_map": QUANTIZERS["nf4"].dequantize(pairs, torch.ones(1, 2))[0, :16].clone(),
            ".quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
        }


class ExportQuantizer(NamedTuple):
    """The functions of a format."""

    quantize: Callable[[Tensor], Any]
    """Weight [N, D] in float32 → quantized weight, of few bits."""
    dequantize: Callable[[Any], Tensor]
    """Quantized weight → the float32 weight [N, D] that it stands for."""
    flatten: Callable[[Mapping[str, Any]], tuple[dict[str, Tensor], Header]]
    """Name → tensor or quantized weight, to the tensors that a file has for them and what its header says of them."""
    describe: Callable[[], dict[str, Any]]
    """Function that gives the `quantization_config` of config.json."""


def _quantize_nf4(weight: Tensor) -> NF4Matrix:
    if weight.is_meta:  # sizes alone are asked
        num_groups = weight.numel() // EXPORT_FORMATS["nf4"].group
        codes = torch.empty(weight.numel() // 2, 1, dtype=torch.uint8, device="meta")
        return NF4Matrix(codes, torch.empty(num_groups, device="meta"), weight.shape[0])
    codes, scales = QUANTIZERS["nf4"].quantize(weight, torch.float32)
    return NF4Matrix(codes.view(-1, 1), scales.flatten(), weight.shape[0])


def _flatten_nf4(weights: Mapping[str, Any]) -> tuple[dict[str, Tensor], Header]:
    tensors: dict[str, Tensor] = {}
    for name, weight in weights.items():
        parts = weight.list_tensors() if isinstance(weight, NF4Matrix) else {"": weight}
        tensors |= {f"{name}{end}": part for end, part in parts.items()}
    return tensors, {}


def _describe_nf4() -> dict[str, Any]:
    return {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": False, "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8", "llm_int8_skip_modules": ["lm_head"],
    }  # fmt: skip


def _quantize_int8(weight: Tensor) -> Any:
    from torchao.quantization import Int8Tensor, PerRow

    made = Int8Tensor.from_hp(weight, PerRow())
    # bfloat16 is the format that it computes in; the scales stay those of the float32 weight.
    return Int8Tensor(made.qdata, made.scale, made.block_size, torch.bfloat16, zero_point=made.zero_point)


def _dequantize_int8(weight: Any) -> Tensor:
    values: Tensor = weight.dequantize(torch.float32)
    return values


def _quantize_int4(weight: Tensor) -> Any:
    from torchao.quantization import Int4Tensor

    group = EXPORT_FORMATS["int4"].group
    quantizer = FAKE_QUANTIZERS["int4"]
    scales = quantizer.find_scales(weight, alone)
    codes = quantizer.find_codes(copy_exact(weight), scales).clamp_(quantizer.least, quantizer.most).sub_(8)
    codes = codes.to(torch.int8)
    packed = (codes[:, ::2] & 15) | (codes[:, 1::2] << 4)
    turned = (each.squeeze(-1).t().contiguous() for each in scales)
    return Int4Tensor(packed, *turned, block_size=[1, group], shape=weight.shape)


def _dequantize_int4(weight: Any) -> Tensor:
    pairs = (weight.qdata << 4 >> 4, weight.qdata >> 4)  # shifts of int8 keep the sign
    codes = torch.stack(pairs, -1).flatten(1).float().unflatten(1, (-1, weight.block_size[-1]))
    scales, zeros = (each.t().float()[..., None] for each in (weight.scale, weight.zero_point))
    return (codes * scales + zeros).flatten(1)


def _flatten_torchao(weights: Mapping[str, Any]) -> tuple[dict[str, Tensor], Header]:
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    tensors, header = flatten_tensor_state_dict(dict(weights))
    return tensors, header


def _describe_torchao(name: str) -> dict[str, Any]:
    from torchao.core.config import config_to_dict
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig

    config = Int8WeightOnlyConfig() if name == "int8" else Int4WeightOnlyConfig(EXPORT_FORMATS[name].group)
    return {
        "quant_method": "torchao", "quant_type": {"default": config_to_dict(config)},
        "modules_to_not_convert": ["lm_head"], "include_input_output_embeddings": False,
    }  # fmt: skip


EXPORT_QUANTIZERS: dict[str, ExportQuantizer] = {
    "int8": ExportQuantizer(_quantize_int8, _dequantize_int8, _flatten_torchao, lambda: _describe_torchao("int8")),
    "int4": ExportQuantizer(_quantize_int4, _dequantize_int4, _flatten_torchao, lambda: _describe_torchao("int4")),
    "nf4": ExportQuantizer(_quantize_nf4, NF4Matrix.dequantize, _flatten_nf4, _describe_nf4),
}
"""Name of a format → its functions."""
