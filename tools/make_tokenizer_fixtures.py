#!/usr/bin/env python3
"""Makes tests/fixtures/tokenizer/: small tokenizers of several kinds and what the `tokenizers` package makes of varied
strings with each. Deterministic; needs `pip install tokenizers` (made with 0.23.3).

A case file is JSON lines, [string, [ids]]; the strings of all cases together are more than 2,000.
"""

import json
import pathlib
import random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import ByteLevel as ByteLevelProcessor

OUT = pathlib.Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "tokenizer"

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

SENTENCES = [
    "The quick brown fox jumps over the lazy dog; it's what they'd say, isn't it? We'll see, I'm sure you've guessed.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. Fünf ähnliche Öfen übten Äußerst.",
    "Portez ce vieux whisky au juge blond qui fume. L'élève naïf a vu où l'âne mangeait çà et là.",
    "El pingüino Wenceslao hizo kilómetros bajo exhaustiva lluvia y frío; ¿añoraba a su querido cachorro?",
    "Příliš žluťoučký kůň úpěl ďábelské ódy. Zażółć gęślą jaźń. Árvíztűrő tükörfúrógép.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю. Їжак з'їв ґрунт.",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία. Τάχιστη αλώπηξ βαφής ψημένη γη.",
    "いろはにほへと ちりぬるを わかよたれそ つねならむ。東京特許許可局の局長は、カタカナとひらがなを使う。",
    "我能吞下玻璃而不伤身体。天地玄黃，宇宙洪荒；日月盈昃，辰宿列張。",
    "다람쥐 헌 쳇바퀴에 타고파. 키스의 고유조건은 입술끼리 만나야 하고 특별한 기술은 필요치 않다.",
    "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण का सर्वनाश करने वाले विष्णुवतार भगवान श्रीराम।",
    "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า กว่าบรรดาฝูงสัตว์เดรัจฉาน จงฝ่าฟันพัฒนาวิชาการ",
    "نص حكيم له سر قاطع وذو شأن عظيم مكتوب على ثوب أخضر ومغلف بجلد أزرق. هَٰذَا بَيَانٌ لِّلنَّاسِ",
    "דג סקרן שט בים מאוכזב ולפתע מצא חברה. בְּרֵאשִׁית בָּרָא אֱלֹהִים",
    "Tiếng Việt có dấu: Trăm năm trong cõi người ta, chữ tài chữ mệnh khéo là ghét nhau.",
    "თქვენი სახელი; Հայերեն լեզու; አማርኛ ፊደል; ខ្មែរ; မြန်မာ; தமிழ் மொழி; বাংলা ভাষা; ਪੰਜਾਬੀ; తెలుగు; ᏣᎳᎩ",
    "def f(x: int) -> str:\n    return f\"{x:>10}\"  # comment\n\n\nclass A(B):\n\tpass\n",
    "#include <stdio.h>\nint main(void) {\r\n  printf(\"%d\\n\", 0x1F << 3);\r\n  return 0;\r\n}\r\n",
    "SELECT * FROM t WHERE a >= 3.14159 AND b IN ('x', 'y') -- done\n;",
    "{\"key\": [1, 2.5e-10, null, true], \"nested\": {\"ä\": \"\\u00e9\"}}",
    "https://example.org/path?q=a+b&c=%20d#frag user@example.com +1-555-0100 192.168.0.1 2026-11-29T21:00:00Z",
    "∀x∈ℝ: ⌈x⌉ = −⌊−x⌋, α ∧ ¬β, ∮E⋅da = Q, n → ∞, ∑f(i) = ∏g(i), ½ ² ³ ⅷ Ⅻ ① ⑳ ٣ ४ 五",
]
EMOJI = [
    "😀", "👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "🇩🇪🇯🇵", "❤️", "☃", "🧑🏿‍🚀", "👁️‍🗨️", "1️⃣", "🫱🏻‍🫲🏿", "♥︎",
]
MARKS = [
    "e\u0301", "a\u0308\u0304", "q\u0307\u0323", "\u1100\u1161\u11a8", "\u0061\u0315\u0300\u05ae\u0062", "\u212b", "\u2126",
    "\u0340", "\u0344", "\u0f73\u0f71", "\u0958", "\ufb1d", "\u1e9b\u0323", "\u0323", "\u0301\u0301\u0301", "\uac00\u11a8",
    "I\u0307", "\u0390", "x\u20dd", "\u09c7\u09be", "\u0b47\u0b3e", "\u1b05\u1b35", "\u30ab\u3099", "\ufb2c",
]
SPACES = [
    " ", "  ", "   ", " " * 17, " " * 200, "\t", "\t\t", "\n", "\n\n\n", "\r\n", "\r", "\r\r\n\n", " \n", "\n ", " \r\n \t",
    "\u00a0", "\u2003", "\u3000", "\u1680", "\u2028", "\u2029", "\u0085", "\u200b", "\ufeff", "\v", "\f", "\u180e", "\u202f",
]
ODD = [
    "'", "''s", "'S", "'Ll", "'ſ", "don'T", "I'M", "'re've'd", "...", "?!", "---", "____", "a_b", "$100", "50%", "\"q\"",
    "(a)", "[b]", "<c>", "<|", "|>", "<|endoftext", "endoftext|>", "\\", "\\n", "~`^", "\u0000", "\u0001", "\u007f", "\u0080",
    "\u009f", "\u00ad", "\u200d", "\u200e", "\u202e", "\ue000", "\U000f0000", "\U0010fffd", "\ufffd", "ﬁ", "Ａ１", "ß", "ẞ",
    "0", "12", "123", "1234567890", "3.14", "1,000", "x1", "1x", "０１", "²", "Ⅷ", "ǅ", "ʰ", "ª", "_", "‿", "ⓐ", "🄰",
]
MARKERS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>", "<tool_call>", "<word>", "<left>", "<right>", "naïve", "é!"]


def strings(seed, count):
    """Varied strings: every building block alone, then mixtures."""
    rng = random.Random(seed)
    blocks = SENTENCES + EMOJI + MARKS + SPACES + ODD + MARKERS
    made = [""] + blocks
    words = [word for sentence in SENTENCES for word in sentence.replace("\n", " ").split(" ") if word]

    def stray():
        while True:
            code = rng.choice([rng.randrange(0x20, 0x250), rng.randrange(0x300, 0x3000), rng.randrange(0x1F300, 0x1F650)])
            if ASSIGNED[code]:
                return chr(code)

    while len(made) < count:
        kind = rng.randrange(6)
        if kind == 0:
            made.append("".join(rng.choice(words) + rng.choice([" ", " ", ", ", "\n", ""]) for _ in range(rng.randrange(1, 9))))
        elif kind == 1:
            made.append("".join(rng.choice(rng.choice([words, EMOJI, MARKS, SPACES, ODD, MARKERS])) for _ in range(rng.randrange(2, 9))))
        elif kind == 2:
            made.append("".join(rng.choice(SPACES[:20] + ["a", "Z9", "。", "'s"]) for _ in range(rng.randrange(2, 10))))
        elif kind == 3:
            made.append("".join(rng.choice([rng.choice(words), rng.choice(MARKERS), " ", "\n", "."]) for _ in range(rng.randrange(2, 8))))
        elif kind == 4:
            made.append("".join(stray() for _ in range(rng.randrange(1, 12))))
        else:
            sentence = rng.choice(SENTENCES)
            begin = rng.randrange(len(sentence))
            made.append(sentence[begin : begin + rng.randrange(1, 30)])
    return made


def assigned_before_2020():
    """Code points whose category every Unicode version in use agrees on."""
    import unicodedata

    old = unicodedata.ucd_3_2_0
    return [old.category(chr(code)) == unicodedata.category(chr(code)) != "Cn" for code in range(0x3000)] + [
        unicodedata.category(chr(code)) != "Cn" and code < 0x1F600 for code in range(0x3000, 0x20000)
    ]


ASSIGNED = assigned_before_2020()


def train(tokenizer, vocabulary):
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False,
        special_tokens=[],
    )
    tokenizer.train_from_iterator(SENTENCES * 3 + EMOJI, trainer)


def split(pattern, **byte_level):
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False, **byte_level),
    ])


def qwen2():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = split(QWEN2)
    train(tokenizer, 900)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("<tool_call>", normalized=False)])
    return tokenizer


def qwen35():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = split(QWEN35)
    tokenizer.post_processor = ByteLevelProcessor(trim_offsets=False)
    train(tokenizer, 900)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("naïve", normalized=True), AddedToken("e\u0301!", normalized=True)])
    return tokenizer


def gpt2():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    train(tokenizer, 700)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.add_tokens([
        AddedToken("<word>", single_word=True, normalized=False), AddedToken("<left>", lstrip=True, normalized=False),
        AddedToken("<right>", rstrip=True, normalized=False), AddedToken("naïve", single_word=True, normalized=False),
    ])
    return tokenizer


def whole_words():
    """Whole words first, whatever the merges say; numbers by threes; a space before every stretch of text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC()])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), behavior="isolated"),
        pre_tokenizers.Split(",", behavior="removed"),
        pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True),
    ])
    train(tokenizer, 600)
    document = json.loads(tokenizer.to_str())
    rng = random.Random(5)
    # Without these merges some words of the vocabulary are reached only as a whole.
    merges = document["model"]["merges"]
    document["model"]["merges"] = [merge for merge in merges if rng.random() < 0.9]
    document["model"]["ignore_merges"] = True
    tokenizer = Tokenizer.from_str(json.dumps(document))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    for seed, (make, count) in enumerate([(qwen2, 1000), (qwen35, 1000), (gpt2, 500), (whole_words, 300)]):
        tokenizer = make()
        tokenizer.decoder = decoders.ByteLevel()
        document = json.loads(tokenizer.to_str())
        if make is gpt2:
            document["model"]["merges"] = [" ".join(merge) for merge in document["model"]["merges"]]
        text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
        (OUT / f"{make.__name__}.json").write_text(text + "\n", encoding="utf-8")
        tokenizer = Tokenizer.from_str(text)
        cases = [[string, tokenizer.encode(string).ids] for string in strings(seed, count)]
        lines = "".join(json.dumps(case, ensure_ascii=False, separators=(",", ":")) + "\n" for case in cases)
        (OUT / f"{make.__name__}.cases.jsonl").write_text(lines, encoding="utf-8")
        print(f"{make.__name__}: {tokenizer.get_vocab_size()} tokens, {len(cases)} strings")
    write_shipped_cases()


def write_shipped_cases():
    """Stretches of the held-out text under the tokenizer of the model that ships."""
    model = pathlib.Path(__file__).resolve().parent.parent / "models/gdn-tiny"
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    text = (model / "heldout.txt").read_bytes().decode()
    cases = [[text[i:i + 1000], tokenizer.encode(text[i:i + 1000]).ids] for i in range(0, len(text), 10000)]
    lines = "".join(json.dumps(case, ensure_ascii=False, separators=(",", ":")) + "\n" for case in cases)
    (OUT / "gdn-tiny.cases.jsonl").write_text(lines, encoding="utf-8")
    print(f"gdn-tiny: {len(cases)} strings")


if __name__ == "__main__":
    main()
