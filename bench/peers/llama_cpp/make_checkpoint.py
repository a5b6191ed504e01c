"""Write a random Qwen3-MoE checkpoint in bf16, the same bytes for the same seed: for speed comparisons, not for answers.

    python3 make_checkpoint.py --out DIR --tokenizer DIR_WITH_TOKENIZER_JSON [--seed 1]

The default is the model of docs/performance.md: 12 layers, hidden 1024, 32 experts (8 a token) of 512, vocabulary 151,936: 978 million
weights, of which 369 million are read for a token. Needs numpy.
"""

import argparse
import json
import lzma
import pathlib
import shutil
import struct
import sys

import numpy as np


def parse():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", required=True, type=pathlib.Path)
    p.add_argument("--tokenizer", required=True, type=pathlib.Path, help="directory with tokenizer.json, or tokenizer.json.xz")
    p.add_argument("--seed", type=int, default=1)
    for name, value in dict(layers=12, hidden=1024, experts=32, top_k=8, ffn=512, heads=16, kv_heads=4, head_dim=128, vocab=151936).items():
        p.add_argument("--" + name.replace("_", "-"), type=int, default=value)
    return p.parse_args()


def config(a):
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "torch_dtype": "bfloat16",
        "hidden_size": a.hidden,
        "intermediate_size": 3 * a.hidden,
        "moe_intermediate_size": a.ffn,
        "num_hidden_layers": a.layers,
        "num_attention_heads": a.heads,
        "num_key_value_heads": a.kv_heads,
        "head_dim": a.head_dim,
        "num_experts": a.experts,
        "num_experts_per_tok": a.top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": a.vocab,
        "max_position_embeddings": 4096,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "eos_token_id": 151645 if a.vocab > 151645 else a.vocab - 1,
    }


def shapes(a):
    q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    yield "model.embed_tokens.weight", (a.vocab, a.hidden)
    for i in range(a.layers):
        p = f"model.layers.{i}."
        yield p + "input_layernorm.weight", (a.hidden,)
        yield p + "self_attn.q_proj.weight", (q, a.hidden)
        yield p + "self_attn.k_proj.weight", (kv, a.hidden)
        yield p + "self_attn.v_proj.weight", (kv, a.hidden)
        yield p + "self_attn.o_proj.weight", (a.hidden, q)
        yield p + "self_attn.q_norm.weight", (a.head_dim,)
        yield p + "self_attn.k_norm.weight", (a.head_dim,)
        yield p + "post_attention_layernorm.weight", (a.hidden,)
        yield p + "mlp.gate.weight", (a.experts, a.hidden)
        for e in range(a.experts):
            yield p + f"mlp.experts.{e}.gate_proj.weight", (a.ffn, a.hidden)
            yield p + f"mlp.experts.{e}.up_proj.weight", (a.ffn, a.hidden)
            yield p + f"mlp.experts.{e}.down_proj.weight", (a.hidden, a.ffn)
    yield "model.norm.weight", (a.hidden,)
    yield "lm_head.weight", (a.vocab, a.hidden)


def bf16(x):
    """float32 to the nearest bf16, ties to even."""
    u = x.view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def values(seed, index, shape):
    n = int(np.prod(shape))
    if len(shape) == 1:
        return np.full(n, 0x3F80, np.uint16)  # norms: 1
    rng = np.random.Generator(np.random.Philox(key=[seed, index]))
    return bf16(rng.standard_normal(n, dtype=np.float32) * np.float32(0.02))


def write_weights(a):
    header, offset = {}, 0
    for name, shape in shapes(a):
        n = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + n]}
        offset += n
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(a.out / "model.safetensors", "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for i, (_, shape) in enumerate(shapes(a)):
            values(a.seed, i, shape).tofile(f)
            if sys.stderr.isatty():
                print(f"\r{f.tell() >> 20} of {offset >> 20} MiB", end="", file=sys.stderr, flush=True)


def copy_tokenizer(a):
    packed, plain = a.tokenizer / "tokenizer.json.xz", a.tokenizer / "tokenizer.json"
    if packed.exists():
        (a.out / "tokenizer.json").write_bytes(lzma.decompress(packed.read_bytes()))
    else:
        shutil.copy(plain, a.out / "tokenizer.json")
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        if (a.tokenizer / name).exists():
            shutil.copy(a.tokenizer / name, a.out / name)


def main():
    a = parse()
    a.out.mkdir(parents=True, exist_ok=True)
    (a.out / "config.json").write_text(json.dumps(config(a), indent=1) + "\n")
    copy_tokenizer(a)
    write_weights(a)


if __name__ == "__main__":
    main()
