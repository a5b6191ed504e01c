"""A headless Chromium over the WebDriver protocol (https://www.w3.org/TR/webdriver2/), standard library only."""
import base64
import json
import os
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


def find_programs():
    """(chromium, chromedriver); None where one is missing."""
    chromium = next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)
    return chromium, shutil.which("chromedriver")


class Browser:
    def __init__(self, chromium, driver, dark=False, width=1440, height=1000):
        self.process = subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        port = None
        for line in self.process.stdout:
            found = re.search(r"started successfully on port (\d+)", line)
            if found:
                port = int(found.group(1))
                break
        self.url = f"http://127.0.0.1:{port}"
        args = ["--headless=new", f"--window-size={width},{height}", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
                "--no-first-run", "--disable-background-networking", "--disable-component-update", "--force-device-scale-factor=1"]
        if os.geteuid() == 0:
            args.append("--no-sandbox")  # Chromium refuses to run as root with its sandbox
        caps = {"browserName": "chrome", "goog:chromeOptions": {"binary": chromium, "args": args}, "goog:loggingPrefs": {"browser": "ALL"}}
        try:
            self.session = self.call("POST", "/session", {"capabilities": {"alwaysMatch": caps}})["sessionId"]
        except Exception:
            self.process.kill()
            raise
        if dark is not None:
            self.set_dark(dark)

    def call(self, method, path, body=None, timeout=60):
        data = json.dumps(body).encode() if body is not None else None
        r = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(r, timeout=timeout) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as e:
            raise AssertionError(f"{method} {path}: {json.load(e)['value']['message'][:500]}") from None

    def do(self, method, path, body=None):
        return self.call(method, f"/session/{self.session}{path}", body)

    def cdp(self, command, params):
        return self.do("POST", "/goog/cdp/execute", {"cmd": command, "params": params})

    def set_dark(self, dark):
        self.cdp("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]})

    def resize(self, width, height):
        self.cdp("Emulation.setDeviceMetricsOverride", {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False})

    def open(self, url):
        self.do("POST", "/url", {"url": url})

    def run(self, script, *args):
        return self.do("POST", "/execute/sync", {"script": script, "args": list(args)})

    def find(self, css):
        return self.do("POST", "/element", {"using": "css selector", "value": css})[ELEMENT]

    def click(self, css):
        self.do("POST", f"/element/{self.find(css)}/click", {})

    def type(self, css, text):
        self.do("POST", f"/element/{self.find(css)}/value", {"text": text})

    def keys(self, *names):
        """Press and release keys wherever the focus is."""
        actions = [a for n in names for a in ({"type": "keyDown", "value": n}, {"type": "keyUp", "value": n})]
        self.do("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def wait(self, script, wait_s=15, *args):
        """Until the script returns something true; returns that."""
        end = time.monotonic() + wait_s
        while True:
            got = self.run(script, *args)
            if got:
                return got
            assert time.monotonic() < end, f"not within {wait_s} s: {script}"
            time.sleep(0.05)

    def screenshot(self, path):
        with open(path, "wb") as f:
            f.write(base64.b64decode(self.do("GET", "/screenshot")))

    def console(self):
        return self.do("POST", "/se/log", {"type": "browser"})

    def close(self):
        try:
            self.do("DELETE", "")
        except Exception:
            pass
        self.process.terminate()
        self.process.wait(10)
