"""Raw HTTP helpers and a tiny test runner for the server's tests. Standard library only."""
import http.client
import json
import queue
import re
import socket
import subprocess
import sys
import threading
import time
import traceback


class Server:
    """The program under test with its output as a queue of lines."""

    def __init__(self, argv, port_pattern=r"^port (\d+)$", wait_s=30):
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.lines = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.port = int(self.wait_for(port_pattern, wait_s).group(1))

    def _read(self):
        for line in self.process.stdout:
            self.lines.put(line.rstrip("\n"))

    def wait_for(self, pattern, wait_s=5):
        """The first line from now on that matches; others are dropped."""
        end = time.monotonic() + wait_s
        while True:
            try:
                line = self.lines.get(timeout=max(0.001, end - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no line like {pattern!r} within {wait_s} s")
            found = re.search(pattern, line)
            if found:
                return found

    def drop_lines(self):
        while not self.lines.empty():
            self.lines.get_nowait()

    def stop(self, wait_s=20):
        self.process.stdin.close()
        code = self.process.wait(wait_s)
        assert code == 0, f"the server's exit code is {code}"

    def request(self, method, path, body=None, headers=None, timeout=30):
        c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        if body is not None and not isinstance(body, (bytes, str)):
            body = json.dumps(body)
        if isinstance(body, str):
            body = body.encode()
        h = {"Content-Type": "application/json"} if body is not None else {}
        h.update(headers or {})
        c.request(method, path, body, h)
        r = c.getresponse()
        data = r.read()
        c.close()
        return r.status, dict(r.getheaders()), data

    def post(self, path, body, **kw):
        status, _, data = self.request("POST", path, body, **kw)
        return status, json.loads(data)

    def stream(self, path, body, timeout=30):
        """(status, list of the events' JSON, True when [DONE] came, comments)."""
        status, headers, data = self.request("POST", path, dict(body, stream=True), timeout=timeout)
        if status != 200:
            return status, [json.loads(data)], False, []
        assert headers["Content-Type"] == "text/event-stream", headers
        return (status,) + parse_events(data)

    def raw(self, timeout=10):
        s = socket.create_connection(("127.0.0.1", self.port), timeout=timeout)
        return s


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def parse_events(data):
    events, done, comments = [], False, []
    for block in data.decode("utf-8").split("\n\n"):  # decoding fails where an event breaks a character
        if block == "":
            continue
        if block.startswith(":"):
            comments.append(block)
        elif block == "data: [DONE]":
            done = True
        else:
            assert block.startswith("data: ") and "\n" not in block and not done, block
            events.append(json.loads(block[6:]))
    return events, done, comments


def post_bytes(path, body, extra=""):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    return (f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{extra}Content-Length: {len(body)}\r\n\r\n").encode() + body


def read_all(s):
    data = b""
    try:
        while True:
            piece = s.recv(65536)
            if not piece:
                return data
            data += piece
    except (ConnectionError, socket.timeout):
        return data


def read_response(s):
    """Status and body of one answer with Content-Length; nothing of the next answer is taken from the socket."""
    f = s.makefile("rb", buffering=0)
    status = int(f.readline().split()[1])
    length = 0
    while True:
        line = f.readline().strip()
        if not line:
            break
        name, value = line.split(b":", 1)
        if name.lower() == b"content-length":
            length = int(value)
    body = b""
    while len(body) < length:
        piece = f.read(length - len(body))
        assert piece, "the connection ended inside an answer"
        body += piece
    return status, body


def run_cases(cases):
    failed = 0
    for case in cases:
        start = time.monotonic()
        try:
            case()
            print(f"ok   {case.__name__} {time.monotonic() - start:.2f} s", flush=True)
        except Exception:
            failed += 1
            print(f"FAIL {case.__name__}", flush=True)
            traceback.print_exc(file=sys.stdout)
    print(f"{len(cases)} cases, {failed} failed", flush=True)
    return 1 if failed else 0
