"""What a run's state is made of: named tensors of model and optimizer, and random number generators as JSON."""

import base64
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moe_framework.errors import CheckpointError

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by the names of the unwrapped model.

    Args:
        model: The model; FSDP modules are resharded first.

    Returns:
        `model.NAME` → tensor that shares the model's memory, detached. A tied parameter appears once, under its
        first name. `_extra_state` is left out: it is not a tensor of the model.
    """
    return {f"model.{name}": tensor.detach() for name, tensor in _named_tensors(model)}


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The moments of an AdamW-like optimizer by its parameters' names; zero ones are made where there are none yet.

    Args:
        model: The model.
        optimizer: Its optimizer, whose state holds tensors in the parameter's shape, and `step`.

    Returns:
        `optimizer.KEY.NAME` → tensor that shares the optimizer's memory, such as `optimizer.exp_avg.head.weight`.
    """
    allocate_optimizer_state(optimizer)
    tensors: dict[str, Tensor] = {}
    for name, parameter in _named_tensors(model):
        for key, value in optimizer.state.get(parameter, {}).items():
            if key != "step" and isinstance(value, Tensor):
                tensors[f"optimizer.{key}.{name}"] = value.detach()
    return tensors


def allocate_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the zero moments that an AdamW's first step would make, without stepping.

    Args:
        optimizer: Of parameters on no meta device; those that have state keep it.
    """
    for group in optimizer.param_groups:
        on_device = group.get("capturable", False) or group.get("fused", False)
        keys = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group.get("amsgrad", False) else ("exp_avg", "exp_avg_sq")
        for parameter in group["params"]:
            if not parameter.requires_grad or optimizer.state.get(parameter):
                continue
            assert not parameter.is_meta, "materialise the model before its optimizer state"
            state = optimizer.state[parameter]
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu")
            for key in keys:
                state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)


def optimizer_step(optimizer: torch.optim.Optimizer) -> int:
    """Number of steps that every parameter has taken; 0 before the first.

    Args:
        optimizer: An AdamW-like optimizer.

    Raises:
        CheckpointError: Parameters differ, so one number cannot restore them.
    """
    steps = {int(state["step"]) for state in optimizer.state.values() if "step" in state}
    if len(steps) > 1:
        raise CheckpointError(
            f"optimizer steps {sorted(steps)} differ between parameters: some got no gradient in some steps. "
            "Freeze them (requires_grad=False) or let each take part in every step."
        )
    return steps.pop() if steps else 0


def set_optimizer_step(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Set the step count of every parameter that has state.

    Args:
        optimizer: An AdamW-like optimizer, with state.
        step: Steps taken.
    """
    for state in optimizer.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"].fill_(step)
        elif "step" in state:
            state["step"] = step


def rng_state() -> dict[str, Any]:
    """State of this rank's random number generators: Python's, numpy's, torch's on the CPU and on its GPU if in use.

    Returns:
        JSON-able; bytes are base64.
    """
    version, internal, gauss = random.getstate()
    algorithm, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": {"version": version, "state": _encode(np.array(internal, dtype="<u8").tobytes()), "gauss": gauss},
        "numpy": {
            "algorithm": algorithm,
            "keys": _encode(np.asarray(keys, dtype="<u4").tobytes()),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached_gaussian": float(cached),
        },
        "torch_cpu": _encode_tensor(torch.get_rng_state()),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["torch_cuda"] = _encode_tensor(torch.cuda.get_rng_state())
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore what `rng_state` returned; a GPU's state is restored where there is a GPU.

    Args:
        state: As `rng_state` returned it, also after JSON.

    Raises:
        CheckpointError: The state is malformed.
    """
    try:
        python, numpy = state["python"], state["numpy"]
        internal = tuple(int(word) for word in np.frombuffer(_decode(python["state"]), dtype="<u8"))
        random.setstate((python["version"], internal, python["gauss"]))
        keys = np.frombuffer(_decode(numpy["keys"]), dtype="<u4")
        rest = (numpy["position"], numpy["has_gauss"], numpy["cached_gaussian"])
        np.random.set_state((numpy["algorithm"], keys, *rest))
        torch.set_rng_state(_decode_tensor(state["torch_cpu"]))
        if "torch_cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(_decode_tensor(state["torch_cuda"]))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"rank_states: not a state of random number generators ({type(error).__name__}: {error}). "
            "Resume from another step."
        ) from error


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    seen: set[int] = set()
    # Not named_parameters: only state_dict makes FSDP put its sharded parameters back after an evaluation.
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name.endswith("_extra_state") or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        yield name, tensor


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _decode(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _encode_tensor(state: Tensor) -> str:
    return _encode(state.cpu().numpy().tobytes())


def _decode_tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(_decode(text)), dtype=torch.uint8)
