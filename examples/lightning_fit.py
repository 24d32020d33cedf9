"""Lightning uses minato's loader like torch's, and saves its position.

    python examples/lightning_fit.py

Needs lightning (pip install lightning).
"""

import tempfile

import lightning.pytorch as pl
import torch

from minato import DataLoader, Dataset


class Points(Dataset):
    """Points of a plane, and whether they lie above its diagonal."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        point = torch.rand(2)
        return point, (point[1] > point[0]).float()


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(2, 1)

    def training_step(self, batch, number):
        points, above = batch
        return torch.nn.functional.binary_cross_entropy_with_logits(self.net(points)[:, 0], above)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def fit(folder, steps, checkpoint=None):
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        max_steps=steps, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    model = Model()
    trainer.fit(model, DataLoader(Points(), 8, shuffle=True, num_workers=2), ckpt_path=checkpoint)
    return trainer, model


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        _, whole = fit(folder, 12)
        # The fit ended in the middle of the second epoch; the checkpoint has the loader's state.
        trainer, _ = fit(folder, 10)
        trainer.save_checkpoint(f"{folder}/saved.ckpt")
        _, resumed = fit(folder, 12, f"{folder}/saved.ckpt")
        same = torch.equal(whole.net.weight, resumed.net.weight)
        print(f"the same weights with and without the interruption: {same}")
