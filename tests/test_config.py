"""What the training config promises: what it reads, what it refuses and in which words, and how "auto" is filled."""

from __future__ import annotations

import base64
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from infinity.config import Batch, Config, load_config
from infinity.config.__main__ import render_reference
from infinity.config.blocks import AioConfig
from infinity.config.optimizers import AdamConfig, WarmupCosineLRConfig, WarmupDecayLRConfig, WarmupLRConfig
from infinity.config.whole import solve_batch
from infinity.errors import ConfigError

NVME = {"device": "nvme", "nvme_path": "/mnt/nvme"}


def problems(source: Any) -> list[str]:
    """The error lines that `source` gets, without the line that names the source."""
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    assert "pydantic" not in str(caught.value)
    return [line.strip() for line in str(caught.value).split("\n")[1:]]


# --- Sources ---


def test_reads_dict_path_and_base64_alike(tmp_path: Path) -> None:
    source = {"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_param": NVME}}
    text = json.dumps(source)
    file = tmp_path / "ds.json"
    file.write_text(text)
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    assert load_config(source) == load_config(file) == load_config(str(file)) == load_config(encoded)
    assert load_config(base64.b64encode(text.encode()).decode()).train_batch_size == 8


def test_reads_comments_and_last_commas_as_deepspeed_s_hjson(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(
        """{ // what a cluster's template says
        "train_batch_size": 8,  # of all ranks
        "wandb": {"project": "a # b // c /* d */, }",}, /* and
        so on */
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [1, 2, /* last */]}},
        }"""
    )
    config = load_config(file)
    assert config == load_config(file.read_text())
    assert (config.train_batch_size, config.wandb.project) == (8, "a # b // c /* d */, }")
    assert config.scheduler.warmup_max_lr == (1, 2)  # type: ignore[union-attr]


@pytest.mark.parametrize("before", ["# all ranks\n", "// {\n", "/* a\nb */ ", "\ufeff"])
def test_a_text_may_begin_with_a_comment_or_a_byte_order_mark(before: str) -> None:
    text = f'{before}{{"train_batch_size": 8}}'
    assert load_config(text).train_batch_size == 8
    assert load_config(base64.b64encode(text.encode()).decode()).train_batch_size == 8


def test_a_number_with_thousands_of_digits_is_refused() -> None:
    with pytest.raises(ConfigError, match="JSON config: not JSON: Exceeds the limit"):
        load_config(f'{{"train_batch_size": {"9" * 5000}}}')


def test_reads_base64_longer_than_a_file_name() -> None:
    encoded = base64.b64encode(json.dumps({"comms_logger": "x" * 10_000}).encode()).decode()
    assert load_config(encoded).ignored == ("comms_logger",)


def test_reads_a_file_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_bytes(b"\xef\xbb\xbf{}")
    assert load_config(file) == Config()


def test_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nowhere/ds\.json: can't read the config: No such file"):
        load_config("nowhere/ds.json")


def test_bad_json_tells_path_line_and_column(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{ # a comment\n  "train_batch_size": 8,,\n}')
    with pytest.raises(ConfigError, match=r"ds\.json, line 3, column 1: not JSON: "):
        load_config(file)
    with pytest.raises(ConfigError, match=r"base64 config, line 1, column 9: not JSON: "):
        load_config(base64.b64encode(b'{"a": 1,, "b": 2}').decode())


@pytest.mark.parametrize("text", ["[]", "3", '"auto"', "null"])
def test_json_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "ds.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="expected a JSON object"):
        load_config(file)


def test_binary_file_and_deep_nesting_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ConfigError, match="not UTF-8 at byte 7"):
        load_config(file)
    file.write_text('{"comms_logger":' * 20_000 + "1" + "}" * 20_000)
    with pytest.raises(ConfigError, match=r"ds\.json"):
        load_config(file)


def test_duplicate_keys_are_refused_wherever_they_are(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"aio": {"queue_depth": 1, "queue_depth": 2}, "timers": {"a": [{"b": 1, "b": 1}]}}')
    assert problems(file) == [
        "aio.queue_depth: given more than once, keep one",
        "timers.a[0].b: given more than once, keep one",
    ]


# --- Defaults ---


def test_defaults() -> None:
    config = load_config({})
    zero = config.zero_optimization
    assert (zero.stage, zero.reduce_bucket_size, zero.stage3_param_persistence_threshold) == (0, 500_000_000, 100_000)
    assert (zero.stage3_max_live_parameters, zero.stage3_max_reuse_distance) == ("auto", "auto")
    assert zero.stage3_model_persistence_threshold == sys.maxsize
    assert (zero.sub_group_size, zero.stage3_prefetch_bucket_size) == ("auto", "auto")
    assert (zero.mics_shard_size, zero.zero_hpz_partition_size) == (-1, 1)
    assert (zero.offload_param.device, zero.offload_param.nvme_path, zero.offload_param.max_in_cpu) == ("none", None, 0)
    assert (config.aio.block_size, config.aio.queue_depth, config.aio.intra_op_parallelism) == (1 << 20, 32, 1)
    assert (config.fp16.enabled, config.fp16.loss_scale, config.fp16.initial_scale_power) == (False, 0.0, 16)
    assert (config.fp16.loss_scale_window, config.fp16.hysteresis, config.fp16.min_loss_scale) == (1000, 2, 1.0)
    assert (config.gradient_clipping, config.steps_per_print, config.bf16.enabled) == (1.0, 10, False)
    assert (config.optimizer, config.scheduler, config.auto, config.ignored) == (None, None, (), ())
    own = config.infinity
    assert (own.pinned_bytes_max, own.wrap, own.backend, own.rings) == ("auto", "auto", "auto", 1)
    assert (own.lock_memory, own.fused, own.reduce_dtype) == (False, True, "fp32")


def test_queue_depth_defaults_to_32_in_a_given_aio_block_too() -> None:
    assert load_config({"aio": {"block_size": 4096}}).aio.queue_depth == 32


def test_config_and_its_blocks_are_frozen() -> None:
    config = load_config({})
    with pytest.raises(ValidationError):
        config.gradient_clipping = 1.0
    with pytest.raises(ValidationError):
        config.aio.queue_depth = 1


def test_every_field_is_described() -> None:
    assert "| None |" not in render_reference()


# --- Tolerances ---


@pytest.mark.parametrize(("written", "read"), [("true", True), ("False", False), (True, True), (False, False)])
def test_booleans_may_be_strings(written: Any, read: bool) -> None:
    assert load_config({"bf16": {"enabled": written}}).bf16.enabled is read


@pytest.mark.parametrize("written", [1e9, 10**9, "1e9", "1B"])
def test_integers_may_be_floats_and_counts(written: Any) -> None:
    size = load_config({"zero_optimization": {"sub_group_size": written}}).zero_optimization.sub_group_size
    assert size == 10**9
    assert isinstance(size, int)


def test_bytes_may_have_a_unit() -> None:
    config = load_config({"infinity": {"pinned_bytes_max": "512MiB"}, "aio": {"block_size": "2MiB"}})
    assert (config.infinity.pinned_bytes_max, config.aio.block_size) == (512 << 20, 2 << 20)


def test_numbers_may_be_strings() -> None:
    source = {"optimizer": {"type": "AdamW", "params": {"lr": "3e-5"}}}
    optimizer = load_config(source).optimizer
    assert optimizer is not None
    assert optimizer.lr == 3e-5


@pytest.mark.parametrize("key", ["thread_count", "num_threads", "intra_op_parallelism"])
def test_old_names_of_intra_op_parallelism(key: str) -> None:
    config = load_config({"aio": {key: 4}})
    assert (config.aio.intra_op_parallelism, config.io_rings) == (4, 4)


def test_old_and_new_name_together_are_refused() -> None:
    assert problems({"aio": {"thread_count": 4, "intra_op_parallelism": 4}}) == [
        "aio.intra_op_parallelism: given already as aio.thread_count, keep one"
    ]


def test_errors_name_the_key_as_it_was_written() -> None:
    assert problems({"aio": {"thread_count": 0}}) == ["aio.thread_count: got 0, expected an integer of at least 1"]


def test_deprecated_cpu_offload_becomes_the_device_cpu() -> None:
    zero = load_config(
        {
            "zero_optimization": {
                "stage": 3,
                "cpu_offload": "true",
                "cpu_offload_param": True,
                "cpu_offload_use_pin_memory": False,
                "offload_param": {"max_in_cpu": 5},
            }
        }
    ).zero_optimization
    assert (zero.offload_optimizer.device, zero.offload_optimizer.pin_memory) == ("cpu", False)
    assert (zero.offload_param.device, zero.offload_param.pin_memory, zero.offload_param.max_in_cpu) == (
        "cpu",
        False,
        5,
    )


def test_deprecated_cpu_offload_that_is_false_changes_nothing() -> None:
    config = load_config({"zero_optimization": {"cpu_offload": False, "cpu_offload_use_pin_memory": True}})
    assert config.zero_optimization.offload_optimizer.device == "none"
    assert config.ignored == ("zero_optimization.cpu_offload_use_pin_memory",)


def test_deprecated_cpu_offload_against_another_device_is_refused() -> None:
    source = {"zero_optimization": {"stage": 3, "cpu_offload": True, "offload_optimizer": NVME}}
    assert problems(source) == [
        'zero_optimization.cpu_offload: got true together with zero_optimization.offload_optimizer.device "nvme", '
        "keep the latter"
    ]


def test_null_is_the_same_as_nothing() -> None:
    zero = {"offload_param": None, "overlap_comm": None}
    assert load_config({"train_batch_size": None, "amp": None, "zero_optimization": zero}) == Config()


def test_infinite_steps_per_print_prints_never(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"steps_per_print": Infinity}')
    assert load_config(file).steps_per_print == 0


def test_nvme_path_may_be_a_path_object() -> None:
    source = {"zero_optimization": {"stage": 3, "offload_param": {"device": "NVMe", "nvme_path": Path("/mnt/x")}}}
    offload = load_config(source).zero_optimization.offload_param
    assert (offload.device, offload.nvme_path) == ("nvme", "/mnt/x")


# --- Refusals ---


def test_a_wrong_value_names_its_path_and_the_right_ones() -> None:
    assert problems({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvm"}}}) == [
        'zero_optimization.offload_param.device: got "nvm", expected one of none, cpu, nvme'
    ]


def test_all_problems_are_listed_each_on_its_line(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"aio": {"block_size": 1000, "queu_depth": 4}, "gradient_clipping": -1}))
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert str(caught.value).split("\n") == [
        f"{file}: 3 problems",
        "  aio.queu_depth: unknown key, did you mean aio.queue_depth?",
        "  gradient_clipping: got -1, expected a number of at least 0",
        '  aio.block_size: got 1000, expected a positive multiple of 4096 bytes such as 1048576 or "1MiB"',
    ]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("aio.block_size", 0),
        ("aio.block_size", -4096),
        ("aio.block_size", 6144),
        ("aio.queue_depth", 0),
        ("aio.queue_depth", True),
        ("aio.queue_depth", 1.5),
        ("aio.queue_depth", "many"),
        ("aio.queue_depth", float("inf")),
        ("aio.queue_depth", float("nan")),
        ("aio", 3),
        ("aio", []),
        ("zero_optimization.stage", 4),
        ("zero_optimization.stage", True),
        ("zero_optimization.sub_group_size", 0),
        ("zero_optimization.mics_shard_size", 0),
        ("zero_optimization.offload_param.device", 3),
        ("zero_optimization.offload_param.nvme_path", ""),
        ("zero_optimization.offload_param.pin_memory", "yes"),
        ("train_batch_size", 0),
        ("gradient_clipping", float("nan")),
        ("gradient_clipping", True),
        ("steps_per_print", -1),
        ("steps_per_print", float("nan")),
        ("bf16.enabled", 1),
        ("optimizer.params.lr", -1e-3),
        ("optimizer.params.betas", [0.9]),
        ("optimizer.params.betas", [0.9, 1.0]),
        ("optimizer.params.betas", 0.9),
        ("optimizer.params.amsgrad", True),
        ("optimizer.params.amsgrad", "true"),
        ("optimizer.params.amsgrad", 0),
        ("optimizer.params.bias_correction", False),
        ("optimizer.params.adam_w_mode", 2),
        ("optimizer.params", []),
        ("optimizer", "AdamW"),
        ("optimizer.type", "Lamb"),
        ("scheduler.type", "PolynomialLR"),
        ("scheduler.params.warmup_max_lr", []),
        ("scheduler.params.warmup_max_lr", [1e-3, "x"]),
        ("scheduler.params.warmup_type", "cubic"),
        ("infinity.pinned_bytes_max", "512 potatoes"),
        ("infinity.pinned_bytes_max", 100),
        ("infinity.wrap", "Block"),
        ("infinity.wrap", []),
        ("infinity.wrap", [3]),
        ("infinity.backend", "posix"),
        ("infinity.rings", 0),
        ("infinity.reduce_dtype", "fp16"),
    ],
)
def test_value_out_of_range_is_refused_by_its_path(path: str, value: Any) -> None:
    source: dict[str, Any] = {"optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupLR"}}
    *blocks, leaf = path.split(".")
    inner = source
    for block in blocks:
        inner = inner.setdefault(block, {})
    inner[leaf] = value
    (line,) = problems(source)
    assert line.startswith(f"{path}: got ")
    assert ", expected " in line


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ({"zero_optimisation": {}}, "zero_optimisation: unknown key, did you mean zero_optimization?"),
        (
            {"zero_optimization": {"offload_param": {"nvme_pth": "/x"}}},
            "zero_optimization.offload_param.nvme_pth: unknown key, did you mean "
            "zero_optimization.offload_param.nvme_path?",
        ),
        (
            {"infinity": {"offload_activations": {"buffer_byte": 1}}},
            "infinity.offload_activations.buffer_byte: unknown key, did you mean "
            "infinity.offload_activations.buffer_bytes?",
        ),
        (
            {"infinity": {"offload_activations": "cpu"}},
            'infinity.offload_activations: got "cpu", expected an object',
        ),
        ({"queue_depth": 8}, "queue_depth: unknown key here, it belongs at aio.queue_depth"),
        ({"wandb": {"projct": "p"}}, "wandb.projct: unknown key, did you mean wandb.project?"),
        ({"csv_monitor": {"job_nam": "a"}}, "csv_monitor.job_nam: unknown key, did you mean csv_monitor.job_name?"),
        ({"tensorbord": {}}, "tensorbord: unknown key, did you mean tensorboard?"),
        ({"tensorboard": True}, "tensorboard: got true, expected an object"),
        (
            {"optimizer": {"type": "Adam", "adam_w_mode": True}},
            "optimizer.adam_w_mode: unknown key here, it belongs at optimizer.params.adam_w_mode",
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"weight_decy": 0}}},
            "optimizer.params.weight_decy: unknown key, did you mean optimizer.params.weight_decay?",
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 1}}},
            "scheduler.params.total_num_steps: unknown key for this type, remove it",
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"type": 1}}},
            "scheduler.params.type: unknown key here, it belongs at optimizer.type or scheduler.type",
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}}},
            "optimizer.params.max_grad_norm: unknown key here, it belongs at gradient_clipping",
        ),
        ({"xyzzy": 1}, "xyzzy: unknown key, remove it"),
        ({"ignored": ["x"]}, "ignored: unknown key, remove it"),
        ({3: 1}, "config: got the key 3, expected a text"),
    ],
)
def test_unknown_key_gets_the_nearest_name(source: Any, line: str) -> None:
    assert problems(source) == [line]


def test_unknown_optimizer_lists_the_supported_ones_and_nothing_else() -> None:
    source = {"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 400}}}
    advice = "; leave the block out and pass another to initialize, as optimizer=lambda groups: ..."
    assert problems(source) == [f'optimizer.type: got "OneBitAdam", expected one of AdamW, Adam, SGD, Muon{advice}']
    assert problems({"optimizer": {}}) == ["optimizer.type: missing, expected one of AdamW, Adam, SGD, Muon"]
    assert problems({"scheduler": {"params": {}}}) == [
        "scheduler.type: missing, expected one of WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest"
    ]


def test_a_long_value_is_cut() -> None:
    (line,) = problems({"aio": {"queue_depth": "x" * 10_000}})
    assert len(line) < 200


# --- Cross checks ---


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("block", ["offload_param", "offload_optimizer"])
def test_nvme_needs_stage_3(stage: int, block: str) -> None:
    (line,) = problems({"zero_optimization": {"stage": stage, block: NVME}})
    assert line.startswith(f'zero_optimization.{block}.device: got "nvme" with zero_optimization.stage {stage}')
    assert line.endswith("set zero_optimization.stage to 3")


def test_offload_to_cpu_needs_its_stage() -> None:
    (line,) = problems({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}})
    assert line.endswith("set zero_optimization.stage to 3")
    (line,) = problems({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}})
    assert line.endswith("set zero_optimization.stage to 1, 2 or 3")
    source = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}
    assert load_config(source).zero_optimization.offload_optimizer.device == "cpu"


@pytest.mark.parametrize("blocks", [["offload_optimizer"], ["offload_param", "offload_optimizer"]])
def test_nvme_needs_a_path(blocks: list[str]) -> None:
    lines = problems({"zero_optimization": {"stage": 3, **{block: {"device": "nvme"} for block in blocks}}})
    assert len(lines) == len(blocks)
    for block, line in zip(blocks, lines, strict=True):
        assert line.startswith(f"zero_optimization.{block}.nvme_path: missing, expected a folder on the drive")


@pytest.mark.parametrize("path", [{}, {"nvme_path": "auto"}])
def test_parameters_alone_need_none_as_they_may_all_rest_in_files(path: dict[str, str]) -> None:
    source = {"train_batch_size": 1, "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", **path}}}
    config = load_config(source).resolve(world_size=1)
    assert config.uses_nvme and config.nvme_paths == ()


def test_fp16_and_bf16_exclude_each_other() -> None:
    (line,) = problems({"fp16": {"enabled": True}, "bf16": {"enabled": "true"}})
    assert line == "fp16.enabled: got true together with bf16.enabled true, set one of the two to false"
    assert load_config({"fp16": {"enabled": True}}).fp16.enabled


def test_cross_checks_hold_for_a_config_made_in_python() -> None:
    with pytest.raises(ValidationError, match="set one of the two to false"):
        Config.model_validate({"fp16": {"enabled": True}, "bf16": {"enabled": True}})
    with pytest.raises(ValidationError):
        AioConfig(block_size=1)


# --- Ignored keys ---


def test_keys_without_meaning_here_are_collected_in_order() -> None:
    config = load_config(
        {
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": 3,
                "overlap_comm": "auto",
                "contiguous_gradients": True,
                "offload_param": {**NVME, "buffer_count": 5, "buffer_size": 1e8},
                "offload_optimizer": {**NVME, "pipeline_read": True, "fast_init": False},
            },
            "aio": {"single_submit": False, "overlap_events": True},
            "comms_logger": {"enabled": True, "anything": [1]},
            "data_types": {"grad_accum_dtype": "fp32"},
        }
    )
    assert config.ignored == (
        "zero_allow_untested_optimizer",
        "zero_optimization.overlap_comm",
        "zero_optimization.contiguous_gradients",
        "zero_optimization.offload_param.buffer_count",
        "zero_optimization.offload_param.buffer_size",
        "zero_optimization.offload_optimizer.pipeline_read",
        "zero_optimization.offload_optimizer.fast_init",
        "aio.single_submit",
        "aio.overlap_events",
        "comms_logger",
        "data_types",
    )
    assert config.auto == ()
    assert config.resolve(world_size=1).ignored == config.ignored


def test_every_key_of_a_full_config_is_taken_or_reported_once() -> None:
    """The keys that DeepSpeed documents, at its defaults."""
    offload = {"nvme_path": "/mnt/nvme", "buffer_count": 5, "pin_memory": True}
    source = {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 8,
        "gradient_clipping": 1.0,
        "steps_per_print": 10,
        "wall_clock_breakdown": False,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": False, "adam_w_mode": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}},
        "fp16": {
            "enabled": True,
            "auto_cast": False,
            "loss_scale": 0,
            "initial_scale_power": 16,
            "loss_scale_window": 1000,
            "hysteresis": 2,
            "consecutive_hysteresis": False,
            "min_loss_scale": 1,
        },
        "bf16": {"enabled": False},
        "activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": False, "profile": False},
        "flops_profiler": {"enabled": False, "profile_step": 1, "module_depth": -1, "top_modules": 1, "detailed": True},
        "tensorboard": {"enabled": False, "output_path": "", "job_name": "DeepSpeedJobName"},
        "csv_monitor": {"enabled": False, "output_path": "", "job_name": "DeepSpeedJobName"},
        "wandb": {"enabled": False, "group": "", "team": "", "project": "deepspeed"},
        "comet": {
            "enabled": False,
            "samples_log_interval": 100,
            "project": "p",
            "online": True,
            "mode": "get_or_create",
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "aio": {
            "block_size": 1048576,
            "queue_depth": 8,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
            "use_gds": False,
        },
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme", **offload, "buffer_size": 1e8, "max_in_cpu": 1e9},
            "offload_optimizer": {
                "device": "nvme",
                **offload,
                "pipeline_read": False,
                "pipeline_write": False,
                "fast_init": False,
                "ratio": 1.0,
            },
            "sub_group_size": 1e9,
            "stage3_prefetch_bucket_size": 5e7,
            "stage3_param_persistence_threshold": 1e5,
            "stage3_model_persistence_threshold": sys.maxsize,
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": False,
            "stage3_module_granularity_threshold": 0,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_scatter": True,
            "reduce_bucket_size": 5e8,
            "allgather_partitions": True,
            "allgather_bucket_size": 5e8,
            "round_robin_gradients": False,
            "ignore_unused_parameters": True,
            "elastic_checkpoint": False,
            "mics_shard_size": -1,
            "zero_hpz_partition_size": 1,
        },
    }
    config = load_config(source)
    assert len(set(config.ignored)) == len(config.ignored)
    for path, value in leaves(source):
        taken = config.model_dump(exclude_unset=True)
        for name in [part for part in path.split(".") if part != "params"]:
            taken = taken.get(name, {}) if isinstance(taken, dict) else {}
        assert (path in config.ignored) != (
            taken == value or path in ("optimizer.type", "optimizer.params.adam_w_mode")
        )


def leaves(source: dict[str, Any], where: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in source.items():
        path = f"{where}.{name}" if where else name
        if isinstance(value, dict):
            yield from leaves(value, path)
        else:
            yield path, value


OF_DEEPSPEED = """
    zero_optimization.reduce_scatter zero_optimization.allgather_partitions zero_optimization.allgather_bucket_size
    zero_optimization.round_robin_gradients zero_optimization.ignore_unused_parameters
    zero_optimization.elastic_checkpoint zero_force_ds_cpu_optimizer zero_optimization.offload_optimizer.pipeline_write
    prescale_gradients memory_breakdown nebula timers comms_logger log_level zero_optimization.compute_grad_norm
    optimizer.params.set_grad_none scheduler.params.last_batch_iteration activation_checkpointing.profile
"""


@pytest.mark.parametrize("path", OF_DEEPSPEED.split())
def test_key_of_the_deepspeed_world_is_accepted_and_reported(path: str) -> None:
    source: dict[str, Any] = {"optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupLR"}}
    *blocks, leaf = path.split(".")
    inner = source
    for block in blocks:
        inner = inner.setdefault(block, {})
    inner[leaf] = True
    assert load_config(source).ignored == (path,)


def test_features_that_change_the_mathematics_are_refused_when_on() -> None:
    assert load_config({"amp": {"enabled": False}}).ignored == ("amp",)
    (line,) = problems({"amp": {"enabled": True, "opt_level": "O1"}})
    assert line.startswith("amp.enabled: got true, expected false")


@pytest.mark.parametrize(
    "on",
    [
        {"sequence_parallel_size": 2},
        {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}}},
    ],
)
def test_what_is_on_without_an_enabled_is_refused_too(on: dict[str, Any]) -> None:
    (path,) = on
    (line,) = problems(on)
    assert line.startswith(f"{path}: ")
    assert "changes what is computed" in line


@pytest.mark.parametrize(
    "off",
    [
        {"sequence_parallel_size": 1},
        {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False}}}},
    ],
)
def test_what_is_there_and_off_is_ignored(off: dict[str, Any]) -> None:
    assert load_config(off).ignored == tuple(off)


def test_the_communication_type_is_the_one_of_the_reduction() -> None:
    assert load_config({"communication_data_type": "bf16"}).infinity.reduce_dtype == "bf16"
    assert load_config({"communication_data_type": "fp32"}).infinity.reduce_dtype == "fp32"
    own = load_config({"communication_data_type": "bf16", "infinity": {"reduce_dtype": "fp32"}})
    assert (own.infinity.reduce_dtype, own.ignored) == ("fp32", ())
    fp16 = load_config({"communication_data_type": "fp16"})
    assert (fp16.infinity.reduce_dtype, fp16.ignored) == ("fp32", ("communication_data_type",))
    assert "reduce_dtype" in problems({"communication_data_type": "int8"})[0]
    assert "communication_data_type" in problems({"communication_datatype": "bf16"})[0]


# --- Optimizer and scheduler ---


def optimizer_of(kind: str, **params: Any) -> AdamConfig:
    optimizer = load_config({"optimizer": {"type": kind, "params": params}}).optimizer
    assert optimizer is not None
    return optimizer


@pytest.mark.parametrize(
    ("written", "params", "kind", "weight_decay"),
    [
        ("AdamW", {}, "AdamW", 0.0),
        ("adamw", {"adam_w_mode": False}, "AdamW", 0.0),
        ("AdamW", {"torch_adam": True}, "AdamW", 0.01),
        ("Adam", {"torch_adam": "true"}, "AdamW", 0.01),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, "Adam", 0.0),
        ("Adam", {}, "AdamW", 0.0),
        ("ADAM", {"adam_w_mode": "true"}, "AdamW", 0.0),
        ("Adam", {"adam_w_mode": False}, "Adam", 0.0),
        ("Adam", {"adam_w_mode": False, "weight_decay": 0.1}, "Adam", 0.1),
        ("Adam", {"weight_decay": 0.1}, "AdamW", 0.1),
        ("Adam", {"weight_decay": "auto"}, "AdamW", 0.0),
        ("auto", {}, "AdamW", 0.0),
    ],
)
def test_optimizer_type_and_its_weight_decay(written: str, params: Any, kind: str, weight_decay: float) -> None:
    optimizer = optimizer_of(written, **params)
    assert (optimizer.type, optimizer.weight_decay) == (kind, weight_decay)


def test_optimizer_defaults_are_those_of_deepspeed() -> None:
    optimizer = optimizer_of("AdamW", torch_adam=True, amsgrad=False, bias_correction="true")
    assert (optimizer.lr, optimizer.betas, optimizer.eps, optimizer.torch_adam) == (1e-3, (0.9, 0.999), 1e-8, True)
    assert AdamConfig() == AdamConfig(type="AdamW", weight_decay=0.0)


def test_schedulers_are_typed() -> None:
    def scheduler(kind: str, **params: Any) -> Any:
        return load_config({"scheduler": {"type": kind, "params": params}}).scheduler

    warmup = scheduler("WarmupLR", warmup_max_lr=[1e-3, 1e-4], warmup_type="linear")
    assert isinstance(warmup, WarmupLRConfig)
    assert (warmup.warmup_max_lr, warmup.warmup_num_steps, warmup.warmup_type) == ((1e-3, 1e-4), 1000, "linear")
    assert isinstance(scheduler("warmupdecaylr", total_num_steps=1e4), WarmupDecayLRConfig)
    cosine = scheduler("WarmupCosineLR", total_num_steps=10)
    assert isinstance(cosine, WarmupCosineLRConfig)
    assert (cosine.warmup_min_ratio, cosine.cos_min_ratio, cosine.warmup_type) == (0.0, 1e-4, "log")
    cycle = scheduler("OneCycle", cycle_min_lr=1e-4, cycle_max_lr=1e-3, cycle_first_stair_count=1)
    assert (cycle.cycle_first_step_size, cycle.cycle_second_step_size) == (2000, None)


def test_schedulers_miss_what_has_no_default() -> None:
    (line,) = problems({"scheduler": {"type": "WarmupDecayLR"}})
    assert line.startswith("scheduler.params.total_num_steps: missing")
    assert len(problems({"scheduler": {"type": "OneCycle"}})) == 2
    source = {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "decay_lr_rate": 0.1}}
    (line,) = problems({"scheduler": source})
    assert line.startswith("scheduler.params.decay_step_size: got 0")


# --- Resolving ---


def test_auto_is_accepted_anywhere_and_listed() -> None:
    source = {
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": "auto",
        "zero_optimization": {"stage": "auto", "offload_param": {"device": "nvme", "nvme_path": "auto"}},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
        "aio": "auto",
        "infinity": {"wrap": "auto"},
    }
    config = load_config(source)
    assert config.auto == (
        "train_batch_size",
        "gradient_clipping",
        "bf16.enabled",
        "fp16.enabled",
        "zero_optimization.stage",
        "zero_optimization.offload_param.nvme_path",
        "optimizer.params.lr",
        "optimizer.params.betas",
        "scheduler.params.total_num_steps",
        "aio",
        "infinity.wrap",
    )
    resolved = config.resolve(world_size=1, stage=3, offload_param_nvme_path="/mnt/x", total_num_steps=7, bf16=True)
    assert resolved.auto == ()
    assert (resolved.zero_optimization.stage, resolved.zero_optimization.offload_param.nvme_path) == (3, "/mnt/x")
    assert (resolved.bf16.enabled, resolved.fp16.enabled, resolved.gradient_clipping) == (True, False, 1.0)
    assert resolved.optimizer == AdamConfig()
    assert resolved.aio == AioConfig()


def test_auto_that_must_be_given_is_missed_when_resolved() -> None:
    config = load_config({"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}})
    with pytest.raises(ConfigError, match=r"scheduler\.params\.total_num_steps: missing"):
        config.resolve(world_size=1)


def test_hidden_size_fills_the_buckets() -> None:
    keys = ("reduce_bucket_size", "stage3_param_persistence_threshold")
    config = load_config({"zero_optimization": {"stage": 3, **dict.fromkeys(keys, "auto")}})
    zero = config.resolve(world_size=1, hidden_size=1000).zero_optimization
    assert [getattr(zero, key) for key in keys] == [1_000_000, 10_000]
    zero = config.resolve(world_size=1, hidden_size=1000, reduce_bucket_size=5).zero_optimization
    assert zero.reduce_bucket_size == 5
    zero = config.resolve(world_size=1).zero_optimization
    assert [getattr(zero, key) for key in keys] == [500_000_000, 100_000]


def test_hidden_size_leaves_written_numbers_alone() -> None:
    zero = load_config({"zero_optimization": {"stage3_prefetch_bucket_size": 7}})
    resolved = zero.resolve(world_size=1, hidden_size=1000).zero_optimization
    assert (resolved.stage3_prefetch_bucket_size, resolved.reduce_bucket_size) == (7, 500_000_000)


@pytest.mark.parametrize("written", [{}, {"stage3_prefetch_bucket_size": "auto"}])
def test_how_far_to_read_ahead_is_left_to_the_pool(written: dict[str, Any]) -> None:
    config = load_config({"zero_optimization": written}).resolve(world_size=1, hidden_size=1000)
    assert config.zero_optimization.stage3_prefetch_bucket_size == "auto"


def test_optimizer_and_scheduler_are_filled_by_name() -> None:
    params = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    warmup = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto")
    config = load_config(
        {
            "optimizer": {"type": "AdamW", "params": params},
            "scheduler": {"type": "WarmupDecayLR", "params": warmup},
        }
    ).resolve(world_size=1, lr=3e-4, betas=(0.8, 0.9), weight_decay=0.1, eps=None, total_num_steps=50)
    assert config.optimizer == AdamConfig(type="AdamW", lr=3e-4, betas=(0.8, 0.9), weight_decay=0.1, eps=1e-8)
    assert isinstance(config.scheduler, WarmupDecayLRConfig)
    assert (config.scheduler.total_num_steps, config.scheduler.warmup_num_steps) == (50, 1000)
    assert (config.scheduler.warmup_min_lr, config.scheduler.warmup_max_lr) == (0.0, 3e-4)


def test_what_is_written_is_not_overridden_by_the_caller() -> None:
    source = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}, "gradient_clipping": 2.0}
    config = load_config(source).resolve(world_size=1, lr=1.0, gradient_clipping=3.0)
    assert config.optimizer is not None
    assert (config.optimizer.lr, config.gradient_clipping) == (1e-5, 2.0)


@pytest.mark.parametrize("written", [{}, {"gradient_clipping": "auto"}])
def test_gradient_clipping_that_is_not_written_is_the_callers(written: dict[str, Any]) -> None:
    config = load_config(written)
    assert config.resolve(world_size=1, gradient_clipping=0.0).gradient_clipping == 0.0
    assert config.resolve(world_size=1).gradient_clipping == 1.0


def test_gradients_that_are_to_be_seen_do_not_wait_on_nvme() -> None:
    with pytest.raises(ConfigError, match=r"infinity\.keep_grad: got true with infinity\.gradient_bytes_max 1048576"):
        load_config({"infinity": {"keep_grad": True, "gradient_bytes_max": "1MiB"}})


def test_resolving_refuses_what_loading_would() -> None:
    config = load_config({"bf16": {"enabled": "auto"}, "fp16": {"enabled": True}})
    with pytest.raises(ConfigError, match=r"fp16\.enabled: got true together with"):
        config.resolve(world_size=1, bf16=True)
    config = load_config({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}})
    with pytest.raises(ConfigError, match=r'optimizer\.params\.lr: got "fast", expected a number'):
        config.resolve(world_size=1, lr="fast")
    with pytest.raises(ConfigError, match=r"warmup_steps: no key of the config has this name, did you mean warmup_num"):
        config.resolve(world_size=1, warmup_steps=3)
    with pytest.raises(ConfigError, match="world_size: got 0"):
        config.resolve(world_size=0)
    with pytest.raises(ConfigError, match=r"micro_batches_at_once: remove it, as all 4 parts"):
        load_config({"infinity": {"micro_batches": 4, "micro_batches_at_once": 2}}).resolve(world_size=1)
    with pytest.raises(ConfigError, match=r"mics_shard_size: got 3, expected a divisor of the 4 ranks"):
        load_config({"zero_optimization": {"mics_shard_size": 3}}).resolve(world_size=4)
    with pytest.raises(
        ConfigError, match=r"zero_hpz_partition_size: got 4, expected a divisor of the 2 ranks that a copy"
    ):
        load_config({"zero_optimization": {"mics_shard_size": 2, "zero_hpz_partition_size": 4}}).resolve(world_size=4)


def test_resolving_leaves_the_original_alone_and_repeats_itself() -> None:
    config = load_config({"train_micro_batch_size_per_gpu": 2, "gradient_clipping": "auto"})
    resolved = config.resolve(world_size=4, gradient_clipping=1.0)
    assert (config.train_batch_size, config.auto) == (None, ("gradient_clipping",))
    assert resolved.resolve(world_size=4) == resolved


# --- Batch arithmetic ---

SIZES = st.integers(min_value=1, max_value=1000)
NAMES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@given(micro=SIZES, accumulation=SIZES, world_size=SIZES, left_out=st.sampled_from([None, *NAMES]))
def test_any_two_sizes_give_the_third(micro: int, accumulation: int, world_size: int, left_out: str | None) -> None:
    batch = Batch(micro * accumulation * world_size, micro, accumulation)
    source = dict(zip(NAMES, batch, strict=True))
    if left_out is not None:
        del source[left_out]
    assert load_config(source).resolve(world_size=world_size).batch == batch


@given(st.tuples(*(st.none() | SIZES for _ in NAMES)), SIZES)
def test_solved_sizes_multiply_and_keep_what_was_given(given: tuple[int | None, ...], world_size: int) -> None:
    train, micro, accumulation = given
    divisor = (micro or 1) * (accumulation or 1) * world_size
    if train is not None and (train != divisor if micro and accumulation else train % divisor):
        with pytest.raises(ConfigError, match=f"train_batch_size: got {train}, expected"):
            solve_batch(train, micro, accumulation, world_size=world_size)
        return
    batch = solve_batch(train, micro, accumulation, world_size=world_size)
    assert batch.train == batch.micro * batch.accumulation * world_size
    assert all(wanted in (None, got) for wanted, got in zip(given, batch, strict=True))
    assert min(batch) >= 1


def test_what_is_not_given_is_one() -> None:
    assert solve_batch(None, None, None, world_size=4) == Batch(4, 1, 1)
    assert solve_batch(None, 3, None, world_size=4) == Batch(12, 3, 1)
    assert solve_batch(None, None, 3, world_size=4) == Batch(12, 1, 3)
    assert solve_batch(12, None, None, world_size=4) == Batch(12, 3, 1)


def test_sizes_that_contradict_show_their_product() -> None:
    source = dict(zip(NAMES, (10, 4, 1), strict=True))
    with pytest.raises(ConfigError, match=r"train_batch_size: got 10, expected .* = 4 · 1 · 2 = 8$"):
        load_config(source).resolve(world_size=2)
    with pytest.raises(ConfigError, match=r"3 · 1 · 3 = 9 \(train_micro_batch_size_per_gpu derived, rounded down\)"):
        solve_batch(10, None, 1, world_size=3)


def test_caller_gives_sizes_that_are_auto_or_left_open() -> None:
    config = load_config(dict.fromkeys(NAMES, "auto"))
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    assert config.resolve(world_size=2, **sizes).batch == Batch(12, 2, 3)
    assert load_config({}).resolve(world_size=2, **sizes).batch == Batch(12, 2, 3)
    assert load_config({NAMES[0]: 8, NAMES[1]: 1}).resolve(world_size=2, **sizes).batch == Batch(8, 1, 4)


def test_batch_needs_resolving() -> None:
    with pytest.raises(ConfigError, match=r"call Config\.resolve\(world_size=\.\.\.\) first"):
        _ = load_config({"train_batch_size": 4}).batch


# --- The reference ---


def test_reference_is_up_to_date() -> None:
    file = Path(__file__).parent.parent / "docs" / "config.md"
    assert file.read_text(encoding="utf-8") == render_reference(), "run: python -m infinity.config > docs/config.md"


BLOCKS: dict[str, Any] = {"": Config()} | {
    name: block for name in Config.model_fields if isinstance(block := getattr(Config(), name), BaseModel)
}


WRITTEN = json.dumps(
    {
        "train_batch_size": 8,
        "bf16": {"enabled": True},
        "aio": {"block_size": 1048576, "queue_depth": 32},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 6}},
        "zero_optimization": {"stage": 3, "offload_param": NVME, "offload_optimizer": NVME, "sub_group_size": 1e9},
        "infinity": {"pinned_bytes_max": "16MiB", "durability": "step", "checkpoint_keep": 3},
    }
)


@pytest.mark.inputs
@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5), st.lists, max_leaves=3)
)
def test_no_value_brings_anything_but_a_config_error(value: Any) -> None:
    for block, model in BLOCKS.items():
        for name in type(model).model_fields:
            with contextlib.suppress(ConfigError):
                load_config({block: {name: value}} if block else {name: value}).resolve(world_size=1)


@pytest.mark.inputs
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_changed_bytes_of_a_file_are_a_config_or_a_config_error(data: st.DataObject, tmp_path: Path) -> None:
    content = bytearray(WRITTEN.encode())
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file = tmp_path / "config.json"
    file.write_bytes(content[: data.draw(st.integers(len(content) // 2, len(content)))])
    with contextlib.suppress(ConfigError):
        load_config(file).resolve(world_size=1)


@pytest.mark.parametrize("source", [[1], 5, None, b"{}"])
def test_what_is_no_config_is_refused_in_words(source: Any) -> None:
    with pytest.raises(ConfigError, match="a config is a dict, a path to JSON, JSON text, or base64 of JSON, got"):
        load_config(source)
