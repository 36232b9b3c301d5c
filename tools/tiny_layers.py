"""Parts that the small models of every family share."""

import torch
import torch.nn.functional as F
from torch import nn


def linear(x, *weights):
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    return F.linear(x, weight.to(x.dtype))


def normalised(x, eps):
    """FP32, of root mean square 1 along the last dimension."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


class RmsNorm(nn.Module):
    """x / rms(x) times the weight, or 1 + weight where that is zero-centred."""

    def __init__(self, size, eps, is_zero_centred=False):
        super().__init__()
        self.offset, self.eps = float(is_zero_centred), eps
        self.weight = nn.Parameter(torch.full((size,), 1.0 - self.offset))

    def forward(self, x):
        return (normalised(x, self.eps) * (self.offset + self.weight)).to(x.dtype)


class PlainWeight(nn.Module):
    def __init__(self, *shape, value=None, has_bias=False):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape) * shape[-1] ** -0.5 if value is None else torch.full(shape, value))
        if has_bias:
            self.bias = nn.Parameter(torch.zeros(shape[0]))


def convolve(x, weight, bias=None):
    """Causal depthwise convolution [B, T, channels] with weight [channels, 1, width], then SiLU; FP32."""
    length, width = x.shape[1], weight.shape[-1]
    padded = F.pad(x, (0, 0, width - 1, 0)).float()
    taps = weight[:, 0].to(x.dtype).float()
    mixed = sum(padded[:, tap:tap + length] * taps[:, tap] for tap in range(width))
    return F.silu(mixed if bias is None else mixed + bias)


def unit(x):
    """x / |x| along the last dimension, as the delta rules take queries and keys."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def inverse_softplus(x):
    return torch.log(torch.expm1(x))


class GatedMlp(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = PlainWeight(config.intermediate_size, config.hidden_size)
        self.up_proj = PlainWeight(config.intermediate_size, config.hidden_size)
        self.down_proj = PlainWeight(config.hidden_size, config.intermediate_size)

    def forward(self, x):
        gate, up = linear(x, self.gate_proj.weight, self.up_proj.weight).chunk(2, dim=-1)
        return linear(F.silu(gate) * up, self.down_proj.weight)


class LanguageModel(nn.Module):
    """Parameter names are the tensor names of the checkpoint. A family's model gives forward(tokens, dtype): from tokens
    [B, T + 1] the hidden states [B, T, hidden] of the main head (position i predicts token i + 1) and of the multi-token head
    (position i predicts token i + 2; None where there is none). Activations have the type given."""

    # Name of the embedding, tied with the head; embedding() returns it.
    embedding_name = None

    def shrink(self, factor):
        """At initialisation: the embedding to a half, branches that write to the residual stream by `factor`."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name == self.embedding_name:
                    parameter.mul_(0.5)
                if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
                    parameter.mul_(factor)

    def row_blocks(self, name, parameter):
        """Rows of the matrices that a fused one is made of."""
        return [parameter.shape[0]]

    def logits(self, hidden):
        return linear(hidden, self.embedding())

    def losses(self, window):
        """window [B, T + 2] -> mean cross-entropies (nats per token) of both heads. The multi-token head learns half from the
        text and half from what the main head will say of the same token, which is what a draft is judged by."""
        hidden, ahead = self(window[:, :-1], torch.bfloat16 if window.is_cuda else torch.float32)
        main_logits = self.logits(hidden).float()
        main = F.cross_entropy(main_logits.flatten(0, 1), window[:, 1:-1].flatten())
        if ahead is None:
            return main, torch.zeros_like(main)
        ahead_logits = self.logits(ahead).float()
        text = F.cross_entropy(ahead_logits.flatten(0, 1), window[:, 2:].flatten())
        likely = main_logits[:, 1:].detach().softmax(-1)
        draft = -(likely * ahead_logits[:, :-1].log_softmax(-1)).sum(-1).mean()
        return main, 0.5 * (text + draft)
