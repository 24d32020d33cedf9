"""CPUs of other machines make the samples: actors on a Ray cluster, here of two nodes on this machine.

    pip install 'minato-loader[ray]'
    python examples/remote.py
"""

import os
import tempfile
import time

import ray
import torch
from ray.cluster_utils import Cluster

from minato import DataLoader, Dataset, remote


class Samples(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(0.02)  # stands for the work of a sample
        return torch.rand(3) + index, os.getpid()


def epoch(**options):
    torch.manual_seed(0)
    batches = list(DataLoader(Samples(), batch_size=8, shuffle=True, **options))
    return torch.cat([x for x, _ in batches]), {pid for _, pids in batches for pid in pids.tolist()}


if __name__ == "__main__":
    node = {"num_cpus": 1, "object_store_memory": 80 << 20}
    files = tempfile.TemporaryDirectory(dir="/tmp")
    os.environ["TMPDIR"] = tempfile.tempdir = files.name  # for Ray's own files
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    cluster.add_node(**node)
    # A program for a real cluster begins here, with ray.init() alone. working_dir sends its modules.
    root = os.path.dirname(os.path.abspath(__file__))
    ray.init(address=cluster.address, runtime_env={"working_dir": root}, logging_level="error")
    try:
        drawn, actors = epoch(remote=remote.Ray(actors=2, cpus=1))
        same = torch.equal(drawn, epoch(num_workers=2)[0])
        print(f"64 samples from {len(actors)} actors; as from local workers: {same}")
    finally:
        ray.shutdown()
        cluster.shutdown()
        files.cleanup()
