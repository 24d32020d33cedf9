"""Random kidneys, tumours and the CT-like intensities around them.

`draw_patient` draws the sizes, `draw_labels` the segmentation, `paint` the intensities
over any segmentation, a real one included. All lengths are millimetres; volumes are
[z, y, x] with rows running from front to back, as in KiTS19. Every random number comes
from the numpy Generator passed in.
"""
from __future__ import annotations

import dataclasses

import numpy as np
from scipy import ndimage

KIDNEY, TUMOUR = 1, 2
# Slice thicknesses seen in KiTS19 and how common they are (5 mm and 3 mm lead).
SLICE_MM = (0.5, 0.75, 1.0, 1.25, 2.0, 2.5, 3.0, 4.0, 5.0)
SLICE_WEIGHT = (0.04, 0.04, 0.12, 0.07, 0.05, 0.10, 0.22, 0.04, 0.32)
TUMOUR_COUNT_WEIGHT = (0.08, 0.77, 0.10, 0.05)  # 0, 1, 2 and 3 tumours
SLAB = 16  # slices painted at a time: bounds the memory of a 1000-slice volume


@dataclasses.dataclass(frozen=True)
class Body:
    """A bumpy, tilted ellipsoid: centre and radii in mm, rows of `axes` its axes."""

    centre: np.ndarray
    radii: np.ndarray
    axes: np.ndarray
    waves: np.ndarray  # [n, 3] spatial frequencies of the surface
    phases: np.ndarray  # [n]
    amplitude: float

    def cover(self, spacing: np.ndarray, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """The voxel box that surely holds the body, clipped to `shape`."""
        reach = self.radii.max() * (1 + self.amplitude * len(self.phases))
        low = np.floor((self.centre - reach) / spacing).astype(int)
        high = np.ceil((self.centre + reach) / spacing).astype(int) + 1
        return tuple(slice(int(max(0, a)), int(max(0, min(n, b))))
                     for a, b, n in zip(low, high, shape))

    def inside(self, box: tuple[slice, ...], spacing: np.ndarray) -> np.ndarray:
        """Boolean volume over `box`: which voxel centres lie in the body."""
        grid = [(np.arange(s.start, s.stop) * d - c).astype(np.float32)
                for s, d, c in zip(box, spacing, self.centre)]
        z, y, x = np.meshgrid(*grid, indexing="ij", sparse=True)
        axes = self.axes.astype(np.float32)
        u = [(a[0] * z + a[1] * y + a[2] * x) / np.float32(r)
             for a, r in zip(axes, self.radii)]
        surface = np.float32(1.0)
        for wave, phase in zip(self.waves.astype(np.float32), self.phases):
            angle = wave[0] * u[0] + wave[1] * u[1] + wave[2] * u[2] + np.float32(phase)
            surface = surface + np.float32(self.amplitude) * np.sin(angle)
        return u[0] ** 2 + u[1] ** 2 + u[2] ** 2 < surface ** 2


@dataclasses.dataclass(frozen=True)
class Patient:
    """Holds what is drawn before any voxel exists; `scale` shrinks the whole patient."""

    shape: tuple[int, int, int]
    spacing: tuple[float, float, float]
    kidneys: tuple[Body, ...]
    hollows: tuple[Body, ...]
    tumours: tuple[Body, ...]


def _body(rng: np.random.Generator, centre, radii, tilt: float, bumps: float) -> Body:
    rotation = np.eye(3)
    for first, second in ((0, 1), (0, 2), (1, 2)):
        angle = rng.normal(0.0, tilt)
        turn = np.eye(3)
        turn[first, first] = turn[second, second] = np.cos(angle)
        turn[first, second], turn[second, first] = -np.sin(angle), np.sin(angle)
        rotation = rotation @ turn
    return Body(np.asarray(centre, float), np.asarray(radii, float), rotation,
                rng.normal(0.0, 2.5, (4, 3)), rng.uniform(0, 2 * np.pi, 4), bumps)


def draw_field(rng: np.random.Generator, scale: float):
    """Draw (shape, spacing) so that preprocessed sizes follow those of KiTS19.

    512 x 512 slices of 0.44 to 1.04 mm pixels, covering 145 to 700 mm: resampled to
    the target spacing, float32 image plus uint8 label, that is a median near 130 MB.
    """
    pixel = float(np.clip(rng.normal(0.79, 0.10), 0.44, 1.04))
    thickness = float(rng.choice(SLICE_MM, p=SLICE_WEIGHT))
    extent = float(np.clip(rng.lognormal(np.log(366.0), 0.43), 145.0, 700.0)) * scale
    side = max(16, round(512 * scale))
    return (max(8, round(extent / thickness)), side, side), (thickness, pixel, pixel)


def draw_patient(rng: np.random.Generator, scale: float = 1.0) -> Patient:
    """Draw one patient: field of view, two kidneys, 0 to 3 tumours."""
    shape, spacing = draw_field(rng, scale)
    middle = np.array(shape) * np.array(spacing) / 2
    width = shape[2] * spacing[2]
    kidneys, hollows, tumours = [], [], []
    for side in (-1, 1):
        radii = np.array([rng.normal(55, 5), rng.normal(27, 3), rng.normal(30, 3)]) * scale
        offset = min(rng.normal(70, 6) * scale, 0.30 * width)
        centre = middle + [rng.normal(0, 12) * scale, rng.normal(35, 8) * scale,
                           side * offset]
        kidneys.append(_body(rng, centre, radii, 0.15, 0.03))
        hollow = centre - [0, 4 * scale, side * 0.75 * radii[2]]
        hollows.append(_body(rng, hollow, radii * (0.35, 0.40, 0.55), 0.2, 0.03))
    for _ in range(rng.choice(4, p=TUMOUR_COUNT_WEIGHT)):
        host = kidneys[rng.integers(2)]
        direction = rng.normal(size=3)
        direction /= np.linalg.norm(direction)
        centre = host.centre + host.axes.T @ (direction * host.radii) * rng.uniform(0.7, 1.0)
        radius = np.clip(rng.lognormal(np.log(18.0), 0.55), 4.0, 75.0) * scale
        radii = radius * rng.uniform(0.8, 1.2, 3)
        tumours.append(_body(rng, centre, radii, 0.5, 0.04))
    return Patient(shape, spacing, tuple(kidneys), tuple(hollows), tuple(tumours))


def draw_labels(patient: Patient) -> np.ndarray:
    """Return the uint8 segmentation [z, y, x] of `patient`."""
    labels = np.zeros(patient.shape, np.uint8)
    spacing = np.array(patient.spacing)
    layers = [(patient.kidneys, KIDNEY), (patient.hollows, 0), (patient.tumours, TUMOUR)]
    for bodies, value in layers:
        for body in bodies:
            box = body.cover(spacing, patient.shape)
            labels[box][body.inside(box, spacing)] = value
    return labels


class Painter:
    """CT-like intensities over one segmentation, slab by slab."""

    def __init__(self, labels: np.ndarray, spacing: tuple[float, float, float],
                 rng: np.random.Generator, scale: float) -> None:
        self.labels, self.spacing, self.rng, self.scale = labels, spacing, rng, scale
        self.noise = rng.uniform(9.0, 20.0)
        self.kidney = rng.normal(170.0, 18.0)
        self.tumour = rng.normal(85.0, 15.0)
        self.section = self._cross_section()
        self.liver = self._liver()
        self.step = max(1, round(12.0 * scale / spacing[0]))  # texture plane distance
        self.planes: dict[int, np.ndarray] = {}

    def _centre(self) -> tuple[float, float]:
        """(y, x) of the body in mm: from the kidneys if any, else the middle."""
        _, height, width = self.labels.shape
        y, x = height * self.spacing[1] / 2, width * self.spacing[2] / 2
        rows = np.flatnonzero(self.labels.any(axis=(0, 2)))
        if rows.size:
            y = (rows[0] + rows[-1]) / 2 * self.spacing[1] - 35 * self.scale
        return y, x

    def _cross_section(self) -> np.ndarray:
        """One slice [y, x] in HU: air, fat, muscle, spine and great vessels."""
        _, height, width = self.labels.shape
        self.centre = y0, x0 = self._centre()
        y = (np.arange(height, dtype=np.float32) * self.spacing[1] - y0)[:, None]
        x = (np.arange(width, dtype=np.float32) * self.spacing[2] - x0)[None, :]
        y, x = y / self.scale, x / self.scale
        half_y, half_x = self.rng.uniform(105, 130), self.rng.uniform(155, 185)
        section = np.full((height, width), -1000.0, np.float32)

        def ellipse(cy, cx, ry, rx, value):
            section[((y - cy) / ry) ** 2 + ((x - cx) / rx) ** 2 < 1] = value

        fat = self.rng.uniform(12, 30)
        ellipse(0, 0, half_y, half_x, -100)
        ellipse(0, 0, half_y - fat, half_x - fat, 55)
        ellipse(0, 0, half_y - fat - 12, half_x - fat - 12, -85)
        ellipse(25, -70, 45, 55, -95)
        ellipse(25, 70, 45, 55, -95)
        ellipse(-30, 0, 45, 100, 35)
        for side in (-1, 1):
            ellipse(52, 38 * side, 22, 20, 60)
        ellipse(45, 0, 24, 25, 210)
        ellipse(78, 0, 16, 9, 320)
        ellipse(12, -8, 11, 11, 190)
        ellipse(12, 20, 12, 13, 150)
        return section

    def _liver(self) -> Body:
        y0, x0 = self.centre
        depth = self.labels.shape[0] * self.spacing[0]
        centre = [depth * 0.3, y0 - 25 * self.scale, x0 - 85 * self.scale]
        return _body(self.rng, centre, np.array([85.0, 65.0, 60.0]) * self.scale, 0.2, 0.04)

    def _plane(self, number: int) -> np.ndarray:
        """Low-frequency texture, standard deviation about 1, of one coarse plane."""
        if number not in self.planes:
            _, height, width = self.labels.shape
            coarse = max(4, round(width * self.spacing[2] / (10.0 * self.scale)))
            grid = self.rng.standard_normal((coarse, coarse)).astype(np.float32)
            zoom = (height / coarse, width / coarse)
            plane = ndimage.zoom(grid, zoom, order=1, mode="nearest", grid_mode=True)
            self.planes = {k: v for k, v in self.planes.items() if k >= number - 1}
            self.planes[number] = 1.6 * plane[:height, :width]
        return self.planes[number]

    def _texture(self, start: int, stop: int) -> np.ndarray:
        rows = []
        for z in range(start, stop):
            number, rest = divmod(z, self.step)
            before, after = self._plane(number), self._plane(number + 1)
            weight = np.float32(rest / self.step)
            rows.append(before + weight * (after - before))
        return np.stack(rows)

    def slab(self, start: int, stop: int) -> np.ndarray:
        """Slices start to stop, int16 HU."""
        labels = self.labels[start:stop]
        hu = np.repeat(self.section[None], stop - start, axis=0)
        box = list(self.liver.cover(np.array(self.spacing), self.labels.shape))
        low, high = max(start, box[0].start), min(stop, box[0].stop)
        if low < high:
            box[0] = slice(low, high)
            inside = self.liver.inside(tuple(box), np.array(self.spacing))
            part = hu[low - start:high - start, box[1], box[2]]
            part[inside & (part > -500)] = 105.0
        texture = self._texture(start, stop)
        hu[(texture > 2.4) & (hu == 35.0)] = -700.0  # gas in the bowel
        hu[labels == KIDNEY] = self.kidney
        hu[labels == TUMOUR] = self.tumour
        strength = np.where(labels == TUMOUR, np.float32(22), np.float32(9))
        hu += texture * strength * (hu > -500)
        hu = ndimage.gaussian_filter(hu, (0, 0.6, 0.6), output=np.float32)
        noise = self.rng.standard_normal(hu.shape, dtype=np.float32)
        # Scanner noise is not white: neighbours share part of it.
        noise += np.roll(noise, 1, axis=2) + np.roll(noise, 1, axis=1)
        hu += noise * np.float32(self.noise / np.sqrt(3.0))
        return np.clip(np.rint(hu), -1024, 3071).astype(np.int16)


def paint(labels: np.ndarray, spacing: tuple[float, float, float],
          rng: np.random.Generator, scale: float = 1.0) -> np.ndarray:
    """Return int16 intensities in HU over `labels` (uint8 [z, y, x])."""
    painter = Painter(labels, spacing, rng, scale)
    image = np.empty(labels.shape, np.int16)
    for start in range(0, labels.shape[0], SLAB):
        stop = min(start + SLAB, labels.shape[0])
        image[start:stop] = painter.slab(start, stop)
    return image
