#!/usr/bin/env python3
"""The manual: --help of every command, epx(1), completions, the systemd unit: manual_test.py EPX SOURCE_DIR BUILD_DIR [PART]

Parts beside the default one, each skipped where its program is not installed: groff, mandoc, zsh, fish, systemd.
"""
import os
import re
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from http_client import run_cases

EPX, SOURCE, BUILD = sys.argv[1:4]
PART = sys.argv[4] if len(sys.argv) > 4 else "always"
COMMANDS = ["serve", "generate", "info", "demo", "eval", "bench a2a", "bench serve", "plan"]


def epx(*args, code=0):
    p = subprocess.run([EPX, *args], capture_output=True, text=True, timeout=30)
    assert p.returncode == code, (args, p.returncode, p.stderr)
    return p.stdout if code == 0 else p.stderr


def flags(command):
    """{flag: (aliases and itself, what follows)} of a command's --help."""
    found = {}
    for line in epx(*command.split(), "--help").splitlines():
        m = re.fullmatch(r"    (--[a-z0-9-]+(?:, --[a-z0-9-]+)?)( .+)?", line)
        if m:
            names = m.group(1).split(", ")
            found[names[0]] = (names, (m.group(2) or "").strip())
    assert "--help" in found and len(found) > 5, command
    return found


def helps():
    usage = epx("--help")
    for command in COMMANDS:
        text = epx(*command.split(), "--help")
        assert re.search(rf"^  {command.split()[0]} ", usage, re.M), command
        for part in ("NAME\n    epx " + command + " - ", "SYNOPSIS\n    epx " + command, "DESCRIPTION\n", "OPTIONS\n", "EXAMPLES\n", "EXIT STATUS\n"):
            assert part in text, (command, part)
        for line in text[text.index("DESCRIPTION"):].splitlines():
            assert len(line) <= 80 or re.match(r"    --", line), (command, line)  # names and choices of a flag stay on a line
        examples = text[text.index("EXAMPLES\n"):text.index("\nENVIRONMENT")].replace("\\\n", " ")
        for line in examples.splitlines()[1:]:  # an example uses the command's own flags
            for flag in re.findall(r"--[a-z0-9-]+", line):
                assert any(flag in names for names, _ in flags(command).values()), (command, flag)


def man_page():
    page = epx("man").replace("\\-", "-")
    assert page.startswith(".TH EPX 1") and epx("man", "x", code=2)
    sections = {}
    for part in re.split(r"^\.SH ", page, flags=re.M)[1:]:
        title, _, body = part.partition("\n")
        sections[title] = body
    for command in COMMANDS:
        body = sections["epx " + command]
        for names, value in flags(command).values():
            want = ", ".join(names) + (" " + value if value else "")
            assert f".TP\n.B {want}\n" in body, (command, want)
    assert not re.search(r"^\.(?!TH|SH|SS|TP|B |I |nf|fi|PP)", page, re.M)


def bash(line, *words):
    """What bash offers for the last of the words."""
    script = f'source <("{EPX}" completion bash); COMP_WORDS=({" ".join(repr(w) for w in words)}); COMP_CWORD={len(words) - 1}; _epx; printf "%s\\n" "${{COMPREPLY[@]}}"'
    p = subprocess.run(["bash", "--norc", "-c", script], capture_output=True, text=True, timeout=30, cwd=SOURCE)
    assert p.returncode == 0 and not p.stderr, p.stderr
    return sorted(p.stdout.split())


def bash_completion():
    assert bash("", "epx", "") == sorted({c.split()[0] for c in COMMANDS} | {"completion", "man", "help"})
    assert bash("", "epx", "bench", "") == ["a2a", "serve"] and bash("", "epx", "completion", "z") == ["zsh"]
    for command in COMMANDS:
        got = [w for w in bash("", "epx", *command.split(), "--") if w.startswith("--")]
        assert got == sorted(n for names, _ in flags(command).values() for n in names), (command, got)
        for names, value in flags(command).values():
            if value.startswith("{"):
                for name in names:
                    assert bash("", "epx", *command.split(), name, "") == sorted(value.strip("{}").split(",")), (command, name)
    assert bash("", "epx", "serve", "--model-path", "mod") == ["models"]
    assert bash("", "epx", "eval", "g") == ["gsm8k"]
    assert bash("", "epx", "bench", "serve", "--backend", "vllm-") == ["vllm-chat"]
    assert bash("", "epx", "serve", "--load-format", "=", "du") == ["dummy"]
    assert "zsh" in epx("completion", "tcsh", code=2)


def other_shells_name_every_flag():
    zsh, fish = epx("completion", "zsh"), epx("completion", "fish")
    for command in COMMANDS:
        body = zsh[zsh.index(f"'{command}') flags=("):]
        body = body[:body.index(") ;;")]
        when = command.split()[-1]
        for names, value in flags(command).values():
            for n in names:
                assert f"'{n}{'=' if value else ''}[" in body, (command, n)
                assert re.search(rf"^complete -c epx -n '[^']*from {when}[^']*' -l {n[2:]}( |$)", fish, re.M), (command, n)


def installed():
    """`make install` puts page and completions where the programs look for them, and they are those of this program."""
    with tempfile.TemporaryDirectory() as d:
        p = subprocess.run(["cmake", "--install", BUILD, "--prefix", d], capture_output=True, text=True, timeout=100)
        assert p.returncode == 0, p.stderr
        for path, args in (("share/man/man1/epx.1", ["man"]), ("share/bash-completion/completions/epx", ["completion", "bash"]),
                           ("share/zsh/site-functions/_epx", ["completion", "zsh"]), ("share/fish/vendor_completions.d/epx.fish", ["completion", "fish"])):
            with open(os.path.join(d, path)) as f:
                assert f.read() == epx(*args), path
        assert subprocess.run([os.path.join(d, "bin/epx"), "--version"], capture_output=True).returncode == 0


def unit_settings():
    """The unit's command line is one that `epx serve` understands."""
    unit = open(os.path.join(SOURCE, "examples/epx.service")).read()
    line = re.search(r"^ExecStart=\S+ serve (.*)$", unit, re.M).group(1)
    example = re.search(r"^#   EPX_ARGS=(.*)$", unit, re.M).group(1)
    args = line.replace("${EPX_MODEL}", "/nonexistent").replace("$EPX_ARGS", example).split()
    err = epx("serve", *args, code=2)
    assert err.count("\n") == 2 and "--model-path /nonexistent: No such file" in err, err
    seconds = {k: int(v) for k, v in re.findall(r"(TimeoutStopSec=|--shutdown-timeout )(\d+)", unit)}
    assert seconds["TimeoutStopSec="] > seconds["--shutdown-timeout "]  # systemd waits longer than the server does


def launchers():
    """examples/serve-node.sh under each launcher's variables, with a program that prints its arguments; its flags are those of `epx serve`."""
    script = os.path.join(SOURCE, "examples/serve-node.sh")
    base = {"PATH": os.environ["PATH"], "EPX": "echo", "EPX_JOIN_TOKEN": "x"}
    for env in ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, {"PMI_RANK": "1", "PMI_SIZE": "2"}):
        p = subprocess.run([script, "h:5000", "--model-path", "a b"], env=dict(base, **env), capture_output=True, text=True)
        assert p.stdout == "serve --nnodes 2 --node-rank 1 --dist-init-addr h:5000 --model-path a b\n", (env, p)
    known = flags("serve")
    assert {"--nnodes", "--node-rank", "--dist-init-addr"} <= set(known)
    assert subprocess.run([script, "h:5000", "--tp", "2"], env=base, capture_output=True).returncode == 2  # no launcher
    no_secret = {k: v for k, v in base.items() if k != "EPX_JOIN_TOKEN"}
    assert subprocess.run([script, "h:1", "x"], env=dict(no_secret, PMI_RANK="0", PMI_SIZE="1"), capture_output=True).returncode != 0
    batch = os.path.join(SOURCE, "examples/serve.sbatch")
    assert subprocess.run(["bash", "-n", batch]).returncode == 0
    text = open(batch).read().replace("\\\n", " ")
    for command, line in (("serve", re.search(r"serve-node.sh .*", text).group(0)), ("bench serve", re.search(r'bench serve .*', text).group(0))):
        names = {n for names, _ in flags(command).values() for n in names}
        assert set(re.findall(r"--[a-z0-9-]+", line)) <= names, line


def run(*args, text=None):
    p = subprocess.run(args, input=text, capture_output=True, text=True, timeout=60)
    assert p.returncode == 0 and not p.stderr.strip(), (args, p.returncode, p.stdout[-500:], p.stderr[-1000:])
    return p.stdout


def groff():
    text = run("groff", "-man", "-Tutf8", "-ww", "-rLL=100n", text=epx("man"))
    assert "bench serve" in text and "--moe-a2a-backend" in re.sub(r"\x1b\[[0-9;]*m|.\x08", "", text)


def mandoc():
    p = subprocess.run(["mandoc", "-man", "-Tlint", "-Werror"], input=epx("man"), capture_output=True, text=True, timeout=60)
    assert p.returncode == 0, p.stdout[:1000]


def zsh():
    with tempfile.TemporaryDirectory() as d:
        with open(os.path.join(d, "_epx"), "w") as f:
            f.write(epx("completion", "zsh"))
        run("zsh", "-n", os.path.join(d, "_epx"))
        # zsh completes only at a prompt: its builtins are replaced by ones that print what they are given.
        stubs = f"compdef() {{ :; }}; compadd() {{ shift; print -l -- $@; }}; _arguments() {{ print -l -- $@; }}; source {d}/_epx; "

        def offers(*words):
            line = " ".join(repr(w) for w in words)
            return run("zsh", "-f", "-c", f"{stubs} words=({line}); CURRENT={len(words)}; _epx").splitlines()
        assert set(offers("epx", "")) == {c.split()[0] for c in COMMANDS} | {"completion", "man", "help"}
        assert offers("epx", "bench", "") == ["a2a", "serve"]
        for command in COMMANDS:
            got = sorted(m.group(1) for m in (re.match(r"(--[a-z0-9-]+)=?\[", x) for x in offers("epx", *command.split(), "--")) if m)
            assert got == sorted(n for names, _ in flags(command).values() for n in names), (command, got)
        assert any(re.match(r"--moe-a2a-backend=\[.*:\(auto none pplx deepep\)$", x) for x in offers("epx", "serve", ""))

def fish():
    with tempfile.TemporaryDirectory() as d:
        path = os.path.join(d, "epx.fish")
        with open(path, "w") as f:
            f.write(epx("completion", "fish"))
        run("fish", "--no-config", "-n", path)

        def offers(line):
            return [x.split("\t")[0] for x in run("fish", "--no-config", "-c", f"source {path}; complete -C '{line}'").splitlines()]
        assert set(offers("epx ")) == {c.split()[0] for c in COMMANDS} | {"completion", "man", "help"}, offers("epx ")
        assert offers("epx bench ") == ["a2a", "serve"]
        for command in COMMANDS:
            names = sorted(n for names, _ in flags(command).values() for n in names)
            got = sorted(set(offers(f"epx {command} --")))
            assert got == names, (command, set(got) ^ set(names))
        assert set(offers("epx serve --moe-a2a-backend ")) == {"auto", "none", "pplx", "deepep"}


def systemd():
    with tempfile.TemporaryDirectory() as d:
        path = os.path.join(d, "epx.service")
        unit = open(os.path.join(SOURCE, "examples/epx.service")).read()
        with open(path, "w") as f:
            f.write(unit.replace("/usr/local/bin/epx", os.path.abspath(EPX)).replace("Documentation=man:epx(1)\n", ""))  # not installed here
        p = subprocess.run(["systemd-analyze", "verify", "--man=no", path], capture_output=True, text=True, timeout=60)
        bad = [line for line in p.stderr.splitlines() if "epx.service" in line]
        assert bad == [], bad


PROGRAMS = {"groff": "groff", "mandoc": "mandoc", "zsh": "zsh", "fish": "fish", "systemd": "systemd-analyze"}
if PART == "always":
    sys.exit(run_cases([helps, man_page, bash_completion, other_shells_name_every_flag, installed, unit_settings, launchers]))
if not shutil.which(PROGRAMS[PART]):
    print(f"skip: {PROGRAMS[PART]} is not installed; scripts/install-deps ci brings it")
    sys.exit(77)
sys.exit(run_cases([globals()[PART]]))
