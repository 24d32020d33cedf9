"""Detection: JPEG images of uneven size with boxes around uneven numbers of objects.

    python -m unet3d.bench.workloads.detection --out data/detection --images 200

A folder of COCO is taken as it is: annotations/instances_NAME.json, with the images in NAME/,
images/NAME/ or images/. Without it, this program makes data of the kind.

Makes textured images whose sizes and compressibility vary like those of photographs, with
rectangles, ellipses and triangles to be found. A sample is decoded, resized (shorter side
`--short-side` unless the longer would exceed `--long-side`), flipped with probability 1/2,
and normalised; a batch is padded to its largest height and width, and its boxes stay lists.
"""
from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import nn
from torch.nn import functional

from unet3d.bench.workloads import base
from unet3d.data import mix
from unet3d.nifti import DataError
from unet3d.parallel import each

KIND = "detection"
CLASSES = 3  # rectangle, ellipse, triangle
MEAN = np.array([0.485, 0.456, 0.406], np.float32)  # of ImageNet, as is customary
STD = np.array([0.229, 0.224, 0.225], np.float32)
STRIDE = 16  # of the network; batches are padded to multiples of twice that
PAD_TO = 32


# -- data ------------------------------------------------------------------------------


def coco_file(folder: Path) -> Path | None:
    """The annotations of a folder of COCO: of several the training part; None if there are none.
    Raises DataError if there is a choice."""
    found = sorted(path for where in (folder, folder / "annotations")
                   for path in where.glob("*.json") if path.name != base.INDEX_NAME)
    found = [path for path in found if path.name.startswith("instances")] or found
    training = [path for path in found if "train" in path.name] or found
    if len(training) > 1:
        raise DataError(f"{folder}: holds several annotations ({', '.join(p.name for p in found)})"
                        ": choose with --annotations FILE")
    return training[0] if training else None


def read_coco(folder: Path, annotations: Path) -> tuple[Path, list[dict[str, Any]], int]:
    """The folder of the images, the items, and the number of categories. Crowds and empty boxes
    are left out. Raises DataError."""
    try:
        known = json.loads(annotations.read_text())
        images = {image["id"]: {"name": image["file_name"], "boxes": [], "labels": []}
                  for image in known["images"]}
        labels = {number: place for place, number in enumerate(sorted(
            category["id"] for category in known["categories"]))}
        for one in known["annotations"]:
            x, y, width, height = one["bbox"]
            if width > 0 and height > 0 and not one.get("iscrowd"):
                images[one["image_id"]]["boxes"].append([x, y, x + width, y + height])
                images[one["image_id"]]["labels"].append(labels[one["category_id"]])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{annotations}: cannot be read as annotations of COCO: "
                        f"{error!r}") from error
    items = sorted(images.values(), key=lambda item: item["name"])
    part = annotations.stem.removeprefix("instances_")
    places = [folder / part, folder / "images" / part, folder / "images", folder]
    for place in places:
        if items and (place / items[0]["name"]).is_file():
            return place, items, len(labels)
    raise DataError(f"{annotations}: lists {len(items)} images, of which the first is in none of "
                    f"{', '.join(map(str, places))}")


def draw_image(rng: np.random.Generator,
               scale: float) -> tuple[Image.Image, list[list[float]], list[int]]:
    """An image (longer side about 640 x `scale` pixels), its boxes (x0, y0, x1, y1), classes."""
    longer = float(np.clip(640 * np.exp(rng.normal(0, 0.45)), 200, 2400)) * scale
    sides = [max(32, round(longer)), max(32, round(longer * rng.uniform(0.55, 1)))]
    width, height = sides if rng.random() < 0.7 else sides[::-1]
    coarse = rng.integers(0, 256, (*np.maximum(2, np.array([height, width]) // 48), 3), np.uint8)
    smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    grain = rng.normal(0, rng.uniform(0, 25), (height, width, 1)).astype(np.float32)
    image = Image.fromarray(np.clip(np.asarray(smooth) + grain, 0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    boxes, labels = [], []
    for _ in range(rng.integers(0, 9)):
        w, h = (rng.uniform(0.08, 0.4) * n for n in (width, height))
        x, y = rng.uniform(0, width - w), rng.uniform(0, height - h)
        kind, colour = int(rng.integers(CLASSES)), tuple(rng.integers(0, 256, 3).tolist())
        if kind == 0:
            draw.rectangle((x, y, x + w, y + h), colour)
        elif kind == 1:
            draw.ellipse((x, y, x + w, y + h), colour)
        else:
            draw.polygon([(x, y + h), (x + w, y + h), (x + w / 2, y)], colour)
        boxes.append([round(v, 2) for v in (x, y, x + w, y + h)])
        labels.append(kind)
    return image, boxes, labels


def make_image(number: int, out: Path, seed: int, scale: float) -> dict[str, Any]:
    """Write image `number`; returns its item of the index."""
    rng = np.random.default_rng(mix(seed, number))
    image, boxes, labels = draw_image(rng, scale)
    name = f"image_{number:06d}.jpg"
    image.save(out / name, quality=int(rng.integers(60, 96)))
    return {"name": name, "boxes": boxes, "labels": labels}


def generate(out: Path, images: int, seed: int = 0, scale: float = 1.0,
             workers: int = 1) -> None:
    """Make the folder, unless it exists. Raises DataError if it was made differently."""
    settings = {"kind": KIND, "images": images, "seed": seed, "scale": scale}
    if base.made_already(out, settings):
        return
    out.mkdir(parents=True, exist_ok=True)
    work = functools.partial(make_image, out=out, seed=seed, scale=scale)
    items = each(work, range(images), workers, "images")
    base.write_index(out, settings, sorted(items, key=lambda item: item["name"]))


# -- samples and batches ---------------------------------------------------------------


class ImageDataset(base.SeededDataset):
    """Sample i: image float32 [3, h, w], boxes float32 [k, 4] in its pixels, labels int64
    [k], index. k may be 0."""

    def __init__(self, folder: Path, seed: int, short_side: int, long_side: int,
                 annotations: Path | None = None, samples: int | None = None) -> None:
        super().__init__(seed)
        if annotations is None and not (folder / base.INDEX_NAME).exists():
            annotations = coco_file(folder)
        self.folder, self.classes = folder, CLASSES
        if annotations is not None:
            self.folder, items, self.classes = read_coco(folder, annotations)
        else:
            items = base.read_index(folder, KIND, "COCO (annotations/instances_*.json and images)")
        self.items = base.choose(items, samples, seed)
        self.short_side, self.long_side = short_side, long_side

    def __len__(self) -> int:
        return len(self.items)

    def file(self, index: int) -> Path:
        return self.folder / self.items[index]["name"]

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        item, rng = self.items[index], self.generator(index)
        try:
            with Image.open(self.file(index)) as stored:
                image = stored.convert("RGB")
        except OSError as error:
            raise DataError(f"{self.file(index)}: cannot be read: {error}") from error
        boxes = np.array(item["boxes"], np.float32).reshape(-1, 4)
        factor = min(self.short_side / min(image.size), self.long_side / max(image.size))
        size = [max(1, round(n * factor)) for n in image.size]
        boxes *= np.array([size[0] / image.width, size[1] / image.height] * 2, np.float32)
        pixels = np.asarray(image.resize(size, Image.Resampling.BILINEAR))
        if rng.random() < 0.5:
            pixels = pixels[:, ::-1]
            boxes[:, [0, 2]] = size[0] - boxes[:, [2, 0]]
        normal = (pixels * np.float32(1 / 255) - MEAN) / STD
        return (torch.from_numpy(np.ascontiguousarray(normal.transpose(2, 0, 1))),
                torch.from_numpy(boxes), torch.tensor(item["labels"], dtype=torch.int64), index)


def collate(samples: list) -> base.Batch:
    """image float32 [n, 3, H, W] padded with zeros, size int64 [n, 2] of what is not padding
    (h, w), boxes and labels as lists of tensors, index int64 [n]."""
    sizes = torch.tensor([sample[0].shape[1:] for sample in samples])
    high, wide = (-(-int(n) // PAD_TO) * PAD_TO for n in sizes.amax(0))
    image = torch.zeros(len(samples), 3, high, wide)
    for row, (h, w), sample in zip(image, sizes.tolist(), samples):
        row[:, :h, :w] = sample[0]
    return {"image": image, "size": sizes, "boxes": [s[1] for s in samples],
            "labels": [s[2] for s in samples],
            "index": torch.tensor([s[3] for s in samples])}


def parts(batch: base.Batch, row: int) -> list[torch.Tensor]:
    """Image without padding, boxes, labels of one row."""
    h, w = batch["size"][row].tolist()
    return [batch["image"][row, :, :h, :w], batch["boxes"][row], batch["labels"][row]]


# -- a small network -------------------------------------------------------------------


class Detector(nn.Sequential):
    """A map of class scores and box sizes, one cell for 16 x 16 pixels: [n, classes + 2, ...]."""

    def __init__(self, classes: int, width: int = 8) -> None:
        layers: list[nn.Module] = []
        channels = [3, width, width * 2, width * 4, width * 4]
        for before, after in zip(channels, channels[1:]):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.ReLU()]
        super().__init__(*layers, nn.Conv2d(channels[-1], classes + 2, 1))


def detection_loss(out: torch.Tensor, boxes: list[torch.Tensor],
                   labels: list[torch.Tensor]) -> torch.Tensor:
    """Which cell holds the centre of which class, and the size of its box (log of cells)."""
    classes = out.shape[1] - 2
    target = torch.zeros_like(out[:, :classes])
    sizes = out.new_zeros(())
    count = 0
    for row, (box, label) in enumerate(zip(boxes, labels)):
        if not len(box):
            continue
        cell = ((box[:, :2] + box[:, 2:]) / 2 / STRIDE).long()
        x, y = cell[:, 0].clamp_max(out.shape[3] - 1), cell[:, 1].clamp_max(out.shape[2] - 1)
        target[row, label, y, x] = 1
        want = ((box[:, 2:] - box[:, :2]) / STRIDE).clamp_min(0.1).log()
        sizes = sizes + functional.l1_loss(out[row, classes:, y, x].T, want, reduction="sum")
        count += len(box)
    found = functional.binary_cross_entropy_with_logits(out[:, :classes], target,
                                                        pos_weight=out.new_tensor(50.0))
    return found + 0.1 * sizes / max(1, count)


def make_step(device: torch.device, classes: int) -> Callable[[base.Batch], float]:
    """A training step of the small network."""
    torch.manual_seed(0)
    net = Detector(classes).to(device).train()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)

    def step(batch: base.Batch) -> float:
        moved = [[t.to(device, non_blocking=True) for t in batch[name]]
                 for name in ("boxes", "labels")]
        loss = detection_loss(net(batch["image"].to(device, non_blocking=True)), *moved)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The workload's options of a run."""
    parser.add_argument("--short-side", type=base.positive, default=256, metavar="PIXELS")
    parser.add_argument("--long-side", type=base.positive, default=426, metavar="PIXELS")
    parser.add_argument("--annotations", type=Path, metavar="JSON",
                        help="of COCO (default: instances_*.json in the folder or in its "
                        "annotations/, the training part if there are several)")


def open_job(args: argparse.Namespace) -> base.Job:
    """The job of parsed arguments. Raises DataError."""
    dataset = ImageDataset(args.data, args.seed, args.short_side, args.long_side,
                           args.annotations, args.samples)
    return base.Job(dataset, 8, collate, parts,
                    functools.partial(make_step, classes=dataset.classes))


def main(argv: list[str] | None = None) -> int:
    """Command line entry; returns the exit status."""
    what = base.Files("detection", "images", "of the images' sides", 0.05)
    return base.write_files(argv, __doc__, what, generate)


if __name__ == "__main__":
    sys.exit(main())
