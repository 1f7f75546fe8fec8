"""What the ranks of the GPU tests with Megatron-Core run. Imported by a pool's processes."""

import multiprocessing
import re
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from moe_framework.checkpoint.convert.base import TensorInfo
from moe_framework.checkpoint.convert.boxes import parts
from moe_framework.checkpoint.convert.keymap_megatron import megatron_keymap
from moe_framework.checkpoint.convert.megatron_sink import MegatronSink
from moe_framework.checkpoint.convert.megatron_source import MegatronSource
from moe_framework.checkpoint.convert.views import OurView, TheirView
from moe_framework.config.schema import ModelConfig
from tests.distributed.megatron_jobs import why_not_importable
from tests.unit.checkpoint.convert.megatron_checkpoints import InMemory
from tests.unit.model.builders import plain_decoder

MODEL = ModelConfig(
    num_layers=4,
    hidden_size=256,
    intermediate_size=384,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    num_experts=4,
    top_k=2,
    vocab_size=320,
    max_positions=128,
    # Larger than in training, so that every part of the model moves the logits.
    init_std=0.08,
)
SIZES: dict[str, Any] = {
    **{key: getattr(MODEL, key) for key in MODEL.__dataclass_fields__ if key != "init_std"},
    "family": "mixtral",
    "padded_vocab_size": MODEL.vocab_size,
}
# A rank names its own experts from 0 on.
_EXPERT = re.compile(r"(?P<weight>.*\.experts\.linear_fc[12]\.weight)(?P<local>\d+)")


def obstacle() -> str | None:
    """Why the tests cannot run here, or None."""
    try:
        import_module("transformer_engine.pytorch")
    except Exception as error:  # a binary extension may fail in any way
        return f"transformer_engine cannot be imported ({type(error).__name__}: {error})"
    return why_not_importable()


def both_ways(folder: str) -> dict[str, dict[str, Any]]:
    """Exchange checkpoints with Megatron in both directions, rank r on GPU r, the experts spread over all ranks.

    Args:
        folder: An empty folder for the checkpoints.

    Returns:
        What `load_ours` and `read_theirs` return, by their names; the same on every rank, up to rounding.

    Collective: the world; every rank must call. It ends with another process group, on NCCL.
    """
    model = _start(f"{folder}.store")
    results = {}
    try:
        for way in (load_ours, read_theirs):
            path = Path(folder) / way.__name__
            path.mkdir(exist_ok=True)
            dist.barrier()
            results[way.__name__] = way(model, path)
    finally:
        # Megatron's saving leaves a process, which would outlive the pool and keep its output open.
        for child in multiprocessing.active_children():
            child.terminate()
            child.join()
    return results


def load_ours(model: Any, folder: Path) -> dict[str, Any]:
    """Write a random model of ours, let Megatron load it strictly, and compare.

    Args:
        model: Megatron's; its weights are replaced.
        folder: An empty folder.

    Returns:
        `different`: names of the weights that Megatron has otherwise; and the errors of `_errors`.

    Collective: the world; every rank must call.
    """
    from megatron.core import dist_checkpointing

    ours = _random_weights()
    if dist.get_rank() == 0:
        _write(folder, ours)
    dist.barrier()
    wanted = dict(model.sharded_state_dict())
    state: Any = dist_checkpointing.load(wanted, str(folder), strict="raise_all")
    model.load_state_dict({name: state[name] for name in wanted}, strict=True)
    return {"different": _different(_as_ours(model), ours), **_errors(model, ours)}


def read_theirs(model: Any, folder: Path) -> dict[str, Any]:
    """Let Megatron save a random model, read it, and compare; takes and returns what `load_ours` does."""
    from megatron.core import dist_checkpointing

    _fill(model)
    dist_checkpointing.save(dict(model.sharded_state_dict()), str(folder))
    source = MegatronSource(folder, SIZES)
    view = OurView(source, megatron_keymap(source.config(), source.tensors()))
    read = {name: view.read(name) for name in view.tensors()}
    return {"different": _different(read, _as_ours(model)), **_errors(model, read)}


def _start(store: str) -> Any:
    """Build a GPTModel with Transformer Engine's layers and grouped GEMM, in a process group of its own on NCCL."""
    reason = obstacle()
    assert reason is None, reason
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{store}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(minutes=3),
        device_id=torch.device("cuda", rank),
    )
    parallel_state.initialize_model_parallel(expert_model_parallel_size=num_ranks)
    model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(
        num_layers=MODEL.num_layers,
        hidden_size=MODEL.hidden_size,
        ffn_hidden_size=MODEL.intermediate_size,
        moe_ffn_hidden_size=MODEL.intermediate_size,
        num_attention_heads=MODEL.num_heads,
        num_query_groups=MODEL.num_kv_heads,
        kv_channels=MODEL.resolved_head_dim,
        num_moe_experts=MODEL.num_experts,
        moe_router_topk=MODEL.top_k,
        moe_router_dtype="fp32",
        moe_grouped_gemm=True,
        expert_model_parallel_size=num_ranks,
        moe_token_dispatcher_type="alltoall",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        layernorm_epsilon=MODEL.norm_eps,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
    )
    model = GPTModel(
        config,
        get_gpt_layer_with_transformer_engine_spec(num_experts=MODEL.num_experts, moe_grouped_gemm=True),
        vocab_size=MODEL.vocab_size,
        max_sequence_length=MODEL.max_positions,
        position_embedding_type="rope",
        rotary_base=int(MODEL.rope_theta),
        share_embeddings_and_output_weights=False,
    )
    return model.cuda().bfloat16().eval()


@torch.no_grad()
def _fill(model: Any) -> None:
    for number, (name, parameter) in enumerate(sorted(model.named_parameters())):
        # What is not an expert's is the same on all ranks.
        seed = number + (1000 * dist.get_rank() if _EXPERT.fullmatch(name) else 0)
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) * MODEL.init_std
        parameter.copy_(1 + noise if "norm" in name else noise)


def _random_weights() -> dict[str, Tensor]:
    decoder = plain_decoder(MODEL, seed=3)
    generator = torch.Generator().manual_seed(4)
    return {
        # Norms begin as ones, which would hide that two of them are exchanged.
        name: (tensor + 0.1 * torch.randn(tensor.shape, generator=generator) if "norm" in name else tensor)
        .detach()
        .bfloat16()
        for name, tensor in decoder.state_dict().items()
    }


def _write(folder: Path, ours: dict[str, Tensor]) -> None:
    view = TheirView(InMemory(ours), megatron_keymap(SIZES))
    sink = MegatronSink(folder)
    infos: dict[str, TensorInfo] = view.tensors()
    sink.begin(infos, SIZES)
    for name, info in infos.items():
        for region in parts(info):
            sink.write(name, tuple(part.start for part in region), view.read(name, region))
    sink.finish()


def _as_ours(model: Any) -> dict[str, Tensor]:
    weights = _of_all_ranks(model)
    view = OurView(InMemory(weights), megatron_keymap(SIZES, weights))
    return {name: view.read(name) for name in view.tensors()}


def _of_all_ranks(model: Any) -> dict[str, Tensor]:
    """Weights under the names of one module that has all experts; those of the others must be equal on all ranks."""
    num_ranks = dist.get_world_size()
    num_local = MODEL.num_experts // num_ranks
    weights: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if "_extra_state" in name:
            continue
        by_rank = [torch.empty_like(value) for _ in range(num_ranks)]
        dist.all_gather(by_rank, value.contiguous())
        expert = _EXPERT.fullmatch(name)
        if expert is None:
            assert all(torch.equal(other, value) for other in by_rank), f"{name} differs between ranks"
            weights[name] = value.cpu()
        else:
            local = int(expert["local"])
            assert local < num_local, f"{name}: more than {num_local} experts on a rank"
            for rank, tensor in enumerate(by_rank):
                weights[f"{expert['weight']}{rank * num_local + local}"] = tensor.cpu()
    return weights


def _different(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Names of the weights that are not equal, and of those that are missing on one side."""
    equal = {name for name in found.keys() & expected.keys() if torch.equal(found[name], expected[name])}
    return sorted((found.keys() | expected.keys()) - equal)


@torch.no_grad()
def _errors(model: Any, weights: dict[str, Tensor]) -> dict[str, float]:
    """How far logits in bf16 are from ours in fp32, relative, at the first decile and at the first quartile of tokens.

    The other tokens say little: rounding sends some to another expert, and with them changes all that attend to them.
    On a CPU, for six models drawn like these, that begins above the fourth decile.

    Returns:
        `theirs` and `ours` for the decile, `theirs_quartile` and `ours_quartile`, and `swapped`: the decile for ours in
        fp32 with two experts of the first layer exchanged.
    """
    tokens = torch.randint(
        MODEL.vocab_size, (2, MODEL.max_positions), generator=torch.Generator().manual_seed(5)
    ).cuda()
    positions = torch.arange(MODEL.max_positions, device="cuda").expand_as(tokens)
    exact = _our_logits(weights, torch.float32, tokens, positions)
    theirs = _distances(model(tokens, positions, None), exact)
    ours = _distances(_our_logits(weights, torch.bfloat16, tokens, positions), exact)
    name = "layers.0.moe.experts.down"
    swapped = weights | {name: weights[name][[1, 0, 2, 3]]}
    wrong = _distances(_our_logits(swapped, torch.float32, tokens, positions), exact)
    return {
        "theirs": theirs.quantile(0.1).item(),
        "ours": ours.quantile(0.1).item(),
        "theirs_quartile": theirs.quantile(0.25).item(),
        "ours_quartile": ours.quantile(0.25).item(),
        "swapped": wrong.quantile(0.1).item(),
    }


def _our_logits(weights: dict[str, Tensor], dtype: torch.dtype, tokens: Tensor, positions: Tensor) -> Tensor:
    decoder = plain_decoder(MODEL)
    decoder.load_state_dict(weights)
    logits = decoder.to("cuda", dtype).eval()(tokens, positions).logits_BSV
    assert logits is not None
    return logits


def _distances(logits_BSV: Tensor, exact_BSV: Tensor) -> Tensor:
    difference = (logits_BSV.double() - exact_BSV.double()).norm(dim=-1)
    return (difference / exact_BSV.double().norm(dim=-1)).flatten()
