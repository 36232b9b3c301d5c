#!/usr/bin/env python3
"""Trains the small hybrid checkpoints under models/: tokenizer, token stream, training, export to the Hugging Face layout,
evaluation (bits per byte and agreement of the multi-token prediction head) and a check against transformers."""

import argparse
import dataclasses
import datetime
import json
import lzma
import math
import os
import pathlib
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

SEPARATOR = "<|endoftext|>"
# The pattern of the Qwen2 and Qwen3 tokenizers.
SPLIT_PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
CHUNK = 64


@dataclasses.dataclass
class Config:
    """Shapes of a model; field names are those of the config.json it is saved with."""
    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 480
    num_hidden_layers: int = 8
    full_attention_interval: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    partial_rotary_factor: float = 0.25
    rope_theta: float = 10000.0
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 64
    linear_value_head_dim: int = 64
    linear_conv_kernel_dim: int = 4
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-6

    def layer_types(self):
        return ["full_attention" if (layer + 1) % self.full_attention_interval == 0 else "linear_attention"
                for layer in range(self.num_hidden_layers)]

    def to_json(self, separator_id):
        fields = dataclasses.asdict(self)
        rope = {"rope_type": "default", "rope_theta": fields.pop("rope_theta"),
                "partial_rotary_factor": fields["partial_rotary_factor"]}
        return {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", **fields,
                "layer_types": self.layer_types(), "rope_parameters": rope, "hidden_act": "silu", "attention_bias": False,
                "attention_dropout": 0.0, "attn_output_gate": True, "tie_word_embeddings": True, "mtp_num_hidden_layers": 1,
                "mtp_use_dedicated_embeddings": False, "mamba_ssm_dtype": "float32", "initializer_range": 0.02,
                "use_cache": True, "bos_token_id": None, "eos_token_id": separator_id, "pad_token_id": separator_id,
                "dtype": "bfloat16"}

    @classmethod
    def from_json(cls, path):
        saved = json.loads(pathlib.Path(path).read_text())
        saved |= {"rope_theta": saved["rope_parameters"]["rope_theta"],
                  "partial_rotary_factor": saved["rope_parameters"]["partial_rotary_factor"]}
        return cls(**{field.name: saved[field.name] for field in dataclasses.fields(cls) if field.name in saved})


# --- the chunked delta rule ---------------------------------------------------------------------------------------------

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
    if lower.is_cuda and triton is not None:
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
    decay [chunks, heads], erase [chunks, heads, K, K], write [chunks, heads, K, V], FP32."""
    states = write.new_empty(write.shape)
    states[0].zero_()
    for chunk in range(write.shape[0] - 1):
        torch.addcmul(write[chunk], states[chunk], decay[chunk][:, None, None], out=states[chunk + 1])
        states[chunk + 1].baddbmm_(erase[chunk], states[chunk], alpha=-1)
    return states


@torch.library.custom_op("train_tiny::chunk_states_gradient", mutates_args=())
def chunk_states_gradient(gradient: torch.Tensor, decay: torch.Tensor, erase: torch.Tensor) -> torch.Tensor:
    """For each chunk c the gradient of S[c+1] with everything after it counted in."""
    following = gradient.new_empty(gradient.shape)
    following[-1].zero_()
    for chunk in range(gradient.shape[0] - 1, 0, -1):
        torch.addcmul(gradient[chunk], following[chunk], decay[chunk][:, None, None], out=following[chunk - 1])
        following[chunk - 1].baddbmm_(erase[chunk].transpose(1, 2), following[chunk], alpha=-1)
    return following


def chunk_states_backward(context, gradient):
    decay, erase, states = context.saved_tensors
    following = chunk_states_gradient(gradient.contiguous(), decay, erase)
    return (following * states).sum((-1, -2)), -(following @ states.transpose(-1, -2)), following


chunk_states.register_fake(lambda decay, erase, write: write.new_empty(write.shape))
chunk_states_gradient.register_fake(lambda gradient, decay, erase: gradient.new_empty(gradient.shape))
chunk_states.register_autograd(chunk_states_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:2], output))


def gated_delta_rule(query, key, value, log_decay, beta):
    """Outputs [B, T, H, V] of the gated delta rule from a zero state. query, key [B, T, G, K] normalised, value [B, T, H, V],
    log_decay, beta [B, T, H] FP32. Products run in value's type, decays, the triangular solve and the states in FP32."""
    batch, length, groups, key_size = key.shape
    heads, value_size = value.shape[2:]
    ratio, dtype = heads // groups, value.dtype
    padding = -length % CHUNK
    if padding:
        query, key, value = (F.pad(x, (0, 0, 0, 0, 0, padding)) for x in (query, key, value))
        log_decay, beta = (F.pad(x, (0, 0, 0, padding)) for x in (log_decay, beta))
    chunks = (length + padding) // CHUNK

    def vectors(x, per_group):
        return x.reshape(batch, chunks, CHUNK, groups, per_group, x.shape[-1]).permute(1, 0, 3, 4, 2, 5)

    def scalars(x):
        return x.reshape(batch, chunks, CHUNK, groups, ratio).permute(1, 0, 3, 4, 2)

    # chunks, batch, groups, heads per group, position in the chunk, channel
    query, key, value = vectors(query, 1), vectors(key, 1), vectors(value, ratio)
    beta, decay = scalars(beta)[..., None], scalars(log_decay).cumsum(-1)[..., None]
    position = torch.arange(CHUNK, device=key.device)
    between = (decay - decay.transpose(-1, -2)).masked_fill(position[:, None] < position, -torch.inf).exp()
    key_products = (key @ key.transpose(-1, -2)).float()
    lower = (beta * key_products * between).masked_fill(position[:, None] <= position, 0.0)
    inverse = unit_lower_inverse(lower.reshape(-1, CHUNK, CHUNK)).view(lower.shape).to(dtype)
    reads = ((query @ key.transpose(-1, -2)).float() * between).to(dtype)
    last = decay[..., -1:, :]
    corrected = inverse @ torch.cat([(key * (beta * decay.exp())).to(dtype), (value * beta).to(dtype)], dim=-1)
    from_key, from_value = corrected.split([key_size, value_size], dim=-1)
    summary = ((key * (last - decay).exp()).to(dtype).transpose(-1, -2) @ corrected).float()
    flat = summary.reshape(chunks, batch * heads, key_size, key_size + value_size)
    states = chunk_states(last.exp().reshape(chunks, batch * heads), flat[..., :key_size], flat[..., key_size:])
    states = states.view(chunks, batch, groups, ratio, key_size, value_size).to(dtype)
    output = (query * decay.exp()).to(dtype) @ states + reads @ (from_value - from_key @ states)
    return output.permute(1, 0, 4, 2, 3, 5).reshape(batch, length + padding, heads, value_size)[:, :length]


# --- the model ------------------------------------------------------------------------------------------------------------

def linear(x, *weights):
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    return F.linear(x, weight.to(x.dtype))


class RmsNorm(nn.Module):
    """Zero-centred weight, as everywhere in this model but in the gated norm."""

    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(size)), eps

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * (1.0 + self.weight)).to(x.dtype)


class PlainWeight(nn.Module):
    def __init__(self, *shape, value=None):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape) * shape[-1] ** -0.5 if value is None else torch.full(shape, value))


class GatedDeltaNet(nn.Module):
    """Token mixer `linear_attn`. `depth` in 0..1 spreads the slow heads' decays over the layers."""

    def __init__(self, config, depth):
        super().__init__()
        self.config = config
        key_size = config.linear_num_key_heads * config.linear_key_head_dim
        value_size = config.linear_num_value_heads * config.linear_value_head_dim
        heads, hidden = config.linear_num_value_heads, config.hidden_size
        self.sizes = [key_size, key_size, value_size]
        self.in_proj_qkv = PlainWeight(sum(self.sizes), hidden)
        self.in_proj_z = PlainWeight(value_size, hidden)
        self.in_proj_b = PlainWeight(heads, hidden)
        self.in_proj_a = PlainWeight(heads, hidden)
        self.conv1d = PlainWeight(sum(self.sizes), 1, config.linear_conv_kernel_dim)
        self.norm = PlainWeight(config.linear_value_head_dim, value=1.0)
        self.out_proj = PlainWeight(hidden, value_size)
        # Base decay per token: the first head 1e-4 to 1e-3 by layer, the others up to 1, so that long memories exist to be kept.
        rates = torch.logspace(math.log10(1e-4) + depth, 0.0, heads)
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.dt_bias = nn.Parameter(torch.log(torch.expm1(rates)))

    def forward(self, x, rotary):
        config = self.config
        batch, length, _ = x.shape
        heads, groups = config.linear_num_value_heads, config.linear_num_key_heads
        key_size, value_size = config.linear_key_head_dim, config.linear_value_head_dim
        projected = linear(x, self.in_proj_qkv.weight, self.in_proj_z.weight, self.in_proj_b.weight, self.in_proj_a.weight)
        mixed, gate, b, a = projected.split([sum(self.sizes), heads * value_size, heads, heads], dim=-1)
        width = config.linear_conv_kernel_dim
        padded = F.pad(mixed, (0, 0, width - 1, 0)).float()
        taps = self.conv1d.weight[:, 0].to(x.dtype).float()
        mixed = F.silu(sum(padded[:, tap:tap + length] * taps[:, tap] for tap in range(width)))
        query, key, value = mixed.split(self.sizes, dim=-1)
        query, key = (part.reshape(batch, length, groups, key_size) for part in (query, key))
        query = query * torch.rsqrt(query.square().sum(-1, keepdim=True) + 1e-6) * key_size ** -0.5
        key = key * torch.rsqrt(key.square().sum(-1, keepdim=True) + 1e-6)
        log_decay = -self.A_log.exp() * F.softplus(a.float() + self.dt_bias)
        output = gated_delta_rule(query.to(x.dtype), key.to(x.dtype), value.to(x.dtype).view(batch, length, heads, value_size),
                                  log_decay, b.float().sigmoid()).float()
        output = output * torch.rsqrt(output.square().mean(-1, keepdim=True) + config.rms_norm_eps) * self.norm.weight
        output = output * F.silu(gate.float().view(output.shape))
        return linear(output.to(x.dtype).view(batch, length, -1), self.out_proj.weight)


class GatedAttention(nn.Module):
    """Token mixer `self_attn`: normalised queries and keys, partial rotary positions, an output gate per channel."""

    def __init__(self, config, depth):
        super().__init__()
        self.config = config
        hidden, size = config.hidden_size, config.head_dim
        self.q_proj = PlainWeight(config.num_attention_heads * size * 2, hidden)
        self.k_proj = PlainWeight(config.num_key_value_heads * size, hidden)
        self.v_proj = PlainWeight(config.num_key_value_heads * size, hidden)
        self.o_proj = PlainWeight(hidden, config.num_attention_heads * size)
        self.q_norm = RmsNorm(size, config.rms_norm_eps)
        self.k_norm = RmsNorm(size, config.rms_norm_eps)

    def forward(self, x, rotary):
        config = self.config
        batch, length, _ = x.shape
        heads, groups, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        query, key, value = linear(x, self.q_proj.weight, self.k_proj.weight, self.v_proj.weight).split(
            [heads * size * 2, groups * size, groups * size], dim=-1)
        query, gate = query.reshape(batch, length, heads, 2 * size).chunk(2, dim=-1)
        query = rotate(self.q_norm(query), rotary).transpose(1, 2)
        key = rotate(self.k_norm(key.reshape(batch, length, groups, size)), rotary).transpose(1, 2)
        value = value.reshape(batch, length, groups, size).transpose(1, 2)
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2)
        return linear((output * gate.sigmoid()).reshape(batch, length, -1), self.o_proj.weight)


def rotary_table(config, length, device):
    size = int(config.head_dim * config.partial_rotary_factor)
    frequencies = 1.0 / config.rope_theta ** (torch.arange(0, size, 2, device=device, dtype=torch.float32) / size)
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * frequencies
    return angles.cos()[:, None], angles.sin()[:, None]


def rotate(x, rotary):
    cos, sin = rotary
    half = cos.shape[-1]
    first, second, rest = x[..., :half].float(), x[..., half:2 * half].float(), x[..., 2 * half:]
    return torch.cat([(first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype), rest], dim=-1)


class Mlp(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = PlainWeight(config.intermediate_size, config.hidden_size)
        self.up_proj = PlainWeight(config.intermediate_size, config.hidden_size)
        self.down_proj = PlainWeight(config.hidden_size, config.intermediate_size)

    def forward(self, x):
        gate, up = linear(x, self.gate_proj.weight, self.up_proj.weight).chunk(2, dim=-1)
        return linear(F.silu(gate) * up, self.down_proj.weight)


# layer type: name of the mixer in the checkpoint, module called as mixer(x, rotary)
MIXERS = {"linear_attention": ("linear_attn", GatedDeltaNet), "full_attention": ("self_attn", GatedAttention)}


class Layer(nn.Module):
    def __init__(self, config, layer_type, depth):
        super().__init__()
        self.mixer_name, mixer = MIXERS[layer_type]
        self.add_module(self.mixer_name, mixer(config, depth))
        self.mlp = Mlp(config)
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x, rotary):
        x = x + getattr(self, self.mixer_name)(self.input_layernorm(x), rotary)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed_tokens = PlainWeight(config.vocab_size, config.hidden_size)
        types = config.layer_types()
        self.layers = nn.ModuleList(Layer(config, layer_type, index / max(1, len(types) - 1)) for index, layer_type in enumerate(types))
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)


class MultiTokenPrediction(nn.Module):
    """From the hidden state at position i and the embedding of token i + 1 to the hidden state that predicts token i + 2."""

    def __init__(self, config):
        super().__init__()
        self.pre_fc_norm_embedding = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.pre_fc_norm_hidden = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.fc = PlainWeight(config.hidden_size, 2 * config.hidden_size)
        self.layers = nn.ModuleList([Layer(config, "full_attention", 1.0)])
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, next_embedding, hidden, rotary):
        x = linear(torch.cat([self.pre_fc_norm_embedding(next_embedding), self.pre_fc_norm_hidden(hidden)], dim=-1), self.fc.weight)
        return self.norm(self.layers[0](x, rotary))


class Model(nn.Module):
    """Parameter names are the tensor names of the checkpoint. Activations have the type given to forward."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        self.mtp = MultiTokenPrediction(config)
        with torch.no_grad():
            self.model.embed_tokens.weight.mul_(0.5)
            # Branches that write to the residual stream start small.
            for name, parameter in self.named_parameters():
                if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
                    parameter.mul_((2 * config.num_hidden_layers) ** -0.5)

    def forward(self, tokens, dtype):
        """tokens [B, T + 1]: hidden states [B, T, hidden] of the main head (position i predicts token i + 1) and of the
        multi-token head (position i predicts token i + 2)."""
        length = tokens.shape[1] - 1
        embedded = F.embedding(tokens, self.model.embed_tokens.weight).to(dtype)
        rotary = rotary_table(self.config, length, tokens.device)
        x = embedded[:, :-1]
        for layer in self.model.layers:
            x = layer(x, rotary)
        hidden = self.model.norm(x)
        return hidden, self.mtp(embedded[:, 1:], hidden, rotary)

    def logits(self, hidden):
        return linear(hidden, self.model.embed_tokens.weight)

    def losses(self, window):
        """window [B, T + 2] -> mean cross-entropies (nats per token) of both heads. The multi-token head learns half from the
        text and half from what the main head will say of the same token, which is what a draft is judged by."""
        hidden, ahead = self(window[:, :-1], torch.bfloat16 if window.is_cuda else torch.float32)
        main_logits, ahead_logits = self.logits(hidden).float(), self.logits(ahead).float()
        main = F.cross_entropy(main_logits.flatten(0, 1), window[:, 1:-1].flatten())
        text = F.cross_entropy(ahead_logits.flatten(0, 1), window[:, 2:].flatten())
        likely = main_logits[:, 1:].detach().softmax(-1)
        draft = -(likely * ahead_logits[:, :-1].log_softmax(-1)).sum(-1).mean()
        return main, 0.5 * (text + draft)


# --- optimisers, written so that a whole step can be captured in a CUDA graph --------------------------------------------------

class Adam:
    def __init__(self, parameters, rate_scale):
        self.parameters, self.rate_scale = parameters, rate_scale
        self.first = [torch.zeros_like(p) for p in parameters]
        self.second = [torch.zeros_like(p) for p in parameters]

    def step(self, gradients, rate, count):
        rate = rate * self.rate_scale
        torch._foreach_lerp_(self.first, gradients, 0.1)
        torch._foreach_mul_(self.second, 0.95)
        torch._foreach_addcmul_(self.second, gradients, gradients, 0.05)
        scale = torch._foreach_sqrt(self.second)
        torch._foreach_mul_(scale, (1 - 0.95 ** count).rsqrt())
        torch._foreach_add_(scale, 1e-9)
        update = torch._foreach_div(self.first, scale)
        torch._foreach_mul_(update, -rate / (1 - 0.9 ** count))
        torch._foreach_add_(self.parameters, update)


class Muon:
    """Momentum whose update is orthogonalised by Newton-Schulz iterations, scaled to Adam's usual step size; matrices of one
    shape run as one batch."""

    def __init__(self, blocks, decay):
        """blocks: (index into the gradients, first row, last row, parameter)."""
        self.decay, self.groups = decay, {}
        for index, first, last, parameter in blocks:
            view = parameter.detach()[first:last]
            self.groups.setdefault(tuple(view.shape), []).append((index, first, last, view))
        device = blocks[0][3].device
        self.momenta = {shape: torch.zeros(len(members), *shape, device=device) for shape, members in self.groups.items()}

    def step(self, gradients, rate):
        for shape, members in self.groups.items():
            momentum = self.momenta[shape]
            gradient = torch.stack([gradients[index][first:last] for index, first, last, _ in members])
            momentum.lerp_(gradient, 0.05)
            x = gradient.lerp(momentum, 0.95).bfloat16()
            tall = shape[0] > shape[1]
            x = x.transpose(1, 2) if tall else x
            x = x / (x.float().square().sum((1, 2), keepdim=True).sqrt() * 1.01 + 1e-12).bfloat16()
            for a, b, c in ((4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037),
                            (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012)):
                gram = x @ x.transpose(1, 2)
                x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
            x = (x.transpose(1, 2) if tall else x).float() * (-0.2 * max(shape) ** 0.5) * rate
            views = [view for *_, view in members]
            torch._foreach_mul_(views, 1 - rate * self.decay)
            torch._foreach_add_(views, list(x.unbind(0)))


class Optimizer:
    """Muon for the matrices, Adam for the embedding and everything small. Rates are multiples of `rate`, set before a step."""

    def __init__(self, model, decay, embedding_rate, vector_rate):
        self.parameters = [parameter for _, parameter in model.named_parameters()]
        device = self.parameters[0].device
        self.rate, self.count = torch.zeros((), device=device), torch.zeros((), device=device)
        blocks, vectors, embedding = [], [], []
        for index, (name, parameter) in enumerate(model.named_parameters()):
            if name == "model.embed_tokens.weight":
                embedding.append(index)
            elif parameter.ndim != 2 or parameter.shape[0] < 16:
                vectors.append(index)
            else:
                sizes = model.model.layers[0].linear_attn.sizes if "in_proj_qkv" in name else [parameter.shape[0]]
                ends = np.cumsum(sizes).tolist()
                blocks += [(index, end - size, end, parameter) for size, end in zip(sizes, ends)]
        self.adams = [(indices, Adam([self.parameters[i].detach() for i in indices], scale))
                      for indices, scale in ((embedding, embedding_rate), (vectors, vector_rate))]
        self.muon = Muon(blocks, decay)

    @torch.no_grad()
    def step(self, gradients):
        self.count += 1
        for indices, adam in self.adams:
            adam.step([gradients[i] for i in indices], self.rate, self.count)
        self.muon.step(gradients, self.rate)


# --- training -------------------------------------------------------------------------------------------------------------

class Windows:
    """Start offsets of training windows: every pass over the stream is cut at a new offset and visited in a new order."""

    def __init__(self, tokens, length, batch, seed):
        self.tokens, self.length, self.batch = tokens, length, batch
        self.generator = torch.Generator().manual_seed(seed)
        self.queue = torch.zeros(0, dtype=torch.int64)

    def next_batch(self):
        while len(self.queue) < self.batch:
            offset = int(torch.randint(self.length, (), generator=self.generator))
            starts = torch.arange(offset, self.tokens - self.length - 2, self.length)
            self.queue = torch.cat([self.queue, starts[torch.randperm(len(starts), generator=self.generator)]])
        starts, self.queue = self.queue[:self.batch], self.queue[self.batch:]
        return starts


def captured_step(model, optimizer, tokens, batch, length, ahead_weight):
    """A function of window starts that runs one training step, captured in one CUDA graph where there is a GPU."""
    device = tokens.device
    starts = torch.zeros(batch, dtype=torch.int64, device=device)
    reach = torch.arange(length + 2, device=device)
    loss_sums = torch.zeros(2, device=device)
    losses = torch.compile(model.losses, dynamic=False) if device.type == "cuda" else model.losses

    def step():
        main, ahead = losses(tokens[starts[:, None] + reach].long())
        optimizer.step(torch.autograd.grad(main + ahead_weight * ahead, optimizer.parameters))
        loss_sums.add_(torch.stack([main.detach(), ahead.detach()]))

    if device.type == "cuda":
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        loss_sums.zero_()

    def run(new_starts):
        starts.copy_(new_starts, non_blocking=True)
        if device.type == "cuda":
            graph.replay()
        else:
            step()
    return run, loss_sums


def train(arguments):
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = Config(**{f.name: getattr(arguments, f.name) for f in dataclasses.fields(Config)})
    model = Model(config).to(device)
    arguments.output.mkdir(parents=True, exist_ok=True)
    tokens = torch.from_numpy(np.fromfile(arguments.tokens, dtype=np.uint16).astype(np.int32)).to(device)
    documents = read_heldout(arguments.heldout, arguments.tokenizer) if arguments.heldout else None
    optimizer = Optimizer(model, arguments.weight_decay, arguments.embedding_rate, arguments.vector_rate)
    if arguments.initial:
        load_weights(model, arguments.initial)
    began = time.time()
    step, loss_sums = captured_step(model, optimizer, tokens, arguments.batch, arguments.length, arguments.mtp_weight)
    windows = Windows(len(tokens), arguments.length, arguments.batch, arguments.seed)
    count = sum(p.numel() for p in model.parameters())
    print(f"# {datetime.date.today()} {torch.cuda.get_device_name() if device.type == 'cuda' else 'CPU'} torch {torch.__version__} "
          f"parameters {count} tokens {len(tokens)} prepared in {time.time() - began:.0f} s")
    print("# " + " ".join(f"{name}={value}" for name, value in sorted(vars(arguments).items())
                          if name not in ("run", "command", "output", "tokens", "heldout", "tokenizer")))
    per_step = arguments.batch * arguments.length
    total, index, started, saved = arguments.steps, 0, time.time(), time.time()
    if not total:
        # The schedule's length is fixed once the first real steps are timed.
        total = 10 ** 9
    while index < total:
        rate = arguments.rate * min(1.0, (index + 1) / arguments.warmup) * (1 - index / total)
        optimizer.rate.fill_(rate)
        step(windows.next_batch())
        index += 1
        if index == 200 and total == 10 ** 9:
            torch.cuda.synchronize() if device.type == "cuda" else None
            each = (time.time() - started) / index
            total = int(arguments.seconds / each)
            print(f"# {each * 1e3:.1f} ms a step, {per_step / each / 1e6:.3f} M tokens/s, {total} steps, {total * per_step / 1e6:.0f} M tokens")
        if index % arguments.log_every == 0:
            main, ahead = (loss_sums / arguments.log_every).tolist()
            loss_sums.zero_()
            print(f"step {index} tokens {index * per_step / 1e6:.0f}M seconds {time.time() - started:.0f} rate {rate:.5f} "
                  f"loss {main:.4f} mtp {ahead:.4f}")
        if index == total or time.time() - saved > arguments.save_every:
            export(model, config, arguments.output, arguments.tokenizer)
            if documents:
                figures = evaluate(arguments.output, documents, arguments.length)
                print(f"heldout step {index} bits_per_byte {figures['bits_per_byte']:.4f} mtp_agreement {figures['mtp_agreement']:.4f}")
            saved = time.time()
    seconds = time.time() - started
    print(f"# done: {index} steps, {index * per_step / 1e6:.1f} M tokens, {seconds:.0f} s, {index * per_step / seconds / 1e6:.3f} M tokens/s")


# --- the checkpoint ---------------------------------------------------------------------------------------------------------

def export(model, config, folder, tokenizer):
    """Writes model.safetensors (matrices BF16, gates' and norms' vectors FP32) and config.json, each replaced at once."""
    from safetensors.torch import save_file
    tensors = {}
    for name, parameter in model.state_dict().items():
        is_vector = parameter.ndim == 1
        tensors[name] = parameter.detach().to("cpu", torch.float32 if is_vector else torch.bfloat16).contiguous()
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors.new", metadata={"format": "pt"})
    os.replace(folder / "model.safetensors.new", folder / "model.safetensors")
    separator_id = read_tokenizer(tokenizer).token_to_id(SEPARATOR) if tokenizer else 0
    (folder / "config.json").write_text(json.dumps(config.to_json(separator_id), indent=2) + "\n")


def load_weights(model, folder):
    from safetensors.torch import load_file
    model.load_state_dict(load_file(pathlib.Path(folder) / "model.safetensors"))


def read_tokenizer(path):
    import tokenizers
    return tokenizers.Tokenizer.from_file(str(path))


def read_heldout(path, tokenizer):
    """[(package, bytes, token ids)] of heldout.jsonl or heldout.txt. A document starts after a separator, which is given and not
    predicted."""
    tokenizer = read_tokenizer(tokenizer)
    separator_id = tokenizer.token_to_id(SEPARATOR)
    if path.suffix == ".txt":
        rows = [{"package": path.name, "text": text} for text in path.read_text().split(SEPARATOR)[:-1]]
    else:
        rows = [json.loads(line) for line in open(path)]
    return [(row["package"], row["text"].encode(), [separator_id] + tokenizer.encode(row["text"]).ids) for row in rows]


@torch.no_grad()
def evaluate(folder, documents, window):
    """Bits per byte and agreement of the multi-token head's first choice with the main head's for the same token, with the
    saved weights in FP32. A document longer than the window is read in windows that overlap by half; each token is scored once."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    model = Model(Config.from_json(pathlib.Path(folder) / "config.json"))
    load_weights(model, folder)
    model.to(device)
    pieces = []
    for package, _, ids in documents:
        for start in range(0, len(ids) - 1, window // 2):
            first_scored = 0 if start == 0 else window // 2
            pieces.append((package, ids[start:start + window + 1], first_scored))
            if start + window + 1 >= len(ids):
                break
    pieces.sort(key=lambda piece: len(piece[1]))
    bits, agreed, compared = {}, 0, 0
    while pieces:
        longest = len(pieces[-1][1])
        batch = [pieces.pop() for _ in range(min(len(pieces), max(1, 8 * 4096 // longest)))]
        tokens = torch.zeros(len(batch), longest, dtype=torch.int64)
        scored = torch.zeros(len(batch), longest - 1, dtype=torch.bool)
        for row, (_, ids, first_scored) in enumerate(batch):
            tokens[row, :len(ids)] = torch.tensor(ids)
            scored[row, first_scored:len(ids) - 1] = True
        tokens, scored = tokens.to(device), scored.to(device)
        hidden, ahead = model(tokens, torch.float32)
        logits = model.logits(hidden)
        nats = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(scored.shape)
        per_row = ((nats * scored).double().sum(1) / math.log(2)).tolist()
        for (package, *_), value in zip(batch, per_row):
            bits[package] = bits.get(package, 0.0) + value
        same = model.logits(ahead[:, :-1]).argmax(-1) == logits[:, 1:].argmax(-1)
        agreed += int((same & scored[:, 1:]).sum())
        compared += int(scored[:, 1:].sum())
    torch.set_float32_matmul_precision(precision)
    sizes = {}
    for package, data, _ in documents:
        sizes[package] = sizes.get(package, 0) + len(data)
    return {"bits_per_byte": sum(bits.values()) / sum(sizes.values()), "mtp_agreement": agreed / compared,
            "tokens": sum(len(ids) - 1 for *_, ids in documents), "bytes": sum(sizes.values()),
            "by_package": {package: {"bytes": sizes[package], "bits_per_byte": bits[package] / sizes[package]} for package in sizes}}


def evaluate_command(arguments):
    documents = read_heldout(arguments.heldout, arguments.tokenizer)
    figures = evaluate(arguments.model, documents, arguments.length)

    def xz_bits(data):
        return 8 * len(lzma.compress(data, preset=9)) / len(data)
    for package, row in figures["by_package"].items():
        row["xz_9_bits_per_byte"] = xz_bits(b"".join(data for name, data, _ in documents if name == package))
    figures["xz_9_bits_per_byte"] = xz_bits(b"".join(data for _, data, _ in documents))
    text = json.dumps(figures, indent=1)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n")


def tokenizer_command(arguments):
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(tokenizers.Regex(SPLIT_PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=arguments.vocabulary - 1, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
                                  show_progress=False)
    tokenizer.train_from_iterator(arguments.text.read_text().split(SEPARATOR), trainer)
    # Added last, so that merges and their tokens have the ids of their ranks.
    tokenizer.add_special_tokens([tokenizers.AddedToken(SEPARATOR, special=True, normalized=False)])
    arguments.output.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(arguments.output / "tokenizer.json"))
    separator_id = tokenizer.token_to_id(SEPARATOR)
    (arguments.output / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "add_prefix_space": False, "clean_up_tokenization_spaces": False,
        "bos_token": None, "eos_token": SEPARATOR, "pad_token": SEPARATOR, "unk_token": None,
        "model_max_length": arguments.length,
        "added_tokens_decoder": {str(separator_id): {"content": SEPARATOR, "lstrip": False, "normalized": False, "rstrip": False,
                                                     "single_word": False, "special": True}}}, indent=2) + "\n")
    (arguments.output / "generation_config.json").write_text(json.dumps({
        "eos_token_id": separator_id, "pad_token_id": separator_id, "do_sample": True, "temperature": 0.8, "top_p": 0.95}, indent=2) + "\n")


def tokens_command(arguments):
    tokenizer = read_tokenizer(arguments.tokenizer)
    separator_id = tokenizer.token_to_id(SEPARATOR)
    documents = arguments.text.read_text().split(SEPARATOR)[:-1]
    ids = [np.array([separator_id], dtype=np.uint16)]
    for first in range(0, len(documents), 256):
        for encoded in tokenizer.encode_batch_fast(documents[first:first + 256]):
            ids.append(np.array(encoded.ids + [separator_id], dtype=np.uint16))
    ids = np.concatenate(ids)
    ids.tofile(arguments.output)
    print(f"{len(ids)} tokens, {sum(map(len, documents)) / len(ids):.3f} bytes a token")


def check_command(arguments):
    """Saves a model (random, or the one given), loads it with transformers and compares logits in FP32."""
    import tempfile
    from transformers import Qwen3_5ForCausalLM
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.model:
            folder = arguments.model
        else:
            config = Config(vocab_size=512, hidden_size=96, intermediate_size=160, num_hidden_layers=4)
            model = Model(config)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.ndim == 1:
                        parameter.add_(0.2 * torch.randn_like(parameter))
            export(model, config, scratch, None)
            folder = scratch
        ours = Model(Config.from_json(pathlib.Path(folder) / "config.json"))
        load_weights(ours, folder)
        theirs, report = Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        tokens = torch.randint(ours.config.vocab_size, (2, 301))
        with torch.no_grad():
            expected = theirs(tokens[:, :-1]).logits
            given = ours.logits(ours(tokens, torch.float32)[0])
        error = float((given - expected).norm() / expected.norm())
        print(f"relative error {error:.2e}; missing {list(report['missing_keys'])}, unexpected {list(report['unexpected_keys'])}")
        if not error <= 1e-4:
            raise SystemExit("logits differ from transformers'")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name, run, summary, *paths):
        own = commands.add_parser(name, help=summary, description=summary)
        own.set_defaults(run=run)
        for path in paths:
            own.add_argument(f"--{path}", type=pathlib.Path, required=True)
        return own

    own = command("tokenizer", tokenizer_command, "train the byte-level BPE tokenizer and write its files", "text", "output")
    own.add_argument("--vocabulary", type=int, default=4096)
    own.add_argument("--length", type=int, default=4096)
    command("tokens", tokens_command, "turn the training text into a file of 16-bit token ids", "text", "tokenizer", "output")
    own = command("train", train, "train, evaluating and exporting into --output as it goes", "tokens", "tokenizer", "output")
    own.add_argument("--heldout", type=pathlib.Path)
    own.add_argument("--initial", type=pathlib.Path, help="folder of a checkpoint to start from")
    own.add_argument("--seconds", type=float, default=1100, help="length of the schedule, turned into steps after the first 200")
    own.add_argument("--steps", type=int, default=0, help="length of the schedule in steps, instead of --seconds")
    own.add_argument("--batch", type=int, default=32)
    own.add_argument("--length", type=int, default=4096)
    own.add_argument("--rate", type=float, default=8e-3)
    own.add_argument("--embedding-rate", type=float, default=0.6, help="times --rate")
    own.add_argument("--vector-rate", type=float, default=0.5, help="times --rate")
    own.add_argument("--weight-decay", type=float, default=0.1)
    own.add_argument("--warmup", type=int, default=200)
    own.add_argument("--mtp-weight", type=float, default=0.3)
    own.add_argument("--seed", type=int, default=1)
    own.add_argument("--log-every", type=int, default=200)
    own.add_argument("--save-every", type=float, default=120, help="seconds")
    for field in dataclasses.fields(Config):
        own.add_argument("--" + field.name.replace("_", "-"), type=field.type, default=field.default)
    own = command("eval", evaluate_command, "bits per byte by package beside xz -9, and agreement of the two heads",
                  "model", "tokenizer", "heldout")
    own.add_argument("--length", type=int, default=4096, help="window")
    own.add_argument("--output", type=pathlib.Path, help="file for the figures")
    own = command("check", check_command, "compare with the Qwen3.5 text model of transformers")
    own.add_argument("--model", type=pathlib.Path, help="checkpoint to compare; a small random one when left out")
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
