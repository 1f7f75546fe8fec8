"""Every key of the schema with its type, default and meaning, and the nearest key to a misspelt one."""

import difflib
import inspect
import re
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, get_type_hints

from moe_framework.config.schema import Config

# Below this similarity (difflib's ratio) a suggestion is more often wrong than right.
_CUTOFF = 0.6

# Names that other frameworks give to the same thing, so that a habit leads to the right key.
_OTHER_NAMES = {
    "parallel.dp": "dp_size dp_degree data_parallel_size data_parallel_shard_degree",
    "parallel.ep": "ep_size ep_degree expert_parallel_size expert_model_parallel_size expert_parallel_degree",
    "parallel.tp": "tp_size tp_degree tensor_parallel_size tensor_model_parallel_size tensor_parallel_degree",
    "parallel.expert_tp": "expert_tensor_parallel_size etp",
    "model.num_layers": "n_layers n_layer num_hidden_layers depth",
    "model.hidden_size": "d_model n_embd hidden_dim dim",
    "model.intermediate_size": "ffn_hidden_size moe_intermediate_size moe_ffn_hidden_size ffn_dim d_ff",
    "model.num_heads": "n_heads n_head num_attention_heads",
    "model.num_kv_heads": "n_kv_heads num_key_value_heads num_query_groups",
    "model.num_experts": "n_experts num_local_experts n_routed_experts num_moe_experts",
    "model.top_k": "topk num_experts_per_tok num_selected_experts moe_router_topk moe_top_k",
    "model.vocab_size": "n_vocab padded_vocab_size",
    "model.max_positions": "max_position_embeddings max_sequence_length n_positions n_ctx",
    "model.rope_theta": "rotary_base rope_base",
    "model.norm_eps": "rms_norm_eps layernorm_epsilon layer_norm_eps",
    "model.tie_embeddings": "tie_word_embeddings weight_tying",
    "model.init_std": "initializer_range init_method_std",
    "moe.aux_loss": "moe_router_load_balancing_type load_balancing",
    "moe.aux_loss_coeff": "router_aux_loss_coef moe_aux_loss_coeff load_balance_coeff",
    "moe.z_loss_coeff": "router_z_loss_coef moe_z_loss_coeff",
    "experts.backend": "experts_implementation moe_grouped_gemm",
    "dispatcher.backend": "moe_token_dispatcher_type token_dispatcher",
    "precision.mode": "dtype mixed_precision torch_dtype bf16 fp16 fp8",
    "data.path": "data_path dataset dataset_path train_data fasta train_file",
    "data.seq_length": "seq_len sequence_length max_seq_length max_length block_size context_length",
    "optim.lr": "learning_rate peak_lr max_lr",
    "optim.min_lr": "min_learning_rate lr_min",
    "optim.warmup_steps": "lr_warmup_steps num_warmup_steps warmup warmup_iters lr_warmup_iters",
    "optim.schedule": "lr_scheduler lr_scheduler_type lr_decay_style scheduler decay_type",
    "optim.decay_steps": "lr_wsd_decay_iters num_decay_steps lr_decay_steps wsd_decay_steps",
    "optim.beta1": "adam_beta1",
    "optim.beta2": "adam_beta2",
    "optim.eps": "adam_eps adam_epsilon",
    "optim.weight_decay": "wd",
    "optim.clip_norm": "grad_clip clip_grad max_grad_norm max_norm gradient_clip_val",
    "train.max_steps": "steps num_steps total_steps train_iters num_train_steps",
    "train.global_batch_size": "batch_size train_batch_size gbs gradient_accumulation_steps",
    "train.micro_batch_size": "mbs local_batch_size per_device_train_batch_size",
    "train.seed": "random_seed",
    "train.activation_checkpointing": "gradient_checkpointing activation_checkpoint recompute_granularity",
    "train.compile": "torch_compile",
    "train.log_every": "logging_steps log_interval log_freq",
    "eval.every": "eval_steps eval_interval eval_every",
    "checkpoint.ckpt_dir": "checkpoint_dir save_dir save_folder",
    "checkpoint.every": "save_steps save_interval save_every",
    "checkpoint.keep": "save_total_limit keep_last max_to_keep",
    "checkpoint.resume": "resume_from resume_from_checkpoint load_checkpoint",
    "checkpoint.init_from": "pretrained_checkpoint",
    "run.dir": "output_dir",
    "run.name": "experiment_name exp_name job_name run_name",
}


@dataclass(frozen=True)
class Key:
    """One key that a user can set.

    Attributes:
        path: Dotted path, such as `optim.lr`.
        type: The annotation of its field.
        default: Its default value.
        meaning: Its line of the dataclass's docstring.
    """

    path: str
    type: Any
    default: Any
    meaning: str


@cache
def schema_sections() -> dict[str, type]:
    """Return the dataclass of every section by name, in the schema's order."""
    return {
        name: kind for name, kind in get_type_hints(Config).items() if isinstance(kind, type) and is_dataclass(kind)
    }


@cache
def schema_keys() -> dict[str, Key]:
    """Return every key by its dotted path, in the schema's order."""
    keys = _keys_of(Config, "")
    for name, kind in schema_sections().items():
        keys |= _keys_of(kind, f"{name}.")
    return keys


def _keys_of(cls: type, prefix: str) -> dict[str, Key]:
    hints, meanings, defaults = get_type_hints(cls), attribute_meanings(cls), cls()
    return {
        prefix + f.name: Key(prefix + f.name, hints[f.name], getattr(defaults, f.name), meanings.get(f.name, ""))
        for f in fields(cls)
        if not is_dataclass(hints[f.name])
    }


def attribute_meanings(cls: type) -> dict[str, str]:
    """Return the text of each entry in the `Attributes:` section of a class's docstring, joined to one line."""
    meanings: dict[str, str] = {}
    _, _, section = (inspect.getdoc(cls) or "").partition("Attributes:\n")
    name = ""
    for line in section.splitlines():
        entry = re.match(r"    (\w+): (.*)", line)
        if entry:
            name = entry[1]
            meanings[name] = entry[2].strip()
        elif line.startswith(" " * 8) and name:
            meanings[name] += " " + line.strip()
    return meanings


@cache
def names_elsewhere() -> dict[str, str]:
    """Return the key that each name of another framework stands for."""
    return {name: path for path, names in _OTHER_NAMES.items() for name in names.split()}


def nearest_key(unknown: str) -> str | None:
    """Return the known key that a misspelt or foreign one most likely means, or None.

    The last component decides, over the schema's names and other frameworks'; among equals, the section does.
    """
    section, _, name = unknown.rpartition(".")
    candidates = [(path.rpartition(".")[2], path) for path in schema_keys()] + list(names_elsewhere().items())
    if not section:
        candidates += [(known, known) for known in schema_sections()]
    scored = [
        (_similarity(name, known), _similarity(section, path.rpartition(".")[0]), path) for known, path in candidates
    ]
    close = [entry for entry in scored if entry[0] >= _CUTOFF]
    # A section that was typed right counts for the little that two similar names can differ by.
    if close:
        return max(close, key=lambda entry: entry[0] + 0.3 * entry[1])[2]
    return section if section in schema_keys() else None


def unknown_key(path: str, assignment: str) -> str:
    """Return the violation for an unknown key.

    Args:
        path: The dotted path that is no key.
        assignment: What the user wrote, such as `optim.learnign_rate=1`.
    """
    nearest = nearest_key(path)
    remedy = f"Did you mean {nearest}?" if nearest else "See --help for all keys."
    return f"{assignment}: unknown key. {remedy}"


def _similarity(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a.lower(), b.lower(), autojunk=False).ratio()
