"""Two more typical workloads, for the same comparison of loaders as the 3D U-Net.

`detection`: JPEG images of uneven size, targets of uneven number, a custom collate_fn.
`speech`: waveforms of uneven length, log-mel features, and optionally simulated slow steps.
Both make their own data (``python -m unet3d.bench.workloads.detection --out FOLDER``) and are run
with ``python -m unet3d.bench.compare --workload detection|speech``.
"""
