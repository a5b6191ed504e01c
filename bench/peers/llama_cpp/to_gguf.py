"""Write a Qwen3-MoE checkpoint of Hugging Face's form as a GGUF file with the same bf16 weights, for llama.cpp.

    python3 to_gguf.py CHECKPOINT_DIR OUT.gguf

Needs numpy and the PyPI package gguf. One file model.safetensors, bf16 matrices. Names and keys: llama.cpp's `qwen3moe`.
"""

import json
import pathlib
import struct
import sys

import gguf
import numpy as np


class Weights:
    def __init__(self, path):
        with open(path, "rb") as f:
            n = struct.unpack("<Q", f.read(8))[0]
            self.header = json.loads(f.read(n))
        self.data = np.memmap(path, np.uint8, "r", offset=8 + n)

    def raw(self, name):
        """The tensor's 16-bit words, shaped."""
        t = self.header[name]
        assert t["dtype"] == "BF16", f"{name} is {t['dtype']}, expected BF16"
        a, b = t["data_offsets"]
        return self.data[a:b].view(np.uint16).reshape(t["shape"])

    def f32(self, name):
        return (self.raw(name).astype(np.uint32) << 16).view(np.float32)


def add_tokens(w, directory, vocab):
    t = json.loads((directory / "tokenizer.json").read_text())
    tokens = [f"[unused{i}]" for i in range(vocab)]
    types = [gguf.TokenType.UNUSED] * vocab
    for text, i in t["model"]["vocab"].items():
        tokens[i], types[i] = text, gguf.TokenType.NORMAL
    for added in t["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("qwen2")
    w.add_token_list(tokens)
    w.add_token_types(types)
    w.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in t["model"]["merges"]])
    w.add_add_bos_token(False)


def add_keys(w, c):
    w.add_context_length(c["max_position_embeddings"])
    w.add_embedding_length(c["hidden_size"])
    w.add_block_count(c["num_hidden_layers"])
    w.add_feed_forward_length(c.get("intermediate_size", c["moe_intermediate_size"]))
    w.add_head_count(c["num_attention_heads"])
    w.add_head_count_kv(c["num_key_value_heads"])
    w.add_key_length(c["head_dim"])
    w.add_value_length(c["head_dim"])
    w.add_rope_freq_base(c["rope_theta"])
    w.add_layer_norm_rms_eps(c["rms_norm_eps"])
    w.add_expert_count(c["num_experts"])
    w.add_expert_used_count(c["num_experts_per_tok"])
    w.add_expert_feed_forward_length(c["moe_intermediate_size"])
    w.add_vocab_size(c["vocab_size"])
    eos = c.get("eos_token_id")
    if eos is not None:
        w.add_eos_token_id(eos[0] if isinstance(eos, list) else eos)


def add_matrix(w, name, words):
    """bf16 as bytes: GGUF's shape then counts bytes in the last dimension."""
    w.add_tensor(name, np.ascontiguousarray(words).view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)


def add_layer(w, src, i, n_experts):
    a, b = f"model.layers.{i}.", f"blk.{i}."
    for theirs, ours in (("attn_norm", "input_layernorm"), ("attn_q_norm", "self_attn.q_norm"), ("attn_k_norm", "self_attn.k_norm"),
                         ("ffn_norm", "post_attention_layernorm"), ("ffn_gate_inp", "mlp.gate")):
        w.add_tensor(f"{b}{theirs}.weight", src.f32(f"{a}{ours}.weight"))
    for theirs, ours in (("attn_q", "q_proj"), ("attn_k", "k_proj"), ("attn_v", "v_proj"), ("attn_output", "o_proj")):
        add_matrix(w, f"{b}{theirs}.weight", src.raw(f"{a}self_attn.{ours}.weight"))
    for part in ("gate", "up", "down"):
        add_matrix(w, f"{b}ffn_{part}_exps.weight",
                   np.stack([src.raw(f"{a}mlp.experts.{e}.{part}_proj.weight") for e in range(n_experts)]))


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    directory = pathlib.Path(sys.argv[1])
    c = json.loads((directory / "config.json").read_text())
    src = Weights(directory / "model.safetensors")
    w = gguf.GGUFWriter(sys.argv[2], "qwen3moe")
    add_keys(w, c)
    add_tokens(w, directory, c["vocab_size"])
    add_matrix(w, "token_embd.weight", src.raw("model.embed_tokens.weight"))
    w.add_tensor("output_norm.weight", src.f32("model.norm.weight"))
    if not c.get("tie_word_embeddings"):
        add_matrix(w, "output.weight", src.raw("lm_head.weight"))
    for i in range(c["num_hidden_layers"]):
        add_layer(w, src, i, c["num_experts"])
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file(progress=False)
    w.close()


if __name__ == "__main__":
    main()
