"""A strict reader of the Prometheus text exposition format 0.0.4, written from its description and not from the writer's code:
https://prometheus.io/docs/instrumenting/exposition_formats/"""
import math
import re

NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
TYPES = {"counter", "gauge", "histogram", "summary", "untyped"}


class Family:
    def __init__(self, name):
        self.name, self.type, self.help, self.samples = name, None, None, []


def number(text):
    if text in ("+Inf", "-Inf", "NaN"):
        return float(text.replace("Inf", "inf"))
    assert re.fullmatch(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?", text), f"not a number: {text!r}"
    return float(text)


def labels_of(text, at):
    """Labels from text[at] == '{' on: (dict, index after '}')."""
    labels, at = {}, at + 1
    while text[at] != "}":
        m = LABEL.match(text, at)
        assert m and text[m.end():m.end() + 2] == '="', text
        value, at = "", m.end() + 2
        while text[at] != '"':
            if text[at] == "\\":
                value, at = value + {"\\": "\\", '"': '"', "n": "\n"}[text[at + 1]], at + 2
            else:
                value, at = value + text[at], at + 1
        assert m.group() not in labels, f"label twice: {text}"
        labels[m.group()] = value
        at += 1
        assert text[at] in ",}", text
        at += text[at] == ","
    return labels, at + 1


def parse(text):
    """{family name: Family}; raises AssertionError on anything the format does not allow."""
    assert text.endswith("\n"), "the last line must end with a line feed"
    families, current = {}, None
    for line in text[:-1].split("\n"):
        assert line == line.strip() and line, f"blank or padded line {line!r}"
        if line.startswith("#"):
            kind, name, rest = line[2:].split(" ", 2)
            assert line[:2] == "# " and kind in ("HELP", "TYPE") and NAME.fullmatch(name), line
            if kind == "HELP":
                assert name not in families, f"{name} begins twice: its lines must be together"
                current = families[name] = Family(name)
                current.help = rest
            else:
                assert current and current.name == name and current.type is None and not current.samples, line
                assert rest in TYPES, line
                current.type = rest
            continue
        m = NAME.match(line)
        assert m and current and current.type, line
        labels, at = labels_of(line, m.end()) if line[m.end()] == "{" else ({}, m.end())
        assert line[at] == " ", line
        base = m.group()
        if current.type == "histogram":
            base = re.sub(r"_(bucket|sum|count)$", "", base)
            assert base != m.group(), line
        assert base == current.name, f"{line} inside the family {current.name}"
        key = (m.group(), tuple(sorted(labels.items())))
        assert key not in [s[0] for s in current.samples[-40:]], f"sample twice: {line}"
        current.samples.append((key, m.group(), labels, number(line[at + 1:])))
    for f in families.values():
        check(f)
    return families


def check(f):
    assert f.type and f.help and f.samples, f.name
    keys = [s[0] for s in f.samples]
    assert len(set(keys)) == len(keys), f"{f.name}: a series twice"
    if f.type == "counter":
        assert f.name.endswith("_total"), f.name
        assert all(v >= 0 for _, _, _, v in f.samples), f.name
    if f.type == "histogram":
        check_histogram(f)


def check_histogram(f):
    series = {}
    for _, name, labels, v in f.samples:
        rest = tuple(sorted((k, x) for k, x in labels.items() if k != "le"))
        s = series.setdefault(rest, {"buckets": [], "sum": None, "count": None})
        if name.endswith("_bucket"):
            s["buckets"].append((number(labels["le"]), v))
        else:
            s[name[len(f.name) + 1:]] = v
    for rest, s in series.items():
        bounds = [b for b, _ in s["buckets"]]
        counts = [c for _, c in s["buckets"]]
        assert bounds == sorted(set(bounds)) and math.isinf(bounds[-1]), (f.name, rest)
        assert counts == sorted(counts) and counts[-1] == s["count"] and s["sum"] is not None, (f.name, rest, s)


def value(families, sample, **labels):
    """Sum of the samples with that name whose labels include these."""
    total, n = 0.0, 0
    for f in families.values():
        for _, name, have, v in f.samples:
            if name == sample and all(have.get(k) == str(x) for k, x in labels.items()):
                total, n = total + v, n + 1
    assert n, f"no sample {sample} {labels}"
    return total
