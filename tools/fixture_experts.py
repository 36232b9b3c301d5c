"""What the fixtures with mixtures of experts share: the published spelling of expert weights, and a watch that a model
chooses its experts clearly and that they matter.
"""
import contextlib
import re

import torch


def separate_experts(state):
    """Fused `experts.gate_up_proj` and `experts.down_proj` as `experts.E.{gate,up,down}_proj.weight`."""
    separate = {}
    for name, value in state.items():
        fused = re.fullmatch(r"(.*\.experts)\.(gate_up|up|down)_proj", name)
        if not fused:
            separate[name] = value
            continue
        prefix, part = fused.groups()
        for expert, matrix in enumerate(value):
            parts = zip(("gate", "up"), matrix.chunk(2)) if part == "gate_up" else [(part, matrix)]
            for projection, rows in parts:
                separate[f"{prefix}.{expert}.{projection}_proj.weight"] = rows.clone()
    return separate


def choice_gap(router, logits):
    """How far the last chosen group and expert are ahead of the first that are not, the least over all tokens; in
    logits where softmax scores, which have their order."""
    bias = getattr(router, "e_score_correction_bias", None)
    choice = logits if bias is None else logits.sigmoid() + bias
    gap = torch.inf
    groups, kept = getattr(router, "num_group", 1), getattr(router, "topk_group", 1)
    if kept < groups:
        members = choice.unflatten(-1, (groups, -1))
        best = members.topk(2, dim=-1)[0].sum(-1).sort(-1, descending=True)
        gap = (best.values[:, kept - 1] - best.values[:, kept]).min().item()
        dropped = torch.zeros_like(best.values, dtype=torch.bool).scatter_(1, best.indices[:, kept:], True)
        choice = members.masked_fill(dropped.unsqueeze(-1), -torch.inf).flatten(-2)
    ranked = choice.sort(-1, descending=True).values
    return min(gap, (ranked[:, router.top_k - 1] - ranked[:, router.top_k]).min().item())


@contextlib.contextmanager
def clear_choices(model, least_gap=5e-4, least_share=0.25):
    """Asserts at the end that no choice of a router in the forward passes within was closer than `least_gap`, that every
    expert was chosen, and that routed and shared experts each make up `least_share` of their blocks' outputs or more.
    """
    gaps, chosen, shares, hooks = [], {}, [], []

    def on_router(router, inputs, outputs):
        gaps.append(choice_gap(router, outputs[0].float()))
        chosen.setdefault(router, set()).update(outputs[2].flatten().tolist())

    for block in (module for module in model.modules() if hasattr(module, "experts")):
        routed = []
        last = getattr(block, "fc2_latent_proj", block.experts)
        hooks.append(last.register_forward_hook(lambda module, inputs, output, routed=routed: routed.append(output)))
        hooks.append(block.register_forward_hook(lambda module, inputs, output, routed=routed: shares.extend(
            (part.norm() / output.norm()).item()
            for part in (routed[-1], output - routed[-1].view_as(output)))))
        hooks.append(block.gate.register_forward_hook(on_router))
    yield
    for hook in hooks:
        hook.remove()
    assert gaps and min(gaps) > least_gap, min(gaps)
    assert all(len(experts) == router.weight.shape[0] for router, experts in chosen.items()), chosen.values()
    assert min(shares) > least_share, shares
    print(f"  experts: smallest gap {min(gaps):.1e}, shares {min(shares):.2f} .. {max(shares):.2f}")
