"""Architectures of other people's packages, with inputs and targets of a few points, for `wild`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

POINTS = 6


class Job(NamedTuple):
    """A model with random weights, a few points, and whether its outputs are classes' logits or values.

    `collate` joins points that are no tensors.
    """

    model: nn.Module
    inputs: Any
    targets: Tensor
    classifies: bool
    dtype: torch.dtype = torch.float64
    collate: Callable[[list[Any]], Any] | None = None


class Called(nn.Module):
    """A model whose outputs are what `call` makes of another and its inputs, as a user would wrap it."""

    def __init__(self, model: nn.Module, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the outputs."""
        return self.call(self.model, *args, **kwargs)


def entry_of(model: nn.Module, entry: Callable[[Any], Tensor]) -> Called:
    """Return the model whose outputs are one entry of what another returns."""
    return Called(model, lambda model, *args, **kwargs: entry(model(*args, **kwargs)))


def classes(model: nn.Module, inputs: Any, count: int, *positions: int) -> Job:
    """Make a job of classification with random labels, at some positions of each point if there are several."""
    return Job(model, inputs, torch.randint(count, (POINTS, *positions)), True)


def values(model: nn.Module, inputs: Any, *shape: int) -> Job:
    """Make a job of regression with random targets of one shape a point."""
    return Job(model, inputs, torch.randn(POINTS, *shape), False)


def images(size: int = 32, channels: int = 3) -> Tensor:
    """Return random square images."""
    return torch.randn(POINTS, channels, size, size)


def words(length: int = 8, vocabulary: int = 50) -> Tensor:
    """Return random tokens."""
    return torch.randint(2, vocabulary, (POINTS, length))


def _timm(name: str, size: int = 32, **options: Any) -> Callable[[], Job]:
    def make() -> Job:
        import timm

        return classes(timm.create_model(name, num_classes=5, **options), images(size), 5)

    return make


def _torchvision(name: str, size: int = 32, **options: Any) -> Callable[[], Job]:
    def make() -> Job:
        import torchvision

        return classes(torchvision.models.get_model(name, num_classes=5, **options), images(size), 5)

    return make


def _segmentation(name: str, **options: Any) -> Callable[[], Job]:
    def make() -> Job:
        import segmentation_models_pytorch as smp

        model = getattr(smp, name)("mobilenet_v2", encoder_weights=None, classes=2, **options)
        return values(model, images(32), 2, 32, 32)

    return make


SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 50,
    "max_position_embeddings": 32,
    "num_labels": 3,
    "pad_token_id": 0,
}


def _transformer(kind: str, config: str, **options: Any) -> Callable[[], Job]:
    """Make a sequence classifier, or a causal language model whose last token is predicted."""

    def make() -> Job:
        import transformers

        model = getattr(transformers, kind)(getattr(transformers, config)(**SMALL | options))
        if kind.endswith("Classification"):
            return classes(entry_of(model, lambda out: out.logits), words(), 3)
        return classes(entry_of(model, lambda out: out.logits), words(), 50, 8)

    return make


def _vision_transformer(kind: str, config: str, **options: Any) -> Callable[[], Job]:
    def make() -> Job:
        import transformers

        given = {"image_size": 32, "num_labels": 3, **options}
        model = getattr(transformers, kind)(getattr(transformers, config)(**given))
        return classes(entry_of(model, lambda out: out.logits), images(32), 3)

    return make


def _monai(name: str, targets: tuple[int, ...] | int, size: int = 32, **options: Any) -> Callable[[], Job]:
    def make() -> Job:
        import monai.networks.nets as nets

        model = getattr(nets, name)(**options)
        model = entry_of(model, lambda out: out[0]) if name == "ViT" else model
        inputs = images(size, 1)
        return classes(model, inputs, targets) if isinstance(targets, int) else values(model, inputs, *targets)

    return make


class DenseGraphs(nn.Module):
    """Two dense graph layers and a mean over nodes, for graphs as (features, adjacency)."""

    def __init__(self, layer: str) -> None:
        super().__init__()
        import torch_geometric.nn as layers

        if layer == "DenseGINConv":
            self.first = layers.DenseGINConv(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8)))
            self.second = layers.DenseGINConv(nn.Linear(8, 8))
        else:
            self.first, self.second = getattr(layers, layer)(4, 8), getattr(layers, layer)(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        """Compute the logits of each graph."""
        hidden = self.first(x, adjacency).tanh()
        return self.head(self.second(hidden, adjacency).tanh().mean(1))


def _dense_graphs(layer: str) -> Callable[[], Job]:
    def make() -> Job:
        adjacency = (torch.rand(POINTS, 5, 5) < 0.5).float()
        inputs = {"x": torch.randn(POINTS, 5, 4), "adjacency": adjacency}
        return classes(DenseGraphs(layer), inputs, 3)

    return make


class RaggedGraphs(nn.Module):
    """A network of graphs of several sizes, which takes a batch of them."""

    def __init__(self, layer: str) -> None:
        super().__init__()
        import torch_geometric.nn as layers

        self.first, self.second = getattr(layers, layer)(4, 8), getattr(layers, layer)(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, batch: Any) -> Tensor:
        """Compute the logits of each graph."""
        from torch_geometric.nn import global_mean_pool

        hidden = self.first(batch.x, batch.edge_index).tanh()
        hidden = self.second(hidden, batch.edge_index).tanh()
        return self.head(global_mean_pool(hidden, batch.batch))


def _ragged_graphs(layer: str) -> Callable[[], Job]:
    def make() -> Job:
        from torch_geometric.data import Batch, Data

        graphs = []
        for count in range(3, 3 + POINTS):
            edges = torch.stack([torch.arange(count), torch.arange(count).roll(1)])
            graphs.append(Data(x=torch.randn(count, 4).double(), edge_index=torch.cat([edges, edges.flip(0)], 1)))
        return classes(RaggedGraphs(layer), graphs, 3)._replace(collate=Batch.from_data_list)

    return make


def _zuko(name: str, **options: Any) -> Callable[[], Job]:
    def make() -> Job:
        import zuko

        flow = getattr(zuko.flows, name)(features=3, **options)
        return values(Called(flow, lambda flow, x: flow().log_prob(x).unsqueeze(1)), torch.randn(POINTS, 3), 1)

    return make


def _nflows(name: str) -> Callable[[], Job]:
    def make() -> Job:
        import nflows.flows as flows

        flow = getattr(flows, name)(4, 8, num_layers=2, num_blocks_per_layer=1)
        return values(Called(flow, lambda flow, x: flow.log_prob(x).unsqueeze(1)), torch.randn(POINTS, 4), 1)

    return make


def _rtdl(name: str) -> Callable[[], Job]:
    def make() -> Job:
        import rtdl_revisiting_models as rtdl

        if name == "MLP":
            model = rtdl.MLP(d_in=6, d_out=3, n_blocks=2, d_block=16, dropout=0.1)
        elif name == "ResNet":
            model = rtdl.ResNet(
                d_in=6,
                d_out=3,
                n_blocks=2,
                d_block=16,
                d_hidden=None,
                d_hidden_multiplier=2.0,
                dropout1=0.1,
                dropout2=0.0,
            )
        else:
            model = rtdl.FTTransformer(
                n_cont_features=6,
                cat_cardinalities=[],
                d_out=3,
                n_blocks=2,
                d_block=16,
                attention_n_heads=2,
                attention_dropout=0.1,
                ffn_d_hidden=None,
                ffn_d_hidden_multiplier=4 / 3,
                ffn_dropout=0.1,
                residual_dropout=0.0,
                linformer_kv_compression_ratio=None,
                linformer_kv_compression_sharing=None,
            )
            return classes(Called(model, lambda model, x: model(x, None)), torch.randn(POINTS, 6), 3)
        return classes(model, torch.randn(POINTS, 6), 3)

    return make


def _tabm() -> Job:
    import tabm

    model = tabm.TabM(
        n_num_features=6,
        d_out=3,
        n_blocks=2,
        d_block=16,
        dropout=0.1,
        k=4,
        arch_type="tabm",
        start_scaling_init="random-signs",
    )
    return classes(entry_of(model, lambda out: out.mean(1)), torch.randn(POINTS, 6), 3)


def _tabnet() -> Job:
    from pytorch_tabnet.tab_network import TabNet

    model = TabNet(6, 3, group_attention_matrix=torch.eye(6), virtual_batch_size=8)
    return classes(entry_of(model, lambda out: out[0]), torch.randn(POINTS, 6), 3)


def _tab_transformer(name: str) -> Callable[[], Job]:
    def make() -> Job:
        import tab_transformer_pytorch as package

        model = getattr(package, name)(
            categories=(4, 3),
            num_continuous=5,
            dim=16,
            depth=2,
            heads=2,
            dim_out=3,
            **({"mlp_act": nn.GELU()} if name == "TabTransformer" else {}),
        )
        inputs = {"x_categ": torch.randint(3, (POINTS, 2)), "x_cont": torch.randn(POINTS, 5)}
        names = {"x_numer": inputs["x_cont"], "x_categ": inputs["x_categ"]}
        return classes(model, names if name == "FTTransformer" else inputs, 3)

    return make


def _crepe() -> Job:
    import torchcrepe

    return values(torchcrepe.Crepe("tiny"), torch.randn(POINTS, 1024), 360)


def _encodec() -> Job:
    from encodec.modules import SEANetEncoder

    model = SEANetEncoder(dimension=8, n_filters=4, ratios=[4, 2], lstm=1)
    return values(entry_of(model, lambda out: out.mean(2)), torch.randn(POINTS, 1, 64), 8)


def _conformer() -> Job:
    from conformer import ConformerBlock

    block = ConformerBlock(dim=16, dim_head=8, heads=2, conv_kernel_size=7)
    return classes(
        nn.Sequential(block, entry_of(nn.Identity(), lambda h: h.mean(1)), nn.Linear(16, 3)),
        torch.randn(POINTS, 12, 16),
        3,
    )


def _torchaudio(name: str) -> Callable[[], Job]:
    def make() -> Job:
        import torchaudio.models as models

        if name == "Wav2Letter":
            return values(
                entry_of(models.Wav2Letter(num_classes=4), lambda out: out.mean(2)), torch.randn(POINTS, 1, 2000), 4
            )
        if name == "DeepSpeech":
            return values(
                entry_of(models.DeepSpeech(10, n_hidden=16, n_class=4), lambda out: out.mean(1)),
                torch.randn(POINTS, 1, 12, 10),
                4,
            )
        model = models.ConvTasNet(
            2,
            enc_kernel_size=16,
            enc_num_feats=8,
            msk_kernel_size=3,
            msk_num_feats=8,
            msk_num_hidden_feats=8,
            msk_num_layers=2,
            msk_num_stacks=1,
        )
        return values(model, torch.randn(POINTS, 1, 64), 2, 64)

    return make


def _neural_operator(name: str) -> Callable[[], Job]:
    def make() -> Job:
        from neuralop import models

        options: dict[str, Any] = {"in_channels": 1, "out_channels": 1, "hidden_channels": 8}
        if name == "UNO":
            options |= {
                "uno_out_channels": [8, 8, 8],
                "uno_n_modes": [[4, 4]] * 3,
                "uno_scalings": [[1.0, 1.0]] * 3,
                "n_layers": 3,
                "channel_mlp_skip": "linear",
            }
        else:
            options |= {"n_modes": (4, 4), "n_layers": 2}
        return values(getattr(models, name)(**options), images(16, 1), 1, 16, 16)

    return make


def _x_transformer(decoder: bool) -> Callable[[], Job]:
    def make() -> Job:
        import x_transformers as package

        kind = package.Decoder if decoder else package.Encoder
        layers = kind(dim=16, depth=2, heads=2, rotary_pos_emb=decoder)
        model = package.TransformerWrapper(num_tokens=50, max_seq_len=16, attn_layers=layers)
        return classes(model, words(), 50, 8)

    return make


def _vit(name: str) -> Callable[[], Job]:
    def make() -> Job:
        import importlib

        package, kind = name.rsplit(".", 1)
        options: dict[str, Any] = {
            "image_size": 32,
            "patch_size": 8,
            "num_classes": 3,
            "dim": 16,
            "depth": 2,
            "heads": 2,
            "mlp_dim": 32,
        }
        if kind == "CaiT":
            options["cls_depth"] = 1
        return classes(getattr(importlib.import_module(package), kind)(**options), images(32), 3)

    return make


def _mamba() -> Job:
    """Make a job of Mamba in single precision, in which its scan computes whatever the weights are in."""
    job = _transformer("MambaForCausalLM", "MambaConfig", state_size=4, expand=2)()
    return job._replace(model=job.model.float(), dtype=torch.float32)


def _chgnet() -> Job:
    """Make a job of CHGNet's energies per atom, in eV."""
    torch.set_default_dtype(torch.float32)  # the only one that it knows
    from chgnet.model import CHGNet
    from pymatgen.core import Lattice, Structure

    network = CHGNet.load(verbose=False, use_device="cpu")
    lattices = [Lattice.cubic(length) for length in torch.linspace(3.9, 4.5, POINTS).tolist()]
    crystals = [Structure(lattice, ["Na", "Cl"], [[0, 0, 0], [0.5, 0.5, 0.5]]) for lattice in lattices]
    energy = Called(network, lambda network, graphs: network(graphs, task="e")["e"].unsqueeze(1))
    job = values(energy, [network.graph_converter(crystal) for crystal in crystals], 1)
    return job._replace(dtype=torch.float32, collate=list)


JOBS: dict[str, dict[str, Callable[[], Job]]] = {
    "timm": {
        "vit_tiny_patch16_224, 3 blocks": _timm("vit_tiny_patch16_224", img_size=32, depth=3),
        "deit3_small_patch16_224, 2 blocks": _timm("deit3_small_patch16_224", img_size=32, depth=2, embed_dim=96),
        "swin_tiny_patch4_window7_224, narrow": _timm(
            "swin_tiny_patch4_window7_224", 56, img_size=56, embed_dim=24, depths=(2, 2), num_heads=(2, 4)
        ),
        "mixer_s32_224": _timm("mixer_s32_224", img_size=32),
        "resnet18, narrow": _timm("resnet18", channels=(16, 32, 64, 64)),
        "resnetv2_50, narrow": _timm("resnetv2_50", layers=(1, 1, 1, 1), channels=(32, 64, 128, 128)),
        "efficientnet_b0": _timm("efficientnet_b0"),
        "mobilenetv3_small_100": _timm("mobilenetv3_small_100"),
        "convnext_atto": _timm("convnext_atto"),
        "regnetx_002": _timm("regnetx_002"),
        "ghostnet_100": _timm("ghostnet_100"),
        "poolformer_s12": _timm("poolformer_s12"),
        "edgenext_xx_small": _timm("edgenext_xx_small"),
        "fastvit_t8": _timm("fastvit_t8", 64),
    },
    "torchvision": {
        "mobilenet_v3_small": _torchvision("mobilenet_v3_small"),
        "densenet121": _torchvision("densenet121"),
        "squeezenet1_1": _torchvision("squeezenet1_1", 64),
        "shufflenet_v2_x0_5": _torchvision("shufflenet_v2_x0_5"),
        "mobilenet_v2": _torchvision("mobilenet_v2"),
        "mnasnet0_5": _torchvision("mnasnet0_5"),
        "googlenet": _torchvision("googlenet", 64, aux_logits=False, init_weights=False),
        "efficientnet_b0": _torchvision("efficientnet_b0"),
        "regnet_y_400mf": _torchvision("regnet_y_400mf"),
    },
    "transformers": {
        "BERT": _transformer("BertForSequenceClassification", "BertConfig"),
        "DistilBERT": _transformer(
            "DistilBertForSequenceClassification", "DistilBertConfig", dim=16, n_layers=2, n_heads=2, hidden_dim=32
        ),
        "RoBERTa": _transformer("RobertaForSequenceClassification", "RobertaConfig"),
        "ALBERT": _transformer("AlbertForSequenceClassification", "AlbertConfig", embedding_size=8),
        "ELECTRA": _transformer("ElectraForSequenceClassification", "ElectraConfig", embedding_size=8),
        "ModernBERT": _transformer("ModernBertForSequenceClassification", "ModernBertConfig"),
        "GPT-2": _transformer("GPT2LMHeadModel", "GPT2Config", n_embd=16, n_layer=2, n_head=2, n_positions=32),
        "Llama": _transformer("LlamaForCausalLM", "LlamaConfig", num_key_value_heads=1),
        "Mistral": _transformer("MistralForCausalLM", "MistralConfig", num_key_value_heads=1),
        "Qwen2": _transformer("Qwen2ForCausalLM", "Qwen2Config", num_key_value_heads=1),
        "Mamba": _mamba,
        "ViT": _vision_transformer(
            "ViTForImageClassification",
            "ViTConfig",
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            patch_size=8,
        ),
        "ConvNeXt": _vision_transformer(
            "ConvNextForImageClassification", "ConvNextConfig", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2
        ),
    },
    "monai": {
        "UNet": _monai(
            "UNet", (2, 32, 32), spatial_dims=2, in_channels=1, out_channels=2, channels=(4, 8, 16), strides=(2, 2)
        ),
        "BasicUNet": _monai("BasicUNet", (2, 32, 32), spatial_dims=2, out_channels=2, features=(4, 4, 8, 8, 16, 4)),
        "SegResNet": _monai("SegResNet", (2, 32, 32), spatial_dims=2, init_filters=8, out_channels=2),
        "AttentionUnet": _monai(
            "AttentionUnet", (2, 32, 32), spatial_dims=2, in_channels=1, out_channels=2, channels=(4, 8), strides=(2,)
        ),
        "DenseNet121": _monai("DenseNet121", 3, spatial_dims=2, in_channels=1, out_channels=3),
        "ViT": _monai(
            "ViT",
            3,
            in_channels=1,
            img_size=(32, 32),
            patch_size=(8, 8),
            hidden_size=16,
            mlp_dim=32,
            num_layers=2,
            num_heads=2,
            classification=True,
            num_classes=3,
            spatial_dims=2,
        ),
    },
    "segmentation_models_pytorch": {
        "Unet": _segmentation("Unet", decoder_channels=(32, 16, 16, 8, 8)),
        "FPN": _segmentation("FPN", decoder_pyramid_channels=32, decoder_segmentation_channels=32),
        "Linknet": _segmentation("Linknet"),
        "DeepLabV3Plus": _segmentation("DeepLabV3Plus", decoder_channels=32),
    },
    "torch_geometric": {
        "DenseGCNConv": _dense_graphs("DenseGCNConv"),
        "DenseGINConv": _dense_graphs("DenseGINConv"),
        "GCNConv, ragged": _ragged_graphs("GCNConv"),
        "SAGEConv, ragged": _ragged_graphs("SAGEConv"),
        "GATConv, ragged": _ragged_graphs("GATConv"),
    },
    "flows": {
        "zuko NSF": _zuko("NSF", transforms=2, hidden_features=(8, 8)),
        "zuko MAF": _zuko("MAF", transforms=2, hidden_features=(8, 8)),
        "zuko NICE": _zuko("NICE", transforms=2, hidden_features=(8, 8)),
        "nflows RealNVP": _nflows("SimpleRealNVP"),
        "nflows MAF": _nflows("MaskedAutoregressiveFlow"),
    },
    "tabular": {
        "rtdl MLP": _rtdl("MLP"),
        "rtdl ResNet": _rtdl("ResNet"),
        "rtdl FT-Transformer": _rtdl("FTTransformer"),
        "TabM": _tabm,
        "TabNet": _tabnet,
        "TabTransformer": _tab_transformer("TabTransformer"),
        "FT-Transformer (lucidrains)": _tab_transformer("FTTransformer"),
    },
    "audio": {
        "torchcrepe tiny": _crepe,
        "EnCodec encoder": _encodec,
        "Conformer": _conformer,
        "Wav2Letter": _torchaudio("Wav2Letter"),
        "DeepSpeech": _torchaudio("DeepSpeech"),
        "ConvTasNet": _torchaudio("ConvTasNet"),
    },
    "neuraloperator": {
        "FNO": _neural_operator("FNO"),
        "TFNO": _neural_operator("TFNO"),
        "UNO": _neural_operator("UNO"),
    },
    "x_transformers": {"Encoder": _x_transformer(False), "Decoder, rotary": _x_transformer(True)},
    "vit_pytorch": {
        "SimpleViT": _vit("vit_pytorch.simple_vit.SimpleViT"),
        "CaiT": _vit("vit_pytorch.cait.CaiT"),
        "DeepViT": _vit("vit_pytorch.deepvit.DeepViT"),
    },
    "chgnet": {"CHGNet": _chgnet},
}
"""By package, or by kind of packages, and by name."""
