#!/usr/bin/env python3
"""Makes tests/fixtures/models/nemotron_h-tiny and nemotron_h_moe-tiny: random Nemotron-H models with their logits.

Needs torch 2.11 and transformers 5.17 (CPU). Run from the repository's root:  python tools/fixtures_nemotron.py
The files are those of make_model_fixtures.py, and one tensor more. transformers 5.17 ignores the config's
time_step_limit and clamps dt at time_step_min, which is an initialisation setting (a single cached token it does not
clamp at all). `logits` are those of the clamp that the config asks for, `logits_of_time_step_min` those that
transformers gives by itself; the models are made so that the two differ.

nemotron_h-tiny has no experts, is spelt as transformers 5.17 saves a config, and its tensors lie under "model.".
nemotron_h_moe-tiny is spelt as the published checkpoints are: a pattern string, "backbone.", a tensor an expert.
"""
import json
import pathlib
import re

import torch
import transformers
from safetensors.torch import save_file

from make_model_fixtures import TOKENS, VOCABULARY

SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=56,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=24,
    max_position_embeddings=4096,
    layer_norm_epsilon=1e-5,
    conv_kernel=4,
    intermediate_size=100,
    bos_token_id=None,
    eos_token_id=1,
    pad_token_id=None,
)


def randomize(model, generator):
    """Replaces every parameter by a BF16 number of a scale at which it matters."""
    for name, parameter in model.named_parameters():
        shape = parameter.shape
        normal = torch.randn(shape, generator=generator)
        if name.endswith("A_log"):
            # Decays from 0.002 to 3 for a dt of 1: some heads remember the whole text, some a few tokens.
            value = torch.linspace(-6.0, 1.0, shape[0])[torch.randperm(shape[0], generator=generator)]
        elif name.endswith("dt_bias"):
            # The first half: a dt of 1e-5 to 1e-3, below time_step_min.
            value = 0.5 + 0.5 * normal
            value[: shape[0] // 2] -= 10.0
        elif name.endswith("mixer.D"):
            # The other half would drown what the first writes into its state, were its D of ordinary size.
            value = 0.5 + 0.5 * normal
            value[: shape[0] // 2] *= 1e-3
        elif name.endswith("conv1d.bias"):
            value = 0.3 * normal
        elif "norm" in name:
            value = 1.0 + 0.3 * normal
        elif "conv1d" in name:
            value = 0.6 * normal
        elif "embeddings" in name:
            value = normal
        else:
            value = 1.2 * normal / shape[-1] ** 0.5
        parameter.data = value.to(torch.bfloat16)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data = 0.2 * torch.randn(buffer.shape, generator=generator)


def published_names(state):
    """The tensors as the published checkpoints hold them: under "backbone.", experts apart."""
    renamed = {}
    for name, value in state.items():
        name = re.sub(r"^model\.", "backbone.", name)
        experts = re.fullmatch(r"(.*\.experts)\.(up_proj|down_proj)", name)
        if not experts:
            renamed[name] = value.contiguous()
            continue
        for expert, matrix in enumerate(value):
            renamed[f"{experts[1]}.{expert}.{experts[2]}.weight"] = matrix.contiguous()
    return renamed


def published_fields(config):
    """The config as the published checkpoints spell it."""
    types = {"linear_attention": "M", "moe": "E", "full_attention": "*", "mlp": "-"}
    fields = {key: value for key, value in config.to_dict().items()
              if key not in ("layers_block_type", "mtp_layers_block_type", "num_hidden_layers")}
    fields["hybrid_override_pattern"] = "".join(types[kind] for kind in config.layers_block_type)
    fields["num_hidden_layers"] = len(config.layers_block_type)
    fields["norm_eps"] = config.layer_norm_epsilon
    return fields


def run(model, tokens, limit):
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = limit
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False).logits[0]


def check_choices(model, tokens):
    """No choice of an expert or a group may hang on rounding."""
    def check(gate, inputs, outputs):
        scores = outputs[0].sigmoid() + gate.e_score_correction_bias
        groups = scores.view(len(scores), gate.num_group, -1).topk(2, dim=-1)[0].sum(-1)
        best, chosen = groups.sort(descending=True)
        margin = (best[:, gate.topk_group - 1] - best[:, gate.topk_group]).min() if gate.topk_group < gate.num_group \
            else torch.tensor(1.0)
        mask = torch.zeros_like(groups).scatter_(1, chosen[:, : gate.topk_group], 1)
        kept = mask.repeat_interleave(scores.shape[1] // gate.num_group, dim=1).bool()
        ordered = scores.masked_fill(~kept, -1.0).sort(descending=True)[0]
        margin = min(margin, (ordered[:, gate.top_k - 1] - ordered[:, gate.top_k]).min())
        assert margin > 2e-5, margin
    hooks = [module.register_forward_hook(check) for module in model.modules()
             if hasattr(module, "e_score_correction_bias")]
    with torch.no_grad():
        model(input_ids=tokens, use_cache=False)
    for hook in hooks:
        hook.remove()


def make(name, config, is_published, seed):
    generator = torch.Generator().manual_seed(seed)
    model = transformers.NemotronHForCausalLM(config).eval()
    randomize(model, generator)
    directory = pathlib.Path("tests/fixtures/models") / name
    directory.mkdir(parents=True, exist_ok=True)
    state = {key: value.contiguous() for key, value in model.state_dict().items()}
    save_file(published_names(state) if is_published else state, directory / "model.safetensors",
              metadata={"format": "pt"})
    fields = published_fields(config) if is_published else json.loads(config.to_json_string(use_diff=False))
    fields["architectures"] = ["NemotronHForCausalLM"]
    fields["dtype"] = "bfloat16"
    (directory / "config.json").write_text(json.dumps(fields, indent=1, sort_keys=True) + "\n")

    tokens = torch.randint(0, VOCABULARY, (1, TOKENS), generator=generator)
    model = model.float()
    check_choices(model, tokens)
    ours = run(model, tokens, tuple(config.time_step_limit))
    theirs = run(model, tokens, (config.time_step_min, float("inf")))
    spread = (ours[1:] - ours[:-1]).norm() / ours.norm()
    difference = (ours - theirs).norm() / ours.norm()
    assert torch.isfinite(ours).all() and spread > 0.5 and difference > 0.05, (spread, difference)
    save_file({"tokens": tokens[0].to(torch.int32), "logits": ours.contiguous(),
               "logits_of_time_step_min": theirs.contiguous()}, directory / "expected.safetensors")
    for file in directory.iterdir():
        file.chmod(0o644)
    size = sum(file.stat().st_size for file in directory.iterdir())
    print(f"{name}: {size} bytes, logits of scale {ours.std():.2f}, spread between positions {spread:.2f}, "
          f"difference by the clamp {difference:.2f}")


def main():
    torch.set_num_threads(1)
    assert transformers.__version__.startswith("5.17"), transformers.__version__
    make("nemotron_h-tiny",
         transformers.NemotronHConfig(**SIZES, hybrid_override_pattern="M-M*-MM-", mamba_num_heads=6,
                                      mamba_head_dim=24, n_groups=2, ssm_state_size=48), False, seed=3)
    make("nemotron_h_moe-tiny",
         transformers.NemotronHConfig(**SIZES, hybrid_override_pattern="MEM*EM", mamba_num_heads=4,
                                      mamba_head_dim=40, n_groups=1, ssm_state_size=16, use_conv_bias=False,
                                      time_step_limit=[0.0005, 0.75], n_routed_experts=12, num_experts_per_tok=4,
                                      n_group=3, topk_group=2, moe_intermediate_size=36, moe_latent_size=28,
                                      moe_shared_expert_intermediate_size=44, routed_scaling_factor=2.5,
                                      norm_topk_prob=True), True, seed=4)


if __name__ == "__main__":
    main()
