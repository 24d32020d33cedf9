"""Two processes that train one model, on CPUs.

    torchrun --standalone --nproc_per_node=2 examples/ddp.py
"""

import torch
import torch.distributed as dist

from minato import DataLoader, Dataset, DistributedSampler


class Points(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        point = torch.rand(2)
        return point, (point[1] > point[0]).float(), index


if __name__ == "__main__":
    dist.init_process_group("gloo")  # "nccl" with GPUs
    rank = dist.get_rank()
    torch.manual_seed(0)  # may be equal on all ranks: they draw different numbers all the same
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)

    # minato divides the default memory limit among the ranks of a machine (LOCAL_WORLD_SIZE).
    sampler = DistributedSampler(Points(), seed=1)
    loader = DataLoader(Points(), batch_size=8, sampler=sampler, num_workers=2,
                        persistent_workers=True)  # fmt: skip
    for epoch in range(2):
        loader.set_epoch(epoch)  # passes it to the sampler; sampler.set_epoch(epoch) works as well
        seen = []
        for points, above, indices in loader:
            loss = torch.nn.functional.binary_cross_entropy_with_logits(net(points)[:, 0], above)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += indices.tolist()
        of_all = [None] * dist.get_world_size()
        dist.all_gather_object(of_all, seen)
        if rank == 0:
            whole = sorted(sum(of_all, [])) == list(range(64))
            print(f"epoch {epoch}: {len(seen)} samples a rank, each sample once: {whole}")
    dist.destroy_process_group()
