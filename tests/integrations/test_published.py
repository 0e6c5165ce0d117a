"""Models in published formats, read where they are: as what the libraries of the formats decode them to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: tools/test_integration.sh transformers")
pytest.importorskip("peft", reason="peft is not installed: tools/test_integration.sh transformers")
pytest.importorskip(
    "compressed_tensors", reason="compressed-tensors is not installed: tools/test_integration.sh transformers"
)

import peft
import published
import published_models
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.utils import match_name
from published import FORMATS
from published_models import CASES, ON_SEVERAL_RANKS
from safetensors.torch import load_file, save_file

from infinity.cli import ckpt
from infinity.errors import CheckpointError
from infinity.fsdp2.materialize import load_weights, stored_parameters
from infinity.store.stored_parameter import read_rows


@pytest.mark.parametrize(("name", "how"), CASES)
def test_it_generates_and_trains_as_its_decoded_values_do(name: str, how: str, one_rank: None, nvme_path: Path) -> None:
    folder = published_models.save(name, how, nvme_path / "model")
    read = published_models.check(folder)
    stored = sum(file.stat().st_size for file in (folder / "coded").glob("*.safetensors"))
    assert read < 1.03 * stored + (256 << 10)


@pytest.mark.slow
def test_two_ranks_gather_the_same(forked_ranks: Any, nvme_path: Path) -> None:
    for name, how in ON_SEVERAL_RANKS:
        published_models.save(name, how, nvme_path / f"{name}, {how}")
    forked_ranks(Path(published_models.__file__), str(nvme_path), ranks=2)


def test_a_model_may_have_integers_of_4_and_of_8_bits(one_rank: None, nvme_path: Path) -> None:
    ways = {"int8, packed": ["re:.*down_proj.*"], "int4, zeros": ["re:.*attn.*", "re:.*gate_proj.*", "re:.*up_proj.*"]}
    eight, four = (published_models.save("llama", how, nvme_path / how) for how in ways)
    file = four / "coded" / "model.safetensors"
    mixed = {name: part for name, part in load_file(file).items() if ".down_proj." not in name}
    down = load_file(eight / "coded" / "model.safetensors")
    mixed |= {name: part for name, part in down.items() if ".down_proj." in name}
    save_file(mixed, file)
    groups = {
        f"group_{number}": {**FORMATS[how].config["config_groups"]["group_0"], "targets": targets}
        for number, (how, targets) in enumerate(ways.items())
    }
    config = json.loads((four / "coded" / "config.json").read_text())
    config["quantization_config"]["config_groups"] = groups
    (four / "coded" / "config.json").write_text(json.dumps(config))
    decoded = load_file(four / "decoded" / "model.safetensors")
    for module in [name.removesuffix(".weight_packed") for name in mixed if name.endswith(".weight_packed")]:
        parts = {name.rpartition(".")[2]: part for name, part in mixed.items() if name.startswith(f"{module}.")}
        (scheme,) = (group for group in groups.values() if any(match_name(module, of) for of in group["targets"]))
        values = PackedQuantizationCompressor.decompress(parts, QuantizationScheme.model_validate(scheme))
        decoded[f"{module}.weight"] = values["weight"].to(torch.bfloat16)
    save_file(decoded, four / "decoded" / "model.safetensors")
    published_models.check(four)
    del mixed["model.layers.0.mlp.down_proj.weight_shape"]
    save_file(mixed, file)
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.down_proj.* 4 or only 8"):
        stored_parameters(four / "coded")


def test_awq_is_what_compressed_tensors_makes_of_it(tmp_path: Path) -> None:
    matrix = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    parts = {f"a.{part}": tensor for part, tensor in FORMATS["awq"].encode(matrix).items()}
    published.write(tmp_path / "awq", {name: tensor.clone() for name, tensor in parts.items()}, "awq")
    converted = AutoAWQConverter(ignore=[], targets=["Linear"], bits=4, group_size=32, zero_point=True).process(parts)
    published.write(tmp_path / "converted", converted, "int4, zeros")
    values = []
    for folder in ("awq", "converted"):
        values.append(torch.empty(64, 96, dtype=torch.float16))
        read_rows(stored_parameters(tmp_path / folder)["a.weight"], 0, values[-1])
    assert torch.equal(values[0], values[1])
    assert torch.equal(values[0], FORMATS["awq"].decode(load(tmp_path / "awq"), torch.float16))


def test_tensors_of_old_files_that_hold_nothing_are_ignored(nvme_path: Path) -> None:
    """Buffers that are now elsewhere in the model, and a bias of zeros for each matrix of GPTQ."""
    folder = published_models.save("llama", "gptq", nvme_path / "model")
    file = folder / "coded" / "model.safetensors"
    tensors = load_file(file)
    tensors |= {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(3), "model.h.position_ids": torch.arange(3)}
    for name in [name for name in tensors if name.endswith(".qweight")]:
        tensors[name.replace("qweight", "bias")] = torch.zeros(tensors[name].shape[1], dtype=torch.float16)
    save_file(tensors, file)
    model = published_models.build("llama")
    with pytest.raises(CheckpointError, match=r"unknown model\.h\.position_ids$"):
        load_weights(model, folder / "coded")
    model.register_buffer("position_ids", torch.arange(3), persistent=False)
    load_weights(model, folder / "coded")
    expected = load_file(folder / "decoded" / "model.safetensors")
    assert all(torch.equal(value.bfloat16(), expected[name]) for name, value in model.state_dict().items())
    tensors["model.layers.1.mlp.up_proj.bias"][7] = 0.5
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"unknown model\.layers\.1\.mlp\.up_proj\.bias$"):
        load_weights(model, folder / "coded")


def load(folder: Path) -> dict[str, torch.Tensor]:
    return {name.removeprefix("a."): tensor for name, tensor in load_file(folder / "model.safetensors").items()}


def test_adapters_are_not_merged_into_codes(nvme_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = published_models.save("llama", "fp8, blocks", nvme_path / "model")
    model = peft.get_peft_model(published_models.build("llama"), peft.LoraConfig(target_modules=["o_proj"]))
    model.save_pretrained(folder / "adapter")
    assert ckpt.main(["merge", str(folder / "coded"), str(folder / "adapter"), str(folder / "merged")]) == 1
    assert "in 4 or 8 bits, which adapters can't be merged into: name its 16- or 32-bit" in capsys.readouterr().err
    assert not (folder / "merged").exists()
