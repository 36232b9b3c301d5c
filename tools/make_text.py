#!/usr/bin/env python3
"""Makes the text the small checkpoints are trained on: fetches pinned Debian documentation packages, cleans and
de-duplicates their documents, and sets whole documents aside as held-out text before anything is trained on them."""

import argparse
import collections
import gzip
import hashlib
import html.parser
import json
import pathlib
import random
import re
import subprocess
import unicodedata
import zlib

import numpy as np

SEPARATOR = "<|endoftext|>"
SHUFFLE_SEED = 20261129
HELDOUT_SALT = "replayssm heldout 1:"
HELDOUT_BYTES = 400_000
SHIPPED_BYTES = 100_000
SHORTEST_DOCUMENT_BYTES = 400
SHINGLE_WORDS = 10
# Among documents, one word sequence in this many is remembered when looking for copies; held-out text is checked in full.
SHINGLE_SAMPLE = 16

# package, version, SHA-256 of the .deb, how documents are read from it, licence of the documents, may be redistributed here
PACKAGES = [
    ("linux-doc-6.1", "6.1.192-3", "f18dfe28dcab7bdbf9185be16b9521f5841277a6a96c374a6683a648d5d5fa4f", "plain", "GPL-2.0-only", True),
    ("python3.11-doc", "3.11.2-6+deb12u9", "5b3594189d6ef9a6963ce0347fd307a1cc67620ad697e144db366070e2e146be", "plain", "PSF-2.0", True),
    ("dict-gcide", "0.48.5+nmu2", "7b0af5cfde3cbdef5e9d6e78f92ec335ced7c2790f37a40f49bebc6f7347ac0f", "dictionary", "GPL-2.0-or-later", True),
    ("perl-doc", "5.36.0-7+deb12u4", "f4269cff4576d6f02a6756df842988e58451c7e945b08517dd235531b24e48f8", "perl", "GPL-1.0-or-later OR Artistic-1.0-Perl", True),
    ("manpages", "6.03-2", "efa1ba4cd19ad7baeae959c9209a7eb74be2ebb858bcabb412597bfc9f588c91", "roff", "various, page by page", False),
    ("manpages-dev", "6.03-2", "96f55cb5e26231d5567c89b692bced63825a14a2d5bd18fdf16ea2ed44eb9838", "roff", "various, page by page", False),
    ("anarchism", "15.3-3", "cf21c10948b00e923c62eb31c39a3390413fa26c5ee0e3b925feb0ec7fe42948", "markdown", "GPL-2.0-or-later", True),
    ("debian-handbook", "11.20220922", "3d5dbeac1f1afc9c094eab9d0f701f6ecff99c4927d5a4794cf6c85678134faa", "html", "GPL-2.0-or-later OR CC-BY-SA-3.0", True),
    ("git-doc", "1:2.39.5-0+deb12u3", "3c89668a11053a6bafade3de1f611f4613db31e082af63f43d8c5b69ad8795ec", "plain", "GPL-2.0-only", True),
    ("cmake-data", "3.25.1-1", "8371f9694da94fd551a3ea653e2e25d99747471ca0b48cc029bf5c792ea590a3", "plain", "BSD-3-Clause", True),
    ("libssl-doc", "3.0.22-1~deb12u2", "b79995160eeb7673b3933bf270105e075814a13b3d499db8c65bb41735748b41", "roff", "Apache-2.0", True),
    ("vim-runtime", "2:9.0.1378-2+deb12u2", "6a3dd2317a593742cb247f3494d986b3127887dbe1449253b8efa6112289854e", "plain", "OPL-1.0", False),
]


def fetch(package, version, sha256, folder):
    """Returns the path of the verified .deb, downloading it when the folder lacks it."""
    def found():
        return [path for path in folder.glob(f"{package}_*.deb")
                if hashlib.sha256(path.read_bytes()).hexdigest() == sha256]
    if not found():
        subprocess.run(["apt-get", "download", f"{package}={version}"], cwd=folder, check=False)
    if not found():
        raise SystemExit(f"{package} {version} with SHA-256 {sha256} is neither in {folder} nor on the configured mirror; "
                         f"superseded versions are kept at https://snapshot.debian.org/package/{package}/")
    return found()[0]


def read_file(path):
    data = path.read_bytes()
    if path.suffix in (".gz", ".dz"):
        data = gzip.decompress(data)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("latin-1")


# --- markup to text ---------------------------------------------------------------------------------------------------

ROFF_CHARACTERS = {"aq": "'", "cq": "'", "oq": "'", "lq": '"', "rq": '"', "dq": '"', "em": "--", "en": "-", "ha": "^",
                   "ti": "~", "ga": "`", "rs": "\\", "bu": "*", "hy": "-", "co": "(C)", "->": "->", "<-": "<-", ">=": ">=",
                   "<=": "<=", "!=": "!=", "+-": "+-", "mu": "x", "pc": ".", "sl": "/", "at": "@", "sh": "#", "Do": "$"}


def roff_inline(text):
    text = re.sub(r"\\\*\((C\+|--|PI|L\"|R\"|C`|C'|Aq)", lambda m: {"C+": "C++", "--": "--", "PI": "pi", "L\"": '"', "R\"": '"',
                  "C`": "", "C'": "", "Aq": "'"}[m.group(1)], text)
    text = re.sub(r"\\f(\(..|\[[^\]]*\]|.)", "", text)
    text = re.sub(r"\\s[-+]?\d{1,2}|\\[vh]'[^']*'|\\w'[^']*'", "", text)
    text = re.sub(r"\\\(([^\s]{2})|\\\[([^\]]+)\]", lambda m: ROFF_CHARACTERS.get(m.group(1) or m.group(2), ""), text)
    text = re.sub(r"\\\*\(..|\\\*\[[^\]]*\]|\\\*.", "", text)
    text = re.sub(r'\\".*', "", text)
    text = text.replace("\\-", "-").replace("\\ ", " ").replace("\\~", " ").replace("\\e", "\0").replace("\\(", "(")
    text = re.sub(r"\\[&/,|^:%dutcz0]", "", text)
    text = re.sub(r"\\(.)", r"\1", text)
    return text.replace("\0", "\\")


def roff_arguments(text):
    return [quoted.replace('""', '"') if quoted or not bare else bare
            for quoted, bare in re.findall(r'"((?:[^"]|"")*)"?|((?:\\.|[^\s"])(?:\\.|[^\s])*)', text)]


def roff_to_text(text):
    lines, skip_until, title_seen = [], None, False
    for line in text.replace("\\\n", "").split("\n"):
        if skip_until is not None:
            if line.strip() == skip_until:
                skip_until = None
            continue
        if not line.startswith((".", "'")):
            if title_seen:
                lines.append(roff_inline(line))
            continue
        match = re.match(r"[.']\s*(\S+)\s*(.*)", line)
        if not match:
            continue
        request, rest = match.groups()
        if request.startswith('\\"'):
            continue
        if request in ("de", "de1", "am", "ig"):
            skip_until = ".."
            continue
        arguments = roff_arguments(rest)
        if request == "TH":
            title_seen = True
            lines.append(roff_inline(f"{arguments[0]}({arguments[1]})") if len(arguments) > 1 else "")
        elif request in ("SH", "SS"):
            lines += ["", roff_inline(" ".join(arguments))]
        elif request in ("B", "I", "SM", "SB"):
            lines.append(roff_inline(" ".join(arguments)))
        elif request in ("BR", "BI", "IR", "RI", "RB", "IB"):
            lines.append(roff_inline("".join(arguments)))
        elif request in ("PP", "P", "LP", "TP", "sp", "HP", "TQ", "Sp", "Vb"):
            lines.append("")
        elif request == "IP":
            lines += [""] + ([roff_inline(arguments[0])] if arguments else [])
        elif request == "UR" or request == "MT":
            lines.append(roff_inline(" ".join(arguments)))
    return "\n".join(lines)


def pod_to_text(text):
    text = re.sub(r"(?ms)^=(begin|for)\b.*?^=(end\b[^\n]*|cut)$", "", text)
    text = re.sub(r"E<(lt|gt|sol|verbar|\w+)>", lambda m: {"lt": "\1", "gt": "\2", "sol": "/", "verbar": "|"}.get(m.group(1), ""), text)
    text = re.sub(r"[BCFILSX]<< (.*?) >>", r"\1", text)
    for _ in range(3):
        text = re.sub(r"(?s)L<(?:([^<>|]*)\|)?([^<>]*)>", lambda m: m.group(1) or m.group(2), text)
        text = re.sub(r"(?s)[XZ]<[^<>]*>", "", text)
        text = re.sub(r"(?s)[BCFIS]<([^<>]*)>", r"\1", text)
    text = re.sub(r"(?m)^=(over|back|cut|pod|encoding).*$", "", text)
    text = re.sub(r"(?m)^=(head\d|item)\s+", "", text)
    return text.replace("\1", "<").replace("\2", ">")


class HtmlText(html.parser.HTMLParser):
    """Collects the visible text of a page; block elements end a line."""
    BLOCKS = {"p", "div", "h1", "h2", "h3", "h4", "h5", "li", "pre", "tr", "dt", "dd", "table", "ul", "ol", "br"}
    HIDDEN = {"script", "style", "head", "nav"}

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.parts, self.hidden, self.preformatted = [], 0, 0

    def handle_starttag(self, tag, attributes):
        self.hidden += tag in self.HIDDEN
        self.preformatted += tag == "pre"
        if tag in self.BLOCKS:
            self.parts.append("\n" if tag in ("br", "li", "tr", "dd") else "\n\n")

    def handle_endtag(self, tag):
        self.hidden -= tag in self.HIDDEN
        self.preformatted -= tag == "pre"
        if tag in self.BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data):
        if not self.hidden:
            self.parts.append(data if self.preformatted else re.sub(r"\s+", " ", data))


def html_to_text(text):
    page = HtmlText()
    page.feed(text)
    text = "".join(page.parts)
    text = re.sub(r"(?m)^ +(?=\S)", "", text)
    return re.sub(r"(?m)^((Prev|Next)([A-Z0-9].*)?|Product SiteDocumentation Site|Home|Up|Download the ebook)\s*$", "", text)


def markdown_to_text(text):
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"(\*\*|__|\*)(\S(?:.*?\S)?)\1", r"\2", text)
    return re.sub(r"\\([-_*.#\[\]()!])", r"\1", text)


# --- documents of each package ------------------------------------------------------------------------------------------

def plain_documents(root, package):
    for path in sorted(root.rglob("*")):
        name = path.name.removesuffix(".gz")
        parts = path.relative_to(root).parts
        if path.is_symlink() or not path.is_file() or "translations" in parts:
            continue
        if package == "linux-doc-6.1" and "html" in parts:
            continue
        if package == "python3.11-doc" and "_sources" not in parts:
            continue
        if package == "cmake-data" and "Help" not in parts or package == "vim-runtime" and "doc" not in parts:
            continue
        if name.endswith((".txt", ".rst")):
            yield "/".join(parts), read_file(path)


def dictionary_documents(root, package):
    """Entries whose headwords share three letters make one document, so that related words never lie on both sides."""
    text = read_file(root / "usr/share/dictd/gcide.dict.dz")
    groups = collections.defaultdict(list)
    for entry in re.split(r"\n\n(?=\S)", text):
        headword = entry.lstrip().split(" \\")[0].split("\n")[0]
        letters = re.sub(r"[^a-z]", "", unicodedata.normalize("NFKD", headword).lower())[:3]
        if headword and not headword.startswith("00-database") and letters:
            groups[letters].append(entry)
    for letters in sorted(groups):
        yield f"gcide.dict/{letters}", "\n\n".join(groups[letters])


def roff_documents(root, package):
    for path in sorted(root.rglob("man/man*/*.gz")):
        if not path.is_symlink() and path.is_file():
            yield "/".join(path.relative_to(root).parts[2:]), roff_to_text(read_file(path))


def perl_documents(root, package):
    for path in sorted(root.rglob("*.pod")):
        if not path.is_symlink():
            yield "/".join(path.relative_to(root).parts[2:]), pod_to_text(read_file(path))
    for name, text in roff_documents(root, package):
        # Section 1 repeats the .pod files.
        if "/man3/" in "/" + name:
            yield name, text


def markdown_documents(root, package):
    for path in sorted(root.rglob("markdown/*.md*")):
        yield "/".join(path.relative_to(root).parts[3:]), markdown_to_text(read_file(path))


def html_documents(root, package):
    for path in sorted(root.rglob("en-US/*.html")):
        yield "/".join(path.relative_to(root).parts[4:]), html_to_text(read_file(path))


READERS = {"plain": plain_documents, "dictionary": dictionary_documents, "roff": roff_documents, "perl": perl_documents,
           "markdown": markdown_documents, "html": html_documents}
PLAIN_CHARACTERS = str.maketrans({"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "--",
                                  "\u2026": "...", "\u2022": "*", "\u00a0": " ", "\u2212": "-", "\u00ad": None, "\u00b7": "*",
                                  "\u00d7": "x", "\u00a9": "(C)", "\u00ae": "(R)", "\u2192": "->", "\u2190": "<-", "\r": None,
                                  "\u00e6": "ae", "\u00c6": "AE", "\u0153": "oe", "\u0152": "OE", "\f": None})


def clean(text):
    """Printable ASCII with tabs and newlines; returns an empty string for a document that is mostly something else."""
    text = unicodedata.normalize("NFKD", text.translate(PLAIN_CHARACTERS))
    plain = re.sub(r"[^\t\n\x20-\x7e]", "", text)
    if len(plain) < 0.9 * len(text):
        return ""
    plain = plain.replace(SEPARATOR, "")
    plain = re.sub(r"([-=*~_#+.^\"'`:])\1{8,}", lambda match: match.group(1) * 8, plain)
    plain = re.sub(r" {25,}", " " * 24, plain)
    plain = re.sub(r"[ \t]+(?=\n)", "", plain)
    return re.sub(r"\n{3,}", "\n\n", plain).strip() + "\n"


# --- copies ---------------------------------------------------------------------------------------------------------------

class Shingles:
    """Hashes of every sequence of SHINGLE_WORDS words of a text."""

    def __init__(self):
        self.word_hashes = {}
        powers = [1]
        for _ in range(SHINGLE_WORDS - 1):
            powers.append(powers[-1] * 0x9E3779B97F4A7C15 % 2**64)
        self.powers = np.array(powers, dtype=np.uint64)

    def __call__(self, text):
        words = re.findall(r"[A-Za-z0-9]+", text.lower())
        known = self.word_hashes
        for word in words:
            if word not in known:
                known[word] = zlib.crc32(word.encode()) * 0x100000001B3 % 2**64 ^ zlib.adler32(word.encode())
        if len(words) < SHINGLE_WORDS:
            return np.zeros(0, dtype=np.uint64)
        hashes = np.array([known[word] for word in words], dtype=np.uint64)
        windows = np.lib.stride_tricks.sliding_window_view(hashes, SHINGLE_WORDS)
        mixed = (windows * self.powers).sum(axis=1, dtype=np.uint64)
        return np.unique(mixed ^ (mixed >> np.uint64(29)))


def without_copies(documents, shingles):
    """Drops a document of which most word sequences were already seen in one kept before."""
    seen, kept = set(), []
    for package, name, text in documents:
        sample = [int(value) for value in shingles(text) if int(value) % SHINGLE_SAMPLE == 0]
        if sample and sum(value in seen for value in sample) > 0.6 * len(sample):
            continue
        seen.update(sample)
        kept.append((package, name, text))
    return kept


def choose_heldout(documents):
    """Whole documents in the order of their names' hashes, each package in proportion to its size."""
    total = sum(len(text) for _, _, text in documents)
    heldout = []
    for package in [row[0] for row in PACKAGES]:
        own = [row for row in documents if row[0] == package]
        budget = HELDOUT_BYTES * sum(len(row[2]) for row in own) / total
        own.sort(key=lambda row: hashlib.sha256((HELDOUT_SALT + row[0] + "/" + row[1]).encode()).hexdigest())
        taken = []
        for row in own:
            if len(row[2]) <= budget * 1.1:
                taken.append(row)
                budget -= len(row[2])
        heldout += taken or [min(own, key=lambda row: len(row[2]))]
    return heldout


def without_heldout(documents, heldout, shingles):
    """Drops training documents that share a notable part of their text with a held-out one; reports what overlap is left."""
    held_names = {(package, name) for package, name, _ in heldout}
    held_shingles = [shingles(text) for _, _, text in heldout]
    everything = np.unique(np.concatenate(held_shingles))
    training, dropped, shared_left = [], [], []
    for package, name, text in documents:
        if (package, name) in held_names:
            continue
        own = shingles(text)
        shared = own[np.isin(own, everything, assume_unique=True)]
        if len(shared) >= 20:
            most = max(np.isin(held, shared).mean() for held in held_shingles if len(held))
            if len(shared) > 0.2 * len(own) or most > 0.2:
                dropped.append(f"{package}/{name}")
                continue
        shared_left.append(shared)
        training.append((package, name, text))
    left = len(np.unique(np.concatenate(shared_left))) / len(everything)
    return training, dropped, left


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packages", type=pathlib.Path, default=pathlib.Path("build/text/packages"),
                        help="folder that keeps the .deb files")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("build/text"),
                        help="folder for train.txt, heldout.jsonl, heldout.txt and text.json")
    arguments = parser.parse_args()
    arguments.packages.mkdir(parents=True, exist_ok=True)
    arguments.output.mkdir(parents=True, exist_ok=True)

    shingles = Shingles()
    documents = []
    for package, version, sha256, reader, _, _ in PACKAGES:
        deb = fetch(package, version, sha256, arguments.packages)
        root = arguments.packages / "unpacked" / package
        if not root.exists():
            root.mkdir(parents=True)
            subprocess.run(["dpkg", "-x", str(deb), str(root)], check=True)
        for name, text in READERS[reader](root, package):
            text = clean(text)
            if len(text) >= SHORTEST_DOCUMENT_BYTES:
                documents.append((package, name, text))
    read = len(documents)
    documents = without_copies(documents, shingles)
    heldout = choose_heldout(documents)
    training, dropped, left = without_heldout(documents, heldout, shingles)
    random.Random(SHUFFLE_SEED).shuffle(training)

    with open(arguments.output / "train.txt", "w", encoding="ascii") as file:
        file.write("".join(text + SEPARATOR for _, _, text in training))
    with open(arguments.output / "heldout.jsonl", "w", encoding="ascii") as file:
        for package, name, text in heldout:
            file.write(json.dumps({"package": package, "name": name, "text": text}) + "\n")

    may_ship = {row[0] for row in PACKAGES if row[5]}
    candidates = [row for row in heldout if row[0] in may_ship]
    candidate_bytes = sum(len(text) for _, _, text in candidates)
    shipped = []
    for package in [row[0] for row in PACKAGES if row[5]]:
        own = [row for row in candidates if row[0] == package]
        budget = SHIPPED_BYTES * sum(len(row[2]) for row in own) / candidate_bytes
        for row in own:
            if len(row[2]) <= budget * 1.2:
                shipped.append(row)
                budget -= len(row[2])
    (arguments.output / "heldout.txt").write_text("".join(text + SEPARATOR for _, _, text in shipped), encoding="ascii")

    def sizes(rows):
        table = collections.Counter()
        for package, _, text in rows:
            table[package] += len(text)
        return dict(table)

    summary = {"documents_read": read, "documents_without_copies": len(documents), "training_documents": len(training),
               "training_bytes": sum(len(row[2]) for row in training), "training_bytes_by_package": sizes(training),
               "heldout_documents": len(heldout), "heldout_bytes": sum(len(row[2]) for row in heldout),
               "heldout_bytes_by_package": sizes(heldout), "dropped_as_near_heldout": dropped,
               "heldout_word_sequences_also_in_training": round(left, 4), "shipped": [f"{row[0]}/{row[1]}" for row in shipped],
               "sha256": {name: hashlib.sha256((arguments.output / name).read_bytes()).hexdigest()
                          for name in ("train.txt", "heldout.jsonl", "heldout.txt")}}
    (arguments.output / "text.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps({key: value for key, value in summary.items() if key != "shipped"}, indent=1))


if __name__ == "__main__":
    main()
