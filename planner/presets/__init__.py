"""Models that need no network, no weights and no other library.

Each preset is a compact plain-PyTorch module with the parameter count and the ops of
the model that it is named after, built on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from passes.walk import named_modules
from planner.presets.bert import BERT_SIZES, Bert
from planner.presets.deepseek import DEEPSEEK_SIZES, DeepSeek
from planner.presets.gpt import GPT, GPT_SIZES
from planner.presets.llama import LLAMA_SIZES, Llama
from planner.presets.t5 import T5, T5_SIZES
from planner.presets.unet import UNET_SIZES, UNet
from planner.presets.vision import RESNET_SIZES, VIT_SIZES, ResNet, ViT

Mode = Literal["train", "infer"]


@dataclass(frozen=True, slots=True)
class Shape:
    """What fixes the inputs of a preset."""

    size: int  # tokens, or pixels a side
    dtype: torch.dtype
    train: bool


@dataclass(frozen=True, slots=True)
class Preset:
    """``make(size)`` builds the module, ``inputs(shape)`` one sample's arguments.

    ``size`` is the sequence length (``unit == "tokens"``) or the side of an image
    (``"pixels"``); ``default_size`` is the one the model was published with.
    """

    name: str
    description: str
    unit: Literal["tokens", "pixels"]
    default_size: int
    make: Callable[[int], nn.Module]
    inputs: Callable[[Shape], dict[str, Tensor]]

    def build(
        self, *, dtype: torch.dtype, size: int | None = None, mode: Mode = "train"
    ) -> tuple[nn.Module, dict[str, Tensor]]:
        """The module on the meta device and keyword arguments for one sample."""
        chosen = self.default_size if size is None else size
        train = mode == "train"
        with torch.device("meta"):
            model = self.make(chosen)
            kwargs = self.inputs(Shape(chosen, dtype, train))
        return _cast(model, dtype).train(train), kwargs


def _cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast, but leave in fp32 what the real model keeps there."""
    kept: dict[str, Tensor] = {}
    for path, module in named_modules(model):
        for key in getattr(module, "keep_fp32", ()):
            kept[f"{path}.{key}"] = getattr(module, key)
    model = model.to(dtype)
    for name, buffer in kept.items():
        path, _, key = name.rpartition(".")
        setattr(model.get_submodule(path), key, buffer)
    return model


def _ids(length: int) -> Tensor:
    return torch.zeros(1, length, dtype=torch.long)


def _text(shape: Shape) -> dict[str, Tensor]:
    inputs = {"input_ids": _ids(shape.size)}
    return {**inputs, "labels": _ids(shape.size)} if shape.train else inputs


def _encoder_decoder(shape: Shape) -> dict[str, Tensor]:
    """Targets are a quarter of the input (T5 was trained on 512 and 114 tokens)."""
    target = "labels" if shape.train else "decoder_input_ids"
    return {"input_ids": _ids(shape.size), target: _ids(max(1, shape.size // 4))}


def _image(shape: Shape) -> dict[str, Tensor]:
    inputs = {"pixels": torch.zeros(1, 3, shape.size, shape.size, dtype=shape.dtype)}
    labels = {"labels": torch.zeros(1, dtype=torch.long)}
    return {**inputs, **labels} if shape.train else inputs


def _latents(shape: Shape) -> dict[str, Tensor]:
    c, side = UNET_SIZES["unet-sd"], shape.size // 8
    latents = torch.zeros(1, c.latent, side, side, dtype=shape.dtype)
    inputs = {
        "latents": latents,
        "timestep": torch.zeros(1, dtype=torch.long),
        "context": torch.zeros(1, c.text_tokens, c.context, dtype=shape.dtype),
    }
    return {**inputs, "labels": torch.zeros_like(latents)} if shape.train else inputs


_TEXT = {
    "gpt2": "GPT-2, 124M",
    "gpt-22b": "Megatron GPT, 22B",
    "gpt3-175b": "GPT-3 as trained by Megatron, 175B",
    "gpt-530b": "Megatron GPT, 530B",
    "gpt-1t": "Megatron GPT, 1T",
    "llama3-8b": "Llama 3, 8B",
    "llama3-70b": "Llama 3, 70B",
    "llama3-405b": "Llama 3.1, 405B",
    "mixtral-8x7b": "Mixtral, 8 experts of which 2 run, 47B",
    "qwen3-30b-a3b": "Qwen3 MoE, 128 experts of which 8 run, 30B",
    "deepseek-v3": "DeepSeek-V3, 256 experts of which 8 run, 671B",
    "bert-large": "BERT-large with its masked-token head, 335M",
    "t5-11b": "T5, encoder and decoder, 11B",
}
_VISION = {
    "vit-l16": "Vision transformer L/16, 304M",
    "resnet50": "ResNet-50, 26M",
    "wide-resnet": "Alpa's largest wide ResNet, 13B",
    "wide-resnet-250m": "Alpa's wide ResNet, 250M",
    "wide-resnet-1b": "Alpa's wide ResNet, 1B",
    "wide-resnet-2b": "Alpa's wide ResNet, 2B",
    "wide-resnet-4b": "Alpa's wide ResNet, 4B",
    "wide-resnet-6.8b": "Alpa's wide ResNet, 6.8B",
    "wide-resnet-13b": "Alpa's wide ResNet, 13B",
    "unet-sd": "Stable Diffusion 1 UNet, 860M",
}


def _text_maker(name: str) -> tuple[int, Callable[[int], nn.Module]]:
    if name in GPT_SIZES:
        gpt = GPT_SIZES[name]
        return gpt.positions, lambda size: GPT(gpt, size)
    if name in LLAMA_SIZES:
        llama = LLAMA_SIZES[name]
        return llama.positions, lambda _: Llama(llama)
    if name in DEEPSEEK_SIZES:
        deepseek = DEEPSEEK_SIZES[name]
        return deepseek.positions, lambda _: DeepSeek(deepseek)
    if name in BERT_SIZES:
        bert = BERT_SIZES[name]
        return bert.positions, lambda size: Bert(bert, size)
    t5 = T5_SIZES[name]
    return t5.positions, lambda _: T5(t5)


def _vision_maker(name: str) -> tuple[int, Callable[[int], nn.Module]]:
    if name in VIT_SIZES:
        vit = VIT_SIZES[name]
        return 224, lambda size: ViT(vit, size)
    if name in UNET_SIZES:
        unet = UNET_SIZES[name]
        return 512, lambda _: UNet(unet)
    resnet = RESNET_SIZES[name]
    return 224, lambda _: ResNet(resnet)


def _presets() -> dict[str, Preset]:
    found: dict[str, Preset] = {}
    for name, text in _TEXT.items():
        size, make = _text_maker(name)
        inputs = _encoder_decoder if name in T5_SIZES else _text
        found[name] = Preset(name, text, "tokens", size, make, inputs)
    for name, text in _VISION.items():
        size, make = _vision_maker(name)
        inputs = _latents if name in UNET_SIZES else _image
        found[name] = Preset(name, text, "pixels", size, make, inputs)
    return found


PRESETS = _presets()
