#!/usr/bin/env python3
"""Make tests/data/tokenizer_cases/: strings with the ids that the `tokenizers` package (PyPI) gives them.

Oracle: tokenizers 0.23.3 on the four tokenizer.json of tests/data/tokenizers. Deterministic: fixed seed, no clock. Needs
Python 3.11 (unicodedata of Unicode 14.0.0), so that only characters assigned in Unicode 14 are drawn.

  cases.jsonl.xz        one line a string: {"t": text, "n": NFC when it differs, "<tokenizer>": ids}
  options.json          small tokenizers that use one option each, with strings and ids
  differences.json      strings on which PCRE2 10.42 and utf8proc 2.8 are known to differ from the package
"""
import argparse
import json
import lzma
import random
import unicodedata
from pathlib import Path

import tokenizers
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
NAMES = ["qwen2_5", "qwen3", "deepseek_v3", "gptoss"]
N_STRINGS = 2000

WORDS = """the of and to in is that it was for on are with as his they at be this from have or by one had not but what all were
when we there can an your which their said if do will each about how up out them then she many some so these would other into has
more her two like him see time could no make than first been its who now people my made over did down only way find use may water
long little very after words called just where most know router expert token combine dispatch gradient Tensor latency bandwidth
didn't we're I'll you've he'd it's can't THEY'RE DON'T I'M o'clock rock'n'roll e-mail state-of-the-art co-operate Ph.D.
U.S.A.""".split()

SENTENCES = [
    "Der schnelle braune Fuchs springt über den faulen Hund; größer, süßer, ähnlich.",
    "Le cœur déçu mais l'âme plutôt naïve, Louÿs rêva de crapaüter en canoë.",
    "El pingüino Wenceslao hizo kilómetros bajo exhaustiva lluvia y frío.",
    "Příliš žluťoučký kůň úpěl ďábelské ódy. Zażółć gęślą jaźń.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία. Τάχιστη αλώπηξ βαφής.",
    "いろはにほへと ちりぬるを。今日は2026年11月30日です。カタカナも。",
    "我能吞下玻璃而不伤身体。北京欢迎你!价格是¥1,234.50元。",
    "다람쥐 헌 쳇바퀴에 타고파. 안녕하세요 세계!",
    "نص حكيم له سر قاطع وذو شأن عظيم مكتوب على ثوب أخضر ١٢٣٤٥",
    "דג סקרן שט בים מאוכזב ולפתע מצא לו חברה",
    "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण का सर्वनाश १२३",
    "নববর্ষের শুভেচ্ছা রইল সবাইকে ৪৫৬",
    "யாமறிந்த மொழிகளிலே தமிழ்மொழி போல் இனிதாவது எங்கும் காணோம்",
    "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า กว่าบรรดาฝูงสัตว์เดรัจฉาน ๑๒๓",
    "Tiếng Việt có nhiều dấu thanh: ngã, hỏi, nặng, sắc, huyền.",
    "Pijamalı hasta yağız şoföre çabucak güvendi. İstanbul'da ılık.",
    "საქართველო ლამაზია. Հայաստան գեղեցիկ է.",
    "ბუ ᏣᎳᎩ ᐃᓄᒃᑎᑐᑦ ខ្មែរ ລາວ မြန်မာ ትግርኛ བོད་ཡིག",
    "\U00010330\U00010331\U00010332 \U00012000\U00012001 \U0001d400\U0001d401\U0001d7d8\U0001d7d9 \U00013000",
]

CODE = [
    "for (size_t i = 0; i < n; i++) {\n    sum += x[i] * y[i];\n}\n",
    "def f(x: int) -> int:\n\treturn x ** 2 if x > 0 else -x  # comment\n",
    "#include <stdio.h>\r\nint main(void) { printf(\"%d\\n\", 42); return 0; }\r\n",
    "SELECT a.id, COUNT(*) FROM t AS a WHERE a.x >= 10 GROUP BY 1;",
    "const f = async ({a, b}) => await g(`${a}-${b}`, [...b]);",
    "<div class=\"x\"><a href='https://example.org/a?b=c&d=%20e#f'>y</a></div>",
    "{\"key\": [1, 2.5e-3, null, true], \"nested\": {\"a\\nb\": \"\\u00e9\"}}",
    "x86_64-linux-gnu /usr/lib/../bin//ls -la | grep -E '^[a-z]+$' && echo $?",
    "\\begin{equation} \\frac{\\partial f}{\\partial x} = \\sum_{i=1}^{n} x_i^2 \\end{equation}",
    "camelCaseIdentifier snake_case_name SCREAMING_SNAKE kebab-case HTMLParser iPhone15Pro v2ray",
    "| a | b |\n|---|---|\n| 1 | 2 |\n\n* item\n  - sub\n\n```c\nint x;\n```\n",
    "user@example.com +49 (0)30 1234-5678 192.168.0.1 2001:db8::1 #tag @name",
]

EMOJI = ["\U0001f600", "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466", "\U0001f44d\U0001f3fd", "\u2764\ufe0f",
         "\U0001f1e9\U0001f1ea", "\U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f", "1\ufe0f\u20e3",
         "\U0001f9d1\u200d\U0001f4bb", "\u262f", "\u2603\ufe0e"]

SPACES = [" ", "  ", "   ", "\t", "\n", "\r\n", "\n\n", "\r", "\x0b", "\x0c", "\xa0", "\u2003", "\u3000", "\u2028", "\u2029",
    "\x85",
          "\u200b", "\ufeff", "\u202f", "\u1680", "\x1c", "\x1f", " \n", "\n ", "\t\n\t"]

MARKS = ["\u0301", "\u0300", "\u0308", "\u0323", "\u0327", "\u0331", "\u0345", "\u05b0", "\u064b", "\u093c", "\u3099", "\u0344"]

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<|fim_prefix|>",
            "<|box_start|>", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁sep｜>",
            "<|EOT|>", "<｜▁pad▁｜>", "<｜place▁holder▁no▁12｜>", "<|start|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>",
            "<|startoftext|>", "<|reserved_200017|>", "<|endofprompt|>", "<|im_start", "im_end|>", "<|", "|>", "<｜", "▁"]


# Known differences, found by comparing every assigned character in the context of difference_text().
# Marks newer than Unicode 9: the package's NFC knows neither their combining class nor the composition of U+11938.
NEWER_MARKS = """7fd 899-89b 8cf-8d3 c3c d3b-d3c eba 1715 1abf-1ac0 1ac3-1ac4 1aca 1df6-1dfa a82c 10f46-10f47 10f4b
10f4d-10f50 10f83
10f85 11070 1133b 11839-1183a 1193d-1193e 11943 119e0 11a34 11a47 11a99 11d42 11d44-11d45 11d97 16ff0-16ff1"""
# Code points newer than Unicode 14: Oniguruma has their properties, PCRE2 10.42 takes them as unassigned.
NEWER_POINTS = "1b4e 1c89 2427 2ffc 31350 1fa75"
PACKAGE_SPACE = 0x180E  # \s of PCRE2 only


def points(text):
    for part in text.split():
        first, _, last = part.partition("-")
        yield from range(int(first, 16), int(last or first, 16) + 1)


KNOWN = {*points(NEWER_MARKS), PACKAGE_SPACE, 0x11930, 0x11938}


def difference_text(c):
    return chr(c) + "a " + chr(c) * 2 + "!" + chr(c) + " " + chr(c) + "1\na" + chr(c) + "\u0301"


def assigned():
    """Characters of Unicode 14 that may appear in text, those of differences.json excepted."""
    return [chr(c) for c in range(0x110000) if unicodedata.category(chr(c)) not in ("Cn", "Cs", "Co") and c not in KNOWN]


class Maker:
    def __init__(self, seed):
        self.r = random.Random(seed)
        self.chars = assigned()
        self.by_category = {}
        for c in self.chars:
            self.by_category.setdefault(unicodedata.category(c), []).append(c)

    def english(self):
        r = self.r
        words = [r.choice(WORDS) for _ in range(r.randint(1, 30))]
        words = [w.capitalize() if r.random() < 0.1 else w for w in words]
        return "".join(w + r.choice([" "] * 12 + [", ", ". ", "; ", "! ", "? ", "\n", " (", ") ", "\"", "'", " - ",
            "..."]) for w in words)

    def numbers(self):
        r = self.r
        parts = [str(r.randint(0, 10 ** r.randint(1, 15))), f"{r.uniform(-1e6, 1e6):.{r.randint(0, 6)}f}", f"{r.random():e}",
            "1,234,567",
                 "²³¼½", "٣٤٥", "０１２", "Ⅷ", "0x1F", "3.14159", "1e-10", "10%", "$5.00", "12:34:56", "2026-11-30", "〇一二"]
        return r.choice(["", " ", ", ", "\n"]).join(r.choice(parts) for _ in range(r.randint(1, 8)))

    def script(self):
        r = self.r
        start = self.chars.index(r.choice(self.chars))
        pool = self.chars[start:start + 60]
        return " ".join("".join(r.choice(pool) for _ in range(r.randint(1, 8))) for _ in range(r.randint(1, 6)))

    def anything(self):
        r = self.r
        categories = sorted(self.by_category)
        return "".join(r.choice(self.by_category[r.choice(categories)]) for _ in range(r.randint(1, 24)))

    def marks(self):
        r = self.r
        base = "aeiouAEOnsgc한각がｶαωЙاבक1 "
        return "".join(r.choice(base) + "".join(r.choice(MARKS) for _ in range(r.randint(0, 4))) for _ in range(r.randint(1, 12)))

    def decomposed(self):
        return unicodedata.normalize(self.r.choice(["NFD", "NFKD", "NFC"]), self.r.choice(SENTENCES))

    def spaces(self):
        r = self.r
        out = []
        for _ in range(r.randint(1, 10)):
            out.append(r.choice(SPACES) * r.choice([1, 1, 1, 2, 3, 7, 17]))
            out.append(r.choice(["", "", "x", "9", "é", "中", ".", "'s", "'LL", "'ſ", "don't"]))
        return "".join(out)

    def emoji(self):
        return "".join(self.r.choice(EMOJI + [" ", "a", "!"]) for _ in range(self.r.randint(1, 10)))

    def specials(self):
        r = self.r
        return "".join(r.choice(SPECIALS) if r.random() < 0.6 else r.choice(["", " ", "\n", "text", " word ", "é", "e\u0301",
            "中文"])
                       for _ in range(r.randint(1, 10)))

    def random_bytes(self):
        r = self.r
        data = bytes(r.randrange(256) for _ in range(r.randint(1, 40)))
        return "".join(c for c in data.decode("utf-8", "replace") if unicodedata.category(c) not in ("Cn", "Cs", "Co"))

    def long_repeat(self):
        r = self.r
        unit = r.choice(["a", "A", " ", "\n", "ab", "1", "中", "!", "=", "-_", "é", "e\u0301", "\U0001f600", "the ", "'s", "<",
            "\t", "Aa"])
        return unit * r.randint(20, 600) + r.choice(["", "x", " y"])

    def code(self):
        return "".join(self.r.choice(CODE) for _ in range(self.r.randint(1, 2)))

    def mixed(self):
        parts = [self.english, self.numbers, self.spaces, self.emoji, self.marks, self.script, self.code]
        return "".join(self.r.choice(parts)()[:60] for _ in range(self.r.randint(2, 4)))

    def draw(self):
        kinds = [(self.english, 6), (self.code, 3), (self.numbers, 3), (self.script, 5), (self.anything, 3), (self.marks, 3),
                 (self.decomposed, 2), (self.spaces, 4), (self.emoji, 2), (self.specials, 3), (self.random_bytes, 2),
                 (self.long_repeat, 1), (self.mixed, 4)]
        return self.r.choices([k for k, _ in kinds], [w for _, w in kinds])[0]()


def make_strings(seed):
    maker = Maker(seed)
    out = ["", " ", "a", "\0", "a\0b", "\n", "\r\n", "\ufeff", "\ufffd"] + SENTENCES + CODE + EMOJI + SPACES + SPECIALS
    seen = set(out)
    while len(out) < N_STRINGS:
        text = maker.draw()
        if text in seen:
            continue
        seen.add(text)
        out.append(text)
    return out[:N_STRINGS]


def load(name):
    with lzma.open(ROOT / "tests/data/tokenizers" / name / "tokenizer.json.xz", "rt", encoding="utf-8") as f:
        return Tokenizer.from_str(f.read())


def ids(tok, text):
    return tok.encode(text, add_special_tokens=False).ids


def write_cases(out_dir, seed):
    loaded = {n: load(n) for n in NAMES}
    with lzma.open(out_dir / "cases.jsonl.xz", "wt", encoding="utf-8", preset=9 | lzma.PRESET_EXTREME, newline="\n") as f:
        for text in make_strings(seed):
            line = {"t": text}
            nfc = unicodedata.normalize("NFC", text)
            if nfc != text:
                line["n"] = nfc
            line.update({n: ids(tok, text) for n, tok in loaded.items()})
            if line["qwen2_5"] == line["qwen3"]:
                del line["qwen3"]  # the two agree but for the later added tokens
            f.write(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n")
    return loaded


# ---- small tokenizers, one option each ----

def byte_chars():
    own = list(range(0x21, 0x7F)) + list(range(0xA1, 0xAD)) + list(range(0xAE, 0x100))
    table, n = {}, 0
    for b in range(256):
        table[b] = chr(b) if b in own else chr(256 + n)
        n += b not in own
    return table


def small(**changes):
    vocab = {c: i for i, c in enumerate(byte_chars().values())}
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("a", "a"), ("aa", "aa"), ("i", "n"), ("1", "2"), ("Ġ", "a"), ("l", "l"),
              ("a", "aa"), ("e", "r"), ("Ã", "©"), ("aa", "a")]
    for a, b in merges:
        vocab.setdefault(a + b, len(vocab))
    t = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
         "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
         "post_processor": None, "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
         "use_regex": True},
         "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
         "end_of_word_suffix": None,
                   "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": vocab,
                   "merges": [list(m) for m in merges]}}
    added = changes.pop("added", [])
    model = changes.pop("model", {})
    t.update(changes)
    t["model"].update(model)
    for i, a in enumerate(added):
        t["added_tokens"].append({"id": len(vocab) + i, "content": a[0], "special": "special" in a[1:],
            "single_word": "word" in a[1:],
                                  "lstrip": "lstrip" in a[1:], "rstrip": "rstrip" in a[1:], "normalized": "normalized" in a[1:]})
    return t


def split(pattern, behavior, invert=False, kind="Regex"):
    return {"type": "Split", "pattern": {kind: pattern}, "behavior": behavior, "invert": invert}


def sequence(*steps, **byte_level):
    last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    last.update(byte_level)
    return {"type": "Sequence", "pretokenizers": list(steps) + [last]}


TEXTS = ["", " ", "the", "  the  the", "aaaaa aaaaaaaa", "in the inner 12 1212 a12b", "a-b--c---", "--a", "a--", "- -",
    "don't we'll",
         "THE thé the\u0301", "<x>the<x> <x>", " <x> ", "<x><x>", "<xy><x>y", "a<x>b", "é<x>é <x>\n\n<x>.",
         "the\u00a0<x>\u2003<x>",
         "<x>\u0301", "e\u0301<é>e\u0301 <e\u0301>", "1a2b33c", "x٣x²", "\n\n the\t", "caa aab aaa", "_<x>_ <x>9 9<x>",
         "abcabc", "a  b",
         "x\u200d<x>", "(<x>)", "<x> \n <x>", "zz azz zza zz9 _zz (zz) zzé zz zz", "zzzz  zz\u0301 zz\u200d"]


def option_tokenizers():
    out = {
        "prefix_space": small(pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
            "use_regex": True}),
        "prefix_space_split": small(pre_tokenizer=sequence(split("-", "Isolated"), add_prefix_space=True, use_regex=True)),
        "no_regex": small(pre_tokenizer={"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
            "use_regex": False}),
        "digits": small(pre_tokenizer=sequence({"type": "Digits", "individual_digits": True})),
        "digit_runs": small(pre_tokenizer=sequence({"type": "Digits", "individual_digits": False})),
        "ignore_merges": small(model={"ignore_merges": True}),
        "string_merges": small(model={"merges": ["t h", "th e", "Ġ the", "a a", "i n", "a aa"],
            "vocab": small()["model"]["vocab"]}),
        "nfc_sequence": small(normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}]}),
        "lookbehind": small(pre_tokenizer=sequence(split("(?<=a)b|^c|x$", "Isolated"))),
        "empty_matches": small(pre_tokenizer=sequence(split("-*", "Isolated"))),
        "empty_merged": small(pre_tokenizer=sequence(split("-*", "MergedWithPrevious"))),
        "nothing_matches": small(pre_tokenizer=sequence(split("ZZZ", "Removed"))),
        "literal_dots": small(pre_tokenizer=sequence(split("--", "Removed", kind="String"), split(".", "Isolated",
            kind="String"))),
    }
    for behavior in ["Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous"]:
        for invert in [False, True]:
            out[f"split_{behavior}_{invert}"] = small(pre_tokenizer=sequence(split("-|a", behavior, invert)))
    flags = {"plain": [], "special": ["special"], "word": ["word"], "lstrip": ["lstrip"], "rstrip": ["rstrip"],
        "both": ["lstrip", "rstrip"],
             "all": ["word", "lstrip", "rstrip"], "normalized": ["normalized"], "normalized_word": ["normalized", "word"]}
    for name, f in flags.items():
        out[f"added_{name}"] = small(normalizer={"type": "NFC"}, added=[("<x>", *f), ("<xy>", *f), ("<é>", *f), ("zz", *f)])
    out["added_spaces"] = small(added=[("<x>", "rstrip"), (" ", "normalized"), ("\n\n",)])
    out["added_in_vocab"] = small(added=[])
    out["added_in_vocab"]["added_tokens"] = [{"id": out["added_in_vocab"]["model"]["vocab"]["the"], "content": "the",
        "special": True,
                                              "single_word": True, "lstrip": False, "rstrip": False, "normalized": False}]
    return out


def write_options(out_dir):
    rows = []
    base = small()["model"]
    for name, t in option_tokenizers().items():
        tok = Tokenizer.from_str(json.dumps(t))
        row = {"name": name, "ids": [ids(tok, x) for x in TEXTS]}
        t["model"] = {k: v for k, v in t["model"].items() if base.get(k) != v}  # the rest is in "model" of the file
        row["tokenizer"] = t
        rows.append(row)
    with open(out_dir / "options.json", "w", encoding="utf-8", newline="\n") as f:
        f.write(json.dumps({"model": base, "texts": TEXTS, "rows": rows}, separators=(",", ":")) + "\n")


def write_differences(out_dir, loaded):
    """Each row: a string, what the package gives, and the NFC of Unicode 14, which decode(encode(text)) must be here."""
    wanted = [("marks newer than Unicode 9", c, ["qwen2_5", "qwen3"]) for c in points(NEWER_MARKS)]
    wanted += [("U+180E", PACKAGE_SPACE, ["qwen2_5", "qwen3", "deepseek_v3"])]
    wanted += [("code points newer than Unicode 14", c, ["deepseek_v3"]) for c in points(NEWER_POINTS)]
    rows = []
    for why, c, names in wanted:
        text = difference_text(c)
        rows.append({"why": why, "point": f"U+{c:04X}", "text": text, "nfc": unicodedata.normalize("NFC", text),
                     "ids": {n: ids(loaded[n], text) for n in names}})
    with open(out_dir / "differences.json", "w", encoding="utf-8", newline="\n") as f:
        f.write("[\n" + ",\n".join(json.dumps(r, separators=(",", ":")) for r in rows) + "\n]\n")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seed", type=int, default=20261130)
    p.add_argument("--out", type=Path, default=ROOT / "tests/data/tokenizer_cases")
    a = p.parse_args()
    if unicodedata.unidata_version != "14.0.0":
        raise SystemExit(f"unicodedata {unicodedata.unidata_version}: Python 3.11 with Unicode 14.0.0 is needed")
    a.out.mkdir(parents=True, exist_ok=True)
    write_options(a.out)
    write_differences(a.out, write_cases(a.out, a.seed))
    print("tokenizers", tokenizers.__version__)


if __name__ == "__main__":
    main()
