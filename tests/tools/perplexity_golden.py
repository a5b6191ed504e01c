#!/usr/bin/env python3
"""Expected values of tests/server/eval_test.py: mean negative log-likelihood of a text under a Qwen3-MoE model.

    tests/tools/perplexity_golden.py MODEL_DIR TEXT WINDOW...

A forward pass in numpy and the tokenizer of Hugging Face (packages numpy, tokenizers); nothing of this repository is used. Windows overlap by
half; a token is scored in the first window that holds it.
"""
import json
import struct
import sys

import numpy as np
from tokenizers import Tokenizer


def load(path):
    data = open(path, "rb").read()
    n = struct.unpack("<Q", data[:8])[0]
    out = {}
    for name, v in json.loads(data[8:8 + n]).items():
        if name == "__metadata__":
            continue
        raw = data[8 + n + v["data_offsets"][0]:8 + n + v["data_offsets"][1]]
        a = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32) if v["dtype"] == "BF16" else np.frombuffer(raw, np.float32)
        out[name] = a.reshape(v["shape"]).astype(np.float64)
    return out


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


class Model:
    def __init__(self, d):
        self.c = json.load(open(d + "/config.json"))
        self.w = load(d + "/model.safetensors")

    def norm(self, name, x):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.c["rms_norm_eps"]) * self.w[name]

    def rope(self, x):
        d = x.shape[-1]
        theta = (self.c.get("rope_parameters") or self.c)["rope_theta"]
        a = np.arange(len(x))[:, None, None] * theta ** (-np.arange(0, d, 2) / d)
        p, q = x[..., :d // 2], x[..., d // 2:]
        return np.concatenate([p * np.cos(a) - q * np.sin(a), q * np.cos(a) + p * np.sin(a)], -1)

    def attention(self, p, x):
        c, n = self.c, len(x)
        q, k, v = ((x @ self.w[f"{p}{m}_proj.weight"].T).reshape(n, -1, c["head_dim"]) for m in "qkv")
        q, k = self.rope(self.norm(p + "q_norm.weight", q)), self.rope(self.norm(p + "k_norm.weight", k))
        k, v = (np.repeat(t, q.shape[1] // t.shape[1], 1) for t in (k, v))
        s = np.einsum("ihd,jhd->hij", q, k) * c["head_dim"] ** -0.5
        s = softmax(np.where(np.tril(np.ones((n, n), bool)), s, -np.inf))
        return np.einsum("hij,jhd->ihd", s, v).reshape(n, -1) @ self.w[p + "o_proj.weight"].T

    def moe(self, p, x):
        c = self.c
        s = softmax(x @ self.w[p + "gate.weight"].T)
        ids = np.argsort(-s, -1, kind="stable")[:, :c["num_experts_per_tok"]]
        w = np.take_along_axis(s, ids, 1)
        if c["norm_topk_prob"]:
            w = w / w.sum(-1, keepdims=True)
        y = np.zeros_like(x)
        for e in range(s.shape[1]):
            t, j = np.where(ids == e)
            g, u = (x[t] @ self.w[f"{p}experts.{e}.{m}_proj.weight"].T for m in ("gate", "up"))
            y[t] += (g / (1 + np.exp(-g)) * u) @ self.w[f"{p}experts.{e}.down_proj.weight"].T * w[t, j, None]
        return y

    def logits(self, ids):
        x = self.w["model.embed_tokens.weight"][ids]
        for i in range(self.c["num_hidden_layers"]):
            p = f"model.layers.{i}."
            x = x + self.attention(p + "self_attn.", self.norm(p + "input_layernorm.weight", x))
            x = x + self.moe(p + "mlp.", self.norm(p + "post_attention_layernorm.weight", x))
        head = "model.embed_tokens.weight" if self.c["tie_word_embeddings"] else "lm_head.weight"
        return self.norm("model.norm.weight", x) @ self.w[head].T


def main():
    model, ids = Model(sys.argv[1]), Tokenizer.from_file(sys.argv[1] + "/tokenizer.json").encode(open(sys.argv[2]).read()).ids
    for window in map(int, sys.argv[3:]):
        losses, scored = [], 1
        for first in range(0, len(ids), window // 2):
            part = ids[first:first + window]
            if scored >= first + len(part):
                continue
            p = model.logits(part)
            p = p - p.max(-1, keepdims=True)
            p = p - np.log(np.exp(p).sum(-1, keepdims=True))
            losses += [-p[t - first - 1, ids[t]] for t in range(scored, first + len(part))]
            scored = first + len(part)
        print(f"window {window}: {len(ids)} tokens, {len(losses)} scored, mean {np.mean(losses):.6f}, perplexity {np.exp(np.mean(losses)):.4f}")


main()
