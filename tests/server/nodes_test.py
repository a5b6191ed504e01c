"""One server of several `epx serve` processes as on several hosts, here all on this one: nodes_test.py EPX MODEL_DIR MODULE_DIR.
Answers equal one rank's over shared memory and over messages; other settings are refused by name; every way to die is told."""
import atexit
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from http_client import free_port, run_cases

EPX, MODEL, MODULES = sys.argv[1:4]
if not os.access(EPX, os.X_OK):
    print(f"skip: the epx program ({EPX}) is not built")
    sys.exit(77)
HAS_UCX = os.path.exists(os.path.join(MODULES, "libepx_ucx.so"))
PROMPTS = [f"Anna has {3 * i + 2} apples and buys {i + 4} more. How many apples does she have?" for i in range(4)]
TWO = ["--tp", "2", "--dp", "2", "--enable-dp-attention", "--moe-a2a-backend", "pplx"]
FOLDER = tempfile.TemporaryDirectory()
COUNT = iter(range(1000))


class Epx:
    """One `epx serve`; what it says goes to a file."""

    def __init__(self, *flags, model=MODEL, env=None):
        self.path = os.path.join(FOLDER.name, f"out.{next(COUNT)}")
        with open(self.path, "w") as out:
            self.process = subprocess.Popen([EPX, "serve", "--model-path", model, "--port", "0", "--threads", "1", "--max-total-tokens",
                                             "8192", "--log-level", "error", *flags], stdin=subprocess.DEVNULL, stdout=out,
                                            stderr=subprocess.STDOUT, env=dict(os.environ, **(env or {})))
        atexit.register(self.process.kill)

    def text(self):
        with open(self.path) as f:
            return f.read()

    def wait_for(self, pattern, seconds=20):
        until = time.monotonic() + seconds
        while True:
            found = re.search(pattern, self.text(), re.M)
            if found:
                return found
            assert time.monotonic() < until and self.process.poll() is None, f"no {pattern!r} in:\n{self.text()}"
            time.sleep(0.02)

    def url(self):
        return self.wait_for(r"^(http://127\.0\.0\.1:\d+)$").group(1)

    def ask(self, text, n=16, path="/generate", **kw):
        body = dict({"text": text, "sampling_params": {"temperature": 0, "max_new_tokens": n, "ignore_eos": True}}, **kw)
        request = urllib.request.Request(self.url() + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as r:
                return r.status, json.load(r)
        except urllib.error.HTTPError as e:
            return e.code, json.load(e)

    def state(self):
        with urllib.request.urlopen(self.url() + "/engine/state", timeout=20) as r:
            return json.load(r)

    def ends(self, code, seconds=20):
        assert self.process.wait(seconds) == code, (self.process.returncode, self.text())
        return self.text()

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        return self.ends(0)


def pair(*flags, n=2, env=None):
    """Node 0 and the others, the last one first: they wait for each other."""
    where = ["--nnodes", str(n), "--dist-init-addr", f"127.0.0.1:{free_port()}", "--dist-timeout", "20"]
    others = [Epx(*flags, *where, "--node-rank", str(i), env=env) for i in range(n - 1, 0, -1)]
    return [Epx(*flags, *where, "--node-rank", "0", env=env)] + others[::-1]


def answers(s):
    got = [None] * len(PROMPTS)

    def one(i):
        status, a = s.ask(PROMPTS[i])
        got[i] = a["text"] if status == 200 else a

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(PROMPTS))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return got


def of_one_rank():
    s = Epx()
    got = answers(s)
    s.stop()
    return got


WANT = of_one_rank()


def check_answers(flags, n=2, env=None, transport="shm"):
    nodes = pair(*flags, n=n, env=env)
    got = answers(nodes[0])
    assert got == WANT, got
    assert f" over {transport}," in nodes[0].text() and "not encrypted" in nodes[0].text(), nodes[0].text()
    state = nodes[0].state()
    assert all(r["pid"] > 0 for r in state["ranks"]), state["ranks"]
    nodes[0].stop()
    for node in nodes[1:]:
        assert "node 0 has stopped the server" in node.ends(0)
    assert not [r for r in state["ranks"] if is_alive(r["pid"])]


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def answers_equal_one_ranks():
    check_answers(TWO)
    check_answers(["--tp", "4", "--dp", "2", "--enable-dp-attention"], n=4)
    check_answers(["--tp", "1", "--dp", "2"], transport="self")  # a replica on each node


def answers_over_messages():
    if not HAS_UCX:
        print("     not run: libepx_ucx.so is not built")
        return
    hosts = {"EPX_EMULATED_HOSTS": "2", "UCX_TLS": "tcp", "EPX_MODULE_DIR": MODULES}
    check_answers(TWO, env=hosts, transport="ucx")
    check_answers(["--tp", "4", "--dp", "2", "--enable-dp-attention"], env=hosts, transport="ucx")


def other_settings_are_refused():
    """By name and with both values, on both nodes, all at once."""
    where = ["--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{free_port()}", "--dist-timeout", "20", *TWO]
    b = Epx(*where, "--node-rank", "1", "--chunked-prefill-size", "64", "--page-size", "32")
    a = Epx(*where, "--node-rank", "0", "--chunked-prefill-size", "128", "--schedule-policy", "lpm")
    for s in (a, b):
        text = s.ends(1)
        for part in (r"--chunked-prefill-size is 128 on node 0 and 64 on node 1 \(", r'--schedule-policy is "lpm" on node 0 and "fcfs" on node 1',
                     r"--page-size is 0 on node 0 and 32 on node 1"):
            assert re.search(part, text), (part, text)


def another_model_is_refused():
    """The same shapes with one weight changed; the models may lie in different places."""
    other = os.path.join(FOLDER.name, "model")
    os.mkdir(other)
    for name in os.listdir(MODEL):
        if name.endswith(".json") or name == "model.safetensors":
            with open(os.path.join(MODEL, name), "rb") as f:
                data = f.read()
            with open(os.path.join(other, name), "wb") as f:
                f.write(data)
    where = ["--nnodes", "2", "--dist-timeout", "20", *TWO, "--dist-init-addr"]
    port = free_port()
    nodes = [Epx(*where, f"127.0.0.1:{port}", "--node-rank", "0"), Epx(*where, f"127.0.0.1:{port}", "--node-rank", "1", model=other)]
    assert answers(nodes[0]) == WANT
    nodes[0].stop()
    nodes[1].ends(0)
    with open(os.path.join(other, "model.safetensors"), "r+b") as f:
        f.seek(-1, os.SEEK_END)
        f.write(b"\x55")
    port = free_port()
    nodes = [Epx(*where, f"127.0.0.1:{port}", "--node-rank", "0"), Epx(*where, f"127.0.0.1:{port}", "--node-rank", "1", model=other)]
    for s in nodes:
        text = s.ends(1)
        assert re.search(r"model.safetensors is [0-9a-f]{16}\.\.\. of \d+ bytes on node 0 and [0-9a-f]{16}\.\.\. of \d+ bytes on node 1", text), text


def nobody_comes():
    where = ["--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{free_port()}", "--dist-timeout", "1", *TWO]
    assert "missing of 2 nodes: 1" in Epx(*where, "--node-rank", "0").ends(1)
    assert "no node 0 at 127.0.0.1" in Epx(*where, "--node-rank", "1").ends(1)
    where = ["--dist-init-addr", f"127.0.0.1:{free_port()}", "--dist-timeout", "5", *TWO]
    b, a = Epx(*where, "--nnodes", "2", "--node-rank", "1"), Epx(*where, "--nnodes", "1", "--node-rank", "0")
    assert a.url() and "--dist-init-addr: no effect with --nnodes 1" in a.text()
    a.stop()
    b.process.kill()
    where = ["--dist-init-addr", f"127.0.0.1:{free_port()}", "--dist-timeout", "5", "--tp", "4"]
    a, b = Epx(*where, "--nnodes", "4", "--node-rank", "0"), Epx(*where, "--nnodes", "2", "--node-rank", "1")
    assert "n_nodes is 2 on node 1 and 4 on node 0" in a.ends(1) and "n_nodes is 2 on node 1 and 4 on node 0" in b.ends(1)


def mistakes():
    token = {"EPX_JOIN_TOKEN": ""}
    for flags, part, code in ((["--nnodes", "2"], "--nnodes 2 needs --dist-init-addr", 2),
                              (["--nnodes", "2", "--node-rank", "2", "--dist-init-addr", "x:1"], "--node-rank 2: legal values with --nnodes 2: 0 to 1", 2),
                              (["--nnodes", "3", "--dist-init-addr", "x:1"], "--nnodes 3: 2 ranks do not divide", 2),
                              (["--nnodes", "2", "--dist-init-addr", "192.0.2.1:7"], "EPX_JOIN_TOKEN is not set", 1),
                              (["--nnodes", "2", "--node-rank", "1", "--dist-init-addr", "192.0.2.1:7"], "EPX_JOIN_TOKEN is not set", 1),
                              (["--nnodes", "2", "--dist-init-addr", "127.0.0.1"], "HOST:PORT", 1)):
        text = Epx(*TWO, *flags, env=token).ends(code)
        assert part in text, (part, text)


def in_work(nodes, dp=0):
    """A long request on node 0's first DP rank, once it runs: (its thread, the answer to come)."""
    answer = []
    thread = threading.Thread(target=lambda: answer.append(nodes[0].ask(PROMPTS[0], n=3500, data_parallel_rank=dp)))
    thread.start()
    until = time.monotonic() + 20
    while sum(r["running"] for r in nodes[0].state()["ranks"]) == 0:
        assert time.monotonic() < until
        time.sleep(0.01)
    return thread, answer


def check_loss(nodes, strike, words, seconds, others_end=True):
    """After strike() the request, node 0 and the other node end with these words, in time, and no rank is left."""
    pids = [r["pid"] for r in nodes[0].state()["ranks"]]
    thread, answer = in_work(nodes)
    start = time.monotonic()
    strike(pids)
    thread.join(30)
    took = time.monotonic() - start
    assert answer and answer[0][0] == 503 and re.search(words, answer[0][1]["error"]["message"]), answer
    assert took < seconds, took
    text = nodes[0].ends(1)
    assert re.search(words, text), text
    if others_end:
        assert re.search(words, nodes[1].ends(1)), nodes[1].text()
    until = time.monotonic() + 3
    while [p for p in pids if is_alive(p)]:
        assert time.monotonic() < until, "ranks are left"
        time.sleep(0.02)


def a_remote_rank_dies():
    nodes = pair(*TWO)
    check_loss(nodes, lambda pids: os.kill(pids[1], signal.SIGKILL),
               r"rank 1 \(process \d+ on .+\) was killed by signal 9 \(SIGKILL\)", 2)


def a_local_rank_dies():
    nodes = pair(*TWO)
    check_loss(nodes, lambda pids: os.kill(pids[0], signal.SIGKILL), r"rank 0 \(process \d+ on .+\) was killed by signal 9", 2)


def a_node_dies():
    nodes = pair(*TWO)
    check_loss(nodes, lambda pids: nodes[1].process.kill(), r"node 1 \(.+\) with ranks 1 to 1 closed its connection", 2, others_end=False)


def a_node_is_silent():
    """A stopped node and its ranks: nothing is closed, nothing answers."""
    nodes = pair(*TWO, "--watchdog-timeout", "2")

    def stop(pids):
        os.kill(nodes[1].process.pid, signal.SIGSTOP)
        os.kill(pids[1], signal.SIGSTOP)

    try:
        check_loss_but_stopped(nodes, stop)
    finally:
        nodes[1].process.kill()


def check_loss_but_stopped(nodes, stop):
    pids = [r["pid"] for r in nodes[0].state()["ranks"]]
    thread, answer = in_work(nodes)
    start = time.monotonic()
    stop(pids)
    thread.join(30)
    took = time.monotonic() - start
    assert answer and answer[0][0] == 503 and re.search("node 1|rank 1", answer[0][1]["error"]["message"]), answer
    assert took < 5, took
    nodes[0].ends(1)
    nodes[1].process.kill()
    until = time.monotonic() + 3
    while is_alive(pids[1]):  # a stopped process dies with its node all the same
        assert time.monotonic() < until, "a rank is left"
        time.sleep(0.02)


def node_0_dies():
    nodes = pair(*TWO)
    pids = [r["pid"] for r in nodes[0].state()["ranks"]]
    start = time.monotonic()
    nodes[0].process.kill()
    assert "node 0 at 127.0.0.1" in nodes[1].ends(1) and "closed its connection" in nodes[1].text(), nodes[1].text()
    assert time.monotonic() - start < 3 and not [p for p in pids if is_alive(p)]


def a_node_of_a_replica_dies():
    """Its requests end with its name, those of the other replica come to their end."""
    nodes = pair("--tp", "1", "--dp", "2", "--disable-radix-cache")
    nodes[0].url()
    results = [None, None]

    def one(i):
        results[i] = nodes[0].ask(PROMPTS[i], n=(700, 3900)[i], data_parallel_rank=i)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    until = time.monotonic() + 20
    while sum(r["running"] for r in nodes[0].state()["ranks"]) < 2:
        assert time.monotonic() < until
        time.sleep(0.01)
    nodes[1].process.kill()
    threads[1].join(20)
    status, answer = results[1]
    assert status == 503 and re.search(r"node 1 \(.+\) with ranks 1 to 1 closed", answer["error"]["message"]), results
    threads[0].join(60)
    status, answer = results[0]
    assert status == 200 and answer["meta_info"]["completion_tokens"] == 700, results[0]
    nodes[0].ends(1)


def a_rank_that_cannot_start():
    """What is wrong on the other node is said on both."""
    nodes = pair(*TWO, "--context-length", "5000")
    for s in nodes:
        text = s.ends(1)
        assert "context length 5000" in text and "max_position_embeddings, 4096" in text, text


sys.exit(run_cases([answers_equal_one_ranks, answers_over_messages, other_settings_are_refused, another_model_is_refused, nobody_comes, mistakes,
                    a_remote_rank_dies, a_local_rank_dies, a_node_dies, a_node_is_silent, node_0_dies, a_node_of_a_replica_dies,
                    a_rank_that_cannot_start]))
