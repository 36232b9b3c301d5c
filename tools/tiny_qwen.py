"""The layout of a Qwen3.5 text model: Gated DeltaNet, gated attention and one multi-token prediction layer."""

import dataclasses
import json
import math
import pathlib

import torch
import torch.nn.functional as F
from torch import nn

from tiny_layers import GatedMlp, LanguageModel, PlainWeight, RmsNorm, convolve, inverse_softplus, linear, normalised, unit
from tiny_scan import gated_delta_rule


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

    @classmethod
    def small(cls):
        return cls(vocab_size=512, hidden_size=96, intermediate_size=160, num_hidden_layers=4)


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
        self.dt_bias = nn.Parameter(inverse_softplus(rates))

    def forward(self, x, rotary):
        config = self.config
        batch, length, _ = x.shape
        heads, groups = config.linear_num_value_heads, config.linear_num_key_heads
        key_size, value_size = config.linear_key_head_dim, config.linear_value_head_dim
        projected = linear(x, self.in_proj_qkv.weight, self.in_proj_z.weight, self.in_proj_b.weight, self.in_proj_a.weight)
        mixed, gate, b, a = projected.split([sum(self.sizes), heads * value_size, heads, heads], dim=-1)
        query, key, value = convolve(mixed, self.conv1d.weight).split(self.sizes, dim=-1)
        query, key = (unit(part.reshape(batch, length, groups, key_size)) for part in (query, key))
        log_decay = -self.A_log.exp() * F.softplus(a.float() + self.dt_bias)
        output = gated_delta_rule((query * key_size ** -0.5).to(x.dtype), key.to(x.dtype),
                                  value.to(x.dtype).view(batch, length, heads, value_size), log_decay, b.float().sigmoid())
        output = normalised(output, config.rms_norm_eps) * self.norm.weight
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
        self.q_norm = RmsNorm(size, config.rms_norm_eps, is_zero_centred=True)
        self.k_norm = RmsNorm(size, config.rms_norm_eps, is_zero_centred=True)

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


# layer type: name of the mixer in the checkpoint, module called as mixer(x, rotary)
MIXERS = {"linear_attention": ("linear_attn", GatedDeltaNet), "full_attention": ("self_attn", GatedAttention)}


class Layer(nn.Module):
    def __init__(self, config, layer_type, depth):
        super().__init__()
        self.mixer_name, mixer = MIXERS[layer_type]
        self.add_module(self.mixer_name, mixer(config, depth))
        self.mlp = GatedMlp(config)
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps, is_zero_centred=True)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps, is_zero_centred=True)

    def forward(self, x, rotary):
        x = x + getattr(self, self.mixer_name)(self.input_layernorm(x), rotary)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed_tokens = PlainWeight(config.vocab_size, config.hidden_size)
        types = config.layer_types()
        self.layers = nn.ModuleList(Layer(config, layer_type, index / max(1, len(types) - 1)) for index, layer_type in enumerate(types))
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps, is_zero_centred=True)


class MultiTokenPrediction(nn.Module):
    """From the hidden state at position i and the embedding of token i + 1 to the hidden state that predicts token i + 2."""

    def __init__(self, config):
        super().__init__()
        self.pre_fc_norm_embedding = RmsNorm(config.hidden_size, config.rms_norm_eps, is_zero_centred=True)
        self.pre_fc_norm_hidden = RmsNorm(config.hidden_size, config.rms_norm_eps, is_zero_centred=True)
        self.fc = PlainWeight(config.hidden_size, 2 * config.hidden_size)
        self.layers = nn.ModuleList([Layer(config, "full_attention", 1.0)])
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps, is_zero_centred=True)

    def forward(self, next_embedding, hidden, rotary):
        x = linear(torch.cat([self.pre_fc_norm_embedding(next_embedding), self.pre_fc_norm_hidden(hidden)], dim=-1), self.fc.weight)
        return self.norm(self.layers[0](x, rotary))


class Model(LanguageModel):
    embedding_name = "model.embed_tokens.weight"

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        self.mtp = MultiTokenPrediction(config)
        self.shrink((2 * config.num_hidden_layers) ** -0.5)

    def embedding(self):
        return self.model.embed_tokens.weight

    def row_blocks(self, name, parameter):
        return self.model.layers[0].linear_attn.sizes if "in_proj_qkv" in name else super().row_blocks(name, parameter)

    def forward(self, tokens, dtype):
        embedded = F.embedding(tokens, self.embedding()).to(dtype)
        rotary = rotary_table(self.config, tokens.shape[1] - 1, tokens.device)
        x = embedded[:, :-1]
        for layer in self.model.layers:
            x = layer(x, rotary)
        hidden = self.model.norm(x)
        return hidden, self.mtp(embedded[:, 1:], hidden, rotary)
