"""The program infinity-ckpt, and the model that it makes of a checkpoint."""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from converting import interrupted, peak_of
from hostile import MakesFolder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import infinity
from infinity.checkpoint import consolidate as consolidation
from infinity.checkpoint import merge as merging
from infinity.checkpoint.manifest import load_manifest
from infinity.cli.ckpt import main
from infinity.store.files import StoredFile
from infinity.utils import zero_to_fp32


class Model(nn.Module):
    """With a tied head, a buffer, a frozen parameter and one that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 24)
        self.block = nn.Linear(24, 24)
        self.uneven = nn.Parameter(torch.randn(3, 24))
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.head = nn.Linear(24, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(0.1))
        self.register_buffer("count", torch.arange(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x)
        h = h + torch.tanh(self.block(h)) + self.uneven.sum(0) + self.frozen(h)
        return self.head(h) * self.scale


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder with two checkpoints, and the values in the last."""
    folder = tmp_path_factory.mktemp("checkpoints")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    offload = {"device": "nvme", "nvme_path": str(folder / "nvme")}
    config = {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"weight_decay": 0.01}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
        "infinity": {"pinned_bytes_max": "16MiB"},
    }
    engine, *_ = infinity.initialize(model=Model(), config=config)
    with engine:
        engine.save_checkpoint(folder, tag="first")
        engine.backward(engine(torch.arange(8)[None]).float().square().mean())
        engine.step()
        engine.save_checkpoint(folder, tag="last")
        engine.save_checkpoint(folder / "arenas", tag="last", format="arena")
        state = engine.state_dict()
        values = {k: (v.full_tensor() if hasattr(v, "full_tensor") else v) + 0 for k, v in state.items()}
    dist.destroy_process_group()
    return folder, values


@pytest.fixture
def copy(saved: tuple[Path, Any], tmp_path: Path) -> Path:
    """A copy of the folder, to be spoilt."""
    return Path(shutil.copytree(saved[0], tmp_path / "copy"))


@pytest.mark.parametrize(("dtype", "torch_dtype"), list(consolidation.DTYPES.items()))
@pytest.mark.parametrize("size", ["5GB", "2KiB"])
def test_a_model_is_the_masters_in_the_wanted_type(
    dtype: str, torch_dtype: torch.dtype, size: str, saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    folder, values = saved
    assert main(["consolidate", str(folder), str(tmp_path / "out"), "--dtype", dtype, "--max-shard-size", size]) == 0
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert found.keys() == values.keys() - {"head.weight"}
    for name, tensor in found.items():
        buffer = name in ("scale", "count")
        assert torch.equal(tensor, values[name] if buffer else values[name].to(torch_dtype)), name
    if size == "5GB":
        assert [each.name for each in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    else:
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == found.keys()
        assert index["metadata"]["total_size"] == sum(t.numel() * t.itemsize for t in found.values())
        assert len(files) > 1
        assert all(len(load_file(f)) == 1 or f.stat().st_size < 2048 + 1000 for f in files)
    with safe_open(files[0], framework="pt") as opened:
        assert opened.metadata() == {"format": "pt", "writer": "infinity"}


def test_a_consolidated_model_is_loaded_straight_into_the_arena(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    folder, values = saved
    assert main(["consolidate", str(folder), str(tmp_path / "out"), "--max-shard-size", "2KiB"]) == 0
    offload = {"device": "nvme", "nvme_path": str(tmp_path / "nvme")}
    config = {
        "optimizer": {"type": "AdamW", "params": {"weight_decay": 0.01}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
    }
    for weights in (tmp_path / "out", tmp_path / "out" / "model.safetensors.index.json"):
        with infinity.init_empty():
            model = Model()
        engine, *_ = infinity.initialize(model=model, config=config, weights=weights)
        with engine:
            for name, tensor in engine.state_dict().items():
                whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
                assert torch.equal(whole + 0, values[name]), name


def test_the_names_that_users_of_deepspeed_look_for(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    folder, values = saved
    state = infinity.get_fp32_state_dict_from_zero_checkpoint(folder)
    assert state.keys() == values.keys()
    assert all(torch.equal(state[name], values[name]) for name in values)
    assert state["head.weight"] is state["embedding.weight"]
    Model().load_state_dict(state)
    infinity.convert_zero_checkpoint_to_fp32_state_dict(folder, tmp_path / "out", tag="first")
    assert not torch.equal(load_file(tmp_path / "out" / "model.safetensors")["uneven"], values["uneven"])
    with pytest.raises(infinity.CheckpointError, match="holds a model already"):
        infinity.convert_zero_checkpoint_to_fp32_state_dict(folder, tmp_path / "out")


def test_info_tells_what_is_there(saved: tuple[Path, Any], capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = saved
    assert main(["info", str(folder), "--json", "--tensors"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["checkpoint"] == str(folder / "last")
    assert (report["global_steps"], report["ranks"], report["hashed"]) == (1, 1, True)
    assert report["parameters"] == 11 * 24 + 2 * (24 * 24 + 24) + 3 * 24
    assert report["tied"] == {"head.weight": "embedding.weight"}
    assert {"name": "count", "shape": [3], "dtype": "int64", "buffer": True} in report["tensors"]
    assert report["nbytes"] == sum(file.stat().st_size for file in (folder / "last").iterdir())
    assert main(["info", str(folder / "first"), "--tensors"]) == 0
    text = capsys.readouterr().out
    assert "head.weight = embedding.weight" in text
    assert "the tag 'last'" in text
    assert "uneven  float32 [3, 24]" in text


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda p: (p / "__0_1.distcp").unlink(), "missing"),
        (lambda p: (p / "__0_1.distcp").write_bytes(b"short"), "5 bytes instead of"),
        (lambda p: (p / "rank7.pt").write_bytes(b"new"), "not in the manifest"),
        (lambda p: flip(p / "__0_1.distcp"), "bytes have changed"),
        (lambda p: flip(p / ".metadata"), "bytes have changed"),
    ],
)
def test_verify_names_every_file_that_is_not_as_it_was(
    spoil: Any, why: str, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(copy)]) == 0
    assert "is whole" in capsys.readouterr().out
    spoil(copy / "last")
    assert main(["verify", str(copy)]) == 1
    assert why in capsys.readouterr().err
    assert main(["verify", str(copy), "--tag", "first"]) == 0
    capsys.readouterr()
    assert main(["verify", str(copy), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["whole"]
    assert why in report["damaged"][0]["why"]


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_a_damaged_checkpoint_makes_no_model(copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    biggest = max((copy / "last").glob("*.distcp"), key=lambda file: file.stat().st_size)
    names = {name for name, entry in stored_names(copy / "last").items() if name.startswith("model.")}
    victim = copy / "last" / next(v for k, v in stored_names(copy / "last").items() if k in names)
    assert biggest.exists()
    flip(victim)
    assert main(["consolidate", str(copy), str(tmp_path / "out")]) == 1
    assert f"{victim.name} is damaged" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["info", "verify", "export", "consolidate"])
def test_every_command_names_the_arena_that_is_missing(
    command: str, copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copy / "arenas" / "last" / "rank0.arena").unlink()
    output = [str(tmp_path / "out")] if command in ("export", "consolidate") else []
    assert main([command, str(copy / "arenas"), *output]) == 1
    assert re.search(r"rank0\.arena is damaged.*missing", capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_a_drive_without_room_is_left_as_it_was(
    saved: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("infinity.checkpoint.checks.free_bytes", lambda root: 1000)
    assert main(["consolidate", str(saved[0]), str(tmp_path / "out")]) == 1
    assert re.search(r"has 1000 B free: free .* more or save elsewhere", capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def stored_names(checkpoint: Path) -> dict[str, str]:
    metadata = dcp.FileSystemReader(checkpoint).read_metadata()
    return {index.fqn: info.relative_path for index, info in metadata.storage_data.items()}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["info", "{copy}/nothing"], "is not a folder"),
        (["info", "{copy}", "--tag", "third"], "is not a checkpoint .* the tag 'first', 'last'"),
        (["info", "{copy}", "--tag", "../copy"], "one folder name"),
        (["verify", "{copy}/nvme"], "holds no checkpoint.* name a tag, or another folder"),
        (["consolidate", "{copy}", "{copy}/latest"], "/latest is a file, not a folder: name another"),
        (["consolidate", "{copy}", "{copy}/latest/model"], "/latest is a file, not a folder: name another"),
    ],
)
def test_what_cannot_be_is_an_error_in_a_line(
    arguments: list[str], message: str, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copy / "nvme").mkdir(exist_ok=True)
    assert main([each.format(copy=copy) for each in arguments]) == 1
    out, err = capsys.readouterr()
    assert re.search(message, err)
    assert err.startswith("infinity-ckpt: ") and err.count("\n") == 1
    assert out == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["info"],
        ["consolidate", "a", "b", "--dtype", "fp8"],
        ["verify", ""],
    ],
)
def test_wrong_usage_is_two(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2


def test_a_size_without_its_unit_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["consolidate", "a", "b", "--max-shard-size", "5"])
    assert "did you mean 5GiB?" in capsys.readouterr().err


COMMANDS = ("info", "verify", "consolidate", "export")


@pytest.mark.inputs
@settings(
    max_examples=max(1, settings.default.max_examples // 5), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_whatever_is_in_a_checkpoint_a_command_ends_in_words(
    saved: tuple[Path, Any], data: st.DataObject, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bytes of a file are changed, or it is cut; and its hash in the manifest is corrected, as an attacker could."""
    folder = saved[0] / data.draw(st.sampled_from(["last", "arenas/last"]))
    manifest = load_manifest(folder)
    assert manifest is not None
    victim = data.draw(st.sampled_from(sorted(path.name for path in folder.iterdir())))
    content = bytearray((folder / victim).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.just(len(content)) | st.integers(0, len(content)))]
    if victim in manifest.files and data.draw(st.booleans()):
        manifest.files[victim] = StoredFile(len(content), hashlib.sha256(content).hexdigest())
    with TemporaryDirectory(dir=tmp_path) as scratch:  # whatever ends an example, the next finds nothing of it
        spoilt = Path(shutil.copytree(folder, Path(scratch) / "spoilt"))
        (spoilt / "manifest.json").write_bytes(manifest.to_json())
        (spoilt / victim).write_bytes(content)
        for command in COMMANDS:
            output = [str(Path(scratch) / command)] if command in ("consolidate", "export") else []
            code = main([command, str(spoilt), *output])
            told = capsys.readouterr().err
            assert code == 0 or (code == 1 and told.startswith("infinity-ckpt: ")), told


def test_a_file_of_no_bytes_is_damaged(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As its writer can say in the manifest, too; torch has no word to say about it."""
    folder = copy / "last"
    manifest = load_manifest(folder)
    assert manifest is not None
    (folder / "__0_0.distcp").write_bytes(b"")
    manifest.files["__0_0.distcp"] = StoredFile(0, hashlib.sha256(b"").hexdigest())
    (folder / "manifest.json").write_bytes(manifest.to_json())
    assert main(["consolidate", str(folder), str(copy / "out")]) == 1
    assert re.search(r"__0_0\.distcp is damaged \(EOFError\): there is also the tag", capsys.readouterr().err)


MODULE = f"model.{40 * 'a'}"


def write_adapter(folder: Path, spoil: Any = lambda config, tensors: None) -> dict[str, torch.Tensor]:
    """A model of one matrix in `folder/base`, and an adapter of it in `folder/adapter`; the tensors of both."""
    (folder / "base").mkdir(parents=True)
    (folder / "adapter").mkdir()
    config: Any = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "rank_pattern": {"a+": 2}}
    base = torch.randn(6, 4).bfloat16()
    tensors = {"base": base, "lora_A": torch.randn(2, 4), "lora_B": torch.randn(6, 2)}
    config = spoil(config, tensors) or config
    save_file({f"{MODULE}.weight": tensors["base"], "other": torch.ones(2)}, folder / "base" / "model.safetensors")
    (folder / "base" / "config.json").write_text("{}")
    lora = {f"base_model.model.{MODULE}.{name}.weight": tensors[name] for name in ("lora_A", "lora_B")}
    save_file(lora, folder / "adapter" / "adapter_model.safetensors")
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    return tensors


def test_an_adapter_is_merged_with_the_rank_that_its_pattern_says(tmp_path: Path) -> None:
    tensors = write_adapter(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    assert main(["merge", *(str(tmp_path / name) for name in ("base", "adapter", "out"))]) == 0
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(merged["other"], torch.ones(2))
    assert torch.equal(merged[f"{MODULE}.weight"], tensors["base"].add_(tensors["lora_B"] @ tensors["lora_A"] * 8))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
        "notes.txt",
    ]


def shaped(**shapes: tuple[int, ...]) -> Any:
    return lambda config, tensors: tensors.update({name: torch.ones(shape) for name, shape in shapes.items()})


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (
            lambda config, tensors: config.update(r=0),
            "not an adapter saved by PEFT .*r: .*greater than or equal to 1",
        ),
        (lambda config, tensors: config.pop("r"), "r: Field required"),
        (lambda config, tensors: config.update(rank_pattern={"a+": "two"}), "rank_pattern"),
        (lambda config, tensors: config.update(lora_alpha=float("nan")), "lora_alpha: .*finite number"),
        (lambda config, tensors: config.update(lora_alpha=1e308, alpha_pattern={}), "numbers that are not finite"),
        (lambda config, tensors: [config], "not an adapter saved by PEFT"),
        (lambda config, tensors: config.update(rank_pattern={"(": 2}), "not regular expressions"),
        (lambda config, tensors: config.update(rank_pattern={"(a+)+b": 2}), "take more than 1 s to match"),
        (lambda config, tensors: config.update(rank_pattern={}), "ranks 2 and 2, and the rank 8 in"),
        (shaped(lora_A=(3, 4)), "ranks 3 and 2, and the rank 2 in"),
        (shaped(lora_A=(2, 4, 1)), "not a matrix of numbers"),
        (shaped(lora_B=(7, 2)), r"another model than .*no model\.a+\.weight of shape \(7, 4\)"),
        (lambda config, tensors: tensors.update(lora_A=torch.ones(2, 4).int()), "not a matrix of numbers"),
        (lambda config, tensors: tensors.update(base=torch.ones(6, 4).int()), r"is in torch\.int32"),
        (lambda config, tensors: tensors["lora_B"].fill_(float("nan")), "numbers that are not finite"),
    ],
)
def test_what_cannot_be_merged_is_an_error_in_a_line(
    spoil: Any, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "_MATCHING_SECONDS", 1.0)
    write_adapter(
        tmp_path, lambda config, tensors: found if isinstance(found := spoil(config, tensors), list) else None
    )
    assert main(["merge", *(str(tmp_path / name) for name in ("base", "adapter", "out"))]) == 1
    err = capsys.readouterr().err
    assert err.startswith("infinity-ckpt: ") and err.count("\n") == 1 and re.search(why, err), err
    assert not (tmp_path / "out").exists()


def test_a_merge_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_adapter(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("mine")
    assert main(["merge", *(str(tmp_path / name) for name in ("base", "adapter", "out"))]) == 1
    assert "config.json exists already" in capsys.readouterr().err
    assert [path.read_text() for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_help_loads_nothing_heavy() -> None:
    heavy = ["torch", "numpy", "pydantic", "rich"]
    code = (
        "import sys; from infinity.cli.ckpt import main\n"
        "try: main(['consolidate', '--help'])\n"
        f"finally: sys.stderr.write(','.join(m for m in {heavy} if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "--max-shard-size" in done.stdout
    assert done.stderr == ""


def test_ctrl_c_leaves_nothing(saved: tuple[Path, Any], tmp_path: Path) -> None:
    pieces, out = "infinity.checkpoint.consolidate:_DcpModel.pieces", tmp_path / "out"
    for number, said in ((signal.SIGINT, "infinity-ckpt: interrupted\n"), (signal.SIGTERM, "")):
        assert interrupted(number, pieces, "consolidate", str(saved[0]), str(out)) == said
        assert not out.exists()


@pytest.mark.parametrize("count", [12, pytest.param(48, marks=pytest.mark.long)])
def test_memory_is_bounded_by_one_tensor(count: int, tmp_path: Path) -> None:
    tensors = {f"layer{number}": torch.full((1 << 20, 4), float(number)) for number in range(count)}  # 16 MiB each
    dcp.save({"model": tensors}, checkpoint_id=tmp_path / "made", no_dist=True)
    peak_bytes, report = peak_of("consolidate", str(tmp_path / "made"), str(tmp_path / "out"), "--dtype", "bf16")
    print(f"consolidate: {16 * count} MiB read, memory grew by {peak_bytes >> 20} MiB at most")
    assert report["nbytes"] > 8 * count << 20
    assert peak_bytes < 128 << 20  # a tensor as it is stored, read and written, and what malloc keeps of the one before
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], tensors[name].bfloat16()) for name in tensors)


def test_checkpoints_of_stock_training_are_read_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Model()
    state, optimizer_state = get_state_dict(model, torch.optim.AdamW(model.parameters()))
    dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=tmp_path / "made", no_dist=True)
    assert main(["consolidate", str(tmp_path / "made"), str(tmp_path / "out")]) == 0
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["uneven"], model.uneven.detach())
    assert main(["info", str(tmp_path / "made")]) == 0
    assert "none: save_checkpoint did not write it" in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "made")]) == 1
    assert "to compare it with" in capsys.readouterr().err


def test_no_code_is_run(copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / "last" / "manifest.json").unlink()
    (copy / "last" / ".metadata").write_bytes(pickle.dumps(MakesFolder(tmp_path / "ran")))
    assert main(["info", str(copy)]) == 1
    assert "posix.mkdir is not permitted in a checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_the_converter_is_where_scripts_import_it_from(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    folder, values = saved
    assert zero_to_fp32.main([str(folder), str(tmp_path / "out"), "--max_shard_size", "1MB"]) == 0
    written: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        written |= load_file(file)
    assert values.keys() - written.keys() == {"head.weight"}  # tied: written once
    assert all(torch.equal(written[name], values[name]) for name in written)
    fresh = Model()
    assert zero_to_fp32.load_state_dict_from_zero_checkpoint(fresh, folder) is fresh
    held = fresh.state_dict()
    assert all(torch.equal(held[name], values[name]) for name in values)
    assert infinity.utils.zero_to_fp32 is zero_to_fp32


def test_the_converter_tells_in_a_line_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert zero_to_fp32.main([str(tmp_path / "nowhere"), str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err.startswith("zero_to_fp32: ")
