"""Two processes that share a model through FSDP start from the weights of one process."""

import torch
from torch import distributed as dist
from torch import multiprocessing
from torch.distributed.fsdp import fully_shard

from models.vit import VisionTransformer

PROCESSES = 2


def build(device: str) -> VisionTransformer:
    return VisionTransformer(
        image_size=32, embed_dim=48, depth=2, heads=4, head_dim=8, num_classes=10, device=device
    )


def compare_shards(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=PROCESSES)
    torch.manual_seed(0)
    whole = build("cpu").state_dict()
    model = build("meta")
    for part in (*model.blocks, model):
        fully_shard(part)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.init_weights()
    for name, param in model.named_parameters():
        shards = dict(enumerate(whole[name].chunk(PROCESSES)))
        assert torch.equal(param.to_local(), shards.get(rank, whole[name][:0])), name
    dist.destroy_process_group()


def test_a_sharded_model_gets_the_weights_of_a_whole_one(tmp_path):
    multiprocessing.spawn(compare_shards, (f"file://{tmp_path}/store",), nprocs=PROCESSES)
