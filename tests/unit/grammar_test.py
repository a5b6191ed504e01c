"""Grammar-constrained decoding: grammar_test.py GENERATOR TOKENIZER [LARGE_TOKENIZER.xz]. Random schemas, random tokens, and every
text checked by a validator that follows JSON Schema's words and shares nothing with the engine. Seed: EPX_TEST_SEED."""
import json
import os
import random
import re
import subprocess
import sys
import tempfile

GENERATOR, TOKENIZER = sys.argv[1:3]
SEED = int(os.environ.get("EPX_TEST_SEED", "1"))
RND = random.Random(SEED)
print(f"seed {SEED}")


class Generator:
    def __init__(self, tokenizer):
        self.p = subprocess.Popen([GENERATOR, tokenizer], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8")

    def ask(self, spec, seed, max_tokens=600, check=False):
        self.p.stdin.write(json.dumps({"spec": spec, "seed": seed, "max_tokens": max_tokens, "check": check}) + "\n")
        self.p.stdin.flush()
        line = self.p.stdout.readline()
        assert line, f"the generator ended with {self.p.wait()} on {json.dumps(spec)}"
        return json.loads(line)

    def end(self):
        self.p.stdin.close()
        assert self.p.wait() == 0


# ---- the validator ----

def no_constant(name):
    raise ValueError(f"{name} is not JSON")


def unique(pairs):
    return dict(pairs)


def same(a, b):
    """JSON equality: 1 equals 1.0 but not true."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return a == b
    if type(a) is not type(b):
        return False
    if isinstance(a, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    if isinstance(a, dict):
        return set(a) == set(b) and all(same(a[k], b[k]) for k in a)
    return a == b


def is_type(v, t):
    number = isinstance(v, (int, float)) and not isinstance(v, bool)
    return {"object": isinstance(v, dict), "array": isinstance(v, list), "string": isinstance(v, str), "boolean": isinstance(v, bool),
            "null": v is None, "number": number, "integer": number and v == int(v)}[t]


def valid(v, s, root):
    if s is True:
        return True
    if "$ref" in s:
        target = root
        for part in s["$ref"].lstrip("#").split("/")[1:]:
            target = target[part]
        if not valid(v, target, root):
            return False
    types = s.get("type")
    if types is not None and not any(is_type(v, t) for t in ([types] if isinstance(types, str) else types)):
        return False
    if "enum" in s and not any(same(v, e) for e in s["enum"]):
        return False
    if "const" in s and not same(v, s["const"]):
        return False
    if "anyOf" in s and not any(valid(v, b, root) for b in s["anyOf"]):
        return False
    if "oneOf" in s and sum(valid(v, b, root) for b in s["oneOf"]) != 1:
        return False
    if isinstance(v, str) and not s.get("minLength", 0) <= len(v) <= s.get("maxLength", 1 << 40):
        return False
    if isinstance(v, list):
        if not s.get("minItems", 0) <= len(v) <= s.get("maxItems", 1 << 40):
            return False
        if "items" in s and not all(valid(x, s["items"], root) for x in v):
            return False
    if isinstance(v, dict):
        props = s.get("properties", {})
        if any(name not in v for name in s.get("required", [])):
            return False
        for name, x in v.items():
            rule = props.get(name, s.get("additionalProperties", True))
            if rule is False or (rule is not True and not valid(x, rule, root)):
                return False
    return True


# ---- random schemas ----

NAMES = ["a", "b", "name", "na", "\u00e9t\u00e9", "x y", "quo\"te", "back\\slash", "items", "\U0001f600"]
VALUES = ["a", "b", "red", "\u20ac", "", 0, 1, -7, 2.5, 1e300, True, False, None, [1, "x"], {"k": [None]}]


def random_schema(depth, refs):
    kinds = ["string", "number", "integer", "boolean", "null", "enum", "const", "list", "bounded"]
    if depth > 0:
        kinds += ["object", "object", "array", "array", "anyOf", "oneOf", "map", "any"]
        if refs:
            kinds += ["ref"]
    k = RND.choice(kinds)
    if k in ("string", "number", "integer", "boolean", "null"):
        return {"type": k, "title": "T"}
    if k == "enum":
        return {"enum": RND.sample(VALUES, RND.randint(1, 5))}
    if k == "const":
        return {"const": RND.choice(VALUES)}
    if k == "list":
        return {"type": RND.sample(["string", "null", "integer", "boolean", "array"], RND.randint(1, 3))}
    if k == "bounded":
        lo = RND.randint(0, 4)
        return {"type": "string", "minLength": lo, "maxLength": lo + RND.randint(0, 5)}
    if k == "object":
        names = RND.sample(NAMES, RND.randint(0, 4))
        s = {"type": "object", "properties": {n: random_schema(depth - 1, refs) for n in names},
             "required": [n for n in names if RND.random() < 0.6]}
        if RND.random() < 0.7:
            s["additionalProperties"] = False
        return s
    if k == "map":
        return {"type": "object", "additionalProperties": random_schema(depth - 1, refs)}
    if k == "array":
        lo = RND.randint(0, 2)
        s = {"type": "array", "items": random_schema(depth - 1, refs), "minItems": lo}
        if RND.random() < 0.8:
            s["maxItems"] = lo + RND.randint(0, 3)
        return s
    if k == "anyOf":
        return {"anyOf": [random_schema(depth - 1, refs) for _ in range(RND.randint(1, 3))]}
    if k == "oneOf":
        return {"oneOf": [{"type": "object", "properties": {"kind": {"const": c}, "v": random_schema(depth - 1, refs)}, "required": ["kind"],
                           "additionalProperties": False} for c in ("a", "b")] + [{"type": RND.choice(["null", "string"])}]}
    if k == "ref":
        return {"$ref": RND.choice(["#/$defs/leaf", "#/$defs/tree"])}
    return True


def random_root():
    refs = RND.random() < 0.5
    s = random_schema(3, refs)
    while s is True:
        s = random_schema(3, refs)
    if refs:
        s["$defs"] = {"leaf": {"type": "string", "maxLength": 3},
                      "tree": {"type": "object", "properties": {"v": {"type": "integer"}, "l": {"$ref": "#/$defs/tree"},
                                                                "k": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}},
                               "required": ["v"], "additionalProperties": False}}
    return s


# ---- cases ----

def parse(text):
    return json.loads(text, parse_constant=no_constant, object_pairs_hook=unique)


def check(g, schema, seed, **kw):
    """1 when the text was completed (and is right), else 0."""
    a = g.ask({"schema": schema}, seed, **kw)
    assert "error" not in a, (a, json.dumps(schema))
    if not a["done"]:
        return 0
    try:
        v = parse(a["text"])
    except ValueError as e:
        raise AssertionError(f"seed {seed}: not JSON ({e}): {a['text']!r} of {json.dumps(schema)}")
    assert valid(v, schema, schema), f"seed {seed}: {a['text']!r} does not match {json.dumps(schema)}"
    return 1


def random_schemas(g):
    done = total = 0
    for i in range(400):
        schema = random_root()
        for k in range(3):
            done += check(g, schema, SEED * 1000003 + i * 10 + k)
            total += 1
    print(f"{done} of {total} random texts were completed")
    assert done > total * 0.9


def masks_agree_with_trying(g):
    for i in range(25):
        check(g, random_root(), SEED * 7 + i, max_tokens=12, check=True)


def free_json(g):
    done = sum(check(g, {"type": "object"}, SEED + i, max_tokens=1500) for i in range(60))
    assert done > 30, done
    for i in range(60):
        check(g, {}, SEED + i)


FIXED = [
    ({"type": "integer"}, r"-?(0|[1-9][0-9]*)$"),
    ({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, r'\{\s*"a"\s*:'),
    ({"type": "array", "items": {"const": 5}, "minItems": 3, "maxItems": 3}, r"\[\s*5\s*,\s*5\s*,\s*5\s*\]$"),
    ({"enum": ["x", "xy", "xyz"]}, r'"xy?z?"$'),
    ({"type": "object", "properties": {}, "additionalProperties": False}, r"\{\s*\}$"),
    ({"type": "string", "enum": ["a", 1, None]}, r'"a"$'),
    ({"anyOf": [{"type": "null"}, {"type": "boolean"}]}, r"(null|true|false)$"),
    ({"enum": [f"value {i}" for i in range(1000)]}, r'"value [0-9]{1,3}"$'),
    ({"type": "object", "properties": {f"p{i}": {"const": i} for i in range(1000)}, "required": ["p999"]}, r"\{"),
]


def fixed_schemas(g):
    for schema, pattern in FIXED:
        for i in range(10):
            a = g.ask({"schema": schema}, SEED + i)
            assert not a["done"] or re.match(pattern, a["text"]), (schema, a)
            check(g, schema, SEED + i)


def calls_with_prefix(g):
    tools = [{"name": "add", "schema": {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["a"], "$defs": {"n": {"type": "integer"}}}},
             {"name": "no\"op", "schema": {"type": "object", "properties": {}, "additionalProperties": False}}]
    seen = set()
    for i in range(40):
        a = g.ask({"calls": tools, "prefix": "<tool_call>\n", "suffix": "\n</tool_call>"}, SEED + i)
        assert a["done"], a
        text = a["text"]
        assert text.startswith("<tool_call>\n") and text.endswith("\n</tool_call>"), text
        v = parse(text[len("<tool_call>\n"):-len("\n</tool_call>")])
        assert list(v) == ["name", "arguments"], v
        tool = next(t for t in tools if t["name"] == v["name"])
        assert valid(v["arguments"], tool["schema"], tool["schema"])
        seen.add(v["name"])
    assert len(seen) == 2


REFUSED = [
    ({"type": "string", "pattern": "a"}, 'schema: keyword "pattern" is not supported; supported: type,'),
    ({"type": "object", "properties": {"d": {"type": "string", "format": "date"}}}, 'schema.d: keyword "format"'),
    ({"type": "number", "minimum": 1}, '"minimum"'), ({"allOf": [{}]}, '"allOf"'), ({"not": {}}, '"not"'),
    ({"type": "array", "items": {"type": "array", "uniqueItems": True}}, 'schema.items: keyword "uniqueItems"'),
    ({"anyOf": [{"type": "string"}, {"type": "string", "contentEncoding": "x"}]}, 'schema.anyOf[1]: keyword "contentEncoding"'),
    ({"type": "text"}, 'unknown type "text"'), ({"type": []}, "1 to 7 names"), ({"type": 5}, "1 to 7 names"), (False, "matches nothing"), (5, "object or true"),
    ({"properties": {"a": {}}, "required": ["b"]}, 'names "b", which is not in'), ({"required": "a"}, "list of names"),
    ({"type": "string", "minLength": 5, "maxLength": 4}, '"minLength" 5 is more than "maxLength" 4'), ({"type": "string", "minLength": -1}, "integer from 0"),
    ({"type": "array", "maxItems": 1.5}, "integer from 0"), ({"enum": []}, "non-empty list"), ({"type": "string", "enum": [1]}, "has the type"),
    ({"enum": ["a"], "minLength": 1}, '"minLength" beside "enum"'), ({"anyOf": []}, "non-empty"), ({"anyOf": [{}], "type": "string"}, '"type" beside "anyOf"'),
    ({"$ref": "#/$defs/x"}, "is not found"), ({"$ref": "http://x"}, "is not found"), ({"$ref": 5}, "is not found"), ({"$ref": "#"}, "leads back to itself"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}]}}}, "leads back to itself"),
    ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "infinite"), ({"items": {"$ref": "#"}, "minItems": 1}, "infinite"),
    ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, "oneOf[0] and oneOf[1] may match the same value"),
    ({"oneOf": [{"const": 1}, {"const": 1.0}]}, "may match"), ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "may match"),
    ({"enum": list(range(1001))}, "more than 1000 alternatives"), ({"anyOf": [{"enum": [f"{k}.{i}" for i in range(600)]} for k in range(2)]}, "more than 1000 alternatives"),
    ({"properties": {f"p{i}": {} for i in range(1001)}}, "1001 properties; at most 1000"),
    ({"additionalProperties": 5}, "true, false or a schema"), ({"items": [{}]}, "a list of schemas is not supported"), ({"properties": []}, "must be an object"),
]


def refusals(g):
    for schema, words in REFUSED:
        a = g.ask({"schema": schema}, 1)
        assert words in a.get("error", ""), (json.dumps(schema)[:300], words, str(a)[:300])


def speed(path):
    """Masks of a vocabulary of 150 thousand in the low milliseconds."""
    with tempfile.NamedTemporaryFile(suffix=".json") as f:
        f.write(subprocess.run(["xz", "-dc", path], check=True, stdout=subprocess.PIPE).stdout)
        f.flush()
        g = Generator(f.name)
    # the file is read before the first answer
        schema = {"type": "object", "properties": {"name": {"type": "string"}, "n": {"type": "integer"}, "kind": {"enum": ["a", "b", "c"]},
                                                   "list": {"type": "array", "items": {"type": "string", "maxLength": 40}}},
                  "required": ["name", "n", "kind", "list"]}
        worst, means = 0, []
        for s in (schema, {"type": "object"}):
            for i in range(6):
                a = g.ask({"schema": s}, SEED + i, max_tokens=60)
                means.append(a["mask_us"])
                worst = max(worst, a["mask_max_us"])
    g.end()
    mean = sum(means) / len(means)
    print(f"masks of the large vocabulary: mean {mean:.0f} us, longest {worst:.0f} us")
    assert mean < 5000, mean  # "low milliseconds", with room for a busy machine and sanitizers


G = Generator(TOKENIZER)
for case in (fixed_schemas, refusals, calls_with_prefix, random_schemas, masks_agree_with_trying, free_json):
    case(G)
    print(f"ok {case.__name__}", flush=True)
G.end()
if len(sys.argv) > 3:
    speed(sys.argv[3])
