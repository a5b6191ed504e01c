#!/usr/bin/env python3
"""`epx bench serve` against a server that sends known events at known times, and against `epx serve`: bench_serve_test.py EPX SOURCE_DIR

The fake server notes when it really sent each event (one monotonic clock for all processes), so that a loaded machine does not blur the
truth: every time that the client reports must be that of the event, a little later.
"""
import http.server
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from http_client import Server, free_port, run_cases

EPX, SOURCE = sys.argv[1:3]
MODEL = os.path.join(SOURCE, "models/tinymoe-math")
SLACK = 0.25  # s, of a loaded machine


class Fake(http.server.ThreadingHTTPServer):
    """Plays `script`: a list of (seconds to wait, text to add, tokens so far) for every request; notes what came and when it was answered."""
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, script, status=200, fail=None, gate=0):
        http.server.ThreadingHTTPServer.__init__(self, ("127.0.0.1", 0), Handler)
        self.script, self.status, self.fail, self.gate = script, status, fail, gate  # gate: answer when so many have come
        self.seen, self.live, self.most, self.lock = [], 0, 0, threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def port(self):
        return self.server_address[1]


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def setup(self):
        http.server.BaseHTTPRequestHandler.setup(self)
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def whole(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        if self.path == "/v1/models":
            return self.whole(200, {"data": [{"id": "fake"}]})
        self.whole(404, {"error": {"message": "no such path"}})

    def chunk(self, text):
        data = text.encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def event(self, text, piece, n, last):
        if self.path == "/generate":
            return {"text": text, "meta_info": {"prompt_tokens": 11, "completion_tokens": n, "finish_reason": {"type": "length"} if last else None}}
        choice = {"index": 0, "finish_reason": "length" if last else None}
        choice.update({"delta": {"content": piece}} if "chat" in self.path else {"text": piece})
        return {"choices": [choice]}

    def do_POST(self):
        f = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        note = {"path": self.path, "body": body, "at": time.monotonic(), "events": [], "key": self.headers.get("Authorization")}
        with f.lock:
            f.seen.append(note)
            f.live += 1
            f.most = max(f.most, f.live)
        try:
            if f.status != 200:
                return self.whole(f.status, {"error": {"message": "not today"}})
            self.play(f, body, note)
        finally:
            with f.lock:
                f.live -= 1

    def play(self, f, body, note):
        if not body["stream"]:
            time.sleep(sum(wait for wait, _, _ in f.script))
            text = "".join(piece for _, piece, _ in f.script)
            note["events"].append((time.monotonic(), text, f.script[-1][2]))
            return self.whole(200, self.event(text, text, f.script[-1][2], True))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        end = time.monotonic() + 40
        while f.most < f.gate and time.monotonic() < end:
            time.sleep(0.1)
        text = ""
        for i, (wait, piece, n) in enumerate(f.script):
            time.sleep(wait)
            if f.fail == "error" and i == 2:
                note["events"].append((time.monotonic(), "", 0))
                self.chunk('data: {"error": {"message": "a rank died"}}\n\n')
                break
            if f.fail == "cut" and i == 2:
                break
            text += piece
            note["events"].append((time.monotonic(), piece, n))
            self.chunk(": a comment\n\ndata: " + json.dumps(self.event(text, piece, n, i == len(f.script) - 1)) + "\n\n")
        if self.path != "/generate" and not f.fail:
            self.chunk("data: " + json.dumps({"choices": [], "usage": {"completion_tokens": f.script[-1][2], "prompt_tokens": 11}}) + "\n\n")
        if f.fail != "cut":
            note["done"] = time.monotonic()
            self.chunk("data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")


def bench(port, *args, code=0, env=None, n=4):
    """The JSON line and what was printed."""
    with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as out:
        argv = [EPX, "bench", "serve", "--port", str(port), "--tokenizer", MODEL, "--num-prompts", str(n), "--random-input-len", "12",
                "--random-output-len", "9", "--random-range-ratio", "1", "--output-file", out.name, "--output-details"] + list(args)
        p = subprocess.run(argv, capture_output=True, text=True, timeout=100, env=dict(os.environ, **(env or {})))
        assert p.returncode == code, (p.returncode, p.stdout, p.stderr)
        lines = out.read().splitlines()
        return (json.loads(lines[0]) if lines else None), p.stdout, p.stderr


class Late(AssertionError):
    pass


def near(got, want, slack, *what):
    assert want - 1e-6 <= got, (got, want, *what)
    if got > want + slack:
        raise Late((got, want, *what))


def retried(case):
    """Once more, and once more, when the client came late to what the server had sent in time: another process had the core."""
    for _ in range(4):
        try:
            return case()
        except Late as late:
            print(f"late: {late}", flush=True)
    return case()


# A first event without text, the first text with 2 tokens, then 3 and 1 more at once, one that repeats, and the last.
SCRIPT = [(0.05, "", 0), (0.1, "ab", 2), (0.15, "cd", 5), (0.05, "e", 6), (0.02, "", 6), (0.1, "f", 9)]


def expected(note, start, native):
    """Times of one request by the definitions of SGLang's bench_serving, from when the events were sent."""
    text = [(t, n) for t, piece, n in note["events"] if piece]
    gaps = []
    for (t0, n0), (t1, n1) in zip(text, text[1:]):
        gaps += [(t1 - t0) / (n1 - n0)] * (n1 - n0) if native else [t1 - t0]
    return text[0][0] - start, gaps, note["done"] - start


def times(backend):
    native = backend == "sglang"
    f = Fake(SCRIPT)
    r, _, _ = bench(f.port, "--backend", backend, "--max-concurrency", "1")
    f.shutdown()
    assert r["completed"] == 4 and r["failed"] == 0 and f.most == 1, (r, f.most)
    warm, notes = f.seen[0], f.seen[1:]
    assert warm["body"].get("max_tokens", warm["body"].get("max_completion_tokens", warm["body"].get("sampling_params", {}).get("max_new_tokens"))) == 9
    left = sorted(notes, key=lambda n: n["at"])
    for i in sorted(range(4), key=lambda i: r["start_times"][i]):
        note = left.pop(0)  # one at a time, so that it is known which note is whose
        start = r["start_times"][i]
        near(note["at"], start, SLACK, "arrival")
        ttft, gaps, latency = expected(note, start, native)
        near(r["ttfts"][i], ttft, SLACK)
        near(r["e2e_latencies"][i], latency, SLACK)
        assert len(r["itls"][i]) == len(gaps) == (7 if native else 3), r["itls"][i]
        near(sum(r["itls"][i]) + SLACK, sum(gaps), 2 * SLACK)
        assert r["output_lens"][i] == 9 and r["input_lens"][i] == 12 and r["server_input_lens"][i] == 11 and r["generated_texts"][i] == "abcdef"
    same_statistics(r)


def native_times():
    retried(lambda: times("sglang"))


def completion_times():
    retried(lambda: times("sglang-oai"))


def chat_times():
    retried(lambda: times("vllm-chat"))


def percentile(v, p):
    at = p / 100 * (len(v) - 1)
    i = min(int(at), len(v) - 2) if len(v) > 1 else 0
    return v[i] + (v[i + 1] - v[i]) * (at - i) if len(v) > 1 else v[0]


def same_statistics(r):
    """Every figure of the line, from the times of the requests by another program: this one."""
    done = [i for i, e in enumerate(r["errors"]) if e == ""]
    lists = {"ttft": [r["ttfts"][i] for i in done], "e2e_latency": [r["e2e_latencies"][i] for i in done],
             "itl": [x for i in done for x in r["itls"][i]],
             "tpot": [(r["e2e_latencies"][i] - r["ttfts"][i]) / (r["output_lens"][i] - 1) for i in done if r["output_lens"][i] > 1]}
    for name, v in lists.items():
        v = sorted(v)
        mean = sum(v) / len(v)
        want = {"mean": mean, "median": percentile(v, 50), "std": math.sqrt(sum((x - mean) ** 2 for x in v) / len(v)), "p90": percentile(v, 90),
                "p95": percentile(v, 95), "p99": percentile(v, 99), "max": v[-1]}
        for what, value in want.items():
            assert abs(r[f"{what}_{name}_ms"] - 1000 * value) < 1e-3, (what, name, r[f"{what}_{name}_ms"], 1000 * value)
    total_in, total_out = sum(r["input_lens"][i] for i in done), sum(r["output_lens"])
    first = min(r["start_times"][i] for i in done)
    tokens, present = {}, {}
    for i in done:
        t = r["start_times"][i] + r["ttfts"][i] - first
        for gap in [0] + r["itls"][i]:
            t += gap
            tokens[int(t)] = tokens.get(int(t), 0) + 1
        for s in range(int(r["start_times"][i] - first), int(r["start_times"][i] + r["e2e_latencies"][i] - first) + 1):
            present[s] = present.get(s, 0) + 1
    want = {"completed": len(done), "total_input_tokens": total_in, "total_output_tokens": total_out, "request_throughput": len(done) / r["duration"],
            "input_throughput": total_in / r["duration"], "output_throughput": total_out / r["duration"],
            "total_throughput": (total_in + total_out) / r["duration"], "concurrency": sum(lists["e2e_latency"]) / r["duration"],
            "max_output_tokens_per_s": max(tokens.values()), "max_concurrent_requests": max(present.values())}
    for name, value in want.items():
        assert abs(r[name] - value) < 1e-6 * max(1, value), (name, r[name], value)
    last = max(r["start_times"][i] + r["e2e_latencies"][i] for i in done)
    near(r["duration"], last - first, SLACK)


def one_piece():
    """--disable-stream: the answer is one event."""
    retried(in_one_piece)


def in_one_piece():
    f = Fake(SCRIPT)
    r, _, _ = bench(f.port, "--disable-stream")
    for i in range(4):
        assert r["itls"][i] == [] and r["ttfts"][i] == r["e2e_latencies"][i] and r["output_lens"][i] == 9
    near(r["mean_ttft_ms"], 1000 * sum(w for w, _, _ in SCRIPT), 1000 * SLACK)
    f.shutdown()


def rate():
    """A Poisson process: no request before its time; 40 of them a second have 0.5 to 2 times that rate."""
    f = Fake([(0, "a", 1)])
    r, out, _ = bench(f.port, "--request-rate", "40", "--warmup-requests", "0", n=40)
    starts = sorted(r["start_times"])
    took = starts[-1] - starts[0]
    gaps = [b - a for a, b in zip(starts, starts[1:])]
    assert 0.5 < took < 2.5 and len(f.seen) == 40 and r["request_rate"] == 40 and "Traffic request rate:                    40" in out, took
    mean = took / 39
    assert 0.4 < math.sqrt(sum((g - mean) ** 2 for g in gaps) / 39) / mean < 1.8  # an exponential distribution has 1, an even spacing 0
    f.shutdown()


def concurrency():
    f = Fake([(0.05, "a", 1)])
    r, out, _ = bench(f.port, "--max-concurrency", "3", "--warmup-requests", "0", n=12)
    assert f.most == 3 and r["max_concurrency"] == 3 and r["completed"] == 12 and "Max request concurrency:                 3" in out
    f.most = 0
    r, _, _ = bench(f.port, "--warmup-requests", "0", n=12)
    assert f.most > 6 and r["max_concurrency"] is None
    f.shutdown()


def what_is_sent():
    f = Fake([(0, "a", 1)])
    bench(f.port, "--extra-request-body", '{"top_k": 5}', "--disable-ignore-eos", "--warmup-requests", "2", env={"OPENAI_API_KEY": "k1"})
    assert len(f.seen) == 6 and all(s["path"] == "/generate" and s["key"] == "Bearer k1" for s in f.seen)
    b = f.seen[-1]["body"]
    assert b["top_k"] == 5 and b["sampling_params"] == {"temperature": 0.0, "max_new_tokens": 9, "ignore_eos": False} and b["stream"] is True, b
    texts = [s["body"]["text"] for s in f.seen]  # four at a time: in any order
    assert len(set(texts[2:])) == 4 and texts[0] == texts[1] and texts.count(texts[0]) == 3
    f.seen.clear()
    bench(f.port, "--backend", "sglang-oai", "--tokenize-prompt", "--random-output-len", "50")
    warm, b = f.seen[0]["body"], f.seen[-1]["body"]
    assert warm["max_tokens"] == 32 and b["max_tokens"] == 50 and b["model"] == "fake" and b["ignore_eos"] is True and len(b["prompt"]) == 12, b
    assert b["stream_options"] == {"include_usage": True}
    f.shutdown()


def failures():
    """A request that fails is counted, shown, and not part of any figure; a benchmark of failures does not look like a fast one."""
    for status, fail, word in ((503, None, "status 503: not today"), (200, "error", "a rank died"), (200, "cut", "ended before the answer")):
        f = Fake(SCRIPT, status, fail)
        r, out, err = bench(f.port, "--warmup-requests", "0", code=1)
        assert r["completed"] == 0 and r["failed"] == 4 and r["total_output_tokens"] == 0 and r["mean_ttft_ms"] == 0 and word in r["errors"][0], r
        assert "4 of 4 requests failed" in err and word in err and "Failed requests:" in out, err
        _, _, err = bench(f.port, code=1)
        assert "the warm-up failed" in err and word in err, err
        f.shutdown()
    _, _, err = bench(free_port(), code=1)
    assert "refused" in err or "connect" in err, err


def mistakes():
    for args, words in ((["--backend", "trt"], "known, but not built yet"), (["--request-rate", "-1"], "numbers above 0, inf"),
                        (["--dataset-name", "sharegpt"], "needs --dataset-path"), (["--extra-request-body", "[]"], "a JSON object"),
                        (["--backend", "vllm-chat", "--tokenize-prompt"], "which are text"), (["--base-url", "ftp://x"], "http://HOST:PORT"),
                        (["--num-prompts", "0"], "integers from 1"), (["--what"], "unknown flag --what")):
        p = subprocess.run([EPX, "bench", "serve"] + args, capture_output=True, text=True, timeout=20)
        assert p.returncode == 2 and words in p.stderr, (args, p.stderr)


def many_streams():
    """Hundreds of streams at a time through one thread; tests/server/many_streams.py has 2,048."""
    f = Fake([(0.2, "a", 1), (0.5, "b", 2)], gate=400)
    r, _, _ = bench(f.port, "--warmup-requests", "0", n=400)
    assert r["completed"] == 400 and f.most == 400, (r["failed"], f.most, r["errors"][0])
    f.shutdown()


def own_server():
    """Against `epx serve`: counts are exact, and all four ways to ask agree on them."""
    s = Server([EPX, "serve", "--model-path", MODEL, "--port", str(free_port()), "--log-level", "error"], r"^http://127\.0\.0\.1:(\d+)", 60)
    try:
        for backend in ("sglang", "sglang-oai", "sglang-oai-chat"):
            ids = [] if "chat" in backend else ["--tokenize-prompt"]
            r, out, _ = bench(s.port, "--backend", backend, "--max-concurrency", "3", *ids, n=6)
            assert r["completed"] == 6 and r["total_output_tokens"] == 54 and r["total_input_tokens"] == 72, r
            if ids:
                assert r["server_input_lens"] == [12] * 6, r["server_input_lens"]
            assert "Total generated tokens:                  54" in out
            same_statistics(r)
        r, _, _ = bench(s.port, "--flush-cache", "--tokenize-prompt")
        assert r["server_info"]["internal_states"][0]["dp_rank"] == 0
        p = subprocess.run([EPX, "bench", "serve", "--port", str(s.port), "--num-prompts", "2", "--random-output-len", "3", "--output-file", "-"],
                           capture_output=True, text=True, timeout=60)  # finds the tokenizer by itself; JSON on standard output
        assert p.returncode == 0 and json.loads(p.stdout)["completed"] == 2 and "Serving Benchmark Result" in p.stderr, p.stderr
    finally:
        s.process.terminate()
        s.process.wait(20)


CASES = [native_times, completion_times, chat_times, one_piece, rate, concurrency, what_is_sent, failures, mistakes, many_streams, own_server]
if len(sys.argv) > 3:
    CASES = [c for c in CASES if c.__name__ in sys.argv[3:]]
sys.exit(run_cases(CASES))
