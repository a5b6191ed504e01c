#!/usr/bin/env python3
"""`epx eval`: eval_test.py EPX SOURCE_DIR REFERENCE_DIR

Perplexity against values of an independent implementation (tests/tools/perplexity_golden.py); comparison with reference files that are
right, and with ones that were changed in one place.
"""
import json
import pathlib
import re
import struct
import subprocess
import sys
import tempfile

EPX, SOURCE = sys.argv[1], pathlib.Path(sys.argv[2])
TINY, QWEN = SOURCE / "models/tinymoe-math", pathlib.Path(sys.argv[3]) / "qwen3_moe"
TWO_RANKS = ["--tp", "2", "--dp", "2", "--enable-dp-attention", "--threads", "1"]


def run(*args):
    p = subprocess.run([EPX, "eval", *map(str, args)], capture_output=True, text=True, timeout=100)
    print("epx eval", *args, "->", p.returncode, flush=True)
    return p.returncode, p.stdout, p.stderr


def expect(condition, *what):
    if not condition:
        print("FAILED:", *what)
        sys.exit(1)


def check_perplexity():
    text = SOURCE / "tests/data/eval/problems.txt"
    for window, mean, ranks in [(64, 2.602469, []), (129, 2.376655, TWO_RANKS), (4096, 2.489494, [])]:
        code, out, err = run("perplexity", text, "--model-path", TINY, "--window", window, *ranks)
        expect(code == 0, out, err)
        n, got = re.search(r"scored +(\d+) tokens, mean negative log-likelihood ([0-9.]+)", out).groups()
        expect(int(n) == 1044 and abs(float(got) - mean) < 1e-5, out, "expected", mean)


def change(name, edit):
    """A copy of the reference with the bytes of one tensor changed."""
    d = pathlib.Path(tempfile.mkdtemp(prefix="epx-eval-"))
    (d / "reference.json").write_bytes((QWEN / "reference.json").read_bytes())
    data = bytearray((QWEN / "reference.safetensors").read_bytes())
    n = struct.unpack("<Q", data[:8])[0]
    begin, end = (8 + n + o for o in json.loads(data[8:8 + n])[name]["data_offsets"])
    data[begin:end] = edit(bytes(data[begin:end]))
    (d / "reference.safetensors").write_bytes(data)
    return d


def add_to_first(fmt, amount):
    return lambda b: struct.pack(fmt, struct.unpack(fmt, b[:4])[0] + amount) + b[4:]


def check_logits():
    for ranks in ([], TWO_RANKS):
        code, out, err = run("logits", "--model-path", QWEN, *ranks)
        expect(code == 0 and out.count(": ok") == 3 and "21 of 21" in out and "96 of 96" in out, out, err)
    code, out, err = run("logits", "--model-path", QWEN, "--tolerance", "1e-7")
    expect(code == 1 and "OVER" in out, out, err)
    for name, edit, word in [("logits_last.2", add_to_first("<f", 0.01), "OVER"), ("router_ids.1.layer1", add_to_first("<i", 1), "DIFFERENT"),
                             ("greedy.3", add_to_first("<i", 1), "DIFFERENT")]:
        d = change(name, edit)
        code, out, err = run("logits", "--model-path", QWEN, "--reference", d)
        expect(code == 1 and out.count(word) == 1 and out.count(": ok") == 2, name, out, err)
        for f in d.iterdir():
            f.unlink()
        d.rmdir()


def check_mistakes():
    for args, part in [(["foo", "--model-path", TINY], '"foo": unknown'), (["perplexity", "--model-path", TINY], "FILE is missing"),
                       ([], "--model-path is missing")]:
        code, out, err = run(*args)
        expect(code == 2 and part in err, out, err)
    for args, part in [(["perplexity", "/nonexistent", "--model-path", TINY], "/nonexistent"),
                       (["logits", "--model-path", TINY, "--reference", QWEN], "expected 1 of 4096"),
                       (["logits", "--model-path", TINY, "--reference", "/nonexistent"], "/nonexistent/reference.json")]:
        code, out, err = run(*args)
        expect(code == 1 and part in err, out, err)


check_perplexity()
check_logits()
check_mistakes()
