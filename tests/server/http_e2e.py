"""End to end: `epx serve` with two expert-parallel ranks on the bundled model: http_e2e.py EPX MODEL_DIR.
Real answers, streams equal to answers, the same text whatever else is in the batch, a rank killed in mid-generation."""
import json
import os
import signal
import sys
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from http_client import Server, free_port, post_bytes, read_all, run_cases

EPX, MODEL = sys.argv[1:3]
if not os.access(EPX, os.X_OK):
    print(f"skip: the epx program ({EPX}) is not built")
    sys.exit(77)
NAME = "tinymoe"


class Epx(Server):
    def __init__(self, tp=2):
        parallel = ["--tp", str(tp), "--dp", str(tp), "--enable-dp-attention", "--moe-a2a-backend", "pplx"] if tp > 1 else []
        Server.__init__(self, [EPX, "serve", "--model-path", MODEL, "--served-model-name", NAME, "--port", str(free_port()),
                               "--max-total-tokens", "16384", "--log-level", "error"] + parallel, r"^http://127\.0\.0\.1:(\d+)", 60)

    def ranks(self):
        children = []
        for t in os.listdir(f"/proc/{self.process.pid}/task"):
            with open(f"/proc/{self.process.pid}/task/{t}/children") as f:
                children += [int(p) for p in f.read().split()]
        return sorted(set(children))

    def ask(self, question, **kw):
        body = dict({"model": NAME, "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 120}, **kw)
        status, answer = self.post("/v1/chat/completions", body, timeout=60)
        assert status == 200, answer
        return answer


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def known_answers():
    """Chat prompts of the model's reference with the text that transformers gave, up to the end token."""
    with open(os.path.join(MODEL, "reference.json")) as f:
        r = json.load(f)
    for text, greedy, ids in zip(r["texts"], r["greedy_text"], r["greedy"]):
        begin, end = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
        if text.startswith(begin) and text.endswith(end) and text.count("<|im_start|>") == 2 and 4082 in ids and "Hello!" not in text:
            yield text[len(begin):-len(end)], greedy.split("<|im_end|>")[0]


S = Epx()


def two_ranks_answer():
    assert len(S.ranks()) == 2
    asked = 0
    for question, want in known_answers():
        a = S.ask(question)
        c = a["choices"][0]
        assert c["message"]["content"] == want and c["finish_reason"] == "stop", (question, c, want)
        asked += 1
    assert asked >= 2


def stream_equals_answer():
    for kw in ({}, {"temperature": 1.0, "seed": 11, "top_p": 0.95}, {"stop": ["="]}, {"max_tokens": 5}, {"temperature": 1.0, "seed": 3, "n": 2}):
        question = list(known_answers())[0][0]
        whole = S.ask(question, **kw)
        body = dict({"model": NAME, "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 120,
                     "stream_options": {"include_usage": True}}, **kw)
        status, events, done, _ = S.stream("/v1/chat/completions", body, timeout=60)
        assert status == 200 and done and events[-1]["usage"] == whole["usage"], events
        for c in whole["choices"]:
            mine = [e["choices"][0] for e in events if e["choices"] and e["choices"][0]["index"] == c["index"]]
            assert "".join(m["delta"].get("content", "") for m in mine) == c["message"]["content"]
            assert mine[-1]["finish_reason"] == c["finish_reason"]
            assert "=" not in c["message"]["content"] or "stop" not in kw


def same_text_in_any_company():
    questions = [q for q, _ in known_answers()][:4]
    sampled = {"temperature": 1.0, "seed": 5, "max_tokens": 60}
    alone = [S.ask(q, **sampled)["choices"][0]["message"]["content"] for q in questions]
    together = [None] * (3 * len(questions))

    def one(i):
        together[i] = S.ask(questions[i % len(questions)], **sampled)["choices"][0]["message"]["content"]

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(together))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert together == alone * 3


def completions_by_text_and_ids():
    body = {"model": NAME, "prompt": "Question: Sara has 9 eggs. She buys 3 more. How many eggs does she have?\nAnswer:", "temperature": 0,
            "max_tokens": 40, "stop": "\n\n"}
    status, a = S.post("/v1/completions", body)
    assert status == 200 and a["choices"][0]["text"].strip(), a
    status, b = S.post("/v1/completions", dict(body, prompt=[13, 20], ignore_eos=True, max_tokens=30, stop=None))
    assert status == 200 and b["usage"] == {"prompt_tokens": 2, "completion_tokens": 30, "total_tokens": 32}, b
    assert b["choices"][0]["finish_reason"] == "length"


def a_client_that_leaves_frees_its_place():
    s = S.raw()
    s.sendall(post_bytes("/v1/completions", {"model": NAME, "prompt": "Question:", "max_tokens": 3000, "ignore_eos": True, "stream": True}))
    s.recv(1000)
    s.close()
    start = time.monotonic()
    S.ask("What is 17+25?")
    assert time.monotonic() - start < 10


def terminates_cleanly():
    """Live streams are finished, new requests are refused, then the program ends."""
    s = S.raw(30)
    s.sendall(post_bytes("/v1/completions", {"model": NAME, "prompt": "Question:", "max_tokens": 300, "ignore_eos": True, "temperature": 0,
                                             "stream": True}, "Connection: close\r\n"))
    s.recv(100)
    ranks = S.ranks()
    S.process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    assert S.post("/v1/completions", {"model": NAME, "prompt": "a", "max_tokens": 1})[0] == 503
    rest = read_all(s)
    assert rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") and b'"finish_reason":"length"' in rest and b'"error"' not in rest, rest[-300:]
    assert S.process.wait(20) == 0 and not [p for p in ranks if is_alive(p)]


def rank_killed_in_mid_generation():
    for stream in (True, False):
        s2 = Epx()
        ranks = s2.ranks()
        assert len(ranks) == 2
        s = s2.raw(30)
        s.sendall(post_bytes("/v1/completions", {"model": NAME, "prompt": "Question:", "max_tokens": 3500, "ignore_eos": True,
                                                 "temperature": 0, "stream": stream}, "Connection: close\r\n"))
        if stream:
            assert s.recv(4096).startswith(b"HTTP/1.1 200")
        time.sleep(0.3)
        start = time.monotonic()
        os.kill(ranks[1], signal.SIGKILL)
        rest = read_all(s)
        took = time.monotonic() - start
        assert b'"error":{' in rest and f"{ranks[1]}".encode() in rest and b"rank 1" in rest, rest[-600:]
        assert rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") if stream else rest.startswith(b"HTTP/1.1 503"), rest[-600:]
        assert took < 2, took
        assert s2.process.wait(20) != 0  # the server of a lost group ends and says so
        assert not [p for p in ranks if is_alive(p)]
        s.close()


sys.exit(run_cases([two_ranks_answer, stream_equals_answer, same_text_in_any_company, completions_by_text_and_ids,
                    a_client_that_leaves_frees_its_place, terminates_cleanly, rank_killed_in_mid_generation]))
