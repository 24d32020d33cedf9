"""Images that compress as photos do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw


def photo(seed: int, width: int = 320, height: int = 240) -> Any:
    """Gradients, shapes and the noise of a sensor."""
    rng = np.random.default_rng(seed)
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    ways = rng.uniform(-1, 1, (3, 2))
    pixels = np.stack([128 + 90 * (a * x + b * y) for a, b in ways], -1)
    image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    for _ in range(24):
        left, top = rng.integers(0, (width, height))
        size = rng.integers(4, height // 3, 2)
        color = tuple(int(c) for c in rng.integers(0, 256, 3))
        kind = draw.ellipse if rng.random() < 0.5 else draw.rectangle
        kind([int(left), int(top), int(left + size[0]), int(top + size[1])], fill=color)
    noisy = np.asarray(image) + rng.normal(0, 4, (height, width, 3))
    return Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8))


def folder_of(at: Path, count: int, quality: int = 95, **size: int) -> Path:
    """JPEG files in two classes."""
    for n in range(count):
        (at / f"class{n % 2}").mkdir(parents=True, exist_ok=True)
        photo(n, **size).save(at / f"class{n % 2}" / f"{n}.jpg", quality=quality)
    return at
