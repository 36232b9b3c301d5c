"""The layout of a Kimi-Linear model: Kimi Delta Attention and multi-head latent attention without positions, dense MLPs."""

import dataclasses
import json
import math
import pathlib

import torch
import torch.nn.functional as F
from torch import nn

from tiny_layers import GatedMlp, LanguageModel, PlainWeight, RmsNorm, convolve, inverse_softplus, linear, normalised, unit
from tiny_scan import kimi_delta_rule


@dataclasses.dataclass
class Config:
    """Shapes of a model; field names are those of the config.json it is saved with, or of its `linear_attn_config` after
    `linear_`."""
    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 168
    num_hidden_layers: int = 8
    full_attention_interval: int = 4
    num_attention_heads: int = 6
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 16
    v_head_dim: int = 32
    linear_num_heads: int = 3
    linear_head_dim: int = 64
    linear_short_conv_kernel_size: int = 4
    model_max_length: int = 4096
    rms_norm_eps: float = 1e-6

    def is_attention(self, layer):
        return (layer + 1) % self.full_attention_interval == 0

    def to_json(self, separator_id):
        fields = dataclasses.asdict(self)
        del fields["full_attention_interval"]
        layers = range(self.num_hidden_layers)
        linear_attention = {"kda_layers": [layer + 1 for layer in layers if not self.is_attention(layer)],
                            "full_attn_layers": [layer + 1 for layer in layers if self.is_attention(layer)],
                            **{name: fields.pop("linear_" + name) for name in ("num_heads", "head_dim", "short_conv_kernel_size")}}
        # Every layer has a dense MLP: the first `first_k_dense_replace` layers are without experts.
        return {"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", **fields,
                "num_key_value_heads": self.num_attention_heads, "head_dim": self.qk_nope_head_dim + self.qk_rope_head_dim,
                "linear_attn_config": linear_attention, "q_lora_rank": None, "mla_use_nope": True, "hidden_act": "silu",
                "first_k_dense_replace": self.num_hidden_layers, "attention_bias": False, "tie_word_embeddings": True,
                "initializer_range": 0.02, "use_cache": True, "bos_token_id": None, "eos_token_id": separator_id,
                "pad_token_id": separator_id, "dtype": "bfloat16"}

    @classmethod
    def from_json(cls, path):
        saved = json.loads(pathlib.Path(path).read_text())
        saved |= {"linear_" + name: value for name, value in saved["linear_attn_config"].items()}
        saved["full_attention_interval"] = saved["linear_full_attn_layers"][0]
        config = cls(**{field.name: saved[field.name] for field in dataclasses.fields(cls)})
        if [layer + 1 for layer in range(config.num_hidden_layers) if config.is_attention(layer)] != saved["linear_full_attn_layers"]:
            raise SystemExit(f"full_attn_layers {saved['linear_full_attn_layers']}: not every n-th layer")
        return config

    @classmethod
    def small(cls):
        return cls(vocab_size=512, hidden_size=96, intermediate_size=160, num_hidden_layers=4)


class DeltaAttention(nn.Module):
    """Kimi Delta Attention. `depth` in 0..1 spreads the slow channels' decays over the layers."""

    def __init__(self, config, depth):
        super().__init__()
        self.config = config
        heads, size, hidden = config.linear_num_heads, config.linear_head_dim, config.hidden_size
        for name in ("q", "k", "v"):
            self.add_module(name + "_proj", PlainWeight(heads * size, hidden))
            self.add_module(name + "_conv1d", PlainWeight(heads * size, 1, config.linear_short_conv_kernel_size))
        self.f_a_proj = PlainWeight(size, hidden)
        self.f_b_proj = PlainWeight(heads * size, size)
        self.b_proj = PlainWeight(heads, hidden)
        self.g_a_proj = PlainWeight(size, hidden)
        self.g_b_proj = PlainWeight(heads * size, size)
        self.o_norm = PlainWeight(size, value=1.0)
        self.o_proj = PlainWeight(hidden, heads * size)
        # Base decay per token and channel: the first head begins at 1e-4 to 1e-3 by layer, the last ends at 1.
        rates = torch.logspace(math.log10(1e-4) + depth, 0.0, heads * size)
        self.A_log = nn.Parameter(torch.zeros(1, 1, heads, 1))
        self.dt_bias = nn.Parameter(inverse_softplus(rates))

    def forward(self, x):
        config = self.config
        batch, length, _ = x.shape
        heads, size = config.linear_num_heads, config.linear_head_dim
        inner = heads * size
        # Rows of zeros make the product's width a multiple of 8, as fast kernels ask for.
        spare = -heads % 8
        mixed, forget, gate, b, _ = linear(
            x, self.q_proj.weight, self.k_proj.weight, self.v_proj.weight, self.f_a_proj.weight, self.g_a_proj.weight,
            F.pad(self.b_proj.weight, (0, 0, 0, spare))).split([3 * inner, size, size, heads, spare], dim=-1)
        taps = torch.cat([self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight])
        query, key, value = convolve(mixed, taps).reshape(batch, length, 3, heads, size).unbind(2)
        forget = (linear(forget, self.f_b_proj.weight).float() + self.dt_bias).view(batch, length, heads, size)
        output = kimi_delta_rule((unit(query) * size ** -0.5).to(x.dtype), unit(key).to(x.dtype), value.to(x.dtype),
                                 -self.A_log.exp() * F.softplus(forget), b.float().sigmoid(), is_exact=x.dtype == torch.float32)
        output = normalised(output, config.rms_norm_eps) * self.o_norm.weight
        output = output * linear(gate, self.g_b_proj.weight).float().view(output.shape).sigmoid()
        return linear(output.to(x.dtype).reshape(batch, length, inner), self.o_proj.weight)


class LatentAttention(nn.Module):
    """Keys and values expanded from one latent per token; the part of a key that would carry its position is shared by all
    heads and used as it is."""

    def __init__(self, config, depth):
        super().__init__()
        self.config = config
        heads, hidden = config.num_attention_heads, config.hidden_size
        self.q_proj = PlainWeight(heads * (config.qk_nope_head_dim + config.qk_rope_head_dim), hidden)
        self.kv_a_proj_with_mqa = PlainWeight(config.kv_lora_rank + config.qk_rope_head_dim, hidden)
        self.kv_a_layernorm = RmsNorm(config.kv_lora_rank, config.rms_norm_eps)
        self.kv_b_proj = PlainWeight(heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank)
        self.o_proj = PlainWeight(hidden, heads * config.v_head_dim)

    def forward(self, x):
        config = self.config
        batch, length, _ = x.shape
        heads, size, value_size = config.num_attention_heads, config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
        query, latent, shared = linear(x, self.q_proj.weight, self.kv_a_proj_with_mqa.weight).split(
            [heads * size, config.kv_lora_rank, config.qk_rope_head_dim], dim=-1)
        expanded = linear(self.kv_a_layernorm(latent), self.kv_b_proj.weight).view(batch, length, heads, -1)
        key, value = expanded.split([config.qk_nope_head_dim, value_size], dim=-1)
        key = torch.cat([key, shared[:, :, None].expand(-1, -1, heads, -1)], dim=-1)
        # One width for all three: the fast attention kernels ask for it.
        width = max(size, value_size)
        query, key, value = (F.pad(part, (0, width - part.shape[-1])).transpose(1, 2)
                             for part in (query.reshape(batch, length, heads, size), key, value))
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=size ** -0.5)
        return linear(output[..., :value_size].transpose(1, 2).reshape(batch, length, -1), self.o_proj.weight)


class Layer(nn.Module):
    def __init__(self, config, mixer, depth):
        super().__init__()
        self.self_attn = mixer(config, depth)
        self.mlp = GatedMlp(config)
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed_tokens = PlainWeight(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Layer(config, LatentAttention if config.is_attention(layer) else DeltaAttention, layer / max(1, config.num_hidden_layers - 1))
            for layer in range(config.num_hidden_layers))
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)


class Model(LanguageModel):
    embedding_name = "model.embed_tokens.weight"

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        self.shrink((2 * config.num_hidden_layers) ** -0.5)

    def embedding(self):
        return self.model.embed_tokens.weight

    def row_blocks(self, name, parameter):
        if "kv_a_proj" in name:
            return [self.config.kv_lora_rank, self.config.qk_rope_head_dim]
        return super().row_blocks(name, parameter)

    def forward(self, tokens, dtype):
        x = F.embedding(tokens[:, :-1], self.embedding()).to(dtype)
        for layer in self.model.layers:
            x = layer(x)
        return self.model.norm(x), None
