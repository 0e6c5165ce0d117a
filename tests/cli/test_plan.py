"""What `infinity-bench plan` promises: one answer per strategy, figures one can change, a config that loads, clear refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from infinity.cli import bench
from infinity.cli.plan.hf_config import read_hf_config
from infinity.cli.plan.machines import PRESETS, preset_of
from infinity.config import load_config
from infinity.config.optimizers import AdamConfig, MuonConfig
from infinity.drive.choice import DriveProfile, save_profile
from infinity.errors import ConfigError
from infinity.plan.machine import DriveSpeed
from infinity.plan.planner import plans_for
from infinity.plan.strategy import STRATEGIES

FIGURES = [
    *("--tflops", "400", "--gpu-memory", "80GB", "--gpu-bandwidth", "3000", "--link", "50"),
    *("--host-memory", "2TB", "--host-bandwidth", "400"),
]


def plan(*arguments: str) -> int:
    return bench.main(["plan", *arguments])


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    plan(*arguments, "--json", "-")
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_table_tells_of_every_strategy_and_chooses(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--params", "70B", "--preset", "dgx-h100", "--cache", "0") == 0
    out = capsys.readouterr().out
    for strategy in STRATEGIES:
        assert strategy.name in out
    assert "full training: fits as stage 3, " in out
    assert "pinned pool" not in out  # of the chosen one, which has none
    assert "limited by the memory that the update reads and writes" in out


def test_json_holds_the_published_example(capsys: pytest.CaptureFixture[str]) -> None:
    plain = [
        "--master-weights",
        "full",
        "--update",
        "step",
        "--cache",
        "0",
        "--pinned-bytes-max",
        "2GiB",
    ]  # in which nothing stays
    found = planned(capsys, "--params", "70B", "--preset", "dgx-h100", *plain)
    last = found["strategies"][-1]
    assert last["name"] == "stage 3, all on NVMe"
    assert 8 * last["plain_read_bytes_per_rank"] == 1120 * 10**9
    assert 8 * last["plain_written_bytes_per_rank"] == 980 * 10**9
    assert last["lower_bound_seconds"] == pytest.approx(61, rel=0.01)
    assert last["step_seconds"] >= last["lower_bound_seconds"]
    assert found["model"]["params"] == 70 * 10**9
    assert found["tokens_per_step"] == 8 * 2048
    json.dumps(found, allow_nan=False)


def test_updates_ahead_are_told_with_their_space_and_the_cost_of_a_step_that_discards_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ["--params", "1B", "--seq", "256", "--preset", "laptop", "--cache", "0"]
    ahead, forward = (planned(capsys, *asked, "--update", update) for update in ("backward", "forward"))
    assert (ahead["update"], ahead["speculative"], forward["speculative"]) == ("backward", True, False)
    ahead, forward = ahead["strategies"][-1], forward["strategies"][-1]
    assert ahead["step_seconds"] < forward["step_seconds"]
    assert ahead["written_bytes_per_rank"] == pytest.approx(forward["written_bytes_per_rank"], rel=1e-6)
    stored = sum(forward["memory_bytes_per_rank"]["nvme"].values())
    early = ahead["memory_bytes_per_rank"]["nvme"]["second slot of what the backward updates"] / 12
    assert early == pytest.approx(0.75e9, rel=1e-3)  # a fourth of each block waits for the forward
    assert sum(ahead["memory_bytes_per_rank"]["nvme"].values()) == pytest.approx(stored + 12 * early, rel=1e-6)
    assert ahead["discarded_read_bytes_per_rank"] == pytest.approx(10 * early, rel=1e-6)
    assert ahead["discarded_written_bytes_per_rank"] == pytest.approx(12 * early, rel=1e-6)
    assert forward["discarded_read_bytes_per_rank"] == forward["discarded_written_bytes_per_rank"] == 0
    plan(*asked, "--update", "backward")
    out = capsys.readouterr().out
    assert "second slot of what the backward updates" in out
    assert "discards them, which costs a rank 6.98 GiB more read, 8.38 GiB more written and" in out


@pytest.mark.parametrize(
    ("drive_gb", "update"), [("35", "backward"), ("29", "forward"), ("20", "forward"), (None, "backward")]
)
def test_auto_is_ahead_of_the_step_where_that_leaves_as_much_space_as_it_takes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, drive_gb: str | None, update: str
) -> None:
    file = tmp_path / "config.json"
    asked = ["--params", "1B", "--seq", "256", "--preset", "laptop", "--cache", "0", "--write-config", str(file)]
    asked += ["--drive-size", f"{drive_gb}GB"] if drive_gb else []
    plan_of_all = planned(capsys, *asked)["strategies"][-1]
    assert (plan_of_all["update"], plan_of_all["speculative"], plan_of_all["fits"]) == (
        update,
        update == "backward",
        True,
    )
    written = json.loads(file.read_text())["infinity"].get("update", "auto")
    assert written == ("auto" if update == "backward" else "forward")
    plan(*asked)
    assert ("updates in the forward: in the backward" in capsys.readouterr().out) == (update == "forward")
    if drive_gb == "20":
        plan(*asked, "--update", "backward")
        assert "stage 3, all on NVMe: does not fit, NVMe: 19.56 GiB needed, 18.63 GiB usable" in capsys.readouterr().out


@pytest.mark.parametrize(("host_memory", "device"), [("8GB", "nvme"), ("64GB", "cpu")])
def test_what_was_planned_for_the_state_is_in_the_config(tmp_path: Path, host_memory: str, device: str) -> None:
    asked = {"master_weights": "full", "moments_dtype": "8bit", "update": "step"}
    options = [word for name, value in asked.items() for word in (f"--{name.replace('_', '-')}", value)]
    file = tmp_path / "config.json"
    machine = ["--preset", "laptop", "--host-memory", host_memory]
    assert plan("--params", "1B", "--seq", "256", *machine, *options, "--write-config", str(file)) == 0
    config = load_config(file)
    assert config.zero_optimization.offload_optimizer.device == device
    assert {name: getattr(config.infinity, name) for name in asked} == asked


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_plans_a_small_model(capsys: pytest.CaptureFixture[str], name: str) -> None:
    found = planned(capsys, "--params", "200M", "--seq", "512", "--preset", name)
    assert found["chosen"] is not None and found["remedies"] == []
    assert all(each["step_seconds"] > 0 for each in found["strategies"])


def test_presets_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--preset", "list") == 0
    assert all(name in capsys.readouterr().out for name in ["dgx-h100"])


def test_figures_make_a_machine_and_change_a_preset(capsys: pytest.CaptureFixture[str]) -> None:
    given = planned(capsys, "--params", "1B", *FIGURES)
    assert given["machine"]["flops_per_s"] == 400e12
    assert given["machine"]["read_bytes_per_s"] is None
    assert [each["fits"] for each in given["strategies"] if "nvme" in each["offload_optimizer"]] == [False, False]
    changed = planned(
        capsys, "--params", "1B", "--preset", "dgx-h100", "--gpus", "4", "--read", "10", "--write", "5", "--mixed", "8"
    )
    assert changed["machine"]["ranks_per_node"] == 4
    assert changed["machine"]["mixed_bytes_per_s"] == 8e9
    assert changed["machine"]["host_bytes"] == PRESETS["dgx-h100"].host_bytes


def test_nodes_shard_further(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--params", "70B", "--preset", "dgx-h100", "--cache", "0"]
    one, four = (planned(capsys, *asked, "--nodes", count) for count in ("1", "4"))
    assert four["tokens_per_step"] == 4 * one["tokens_per_step"]
    parts = [found["strategies"][-1]["memory_bytes_per_rank"]["nvme"]["16-bit copies"] for found in (one, four)]
    assert parts[0] == 4 * parts[1]


@pytest.mark.parametrize(
    ("arguments", "strategy"),
    [
        (["--params", "1B", "--preset", "dgx-h100"], "stage 2"),
        (["--params", "70B", "--cache", "0", "--preset", "dgx-h100"], "stage 3, optimizer on CPU"),
        (["--params", "70B", "--preset", "dgx-h100"], "stage 3, optimizer on CPU"),
        (["--params", "4B", "--cache", "0", "--preset", "rtx4090-gen4"], "stage 3, optimizer on NVMe"),
        (["--params", "7B", "--cache", "0", "--preset", "rtx4090-gen4"], "stage 3, all on NVMe"),
        (["--params", "7B", "--preset", "rtx4090-gen4"], "stage 3, all on NVMe"),
        (["--params", "13B", "--preset", "rtx4090-gen4"], "stage 3, all on NVMe"),
        (["--params", "30B", "--preset", "rtx4090-gen4"], "stage 3, all on NVMe"),
        (["--params", "7B", "--preset", "rtx4090-gen4", "--drive-size", "1GB"], None),
        (["--params", "200M", "--seq", "256", "--preset", "laptop"], "stage 3, all on CPU"),
    ],
)
def test_the_config_that_is_written_loads_and_says_what_was_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], strategy: str | None
) -> None:
    file = tmp_path / "config.json"
    code = plan(*arguments, "--batch-size", "2", "--accumulation", "3", "--write-config", str(file), "/nvme0")
    if strategy is None:
        said = capsys.readouterr()
        assert code == 1
        assert f"full training does not fit: nothing written to {file}\n" in said.err
        assert not file.exists()
        file.touch()
        plan(*arguments, "--write-config", str(file))
        assert f"nothing written to {file}, an older file stays there" in capsys.readouterr().err
        return
    assert code == 0
    assert f"full training: fits as {strategy}" in capsys.readouterr().out
    config = load_config(file)
    assert config.ignored == ()
    chosen = next(each for each in STRATEGIES if each.name == strategy)
    zero = config.zero_optimization
    assert (zero.stage, zero.offload_param.device, zero.offload_optimizer.device) == (
        chosen.stage,
        chosen.parameters,
        chosen.optimizer,
    )
    assert config.nvme_paths == (("/nvme0",) if chosen.uses_nvme else ())
    ranks = 8 if "dgx" in arguments[-1] else 1
    resolved = config.resolve(world_size=ranks)
    assert resolved.batch == (6 * ranks, 2, 3)
    if chosen.uses_nvme:
        assert isinstance(config.infinity.pinned_bytes_max, int)
        assert (config.infinity.host_cache_bytes > 0) == ("--cache" not in arguments)
        assert config.infinity.pinned_bytes_max > config.infinity.host_cache_bytes


@pytest.mark.parametrize(("optimizer", "bytes_each"), [("AdamW", 12), ("Muon", 8.0737), ("SGD", 8), ("plain-SGD", 4)])
def test_an_optimizer_that_keeps_less_needs_less(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], optimizer: str, bytes_each: float
) -> None:
    file = tmp_path / "config.json"
    arguments = ["--params", "7B", "--preset", "rtx4090-gen4", "--cache", "0", "--write-config", str(file)]
    arguments += ["--update", "forward"]
    given = planned(capsys, *arguments, "--optimizer", optimizer)
    (everything,) = (each for each in given["strategies"] if each["name"] == "stage 3, all on NVMe")
    assert sum(everything["memory_bytes_per_rank"]["nvme"].values()) == pytest.approx(
        bytes_each * given["model"]["params"], rel=1e-3
    )
    made = load_config(file).optimizer
    assert made is not None and made.type == optimizer.removeprefix("plain-")
    assert isinstance(made, (AdamConfig, MuonConfig)) or bool(made.momentum) == (optimizer == "SGD")


@pytest.mark.parametrize(("where", "strategy"), [("cpu", "stage 3, all on CPU"), ("nvme", "stage 3, all on NVMe")])
def test_offloaded_activations_are_in_the_report_and_in_the_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str, strategy: str
) -> None:
    file = tmp_path / "config.json"
    asked = ["--params", "70B", "--preset", "dgx-h100", "--batch-size", "8", "--cache", "0", "/nvme0"]
    found = planned(capsys, *asked, "--offload-activations", where, "--write-config", str(file))
    of_it = next(each for each in found["strategies"] if each["name"] == strategy)
    without = next(each for each in planned(capsys, *asked)["strategies"] if each["name"] == strategy)
    read, before = (each["plain_read_bytes_per_rank"] for each in (of_it, without))
    held = {user for tier in of_it["memory_bytes_per_rank"].values() for user in tier}
    assert (found["offload_activations"], read > before) == (where, where == "nvme")
    assert "activation checkpoints" not in held
    assert "saved activations, pinned" in held if where == "cpu" else "saved activations" in held
    config = load_config(file)
    assert config.infinity.offload_activations.device == where
    if where == "nvme":
        buffer_bytes = found["activation_buffer_bytes"]
        assert config.infinity.offload_activations.buffer_bytes == buffer_bytes
        assert isinstance(config.infinity.pinned_bytes_max, int) and config.infinity.pinned_bytes_max > buffer_bytes


def test_a_step_of_so_many_tokens_is_found_and_told_and_its_config_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    asked = ["--params", "8B", "--preset", "rtx4090-gen4", "--tokens-per-step", "131072", "--write-config", str(file)]
    found = planned(capsys, *asked)
    chosen = next(each for each in found["strategies"] if each["name"] == found["chosen"])
    assert found["tokens_per_step"] == 131_072 == found["batch"] * found["accumulation"] * found["model"]["seq"]
    assert chosen["bound"] == "compute" and chosen["step_seconds"] < chosen["lower_bound_seconds"] / 0.95
    assert chosen["hours_per_billion_tokens"] == pytest.approx(1e9 / 3600 / chosen["tokens_per_s"])
    assert chosen["written_bytes_per_token"] == chosen["written_bytes_per_rank"] / 131_072
    assert chosen["drive_days"] == pytest.approx(5 * 365 / chosen["drive_writes_per_day"])
    config = load_config(file)
    assert config.batch.accumulation == found["accumulation"] == found["micro_batches_at_once"]
    assert config.infinity.schedule == "vertical"
    assert config.infinity.gradient_bytes_max == found["gradient_bytes_max"]
    activations = config.infinity.offload_activations
    assert (activations.device, activations.host_bytes_max) == ("cpu", found["activation_host_bytes_max"])
    again = planned(capsys, *asked, "--batch-size", "2", "--offload-activations", "nvme", "--gradient-memory", "0")
    kept = (again["batch"], again["offload_activations"], again["gradient_bytes_max"])
    assert (again["tokens_per_step"], *kept) == (131_072, 2, "nvme", 0)
    plan(*asked)
    out = capsys.readouterr().out
    assert "by compute, which is 9" in out and "MB written per token" in out


def test_a_durable_run_is_planned_and_its_config_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--params", "7B", "--preset", "rtx4090-gen4", "--durability", "step"]
    found = planned(capsys, *model, "--write-config", str(tmp_path / "config.json"))
    last = found["strategies"][-1]
    assert last["memory_bytes_per_rank"]["nvme"]["second place of the state"] == 12 * 7 * 10**9
    assert (found["durability"], last["cache_bytes"]) == ("step", 0)
    config = load_config(tmp_path / "config.json")
    assert (config.infinity.durability, config.infinity.host_cache_bytes) == ("step", 0)
    assert plan(*model) == 0
    assert "commit records" in capsys.readouterr().out


def test_files_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    result, chart = tmp_path / "plan.json", tmp_path / "plan.png"
    arguments = ["--params", "1B", "--preset", "rtx4090-gen4", "--json", str(result), "--plot", str(chart)]
    assert plan(*arguments) == 0
    assert json.loads(result.read_text())["format"] == 1
    assert chart.read_bytes().startswith(b"\x89PNG")
    assert "full training: fits" in capsys.readouterr().out


def test_the_timeline_has_a_row_per_resource_and_ends_with_the_step(tmp_path: Path) -> None:
    result, trace = tmp_path / "plan.json", tmp_path / "trace.json"
    plan("--params", "13B", "--preset", "rtx4090-gen4", "--json", str(result), "--timeline", str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    rows = {each["args"]["name"] for each in events if each["ph"] == "M"}
    assert rows == {"read", "write", "to_device", "to_host", "compute", "update"}
    found = json.loads(result.read_text())
    chosen = next(each for each in found["strategies"] if each["name"] == found["chosen"])
    end = max(each["ts"] + each["dur"] for each in events if each["ph"] == "X")
    assert end == pytest.approx(1e6 * chosen["step_seconds"])


@pytest.mark.parametrize(
    ("asked", "first", "among"),
    [
        ("--params 7B --preset laptop --gradient-memory 8GiB", "--gradient-memory 0", "--host-memory 32GB"),
        ("--params 7B --batch-size 64 --preset rtx4090-gen4", "--batch-size 8", "--seq 512"),
        ("--params 7B --no-checkpointing --batch-size 8 --preset rtx4090-gen4", "no --no-checkpointing", "--seq 512"),
        (
            "--params 100M --seq 128 --preset laptop --host-memory 2GB --cache 0 --pinned-bytes-max 2MiB",
            "no --pinned-bytes-max",
            "",
        ),
        (
            "--params 13B --gradient-memory 0 --cache 0 --preset rtx4090-gen4 --drive-size 100GB",
            "",
            "--drive-size 200GB",
        ),
        (
            "--params 7B --durability step --gradient-memory 0 --preset laptop --drive-size 120GB",
            "--durability none",
            "",
        ),
        ("--params 3B --gradient-memory 0 --cpu --tflops 1 --host-memory 8GB --host-bandwidth 40", "", "--read GB/s"),
        ("--params 1T --preset dgx-h100", "--groups-per-block 2", "--gpu-memory 160GB"),
        (
            "--layers 2 --hidden 16384 --gradient-memory 0 --preset laptop --drive-size 10GB",
            "--groups-per-block 2 with --host-memory 128GB",
            "--host-memory 128GB with --drive-size 80GB",
        ),
        ("--params 70B --preset laptop", "--host-memory 64GB", ""),
    ],
)
def test_where_nothing_fits_what_is_named_does(
    capsys: pytest.CaptureFixture[str], asked: str, first: str, among: str
) -> None:
    arguments = asked.split()
    found = planned(capsys, *arguments)
    assert found["chosen"] is None
    assert found["remedies"][0].startswith(first)
    assert any(among in each for each in found["remedies"])
    for remedy in found["remedies"]:
        changed = list(arguments)
        for word in remedy.replace("GB/s", "20").split(" with "):
            if word.startswith("no "):
                at = changed.index(word.removeprefix("no "))
                del changed[at : at + (1 if word == "no --no-checkpointing" else 2)]
            else:
                changed += word.split()  # the last one of two counts
        assert plan(*changed) == 0, remedy
    capsys.readouterr()
    assert plan(*arguments) == (0 if any(way["fits"] for way in found["frozen"]) else 1)
    assert f"would make full training fit: {'; or '.join(found['remedies'])}" in capsys.readouterr().out


def test_where_no_two_changes_are_enough_no_advice_is_invented(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--layers", "2", "--hidden", "1000000", "--heads", "8", "--preset", "laptop"]
    assert planned(capsys, *asked)["remedies"] == []
    plan(*asked)
    assert "next: use a smaller model or another machine" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--preset", "dgx-h100"], "describe the model once"),
        (["--params", "1B", "--layers", "2", "--hidden", "64", "--preset", "laptop"], "describe the model once"),
        (["--layers", "2", "--preset", "laptop"], "--layers and --hidden go together"),
        (["--layers", "2", "--hidden", "100", "--heads", "3", "--preset", "laptop"], "--heads 3 does not divide"),
        (["--params", "5", "--preset", "laptop"], "too few for a transformer"),
        (["--params", "1B"], "--tflops, --host-memory, --host-bandwidth, --gpu-memory"),
        (["--params", "1B", "--preset", "dgx-h100", "--cpu"], "--cpu: DGX H100 has a GPU"),
        (
            ["--params", "1B", "--preset", "laptop", "--gpu-memory", "8GB"],
            "--gpu-memory: a laptop that computes on its CPU",
        ),
        (["--params", "1B", *FIGURES, "--cpu"], "--gpu-memory, --gpu-bandwidth, --link: the machine given has no GPU"),
        (["--params", "1B", "--cpu", "--tflops", "1"], "missing: --host-memory, --host-bandwidth"),
        (["--params", "1B", "--preset", "cray"], "no such preset; there are dgx-h100"),
        (["--params", "1B", "not-there"], "not-there: name an existing folder"),
        (
            ["--params", "1B", "--preset", "laptop", "--pinned-bytes-max", "1GiB", "--cache", "1GiB"],
            "leaves nothing for the pool",
        ),
        (["--params", "1B", "--preset", "laptop", "--read", "1"], "--read and --write go together"),
        (["--params", "1B", *FIGURES, "--mixed", "1"], "--mixed goes with"),
        (["--params", "1B", "--preset", "laptop", "--plot", "x.exe"], "must end in one of"),
        (["--params", "1B", "--preset", "laptop", "--write-config", "not-there/x.json"], "can't be written"),
        (["--params", "1B", *FIGURES, "--gpus", "2"], "give --node-link"),
        (["--params", "1B", *FIGURES, "--activation-buffer", "1GB"], "is for --offload-activations nvme"),
        (["--params", "1B", *FIGURES, "--nodes", "2"], "give --network"),
        (
            ["--params", "1B", *FIGURES, "--tokens-per-step", "5000"],
            "multiple of 2048, the tokens of all ranks at once: 4096",
        ),
        (["--params", "1B", *FIGURES, "--tokens-per-step", "8192", "--accumulation", "2"], "leave --accumulation and"),
        (["--params", "1B", *FIGURES, "--tensor-parallel", "2"], "--tensor-parallel 2 must divide the 1 ranks"),
        (
            ["--layers", "2", "--hidden", "96", "--heads", "3", "--preset", "dgx-h100", "--tensor-parallel", "2"],
            "--tensor-parallel 2 must divide the 3 attention heads",
        ),
        (["--params", "1B", "--preset", "dgx-h100", "--expert-parallel", "2"], "the model has no experts"),
        (
            ["--layers", "2", "--hidden", "64", "--preset", "dgx-h100", "--pipeline-stages", "4"],
            "the model has only 2 layers",
        ),
        (["--params", "1B", "--preset", "dgx-h100", "--pipeline-stages", "3"], "must divide the 8 ranks"),
        (["--params", "1B", "--preset", "dgx-h100", "--pipeline-stages", "4"], "give --accumulation 4"),
        (
            ["--params", "1B", "--preset", "dgx-h100", "--pipeline-stages", "2", "--tensor-parallel", "2"],
            "--tensor-parallel and --pipeline-stages: infinity can't combine them",
        ),
        (
            ["--params", "1B", "--preset", "dgx-h100", "--pipeline-stages", "2", "--micro-batches-at-once", "2"],
            "leave --schedule and",
        ),
        (
            ["--params", "1B", "--preset", "dgx-h100", "--pipeline-stages", "2", "--durability", "step"],
            "which infinity can't combine",
        ),
        (["--params", "1B", *FIGURES, "--accumulation", "4", "--micro-batches-at-once", "3"], "must divide the 4"),
        (
            ["--params", "1B", "--preset", "dgx-h100", "--optimizer", "Muon", "--update", "forward"],
            "updates matrices on all of them together",
        ),
        (["--params", "1B", "--preset", "laptop", "--optimizer", "SGD", "--moments-dtype", "8bit"], "Adam and AdamW"),
        (["--hf-config", "not-there.json", "--preset", "laptop"], "can't be read"),
        (["--params", "1B", "--preset", "laptop", "--durability", "step", "--cache", "1GB"], "leave --cache out"),
        (
            ["--params", "1B", "--preset", "laptop", "--durability", "step", "--offload-activations", "nvme"],
            "use --offload-activations cpu",
        ),
    ],
)
def test_what_can_not_be_planned_is_refused_in_words(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert plan(*arguments) == 2
    told = capsys.readouterr()
    assert told.err.startswith("infinity-bench plan: error: ")
    assert said in told.err
    assert told.out == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["--params", "many"],
        ["--params", "0"],
        ["--tflops", "0"],
        ["--link", "nan"],
        ["--batch-size", "0"],
        ["--pinned-bytes-max", "-1"],
    ],
)
def test_values_out_of_range_are_wrong_usage(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        plan(*arguments)
    assert ended.value.code == 2
    assert "expected" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cache", "4"], "argument --cache: expected a size with its unit, got 4: did you mean 4GiB?"),
        (["--gradient-memory", "1e3"], "did you mean 1e3GiB?"),
        (["--gpu-memory", "24"], "did you mean 24GiB?"),
        (["--host-memory", "64"], "did you mean 64GiB?"),
        (["--drive-size", "1048575"], "did you mean 1048575GiB?"),
        (["--pinned-bytes-max", "1"], "did you mean 1GiB?"),
        (["--activation-buffer", "2 "], "did you mean 2GiB?"),
        (["--batch-size", "1e30"], "argument --batch-size: expected a whole number such as 8, got '1e30'"),
        (["--gpus", "1.5"], "argument --gpus: expected a whole number such as 8, got '1.5'"),
        (["--read", "7GB/s"], "--read: expected a number of GB/s above 0, without the unit, such as 12.5, got 7GB/s"),
        (["--tflops", "-1"], "--tflops: expected a number of TFLOP/s above 0"),
    ],
)
def test_a_slip_is_refused_with_what_would_do(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        plan("--params", "1B", "--preset", "laptop", *arguments)
    assert ended.value.code == 2
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("cache", ["0", "4B", "512KiB", "1048576"])
def test_sizes_that_can_be_meant_are_taken(capsys: pytest.CaptureFixture[str], cache: str) -> None:
    assert plan("--params", "200M", "--seq", "512", "--preset", "laptop", "--cache", cache) == 0


# Models of Hugging Face, by the parameter counts that transformers itself gives for them

LLAMA_2_7B = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
LLAMA_3_70B = LLAMA_2_7B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
GPT_2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
QWEN_2_7B = LLAMA_2_7B | {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}

GEMMA_2_9B = {
    "model_type": "gemma2",
    "head_dim": 256,
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "num_attention_heads": 16,
    "num_hidden_layers": 42,
    "num_key_value_heads": 8,
    "vocab_size": 256000,
}
GEMMA_3_1B = GEMMA_2_9B | {
    "model_type": "gemma3_text",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "vocab_size": 262144,
}
SMOLLM_3 = {name: value for name, value in LLAMA_2_7B.items() if name != "tie_word_embeddings"} | {
    "model_type": "smollm3",
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "vocab_size": 128256,
}


@pytest.mark.parametrize(
    ("values", "numel"),
    [
        (LLAMA_2_7B, 6_738_415_616),
        (GEMMA_2_9B, 9_241_705_984),
        (GEMMA_3_1B, 999_885_952),
        (SMOLLM_3, 3_075_098_624),
        (LLAMA_3_70B, 70_553_706_496),
        (GPT_2, 124_439_808),
        (QWEN_2_7B, 7_615_616_512),
        ({"text_config": LLAMA_2_7B, "model_type": "llava"}, 6_738_415_616),
    ],
)
def test_models_of_hugging_face_have_the_parameters_they_have(
    tmp_path: Path, values: dict[str, Any], numel: int
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(values))
    model = read_hf_config(file, seq=None)
    assert model.numel == numel
    assert model.seq == min(2048, values.get("n_positions", 2048))
    assert read_hf_config(file, seq=128).seq == 128


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "holds no JSON object"),
        ('{"hidden_size": 64}', "num_hidden_layers or n_layer or num_layers is missing"),
        (json.dumps(LLAMA_2_7B | {"hidden_size": "wide"}), "hidden_size: got 'wide', expected a count"),
        (json.dumps(LLAMA_2_7B | {"hidden_size": 0}), "hidden_size: got 0, expected at least 1"),
        (json.dumps(LLAMA_2_7B | {"num_local_experts": 8}), "'llama' is not supported"),
        (
            json.dumps(LLAMA_2_7B | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 9}),
            "num_experts_per_tok: got 9, but there are 8 experts",
        ),
        (
            json.dumps(LLAMA_2_7B | {"model_type": "mixtral", "num_local_experts": 8}),
            "num_experts_per_tok is missing",
        ),
        (json.dumps(LLAMA_2_7B | {"model_type": "t5", "num_decoder_layers": 6}), "'t5' with an encoder"),
        (json.dumps({"text_config": LLAMA_2_7B | {"linear_num_key_heads": 16}}), "linear attention"),
        (json.dumps(LLAMA_2_7B | {"model_type": "mamba2", "state_size": 128}), "'mamba2' with state spaces"),
        (json.dumps(GEMMA_3_1B | {"hidden_size_per_layer_input": 256}), "from layer to layer"),
    ],
)
def test_a_config_that_describes_no_such_model_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_hf_config(file, seq=None)
    assert said in str(caught.value)
    assert str(file) in str(caught.value)


# Mixtures of experts, by what their publishers and transformers say of them

MIXTRAL_8X7B = LLAMA_2_7B | {
    "model_type": "mixtral",
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
}
QWEN_3_30B_A3B = LLAMA_2_7B | {
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "vocab_size": 151936,
}
QWEN_1_5_A2_7B = QWEN_3_30B_A3B | {
    "model_type": "qwen2_moe",
    "head_dim": None,
    "intermediate_size": 5632,
    "moe_intermediate_size": 1408,
    "num_attention_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "shared_expert_intermediate_size": 5632,
}
DEEPSEEK_V3 = LLAMA_2_7B | {
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def written(folder: Path, values: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(values))
    return folder / "config.json"


@pytest.mark.parametrize(
    ("values", "numel", "active", "blocks"),
    [
        (MIXTRAL_8X7B, 46_702_792_704, 12.9e9, 32),
        (QWEN_3_30B_A3B, 30_532_122_624, 3.3e9, 48),
        (QWEN_1_5_A2_7B, 14_315_784_192, 2.7e9, 24),
        (DEEPSEEK_V3, 671_026_404_352, 37e9, 58),
    ],
)
def test_mixtures_of_experts_have_the_parameters_they_have(
    tmp_path: Path, values: dict[str, Any], numel: int, active: float, blocks: int
) -> None:
    model = read_hf_config(written(tmp_path, values), seq=None)
    assert model.numel == numel
    assert model.active_numel == pytest.approx(active, rel=0.02)
    assert model.experts is not None and len(model.experts.blocks) == blocks


@pytest.mark.parametrize(
    ("changes", "blocks"),
    [
        ({"decoder_sparse_step": 2}, tuple(range(1, 48, 2))),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1, 5]}, (3, *range(7, 48, 2))),
        ({"mlp_only_layers": [*range(1, 48)]}, (0,)),
        ({"mlp_only_layers": [*range(48)]}, None),
    ],
)
def test_blocks_without_experts_are_dense(
    tmp_path: Path, changes: dict[str, Any], blocks: tuple[int, ...] | None
) -> None:
    model = read_hf_config(written(tmp_path, QWEN_3_30B_A3B | changes), seq=None)
    assert (model.experts and model.experts.blocks) == blocks
    dense = read_hf_config(written(tmp_path, QWEN_3_30B_A3B | {"num_experts": 0, "model_type": "qwen3"}), seq=None)
    sparse = read_hf_config(written(tmp_path, QWEN_3_30B_A3B), seq=None)
    count = len(blocks or ())
    assert model.numel == dense.numel + count * (sparse.numel - dense.numel) // 48


def test_a_mixture_moves_all_parameters_and_computes_with_active_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--hf-config", str(written(tmp_path, MIXTRAL_8X7B)), "--preset", "dgx-h100", "--cache", "0"]
    found = planned(capsys, *asked)
    assert (found["model"]["params"], found["model"]["active_params"]) == (46_702_792_704, 12_879_925_248)
    assert found["model"]["experts"] == {"count": 8, "per_token": 2, "blocks": 32}
    last = found["strategies"][-1]
    assert 8 * last["plain_read_bytes_per_rank"] == pytest.approx(14 * 46_702_792_704, rel=1e-6)
    in_memory = found["strategies"][2]
    assert in_memory["lower_bound_seconds"] == pytest.approx(8 * 2048 * 12_879_925_248 / (0.4 * 989e12))
    plan(*asked)
    out = capsys.readouterr().out
    assert "46.7B parameters, 12.9B of them active (2 of 8 experts in 32 blocks)" in out
    section = out[out.index("On frozen weights in their files") : out.index("of one rank\n")]
    assert "does not fit" not in section and "experts: only those that a token" in section


@pytest.mark.parametrize(
    ("shape", "option", "key", "block", "batch"),
    [
        (LLAMA_2_7B, "--tensor-parallel", "autotp_size", {"tensor_parallel": {"autotp_size": 4}}, 2 * 4),
        (
            MIXTRAL_8X7B,
            "--expert-parallel",
            "autoep_size",
            {"expert_parallel": {"enabled": True, "autoep_size": 4}},
            8 * 4,
        ),
        (LLAMA_2_7B, "--pipeline-stages", "num_stages", {}, 2 * 4),
    ],
)
def test_a_split_is_reported_and_its_config_loads(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    shape: dict[str, Any],
    option: str,
    key: str,
    block: dict[str, Any],
    batch: int,
) -> None:
    asked = ["--hf-config", str(written(tmp_path, shape)), "--preset", "dgx-h100", option, "4", "--accumulation", "4"]
    file = tmp_path / "train.json"
    found = planned(capsys, *asked, "--write-config", str(file))
    keys = ("autotp_size", "autoep_size", "num_stages")
    assert [found[name] for name in keys] == [4 if name == key else 1 for name in keys]
    config = json.loads(file.read_text())
    assert {name: config[name] for name in config if name.endswith("_parallel")} == block
    assert config["train_batch_size"] == batch and found["tokens_per_step"] == batch * found["model"]["seq"]
    assert load_config(file).ignored == ()
    plan(*asked)
    assert key in capsys.readouterr().out.split("full training", maxsplit=1)[0]


def test_experts_are_split_evenly_and_other_layers_of_a_mixture_are_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--hf-config", str(written(tmp_path, MIXTRAL_8X7B)), "--preset", "dgx-h100", "--nodes", "2"]
    assert plan(*asked, "--expert-parallel", "16") == 2
    assert "--expert-parallel 16 must divide the 8 experts of a block" in capsys.readouterr().err
    assert plan(*asked, "--tensor-parallel", "2") == 2
    assert "use --expert-parallel" in capsys.readouterr().err
    grouped = LLAMA_2_7B | {"num_key_value_heads": 4}
    asked = ["--hf-config", str(written(tmp_path, grouped)), "--preset", "dgx-h100", "--tensor-parallel", "8"]
    assert plan(*asked) == 2
    assert "--tensor-parallel 8 must divide the 4 key-value heads" in capsys.readouterr().err


# Work on frozen weights


def test_frozen_weights_in_files_have_rows_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--params", "8B", "--preset", "rtx4090-gen4"]
    found = planned(capsys, *asked, "--lora", "8")
    lora, generation = found["frozen"]
    assert (lora["name"], lora["per"], generation["name"], generation["per"]) == (
        "LoRA on files",
        "step",
        "generation from files",
        "round",
    )
    assert lora["fits"] and generation["fits"] and lora["base_bits"] == 16
    assert lora["written_bytes_per_rank"] == generation["written_bytes_per_rank"] == 0
    assert lora["read_bytes_per_rank"] == generation["read_bytes_per_rank"] == 0  # all of it stays in 64 GB
    assert lora["start_seconds"] == pytest.approx(5 + 16e9 / 7e9)
    root_numel = found["model"]["vocab"] * found["model"]["hidden"]  # and less than a block's remainder
    assert generation["seconds"] == pytest.approx(2 * (8e9 - root_numel) / 25e9, rel=1e-6)
    assert planned(capsys, *asked)["frozen"][0]["trained_params"] == 2 * lora["trained_params"]
    assert found["lora_rank"] == 8
    plan(*asked)
    out = capsys.readouterr().out
    section = out[out.index("On frozen weights in their files") :]
    for said in ("LoRA on files", "generation from files", "writes", "none", "adapters: rank 16", "wear: none"):
        assert said in section


def test_less_pinned_memory_is_more_to_read(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--params", "8B", "--preset", "rtx4090-gen4"]
    rooms = [["--cache", "0"], ["--pinned-bytes-max", "8GiB"], ["--pinned-bytes-max", "12GiB"], []]
    found = [planned(capsys, *asked, *room)["frozen"] for room in rooms]
    for number in (0, 1):
        reads = [of_room[number]["read_bytes_per_rank"] for of_room in found]
        assert reads == sorted(reads, reverse=True) and len({*reads}) == 4
    assert [of_room[0]["pinned_bytes"] for of_room in found[1:3]] == [8 << 30, 12 << 30]


def test_files_of_fewer_bits_are_read_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--params", "8B", "--preset", "rtx4090-gen4", "--cache", "0"]
    found = [planned(capsys, *asked, *bits)["frozen"][1] for bits in ([], ["--base-bits", "8"], ["--base-bits", "4"])]
    assert [generation["base_bits"] for generation in found] == [16, 8, 4]
    reads = [generation["read_bytes_per_rank"] for generation in found]
    assert reads == sorted(reads, reverse=True) and reads[2] < 0.3 * reads[0]
    files = [sum(generation["memory_bytes_per_rank"]["nvme"].values()) for generation in found]
    root_bytes = 2 * files[1] - files[0]
    assert files[2] - root_bytes == pytest.approx((files[0] - root_bytes) * 9 / 32)
    plan(*asked, "--base-bits", "4")
    assert "weights: 4 bits of the blocks' matrices" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("how", "bits"),
    [
        ({"load_in_4bit": True}, 4),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8),
        ({"quant_method": "mxfp4"}, 4),
        ({"quant_method": "awq", "bits": 4}, 4),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}}, 8),
        (None, 16),
    ],
)
def test_a_config_says_in_how_many_bits_its_files_are(
    how: dict[str, Any] | None, bits: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16}
    config |= {"intermediate_size": 4096, "vocab_size": 32000, "hidden_act": "silu", "quantization_config": how}
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = ["--hf-config", str(tmp_path / "config.json"), "--preset", "rtx4090-gen4"]
    assert planned(capsys, *asked)["frozen"][0]["base_bits"] == bits
    assert planned(capsys, *asked, "--base-bits", "16")["frozen"][0]["base_bits"] == 16


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"quant_method": "hqq"}, "quant_method 'hqq' is not supported"),
        ({"quant_method": "gptq", "bits": 3}, "weights with 3 bits are not supported"),
        ({"quant_method": "compressed-tensors"}, "quantization_config is damaged"),
        (5, "quantization_config is damaged"),
    ],
)
def test_a_config_of_an_unknown_format_is_refused(
    how: Any, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16}
    config |= {"intermediate_size": 4096, "vocab_size": 32000, "hidden_act": "silu", "quantization_config": how}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert plan("--hf-config", str(tmp_path / "config.json"), "--preset", "rtx4090-gen4") != 0
    assert why in capsys.readouterr().err


def test_verdicts_come_first_and_adapters_count_where_full_training_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--params", "8B", "--preset", "laptop"]
    assert plan(*asked) == 0
    verdicts = capsys.readouterr().out.split("\n\n")[1].splitlines()
    assert [line.partition(": ")[0] for line in verdicts] == ["full training", "LoRA of rank 16", "generation", "next"]
    assert "does not fit, not even with --gradient-memory 0, which changes no number: host memory" in verdicts[0]
    assert verdicts[1].endswith("fits on frozen weights in their files: 3.30 min a step, 10.3 tokens/s")
    assert (
        plan(*asked, "--write-config", str(tmp_path / "config.json")) == 1
    )  # of full training, which the next line needs
    assert plan("--params", "70B", "--preset", "laptop") == 1


def test_what_changes_no_number_is_tried_before_anything_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--params", "1B", "--batch-size", "8", "--seq", "1024", "--preset", "rtx4090-gen4"]
    asked += ["--gpu-memory", "5600MB", "--host-memory", "6GB"]
    eased = ["--gradient-memory", "0", "--offload-activations", "cpu"]
    found = planned(capsys, *asked, "--write-config", str(tmp_path / "config.json"))
    assert " ".join(found["eased"]) == " ".join(eased)
    assert found["lora_eased"] == ["--offload-activations cpu"] and found["frozen"][0]["fits"]
    assert planned(capsys, *asked, *eased)["strategies"] == found["strategies"]
    options = load_config(tmp_path / "config.json").infinity
    assert (options.gradient_bytes_max, options.offload_activations.device) == (0, "cpu")
    as_asked = planned(capsys, *asked, "--offload-activations", "none")
    assert (as_asked["chosen"], as_asked["eased"]) == (None, ["--gradient-memory 0"])
    assert as_asked["remedies"][0] == "--offload-activations cpu"


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("NVIDIA GeForce RTX 3060", "rtx3060-gen4"),
        ("3090", "rtx3090-gen4"),
        ("RTX 4060 Ti", "rtx4060ti-gen4"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", None),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("RTX 3060 Ti", None),
    ],
)
def test_a_preset_is_found_by_the_name_of_its_gpu(name: str, preset: str | None) -> None:
    assert preset_of(name) == (PRESETS[preset] if preset is not None else None)


@pytest.mark.parametrize("columns", ["80", "200"])
def test_no_column_is_cut_short(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    plan("--params", "70B", "--preset", "laptop")
    out = capsys.readouterr().out
    assert "…" not in out and "DWPD" in out
    assert max(len(line) for line in out.splitlines() if line.startswith(" stage")) <= 132


def test_work_on_files_needs_a_drive(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--params", "1B", *FIGURES)
    for each in found["frozen"]:
        assert each["reasons"] == ["NVMe: the machine has no drive"]
        assert each["seconds"] is each["start_seconds"] is None
    assert plan("--params", "1B", *FIGURES) == 0
    assert "LoRA on files: does not fit, NVMe: the machine has no drive" in capsys.readouterr().out


def test_a_mixture_is_not_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    asked = ["--hf-config", str(written(tmp_path, MIXTRAL_8X7B)), "--preset", "laptop"]
    assert plan(*asked, "--plot", str(tmp_path / "plan.png")) == 2
    assert "--plot draws dense models" in capsys.readouterr().err


# This machine


def test_here_measures_and_leaves_nothing_behind(nvme_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--layers", "2", "--hidden", "64", "--vocab", "256", "--seq", "32", str(nvme_path)]
    found = planned(capsys, *arguments)
    machine = found["machine"]
    for name in (
        "flops_per_s",
        "host_bytes",
        "host_bytes_per_s",
        "read_bytes_per_s",
        "write_bytes_per_s",
        "mixed_bytes_per_s",
    ):
        assert 0 < machine[name] < math.inf
    assert found["config"]["zero_optimization"]["stage"] in (2, 3)
    assert list(nvme_path.iterdir()) == []


def test_here_takes_the_drive_from_its_profile(nvme_path: Path) -> None:
    from infinity.cli.plan.here import _drive_speed

    profile = DriveProfile(
        written="2026-01-01T00:00:00",
        path=str(nvme_path),
        drive="a drive",
        backend="threads",
        block_bytes=1 << 20,
        queue_depth=8,
        rings=1,
        mix="bursts",
        read_bytes_per_s=3e9,
        write_bytes_per_s=2e9,
        mixed_bytes_per_s=2.2e9,
        cpu_seconds_per_gib=0.1,
    )
    save_profile(profile, nvme_path)
    assert _drive_speed(nvme_path) == (DriveSpeed(3e9, 2e9, (1.1e9, 1.1e9)), "its profile")


def test_processes_on_a_cpu_share_its_cores(capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (planned(capsys, "--params", "200M", "--preset", "laptop", "--gpus", count) for count in ("1", "2"))
    assert two["machine"]["flops_per_s"] == one["machine"]["flops_per_s"] / 2


def test_plans_do_not_depend_on_what_was_planned_before() -> None:
    from infinity.plan.transformer import transformer_of
    from infinity.plan.work import Work

    work = Work(transformer_of(10**9, seq=512, vocab=1000), ranks=8)
    assert plans_for(work, PRESETS["dgx-h100"]) == plans_for(work, PRESETS["dgx-h100"])
