"""Starts its ranks by itself, and uses objects, groups and messages between ranks."""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def main(rank: int, ranks: int) -> None:
    torch.cuda.set_device(rank)
    address = "tcp://localhost:29511"
    dist.init_process_group("nccl", init_method=address, rank=rank, world_size=ranks)
    assert dist.get_backend() == "nccl"
    x = torch.ones(4, device=rank)
    dist.all_reduce(x)
    objects = [None] * ranks
    dist.all_gather_object(objects, {"rank": rank})
    assert objects[0] == {"rank": 0}
    dist.barrier(dist.new_group(backend="gloo"))
    ring = [dist.P2POp(dist.isend, x, (rank + 1) % ranks)]
    ring += [dist.P2POp(dist.irecv, torch.empty_like(x), (rank - 1) % ranks)]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    assert ring[1].tensor.cpu().numel() == 4
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks = torch.cuda.device_count()
    mp.spawn(main, args=(ranks,), nprocs=ranks, join=True)
