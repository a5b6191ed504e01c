#!/usr/bin/env python3
"""`epx eval gsm8k`: gsm8k_test.py EPX SOURCE_DIR

Prompts, requests and both scores are worked out here again, from the rules of SGLang's benchmark/gsm8k (the loose scorer in its own words of
Python) and by hand (the strict one), against a server with prepared answers; then against `epx serve` and ranks of its own.
"""
import ast
import http.server
import json
import os
import re
import subprocess
import sys
import tempfile
import threading

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from http_client import Server, free_port, run_cases

EPX, SOURCE = sys.argv[1:3]
MODEL = os.path.join(SOURCE, "models/tinymoe-math")
QUESTIONS = os.path.join(SOURCE, "tests/data/eval/questions.jsonl")
ITEMS = [json.loads(line) for line in open(QUESTIONS, encoding="utf-8")]
# An answer for each question, as a model might give it, and whether the strict scorer takes it for right.
ANSWERS = [(" #### 28", True), (" 27.0", True), (" It is $30.", True), (" 112 toy cars, not 1,120", False), (" no idea", False),
           (" #### 74", True), ("", False), (" 80", True), (" 2 days", True), (" 64.5", False), (" -5", True), (" $3.5 each", True),
           (" 2625", True), (" .125", True), (" 12 + 2 = 14 hours", True), (" None, so 0.", True)]
LOOSE_INVALID = -9999999


def loose(text):
    numbers = re.findall(r"\d+", text.replace(",", ""))
    if not numbers:
        return LOOSE_INVALID
    try:
        return ast.literal_eval(numbers[-1])
    except SyntaxError:
        return LOOSE_INVALID


def prompt(i, shots):
    head = "".join(f"Question: {x['question']}\nAnswer: {x['answer']}\n\n" for x in ITEMS[:shots])
    return head + f"Question: {ITEMS[i]['question']}\nAnswer:"


class Fake(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, native, answers, shots, broken=()):
        http.server.ThreadingHTTPServer.__init__(self, ("127.0.0.1", 0), Handler)
        self.native, self.broken, self.bodies = native, broken, []
        self.by_prompt = {prompt(i, shots): (i, a) for i, a in enumerate(answers)}
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def whole(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        if self.path == "/get_model_info" and self.server.native:
            return self.whole(200, {"model_path": "x"})
        if self.path == "/v1/models":
            return self.whole(200, {"data": [{"id": "fake"}]})
        self.whole(404, {})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append((self.path, body))
        i, answer = self.server.by_prompt[body["text" if self.path == "/generate" else "prompt"]]
        if i in self.server.broken:
            return self.whole(500, {"error": {"message": "out of ideas"}})
        if self.path == "/generate":
            return self.whole(200, {"text": answer, "meta_info": {"completion_tokens": 3 + i, "finish_reason": {"type": "stop"}}})
        self.whole(200, {"choices": [{"text": answer, "finish_reason": "stop"}], "usage": {"completion_tokens": 3 + i}})


def gsm8k(*args, code=0):
    p = subprocess.run([EPX, "eval", "gsm8k", *map(str, args)], capture_output=True, text=True, timeout=100)
    assert p.returncode == code, (p.returncode, p.stdout, p.stderr)
    return p.stdout, p.stderr


def figure(text, name):
    return float(re.search(rf"^{name}: ([0-9.]+)", text, re.M).group(1))


def prepared_answers():
    texts = [a for a, _ in ANSWERS]
    for native in (True, False):
        f = Fake(native, texts, 3)
        with tempfile.TemporaryDirectory() as d:
            out, _ = gsm8k("--data-path", QUESTIONS, "--port", f.server_address[1], "--num-shots", 3, "--log-file", d + "/log", "--result-file",
                           d + "/result", "--parallel", 4)
            log = [json.loads(line) for line in open(d + "/log")]
            result = json.loads(open(d + "/result").read())
        right = [loose(a) == loose(x["answer"]) for a, x in zip(texts, ITEMS)]
        strict = [s for _, s in ANSWERS]
        assert right != strict
        assert [r["right"] for r in log] == right and [r["strict_right"] for r in log] == strict, [(r["index"], r["right"], r["strict_right"]) for r in log]
        assert figure(out, "Accuracy") == round(sum(right) / 16, 3) and figure(out, "Accuracy, strict") == round(sum(strict) / 16, 3), out
        assert figure(out, "Invalid") == round(sum(loose(a) == LOOSE_INVALID for a in texts) / 16, 3), out
        assert [r["answer"] for r in log] == texts and [r["completion_tokens"] for r in log] == list(range(3, 19))
        assert [LOOSE_INVALID if r["value"] is None else int(r["value"]) for r in log] == [loose(a) for a in texts]
        assert result["task"] == "gsm8k" and result["accuracy"] == sum(right) / 16 and result["num_requests"] == 16 and result["other"]["parallel"] == 4
        assert abs(figure(out, "Output throughput") - sum(range(3, 19)) / result["latency"]) < 0.01
        path, body = f.bodies[0]
        stop = ["Question", "Assistant:", "<|separator|>"]
        if native:
            assert path == "/generate" and body["sampling_params"] == {"temperature": 0.0, "max_new_tokens": 512, "ignore_eos": False, "stop": stop}, body
        else:
            assert path == "/v1/completions" and body["max_tokens"] == 512 and body["stop"] == stop and body["temperature"] == 0, body
        f.shutdown()


def limits():
    f = Fake(True, [a for a, _ in ANSWERS], 0)
    out, _ = gsm8k("--data-path", QUESTIONS, "--port", f.server_address[1], "--num-shots", 0, "--num-questions", 5, "--max-new-tokens", 9)
    assert len(f.bodies) == 5 and f.bodies[0][1]["sampling_params"]["max_new_tokens"] == 9 and "of 5)" in out
    f.shutdown()


def unanswered():
    f = Fake(True, [a for a, _ in ANSWERS], 3, broken=(2, 5))
    out, err = gsm8k("--data-path", QUESTIONS, "--port", f.server_address[1], "--num-shots", 3, code=1)
    assert "did not answer 2 of 16 questions" in err and "question 2: status 500: out of ideas" in err, err
    f.shutdown()


def compare():
    """Two servers, one with three other answers: which, where they part, and who is right."""
    texts = [a for a, _ in ANSWERS]
    other = list(texts)
    other[0], other[4], other[11] = " #### 82", " it must be 11", " $3.5 for each"
    a, b = Fake(True, texts, 5), Fake(False, other, 5)
    with tempfile.NamedTemporaryFile() as log:
        out, _ = gsm8k("--data", QUESTIONS, "--port", a.server_address[1], "--compare", f"http://127.0.0.1:{b.server_address[1]}/", "--log-file", log.name)
        lines = [json.loads(line) for line in open(log.name)]
    assert "Same text: 13 of 16\nSame value: 14 of 16\nOnly the first right: 1\nOnly the second right: 1\n" in out, out
    assert "question 0: right and wrong; texts differ from byte 6 on\n    first  28\n    second 82\n" in out, out
    assert "question 4: wrong and right; texts differ from byte 1 on\n    first  no idea\n    second it must be 11\n" in out, out
    assert "question 11: wrong and wrong" in out and out.count("  question ") == 3
    assert lines[4]["compared"]["right"] is True and lines[4]["right"] is False and lines[4]["compared"]["answer"] == " it must be 11"
    a.shutdown()
    b.shutdown()


def own_ranks_and_server():
    """Ranks of its own and a server with another number of ranks: the same texts to the byte."""
    s = Server([EPX, "serve", "--model-path", MODEL, "--port", str(free_port()), "--log-level", "error"], r"^http://127\.0\.0\.1:(\d+)", 60)
    try:
        out, _ = gsm8k("--data-path", QUESTIONS, "--model-path", MODEL, "--tp", 2, "--dp", 2, "--enable-dp-attention", "--threads", 1, "--num-shots", 2,
                       "--compare", f"http://127.0.0.1:{s.port}")
        assert "Same text: 16 of 16" in out and out.count("(10 of 16)") >= 2 and 0.6 < figure(out, "Accuracy") < 0.65, out
    finally:
        s.process.terminate()
        s.process.wait(20)


def mistakes():
    for args, code, words in ((["--port", 1], 2, "the questions are missing"), (["--data-path", QUESTIONS, "--compare", "x"], 2, "http://HOST:PORT"),
                              (["--data-path", QUESTIONS, "--num-shots", 17, "--model-path", MODEL], 1, "0 to the 16 questions"),
                              (["--data-path", "/nonexistent", "--model-path", MODEL], 1, "/nonexistent"),
                              (["--data-path", QUESTIONS, "--port", free_port()], 1, "http://127.0.0.1:"),
                              (["--data-path", QUESTIONS, QUESTIONS], 2, "unexpected argument")):
        _, err = gsm8k(*args, code=code)
        assert words in err, (args, err)
    _, err = gsm8k("--data-path", __file__, "--model-path", MODEL, code=1)
    assert "line 2: legal: {" in err, err


sys.exit(run_cases([prepared_answers, limits, unanswered, compare, own_ranks_and_server, mistakes]))
