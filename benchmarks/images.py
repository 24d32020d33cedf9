"""CPU time of making a training sample from a JPEG photo: minato.ops against Pillow and torchvision.

    python benchmarks/images.py [--sets D S M L] [--files 44] [--repeats 7] [--json FILE] [--quick]
    python benchmarks/images.py --epoch     # an epoch of ImageFolder by loaders, 2 workers; needs torchvision

The photographs are those that installed packages carry: matplotlib's grace_hopper.jpg (public
domain), and if they are installed, scikit-learn's china.jpg and flower.jpg (CC BY 2.0) and seven of
scikit-image's (public domain or CC0: the documentation of skimage.data names each source). They are resized and
encoded anew: D 500x375 at quality 93 to 97, S 500x375 at 85 to 95, M 1000x720 and L 1600x1125 at 85
to 95. A sample is a random crop resized to 224x224, perhaps flipped, normalized. Files are in memory.

The ways take turns, and a number is the median over rounds of CPU milliseconds for each sample.
Torch uses one thread. "pillow" is Pillow with torchvision's first transforms, if torchvision is
installed, else the same with Pillow alone. "torchvision 2" is decode_jpeg with the second transforms.
"torchcodec" is its decode_jpeg with the second transforms. "OpenCV" interpolates without antialiasing, so its
samples are others. "DALI" is a pipeline of operators on the CPU, of which each call makes all files' samples.
"scaled" is minato with decode="scaled". "huffman" is a bound for all ways that read codes up to the crop's end:
libjpeg-turbo skips to its last row. The samples of "pillow" and "minato" must be equal.

With --epoch, files of all sets lie in a folder, and a number is images per second and the CPU time of all
processes for each. Epochs take turns; the first of each is not counted. Every epoch must have each target as
often, and under torch's loader the samples of "pillow" and "minato.ops" must be equal.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image

from minato import _ops, ops
from minato.ops import jpeg

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PHOTOS = {
    "matplotlib": "mpl-data/sample_data/grace_hopper.jpg",
    "sklearn": "datasets/images/china.jpg datasets/images/flower.jpg",
    "skimage": "data/astronaut.png data/chelsea.png data/coffee.png data/hubble_deep_field.jpg "
               "data/motorcycle_left.png data/retina.jpg data/rocket.jpg",
}  # fmt: skip
SETS = {"D": ((500, 375), (93, 95, 97)), "S": ((500, 375), (85, 90, 95)),
        "M": ((1000, 720), (85, 90, 95)), "L": ((1600, 1125), (85, 90, 95))}  # fmt: skip
Way = Callable[[Any], Any]  # of a file's bytes


def photos() -> list[str]:
    found = []
    for package, names in PHOTOS.items():
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.submodule_search_locations:
            found += [os.path.join(spec.submodule_search_locations[0], n) for n in names.split()]
    return [path for path in found if os.path.exists(path)]


def make(name: str, count: int) -> list[bytes]:
    size, qualities = SETS[name]
    paths, files = photos(), []
    for n in range(count):
        with Image.open(paths[n % len(paths)]) as image:
            resized = image.convert("RGB").resize(size, Image.Resampling.LANCZOS)
        file = io.BytesIO()
        resized.save(file, "JPEG", quality=qualities[n % len(qualities)])
        files.append(file.getvalue())
    return files


def ways() -> dict[str, Way]:
    """Functions from a file to a sample, which draw the same numbers."""
    ours = ops.RandomResizedCropJpeg(224, mean=MEAN, std=STD)
    library = jpeg.find_library()
    byte = np.arange(256, dtype=np.uint8).reshape(1, 256).repeat(3, 0)
    pixel = np.empty(3, np.uint8)

    def huffman(file: bytes) -> None:
        left, top, width, height = ours._region(*_ops.jpeg_size(file))
        corner = (left + width - 1, top + height - 1, 1, 1)
        _ops.jpeg_crop(library.handle, file, corner, (1, 1), (0, 0, 1, 1), False, False, False, byte, pixel)

    def alone(file: bytes) -> Any:
        with Image.open(io.BytesIO(file)) as image:
            pixels = ours._by_pillow(file, None, ours._crop(*image.size))
        return torch.from_numpy(pixels).permute(2, 0, 1).contiguous().float().div(255).sub_(
            torch.tensor(MEAN).view(3, 1, 1)).div_(torch.tensor(STD).view(3, 1, 1))

    scaled = ops.RandomResizedCropJpeg(224, mean=MEAN, std=STD, decode="scaled")
    found: dict[str, Way] = {"pillow": alone, "minato": ours, "scaled": scaled}
    if library is not None:
        found["huffman"] = huffman
    if importlib.util.find_spec("torchvision") is not None:
        from torchvision import transforms
        from torchvision.io import decode_jpeg
        from torchvision.transforms import v2

        first = transforms.Compose([
            transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(),
            transforms.ToTensor(), transforms.Normalize(MEAN, STD),
        ])  # fmt: skip
        second = v2.Compose([
            v2.RandomResizedCrop(224), v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD),
        ])  # fmt: skip

        def pillow(file: bytes) -> Any:
            with Image.open(io.BytesIO(file)) as image:
                return first(image.convert("RGB"))

        found["pillow"] = pillow
        found["torchvision 2"] = lambda file: second(
            decode_jpeg(torch.frombuffer(bytearray(file), dtype=torch.uint8)))
        with contextlib.suppress(ImportError, OSError, RuntimeError):  # its libraries may be missing
            from torchcodec.decoders import decode_jpeg as decode_by_torchcodec

            found["torchcodec"] = lambda file: second(decode_by_torchcodec(file))
        with contextlib.suppress(ImportError):
            import cv2

            cv2.setNumThreads(1)
            mean, std = np.float32(MEAN) * 255, np.float32(STD) * 255

            def opencv(file: bytes) -> Any:
                pixels = cv2.imdecode(np.frombuffer(file, np.uint8), cv2.IMREAD_COLOR_RGB)
                top, left, height, width = transforms.RandomResizedCrop.get_params(
                    torch.empty(3, *pixels.shape[:2], device="meta"), (0.08, 1.0), (3 / 4, 4 / 3))
                pixels = cv2.resize(pixels[top : top + height, left : left + width], (224, 224))
                if torch.rand(1) < 0.5:
                    pixels = cv2.flip(pixels, 1)
                return torch.from_numpy((pixels - mean) / std).permute(2, 0, 1).contiguous()

            found["OpenCV"] = opencv
    with contextlib.suppress(ImportError, OSError):
        found["DALI"] = dali()
    return found


def dali() -> Way:
    """Makes the samples of all files at once, as DALI's pipelines do; its threads' time counts, too."""
    from nvidia.dali import fn, pipeline_def, types

    given: list[Any] = []

    @pipeline_def(num_threads=1, device_id=None, exec_async=False, exec_pipelined=False)
    def pipeline() -> Any:
        files = fn.external_source(lambda: given, dtype=types.UINT8)
        pixels = fn.decoders.image_random_crop(
            files, device="cpu", random_area=(0.08, 1.0), random_aspect_ratio=(3 / 4, 4 / 3))
        pixels = fn.resize(pixels, size=(224, 224), interp_type=types.INTERP_LINEAR, antialias=True)
        return fn.crop_mirror_normalize(pixels, mirror=fn.random.coin_flip(), dtype=types.FLOAT,
                                        mean=np.multiply(MEAN, 255), std=np.multiply(STD, 255))  # fmt: skip

    built: Any = None

    def run(files: list[bytes]) -> Any:
        nonlocal built
        given[:] = [np.frombuffer(file, np.uint8) for file in files]
        if built is None:
            built = pipeline(batch_size=len(files))
            built.build()
        return built.run()

    return run


def measure(files: list[bytes], all_ways: dict[str, Way], repeats: int) -> dict[str, float]:
    """CPU milliseconds for each sample."""
    times: dict[str, list[float]] = {name: [] for name in all_ways}
    for number in range(repeats + 1):  # the first is not counted
        for name, way in all_ways.items():
            torch.manual_seed(number)
            begin = time.process_time()
            for file in [files] if name == "DALI" else files:
                way(file)
            times[name].append((time.process_time() - begin) * 1e3 / len(files))
    return {name: statistics.median(found[1:]) for name, found in times.items()}


def differ(files: list[bytes], all_ways: dict[str, Way]) -> int:
    count = 0
    for number, file in enumerate(files):
        made = []
        for name in ("pillow", "minato"):
            torch.manual_seed(number)
            made.append(all_ways[name](file))
        count += not torch.equal(*made)
    return count


def loaders(folder: str) -> dict[str, Any]:
    """By name: a function that makes a loader of the folder's photos."""
    from torchvision import datasets, transforms
    from torchvision.io import decode_image
    from torchvision.transforms import v2

    import minato

    first = datasets.ImageFolder(folder, transforms.Compose([
        transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(),
        transforms.ToTensor(), transforms.Normalize(MEAN, STD)]))  # fmt: skip
    second = datasets.ImageFolder(folder, v2.Compose([
        decode_image, v2.RandomResizedCrop(224), v2.RandomHorizontalFlip(),
        v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]), loader=str)  # fmt: skip
    crop = ops.RandomResizedCropJpeg(224, mean=MEAN, std=STD)
    ours = datasets.ImageFolder(folder, crop, loader=str)
    native = ops.ImageFolder(folder, crop)
    options: dict[str, Any] = {"batch_size": 32, "num_workers": 2, "shuffle": True,
                               "persistent_workers": True}  # fmt: skip
    kinds = {"torch": torch.utils.data.DataLoader, "minato": minato.DataLoader}
    made = {f"{name}, {how}": kind(dataset, **options) for name, kind in kinds.items() for how, dataset in
            (("pillow", first), ("torchvision 2", second), ("minato.ops", ours))}
    made["minato, native"] = minato.DataLoader(native, **options)
    return made


def cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def of_workers() -> float:
    import psutil

    return sum(sum(child.cpu_times()[:2]) for child in psutil.Process().children(recursive=True))


def epochs(count: int, repeats: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(SETS):
            os.mkdir(f"{folder}/{number}")
            for n, file in enumerate(make(name, count)):
                with open(f"{folder}/{number}/{n}.jpg", "wb") as stream:
                    stream.write(file)
        found = loaders(folder)
        images = count * len(SETS)
        rates: dict[str, list[float]] = {name: [] for name in found}
        used: dict[str, list[float]] = {name: [] for name in found}
        sums: dict[str, list[Any]] = {name: [] for name in found}
        for turn in range(repeats + 1):
            for name, loader in found.items():
                torch.manual_seed(turn)
                begin, cpu = time.perf_counter(), cpu_seconds() + of_workers()
                targets, pixels = torch.zeros(len(SETS)), 0.0
                for x, y in loader:
                    targets += torch.bincount(y, minlength=len(SETS))
                    pixels += x[:, :, 0, 0].double().sum().item()
                if turn:
                    rates[name].append(images / (time.perf_counter() - begin))
                    used[name].append((cpu_seconds() + of_workers() - cpu) * 1e3 / images)
                sums[name].append(pixels)
                if targets.tolist() != [count] * len(SETS):
                    raise SystemExit(f"{name} has delivered {targets.tolist()}")
        print(f"{images} photos, 2 workers, {repeats} epochs\n{'':24}{'images/s':>10}{'range':>16}{'CPU ms':>9}")
        for name, each in rates.items():
            print(f"{name:24}{statistics.median(each):10.0f}{min(each):9.0f}..{max(each):<5.0f}"
                  f"{statistics.median(used[name]):9.2f}")
        if sums["torch, pillow"] != sums["torch, minato.ops"]:
            raise SystemExit("pillow and minato.ops differ under torch's loader")
        return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--files", type=int, default=44)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json")
    parser.add_argument("--epoch", action="store_true")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.epoch:
        return epochs(*((16, 1) if options.quick else (100, options.repeats)))
    if options.quick:
        options.files, options.repeats, options.sets = 2, 1, options.sets[:1]
    torch.set_num_threads(1)
    found, all_ways = jpeg.find_library(), ways()
    print(f"{len(photos())} photographs, decoded by {found.path if found else 'Pillow alone'}")
    result: dict[str, Any] = {"photos": len(photos()), "sets": {}}
    print(f"{'CPU ms':8}" + "".join(f"{name:>15}" for name in all_ways) + f"{'differ':>8}")
    for name in options.sets:
        files = make(name, options.files)
        row = measure(files, all_ways, options.repeats)
        wrong = differ(files, all_ways)
        result["sets"][name] = {"ms": row, "differ": wrong,
                                "bytes": sum(map(len, files)) // len(files)}  # fmt: skip
        print(f"{name:8}" + "".join(f"{ms:15.2f}" for ms in row.values()) + f"{wrong:8}", flush=True)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=2)
    return 1 if any(row["differ"] for row in result["sets"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
