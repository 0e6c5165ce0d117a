"""Names of DeepSpeed that infinity refuses, each with the words that say what to use instead."""

from __future__ import annotations

_REFUSED = {
    "build the model from torch's modules": "DeepSpeedTransformerConfig DeepSpeedTransformerLayer module_inject "
    "ops.transformer replace_transformer_layer",
    "use infinity.init_empty()": "OnDevice",
    "use `infinity-bench plan` or `infinity-bench sweep`": "autotuning",
    "call torch.compile(model) before initialize": "compile",
    "compress the trained model with another library": "compression",
    "a checkpoint resumes on any number of ranks": "elasticity",
    "init_inference runs a model from NVMe; it schedules no requests": "inference",
    "use torch.save or engine.save_checkpoint": "io",
    "use PEFT: frozen weights stay in their files": "linear",
    "a model's own experts train as they are, sharded over all ranks": "moe.layer",
    "AsyncIOBuilder reads and writes through host memory": "ops.op_builder.GDSBuilder",
    "use torch.nn.attention.flex_attention": "ops.sparse_attention",
    "choose and order the samples in the dataset or its sampler": "runtime.data_pipeline",
    "initialize() returns the optimizer": "runtime.fp16",
    "use infinity.zero; parameters have no ds_status": "runtime.zero.partition_parameters",
    "sequence parallelism is not supported": "sequence",
    "set tensor_parallel in the config": "runtime.domino tp_model_init",
}
"""What to do instead → names of DeepSpeed that are refused, with all below them."""


def refusal_of(path: str) -> ImportError | None:
    """Return the error to raise for a name of `_REFUSED`, given as "infinity.NAME"."""
    name = path.partition(".")[2]
    for instead, refused in _REFUSED.items():
        if any(f"{name}.".startswith(f"{one}.") for one in refused.split()):
            return ImportError(f"DeepSpeed's {name} is not available: {instead}", name=path)
    return None
