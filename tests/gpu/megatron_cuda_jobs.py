"""What the GPU tests with Megatron-Core run, in a process of their own, since Megatron changes torch."""

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
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


def obstacle() -> str | None:
    """Why the tests cannot run here, or None."""
    try:
        import_module("transformer_engine.pytorch")
    except Exception as error:  # a binary extension may fail in any way
        return f"transformer_engine cannot be imported ({type(error).__name__}: {error})"
    return why_not_importable()


def load_ours(folder: str) -> dict[str, Any]:
    """Write a random model of ours, let Megatron load it strictly, and compare.

    Returns:
        `different`: names of the weights that Megatron has otherwise; and the errors of `_errors`.
    """
    model = _start(folder)
    from megatron.core import dist_checkpointing

    ours = _random_weights()
    _write(Path(folder), ours)
    wanted = dict(model.sharded_state_dict())
    state: Any = dist_checkpointing.load(wanted, folder, strict="raise_all")
    model.load_state_dict({name: state[name] for name in wanted}, strict=True)
    found = _as_ours(model)
    different = [name for name, tensor in ours.items() if not torch.equal(found[name], tensor)]
    return {"different": different, **_errors(model, ours)}


def read_theirs(folder: str) -> dict[str, Any]:
    """Let Megatron save a random model, read it, and compare; returns what `load_ours` does."""
    model = _start(folder)
    from megatron.core import dist_checkpointing

    with torch.no_grad():
        for number, (name, parameter) in enumerate(sorted(model.named_parameters())):
            generator = torch.Generator().manual_seed(number)
            noise = torch.randn(parameter.shape, generator=generator) * MODEL.init_std
            parameter.copy_(1 + noise if "norm" in name else noise)
    dist_checkpointing.save(dict(model.sharded_state_dict()), folder)
    source = MegatronSource(Path(folder), SIZES)
    view = OurView(source, megatron_keymap(source.config(), source.tensors()))
    read = {name: view.read(name) for name in view.tensors()}
    expected = _as_ours(model)
    different = [name for name, tensor in expected.items() if not torch.equal(read[name], tensor)]
    return {"different": different, **_errors(model, read)}


def _start(folder: str) -> Any:
    """Start Megatron on one GPU and build a GPTModel with Transformer Engine's layers and grouped GEMM."""
    reason = obstacle()
    assert reason is None, reason
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.cuda.set_device(0)
    torch.distributed.init_process_group(
        "nccl", init_method=f"file://{folder}.store", rank=0, world_size=1, device_id=torch.device("cuda", 0)
    )
    parallel_state.initialize_model_parallel()
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
    weights = {name: value.cpu() for name, value in model.state_dict().items() if "_extra_state" not in name}
    view = OurView(InMemory(weights), megatron_keymap(SIZES, weights))
    return {name: view.read(name) for name in view.tensors()}


@torch.no_grad()
def _errors(model: Any, weights: dict[str, Tensor]) -> dict[str, float]:
    """How far logits in bf16 are from ours in fp32, relative, at the median token and at the ninth decile.

    Returns:
        `theirs` and `ours` for the median, `theirs_high` and `ours_high` for the ninth decile, and `swapped`: the
        median for ours in fp32 with two experts of the first layer exchanged.
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
        "theirs": theirs.median().item(),
        "ours": ours.median().item(),
        "theirs_high": theirs.quantile(0.9).item(),
        "ours_high": ours.quantile(0.9).item(),
        "swapped": wrong.median().item(),
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
