"""Two more workloads of the field, for the same comparison of loaders as the 3D U-Net.

`detection`: JPEG images of uneven size, targets of uneven number, a collate_fn of its own.
`speech`: waveforms of uneven length, log-mel features, and simulated slow steps if asked for.
Both make their own data (``python -m unet3d.bench.workloads.detection --out FOLDER``) and run by
``python -m unet3d.bench.compare --workload detection|speech``.
"""
