"""The HTTP server over a played cluster: http_test.py PROGRAM [case ...]. The answer to a prompt is the prompt itself;
the seed scripts the cluster (http_fake_server.c)."""
import json
import os
import socket
import sys
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from http_client import Server, parse_events, post_bytes, read_all, read_response, run_cases

PROGRAM = sys.argv[1]
DIE_AFTER_3, SUBMIT_FULL, ERROR_AT_ONCE, SILENT, SLOW_SUBMIT, SUBMIT_PEER, END_TOKEN = [m << 16 for m in range(1, 8)]
DEATH = "rank 1 (process 4242) was killed by signal 9"
TEXT = "Hello world, 3 apples and 4 pears: \u00e9\u20ac\U0001f600 \U0001f469\u200d\U0001f680 done."
S = Server([PROGRAM])


def comp(prompt=TEXT, **kw):
    return dict({"model": "tiny", "prompt": prompt, "max_tokens": 1000, "seed": 0}, **kw)


def chat(content=TEXT, **kw):
    return dict({"model": "tiny", "messages": [{"role": "user", "content": content}], "seed": 0}, **kw)


def text_of(events):
    return "".join(c.get("text") or c.get("delta", {}).get("content") or "" for e in events for c in e["choices"])


def expect_error(answer, status, words, param=None, code=None):
    got, body = answer
    assert got == status, (got, body)
    e = body["error"]
    assert set(e) == {"message", "type", "param", "code"} and set(body) == {"error"}, body
    assert words in e["message"], body
    assert param is None or e["param"] == param, body
    assert code is None or e["code"] == code, body


def completion():
    status, a = S.post("/v1/completions", comp())
    assert status == 200 and a["object"] == "text_completion" and a["model"] == "tiny" and a["id"].startswith("cmpl-"), a
    assert abs(a["created"] - time.time()) < 60
    c = a["choices"][0]
    assert c == {"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "length"}, c
    u = a["usage"]
    assert u["prompt_tokens"] == u["completion_tokens"] > 5 and u["total_tokens"] == 2 * u["prompt_tokens"], u


def chat_completion():
    status, a = S.post("/v1/chat/completions", chat("hi"))
    assert status == 200 and a["object"] == "chat.completion" and a["id"].startswith("chatcmpl-"), a
    m = a["choices"][0]["message"]
    assert m == {"role": "assistant", "content": "user\nhi\nassistant\n"}, m  # special tokens of the template are no text


def stream_equals_answer():
    for step in (0, 2):
        status, events, done, _ = S.stream("/v1/completions", comp(seed=step))
        assert status == 200 and done and text_of(events) == TEXT, events
        assert events[-1]["choices"][0] == {"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}
        assert all(e["choices"][0]["finish_reason"] is None and "usage" not in e for e in events[:-1])
        assert len({e["id"] for e in events}) == 1
    assert len(events) > 5  # with pauses the text comes in pieces


def chat_stream():
    status, events, done, _ = S.stream("/v1/chat/completions", chat(seed=1))
    assert status == 200 and done
    assert events[0]["object"] == "chat.completion.chunk"
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}, events[0]
    assert all("role" not in e["choices"][0]["delta"] for e in events[1:])
    assert events[-1]["choices"][0]["delta"] == {} and events[-1]["choices"][0]["finish_reason"] == "length"
    assert text_of(events) == "user\n" + TEXT + "\nassistant\n"


def usage_in_stream():
    _, whole = S.post("/v1/completions", comp())
    _, events, done, _ = S.stream("/v1/completions", comp(stream_options={"include_usage": True}))
    assert done and events[-1]["choices"] == [] and events[-1]["usage"] == whole["usage"]
    assert all(e["usage"] is None for e in events[:-1])


def end_token_is_not_text():
    status, a = S.post("/v1/completions", comp(seed=END_TOKEN))
    c = a["choices"][0]
    assert c["text"] == TEXT and c["finish_reason"] == "stop", a
    assert a["usage"]["completion_tokens"] == a["usage"]["prompt_tokens"] + 1


def special_tokens_as_text():
    whole = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    for stream in (False, True):
        body = chat("hi", skip_special_tokens=False, seed=END_TOKEN)
        got = text_of(S.stream("/v1/chat/completions", body)[1]) if stream else S.post("/v1/chat/completions", body)[1]["choices"][0]["message"]["content"]
        assert got == whole, got
    expect_error(S.post("/v1/completions", comp(skip_special_tokens=0)), 400, "true, false or null", "skip_special_tokens")


def max_tokens_is_obeyed():
    _, a = S.post("/v1/completions", comp(max_tokens=3))
    assert a["usage"]["completion_tokens"] == 3 and a["choices"][0]["finish_reason"] == "length"
    assert TEXT.startswith(a["choices"][0]["text"])
    _, a = S.post("/v1/completions", {"model": "tiny", "prompt": "x " * 200, "seed": 0})
    assert a["usage"]["completion_tokens"] == 16  # OpenAI's default
    _, a = S.post("/v1/chat/completions", chat("x " * 200))
    assert a["usage"]["completion_tokens"] > 16


def stop_strings():
    for stop, want in ((["apples and"], TEXT[:TEXT.index("apples and")]), ("lo wor", "Hel"), (["zzz", "\u20ac\U0001f600"], TEXT[:TEXT.index("\u20ac")]),
                       ("H", ""), (["nothing"], TEXT), (["done.x"], TEXT)):
        for seed in (0, 1):
            _, a = S.post("/v1/completions", comp(stop=stop, seed=seed))
            c = a["choices"][0]
            assert c["text"] == want and c["finish_reason"] == ("length" if want == TEXT else "stop"), (stop, c)
            _, events, done, _ = S.stream("/v1/completions", comp(stop=stop, seed=seed))
            assert text_of(events) == want and done and events[-1]["choices"][0]["finish_reason"] == c["finish_reason"]


def stop_string_cancels():
    S.drop_lines()
    start = time.monotonic()
    _, a = S.post("/v1/completions", comp(prompt="Hello world " * 100, stop="world", seed=50))
    assert a["choices"][0]["text"] == "Hello " and time.monotonic() - start < 3
    S.wait_for(r"^cancel \d+", 2)


def stop_token_ids():
    _, a = S.post("/v1/completions", comp(prompt=[100, 200, 300, 400], stop_token_ids=[300]))
    _, b = S.post("/v1/completions", comp(prompt=[100, 200]))
    assert a["choices"][0]["text"] == b["choices"][0]["text"] and a["choices"][0]["finish_reason"] == "stop"
    assert a["usage"]["completion_tokens"] == 3


def sampling_reaches_the_cluster():
    S.drop_lines()
    S.post("/v1/completions", comp("a", temperature=1.5, top_p=0.5, top_k=7, min_p=0.25, ignore_eos=True, max_tokens=9))
    line = S.wait_for(r"^submit .*").group(0)
    for want in ("temperature=1.5 ", "top_p=0.5 ", "top_k=7 ", "min_p=0.25 ", "ignore_eos=1 ", "max_new=9 ", "seed=0 "):
        assert want in line, (want, line)
    S.post("/v1/completions", {"model": "tiny", "prompt": "a"})
    line = S.wait_for(r"^submit .*").group(0)
    for want in ("temperature=0.25 ", "top_p=1 ", "top_k=20 ", "min_p=0 ", "ignore_eos=0 "):  # the model's defaults
        assert want in line, (want, line)
    assert "seed=0 " not in line  # drawn


def adjustments_reach_the_cluster():
    S.drop_lines()
    S.post("/v1/completions", comp("a", presence_penalty=1.5, frequency_penalty=-0.5, repetition_penalty=1.25, min_tokens=2,
                                   logit_bias={"7": -100, "11": 2.5}))
    assert S.wait_for(r"^submit .*").group(0).endswith("presence=1.5 frequency=-0.5 repetition=1.25 min_new=2 bias=7:-100,11:2.5, grammar=")
    S.post("/v1/completions", comp("a"))
    assert S.wait_for(r"^submit .*").group(0).endswith("presence=0 frequency=0 repetition=0 min_new=0 bias= grammar=")
    expect_error(S.post("/v1/completions", {"model": "tiny", "prompt": "a", "min_tokens": 17}), 400, "at most max_tokens (here 16)", "min_tokens")


def chat_entries(events):
    return [t for e in events for c in e["choices"] if c["logprobs"] for t in c["logprobs"]["content"]]


def logprobs_of_chat():
    body = chat(logprobs=True, top_logprobs=3)
    _, a = S.post("/v1/chat/completions", body)
    c = a["choices"][0]
    entries = c["logprobs"]["content"]
    assert len(entries) == a["usage"]["completion_tokens"] and c["logprobs"]["refusal"] is None
    special = [t for t in entries if t["token"] in ("<|im_start|>", "<|im_end|>")]
    assert bytes(b for t in entries if t not in special for b in t["bytes"]).decode() == c["message"]["content"] and special
    for t in entries:
        assert set(t) == {"token", "logprob", "bytes", "top_logprobs"} and len(t["top_logprobs"]) == 3, t
        assert -1 < t["logprob"] <= 0 and [x["logprob"] for x in t["top_logprobs"]] == [0, -1, -2]
        assert t["top_logprobs"][0]["token"] == t["token"] or t in special
        assert bytes(t["bytes"]).decode("utf-8", "replace") == t["token"]
    for step in (0, 1):
        _, events, done, _ = S.stream("/v1/chat/completions", dict(body, seed=step))
        assert done and chat_entries(events) == entries
    _, events, _, _ = S.stream("/v1/chat/completions", dict(body, seed=1, stop=["zz", "4 pears: \u00e9\u20acx"]))
    assert chat_entries(events) == entries  # held text brings its logprobs when it comes
    _, a = S.post("/v1/chat/completions", chat(logprobs=True))
    assert a["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert S.post("/v1/chat/completions", chat(logprobs=False))[1]["choices"][0]["logprobs"] is None


def logprobs_of_completions():
    _, a = S.post("/v1/completions", comp(logprobs=2))
    l = a["choices"][0]["logprobs"]
    n = a["usage"]["completion_tokens"]
    assert [len(l[k]) for k in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [n] * 4
    for t, o in zip(l["tokens"], l["text_offset"]):
        assert TEXT[o:].startswith(t) or t.startswith("bytes:\\x"), (t, o)
    assert any(t.startswith("bytes:\\x") for t in l["tokens"])  # parts of a character
    assert all(t in top and len(top) >= 2 for t, top in zip(l["tokens"], l["top_logprobs"]))
    _, events, _, _ = S.stream("/v1/completions", comp(logprobs=2, seed=1))
    parts = [e["choices"][0]["logprobs"] for e in events if e["choices"][0]["logprobs"]]
    assert {k: [x for p in parts for x in p[k]] for k in l} == l
    _, a = S.post("/v1/completions", comp(logprobs=0, stop="apples"))
    l = a["choices"][0]["logprobs"]
    assert a["choices"][0]["text"] == "Hello world, 3 " and "".join(l["tokens"]) == "Hello world, 3 apples", l  # the last is in the text with its blank
    assert l["top_logprobs"] == [{}] * len(l["tokens"])


QWEN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../data/tokenizers/qwen3")
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add two numbers.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}}},
         {"type": "function", "function": {"name": "now"}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "</x>"]}}\n</tool_call>'


def tool_server(answer):
    return Server([PROGRAM, "--template-dir", QWEN, "--answer", answer])


def calls_of(message):
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls", [])]


def joined_deltas(events):
    message = {"content": "", "tool_calls": []}
    for e in events:
        d = e["choices"][0]["delta"]
        message["content"] += d.get("content") or ""
        for c in d.get("tool_calls", []):
            assert c["index"] == len(message["tool_calls"]) and c["type"] == "function", c
            message["tool_calls"].append(c)
    return message


def tool_calls():
    add, now = ("add", {"a": 1, "b": [2, "</x>"]}), ("now", {})
    now_text = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    bad = '<tool_call>\n{"name": "add", "arguments": 5}\n</tool_call>'
    for answer, content, calls in (("Just text <tool", "Just text <tool", []), (CALL, None, [add]), ("I will add.\n\n" + CALL, "I will add.", [add]),
                                   (CALL + "\n" + now_text + "\n", None, [add, now]), ("Hm " + bad, "Hm " + bad, []), (bad + CALL, bad, [add]),
                                   ("a<tool_call>\n{\"name\": \"add\", ", "a<tool_call>\n{\"name\": \"add\", ", []), ("x \n " + now_text + " y", "x y", [now])):
        s2 = tool_server(answer)
        _, a = s2.post("/v1/chat/completions", chat(tools=TOOLS, seed=END_TOKEN))
        c = a["choices"][0]
        assert c["message"]["content"] == content and calls_of(c["message"]) == calls, (answer, c)
        assert c["finish_reason"] == ("tool_calls" if calls else "stop"), c
        ids = [t["id"] for t in c["message"].get("tool_calls", [])]
        assert len(set(ids)) == len(ids) and all(t["type"] == "function" and "index" not in t for t in c["message"].get("tool_calls", []))
        for step in (0, 1):
            _, events, done, _ = s2.stream("/v1/chat/completions", chat(tools=TOOLS, seed=END_TOKEN + step))
            m = joined_deltas(events)
            assert done and m["content"] == (content or "") and calls_of(m) == calls, (answer, m)
            assert events[-1]["choices"][0]["finish_reason"] == c["finish_reason"]
        _, a = s2.post("/v1/chat/completions", chat(tools=TOOLS, tool_choice="none", seed=END_TOKEN))
        assert a["choices"][0]["message"]["content"] == answer and a["choices"][0]["finish_reason"] == "stop"
        s2.stop()


def one_tool_call():
    now = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    s2 = tool_server(CALL + "\n" + now + "\nand more text" * 20)
    for stream in (False, True):
        body = chat(tools=TOOLS, parallel_tool_calls=False, seed=END_TOKEN + 1)
        if stream:
            _, events, _, _ = s2.stream("/v1/chat/completions", body)
            m, reason = joined_deltas(events), events[-1]["choices"][0]["finish_reason"]
        else:
            c = s2.post("/v1/chat/completions", body)[1]["choices"][0]
            m, reason = c["message"], c["finish_reason"]
        assert [n for n, _ in calls_of(m)] == ["add"] and reason == "tool_calls", m
    s2.stop()


def forced_tool_calls_have_a_grammar():
    s2 = tool_server("x")
    for choice, names in (("required", ["add", "now"]), ({"type": "function", "function": {"name": "now"}}, ["now"])):
        s2.drop_lines()
        s2.post("/v1/chat/completions", chat(tools=TOOLS, tool_choice=choice))
        spec = json.loads(s2.wait_for(r"^submit .* grammar=(.+)$").group(1))
        assert [c["name"] for c in spec["calls"]] == names and spec["prefix"] == "<tool_call>\n" and spec["suffix"] == "\n</tool_call>", spec
    s2.post("/v1/chat/completions", chat(tools=TOOLS, tool_choice="auto"))
    assert s2.wait_for(r"^submit .* grammar=(.*)$").group(1) == ""
    s2.stop()


def conversation_with_tools():
    s2 = Server([PROGRAM, "--template-dir", QWEN])  # answers with the prompt
    messages = [{"role": "user", "content": "1+2?"}, {"role": "assistant", "content": None, "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{\"a\": 1, \"b\": 2}"}}]},
                {"role": "tool", "tool_call_id": "call_1", "content": "3"}]
    text = s2.post("/v1/chat/completions", {"model": "tiny", "messages": messages, "tools": TOOLS, "tool_choice": "auto", "seed": 0})[1]["choices"][0]["message"]
    prompt = text["content"] or ""
    assert "Add two numbers." in prompt and "<tool_response>\n3\n</tool_response>" in prompt, text
    assert calls_of(text) == [("add", {"a": 1, "b": 2})]  # the call of the conversation, played back
    s2.stop()
    for extra, param in (({"tools": TOOLS}, "tools"), ({"messages": messages}, "messages")):
        expect_error(S.post("/v1/chat/completions", dict(chat(), **extra)), 400, "does not know tools", param, "unsupported_parameter")


def response_format_reaches_the_cluster():
    S.drop_lines()
    S.post("/v1/chat/completions", chat(response_format={"type": "json_object"}))
    assert json.loads(S.wait_for(r"^submit .* grammar=(.*)$").group(1)) == {"schema": {"type": "object"}}
    schema = {"type": "object", "properties": {"\u00e9": {"type": "string"}}}
    S.post("/v1/completions", comp("a", response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}))
    assert json.loads(S.wait_for(r"^submit .* grammar=(.*)$").group(1)) == {"schema": schema}
    S.post("/v1/chat/completions", chat(response_format={"type": "text"}))
    assert S.wait_for(r"^submit .* grammar=(.*)$").group(1) == ""
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"d": {"type": "string", "format": "date"}}}}}
    expect_error(S.post("/v1/chat/completions", chat(response_format=bad)), 400, 'schema.d: keyword "format" is not supported', "response_format", "invalid_schema")


def echo():
    _, a = S.post("/v1/completions", comp("one two", echo=True, n=2))
    assert [c["text"] for c in a["choices"]] == ["one twoone two"] * 2
    ids = [100, 200, 300]
    _, b = S.post("/v1/completions", comp(ids))
    _, a = S.post("/v1/completions", comp(ids, echo=True, max_tokens=3))
    assert a["choices"][0]["text"] == 2 * b["choices"][0]["text"]
    _, events, done, _ = S.stream("/v1/completions", comp("x y", echo=True, seed=2, stop="y"))
    assert text_of(events) == "x yx " and done  # the prompt is not searched for stop strings


def echo_with_logprobs():
    for stream in (False, True):
        body = comp(TEXT, echo=True, logprobs=2, seed=1)
        if stream:
            events = S.stream("/v1/completions", body)[1]
            parts = [e["choices"][0]["logprobs"] for e in events if e["choices"] and e["choices"][0]["logprobs"]]
            text, l = text_of(events), {k: [x for p in parts for x in p[k]] for k in parts[0]}
        else:
            status, a = S.post("/v1/completions", body)
            text, l = a["choices"][0]["text"], a["choices"][0]["logprobs"]
            n = a["usage"]["prompt_tokens"]
            assert a["usage"]["completion_tokens"] == n
        assert text == 2 * TEXT and [len(v) for v in l.values()] == [2 * n] * 4, l
        assert l["token_logprobs"][0] is None and l["top_logprobs"][0] is None and None not in l["token_logprobs"][1:]
        assert l["tokens"][:n] == l["tokens"][n:] and l["token_logprobs"][1:n] == l["token_logprobs"][n + 1:]
        assert l["text_offset"][n:] == [o + len(TEXT) for o in l["text_offset"][:n]]
        assert all(t.startswith("bytes:") or (2 * TEXT)[o:].startswith(t) for t, o in zip(l["tokens"], l["text_offset"]))


def several_choices():
    S.drop_lines()
    _, a = S.post("/v1/completions", comp(["one two", "three"], n=2))
    assert [c["text"] for c in a["choices"]] == ["one two", "one two", "three", "three"]
    assert [c["index"] for c in a["choices"]] == [0, 1, 2, 3]
    assert a["usage"]["completion_tokens"] == 2 * a["usage"]["prompt_tokens"]
    seeds = [S.wait_for(r"^submit .* seed=(\d+)").group(1) for _ in range(4)]
    assert seeds == ["0", "1", "0", "1"], seeds
    _, events, done, _ = S.stream("/v1/chat/completions", chat("abc def", n=3))
    for i in range(3):
        mine = [e for e in events if e["choices"][0]["index"] == i]
        assert mine[0]["choices"][0]["delta"]["role"] == "assistant" and mine[-1]["choices"][0]["finish_reason"]
        assert text_of(mine) == "user\nabc def\nassistant\n"


def events_before_the_id_is_known():
    for _ in range(3):
        status, a = S.post("/v1/completions", comp(seed=SLOW_SUBMIT))
        assert status == 200 and a["choices"][0]["text"] == TEXT
    _, events, done, _ = S.stream("/v1/completions", comp(seed=SLOW_SUBMIT))
    assert done and text_of(events) == TEXT


def models_and_health():
    status, _, body = S.request("GET", "/v1/models")
    m = json.loads(body)
    assert status == 200 and m["object"] == "list" and m["data"][0]["id"] == "tiny" and m["data"][0]["object"] == "model"
    status, _, body = S.request("GET", "/v1/models/tiny")
    assert status == 200 and json.loads(body) == m["data"][0]
    status, _, body = S.request("GET", "/v1/models/none")
    expect_error((status, json.loads(body)), 404, "\"none\" does not exist", "model", "model_not_found")
    status, _, body = S.request("GET", "/health?x=1")
    assert status == 200
    status, headers, body = S.request("HEAD", "/health")
    assert status == 200 and body == b"" and int(headers["Content-Length"]) > 0


def paths_and_methods():
    for path in ("/v1", "/web/none.js", "/v1/completions/", "/v1/models/", "/nope", "/v1/%00", "/../etc/passwd"):
        status, _, body = S.request("GET", path)
        expect_error((status, json.loads(body)), 404, "no such path")
    for method, path, allow in (("GET", "/v1/completions", "POST"), ("DELETE", "/v1/chat/completions", "POST"),
                                ("POST", "/v1/models", "GET, HEAD"), ("PUT", "/health", "GET, HEAD"), ("OPTIONS", "/health", "GET, HEAD"),
                                ("POS", "/v1/completions", "POST"), ("ET", "/health", "GET, HEAD")):
        status, headers, body = S.request(method, path)
        expect_error((status, json.loads(body)), 405, "is not allowed")
        assert headers["Allow"] == allow, headers


def content_types():
    for t, want in (("application/json", 200), ("application/json; charset=utf-8", 200), ("APPLICATION/JSON;charset=UTF-8", 200),
                    ("text/plain", 415), ("application/jsonx", 415), ("application/x-www-form-urlencoded", 415),
                    ("application/json; charset=latin1", 415), ("", 415)):
        status, _, _ = S.request("POST", "/v1/completions", comp("a"), {"Content-Type": t})
        assert status == want, (t, status)
    status, _, _ = S.request("POST", "/v1/completions", comp("a"), {"Content-Encoding": "gzip"})
    assert status == 415


def bad_bodies_keep_the_connection():
    s = S.raw()
    for body, status in ((b"{", 400), (b"\xff\xfe", 400), (b"[]", 400), (b"", 400), (b"{\"model\":\"x\",\"prompt\":\"a\"}", 404)):
        s.sendall(post_bytes("/v1/completions", body))
        got, data = read_response(s)
        expect_error((got, json.loads(data)), status, "")
    s.sendall(post_bytes("/v1/completions", comp("still here")))
    got, data = read_response(s)
    assert got == 200 and json.loads(data)["choices"][0]["text"] == "still here"
    s.close()


def pipelined_requests():
    s = S.raw()
    s.sendall(post_bytes("/v1/completions", comp("first", seed=5)) + post_bytes("/v1/completions", comp("second")))
    for want in ("first", "second"):
        status, data = read_response(s)
        assert status == 200 and json.loads(data)["choices"][0]["text"] == want
    s.close()


def too_long_for_the_context():
    expect_error(S.post("/v1/completions", comp("a", max_tokens=4096)), 400, "more than the context of 4096 tokens", "prompt",
                 "context_length_exceeded")
    expect_error(S.post("/v1/completions", comp([1] * 4096, max_tokens=1)), 400, "4097 tokens")
    expect_error(S.post("/v1/chat/completions", chat("x y " * 4000)), 400, "leaves no room", "messages", "context_length_exceeded")
    expect_error(S.post("/v1/completions", comp("x " * 2000000)), 400, "bytes of text", "prompt", "context_length_exceeded")
    expect_error(S.post("/v1/completions", comp("")), 400, "no tokens", "prompt")


def errors_before_the_stream():
    for stream in (False, True):
        expect_error(S.post("/v1/completions", comp(temperature=9, stream=stream)), 400, "temperature", "temperature", "invalid_value")
        expect_error(S.post("/v1/completions", comp(seed=SUBMIT_FULL, stream=stream)), 429, "8 requests wait", None, "queue_full")
        expect_error(S.post("/v1/completions", comp(seed=SUBMIT_PEER, stream=stream)), 503, DEATH, None, "engine_failure")
        expect_error(S.post("/v1/completions", comp(seed=ERROR_AT_ONCE, stream=stream)), 503, DEATH, None, "engine_failure")


def oversized_by_length():
    s = S.raw()
    s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 8388609\r\n\r\n")
    status, data = read_response(s)  # no byte of the body was sent
    expect_error((status, json.loads(data)), 413, "larger than 8388608 bytes", None, "request_too_large")
    s.close()
    s = S.raw()
    s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99999999999999999999999\r\n\r\n")
    assert read_all(s).split()[1] in (b"413", b"400")
    s.close()


def oversized_chunked():
    def send(n_mib):
        s = S.raw()
        s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
        piece = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
        try:
            for _ in range(n_mib):
                s.sendall(piece)
            s.sendall(b"0\r\n\r\n")
            return read_response(s)
        except (ConnectionError, IndexError):
            return None, b""
        finally:
            s.close()
    status, data = send(9)  # drained, then refused
    expect_error((status, json.loads(data)), 413, "larger than")
    assert send(40)[0] is None  # past the bound of draining: closed
    status, data = send(7)  # within the limit: blank JSON
    assert status == 400


def header_bounds():
    s = S.raw()
    try:
        s.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 200000 + b"\r\n\r\n")
    except ConnectionError:
        pass
    data = read_all(s)
    assert data == b"" or data.split()[1] in (b"413", b"431", b"400"), data[:100]
    s.close()
    assert S.request("GET", "/health")[0] == 200


def leaving(body):
    S.drop_lines()
    s = S.raw()
    s.sendall(post_bytes("/v1/completions", body))
    number = S.wait_for(r"^submit (\d+)").group(1)
    time.sleep(0.3)
    start = time.monotonic()
    s.close()
    S.wait_for(f"^cancel {number}$", 2)
    took = time.monotonic() - start
    S.wait_for(f"^end {number}$", 2)
    assert took < 1, took


def client_leaves_while_parked():
    for stream in (False, True):
        leaving(comp(seed=SILENT, stream=stream))


def client_leaves_between_tokens():
    for stream in (False, True):
        leaving(comp("word " * 500, seed=20, stream=stream))


def client_resets():
    S.drop_lines()
    s = S.raw()
    s.sendall(post_bytes("/v1/chat/completions", chat(seed=SILENT, stream=True)))
    S.wait_for(r"^submit")
    s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    s.close()
    S.wait_for(r"^cancel", 1)


def many_streams():
    results, n = [None] * 64, 64

    def one(i):
        text = f"stream number {i}: " + TEXT * 3
        status, events, done, _ = S.stream("/v1/completions", comp(text, seed=1 + i % 5))
        results[i] = status == 200 and done and text_of(events) == text

    threads = [threading.Thread(target=one, args=(i,)) for i in range(n)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert all(results), [i for i in range(n) if not results[i]]


def slow_clients():
    """Silent, dripping and never-ending clients are ended; others are served meanwhile."""
    s2 = Server([PROGRAM, "--timeout", "1", "--max-connections", "40"])
    silent = [s2.raw() for _ in range(10)]
    drip, dripped = s2.raw(), threading.Event()
    half = s2.raw()
    half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{")

    def dripping():
        try:
            drip.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
            for _ in range(100):
                drip.sendall(b"A: b\r\n")  # never silent for a second
                time.sleep(0.1)
        except OSError:
            dripped.set()

    thread = threading.Thread(target=dripping)
    thread.start()
    assert s2.request("GET", "/health")[0] == 200
    thread.join(20)
    assert dripped.is_set(), "a client that drips headers was never ended"
    for s in silent + [half]:
        s.settimeout(5)
        read_all(s)
        s.close()
    drip.close()
    assert s2.request("GET", "/health")[0] == 200
    s2.stop()


def keep_alive_comments():
    s2 = Server([PROGRAM, "--keepalive", "1"])
    s = s2.raw()
    s.sendall(post_bytes("/v1/completions", comp(seed=SILENT, stream=True)))
    data, end = b"", time.monotonic() + 4
    while data.count(b": keep-alive\n\n") < 2 and time.monotonic() < end:
        data += s.recv(4096)
    assert b"text/event-stream" in data and data.count(b": keep-alive\n\n") >= 2, data
    status, events, done, comments = s2.stream("/v1/completions", comp("a b", seed=1500))
    assert status == 200 and done and text_of(events) == "a b" and comments
    s2.process.stdin.close()  # the silent one is still there: it gets an error and the end
    rest = read_all(s)
    assert b"shutting down" in rest and b"[DONE]" in rest, rest
    assert s2.process.wait(10) == 0


def api_key():
    s2 = Server([PROGRAM, "--api-key", "s3cret-key"])
    good = {"Authorization": "Bearer s3cret-key"}
    for path, method, body in (("/v1/models", "GET", None), ("/v1/completions", "POST", comp("a")), ("/nope", "GET", None)):
        for bad in ({}, {"Authorization": ""}, {"Authorization": "Bearer "}, {"Authorization": "Bearer s3cret-ke"}, {"Authorization": "Bearer s3cret-key2"},
                    {"Authorization": "Bearer S3cret-key"}, {"Authorization": "Basic s3cret-key"}, {"Authorization": "s3cret-key"},
                    {"Authorization": "Bearer s3cret-keys3cret-key"}, {"X-Api-Key": "s3cret-key"}):
            status, headers, data = s2.request(method, path, body, bad)
            expect_error((status, json.loads(data)), 401, "API key", None, "invalid_api_key")
            assert headers["WWW-Authenticate"] == "Bearer" and json.loads(data)["error"]["type"] == "authentication_error"
            assert "s3cret" not in data.decode()
        assert s2.request(method, path, body, good)[0] == (404 if path == "/nope" else 200)
    assert s2.request("GET", "/health")[0] == 200
    s2.stop()


def drains_before_it_stops():
    """The end lets live requests finish and refuses new ones."""
    s2 = Server([PROGRAM, "--drain", "5000"])
    s = s2.raw()
    s.sendall(post_bytes("/v1/completions", comp(seed=40, stream=True), "Connection: close\r\n"))
    s2.wait_for(r"^submit")
    s2.process.stdin.close()
    time.sleep(0.2)
    for path, body in (("/health", None), ("/v1/completions", comp())):
        status, _, data = s2.request("POST" if body else "GET", path, body)
        expect_error((status, json.loads(data)), 503, "shutting down", None, "shutting_down")
    data = read_all(s)
    assert b"[DONE]" in data and b'"finish_reason":"length"' in data and b"error" not in data, data[-500:]
    s2.wait_for(r"^left 0$")
    assert s2.process.wait(10) == 0
    s2 = Server([PROGRAM, "--drain", "300"])  # bounded: a request that does not end gets an error
    s = s2.raw()
    s.sendall(post_bytes("/v1/completions", comp(seed=SILENT)))
    s2.wait_for(r"^submit")
    start = time.monotonic()
    s2.process.stdin.close()
    s2.wait_for(r"^left 1$")
    assert b"shutting down" in read_all(s) and 0.25 < time.monotonic() - start < 3
    assert s2.process.wait(10) == 0


def queue_limit():
    s2 = Server([PROGRAM, "--max-live", "2"])
    s = s2.raw()
    s.sendall(post_bytes("/v1/completions", comp(seed=SILENT, n=2)))
    s2.wait_for(r"^submit"), s2.wait_for(r"^submit")
    status, headers, body = s2.request("POST", "/v1/completions", comp())
    expect_error((status, json.loads(body)), 429, "queue is full", None, "queue_full")
    assert headers["Retry-After"] == "1"
    s.close()
    s2.wait_for(r"^end"), s2.wait_for(r"^end")
    assert s2.post("/v1/completions", comp())[0] == 200
    s2.stop()


def rank_dies_in_mid_stream():
    s2 = Server([PROGRAM])
    status, events, done, _ = s2.stream("/v1/completions", comp(seed=DIE_AFTER_3 + 2))
    assert status == 200 and done and DEATH in events[-1]["error"]["message"], events
    assert set(events[-1]["error"]) == {"message", "type", "param", "code"}
    assert TEXT.startswith(text_of(events[:-1])) and len(events) >= 2
    end = time.monotonic() + 2  # the requests are told first, then the server
    while s2.request("GET", "/health")[0] == 200 and time.monotonic() < end:
        time.sleep(0.01)
    for method, path, body in (("GET", "/health", None), ("POST", "/v1/completions", comp()), ("POST", "/v1/chat/completions", chat(stream=True))):
        status, _, data = s2.request(method, path, body)
        expect_error((status, json.loads(data)), 503, DEATH, None, "engine_failure")
    assert s2.request("GET", "/v1/models")[0] == 200
    s2.stop()
    s2 = Server([PROGRAM])
    expect_error(s2.post("/v1/completions", comp(seed=DIE_AFTER_3)), 503, DEATH, None, "engine_failure")
    s2.stop()


def no_chat_template():
    s2 = Server([PROGRAM, "--no-template", "1"])
    expect_error(s2.post("/v1/chat/completions", chat()), 400, "no chat template", "messages", "no_chat_template")
    assert s2.post("/v1/completions", comp())[0] == 200
    s2.stop()


def slow_reader_loses_nothing():
    """A client that reads late gets every byte."""
    s = S.raw()
    text = "word number " * 1500
    s.sendall(post_bytes("/v1/completions", comp(text, stream=True), "Connection: close\r\n"))
    time.sleep(1)
    data = read_all(s).split(b"\r\n\r\n", 1)[1]
    s.close()
    body = b""
    while data:  # chunked coding
        size, data = data.split(b"\r\n", 1)
        body, data = body + data[:int(size, 16)], data[int(size, 16) + 2:]
    events, done, _ = parse_events(body)
    assert done and text.startswith(text_of(events)) and len(events) > 1


def stops_with_everything_ended():
    S.stop()


CASES = [completion, chat_completion, stream_equals_answer, chat_stream, usage_in_stream, end_token_is_not_text, special_tokens_as_text, max_tokens_is_obeyed,
         stop_strings, stop_string_cancels, stop_token_ids, sampling_reaches_the_cluster, adjustments_reach_the_cluster,
         logprobs_of_chat, logprobs_of_completions, tool_calls, one_tool_call,
         forced_tool_calls_have_a_grammar, conversation_with_tools, echo_with_logprobs, response_format_reaches_the_cluster, echo, several_choices,
         events_before_the_id_is_known, models_and_health, paths_and_methods, content_types, bad_bodies_keep_the_connection,
         pipelined_requests, too_long_for_the_context, errors_before_the_stream, oversized_by_length, oversized_chunked, header_bounds,
         client_leaves_while_parked, client_leaves_between_tokens, client_resets, many_streams, slow_reader_loses_nothing, slow_clients,
         keep_alive_comments, api_key, drains_before_it_stops, queue_limit, rank_dies_in_mid_stream, no_chat_template, stops_with_everything_ended]
if len(sys.argv) > 2:
    CASES = [c for c in CASES if c.__name__ in sys.argv[2:]] + [stops_with_everything_ended]
sys.exit(run_cases(CASES))
