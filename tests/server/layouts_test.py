"""Layouts of ranks behind one port, on the bundled model: layouts_test.py EPX MODEL_DIR.
Attention shared by two ranks of each DP rank: what is counted for the DP rank and what for the rank. Replicas: answers equal one
rank's, requests are spread and pinned, a lost replica takes only its own requests along."""
import atexit
import json
import os
import signal
import sys
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import prom
from http_client import Server, run_cases

EPX, MODEL = sys.argv[1:3]
if not os.access(EPX, os.X_OK):
    print(f"skip: the epx program ({EPX}) is not built")
    sys.exit(77)
PROMPTS = [f"Anna has {3 * i + 2} apples and buys {i + 4} more. How many apples does she have?" for i in range(6)]


def start(*flags):
    s = Server([EPX, "serve", "--model-path", MODEL, "--served-model-name", "tiny", "--port", "0", "--max-total-tokens", "4096",
                   "--threads", "1", "--log-level", "error", *flags], r"^http://127\.0\.0\.1:(\d+)", 60)
    atexit.register(s.process.kill)
    return s


def end(s, code=0):
    s.process.send_signal(signal.SIGTERM)
    assert s.process.wait(20) == code, s.process.returncode


def get(s, path):
    status, _, data = s.request("GET", path)
    assert status == 200, (path, status, data)
    return data.decode()


def ask(s, text, n=16, **kw):
    body = dict({"text": text, "sampling_params": {"temperature": 0, "max_new_tokens": n, "ignore_eos": True}}, **kw)
    status, answer = s.post("/generate", body, timeout=60)
    assert status == 200, answer
    return answer["text"]


def answers_of_one_rank():
    s = start()
    answers = [ask(s, p) for p in PROMPTS]
    end(s)
    return answers


WANT = answers_of_one_rank()


def labels(families, name):
    return {tuple(sorted((k, v) for k, v in labels.items() if k in ("dp_rank", "rank", "peer")))
            for f in families.values() for _, sample, labels, _ in f.samples if sample == name}


def two_dp_ranks_of_two_ranks():
    """Requests are counted by DP rank, exchanges by rank; a request is pinned to a DP rank, of which there are two."""
    s = start("--tp", "4", "--dp", "2", "--enable-dp-attention", "--moe-a2a-backend", "pplx")
    for i, p in enumerate(PROMPTS):
        assert ask(s, p, data_parallel_rank=i % 2) == WANT[i], p
    status, answer = s.post("/generate", {"text": "x", "data_parallel_rank": 2})
    assert status == 400 and "0 to 1" in answer["error"]["message"], answer
    m = prom.parse(get(s, "/metrics"))
    for name in ("sglang:num_requests_total", "sglang:num_running_reqs", "sglang:time_to_first_token_seconds_count", "epx_steps_total"):
        assert labels(m, name) == {(("dp_rank", str(d)),) for d in (0, 1)}, (name, labels(m, name))
    assert [prom.value(m, "sglang:num_requests_total", dp_rank=d) for d in (0, 1)] == [3, 3]
    assert prom.value(m, "sglang:generation_tokens_total") == 16 * len(PROMPTS)
    ranks = {(("dp_rank", str(r // 2)), ("rank", str(r))) for r in range(4)}
    assert labels(m, "epx_exchange_seconds_count") == labels(m, "epx_exchange_moved_bytes_total") == ranks
    assert labels(m, "epx_exchange_rows_total") == {(d, ("peer", str(p)), r) for d, r in ranks for p in range(4)}
    load, info = json.loads(get(s, "/get_load")), json.loads(get(s, "/get_server_info"))
    assert [e["dp_rank"] for e in load] == [e["dp_rank"] for e in info["internal_states"]] == [0, 1], (load, info)
    assert all(e["num_reqs"] == 0 for e in load), load
    state = json.loads(get(s, "/engine/state"))["ranks"]
    assert [(r["rank"], r["dp_rank"]) for r in state] == [(0, 0), (1, 0), (2, 1), (3, 1)], state
    assert [r["requests"] for r in state] == [3, 0, 3, 0], state
    end(s)


def ranks_of(s):
    return [r["pid"] for r in json.loads(get(s, "/engine/state"))["ranks"]]


def replicas():
    """Two whole models of two ranks: the same answers, spread evenly; everything is counted by replica."""
    s = start("--tp", "2", "--dp", "2", "--moe-a2a-backend", "pplx", "--load-balance-method", "round_robin")
    got = [None] * len(PROMPTS)

    def one(i):
        got[i] = ask(s, PROMPTS[i])

    together([threading.Thread(target=one, args=(i,)) for i in range(len(PROMPTS))])
    assert got == WANT, got
    m = prom.parse(get(s, "/metrics"))
    assert [prom.value(m, "sglang:num_requests_total", dp_rank=d) for d in (0, 1)] == [3, 3]
    assert labels(m, "epx_exchange_rows_total") == {(("dp_rank", str(r // 2)), ("peer", str(p)), ("rank", str(r)))
                                                    for r in range(4) for p in range(r - r % 2, r - r % 2 + 2)}
    sent = [r["rows_sent"] for r in json.loads(get(s, "/engine/state"))["ranks"]]
    assert all(len(row) == 4 and sum(row) == sum(row[a - a % 2:a - a % 2 + 2]) > 0 for a, row in enumerate(sent)), sent
    for i, p in enumerate(PROMPTS[:3]):
        assert ask(s, p, data_parallel_rank=1) == WANT[i]
    m = prom.parse(get(s, "/metrics"))
    assert [prom.value(m, "sglang:num_requests_total", dp_rank=d) for d in (0, 1)] == [3, 6]
    info = json.loads(get(s, "/get_server_info"))
    assert info["n_ranks"] == 4 and info["n_replicas"] == 2 and [e["dp_rank"] for e in info["internal_states"]] == [0, 1], info
    assert s.request("POST", "/flush_cache")[0] == 200
    first, second = cached(s, 0), cached(s, 0)
    assert first == 0 and second > 0 and cached(s, 1) == 0, (first, second)  # each replica has a prefix cache of its own
    abort_one(s)
    end(s)


def cached(s, dp):
    body = {"text": PROMPTS[0], "sampling_params": {"temperature": 0, "max_new_tokens": 2}, "data_parallel_rank": dp}
    return s.post("/generate", body)[1]["meta_info"]["cached_tokens"]


def together(threads):
    for t in threads:
        t.start()
    for t in threads:
        t.join()


def long_requests(s, n, tokens):
    """One pinned to each of the first n DP ranks; [status, answer] of each and their threads, once all of them run."""
    results = [None] * n

    def one(i):
        params = {"temperature": 0, "max_new_tokens": tokens[i], "ignore_eos": True}
        results[i] = s.post("/generate", {"text": PROMPTS[i], "rid": f"r{i}", "sampling_params": params, "data_parallel_rank": i}, timeout=60)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(n)]
    for t in threads:
        t.start()
    until = time.monotonic() + 20
    while not all(e["num_running_reqs"] == 1 for e in json.loads(get(s, "/server_info"))["internal_states"][:n]):
        assert time.monotonic() < until, "the requests do not run"
        time.sleep(0.01)
    return results, threads


def abort_one(s):
    results, threads = long_requests(s, 2, [3500, 3500])
    assert s.post("/abort_request", {"rid": "r1"}) == (200, {"num_aborted": 1})
    threads[1].join(20)
    assert results[1][1]["meta_info"]["finish_reason"]["type"] == "abort" and results[0] is None, results
    assert s.post("/abort_request", {"abort_all": True}) == (200, {"num_aborted": 1})
    threads[0].join(20)
    assert results[0][1]["meta_info"]["finish_reason"]["type"] == "abort", results


def a_replica_dies():
    """Its request ends with the rank's name, the other replica's comes to its end, new ones are refused, the server ends."""
    s = start("--tp", "2", "--dp", "2", "--moe-a2a-backend", "pplx", "--disable-radix-cache")
    pids = ranks_of(s)
    results, threads = long_requests(s, 2, [1500, 3500])
    os.kill(pids[3], signal.SIGKILL)
    threads[1].join(10)
    status, answer = results[1]
    assert status == 503 and f"replica 1 rank 1 (process {pids[3]}) was killed" in answer["error"]["message"], results[1]
    assert results[0] is None, "the other replica's request is still in work"
    assert s.request("GET", "/health")[0] == 503
    status, answer = s.post("/generate", {"text": "x"})
    assert status == 503 and f"process {pids[3]}" in answer["error"]["message"], answer
    threads[0].join(60)
    status, answer = results[0]
    assert status == 200 and answer["meta_info"]["completion_tokens"] == 1500, results[0]
    assert s.process.wait(20) == 1


sys.exit(run_cases([two_dp_ranks_of_two_ranks, replicas, a_replica_dies]))
