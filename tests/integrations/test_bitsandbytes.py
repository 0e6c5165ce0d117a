"""Moments in 8 bits have bitsandbytes' format: its values are ours, and it reads what we wrote."""

from __future__ import annotations

import pytest
import torch

from infinity.optim.coded_moments import BLOCK_NUMEL, code_values, decode, encode

functional = pytest.importorskip(
    "bitsandbytes.functional", reason="bitsandbytes is not installed: tools/test_integration.sh transformers"
)


@pytest.mark.parametrize("signed", [True, False])
def test_bitsandbytes_reads_our_codes(signed: bool) -> None:
    values = functional.create_dynamic_map(signed=signed)
    assert torch.allclose(code_values(signed=signed), values, rtol=1e-6, atol=0)
    moments = torch.randn(40 * BLOCK_NUMEL, generator=torch.Generator().manual_seed(0))
    moments = moments if signed else moments.square()
    codes, scales = encode(moments, signed=signed)
    theirs = functional.dequantize_blockwise(codes, absmax=scales, code=values, blocksize=BLOCK_NUMEL)
    assert torch.allclose(decode(codes, scales, signed=signed), theirs, rtol=2e-6, atol=0)
    their_codes, state = functional.quantize_blockwise(moments, code=values, blocksize=BLOCK_NUMEL)
    assert torch.equal(state.absmax, scales.abs())
    theirs = functional.dequantize_blockwise(their_codes, state, code=values, blocksize=BLOCK_NUMEL)
    error, their_error = ((kept - moments).abs().mean() for kept in (decode(codes, scales, signed=signed), theirs))
    assert error < 1.01 * their_error
