"""Exercise 17 as its learner would write it. The project has it as a part of `_backward_q`."""

import torch
import triton
import triton.language as tl


@triton.jit
def kernel(x, y, out, N, D: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place, live = row[:, None] * D + tl.arange(0, D)[None, :], row < N
    left = tl.load(x + place, mask=live[:, None], other=0.0).to(tl.float32)
    right = tl.load(y + place, mask=live[:, None], other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum(left * right, 1), mask=live)


def row_dots(x, y):
    result = torch.empty(len(x), dtype=torch.float32, device=x.device)
    kernel[(triton.cdiv(len(x), 64),)](x, y, result, len(x), D=x.shape[1], BLOCK=64)
    return result
