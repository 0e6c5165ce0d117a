"""Floor 14. What scripts written for DeepSpeed import from its `utils`: `infinity.utils.zero_to_fp32`."""
