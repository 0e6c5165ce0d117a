"""Published formats: any rows of a coded matrix are those of the whole, and it is what the plainest arithmetic gives."""

from __future__ import annotations

import json
from pathlib import Path

import published
import pytest
import torch
from published import FORMATS, Parts

from infinity.errors import CheckpointError, ConfigError
from infinity.fsdp2.materialize import stored_parameters
from infinity.store.foreign import StoredTensor
from infinity.store.stored_parameter import read_rows

ROWS, COLUMNS = 200, 224
"""Not whole blocks of 128, and rows that ranks don't share by eights."""


def matrix(rows: int = ROWS, columns: int = COLUMNS) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def make(folder: Path, how: str) -> tuple[Parts, torch.Tensor]:
    """The tensors that were written, and the matrix that was coded."""
    parts = FORMATS[how].encode(matrix())
    tensors = {f"a.b.{part}": tensor.contiguous() for part, tensor in parts.items()}
    published.write(folder, {**tensors, "a.norm.weight": torch.ones(7)}, how)
    return parts, matrix()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("how", FORMATS)
def test_values_are_those_of_the_format(how: str, dtype: torch.dtype, tmp_path: Path) -> None:
    parts, original = make(tmp_path, how)
    stored = stored_parameters(tmp_path)
    assert stored.keys() == {"a.b.weight", "a.norm.weight"}
    assert isinstance(stored["a.norm.weight"], StoredTensor)
    assert stored["a.b.weight"].shape == (ROWS, COLUMNS)
    expected = FORMATS[how].decode(parts, dtype).contiguous()
    assert expected.shape == original.shape
    assert (expected.float() - original).abs().mean() < 0.2  # it is a format, not noise
    for first, count in [(0, ROWS), (0, 1), (127, 2), (8, 96), (100, 100), (199, 1), (3, 0)]:
        out = torch.full((count, COLUMNS), 7.0, dtype=dtype)
        read_rows(stored["a.b.weight"], first, out)
        assert torch.equal(bits(out), bits(expected[first : first + count])), (first, count)


@pytest.mark.parametrize("how", FORMATS)
def test_rows_are_read_with_what_they_need_and_no_more(how: str, tmp_path: Path) -> None:
    make(tmp_path, how)
    stored = stored_parameters(tmp_path)["a.b.weight"]
    whole = sum(one.nbytes for one in stored.ranges(0, ROWS))
    assert whole == pytest.approx(FORMATS[how].bytes_per_element * ROWS * COLUMNS, rel=0.05)
    assert sum(one.nbytes for one in stored.ranges(0, ROWS // 2)) <= whole * 0.5 + 4 * COLUMNS + 200
    assert sum(one.nbytes for one in stored.ranges(5, 0)) == 0


@pytest.mark.parametrize("how", FORMATS)
def test_tensors_that_lack_or_do_not_fit_are_named(how: str, tmp_path: Path) -> None:
    parts = FORMATS[how].encode(matrix())
    for lacking in set(parts) - {FORMATS[how].codes, "weight_shape", "weight_zero_point", "weight_g_idx"}:
        kept = {f"a.b.{part}": tensor.contiguous() for part, tensor in parts.items() if part != lacking}
        published.write(tmp_path, kept, how)
        with pytest.raises(CheckpointError, match=r"a\.b.*fit together"):
            stored_parameters(tmp_path)
    for part, tensor in parts.items():
        if part == "weight_shape" or tensor.numel() == 1:
            continue
        spoiled = {f"a.b.{name}": value.contiguous() for name, value in parts.items()}
        shapes_alone_say_what_has_a_scale = ("fp8, one scale", "fp8, rows", "fp4 in fp8", "fp8 of ModelOpt")
        if how not in shapes_alone_say_what_has_a_scale:
            published.write(tmp_path, spoiled | {f"a.b.{part}": tensor[: len(tensor) // 2].contiguous()}, how)
            with pytest.raises(CheckpointError, match=r"a\.b.* fit together"):
                stored_parameters(tmp_path)
        other = tensor.to(torch.int16) if tensor.itemsize > 2 else tensor.to(torch.float64)
        published.write(tmp_path, spoiled | {f"a.b.{part}": other.contiguous()}, how)
        assert "fit together" in why_not(tmp_path)


def why_not(folder: Path) -> str:
    """Why what the folder holds is no model with the parameter a.b.weight; empty where it is."""
    try:
        stored = stored_parameters(folder)
    except CheckpointError as error:
        return str(error)
    return "it doesn't fit together with" + ", ".join(stored.keys() - {"a.b.weight"}) if len(stored) > 1 else ""


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"quant_method": "hqq"}, "quant_method 'hqq' is not supported"),
        ({"bits": 4}, "has no quant_method"),
        ({"quant_method": "awq", "version": "gemv"}, "AWQ's format 'gemv'"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "GPTQ's format 'marlin'"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format 'marlin-24' is not supported"),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-bitmask"}},
            "format 'sparse-bitmask' is not supported",
        ),
        (
            {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"u": {}}}},
            "transform_config",
        ),
    ],
)
def test_unknown_formats_are_refused_by_name(config: dict[str, object], why: str, tmp_path: Path) -> None:
    make(tmp_path, "int4")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with pytest.raises(ConfigError, match=why):
        stored_parameters(tmp_path)


def test_a_damaged_config_is_named(tmp_path: Path) -> None:
    make(tmp_path, "int4")
    damaged = '{"quantization_config": {"quant_method": "compressed-tensors", "config_groups": 7}}'
    for content in ("[", "3", '{"quantization_config": 5}', damaged):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"config\.json(:| is).*damaged"):
            stored_parameters(tmp_path)


def test_the_config_of_a_part_of_a_model_counts(tmp_path: Path) -> None:
    make(tmp_path, "int4")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config}))
    assert "a.b.weight" in stored_parameters(tmp_path)


def test_experts_in_fp8_are_read_one_by_one(tmp_path: Path) -> None:
    experts = [matrix(160 + 8 * number, 192)[:160] for number in range(3)]
    parts = [FORMATS["fp8, blocks"].encode(expert) for expert in experts]
    tensors = {
        "experts.down_proj": torch.stack([part["weight"] for part in parts]),
        "experts.down_proj_scale_inv": torch.stack([part["weight_scale_inv"] for part in parts]),
    }
    published.write(tmp_path, tensors, "fp8, blocks")
    stored = stored_parameters(tmp_path)["experts.down_proj"]
    expected = torch.stack([FORMATS["fp8, blocks"].decode(part, torch.bfloat16) for part in parts])
    assert stored.shape == expected.shape
    for first, count in ((0, 3), (1, 2), (2, 1)):
        out = torch.empty(count, *expected.shape[1:], dtype=torch.bfloat16)
        read_rows(stored, first, out)
        assert torch.equal(out, expected[first : first + count])
    for number in range(3):
        out = torch.empty(70, 192, dtype=torch.bfloat16)
        read_rows(stored.row(number), 60, out)  # type: ignore[attr-defined]
        assert torch.equal(out, expected[number, 60:130])


def test_experts_in_mxfp4_are_read_one_by_one(tmp_path: Path) -> None:
    experts, outputs, inputs = 3, 48, 96
    parts = [published.mx(matrix(outputs + 1 + number, inputs)[:outputs]) for number in range(experts)]
    tensors = {
        "experts.down_proj_blocks": torch.stack([part["codes"] for part in parts]).view(experts, outputs, -1, 16),
        "experts.down_proj_scales": torch.stack([part["scales"] for part in parts]),
    }
    config = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}}
    published.write(tmp_path, tensors, "int4")
    (tmp_path / "config.json").write_text(json.dumps(config))
    (name,) = stored_parameters(tmp_path)
    stored = stored_parameters(tmp_path)[name]
    expected = torch.stack([published.mx_values(part["codes"], part["scales"]).t() for part in parts]).bfloat16()
    assert (name, stored.shape) == ("experts.down_proj", (experts, inputs, outputs))
    out = torch.empty(2, inputs, outputs, dtype=torch.bfloat16)
    read_rows(stored, 1, out)
    assert torch.equal(out, expected[1:])
    for first, count in ((0, inputs), (40, 3), (64, 32), (90, 6)):
        out = torch.empty(count, outputs, dtype=torch.bfloat16)
        read_rows(stored.row(2), first, out)  # type: ignore[attr-defined]
        assert torch.equal(out, expected[2, first : first + count])
