"""Node 0 of a server over two hosts, and its client: serve_hosts.py EPX MODEL_DIR DIR answer|cut FLAGS of `epx serve`...
Answers equal those of one rank. cut: makes DIR/ready.0 when a request is in work, whose end must then name the other host in time."""
import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request

EPX, MODEL, FOLDER, WHAT = sys.argv[1:5]
FLAGS = sys.argv[5:]
PROMPTS = [f"Anna has {3 * i + 2} apples and buys {i + 4} more. How many apples does she have?" for i in range(4)]
DEADLINE_S = 3 + 2.5  # --watchdog-timeout, and what noticing and telling may take


class Server:
    def __init__(self, *flags):
        self.errors = open(os.path.join(FOLDER, "errors"), "w+")
        self.process = subprocess.Popen([EPX, "serve", "--model-path", MODEL, "--port", "0", "--log-level", "error", *flags],
                                        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self.errors, text=True)
        line = self.process.stdout.readline()
        assert "ready to roll" in line, line + self.said()
        self.url = self.process.stdout.readline().strip()

    def said(self):
        self.errors.seek(0)
        return self.errors.read()

    def ask(self, text, n):
        body = {"text": text, "sampling_params": {"temperature": 0, "max_new_tokens": n, "ignore_eos": True}}
        request = urllib.request.Request(self.url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=40) as r:
                return r.status, json.load(r)
        except urllib.error.HTTPError as e:
            return e.code, json.load(e)

    def answers(self):
        return [self.ask(p, 24)[1]["output_ids"] for p in PROMPTS]

    def stop(self):
        self.process.terminate()
        assert self.process.wait(20) == 0, self.said()


one = Server("--threads", "1")
want = one.answers()
one.stop()
s = Server(*FLAGS)
table = s.said()
assert re.search(r"ranks 0 to 0 on nodea, ranks 1 to 1 on nodeb", table) and " over ucx," in table, table
assert s.answers() == want, "other answers than those of one rank"
print(f"{len(want)} answers of 24 tokens equal one rank's: {' '.join(FLAGS)}")
if WHAT == "answer":
    s.stop()
    sys.exit(0)
open(os.path.join(FOLDER, "ready.0"), "w").close()
start = time.monotonic()
status, answer = s.ask(PROMPTS[0], 3900)
took = time.monotonic() - start
message = answer["error"]["message"] if status != 200 else answer
print(f"status {status} after {took:.3f} s: {message}")
assert status == 503 and re.search("nodeb|rank 1", message), answer
assert took < DEADLINE_S, took
assert s.process.wait(10) == 1, s.said()
print(s.said().strip().split("\n")[-1])
