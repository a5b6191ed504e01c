"""SGLang's native endpoints and /metrics of `epx serve` with two ranks on the bundled model: native_test.py EPX MODEL_DIR SOURCE_DIR."""
import json
import os
import re
import sys
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import prom
from http_client import Server, parse_events, post_bytes, read_all, run_cases

EPX, MODEL, SOURCE = sys.argv[1:4]
if not os.access(EPX, os.X_OK):
    print(f"skip: the epx program ({EPX}) is not built")
    sys.exit(77)
NAME = 'tiny "moe"\\math'
S = Server([EPX, "serve", "--model-path", MODEL, "--served-model-name", NAME, "--port", "0", "--max-total-tokens", "16384",
            "--tp", "2", "--dp", "2", "--enable-dp-attention", "--moe-a2a-backend", "pplx", "--enable-metrics"],
           r"^http://127\.0\.0\.1:(\d+)", 60)
TEXT = "Anna has 17 apples and buys 25 more. How many apples does she have?"


def get(path):
    status, headers, data = S.request("GET", path)
    return status, headers, data.decode()


def gen(text=TEXT, n=12, **kw):
    params = dict({"temperature": 0, "max_new_tokens": n, "ignore_eos": True}, **kw.pop("params", {}))
    return dict({"text": text, "sampling_params": params}, **kw)


def metrics():
    status, headers, text = get("/metrics")
    assert status == 200 and headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8", headers
    return prom.parse(text)


def refused(body, param, words, code=None, path="/generate"):
    status, a = S.post(path, body)
    assert status == 400 and set(a) == {"error"} and set(a["error"]) == {"message", "type", "param", "code"}, (status, a)
    assert a["error"]["param"] == param and words in a["error"]["message"], a
    assert code is None or a["error"]["code"] == code, a


def generate():
    status, a = S.post("/generate", gen())
    m = a["meta_info"]
    assert status == 200 and len(a["output_ids"]) == 12 == m["completion_tokens"], a
    assert m["finish_reason"] == {"type": "length", "length": 12} and 0 < m["e2e_latency"] < 60, m
    ids = S.post("/tokenize", {"prompt": TEXT})[1]
    assert ids["count"] == len(ids["tokens"]) == m["prompt_tokens"], (ids, m)
    assert S.post("/detokenize", {"tokens": a["output_ids"]})[1]["text"] == a["text"]
    b = S.post("/generate", {"input_ids": ids["tokens"], "sampling_params": gen()["sampling_params"]})[1]
    assert b["text"] == a["text"]
    same = {"model": NAME, "prompt": TEXT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    assert S.post("/v1/completions", same)[1]["choices"][0]["text"] == a["text"]


def default_is_128_tokens():
    body = {"text": TEXT, "sampling_params": {"temperature": 0, "ignore_eos": True}}
    assert S.post("/generate", body)[1]["meta_info"]["completion_tokens"] == 128
    assert S.request("PUT", "/generate", gen(n=1))[0] == 200


def bench_serving_body():
    """The body that sglang.bench_serving sends."""
    body = {"text": TEXT, "sampling_params": {"temperature": 0.0, "max_new_tokens": 5, "ignore_eos": True}, "stream": True,
            "lora_path": None, "return_logprob": False, "logprob_start_len": -1}
    status, headers, data = S.request("POST", "/generate", body)
    events, done, _ = parse_events(data)
    assert status == 200 and done and headers["Content-Type"] == "text/event-stream"
    counts = [e["meta_info"]["completion_tokens"] for e in events]
    assert counts == sorted(counts) and counts[-1] == 5, counts
    for a, b in zip(events, events[1:]):
        assert b["text"].startswith(a["text"]) and b["output_ids"][:len(a["output_ids"])] == a["output_ids"]
    assert [e["meta_info"]["finish_reason"] for e in events[:-1]] == [None] * (len(events) - 1)
    whole = S.post("/generate", dict(body, stream=False))[1]
    assert events[-1]["text"] == whole["text"] and events[-1]["output_ids"] == whole["output_ids"]
    assert "index" not in events[0]


def lists():
    status, a = S.post("/generate", gen([TEXT, "One plus one"], rid=["a", "b"]))
    assert status == 200 and [x["meta_info"]["id"] for x in a] == ["a", "b"], a
    assert a[0]["text"] == S.post("/generate", gen())[1]["text"]
    assert isinstance(S.post("/generate", gen([TEXT]))[1], list)
    params = [{"max_new_tokens": 0}, {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True}]
    a = S.post("/generate", {"text": ["x y", TEXT], "sampling_params": params})[1]
    assert [x["meta_info"]["completion_tokens"] for x in a] == [0, 3] and a[0]["text"] == "", a
    status, events, done, _ = S.stream("/generate", {"text": ["x y", TEXT], "sampling_params": params})
    assert status == 200 and done and {e["index"] for e in events} == {0, 1}
    last = {e["index"]: e for e in events}
    assert all(e["meta_info"]["finish_reason"]["type"] == "length" for e in last.values())
    a = S.post("/generate", gen("One", n=12, params={"n": 3, "temperature": 2.0, "top_k": -1, "sampling_seed": 5}))[1]
    assert len(a) == 3 and len({tuple(x["output_ids"]) for x in a}) > 1
    assert S.post("/generate", gen(n=0))[1]["meta_info"]["finish_reason"] == {"type": "length", "length": 0}


def stops():
    text = S.post("/generate", gen(n=30))[1]["text"]
    word = text[5:8]
    names = ("sglang:num_aborted_requests_total", "sglang:num_requests_total", "sglang:e2e_request_latency_seconds_count")
    before = [prom.value(metrics(), n) for n in names]
    a = S.post("/generate", gen(n=30, params={"stop": [word, "\x00never"]}))[1]
    assert a["text"] == text[:text.index(word)] and a["meta_info"]["finish_reason"] == {"type": "stop", "matched": word}, a
    # the ranks are told to cancel what a stop string ended; for the metrics it is an answer like others
    wait_until(lambda: [prom.value(metrics(), n) - b for n, b in zip(names, before)] == [0, 1, 1])
    ids = S.post("/generate", gen(n=30))[1]["output_ids"]
    a = S.post("/generate", gen(n=30, params={"stop_token_ids": [ids[4]]}))[1]
    assert a["meta_info"]["finish_reason"] == {"type": "stop", "matched": ids[4]}, a
    assert a["output_ids"] == ids[:ids.index(ids[4]) + 1]


def json_schema():
    schema = json.dumps({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False})
    params = {"max_new_tokens": 200, "temperature": 0, "json_schema": schema}
    a = S.post("/generate", {"text": [TEXT, TEXT], "sampling_params": [params, {"max_new_tokens": 5, "temperature": 0}]})[1]
    got = json.loads(a[0]["text"])
    assert list(got) == ["n"] and isinstance(got["n"], int), a
    refused({"text": "x", "sampling_params": {"json_schema": "{"}}, "json_schema", "as a string of JSON")
    status, e = S.post("/generate", {"text": "x", "sampling_params": {"json_schema": json.dumps({"contains": {}})}})
    assert status == 400 and "contains" in e["error"]["message"], e


def refusals():
    p = lambda **kw: {"text": "x", "sampling_params": kw}
    refused({"sampling_params": {}}, "text", "one of them is required", "missing_parameter")
    refused({"text": "x", "input_ids": [1]}, "input_ids", "not both")
    refused({"text": [1, 2]}, "text", "a string or a list of strings")
    refused({"input_ids": "x"}, "input_ids", "list of token ids")
    refused({"input_ids": [1, 999999]}, "input_ids", "999999")
    refused(p(max_new_tokens=-1), "max_new_tokens", "an integer >= 0")
    refused(p(max_new_tokens=5000), "prompt", "context", "context_length_exceeded")
    refused(p(temperature="hot"), "temperature", "a number")
    refused(p(min_new_tokens=1.5), "min_new_tokens", "min_new_tokens: ")
    refused(p(regex="a+"), "regex", "not supported", "unsupported_parameter")
    refused(p(no_stop_trim=True), "no_stop_trim", "not supported")
    refused(p(max_tokens=3), "max_tokens", "unknown", "unknown_parameter")
    refused({"text": "x", "return_logprob": True}, "return_logprob", "not supported")
    refused({"text": "x", "lora_path": "a"}, "lora_path", "not supported")
    refused({"text": "x", "colour": 1}, "colour", "unknown", "unknown_parameter")
    refused({"text": ["x", "y"], "sampling_params": [{}]}, "sampling_params", "1 for 2")
    refused({"text": ["x", "y"], "rid": "a"}, "rid", "each of the 2")
    refused({"text": "x", "data_parallel_rank": 2}, "data_parallel_rank", "0 to 1")
    status, headers, data = S.request("POST", "/generate", dict(p(top_p=7), stream=True))
    assert status == 400 and headers["Content-Type"] == "application/json", data  # the status is right before the first byte
    assert S.request("POST", "/generate", json.dumps(gen()), {"Content-Type": "text/plain"})[0] == 415
    refused({"prompt": 3}, "prompt", "a string", path="/tokenize")
    refused({"prompt": "x", "colour": 1}, "colour", "unknown", path="/tokenize")
    refused({"tokens": [1, "x"]}, "tokens", "token ids", path="/detokenize")
    refused({"rid": ""}, "rid", "abort_all", path="/abort_request")


def dp_rank_pin():
    before = metrics()
    S.post("/generate", gen(n=2, data_parallel_rank=1))
    S.post("/generate", gen(n=2, routed_dp_rank=1))
    after = metrics()
    for rank, n in ((0, 0), (1, 2)):
        got = [prom.value(m, "sglang:num_requests_total", dp_rank=rank) for m in (before, after)]
        assert got[1] - got[0] == n, (rank, got)


def abort():
    results = {}

    def ask(key, body):
        results[key] = S.post("/generate", body, timeout=60)

    long = {"max_new_tokens": 3900, "ignore_eos": True, "temperature": 0}
    bodies = {"mine": {"text": TEXT, "rid": "mine", "sampling_params": long}, "other": {"text": TEXT, "rid": "other", "sampling_params": long}}
    threads = [threading.Thread(target=ask, args=i) for i in bodies.items()]
    for t in threads:
        t.start()
    wait_until(lambda: sum(r["num_reqs"] for r in json.loads(get("/get_load")[2])) == 2)
    assert get("/flush_cache")[0] == 400
    info = json.loads(get("/server_info")[2])["internal_states"]
    assert sum(r["num_running_reqs"] for r in info) == 2 and sum(r["num_used_tokens"] for r in info) > 0, info
    assert S.post("/abort_request", {"rid": "nobody"}) == (200, {"num_aborted": 0})
    assert S.post("/abort_request", {"rid": "mine"}) == (200, {"num_aborted": 1})
    threads[0].join(10)
    status, a = results["mine"]
    assert status == 200 and a["meta_info"]["finish_reason"]["type"] == "abort" and 0 < a["meta_info"]["completion_tokens"] < 3900
    assert "other" not in results
    assert S.post("/abort_request", {"abort_all": True}) == (200, {"num_aborted": 1})
    threads[1].join(10)
    assert results["other"][1]["meta_info"]["finish_reason"]["type"] == "abort"
    wait_until(lambda: get("/flush_cache")[0] == 200)


def wait_until(condition, wait_s=10):
    end = time.monotonic() + wait_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.02)


def abort_by_openai_id():
    """A stream of OpenAI's ends with what there is and the finish reason abort."""
    s = S.raw(30)
    s.sendall(post_bytes("/v1/completions", {"model": NAME, "prompt": TEXT, "max_tokens": 3900, "ignore_eos": True, "stream": True},
                         "Connection: close\r\n"))
    data = b""
    while b'"id":"' not in data:
        data += s.recv(4096)
    name = re.search(rb'"id":"([^"]+)"', data).group(1).decode()
    assert S.post("/abort_request", {"rid": name}) == (200, {"num_aborted": 1})
    data += read_all(s)
    s.close()
    assert b'"finish_reason":"abort"' in data and b"data: [DONE]" in data, data[-500:]


def information():
    assert get("/ping")[0] == 200 and get("/health")[0] == 200 and get("/health_generate")[0] == 200
    time.sleep(1.1)
    before = prom.value(metrics(), "sglang:generation_tokens_total")
    assert get("/health_generate")[2] == '{"status":"ok"}'  # after a second of silence it asks the ranks for a token
    assert prom.value(metrics(), "sglang:generation_tokens_total") == before + 1
    m = json.loads(get("/get_model_info")[2])
    assert m["model_path"] == MODEL and m["is_generation"] is True and m["served_model_name"] == NAME, m
    for path in ("/get_server_info", "/server_info"):
        i = json.loads(get(path)[2])
        assert i["tp_size"] == i["dp_size"] == 2 and i["moe_a2a_backend"] == "pplx" and i["enable_metrics"] is True, i
        assert len(i["internal_states"]) == 2 and i["version"] and i["max_total_num_tokens"] == 16384, i
        assert not [k for k in i if "key" in k], i


def record():
    top_k, n_layers = 4, 6
    assert get("/stop_expert_distribution_record")[0] == 400 and get("/dump_expert_distribution_record")[0] == 400
    assert get("/flush_cache")[0] == 200  # else the prompt's prefix would not be computed
    settled()
    assert get("/start_expert_distribution_record")[0] == 200 and get("/start_expert_distribution_record")[0] == 400
    n = S.post("/generate", gen(n=7))[1]["meta_info"]["prompt_tokens"]
    settled()
    assert S.request("POST", "/stop_expert_distribution_record")[0] == 200
    S.post("/generate", gen(n=5))
    settled()
    d = json.loads(get("/dump_expert_distribution_record")[2])
    assert d["num_layers"] == n_layers == len(d["logical_count"]) and d["recording"] is False
    assert [sum(layer) for layer in d["logical_count"]] == [(n + 7 - 1) * top_k] * n_layers, d
    assert get("/dump_expert_distribution_record")[0] == 400


def settled():
    """Until two readings in a row agree and nothing runs: the ranks are idle and their reports are exact."""
    def state():
        s = json.loads(get("/engine/state")[2])
        return s["expert_rows"], [r["running"] + r["waiting"] for r in s["ranks"]], [r["steps"] for r in s["ranks"]]

    last = state()
    while True:
        time.sleep(0.05)
        now = state()
        if now == last and sum(now[1]) == 0 and now[2][0] == now[2][1]:
            return
        last = now


def token_counters():
    """What the clients were told is what is counted, at once, also with several requests at a time."""
    before = metrics()
    told, lock = [0, 0, 0], threading.Lock()

    def ask(i):
        if i % 2:
            m = S.post("/generate", gen(n=3 + i))[1]["meta_info"]
            n = (m["prompt_tokens"], m["completion_tokens"])
        else:
            u = S.post("/v1/completions", {"model": NAME, "prompt": TEXT, "max_tokens": 40})[1]["usage"]
            n = (u["prompt_tokens"], u["completion_tokens"])
        with lock:
            told[0], told[1], told[2] = told[0] + n[0], told[1] + n[1], told[2] + 1

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    after = metrics()
    names = ["sglang:prompt_tokens_total", "sglang:generation_tokens_total", "sglang:num_requests_total"]
    got = [prom.value(after, n) - prom.value(before, n) for n in names]
    assert got == told, (got, told)
    for n, want in (("time_to_first_token", told[2]), ("e2e_request_latency", told[2]), ("inter_token_latency", told[1] - told[2])):
        count = f"sglang:{n}{'' if n.endswith('seconds') else '_seconds'}_count"
        assert prom.value(after, count) - prom.value(before, count) == want, (n, want)


def exchange_metrics():
    settled()
    m = metrics()
    rows = prom.value(m, "epx_prefill_rows_total") + prom.value(m, "epx_decode_rows_total")
    pairs = prom.value(m, "epx_exchange_rows_total", phase="combine")
    assert pairs == rows * 4 * 6, (pairs, rows)  # exact sums: a row for each of 4 experts in each of 6 layers
    sent = prom.value(m, "epx_exchange_rows_total", phase="dispatch")
    assert rows * 6 <= sent <= rows * 6 * 2, (sent, rows)  # a token goes to one rank or to both
    assert prom.value(m, "epx_exchange_row_bytes_total", phase="dispatch") == sent * 256 * 4
    assert prom.value(m, "epx_exchange_moved_bytes_total", phase="dispatch") > 0
    for phase in ("dispatch", "combine"):
        counts = {prom.value(m, "epx_exchange_seconds_count", phase=phase, part=p, dp_rank=r) for p in ("wait", "copy") for r in (0, 1)}
        assert len(counts) == 1 and counts.pop() == prom.value(m, "epx_steps_total", dp_rank=0) * 6
    state = json.loads(get("/engine/state")[2])
    for layer, counts in enumerate(state["expert_rows"]):
        most, mean = max(counts), sum(counts) / len(counts)
        assert prom.value(m, "epx_expert_rows_max", layer=layer) == most
        assert abs(prom.value(m, "epx_expert_imbalance", layer=layer) - most / mean) < 1e-9
        assert prom.value(m, "epx_expert_top_rows", layer=layer, place=1) == most
        assert prom.value(m, "epx_expert_top_rows", layer=layer, expert=counts.index(most)) == most
    assert all(s[2]["model_name"] == NAME for f in m.values() for s in f.samples)  # escaping


def documented():
    """docs/metrics.md and the dashboard name exactly what is exposed."""
    m = metrics()
    with open(os.path.join(SOURCE, "docs", "metrics.md")) as f:
        rows = re.findall(r"^\| `([a-z_:0-9]+)` \| (counter|gauge|histogram) \| ([^|]*) \|", f.read(), re.M)
    doc = {name: (kind, sorted(re.findall(r"`([a-z_]+)`", labels))) for name, kind, labels in rows}
    real = {}
    for f in m.values():
        labels = set().union(*(set(s[2]) for s in f.samples)) - {"le", "model_name"}
        real[f.name] = (f.type, sorted(labels))
    assert doc == real, (set(doc) ^ set(real), {k: (doc[k], real[k]) for k in doc if k in real and doc[k] != real[k]})
    with open(os.path.join(SOURCE, "docs", "grafana", "epx.json")) as f:
        board = json.load(f)
    with open(os.path.join(SOURCE, "server", "http", "routes.c")) as f:
        routes = set(re.findall(r'^    \{"(/[^"]*)", "', f.read(), re.M))
    text = "".join(open(os.path.join(SOURCE, "docs", n)).read() for n in ("serving.md", "native-api.md"))
    text = text.replace("`/stop_...`, `/dump_...`", "/stop_expert_distribution_record /dump_expert_distribution_record")
    missing = [r for r in routes if r != "/web/" and not re.search(rf"[ `]{re.escape(r)}[ `,]", text)]
    assert len(routes) > 20 and missing == [], f"not in the documentation: {missing}"
    used = set()
    for panel in board["panels"]:
        for t in panel.get("targets", []):
            used |= set(re.findall(r"(?:sglang:|epx_)[a-z0-9_]+", t["expr"]))
    samples = {s[1] for f in m.values() for s in f.samples}
    assert used and used <= samples, used - samples


def the_reader_is_strict():
    good = get("/metrics")[2]
    bad = [good[:-1], good.replace("# TYPE sglang:token_usage gauge\n", ""), good.replace("\\\\", "\\", 1), good + good,
           good.replace("} 1\n", "} one\n", 1), re.sub(r'(le="\+Inf"\} )\d+', r"\g<1>999999999", good, count=1)]
    for text in bad:
        try:
            prom.parse(text)
        except (AssertionError, KeyError, IndexError):
            continue
        raise AssertionError("a broken exposition was accepted")


def prefix_cache():
    """cached_tokens of an answer, the counter, and a flush that really empties the cache."""
    one = dict(gen(n=2, text=TEXT + " Say it slowly."), data_parallel_rank=0)
    assert S.request("POST", "/flush_cache")[0] == 200
    before = prom.value(metrics(), "sglang:cached_tokens_total")
    assert S.post("/generate", one)[1]["meta_info"]["cached_tokens"] == 0
    assert prom.value(metrics(), "epx_kv_evictable_tokens", dp_rank=0) > 0
    m = S.post("/generate", one)[1]["meta_info"]
    assert 0 < m["cached_tokens"] < m["prompt_tokens"], m
    assert prom.value(metrics(), "sglang:cached_tokens_total") == before + m["cached_tokens"]
    get("/flush_cache")
    wait_until(lambda: prom.value(metrics(), "epx_kv_evictable_tokens") == 0)
    assert S.post("/generate", one)[1]["meta_info"]["cached_tokens"] == 0


def gone_client():
    """A stream of /generate whose client leaves is cancelled."""
    aborted = prom.value(metrics(), "sglang:num_aborted_requests_total")
    s = S.raw()
    s.sendall(post_bytes("/generate", {"text": TEXT, "stream": True, "sampling_params": {"max_new_tokens": 3900, "ignore_eos": True}}))
    assert s.recv(4096)
    s.close()
    wait_until(lambda: prom.value(metrics(), "sglang:num_aborted_requests_total") == aborted + 1, 3)


def page_headers():
    for path, kind in (("/", "text/html"), ("/web/app.js", "text/javascript"), ("/web/style.css", "text/css"), ("/web/charts.js", "text/javascript")):
        status, headers, text = get(path)
        csp = headers["Content-Security-Policy"]
        assert status == 200 and headers["Content-Type"].startswith(kind) and len(text) > 500, (path, headers)
        assert "default-src 'none'" in csp and "unsafe" not in csp and "frame-ancestors 'none'" in csp, csp
        assert "Access-Control-Allow-Origin" not in headers and headers["X-Content-Type-Options"] == "nosniff"
        assert not re.search(r"(src|href)=[\"']?(https?:)?//", text) and "innerHTML" not in text, path
    html = get("/")[2]
    assert not re.search(r"<script(?![^>]*src=)|<style|\son\w+=|style=", html)  # what the policy would block
    assert get("/web/none.js")[0] == 404 and S.request("POST", "/", b"")[0] == 405


try:
    CODE = run_cases([generate, default_is_128_tokens, bench_serving_body, lists, stops, json_schema, refusals, dp_rank_pin, abort, abort_by_openai_id, information, record,
                      token_counters, exchange_metrics, prefix_cache, gone_client, the_reader_is_strict, documented, page_headers])
finally:
    S.process.terminate()
    END = S.process.wait(20)
if END:
    print(f"the server's exit code is {END}")
sys.exit(CODE or (1 if END else 0))
