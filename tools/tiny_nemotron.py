"""The layout of a Nemotron-H model: Mamba-2, attention without positions and squared-ReLU MLPs, one mixer a layer, and multi-token
prediction layers under `mtp`."""

import dataclasses
import json
import math
import pathlib

import torch
import torch.nn.functional as F
from torch import nn

from tiny_layers import LanguageModel, PlainWeight, RmsNorm, convolve, inverse_softplus, linear, normalised
from tiny_scan import state_space_scan


@dataclasses.dataclass
class Config:
    """Shapes of a model; field names are those of the config.json it is saved with. In a pattern M is Mamba-2, * attention, - MLP."""
    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 304
    hybrid_override_pattern: str = "MM-M*-MM-M*-"
    mtp_hybrid_override_pattern: str = "*-"
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 32
    mamba_num_heads: int = 8
    mamba_head_dim: int = 32
    n_groups: int = 2
    ssm_state_size: int = 64
    conv_kernel: int = 4
    max_position_embeddings: int = 4096
    layer_norm_epsilon: float = 1e-5

    def to_json(self, separator_id):
        # time_step_limit is the clamp, so wide that it never acts. time_step_min serves initialisation, but transformers clamps
        # with it: 0 makes the two agree.
        return {"architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", **dataclasses.asdict(self),
                "num_hidden_layers": len(self.hybrid_override_pattern), "num_nextn_predict_layers": 1,
                "time_step_limit": [0.0, 1e9], "time_step_min": 0.0, "time_step_max": 1.0, "time_step_floor": 0.0,
                "chunk_size": 128, "use_conv_bias": True, "mamba_hidden_act": "silu", "mamba_proj_bias": False,
                "mamba_ssm_cache_dtype": "float32", "mlp_hidden_act": "relu2", "mlp_bias": False, "use_bias": False,
                "attention_bias": False, "attention_dropout": 0.0, "hidden_dropout": 0.0, "residual_in_fp32": False,
                "tie_word_embeddings": True, "initializer_range": 0.02, "rescale_prenorm_residual": True, "use_cache": True,
                "bos_token_id": None, "eos_token_id": separator_id, "pad_token_id": separator_id, "dtype": "bfloat16"}

    @classmethod
    def from_json(cls, path):
        saved = json.loads(pathlib.Path(path).read_text())
        return cls(**{field.name: saved[field.name] for field in dataclasses.fields(cls)})

    @classmethod
    def small(cls):
        return cls(vocab_size=512, hidden_size=96, intermediate_size=160, hybrid_override_pattern="M-M*-")


class Mamba2(nn.Module):
    """Mixer M. `depth` in 0..1 spreads the slow heads' decays over the layers."""

    def __init__(self, config, depth):
        super().__init__()
        self.config = config
        heads, hidden = config.mamba_num_heads, config.hidden_size
        inner, state = heads * config.mamba_head_dim, config.n_groups * config.ssm_state_size
        self.sizes = [inner, inner, state, state, heads]
        self.in_proj = PlainWeight(sum(self.sizes), hidden)
        self.conv1d = PlainWeight(inner + 2 * state, 1, config.conv_kernel, has_bias=True)
        self.norm = PlainWeight(inner, value=1.0)
        self.out_proj = PlainWeight(hidden, inner)
        # Base decay per token: the first head 1e-4 to 1e-3 by layer, the last 1; the root of it is the base time step, so that
        # what a head has gathered over its memory is of the same size for all.
        rates = torch.logspace(math.log10(1e-4) + depth, 0.0, heads)
        self.A_log = nn.Parameter(0.5 * rates.log())
        self.dt_bias = nn.Parameter(inverse_softplus(rates.sqrt()))
        self.D = nn.Parameter(torch.ones(heads))

    def forward(self, x):
        config = self.config
        batch, length, _ = x.shape
        inner, _, state, _, heads = self.sizes
        gate, mixed, step = linear(x, self.in_proj.weight).split([inner, inner + 2 * state, heads], dim=-1)
        mixed = convolve(mixed, self.conv1d.weight, self.conv1d.bias).to(x.dtype)
        value, write, read = mixed.split([inner, state, state], dim=-1)
        value = value.reshape(batch, length, heads, config.mamba_head_dim)
        write, read = (part.reshape(batch, length, config.n_groups, config.ssm_state_size) for part in (write, read))
        step = F.softplus(step.float() + self.dt_bias)
        output = state_space_scan(value, step, -self.A_log.exp() * step, write, read).float() + self.D[:, None] * value.float()
        output = output.reshape(batch, length, inner) * F.silu(gate.float())
        output = normalised(output.view(batch, length, config.n_groups, -1), config.layer_norm_epsilon)
        return linear((output.view(batch, length, inner) * self.norm.weight).to(x.dtype), self.out_proj.weight)


class Attention(nn.Module):
    """Mixer *."""

    def __init__(self, config, depth):
        super().__init__()
        self.config = config
        hidden, size = config.hidden_size, config.head_dim
        self.q_proj = PlainWeight(config.num_attention_heads * size, hidden)
        self.k_proj = PlainWeight(config.num_key_value_heads * size, hidden)
        self.v_proj = PlainWeight(config.num_key_value_heads * size, hidden)
        self.o_proj = PlainWeight(hidden, config.num_attention_heads * size)

    def forward(self, x):
        config = self.config
        batch, length, _ = x.shape
        counts = [config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads]
        parts = linear(x, self.q_proj.weight, self.k_proj.weight, self.v_proj.weight).split(
            [count * config.head_dim for count in counts], dim=-1)
        query, key, value = (part.reshape(batch, length, count, config.head_dim).transpose(1, 2) for part, count in zip(parts, counts))
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2)
        return linear(output.reshape(batch, length, -1), self.o_proj.weight)


class Mlp(nn.Module):
    """Mixer -."""

    def __init__(self, config, depth):
        super().__init__()
        self.up_proj = PlainWeight(config.intermediate_size, config.hidden_size)
        self.down_proj = PlainWeight(config.hidden_size, config.intermediate_size)

    def forward(self, x):
        return linear(F.relu(linear(x, self.up_proj.weight)).square(), self.down_proj.weight)


MIXERS = {"M": Mamba2, "*": Attention, "-": Mlp}


class Layer(nn.Module):
    def __init__(self, config, kind, depth):
        super().__init__()
        self.norm = RmsNorm(config.hidden_size, config.layer_norm_epsilon)
        self.mixer = MIXERS[kind](config, depth)

    def forward(self, x):
        return x + self.mixer(self.norm(x))


def layers_of(config, pattern):
    return nn.ModuleList(Layer(config, kind, index / max(1, len(pattern) - 1)) for index, kind in enumerate(pattern))


class Trunk(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embeddings = PlainWeight(config.vocab_size, config.hidden_size)
        self.layers = layers_of(config, config.hybrid_override_pattern)
        self.norm_f = RmsNorm(config.hidden_size, config.layer_norm_epsilon)


class MultiTokenPrediction(nn.Module):
    """From the hidden state at position i and the embedding of token i + 1 to the hidden state that predicts token i + 2. The
    first layer also owns the two input norms and the projection, the last one the final norm."""

    def __init__(self, config):
        super().__init__()
        self.layers = layers_of(config, config.mtp_hybrid_override_pattern)
        first, last = self.layers[0], self.layers[-1]
        first.enorm = RmsNorm(config.hidden_size, config.layer_norm_epsilon)
        first.hnorm = RmsNorm(config.hidden_size, config.layer_norm_epsilon)
        first.eh_proj = PlainWeight(config.hidden_size, 2 * config.hidden_size)
        last.final_layernorm = RmsNorm(config.hidden_size, config.layer_norm_epsilon)

    def forward(self, next_embedding, hidden):
        first, last = self.layers[0], self.layers[-1]
        x = linear(torch.cat([first.enorm(next_embedding), first.hnorm(hidden)], dim=-1), first.eh_proj.weight)
        for layer in self.layers:
            x = layer(x)
        return last.final_layernorm(x)


class Model(LanguageModel):
    embedding_name = "backbone.embeddings.weight"

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.backbone = Trunk(config)
        self.mtp = MultiTokenPrediction(config)
        self.shrink(len(config.hybrid_override_pattern) ** -0.5)

    def embedding(self):
        return self.backbone.embeddings.weight

    def row_blocks(self, name, parameter):
        return self.get_submodule(name.rsplit(".", 2)[0]).sizes if "in_proj" in name else super().row_blocks(name, parameter)

    def forward(self, tokens, dtype):
        embedded = F.embedding(tokens, self.embedding()).to(dtype)
        x = embedded[:, :-1]
        for layer in self.backbone.layers:
            x = layer(x)
        hidden = self.backbone.norm_f(x)
        return hidden, self.mtp(embedded[:, 1:], hidden)
