#!/usr/bin/env python3
"""Times flash-linear-attention's chunked prefill on a GPU, for docs/kernels.md: needs torch, triton and the wheels
flash-linear-attention, fla-core (0.6.0) and einops of PyPI. Inputs are BF16, random; keys and queries are normalised in
the kernel; the final state is asked for. Medians of 10 calls after 3.
"""

import torch
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.kda import chunk_kda


def median_ms(call):
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def main():
    torch.manual_seed(0)
    heads, size = 32, 128
    for name, chunked in (("GDN", chunk_gated_delta_rule), ("KDA", chunk_kda)):
        for batch, tokens in ((8, 4096), (1, 4096), (1, 512)):
            q, k, v = (torch.randn(batch, tokens, heads, size, device="cuda", dtype=torch.bfloat16) for _ in range(3))
            gates = (batch, tokens, heads) if name == "GDN" else (batch, tokens, heads, size)
            g = -0.1 * torch.rand(gates, device="cuda")
            beta = torch.rand(batch, tokens, heads, device="cuda").to(torch.bfloat16)
            with torch.no_grad():
                ms = median_ms(lambda: chunked(q, k, v, g=g, beta=beta, output_final_state=True,
                                               use_qk_l2norm_in_kernel=True))
            print(f"{name} {batch} x {tokens}, {heads} heads of {size}: {ms:.3f} ms", flush=True)


if __name__ == "__main__":
    main()
