"""The networks of the GPU run, random weights and data from one seed, in the sizes of a GPU or as toys for a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.networks import SEED, Block, Problem, cnn, linear_layers, mlp, resnet


class Logits(nn.Module):
    """A model of transformers that returns its logits alone."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__()
        self.model, self.options = model, options

    def forward(self, x: Tensor) -> Tensor:
        """(N, ...) to (N, C), or (N, T, C)."""
        return self.model(x, **self.options).logits  # type: ignore[no-any-return]


def vit(outputs: int, toy: bool) -> nn.Module:
    """ViT-small (22 million weights) on 224 × 224 images in patches of 16."""
    from transformers import ViTConfig, ViTForImageClassification

    width, depth, heads, size, patch = (16, 1, 2, 16, 8) if toy else (384, 12, 6, 224, 16)
    config = ViTConfig(
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        image_size=size,
        patch_size=patch,
        num_labels=outputs,
    )
    return Logits(ViTForImageClassification(config))


def language(outputs: int, toy: bool) -> nn.Module:
    """GPT-2 small with LoRA of rank 8 in its attention, 0.3 million trained weights; C is its vocabulary."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    width, depth, heads = (16, 1, 2) if toy else (768, 12, 12)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=outputs, n_embd=width, n_layer=depth, n_head=heads, **ends))
    lora = LoraConfig(r=2 if toy else 8, target_modules=["c_attn"], fan_in_fan_out=True)
    return Logits(get_peft_model(model, lora), use_cache=False)


def small_cnn(outputs: int) -> nn.Module:
    """A convolution with pooling, then two linear layers; 500 weights."""
    layers = nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 6), nn.ReLU()
    return nn.Sequential(*layers, nn.Linear(6, outputs))


def small_resnet(outputs: int) -> nn.Module:
    """Two residual blocks of the ResNet-18, with 8 and 16 channels; 8,000 weights."""
    first = nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.GroupNorm(8, 8), nn.ReLU()
    blocks = Block(8, 8, 1), Block(8, 16, 2)
    return nn.Sequential(*first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, outputs))


# name -> (network, shape of its data, and that of the toy)
NETWORKS: dict[str, tuple[Callable[[int, bool], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "mlp": (lambda C, toy: linear_layers(10, 12, 12, C, activation=nn.ReLU) if toy else mlp(C), (8192, 784), (16, 10)),
    "cnn": (lambda C, toy: small_cnn(C) if toy else cnn(C), (2048, 1, 28, 28), (8, 1, 8, 8)),
    "resnet": (lambda C, toy: small_resnet(C) if toy else resnet(C), (256, 3, 32, 32), (6, 3, 8, 8)),
    "vit": (vit, (32, 3, 224, 224), (4, 3, 16, 16)),
    "gpt2-lora": (language, (8, 128), (2, 8)),
}


def build(name: str, outputs: int, toy: bool, device: torch.device, points: int | None = None) -> Problem:
    """Return a network with C outputs and its data on a device; toys have at most 50 outputs."""
    make, shape, small = NETWORKS[name]
    outputs, shape = (min(outputs, 50), small) if toy else (outputs, shape)
    shape = (points or shape[0], *shape[1:])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = make(outputs, toy).eval()
    generator = torch.Generator().manual_seed(SEED + 1)
    tokens = name == "gpt2-lora"
    if tokens:
        inputs = torch.randint(outputs, shape, generator=generator)
    else:
        inputs = torch.randn(shape, generator=generator)
    targets = torch.randint(outputs, shape if tokens else shape[:1], generator=generator)
    return Problem(name, outputs, model.to(device), inputs.to(device), targets.to(device))
