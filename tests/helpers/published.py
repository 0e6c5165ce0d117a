"""Matrices as published files hold them, in each format that is read: made on the spot, and their values by the plainest
arithmetic. Nothing of the product is used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Parts = dict[str, torch.Tensor]
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


@dataclass(frozen=True)
class Format:
    """encode: a matrix (fp32) to tensors by what follows the module's name. decode: those to the values, in the dtype that the
    library gives. config: `quantization_config` of config.json. bytes_per_element: of them all."""

    encode: Callable[[torch.Tensor], Parts]
    decode: Callable[[Parts, torch.dtype], torch.Tensor]
    config: Mapping[str, Any]
    bytes_per_element: float
    codes: str = "weight"


def spread(scales: torch.Tensor, rows: int, columns: int, shape: torch.Size) -> torch.Tensor:
    return scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: shape[0], : shape[1]]


def greatest(matrix: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The largest magnitude of each block, those at the edges cut."""
    padded = torch.zeros(-(-matrix.shape[0] // rows) * rows, -(-matrix.shape[1] // columns) * columns)
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix.abs()
    blocks = padded.view(padded.shape[0] // rows, rows, -1, columns)
    return blocks.amax((1, 3)).clamp(min=1e-6)


def nearest_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Codes of 4 bits (uint8)."""
    return (values[..., None] - E2M1).abs().argmin(-1).to(torch.uint8)


def packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned codes of each row in int32, the first in the lowest bits."""
    in_word = 32 // bits
    words = torch.zeros(codes.shape[0], -(-codes.shape[1] // in_word) * in_word, dtype=torch.int64)
    words[:, : codes.shape[1]] = codes
    shifted = words.view(codes.shape[0], -1, in_word) << torch.arange(0, 32, bits)
    return shifted.sum(-1).to(torch.uint32).view(torch.int32)


def unpacked(words: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    codes = words.view(torch.uint32).long()[..., None] >> torch.arange(0, 32, bits) & (1 << bits) - 1
    return codes.flatten(1)[:, :columns]


def fp8(rows: int, columns: int, **config: Any) -> Format:
    """With a scale for each block of so many rows and columns; 0: for all of them."""

    def blocks(shape: torch.Size) -> tuple[int, int]:
        return rows or shape[0], columns or shape[1]

    def encode(matrix: torch.Tensor) -> Parts:
        scales = greatest(matrix, *blocks(matrix.shape)) / 448
        codes = (matrix / spread(scales, *blocks(matrix.shape), matrix.shape)).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale_inv": scales if rows or columns else scales.view(())}

    def decode(parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        codes = parts["weight"].float()
        scales = parts["weight_scale_inv"].view(1, 1) if not rows + columns else parts["weight_scale_inv"]
        return (codes * spread(scales, *blocks(codes.shape), codes.shape)).to(dtype)

    return Format(encode, decode, {"quant_method": "fp8", **config}, 1.0)


def exponents(matrix: torch.Tensor) -> torch.Tensor:
    """Of the powers of two for blocks of 32 in a row (uint8)."""
    return (torch.log2(greatest(matrix, 1, 32)).floor() - 2 + 127).to(torch.uint8)


def pairs(codes: torch.Tensor) -> torch.Tensor:
    return codes[:, ::2] | codes[:, 1::2] << 4


def from_pairs(words: torch.Tensor) -> torch.Tensor:
    return E2M1[torch.stack([words & 15, words >> 4], -1).flatten(-2).long()]


def mx(matrix: torch.Tensor) -> Parts:
    """MXFP4: packed codes and exponents."""
    scales = exponents(matrix)
    return {
        "codes": pairs(nearest_e2m1(matrix / spread(2.0 ** (scales.float() - 127), 1, 32, matrix.shape))),
        "scales": scales,
    }


def mx_values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    values = from_pairs(codes)
    return values * spread(2.0 ** (scales.float() - 127), 1, 32, values.shape)


def fp4_in_fp8() -> Format:
    """As DeepSeek has experts in fp4 next to fp8."""

    def encode(matrix: torch.Tensor) -> Parts:
        parts = mx(matrix)
        return {"weight": parts["codes"].view(torch.int8), "scale": parts["scales"].view(torch.float8_e8m0fnu)}

    def decode(parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        return mx_values(parts["weight"].view(torch.uint8), parts["scale"].view(torch.uint8)).to(dtype)

    return Format(encode, decode, {"quant_method": "fp8", "weight_block_size": [128, 128]}, 0.5 + 1 / 32)


def of_compressed_tensors(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "format": form}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


def integers(
    bits: int, group: int, dtype: torch.dtype, *, symmetric: bool = True, pack: bool = True, order: bool = False
) -> Format:
    """compressed-tensors' integers. `group`: columns with one scale; 0: a row. `order`: groups are anywhere."""

    def group_of(columns: int) -> torch.Tensor:
        number = torch.arange(columns) // (group or columns)
        return number[torch.randperm(columns, generator=torch.Generator().manual_seed(3))] if order else number

    def encode(matrix: torch.Tensor) -> Parts:
        top, number = (1 << bits - 1) - 1, group_of(matrix.shape[1])
        most = torch.stack([matrix[:, number == n].abs().amax(1) for n in range(int(number.max()) + 1)], 1)
        scales = (most.clamp(min=1e-6) / top).to(dtype)
        zeros = torch.zeros_like(scales, dtype=torch.int64)
        if not symmetric:
            zeros = torch.randint(-3, 4, zeros.shape, generator=torch.Generator().manual_seed(4))
        codes = (matrix / scales.float()[:, number] + zeros[:, number]).round().clamp(-top - 1, top).long()
        parts = {"weight_scale": scales}
        if pack:
            parts |= {"weight_packed": packed(codes + top + 1, bits), "weight_shape": torch.tensor(matrix.shape)}
        else:
            parts["weight"] = codes.to(torch.int8)
        if not symmetric:
            down = packed((zeros + top + 1).t().contiguous(), bits).t().contiguous()
            parts["weight_zero_point"] = down if pack else zeros.to(torch.int8)
        return parts | ({"weight_g_idx": number.to(torch.int32)} if order else {})

    def decode(parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        scales, half = parts["weight_scale"], 1 << bits - 1
        if pack:
            rows, columns = parts["weight_shape"].tolist()
            codes = unpacked(parts["weight_packed"], bits, columns) - half
        else:
            codes = parts["weight"].long()
            rows, columns = codes.shape
        number = parts["weight_g_idx"].long() if order else torch.arange(columns) // (group or columns)
        zeros = torch.zeros(rows, scales.shape[1], dtype=torch.int64)
        if not symmetric:
            stored = parts["weight_zero_point"]
            zeros = unpacked(stored.t().contiguous(), bits, rows).t() - half if pack else stored.long()
        values = (codes - zeros[:, number]).to(scales.dtype) * scales[:, number]
        return values.to(dtype)

    form = "pack-quantized" if pack else "int-quantized"
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    config = of_compressed_tensors(form, num_bits=bits, type="int", symmetric=symmetric, **strategy)
    each = bits / 8 + (dtype.itemsize / group if group else 0)
    return Format(encode, decode, config, each, "weight_packed" if pack else "weight")


def fp8_of_compressed_tensors(dtype: torch.dtype) -> Format:
    """With a scale for each row."""

    def encode(matrix: torch.Tensor) -> Parts:
        scales = (greatest(matrix, 1, matrix.shape[1]) / 448).to(dtype)
        return {"weight": (matrix / scales.float()).to(torch.float8_e4m3fn), "weight_scale": scales}

    def decode(parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        return (parts["weight"].to(parts["weight_scale"].dtype) * parts["weight_scale"]).to(dtype)

    config = of_compressed_tensors("float-quantized", num_bits=8, type="float", strategy="channel", symmetric=True)
    return Format(encode, decode, config, 1.0)


def fp8_of_modelopt() -> Format:
    """As `FP8QTensor.dequantize`: the scale is rounded to the dtype first."""

    def encode(matrix: torch.Tensor) -> Parts:
        scale = (matrix.abs().max() / 448).bfloat16().float() * 1.0017  # far from a number in 16 bits
        return {"weight": (matrix / scale).to(torch.float8_e4m3fn), "weight_scale": scale}

    def decode(parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        return parts["weight"].to(dtype) * parts["weight_scale"].to(dtype)

    return Format(encode, decode, {"quant_method": "modelopt", "quant_algo": "FP8"}, 1.0)


def nvfp4(*, modelopt: bool = False) -> Format:
    def encode(matrix: torch.Tensor) -> Parts:
        of_all = 448 * 6 / matrix.abs().max()
        scales = (greatest(matrix, 1, 16) / 6 * of_all).to(torch.float8_e4m3fn)
        codes = nearest_e2m1(matrix / spread(scales.float() / of_all, 1, 16, matrix.shape))
        if modelopt:
            return {"weight": pairs(codes), "weight_scale": scales, "weight_scale_2": 1 / of_all}
        return {"weight_packed": pairs(codes), "weight_scale": scales, "weight_global_scale": of_all.view(1)}

    def decode(parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        scales = parts["weight_scale"].float()
        if modelopt:
            values = from_pairs(parts["weight"])
            return (values * spread(scales * parts["weight_scale_2"], 1, 16, values.shape)).to(dtype)
        values = from_pairs(parts["weight_packed"])
        scales = spread(scales / parts["weight_global_scale"], 1, 16, values.shape)
        return (values * scales).bfloat16().to(dtype)

    config = of_compressed_tensors(
        "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", symmetric=True, group_size=16
    )
    if modelopt:
        config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    return Format(encode, decode, config, 0.5 + 1 / 16, "weight" if modelopt else "weight_packed")


def mxfp4_of_compressed_tensors() -> Format:
    def encode(matrix: torch.Tensor) -> Parts:
        parts = mx(matrix)
        return {"weight_packed": parts["codes"], "weight_scale": parts["scales"]}

    def decode(parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        return mx_values(parts["weight_packed"], parts["weight_scale"]).bfloat16().to(dtype)

    config = of_compressed_tensors(
        "mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", symmetric=True, group_size=32
    )
    return Format(encode, decode, config, 0.5 + 1 / 32, "weight_packed")


def _rounded_to_zeros(matrix: torch.Tensor, number: torch.Tensor, bits: int) -> tuple[torch.Tensor, ...]:
    """Unsigned codes, zeros and fp16 scales (groups, outputs) of a matrix (outputs, inputs). A fifth of the zeros is 0."""
    top = (1 << bits) - 1
    columns = [matrix[:, number == n] for n in range(int(number.max()) + 1)]
    low = torch.stack([of.amin(1).clamp(max=0.0) for of in columns])
    low[:, ::5] = 0.0
    scales = ((torch.stack([of.amax(1).clamp(min=1e-3) for of in columns]) - low) / top).half()
    zeros = (-low / scales.float()).round().clamp(0, top).long()
    codes = (matrix.t() / scales.float()[number] + zeros[number]).round().clamp(0, top).long()
    return codes, zeros, scales


def gptq(bits: int, group: int, *, ordered: bool = True, version: int = 1) -> Format:
    """`ordered`: the groups are one behind the other (no act-order). Version 1 has whole words of zeros minus `ones`."""
    ones = {4: 0x11111111, 8: 0x01010101}[bits] if version == 1 else 0

    def encode(matrix: torch.Tensor) -> Parts:
        number = torch.arange(matrix.shape[1]) // group
        if not ordered:
            number = number[torch.randperm(len(number), generator=torch.Generator().manual_seed(3))]
        codes, zeros, scales = _rounded_to_zeros(matrix, number, bits)
        return {
            "qweight": packed(codes.t().contiguous(), bits).t().contiguous(),
            "qzeros": packed(zeros, bits) - ones,
            "scales": scales,
            "g_idx": number.to(torch.int32),
        }

    def decode(parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        number, scales = parts["g_idx"].long(), parts["scales"]
        codes = unpacked(parts["qweight"].t().contiguous(), bits, len(number)).t()
        zeros = unpacked(parts["qzeros"] + ones, bits, scales.shape[1])
        return (scales[number] * (codes - zeros[number])).t().to(dtype)

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": not ordered}
    if version == 2:
        config["checkpoint_format"] = "gptq_v2"
    return Format(encode, decode, config, bits / 8 * (1 + 1 / group) + 2 / group, "qweight")


AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def awq(group: int) -> Format:
    def shuffled(codes: torch.Tensor) -> torch.Tensor:
        return codes.view(len(codes), -1, 8)[:, :, AWQ_ORDER].flatten(1)

    def in_order(words: torch.Tensor) -> torch.Tensor:
        codes = unpacked(words, 4, 8 * words.shape[1]).view(len(words), -1, 8)
        back = torch.empty_like(codes)
        back[:, :, AWQ_ORDER] = codes
        return back.flatten(1)

    def encode(matrix: torch.Tensor) -> Parts:
        codes, zeros, scales = _rounded_to_zeros(matrix, torch.arange(matrix.shape[1]) // group, 4)
        return {"qweight": packed(shuffled(codes), 4), "qzeros": packed(shuffled(zeros), 4), "scales": scales}

    def decode(parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        codes, zeros = in_order(parts["qweight"]), in_order(parts["qzeros"])
        values = (codes - zeros.repeat_interleave(group, 0)) * parts["scales"].repeat_interleave(group, 0)
        return values.t().to(dtype)

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Format(encode, decode, config, 0.5 * (1 + 1 / group) + 2 / group, "qweight")


FORMATS = {
    "fp8, blocks": fp8(128, 128, weight_block_size=[128, 128]),
    "fp8, rows": fp8(1, 0),
    "fp8, one scale": fp8(0, 0),
    "fp4 in fp8": fp4_in_fp8(),
    "int4": integers(4, 32, torch.bfloat16),
    "int4, rows": integers(4, 0, torch.float16),
    "int4, zeros": integers(4, 16, torch.bfloat16, symmetric=False),
    "int4, any order": integers(4, 32, torch.bfloat16, order=True),
    "int8, packed": integers(8, 32, torch.bfloat16, symmetric=False),
    "int8, rows": integers(8, 0, torch.bfloat16, pack=False),
    "int8, zeros": integers(8, 32, torch.float32, symmetric=False, pack=False),
    "fp8 of compressed-tensors": fp8_of_compressed_tensors(torch.bfloat16),
    "fp8 of ModelOpt": fp8_of_modelopt(),
    "nvfp4": nvfp4(),
    "nvfp4 of ModelOpt": nvfp4(modelopt=True),
    "mxfp4 of compressed-tensors": mxfp4_of_compressed_tensors(),
    "gptq": gptq(4, 32),
    "gptq, any order": gptq(4, 32, ordered=False, version=2),
    "gptq, 8 bits": gptq(8, 32),
    "awq": awq(32),
}


def encode(tensors: Mapping[str, torch.Tensor], how: str, is_coded: Callable[[str, torch.Tensor], bool]) -> Parts:
    """The tensors of a model with those matrices coded that `is_coded` says."""
    made: Parts = {}
    for name, tensor in tensors.items():
        if is_coded(name, tensor):
            module = name.removesuffix("weight")
            made |= {module + part: value for part, value in FORMATS[how].encode(tensor.float()).items()}
        else:
            made[name] = tensor
    return made


def decode(tensors: Mapping[str, torch.Tensor], how: str, dtype: torch.dtype) -> Parts:
    """The values of what `encode` gives."""
    form, made, left = FORMATS[how], {}, dict(tensors)
    for name in tensors:
        module = name.removesuffix(form.codes)
        parts = {part: tensors[module + part] for part in form.encode(torch.ones(128, 128)) if module + part in tensors}
        if name.endswith(f".{form.codes}") and len(parts) > 1:
            made[f"{module}weight"] = form.decode(parts, dtype).contiguous()
            for part in parts:
                left.pop(module + part)
    return left | made


def write(folder: Path, tensors: Parts, how: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": FORMATS[how].config}))
    return folder
