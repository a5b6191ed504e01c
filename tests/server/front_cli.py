#!/usr/bin/env python3
"""The epx program from outside: exit codes, messages, outputs, deaths. Standard library only.

usage: front_cli.py EPX SOURCE_DIR REFERENCE_DIR [NAME]...   (NAME: run only these tests)
"""
import ctypes
import json
import os
import pty
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

EPX, SOURCE = sys.argv[1], sys.argv[2]
TINY = os.path.join(SOURCE, "models/tinymoe-math")
REFERENCE = os.path.join(sys.argv[3], "qwen3_moe")
TWO = ["--tp", "2", "--dp", "2", "--enable-dp-attention", "--moe-a2a-backend", "pplx"]
LIMIT_S = 60
PR_SET_CHILD_SUBREAPER = 36


def run(*args):
    return subprocess.run([EPX, *args], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S)


def check(condition, what, seen=""):
    if not condition:
        raise AssertionError(f"{what}\n--- seen:\n{seen}")


def expect(result, code, *parts):
    """Exit code, and every part in standard error."""
    check(result.returncode == code, f"exit code {result.returncode}, expected {code}", result.stdout + result.stderr)
    for part in parts:
        check(part in result.stderr, f"missing in the message: {part}", result.stderr)
    return result


def ranks_of(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as f:
        children = f.read().split()
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/children") as f:
            children += f.read().split()
    return sorted(set(int(c) for c in children))


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def gone(pid, seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            with open(f"/proc/{pid}/stat") as f:
                if f.read().rsplit(")", 1)[1].split()[0] in "ZX":
                    return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


# ---- settings ----

def test_settings():
    expect(run("serve", "--model-path", TINY, "--tp", "3", "--dp", "2", "--enable-dp-attention"), 2, "--tp-size 3 --dp-size 2", "1, 3")
    expect(run("serve", "--model-path", TINY, "--tp", "5", "--dp", "13"), 2, "--dp-size 13", "13 replicas", "65 ranks", "1 to 12")
    expect(run("eval", "logits", "--model-path", TINY, "--dp", "2"), 2, "--dp-size 2", "one replica", "legal value: 1")
    expect(run("serve", "--model-path", TINY, "--moe-a2a-backend", "foo"), 2, "--moe-a2a-backend foo", "auto, none, pplx")
    expect(run("serve", "--model-path", TINY, "--moe-a2a-backend", "mori"), 2, "mori", "not built yet", "auto, none, pplx, deepep")
    expect(run("serve", "--model-path", "some/hub-name"), 2, "--model-path some/hub-name", "models are not downloaded")
    expect(run("serve", "--model-pth", TINY), 2, "--model-pth", "did you mean --model-path?")
    expect(run("generate", "--model-path", TINY, "--prompt", "x", "--temperature", "hot"), 2, "--temperature hot", "0 to 100")
    expect(run("generate", "--model-path", "/no/such", "--prompt", "x"), 2, "--model-path /no/such", "No such file")
    r = expect(run("serve", "--tp", "3", "--dp", "2", "--enable-dp-attention", "--ep", "5", "--port", "99999", "--bogus"), 2, "--tp-size 3",
               "--ep-size 5", "--port 99999", "--bogus", "--model-path is missing")
    check(r.stdout == "", "standard output is empty", r.stdout)
    ask = ("generate", "--model-path", TINY, "--prompt", "x")
    expect(run(*ask, "--threads", "256"), 2, "--threads 256", "1 to 255")
    expect(run(*ask, "--seed", "-1"), 2, "--seed -1", "0 to 9007199254740992")
    for flag in ("--chunked-prefill-size", "--max-running-requests"):
        expect(run(*ask, flag, "131074", *TWO), 2, f"{flag} 131074", "2 to 131072")
    expect(run(*ask, "--context-length", "4097"), 1, "context length 4097", "max_position_embeddings, 4096")


def test_commands():
    expect(run(), 2, "usage: epx")
    expect(run("plan"), 2, "--model-path DIR, or --hidden N")
    expect(run("bench"), 2, "a2a")
    expect(run("bench", "a2a", "--ranks", "0", "--tokens", "x"), 2, "--ranks 0", "--tokens x")
    expect(run("bench", "a2a", "--device", "cuda", "--cases", "x", "--shapes", "8x9x16"), 2, "--cases x", "rows|fused", "--shapes 8x9x16")
    expect(run("serv"), 2, 'unknown command "serv"', "did you mean serve?")
    for command in ("serve", "generate", "info", "demo"):
        r = expect(run(command, "--help"), 0)
        check("SYNOPSIS" in r.stdout and "EXIT STATUS" in r.stdout and "--model-path" in r.stdout, "a help page", r.stdout)
    check(re.fullmatch(r"epx \d+\.\d+\.\d+\n", run("--version").stdout), "the version")


# ---- broken checkpoints: the rank finds them, one message names file and cause ----

def read_safetensors(path):
    with open(path, "rb") as f:
        data = f.read()
    n = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8:8 + n]), data[8 + n:]


def write_safetensors(path, header, payload):
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + payload)


def broken_model(folder, change):
    target = os.path.join(folder, "model")
    shutil.rmtree(target, ignore_errors=True)
    os.mkdir(target)
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(os.path.join(REFERENCE, name), os.path.join(target, name))
    change(target)
    return target


def change_config(**values):
    def change(folder):
        path = os.path.join(folder, "config.json")
        with open(path) as f:
            config = json.load(f)
        config.update(values)
        with open(path, "w") as f:
            json.dump(config, f)
    return change


def truncate(folder):
    path = os.path.join(folder, "model.safetensors")
    os.truncate(path, os.path.getsize(path) - 1000)


def change_header(edit):
    def change(folder):
        path = os.path.join(folder, "model.safetensors")
        header, payload = read_safetensors(path)
        edit(header)
        write_safetensors(path, header, payload)
    return change


def bad_json(folder):
    with open(os.path.join(folder, "config.json"), "w") as f:
        f.write('{"architectures": ["Qwen3MoeForCausalLM"], ')


UP = "model.layers.1.mlp.experts.3.up_proj.weight"


def test_broken_models():
    def rename(header):
        header["renamed"] = header.pop(UP)

    def reshape(header):
        header[UP]["shape"].reverse()

    cases = [
        (truncate, ["model.safetensors"]),
        (change_header(rename), [UP]),
        (change_header(reshape), [UP, "128", "64"]),
        (change_config(architectures=["FooForCausalLM"]), ["config.json", "FooForCausalLM", "Qwen3MoeForCausalLM"]),
        (change_config(hidden_size="many"), ["config.json", "hidden_size"]),
        (bad_json, ["config.json"]),
    ]
    with tempfile.TemporaryDirectory() as folder:
        for change, parts in cases:
            model = broken_model(folder, change)
            for ranks in ([], TWO):
                r = expect(run("info", "--model-path", model, *ranks), 1, "epx: rank ", *parts)
                check(r.stderr.count("\n") == 1, "one message", r.stderr)


# ---- generate, info, demo ----

def test_generate():
    ask = ["generate", "--model-path", TINY, "--chat", "What is 17+25?", "--temperature", "0"]
    one, two = expect(run(*ask), 0, "tokens/s"), expect(run(*ask, *TWO), 0, "rows sent", "rank 1")
    check("42" in one.stdout, "the sum", one.stdout)
    check(one.stdout == two.stdout, "one and two ranks say the same", one.stdout + "\n---\n" + two.stdout)
    sample = ["generate", "--model-path", TINY, "--prompt", "Sara has", "--max-tokens", "12", "--temperature", "1", "--seed"]
    check(run(*sample, "3").stdout == run(*sample, "3", *TWO).stdout, "the same seed gives the same text")
    check(len({run(*sample, str(i)).stdout for i in range(4)}) > 1, "another seed gives another text")
    expect(run(*ask, "--max-tokens", "100000"), 1, "--max-tokens is 100000", "4096")
    expect(run(*ask, "--context-length", "5"), 1, "prompt has", "no room", "5 tokens")
    expect(run("generate", "--model-path", REFERENCE, "--prompt", "x"), 1, "tokenizer.json", "No such file")
    bad = ["generate", "--model-path", TINY, "--prompt", b"ab\xff"]
    expect(run(*bad), 1, "--prompt: text: invalid UTF-8 at byte 2")
    expect(run(*bad[:3], "--chat", b"\xff"), 1, "--chat: the text is not valid UTF-8")


def test_padded_vocabulary():
    """Ids of the model that the tokenizer does not know have no text, and end nothing."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("config.json", "tokenizer.json"):
            shutil.copyfile(os.path.join(TINY, name), os.path.join(folder, name))
        change_config(vocab_size=65536)(folder)
        r = expect(run("generate", "--model-path", folder, "--load-format", "dummy", "--prompt", "1+1=", "--max-tokens", "16",
                       "--temperature", "1"), 0)
        check("answer      16 tokens" in r.stderr, "16 tokens", r.stderr)


def test_info():
    r = expect(run("info", "--model-path", TINY, *TWO), 0)
    for part in ("shm", "onesided", "avx2", "GPUs", "bytes of checkpoint files mapped"):
        check(part in r.stdout, f"info says {part}", r.stdout)
    gpus = re.search(r"^  (gpu0 |none usable: .*(CUDA module|driver|device))", r.stdout, re.M)
    check(gpus, "info names the GPUs or why none is usable", r.stdout)
    rows = re.findall(r"^ +(\d+) +(\d+) +(\d+)$", r.stdout, re.M)
    size = os.path.getsize(os.path.join(TINY, "model.safetensors"))
    check(len(rows) == 2 and all(0 < int(b) < size for _, _, b in rows), "each rank maps a part of the file", r.stdout)


def test_replica_memory():
    """--mem-fraction-static is shared by all ranks of the host, those of replicas too."""
    takes = []
    for n in ("1", "2"):
        out = expect(run("info", "--model-path", TINY, "--tp", "2", "--dp", n, "--mem-fraction-static", "0.2", "--max-running-requests",
                         "2048", "--threads", "1"), 0).stdout
        kv, exchange = re.search(r"tokens, (\d+) bytes; exchange memory (\d+) bytes", out).groups()
        mapped = re.findall(r"^ +\d+ +\d+ +(\d+)$", out, re.M)
        check(len(mapped) == 2 * int(n), "ranks of all replicas are listed", out)
        takes.append(int(kv) + int(exchange) + int(mapped[0]))
    check(0.4 < takes[1] / takes[0] < 0.6, "a rank of two replicas takes half of what one takes", str(takes))


def test_demo():
    r = expect(run("demo", "--model-path", TINY), 0)
    for part in ("Question:", "27", "tokens/s", "rank 0", "rank 1"):
        check(part in r.stdout, f"the demo prints {part}", r.stdout)


def test_demo_terminal():
    """With a terminal on standard input it serves after the answer; a taken port is left alone."""
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    ours, theirs = pty.openpty()
    p = subprocess.Popen([EPX, "demo", "--model-path", TINY, "--port", str(port)], stdin=theirs, stdout=subprocess.PIPE,
                         stderr=subprocess.PIPE, text=True)
    try:
        lines = []
        while not lines or "curl" not in lines[-1]:
            lines.append(p.stdout.readline())
            check(lines[-1] != "", "the demo serves", "".join(lines))
        text = "".join(lines)
        url = re.search(r"^http://127\.0\.0\.1:(\d+)$", text, re.M)
        check(url and f"Port {port} is taken; using {url[1]}." in text, "it names the other port", text)
        with urllib.request.urlopen(url[0] + "/v1/models", timeout=10) as r:
            check(json.load(r)["data"][0]["id"] == TINY, "the server answers")
        p.send_signal(signal.SIGINT)
        check(p.wait(6) == 0, "SIGINT ends it in order")
    finally:
        p.kill()
        p.communicate()
        taken.close()
        os.close(ours)
        os.close(theirs)


# ---- serve ----

class Server:
    def __init__(self, *args):
        self.process = subprocess.Popen([EPX, "serve", "--port", "0", "--log-level", "error", *args], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, text=True)
        check("fired up and ready to roll" in self.process.stdout.readline(), "the server starts")
        self.url = self.process.stdout.readline().strip()
        self.ranks = ranks_of(self.process.pid)

    def post(self, path, body):
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=LIMIT_S) as r:
                return r.status, json.load(r)
        except urllib.error.HTTPError as e:
            return e.code, json.load(e)

    def end(self, code):
        _, errors = self.process.communicate(timeout=15)
        check(self.process.returncode == code, f"exit code {self.process.returncode}, expected {code}", errors)
        for pid in self.ranks:
            check(gone(pid, 0.1), f"rank process {pid} is gone")
        return errors


def test_serve_launch_lines():
    """The launch line of SGLang's pull request 30756, and the two lines of its test, with only --model-path changed (and the port,
    which another program may have); and one with an expert group for each DP rank and priorities."""
    line = ("--trust-remote-code --tp 4 --dp 4 --enable-dp-attention --enable-dp-lm-head --moe-a2a-backend pplx --deepep-mode low_latency "
            "--moe-runner-backend deep_gemm --mem-fraction-static 0.85 --max-running-requests 2048 --stream-interval 5 "
            "--disable-radix-cache --cuda-graph-bs 1 2 4 8 16 32 64 128 256 512 --chunked-prefill-size 512 --skip-server-warmup "
            f"--watchdog-timeout 600 --port {free_port()}")
    test = ("--trust-remote-code --tp 4 --enable-dp-attention --moe-a2a-backend pplx --deepep-mode low_latency "
            "--cuda-graph-max-bs-decode 128 --mem-fraction-static 0.5 ")
    hybrid = test + "--dp 2 --max-running-requests 256"
    deepep = ("--tp 4 --dp 2 --ep 2 --enable-dp-attention --moe-a2a-backend deepep --deepep-mode auto --chunked-prefill-size 512 "
              "--max-running-requests 64 --mem-fraction-static 0.4 --enable-priority-scheduling")
    test += "--dp 4 --max-running-requests 512"
    for flags, cap, parts in ((line, "512", ("prompt chunk 128, running requests 512, tokens of a step (cap) 512", "DP groups 4",
                                             "attention-TP 1", "note: --cuda-graph-bs", "note: --trust-remote-code",
                                             "note: --skip-server-warmup")),
                              (test, "4096", ("running requests 128, tokens of a step (cap) 4096", "note: --cuda-graph-max-bs-decode")),
                              (hybrid, "4096", ("attention-TP 2, DP groups 2", "running requests 128")),
                              (deepep, "512", ("DP groups 2, expert groups 2; 16 experts, 8 to 8 a rank", "mode normal",
                                               "steps without prompt tokens: mode low_latency, 32 tokens",
                                               "note: --deepep-mode auto: normal in steps"))):
        os.environ["SGLANG_PPLX_NUM_MAX_DISPATCH_TOKENS_PER_RANK"] = cap
        s = Server("--model-path", TINY, "--log-level", "info", *flags.split())
        del os.environ["SGLANG_PPLX_NUM_MAX_DISPATCH_TOKENS_PER_RANK"]
        try:
            body = json.dumps({"model": TINY, "prompt": "17 + 25 =", "max_tokens": 4, "temperature": 0, "stream": True,
                               "priority": 3 if flags == deepep else 0}).encode()
            request = urllib.request.Request(s.url + "/v1/completions", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=20) as r:
                check(b"[DONE]" in r.read(), "the stream ends")
        finally:
            s.process.send_signal(signal.SIGINT)
            _, err = s.process.communicate(timeout=20)
        for part in (*parts, "Prefill batch. #new-seq: 1, #new-token: "):
            check(part in err, f"the table and the log say {part}", err)


def test_serve_notes():
    """Every flag of SGLang's that has no effect here starts the server with one note; --help lists them."""
    help_text = run("serve", "--help").stdout
    noted = re.findall(r"^    --([a-z-]+)(?: (\S+))?\n        no effect", help_text, re.M)
    check(len(noted) >= 9 and ("trust-remote-code", "") in noted and ("cuda-graph-bs", "N...") in noted, "the flags", str(noted))
    values = {"": [], "N": ["8"], "N...": ["1", "2", "4"], "NAME": ["flashinfer"]}
    s = Server("--model-path", TINY, *(word for name, value in noted for word in (f"--{name}", *values[value])), "--tp", "1")
    s.process.send_signal(signal.SIGTERM)
    err = s.end(0)
    for name, _ in noted:
        check(len(re.findall(rf"^epx: note: --{name}: no effect", err, re.M)) == 1, f"one note on --{name}", err)
    for mode in ("prefill", "decode"):
        expect(run("serve", "--model-path", TINY, "--disaggregation-mode", mode), 2, f"--disaggregation-mode {mode}", "legal value: null")


def test_serve_stop():
    s = Server("--model-path", TINY, *TWO)
    try:
        check(len(s.ranks) == 2, "two rank processes", str(s.ranks))
        status, body = s.post("/v1/chat/completions", {"model": TINY, "temperature": 0,
                                                       "messages": [{"role": "user", "content": "What is 17+25?"}]})
        check(status == 200 and "42" in body["choices"][0]["message"]["content"], "an answer", str(body))
        status, body = s.post("/v1/completions", {"model": TINY, "prompt": "1", "priority": 1})
        check(status == 400 and "--enable-priority-scheduling" in body["error"]["message"], "priority needs its flag", str(body))
        started = time.monotonic()
        s.process.send_signal(signal.SIGTERM)
        check("SIGTERM" in s.end(0), "the signal is named")
        check(time.monotonic() - started < 6, "the stop is bounded")
    finally:
        s.process.kill()


def test_serve_rank_killed():
    s = Server("--model-path", TINY, *TWO)
    answer = []
    try:
        body = {"model": TINY, "prompt": "1 + 1", "max_tokens": 3500, "temperature": 0, "ignore_eos": True}
        thread = threading.Thread(target=lambda: answer.append(s.post("/v1/completions", body)))
        thread.start()
        time.sleep(0.5)
        check(thread.is_alive(), "the request is still in work", str(answer))
        os.kill(s.ranks[1], signal.SIGKILL)
        thread.join(10)
        check(answer and answer[0][0] >= 500 and f"process {s.ranks[1]}" in json.dumps(answer[0][1]), "a JSON error that names the process",
              str(answer))
        errors = s.end(1)
        check(f"process {s.ranks[1]}" in errors and "SIGKILL" in errors, "the message names process and signal", errors)
    finally:
        s.process.kill()


def test_serve_front_killed():
    s = Server("--model-path", TINY, *TWO)
    s.process.kill()
    s.process.communicate()
    for pid in s.ranks:
        check(gone(pid, 2), f"rank process {pid} is gone")
        os.waitpid(pid, 0)


def main():
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # ranks of a killed front become children of this process
    wanted = sys.argv[4:]
    failed = 0
    for name, function in list(globals().items()):
        if not name.startswith("test_") or (wanted and name not in wanted):
            continue
        started = time.monotonic()
        try:
            function()
            print(f"ok      {name}  {time.monotonic() - started:.1f} s", flush=True)
        except (AssertionError, OSError, subprocess.SubprocessError, ValueError, KeyError) as e:
            failed += 1
            print(f"FAILED  {name}: {e}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
