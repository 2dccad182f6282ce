"""Building a tiny random model of a causal-LM architecture of transformers."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from zoo_models.sizes import SIZES, overrides


def architectures() -> list[str]:
    """Every model type that transformers registers for causal language modelling."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def class_name(name: str) -> str:
    """The model class of an architecture."""
    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name])


def configuration(name: str) -> PretrainedConfig:
    """The tiny configuration of the architecture ``name``."""
    return _configure(CONFIG_MAPPING[name], name)


def _configure(kind: type[PretrainedConfig], name: str) -> PretrainedConfig:
    defaults = _defaults(kind)
    subs: dict[str, Any] = dict(getattr(kind, "sub_configs", None) or {})
    arguments = overrides(name, defaults, subs=tuple(subs))
    for part, found in subs.items():
        if part in arguments or not isinstance(defaults.get(part), dict):
            continue
        inner = found
        if not hasattr(inner, "model_type") or inner.__name__ == "AutoConfig":
            inner = CONFIG_MAPPING[defaults[part]["model_type"]]
        arguments[part] = _configure(inner, inner.model_type or f"{name}.{part}").to_dict()
    return kind(**arguments)


@functools.lru_cache
def _defaults(kind: type[PretrainedConfig]) -> dict[str, Any]:
    """The attributes of a default configuration; of its signature where defaults alone are not accepted."""
    try:
        default = kind()
    except Exception:
        parameters = inspect.signature(kind).parameters.values()
        return {p.name: p.default for p in parameters if p.default is not p.empty}
    # An attribute map gives some attributes a second name, which is the one that ``to_dict`` lacks.
    mapped = {key: getattr(default, key, None) for key in getattr(kind, "attribute_map", {}) if key in SIZES}
    return {**mapped, **default.to_dict()}


def build(name: str, dtype: torch.dtype = torch.float32, attention: str = "sdpa", seed: int = 0) -> PreTrainedModel:
    """A random model in train mode; ``attention`` falls back to "eager" where the model has no other.

    ``model.config._attn_implementation`` tells which attention it got.
    """
    config = configuration(name)
    make = AutoModelForCausalLM.from_config
    if "decoder" in config.sub_configs:  # the decoder alone is the language model
        config, make = config.decoder, getattr(transformers, class_name(name))._from_config
    torch.manual_seed(seed)
    try:
        model = make(config, attn_implementation=attention)
    except (ValueError, ImportError, NotImplementedError):
        if attention == "eager":
            raise
        torch.manual_seed(seed)
        model = make(config, attn_implementation="eager")
    model = model.to(dtype)
    _shake(model)
    model.train()
    return model


def _shake(model: PreTrainedModel) -> None:
    """Move constant parameters (norm weights of one, biases and gates of zero) so that every one of them matters."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if (
                parameter.numel()
                and parameter.is_floating_point()
                and bool((parameter == parameter.flatten()[0]).all())
            ):
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(0.1 * noise.to(parameter.dtype))


def routes(config: PretrainedConfig) -> bool:
    """Whether the model chooses experts or keys: a discontinuous function, in which rounding may flip a choice."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "index_topk")
    counts = [getattr(part, name, None) for part in (config, config.get_text_config(decoder=True)) for name in names]
    return any(isinstance(count, int) and count > 1 for count in counts)
