#!/usr/bin/env python3
"""Makes tests/fixtures/models: tiny random hybrid models in Hugging Face layout with the logits that `transformers`
gives for one text.

Needs torch 2.11 and transformers 5.17 (CPU). Run from the repository's root:  python tools/make_model_fixtures.py [NAME...]
Each directory holds config.json, model.safetensors (BF16) and expected.safetensors: `tokens` I32 [N] and `logits` F32
[N, vocabulary] of the model with its weights widened to FP32. Sizes are odd on purpose (heads, channels and widths that
are no multiple of a vector), and the weights are scaled so that the states matter at every position.
"""
import contextlib
import json
import pathlib
import sys

import torch
import transformers
from safetensors.torch import save_file

from fixture_experts import clear_choices, separate_experts

TOKENS = 134  # a prompt of 70, past a chunk of 64, and 64 more
VOCABULARY = 187

SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=56,
    intermediate_size=100,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=24,
    max_position_embeddings=4096,
    rms_norm_eps=1e-6,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=32,
    linear_value_head_dim=20,
    linear_num_key_heads=3,
    linear_num_value_heads=6,
    # 12 of 24 dimensions rotate: 6 pairs, no multiple of a vector.
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    bos_token_id=None,
    eos_token_id=1,
)

# 9 experts and widths that are no multiple of a vector.
EXPERTS = dict(
    num_experts=9,
    num_experts_per_tok=3,
    moe_intermediate_size=20,
    shared_expert_intermediate_size=28,
)


def without(sizes, *fields):
    return {key: value for key, value in sizes.items() if key not in fields}


def randomize(model, generator):
    """Replaces every parameter by a BF16 number of a scale at which it matters."""
    for name, parameter in model.named_parameters():
        shape = parameter.shape
        normal = torch.randn(shape, generator=generator)
        if name.endswith("A_log"):
            # Decays from 0.003 to 2 a token: some heads remember the whole text, some a few tokens.
            value = torch.linspace(-6.0, 1.0, shape[0])[torch.randperm(shape[0], generator=generator)]
        elif name.endswith("dt_bias"):
            value = 0.5 + 0.5 * normal
        elif "linear_attn.norm" in name:
            value = 1.0 + 0.3 * normal
        elif "norm" in name:
            value = 0.3 * normal  # zero-centred
        elif "conv1d" in name:
            value = 0.6 * normal
        elif "embed_tokens" in name:
            value = normal
        elif name.endswith(".gate.weight"):
            value = 2.5 * normal / shape[-1] ** 0.5  # routers: the experts of a token are far apart
        else:
            value = 1.2 * normal / shape[-1] ** 0.5
        parameter.data = value.to(torch.bfloat16)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))


def make(name, model_class, config, seed, publish=dict, watch=contextlib.nullcontext):
    """`publish` spells the tensors as published checkpoints do; `watch(model)` is a context that may refuse a model."""
    generator = torch.Generator().manual_seed(seed)
    model = model_class(config).eval()
    randomize(model, generator)
    directory = pathlib.Path("tests/fixtures/models") / name
    directory.mkdir(parents=True, exist_ok=True)
    state = {key: value.contiguous() for key, value in model.state_dict().items() if key != "lm_head.weight"}
    if not config.tie_word_embeddings:
        state["lm_head.weight"] = model.lm_head.weight.data.contiguous()
    save_file(publish(state), directory / "model.safetensors", metadata={"format": "pt"})
    fields = config.to_dict()
    fields["architectures"] = [model_class.__name__]
    fields["dtype"] = "bfloat16"
    (directory / "config.json").write_text(json.dumps(fields, indent=1, sort_keys=True) + "\n")

    tokens = torch.randint(0, VOCABULARY, (1, TOKENS), generator=generator)
    with torch.no_grad(), watch(model):
        logits = model.float()(input_ids=tokens, use_cache=False).logits[0]
    spread = (logits[1:] - logits[:-1]).norm() / logits.norm()
    assert torch.isfinite(logits).all() and spread > 0.5, spread
    save_file({"tokens": tokens[0].to(torch.int32), "logits": logits.contiguous()},
              directory / "expected.safetensors")
    for file in directory.iterdir():
        file.chmod(0o644)
    size = sum(file.stat().st_size for file in directory.iterdir())
    print(f"{name}: {size} bytes, logits of scale {logits.std():.2f}, spread between positions {spread:.2f}")


FIXTURES = {
    "qwen3_5-tiny": lambda name: make(
        name, transformers.Qwen3_5ForCausalLM,
        transformers.Qwen3_5TextConfig(**SIZES, tie_word_embeddings=True, full_attention_interval=4), seed=1),
    "qwen3_next-tiny": lambda name: make(
        name, transformers.Qwen3NextForCausalLM,
        transformers.Qwen3NextConfig(**SIZES, tie_word_embeddings=False, num_experts=0, mlp_only_layers=[0, 1, 2, 3],
                                     layer_types=["linear_attention", "full_attention"] * 2), seed=2),
    "qwen3_5_moe-tiny": lambda name: make(
        name, transformers.Qwen3_5MoeForCausalLM,
        transformers.Qwen3_5MoeTextConfig(**without(SIZES, "intermediate_size"), **EXPERTS, tie_word_embeddings=False,
                                          full_attention_interval=4), seed=4, watch=clear_choices),
    # A dense layer among the others; weights of experts not normalised.
    "qwen3_next_moe-tiny": lambda name: make(
        name, transformers.Qwen3NextForCausalLM,
        transformers.Qwen3NextConfig(**SIZES, **EXPERTS, tie_word_embeddings=True, norm_topk_prob=False,
                                     mlp_only_layers=[2], layer_types=["linear_attention", "full_attention"] * 2),
        seed=3, publish=separate_experts, watch=clear_choices),
}


def main():
    torch.set_num_threads(1)
    assert transformers.__version__.startswith("5."), transformers.__version__
    for name in sys.argv[1:] or FIXTURES:
        FIXTURES[name](name)


if __name__ == "__main__":
    main()
