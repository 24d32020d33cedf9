"""Two more typical workloads, for the same comparison of loaders as the 3D U-Net.

`detection`: JPEG images of uneven size, targets of uneven number, a custom collate_fn.
`speech`: waveforms of uneven length, log-mel features, and optionally simulated slow steps.
Both take the data of the published comparison as it is (COCO, LibriSpeech), or make their own
(``python -m unet3d.bench.workloads.detection --out FOLDER``), and are run with
``python -m unet3d.bench.compare --workload detection|speech``.
"""
