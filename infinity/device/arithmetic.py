"""In which dtypes the CPU multiplies fast.

torch multiplies 16-bit matrices with the CPU's vector instructions where these are made for it (AVX-512, AMX, Arm's bf16). Else
it has a plain loop for some of them: on an EPYC with AVX2 alone, the gradient of a layer's input takes 32 times as long in bf16
as in fp32 (0.9 and 28 GFLOP/s on one core), that of its weight 1.2 times.
"""

from __future__ import annotations

import torch

_SUPPORT = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}


def cpu_multiplies_fast_in(dtype: torch.dtype) -> bool:
    """Whether matrices of this dtype are multiplied by vector instructions. True where torch doesn't say."""
    supported = getattr(torch.ops.mkldnn, _SUPPORT.get(dtype, ""), None)
    return supported is None or bool(supported())


def why_slow(dtype: torch.dtype) -> str | None:
    """What to know of a CPU that is to compute in this dtype; None where it does so fast."""
    if cpu_multiplies_fast_in(dtype):
        return None
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    return (
        f"{name} is slow on this CPU, which has no vector instructions to multiply in it: a backward may take 30 times as long "
        "as in fp32"
    )
