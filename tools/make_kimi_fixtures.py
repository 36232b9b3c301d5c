#!/usr/bin/env python3
"""Makes the Kimi-Linear fixtures: tiny random models in tests/fixtures/models, a KDA layer in tests/fixtures/layers.

Needs torch 2.11 and transformers 5.17 (CPU). Run from the repository's root:  python tools/make_kimi_fixtures.py
kimi_linear-tiny has the names and the config fields of the published checkpoint, kimi_linear_respelled-tiny those of
current `transformers` (packed convolution, 3-D experts); kimi_linear_bounded-tiny has the gate with a lower bound, its
KDA layers computed by the module of `glm5_next`. Files are those of make_model_fixtures.py. layers/glm5_next_kda holds
one such layer alone: x F32 [N, hidden], y of the same shape, and the weights by their published names.
"""
import json
import pathlib
import tempfile

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextLinearAttention
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearTopkRouter

TOKENS = 134  # a prompt of 70, past a chunk of 64, and 64 more
VOCABULARY = 187
LOWER_BOUND = -5.0
FP32_NAMES = ("A_log", "dt_bias", "e_score_correction_bias")  # FP32 in the published checkpoint

SIZES = dict(vocab_size=VOCABULARY, hidden_size=56, intermediate_size=100, moe_intermediate_size=36,
             num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=28, qk_nope_head_dim=12, qk_rope_head_dim=8,
             v_head_dim=20, model_max_length=4096, rms_norm_eps=1e-5, hidden_act="silu", routed_scaling_factor=2.446,
             num_experts=8, num_experts_per_token=3, pad_token_id=None, bos_token_id=None, eos_token_id=1)


def random_weights(model, generator, has_fp32, is_bounded=False):
    """Replaces every parameter and router bias by a number of a scale at which it matters: BF16, or FP32 if the
    published checkpoint keeps it so and `has_fp32`."""
    for name, value in list(model.named_parameters()) + list(model.named_buffers()):
        shape = value.shape
        normal = torch.randn(shape, generator=generator)
        if is_bounded and name.endswith("A_log"):
            number = torch.linspace(-1.0, 1.5, value.numel()).view(shape)
        elif is_bounded and name.endswith("dt_bias"):
            # Channels from below 1e-3 a token up to the bound: a chunk's decay spans hundreds of nepers.
            number = -1.5 + 2.0 * normal
        elif name.endswith("A_log"):
            # Decays from 0.003 to 2 a token: some heads remember the whole text, some a few tokens.
            count = value.numel()
            number = torch.linspace(-6.0, 1.0, count)[torch.randperm(count, generator=generator)].view(shape)
        elif name.endswith("dt_bias"):
            number = 0.5 + 0.5 * normal
        elif name.endswith("e_score_correction_bias"):
            number = 0.2 * normal
        elif "norm" in name:
            number = 1.0 + 0.3 * normal
        elif "conv1d" in name:
            number = 0.6 * normal
        elif "embed_tokens" in name:
            number = normal
        else:
            number = 1.2 * normal / shape[-1] ** 0.5
        is_fp32 = has_fp32 and name.endswith(FP32_NAMES)
        value.data = number if is_fp32 else number.to(torch.bfloat16)


def smallest_margin(model, run):
    """By how much, at least, a router's choice of groups and experts was decided while `run` ran."""
    margins = []

    def watch(router, inputs, outputs):
        scores = outputs[0].sigmoid() + router.e_score_correction_bias
        groups = scores.view(len(scores), router.num_group, -1)
        totals = groups.topk(2, dim=-1)[0].sum(dim=-1)
        if router.topk_group < router.num_group:
            best = totals.sort(dim=-1, descending=True)[0]
            margins.append((best[:, router.topk_group - 1] - best[:, router.topk_group]).min())
        chosen = totals.topk(router.topk_group, dim=-1)[1]
        mask = torch.zeros_like(totals, dtype=torch.bool).scatter_(1, chosen, True)
        allowed = groups.masked_fill(~mask.unsqueeze(-1), float("-inf")).flatten(1)
        best = allowed.sort(dim=-1, descending=True)[0]
        margins.append((best[:, router.top_k - 1] - best[:, router.top_k]).min())

    hooks = [module.register_forward_hook(watch) for module in model.modules()
             if isinstance(module, KimiLinearTopkRouter)]
    result = run()
    for hook in hooks:
        hook.remove()
    return result, float(min(margins, default=1))


def bounded_config(hidden, heads, size):
    return Glm5NextTextConfig(hidden_size=hidden, linear_num_heads=heads, linear_head_dim=size, num_hidden_layers=1,
                              linear_lower_bound=LOWER_BOUND, layer_types=["linear_attention"], hidden_act="silu",
                              rms_norm_eps=1e-5)


def published_names(state, dense_layers):
    """What save_pretrained writes, but for the dense layers, whose published name it loses."""
    renamed = {}
    for name, value in state.items():
        for layer in dense_layers:
            name = name.replace(f"layers.{layer}.block_sparse_moe.", f"layers.{layer}.mlp.")
        if name.endswith("A_log"):
            value = value.view(1, 1, -1, 1)
        renamed[name] = value.contiguous()
    return renamed


def make(name, config, fields, is_published, is_bounded, seed):
    """`fields`: the published config.json, or None for what transformers saves."""
    generator = torch.Generator().manual_seed(seed)
    model = transformers.KimiLinearForCausalLM(config).eval()
    if is_bounded:
        bounded = bounded_config(config.hidden_size, config.linear_num_heads, config.linear_head_dim)
        for layer, kind in zip(model.model.layers, config.layer_types):
            if kind == "linear_attention":
                layer.self_attn = Glm5NextTextLinearAttention(bounded, 0).eval()
    random_weights(model, generator, is_published, is_bounded)
    directory = pathlib.Path("tests/fixtures/models") / name
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as saved:
        model.save_pretrained(saved, save_original_format=is_published)
        state = load_file(pathlib.Path(saved) / "model.safetensors")
        written = json.loads((pathlib.Path(saved) / "config.json").read_text())
    if is_published:
        dense = [i for i, kind in enumerate(config.mlp_layer_types) if kind == "dense"]
        state = published_names(state, dense)
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    fields = dict(fields or written, dtype="bfloat16", architectures=["KimiLinearForCausalLM"])
    (directory / "config.json").write_text(json.dumps(fields, indent=1, sort_keys=True) + "\n")

    tokens = torch.randint(0, VOCABULARY, (1, TOKENS), generator=generator)
    with torch.no_grad():
        logits, margin = smallest_margin(
            model, lambda: model.float()(input_ids=tokens, use_cache=False).logits[0])
    spread = (logits[1:] - logits[:-1]).norm() / logits.norm()
    assert torch.isfinite(logits).all() and spread > 0.5, spread
    # A choice of experts that another order of sums could turn would make the logits incomparable.
    assert margin > 2e-5, margin
    save_file({"tokens": tokens[0].to(torch.int32), "logits": logits.contiguous()},
              directory / "expected.safetensors")
    for file in directory.iterdir():
        file.chmod(0o644)
    size = sum(file.stat().st_size for file in directory.iterdir())
    print(f"{name}: {size} bytes, logits of scale {logits.std():.2f}, spread between positions {spread:.2f}, "
          f"router margin {margin:.1e}")


def published_fields(kda_layers, full_attn_layers, heads, size, lower_bound=None, **more):
    """config.json as the published checkpoint spells it; layers count from 1."""
    linear = dict(kda_layers=kda_layers, full_attn_layers=full_attn_layers, num_heads=heads, head_dim=size,
                  short_conv_kernel_size=4)
    if lower_bound is not None:
        linear["gate_lower_bound"] = lower_bound
    return dict(SIZES, model_type="kimi_linear", num_hidden_layers=len(kda_layers) + len(full_attn_layers),
                linear_attn_config=linear, head_dim=14, mla_use_nope=True, q_lora_rank=None, moe_layer_freq=1,
                moe_router_activation_func="sigmoid", moe_renormalize=True, use_grouped_topk=True,
                num_nextn_predict_layers=0, rope_scaling=None, rope_theta=10000.0, tie_word_embeddings=False,
                use_cache=True, **more)


def make_layer(seed):
    generator = torch.Generator().manual_seed(seed)
    hidden, heads, size = 40, 5, 16
    layer = Glm5NextTextLinearAttention(bounded_config(hidden, heads, size), 0).eval()
    random_weights(layer, generator, has_fp32=True, is_bounded=True)
    layer = layer.float()
    x = torch.randn(1, TOKENS, hidden, generator=generator)
    with torch.no_grad():
        y = layer(x)
        gates = layer.forget_gate(x)
    assert gates.min() < 0.99 * LOWER_BOUND and gates.max() > 1e-3 * LOWER_BOUND, (gates.min(), gates.max())
    assert torch.isfinite(y).all()
    state = {name.replace("forget_gate.", ""): value.contiguous() for name, value in layer.state_dict().items()}
    for part, value in zip("qkv", state.pop("conv1d.weight").chunk(3)):
        state[f"{part}_conv1d.weight"] = value.contiguous()
    directory = pathlib.Path("tests/fixtures/layers")
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "glm5_next_kda.safetensors"
    save_file(dict(state, x=x[0].contiguous(), y=y[0].contiguous()), file)
    file.chmod(0o644)
    print(f"{file}: {file.stat().st_size} bytes, gates {gates.min():.2f} to {gates.max():.2e}")


def main():
    torch.set_num_threads(1)
    assert transformers.__version__.startswith("5.17"), transformers.__version__
    published = published_fields([1, 2, 4], [3], heads=3, size=32, first_k_dense_replace=1,
                                 num_shared_experts=1, num_expert_group=4, topk_group=2)
    make("kimi_linear-tiny", transformers.KimiLinearConfig(**published), published, is_published=True,
         is_bounded=False, seed=3)
    respelled = transformers.KimiLinearConfig(
        **SIZES, num_hidden_layers=4, layer_types=["full_attention"] + ["linear_attention"] * 3,
        mlp_layer_types=["sparse", "dense", "sparse", "dense"], linear_num_heads=5, linear_head_dim=16,
        num_shared_experts=2, num_expert_group=1, topk_group=1, moe_renormalize=False, q_lora_rank=23)
    make("kimi_linear_respelled-tiny", respelled, None, is_published=False, is_bounded=False, seed=4)
    bounded = published_fields([1, 3], [2], heads=2, size=48, lower_bound=LOWER_BOUND,
                               first_k_dense_replace=3, num_shared_experts=1, num_expert_group=1, topk_group=1)
    make("kimi_linear_bounded-tiny", transformers.KimiLinearConfig(**bounded), bounded, is_published=True,
         is_bounded=True, seed=5)
    make_layer(seed=6)


if __name__ == "__main__":
    main()
