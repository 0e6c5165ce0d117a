"""DeepSpeed's `pipe`: models of layers for `Engine.train_batch`."""

from infinity.runtime.pipeline import LayerSpec, PipelineModule, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
