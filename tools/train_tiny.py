#!/usr/bin/env python3
"""Trains the small hybrid checkpoints under models/: tokenizer, token stream, training, export to the Hugging Face layout,
evaluation (bits per byte and agreement of the multi-token prediction head), and checks of the scans and against transformers.
The families' shapes and modules are in tiny_qwen.py, tiny_nemotron.py and tiny_kimi.py."""

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

import tiny_kimi
import tiny_nemotron
import tiny_qwen
import tiny_scan

SEPARATOR = "<|endoftext|>"
# The pattern of the Qwen2 and Qwen3 tokenizers.
SPLIT_PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
# name: module with Config and Model, the config's model_type, class of transformers
FAMILIES = {"qwen": (tiny_qwen, "qwen3_5_text", "Qwen3_5ForCausalLM"),
            "nemotron": (tiny_nemotron, "nemotron_h", "NemotronHForCausalLM"),
            "kimi": (tiny_kimi, "kimi_linear", "KimiLinearForCausalLM")}


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
            if name == model.embedding_name:
                embedding.append(index)
            elif parameter.ndim != 2 or parameter.shape[0] < 16:
                vectors.append(index)
            else:
                sizes = model.row_blocks(name, parameter)
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


def shaped(config_class, settings):
    """The class's default shapes with NAME=VALUE settings applied."""
    types = {field.name: field.type for field in dataclasses.fields(config_class)}
    values = dict(setting.split("=", 1) for setting in settings)
    if unknown := set(values) - set(types):
        raise SystemExit(f"--shape {sorted(unknown)}: expected one of {sorted(types)}")
    return config_class(**{name: types[name](value) for name, value in values.items()})


def train(arguments):
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    family = FAMILIES[arguments.family][0]
    config = shaped(family.Config, arguments.shape)
    model = family.Model(config).to(device)
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
    print("# " + " ".join(f"{name}={value}" for name, value in sorted((vars(arguments) | vars(config)).items())
                          if name not in ("run", "command", "output", "tokens", "heldout", "tokenizer", "shape")))
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
                agreement = f" mtp_agreement {figures['mtp_agreement']:.4f}" if "mtp_agreement" in figures else ""
                print(f"heldout step {index} bits_per_byte {figures['bits_per_byte']:.4f}{agreement}")
            saved = time.time()
    seconds = time.time() - started
    print(f"# done: {index} steps, {index * per_step / 1e6:.1f} M tokens, {seconds:.0f} s, {index * per_step / seconds / 1e6:.3f} M tokens/s")


# --- the checkpoint ---------------------------------------------------------------------------------------------------------

def export(model, config, folder, tokenizer):
    """Writes model.safetensors (matrices BF16, gates' and norms' vectors FP32) and config.json, each replaced at once."""
    from safetensors.torch import save_file
    tensors = {}
    for name, parameter in model.state_dict().items():
        is_vector = parameter.ndim == 1 or name.endswith("A_log")
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


def family_of(folder):
    model_type = json.loads((pathlib.Path(folder) / "config.json").read_text())["model_type"]
    return next(family for family in FAMILIES.values() if family[1] == model_type)


def load_model(folder):
    family = family_of(folder)[0]
    model = family.Model(family.Config.from_json(pathlib.Path(folder) / "config.json"))
    load_weights(model, folder)
    return model


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
    """Bits per byte and, where there is a multi-token head, agreement of its first choice with the main head's for the same token,
    with the saved weights in FP32. A document longer than the window is read in windows that overlap by half; each token is scored once."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    model = load_model(folder).to(device)
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
        if ahead is not None:
            same = model.logits(ahead[:, :-1]).argmax(-1) == logits[:, 1:].argmax(-1)
            agreed += int((same & scored[:, 1:]).sum())
            compared += int(scored[:, 1:].sum())
    torch.set_float32_matmul_precision(precision)
    sizes = {}
    for package, data, _ in documents:
        sizes[package] = sizes.get(package, 0) + len(data)
    return {"bits_per_byte": sum(bits.values()) / sum(sizes.values()), **({"mtp_agreement": agreed / compared} if compared else {}),
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
    import transformers
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.model or scratch
        if not arguments.model:
            family = FAMILIES[arguments.family][0]
            config = family.Config.small()
            model = family.Model(config)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.ndim == 1:
                        parameter.add_(0.2 * torch.randn_like(parameter))
            export(model, config, scratch, None)
        ours = load_model(folder)
        reference = getattr(transformers, family_of(folder)[2])
        theirs, report = reference.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        missing = set(report["missing_keys"])
        if "lm_head.weight" in missing:
            # Not every class of transformers ties the head to the embedding where the config says so.
            theirs.lm_head.weight = theirs.get_input_embeddings().weight
            missing.remove("lm_head.weight")
        tokens = torch.randint(ours.config.vocab_size, (2, 301))
        with torch.no_grad():
            expected = theirs(tokens[:, :-1]).logits
            given = ours.logits(ours(tokens, torch.float32)[0])
        error = float((given - expected).norm() / expected.norm())
        print(f"relative error {error:.2e}; missing {sorted(missing)}, unexpected {sorted(report['unexpected_keys'])}")
        if missing or not error <= 1e-4:
            raise SystemExit("differs from transformers")


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
    own.add_argument("--initial", type=pathlib.Path, help="folder of a checkpoint of this shape, whose weights are where training "
                     "starts; the optimizer's state and the schedule begin anew")
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
    own.add_argument("--family", choices=FAMILIES, default="qwen")
    own.add_argument("--shape", nargs="*", default=[], metavar="NAME=VALUE", help="fields of the family's Config")
    own = command("eval", evaluate_command, "bits per byte by package beside xz -9, and agreement of the two heads",
                  "model", "tokenizer", "heldout")
    own.add_argument("--length", type=int, default=4096, help="window")
    own.add_argument("--output", type=pathlib.Path, help="file for the figures")
    own = command("scans", lambda arguments: tiny_scan.check_scans("cuda" if torch.cuda.is_available() else "cpu"),
                  "compare the chunked forms and their gradients with the recurrences")
    own = command("check", check_command, "compare with the model of transformers")
    own.add_argument("--family", choices=FAMILIES, default="qwen", help="of the random model")
    own.add_argument("--model", type=pathlib.Path, help="checkpoint to compare; a small random one when left out")
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
