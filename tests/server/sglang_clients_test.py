"""SGLang's own clients from PyPI, unmodified, against `epx serve` with two ranks: sglang_clients_test.py EPX SOURCE_DIR VENV_PYTHON

`python -m sglang.bench_serving` with random-ids over the three APIs, and `python -m sglang.test.few_shot_gsm8k`, whose rules are those of
benchmark/gsm8k; the latter must agree with `epx eval gsm8k`."""
import json
import os
import re
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from http_client import Server, free_port, run_cases

EPX, SOURCE, PYTHON = sys.argv[1:4]
MODEL = os.path.join(SOURCE, "models/tinymoe-math")
QUESTIONS = os.path.join(SOURCE, "tests/data/eval/questions.jsonl")
HAS_IT = "import importlib.util, sys; sys.exit(importlib.util.find_spec('sglang') is None)"  # importing it takes seconds
if not os.access(PYTHON, os.X_OK) or subprocess.run([PYTHON, "-c", HAS_IT]).returncode:
    print(f"skip: no sglang package; scripts/install-deps ci makes {PYTHON} with it")
    sys.exit(77)

SCRATCH = tempfile.TemporaryDirectory()
ENV = dict(os.environ, HF_HUB_OFFLINE="1", HF_HOME=SCRATCH.name, HOME=SCRATCH.name)  # nothing is downloaded
S = Server([EPX, "serve", "--model-path", MODEL, "--port", str(free_port()), "--tp", "2", "--dp", "2", "--enable-dp-attention", "--moe-a2a-backend",
            "pplx", "--log-level", "error"], r"^http://127\.0\.0\.1:(\d+)", 60)


def client(module, *args):
    p = subprocess.run([PYTHON, "-m", module, *map(str, args)], capture_output=True, text=True, timeout=120, env=ENV, cwd=SCRATCH.name)
    assert p.returncode == 0, (p.stdout[-2000:], p.stderr[-2000:])
    return p.stdout


def bench(backend, *args):
    out = os.path.join(SCRATCH.name, backend + ".jsonl")
    text = client("sglang.bench_serving", "--backend", backend, "--dataset-name", "random-ids", "--num-prompt", 12, "--random-input-len", 48,
                  "--random-output-len", 24, "--random-range-ratio", 1, "--max-concurrency", 6, "--host", "127.0.0.1", "--port", S.port,
                  "--tokenizer", MODEL, "--output-file", out, "--output-details", "--disable-tqdm", *args)
    assert "Serving Benchmark Result" in text
    return json.loads(open(out).read())


def check(r):
    assert r["completed"] == 12 and r["total_input_tokens"] == 12 * 48 and r["total_output_tokens"] == 12 * 24, r
    assert r["errors"] == [""] * 12 and all(r["generated_texts"]) and all(t > 0 for t in r["ttfts"]), r["errors"]
    assert r["mean_itl_ms"] > 0 and r["mean_tpot_ms"] > 0 and r["output_throughput"] > 0


def bench_serving_native():
    """And `epx bench serve` finds the same lengths and writes every key that SGLang's line has."""
    theirs = bench("sglang", "--flush-cache")
    check(theirs)
    assert theirs["server_info"]["tp_size"] == 2 and all(len(itl) <= 23 for itl in theirs["itls"])  # 24 tokens, the first without a gap
    out = subprocess.run([EPX, "bench", "serve", "--num-prompts", "12", "--random-input-len", "48", "--random-output-len", "24", "--random-range-ratio", "1",
                          "--max-concurrency", "6", "--port", str(S.port), "--output-file", "-", "--output-details"], capture_output=True, text=True, timeout=60)
    assert out.returncode == 0, out.stderr
    mine = json.loads(out.stdout)
    check(mine)
    missing = set(theirs) - set(mine) - {"total_input_text_tokens", "total_input_vision_tokens"}  # what it has for images
    assert missing == set(), missing


def bench_serving_completions():
    check(bench("sglang-oai"))


def bench_serving_chat():
    check(bench("sglang-oai-chat"))


def gsm8k():
    text = client("sglang.test.few_shot_gsm8k", "--data-path", QUESTIONS, "--num-questions", 16, "--num-shots", 3, "--parallel", 8, "--port", S.port)
    theirs = re.search(r"^Accuracy: ([0-9.]+)\nInvalid: ([0-9.]+)", text, re.M).groups()
    p = subprocess.run([EPX, "eval", "gsm8k", "--data-path", QUESTIONS, "--num-shots", "3", "--parallel", "8", "--port", str(S.port)],
                       capture_output=True, text=True, timeout=60)
    assert p.returncode == 0, p.stderr
    mine = re.search(r"^Accuracy: ([0-9.]+) .*\nInvalid: ([0-9.]+)", p.stdout, re.M).groups()
    assert mine == theirs and 0.5 < float(mine[0]) < 1, (mine, theirs)


try:
    CODE = run_cases([bench_serving_native, bench_serving_completions, bench_serving_chat, gsm8k])
finally:
    S.process.terminate()
    END = S.process.wait(20)
sys.exit(CODE or (1 if END else 0))
