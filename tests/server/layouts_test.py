"""Layouts of ranks behind one port, on the bundled model: layouts_test.py EPX MODEL_DIR.
Attention shared by two ranks of each DP rank: what is counted for the DP rank and what for the rank."""
import atexit
import json
import os
import signal
import sys

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


sys.exit(run_cases([two_dp_ranks_of_two_ranks]))
