"""The 3D U-Net (KiTS19) training workload: one specification, any data loader.

Programs, each with ``--help``: ``python -m unet3d.phantom``, ``.preprocess``,
``.train`` and ``.evaluate``; what measures loaders is in ``unet3d.bench``: ``.compare``,
``.plot``, ``.accuracy``.
"""
