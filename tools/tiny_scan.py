"""Chunked forms of the recurrences that the small checkpoints are trained with, and the check of each against its recurrence.
A chunk's tokens meet each other in matrix products; a state is kept only at the start of each chunk."""

import torch
import torch.nn.functional as F

CHUNK = 64
# Rows of a chunk that share one reference point of the decays per channel.
BLOCK = 16
# Largest exponent of a factored decay inside a block: e^60 is far from FP32's and BF16's end.
EXPONENT_LIMIT = 60.0

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

if triton is not None:
    @triton.jit
    def unit_lower_inverse_kernel(lower, inverse, SIZE: tl.constexpr):
        """One program inverts one matrix by forward substitution, row by row, in registers."""
        base = tl.program_id(0).to(tl.int64) * SIZE * SIZE
        index = tl.arange(0, SIZE)
        rows, columns = index[:, None], index[None, :]
        result = tl.where(rows == columns, 1.0, 0.0)
        for row in range(1, SIZE):
            left = tl.load(lower + base + row * SIZE + index)
            left = tl.where(index < row, left, 0.0)
            update = tl.sum(left[:, None] * result, axis=0)
            result -= tl.where(rows == row, update[None, :], 0.0)
        tl.store(inverse + base + rows * SIZE + columns, result)


@torch.library.custom_op("train_tiny::unit_lower_inverse", mutates_args=())
def unit_lower_inverse(lower: torch.Tensor) -> torch.Tensor:
    """(I + lower)^-1 of strictly lower triangular matrices [count, size, size], FP32. Exact substitution: products of powers
    of `lower` overflow FP32's digits where keys repeat."""
    if lower.is_cuda and triton is not None and lower.dtype == torch.float32:
        inverse = torch.empty_like(lower)
        unit_lower_inverse_kernel[(lower.shape[0],)](lower, inverse, lower.shape[-1], num_warps=2)
        return inverse
    identity = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    return torch.linalg.solve_triangular(identity + lower, identity.expand_as(lower), upper=False, unitriangular=True).contiguous()


def unit_lower_inverse_backward(context, gradient):
    transposed = context.saved_tensors[0].transpose(-1, -2)
    return -(transposed @ gradient @ transposed)


unit_lower_inverse.register_fake(lambda lower: torch.empty_like(lower))
unit_lower_inverse.register_autograd(unit_lower_inverse_backward,
                                     setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output))


@torch.library.custom_op("train_tiny::chunk_states", mutates_args=())
def chunk_states(decay: torch.Tensor, erase: torch.Tensor, write: torch.Tensor) -> torch.Tensor:
    """States at the start of each chunk: S[c+1] = decay[c] S[c] - erase[c] S[c] + write[c], S[0] = 0.
    decay [chunks, heads, 1 or K], erase [chunks, heads, K, K], write [chunks, heads, K, V], FP32."""
    states = write.new_empty(write.shape)
    states[0].zero_()
    for chunk in range(write.shape[0] - 1):
        torch.addcmul(write[chunk], states[chunk], decay[chunk][:, :, None], out=states[chunk + 1])
        states[chunk + 1].baddbmm_(erase[chunk], states[chunk], alpha=-1)
    return states


@torch.library.custom_op("train_tiny::chunk_states_gradient", mutates_args=())
def chunk_states_gradient(gradient: torch.Tensor, decay: torch.Tensor, erase: torch.Tensor) -> torch.Tensor:
    """For each chunk c the gradient of S[c+1] with everything after it counted in."""
    following = gradient.new_empty(gradient.shape)
    following[-1].zero_()
    for chunk in range(gradient.shape[0] - 1, 0, -1):
        torch.addcmul(gradient[chunk], following[chunk], decay[chunk][:, :, None], out=following[chunk - 1])
        following[chunk - 1].baddbmm_(erase[chunk].transpose(1, 2), following[chunk], alpha=-1)
    return following


def chunk_states_backward(context, gradient):
    decay, erase, states = context.saved_tensors
    following = chunk_states_gradient(gradient.contiguous(), decay, erase)
    by_row = (following * states).sum(-1)
    if decay.shape[-1] == 1:
        by_row = by_row.sum(-1, keepdim=True)
    return by_row, -(following @ states.transpose(-1, -2)), following


chunk_states.register_fake(lambda decay, erase, write: write.new_empty(write.shape))
chunk_states_gradient.register_fake(lambda gradient, decay, erase: gradient.new_empty(gradient.shape))
chunk_states.register_autograd(chunk_states_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:2], output))


def padded(*tensors):
    """[B, T, ...] with zeros appended up to whole chunks: they leave a state alone."""
    padding = -tensors[0].shape[1] % CHUNK
    return [F.pad(x, (0, 0) * (x.ndim - 2) + (0, padding)) if padding else x for x in tensors]


def wide(x):
    """FP32, or FP64 as it is."""
    return x if x.dtype == torch.float64 else x.float()


def gated_delta_rule(query, key, value, log_decay, beta):
    """Outputs [B, T, H, V] of the gated delta rule from a zero state. query, key [B, T, G, K] normalised, value [B, T, H, V],
    log_decay, beta [B, T, H] FP32. Products run in value's type, decays, the triangular solve and the states in FP32."""
    batch, length, groups, key_size = key.shape
    heads, value_size = value.shape[2:]
    ratio, dtype = heads // groups, value.dtype
    query, key, value, log_decay, beta = padded(query, key, value, log_decay, beta)
    chunks = key.shape[1] // CHUNK

    def vectors(x, per_group):
        return x.reshape(batch, chunks, CHUNK, groups, per_group, x.shape[-1]).permute(1, 0, 3, 4, 2, 5)

    def scalars(x):
        return x.reshape(batch, chunks, CHUNK, groups, ratio).permute(1, 0, 3, 4, 2)

    # chunks, batch, groups, heads per group, position in the chunk, channel
    query, key, value = vectors(query, 1), vectors(key, 1), vectors(value, ratio)
    beta, decay = scalars(beta)[..., None], scalars(log_decay).cumsum(-1)[..., None]
    position = torch.arange(CHUNK, device=key.device)
    between = (decay - decay.transpose(-1, -2)).masked_fill(position[:, None] < position, -torch.inf).exp()
    key_products = wide(key @ key.transpose(-1, -2))
    lower = (beta * key_products * between).masked_fill(position[:, None] <= position, 0.0)
    inverse = unit_lower_inverse(lower.reshape(-1, CHUNK, CHUNK)).view(lower.shape).to(dtype)
    reads = (wide(query @ key.transpose(-1, -2)) * between).to(dtype)
    last = decay[..., -1:, :]
    corrected = inverse @ torch.cat([(key * (beta * decay.exp())).to(dtype), (value * beta).to(dtype)], dim=-1)
    from_key, from_value = corrected.split([key_size, value_size], dim=-1)
    summary = wide((key * (last - decay).exp()).to(dtype).transpose(-1, -2) @ corrected)
    flat = summary.reshape(chunks, batch * heads, key_size, key_size + value_size)
    states = chunk_states(last.exp().reshape(chunks, batch * heads, 1), flat[..., :key_size], flat[..., key_size:])
    states = states.view(chunks, batch, groups, ratio, key_size, value_size).to(dtype)
    output = (query * decay.exp()).to(dtype) @ states + reads @ (from_value - from_key @ states)
    return output.permute(1, 0, 4, 2, 3, 5).reshape(batch, chunks * CHUNK, heads, value_size)[:, :length]


def decayed_products(rows, key, decay, is_exact):
    """rows [..., R, CHUNK, K], key and decay [..., CHUNK, K], decay a running sum of log decays: for each of the R and i >= j the
    sums over channels of rows[i] key[j] e^(decay[i] - decay[j]), [..., R, CHUNK, CHUNK]; above the diagonal finite, of no meaning.
    Every block of rows takes its decays from its own start, so exponents between blocks are never positive. Within a block they
    are factored too, up to EXPONENT_LIMIT, where a stronger decay counts as that one; exact ones are taken pair by pair."""
    dtype, blocks, kinds, size = key.dtype, CHUNK // BLOCK, rows.shape[-3], key.shape[-1]
    start = F.pad(decay[..., BLOCK - 1:-1:BLOCK, :], (0, 0, 1, 0))
    since = decay.unflatten(-2, (blocks, BLOCK)) - start[..., None, :]
    # ..., block of rows, kind, row in the block, channel
    by_block = rows.unflatten(-2, (blocks, BLOCK)).transpose(-4, -3)
    scaled = (by_block * since[..., None, :, :].exp()).to(dtype).flatten(-3, -2)
    first = torch.arange(blocks, device=key.device)[:, None] * BLOCK
    is_later = torch.arange(CHUNK, device=key.device) >= (first if is_exact else first + BLOCK)
    exponent = (start[..., None, :] - decay[..., None, :, :]).clamp(max=EXPONENT_LIMIT).masked_fill(is_later[..., None], -torch.inf)
    products = scaled @ (key[..., None, :, :] * exponent.exp()).to(dtype).transpose(-1, -2)
    products = wide(products).unflatten(-2, (kinds, BLOCK))
    if is_exact:
        index = torch.arange(BLOCK, device=key.device)
        own = (since[..., :, None, :] - since[..., None, :, :]).masked_fill((index[:, None] < index)[..., None], -torch.inf).exp()
        pairs = by_block[..., :, None, :] * key.unflatten(-2, (blocks, BLOCK))[..., None, None, :, :]
        inside = (wide(pairs) * own[..., None, :, :, :]).sum(-1)
        identity = torch.eye(blocks, dtype=inside.dtype, device=key.device)[:, None, None, :, None]
        products = products + (inside[..., None, :] * identity).flatten(-2)
    return products.transpose(-4, -3).flatten(-3, -2)


def kimi_delta_rule(query, key, value, log_decay, beta, is_exact):
    """Outputs [B, T, H, V] of the delta rule with a decay per key channel, from a zero state. query, key [B, T, H, K] normalised,
    value [B, T, H, V], log_decay [B, T, H, K], beta [B, T, H] FP32. Types as in gated_delta_rule; is_exact as in decayed_products."""
    batch, length, heads, key_size = key.shape
    value_size, dtype = value.shape[-1], value.dtype
    query, key, value, log_decay, beta = padded(query, key, value, log_decay, beta[..., None])
    chunks = key.shape[1] // CHUNK

    def by_chunk(x):
        return x.reshape(batch, chunks, CHUNK, heads, x.shape[-1]).permute(1, 0, 3, 2, 4)

    # chunks, batch, heads, position in the chunk, channel
    query, key, value, beta, decay = (by_chunk(x) for x in (query, key, value, beta, log_decay))
    decay = decay.cumsum(-2)
    position = torch.arange(CHUNK, device=key.device)
    products = decayed_products(torch.stack([key, query], dim=-3), key, decay, is_exact)
    lower = (beta * products[..., 0, :, :]).masked_fill(position[:, None] <= position, 0.0)
    reads = products[..., 1, :, :].masked_fill(position[:, None] < position, 0.0).to(dtype)
    inverse = unit_lower_inverse(lower.reshape(-1, CHUNK, CHUNK)).view(lower.shape).to(dtype)
    last = decay[..., -1:, :]
    corrected = inverse @ torch.cat([(key * (beta * decay.exp())).to(dtype), (value * beta).to(dtype)], dim=-1)
    from_key, from_value = corrected.split([key_size, value_size], dim=-1)
    summary = wide((key * (last - decay).exp()).to(dtype).transpose(-1, -2) @ corrected)
    flat = summary.reshape(chunks, batch * heads, key_size, key_size + value_size)
    states = chunk_states(last.exp().reshape(chunks, batch * heads, key_size), flat[..., :key_size], flat[..., key_size:])
    states = states.view(chunks, batch, heads, key_size, value_size).to(dtype)
    output = (query * decay.exp()).to(dtype) @ states + reads @ (from_value - from_key @ states)
    return output.permute(1, 0, 3, 2, 4).reshape(batch, chunks * CHUNK, heads, value_size)[:, :length]


def state_space_scan(x, step, log_decay, write, read):
    """Outputs [B, T, H, P] of Mamba-2's recurrence from a zero state, without the D term. x [B, T, H, P], step (the time step) and
    log_decay [B, T, H] FP32, write and read (B and C) [B, T, G, N]. Products run in x's type; decays and the sums of chunks'
    states in FP32."""
    batch, length, heads, head_size = x.shape
    groups, state_size = write.shape[2:]
    ratio, dtype = heads // groups, x.dtype
    x, step, log_decay, write, read = padded(x, step, log_decay, write, read)
    chunks = x.shape[1] // CHUNK

    def scalars(values):
        return values.reshape(batch, chunks, CHUNK, groups, ratio).permute(0, 3, 4, 1, 2)

    # batch, groups, heads per group, chunks, position in the chunk, channel
    x = x.reshape(batch, chunks, CHUNK, groups, ratio, head_size).permute(0, 3, 4, 1, 2, 5)
    write, read = (part.permute(0, 2, 1, 3).reshape(batch, groups, 1, chunks, CHUNK, state_size) for part in (write, read))
    step, decay = scalars(step), scalars(log_decay).cumsum(-1)
    position = torch.arange(CHUNK, device=x.device)
    between = (decay[..., None] - decay[..., None, :]).masked_fill(position[:, None] < position, -torch.inf).exp()
    mixing = (wide(read @ write.transpose(-1, -2)) * between * step[..., None, :]).to(dtype)
    last = decay[..., -1]
    written = (write * ((last[..., None] - decay).exp() * step)[..., None]).to(dtype).transpose(-1, -2) @ x
    # The state at the start of chunk c is a sum over the chunks before it.
    total = last.cumsum(-1)
    index = torch.arange(chunks, device=x.device)
    carried = ((total - last)[..., None] - total[..., None, :]).masked_fill(index[:, None] <= index, -torch.inf).exp()
    states = (carried @ wide(written).flatten(-2)).unflatten(-1, (state_size, head_size)).to(dtype)
    output = mixing @ x + (read * decay.exp()[..., None]).to(dtype) @ states
    return output.permute(0, 3, 4, 1, 2, 5).reshape(batch, chunks * CHUNK, heads, head_size)[:, :length]


# --- the recurrences themselves, token by token ------------------------------------------------------------------------------

def delta_recurrence(query, key, value, log_decay, beta):
    """The delta rule with log_decay [B, T, H, 1 or K]; query and key [B, T, H, K]."""
    state = value.new_zeros(*value.shape[:1], *value.shape[2:], key.shape[-1])
    outputs = []
    for token in range(key.shape[1]):
        state = state * log_decay[:, token, :, None].exp()
        error = beta[:, token, :, None] * (value[:, token] - (state @ key[:, token, :, :, None])[..., 0])
        state = state + error[..., None] * key[:, token, :, None]
        outputs.append((state @ query[:, token, :, :, None])[..., 0])
    return torch.stack(outputs, dim=1)


def state_space_recurrence(x, step, log_decay, write, read):
    state = x.new_zeros(*x.shape[:1], *x.shape[2:], write.shape[-1])
    ratio = x.shape[2] // write.shape[2]
    write, read = (part.repeat_interleave(ratio, dim=2) for part in (write, read))
    outputs = []
    for token in range(x.shape[1]):
        state = state * log_decay[:, token, :, None, None].exp()
        state = state + (step[:, token, :, None] * x[:, token])[..., None] * write[:, token, :, None]
        outputs.append((state @ read[:, token, :, :, None])[..., 0])
    return torch.stack(outputs, dim=1)


def scan_cases(device):
    """(name, chunked form, recurrence, inputs in FP64); decays from 1e-4 to `strongest` per token."""
    generator = torch.Generator().manual_seed(1)
    batch, length, heads, groups, size, value_size = 2, 150, 4, 2, 32, 48

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device)

    def log_decays(strongest, *shape):
        uniform = torch.rand(shape, generator=generator, dtype=torch.float64).to(device)
        return -torch.exp(torch.log(torch.tensor(1e-4)) + uniform * torch.log(torch.tensor(strongest * 1e4)))

    def delta_inputs(key_heads, *decay):
        query, key = (F.normalize(normal(batch, length, key_heads, size) + 0.5, dim=-1) for _ in range(2))
        return [query, key, normal(batch, length, heads, value_size), log_decays(*decay), normal(batch, length, heads).sigmoid()]

    def grouped(query, key, value, log_decay, beta):
        query, key = (x.repeat_interleave(heads // groups, dim=2) for x in (query, key))
        return delta_recurrence(query, key, value, log_decay[..., None], beta)

    yield "gated delta rule", gated_delta_rule, grouped, delta_inputs(groups, 2.0, batch, length, heads)
    channels = (batch, length, heads, size)
    yield ("Kimi delta rule, factored", lambda *inputs: kimi_delta_rule(*inputs, False), delta_recurrence,
           delta_inputs(heads, 3.5, *channels))
    yield "Kimi delta rule, exact", lambda *inputs: kimi_delta_rule(*inputs, True), delta_recurrence, delta_inputs(heads, 40.0, *channels)
    yield ("state space scan", state_space_scan, state_space_recurrence,
           [normal(batch, length, heads, size), normal(batch, length, heads).exp(), log_decays(3.0, batch, length, heads),
            normal(batch, length, groups, value_size), normal(batch, length, groups, value_size)])


def check_scans(device):
    """Compares every chunked form, values and gradients, with its recurrence in FP64: itself run in FP64, then with the products in
    BF16 and the rest in FP32, as in training (compiled on a GPU). Exits where one differs."""
    for name, chunked, recurrence, inputs in scan_cases(device):
        leaves = [x.detach().requires_grad_() for x in inputs]
        expected = recurrence(*leaves)
        weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(device)
        gradients = torch.autograd.grad((expected * weights).sum(), leaves)
        # log decays and beta or the time step stay FP32
        is_gate = [index in ((1, 2) if "state" in name else (3, 4)) for index in range(5)]
        for kind, tolerance in (("float64", 1e-10), ("bfloat16", 3e-2)):
            dtype = torch.float64 if kind == "float64" else torch.bfloat16
            given_inputs = [x.detach().to(torch.float32 if gate and kind != "float64" else dtype).requires_grad_()
                            for x, gate in zip(inputs, is_gate)]
            is_compiled = device == "cuda" and kind != "float64"
            given = (torch.compile(chunked, dynamic=False) if is_compiled else chunked)(*given_inputs)
            given_gradients = torch.autograd.grad((given.double() * weights).sum(), given_inputs)
            errors = [float((a.detach().double() - b.detach()).norm() / b.detach().norm()) for a, b in zip((given, *given_gradients), (expected, *gradients))]
            print(f"{name}, {kind}: relative error {errors[0]:.1e}, gradients " + " ".join(f"{error:.1e}" for error in errors[1:]))
            if not max(errors) <= tolerance:
                raise SystemExit(f"{name}, {kind}: differs from the recurrence by more than {tolerance}")
