"""Models of transformers, with and without adapters of peft, against Jacobians by one backward pass a row."""

import functools
import operator
import os
import warnings
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TRANSFORMERS_VERBOSITY": "error"}

import pytest
import torch
import transformers  # which imports a model where it is named: in one of the test processes
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import curvops as co
from curvops.errors import NoFactorsWarning
from curvops.linalg import Kronecker
from curvops.operators import DiagonalGGN, EmpiricalFisher
from tests.network.products import agree, columns, require_curvature, softmax_hessian
from tests.zoo import dense_jacobian

# peft asks transformers for a property under its old name
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

N, LENGTH, C, TOKENS, PAD = 5, 6, 3, 32, 0
ENGINES = ["auto", "autodiff", "layerwise"]
NETWORKS = [(name, attention) for name in ("gpt2", "bert") for attention in ("sdpa", "eager")]
ADAPTED = {"gpt2": ["c_attn"], "bert": ["query", "value"]}
LAYERS = {"gpt2": 2, "bert": 1}
CASES = [("gpt2", "autodiff"), ("gpt2", "layerwise"), ("bert", "layerwise")]
"""Networks with engines: only the layerwise one, which "auto" chooses, looks at the layers, which differ."""
HALF = torch.finfo(torch.bfloat16).eps


class Logits(nn.Module):
    """The logits alone of a model that returns them among other things."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Tensor:
        return self.model(**batch).logits


def bare(name: str, attention: str) -> nn.Module:
    """Two layers of width 16, one in BERT, with weights large enough that attention is far from uniform."""
    torch.manual_seed(1)
    sizes = {"vocab_size": TOKENS, "num_labels": C, "pad_token_id": PAD, "attn_implementation": attention}
    if name == "gpt2":
        heads = {
            "n_positions": 8,
            "n_embd": 16,
            "n_layer": LAYERS[name],
            "n_head": 2,
            "bos_token_id": 1,
            "eos_token_id": 1,
        }
        model: nn.Module = transformers.GPT2ForSequenceClassification(transformers.GPT2Config(**sizes, **heads))
    else:
        heads = {
            "hidden_size": 16,
            "num_hidden_layers": LAYERS[name],
            "num_attention_heads": 2,
            "intermediate_size": 32,
        }
        config = transformers.BertConfig(**sizes, **heads, max_position_embeddings=8)
        model = transformers.BertForSequenceClassification(config)
    return strong(model)


def strong(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.3)
    return model


@functools.cache
def adapted(name: str, attention: str, **options: Any) -> nn.Module:
    """A bfloat16 base under a float32 adapter of rank 2. Do not write into it."""
    from peft import LoraConfig, get_peft_model  # here, for the same reason

    config = LoraConfig(r=2, target_modules=ADAPTED[name], fan_in_fan_out=name == "gpt2", **options)
    return Logits(strong(get_peft_model(bare(name, attention).bfloat16(), config))).eval()


def sentences(length: int = LENGTH) -> dict[str, Tensor]:
    """Of several lengths, padded at the end."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, TOKENS, (N, LENGTH), generator=generator)
    mask = torch.arange(length) < torch.tensor([6, 4, 3, 5, 3]).unsqueeze(1)
    tokens = nn.functional.pad(tokens, (0, length - LENGTH), value=PAD)
    return {"input_ids": tokens.where(mask, PAD), "attention_mask": mask.long()}


LABELS = torch.tensor([0, 2, 1, 1, 0])


def linearized(model: Any, **options: Any) -> co.operators.Linearization:
    return co.linearize(model, (sentences(), LABELS), "classification", **options)


@functools.cache
def whole(name: str, attention: str) -> tuple[nn.Module, Tensor]:
    """A float64 network, and its Jacobian at the sentences. Do not write into it."""
    model = Logits(bare(name, attention)).double().eval()
    return model, dense_jacobian(model, sentences())


@functools.cache
def doubled(name: str) -> tuple[nn.Module, Tensor]:
    """An adapted network in float64, and its Jacobian at the sentences. Do not write into it."""
    model = adapted.__wrapped__(name, "sdpa").double()
    return model, dense_jacobian(model, sentences())


def moments(model: nn.Module, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """diag(p) − ppᵀ of all points as one matrix (N·C, N·C), and r = p − y as the columns of (N·C, N)."""
    f = model(**sentences()).detach().to(dtype)
    r = f.softmax(-1) - nn.functional.one_hot(LABELS, C)
    return softmax_hessian(f), torch.block_diag(*r.unsqueeze(2))


@pytest.mark.parametrize(("name", "engine"), CASES)
def test_products_of_a_whole_network(name: str, engine: str) -> None:
    model, J = whole(name, "sdpa")
    require_curvature(linearized(model, engine=engine), J, moments(model, J.dtype)[0])


def test_every_layer_of_gpt2_has_a_rule() -> None:
    """Its attention and MLP layers are `Conv1D`; positions are looked up once for all points."""
    lin = linearized(whole("gpt2", "sdpa")[0])
    assert not lin.plan.others
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoFactorsWarning)
        kfac = co.KFAC(lin)
    blocks = {names: type(block) for names, block in zip(kfac.names, kfac.blocks)}
    layers = {
        names: kind for names, kind in blocks.items() if any("c_attn" in name or "c_fc" in name for name in names)
    }
    assert len(layers) == 4
    assert set(layers.values()) == {Kronecker}


def test_what_is_written_into_a_transposed_linear_layer_s_output() -> None:
    """The output is a view, whose place in the graph an in-place operation changes: the engine's check sees it."""
    model = nn.Sequential(Conv1D(5, 4), nn.ReLU(inplace=True), Conv1D(3, 5)).double()
    x, y = torch.randn(6, 4, generator=torch.Generator().manual_seed(3)).double(), torch.arange(6) % 3
    found = [co.GGN(co.linearize(model, (x, y), "classification", engine=engine)).to_dense() for engine in ENGINES]
    assert all(agree(dense, found[1]) for dense in found)


@pytest.mark.parametrize(("name", "attention"), NETWORKS)
def test_attention_masks_reach_the_network(name: str, attention: str) -> None:
    """More padding changes nothing; neither does what a hidden token says, until the mask shows it."""
    model, J = whole(name, attention)
    lin, U = linearized(model), columns(len(J), 1)

    def with_second(token: int, shown: int) -> Tensor:
        batch = sentences()
        batch["input_ids"][:, 1], batch["attention_mask"][:, 1] = token, shown
        return lin.jacobian(batch).mT @ U

    assert agree(lin.jacobian(sentences(8)).mT @ U, J.mT @ U)
    assert agree(with_second(2, 0), with_second(3, 0))
    assert not agree(with_second(2, 1), with_second(3, 1), 0.01)


@pytest.mark.parametrize(("name", "engine"), CASES)
def test_products_of_an_adapter_in_double_precision(name: str, engine: str) -> None:
    """All adapters have layer rules."""
    model, J = doubled(name)
    (H, r), lin = moments(model, torch.float64), linearized(model, engine=engine)
    require_curvature(lin, J, H)
    V = columns(J.shape[1], 3)
    assert agree(EmpiricalFisher(lin) @ V, J.mT @ (r @ (r.mT @ (J @ V))))
    assert not lin.plan.others


@pytest.mark.parametrize(("name", "engine"), CASES)
def test_products_of_an_adapter_on_a_half_precision_base(name: str, engine: str) -> None:
    """Both routes round to bfloat16 at some ten operations between adapter and logits, by half an eps each at most.

    At random that is √20 halves, 4 eps with a margin for each product with J. As V is standard normal, ‖MV‖ is about
    ‖M‖√K for any M: errors are relative to that.
    """
    model = adapted(name, "sdpa")
    J, (H, r) = dense_jacobian(model, sentences()), moments(model, torch.float32)
    lin = linearized(model, engine=engine)

    def near(actual: Tensor, expected: Tensor, size: Tensor, products: int = 1) -> bool:
        return bool((actual - expected).norm() <= 4 * HALF * products * size)

    G, F = J.mT @ H @ J, J.mT @ r @ r.mT @ J
    for k in (3, 1):
        V, U = columns(J.shape[1], k, J.dtype), columns(J.shape[0], k, J.dtype)
        assert near(co.GGN(lin) @ V, G @ V, G.norm() * k**0.5, 2)
        assert near(EmpiricalFisher(lin) @ V, F @ V, F.norm() * k**0.5, 2)
        assert near(lin.jacobian() @ V, J @ V, J.norm() * k**0.5)
        assert near(lin.jacobian().mT @ U, J.mT @ U, J.norm() * k**0.5)
    assert near(DiagonalGGN(lin).diagonal(), G.diagonal(), G.diagonal().norm(), 2)
    exact = doubled(name)[1]
    assert near(lin.jacobian().to_dense().double(), exact, exact.norm())
    assert all(map(operator.is_, lin.model.module.parameters(), model.parameters()))  # not copied
    assert next(model.parameters()).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ADAPTED)
def test_solves_converge_on_a_half_precision_base(name: str) -> None:
    """The engine chosen rounds J once and multiplies by that J both ways in single precision: G is symmetric."""
    lin = linearized(adapted(name, "sdpa"))
    V, G = columns(lin.num_parameters, 2, torch.float32), co.GGN(lin)
    form, eps = V.mT @ (GV := G @ V), torch.finfo(torch.float32).eps
    assert (form[0, 1] - form[1, 0]).abs() <= 10 * eps * V.norm() * GV.norm()
    solution = G.add_diagonal(0.01).cg(V, rtol=1e-5)
    assert solution.converged.all()
    assert solution.iterations < 20
    assert lin.plan.in_use == {"layerwise": 1}
    assert not lin.plan.others


def test_a_model_output_is_no_tensor_of_outputs() -> None:
    with pytest.raises(TypeError, match=r"SequenceClassifierOutput, .* let forward return outputs.logits"):
        linearized(bare("bert", "sdpa").eval())


def test_a_head_that_peft_trains_in_half_precision_is_named() -> None:
    model = adapted("bert", "sdpa", task_type="SEQ_CLS")
    message = r"classifier.*' is torch.bfloat16 on cpu, but parameter '.*lora_.*' torch.float32 on cpu: convert it"
    with pytest.raises(ValueError, match=message):
        linearized(model)
    assert linearized(model, parameters="*lora_*").num_parameters == 128


def test_the_last_layer_of_a_masked_language_model_is_the_innermost() -> None:
    """The module around the decoder owns a bias, too, which is the decoder's; the weight is that of the embeddings."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
    config = transformers.BertConfig(vocab_size=TOKENS, max_position_embeddings=8, **sizes)
    model = Logits(strong(transformers.BertForMaskedLM(config))).eval()
    tokens = sentences()["input_ids"]
    lin = co.linearize(model.double(), ({"input_ids": tokens}, tokens), "classification", "last_layer")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert set(lin.model.selection.names) == {names[id(p)] for p in model.model.cls.predictions.decoder.parameters()}
