"""A Mixtral folder of any size made of random bytes, and a look at the memory of a running process."""

import json
import os
import struct
import subprocess
import time
from pathlib import Path

SHARD_BYTES = 2 * 10**9


def write_random_mixtral(
    folder: Path,
    *,
    num_layers: int,
    hidden_size: int,
    intermediate_size: int,
    num_experts: int = 8,
    vocab_size: int = 32000,
) -> int:
    """Write config.json and bf16 safetensors with an index; only one block of random bytes is ever in memory.

    Returns:
        Bytes of all tensors.
    """
    shapes = _shapes(num_layers, hidden_size, intermediate_size, num_experts, vocab_size)
    folder.mkdir(parents=True)
    config = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": hidden_size // 128 or 1,
        "num_key_value_heads": hidden_size // 512 or 1,
        "num_local_experts": num_experts,
        "num_experts_per_tok": 2,
        "vocab_size": vocab_size,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    filled = 0
    for name, shape in shapes.items():
        if filled > SHARD_BYTES:
            shards.append({})
            filled = 0
        shards[-1][name] = shape
        filled += _num_bytes(shape)
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_shard(folder / file, shard)
        weight_map |= dict.fromkeys(shard, file)
    total = sum(map(_num_bytes, shapes.values()))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def peak_anonymous_bytes(process: subprocess.Popen, *, every_s: float = 0.02) -> int:
    """Wait for a process, and return the largest RssAnon seen."""
    peak = 0
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except OSError:
            break
        found = [line for line in status.splitlines() if line.startswith("RssAnon")]
        peak = max(peak, int(found[0].split()[1]) * 1024 if found else 0)
        time.sleep(every_s)
    process.wait()
    return peak


def _shapes(layers: int, hidden: int, inter: int, experts: int, vocab: int) -> dict[str, tuple[int, ...]]:
    heads, kv = hidden, (hidden // 512 or 1) * (128 if hidden >= 128 else hidden)
    shapes: dict[str, tuple[int, ...]] = {
        "lm_head.weight": (vocab, hidden),
        "model.embed_tokens.weight": (vocab, hidden),
    }
    for layer in range(layers):
        at = f"model.layers.{layer}"
        for expert in range(experts):
            moe = f"{at}.block_sparse_moe.experts.{expert}"
            shapes |= {f"{moe}.w1.weight": (inter, hidden), f"{moe}.w2.weight": (hidden, inter)}
            shapes[f"{moe}.w3.weight"] = (inter, hidden)
        shapes[f"{at}.block_sparse_moe.gate.weight"] = (experts, hidden)
        shapes |= {f"{at}.input_layernorm.weight": (hidden,), f"{at}.post_attention_layernorm.weight": (hidden,)}
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (kv, hidden) for name in ("k", "v")}
        shapes |= {f"{at}.self_attn.q_proj.weight": (heads, hidden), f"{at}.self_attn.o_proj.weight": (hidden, heads)}
    return shapes | {"model.norm.weight": (hidden,)}


def _num_bytes(shape: tuple[int, ...]) -> int:
    count = 2
    for size in shape:
        count *= size
    return count


def _write_shard(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in sorted(shapes.items()):
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + _num_bytes(shape)]}  # pyright: ignore
        end += _num_bytes(shape)
    text = json.dumps(header, separators=(",", ":")).encode()  # as safetensors writes it
    text += b" " * (-len(text) % 8)
    block = os.urandom(16 * 2**20 - 6)  # no multiple of a row, so that rows differ
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        while end:
            stream.write(block[:end])
            end -= min(end, len(block))
