"""Two processes that share a model through FSDP start from the weights of one process."""

import pytest
import torch
from torch import distributed as dist
from torch import multiprocessing
from torch.distributed.fsdp import fully_shard

from models.bert import BERT
from models.davit import DaViT
from models.gpt import GPT
from models.layers import Model
from models.nystromformer import Nystromformer
from models.tnt import TNT
from models.vit import VisionTransformer
from models.volo import VOLO
from models.xcit import XCiT

PROCESSES = 2
SMALL = {"image_size": 32, "num_classes": 10}
FLAT = SMALL | {"patch_size": 8, "embed_dim": 48, "depth": 2, "heads": 4, "head_dim": 8}
TEXT = {"vocab_size": 40, "sequence_length": 16, "embed_dim": 24, "depth": 2, "heads": 2}
STAGES = SMALL | {"embed_dims": (16, 24), "depths": (1, 2), "heads": 2}


MODELS = {
    "vit": (VisionTransformer, FLAT),
    "xcit": (XCiT, FLAT),
    "tnt": (TNT, FLAT | {"inner_dim": 8, "inner_heads": 2}),
    "volo": (VOLO, STAGES | {"patch_size": 8}),
    "davit": (DaViT, STAGES),
    "gpt": (GPT, TEXT),
    "bert": (BERT, TEXT),
    "classifying bert": (BERT, TEXT | {"num_classes": 3}),
    "nystromformer": (Nystromformer, TEXT | {"num_landmarks": 4, "conv_kernel_size": 3}),
}


def build(name: str, device: str) -> Model:
    constructor, sizes = MODELS[name]
    return constructor(**sizes, device=device)


def compare_shards(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=PROCESSES)
    for name in MODELS:
        torch.manual_seed(0)
        whole = build(name, "cpu").state_dict()
        model = build(name, "meta")
        for part in (*model.blocks, model):
            fully_shard(part)
        model.to_empty(device="cpu")
        torch.manual_seed(0)
        model.init_weights()
        for key, value in model.state_dict().items():
            if isinstance(value, torch.distributed.tensor.DTensor):
                shards = dict(enumerate(whole[key].chunk(PROCESSES)))
                assert torch.equal(value.to_local(), shards.get(rank, whole[key][:0])), key
            else:
                assert torch.equal(value, whole[key]), key
    dist.destroy_process_group()


@pytest.mark.slow
def test_a_sharded_model_gets_the_weights_of_a_whole_one(tmp_path):
    multiprocessing.spawn(compare_shards, (f"file://{tmp_path}/store",), nprocs=PROCESSES)
